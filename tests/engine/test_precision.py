"""Tests with `torch.set_float32_matmul_precision("high")`, as in a notebook that needs speed.

On a GPU, this setting rounds the inputs of a matrix product to TF32's 10 bits (simulated by
`rounded_products.py`). Nothing is refused because of it: checks against a tolerance compute in
full precision, results have TF32's rounding errors at most, and the setting is restored.
"""

import bridges
import pytest
import torch
from bridges import with_heads
from common import HAS_HOOKED_TRANSFORMER, relative, tokens
from rounded_products import tf32

from attn_only_lens import Contrast, circuits, expose_neuron_heads, viz
from attn_only_lens import patching as p
from attn_only_lens.models.verify import verify
from attn_only_lens.precision import full_precision, matmul_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

KIND = "converted llama" if HAS_HOOKED_TRANSFORMER else "llama"
CLEAN, CORRUPTED = tokens(0, pos=7), tokens(1, pos=7)
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff([7, 8], [8, 9]))
TF32 = 2e-2  # relative to the largest value: 2⁻¹¹ per product, through two layers and a difference


def secant(model):
    return p.attribution(model, PAIR, method="secant")


def graph(model):
    alone = Contrast(CLEAN, None, PAIR.metric)
    graph = circuits.attribution_graph(model, alone, top=10)
    assert len(viz.circuit_view(graph, model, alone)) > 10_000
    return graph


def paths(model):
    edges = p.Edges(p.Sites(["L0H1", "L0N3"], -1), ["L1H0", "L1N29"], "z")
    return p.path_patch(model, PAIR, edges)


NUMBERS = {
    secant: lambda sweep: sweep.frame["value"],
    paths: lambda sweep: sweep.frame["value"],
    graph: lambda graph: graph.inflow()["metric"],
}


@pytest.mark.both_versions
@pytest.mark.parametrize("use", [paths] if HAS_HOOKED_TRANSFORMER else NUMBERS)
def test_less_precise_products_are_no_reason_to_refuse(use):
    expected = use(with_heads(KIND, torch.float32))
    with tf32(least=5) as products:
        model = with_heads(KIND, torch.float32)
        model(CLEAN)
        before = products.rounded
        got = use(model)
        assert torch.get_float32_matmul_precision() == "high"
    got, expected = (torch.tensor(NUMBERS[use](result)) for result in (got, expected))
    assert before  # the model's own products are rounded
    assert relative(got, expected) < TF32


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
