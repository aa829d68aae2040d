"""Tests of sweeps against whole forward passes with hooks, site by site, on all kinds of models."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from common import tokens
from models import CORE, FAMILIES, STRUCTURES, build, written_out
from patched_runs import cached, logit_diff, mask_at, patched_logits
from transformer_lens import patching as tl_patching

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.tolerances import LOGIT_TOLERANCE

BATCH, POS = 2, 11
RIGHT, WRONG = 7, 8
METRIC = p.logit_diff(correct=RIGHT, wrong=WRONG)
SITES = ["L0N36", "L1N5", "L1N29", "L2N3", "L0H1", "L1H0", "L2H1"]
PARTS = ["z", "pattern", "value", "q", "k"]
LAYOUTS = pytest.mark.parametrize("layout", ["two blocks", "in place"])
EXACT = 1e-10


def pair():
    """Return clean and corrupted prompts that differ at 7, and from 3 or 5 on."""
    clean = tokens(1)
    corrupted = clean.clone()
    corrupted[0, 3], corrupted[1, 5] = (clean[0, 3] + 5) % 41, (clean[1, 5] + 7) % 41
    corrupted[:, 7] = (clean[:, 7] + 3) % 41
    return clean, corrupted


def made(family, layout, dtype=torch.float64, build=build, **changes):
    model = build(family, dtype, **changes)
    if layout == "two blocks":
        return convert(model)
    expose_neuron_heads(model)
    return model


def value(logits):
    return logit_diff(logits, torch.tensor([POS - 1] * BATCH), RIGHT, WRONG)


def errors(model, part, sites=SITES, n=9, truth=None):
    """Return the largest error over some sites, relative to the logits, and the values' spread.

    The oracle runs `truth`, or else the same model, with hooks.
    """
    truth = truth or model
    clean, corrupted = pair()
    sweep = p.activation_patch(model, clean, corrupted, METRIC, sites=sites, part=part, progress=0)
    source = cached(truth, clean)
    rows = sweep.to_frame()
    assert len(rows) == len(sites) * POS
    # Take rows at position 3 and later, where the prompts differ, and one row before it.
    rows = pd.concat([rows[rows.position >= 3].sample(n, random_state=3), rows.iloc[:1]])
    worst = 0.0
    for row in rows.itertuples():
        places = mask_at(BATCH, POS, row.position)
        logits = patched_logits(truth, corrupted, source, row.name, part, places)
        worst = max(worst, abs(value(logits) - row.value) / logits.abs().max().item())
    return worst, rows.value.std()


# The layout matters for neurons, and most families differ in their attention only. A part other
# than z is therefore not tested on every combination.
EVERY = [
    (family, layout, part)
    for family, part in itertools.product(FAMILIES, PARTS)
    for layout in ("two blocks", "in place")
    if part == "z" or family in CORE or (layout == "two blocks" and family in STRUCTURES)
]


@pytest.mark.parametrize(("family", "layout", "part"), EVERY)
def test_every_family(family, layout, part):
    sites = [site for site in SITES if part != "k" or "H" in site]
    model, truth = made(family, layout), made(family, layout, build=written_out)
    worst, spread = errors(model, part, sites, truth=truth)
    assert worst <= EXACT
    assert spread > 1e-5


@pytest.mark.parametrize("family", CORE)
@LAYOUTS
def test_float32(family, layout):
    worst, _ = errors(made(family, layout, torch.float32), "z")
    assert worst <= LOGIT_TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["attention", "neuron"])
@pytest.mark.parametrize("part", PARTS[:4])
def test_generic_activation_patch(part, kind):
    """A sweep agrees with TransformerLens' generic_activation_patch on a converted model."""
    model = made("gelu", "two blocks")
    clean, corrupted = pair()
    heads, block = ([0, 1], 2) if kind == "attention" else ([0, 17, 36], 3)
    positions = [2, 3, 8, 10]
    index = pd.DataFrame(
        [(block, pos, head) for pos in positions for head in heads],
        columns=["layer", "pos", "head_index"],
    )

    def of_pattern(corrupted_pattern, index, clean_pattern):
        _, pos, head = index
        corrupted_pattern[:, head, pos] = clean_pattern[:, head, pos]
        return corrupted_pattern

    setter = of_pattern if part == "pattern" else tl_patching.layer_pos_head_vector_patch_setter
    expected = []  # TransformerLens' table of results is in float32

    def metric(logits):
        expected.append(value(logits))
        return logits.new_tensor(0.0)

    with torch.no_grad():
        tl_patching.generic_activation_patch(
            model,
            corrupted,
            cached(model, clean),
            metric,
            setter,
            {"value": "v"}.get(part, part),
            index_df=index,
        )
    letter = "H" if kind == "attention" else "N"
    names = [f"L1{letter}{head}" for head in heads]
    sweep = p.activation_patch(
        model,
        clean,
        corrupted,
        METRIC,
        sites=names,
        part=part,
        positions=positions,
        progress=False,
    )
    frame = sweep.to_frame()
    assert frame["name"].tolist() == names * len(positions)
    assert frame["position"].tolist() == index["pos"].tolist()
    np.testing.assert_allclose(frame["value"], expected, rtol=0, atol=EXACT)
    assert len({round(value, 6) for value in expected}) > len(expected) // 2


@LAYOUTS
@pytest.mark.parametrize("part", ["z", "pattern", "value"])
def test_heads_that_write_nothing_can_be_patched(layout, part):
    """Newly grown heads have zero output weights: their patches have no effect."""
    model = build("gelu")
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    if layout == "two blocks":
        model = convert(model)
    else:
        expose_neuron_heads(model)
    sweep = p.activation_patch(
        model, *pair(), METRIC, sites=["L1H0", "L2H1"], part=part, positions="all", progress=0
    )
    effect = sweep.effect.to_numpy()
    assert abs(effect[0]) < 1e-12  # rounding, because the block runs two variants in one batch
    assert abs(effect[1]) > 1e-4
