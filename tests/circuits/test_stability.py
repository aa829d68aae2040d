"""Tests of circuits from random halves of the prompts: inclusion, held-out prompts and transfer."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attn_only_lens import Contrast, circuits, tasks
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search
from attn_only_lens.circuits.stability import random_halves
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

RESAMPLES = 4  # of the fixture `circuit`


def test_halves_are_disjoint_and_all_of_a_size():
    for n in (8, 11):
        halves = list(random_halves(n, 5, seed=0))
        assert len(halves) == 5
        for half, rest in halves:
            assert len(half) == len(rest) == n // 2
            assert not set(half) & set(rest)
        assert all((a == d).all() for (a, _), (_, d) in [halves[:2], halves[2:4]])
        assert len({tuple(half) for half, _ in halves}) > 2


def test_the_circuit_itself_does_not_change(model, task, circuit):
    alone = circuits.discover(model, task, sites=p.Sites(positions="roles"))
    pd.testing.assert_frame_equal(alone.frame, circuit.frame[[*alone.frame]], rtol=1e-4)
    shares = circuit.stability.sites.set_index(["name", "position"])["inclusion"]
    for _, row in circuit.frame.iterrows():
        assert row["inclusion"] == shares.get((row["name"], row["position"]), 0.0)
        # Four circuits count as 2 + 2 / 8 independent ones; ends: (share - p)² = z² p(1 - p) / n.
        share, z2, n = row["inclusion"], 1.6448536**2, 2.25
        low, high = sorted(np.roots([1 + z2 / n, -2 * share - z2 / n, share**2]).clip(0, 1))
        got = row["inclusion_low"], row["inclusion_high"]
        assert got == pytest.approx((low, high), abs=1e-6)
        assert (row["class"] == "noise") == (row["inclusion"] <= 0.1)
    with pytest.raises(InputError, match="resamples=20"):
        alone.core()


def test_sites_have_their_inclusion_and_the_core_is_what_nearly_all_include(model, task, circuit):
    sites = circuit.to_frame()
    assert (sites["inclusion"] * RESAMPLES % 1 < 1e-9).all()
    assert ((sites["class"] == "core") == (sites["inclusion"] >= 0.9)).all()
    stability, core = circuit.stability, circuit.core()
    assert stability.n_union == len(sites) >= stability.n_core == len(core) > 5
    sizes = stability.resamples["n_sites"]
    assert sizes.sum() == pytest.approx(RESAMPLES * sites["inclusion"].sum())
    measured = circuits.evaluate(model, core, task)
    assert core.faithfulness == pytest.approx(measured.faithfulness, abs=1e-5)
    assert core.completeness == pytest.approx(measured.completeness, abs=1e-5)


def test_circuits_transfer_as_evaluate_says(model, task, circuit):
    relative = tasks.agreement(model.tokenizer, 5, structure="relative", seed=7)
    matrix = circuits.transfer(model, {"relative": circuit}, {"same": task, "other": relative})
    expected = [circuits.evaluate(model, circuit, one).faithfulness for one in (task, relative)]
    assert matrix.loc["relative"].tolist() == pytest.approx(expected)


def test_what_cannot_be_evaluated_is_refused(model, task, circuit):
    twice = replace(circuit, frame=pd.concat([circuit.frame, circuit.frame]))
    for given, contrast, reason in (
        (circuit, replace(task, roles={}), "the contrast lacks roles of the circuit"),
        (twice, task, "some sites are in the circuit twice"),
    ):
        with pytest.raises(InputError, match=reason):
            circuits.evaluate(model, given, contrast)


def test_what_cannot_be_resampled_is_refused(model, task):
    three = Contrast(
        *(task.clean[:3], task.corrupted[:3]),
        p.logit_diff(list(task.answers[:3]), list(task.wrong[:3])),
    )
    custom = replace(task, metric=p.custom(lambda logits: logits.mean()))
    for contrast, reason in (
        (custom, "every custom metric; expected logit_diff"),
        (three, "got 3 prompt pairs"),
    ):
        how = {"sites": p.Sites(positions="all"), "search": Search(resamples=4)}
        with pytest.raises(InputError, match=reason):
            circuits.discover(model, contrast, **how)
