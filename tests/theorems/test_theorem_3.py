"""Tests of every clause of Theorem 3 against loops, and controls that break it."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from common import relative

from attn_only_lens.reference import MLP, GeneralizedSiLU, Head, direct_sum, neuron_heads

N, D, D_MLP = 7, 5, 11
# A few roundings: sums of about a dozen products of numbers of size one.
TOLERANCE = 1e-13
ALPHAS = [(1.0, 1.0), (1 / 1.702, 1.702), (-2.3, 0.7), (0.4, -3.1), (1 / 50, 50.0), (0.0, 1.0)]


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def expected_mlp(X, V_1, V_2, a_1, a_2):
    """Compute f(X) ⊕ [0] with torch's silu."""
    return F.pad(a_1 * F.silu(a_2 * (X @ V_1)) @ V_2, (0, 1, 0, 1))


def close(got, expected):
    return (got - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max())


@pytest.fixture
def parts():
    return rand(N, D), rand(D, D_MLP), rand(D_MLP, D)


def bias_token(X):
    """Return X ⊕ [1], by torch's padding."""
    Z = F.pad(X, (0, 1, 0, 1))
    Z[-1, -1] = 1.0
    return Z


def test_the_matrices_symbol_for_symbol(parts):
    _, V_1, V_2 = parts
    a_1, a_2 = -2.3, 0.7
    heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU(a_1, a_2)), N)
    assert len(heads) == D_MLP
    for i, head in enumerate(heads):
        assert head.W_QK.shape == head.W_OV.shape == (D + 1, D + 1)
        for r in range(D + 1):
            for c in range(D + 1):
                qk = -a_2 * V_1[r, i] if r < D and c == D else 0.0
                ov = a_1 * a_2 * V_1[r, i] * V_2[i, c] if r < D and c < D else 0.0
                assert math.isclose(head.W_QK[r, c], qk, rel_tol=1e-15)
                assert math.isclose(head.W_OV[r, c], ov, rel_tol=1e-15)
        assert head.mask.shape == (N + 1, N + 1)
        for r in range(N + 1):
            for c in range(N + 1):
                assert head.mask[r, c] == (1 if r == c or c == N else 0)


@pytest.mark.parametrize(("a_1", "a_2"), ALPHAS)
def test_the_mlp_is_the_sum_of_its_heads(parts, a_1, a_2):
    X, V_1, V_2 = parts
    heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU(a_1, a_2)), N)
    got = sum(head(bias_token(X)) for head in heads)
    assert close(got, expected_mlp(X, V_1, V_2, a_1, a_2))


def test_for_all_X(parts):
    """Cover gates that are open or shut up to rounding, X = 0, and one token."""
    X, V_1, V_2 = parts
    for tokens in (1e3 * X, 0 * X, X[:1]):
        heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), len(tokens))
        got = sum(head(bias_token(tokens)) for head in heads)
        assert close(got, expected_mlp(tokens, V_1, V_2, 1.0, 1.0))


def test_scores_and_pattern_are_the_proofs(parts):
    X, V_1, V_2 = parts
    for i, head in enumerate(neuron_heads(MLP(V_1, V_2, GeneralizedSiLU(1.0, 1.702)), N)):
        scores, pattern = head.scores(bias_token(X)), head.pattern(bias_token(X))
        for t in range(N + 1):
            q = 1.702 * sum(X[t, a] * V_1[a, i] for a in range(D)).item() if t < N else 0.0
            for s in range(N + 1):
                score = -q if t < N and s == N else 0.0
                weight = sigmoid(q) if s == t else sigmoid(-q) if s == N else 0.0
                if t == N:
                    weight = float(s == N)
                assert math.isclose(scores[t, s], score, rel_tol=1e-12, abs_tol=1e-14)
                assert math.isclose(pattern[t, s], weight, rel_tol=1e-12)


def test_internal_dimension_is_one(parts):
    _, V_1, V_2 = parts
    for head in neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), N):
        assert torch.linalg.matrix_rank(head.W_QK) == 1
        assert torch.linalg.matrix_rank(head.W_OV) == 1


def test_bias_token_first_the_mask_is_causal(parts):
    X, V_1, V_2 = parts
    rows, columns = [N, *range(N)], [D, *range(D)]
    total = 0
    for head in neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), N):
        mask = head.mask[rows][:, rows]
        assert torch.equal(mask, mask.tril())
        first = Head(head.W_QK[columns][:, columns], head.W_OV[columns][:, columns], mask)
        total = total + first(bias_token(X)[rows][:, columns])
    assert close(total, expected_mlp(X, V_1, V_2, 1.0, 1.0)[rows][:, columns])


def test_the_slip_in_the_papers_sketch():
    """softmax([-x, 0]) is [σ(-x), σ(x)], unlike in the sketch; the proof uses [0, -x]."""
    x = 1.3
    for scores, expected in (
        ([-x, 0.0], [sigmoid(-x), sigmoid(x)]),
        ([0.0, -x], [sigmoid(x), sigmoid(-x)]),
    ):
        got = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        assert got == pytest.approx(expected, rel=1e-14)


WRONG_MASKS = {
    "sees everything": torch.ones(N + 1, N + 1, dtype=torch.float64),
    "sees no bias token": torch.eye(N + 1, dtype=torch.float64),
    "causal": torch.ones(N + 1, N + 1, dtype=torch.float64).tril(),
    "sees the first token": torch.eye(N + 1, dtype=torch.float64)
    .index_fill(1, torch.tensor([0]), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_MASKS)
def test_a_wrong_mask_fails(parts, wrong):
    X, V_1, V_2 = parts
    heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), N)
    masked = [dataclasses.replace(head, mask=WRONG_MASKS[wrong]) for head in heads]
    got = sum(head(bias_token(X)) for head in masked)
    assert relative(got, expected_mlp(X, V_1, V_2, 1.0, 1.0)) > 0.1


def test_other_wrong_constructions_fail(parts):
    X, V_1, V_2 = parts
    heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), N)
    expected = expected_mlp(X, V_1, V_2, 1.0, 1.0)

    def error(change, stream):
        return relative(sum(change(head)(stream) for head in heads), expected)

    def opposite(head):
        return dataclasses.replace(head, W_QK=-head.W_QK)

    def bias_read(head):
        return dataclasses.replace(head, W_OV=head.W_OV + direct_sum(0 * rand(D, D), 1.0))

    assert error(lambda head: head, bias_token(X)) < TOLERANCE  # the same code without an error
    assert error(lambda head: head, direct_sum(X, 0.0)) > 0.1  # the bias token without its 1
    assert error(opposite, bias_token(X)) > 0.1  # σ(-q) instead of σ(q)
    assert error(bias_read, bias_token(X)) > 0.1  # the bias token's value is not 0


def test_another_activation_is_refused(parts):
    _, V_1, V_2 = parts
    with pytest.raises(ValueError, match="expected a GeneralizedSiLU"):
        neuron_heads(MLP(V_1, V_2, F.silu), N)
