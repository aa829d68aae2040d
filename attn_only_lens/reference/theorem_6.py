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
form for GPT-2. Biases are handled by the bias trick (`reference/bias_trick.py`): t acts on [X | 1],
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

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import check_matrix, direct_sum
from attn_only_lens.reference.theorem_3 import neuron_heads
from attn_only_lens.reference.transformer import Norm, Transformer


@dataclass(frozen=True)
class PassingNorm:
    """A norm that is applied only to the first N rows and D columns of a matrix.

    So the constant coordinate and the bias token of [X | 1], X ⊕ [1] and [X | 1] ⊕ [1] do not
    change.

    Attributes:
        norm: a norm on M_{N,D}.
        n_tokens: N.
        d: D.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import PassingNorm
        >>> PassingNorm(torch.neg, n_tokens=1, d=1)(torch.eye(2, dtype=torch.float64)).tolist()
        [[-1.0, 0.0], [0.0, 1.0]]
    """

    norm: Norm
    n_tokens: int
    d: int

    def __call__(self, X: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """Return X with X[:N, :D] replaced by norm(X[:N, :D]).

        Raises:
            ValueError: X is not a float64 matrix, or is smaller than N × D.
        """
        check_matrix("X", X)
        if X.shape[0] < self.n_tokens or X.shape[1] < self.d:
            raise ValueError(
                f"X: got shape {list(X.shape)}; expected [{self.n_tokens}, {self.d}] or larger"
            )
        normed = X.clone()
        normed[: self.n_tokens, : self.d] = self.norm(X[: self.n_tokens, : self.d])
        return normed


def extended_head(head: Head) -> Head:
    """Extend a head h to streams with a bias token: return h′ with h′(X ⊕ [1]) = h(X) ⊕ [0].

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import Head, extended_head
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> extended_head(Head(one, one, mask=one)).mask.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return Head(direct_sum(head.W_QK, 1.0), direct_sum(head.W_OV, 0.0), direct_sum(head.mask, 1.0))


def attention_only(transformer: Transformer, n_tokens: int) -> Transformer:
    """Return the attention-only transformer t′ of Theorem 6, whose stream is X_j ⊕ [1].

    Args:
        transformer: t on M_{N,D}, post-norm or pre-norm; every MLP has a `GeneralizedSiLU`.
        n_tokens: N.

    Returns:
        t′ on M_{N+1,D+1}, with one sublayer per sublayer of t; heads are in the order of neurons.
        `.run(X ⊕ [1])` returns every intermediate stream, output and pattern.

    Raises:
        ValueError: an activation is not a `GeneralizedSiLU`, or a mask is not for `n_tokens`
            tokens.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import (
        ...     MLP, GeneralizedSiLU, LayerNorm, Transformer, attention_only, direct_sum
        ... )
        >>> _ = torch.manual_seed(0)
        >>> shapes = [(5, 3), (3, 7), (7, 3)]
        >>> X, V_1, V_2 = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
        >>> one = torch.ones(3, dtype=torch.float64)
        >>> norm = LayerNorm(gain=2 * one, bias=one)
        >>> t = Transformer((MLP(V_1, V_2, GeneralizedSiLU()),), norms=(norm,))
        >>> got = attention_only(t, n_tokens=5)(direct_sum(X, 1.0))
        >>> torch.allclose(got, direct_sum(t(X), 1.0), rtol=1e-12, atol=1e-12)
        True
    """
    sublayers = []
    for sublayer in transformer.sublayers:
        if isinstance(sublayer, tuple):
            sublayers.append(tuple(_extended(head, n_tokens) for head in sublayer))
        else:
            sublayers.append(neuron_heads(sublayer, n_tokens))

    def passing(norm: Norm) -> Norm:
        return PassingNorm(norm, n_tokens, transformer.width)

    final = transformer.final_norm
    return Transformer(
        tuple(sublayers),
        tuple(passing(norm) for norm in transformer.norms),
        transformer.pre_norm,
        None if final is None else passing(final),
    )


def _extended(head: Head, n_tokens: int) -> Head:
    if head.n_tokens != n_tokens:
        raise ValueError(f"n_tokens: got {n_tokens}; expected the masks' size, {head.n_tokens}")
    return extended_head(head)
