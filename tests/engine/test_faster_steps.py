"""Tests that replays use fused activations and a trimmed last block only if results agree."""

from contextlib import suppress
from functools import partial
from itertools import chain

import bridges
import numpy as np
import pytest
import torch
from common import needs_hooked_transformer, of_a_library
from patched_runs import difference, whole_runs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import NewGELUActivation

from attn_only_lens import Contrast, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine import recording
from attn_only_lens.engine.recording import record_pair
from attn_only_lens.engine.replay import Replay, base
from attn_only_lens.engine.replay.faster import FusedActivations
from attn_only_lens.engine.sites import resolve_sites

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
KINDS = ["gpt2", "llama", pytest.param("converted", marks=needs_hooked_transformer)]
FIRST = 3
CLEAN = torch.tensor([[3, 5, 2, 11, 13, 17, 19], [4, 6, 1, 12, 14, 18, 20]])
CORRUPTED = CLEAN.clone()
CORRUPTED[:, FIRST] += 2
SITES = ["L0N5", "L1N3", "L1H0", "L0H1"]
METRIC = p.logit_diff(7, 11)
PAIR = Contrast(CLEAN, CORRUPTED, METRIC)


def model_of(kind):
    if kind == "converted":
        from models import build  # a module-level import would skip the module under 4

        return convert(build("gelu_new"))
    return expose_neuron_heads(bridges.boot(kind)).model


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
    model = model_of(kind)
    require_exact(model)
    calls = []
    values = Replay.values
    monkeypatch.setattr(base, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(Replay, "values", lambda *some: calls.append(some) or values(*some))
    require_exact(model)
    last = len(model.blocks)
    assert sum(variants[0].block == last for _, *variants in calls) > 2


class Kernels(TorchDispatchMode):
    """A mode that records the names of kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_activations_are_fused_and_the_last_block_runs_where_the_metric_reads(kind):
    """The last block's MLP gets one token per variant and prompt."""
    model, n_tokens = model_of(kind), []
    module = model.blocks[-1].attn if kind == "converted" else model.blocks[-1].mlp
    look = of_a_library(lambda module, args, output: n_tokens.append(output.shape[1]))
    module.register_forward_hook(look)
    patched(model)
    n_tokens.clear()
    with Kernels() as kernels:
        patched(model)
    assert n_tokens[0] == CLEAN.shape[1]  # the recording of both runs
    assert set(n_tokens[1:]) == {1}
    n_layers = 2 if kind == "gpt2" else 3
    assert kernels.names.count("gelu") >= n_layers - 1
    # One tanh per layer for the recording of both runs, and one for the comparison of the kernels.
    assert kernels.names.count("tanh") == n_layers + 1


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


def test_both_runs_in_one_pass_are_those_of_two_passes(monkeypatch):
    model, n_rows = model_of("gpt2"), []
    count = of_a_library(lambda module, args, output: n_rows.append(len(args[0])))
    model.blocks[0].register_forward_hook(count)
    together = recorded_pair(model)
    assert n_rows == [2 * len(CLEAN)]
    monkeypatch.setattr(recording, "_FEW_TOKENS", 0)
    apart = recorded_pair(model)
    assert n_rows[1:] == [len(CLEAN)] * 2
    for side in ("clean", "corrupted"):
        one, other = (
            [
                run.logits,
                *run.streams,
                *chain(*run.key_values),
                *(of.z for of in run.neurons.values()),
            ]
            for run in (getattr(together, side), getattr(apart, side))
        )
        for tensors in zip(one, other, strict=True):
            torch.testing.assert_close(*tensors, rtol=0, atol=1e-12)


def test_runs_are_recorded_apart_if_rows_round_differently():
    """Otherwise, patches before the first different token would seem to have an effect."""
    model = model_of("gpt2")

    def round_by_row(module, args, output):
        stream = output[0] if isinstance(output, tuple) else output
        stream += 1e-13 * torch.arange(len(stream))[:, None, None]

    model.blocks[0].register_forward_hook(of_a_library(round_by_row))
    runs = recorded_pair(model)
    assert torch.equal(runs.clean.streams[-1][:, :FIRST], runs.corrupted.streams[-1][:, :FIRST])
