"""Tests that pattern, value and interaction add up and agree with whole runs and caches."""

import bridges
import numpy as np
import pytest
import torch
from common import tokens
from patched_runs import cached, difference, hook_point, whole_runs

from attn_only_lens import Bilinear
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
POS = 11
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L1N5", "L1N29"]
WRITES = ["write_pattern", "write_value", "write_interaction"]
EFFECTS = {"pattern": "effect_pattern", "value": "effect_value", "z": "effect"}


def pair():
    clean = tokens(1)
    corrupted = clean.clone()
    corrupted[:, 4], corrupted[:, 7] = (clean[:, 4] + 5) % 41, (clean[:, 7] + 3) % 41
    return clean, corrupted


def split(model, **how):
    how = {"sites": SITES, "progress": False} | how
    return p.gate_and_value(model, *pair(), METRIC, **how)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_against_whole_runs_and_caches(name, direction):
    model, noise = bridges.exposed_copy(bridges.boot(name)), direction == "noise"
    frame = split(model, positions=[4, 5, 10], direction=direction)
    # Rows are ordered by layer and then by position, as in sweeps of neurons.
    assert frame["name"].tolist() == SITES[:1] * 3 + SITES[1:] * 3
    runs = dict(zip(("clean", "corrupted"), pair(), strict=True))
    before, source = (cached(model, runs[x]) for x in sorted(runs, reverse=not noise))
    with torch.no_grad():
        clean, corrupted = (difference(model(run)) for run in pair())
    baseline = clean if noise else corrupted
    for part, column in EFFECTS.items():
        values = np.array(whole_runs(model, (*pair(), None), frame, part, noise=noise))
        expected = (values - baseline) / (clean - corrupted)
        np.testing.assert_allclose(frame[column], expected, rtol=1e-6, atol=1e-9)
        assert np.std(expected) > 1e-7
    for row in frame.itertuples():
        index, close = int(row.name.split("N")[1]), {"rel": 1e-9, "abs": 1e-10}
        one, two = (
            {
                "w": c[hook_point(model, row.name, "pattern")][:, index, row.position, 0],
                "v": c[hook_point(model, row.name, "value")][:, row.position, index, 0],
                "z": c[hook_point(model, row.name, "z")][:, row.position, index, 0],
            }
            for c in (before, source)
        )
        by_pattern, by_value = (two["w"] - one["w"]) * one["v"], one["w"] * (two["v"] - one["v"])
        assert row.write_pattern == pytest.approx(by_pattern.mean().item(), **close)
        assert row.write_value == pytest.approx(by_value.mean().item(), **close)
        assert row.write == pytest.approx((two["z"] - one["z"]).mean().item(), **close)
    for parts, whole in ((WRITES, "write"), ([f"effect{x[5:]}" for x in WRITES], "effect")):
        np.testing.assert_allclose(frame[parts].sum(axis=1), frame[whole], rtol=0, atol=1e-12)
        # Control: without the interaction, the parts do not add up.
        assert (frame[parts[:2]].sum(axis=1) - frame[whole]).abs().max() > 1e-6


@pytest.mark.parametrize("positions", ["each", "all", -1])
def test_against_three_sweeps(positions):
    """With neurons of a bilinear gate, and padding."""
    model, mask = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(4)), torch.ones(2, POS)
    mask[1, 9:] = 0
    how = {"sites": ["L0N36", "L1N22", "L1N147"], "positions": positions, "mask": mask}
    frame = split(model, **how)
    for part, column in EFFECTS.items():
        sweep = p.activation_patch(model, *pair(), METRIC, part=part, progress=False, **how)
        assert frame["name"].tolist() == sweep.frame["name"].tolist()
        assert frame["position"].tolist() == sweep.frame["position"].tolist()
        np.testing.assert_array_equal(frame[column], sweep.effect)
    np.testing.assert_allclose(frame[WRITES].sum(axis=1), frame["write"], rtol=0, atol=1e-12)
    assert (frame["write"] != 0).any()


@pytest.mark.both_versions
def test_every_neuron_by_default_and_going_on(tmp_path):
    model, how = bridges.exposed_copy(bridges.boot("gpt2")), {"sites": p.neuron_heads()}
    how["positions"] = 4
    frame = p.gate_and_value(model, *pair(), METRIC, positions=4, progress=False)
    assert len(frame) == 2 * 37
    for _ in range(2):
        kept = split(model, resume=tmp_path, **how)
        np.testing.assert_array_equal(kept["effect_pattern"], frame["effect_pattern"])
        assert kept["name"].tolist() == frame["name"].tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pattern", "value", "z"]


def test_refused():
    with pytest.raises(InputError, match="expected neuron-heads") as caught:
        split(bridges.exposed_copy(bridges.boot("gpt2")), sites=["L0H1"], direction="zero")
    assert len(caught.value.reasons) == 2
