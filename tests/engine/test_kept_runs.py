"""Tests that runs and a model's passed tests are kept until the model changes.

Both runs of a contrast are recorded once. A model is tested once, and again if prompts are longer.
"""

import copy
import gc
import sys
import weakref
from contextlib import suppress
from itertools import pairwise
from types import MethodType

import bridges
import pytest
import torch
from common import changed, of_a_library, tokens

from attn_only_lens import Contrast, explain
from attn_only_lens import patching as p
from attn_only_lens.engine import kept_runs, passed_tests
from attn_only_lens.engine.multipliers import Held, run_both
from attn_only_lens.errors import AttnOnlyLensError, InputError
from attn_only_lens.heads import host_of

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
METRIC = p.logit_diff(correct=7, wrong=8)
SECANT = p.Estimate("secant", budget=0)


def contrast(seed=1):
    return Contrast(tokens(seed, batch=1), tokens(seed + 1, batch=1), METRIC)


@pytest.fixture
def model():
    return bridges.exposed_copy(bridges.boot("gpt2", torch.float32))


def patched(model, some):
    return p.activation_patch(model, some, sites=["L0H1", "L1N3"]).frame["value"].tolist()


def counted(model, call):
    """Return a call's result, and how often it ran the first block.

    A profiler counts, because a hook or another forward function would be a change of the model.
    """
    block, n_passes = model.blocks[0], [0]

    def count(frame, event, _):
        if event == "call" and frame.f_code is type(block).forward.__code__:
            n_passes[0] += frame.f_locals["self"] is block

    sys.setprofile(count)
    try:
        return call(), n_passes[0]
    finally:
        sys.setprofile(None)


def test_an_analysis_repeats_no_run(model):
    one, other = contrast(), contrast()
    alone = [patched(model, one), p.attribution(model, other, method=SECANT).frame]
    (together, first), (again, second) = (
        counted(model, lambda: p.attribution(model, one, method=SECANT).frame) for _ in range(2)
    )
    assert second < first  # the runs of a contrast, but not the pass for its multipliers
    assert together["value"].equals(again["value"])
    assert together["value"].equals(alone[1]["value"])
    values, n_kept_run = counted(model, lambda: patched(model, one))
    fresh, n_fresh = counted(model, lambda: patched(model, contrast()))
    assert n_kept_run < n_fresh
    assert values == fresh == pytest.approx(alone[0], abs=1e-5)


CHANGES = {
    "a matrix": lambda model: _scale(model),
    "a hook": lambda model: model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: 1.1 * x),
}


@torch.no_grad()
def _scale(model):
    next(x for x in model.parameters() if x.ndim == 2).mul_(1.1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_again(model, change):
    some = contrast()
    pair = some.pair(model)
    before = run_both(model, pair)
    assert run_both(model, pair).recording is before.recording
    whole = run_both(model, pair, decomposed=True)
    assert before.decomposition is None
    assert run_both(model, pair).decomposition is whole.decomposition is not None
    CHANGES[change](model)
    after = run_both(model, pair)
    assert not torch.equal(after.logits, before.logits)
    torch.testing.assert_close(after.logits[:1], model(pair.clean))


def test_a_run_of_a_circuit_is_kept_by_what_is_outside(model):
    pair = contrast().pair(model)
    name = host_of(model).hook_name(0, "neuron", "z")
    shape = run_both(model, pair).recording.hooked[name].shape[1:3]
    held = [{name: Held(torch.zeros(1, *shape, 1, dtype=torch.bool))} for _ in range(3)]
    held[1][name].outside[0, -1, 3] = True
    held[2][name] = Held(held[1][name].outside, torch.full((1, *shape, 1), 0.1))
    runs = [run_both(model, pair, held=some) for some in held]
    again = [run_both(model, pair, held=copy.deepcopy(some)) for some in held]
    logits = [run.logits for run in (run_both(model, pair), *runs)]
    assert [x.recording is y.recording for x, y in zip(runs, again, strict=True)] == [True] * 3
    assert [torch.equal(x, y) for x, y in pairwise(logits)] == [True, False, False]
    _scale(model)
    assert run_both(model, pair, held=held[1]).recording is not runs[1].recording


def test_a_model_that_changes_during_an_analysis_is_an_error(model):
    def metric(logits):
        model.blocks[1].scale = 1.1  # the state has every attribute of every module
        return logits[0, -1, 7] - logits[0, -1, 8]

    with pytest.raises(InputError, match="the model changed during the analysis"):
        explain(model, Contrast(tokens(1, batch=1), tokens(2, batch=1), metric))


def test_memory_is_bounded(model, monkeypatch):
    some = [contrast(seed) for seed in (1, 3, 5)]
    pairs = [each.pair(model) for each in some]
    run_both(model, pairs[0])
    ((*_, size),) = host_of(model).passing.kept_runs[pairs[0]].values()
    assert size >= sum(x.nbytes for x in run_both(model, pairs[0]).recording.streams)
    monkeypatch.setattr(kept_runs, "free_bytes", lambda device: 2.5 * size / kept_runs._SHARE)
    for pair in pairs:
        run_both(model, pair)
    kept = [kept_runs.kept_runs(model, pair) is not None for pair in pairs]
    assert kept == [False, True, True]  # the oldest went
    # The precision of products is part of the state.
    monkeypatch.setattr(kept_runs, "matmul_precision", lambda: "tf32")
    assert kept_runs.kept_runs(model, pairs[2]) is None


def test_runs_are_kept_no_longer_than_contrast_and_model():
    model, some = bridges.exposed_copy(bridges.boot("gpt2")), contrast()
    run_both(model, some.pair(model))
    assert len(host_of(model).passing.kept_runs) == 1
    assert not host_of(copy.deepcopy(model)).passing.kept_runs
    del some
    gc.collect()
    assert not host_of(model).passing.kept_runs
    some = contrast()
    run_both(model, some.pair(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_contrast_used_in_inference_mode_can_be_used_outside_it(model):
    some = contrast()
    with torch.inference_mode():
        patched(model, some)
    expected = p.attribution(model, contrast(), method=SECANT).frame
    assert p.attribution(model, some, method=SECANT).frame.equals(expected)


# Tests of a model that have passed


def swept(model, n_pos=7, batch=1, mask=None):
    """Return effects, and how often a sweep ran the first block."""
    clean = tokens(1, batch, n_pos)
    some = Contrast(clean, changed(clean, slice(3, None)), METRIC, mask=mask)
    how = {"sites": ["L0N5", "L1N3", "L1H0"], "per_prompt": batch > 1}
    result, n_runs = counted(model, lambda: p.activation_patch(model, some, **how))
    return result.effect.to_numpy(), n_runs


def test_tests_run_once(model):
    first, n_first = swept(model)
    second, n_second = swept(model)
    assert (first == second).all()
    assert n_second <= n_first - 3
    assert swept(model, n_pos=5)[1] < n_first  # shorter prompts
    assert swept(model, n_pos=11)[1] > n_second  # longer prompts
    assert swept(model, n_pos=11)[1] <= n_second


CHANGES_AFTER_TESTS = {
    "a vector is written to through .data": lambda model: (
        model.ln_final.original_component.weight.data.mul_(1.5)
    ),
    "a hook": lambda model: model.blocks[0].register_forward_hook(of_a_library(lambda *run: None)),
}


@pytest.mark.parametrize("change", CHANGES_AFTER_TESTS)
def test_a_changed_model_is_tested_again(change, model):
    n_first, n_second = (swept(model)[1] for _ in range(2))
    CHANGES_AFTER_TESTS[change](model)
    assert swept(model)[1] == n_first
    assert swept(model)[1] == n_second
    with torch.autocast("cpu", torch.bfloat16), suppress(AttnOnlyLensError):
        assert swept(model)[1] > n_second


def test_metrics_of_other_columns_are_tested():
    """The tests cover new columns, because a forward pass may treat one logit differently."""
    model = bridges.exposed("gpt2")
    wrapped = model.original_model
    forward = type(wrapped).forward

    def masking(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[..., 0] = -3.0
        return output

    wrapped.forward = MethodType(masking, wrapped)
    clean, corrupted = (torch.tensor([[3, 5, 7, x, 13]]) for x in (11, 17))
    for correct in (0, 5):
        contrast = Contrast(clean, corrupted, p.logit_diff(correct, 7))
        remembered = p.activation_patch(model, contrast, sites="heads").effect.to_numpy()
        passed_tests._PASSED.clear()
        fresh = p.activation_patch(model, contrast, sites="heads").effect.to_numpy()
        assert (remembered == fresh).all()


def test_padded_prompts_are_always_tested(model):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, -2:] = 0
    # Only whether the model ignores padding is remembered after the first sweep.
    _, n_second, n_third = (swept(model, batch=2, mask=mask)[1] for _ in range(3))
    _, without_padding = (swept(model, batch=2)[1] for _ in range(2))
    assert n_second == n_third > without_padding
