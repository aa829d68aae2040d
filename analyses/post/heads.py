"""Plain attention heads, unmasked and without biases, and weights split over several of them.

A sublayer adds its heads to the stream X, each

    softmax(X W_Q (X W_K)ᵀ) X W_V W_O

with the softmax over keys, and the usual 1/√d_head folded into W_Q, as the post does. A head's
W_V W_O has rank d_head at most. "If the weight matrix W is too high-rank, it can be split over
multiple attention heads with equal Q matrices": with equal patterns A, Σ_h A X W_V^h W_O^h =
A X (Σ_h W_V^h W_O^h), so W = R S with inner size r needs ⌈r / d_head⌉ heads, each with d_head
columns of R and the same rows of S. No decomposition is computed, so nothing is rounded.

W_Q W_Kᵀ cannot be split in this way: a softmax of a sum is not a sum of softmaxes. The added heads
need rank N + 1 there, for any d_head, as the post says.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The heads of one sublayer.

    Attributes:
        W_Q: queries, [n_heads, width, d_qk], including the scale 1/√d_head.
        W_K: keys, [n_heads, width, d_qk].
        W_V: values, [n_heads, width, d_ov].
        W_O: outputs, [n_heads, d_ov, width].

    Example:
        >>> eye, zero = torch.eye(2).expand(1, 2, 2), torch.zeros(1, 2, 2)
        >>> mean = Heads(W_Q=zero, W_K=zero, W_V=eye, W_O=eye)  # equal scores: a mean over keys
        >>> mean(torch.tensor([[1.0, 2.0], [5.0, 4.0]]))
        tensor([[4., 5.],
                [8., 7.]])
    """

    W_Q: Float[Tensor, "n_heads width d_qk"]
    W_K: Float[Tensor, "n_heads width d_qk"]
    W_V: Float[Tensor, "n_heads width d_ov"]
    W_O: Float[Tensor, "n_heads d_ov width"]

    def scores(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return scores before the softmax, [*batch, n_heads, query, key]."""
        # One product for all heads: broadcasting would copy the stream for each head.
        queries = torch.einsum("...nw,hwd->...hnd", stream, self.W_Q)
        return queries @ torch.einsum("...nw,hwd->...hnd", stream, self.W_K).mT

    def pattern(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return attention weights, [*batch, n_heads, query, key]; those of a query sum to 1."""
        return self.scores(stream).softmax(-1)

    def __call__(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return the stream after the sublayer, including the skip connection."""
        return stream + self.write(stream, self.pattern(stream))

    def write(
        self,
        stream: Float[Tensor, "*batch n_vectors width"],
        pattern: Float[Tensor, "*batch n_heads n_vectors n_vectors"],
    ) -> Tensor:
        """Return what the heads add to the stream, for a given pattern."""
        z = pattern @ torch.einsum("...nw,hwd->...hnd", stream, self.W_V)
        return torch.einsum("...hnd,hdw->...nw", z, self.W_O)


def split(
    reads: Float[Tensor, "width rank"], writes: Float[Tensor, "rank width"], d_head: int
) -> tuple[Tensor, Tensor]:
    """Split the value matrix `reads @ writes` over heads of width d_head.

    Args:
        reads: columns that read from the stream, [width, rank].
        writes: rows that are written for them, [rank, width].
        d_head: the largest width of a head; the last head is padded with zeros.

    Returns:
        W_V [n_heads, width, d_head] and W_O [n_heads, d_head, width], n_heads = ⌈rank / d_head⌉.

    Raises:
        ValueError: d_head is not a positive integer.

    Example:
        >>> reads, writes = torch.randn(7, 5), torch.randn(5, 7)
        >>> W_V, W_O = split(reads, writes, d_head=2)
        >>> W_V.shape, W_O.shape
        (torch.Size([3, 7, 2]), torch.Size([3, 2, 7]))
        >>> torch.allclose((W_V @ W_O).sum(0), reads @ writes, atol=1e-5)
        True
    """
    if not isinstance(d_head, int) or d_head < 1:
        raise ValueError(f"d_head: got {d_head!r}; expected an integer of at least 1")
    width, rank = reads.shape
    missing = -rank % d_head
    reads = torch.cat([reads, reads.new_zeros(width, missing)], dim=1)
    writes = torch.cat([writes, writes.new_zeros(missing, width)], dim=0)
    return reads.unflatten(1, (-1, d_head)).transpose(0, 1), writes.unflatten(0, (-1, d_head))
