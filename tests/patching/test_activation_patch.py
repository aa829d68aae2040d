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

from attn_only_lens import Bilinear, Contrast, Work, circuits, explain, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record
from attn_only_lens.engine.replay import make_replay
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
CASES = [(name, "plain") for name in (*bridges.CHOSEN, "granite", "openai")]
CASES += [("gpt2", "later"), ("llama", "processed"), ("native", "processed")]


def takes_patterns(name):
    """Under 3.9, the hook points of a native bridge's patterns only look on."""
    point = hook_point(made(name), "L1H0", "pattern")
    edited = made(name).run_with_hooks(WHOLE.clean, fwd_hooks=[(point, lambda x, hook: x + 1)])
    return not torch.equal(edited, made(name)(WHOLE.clean))


@pytest.mark.both_versions
@pytest.mark.parametrize(("name", "state"), CASES)
def test_every_part_of_every_family(name, state):
    model = made(name, state)
    for part in PARTS:
        sites = [site for site in SITES if part != "k" or "H" in site]
        if (part in ("k", "value") and name in SHARED) or (
            part == "pattern" and name.startswith("native") and not takes_patterns(name)
        ):
            sites = [site for site in sites if "N" in site]
        if sites:
            frame = sweep(model, part=part, sites=sites)
            after = frame[frame.position >= 4]
            require_exact(model, after, part=part)
            # Patches of both kinds of heads have an effect, and none before the prompts differ.
            assert after.groupby("kind", observed=True)["value"].std().min() > 1e-7
            assert set(frame[frame.position < 4]["score"]) == {0.0}


@pytest.mark.parametrize("positions", ["each", "all", -1, [-5, -4, -2], [5, 4, -2]])
@pytest.mark.parametrize("side", PADDING)
def test_positions_and_padding(side, positions):
    model, padded, sites = made("gpt2"), PAIRS[side], p.Sites(SITES, positions)
    if side != "none" and positions == [5, 4, -2]:
        with pytest.raises(InputError, match=r"prompt 0 has 11 tokens, and prompt 1 has [89], so"):
            sweep(model, padded, sites)
        return
    by_role = side != "none" and positions == "each"
    for direction in ("denoise", "noise"):
        frame = sweep(model, padded, sites, direction=direction)
        assert (frame["position"].unique().tolist() == list(ROLES)) == by_role
        require_exact(model, frame, padded, n=11, noise=direction == "noise")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "native"])
def test_padding_in_every_part(side, name):
    model, padded = made(name), PAIRS[side]
    if model(padded.clean, attention_mask=padded.mask).isnan().any():
        # The bridge's own logits are nan behind padding on the left.
        with pytest.raises(InputError, match="not finite"):
            sweep(model, padded)
        return
    sites = NEURONS if name == "llama" else SITES
    for part in PARTS[1:4]:
        sites_of_part = NEURONS if (name, part) == ("native", "pattern") else sites
        frame = sweep(model, padded, sites_of_part, part=part, per_prompt=True)
        require_exact(model, frame, padded, n=11, part=part)
        # Control: without the mask, the same tokens give other values.
        without = sweep(model, WHOLE, sites_of_part, part=part, per_prompt=True)
        assert (frame["value"] - without["value"]).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["z", "pattern", "value", "q"])
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


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize(
    "to", ["zero", "bias", "mean", "mean of others", "resample", "resample others"]
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
    assert (frame["position"].unique().tolist() == list(ROLES)) == (side == "right")
    point_of = "pattern" if to == "bias" else "z"
    expected = [ablated(model, row, contrast, point_of, instead) for row in frame.itertuples()]
    np.testing.assert_allclose(frame["value"], expected, rtol=0, atol=EXACT)
    assert frame["value"].std() > 1e-4


def test_references_to_resample_from():
    model, clean, others = made("gpt2"), WHOLE.clean, tokens(9, batch=BATCH)

    def values(rows, reference):
        contrast = Contrast(clean[rows], WHOLE.corrupted[rows], METRIC)
        direction = p.Ablation("resample", reference)
        return sweep(model, contrast, p.Sites(SITES, 5), direction=direction)["value"]

    # Each prompt takes the activations of its own row; without a reference, of the next prompt.
    whole = values([0, 1, 2], others)
    single = sum(values([row], others[[row]]) for row in range(BATCH)) / BATCH
    np.testing.assert_allclose(whole, single, rtol=0, atol=EXACT)
    assert (values([0, 1, 2], others.roll(-1, 0)) - whole).abs().max() > 1e-4
    rolled, default = values([0, 1, 2], clean.roll(-1, 0)), values([0, 1, 2], None)
    np.testing.assert_allclose(rolled, default, rtol=0, atol=EXACT)

    same = others.clone()
    same[1] = clean[1]
    for reference, reason in (
        (others[:2], r"reference prompts \[2, 11\]; expected \[3, 11\], one row for each"),
        (others[:1], r"got reference prompts \[1, 11\]"),
        (others[:, :7], r"got reference prompts \[3, 7\]"),
        (same, r"got the same prompt in rows \[1\]"),
    ):
        with pytest.raises(InputError, match=reason):
            sweep(model, direction=p.Ablation("resample", reference))
    with pytest.raises(InputError, match="two prompts or more, or a reference"):
        values([0], None)
    for kind in ("zero", "bias", "noise"):
        with pytest.raises(InputError, match="expected no reference"):
            sweep(model, sites=NEURONS, direction=p.Ablation(kind, others))


# Metrics


def by_hand(name, clean_logits):
    """Return a metric, computed from the logits with torch."""

    def last(logits, mask):
        ends = [POS - 1] * BATCH if mask is None else mask.cumsum(1).argmax(1)
        return logits[range(BATCH), ends]

    def probability(logits, mask):
        return F.softmax(last(logits, mask), -1)[:, 7].mean().item()

    def log_probability(logits, mask):
        return F.log_softmax(last(logits, mask), -1)[:, 7].mean().item()

    def kl(logits, mask):
        logs, of_clean = (last(x, mask).log_softmax(-1) for x in (logits, clean_logits))
        return F.kl_div(logs, of_clean, log_target=True, reduction="batchmean").item()

    def loss(logits, mask):
        clean, total = WHOLE.clean, []
        for prompt in range(BATCH):
            for pos in range(POS - 1):
                if mask is None or (mask[prompt, pos] and mask[prompt, pos + 1]):
                    one = F.cross_entropy(logits[prompt, pos], clean[prompt, pos + 1])
                    total.append(one.item())
        return float(np.mean(total))

    def custom(logits, mask):
        ends = [POS - 1] * BATCH if mask is None else mask.cumsum(1).argmax(1)
        rows = [logits[i, ends[i] - 4 : ends[i] + 1, 2:5] for i in range(BATCH)]
        return torch.stack(rows).square().mean().item()

    return locals()[name]


METRICS = {
    "probability": p.probability(7),
    "log_probability": p.log_probability(7),
    "kl": p.kl(),
    "loss": p.loss(),
    "custom": lambda logits: logits[:, -5:, 2:5].square().mean(),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("family", "side"), [("gpt2", "right"), ("gpt2", "left"), ("gemma2", "none")]
)
def test_metrics(name, family, side):
    model, contrast = made(family), replace(PAIRS[side], metric=METRICS[name])
    with torch.no_grad():
        measure = by_hand(name, model(contrast.clean, attention_mask=contrast.mask))
    frame = sweep(model, contrast, p.Sites(["L0N36", "L1H0"], [-5, -4, -3, -2, -1]))
    require_exact(model, frame, contrast, measure=measure)


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_less_precise_models_are_close_to_the_same_weights_in_float64(dtype):
    narrow, wide = bridges.exposed_copy(bridges.boot("gpt2").to(dtype)), made("gpt2")
    logits, others = (wide(x)[:, -1].mean(0) for x in (WHOLE.clean, WHOLE.corrupted))
    most, least = (int(x((logits - others), 0)) for x in (torch.argmax, torch.argmin))
    how = replace(WHOLE, metric=p.logit_diff(most, least)), p.Sites(SITES, "all")
    narrow, expected = (sweep(model, *how)["value"] for model in (narrow, wide))
    # Two logits, each after roundings in two layers.
    bound = 2 * LOGIT_TOLERANCE[dtype] * logits.abs().max().item()
    assert (narrow - expected).abs().max() < bound
    assert expected.std() > 1e-3


def test_what_comes_before_a_patch_is_the_same_to_the_bit():
    kept = []

    def seen(logits):
        kept.append(logits.clone())
        return logits[0, 4, 6]

    sites, work = p.Sites(["L0N36", "L1N5"], [4, 5]), Work(batch_size=1)
    frame = sweep(made("gpt2"), replace(WHOLE, metric=seen), sites, work=work)
    corrupted_logits, patched = kept[3], kept[-4:]  # the metric is evaluated twice beforehand
    frame = frame.sort_values(["position", "layer"])  # the order in which the patches run
    for row, logits in zip(frame.itertuples(), patched, strict=True):
        same = logits == corrupted_logits
        assert same[:, : row.position].all()
        assert not same[:, row.position].all()
    assert set(frame[frame.position == 5]["score"]) == {0.0}
    assert 0.0 not in set(frame[frame.position == 4]["score"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "adds"), [("gpt2", True), ("neox", True), ("gemma2", False)])
def test_whether_a_norm_follows_the_mlp_is_seen_in_every_precision(name, adds, dtype):
    """Adding an MLP's output to the stream would skip the norm that follows the MLP in Gemma 2."""
    model = made(name, dtype=dtype)
    bound = bind(METRIC, model, WHOLE.pair(model))
    replay = make_replay(model, record(model, WHOLE.clean, None), bound)
    assert {replay.adds_mlp_output(i, block.mlp) for i, block in enumerate(model.blocks)} == {adds}


# Refusals


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"part": "k"}, "got part='k'"),
        ({"part": "k", "sites": ["L0N5"]}, "whose keys are constant"),
        ({"direction": "sideways"}, "got direction='sideways'"),
        ({"direction": "zero", "part": "q"}, "expected part='z'"),
        ({"direction": "bias"}, "got 'bias' for attention heads"),
        ({"sites": p.Sites(SITES, [3, 3])}, "which are the same"),
        ({"sites": ["L0N37"]}, "neurons 0 to 36"),
        ({"contrast": WHOLE.clean}, r"got a Tensor; expected Contrast\(clean, corrupted, metric\)"),
    ],
)
def test_refused_before_anything_runs(how, words):
    model, calls = made("gpt2"), []
    handle = model.blocks[0].register_forward_pre_hook(of_a_library(lambda *_: calls.append(1)))
    with handle, pytest.raises(InputError, match=words):
        sweep(model, **how)
    assert not calls or how.get("direction") == "bias"


@pytest.mark.both_versions
def test_a_hook_point_that_takes_no_edits_is_refused():
    model = made("native")
    if takes_patterns("native"):
        assert sweep(model, part="pattern", sites=["L1H0"])["value"].std() > 1e-6
        return
    with pytest.raises(UnsupportedModelError, match="the model does not use") as caught:
        sweep(model, part="pattern")
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)
    ]
    assert len(sweep(model, part="q"))


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
    contrast = Contrast(torch.tensor([3, 5, 7]), torch.tensor([3, 11, 7]), METRIC)
    for run in (
        p.activation_patch,
        p.attribution,
        partial(p.path_patch, edges=p.Edges("L0H0", "logits")),
        circuits.discover,
        explain,
        circuits.attribution_graph,
        circuits.path_expansion,
    ):
        with pytest.raises(InputError, match=match):
            run(model, contrast)
    with pytest.raises(InputError, match=match):
        circuits.attribution_graph(model, replace(contrast, corrupted=None))
