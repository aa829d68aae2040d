"""Both runs of a contrast are recorded once, and again after any change of the model."""

import copy
import gc
import sys
import weakref

import bridges
import pytest
import torch
from common import tokens

from attn_only_lens import Contrast, explain
from attn_only_lens import patching as p
from attn_only_lens.engine import kept_runs
from attn_only_lens.engine.model_state import snapshot, unchanged
from attn_only_lens.engine.multipliers import run_both
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of

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
    "a row of a matrix, through its data": lambda model: _row(model),
    "a hook": lambda model: model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: 1.1 * x),
    "the dtype": lambda model: model.double(),
}


@torch.no_grad()
def _scale(model):
    next(x for x in model.parameters() if x.ndim == 2).mul_(1.1)


def _row(model):
    next(x for x in model.parameters() if x.ndim == 2).data[contrast().clean[0, 0]] = 0.0


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


def test_a_model_that_changes_during_an_analysis_is_an_error(model):
    """In `unchanged`, the state is described once; another error than the change's goes first."""
    with unchanged(model), unchanged(model):
        assert snapshot(model) is snapshot(model)
    assert snapshot(model) is not snapshot(model)  # control
    with pytest.raises(InputError, match="the model changed during the analysis"), unchanged(model):
        _scale(model)
    with pytest.raises(ZeroDivisionError), unchanged(model):
        _fail(model)

    def metric(logits):
        model.blocks[1].scale = 1.1  # the state has every attribute of every module
        return logits[0, -1, 7] - logits[0, -1, 8]

    with pytest.raises(InputError, match="the model changed during the analysis"):
        explain(model, Contrast(tokens(1, batch=1), tokens(2, batch=1), metric))


def _fail(model):
    _scale(model)
    raise ZeroDivisionError


def test_memory_is_bounded(model, monkeypatch):
    some = [contrast(seed) for seed in (1, 3, 5)]
    pairs = [each.pair(model) for each in some]
    run_both(model, pairs[0])
    (size,) = (n for *_, n in host_of(model).passing.kept_runs.values())
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
