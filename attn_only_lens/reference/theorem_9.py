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
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import check_matrix, direct_sum, zeros


def with_positions(X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d+n_tokens"]:
    """Return [X | I_N], where I_N contains the one-hot positions of the tokens.

    Raises:
        ValueError: X is not a float64 matrix.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import with_positions
        >>> with_positions(torch.tensor([[5.0], [7.0]], dtype=torch.float64)).tolist()
        [[5.0, 1.0, 0.0], [7.0, 0.0, 1.0]]
    """
    check_matrix("X", X)
    return torch.cat([X, torch.eye(len(X), dtype=X.dtype, device=X.device)], dim=1)


def unmasked_head(head: Head, omega: float) -> Head:
    """Return the head h_Ω on M_{N,D+N}, whose W_QK encodes the mask Λ of a head on M_{N,D}.

    Args:
        head: a head on M_{N,D}, with any mask.
        omega: Ω, positive.

    Returns:
        A head whose input is `with_positions(X)`, and whose mask is 1 everywhere.

    Raises:
        ValueError: Ω is not positive and finite.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import Head, unmasked_head, with_positions
        >>> _ = torch.manual_seed(0)
        >>> X, W_QK, W_OV = (torch.randn(*s, dtype=torch.float64) for s in [(5, 3), (3, 3), (3, 3)])
        >>> causal = Head(W_QK, W_OV, torch.ones(5, 5, dtype=torch.float64).tril())
        >>> got = unmasked_head(causal, omega=50.0)(with_positions(X))
        >>> torch.allclose(got, torch.nn.functional.pad(causal(X), (0, 5)), atol=1e-12)
        True
    """
    _check_positive("omega", omega)
    W_QK = direct_sum(head.W_QK, omega * (head.mask - 1))
    W_OV = direct_sum(head.W_OV, zeros(head.n_tokens, head.n_tokens))
    return Head(W_QK, W_OV, torch.ones_like(head.mask))


def masking_error(
    head: Head, X: Float[Tensor, "n_tokens d"], omega: float
) -> Float[Tensor, " n_tokens"]:
    """Return, for each token t, an upper bound on the error ‖h_Ω(X)_t - h(X)_t‖ of `unmasked_head`.

    Raises:
        ValueError: Ω is not positive and finite, or X does not fit the head.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import Head, masking_error
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> head = Head(0 * eye, eye, mask=torch.ones_like(eye).tril())  # the last sees all
        >>> masking_error(head, eye, omega=2.0)  # one token is masked, √2 away: √2 e^-2
        tensor([0.1914, 0.0000], dtype=torch.float64)
    """
    _check_positive("omega", omega)
    S, visible, v = head.scores(X), head.mask == 1, X @ head.W_OV
    gap = S.masked_fill(visible, -math.inf).amax(1) - S.masked_fill(~visible, -math.inf).amax(1)
    return (~visible).sum(1) * (gap - omega).exp() * torch.cdist(v, v).max()


def sufficient_omega(head: Head, *, radius: float, error: float) -> float:
    """Return an Ω for which h_Ω(X) and h(X) differ by at most `error` at every token.

    Args:
        head: the masked head.
        radius: R, a bound on the norms of the rows of X.
        error: ε, the largest allowed distance.

    Raises:
        ValueError: the radius or the error is not positive and finite.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import Head, sufficient_omega
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> head = Head(eye, eye, mask=torch.ones_like(eye).tril())
        >>> round(sufficient_omega(head, radius=1.0, error=1e-6), 2)  # 2 + ln(4e6)
        17.2
    """
    _check_positive("radius", radius)
    _check_positive("error", error)
    W_QK, W_OV = (torch.linalg.matrix_norm(W, 2).item() for W in (head.W_QK, head.W_OV))
    largest = 2 * head.n_tokens * radius * W_OV / error  # 0 if W_OV = 0: then every Ω suffices
    return max(2 * radius**2 * W_QK + math.log(max(largest, 1.0)), 1.0)


def _check_positive(name: str, number: float) -> None:
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name}: got {number!r}; expected a positive finite number")
