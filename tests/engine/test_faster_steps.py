"""Tests that replays use fused activations and a trimmed last block only if results agree."""

from contextlib import suppress
from functools import partial

import bridges
import numpy as np
import pytest
import torch
from bridges import with_heads
from common import changed, needs_hooked_transformer, of_a_library
from patched_runs import difference, whole_runs
from transformers.activations import NewGELUActivation

from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.recording import record_pair
from attn_only_lens.engine.replay import Replay, base
from attn_only_lens.engine.replay.faster import FusedActivations
from attn_only_lens.engine.sites import resolve_sites

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
KINDS = ["gpt2", "llama", pytest.param("converted gelu_new", marks=needs_hooked_transformer)]
FIRST = 3
CLEAN = torch.tensor([[3, 5, 2, 11, 13, 17, 19], [4, 6, 1, 12, 14, 18, 20]])
CORRUPTED = changed(CLEAN, FIRST)
SITES = ["L0N5", "L1N3", "L1H0", "L0H1"]
METRIC = p.logit_diff(7, 11)
PAIR = Contrast(CLEAN, CORRUPTED, METRIC)


def patched(model, sites=SITES):
    return p.activation_patch(model, PAIR, sites=sites).to_frame()


def require_exact(model, sites=SITES):
    """Compare every value with a whole forward pass."""
    frame, measure = patched(model, sites), partial(difference, correct=7, wrong=11)
    expected = whole_runs(model, PAIR, frame, measure=measure)
    np.testing.assert_allclose(frame["value"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_logits_may_be_computed_in_turns(kind, monkeypatch):
    """If the vocabulary is large, blocks run more variants at a time than the unembedding."""
    model = with_heads(kind)
    require_exact(model)
    calls = []
    values = Replay.values
    monkeypatch.setattr(base, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(Replay, "values", lambda *some: calls.append(some) or values(*some))
    require_exact(model)
    last = len(model.blocks)
    assert sum(variants[0].block == last for _, *variants in calls) > 2


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_the_last_block_runs_where_the_metric_reads(kind):
    """The last block's MLP gets one token per variant and prompt."""
    model, n_tokens = with_heads(kind), []
    module = model.blocks[-1].attn if kind.startswith("converted") else model.blocks[-1].mlp
    look = of_a_library(lambda module, args, output: n_tokens.append(output.shape[1]))
    module.register_forward_hook(look)
    patched(model)
    n_tokens.clear()
    patched(model)
    assert n_tokens[0] == CLEAN.shape[1]  # the recording of both runs
    assert set(n_tokens[1:]) == {1}


def test_last_block_that_mixes_tokens_runs_on_all():
    """An MLP that reads several tokens must not run on one token alone."""
    model = bridges.boot("gpt2")
    mlp = model.blocks[-1].mlp.original_component
    forward = type(mlp).forward

    def mixing(x):
        return forward(mlp, x + x.roll(1, dims=1))

    mlp.forward = mixing
    require_exact(expose_neuron_heads(model).model, p.Sites("L0N5", "all"))


class Other(NewGELUActivation):
    """A subclass that may compute something else."""


def test_other_activations_are_not_replaced(monkeypatch):
    slow = NewGELUActivation()
    fused = FusedActivations([slow], torch.float64)
    assert fused._replaced
    with suppress(ZeroDivisionError), fused.used():
        assert "forward" in vars(slow)
        raise ZeroDivisionError
    assert "forward" not in vars(slow)  # it is restored after an error
    assert not FusedActivations([slow], torch.bfloat16)._replaced
    assert not FusedActivations([Other()], torch.float64)._replaced
    slow.forward = lambda x: x
    assert not FusedActivations([slow], torch.float64)._replaced
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(NewGELUActivation, "forward", lambda self, x: 1.000001 * gelu(x))
    assert not FusedActivations([NewGELUActivation()], torch.float32)._replaced


def recorded_pair(model):
    return record_pair(model, PAIR.pair(model), METRIC, resolve_sites(model, SITES), "z")


def test_runs_are_recorded_apart_if_rows_round_differently():
    """Otherwise, patches before the first different token would seem to have an effect."""
    model = with_heads("gpt2")

    def round_by_row(module, args, output):
        stream = output[0] if isinstance(output, tuple) else output
        stream += 1e-13 * torch.arange(len(stream))[:, None, None]

    model.blocks[0].register_forward_hook(of_a_library(round_by_row))
    runs = recorded_pair(model)
    assert torch.equal(runs.clean.streams[-1][:, :FIRST], runs.corrupted.streams[-1][:, :FIRST])
