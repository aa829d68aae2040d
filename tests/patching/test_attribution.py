"""Tests of estimates without repairs against derivatives and patches made with plain hooks."""

from dataclasses import replace
from functools import cache

import bridges
import numpy as np
import patched_runs as oracle
import pytest
import torch
from common import changed, of_a_library, tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.patching.integrated_gradients import integrated_gradients

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
POS, END = 5, 4
METRIC = p.logit_diff(correct=7, wrong=8)
NAMES = ("L0H1", "L0N3", "L1H0", "L1N36")
METHODS = ("gradient", "exact_gate", "integrated", "secant")
# The steps of a difference quotient, and the largest relative error: step² f‴/6. RMS norms of
# transformers compute in float32 in any dtype, so that rounding has an error of 1e-7/step.
STEPS = {"gpt2": (1e-4, 1e-6), "neox": (1e-4, 1e-6), "llama": (1e-2, 5e-3), "gemma2": (1e-2, 5e-3)}


@cache
def made(name):
    return bridges.exposed_copy(bridges.boot(name))


CLEAN = tokens(0, batch=1, pos=POS)
CORRUPTED = changed(CLEAN, 1)
PAIR = Contrast(CLEAN, CORRUPTED, METRIC)


def estimate(model, contrast=PAIR, method="exact_gate", steps=None, split=False, **how):
    # `test_repairs.py` tests exact repairs.
    method = p.Estimate(method, budget=0, steps=steps, split=split)
    return p.attribution(model, contrast, method=method, **how)


def moves(sweep, name, position):
    """Return the change of the metric that an estimate predicts."""
    row = sweep.frame.query(f"name == {name!r} and position == {position!r}")
    return row["value"].item() - sweep.corrupted_value


def require_close(got, expected, tolerance):
    got, expected = np.array(got), np.array(expected)
    assert abs(got - expected).max() < tolerance * abs(expected).max()
    assert abs(expected).max() > 1e-6


@pytest.mark.parametrize(
    ("name", "parts"),
    [("gpt2", "z q k value pattern"), ("neox", "z"), ("llama", "q"), ("gemma2", "z pattern")],
)
def test_gradient_is_the_slope_of_small_patches(name, parts):
    model, (step, tolerance) = made(name), STEPS[name]
    for part in parts.split():
        sites = [site for site in NAMES if part != "k" or "H" in site]
        result = estimate(model, part=part, method="gradient")
        rows = [(site, pos) for site in sites for pos in (1, END)]
        expected = []
        for site, pos in rows:
            hook_name, index = oracle.place(model, site, part, pos)
            change = oracle.seen(model, CLEAN, hook_name)[index]
            change = change - oracle.seen(model, CORRUPTED, hook_name)[index]
            expected.append(oracle.slope(model, CORRUPTED, hook_name, index, change, step=step))
        require_close([moves(result, *row) for row in rows], expected, tolerance)
        # Control: the gradient of the other run gives other values.
        noise = estimate(model, part=part, method="gradient", direction="noise")
        reverse = [noise.clean_value - noise.corrupted_value - moves(noise, *row) for row in rows]
        assert (
            abs(np.array(reverse) - expected).max() > 2 * tolerance * abs(np.array(expected)).max()
        )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_exact_gate_is_the_slope_along_the_z_that_a_query_makes(name):
    model, (step, tolerance) = made(name), STEPS[name]
    result, linear = (
        estimate(model, part="q", method=method) for method in ("exact_gate", "gradient")
    )
    rows, expected = [(site, pos) for site in NAMES for pos in (1, END)], []
    for site, pos in rows:
        q, index = oracle.place(model, site, "q", pos)
        z, _ = oracle.place(model, site, "z", pos)
        clean_q = oracle.seen(model, CLEAN, q)

        def ask(value, hook, index=index, clean_q=clean_q):
            value = value.clone()
            value[index] = clean_q[index]
            return value

        change = oracle.seen(model, CORRUPTED, z, hooks=[(q, ask)])[index]
        change = change - oracle.seen(model, CORRUPTED, z)[index]
        expected.append(oracle.slope(model, CORRUPTED, z, index, change, step=step))
    require_close([moves(result, *row) for row in rows], expected, tolerance)
    control = np.array([moves(linear, *row) for row in rows])
    assert abs(control - expected).max() > 2 * tolerance * np.abs(expected).max()
    for part in ("z", "value"):  # where no gate is passed, both methods are the same
        first, second = (estimate(model, part=part, method=m).frame for m in METHODS[:2])
        assert first.equals(second)


# Integrated gradients


def test_integrated_gradients_of_the_embedding_are_complete():
    """The gradients add up to the metric's difference, with an error of order 1/steps²."""
    model = made("gpt2")
    metric = bind(METRIC, model, PAIR.pair(model))
    first, second = record(model, CORRUPTED, None), record(model, CLEAN, None)
    change, errors = metric.of(second.logits) - metric.of(first.logits), []
    for steps in (1, 16, 32):
        name = "blocks.0.hook_resid_pre"
        g = integrated_gradients(model, first, second, metric, Tape([name]), steps, False)[name]
        errors.append(((second.streams[0] - first.streams[0]) * g).sum().item() - change)
    assert abs(errors[2]) < 1e-2 * abs(change)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.2)
    assert abs(errors[0]) > 10 * abs(errors[2])  # control: one gradient alone is far off


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"direction": "zero", "method": "integrated"}, "interpolates between the clean"),
        ({"part": "q", "method": "secant"}, "expected part='z'"),
        ({"split": True}, "got split=True with method='exact_gate'"),
        ({"steps": 0, "method": "integrated"}, "got steps=0"),
        ({"work": Work(batch_size=3)}, "got batch_size=3 in work; this function does not use"),
        ({"contrast": replace(PAIR, metric=lambda x: 0 * x.sum())}, "constant"),
        ({"contrast": replace(PAIR, metric=lambda x: x.detach()[:, -1, 3].mean())}, "detached"),
    ],
)
def test_refusals(settings, words):
    with pytest.raises(InputError, match=words):
        estimate(made("gpt2"), **settings)


def test_a_metric_that_is_flat_where_it_is_patched_into():
    """Refuse a metric with a zero gradient on the patched run: all its estimates would be zero."""
    model, contrast = made("llama"), replace(PAIR, metric=p.kl())
    for method in ("gradient", "exact_gate"):
        with pytest.raises(InputError, match="gradient is zero on the run that is patched"):
            estimate(model, contrast, method, direction="noise")
        # Controls: the gradient is not zero in the other direction, nor between the runs.
        assert estimate(model, contrast, method).effect.abs().max() > 1e-3
    between = estimate(model, contrast, "integrated", direction="noise")
    assert between.effect.abs().max() > 1e-3


def test_a_padding_token_with_a_zero_embedding():
    """Transformers sets the embedding of `padding_idx` to zero, so a norm's input can be zero."""
    model, pad = bridges.exposed_copy(bridges.boot("llama")), 0
    clean, mask = tokens(3, batch=2, pos=POS), torch.tensor([[1, 1, 1, 0, 0], [1] * POS])
    sides = (side.where(mask.bool(), torch.tensor(pad)) for side in (clean, changed(clean, 1)))
    contrast = Contrast(*sides, METRIC, mask=mask)
    assert not (contrast.clean[mask.bool()] == pad).any()
    before = estimate(model, contrast, "secant", per_prompt=True).to_frame()
    with torch.no_grad():
        model.original_model.get_input_embeddings().weight[pad] = 0
    assert not model.embed(torch.tensor([pad])).any()
    after = estimate(model, contrast, "secant", per_prompt=True).to_frame()
    assert before["value"].equals(after["value"])  # no token attends to padding


def test_tokens_that_enter_elsewhere_leave_no_path():
    model, given = bridges.exposed_copy(bridges.boot("gpt2")), []
    embedding = model.embed.W_E.detach()

    def note(module, args, kwargs):
        given.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

    def with_tokens(module, args):
        return (args[0] + embedding[given[-1]], *args[1:])

    model.original_model.register_forward_pre_hook(of_a_library(note), with_kwargs=True)
    model.blocks[1].register_forward_pre_hook(of_a_library(with_tokens))
    with pytest.raises(UnsupportedModelError, match="the model reads tokens elsewhere"):
        estimate(model, method="integrated")
