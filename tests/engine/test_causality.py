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
@pytest.mark.parametrize(
    ("make", "of", "when"),
    [
        ("exposed", "instances", "after a sweep"),
        ("converted", "class", "after a sweep"),
        ("converted", "instances", "before"),
    ],
)
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


@pytest.mark.parametrize("overridden", [False, True])
def test_texts_of_different_lengths(overridden, monkeypatch):
    """Padding does not change the activations of a model that attends to all tokens."""
    model = expose_neuron_heads(bridges.boot("llama")).model
    if overridden:
        name = "_apply_reconstruct_attention_mask"
        monkeypatch.setattr(type(model.blocks[0].attn), name, unmasked)
    assert ignores_padding(model) is not overridden
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


def ignoring_masks(make, monkeypatch):
    """Return a model without any attention mask, and a function that gives it one."""
    if make == "bridge":
        model = expose_neuron_heads(bridges.boot("llama")).model
        name = "_apply_reconstruct_attention_mask"
        monkeypatch.setattr(type(model.blocks[0].attn), name, unmasked)
        return model, monkeypatch.undo
    from models import build

    source = build("gelu")
    attention, model = type(source.blocks[0].attn), convert(source)
    monkeypatch.setattr(attention, "apply_causal_mask", unmasked)
    return model, monkeypatch.undo


def means(model):
    with p.ablated(model, SITES, to="mean", prompts=ROWS):
        return model(CLEAN)


FEW = {
    "sizes": growth.ComparisonSizes(n_patched=0, n_nodes=0),
    "resampling": growth.Resampling(n_resamples=2),
}


LAST = p.Sites(SITES, -1)


CASES += [pytest.param("converted", x, marks=needs_hooked_transformer) for x in OF_CONVERTED]


def compared(model):
    expose_neuron_heads(model).undo()
    grown = grow(model, d_mlp=model.cfg.d_mlp + 4, seed=0)
    return compare(model, grown, MASKED, **FEW)


def replaced(model):
    expose_neuron_heads(model).undo()
    d_model = model.cfg.d_model
    zeros = torch.zeros(d_model).double()
    W = torch.eye(d_model).double()
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
    "fidelity": replaced,
    "compare": compared,
}
CASES = [
    *(("bridge", name) for name in CALLS),
    pytest.param("converted", "activation_patch", marks=needs_hooked_transformer),
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_padding_that_changes_logits_is_refused(make, name, monkeypatch):
    model, give_mask = ignoring_masks(make, monkeypatch)
    padded = model(PADDED, attention_mask=MASK)[1, 3]
    assert relative(padded, model(ROWS[1][None])[0, 3]) > 1e-2
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        CALLS[name](model)
    give_mask()  # control: the call is right on a model that ignores padding
    CALLS[name](expose_neuron_heads(model).model if name == "compare" else model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_side_is_tested(side, monkeypatch):
    """A model with a causal mask only ignores padding on the right, but not on the left."""
    model, give_mask = ignoring_masks("bridge", monkeypatch)
    mask = MASK.flip(1) if side == "left" else MASK
    with pytest.raises(InputError, match=f"padding on the {side} changes"):
        replace(MASKED, mask=mask).pair(model)
    give_mask()

    def causal(self, attn_scores, *args, **kwargs):
        return attn_scores + torch.full_like(attn_scores[0, 0], -torch.inf).triu(1)

    monkeypatch.setattr(type(model.blocks[0].attn), "_apply_reconstruct_attention_mask", causal)
    with pytest.raises(InputError, match="on the left") if side == "left" else nullcontext():
        replace(MASKED, mask=mask).pair(model)


def test_functions_that_run_each_length_alone(monkeypatch):
    model, _ = ignoring_masks("bridge", monkeypatch)
    rows, answers = [*ROWS, *OTHERS], ([2, 3, 5, 7], [11, 13, 17, 19])
    last = [model(row[None])[0, -1, list(x)] for row, *x in zip(rows, *answers, strict=True)]
    expose_neuron_heads(model).undo()
    grown = grow(model, d_mlp=model.cfg.d_mlp + 4, seed=0)
    result = compare(model, grown, Contrast(rows, None, p.logit_diff(*answers)), **FEW)
    expected = torch.stack(last).diff().mean().item()
    assert result.about["values"]["original"]["clean"] == pytest.approx(-expected, rel=1e-9)
