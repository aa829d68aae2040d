"""Matrix products as a GPU makes them of float32 where TF32 is allowed: of inputs with 10 bits.

`torch.set_float32_matmul_precision("high")` changes nothing on most CPUs. With this it does: while
the mode is entered, float32 inputs of matrix products are rounded to TF32's 10 bits, in backward
passes too, unless the setting says "highest". A GPU may leave small products alone; here, those of
fewer rows than `least`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RoundedProducts", "tf32"]

_DROPPED = 13  # of float32's 23 bits
_aten = torch.ops.aten
_FACTORS = {  # where the two matrices stand
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addmm_.default: (1, 2),
}


class RoundedProducts(TorchDispatchMode):
    """While it is entered, products are of rounded matrices.

    Attributes:
        rounded: how many products have been.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least, self.rounded = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = _FACTORS.get(func, ())
        if places and torch.get_float32_matmul_precision() != "highest":
            first = args[places[0]]
            if first.dtype == torch.float32 and first.shape[-2] >= self.least:
                args = list(args)
                for place in places:
                    args[place] = rounded(args[place])
                self.rounded += 1
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    """To the nearest float32 of 10 bits; of two, to the even one."""
    bits = x.contiguous().view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    nearest = (bits + ((1 << (_DROPPED - 1)) - 1) + odd) & -(1 << _DROPPED)
    return torch.where(x.isfinite(), nearest.view(torch.float32), x)


@contextmanager
def tf32(least: int = 0) -> Iterator[RoundedProducts]:
    """A notebook that has called `torch.set_float32_matmul_precision("high")`, on a GPU."""
    torch.set_float32_matmul_precision("high")
    try:
        with RoundedProducts(least) as mode:
            yield mode
    finally:
        torch.set_float32_matmul_precision("highest")
