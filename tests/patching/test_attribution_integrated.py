"""Tests that integrated gradients are complete at the embedding and alike in both directions."""

from functools import partial

import patch_oracle as oracle
import pytest
from common import of_a_library, tokens
from models import build

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.patching._attribution import integrated_gradients

estimate = partial(p.attribution, budget=0)  # `test_repairs.py` tests exact repairs

POS = 5
LAYOUTS = ("two blocks a layer", "in place")
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)


def prompts():
    clean = tokens(0, batch=1, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


def model_of(family, layout):
    source = build(family, scale=0.25)
    if layout == "two blocks a layer":
        return convert(source)
    expose_neuron_heads(source)
    return source


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integrated_gradients_of_the_embedding_are_complete(layout):
    """The gradients add up to the metric's difference, with an error of order 1/steps²."""
    model, (clean, corrupted) = model_of("gelu", layout), prompts()
    metric = bind(METRIC, model, p.prompt_pair(model, clean, corrupted))
    first, second = record(model, corrupted, None), record(model, clean, None)
    errors = []
    for steps in (1, 16, 32):
        name = "blocks.0.hook_resid_pre"
        g = integrated_gradients(model, first, second, metric, Tape([name]), steps, False)[name]
        total = ((second.streams[0] - first.streams[0]) * g).sum().item()
        errors.append(total - (metric.of(second.logits) - metric.of(first.logits)))
    assert abs(errors[2]) < 1e-2 * abs(metric.of(second.logits) - metric.of(first.logits))
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.2)
    assert abs(errors[0]) > 30 * abs(errors[2])  # control: one gradient alone is far off


def test_integrated_converges_and_is_no_single_gradient():
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    settings = {"method": "integrated", "progress": False}
    scores = {
        steps: estimate(model, clean, corrupted, METRIC, steps=steps, **settings).frame["score"]
        for steps in (4, 8, 64)
    }
    off = {steps: (scores[steps] - scores[64]).abs().max() for steps in (4, 8)}
    assert off[8] < off[4] / 2
    plain = estimate(model, clean, corrupted, METRIC, method="gradient").frame["score"]
    assert (plain - scores[64]).abs().max() > 3 * off[4]
    noise = estimate(
        model, clean, corrupted, METRIC, steps=64, direction="noise", **settings
    ).frame["score"]
    # The reverse path has the same gradients, and changes of the opposite sign.
    assert (scores[64] + noise - 1).abs().max() < 1e-10


def test_tokens_that_enter_elsewhere_leave_no_path():
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    embedding = model.embed.W_E.detach()

    def with_tokens(module, args):
        return (args[0] + embedding[model.given], *args[1:])

    def note(module, args, kwargs):
        model.given = args[0]

    model.register_forward_pre_hook(of_a_library(note), with_kwargs=True)
    model.blocks[1].register_forward_pre_hook(of_a_library(with_tokens))
    with pytest.raises(UnsupportedModelError, match="the model reads tokens elsewhere"):
        estimate(model, clean, corrupted, METRIC, method="integrated", progress=False)
