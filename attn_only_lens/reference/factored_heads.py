"""Heads of Theorem 3 that store two vectors per neuron, or use a persistent vector as bias token.

The heads of Theorem 3, one for each neuron, have internal dimension 1. With columns W_Q, W_K, W_V,
W_O ∈ M_{D+1,1},

    W_QK = W_Q W_Kᵀ / √(D+1)        W_Q = W_V = a₂ [V₁ⁱ | 0]ᵀ
    W_OV = W_V W_Oᵀ                 W_K = √(D+1) [0 | -1]ᵀ,  the same for every neuron
                                    W_O = a₁ [V₂ⁱ | 0]ᵀ

Therefore only two vectors must be stored for each neuron: W_Q = W_V and W_O. (In [V₁ⁱ | 0], V₁ⁱ is
a row. The paper writes W_OV = W_V W_O, but W_O ∈ M_{D+1,1} must be transposed.)

**The factor √(D+1).** Vaswani et al. divide scores by √d_k, where d_k = 1 here, so a standard
implementation divides by 1 and needs W_K = [0 | -1]ᵀ. Both conventions give the same W_QK; this
file follows the paper. Mixing the two conventions would scale the scores, and thus the slope a₂, by
√(D+1) or 1/√(D+1).

**Persistent vectors** (Sukhbaatar et al., 2019). The bias token need not be a row of the stream.
Instead, the stream is Y = [X | 0] ∈ M_{N,D+1}, and the persistent vector p = (0, …, 0, 1) is an
additional key and value, but not a query. If Z is Y stacked on p,

    msoftmax(Y W_QK Zᵀ, [I_N | 1]) Z W_OV = [f_i(X) | 0].

Proof: the queries come from the first N rows of X ⊕ [1], and the keys and values from all rows, so
the equation is Theorem 3 without the bias token's output. All heads share p, with the same key W_Kᵀ
p = -√(D+1) and the same value W_Vᵀ p = 0. Sukhbaatar et al. learn a persistent key and value for
each head directly; here, they are -√(D+1) and 0 in every head. In their paper, the softmax is over
the whole context; here, it is over the token itself and p.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head, msoftmax
from attn_only_lens.reference.matrices import check_matrix, zeros
from attn_only_lens.reference.theorem_3 import generalized_silu, neuron_mask
from attn_only_lens.reference.transformer import MLP


def persistent_vector(d: int) -> Float[Tensor, "1 d+1"]:
    """Return the bias token as a row vector, (0, …, 0, 1) with d zeros.

    Example:
        >>> from attn_only_lens.reference import persistent_vector
        >>> persistent_vector(2).tolist()
        [[0.0, 0.0, 1.0]]
    """
    return torch.cat([zeros(1, d), torch.ones(1, 1, dtype=torch.float64, device="cpu")], dim=1)


@dataclass(frozen=True, eq=False)
class FactoredHead:
    """A head that computes one neuron, stored as four columns whose products are W_QK and W_OV.

    Attributes:
        W_Q: a_2 [V_1^i | 0]ᵀ.
        W_K: √(D+1) [0 | -1]ᵀ, one tensor for all heads.
        W_V: the same tensor as W_Q.
        W_O: a_1 [V_2^i | 0]ᵀ.

    Raises:
        ValueError: a factor is not a float64 column, or factors differ in length.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import MLP, GeneralizedSiLU, factored_heads
        >>> V = torch.tensor([[2.0]], dtype=torch.float64)
        >>> (head,) = factored_heads(MLP(V, 5 * V, GeneralizedSiLU()))
        >>> head.W_Q.T.tolist(), head.W_O.T.tolist(), head.W_Q is head.W_V
        ([[2.0, 0.0]], [[10.0, 0.0]], True)
    """

    W_Q: Float[Tensor, "d+1 1"]
    W_K: Float[Tensor, "d+1 1"]
    W_V: Float[Tensor, "d+1 1"]
    W_O: Float[Tensor, "d+1 1"]

    def __post_init__(self) -> None:
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            check_matrix(name, getattr(self, name), self.W_Q.shape[0], 1)

    @property
    def scale(self) -> float:
        """√(D+1), the divisor of scores."""
        return math.sqrt(self.W_Q.shape[0])

    def head(self, n_tokens: int) -> Head:
        """Return the head of Theorem 3 that has these factors; it acts on M_{N+1,D+1}."""
        W_QK = self.W_Q @ self.W_K.T / self.scale
        return Head(W_QK, self.W_V @ self.W_O.T, neuron_mask(n_tokens))

    def persistent_pattern(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens keys"]:
        """Return the N tokens' attention pattern [N, N+1]: each attends to itself and to p.

        Raises:
            ValueError: X has the wrong width, or is not float64.
        """
        queries, keys = self._rows(X)
        scores = (queries @ self.W_Q) @ (keys @ self.W_K).T / self.scale
        return msoftmax(scores, neuron_mask(len(X))[:-1])

    def persistent(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d+1"]:
        """Return the head's output [f_i(X) | 0], computed with a persistent vector as bias token.

        Raises:
            ValueError: X has the wrong width, or is not float64.
        """
        _, values = self._rows(X)
        return self.persistent_pattern(X) @ (values @ self.W_V) @ self.W_O.T

    def _rows(self, X: Tensor) -> tuple[Tensor, Tensor]:
        check_matrix("X", X, columns=self.W_Q.shape[0] - 1)
        tokens = torch.cat([X, zeros(len(X), 1)], dim=1)
        return tokens, torch.cat([tokens, persistent_vector(X.shape[1])], dim=0)


def factored_heads(mlp: MLP) -> tuple[FactoredHead, ...]:
    """Return the heads of Theorem 3 in factored form, one per neuron.

    Args:
        mlp: an MLP on M_{N,D} with a `GeneralizedSiLU`.

    Returns:
        ℓ heads that share W_K; in each, W_Q and W_V are the same tensor.

    Raises:
        ValueError: the activation is not a `GeneralizedSiLU`.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import MLP, GeneralizedSiLU, factored_heads
        >>> _ = torch.manual_seed(0)
        >>> shapes = [(5, 3), (3, 7), (7, 3)]
        >>> X, V_1, V_2 = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
        >>> mlp = MLP(V_1, V_2, GeneralizedSiLU())
        >>> total = sum(head.persistent(X) for head in factored_heads(mlp))
        >>> torch.allclose(total[:, :-1], mlp(X), rtol=1e-12, atol=1e-12)
        True
    """
    alpha, D = generalized_silu(mlp), mlp.width
    W_K = math.sqrt(D + 1) * -persistent_vector(D).T
    heads = []
    for i in range(mlp.V_1.shape[1]):
        W_Q = alpha.a_2 * torch.cat([mlp.V_1[:, [i]], zeros(1, 1)])
        W_O = alpha.a_1 * torch.cat([mlp.V_2[[i], :].T, zeros(1, 1)])
        heads.append(FactoredHead(W_Q, W_K, W_Q, W_O))
    return tuple(heads)
