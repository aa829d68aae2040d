"""Tests of contrasts: what is checked when one is made, and the tokens of its runs in a model."""

import copy
import gc
import warnings
import weakref
from dataclasses import replace

import bridges
import numpy as np
import pytest
import torch
from common import D_VOCAB, tokens
from sealed_files import rewrite
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.engine.prompts import prompt_pair, single_prompts
from attn_only_lens.errors import CheckpointError, InputError, InputWarning, UnsupportedCallError

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # raised by TransformerLens
METRIC = p.logit_diff(5, 7)
CLEAN, CORRUPTED = ("w1 w2 w3", "w8 w9"), ("w1 w5 w3", "w7 w9")
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles={"subject": [2, 1], "end": -1})
OF_ONE = replace(PAIR, corrupted=None)


@pytest.fixture
def model(tmp_path):
    model = bridges.boot("gpt2")
    model.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path)
    model.cfg.tokenizer_prepends_bos = False
    return model


# Construction


def test_refused_with_every_reason():
    with pytest.raises(InputError) as caught:
        Contrast(7, {"w1"}, 3, roles=["end"])
    assert len(caught.value.reasons) == 4
    for reason in (
        "clean: got an int; expected a text, a list of texts, or tokens",
        "corrupted: got a set; expected a text",
        "got an int as metric; expected a metric such as logit_diff",
        "roles: got a list; expected a dict from names to positions",
    ):
        assert caught.match(reason)
    for clean, corrupted, reason in (
        ([[3, 5]], "w1", "clean: got a list; expected .* or tokens in a tensor"),
        ([], torch.zeros(0, 3), "(?s)clean: got no prompts.*corrupted: got no prompts"),
        (["w1"] * 3, ["w2"], "got 3 clean and 1 corrupted prompts; expected the same"),
    ):
        with pytest.raises(InputError, match=reason):
            Contrast(clean, corrupted, METRIC)


def test_prompts_of_every_form():
    text, rows = "w1 w2", tokens(batch=3)
    for prompts, n in (
        (text, 1),
        ([text] * 3, 3),
        (rows, 3),
        (rows[0], 1),
        (list(rows), 3),
        (rows.numpy().astype(np.uint8), 3),
    ):
        assert len(Contrast(prompts, None, METRIC)) == len(Contrast(prompts, prompts, METRIC)) == n
    # A list that changes later does not change the contrast.
    texts = [text]
    contrast = Contrast(texts, texts, METRIC)
    texts.append("w3")
    assert contrast.clean == (text,)
    assert repr(PAIR) == (
        "Contrast(2 pairs; logit_diff(5, 7); subject, end)\n  'w1 w2 w3'\n  'w1 w5 w3'"
    )
    assert len(repr(Contrast("w1 " * 10**4, None, METRIC))) < 500
    assert (PAIR.answers, PAIR.wrong) == (((5,),), ((7,),))


# The tokens in a model


def require_same(got, expected):
    for name in ("clean", "corrupted", "mask"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    assert got.roles == expected.roles


def test_a_pair_is_that_of_its_prompts(model):
    pair = PAIR.pair(model)
    require_same(pair, prompt_pair(model, CLEAN, CORRUPTED, roles=PAIR.roles))
    assert pair.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    alone = OF_ONE.pair(model)
    require_same(alone, single_prompts(model, CLEAN, roles=PAIR.roles))
    assert alone.corrupted is alone.clean
    assert not torch.equal(pair.corrupted, pair.clean)  # control


def test_a_pair_is_made_once_for_each_model(model):
    other = bridges.boot("gpt2")
    other.tokenizer, other.cfg.tokenizer_prepends_bos = model.tokenizer, True
    pair, of_other = PAIR.pair(model), PAIR.pair(other)
    assert PAIR.pair(model) is pair
    assert PAIR.pair(other) is of_other is not pair
    assert replace(PAIR).pair(model) is not pair
    # A model is not kept by the contrasts that it has read.
    reference = weakref.ref(other)
    del other, of_other
    gc.collect()
    assert reference() is None
    copied = copy.deepcopy(PAIR)
    assert copied.pair(model) is not pair
    assert torch.equal(copied.pair(model).clean, pair.clean)
    part = pair.of_prompts([1])
    assert part.select(part.roles["subject"]) == [1]
    assert (part.n_all, part.clean.tolist()) == (2, [[0, 12, 13]])  # without padding


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.tokenizer, "padding_side", "left"),
        lambda model: setattr(model.tokenizer, "pad_token", "<eos>"),
        lambda model: setattr(model.cfg, "default_prepend_bos", False),
    ],
)
def test_a_pair_is_made_again_if_texts_are_read_otherwise(change, model):
    contrast = replace(PAIR)
    pair = contrast.pair(model)
    change(model)
    again = contrast.pair(model)
    require_same(again, prompt_pair(model, CLEAN, CORRUPTED, roles=PAIR.roles))
    assert not torch.equal(again.clean, pair.clean)
    assert contrast.pair(model) is again


def test_a_pair_is_made_again_for_another_tokenizer_or_device(model, tmp_path):
    contrast = replace(PAIR)
    pair = contrast.pair(model)
    model.tokenizer = tiny_tokenizer(D_VOCAB - 2, tmp_path / "another")
    assert contrast.pair(model) is not pair
    contrast = Contrast(tokens(), None, METRIC)  # a pair cannot be compared on this device
    pair = contrast.pair(model)
    model.to("meta")
    again = contrast.pair(model)
    assert (pair.clean.device.type, again.clean.device.type) == ("cpu", "meta")


def test_refusals_and_warnings_are_those_of_prompts(model, monkeypatch):
    with pytest.raises(UnsupportedCallError, match="got a str as the model; expected a Transform"):
        PAIR.pair("gpt2")
    with pytest.raises(InputError, match="prompt 0 has 4 clean tokens"):
        replace(PAIR, corrupted=("w1", "w2")).pair(model)
    odd = replace(PAIR, clean=("w1 odd w3", "w8 w9"))
    with pytest.warns(InputWarning, match="'odd' in clean prompt 0 'w1 odd w3'"):
        odd.pair(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odd.pair(model)  # a contrast warns once for each model
    # Padding is tested with each call: the model may have changed after its first analysis.
    PAIR.pair(model)
    name = "attn_only_lens.engine.prompts.ignores_padding"
    monkeypatch.setattr(name, lambda model, side: False)
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        PAIR.pair(model)
    replace(PAIR, clean=CLEAN[:1], corrupted=CORRUPTED[:1], roles={}).pair(model)  # no padding


@pytest.mark.parametrize("of", [torch.Tensor.clone, lambda x: [*x]])
def test_tokens_that_are_later_changed_in_place_stay_as_they_were(of, model):
    given, mask = of(tokens(1)), torch.ones(tokens(1).shape)
    some = Contrast(given, tokens(2), METRIC, mask=mask)
    for row in given:
        row[:] = 0
    mask[:, -1] = 0
    pair = some.pair(model)
    assert torch.equal(pair.clean, tokens(1))
    assert pair.real.all()


# Files


ROWS = tokens(batch=3)
METRICS = [
    p.logit_diff(" are", [7, "x"]),
    p.probability_diff([[33, 31], [13]], [["a", 29], [5]]),
    p.probability("é"),
    p.log_probability(torch.tensor([5, 7, 11])),
    p.kl(),
    p.loss(),
]


@pytest.mark.parametrize(
    "more",
    [
        {"clean": ["a \n\t日", "b", "c"], "corrupted": ("d", "e", "f"), "roles": {"x": [2, -1, 0]}},
        {"clean": ROWS, "corrupted": ROWS + 1, "mask": ROWS > 3, "dropped": {"too long": 3}},
        {"clean": ROWS[0], "corrupted": ROWS[0].numpy(), "roles": {"x": np.int64(2)}},
        {"clean": [ROWS[0], ROWS[1, :2], ROWS[2, :2]], "corrupted": None, "name": "é"},
    ],
)
def test_a_contrast_is_read_back(more, tmp_path):
    def plain(value):
        if isinstance(value, torch.Tensor | np.ndarray):
            return value.tolist()
        if isinstance(value, list | tuple):
            return list(map(plain, value))
        return {key: plain(item) for key, item in value.items()} if type(value) is dict else value

    for metric in METRICS:
        contrast = Contrast(metric=metric, **more)
        contrast.save(tmp_path / "contrast.json")
        again = Contrast.load(tmp_path / "contrast.json")
        for name in ("clean", "corrupted", "roles", "mask", "name", "dropped"):
            assert plain(getattr(again, name)) == plain(getattr(contrast, name))
        assert again.metric.identity() == metric.identity()
        assert (again.answers, again.wrong) == (contrast.answers, contrast.wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["contrast.json"]


def test_a_function_is_stored_by_its_name(tmp_path):
    def largest(logits):
        return logits[:, -1].max()

    path = tmp_path / "contrast.json"
    # A function with the name of one of the package's metrics is still a function.
    for metric in (largest, p.custom(largest, name="loss", version="1")):
        replace(PAIR, metric=metric).save(path)
        with pytest.raises(InputError, match=r"only the name of its metric, .*, a function; "):
            Contrast.load(path)
        with pytest.raises(InputError, match=r"got the metric logit_diff\(5, 7\); expected"):
            Contrast.load(path, METRIC)
    replace(PAIR, metric=largest).save(path)
    assert Contrast.load(path, largest).metric is largest
    PAIR.save(path)
    assert Contrast.load(path, METRIC).metric is METRIC
    with pytest.raises(InputError, match="got the metric largest; expected logit_diff"):
        Contrast.load(path, largest)


@pytest.mark.parametrize(
    ("path_to", "value", "match"),
    [
        (("name",), 7, r"contrast\.name: got 7; expected str"),
        (("metric", "version"), "7", "logit_diff.*, version 7, .*: use the release that wrote"),
        (("metric", "answers"), [[[5]], [[9]]], r"has the metric logit_diff\(5, 7\)"),
        (("metric", "kind"), "entropy", r"has the metric logit_diff\(5, 7\)"),
        (("metric", "answers"), [[[0.5]], [[7]]], "expected int"),
        (("clean",), ["w1"], "(?s)holds no contrast: .*got 1 clean and 2 corrupted prompts"),
        (("roles", "subject"), [1, 2, 3], "(?s)holds no contrast: .*subject: got 3 positions"),
        (("mask",), [[1, 1], [1]], "holds no contrast"),
        (("more",), 3, "holds no contrast: .*more"),
    ],
)
def test_files_that_another_program_wrote_are_refused(path_to, value, match, tmp_path):
    def change(whole):
        *outer, last = ("contrast", *path_to)
        for key in outer:
            whole = whole[key]
        whole[last] = value

    PAIR.save(tmp_path / "contrast.json")
    rewrite(tmp_path / "contrast.json", change)
    with pytest.raises(CheckpointError, match=match):
        Contrast.load(tmp_path / "contrast.json")
