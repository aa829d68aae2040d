"""Theorem 9: a head without a mask can approximate a masked head with arbitrarily small error.

"Attention heads can encode arbitrary masking patterns in their weight matrices to within
arbitrarily small error" (the abstract of arXiv 2309.08593; the draft has no such theorem, so the
statement, the bound and the proof below are ours). Add N coordinates with each token's one-hot
position to the stream, which becomes [X | I_N] ∈ M_{N,D+N}. For a head with W_QK, W_OV and Λ, let
h_Ω be the head on M_{N,D+N} with

    W′_QK = W_QK ⊕ Ω(Λ - 1)        W′_OV = W_OV ⊕ 0        Λ′ = 1, which masks nothing

(1 is the matrix of ones). Then h_Ω([X | I_N]) → [h(X) | 0] as Ω → ∞. For all ε > 0 and R, there is
an Ω (`sufficient_omega`) such that the error is at most ε for all X whose rows have norm at most R.

Proof. The scores are [X | I_N] W′_QK [X | I_N]ᵀ = S + Ω(Λ - 1) with S = X W_QK Xᵀ, since I_N on
both sides selects the second block of W′_QK. For token t, let M_t be the sum of exp(S_ts) over the
visible tokens s, and m_t the sum over the masked tokens s. In the pattern, the masked tokens have
the weight

    leak_t = e^{-Ω} m_t / (M_t + e^{-Ω} m_t) ≤ n_t e^{gap_t - Ω}

where n_t is the number of masked tokens, and gap_t is the largest masked score minus the largest
visible score. Among the visible tokens, and among the masked tokens, softmax keeps the ratios of
weights. So row t of the pattern is (1 - leak_t) A_t + leak_t B_t, where A_t is the masked head's
row, and B_t contains weights on the masked tokens that sum to 1. If v_s are the rows of X W_OV,
then

    ‖h_Ω(X)_t - h(X)_t‖ = leak_t ‖Σ_s (B_ts - A_ts) v_s‖ ≤ n_t e^{gap_t - Ω} max_{s,s′} ‖v_s - v_s′‖

|S_ts| ≤ R² ‖W_QK‖ and ‖v_s‖ ≤ R ‖W_OV‖ (spectral norms), so the error is at most ε for

    Ω = 2 R² ‖W_QK‖ + ln(2 N R ‖W_OV‖ / ε).

The head outputs 0 in the position coordinates, so a skip connection preserves them. Therefore
layers can be stacked, provided that R bounds the inputs of all layers and norms preserve these
coordinates (`theorem_6.py`).

The blog post uses the same Ω. The post's matrix B of scores by position (`post/sublayers.py`) is
Ω(Λ - 1) plus a constant per row, which softmax ignores. The post's three sublayers are heads of
Theorems 3 and 7 with masks encoded in this way.
"""

import math

import torch
from oracles.definitions import Head, direct_sum, eye, zeros


def with_positions(X):
    """Return [X | I_N]."""
    return torch.cat([X, eye(len(X))], dim=1)


def unmasked_head(head, omega):
    """Return h_Ω on M_{N,D+N}, whose W_QK encodes the mask of a head on M_{N,D}."""
    n_tokens = len(head.mask)
    W_QK = direct_sum(head.W_QK, omega * (head.mask - 1))
    return Head(W_QK, direct_sum(head.W_OV, zeros(n_tokens, n_tokens)), torch.ones_like(head.mask))


def masking_error(head, X, omega):
    """Return the bound on ‖h_Ω(X)_t - h(X)_t‖ for each token t.

    >>> head = Head(zeros(2, 2), eye(2), mask=torch.ones(2, 2).double().tril())
    >>> masking_error(head, eye(2), omega=2.0)  # one token is masked, √2 away: √2 e^-2
    tensor([0.1914, 0.0000], dtype=torch.float64)
    """
    S, visible, v = head.scores(X), head.mask == 1, X @ head.W_OV
    gap = S.masked_fill(visible, -math.inf).amax(1) - S.masked_fill(~visible, -math.inf).amax(1)
    return (~visible).sum(1) * (gap - omega).exp() * torch.cdist(v, v).max()


def sufficient_omega(head, *, radius, error):
    """Return an Ω with an error of at most `error` for all X whose rows have norm ≤ `radius`.

    >>> head = Head(eye(2), eye(2), mask=torch.ones(2, 2).double().tril())
    >>> round(sufficient_omega(head, radius=1.0, error=1e-6), 2)  # 2 + ln(4e6)
    17.2
    """
    W_QK, W_OV = (torch.linalg.matrix_norm(W, 2).item() for W in (head.W_QK, head.W_OV))
    largest = 2 * len(head.mask) * radius * W_OV / error  # 0 if W_OV = 0: then every Ω suffices
    return max(2 * radius**2 * W_QK + math.log(max(largest, 1.0)), 1.0)
