"""How many variants run at once."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from attn_only_lens.patching.processes import launched

__all__ = ["Batching"]

# At GPT-2 small's shape on one thread 512, 1024 and 2048 are within a tenth of each other, 128 is
# slower by a tenth, 4096 and 8192 by a sixth: they only leave the caches.
_CPU_TOKENS = 2048
_SHARE = 0.5  # of the free memory


class Batching:
    """Runs many variants in forward passes of a size that fits, and a smaller one where it did not.

    Args:
        model: for its device and dtype.
        batch_size: variants in one forward pass; None for what memory allows.
        on_done: told how many sites are done.
        of_token: how many numbers a forward pass holds at once for a token.
    """

    def __init__(
        self, model: Any, batch_size: int | None, on_done: Callable[[int], None], of_token: int = 1
    ) -> None:
        self._size = batch_size
        self._numbers = _numbers_that_fit(model, of_token) if batch_size is None else 0
        self._on_done = on_done

    def fill(
        self,
        values: Tensor,
        alive: Tensor,
        numbers_each: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Put `run(indices)` where `alive` is set, in chunks; halve them when memory runs out.

        Args:
            values: one for each variant, filled in place.
            alive: which of them to run.
            numbers_each: how many numbers one variant holds at once.
            run: gives the values of some variants.
        """
        left = alive.nonzero()[:, 0]
        self._on_done(len(values) - len(left))
        while len(left):
            size = self._size or max(1, self._numbers // numbers_each)
            chunk = left[:size]
            found = _unless_out_of_memory(run, chunk)
            if found is None:
                self._halve(len(chunk), numbers_each)
                continue
            values[chunk.cpu()] = found.cpu().to(values.dtype)
            self._on_done(len(chunk))
            left = left[size:]

    def _halve(self, size: int, numbers_each: int) -> None:
        if self._size is None:
            self._numbers = max(1, size // 2) * numbers_each
        else:
            self._size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor | None:
    """What `run` gives; None where memory ran out, when what it held is free again."""
    try:
        return run(chunk)
    except RuntimeError as error:
        # torch.OutOfMemoryError is for GPUs; on a CPU it is an error like any other.
        gone = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(chunk) == 1 or not gone:
            raise
        return None


def _numbers_that_fit(model: Any, of_token: int) -> int:
    parameter = next(model.parameters())
    each = parameter.element_size()
    if parameter.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(parameter.device)
        return int(_SHARE * free / each)
    # Processes launched together share the memory; each may get there before the others.
    free = psutil.virtual_memory().available // launched()
    return min(_CPU_TOKENS * of_token, int(_SHARE * free / each))
