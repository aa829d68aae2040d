"""Put recorded keys and values into a transformers cache that never stores new ones.

With such a cache, a model can run the rest of a prompt many times, with the correct positions,
rotations and masks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from attn_only_lens.engine.cached_generation import RecordedCache
from attn_only_lens.engine.recording import Recording, keys_and_values, run_blocks
from attn_only_lens.engine.replay.base import suppress_refusals

_Heads = Float[Tensor, "batch head pos d_head"]


@dataclass(frozen=True)
class KeyValues:
    """One run's keys and values, by layer; keys are rotated if the model uses rotary embeddings."""

    layers: tuple[tuple[_Heads, _Heads], ...]

    def before(self, first: int) -> RecordedCache:
        """Return a cache that holds the positions before `first`, for any number of variants."""
        return RecordedCache(
            layers=[
                _Prefix(keys[..., :first, :], values[..., :first, :])
                for keys, values in self.layers
            ]
        )


def record_key_values(model: Any, recording: Recording) -> KeyValues | None:
    """Return a run's keys and values, or None if the model has no cache.

    Repeat the run if it did not record keys and values.
    """
    if recording.key_values:
        return KeyValues(recording.key_values)
    # Without a configuration, the cache keeps all positions.
    cache = RecordedCache(layer_class_to_replicate=DynamicLayer)
    layers: tuple[tuple[_Heads, _Heads], ...] = ()
    with suppress_refusals():  # the model may not accept a cache
        run_blocks(model, recording.tokens, recording.mask, past_key_values=cache)
        layers = keys_and_values(cache, recording.tokens)
    return KeyValues(layers) if layers else None


class _Prefix(DynamicLayer):
    """A cache layer that does not store new keys and values."""

    def __init__(self, keys: _Heads, values: _Heads) -> None:
        super().__init__()
        # `lazy_initialization` would also copy two empty tensors to the device.
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return extend(self.keys, key_states, -2), extend(self.values, value_states, -2)


def extend(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """For each variant, concatenate past and new keys (or values); copy the data only once."""
    of_each = new.unflatten(0, (-1, len(past)))
    axis = axis if axis < 0 else axis + 1
    return torch.cat([past.expand(len(of_each), *past.shape), of_each], axis).flatten(0, 1)
