"""Tests of Theorem 8: D heads are α entry by entry, and D + 1 replace X by α(X) with a skip."""

import math

import pytest
import torch
import torch.nn.functional as F
from common import relative

from attn_only_lens.reference import (
    GeneralizedSiLU,
    activation_heads,
    direct_sum,
    linear_head,
    replacing_heads,
)

N, D = 7, 5
ALPHAS = [GeneralizedSiLU(), GeneralizedSiLU(1 / 1.702, 1.702), GeneralizedSiLU(-2.3, 0.7)]


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def through_skip(heads, Z):
    return Z + sum(head(Z) for head in heads)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_entry_by_entry(alpha):
    X = rand(N, D)
    heads = activation_heads(alpha, N, D)
    assert len(heads) == D
    assert all(head.width == D + 1 and head.n_tokens == N + 1 for head in heads)
    got = sum(head(direct_sum(X, 1.0)) for head in heads)
    for t in range(N + 1):
        for a in range(D + 1):
            expected = 0.0
            if t < N and a < D:
                x = alpha.a_2 * X[t, a].item()
                expected = alpha.a_1 * x / (1 + math.exp(-x))
            assert math.isclose(got[t, a], expected, rel_tol=1e-13)


def test_each_head_acts_on_its_own_coordinate():
    X = rand(N, D)
    for a, head in enumerate(activation_heads(ALPHAS[0], N, D)):
        got = head(direct_sum(X, 1.0))
        torch.testing.assert_close(got[:N, a], F.silu(X[:, a]), rtol=1e-13, atol=0)
        got[:, a] = 0
        assert not got.any()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_d_plus_1_heads_replace_x(alpha):
    X = rand(N, D)
    heads = replacing_heads(alpha, N, D)
    assert len(heads) == D + 1
    got = through_skip(heads, direct_sum(X, 1.0))
    expected = F.pad(alpha.a_1 * F.silu(alpha.a_2 * X), (0, 1, 0, 1))
    expected[N, D] = 1.0
    # x + (α(x) - x) rounds relative to x, not to α(x).
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    # The bias token is intact, so α can be applied again.
    again = through_skip(heads, got)
    twice = alpha.a_1 * F.silu(alpha.a_2 * expected[:N, :D])
    torch.testing.assert_close(again[:N, :D], twice, rtol=0, atol=1e-13)


def test_the_linear_head_is_needed():
    """Control: α's heads alone give X + α(X)."""
    X = rand(N, D)
    got = through_skip(replacing_heads(ALPHAS[0], N, D)[:-1], direct_sum(X, 1.0))
    assert relative(got[:N, :D], X + F.silu(X)) < 1e-13
    assert relative(got[:N, :D], F.silu(X)) > 0.1


def test_it_must_leave_the_bias_token_alone():
    """Control: -I_{D+1} instead of -I_D ⊕ [0] is right once and wrong twice."""
    X, alpha = rand(N, D), ALPHAS[0]
    wiping = linear_head(-torch.eye(D + 1, dtype=torch.float64), N + 1)
    heads = (*activation_heads(alpha, N, D), wiping)
    once = through_skip(heads, direct_sum(X, 1.0))
    assert relative(once[:N, :D], F.silu(X)) < 1e-13
    assert once[N, D] == 0
    assert relative(through_skip(heads, once)[:N, :D], F.silu(F.silu(X))) > 0.1
