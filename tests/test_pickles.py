"""Tests that contrasts and results come back equal from a pickle, in which processes send them."""

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from attn_only_lens import (
    Bilinear,
    Contrast,
    GeneralizedSiLU,
    HeadName,
    Work,
    circuits,
    compare,
    explain,
    expose_neuron_heads,
    grow,
    growth,
    load,
    neurons,
    tasks,
    transcoders,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.errors import UnsupportedCallError

METRICS = {
    "logit_diff": p.logit_diff([7, 8, 10], 9),
    "probability_diff": p.probability_diff([[7, 8], [9], [5]], [[1]]),
    "probability": p.probability(7),
    "log_probability": p.log_probability(7),
    "kl": p.kl(),
    "loss": p.loss(),
    "custom": p.custom(torch.nn.functional.relu, "relu", version="1"),
}


@pytest.fixture(scope="module")
def english():
    return expose_neuron_heads(load("small-english")).model


@pytest.fixture(scope="module")
def adder():
    return expose_neuron_heads(load("modular-addition")).model


@pytest.fixture(scope="module")
def sums():
    clean = torch.tensor([[3, 4, 113], [4, 4, 113], [5, 5, 113]])
    return Contrast(clean, clean + torch.tensor([0, 1, 0]), METRICS["logit_diff"])


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def require_equal(got, expected, place="result"):
    """Require equal types and values, also in the fields of dataclasses, to the last bit."""
    assert type(got) is type(expected), place
    if isinstance(expected, pd.DataFrame | pd.Series):
        check = getattr(pd.testing, f"assert_{'frame' if expected.ndim > 1 else 'series'}_equal")
        check(got, expected, check_exact=True)
        assert got.attrs == expected.attrs, place
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, place
        assert got.equal(expected), place
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected, place, strict=True)
    elif isinstance(expected, torch.nn.Module):
        raise AssertionError(f"{place}: a result must not send a model")
    elif isinstance(expected, Mapping):
        assert [*got] == [*expected], place
        for key in expected:
            require_equal(got[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), place
        for i, pair in enumerate(zip(got, expected, strict=True)):
            require_equal(*pair, f"{place}[{i}]")
    elif isinstance(expected, partial):
        require_equal((got.func, got.args), (expected.func, expected.args), place)
    elif is_dataclass(expected):
        for field in fields(expected):
            values = (getattr(x, field.name) for x in (got, expected))
            require_equal(*values, f"{place}.{field.name}")
    else:
        assert got == expected or (got != got and expected != expected), place


@pytest.mark.parametrize("name", METRICS)
def test_contrasts_with_each_metric(adder, sums, name):
    clean = sums.clean.clamp(max=112)  # `loss` needs a logit for every token
    roles = {"last": -1, "b": [1, 1, 1]}
    contrast = Contrast(clean, clean.flip(0), METRICS[name], roles=roles, mask=clean >= 0, name="x")
    contrast.pair(adder)  # which keeps the pair for the model
    got = pickled(contrast)
    require_equal(got, contrast)
    if name == "custom":
        return
    logits = torch.randn(3, 3, 113, generator=torch.Generator().manual_seed(0))
    values = [bind(x.metric, adder, x.pair(adder), logits).of(2 * logits) for x in (got, contrast)]
    assert values[0] == values[1] != 0


def test_a_function_without_a_name_is_refused_by_pickle(sums):
    contrast = replace(sums, metric=lambda logits: logits[:, -1].max())
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(contrast)


def test_options():
    for value in (
        Work(batch_size=5),
        p.Sites(["L0N5@1"], positions=[1, 2]),
        p.Edges("heads", "neurons", part="q"),
        p.Estimate("secant", budget=3),
        p.Ablation("resample"),
        circuits.Search(resamples=7),
        growth.ComparisonSizes(n_patched=5),
        HeadName.parse("L3N7"),
        GeneralizedSiLU(1.0, 2.0),
        Bilinear(),
    ):
        require_equal(pickled(value), value)


@pytest.fixture(scope="module")
def why(english):
    some = tasks.agreement(english.tokenizer, n=8)
    return explain(english, some[:4], held_out=some[4:], most_nodes=20)


def test_an_explanation_leaves_its_model_behind(english, why):
    got = pickled(why)
    assert got.model is None
    require_equal(got, replace(why, model=None))
    assert repr(got) == repr(why)
    with pytest.raises(UnsupportedCallError, match="NoneType as the model"):
        got.view()
    page = why.view()
    assert replace(got, model=english).view() == page
    assert (pickled(page), pickled(page).picture) == (page, page.picture)


def test_results_on_a_language_model(english):
    keys = Contrast(
        "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
    )
    W = torch.eye(128)
    nothing = transcoders.Transcoder(W, 0 * W, torch.zeros(128), torch.zeros(128))
    texts = ["The keys near the cabinet"]
    graph, halves = circuits.attribution_graph(english, keys, top=20), circuits.Search(resamples=2)
    for result in (
        graph,
        circuits.discover(english, tasks.agreement(english.tokenizer, n=4), search=halves),
        circuits.group_nodes(graph, english, keys),
        circuits.path_expansion(english, replace(keys, corrupted=None)).effects(),
        circuits.token_circuit(english, "L0H1", "qk").top(3),
        transcoders.fidelity(load("small-english"), {2: nothing}, texts),
        nothing,
        neurons.top_examples(english, ["L0N7"], neurons.Corpus(texts), k=2),
        neurons.corpus_statistics(english, ["L0N7", "L0H2"], neurons.Corpus(texts), k=2),
    ):
        require_equal(pickled(result), result, type(result).__name__)


def test_results_on_sums(adder, sums):
    sites = p.Sites("heads")
    attribution = p.attribution(adder, sums)
    grown = grow(load("modular-addition"), d_mlp=517, seed=0)
    alone = Contrast(sums.clean[:2], None, p.logit_diff([7, 8], [8, 7]))
    for result in (
        attribution,
        p.attribution(adder, sums, sites=sites, method=p.Estimate("secant", budget=0, split=True)),
        p.activation_patch(adder, sums, sites=sites, per_prompt=True),
        p.path_patch(adder, sums, p.Edges(sites, "neurons", part="z"), top=5),
        circuits.faithfulness(adder, sums, attribution),
        circuits.composition(adder, "L0H2", ["L0N5", "L0N7"], "q").frame,
        circuits.score_sources(adder, torch.tensor([3, 4, 113]), "L0H2", query=2, key=0),
        compare(load("modular-addition"), grown, alone, sizes=growth.ComparisonSizes(n_patched=5)),
    ):
        require_equal(pickled(result), result, type(result).__name__)
