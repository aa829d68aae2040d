"""Divergences, resamples and overlaps, against sums by hand and scipy."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import spearmanr

from attn_only_lens.comparison.circuits import (
    Overlap,
    Resampling,
    largest,
    overlap_measures,
    select_mass,
)
from attn_only_lens.comparison.statistics import gate_divergence, pattern_divergence


def test_divergences_are_scipys():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, 7, 11, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    p[0, 0], q[0, 0] = torch.eye(11, dtype=torch.float64)[:2]
    found = pattern_divergence(p, q)
    expected = jensenshannon(p.numpy(), q.numpy(), base=2, axis=-1) ** 2
    np.testing.assert_allclose(found, expected, atol=1e-14)
    assert found[0, 0] == 1
    assert pattern_divergence(p, p).max() == 0
    gates = jensenshannon(
        np.stack([p[0], 1 - p[0]], -1), np.stack([q[0], 1 - q[0]], -1), base=2, axis=-1
    )
    np.testing.assert_allclose(gate_divergence(p[0], q[0]), gates**2, atol=1e-14)


def test_a_sink_is_an_outcome():
    """Rows that leave a half to it, and rows that leave nothing."""
    half = torch.tensor([[0.25, 0.25], [0.5, 0.0]], dtype=torch.float64)
    whole = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    three = np.array([[0.25, 0.25, 0.5], [0.5, 0.0, 0.5]])
    expected = jensenshannon(three, np.array([[0.5, 0.5, 0.0]] * 2), base=2, axis=-1) ** 2
    np.testing.assert_allclose(pattern_divergence(half, whole), expected, atol=1e-14)
    low = torch.tensor([[1 / 3, 2 / 3]]).bfloat16()  # which sums to 1 within its rounding only
    assert pattern_divergence(low, low.float().to(torch.bfloat16)).item() == 0


def test_overlap_of_two_circuits():
    first = np.array([5.0, -4.0, 3.0, 2.0, np.nan, 0.0, 1.0])
    second = np.array([1.0, -4.0, 5.0, 0.5, 9.0, 0.0, -2.0])
    one, other = largest(first, 3), largest(second, 3)
    assert (one.tolist(), other.tolist()) == ([0, 1, 2], [1, 2, 4])
    assert largest(np.array([1.0, -2.0, 2.0, -2.0, 1.0]), 2).tolist() == [1, 2]  # of equals
    assert [largest(first, n).tolist() for n in (0, 7)] == [[], [0, 1, 2, 3, 5, 6]]
    found = overlap_measures(
        lambda weights: {"nodes": Overlap(one, other, first, second)}, Resampling(3, 5, 0.9, 0)
    )["nodes"]
    assert [found[key] for key in ("kept", "lost", "gained")] == [2, 1, 1]
    assert found["jaccard"] == found["jaccard_low"] == found["jaccard_high"] == 0.5
    expected = spearmanr(first[[0, 1, 2]], second[[0, 1, 2]]).statistic
    assert found["rank_correlation"] == pytest.approx(expected)


def test_intervals_are_of_resampled_prompts():
    """Against every resample that there is."""
    scores = np.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.2, 1.1, 1.2]])
    other = np.array([2])

    def choose(weights):
        found = largest(scores @ weights, 1)
        return {"nodes": Overlap(found, other, scores @ weights, np.ones(3))}

    n = 4000
    resampling = Resampling(3, n, 0.5, seed=0)
    values = [float(choose(w)["nodes"][0][0] == 2) for w in resampling.weights()]
    every = [
        largest(scores[:, list(rows)].mean(1), 1)[0] == 2
        for rows in itertools.product(range(3), repeat=3)
    ]
    # Four standard errors of a share.
    assert np.mean(values) == pytest.approx(np.mean(every), abs=4 * np.sqrt(0.25 / n))
    assert 0 < np.mean(every) < 1
    found = overlap_measures(choose, Resampling(3, 200, 0.999, seed=0))["nodes"]
    assert (found["jaccard_low"], found["jaccard_high"]) == (0, 1)
    again = overlap_measures(choose, Resampling(3, 200, 0.999, seed=0))["nodes"]
    assert found == pytest.approx(again, nan_ok=True)


def test_as_few_edges_as_have_the_mass():
    weights = np.array([4.0, -3.0, 2.0, 1.0, 50.0, 0.0, 7.0])
    kinds = np.array(["value"] * 4 + ["q"] * 3, dtype=object)
    among = np.array([0, 1, 2, 3, 5, 6])
    assert select_mass(weights, kinds, among, 0.7).tolist() == [0, 1, 6]
    assert select_mass(weights, kinds, among, 1.0).tolist() == [0, 1, 2, 3, 6]
    assert select_mass(weights, kinds, among[:0], 0.7).tolist() == []
