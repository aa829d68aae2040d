"""Find the largest entries of a matrix in chunks, without storing the whole matrix."""

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

_Numbers: TypeAlias = int | Int[Tensor, "number"]
_ROUNDED = 1.001  # a bound times this factor holds despite rounding, in any dtype


class LargestScores:
    """The k largest scores added so far, with their rows and columns in the matrix.

    Example:
        >>> largest = LargestScores(2)
        >>> largest.add(torch.tensor([[1.0, 5.0], [7.0, 3.0]]), (0, 0))
        >>> largest.pairs.tolist(), largest.values.tolist()
        ([[1, 0], [0, 1]], [7.0, 5.0])
    """

    def __init__(self, k: int, *, by_size: bool = False) -> None:
        self.k, self.by_size = k, by_size
        self.values = torch.empty(0, device="cpu")
        self.pairs: Int[Tensor, "pair 2"] = torch.empty(0, 2, dtype=torch.long, device="cpu")
        self.seen = 0

    def add(self, block: Float[Tensor, "writer reader"], first: tuple[_Numbers, _Numbers]) -> None:
        """Add a chunk of scores."""
        self.seen += block.numel()
        sizes = self._sizes(block)
        rows = (sizes.amax(dim=1) > self._least).nonzero().squeeze(1)
        if not len(rows):
            return
        columns = sizes[rows].topk(min(self.k, block.shape[1]), dim=1).indices
        values = block[rows[:, None], columns]
        indices = (rows[:, None].expand_as(columns), columns)
        numbers = [
            index + start if isinstance(start, int) else start.to(index.device)[index]
            for index, start in zip(indices, first, strict=True)
        ]
        pairs = torch.stack(numbers, -1)
        values = torch.cat([self.values.to(values), values.flatten()])
        self.pairs = torch.cat([self.pairs.to(pairs.device), pairs.flatten(0, 1)])
        order = self._sizes(values).topk(min(self.k, len(values))).indices
        self.values, self.pairs = values[order], self.pairs[order]

    @property
    def _least(self) -> float:
        """The threshold that a score (or its absolute value) must exceed to be kept."""
        full = len(self.values) == self.k
        return self._sizes(self.values[-1]).item() if full else -float("inf")

    def _sizes(self, scores: Tensor) -> Tensor:
        return scores.abs() if self.by_size else scores

    def add_products(
        self,
        left: Float[Tensor, "writer d"],
        right: Float[Tensor, "reader d"],
        first: tuple[int, int],
        *,
        block: int,
    ) -> None:
        """Add the score a · b of every row a of `left` and every row b of `right`.

        Skip chunks whose upper bound ‖a‖ ‖b‖ does not exceed the smallest kept score. Chunks of
        `block` rows need 2 block d + 2 block² + 16 block min(k, block) numbers in memory.
        """
        seen = self.seen + len(left) * len(right)
        (left_norms, left_rows), (right_norms, right_rows) = (
            matrix.norm(dim=1).sort(descending=True) for matrix in (left, right)
        )
        for i in range(0, len(left), block):
            rows = left_rows[i : i + block]
            left_block = left[rows]
            for j in range(0, len(right), block):
                if float(left_norms[i]) * float(right_norms[j]) * _ROUNDED <= self._least:
                    break
                columns = right_rows[j : j + block]
                self.add(left_block @ right[columns].T, (rows + first[0], columns + first[1]))
        self.seen = seen
