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
from oracles.definitions import MLP, Head, ones, zeros
from oracles.theorems_7_and_8 import linear_head


def append_ones(X):
    """Return [X | 1]."""
    return torch.cat([X, ones(len(X), 1)], dim=1)


def head_with_biases(W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, mask):
    """Return the head h with h([X | 1]) = [output of the head with biases on X | 0]."""
    W_QK = _over(W_Q, b_Q) @ _over(W_K, b_K).T / math.sqrt(W_Q.shape[1])
    return Head(W_QK, _keeping_the_constant(_over(W_V, b_V) @ W_O), mask)


def constant_head(b, n_tokens):
    """Return the head h with h([X | 1]) = [b at every token | 0].

    >>> head = constant_head(torch.tensor([5.0, 7.0]).double(), n_tokens=1)
    >>> head(append_ones(zeros(1, 2))).tolist()
    [[5.0, 7.0, 0.0]]
    """
    return linear_head(_keeping_the_constant(_over(zeros(len(b), len(b)), b)), n_tokens)


def mlp_with_biases(V_1, b_1, V_2, b_2, activation):
    """Return the MLP f with f([X | 1]) = [α(X V_1 + b_1) V_2 + b_2 | 0].

    Its last neuron, which reads only the constant, writes b_2.
    """
    reads = torch.cat([_over(V_1, b_1), zeros(len(V_1) + 1, 1)], dim=1)
    reads[-1, -1] = 1
    writes = _over(V_2, b_2 / activation(torch.tensor(1.0, dtype=torch.float64)))
    return MLP(reads, _keeping_the_constant(writes), activation)


def _over(W, b):
    return torch.cat([W, b[None]])


def _keeping_the_constant(W):
    """Return [W | 0], which writes 0 to the last coordinate."""
    return torch.cat([W, zeros(len(W), 1)], dim=1)
