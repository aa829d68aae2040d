"""Theorem 7: if each token attends only to itself, a head is linear for every W_QK.

If Λ = I_N then h(X) = X W_OV. Proof: the only unmasked entry in each row of the pattern is on the
diagonal, and each row sums to 1, so the pattern is I_N. (Theorem 6 of the draft.)

Theorem 8: D heads apply a generalised SiLU to each entry of X; D + 1 heads replace X by α(X).

    α(X) ⊕ [0] = Σ_{i=1}^{D} h_i(X ⊕ [1])        on M_{N+1,D+1}

Proof: apply Theorem 3 to the MLP f(X) = α(X I_D) I_D of hidden size D. (The paper writes I_N, but a
matrix to the right of X ∈ M_{N,D} must be I_D.)

With a skip connection, X ↦ X + sublayer(X), one more head gives the map X ↦ α(X). This is the
linear head of Theorem 7 that outputs -X. The paper gives the sublayer α(X) - X on M_{N,D}. On the
widened stream, the linear head must not change the bias coordinate, so W_OV = -I_D ⊕ [0]:

    X ⊕ [1] + α(X) ⊕ [0] + (-X) ⊕ [0] = α(X) ⊕ [1]

With W_OV = -I_{D+1}, the bias token would become 0, and the next MLP would be linear, as without a
skip connection (`theorem_6.py`). (Theorem 7 of the draft.)
"""

import torch
from oracles.definitions import MLP, Head, direct_sum, eye
from oracles.theorem_3 import neuron_heads


def linear_head(W_OV, n_tokens):
    """Return the head with W_QK = 0 that maps X to X W_OV."""
    return Head(torch.zeros_like(W_OV), W_OV, eye(n_tokens))


def activation_heads(alpha, n_tokens, d):
    """Return D heads on M_{N+1,D+1} with Σ_i h_i(X ⊕ [1]) = α(X) ⊕ [0].

    >>> from oracles.definitions import GeneralizedSiLU
    >>> X = torch.randn(5, 3).double()
    >>> heads = activation_heads(GeneralizedSiLU(), n_tokens=5, d=3)
    >>> total = sum(head(direct_sum(X, 1.0)) for head in heads)
    >>> expected = direct_sum(torch.nn.functional.silu(X), 0.0)
    >>> len(heads), torch.allclose(total, expected, rtol=1e-12, atol=1e-12)
    (3, True)
    """
    return neuron_heads(MLP(eye(d), eye(d), alpha), n_tokens)


def replacing_heads(alpha, n_tokens, d):
    """Return D + 1 heads that turn X ⊕ [1] into α(X) ⊕ [1] through a skip connection."""
    minus_X = linear_head(direct_sum(-eye(d), 0.0), n_tokens + 1)
    return (*activation_heads(alpha, n_tokens, d), minus_X)
