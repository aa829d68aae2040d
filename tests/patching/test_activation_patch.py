"""Tests of activation patching against whole forward passes with TransformerLens' hooks."""

from dataclasses import replace
from functools import cache, partial

import bridges
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from common import of_a_library, tokens
from patched_runs import (
    cached,
    difference,
    head_of,
    hook_point,
    places_of,
    whole_runs,
)

from attn_only_lens import Bilinear, Contrast, circuits, explain, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
BATCH, POS = 3, 11
EXACT = 1e-10
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L1N5", "L1N29", "L0H1", "L1H0"]
NEURONS = SITES[:3]
PARTS = ["z", "pattern", "value", "q", "k"]


@cache
def made(name, state="plain", dtype=torch.float64):
    if name == "openai":  # its blocks return lists and end in a norm
        config = transformers.OpenAIGPTConfig(**bridges.GPT)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        bridge = bridges.bridged(bridges.randomise(model.to(dtype).eval()))
    else:
        bridge = bridges.boot(name, dtype, "plain" if state == "later" else state)
    expose_neuron_heads(bridge)
    if state == "later":
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


PADDING = {"none": [0, 0, 0], "right": [0, 3, 4], "left": [0, 2, 4]}
# No two roles share a token. With padding on the right, prompts differ at "changed", on the left
# at "earlier".
ROLES = {"earlier": [4, 3, 2], "changed": [6, 5, 4], "before": -2, "end": -1}


def pairs(side):
    """Return three pairs that differ in different places, padded on one side, with roles."""
    clean = tokens(1, batch=BATCH)
    corrupted = clean.clone()
    for prompt, positions in enumerate(([4, 6], [5], [6, 4])):
        for pos in positions:
            corrupted[prompt, pos] = (clean[prompt, pos] + 5 + pos) % 41
    mask = torch.ones_like(clean)
    for prompt, n in enumerate(PADDING[side]):
        mask[prompt, slice(0, n) if side == "left" else slice(POS - n, None)] = 0
    return Contrast(clean, corrupted, METRIC, mask=None if side == "none" else mask, roles=ROLES)


PAIRS = {side: pairs(side) for side in PADDING}
WHOLE = PAIRS["none"]


def sweep(model, contrast=WHOLE, sites=SITES, **how):
    return p.activation_patch(model, contrast, sites=sites, **how).to_frame()


def require_exact(model, frame, contrast=WHOLE, n=5, **how):
    """Compare some rows with whole runs; the rows must have several values."""
    rows = frame.sample(min(n, len(frame)), random_state=1)
    expected = whole_runs(model, contrast, rows, **how)
    np.testing.assert_allclose(rows["value"], expected, rtol=0, atol=EXACT)
    assert np.std(expected) > 100 * EXACT


SHARED = ("llama", "granite", "gemma2", "phi3")
"""Their attention heads share keys and values: `test_grouped_queries.py`."""
CASES = [(name, "plain") for name in ("neox", "gemma2", "phi3", "native", "granite", "openai")]
CASES += [pytest.param("gpt2", "later", marks=pytest.mark.both_versions)]
CASES += [pytest.param("llama", "processed", marks=pytest.mark.both_versions)]


@pytest.mark.parametrize(("name", "state"), CASES)
def test_every_part_of_every_family(name, state):
    model = made(name, state)
    for part in PARTS:
        sites = [site for site in SITES if part != "k" or "H" in site]
        if part in ("k", "value") and name in SHARED:
            sites = [site for site in sites if "N" in site]
        if sites:
            frame = sweep(model, part=part, sites=sites)
            after = frame[frame.position >= 4]
            require_exact(model, after, part=part)
            # Patches of both kinds of heads have an effect, and none before the prompts differ.
            assert after.groupby("kind", observed=True)["value"].std().min() > 1e-7
            assert set(frame[frame.position < 4]["score"]) == {0.0}


@pytest.mark.parametrize(
    ("side", "positions"),
    [
        ("none", "each"),
        ("none", [5, 4, -2]),
        ("left", "each"),
        ("right", [-5, -4]),
        ("left", "all"),
    ],
)
def test_positions_and_padding(side, positions):
    model, padded = made("gpt2"), PAIRS[side]
    for direction in ("denoise", "noise"):
        frame = sweep(model, padded, p.Sites(SITES, positions), direction=direction)
        by_role = side == "left" and positions == "each"
        assert (frame["position"].unique().tolist() == list(ROLES)) == by_role
        require_exact(model, frame, padded, n=11, noise=direction == "noise")


@pytest.mark.parametrize(("name", "side"), [("gpt2", "left"), ("llama", "right")])
def test_padding_in_every_part(name, side):
    model, padded, sites = made(name), PAIRS[side], SITES if name == "gpt2" else NEURONS
    for part in PARTS[1:4]:
        frame = sweep(model, padded, sites, part=part, per_prompt=True)
        require_exact(model, frame, padded, n=11, part=part)
        # Control: without the mask, the same tokens give other values.
        without = sweep(model, WHOLE, sites, part=part, per_prompt=True)
        assert (frame["value"] - without["value"]).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["z", "q"])
def test_neurons_of_bilinear_gates(part):
    model = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(4))
    frame = sweep(model, sites=["L0N146", "L0N147", "L1N23", "L1H0"], part=part)
    neurons = frame[frame.kind == "neuron"]
    require_exact(model, neurons, n=11, part=part)
    at_6 = neurons[neurons.position == 6].set_index("name")["value"]
    assert abs(at_6["L0N146"] - at_6["L0N147"]) > 100 * EXACT


# Ablations


def ablated(model, row, contrast, point_of, instead):
    """Return the metric of a whole clean run with an activation of one head replaced."""
    clean, mask, roles = contrast.clean, contrast.mask, contrast.roles
    real = torch.ones_like(clean).bool() if mask is None else mask.bool()
    point, head = hook_point(model, row.name, point_of), head_of(row.name)

    def edit(value, hook):
        value = value.clone()
        for prompt, pos in places_of(row.position, real, roles).nonzero().tolist():
            index = (prompt, head, pos) if point_of == "pattern" else (prompt, pos, head)
            value[index] = instead(point, prompt, pos, head)
        return value

    with torch.no_grad():
        hooks = [(point, edit)]
        logits = model.run_with_hooks(clean, fwd_hooks=hooks, attention_mask=mask)
    return difference(logits, mask)


@pytest.mark.parametrize(
    ("to", "side"),
    [
        *((to, "none") for to in ("zero", "bias", "mean of others", "resample")),
        *((to, "right") for to in ("mean", "resample", "resample others")),
    ],
)
def test_ablations(to, side):
    model, contrast = made("gpt2"), PAIRS[side]
    clean, mask, (kind, _, of_others) = contrast.clean, contrast.mask, to.partition(" ")
    positions = [2, 5] if side == "none" else "each"  # by role
    how = {"direction": kind, "sites": p.Sites(NEURONS if kind == "bias" else SITES, positions)}
    others, real = clean, torch.ones_like(clean).bool() if mask is None else mask.bool()
    if of_others:
        others = tokens(9, batch=BATCH if kind == "resample" else 5)
        how["direction"], real = p.Ablation(kind, others), torch.ones_like(others).bool()
    elif to == "resample" and side == "right":
        with pytest.raises(InputError, match="from the padding"):
            sweep(model, contrast, **how)
        return
    # A single run is the same: without corrupted prompts, the metric is that of the clean run.
    single = replace(contrast, corrupted=None)
    source = cached(model, others, None if of_others else mask)

    def instead(point, prompt, pos, head):
        if kind == "mean":
            return source[point][:, :, head][real].mean(dim=0)
        if kind == "resample":
            row = prompt if of_others else (prompt + 1) % BATCH
            return source[point][row, pos, head]
        return torch.tensor([0.0, 1.0]) if to == "bias" else 0.0  # attend to the bias token only

    frame, of_one_run = (sweep(model, x, **how) for x in (contrast, single))
    np.testing.assert_allclose(of_one_run["value"], frame["value"], rtol=0, atol=EXACT)
    with torch.no_grad():  # its score is the share of the metric that is left
        whole = difference(model(clean, attention_mask=mask), mask)
    np.testing.assert_allclose(of_one_run["score"], frame["value"] / whole, rtol=1e-9)
    assert (frame["position"].unique().tolist() == list(ROLES)) == (side == "right")
    point_of = "pattern" if to == "bias" else "z"
    expected = [ablated(model, row, contrast, point_of, instead) for row in frame.itertuples()]
    np.testing.assert_allclose(frame["value"], expected, rtol=0, atol=EXACT)
    assert frame["value"].std() > 1e-4


def test_references_to_resample_from():
    """Each prompt takes the activations of its own row; without a reference, of the next prompt."""
    model, clean, others = made("gpt2"), WHOLE.clean, tokens(9, batch=BATCH)

    def values(reference, rows=(0, 1, 2)):
        contrast = Contrast(clean[[*rows]], WHOLE.corrupted[[*rows]], METRIC)
        direction = p.Ablation("resample", reference)
        return sweep(model, contrast, p.Sites(SITES, 5), direction=direction)["value"]

    np.testing.assert_allclose(values(clean.roll(-1, 0)), values(None), rtol=0, atol=EXACT)
    with pytest.raises(
        InputError, match=r"reference prompts \[2, 11\]; expected \[3, 11\], one row"
    ):
        values(others[:2])
    with pytest.raises(InputError, match=r"got the same prompt in rows \[1\]"):
        values(torch.cat([others[:1], clean[1:2], others[2:]]))
    with pytest.raises(InputError, match="two prompts or more, or a reference"):
        values(None, rows=[0])


def loss(logits, mask):
    """Return the mean loss of the clean prompts' tokens, one by one."""
    return np.mean(
        [
            F.cross_entropy(logits[prompt, pos], WHOLE.clean[prompt, pos + 1]).item()
            for prompt, pos in (mask[:, 1:] & mask[:, :-1]).nonzero().tolist()
        ]
    )


def test_the_loss():
    model, contrast = made("gpt2"), replace(PAIRS["left"], metric=p.loss())
    frame = sweep(model, contrast, p.Sites(["L0N36", "L1H0"], [-5, -4, -3, -2, -1]))
    require_exact(model, frame, contrast, measure=loss)


# Precision


def test_a_less_precise_model_is_close_to_the_same_weights_in_float64():
    dtype = torch.bfloat16
    narrow, wide = bridges.exposed_copy(bridges.boot("gpt2").to(dtype)), made("gpt2")
    logits, others = (wide(x)[:, -1].mean(0) for x in (WHOLE.clean, WHOLE.corrupted))
    most, least = (int(x((logits - others), 0)) for x in (torch.argmax, torch.argmin))
    how = replace(WHOLE, metric=p.logit_diff(most, least)), p.Sites(SITES, "all")
    narrow, expected = (sweep(model, *how)["value"] for model in (narrow, wide))
    # Two logits, each after roundings in two layers.
    bound = 2 * LOGIT_TOLERANCE[dtype] * logits.abs().max().item()
    assert (narrow - expected).abs().max() < bound
    assert expected.std() > 1e-3


# Refusals


def test_refused_before_anything_runs():
    model, calls = made("gpt2"), []
    handle = model.blocks[0].register_forward_pre_hook(of_a_library(lambda *_: calls.append(1)))
    with handle, pytest.raises(InputError, match="whose keys are constant"):
        sweep(model, sites=["L0N5"], part="k")
    assert not calls
    with pytest.raises(InputError, match="got 'bias' for attention heads"):
        sweep(model, direction="bias")


def test_a_model_that_is_not_itself():
    """A forward pass with state or active hooks is refused, and so is dropout."""
    model, calls = bridges.exposed_copy(bridges.boot("llama")), []

    def drift(module, args, output):
        calls.append(1)
        return output * (1 + 1e-6 * len(calls))

    handle = model.original_model.lm_head.register_forward_hook(of_a_library(drift))
    with handle, pytest.raises(UnsupportedModelError, match="run that starts at block"):
        sweep(model)
    hooks = model.hooks([(hook_point(model, "L1N5", "z"), lambda z, hook: z * 2)])
    with hooks, pytest.raises(InputError, match=r"hooks are attached"):
        sweep(model)
    for layer in model.original_model.model.layers:  # dropout without a module
        layer.self_attn.attention_dropout = 0.5
    assert len(sweep(model))
    model.train()
    with pytest.raises(InputError, match="dropout is active"):
        sweep(model)


@pytest.mark.parametrize("state", ["checkpointing", "quantized"])
def test_models_in_training_or_of_integers_are_refused(state):
    """A backward pass would fail in torch's checkpoints, and integers have no gradient."""
    model = bridges.exposed_copy(bridges.boot("llama", torch.float32))
    if state == "checkpointing":
        model.original_model.gradient_checkpointing_enable()
        model.train()
        match = "gradient checkpointing is active; call model.eval"
    else:
        # `quantize_dynamic` puts such layers in the place of linear layers.
        layer = next(x for x in model.original_model.modules() if type(x) is torch.nn.Linear)
        layer.__class__ = type(
            "Linear", (torch.nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules"}
        )
        match = "is quantized, so its weights have no gradient"
    for run in (
        *(p.activation_patch, p.attribution, explain),
        partial(p.path_patch, edges=p.Edges("L0H0", "logits")),
        circuits.attribution_graph,
    ):
        with pytest.raises(InputError, match=match):
            run(model, WHOLE)
