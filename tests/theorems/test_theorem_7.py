"""Tests of Theorem 7: a head masked to the diagonal is X ↦ X W_OV."""

import pytest
import torch
from common import relative

from attn_only_lens.reference import Head, linear_head

N, D = 7, 5


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def row_by_row(X, W):
    return [[sum(x[a] * W[a, b] for a in range(D)).item() for b in range(D)] for x in X]


def test_a_linear_map_whatever_the_scores():
    X, W_OV = rand(N, D), rand(D, D)
    expected = torch.tensor(row_by_row(X, W_OV), dtype=torch.float64)
    for W_QK in (rand(D, D), 1e3 * rand(D, D), 0 * rand(D, D)):
        head = Head(W_QK, W_OV, torch.eye(N, dtype=torch.float64))
        assert torch.equal(head.pattern(X), torch.eye(N, dtype=torch.float64))
        assert relative(head(X), expected) < 1e-14
    assert relative(linear_head(W_OV, N)(X), expected) < 1e-14


def test_another_mask_is_another_map():
    """Control: one off-diagonal entry in Λ mixes tokens."""
    X, W_OV, mask = rand(N, D), rand(D, D), torch.eye(N, dtype=torch.float64)
    mask[4, 2] = 1.0
    difference = (Head(rand(D, D), W_OV, mask)(X) - X @ W_OV).abs().amax(1)
    assert difference[4] > 0.01
    assert difference[[0, 1, 2, 3, 5, 6]].max() < 1e-13


def test_a_map_to_another_width_is_refused():
    with pytest.raises(ValueError, match="W_QK: got shape"):
        linear_head(rand(D, 3), N)
