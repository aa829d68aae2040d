"""Float32 matrix products as on a GPU with TF32, where inputs have 10 mantissa bits.

`torch.set_float32_matmul_precision("high")` changes nothing on most CPUs. Within this mode, float32
inputs of matrix products are rounded to TF32's 10 bits, in backward passes too, unless the setting
is "highest". A GPU may not round small products; here, products with fewer rows than `least` are
exact.
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
_FACTORS = {  # the positions of the two matrices
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addmm_.default: (1, 2),
}


class RoundedProducts(TorchDispatchMode):
    """A mode in which matrix products use rounded matrices.

    Attributes:
        rounded: the number of products so far.
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
    """Round to the nearest float32 with 10 mantissa bits; ties go to the even one."""
    bits = x.contiguous().view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    nearest = (bits + ((1 << (_DROPPED - 1)) - 1) + odd) & -(1 << _DROPPED)
    return torch.where(x.isfinite(), nearest.view(torch.float32), x)


@contextmanager
def tf32(least: int = 0) -> Iterator[RoundedProducts]:
    """Simulate `torch.set_float32_matmul_precision("high")` on a GPU."""
    torch.set_float32_matmul_precision("high")
    try:
        with RoundedProducts(least) as mode:
            yield mode
    finally:
        torch.set_float32_matmul_precision("highest")
