"""Frozen patterns: credit adds up, and an estimate is a patch of the model held in place."""

from functools import partial

import patch_oracle as oracle
import pytest
import torch
from common import IN_PLACE, mlp_hook, of_a_library, tokens
from models import CORE, FAMILIES, build

from attn_only_lens import UnsupportedModelError, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.frozen_pass import FrozenPass
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record, run
from attn_only_lens.patching._attribution import integrated_gradients

estimate = partial(p.attribution, budget=0)  # exact repairs: `test_repairs.py`

POS = 5
LAYOUTS = ("two blocks a layer", "in place")
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)
ROUNDING = 1e-10  # of sums of a thousand products, by way of three layers


def prompts(batch=1):
    clean = tokens(0, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


def model_of(family, layout):
    source = build(family, scale=0.25)
    if layout == "two blocks a layer":
        return convert(source)
    expose_neuron_heads(source)
    return source


def bias(name):
    return name.split(".")[-1].lstrip("_").startswith("b")  # _b_V, of grouped values


def shares(model, given, hooks):
    """The logit difference, and what the embedding and every bias contribute to it."""
    before = []
    handle = model.unembed.register_forward_hook(lambda module, args, out: before.append(out))
    biases = [parameter for name, parameter in model.named_parameters() if bias(name)]
    with start_graph(model) as roots:
        run(model, given, None, hooks)
    handle.remove()
    logits = before[0][:, -1]
    value = (logits[:, oracle.CORRECT] - logits[:, oracle.WRONG]).mean()
    found = torch.autograd.grad(value, [roots[0], *biases], allow_unused=True)
    pieces = [
        (gradient * at).sum()
        for gradient, at in zip(found, [roots[0], *biases], strict=True)
        if gradient is not None
    ]
    return value.item(), torch.stack(pieces).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "clip_qkv"])
def test_credit_of_embedding_and_biases_adds_up(family, layout):
    model, (clean, _) = model_of(family, layout), prompts(batch=2)
    value, pieces = shares(model, clean, FrozenPass(model).record_hooks)
    assert pieces.sum().item() == pytest.approx(value, rel=ROUNDING, abs=ROUNDING)
    assert (pieces != 0).sum() > 5
    # control: with nothing frozen, it does not
    value, pieces = shares(model, clean, [])
    assert abs(pieces.sum().item() - value) > 1e-3 * abs(value)


@pytest.mark.parametrize("family", ["gelu", "no_norm", "rms_pre"])
def test_what_all_writers_write_adds_up(family):
    """Embedding, attention heads, neurons and biases, each through the final norm alone."""
    model, (clean, _) = model_of(family, "in place"), prompts()
    frozen, last = FrozenPass(model), model.cfg.n_layers - 1
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(last + 1)]
    names += [mlp_hook("z", layer) for layer in range(last + 1)]
    end = Tape([f"blocks.{last}.hook_resid_post"])
    seen = {}
    keep = [(name, lambda value, hook: seen.update({hook.name: value})) for name in names]
    with start_graph(model) as roots:
        logits = run(model, clean, None, [*frozen.record_hooks, *keep, *end.hooks])[0, -1]
    weights = torch.zeros_like(logits)
    weights[[oracle.CORRECT, oracle.WRONG]] = torch.tensor([1.0, -1.0]).double()
    value = logits @ weights
    after = [b for name, b in model.named_parameters() if bias(name) and "blocks" not in name]
    found = torch.autograd.grad(value, [*end.nodes.values(), *after], allow_unused=True)
    g = found[0]
    total = (g * roots[0]).sum()  # the embedding
    heads, neurons = 0.0, 0.0
    for layer, block in enumerate(model.blocks):
        z = seen[f"blocks.{layer}.attn.hook_z"]
        heads += torch.einsum("bphd,hdm,bpm->h", z, block.attn.W_O, g).sum()
        z = seen[mlp_hook("z", layer)].squeeze(-1)
        neurons += (z * (g @ block.mlp.W_out.T)).sum()
        total = total + (g * (block.attn.b_O + block.mlp.b_out)).sum()
    total = total + sum(
        (f * b).sum() for f, b in zip(found[1:], after, strict=True) if f is not None
    )
    assert (total + heads + neurons).item() == pytest.approx(value.item(), rel=ROUNDING)
    # control: no kind of writer can be left out
    for left_out in (heads, neurons, (g * roots[0]).sum()):
        assert left_out.abs() > 1e-3 * value.abs()


def held(model, given):
    """Hooks that hold every pattern and norm scale at what they are in a run."""
    held = ("hook_scale", "hook_pattern", IN_PLACE["pattern"])
    names = [n for n in model.hook_dict if n.endswith(held)]
    kept = {}
    keep = [(name, lambda value, hook: kept.update({hook.name: value.clone()})) for name in names]
    with torch.no_grad(), model.hooks(fwd_hooks=keep):
        model(given)
    return [(name, lambda value, hook: kept[hook.name]) for name in names]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [f for f in (*CORE, "relu", "sinks") if "gated" not in f])
def test_an_estimate_is_a_patch_of_the_frozen_model(family, layout):
    """Exactly, whatever the size of the patch where all that follows has plain MLPs."""
    model, (clean, corrupted) = model_of(family, layout), prompts()
    hooks = held(model, corrupted)
    names = ("L2N3", "L2N29") if model.cfg.gated_mlp else ("L0H1", "L0N3", "L1N29", "L2H0")
    found = estimate(model, clean, corrupted, METRIC, method="frozen_pattern")
    free = []
    for name in names:
        for pos in (1, POS - 1):
            at, where = oracle.place(model, name, "z", pos)
            change = oracle.seen(model, clean, at)[where] - oracle.seen(model, corrupted, at)[where]
            logits = oracle.moved(model, corrupted, at, where, change, hooks=hooks)
            expected = oracle.difference(logits)
            row = found.frame.query(f"name == {name!r} and position == {pos}")
            assert row["value"].item() == pytest.approx(expected, abs=ROUNDING)
            free.append(
                oracle.difference(oracle.moved(model, corrupted, at, where, change)) - expected
            )
    # control: patches of the model that is not held; without a norm, the last MLP's are the same
    assert max(map(abs, free)) > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_not_linear_when_frozen_is_refused(layout):
    model, (clean, corrupted) = model_of("clip_qkv", layout), prompts()
    with pytest.raises(UnsupportedModelError, match="still not linear"):
        estimate(model, clean, corrupted, METRIC, method="frozen_pattern")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gelu", "llama"])
def test_the_claim_is_tried(family, layout, monkeypatch):
    """Without the scales, or without the half rule, the check says so."""
    model, (clean, corrupted) = model_of(family, layout), prompts()
    attribute = {"metric": METRIC, "method": "frozen_pattern"}
    estimate(model, clean, corrupted, **attribute)
    own = FrozenPass.record_hooks.fget

    def without(ending):
        return property(lambda self: [h for h in own(self) if not h[0].endswith(ending)])

    endings = ["ln_final.hook_scale", *([("hook_v", IN_PLACE["v"])] if family == "llama" else [])]
    for ending in endings:
        monkeypatch.setattr(FrozenPass, "record_hooks", without(ending))
        with pytest.raises((UnsupportedModelError, KeyError)):
            estimate(model, clean, corrupted, **attribute)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integrated_gradients_of_the_embedding_are_complete(layout):
    """They add up to the difference of the metric, with an error of order 1/steps²."""
    model, (clean, corrupted) = model_of("gelu", layout), prompts()
    metric = bind(METRIC, model, p.prompt_pair(model, clean, corrupted))
    one, other = record(model, corrupted, None), record(model, clean, None)
    errors = []
    for steps in (1, 16, 32):
        name = "blocks.0.hook_resid_pre"
        g = integrated_gradients(model, one, other, metric, Tape([name]), steps, False)[name]
        total = ((other.streams[0] - one.streams[0]) * g).sum().item()
        errors.append(total - (metric.of(other.logits) - metric.of(one.logits)))
    assert abs(errors[2]) < 1e-2 * abs(metric.of(other.logits) - metric.of(one.logits))
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
    # the same path the other way: the same gradients, and changes of the other sign
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
    with pytest.raises(UnsupportedModelError, match="tokens enter elsewhere"):
        estimate(model, clean, corrupted, METRIC, method="integrated", progress=False)
