"""Tests that sweeps are right in models whose attention is not causal, whatever `cfg` says."""

from types import MethodType

import bridges
import pytest
import torch
from common import mlp_hook, needs_hooked_transformer, tokens
from torch import nn

from attn_only_lens import convert, expose_neuron_heads, neurons
from attn_only_lens import patching as p
from attn_only_lens.engine.passed_tests import ignores_padding

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
CLEAN, CORRUPTED = tokens(pos=7), tokens(1, pos=7)
NEURON, POSITION = 5, 4


def unmasked(self, scores, *args, **kwargs):
    return scores


def swept(model):
    sites = [f"L0N{NEURON}"]
    arguments = CLEAN, CORRUPTED, p.logit_diff(7, 8)
    how = {"sites": sites, "positions": [POSITION], "progress": False}
    return p.activation_patch(model, *arguments, **how).frame["value"].item()


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
@pytest.mark.parametrize("when", ["before", "after a sweep"])
@pytest.mark.parametrize("of", ["instances", "class"])
@pytest.mark.parametrize("make", ["exposed", "converted"])
def test_an_overridden_mask(make, of, when, monkeypatch):
    from models import build

    source = build("gelu")

    def override():
        for block in source.blocks if of == "instances" else source.blocks[:1]:
            owner = block.attn if of == "instances" else type(block.attn)
            method = MethodType(unmasked, block.attn) if of == "instances" else unmasked
            monkeypatch.setattr(owner, "apply_causal_mask", method)

    causal = hooked(source, mlp_hook("post", 0))
    if when == "before" or make == "converted":
        override()
    model = convert(source) if make == "converted" else expose_neuron_heads(source).model
    if when != "before":
        swept(model)
        override()
    torch.testing.assert_close(model(CLEAN), source(CLEAN))
    got = swept(model)
    expected = hooked(source, mlp_hook("post", 0))
    assert abs(expected - causal) > 1e-3
    assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("of", ["a method", "a function of a module"])
def test_a_mask_that_changes_after_a_sweep(of, monkeypatch):
    # With two blocks, no later block would read what an earlier token's attention adds.
    monkeypatch.setitem(bridges.SIZES, "num_hidden_layers", 3)
    model = expose_neuron_heads(bridges.boot("llama")).model
    assert len(model.blocks) == 3
    name = mlp_hook("z", 0)
    swept(model)
    causal = hooked(model, name)
    assert swept(model) == pytest.approx(causal, rel=1e-9)
    attention = type(model.blocks[0].attn)
    if of == "a method":
        monkeypatch.setattr(
            attention,
            "_apply_reconstruct_attention_mask",
            lambda self, attn_scores, *args, **kwargs: attn_scores,
        )
    else:
        softmax = nn.functional.softmax
        monkeypatch.setattr(
            nn.functional, "softmax", lambda x, *a, **k: softmax(x.clamp(min=0.0), *a, **k)
        )
    expected = hooked(model, name)
    assert abs(expected - causal) > 1e-3
    assert swept(model) == pytest.approx(expected, rel=1e-9)


@needs_hooked_transformer
@pytest.mark.parametrize("overridden", [False, True])
def test_texts_of_different_lengths(overridden, monkeypatch):
    """Padding does not change the activations of a model that attends to all tokens."""
    from models import build

    source = build("gelu")
    for block in source.blocks if overridden else ():
        monkeypatch.setattr(block.attn, "apply_causal_mask", MethodType(unmasked, block.attn))
    model = expose_neuron_heads(source).model
    assert ignores_padding(model) is not overridden
    texts = [tokens(seed, pos=n)[0].tolist() for seed, n in enumerate((3, 7, 5))]
    found = neurons.top_examples(model, ["L2N3"], texts, 3, progress=False)
    for row in found.itertuples():
        alone = source.run_with_cache(torch.tensor([texts[row.text]]))[1][mlp_hook("post", 2)]
        assert row.value == pytest.approx(alone[0, row.position, 3].item(), rel=1e-9)
