"""Tests with `torch.set_float32_matmul_precision("high")`, as in a notebook that needs speed.

On a GPU, this setting rounds the inputs of a matrix product to TF32's 10 bits (simulated by
`rounded_products.py`). Nothing is refused because of it: checks against a tolerance compute in
full precision, results have TF32's rounding errors at most, and the setting is restored.
"""

import bridges
import pytest
import torch
from common import HAS_HOOKED_TRANSFORMER, relative, tokens
from rounded_products import tf32

from attn_only_lens import (
    Contrast,
    circuits,
    compare,
    convert,
    expose_neuron_heads,
    grow,
    growth,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.models.verify import verify
from attn_only_lens.precision import full_precision, matmul_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

CLEAN, CORRUPTED = tokens(0, pos=7), tokens(1, pos=7)
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff([7, 8], [8, 9]))
TF32 = 2e-2  # relative to the largest value: 2⁻¹¹ per product, through two layers and a difference


def bridge():
    return expose_neuron_heads(bridges.boot("gpt2", torch.float32)).model


def gated_bridge():
    return expose_neuron_heads(bridges.boot("llama", torch.float32)).model


def converted():
    from models import build

    return convert(build("llama", torch.float32))


def sweep(model):
    return p.activation_patch(model, PAIR, sites=p.Sites("all", layers=[0, 1]))


def attribution(model):
    return p.attribution(model, PAIR)


def secant(model):
    return p.attribution(model, PAIR, method="secant")


def graph(model):
    alone = Contrast(CLEAN, None, PAIR.metric)
    graph = circuits.attribution_graph(model, alone, top=10)
    assert len(viz.circuit_view(graph, model, alone)) > 10_000
    return graph


def paths(model):
    edges = p.Edges(p.Sites(["L0H1", "L0N3"], -1), ["L1H0", "L1N29"], "z")
    sweep = p.path_patch(model, PAIR, edges)
    shares = circuits.score_sources(model, CLEAN[0], "L1H0", -1, 0)["share"]
    return [*sweep.frame["value"], shares.sum()]


def numbers(result):
    if isinstance(result, list):
        return torch.tensor(result)
    if isinstance(result, circuits.CircuitGraph):
        return torch.tensor(result.inflow()["metric"])
    return torch.tensor(result.to_frame().sort_values(["name", "position"])["value"].to_numpy())


CASES = [(gated_bridge, use) for use in (sweep, attribution, secant, graph, paths)]
CASES += [(bridge, sweep), (bridge, secant)]
if HAS_HOOKED_TRANSFORMER:
    CASES = [(converted, sweep), (converted, secant)]


@pytest.mark.both_versions
@pytest.mark.parametrize(("make", "use"), CASES, ids=lambda f: f.__name__)
def test_less_precise_products_are_no_reason_to_refuse(make, use):
    expected = numbers(use(make()))
    with tf32(least=5) as products:
        model = make()
        model(CLEAN)
        before = products.rounded
        got = numbers(use(model))
        assert torch.get_float32_matmul_precision() == "high"
    assert before  # the model's own products are rounded
    assert relative(got, expected) < TF32


def test_a_comparison_is_made_by_the_users_setting():
    model = bridges.boot("native", torch.float32)
    sizes = growth.ComparisonSizes(batch_size=2, n_patched=3, n_nodes=0)
    contrast = Contrast(torch.cat([CLEAN, CORRUPTED]), None, p.loss())
    with tf32(least=5):
        larger = grow(model, d_mlp=41, seed=0)
        comparison = compare(model, larger, contrast, sizes=sizes)
    assert len(comparison.heads)


def test_verify_measures_the_models_and_not_the_setting():
    model = bridges.boot("llama", torch.float32)
    with tf32(), expose_neuron_heads(model):
        logits = model(CLEAN)
        report = verify(model, model, CLEAN)
    assert report.relative < LOGIT_TOLERANCE[torch.float32]
    # Control: outside of checks, products are rounded by far more than the tolerance.
    assert relative(logits, model(CLEAN)) > LOGIT_TOLERANCE[torch.float32]


def test_the_setting_comes_back_whatever_happens():
    def broken_off():
        with full_precision() as raised, full_precision():
            assert (raised, matmul_precision()) == (True, "ieee")
            raise KeyError

    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError):
            broken_off()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
