"""Tests of divergences of patterns against scipy."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

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
