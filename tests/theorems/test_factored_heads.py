"""Tests of factored neuron-heads: factors, shared vectors, scaling and the persistent vector."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from common import relative

from attn_only_lens.reference import (
    MLP,
    GeneralizedSiLU,
    factored_heads,
    neuron_heads,
    persistent_vector,
)

N, D, D_MLP = 7, 5, 11
A_1, A_2 = -2.3, 0.7
TOLERANCE = 1e-13  # sums of about a dozen products of numbers of size one


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def X():
    return rand(N, D)


@pytest.fixture
def mlp():
    return MLP(rand(D, D_MLP), rand(D_MLP, D), GeneralizedSiLU(A_1, A_2))


def expected_mlp(mlp, X):
    return A_1 * F.silu(A_2 * (X @ mlp.V_1)) @ mlp.V_2


def test_the_factors_symbol_for_symbol(mlp):
    heads = factored_heads(mlp)
    assert len(heads) == D_MLP
    for i, head in enumerate(heads):
        assert head.W_Q.shape == head.W_K.shape == head.W_V.shape == head.W_O.shape == (D + 1, 1)
        for r in range(D):
            assert head.W_Q[r, 0] == head.W_V[r, 0] == A_2 * mlp.V_1[r, i]
            assert head.W_O[r, 0] == A_1 * mlp.V_2[i, r]
            assert head.W_K[r, 0] == 0
        assert head.W_Q[D, 0] == head.W_V[D, 0] == head.W_O[D, 0] == 0
        assert head.W_K[D, 0] == -math.sqrt(D + 1)


def test_they_are_the_factors_of_theorem_3(mlp):
    for factors, head in zip(factored_heads(mlp), neuron_heads(mlp, N), strict=True):
        W_QK = factors.W_Q @ factors.W_K.T / math.sqrt(D + 1)
        W_OV = factors.W_V @ factors.W_O.T
        for got in (W_QK, factors.head(N).W_QK):
            torch.testing.assert_close(got, head.W_QK, rtol=1e-15, atol=0)
        for got in (W_OV, factors.head(N).W_OV):
            torch.testing.assert_close(got, head.W_OV, rtol=1e-15, atol=0)
        assert torch.equal(factors.head(N).mask, head.mask)


def test_two_vectors_a_neuron_are_stored(mlp):
    heads = factored_heads(mlp)
    stored = {
        getattr(head, name).data_ptr() for head in heads for name in ("W_Q", "W_K", "W_V", "W_O")
    }
    assert len(stored) == 2 * D_MLP + 1


def test_the_square_root_cancels_against_w_k(X, mlp):
    """In stock attention, head dimension 1 means division by √1, with W_K = [0 | -1]ᵀ."""
    Z = F.pad(X, (0, 1, 0, 1))
    Z[-1, -1] = 1.0
    mask = torch.eye(N + 1, dtype=torch.bool)
    mask[:, -1] = True
    total = 0
    for head in factored_heads(mlp):
        q, k, v = Z @ head.W_Q, Z @ (head.W_K / math.sqrt(D + 1)), Z @ head.W_V
        total = total + F.scaled_dot_product_attention(q, k, v, mask) @ head.W_O.T
    assert relative(total[:N, :D], expected_mlp(mlp, X)) < TOLERANCE
    assert not total[N].any()


def test_one_square_root_without_the_other_is_another_slope(X, mlp):
    """Control: W_K = [0 | -1]ᵀ with division by √(D+1) gives a flatter gate."""
    heads = [
        dataclasses.replace(head, W_K=head.W_K / math.sqrt(D + 1)) for head in factored_heads(mlp)
    ]
    got = sum(head.persistent(X) for head in heads)[:, :D]
    q = A_2 * (X @ mlp.V_1)
    flattened = A_1 * (q * torch.sigmoid(q / math.sqrt(D + 1))) @ mlp.V_2
    assert relative(got, flattened) < TOLERANCE
    assert relative(got, expected_mlp(mlp, X)) > 0.05


def test_the_persistent_vector():
    assert persistent_vector(D).tolist() == [[0.0] * D + [1.0]]


def test_one_persistent_vector_serves_all_heads(X, mlp):
    heads = factored_heads(mlp)
    got = sum(head.persistent(X) for head in heads)
    assert got.shape == (N, D + 1)
    assert relative(got[:, :D], expected_mlp(mlp, X)) < TOLERANCE
    assert not got[:, D].any()
    for head in heads:
        assert (persistent_vector(D) @ head.W_K).item() == -math.sqrt(D + 1)
        assert (persistent_vector(D) @ head.W_V).item() == 0


def test_its_pattern_is_theorem_3s_less_the_bias_tokens_row(X, mlp):
    Z = F.pad(X, (0, 1, 0, 1))
    Z[-1, -1] = 1.0
    for factors, head in zip(factored_heads(mlp), neuron_heads(mlp, N), strict=True):
        got = factors.persistent_pattern(X)
        assert got.shape == (N, N + 1)
        torch.testing.assert_close(got, head.pattern(Z)[:N], rtol=1e-13, atol=0)


def test_a_key_that_is_zero_fails(X, mlp):
    """Control: with a key of 0, the token and the persistent vector have equal weights."""
    heads = [dataclasses.replace(head, W_K=0 * head.W_K) for head in factored_heads(mlp)]
    got = sum(head.persistent(X) for head in heads)[:, :D]
    assert relative(got, A_1 * 0.5 * A_2 * (X @ mlp.V_1) @ mlp.V_2) < TOLERANCE
    assert relative(got, expected_mlp(mlp, X)) > 0.1


def test_wrong_shapes_are_refused(X, mlp):
    head = factored_heads(mlp)[0]
    with pytest.raises(ValueError, match="W_K: got shape"):
        dataclasses.replace(head, W_K=head.W_K[:-1])
    with pytest.raises(ValueError, match="X: got shape"):
        head.persistent(F.pad(X, (0, 1)))
    with pytest.raises(ValueError, match="expected a GeneralizedSiLU"):
        factored_heads(MLP(mlp.V_1, mlp.V_2, torch.relu))
