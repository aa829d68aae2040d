"""Identity: marks by which a model is recognized, whatever its dtype, device or kind.

The mark of a tensor is the sum of its entries in order, weighted by numbers that look random,

    s = Σ_i r(i div n) r(i mod n) w_i        r(i) = 2 ((i + 1) φ mod 1) - 1, φ the golden ratio

and its norm. A change Δ of the weights, wherever it is, moves s by about ‖Δ‖ / 3. So a tensor whose
s moved by no more than roundings of ‖w‖ is the same one, cast or computed on another machine; after
one step of training it is another. (A digest of bytes would tell casts apart.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_only_lens.tolerances import rounding

_GOLDEN = (math.sqrt(5) + 1) / 2
_ROW = 2**11  # entries of a row; as many rows are summed at a time, in float64


@dataclass(frozen=True)
class Identity:
    """Marks of a model's tensors. Made by `growth.identity`.

    Attributes:
        marks: the weighted sum and the norm of each tensor.
        precision: the largest share of the norm by which roundings may have moved a sum.
    """

    marks: Mapping[str, tuple[float, float]] = field(repr=False)
    precision: float

    def differences(self, second: "Identity") -> list[str]:
        """Return the tensors that differ, or that one model lacks and the other has, not zero.

        The bridge of transformer-lens 3.9 adds a bias of zeros to the unembedding.
        """
        tolerance = max(self.precision, second.precision)
        both = {**self.marks, **second.marks}
        odd = {name for name in self.marks.keys() ^ second.marks.keys() if both[name][1] > 0}
        for name in self.marks.keys() & second.marks.keys():
            (one, size), (two, other_size) = self.marks[name], second.marks[name]
            if not abs(one - two) <= tolerance * max(size, other_size):
                odd.add(name)
        return sorted(odd)


def identity_of(tensors: Mapping[str, Tensor]) -> Identity:
    """Return the identity of a model, from its tensors by name."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return Identity(
        {name: _mark(tensor) for name, tensor in tensors.items()},
        max(map(rounding, dtypes), default=0.0),
    )


def _mark(tensor: Tensor) -> tuple[float, float]:
    total = squares = 0.0
    row = _row_weights(0, _ROW)
    for index, part in enumerate(tensor.detach().cpu().flatten().split(_ROW * _ROW)):
        w = part.double()
        rows, rest = w[: len(w) // _ROW * _ROW].view(-1, _ROW), w[len(w) // _ROW * _ROW :]
        sums = torch.cat([rows @ row, (rest @ row[: len(rest)])[None]])
        total += float(sums @ _row_weights(index * _ROW, len(sums)))
        squares += float(w @ w)
    return total, math.sqrt(squares)


def _row_weights(first: int, n: int) -> Tensor:
    turns = torch.arange(first + 1, first + n + 1, dtype=torch.float64, device="cpu") * _GOLDEN
    return turns.frac() * 2 - 1
