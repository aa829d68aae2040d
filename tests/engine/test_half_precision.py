"""Tests that analyses of half-precision models compute in float32 with the same weights.

The oracle is the same model, cast to float32 by TransformerLens.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from bridges import with_heads
from common import changed, needs_hooked_transformer, tokens

from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p
from attn_only_lens.engine.model_weights import float32_weights
from attn_only_lens.errors import InputError
from attn_only_lens.tolerances import LOGIT_TOLERANCE, rounding

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
HALF = [torch.bfloat16, torch.float16]


CLEAN = tokens(0, batch=1, pos=5)
CORRUPTED = changed(CLEAN, 1)
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff(7, 11))


def paths(model):
    edges = p.Edges(["L0H1", "L0N3"], ["L1H1", "L1N5", "logits"], "z")
    sweep = p.path_patch(model, PAIR, edges)
    return sweep.frame[["value"]]


def expansion(model):
    expansion = circuits.path_expansion(model, PAIR)
    singles = expansion.paths(k=7)[["effect"]]
    return pd.concat([expansion.effects()[["effect"]], singles])


def graph(model):
    graph = circuits.attribution_graph(model, replace(PAIR, corrupted=None), top=20)
    return graph.edges.sort_values(["source", "target", "kind"])[["weight"]]


CASES = [("gpt2", graph), ("gpt2", paths), ("llama", expansion)]
CASES += [pytest.param("converted gelu", paths, marks=needs_hooked_transformer)]


@pytest.mark.parametrize(("kind", "analysis"), CASES)
def test_is_that_of_the_same_weights_in_float32(kind, analysis):
    dtype = HALF[analysis in (paths, graph)]
    narrow, wide = (with_heads(kind, dtype, scale=0.3) for _ in range(2))
    wide.to(torch.float32)
    before = {name: x.clone() for name, x in narrow.state_dict().items()}
    logits = narrow(CLEAN)
    got, expected = analysis(narrow), analysis(wide)
    assert len(got) == len(expected) > 2
    assert got.isna().equals(expected.isna())
    largest = np.nanmax(np.abs(expected.to_numpy()))
    # The results are terms of sums, each with the rounding of float32.
    allowed = LOGIT_TOLERANCE[torch.float32] * largest
    assert np.nanmax(np.abs(got.to_numpy() - expected.to_numpy())) <= allowed
    # The model is unchanged, to the bit.
    after = narrow.state_dict()
    assert all(
        torch.equal(x, after[name]) and x.dtype == after[name].dtype for name, x in before.items()
    )
    assert torch.equal(narrow(CLEAN), logits)
    assert logits.dtype == dtype
    # Control: half precision differs from float32.
    assert (logits.float() - wide(CLEAN)).abs().max() > rounding(torch.float32)


@pytest.mark.parametrize(("kind", "analysis"), CASES[2:])
def test_runs_that_are_not_finite_in_the_models_own_precision_are_refused(kind, analysis):
    """In float32, the same weights do not overflow."""
    model = with_heads(kind, torch.float16, scale=0.3)
    layer = model.blocks[1].attn if kind == "converted gelu" else model.blocks[1].mlp
    with torch.no_grad():
        for matrix in layer.parameters():
            matrix.mul_(3e3 / matrix.abs().amax())
    assert not model(CLEAN).isfinite().all()
    with float32_weights(model):
        assert model(CLEAN).isfinite().all()
    with pytest.raises(InputError, match=r"in torch\.float16, first at blocks\.1"):
        analysis(model)


def test_an_error_leaves_the_model_as_it_was():
    model = with_heads("gpt2", torch.bfloat16)
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    logits = model(CLEAN)
    with pytest.raises(ZeroDivisionError), float32_weights(model):
        _ = 1 / (weight.dtype != torch.float32)
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    assert torch.equal(model(CLEAN), logits)
