"""Tests that sweeps are right in models whose attention is not causal, whatever `cfg` says."""

from contextlib import nullcontext
from dataclasses import replace

import bridges
import pytest
import torch
from common import mlp_hook, needs_hooked_transformer, relative, tokens
from torch import nn

from attn_only_lens import (
    Contrast,
    convert,
    expose_neuron_heads,
    neurons,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.passed_tests import ignores_padding
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
CLEAN, CORRUPTED = tokens(pos=7), tokens(1, pos=7)
NEURON, POSITION = 5, 4
METRIC = p.logit_diff(7, 8)
ONE_LENGTH = Contrast(CLEAN, CORRUPTED, METRIC)


def unmasked(self, attn_scores, *args, **kwargs):
    return attn_scores


def swept(model):
    sweep = p.activation_patch(model, ONE_LENGTH, sites=f"L0N{NEURON}@{POSITION}")
    return sweep.frame["value"].item()


@torch.no_grad()
def hooked(model, name):
    """Return the patched value from a full forward pass with a plain hook."""
    clean = model.run_with_cache(CLEAN)[1][name]

    def edit(value, hook):
        value[:, POSITION, NEURON] = clean[:, POSITION, NEURON]
        return value

    logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, edit)])[:, -1]
    return (logits[:, 7] - logits[:, 8]).mean().item()


@needs_hooked_transformer
def test_an_overridden_mask(monkeypatch):
    from models import build  # a module-level import would skip the module under 4

    source = build("gelu")
    causal = hooked(source, mlp_hook("post", 0))
    monkeypatch.setattr(type(source.blocks[0].attn), "apply_causal_mask", unmasked)
    model = convert(source)
    expected = hooked(source, mlp_hook("post", 0))
    assert abs(expected - causal) > 1e-3
    assert swept(model) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        PAIR.pair(model)


MASKING = "_apply_reconstruct_attention_mask"


def test_a_mask_that_changes_after_a_sweep(monkeypatch):
    # With two blocks, no later block would read what an earlier token's attention adds.
    monkeypatch.setitem(bridges.SIZES, "num_hidden_layers", 3)
    model, name = bridges.exposed("llama"), mlp_hook("z", 0)
    causal = hooked(model, name)
    assert swept(model) == pytest.approx(causal, rel=1e-9)
    softmax = nn.functional.softmax
    monkeypatch.setattr(
        nn.functional, "softmax", lambda x, *a, **k: softmax(x.clamp(min=0.0), *a, **k)
    )
    expected = hooked(model, name)
    assert abs(expected - causal) > 1e-3
    assert swept(model) == pytest.approx(expected, rel=1e-9)


def test_texts_of_different_lengths(monkeypatch):
    """Padding does not change the activations of a model that attends to all tokens."""
    model = expose_neuron_heads(bridges.boot("llama")).model
    assert ignores_padding(model)
    monkeypatch.setattr(type(model.blocks[0].attn), MASKING, unmasked)
    assert not ignores_padding(model)
    texts = [tokens(seed, pos=n)[0].tolist() for seed, n in enumerate((3, 7, 5))]
    found = neurons.top_examples(model, ["L1N3"], neurons.Corpus(texts), k=3)
    for row in found.itertuples():
        alone = model.run_with_cache(torch.tensor([texts[row.text]]))[1][mlp_hook("post", 1)]
        assert row.value == pytest.approx(alone[0, row.position, 3].item(), rel=1e-6)


# Prompts of different lengths

ROWS, OTHERS = ([tokens(seed + i, pos=n)[0] for i, n in enumerate((7, 4))] for seed in (0, 5))
PADDED = torch.stack([ROWS[0], torch.cat([ROWS[1], torch.zeros(3).long()])])
MASK = (torch.arange(7) < torch.tensor([[7], [4]])).long()
PAIR = Contrast(ROWS, OTHERS, METRIC, roles={"first": 0, "end": -1})


MASKED = Contrast(PADDED, PADDED.roll(1, 1), METRIC, mask=MASK)


@pytest.fixture
def model(monkeypatch):
    """A bridge without any attention mask, until `monkeypatch.undo()`."""
    model = expose_neuron_heads(bridges.boot("llama")).model
    monkeypatch.setattr(type(model.blocks[0].attn), MASKING, unmasked)
    return model


def patched(model):
    return p.activation_patch(model, PAIR, sites=p.Sites(["L0N3", "L0H1"], -1))


def means(model):
    with p.ablated(model, ["L0N3", "L0H1"], to="mean", prompts=ROWS):
        return model(CLEAN)


@pytest.mark.parametrize("call", [patched, means])
def test_padding_that_changes_logits_is_refused(call, model, monkeypatch):
    padded = model(PADDED, attention_mask=MASK)[1, 3]
    assert relative(padded, model(ROWS[1][None])[0, 3]) > 1e-2
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        call(model)
    monkeypatch.undo()  # control: the call is right on a model that ignores padding
    call(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_side_is_tested(side, model, monkeypatch):
    """A model with a causal mask only ignores padding on the right, but not on the left."""
    mask = MASK.flip(1) if side == "left" else MASK
    with pytest.raises(InputError, match=f"padding on the {side} changes"):
        replace(MASKED, mask=mask).pair(model)

    def causal(self, attn_scores, *args, **kwargs):
        return attn_scores + torch.full_like(attn_scores[0, 0], -torch.inf).triu(1)

    monkeypatch.setattr(type(model.blocks[0].attn), MASKING, causal)
    with pytest.raises(InputError, match="on the left") if side == "left" else nullcontext():
        replace(MASKED, mask=mask).pair(model)
