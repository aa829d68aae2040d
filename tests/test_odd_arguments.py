"""Tests of arguments of other types: NumPy arrays are accepted, others raise clear errors."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from attn_only_lens import (
    Contrast,
    Work,
    circuits,
    explain,
    expose_neuron_heads,
    grow,
    growth,
    load,
    neurons,
    tasks,
    transcoders,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.tokens import token_texts
from attn_only_lens.errors import (
    AttnOnlyLensError,
    InputError,
    InputWarning,
    UnsupportedCallError,
)
from attn_only_lens.growth.comparison.batches import batches
from attn_only_lens.models.verify import verify
from attn_only_lens.patching.results import Paths, Sweep

CLEAN, CORRUPTED = [3, 4, 113], [3, 5, 113]
METRIC = p.logit_diff(7, 8)
PAIR = Contrast(torch.tensor(CLEAN), torch.tensor(CORRUPTED), METRIC)
HOW = {"sites": ["L0H1", "L0N5"]}


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(load("modular-addition")).model


def swept(model, make):
    contrast = Contrast(make(CLEAN), make(CORRUPTED), METRIC)
    return p.activation_patch(model, contrast, **HOW).frame["value"]


@pytest.mark.parametrize(
    "make",
    [lambda row: np.array([row], dtype=np.uint8), lambda row: [np.array(row, dtype=">i4")]],
    ids=["a batch", "a list of rows of another byte order"],
)
def test_arrays_are_tokens(make, model):
    assert swept(model, make).equals(swept(model, torch.tensor))


def test_swapped_answers_are_warned_about_once(model):
    swapped = replace(PAIR, metric=p.logit_diff(8, 7))
    for call in (p.activation_patch, p.attribution):
        with pytest.warns(InputWarning, match="prefers the wrong answer on the clean") as caught:
            call(model, swapped, **HOW)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(model, PAIR, **HOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an explanation says it in its text
        why = explain(model, swapped, strong=1.0)
    assert "Warning: the model prefers the wrong answer" in why.text()


def test_wrong_answers_are_counted_over_all_chunks_of_prompts(model):
    """The warning depends on all prompts, not on how many of them run at once."""
    right, wrong = (CLEAN, CORRUPTED), (CORRUPTED, CLEAN)

    def n_warnings(pairs, work):
        clean, corrupted = (torch.tensor(side) for side in zip(*pairs, strict=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", InputWarning)
            p.activation_patch(model, Contrast(clean, corrupted, METRIC), **HOW, work=work)
        return sum("for most pairs, the model prefers the wrong" in str(w.message) for w in caught)

    for pairs, expected in (([wrong, wrong, right, right, right], 0), ([right, wrong, wrong], 1)):
        for at_once in (1, 2, None):
            assert n_warnings(pairs, Work(prompts_at_once=at_once)) == expected


def test_arrays_wherever_tokens_are_taken(model):
    tokens = np.array([CLEAN, CORRUPTED])
    tensor, mask = torch.from_numpy(tokens), np.array([[1, 1, 1], [0, 1, 1]])
    same = Contrast(tokens, tokens[::-1], METRIC, mask=mask).pair(model)
    assert same.mask.tolist() == mask.tolist()
    assert verify(load("modular-addition"), model, tokens).bitwise
    of_arrays, of_tensors = (
        p.activation_patch(
            model, Contrast(x, None, METRIC), direction=p.Ablation("mean", reference=x), **HOW
        )
        for x in (tokens, tensor)
    )
    assert of_arrays.frame.equals(of_tensors.frame)
    one_run = Contrast(tokens[0], None, METRIC)
    graph = circuits.attribution_graph(model, one_run, top=3)
    assert viz.circuit_view(graph, model, one_run)
    assert viz.attention_view(model, ["L0N5"], tokens[0])
    assert len(neurons.top_examples(model, ["L0N5"], neurons.Corpus(tokens)))
    one_run = Contrast(tokens, None, METRIC)
    for inputs in (one_run, [one_run]):
        (prompts,) = batches(model, inputs, 2).prompts
        assert torch.equal(prompts.clean, tensor)


def test_a_name_is_no_model_and_a_text_is_no_contrast(model):
    for call in (p.activation_patch, p.attribution, explain, circuits.discover):
        with pytest.raises(UnsupportedCallError, match="got a str as the model; expected a Transf"):
            call("smollm2", PAIR)
        with pytest.raises(InputError, match=r"got a str; expected Contrast\(clean, corrupted, "):
            call(model, "The keys near the cabinet")
    with pytest.raises(UnsupportedCallError, match="got a str as the model"):
        token_texts("smollm2", "a text")


def test_a_dictionary_is_no_work(model):
    edges = p.Edges(["L0H1"], "logits")
    for call in (
        p.activation_patch,
        p.attribution,
        explain,
        circuits.discover,
        partial(p.path_patch, edges=edges),
    ):
        with pytest.raises(InputError, match=r"got a dict as work; expected Work\("):
            call(model, PAIR, work={"progress": False})
    with pytest.raises(InputError, match="got an int as resume; expected a folder's path, or None"):
        Work(resume=3)


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (np.array(CLEAN, dtype=float), "got float64"),
        (np.array([3, 4, 114]), "values from 3 to 114"),
        (np.array(["w1"]), "got a ndarray"),
    ],
    ids=["floats", "range", "texts"],
)
def test_arrays_that_are_no_tokens(tokens, match, model):
    with pytest.raises(InputError, match=match):
        Contrast(tokens, torch.tensor(CORRUPTED), METRIC).pair(model)


def test_a_text_that_is_longer_than_the_context():
    english = load("small-english")
    text, too_long = "the keys " * 600 + "The", "1,202 tokens; the model has 128"
    with pytest.raises(InputError, match=too_long):
        Contrast(text, "The", METRIC).pair(english)
    with pytest.raises(UnsupportedCallError, match=too_long):
        token_texts(english, text)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ((" are", " is"), r"as metric; expected a metric such as logit_diff\("),
        (p.kl, r"kl was not called; expected kl\("),
    ],
)
def test_what_is_no_metric(metric, reason):
    with pytest.raises(InputError, match=reason):
        Contrast(torch.tensor(CLEAN), torch.tensor(CORRUPTED), metric)


VALUES = pd.DataFrame(
    {"layer": 0, "kind": "neuron", "index": [5, 7], "name": ["L0N5", "L0N7"], "position": -1}
).assign(value=[2.0, -1.0])
PATHS = pd.DataFrame({"sender": "L0H1", "receiver": ["L0N5", "logits"], "position": 2}).assign(
    value=[2.0, -1.0]
)
SETTINGS = {"part": "z", "direction": "denoise", "metric": "m", "clean_value": 3.0}
SETTINGS |= {"corrupted_value": -1.0, "n_prompts": 1, "model": "adder"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("clean_value", "3", "the metric is '3' on the clean run"),
        ("clean_value", np.nan, "the metric is nan"),
        ("direction", ["denoise"], r"got direction=\['denoise'\]; expected one of"),
        ("n_prompts", "1", "got n_prompts='1'"),
        ("tokens", 3, "got tokens of type int"),
    ],
)
def test_settings_of_results(name, value, reason):
    settings = SETTINGS | {name: value}
    with pytest.raises(InputError, match=reason):
        Sweep(VALUES, **settings)
    with pytest.raises(InputError, match=reason):
        Paths(PATHS, scale="held", n_paths=2, **settings)
    assert len(Sweep(VALUES, **SETTINGS | {"clean_value": np.float32(3)})) == 2


SWEEP = Sweep(VALUES, **SETTINGS)
REFUSED = {
    "search": (lambda m: circuits.discover(m, PAIR, search="resample"), "got a str as search"),
    "circuit": (lambda m: circuits.evaluate(m, VALUES, PAIR), "expected a Circuit from"),
    "ranking": (lambda m: circuits.faithfulness(m, PAIR, VALUES), "ranking: got a DataFrame"),
    "head": (lambda m: circuits.token_circuit(m, ["L0H1"], "ov"), "expected one name, such as"),
    "mask of texts": (
        lambda m: Contrast("a", "b", METRIC, mask=[[1]]).pair(load("small-english")),
        "got a mask with texts",
    ),
    "unlike numbers of prompts": (
        lambda m: Contrast(["a", "b"], ["a"], METRIC),
        "2 clean and 1 corrupted prompts",
    ),
    "a path to grow": (lambda m: grow("out/model", d_mlp=41), r"pass load\('out/model'\)"),
    "a sweep's frame": (
        lambda m: viz.heatmap(p.activation_patch(m, PAIR, sites=["L0N3@1"]).frame),
        "got the frame of a sweep; expected the sweep itself",
    ),
    "pair": (lambda m: PAIR[3], "got pair 3; expected 0 to 0"),
    "repeated answers": (
        lambda m: explain(m, replace(PAIR, metric=p.probability_diff([[7, 7]], [[8]]))),
        "expected each answer once",
    ),
    "answers of no tokenizer": (
        lambda m: explain(m, replace(PAIR, metric=p.logit_diff("7", "8"))),
        "the model has no tokenizer",
    ),
    "metric of no number": (
        lambda m: p.activation_patch(m, replace(PAIR, metric=p.custom(lambda x: "7")), **HOW),
        "expected one number",
    ),
    "reference": (
        lambda m: p.activation_patch(
            m, PAIR, direction=p.Ablation("zero", reference=torch.tensor([CLEAN])), **HOW
        ),
        "expected no reference",
    ),
    "direction without a corrupted prompt": (
        lambda m: p.activation_patch(m, replace(PAIR, corrupted=None), **HOW),
        "got no corrupted prompt with direction='denoise'",
    ),
    "layers of names": (
        lambda m: p.activation_patch(m, PAIR, sites=p.Sites(["L0H1"], layers=[0])),
        "got layers and names of heads",
    ),
    "mask of no prompts": (
        lambda m: p.ablated(m, ["L0N5"], mask=torch.ones(1, 3)).__enter__(),
        "got a mask without prompts",
    ),
    "steps": (
        lambda m: p.attribution(m, PAIR, method=p.Estimate("secant", steps=3)),
        "expected steps=None",
    ),
    "budget": (
        lambda m: p.attribution(m, PAIR, method=p.Estimate(budget=-1)),
        "or 'auto'",
    ),
    "corpus": (
        lambda m: neurons.corpus_statistics(m, ["L0N5"], ["a text"]).neurons,
        r"expected a corpus: neurons.Corpus\(texts\)",
    ),
    "metric of examples": (
        lambda m: neurons.top_examples(
            m, ["L0N5"], neurons.Corpus(np.array([CLEAN])), by="z", metric=METRIC
        ),
        "got by='z' and metric=",
    ),
    "rows of a heatmap": (lambda m: viz.heatmap(SWEEP, rows="head"), "got rows='head'"),
    "matrix": (lambda m: viz.heatmap([[1.0]]), "expected a sweep, or a frame from"),
    "large matrix": (lambda m: viz.heatmap(VALUES[["value"]].iloc[:0]), "got a 0 × "),
    "texts of a pattern": (
        lambda m: viz.attention_view(m, ["L0H1"], ["a", "b"]),
        "got a list of texts",
    ),
    "frame": (lambda m: Sweep("layer", **SETTINGS), "got a str; expected a pandas DataFrame"),
    "column of texts": (
        lambda m: Sweep(VALUES.assign(value=["a", "b"]), **SETTINGS),
        "value cannot be read",
    ),
    "column of fractions": (
        lambda m: Sweep(VALUES.assign(index=[0.5, 1.0]), **SETTINGS),
        "expected whole numbers",
    ),
    "transcoders": (
        lambda m: transcoders.attach(load("small-english"), [3]),
        r"expected a dict \{layer: Transcoder\}",
    ),
    "transcoder": (
        lambda m: transcoders.attach(load("small-english"), {0: 3}),
        "layer 0: got 3; expected a Transcoder",
    ),
    "saved transcoders": (lambda m: transcoders.save([3], "x"), "expected a dict"),
    "std": (lambda m: growth.init.normal(-1.0), "got std=-1.0"),
    "share": (lambda m: growth.init.splits(share=2.0), "got share=2.0"),
    "same sizes": (
        lambda m: grow(load("modular-addition"), d_mlp=512),
        "which are the current sizes",
    ),
    "seed": (
        lambda m: grow(load("modular-addition"), d_mlp=513, seed="a"),
        "got seed='a'",
    ),
    "keys of a file": (
        lambda m: tasks.from_jsonl(load("small-english").tokenizer, 1, "x", keys=("a",)),
        "expected four names",
    ),
    "loss of one token": (
        lambda m: p.attribution(m, Contrast(torch.tensor([3]), torch.tensor([4]), p.loss())),
        "no prompt has a second token",
    ),
    "overlays": (
        lambda m: viz.circuit_view(circuits.attribution_graph(m, PAIR, top=3), m, PAIR, overlays=3),
        "got an int as overlays",
    ),
    "notes": (
        lambda m: viz.circuit_view(circuits.attribution_graph(m, PAIR, top=3), m, PAIR, notes="a"),
        "got notes='a'; expected a list of texts",
    ),
    "layers of transcoders": (
        lambda m: transcoders.load("x", layers=["a"]),
        "expected layer numbers",
    ),
    "keep": (
        lambda m: tasks.from_jsonl(load("small-english").tokenizer, 1, "x", keep=3),
        "expected a function that takes a dictionary",
    ),
    "solved by no difference": (
        lambda m: replace(PAIR, metric=p.kl()).solved_by(m),
        "expected logit_diff or probability_diff",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arguments_are_refused(case, model):
    call, reason = REFUSED[case]
    with pytest.raises((AttnOnlyLensError, ValueError, IndexError), match=reason):
        call(model)


def test_a_sweep_shows_its_rows_in_a_notebook():
    shown = SWEEP._repr_html_()
    assert "<table" in shown
    assert "L0N5" in shown
