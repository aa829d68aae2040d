"""Tests of every clause of Theorem 3 against loops, with controls that break it."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from common import relative
from oracles.definitions import MLP, GeneralizedSiLU, direct_sum, msoftmax, rand
from oracles.theorem_3 import factors, neuron_heads

N, D, D_MLP = 7, 5, 11
# A few roundings: sums of about a dozen products of numbers of size one.
TOLERANCE = 1e-13
A_1, A_2 = -2.3, 0.7
ALPHAS = [(1.0, 1.0), (1 / 1.702, 1.702), (A_1, A_2), (0.4, -3.1), (1 / 50, 50.0), (0.0, 1.0)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def expected_mlp(mlp, X):
    """Compute f(X) ⊕ [0] with torch's silu."""
    alpha = mlp.activation
    return F.pad(alpha.a_1 * F.silu(alpha.a_2 * (X @ mlp.V_1)) @ mlp.V_2, (0, 1, 0, 1))


def close(got, expected):
    return (got - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max())


def bias_token(X):
    """Return X ⊕ [1], by torch's padding."""
    Z = F.pad(X, (0, 1, 0, 1))
    Z[-1, -1] = 1.0
    return Z


@pytest.fixture
def X():
    return rand(N, D)


@pytest.fixture
def mlp():
    return MLP(rand(D, D_MLP), rand(D_MLP, D), GeneralizedSiLU(A_1, A_2))


@pytest.mark.parametrize(("a_1", "a_2"), ALPHAS)
def test_the_mlp_is_the_sum_of_its_heads(X, mlp, a_1, a_2):
    """Cover gates that are open or shut up to rounding, X = 0, and one token."""
    mlp = dataclasses.replace(mlp, activation=GeneralizedSiLU(a_1, a_2))
    for tokens in (X, 1e3 * X, 0 * X, X[:1]):
        got = sum(head(bias_token(tokens)) for head in neuron_heads(mlp, len(tokens)))
        assert close(got, expected_mlp(mlp, tokens))


def test_scores_and_pattern_are_the_proofs(X, mlp):
    for i, head in enumerate(neuron_heads(mlp, N)):
        scores, pattern = head.scores(bias_token(X)), head.pattern(bias_token(X))
        for t in range(N + 1):
            q = A_2 * sum(X[t, a] * mlp.V_1[a, i] for a in range(D)).item() if t < N else 0.0
            for s in range(N + 1):
                score = -q if t < N and s == N else 0.0
                weight = sigmoid(q) if s == t else sigmoid(-q) if s == N else 0.0
                if t == N:
                    weight = float(s == N)
                assert math.isclose(scores[t, s], score, rel_tol=1e-12, abs_tol=1e-14)
                assert math.isclose(pattern[t, s], weight, rel_tol=1e-12)


WRONG_MASKS = {
    "sees everything": torch.ones(N + 1, N + 1, dtype=torch.float64),
    "sees no bias token": torch.eye(N + 1, dtype=torch.float64),
    "causal": torch.ones(N + 1, N + 1, dtype=torch.float64).tril(),
    "sees the first token": torch.eye(N + 1, dtype=torch.float64)
    .index_fill(1, torch.tensor([0]), 1.0),
}  # fmt: skip


def test_wrong_constructions_fail(X, mlp):
    heads, expected = neuron_heads(mlp, N), expected_mlp(mlp, X)

    def error(stream, **change):
        changed = [
            dataclasses.replace(head, **{name: make(head) for name, make in change.items()})
            for head in heads
        ]
        return relative(sum(head(stream) for head in changed), expected)

    assert error(bias_token(X)) < TOLERANCE  # the same code without an error
    assert error(direct_sum(X, 0.0)) > 0.1  # the bias token without its 1
    assert error(bias_token(X), W_QK=lambda head: -head.W_QK) > 0.1  # σ(-q) instead of σ(q)
    reads_bias = direct_sum(torch.zeros(D, D), 1.0)  # the bias token's value is not 0
    assert error(bias_token(X), W_OV=lambda head: head.W_OV + reads_bias) > 0.1
    for mask in WRONG_MASKS.values():
        assert error(bias_token(X), mask=lambda _, mask=mask: mask) > 0.1


def test_one_persistent_vector_serves_all_heads(X, mlp):
    """The bias token may be a key and value that is no row of the stream."""
    W_Q, W_O, W_K = factors(mlp)
    Y = F.pad(X, (0, 1))
    Z = torch.cat([Y, torch.tensor([[0.0] * D + [1.0]], dtype=torch.float64)])

    def output(key):
        total = 0
        for i, head in enumerate(neuron_heads(mlp, N)):
            scores = torch.outer(Y @ W_Q[:, i], Z @ key) / math.sqrt(D + 1)
            pattern = msoftmax(scores, head.mask[:N])
            if key is W_K:
                torch.testing.assert_close(
                    pattern, head.pattern(bias_token(X))[:N], rtol=1e-13, atol=0
                )
            total = total + torch.outer(pattern @ Z @ W_Q[:, i], W_O[:, i])
        return total

    assert relative(output(W_K), expected_mlp(mlp, X)[:N]) < TOLERANCE
    # Control: with a key of 0, every gate is half open, and the MLP linear.
    linear = F.pad(A_1 * 0.5 * A_2 * (X @ mlp.V_1) @ mlp.V_2, (0, 1))
    assert relative(output(0 * W_K), linear) < TOLERANCE
    assert relative(linear, expected_mlp(mlp, X)[:N]) > 0.1
