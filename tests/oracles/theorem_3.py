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

**Two vectors per neuron** (a remark of the paper). The heads have internal dimension 1. With
columns W_Q, W_K, W_V, W_O ∈ M_{D+1,1},

    W_QK = W_Q W_Kᵀ / √(D+1)        W_Q = W_V = a₂ [V₁ⁱ | 0]ᵀ
    W_OV = W_V W_Oᵀ                 W_K = √(D+1) [0 | -1]ᵀ,  the same for every neuron
                                    W_O = a₁ [V₂ⁱ | 0]ᵀ

so only W_Q = W_V and W_O must be stored for each neuron. (The paper writes W_OV = W_V W_O, but W_O
must be transposed.) Vaswani et al. divide scores by √d_k, where d_k = 1 here, so a standard
implementation divides by 1 and needs W_K = [0 | -1]ᵀ. Both conventions give the same W_QK; this
file follows the paper. Mixing them would scale the slope a₂ by √(D+1) or 1/√(D+1).

**Persistent vectors** (Sukhbaatar et al., 2019). The bias token need not be a row of the stream:
with Y = [X | 0], the persistent vector p = (0, …, 0, 1) as one more key and value but no query, and
Z = Y stacked on p, msoftmax(Y W_QK Zᵀ, [I_N | 1]) Z W_OV = [f_i(X) | 0]. This is the theorem
without the bias token's output. All heads share p; its key is -√(D+1) and its value 0 in all heads.
"""

import math

import torch
from oracles.definitions import Head, direct_sum, eye, zeros


def neuron_mask(n_tokens):
    """Return Λ: each token sees only itself and the bias token.

    >>> neuron_mask(2).tolist()
    [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    """
    mask = eye(n_tokens + 1)
    mask[:, -1] = 1
    return mask


def neuron_heads(mlp, n_tokens):
    """Return the heads h_i on M_{N+1,D+1}, one for each neuron: f(X) ⊕ [0] = Σ_i h_i(X ⊕ [1]).

    >>> from oracles.definitions import MLP, GeneralizedSiLU
    >>> X, V_1, V_2 = (torch.randn(*shape).double() for shape in [(5, 3), (3, 7), (7, 3)])
    >>> mlp = MLP(V_1, V_2, GeneralizedSiLU())
    >>> total = sum(head(direct_sum(X, 1.0)) for head in neuron_heads(mlp, n_tokens=5))
    >>> torch.allclose(total, direct_sum(mlp(X), 0.0), rtol=1e-12, atol=1e-12)
    True
    """
    alpha, mask = mlp.activation, neuron_mask(n_tokens)
    heads = []
    for V_1i, V_2i in zip(mlp.V_1.T, mlp.V_2, strict=True):
        W_QK = zeros(len(V_1i) + 1, len(V_1i) + 1)
        W_QK[:-1, -1] = -alpha.a_2 * V_1i
        W_OV = direct_sum(alpha.a_1 * alpha.a_2 * torch.outer(V_1i, V_2i), 0.0)
        heads.append(Head(W_QK, W_OV, mask))
    return tuple(heads)


def factors(mlp):
    """Return W_Q = W_V and W_O of every neuron, [D+1, n_neurons], and W_K of all, [D+1]."""
    alpha, n_neurons = mlp.activation, mlp.V_1.shape[1]
    W_Q = alpha.a_2 * torch.cat([mlp.V_1, zeros(1, n_neurons)])
    W_O = alpha.a_1 * torch.cat([mlp.V_2.T, zeros(1, n_neurons)])
    W_K = math.sqrt(len(W_Q)) * -eye(len(W_Q))[-1]
    return W_Q, W_O, W_K
