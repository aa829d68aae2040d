"""Tests of Theorem 7, linear heads, and of Theorem 8, heads that are α entry by entry."""

import pytest
import torch
import torch.nn.functional as F
from common import relative
from oracles.definitions import GeneralizedSiLU, Head, direct_sum, rand
from oracles.theorems_7_and_8 import activation_heads, linear_head, replacing_heads

N, D = 7, 5
ALPHAS = [GeneralizedSiLU(), GeneralizedSiLU(1 / 1.702, 1.702), GeneralizedSiLU(-2.3, 0.7)]


def test_a_head_masked_to_the_diagonal_is_linear():
    X, W_OV = rand(N, D), rand(D, D)
    expected = [[sum(x[a] * W_OV[a, b] for a in range(D)).item() for b in range(D)] for x in X]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert relative(linear_head(W_OV, N)(X), expected) < 1e-14
    for W_QK in (rand(D, D), 1e3 * rand(D, D)):
        head = Head(W_QK, W_OV, torch.eye(N, dtype=torch.float64))
        assert torch.equal(head.pattern(X), torch.eye(N, dtype=torch.float64))
        assert relative(head(X), expected) < 1e-14
    # Control: one off-diagonal entry in Λ mixes tokens.
    head.mask[4, 2] = 1.0
    difference = (Head(rand(D, D), W_OV, head.mask)(X) - expected).abs().amax(1)
    assert difference[4] > 0.01
    assert difference[[0, 1, 2, 3, 5, 6]].max() < 1e-13


def through_skip(heads, Z):
    return Z + sum(head(Z) for head in heads)


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


def test_it_must_leave_the_bias_token_alone():
    """Control: -I_{D+1} instead of -I_D ⊕ [0] is right once and wrong twice."""
    X, alpha = rand(N, D), ALPHAS[0]
    wiping = linear_head(-torch.eye(D + 1, dtype=torch.float64), N + 1)
    heads = (*activation_heads(alpha, N, D), wiping)
    once = through_skip(heads, direct_sum(X, 1.0))
    assert relative(once[:N, :D], F.silu(X)) < 1e-13
    assert once[N, D] == 0
    assert relative(through_skip(heads, once)[:N, :D], F.silu(F.silu(X))) > 0.1
