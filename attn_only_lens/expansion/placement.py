"""Where old indices, old tensors and required zeros are among the new ones."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

__all__ = ["Moved", "Place", "Zeros"]


@dataclass(frozen=True)
class Place:
    """Where the old indices of an axis, or the old layers, are among the new ones.

    Attributes:
        where: the new index of each old one.
        size: how many there are now.
    """

    where: tuple[int, ...]
    size: int

    @classmethod
    def same(cls, size: int) -> "Place":
        """Nothing moves."""
        return cls(tuple(range(size)), size)

    def then(self, after: "Place") -> "Place":
        """First this move, then `after`."""
        if after.appended:
            return Place(self.where, after.size)
        return Place(tuple(after.where[index] for index in self.where), after.size)

    @cached_property
    def appended(self) -> bool:
        """Whether the old indices are as they were, the new ones after them."""
        return self.where == tuple(range(len(self.where)))

    @cached_property
    def old(self) -> dict[int, int]:
        """The old index at each new one that has one."""
        return {new: old for old, new in enumerate(self.where)}

    @cached_property
    def new(self) -> tuple[int, ...]:
        """The indices that nothing old went to."""
        if self.appended:
            return tuple(range(len(self.where), self.size))
        return tuple(index for index in range(self.size) if index not in self.old)

    @property
    def moves(self) -> bool:
        """Whether anything differs."""
        return self.size != len(self.where) or not self.appended

    def filled(self, old: Tensor, new: Tensor, dim: int) -> Tensor:
        """Both along a dimension, each at its indices."""
        if old.device.type == "meta":  # somebody asks for shapes only
            return old.new_empty((*old.shape[:dim], self.size, *old.shape[dim + 1 :]))
        both = torch.cat([old, new], dim)
        if self.appended:
            return both
        order = _index((*self.where, *self.new), old.device).argsort()
        return both.index_select(dim, order)

    def picked(self, grown: Tensor, dim: int) -> Tensor:
        """The old indices along a dimension; a view where they are as they were."""
        if self.appended:
            return grown.narrow(dim, 0, len(self.where))
        return grown.index_select(dim, _index(self.where, grown.device))


@dataclass(frozen=True)
class Moved:
    """Where the entries of an old tensor are in the grown model.

    Attributes:
        name: the tensor's name now.
        places: by axis of the tensor.
        scale: what old entries were multiplied by.
    """

    name: str
    places: tuple[Place, ...]
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the grown tensor."""
        return tuple(place.size for place in self.places)

    def old_part(self, grown: Tensor) -> Tensor:
        """The old entries of a grown tensor, as they are there (scaled)."""
        for dim, place in enumerate(self.places):
            grown = place.picked(grown, dim)
        return grown

    def put(self, old: Tensor, into: Tensor) -> Tensor:
        """A copy of `into`, of the grown shape, with `old` at the old entries (not scaled)."""
        if not any(place.moves for place in self.places):
            return old.clone()
        grid = torch.meshgrid(
            *(_index(place.where, into.device) for place in self.places), indexing="ij"
        )
        return into.clone().index_put(grid, old)


@dataclass(frozen=True)
class Zeros:
    """Entries of a grown tensor that are zero so that its function is the old one.

    Attributes:
        name: the tensor.
        where: the indices along each of its axes; the entries are their product.
    """

    name: str
    where: tuple[tuple[int, ...], ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Those entries of the tensor."""
        for dim, indices in enumerate(self.where):
            tensor = tensor.index_select(dim, _index(indices, tensor.device))
        return tensor


def _index(indices: tuple[int, ...], device: torch.device) -> Int[Tensor, " n"]:
    return torch.tensor(indices, dtype=torch.long, device=device)
