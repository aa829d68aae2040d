"""Theorem 6: replacing every MLP sublayer by heads does not change a transformer's function.

For each transformer t on M_{N,D} whose MLPs have generalised SiLU activations, there is an
attention-only transformer t′ on M_{N+1,D+1} whose stream at every sublayer j is X′_j = X_j ⊕ [1].

(Theorem 4 of the draft.) Proof (Appendix A of the draft), by induction on j. MLPs become the heads
of Theorem 3. A head h becomes a head h′ with W′_QK = W_QK ⊕ [1], W′_OV = W_OV ⊕ [0] and Λ′ = Λ ⊕
[1]. Then h′(X ⊕ [1]) = h(X) ⊕ [0], because Λ′ separates the tokens from the bias token, and the
bias token's output is 0. So every sublayer s has s′(X ⊕ [1]) = s(X) ⊕ [0], and with norm′(Y ⊕ [1])
= norm(Y) ⊕ [1],

    post-norm    norm′(X_j ⊕ [1] + s(X_j) ⊕ [0]) = norm(X_j + s(X_j)) ⊕ [1]
    pre-norm     X_j ⊕ [1] + s′(norm(X_j) ⊕ [1]) = (X_j + s(norm(X_j))) ⊕ [1]

and the same holds for a final norm. The paper has only the post-norm form; we added the pre-norm
form for GPT-2. Biases are handled by the bias trick (`bias_trick.py`): t acts on [X | 1],
t′ acts on [X | 1] ⊕ [1], and each sublayer has one more head, which outputs b_O or b₂.

**The norm.** The draft writes LayerNorm(Y ⊕ [1]) = LayerNorm(Y) ⊕ [1], as if one LayerNorm fitted
both sides. This equation is false, and no LayerNorm of D + 1 coordinates satisfies it for any gain
g and bias b.
Proof: the bias coordinate of a token (y | 0) becomes -g_{D+1} μ/s + b_{D+1}, where μ and s are the
row's mean and standard deviation. Since μ/s varies, this is 0 for all y only if g_{D+1} = b_{D+1} =
0. But then the bias coordinate of the bias token becomes 0, and not 1. Normalising only the first D
coordinates of every row is not enough either: the bias token (0 | 1) becomes (b | 1), or 0/0 if eps
= 0. The bias token's value b V₁ⁱ is then not 0, so Theorem 3 fails unless b = 0 and eps > 0.
Therefore the proof uses `PassingNorm`, which normalises only the first N rows and D columns.

**Skip connections** (a remark of the paper). Every head outputs 0 at the bias token, so without the
first skip connection, X′_1 would be X_1 ⊕ [0]. In the next MLP's heads, all scores would then be 0
and all gates 1/2, so that these heads would compute the linear map ½ a₁ a₂ X_1 V₁ V₂.
"""

from dataclasses import dataclass

from oracles.definitions import MLP, Head, Norm, Transformer, direct_sum
from oracles.theorem_3 import neuron_heads


@dataclass(frozen=True)
class PassingNorm:
    """A norm of the first N rows and D columns, which leaves all other entries unchanged.

    >>> import torch
    >>> PassingNorm(torch.neg, n_tokens=1, d=1)(torch.eye(2).double()).tolist()
    [[-1.0, 0.0], [0.0, 1.0]]
    """

    norm: Norm
    n_tokens: int
    d: int

    def __call__(self, X):
        normed = X.clone()
        normed[: self.n_tokens, : self.d] = self.norm(X[: self.n_tokens, : self.d])
        return normed


def extended_head(head):
    """Return h′ with h′(X ⊕ [1]) = h(X) ⊕ [0]."""
    return Head(direct_sum(head.W_QK, 1.0), direct_sum(head.W_OV, 0.0), direct_sum(head.mask, 1.0))


def attention_only(transformer, n_tokens, d):
    """Return t′ on M_{N+1,D+1}, whose stream is X_j ⊕ [1], for a transformer t on M_{N,D}."""

    def passing(norm):
        return norm and PassingNorm(norm, n_tokens, d)

    return Transformer(
        tuple(
            neuron_heads(sublayer, n_tokens)
            if isinstance(sublayer, MLP)
            else tuple(extended_head(head) for head in sublayer)
            for sublayer in transformer.sublayers
        ),
        tuple(passing(norm) for norm in transformer.norms),
        transformer.pre_norm,
        passing(transformer.final_norm),
    )
