"""Tests of divergences, resamples and overlaps against explicit sums and scipy."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import spearmanr

from attn_only_lens.growth.comparison.circuits import (
    Overlap,
    largest,
    overlap_measures,
    select_mass,
)
from attn_only_lens.growth.comparison.options import Resampling
from attn_only_lens.growth.comparison.statistics import gate_divergence, pattern_divergence

pytestmark = pytest.mark.numeric


def test_divergences_are_scipys():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, 7, 11, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    p[0, 0], q[0, 0] = torch.eye(11, dtype=torch.float64)[:2]
    divergences = pattern_divergence(p, q)
    expected = jensenshannon(p.numpy(), q.numpy(), base=2, axis=-1) ** 2
    np.testing.assert_allclose(divergences, expected, atol=1e-14)
    assert divergences[0, 0] == 1
    assert pattern_divergence(p, p).max() == 0
    gates = jensenshannon(
        np.stack([p[0], 1 - p[0]], -1), np.stack([q[0], 1 - q[0]], -1), base=2, axis=-1
    )
    np.testing.assert_allclose(gate_divergence(p[0], q[0]), gates**2, atol=1e-14)


def test_a_sink_is_an_outcome():
    """The sink counts as an outcome, for rows that give it a half or nothing."""
    half = torch.tensor([[0.25, 0.25], [0.5, 0.0]], dtype=torch.float64)
    whole = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    three = np.array([[0.25, 0.25, 0.5], [0.5, 0.0, 0.5]])
    expected = jensenshannon(three, np.array([[0.5, 0.5, 0.0]] * 2), base=2, axis=-1) ** 2
    np.testing.assert_allclose(pattern_divergence(half, whole), expected, atol=1e-14)
    low = torch.tensor([[1 / 3, 2 / 3]]).bfloat16()  # its sum is 1 only up to rounding
    assert pattern_divergence(low, low.float().to(torch.bfloat16)).item() == 0


def rows(chosen):
    """Return the rows that the only resample has chosen."""
    return np.flatnonzero(chosen[0]).tolist()


def test_all_resamples_at_once_are_each_by_itself():
    """Overlaps equal those from sets and scipy, with ties and rows that one model lacks."""
    generator = np.random.default_rng(0)
    scores, others = generator.integers(-3, 4, size=(2, 29, 8)).astype(float)
    scores[[3, 11]], others[17] = np.nan, np.nan
    resampling = Resampling(37, 0.9, seed=1)  # weights and ties are exact

    def overlaps(weights):
        means = weights @ scores.T, weights @ others.T
        return {"nodes": Overlap(largest(means[0], 7), largest(means[1], 13), *means)}

    done = []
    nodes = overlap_measures(overlaps, resampling, 8, 29, done.append)["nodes"]
    assert sum(done) == 37
    jaccard, correlation = [], []
    for weights in resampling.weights(8):
        means = scores @ weights, others @ weights
        by_size = (np.argsort(-np.nan_to_num(abs(x), nan=-1), kind="stable") for x in means)
        first, second = (set(rows[:n].tolist()) for rows, n in zip(by_size, (7, 13), strict=True))
        jaccard.append(len(first & second) / len(first | second))
        union = [row for row in first | second if np.isfinite(means[0][row] + means[1][row])]
        correlation.append(spearmanr(means[0][union], means[1][union]).statistic)
    for name, values in (("jaccard", jaccard), ("rank_correlation", correlation)):
        expected = np.quantile(values, [0.05, 0.95]) - np.mean(values) + nodes[name]
        assert [nodes[f"{name}_{end}"] for end in ("low", "high")] == pytest.approx(expected)
        assert expected[0] < expected[1]


def test_as_few_edges_as_have_the_mass():
    weights = np.array([[4.0, -3.0, 2.0, 1.0, 50.0, 0.0, 7.0]])
    kinds = np.array(["value"] * 4 + ["q"] * 3, dtype=object)
    among = np.array([[True, True, True, True, False, True, True]])
    assert rows(select_mass(weights, kinds, among, 0.7)) == [0, 1, 6]
    assert rows(select_mass(weights, kinds, among, 1.0)) == [0, 1, 2, 3, 6]
    assert rows(select_mass(weights, kinds, among & False, 0.7)) == []
