"""Tests that sweeps are right in models whose attention is not causal, whatever `cfg` says."""

from contextlib import nullcontext
from types import MethodType

import bridges
import pytest
import torch
from common import mlp_hook, needs_hooked_transformer, relative, tokens
from torch import nn

from attn_only_lens import (
    circuits,
    compare,
    convert,
    explain,
    expose_neuron_heads,
    grow,
    neurons,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.passed_tests import ignores_padding
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import Transcoder, fidelity

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
CLEAN, CORRUPTED = tokens(pos=7), tokens(1, pos=7)
NEURON, POSITION = 5, 4


def unmasked(self, attn_scores, *args, **kwargs):
    return attn_scores


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
@pytest.mark.parametrize(
    ("make", "of", "when"),
    [
        ("exposed", "instances", "after a sweep"),
        ("exposed", "class", "before"),
        ("converted", "instances", "before"),
        ("converted", "class", "after a sweep"),
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
    found = neurons.top_examples(model, ["L1N3"], texts, 3, progress=False)
    for row in found.itertuples():
        alone = model.run_with_cache(torch.tensor([texts[row.text]]))[1][mlp_hook("post", 1)]
        assert row.value == pytest.approx(alone[0, row.position, 3].item(), rel=1e-6)


# Prompts of different lengths

QUIET = {"progress": False}
METRIC, SITES = p.logit_diff(7, 8), ["L0N3", "L0H1"]
ROWS, OTHERS = ([tokens(seed + i, pos=n)[0] for i, n in enumerate((7, 4))] for seed in (0, 5))
PADDED = torch.stack([ROWS[0], torch.cat([ROWS[1], torch.zeros(3).long()])])
MASK = (torch.arange(7) < torch.tensor([[7], [4]])).long()
ROLES = {"first": 0, "end": -1}
PAIR, ONE_LENGTH = (ROWS, OTHERS, METRIC), (CLEAN, CORRUPTED, METRIC)


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


def circuit_of(model):
    return circuits.discover(model, *ONE_LENGTH, sites=SITES, positions="all", n_random=0)


def graph_of(model, clean=CLEAN, corrupted=CORRUPTED, positions=None):
    how = {"corrupted": corrupted, "positions": positions}
    return circuits.attribution_graph(model, clean, METRIC, **how)


def means(model):
    with p.ablated(model, SITES, to="mean", prompts=ROWS):
        return model(CLEAN)


def streamed(model):
    expose_neuron_heads(model).undo()
    grown = grow(model, d_mlp=model.cfg.d_mlp + 4, seed=0)
    pair = p.PromptPair(PADDED, PADDED.roll(1, 0), MASK)
    other = p.PromptPair(CLEAN, CORRUPTED)
    return compare(model, grown, [other, pair], METRIC, n_patched=0, n_nodes=0, n_resamples=2)


def replaced(model):
    expose_neuron_heads(model).undo()
    d_model = model.cfg.d_model
    zeros = torch.zeros(d_model).double()
    W = torch.eye(d_model).double()
    return fidelity(model, {1: Transcoder(W, 0 * W, zeros, zeros)}, ROWS, **QUIET)


CALLS = {
    "activation_patch": lambda x: p.activation_patch(x, *PAIR, sites=SITES, positions=0, **QUIET),
    "a mask": lambda x: p.activation_patch(
        *(x, PADDED, PADDED.roll(1, 1), METRIC), sites=SITES, positions=0, mask=MASK, **QUIET
    ),
    "ablations": lambda x: p.activation_patch(
        x, ROWS, None, METRIC, sites=SITES, positions=0, direction="zero", **QUIET
    ),
    "attribution": lambda x: p.attribution(x, *PAIR, sites=SITES, positions=0, **QUIET),
    "path_patch": lambda x: p.path_patch(
        x, *PAIR, senders=SITES[1:], receivers=["L1H0"], part="z", positions=0, **QUIET
    ),
    "ablated": means,
    "attribution_graph": lambda x: graph_of(x, ROWS, None),
    "attribution_graph of pairs": lambda x: graph_of(x, ROWS, OTHERS, ROLES),
    "discover": lambda x: circuits.discover(x, *PAIR, sites=SITES, positions="all", n_random=0),
    "evaluate": lambda x: circuits.evaluate(x, circuit_of(x), *PAIR),
    "transfer": lambda x: circuits.transfer(x, {"a": circuit_of(x)}, {"b": PAIR}),
    "explain": lambda x: explain(x, *PAIR, n_patched=1, **QUIET),
    "faithfulness": lambda x: circuits.faithfulness(
        x, *PAIR, p.activation_patch(x, *ONE_LENGTH, sites=SITES, positions="all", **QUIET)
    ),
    "group_nodes": lambda x: circuits.group_nodes(graph_of(x), x, *PAIR),
    "path_expansion": lambda x: circuits.path_expansion(x, ROWS),
    "circuit_view": lambda x: viz.circuit_view(graph_of(x), x, ROWS),
    "fidelity": replaced,
    "compare": streamed,
}
# These refuse prompts of different lengths, or other prompts than the graph's, of any model.
OWN_REASONS = "attribution_graph", "explain", "group_nodes", "circuit_view"


OF_CONVERTED = ("activation_patch", "attribution_graph of pairs")
CASES = [("bridge", name) for name in CALLS]
CASES += [pytest.param("converted", x, marks=needs_hooked_transformer) for x in OF_CONVERTED]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_padding_that_changes_logits_is_refused(make, name, monkeypatch):
    model, give_mask = ignoring_masks(make, monkeypatch)
    padded = model(PADDED, attention_mask=MASK)[1, 3]
    assert relative(padded, model(ROWS[1][None])[0, 3]) > 1e-2
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        CALLS[name](model)
    give_mask()  # control: the call is right on a model that ignores padding
    with pytest.raises(InputError) if name in OWN_REASONS else nullcontext() as error:
        CALLS[name](expose_neuron_heads(model).model if name == "compare" else model)
    assert error is None or "padding" not in str(error.value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_side_is_tested(side, monkeypatch):
    """A model with a causal mask only ignores padding on the right, but not on the left."""
    model, give_mask = ignoring_masks("bridge", monkeypatch)
    mask = MASK.flip(1) if side == "left" else MASK
    with pytest.raises(InputError, match=f"padding on the {side} changes"):
        p.prompt_pair(model, PADDED, PADDED.roll(1, 1), mask)
    give_mask()

    def causal(self, attn_scores, *args, **kwargs):
        return attn_scores + torch.full_like(attn_scores[0, 0], -torch.inf).triu(1)

    monkeypatch.setattr(type(model.blocks[0].attn), "_apply_reconstruct_attention_mask", causal)
    with pytest.raises(InputError, match="on the left") if side == "left" else nullcontext():
        p.prompt_pair(model, PADDED, PADDED.roll(1, 1), mask)


def test_functions_that_run_each_length_alone(monkeypatch):
    model, _ = ignoring_masks("bridge", monkeypatch)
    rows, answers = [*ROWS, *OTHERS], ([2, 3, 5, 7], [11, 13, 17, 19])
    last = [model(row[None])[0, -1, list(x)] for row, *x in zip(rows, *answers, strict=True)]
    expose_neuron_heads(model).undo()
    grown = grow(model, d_mlp=model.cfg.d_mlp + 4, seed=0)
    few = {"n_patched": 0, "n_nodes": 0, "n_resamples": 2, **QUIET}
    result = compare(model, grown, rows, p.logit_diff(*answers), **few)
    expected = torch.stack(last).diff().mean().item()
    assert result.about["values"]["original"]["clean"] == pytest.approx(-expected, rel=1e-9)
