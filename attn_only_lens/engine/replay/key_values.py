"""Recorded keys and values, as a cache of transformers that keeps nothing new.

With such a cache a model runs the rest of a prompt again and again, with the right positions,
rotations and masks.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from attn_only_lens.engine.recording import Recording, of_this_thread, run_blocks
from attn_only_lens.engine.replay.base import suppress_refusals

_Heads = Float[Tensor, "batch head pos d_head"]


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one run, by layer; rotated if the model uses rotary embeddings."""

    layers: tuple[tuple[_Heads, _Heads], ...]

    def before(self, first: int) -> Cache:
        """Return a cache of the positions before `first`, for any number of variants."""
        return Cache(
            layers=[
                _Prefix(keys[..., :first, :], values[..., :first, :])
                for keys, values in self.layers
            ]
        )


def record_key_values(model: Any, recording: Recording) -> KeyValues | None:
    """Repeat a run to record its keys and values; return None if the model has no cache."""
    cache = DynamicCache()  # without a configuration it keeps all positions, not just a window
    layers: list[Any] = []
    with suppress_refusals():  # of a model that takes no such argument
        with cache_argument(model, cache) as argument:
            run_blocks(model, recording.tokens, recording.mask, **argument)
        layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    if not layers or not all(layer.is_initialized for layer in layers):
        return None
    return KeyValues(tuple((layer.keys, layer.values) for layer in layers))


@contextmanager
def cache_argument(model: Any, cache: Cache) -> Iterator[dict[str, Any]]:
    """Yield the keyword argument with which a bridge reads and fills a cache.

    Since transformers 5.24 it is called `cache`; TransformerLens 4.3's attention still expects
    `past_key_values`, and would not use the cache.
    """
    original = getattr(model, "original_model", model)
    if "cache" not in inspect.signature(original.forward).parameters:
        yield {"past_key_values": cache}
        return

    def rename(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if "cache" in kwargs:
            kwargs = {**kwargs, "past_key_values": kwargs["cache"]}
            del kwargs["cache"]
        return args, kwargs

    with ExitStack() as stack:
        for block in model.blocks:
            hook = of_this_thread(rename)
            stack.enter_context(block.attn.register_forward_pre_hook(hook, with_kwargs=True))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        yield {"cache": cache}


class _Prefix(DynamicLayer):
    """One layer of a cache, which keeps nothing new."""

    def __init__(self, keys: _Heads, values: _Heads) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return extend(self.keys, key_states, -2), extend(self.values, value_states, -2)


def extend(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """Return past and new keys or values of each variant, in one copy."""
    of_each = new.unflatten(0, (-1, len(past)))
    axis = axis if axis < 0 else axis + 1
    return torch.cat([past.expand(len(of_each), *past.shape), of_each], axis).flatten(0, 1)
