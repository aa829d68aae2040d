"""Tests of circuits that are chosen by their error on held-out prompts."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from attn_only_lens import circuits, explain, load
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search
from attn_only_lens.circuits.held_out import choose, prefixes
from attn_only_lens.circuits.stability import random_halves
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

BY_ROLE = p.Sites(positions="roles")


@dataclass
class Additive:
    """An ablated model in which every site adds a number to the metric of every prompt."""

    adds: np.ndarray  # prompt, site

    def by_prompt(self, rows):
        return np.array([self.adds[:, circuit].sum(axis=1) for circuit in rows])

    @property
    def whole_by_prompt(self):
        return self.adds.sum(axis=1)

    @property
    def nothing_by_prompt(self):
        return np.zeros(len(self.adds))


def chosen_by_loops(proposals, adds, halves, weights, wanted):
    """Return the name of the chosen proposal, and every proposal's errors, prompt by prompt."""
    n_prompts, errors, faithfulness, sizes = len(adds), {}, {}, {}
    for name in [x for x in proposals[0] if all(x in some for some in proposals)]:
        sizes[name] = sum(len(some[name]) for some in proposals) / len(proposals)
        for side in (0, 1):
            missed = scale = kept = whole = 0.0
            for prompt in range(n_prompts):
                values = [
                    sum(adds[prompt, site] for site in some[name])
                    for some, half in zip(proposals, halves, strict=True)
                    if prompt in half[side]
                ]
                if values:
                    span = sum(adds[prompt])
                    missed += weights[prompt] * sum(abs(x - span) for x in values) / len(values)
                    scale += weights[prompt] * abs(span)
                    kept += weights[prompt] * sum(values) / len(values)
                    whole += weights[prompt] * span
            errors[name, side], faithfulness[name, side] = missed / scale, kept / whole
    worst = {
        name: max(
            *(errors[name, i] for i in (0, 1)), *(abs(1 - faithfulness[name, i]) for i in (0, 1))
        )
        for name in sizes
    }
    all_sites = adds.shape[1]  # they have no error, up to rounding
    enough = [x for x in sizes if worst[x] <= 1 - wanted or sizes[x] == all_sites]
    return min(enough, key=lambda name: (sizes[name], worst[name])), errors


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_proposal_that_holds_is_chosen(wanted, seed):
    n_prompts, n_sites = 7, 23
    generator = np.random.default_rng(seed)
    common = generator.normal(size=n_sites) ** 3 + 0.5
    adds = common + 0.3 * generator.normal(size=(n_prompts, n_sites))
    halves = [*random_halves(n_prompts, 3, seed)]
    weights = generator.uniform(0.5, 1.5, n_prompts)
    by_half = {
        tuple(half): {
            ("magnitude", size): np.argsort(-abs(adds[half]).mean(axis=0))[:size]
            for size in (2, 3, 5, 11, 17, n_sites)
        }
        | {("signed", size): np.argsort(-adds[half].mean(axis=0))[:size] for size in (3, 7, 11, 13)}
        for half, _ in halves
    }
    by_half[tuple(halves[0][0])]["search", 0] = np.array([1])  # not every half has this proposal
    name, rows, by_size = choose(
        lambda half, ablated: by_half[tuple(half)],
        lambda half: Additive(adds[half]),
        *(halves, weights, wanted),
    )
    proposals = [by_half[tuple(half)] for half, _ in halves]
    expected, errors = chosen_by_loops(proposals, adds, halves, weights, wanted)
    assert name == expected
    assert all((row == some[name]).all() for row, some in zip(rows, proposals, strict=True))
    assert "search" not in set(by_size["order"])
    for row in by_size.itertuples():
        key = row.order, round(row.n_sites)
        assert (row.own_error, row.error) == pytest.approx((errors[key, 0], errors[key, 1]))


def test_prefixes_are_of_four_rankings():
    n_sites, n_prompts = 101, 3
    effects = np.random.default_rng(0).normal(size=(n_sites, n_prompts))
    weights = np.array([0.5, 0.3, 0.2])
    asked = []

    def worth(circuit):
        asked.append(len(circuit))
        return np.arange(n_sites) * (1.0 + len(circuit))

    ablated = SimpleNamespace(weights=weights, n_sites=n_sites, worth=worth)
    circuits_of = prefixes(ablated, effects, slopes=True)
    size = [sum(w * abs(x) for w, x in zip(weights, row, strict=True)) for row in effects]
    mean = [sum(w * x for w, x in zip(weights, row, strict=True)) for row in effects]
    scores = {
        "magnitude": size,
        "signed": mean,
        "tilted": [x + y / 2 for x, y in zip(size, mean, strict=True)],
        "worth": range(n_sites),
    }
    for name, score in scores.items():
        ranked = sorted(range(n_sites), key=lambda site, score=score: -score[site])
        sizes = [k for step, k in circuits_of if step == name]
        assert sizes == [8, 11, 16, 23, 32, 45, 64, 91, n_sites]
        assert all(circuits_of[name, k].tolist() == ranked[:k] for k in sizes)
    assert asked == [0, 64]
    assert "worth" not in {step for step, _ in prefixes(ablated, effects, slopes=False)}


@pytest.fixture(scope="module")
def held_out(model, task):
    search = Search(objective="held_out", resamples=2)
    return circuits.discover(model, task, sites=BY_ROLE, faithfulness=0.8, search=search)


def test_errors_by_size_are_those_that_evaluate_measures(model, task, held_out):
    estimate = p.Estimate("secant", budget=0)
    ranking = p.attribution(
        *(model, task), sites=BY_ROLE, direction="noise", method=estimate, per_prompt=True
    )
    effects = ranking.effect.to_numpy().reshape(-1, len(task))
    sites = ranking.frame.iloc[:: len(task)].reset_index(drop=True)
    by_hand = circuits.discover(model, task[:2], sites=BY_ROLE)
    missed = scale = 0.0
    for half, others in random_halves(len(task), 2, seed=0):
        order = np.argsort(-abs(effects[:, half]).mean(axis=1), kind="stable")
        other = replace(by_hand, frame=sites.iloc[order[:64]], n_sites=len(sites))
        for prompt in others.tolist():
            kept = circuits.evaluate(model, other, task[prompt : prompt + 1])
            span = abs(kept.whole - kept.nothing)
            missed, scale = missed + kept.error * span, scale + span
    by_size = held_out.stability.by_size.set_index(["order", "n_sites"])
    assert by_size.loc[("magnitude", 64.0), "error"] == pytest.approx(missed / scale, rel=1e-4)


def test_the_circuit_is_the_chosen_proposal_for_all_prompts(model, task, held_out):
    by_size = held_out.stability.by_size
    (tried,) = held_out.tried.tail(1).to_dict("records")
    row = by_size.query("order == @tried['step'] and n_sites == @tried['n_sites']").iloc[0]
    assert len(held_out) == tried["n_sites"]
    assert max(row["error"], row["own_error"]) <= 0.2
    smaller = by_size[by_size["n_sites"] < tried["n_sites"]]
    assert (smaller[["error", "own_error"]].max(axis=1) > 0.2).all()
    assert circuits.evaluate(model, held_out, task).error == pytest.approx(tried["error"], abs=1e-4)
    resamples = held_out.stability.resamples
    assert resamples["n_sites"].tolist() == [tried["n_sites"]] * 2
    assert held_out.stability.held_out["mean"]["faithfulness"] == pytest.approx(
        row["faithfulness"], abs=1e-5
    )


def test_explanations_have_such_circuits_and_files_keep_them(model, task, held_out, tmp_path):
    search = Search(objective="held_out", resamples=2)
    why = explain(model, task, faithfulness=0.8, search=search, strong=1.0)
    assert why.circuit.sites == held_out.sites
    assert "on held-out halves of them" in why.title
    held_out.save(tmp_path / "circuit.json")
    again = load(tmp_path / "circuit.json").stability.by_size
    pd.testing.assert_frame_equal(again, held_out.stability.by_size)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "got objective='held_out' without resamples; expected resamples=4"),
        ({"resamples": 4, "order": "signed"}, "got objective='held_out' and order='signed'"),
    ],
)
def test_searches_without_halves_or_with_an_order_are_refused(options, reason):
    with pytest.raises(InputError, match=reason):
        Search(objective="held_out", **options)


def test_a_circuit_of_all_sites_always_holds(model, task):
    search = Search(objective="held_out", resamples=2, n_random=0)
    few = ["L3H3", "L0N30", "L1N5"]
    sites = p.Sites(few, positions="roles")
    circuit = circuits.discover(model, task, sites=sites, faithfulness=1.0, search=search)
    assert len(circuit) == circuit.n_sites > 0
    assert circuit.faithfulness == pytest.approx(1.0, abs=1e-5)


HALVES = [(np.array([0, 1]), np.array([2, 3])), (np.array([2, 3]), np.array([0, 1]))]


@pytest.mark.parametrize(
    ("adds", "proposals", "expected"),
    [
        pytest.param(  # the first keeps 1 on held-out prompts, but 2 and 0 on its own
            [[1, 1, -1, 0, 0], [1, -1, 1, 0, 0], [1, 0, 0, 1, -1], [1, 0, 0, -1, 1]],
            [
                {("signed", 2): [0, 1], ("signed", 3): [0, 1, 2], ("signed", 5): range(5)},
                {("signed", 2): [0, 3], ("signed", 3): [0, 3, 4], ("signed", 5): range(5)},
            ],
            ("signed", 3),
            id="too much and too little on its own prompts",
        ),
        pytest.param(
            [[0.85, 0.1, 0.05]] * 4,
            [{("magnitude", 2): [0, 2], ("tilted", 2): [0, 1], ("tilted", 3): range(3)}] * 2,
            ("tilted", 2),
            id="two of one size",
        ),
        pytest.param(  # the first has an error of .05, but keeps nothing of the mean
            [[0.9, 0.1], [-0.9, 0.0]] * 2,
            [{("signed", 1): [0], ("signed", 2): [0, 1]}] * 2,
            ("signed", 2),
            id="prompts in opposite directions",
        ),
    ],
)
def test_a_chosen_proposal_is_good_in_every_way(adds, proposals, expected):
    adds = np.array(adds, dtype=float)
    by_half = {
        tuple(half): {name: np.array(rows) for name, rows in some.items()}
        for (half, _), some in zip(HALVES, proposals, strict=True)
    }
    name, _, _ = choose(
        lambda half, ablated: by_half[tuple(half)],
        lambda half: Additive(adds[half]),
        *(HALVES, np.full(4, 0.25), 0.8),
    )
    assert name == expected
