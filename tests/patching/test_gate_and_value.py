"""Tests that pattern, value and interaction add up and agree with three sweeps and two caches."""

import numpy as np
import pytest
import torch
from common import tokens
from models import build
from patched_runs import cached, hook_point, logit_diff, mask_at, patched_logits

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

POS = 11
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L1N5", "L1N29", "L2N3"]
WRITES = ["write_pattern", "write_value", "write_interaction"]
EFFECTS = ["effect_pattern", "effect_value", "effect_interaction"]


def pair():
    clean = tokens(1)
    corrupted = clean.clone()
    corrupted[:, 4], corrupted[:, 7] = (clean[:, 4] + 5) % 41, (clean[:, 7] + 3) % 41
    return clean, corrupted


def made(family, layout):
    model = build(family)
    if layout == "two blocks":
        return convert(model)
    expose_neuron_heads(model)
    return model


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize(("family", "layout"), [("gelu", "two blocks"), ("llama", "in place")])
def test_against_whole_runs_and_caches(family, layout, direction):
    model = made(family, layout)
    clean, corrupted = pair()
    positions = [4, 5, 9]
    frame = p.gate_and_value(
        model,
        clean,
        corrupted,
        METRIC,
        sites=SITES,
        positions=positions,
        direction=direction,
        progress=False,
    )
    # Rows are ordered by layer and then by position, as in sweeps of neurons.
    names = [name for layer in (SITES[:1], SITES[1:3], SITES[3:]) for name in layer * 3]
    assert frame["name"].tolist() == names
    target, source_prompts = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    before, source = cached(model, target), cached(model, source_prompts)
    last = torch.tensor([POS - 1, POS - 1])

    def value(logits):
        return logit_diff(logits, last, 7, 8)

    with torch.no_grad():
        baseline, to = value(model(target)), value(model(source_prompts))
    span = to - baseline if direction == "denoise" else baseline - to
    for row in frame.itertuples():
        index = int(row.name.split("N")[1])
        one, two = (
            {
                "w": c[hook_point(model, row.name, "pattern")][:, index, row.position, 0],
                "v": c[hook_point(model, row.name, "value")][:, row.position, index, 0],
                "z": c[hook_point(model, row.name, "z")][:, row.position, index, 0],
            }
            for c in (before, source)
        )
        close = {"rel": 1e-9, "abs": 1e-10}
        by_pattern, by_value = (two["w"] - one["w"]) * one["v"], one["w"] * (two["v"] - one["v"])
        assert row.write_pattern == pytest.approx(by_pattern.mean().item(), **close)
        assert row.write_value == pytest.approx(by_value.mean().item(), **close)
        assert row.write == pytest.approx((two["z"] - one["z"]).mean().item(), **close)
        for part, got in (
            ("pattern", row.effect_pattern),
            ("value", row.effect_value),
            ("z", row.effect),
        ):
            places = mask_at(2, POS, row.position)
            logits = patched_logits(model, target, source, row.name, part, places)
            assert got == pytest.approx((value(logits) - baseline) / span, rel=1e-7, abs=1e-9)
    for parts, whole in ((WRITES, "write"), (EFFECTS, "effect")):
        np.testing.assert_allclose(frame[parts].sum(axis=1), frame[whole], rtol=0, atol=1e-12)
        # Control: without the interaction, the parts do not add up.
        assert (frame[parts[:2]].sum(axis=1) - frame[whole]).abs().max() > 1e-4


@pytest.mark.parametrize("positions", ["each", "all", -1])
def test_against_three_sweeps(positions):
    model = convert(build("gelu"), gate=Bilinear(4))
    sites = ["L0N36", "L1N5.2", "L1N5", "L2N3"]
    mask = torch.ones(2, POS, dtype=torch.long)
    mask[1, 9:] = 0
    how = {"sites": sites, "positions": positions, "mask": mask, "progress": False}
    frame = p.gate_and_value(model, *pair(), METRIC, **how)
    sweeps = {
        part: p.activation_patch(model, *pair(), METRIC, part=part, **how)
        for part in ("pattern", "value", "z")
    }
    names = {"pattern": "effect_pattern", "value": "effect_value", "z": "effect"}
    for part, sweep in sweeps.items():
        assert frame["name"].tolist() == sweep.frame["name"].tolist()
        assert frame["position"].tolist() == sweep.frame["position"].tolist()
        np.testing.assert_array_equal(frame[names[part]], sweep.effect)
    np.testing.assert_allclose(frame[WRITES].sum(axis=1), frame["write"], rtol=0, atol=1e-12)
    assert (frame["write"] != 0).any()


def test_every_neuron_by_default_and_going_on(tmp_path):
    model = made("silu", "two blocks")
    how = {"positions": 4, "progress": False}
    frame = p.gate_and_value(model, *pair(), METRIC, **how)
    assert len(frame) == 3 * 37
    kept = p.gate_and_value(model, *pair(), METRIC, resume=tmp_path, **how)
    again = p.gate_and_value(model, *pair(), METRIC, resume=tmp_path, **how)
    for copy_of in (kept, again):
        np.testing.assert_array_equal(copy_of["effect_pattern"], frame["effect_pattern"])
        assert copy_of["name"].tolist() == frame["name"].tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pattern", "value", "z"]


def test_refused():
    model = made("gelu", "two blocks")
    with pytest.raises(InputError, match="expected neuron-heads") as caught:
        p.gate_and_value(model, *pair(), METRIC, sites=["L0H1", "L0N3"], direction="zero")
    assert len(caught.value.reasons) == 2
