"""Tests of parts, positions, directions and metrics of sweeps, each against whole runs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import of_a_library, tokens
from models import build
from patched_runs import cached, heads_of, hook_point, logit_diff, mask_at, patched_logits

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

BATCH, POS = 3, 11
SITES = ["L0N36", "L1N5", "L2N3", "L0H1", "L2H0"]
METRIC = p.logit_diff(correct=[7, 9, 11], wrong=8)
EXACT = 1e-10
LAST = torch.tensor([POS - 1] * BATCH)
MASKS = {"none": [0, 0, 0], "right": [0, 3, 5], "left": [0, 2, 4]}


def pair(side="none"):
    """Return three pairs that differ in different places, padded on one side, and their mask."""
    clean = tokens(1, batch=BATCH)
    corrupted = clean.clone()
    for prompt, positions in enumerate(([1, 5], [4], [5, 4])):
        for pos in positions:
            corrupted[prompt, pos] = (clean[prompt, pos] + 5 + pos) % 41
    if side == "none":
        return clean, corrupted, None
    mask = torch.ones_like(clean)
    for prompt, n in enumerate(MASKS[side]):
        mask[prompt, slice(0, n) if side == "left" else slice(POS - n, None)] = 0
    return clean, corrupted, mask


def last_of(mask):
    if mask is None:
        return LAST
    return torch.tensor([max(i for i in range(POS) if row[i]) for row in mask])


def value(logits, mask=None):
    return logit_diff(logits, last_of(mask), torch.tensor([7, 9, 11]), torch.tensor(8))


def made(family="gelu", layout="two blocks", **gates):
    model = build(family)
    if layout == "two blocks":
        return convert(model, **gates)
    expose_neuron_heads(model, **gates)
    return model


def sweep(model, side="none", metric=METRIC, sites=SITES, **how):
    clean, corrupted, mask = pair(side)
    how = {"progress": False, "mask": mask} | how
    return p.activation_patch(model, clean, corrupted, metric, sites=sites, **how).to_frame()


def where_of(label, mask):
    """Return the mask of the positions that a label stands for."""
    real = torch.ones(BATCH, POS, dtype=torch.bool) if mask is None else mask.bool()
    if label == "all":
        return real
    if label >= 0:
        return real & mask_at(BATCH, POS, label)
    chosen = torch.zeros_like(real)
    for prompt in range(BATCH):
        chosen[prompt, [i for i in range(POS) if real[prompt, i]][label]] = True
    return chosen


def compare(model, frame, side, part, measure=value, *, noise=False, per_neuron=1, n=None):
    """Compare rows of a frame with whole runs, and check that their values differ."""
    clean, corrupted, mask = pair(side)
    target, source_prompts = (clean, corrupted) if noise else (corrupted, clean)
    source = cached(model, source_prompts, mask)
    rows = frame if n is None else frame.sample(n, random_state=3)
    for row in rows.itertuples():
        places = where_of(row.position, mask)
        logits = patched_logits(
            model, target, source, row.name, part, places, mask, per_neuron=per_neuron
        )
        assert row.value == pytest.approx(measure(logits, mask), rel=0, abs=EXACT), row
    assert rows.value.std() > 1e-6 * rows.value.abs().mean()


@pytest.mark.parametrize("positions", ["each", "all", -1, [5, 4, -2], [6]])
@pytest.mark.parametrize("side", MASKS)
def test_positions_and_padding(side, positions):
    if positions == [6] and side != "none":
        pytest.skip("the same as the others, with masks")
    model = made("rotary")
    if side != "none" and positions == [5, 4, -2]:
        positions = [4, 5] if side == "left" else [5, 4, -2]
    frame = sweep(model, side, positions=positions)
    compare(model, frame, side, "z", n=min(13, len(frame)))


@pytest.mark.parametrize("family", ["gelu", "shortformer", "alibi", "sinks", "grouped_ungrouped"])
@pytest.mark.parametrize("part", ["z", "pattern", "value", "q"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_every_part(side, part, family):
    model = made(family, "in place")
    compare(model, sweep(model, side, part=part), side, part, n=9)


def test_padding_counts():
    """Control: without the mask, the same tokens give other values."""
    model = made("rotary")
    with_mask = sweep(model, "left")["value"]
    assert (with_mask - sweep(model, "left", mask=None)["value"]).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["z", "pattern", "value", "q"])
def test_noise(part):
    model = made("llama", "in place")
    sites = [site for site in SITES if "N" in site] if part == "value" else SITES
    frame = sweep(model, direction="noise", part=part, sites=sites)
    compare(model, frame, "none", part, noise=True, n=9)
    changed = sweep(model, part=part, sites=sites)
    assert (frame["value"] - changed["value"]).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["z", "pattern", "value", "q"])
@pytest.mark.parametrize("layout", ["two blocks", "in place"])
def test_heads_that_share_a_neuron(layout, part):
    model = made(layout=layout, gate=Bilinear(4))
    sites = ["L0N36", "L0N36.2", "L1N5", "L1N5.0", "L1N5.3", "L2N3", "L1H0"]
    frame = sweep(model, sites=sites, part=part)
    neurons = frame[frame.kind == "neuron"]
    compare(model, neurons, "none", part, per_neuron=4, n=11)
    at_5 = neurons[neurons.position == 5].set_index("name")["value"]
    assert abs(at_5["L1N5"] - at_5["L1N5.3"]) > 1e-6


def ablated(model, name, places, instead, mask=None):
    """Return the logits of a whole clean run with z of one head replaced."""
    point = hook_point(model, name, "z")

    def edit(z, hook):
        z = z.clone()
        for head in heads_of(name):
            for prompt, pos in places.nonzero().tolist():
                z[prompt, pos, head] = instead(point, prompt, pos, head)
        return z

    clean = pair()[0]
    with torch.no_grad():
        return model.run_with_hooks(clean, fwd_hooks=[(point, edit)], attention_mask=mask)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("to", ["zero", "mean", "resample", "bias"])
@pytest.mark.parametrize("side", ["none", "right"])
def test_ablations(to, side, reference):
    model = made("llama")
    clean, _, mask = pair(side)
    uses_reference = to in ("mean", "resample")
    sites = SITES if to != "bias" else [site for site in SITES if "N" in site]
    how = {"direction": to, "sites": sites, "positions": [2, 5]}
    others, real = clean, torch.ones(BATCH, POS).bool() if mask is None else mask.bool()
    if reference:
        others = tokens(9, batch=BATCH if to == "resample" else 5)
        real = torch.ones_like(others).bool()
        if not uses_reference:
            with pytest.raises(InputError, match="expected no reference"):
                sweep(model, side, **how, reference=others)
            return
        how["reference"] = others
    elif to == "resample" and side == "right":
        with pytest.raises(InputError, match="from the padding"):
            sweep(model, side, **how)
        return
    source = cached(model, others, None if reference else mask)

    def instead(point, prompt, pos, head):
        if to == "mean":
            return source[point][:, :, head][real].mean(dim=0)
        if to == "resample":
            row = prompt if reference else (prompt + 1) % BATCH
            return source[point][row, pos, head]
        return 0.0

    frame = sweep(model, side, **how)
    for row in frame.itertuples():
        logits = ablated(model, row.name, where_of(row.position, mask), instead, mask)
        assert row.value == pytest.approx(value(logits, mask), rel=0, abs=EXACT), row
    assert frame["value"].std() > 1e-4


def test_one_prompt_is_resampled_from_a_reference():
    model = made()
    clean, corrupted, _ = (None if tensor is None else tensor[:1] for tensor in pair())
    how = {"sites": SITES, "positions": [5], "direction": "resample", "progress": False}
    metric = p.logit_diff(correct=7, wrong=8)
    with pytest.raises(InputError, match="two prompts or more, or a reference"):
        p.activation_patch(model, clean, corrupted, metric, **how)
    unrelated = tokens(9, batch=1)
    frame = p.activation_patch(model, clean, corrupted, metric, reference=unrelated, **how).frame
    # Patching from the other prompt gives the same values (with other scores).
    noise = how | {"direction": "noise"}
    expected = p.activation_patch(model, clean, unrelated, metric, **noise).frame
    np.testing.assert_allclose(frame["value"], expected["value"], rtol=0, atol=EXACT)
    assert frame["value"].std() > 1e-4


def test_each_prompt_is_resampled_from_its_own_row():
    """The value of a batch is the mean over prompts, each resampled from its own reference row."""
    model, others = made(), tokens(9, batch=BATCH)
    clean, corrupted, _ = pair()
    how = {"sites": SITES, "positions": [5], "direction": "resample", "progress": False}
    metric = p.logit_diff(correct=7, wrong=8)

    def values(rows, reference):
        prompts = clean[rows], corrupted[rows]
        return p.activation_patch(model, *prompts, metric, reference=reference, **how).frame[
            "value"
        ]

    whole = values(range(BATCH), others)
    one_by_one = sum(values([row], others[row : row + 1]) for row in range(BATCH)) / BATCH
    np.testing.assert_allclose(whole, one_by_one, rtol=0, atol=EXACT)
    # Control: other reference rows give other values.
    assert (values(range(BATCH), others.roll(-1, 0)) - whole).abs().max() > 1e-3


def test_references_that_cannot_be_resampled_from():
    model, clean = made(), pair()[0]
    itself = tokens(9, batch=BATCH)
    itself[1] = clean[1]
    for reference, reason in (
        (
            tokens(9, batch=2),
            r"got reference prompts \[2, 11\]; expected \[3, 11\], one row for each",
        ),
        (tokens(9, batch=1), r"got reference prompts \[1, 11\]"),
        (tokens(9, batch=BATCH, pos=7), r"got reference prompts \[3, 7\]"),
        (itself, r"got the same prompt in rows \[1\]"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            sweep(model, direction="resample", reference=reference)
        assert len(caught.value.reasons) == 1
    # Rolled clean prompts as reference equal the default, which resamples from the next prompt.
    how = {"direction": "resample", "positions": [5]}
    referenced = sweep(model, reference=clean.roll(-1, 0), **how)
    np.testing.assert_allclose(
        referenced["value"], sweep(model, **how)["value"], rtol=0, atol=EXACT
    )


def test_a_bias_ablation_is_of_the_pattern():
    """The ablation equals a whole run with all attention on the bias token."""
    model = made()
    clean = pair()[0]
    frame = sweep(model, sites=["L1N5", "L2N3"], positions=[2, 5], direction="bias")
    for row in frame.itertuples():
        point = hook_point(model, row.name, "pattern")
        head = heads_of(row.name)[0]

        def edit(pattern, hook, head=head, pos=row.position):
            pattern = pattern.clone()
            pattern[:, head, pos] = torch.tensor([0.0, 1.0])
            return pattern

        with torch.no_grad():
            logits = model.run_with_hooks(clean, fwd_hooks=[(point, edit)])
        assert row.value == pytest.approx(value(logits), rel=0, abs=EXACT)


def by_hand(name, clean_logits):
    """Return a metric, computed from the logits with torch."""

    def probability(logits, mask):
        return F.softmax(logits[torch.arange(BATCH), last_of(mask)], -1)[:, 7].mean().item()

    def log_probability(logits, mask):
        return F.log_softmax(logits[torch.arange(BATCH), last_of(mask)], -1)[:, 7].mean().item()

    def kl(logits, mask):
        rows = torch.arange(BATCH)
        logs, log_probs = (x[rows, last_of(mask)].log_softmax(-1) for x in (logits, clean_logits))
        return F.kl_div(logs, log_probs, log_target=True, reduction="batchmean").item()

    def loss(logits, mask):
        clean, total = pair()[0], []
        for prompt in range(BATCH):
            for pos in range(POS - 1):
                if mask is None or (mask[prompt, pos] and mask[prompt, pos + 1]):
                    one = F.cross_entropy(logits[prompt, pos], clean[prompt, pos + 1])
                    total.append(one.item())
        return float(np.mean(total))

    def custom(logits, mask):
        last = last_of(mask)
        rows = [logits[i, last[i] - 4 : last[i] + 1, 2:5] for i in range(BATCH)]
        return torch.stack(rows).square().mean().item()

    return locals()[name]


METRICS = {
    "probability": p.probability(7),
    "log_probability": p.log_probability(7),
    "kl": p.kl(),
    "loss": p.loss(),
    "custom": lambda logits: logits[:, -5:, 2:5].square().mean(),
}


@pytest.mark.parametrize("family", ["soft_caps", "final_rms"])
@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name, side, family):
    model = made(family)
    clean, _, mask = pair(side)
    with torch.no_grad():
        clean_logits = model(clean, attention_mask=mask)
    frame = sweep(model, side, metric=METRICS[name])
    compare(model, frame, side, "z", by_hand(name, clean_logits), n=9)


@pytest.mark.parametrize("layout", ["two blocks", "in place"])
def test_what_comes_before_a_patch_is_the_same_to_the_bit(layout):
    """Logits before the patched position are equal to the bit, whatever is patched later."""
    model = made(layout=layout)
    kept = []

    def seen(logits):
        kept.append(logits.clone())
        return logits[0, 4, 6]

    frame = sweep(model, metric=seen, sites=["L0N36", "L2N3"], positions=[4, 5], batch_size=1)
    corrupted_logits, patched = kept[3], kept[-4:]  # the metric is evaluated twice beforehand
    frame = frame.sort_values(["position", "layer"])  # the order in which the patches run
    for row, logits in zip(frame.itertuples(), patched, strict=True):
        same = logits == corrupted_logits
        assert same[:, : row.position].all()
        assert not same[:, row.position].all()
    later = frame[frame.position == 5]
    assert set(later["score"]) == {0.0}
    assert not set(frame[frame.position == 4]["score"]) & {0.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The sweep is close to the same sweep in float32, up to half precision's rounding."""
    narrow, wide = convert(build("gelu", dtype, scale=0.2)), convert(build("gelu", scale=0.2))
    scores = [sweep(model, positions="all")["value"] for model in (narrow, wide)]
    assert (scores[0] - scores[1]).abs().max() < 0.1
    assert scores[1].std() > 0.01


def test_refused_before_anything_runs():
    model = made()
    calls = []
    handle = model.blocks[0].register_forward_pre_hook(of_a_library(lambda *_: calls.append(1)))
    for how, reason in (
        ({"part": "k"}, "got part='k'"),
        ({"direction": "sideways"}, "got direction='sideways'"),
        ({"direction": "zero", "part": "q"}, "expected part='z'"),
        ({"positions": [3, 3]}, "which are the same"),
        ({"sites": ["L0N37"]}, "neurons 0 to 36"),
        ({"batch_size": 0}, "got batch_size=0"),
        ({"batch_size": 2.0}, "got batch_size=2.0"),
    ):
        with pytest.raises(InputError, match=reason):
            sweep(model, **how)
    assert not calls
    handle.remove()
    with pytest.raises(InputError, match="got 'bias' for attention heads"):
        sweep(model, direction="bias")
    clean, corrupted, _ = pair()
    with pytest.raises(InputError, match="give two prompts or more"):
        p.activation_patch(model, clean[:1], corrupted[:1], p.kl(), direction="resample")


def test_models_that_are_not_themselves():
    model = made()
    hooks = model.hooks([("blocks.2.hook_resid_pre", lambda x, hook: x * 2)])
    with hooks, pytest.raises(InputError, match=r"hooks are attached .*hook_resid_pre"):
        sweep(model)
    assert len(sweep(model))
    model.blocks[1].drop = torch.nn.Dropout(0.1)
    model.train()
    with pytest.raises(InputError, match="dropout is active"):
        sweep(model)
    model.eval()
    assert len(sweep(model))
