"""Theorem 3: an MLP of size ℓ is a sum of ℓ masked attention heads, one for each neuron.

Let f(X) = α(X V₁) V₂ on M_{N,D} with α(x) = a₁ SiLU(a₂ x). The head of neuron i on M_{N+1,D+1} has

              ⎡ 0 │ -V₁ⁱ ⎤                                      ⎡ I_N │ 1 ⎤
    W_QK = a₂ ⎢───┼──────⎥    W_OV = a₁ a₂ V₁ⁱ V₂ⁱ ⊕ [0]    Λ = ⎢─────┼───⎥
              ⎣ 0 │   0  ⎦                                      ⎣  0  │ 1 ⎦

where V₁ⁱ is a column of V₁ and V₂ⁱ a row of V₂. Then f(X) ⊕ [0] = Σ_i h_i(X ⊕ [1]) for every X. The
last row of X ⊕ [1] is the bias token, and its last column is the bias coordinate.

Theorem 3 is Theorem 2 of the draft. Proof, as in Appendix A of the draft. With q = a₂ X V₁ⁱ, one
number per token, the scores are

    (X ⊕ [1]) W_QK (X ⊕ [1])ᵀ = [[0, -q], [0, 0]].

Token t has two unmasked scores, 0 for itself and -q_t for the bias token, and softmax(0, -q_t) =
(σ(q_t), σ(-q_t)). The bias token attends only to itself, and the last row of (X ⊕ [1]) W_OV is 0.
So the head's output at token t is σ(q_t) x_t · a₁ a₂ V₁ⁱ V₂ⁱ = a₁ q_t σ(q_t) V₂ⁱ = α(x_t V₁ⁱ) V₂ⁱ,
and its output at the bias token is 0.

This file corrects the following slips in the draft.

* The draft says "the block decompositions are into size N and 1". These sizes are correct for Λ,
  but for W_QK and W_OV they are D and 1.
* The proof sketch says that the token's score for itself is -x and its score for the bias token 0,
  "from the main diagonal of (X ⊕ [1]) W_OV (X ⊕ [1])ᵀ", and softmax([-x, 0]) = [σ(x), σ(-x)].
  The matrix should be W_QK, whose scores -x are in the last column, while the main diagonal is 0.
  The two slips cancel, because softmax([-x, 0]) = [σ(-x), σ(x)]. Appendix A is correct.
* The bias token comes last and every token attends to it, so Λ is not causal in this order. If the
  bias token came first, the same mask would be lower triangular; the order does not matter.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import block, direct_sum, ones, zeros
from attn_only_lens.reference.transformer import MLP, GeneralizedSiLU


def neuron_mask(n_tokens: int) -> Float[Tensor, "n_tokens+1 n_tokens+1"]:
    """Return the mask Λ of Theorem 3: each token sees only itself and the bias token.

    Example:
        >>> from attn_only_lens.reference import neuron_mask
        >>> neuron_mask(2).tolist()
        [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    """
    I_N = torch.eye(n_tokens, dtype=torch.float64, device="cpu")
    return block(I_N, ones(n_tokens, 1), zeros(1, n_tokens), ones(1, 1))


def neuron_heads(mlp: MLP, n_tokens: int) -> tuple[Head, ...]:
    """Return the heads of Theorem 3, one for each neuron of an MLP; they act on M_{N+1,D+1}.

    Args:
        mlp: an MLP on M_{N,D} with a `GeneralizedSiLU`.
        n_tokens: N.

    Returns:
        The heads h_1 … h_ℓ of the ℓ neurons, with f(X) ⊕ [0] = Σ_i h_i(X ⊕ [1]).

    Raises:
        ValueError: the activation is not a `GeneralizedSiLU`.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import MLP, GeneralizedSiLU, direct_sum, neuron_heads
        >>> _ = torch.manual_seed(0)
        >>> shapes = [(5, 3), (3, 7), (7, 3)]
        >>> X, V_1, V_2 = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
        >>> mlp = MLP(V_1, V_2, GeneralizedSiLU())
        >>> total = sum(head(direct_sum(X, 1.0)) for head in neuron_heads(mlp, n_tokens=5))
        >>> torch.allclose(total, direct_sum(mlp(X), 0.0), rtol=1e-12, atol=1e-12)
        True
    """
    alpha = generalized_silu(mlp)
    D, mask = mlp.width, neuron_mask(n_tokens)
    heads = []
    for i in range(mlp.V_1.shape[1]):
        V_1i, V_2i = mlp.V_1[:, [i]], mlp.V_2[[i], :]
        W_QK = alpha.a_2 * block(zeros(D, D), -V_1i, zeros(1, D), zeros(1, 1))
        W_OV = direct_sum(alpha.a_1 * alpha.a_2 * V_1i @ V_2i, 0.0)
        heads.append(Head(W_QK, W_OV, mask))
    return tuple(heads)


def generalized_silu(mlp: MLP) -> GeneralizedSiLU:
    """Return an MLP's activation function; raise ValueError if Theorem 3 does not cover it."""
    if not isinstance(mlp.activation, GeneralizedSiLU):
        raise ValueError(
            f"activation: got {mlp.activation!r}; expected a GeneralizedSiLU. For gelu, use "
            "GeneralizedSiLU(1 / 1.702, 1.702); for relu, GeneralizedSiLU(1 / k, k) with a large k"
        )
    return mlp.activation
