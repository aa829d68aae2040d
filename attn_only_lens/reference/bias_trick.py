"""The bias trick: if each token has a coordinate that is 1, heads and MLPs need no biases.

Theorem 6 assumes this trick. Every token gets an additional coordinate that is always 1, and a bias
becomes the row of the weight matrix for this coordinate: the new matrix W̃ is W stacked on b.

* **Input biases.** [X | 1] W̃ = X W + b. The input matrix of an MLP therefore becomes Ṽ₁, which is
  V₁ stacked on b₁. A head has W̃_QK = W̃_Q W̃_Kᵀ / √d_head. For values, W̃_OV = W̃_V W_O adds b_V
  W_O exactly once, because each row of a pattern sums to 1.
* **Output biases.** For b₂, the MLP gets one more neuron, with pre-activation 1, activation α(1)
  and output row b₂ / α(1). For b_O, one more head, masked to the diagonal (Theorem 7), outputs b_O.
* **The constant stays.** No sublayer writes to the last coordinate (the last columns of V₂ and W_OV
  are 0), so the skip connection preserves this coordinate. LayerNorms must also preserve the
  coordinate (see `theorem_6.PassingNorm`).

The constant coordinate is not the bias coordinate of Theorem 3, which is 1 on the bias token and 0
on other tokens. The two coordinates must differ: otherwise, with the paper's W_K, each token would
have the same key as the bias token, and all attention weights would be 1/2.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import check_matrix, check_vector, direct_sum, ones, zeros
from attn_only_lens.reference.theorem_7 import linear_head
from attn_only_lens.reference.transformer import MLP, GeneralizedSiLU


def append_ones(X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d+1"]:
    """Return [X | 1].

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import append_ones
        >>> append_ones(torch.tensor([[3.0, 5.0]], dtype=torch.float64)).tolist()
        [[3.0, 5.0, 1.0]]
    """
    check_matrix("X", X)
    return torch.cat([X, ones(len(X), 1)], dim=1)


def head_with_biases(
    W_Q: Float[Tensor, "d d_head"],
    b_Q: Float[Tensor, " d_head"],
    W_K: Float[Tensor, "d d_head"],
    b_K: Float[Tensor, " d_head"],
    W_V: Float[Tensor, "d d_head"],
    b_V: Float[Tensor, " d_head"],
    W_O: Float[Tensor, "d_head d"],
    mask: Float[Tensor, "n_tokens n_tokens"],
) -> Head:
    """Return a head without biases that computes on [X | 1] what a head with biases computes on X.

    Returns:
        The head h on M_{N,D+1} with h([X | 1]) = [output of the head with biases | 0], where the
        scores of the head with biases are divided by √d_head.

    Raises:
        ValueError: shapes do not match, a tensor is not float64, or the mask is invalid for `Head`.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import append_ones, head_with_biases
        >>> W, b = torch.zeros(2, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> head = head_with_biases(W, b, W, b, W, 3 * b, W.T + 7, mask=one)
        >>> head(append_ones(W.T)).tolist()
        [[21.0, 21.0, 0.0]]
    """
    check_matrix("W_Q", W_Q)
    D, d_head = W_Q.shape
    for name, W in (("W_K", W_K), ("W_V", W_V)):
        check_matrix(name, W, D, d_head)
    for name, b in (("b_Q", b_Q), ("b_K", b_K), ("b_V", b_V)):
        check_vector(name, b, d_head)
    check_matrix("W_O", W_O, d_head, D)
    W_QK = _over(W_Q, b_Q) @ _over(W_K, b_K).T / math.sqrt(d_head)
    W_OV = _over(W_V, b_V) @ torch.cat([W_O, zeros(d_head, 1)], dim=1)
    return Head(W_QK, W_OV, mask)


def constant_head(b: Float[Tensor, " d"], n_tokens: int) -> Head:
    """Return a head on [X | 1] that outputs b at every token, so that b_O is not needed.

    Raises:
        ValueError: b is not a float64 vector.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import append_ones, constant_head
        >>> head = constant_head(torch.tensor([5.0, 7.0], dtype=torch.float64), n_tokens=1)
        >>> head(append_ones(torch.zeros(1, 2, dtype=torch.float64))).tolist()
        [[5.0, 7.0, 0.0]]
    """
    check_vector("b", b, b.numel())
    W_OV = _over(zeros(b.numel(), b.numel()), b)
    return linear_head(torch.cat([W_OV, zeros(len(W_OV), 1)], dim=1), n_tokens)


def mlp_with_biases(
    V_1: Float[Tensor, "d d_mlp"],
    b_1: Float[Tensor, " d_mlp"],
    V_2: Float[Tensor, "d_mlp d"],
    b_2: Float[Tensor, " d"],
    activation: GeneralizedSiLU,
) -> MLP:
    """Return X ↦ α(X V_1 + b_1) V_2 + b_2 as an MLP without biases on [X | 1].

    Returns:
        f on M_{N,D+1} with hidden size ℓ + 1 (its last neuron outputs b_2), with
        f([X | 1]) = [α(X V_1 + b_1) V_2 + b_2 | 0].

    Raises:
        ValueError: shapes do not match, a tensor is not float64, or the activation is 0
            everywhere, so that no neuron can output b_2.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import GeneralizedSiLU, append_ones, mlp_with_biases
        >>> V, b = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> mlp = mlp_with_biases(V, b, V, b + 5, GeneralizedSiLU())
        >>> mlp(append_ones(V)).tolist()
        [[5.0, 0.0]]
    """
    check_matrix("V_1", V_1)
    D, size = V_1.shape
    check_vector("b_1", b_1, size)
    check_matrix("V_2", V_2, size, D)
    check_vector("b_2", b_2, D)
    written = activation(torch.tensor(1.0, dtype=torch.float64, device="cpu"))
    if written == 0:
        raise ValueError(f"activation: got {activation}, which maps 1 to 0; expected a_1, a_2 ≠ 0")
    # The last column of Ṽ_1 reads only the constant coordinate, with weight 1.
    reading = direct_sum(V_1, 1.0)
    reading[D, :size] = b_1
    writing = torch.cat([V_2, b_2[None] / written])
    return MLP(reading, torch.cat([writing, zeros(size + 1, 1)], dim=1), activation)


def _over(W: Tensor, b: Tensor) -> Tensor:
    return torch.cat([W, b[None]])
