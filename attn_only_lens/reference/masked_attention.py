"""Definitions of the masked softmax and the masked attention head.

A mask matrix Λ has entries in {0, 1} and at least one 1 in every row. Let rownorm be the row-wise
ℓ¹ normalisation and ⊙ the element-wise product. Then

    msoftmax(A, Λ) = rownorm(exp(A) ⊙ Λ)
    h(X) = msoftmax(X W_QK Xᵀ, Λ) X W_OV        X ∈ M_{N,D}, one token per row

("Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2.) Where Λ is 0,
the masked softmax is exactly 0. A mask with a row of zeros is an error, because the softmax of this
row would be 0/0. A head's mask has a fixed size N, so a text of another length needs another head.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.matrices import check_matrix


def msoftmax(
    A: Float[Tensor, "n_queries n_keys"], mask: Float[Tensor, "n_queries n_keys"]
) -> Float[Tensor, "n_queries n_keys"]:
    """Return the masked softmax, rownorm(exp(A) ⊙ Λ).

    Args:
        A: scores.
        mask: Λ, entries 0 and 1, at least one 1 in every row.

    Returns:
        The attention pattern: each row sums to 1, and entries are 0 where the mask is 0.

    Raises:
        ValueError: a shape or dtype is wrong, the mask has an entry other than 0 or 1, or a row of
            the mask has no 1.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import msoftmax
        >>> scores = torch.tensor([[0.0, 99.0], [0.0, 0.0]], dtype=torch.float64)
        >>> mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        >>> msoftmax(scores, mask).tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    check_matrix("A", A)
    _check_mask(mask, *A.shape)
    visible = A.masked_fill(mask == 0, -math.inf)
    # Subtracting a row's maximum does not change the weights, and keeps exp finite.
    weights = (visible - visible.amax(dim=1, keepdim=True)).exp()
    return weights / weights.sum(dim=1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Head:
    """A masked attention head, which maps N × D matrices X (one row per token) to N × D matrices.

    Attributes:
        W_QK: scores are X W_QK Xᵀ, with any scaling by a square root included.
        W_OV: values are X W_OV.
        mask: Λ; its size is the number of tokens N.

    Raises:
        ValueError: a shape or dtype is wrong, the mask has an entry other than 0 or 1, or a row of
            the mask has no 1.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import Head
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> head = Head(W_QK=0 * eye, W_OV=10 * eye, mask=torch.ones_like(eye))
        >>> X = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)
        >>> head.pattern(X).tolist(), head(X).tolist()
        ([[0.5, 0.5], [0.5, 0.5]], [[20.0, 40.0], [20.0, 40.0]])
    """

    W_QK: Float[Tensor, "d d"]
    W_OV: Float[Tensor, "d d"]
    mask: Float[Tensor, "n_tokens n_tokens"]

    def __post_init__(self) -> None:
        check_matrix("W_QK", self.W_QK, columns=self.W_QK.shape[0])
        check_matrix("W_OV", self.W_OV, *self.W_QK.shape)
        _check_mask(self.mask, self.mask.shape[0], self.mask.shape[0])

    @property
    def n_tokens(self) -> int:
        """N."""
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.W_QK.shape[0]

    def scores(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens n_tokens"]:
        """Return the attention scores X W_QK Xᵀ, to which the mask is not yet applied."""
        check_matrix("X", X, self.n_tokens, self.width)
        return X @ self.W_QK @ X.T

    def pattern(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens n_tokens"]:
        """Return the attention pattern, msoftmax(X W_QK Xᵀ, Λ)."""
        return msoftmax(self.scores(X), self.mask)

    def __call__(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d"]:
        """Return the head's output, h(X) = msoftmax(X W_QK Xᵀ, Λ) X W_OV."""
        return self.pattern(X) @ X @ self.W_OV


def _check_mask(mask: Tensor, rows: int, columns: int) -> None:
    check_matrix("mask", mask, rows, columns)
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"mask: got entries {mask.unique().tolist()}; expected 0 and 1 only")
    empty = (mask == 0).all(dim=1).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"mask: got no 1 in rows {empty}; expected at least one in each row: let these tokens "
            "attend to themselves, with a W_OV that outputs zeros"
        )
