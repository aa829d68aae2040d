"""Tests that sweeps are right in models whose attention is not causal, whatever `cfg` says."""

from contextlib import nullcontext
from dataclasses import replace
from types import MethodType

import bridges
import pytest
import torch
from common import mlp_hook, needs_hooked_transformer, relative, tokens
from torch import nn

from attn_only_lens import (
    Contrast,
    circuits,
    compare,
    convert,
    explain,
    expose_neuron_heads,
    grow,
    growth,
    neurons,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.passed_tests import ignores_padding
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import Transcoder, fidelity

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
@pytest.mark.parametrize("make", ["exposed", "converted"])
def test_an_overridden_mask(make, monkeypatch):
    from models import build

    source = build("gelu")
    causal = hooked(source, mlp_hook("post", 0))
    if make == "exposed":
        model = expose_neuron_heads(source).model
        swept(model)  # the mask changes after a sweep
        for block in source.blocks:
            monkeypatch.setattr(block.attn, "apply_causal_mask", MethodType(unmasked, block.attn))
    else:
        monkeypatch.setattr(type(source.blocks[0].attn), "apply_causal_mask", unmasked)
        model = convert(source)
    expected = hooked(source, mlp_hook("post", 0))
    assert abs(expected - causal) > 1e-3
    assert swept(model) == pytest.approx(expected, rel=1e-9)


MASKING = "_apply_reconstruct_attention_mask"


@pytest.mark.parametrize("of", ["a method", "a function of a module"])
def test_a_mask_that_changes_after_a_sweep(of, monkeypatch):
    # With two blocks, no later block would read what an earlier token's attention adds.
    monkeypatch.setitem(bridges.SIZES, "num_hidden_layers", 3)
    model, name = expose_neuron_heads(bridges.boot("llama")).model, mlp_hook("z", 0)
    causal = hooked(model, name)
    assert swept(model) == pytest.approx(causal, rel=1e-9)
    if of == "a method":
        monkeypatch.setattr(type(model.blocks[0].attn), MASKING, unmasked)
    else:
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

SITES = ["L0N3", "L0H1"]
ROWS, OTHERS = ([tokens(seed + i, pos=n)[0] for i, n in enumerate((7, 4))] for seed in (0, 5))
PADDED = torch.stack([ROWS[0], torch.cat([ROWS[1], torch.zeros(3).long()])])
MASK = (torch.arange(7) < torch.tensor([[7], [4]])).long()
PAIR = Contrast(ROWS, OTHERS, METRIC, roles={"first": 0, "end": -1})


ALONE = replace(PAIR, corrupted=None)
MASKED = Contrast(PADDED, PADDED.roll(1, 1), METRIC, mask=MASK)


@pytest.fixture
def model(monkeypatch):
    """A bridge without any attention mask, until `monkeypatch.undo()`."""
    model = expose_neuron_heads(bridges.boot("llama")).model
    monkeypatch.setattr(type(model.blocks[0].attn), MASKING, unmasked)
    return model


def means(model):
    with p.ablated(model, SITES, to="mean", prompts=ROWS):
        return model(CLEAN)


def compared(model, contrast=(ONE_LENGTH, MASKED)):
    expose_neuron_heads(model).undo()
    grown = grow(model, d_mlp=model.cfg.d_mlp + 4, seed=0)
    sizes = growth.ComparisonSizes(faithfulness=0.5, n_patched=0, n_nodes=0)
    return compare(model, grown, contrast, sizes=sizes)


def fidelity_of_zeros(model):
    expose_neuron_heads(model).undo()
    zeros, W = torch.zeros(model.cfg.d_model).double(), torch.eye(model.cfg.d_model).double()
    return fidelity(model, {1: Transcoder(W, 0 * W, zeros, zeros)}, ROWS)


LAST = p.Sites(SITES, -1)
CALLS = {
    "activation_patch": lambda x: p.activation_patch(x, PAIR, sites=LAST),
    "a mask": lambda x: p.activation_patch(x, MASKED, sites=LAST),
    "attribution": lambda x: p.attribution(x, PAIR, sites=LAST),
    "path_patch": lambda x: p.path_patch(x, PAIR, p.Edges("L0H1@-1", "L1H0", "z")),
    "ablated": means,
    "attribution_graph": lambda x: circuits.attribution_graph(x, PAIR, positions="roles"),
    "faithfulness": lambda x: circuits.faithfulness(
        x, PAIR, p.activation_patch(x, ONE_LENGTH, sites=p.Sites(SITES, "all"))
    ),
    "explain": lambda x: explain(x, PAIR, strong=1.0),
    "path_expansion": lambda x: circuits.path_expansion(x, ALONE),
    "fidelity": fidelity_of_zeros,
    "compare": compared,
}


@pytest.mark.parametrize("name", CALLS)
def test_padding_that_changes_logits_is_refused(name, model, monkeypatch):
    padded = model(PADDED, attention_mask=MASK)[1, 3]
    assert relative(padded, model(ROWS[1][None])[0, 3]) > 1e-2
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        CALLS[name](model)
    monkeypatch.undo()  # control: the call is right on a model that ignores padding
    CALLS[name](expose_neuron_heads(model).model if name == "compare" else model)


@needs_hooked_transformer
def test_padding_that_changes_logits_of_a_converted_model_is_refused(monkeypatch):
    from models import build

    source = build("gelu")
    model = convert(source)
    monkeypatch.setattr(type(source.blocks[0].attn), "apply_causal_mask", unmasked)
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        CALLS["activation_patch"](model)
    monkeypatch.undo()
    CALLS["activation_patch"](model)


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


def test_compare_refuses_padding_that_attention_reads(model):
    contrast = Contrast([*ROWS, *OTHERS], None, p.loss())
    with pytest.raises(InputError, match="pass prompts of one length at a time"):
        compared(model, contrast)
