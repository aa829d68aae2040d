"""Composition scores of many heads at once, in blocks, and the largest of them.

Every head is a *factor*: a matrix [rank, d_model] of Frobenius norm 1 that stands for all of what
it writes, or reads. A score depends on W_OV through its products alone, and for any A with
A = Q T, Q's columns orthonormal, ‖A B‖ = ‖T B‖. So

    of a writer  A B   T B         A = Q T
    of a reader  A B   (A Tᵀ)ᵀ     Bᵀ = Q T

of rank d_head for an attention head, 1 for a neuron, d_model for the embedding (where T Tᵀ comes
from W_Eᵀ W_E, summed over the vocabulary piece by piece): no d_model × d_model product for a pair.
The scores of some writers and some readers are one matrix product of their factors, squared and
summed over both ranks.

Memory, in numbers of the weights' dtype (float32 for shorter ones: 4 bytes), beyond the model:

    2 d_model Σ d_head                  once: the factors of all attention heads
    d_model²                            once: that of the embedding (four times that in float64,
                                        and a piece of W_E, while it is made)
    4 b d_model + 2 b² + 16 b min(k, b) a block of at most b rows of factors a side (one head, where
                                        it has more): factors, scores, the k largest of each row
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import CircuitError
from attn_only_lens.numerics import where_float64_is

__all__ = [
    "Group",
    "Largest",
    "embedding_factor",
    "pieces",
    "reader_factor",
    "scores",
    "writer_factor",
]

_PIECE = 1024


@dataclass(frozen=True, eq=False)
class Group:
    """Heads of one kind in one layer, as writers or as readers.

    Attributes:
        names: of each head.
        stage: how many sublayers have written before these read; or, of writers, once they have.
        rank: of each factor.
        take: the factors of a slice of the heads, [head, rank, d_model].
    """

    names: tuple[str, ...]
    stage: int
    rank: int
    take: Callable[[slice], Float[Tensor, "head rank d_model"]]


def writer_factor(matrix: FactoredMatrix, names: tuple[str, ...]) -> Tensor:
    """The factors of writers, from what they write."""
    return _unit(torch.linalg.qr(matrix.A).R @ matrix.B, names)


def reader_factor(matrix: FactoredMatrix, names: tuple[str, ...]) -> Tensor:
    """The factors of readers, from what they read."""
    return writer_factor(matrix.T, names)


def embedding_factor(W_E: Float[Tensor, "d_vocab d_model"]) -> Float[Tensor, "1 d_model d_model"]:
    """The factor of the embedding, by its Gram matrix in float64."""
    d_model = W_E.shape[1]
    fine = where_float64_is(W_E)
    gram = torch.zeros(d_model, d_model, dtype=torch.float64, device=fine.device)
    for rows in fine.split(_PIECE):
        rows = rows.double()
        gram.addmm_(rows.T, rows)
    if not gram.isfinite().all():
        raise CircuitError(["the embedding has weights that are not finite"], _PROBLEM)
    values, vectors = torch.linalg.eigh(gram)
    factor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return _unit(factor.to(W_E)[None], ("embed",))


_PROBLEM = "no composition scores can be computed"


def _unit(factors: Tensor, names: tuple[str, ...]) -> Tensor:
    """Set to norm 1, in place; what writes or reads nothing stays zero, and composes with nothing.

    Raises:
        CircuitError: weights are not finite.
    """
    # At their largest entry first: squares of large or small weights leave their type's range.
    largest = torch.linalg.vector_norm(factors, ord=torch.inf, dim=(-2, -1), keepdim=True)
    bad = [
        name
        for name, fine in zip(names, largest.flatten().isfinite().tolist(), strict=True)
        if not fine
    ]
    if bad:
        raise CircuitError(
            [f"{len(bad)} heads, such as {bad[0]}, have weights that are not finite"], _PROBLEM
        )
    factors /= torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(factors, dim=(-2, -1), keepdim=True)
    factors /= torch.where(norm == 0, 1.0, norm)
    return factors


def pieces(group: Group, block: int) -> Iterator[slice]:
    """Slices of a group's heads with at most `block` rows of factors, or one head."""
    step = max(1, block // group.rank)
    for start in range(0, len(group.names), step):
        yield slice(start, min(start + step, len(group.names)))


def scores(
    writers: Float[Tensor, "writer rank d_model"], readers: Float[Tensor, "reader rank_2 d_model"]
) -> Float[Tensor, "writer reader"]:
    """The composition score of every pair."""
    product = writers.flatten(0, 1) @ readers.flatten(0, 1).T
    if writers.shape[1] == readers.shape[1] == 1:
        return product.abs_()
    shape = len(writers), writers.shape[1], len(readers), readers.shape[1]
    return product.square_().view(shape).sum(dim=(1, 3)).sqrt_()


class Largest:
    """The k largest scores so far."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = torch.empty(0, device="cpu")
        self.pairs: Int[Tensor, "pair 2"] = torch.empty(0, 2, dtype=torch.long, device="cpu")
        self.seen = 0

    def add(self, found: Float[Tensor, "writer reader"], first: tuple[int, int]) -> None:
        """Look at the scores of a block whose first writer and reader have these numbers."""
        self.seen += found.numel()
        least = self.values[-1].item() if len(self.values) == self.k else -1.0
        rows = (found.amax(dim=1) > least).nonzero().squeeze(1)
        if not len(rows):
            return
        values, columns = found[rows].topk(min(self.k, found.shape[1]), dim=1)
        pairs = torch.stack([rows[:, None].expand_as(columns) + first[0], columns + first[1]], -1)
        values = torch.cat([self.values.to(values), values.flatten()])
        self.pairs = torch.cat([self.pairs.to(pairs.device), pairs.flatten(0, 1)])
        self.values, order = values.topk(min(self.k, len(values)))
        self.pairs = self.pairs[order]
