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
_FLOATS_PER_TOKEN = 24  # times the widest layer: several copies of the widest activation
_FLOATS_PER_LOGIT = 8  # of those that a metric reads; a loss was seen to take as many
_SHARE = 0.5  # of the free memory


class Batching:
    """Runs many variants in forward passes of a size that fits, and a smaller one where it did not.

    Args:
        model: for its device and sizes.
        batch_size: variants in one forward pass; None for what memory allows.
        on_done: told how many sites are done.
        logits_each: logits that the metric reads of one variant.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int | None,
        on_done: Callable[[int], None],
        logits_each: int = 0,
    ) -> None:
        self._size = batch_size
        self._tokens = _tokens_that_fit(model) if batch_size is None else 0
        # Logits in tokens: as many as take the same memory.
        self._tokens_of_logits = _FLOATS_PER_LOGIT * logits_each // _floats_per_token(model)
        self._on_done = on_done

    def fill(
        self,
        values: Tensor,
        alive: Tensor,
        tokens_each: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Put `run(indices)` where `alive` is set, in chunks; halve them when memory runs out.

        Args:
            values: one for each variant, filled in place.
            alive: which of them to run.
            tokens_each: tokens that one variant runs on.
            run: gives the values of some variants.
        """
        tokens_each += self._tokens_of_logits
        left = alive.nonzero()[:, 0]
        self._on_done(len(values) - len(left))
        while len(left):
            size = self._size or max(1, self._tokens // tokens_each)
            chunk = left[:size]
            found = _unless_out_of_memory(run, chunk)
            if found is None:
                self._halve(len(chunk), tokens_each)
                continue
            values[chunk.cpu()] = found.cpu().to(values.dtype)
            self._on_done(len(chunk))
            left = left[size:]

    def _halve(self, size: int, tokens_each: int) -> None:
        if self._size is None:
            self._tokens = max(1, size // 2) * tokens_each
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


def _tokens_that_fit(model: Any) -> int:
    parameter = next(model.parameters())
    each = _floats_per_token(model) * parameter.element_size()
    if parameter.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(parameter.device)
        return max(1, int(_SHARE * free / each))
    # Processes launched together share the memory; each may get there before the others.
    free = psutil.virtual_memory().available // launched()
    return max(1, min(_CPU_TOKENS, int(_SHARE * free / each)))


def _floats_per_token(model: Any) -> int:
    return _FLOATS_PER_TOKEN * max(max(p.shape) for p in model.blocks.parameters())
