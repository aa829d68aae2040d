"""Tests of Theorem 9: Ω in a head's weights replaces its mask, up to the stated error."""

import math

import pytest
import torch
from common import relative
from oracles.definitions import MLP, GeneralizedSiLU, Head, direct_sum, rand
from oracles.theorem_3 import neuron_heads
from oracles.theorem_9 import masking_error, sufficient_omega, unmasked_head, with_positions

N, D = 7, 5
ROUNDING = 1e-13  # sums of about a dozen products of numbers of size one to ten


def masks():
    random = (torch.rand(N, N) < 0.4).double()
    random[torch.arange(N), torch.randint(N, (N,))] = 1.0
    return {
        "causal": torch.ones(N, N, dtype=torch.float64).tril(),
        "one other": torch.eye(N, dtype=torch.float64).roll(1, 0),
        "random": random,
    }


def masked_attention(X, W_QK, W_OV, mask):
    """Compute masked attention token by token, in Python floats and without a score matrix."""
    out = []
    for t in range(N):
        seen = [s for s in range(N) if mask[t, s] == 1]
        weights = [math.exp(float(X[t] @ W_QK @ X[s])) for s in seen]
        rows = [w / sum(weights) * (X[s] @ W_OV) for w, s in zip(weights, seen, strict=True)]
        out.append(sum(rows))
    return torch.stack(out)


@pytest.mark.parametrize("name", masks())
def test_the_error_falls_below_any_number(name):
    X, W_QK, W_OV, mask = rand(N, D), 0.3 * rand(D, D), rand(D, D), masks()[name]
    expected = masked_attention(X, W_QK, W_OV, mask)
    head = Head(W_QK, W_OV, mask)
    radius = X.norm(dim=1).max().item()
    for error in (1.0, 1e-3, 1e-6, 1e-9):
        omega = sufficient_omega(head, radius=radius, error=error)
        got = unmasked_head(head, omega)
        assert (got.mask == 1).all()
        out = got(with_positions(X))
        off = (out[:, :D] - expected).norm(dim=1)
        assert (off <= error + ROUNDING).all()
        assert (out[:, D:] == 0).all()  # a skip connection keeps the positions
    assert relative(unmasked_head(head, 1e3)(with_positions(X))[:, :D], expected) < ROUNDING


def test_the_bound_holds_for_every_omega_and_is_near():
    """The bound is at least the error for every Ω, and close to it in a limit case."""
    for seed in range(5):
        torch.manual_seed(seed)
        X, W_QK, W_OV, mask = rand(N, D), 0.5 * rand(D, D), rand(D, D), masks()["random"]
        head, expected = Head(W_QK, W_OV, mask), masked_attention(X, W_QK, W_OV, mask)
        for omega in (0.1, 1.0, 5.0, 15.0):
            off = (unmasked_head(head, omega)(with_positions(X))[:, :D] - expected).norm(dim=1)
            bound = masking_error(head, X, omega)
            assert (off <= bound * (1 + 1e-9) + ROUNDING).all()
    # Each token sees only itself and the other is masked: the bound is the error up to e^{-Ω}.
    X, mask = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    head = Head(torch.zeros_like(X), torch.eye(2, dtype=torch.float64), mask)
    off = (unmasked_head(head, 12.0)(with_positions(X))[:, :2] - X).norm(dim=1)
    assert torch.allclose(off, masking_error(head, X, 12.0), rtol=2 * math.exp(-12))


def test_too_small_an_omega_fails():
    """Control: Ω below the scores does not mask, and neither does any Ω without positions."""
    X, W_QK, W_OV, mask = rand(N, D), 3.0 * rand(D, D), rand(D, D), masks()["causal"]
    expected, head = masked_attention(X, W_QK, W_OV, mask), Head(W_QK, W_OV, mask)
    assert relative(unmasked_head(head, 1.0)(with_positions(X))[:, :D], expected) > 0.1
    far = sufficient_omega(head, radius=X.norm(dim=1).max().item(), error=1e-6)
    assert relative(unmasked_head(head, far)(with_positions(X))[:, :D], expected) < 1e-6
    blind = torch.cat([X, torch.zeros(N, N, dtype=torch.float64)], 1)
    assert relative(unmasked_head(head, far)(blind)[:, :D], expected) > 0.1


def test_neurons_without_a_mask():
    """With Theorem 3, heads without masks compute the MLP with a single Ω, as in the blog post."""
    X, V_1, V_2 = rand(N, D), rand(D, 11), rand(11, D)
    expected = torch.nn.functional.silu(X @ V_1) @ V_2
    Z = with_positions(direct_sum(X, 1.0))
    heads = neuron_heads(MLP(V_1, V_2, GeneralizedSiLU()), N)
    total = sum(unmasked_head(head, 60.0)(Z) for head in heads)
    assert (total[:N, :D] - expected).abs().max() < 1e-12
    leaky = sum(unmasked_head(head, 1.0)(Z) for head in heads)
    assert (leaky[:N, :D] - expected).abs().max() > 0.1
