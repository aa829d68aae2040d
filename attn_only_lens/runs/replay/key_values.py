"""Keys and values on record, as the cache of a generation that has come so far.

Models of transformers are told by their cache how many tokens came before those that they are
given, and so what positions these have, which rotations, and which masks. A cache that gives what
is on record, and takes nothing, makes them run the rest of a prompt again and again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.runs.recording import Recording, run

__all__ = ["UNFIT", "Past", "after", "is_refusal", "past_of"]

UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What models raise that cannot run in parts; `is_refusal` tells these from what must be heard."""
_Heads = Float[Tensor, "batch head pos d_head"]


@dataclass(frozen=True)
class Past:
    """Keys and values of one run, layer by layer, rotated where the model rotates them."""

    layers: tuple[tuple[_Heads, _Heads], ...]

    def before(self, first: int) -> Cache:
        """Those of the positions before `first`, for any number of variants."""
        return Cache(
            layers=[
                _Prefix(keys[..., :first, :], values[..., :first, :])
                for keys, values in self.layers
            ]
        )


def past_of(model: Any, recording: Recording) -> Past | None:
    """Keys and values of a recorded run, by running it again; None of a model without a cache."""
    # Without its configuration a cache keeps all positions, where attention is to a window too.
    cache = DynamicCache()
    try:
        run(model, recording.tokens, recording.mask, past_key_values=cache)
    except UNFIT as error:  # a model that takes no such argument
        if not is_refusal(error):
            raise
        return None
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    if not layers or not all(layer.is_initialized for layer in layers):
        return None
    return Past(tuple((layer.keys, layer.values) for layer in layers))


def is_refusal(error: Exception) -> bool:
    """Whether one of UNFIT says that a model does not run so; memory may have run out, too.

    What this package refuses is meant for the caller, whatever was tried.
    """
    said = str(error)
    gone = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said
    return not gone and not isinstance(error, AttnOnlyLensError)


class _Prefix(DynamicLayer):
    """One layer: gives what came before, and keeps nothing of what comes."""

    def __init__(self, keys: _Heads, values: _Heads) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return after(self.keys, key_states, -2), after(self.values, value_states, -2)


def after(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """What came before, the same for all variants, and what comes in each: one copy of both.

    Args:
        past: of each prompt.
        new: of each prompt of each variant, prompts inmost.
        axis: of positions.
    """
    of_each = new.unflatten(0, (-1, len(past)))
    axis = axis if axis < 0 else axis + 1
    return torch.cat([past.expand(len(of_each), *past.shape), of_each], axis).flatten(0, 1)
