"""The largest entries of a matrix that is made block by block, and never held."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LargestScores:
    """The k largest scores so far, of a writer and a reader each.

    Example:
        >>> largest = LargestScores(2)
        >>> largest.add(torch.tensor([[1.0, 5.0], [7.0, 3.0]]), (0, 0))
        >>> largest.add(torch.tensor([[6.0]]), (0, 2))
        >>> largest.pairs.tolist(), largest.values.tolist()
        ([[1, 0], [0, 2]], [7.0, 6.0])
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = torch.empty(0, device="cpu")
        self.pairs: Int[Tensor, "pair 2"] = torch.empty(0, 2, dtype=torch.long, device="cpu")
        self.seen = 0

    def add(self, found: Float[Tensor, "writer reader"], first: tuple[int, int]) -> None:
        """Add the scores of a block whose first writer and reader have these numbers."""
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
