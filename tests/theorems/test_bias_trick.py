"""Tests of the bias trick in Theorem 6: biases of heads and MLPs become weights on [X | 1]."""

import math

import pytest
import torch
import torch.nn.functional as F
from common import relative

from attn_only_lens.reference import (
    GeneralizedSiLU,
    append_ones,
    constant_head,
    head_with_biases,
    mlp_with_biases,
)

N, D, D_HEAD, D_MLP = 7, 13, 5, 11
CAUSAL = torch.ones(N, N, dtype=torch.float64).tril()
A_1, A_2 = -2.3, 0.7


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def activation(x):
    return A_1 * F.silu(A_2 * x)


def test_the_bias_trick_head_by_head():
    X = rand(N, D)
    W_Q, W_K, W_V = (rand(D, D_HEAD) for _ in range(3))
    b_Q, b_K, b_V = (rand(D_HEAD) for _ in range(3))
    W_O = rand(D_HEAD, D)
    head = head_with_biases(W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, CAUSAL)
    q, k, v = X @ W_Q + b_Q, X @ W_K + b_K, X @ W_V + b_V
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True) @ W_O
    got = head(append_ones(X))
    assert relative(got[:, :D], expected) < 1e-13
    assert not got[:, D].any()
    # Control: without the constant, the biases have no effect.
    assert relative(head(F.pad(X, (0, 1)))[:, :D], expected) > 0.1

    b = rand(D)
    got = constant_head(b, N)(append_ones(X))
    assert torch.equal(got, F.pad(b.expand(N, D), (0, 1)))


def test_the_bias_trick_mlp():
    X, V_1, b_1, V_2, b_2 = rand(N, D), rand(D, D_MLP), rand(D_MLP), rand(D_MLP, D), rand(D)
    alpha = GeneralizedSiLU(A_1, A_2)
    mlp = mlp_with_biases(V_1, b_1, V_2, b_2, alpha)
    expected = activation(X @ V_1 + b_1) @ V_2 + b_2
    got = mlp(append_ones(X))
    assert mlp.V_1.shape == (D + 1, D_MLP + 1)
    assert relative(got[:, :D], expected) < 1e-13
    assert not got[:, D].any()
    assert relative(mlp(F.pad(X, (0, 1)))[:, :D], expected) > 0.1
    with pytest.raises(ValueError, match="maps 1 to 0"):
        mlp_with_biases(V_1, b_1, V_2, b_2, GeneralizedSiLU(a_1=0.0))
    with pytest.raises(ValueError, match="b_1: got shape"):
        mlp_with_biases(V_1, b_2, V_2, b_2, alpha)
    with pytest.raises(ValueError, match="b_K: got shape"):
        head_with_biases(V_1, b_1, V_1, b_2, V_1, b_1, V_2, CAUSAL)
    with pytest.raises(ValueError, match="W_O: got shape"):
        head_with_biases(V_1, b_1, V_1, b_1, V_1, b_1, V_2.T, CAUSAL)


def test_the_square_root_in_the_scores_is_that_of_the_heads_width():
    """Original heads divide scores by √d_head. Control: √(D + 1) belongs to neuron-heads."""
    W, b = rand(D, D_HEAD), rand(D_HEAD)
    head = head_with_biases(W, b, W, b, W, b, rand(D_HEAD, D), CAUSAL)
    scores = head.scores(append_ones(X := rand(N, D)))
    q = X @ W + b
    assert relative(scores, q @ q.T / math.sqrt(D_HEAD)) < 1e-13
    assert relative(scores, q @ q.T / math.sqrt(D + 1)) > 0.1
