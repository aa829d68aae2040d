"""The paper's definitions, as dense float64 matrices with one token per row.

"Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2. Theorems have
the numbers of the arXiv version, 2309.08593; the constructions follow the anonymous draft, in which
Theorems 3, 6, 7 and 8 have the numbers 2, 4, 6 and 7. Nothing here shares code with the package.

X ⊕ Y is the block matrix with X and Y on its diagonal, and M_{n,k} the set of real n × k matrices.
A mask Λ has entries 0 and 1, with at least one 1 in every row. Then

    msoftmax(A, Λ) = rownorm(exp(A) ⊙ Λ)
    head           h(X) = msoftmax(X W_QK Xᵀ, Λ) X W_OV        X ∈ M_{N,D}
    MLP            f(X) = α(X V₁) V₂                           α(x) = a₁ SiLU(a₂ x)

A transformer is X_0 ↦ X_1 ↦ … ↦ X_m, where sublayer s_j is an MLP or a sum of heads, and

    post-norm, the paper's:    X_{j+1} = LayerNorm_j(X_j + s_j(X_j))
    pre-norm, GPT-2's:         X_{j+1} = X_j + s_j(LayerNorm_j(X_j)),    then LayerNorm_final(X_m)

The paper has no pre-norm form.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def zeros(rows, columns):
    return torch.zeros(rows, columns, dtype=torch.float64)


def ones(rows, columns):
    return torch.ones(rows, columns, dtype=torch.float64)


def eye(size):
    return torch.eye(size, dtype=torch.float64)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def direct_sum(X, Y):
    """Return X ⊕ Y; a number y is the 1 × 1 matrix [y].

    >>> direct_sum(torch.tensor([[3.0, 5.0]]).double(), 1.0).tolist()
    [[3.0, 5.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return torch.block_diag(X, torch.as_tensor(Y, dtype=torch.float64))


def msoftmax(A, mask):
    """Return the masked softmax, which is exactly 0 where the mask is 0."""
    assert ((mask == 0) | (mask == 1)).all()
    assert mask.any(dim=1).all(), "softmax would be 0/0 in a row without a 1"
    visible = A.masked_fill(mask == 0, -math.inf)
    # Subtracting a row's maximum does not change the weights, and keeps exp finite.
    weights = (visible - visible.amax(dim=1, keepdim=True)).exp()
    return weights / weights.sum(dim=1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Head:
    """A masked attention head; any scaling of scores by a square root is part of W_QK."""

    W_QK: Tensor
    W_OV: Tensor
    mask: Tensor

    def scores(self, X):
        return X @ self.W_QK @ X.T

    def pattern(self, X):
        return msoftmax(self.scores(X), self.mask)

    def __call__(self, X):
        return self.pattern(X) @ X @ self.W_OV


@dataclass(frozen=True)
class GeneralizedSiLU:
    """α(x) = a_1 SiLU(a_2 x)."""

    a_1: float = 1.0
    a_2: float = 1.0

    def __call__(self, x):
        return self.a_1 * (self.a_2 * x) * torch.sigmoid(self.a_2 * x)


@dataclass(frozen=True, eq=False)
class MLP:
    """An MLP without biases: column i of V_1 and row i of V_2 belong to neuron i."""

    V_1: Tensor
    V_2: Tensor
    activation: Callable[[Tensor], Tensor]

    def __call__(self, X):
        return self.activation(X @ self.V_1) @ self.V_2


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean) / √(variance + eps) · gain + bias, for every row x."""

    gain: Tensor
    bias: Tensor
    eps: float = 1e-5

    def __call__(self, X):
        centred = X - X.mean(dim=1, keepdim=True)
        variance = centred.square().mean(dim=1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.gain + self.bias


@dataclass(frozen=True, eq=False)
class Run:
    """Every matrix that a transformer with m sublayers computes.

    Attributes:
        stream: X_0 … X_m.
        outputs: the output of each sublayer, before the skip connection adds X_j.
        patterns: the patterns of each sublayer, [n_heads, n_tokens, n_tokens].
        result: X_m, after the final norm if there is one.
    """

    stream: list[Tensor]
    outputs: list[Tensor]
    patterns: list[Tensor]
    result: Tensor


@dataclass(frozen=True, eq=False)
class Transformer:
    """Sublayers (an MLP, or a tuple of heads) with one norm for each."""

    sublayers: tuple[MLP | tuple[Head, ...], ...]
    norms: tuple[Norm, ...]
    pre_norm: bool = False
    final_norm: Norm | None = None

    def run(self, X):
        stream, outputs, patterns = [X], [], []
        for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
            X = stream[-1]
            read = norm(X) if self.pre_norm else X
            heads = [] if isinstance(sublayer, MLP) else sublayer
            outputs.append(sum(head(read) for head in heads) if heads else sublayer(read))
            patterns.append(
                torch.stack([head.pattern(read) for head in heads]) if heads else zeros(0, 0)
            )
            stream.append(X + outputs[-1] if self.pre_norm else norm(X + outputs[-1]))
        result = stream[-1] if self.final_norm is None else self.final_norm(stream[-1])
        return Run(stream, outputs, patterns, result)
