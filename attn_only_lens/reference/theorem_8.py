"""Theorem 8: D heads apply a generalised SiLU to each entry of X; D + 1 heads replace X by α(X).

    α(X) ⊕ [0] = Σ_{i=1}^{D} h_i(X ⊕ [1])        on M_{N+1,D+1}

Proof: apply Theorem 3 to the MLP f(X) = α(X I_D) I_D of hidden size D. (The paper writes I_N, but a
matrix to the right of X ∈ M_{N,D} must be I_D.)

With a skip connection, X ↦ X + sublayer(X), one more head gives the map X ↦ α(X). This is the
linear head of Theorem 7 that outputs -X. The paper gives the sublayer α(X) - X on M_{N,D}. On the
widened stream, the linear head must not change the bias coordinate, so W_OV = -I_D ⊕ [0]:

    X ⊕ [1] + α(X) ⊕ [0] + (-X) ⊕ [0] = α(X) ⊕ [1]

With W_OV = -I_{D+1}, the bias token would become 0, and the next MLP would be linear, as without a
skip connection (`theorem_6.py`). ("Attention-Only Transformers and Implementing MLPs with Attention
Heads"; Theorem 7 of the draft.)
"""

import torch

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import direct_sum
from attn_only_lens.reference.theorem_3 import neuron_heads
from attn_only_lens.reference.theorem_7 import linear_head
from attn_only_lens.reference.transformer import MLP, GeneralizedSiLU


def activation_heads(alpha: GeneralizedSiLU, n_tokens: int, d: int) -> tuple[Head, ...]:
    """Return the D heads of Theorem 8: Σ_i h_i(X ⊕ [1]) = α(X) ⊕ [0].

    Args:
        alpha: the activation.
        n_tokens: N.
        d: D, the width of X; the heads have D + 1.

    Returns:
        D heads on M_{N+1,D+1}.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import GeneralizedSiLU, activation_heads, direct_sum
        >>> X = torch.randn(5, 3, dtype=torch.float64)
        >>> heads = activation_heads(GeneralizedSiLU(), n_tokens=5, d=3)
        >>> total = sum(head(direct_sum(X, 1.0)) for head in heads)
        >>> expected = direct_sum(torch.nn.functional.silu(X), 0.0)
        >>> len(heads), torch.allclose(total, expected, rtol=1e-12, atol=1e-12)
        (3, True)
    """
    I_D = torch.eye(d, dtype=torch.float64, device="cpu")
    return neuron_heads(MLP(I_D, I_D, alpha), n_tokens)


def replacing_heads(alpha: GeneralizedSiLU, n_tokens: int, d: int) -> tuple[Head, ...]:
    """Return the D + 1 heads that turn X ⊕ [1] into α(X) ⊕ [1] through a skip connection.

    Args:
        alpha: the activation.
        n_tokens: N.
        d: D, the width of X; the heads have D + 1.

    Returns:
        The D + 1 heads on M_{N+1,D+1}; the last is the linear head, which subtracts X.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import GeneralizedSiLU, direct_sum, replacing_heads
        >>> X = torch.randn(5, 3, dtype=torch.float64)
        >>> stream = direct_sum(X, 1.0)
        >>> stream = stream + sum(head(stream) for head in replacing_heads(GeneralizedSiLU(), 5, 3))
        >>> expected = direct_sum(torch.nn.functional.silu(X), 1.0)
        >>> torch.allclose(stream, expected, rtol=1e-12, atol=1e-12)
        True
    """
    minus_X = linear_head(
        direct_sum(-torch.eye(d, dtype=torch.float64, device="cpu"), 0.0), n_tokens + 1
    )
    return (*activation_heads(alpha, n_tokens, d), minus_X)
