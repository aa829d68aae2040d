"""Tests of what only HookedTransformers have: their options, two blocks per layer, skipped blocks.

All other properties of patching are tested on bridges. The oracle is a whole forward pass with
hooks; where heads share keys and values, of a copy of the model in which they do not.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from common import tokens
from models import CORE, build, written_out
from patched_runs import whole_runs
from path_oracle import PathOracle

from attn_only_lens import Contrast, HeadName, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import UnsupportedModelError

POS = 11
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L1N29", "L2N3", "L0H1", "L1H0", "L2H1"]
LAYOUTS = {"two blocks": convert, "in place": lambda x: expose_neuron_heads(x).model}
EXACT = 1e-10


def pair():
    """Return prompts that differ at 7, and from 3 or 5 on."""
    clean = tokens(1)
    corrupted = clean.clone()
    corrupted[0, 3], corrupted[1, 5] = (clean[0, 3] + 5) % 41, (clean[1, 5] + 7) % 41
    corrupted[:, 7] = (clean[:, 7] + 3) % 41
    return Contrast(clean, corrupted, METRIC)


PAIR = pair()


def sweep(model, sites=SITES, contrast=PAIR, **how):
    return p.activation_patch(model, contrast, sites=sites, **how).to_frame()


EVERY = [(family, "two blocks", "z pattern k") for family in CORE]
EVERY += [(family, "two blocks", "z pattern") for family in ("shortformer", "alibi", "sinks")]
EVERY += [(family, "two blocks", "z k") for family in ("local", "soft_caps", "qk_norm")]
EVERY += [(family, "two blocks", "z") for family in ("bidirectional", "ln_pre", "rotary_adjacent")]
EVERY += [(family, "in place", "z value q") for family in CORE]


@pytest.mark.parametrize(("family", "layout", "parts"), EVERY)
def test_patches_of_every_family(family, layout, parts):
    model, truth = LAYOUTS[layout](build(family)), LAYOUTS[layout](written_out(family))
    for part in parts.split():
        sites = [site for site in SITES if part != "k" or "H" in site]
        frame = sweep(model, sites, part=part)
        rows = frame[frame.position >= 3].sample(5, random_state=3)
        expected = whole_runs(truth, PAIR, rows, part)
        largest = model(PAIR.corrupted).abs().max().item()
        np.testing.assert_allclose(rows["value"], expected, rtol=0, atol=EXACT * largest)
        assert np.std(expected) > 1e-7
        before = frame[frame.position < 3]["score"]  # except in a bidirectional model
        assert (set(before) == {0.0}) != (family == "bidirectional")


@pytest.mark.parametrize(
    ("side", "family"), [("left", "shortformer"), ("left", "alibi"), ("right", "sinks")]
)
def test_padding(side, family):
    model, mask = LAYOUTS["in place"](build(family)), torch.ones_like(PAIR.clean)
    mask[1, slice(0, 3) if side == "left" else slice(POS - 3, None)] = 0
    padded = replace(PAIR, mask=mask)
    for part in ("z", "pattern"):
        rows = sweep(model, contrast=padded, part=part, per_prompt=True)
        rows = rows.sample(7, random_state=3)
        expected = whole_runs(model, padded, rows, part)
        np.testing.assert_allclose(rows["value"], expected, rtol=0, atol=EXACT)
        assert np.std(expected) > 1e-5


# Paths


@pytest.mark.parametrize("family", ["gelu", "parallel", "no_norm", "post_norm"])
def test_paths(family):
    """Families without norms, or with norms that no bridge of the other tests has."""
    source, heads = build(family, scale=0.25), ["L1H0", "L1N5"]
    model, oracle = convert(source), PathOracle(source, PAIR, answers=(7, 8))
    for part, receivers, positions in (("z", heads, 7), ("q", heads, 7), ("z", ["logits"], "all")):
        senders = p.Sites(["L0H1", "L0N3"], positions)
        frame = p.path_patch(model, PAIR, p.Edges(senders, receivers, part)).frame
        assert len(frame) == 2 * len(receivers)
        for row in frame.itertuples():
            to = row.receiver if row.receiver == "logits" else HeadName.parse(row.receiver)
            at = slice(None) if positions == "all" else positions
            expected = oracle.value(HeadName.parse(row.sender), to, row.part, at)
            assert row.value == pytest.approx(expected, rel=0, abs=1e-10)
        assert frame["value"].std() > 1e-5


# Attribution


def test_queries_that_are_normed_together_have_no_closed_form():
    model = LAYOUTS["in place"](build("post_norm"))
    how = {"part": "q", "method": p.Estimate("exact_gate", budget=0)}
    with pytest.raises(UnsupportedModelError, match="changes the z of other heads"):
        p.attribution(model, PAIR, **how)
    p.attribution(model, PAIR, sites="neurons", **how)
