"""Check that a bridge's generation with a key-value cache gives the same logits as without one.

A bridge replaces the attention of a transformers model, and transformers passes the cache to it by
a name that has changed between versions. TransformerLens 3.9 to 4.3 ignores the cache that
transformers 5.24 passes: generation with a cache then sees only the last token, without any error.
So no version is trusted: before a model first uses a cache, three short passes test that model.
"""

import warnings
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from attn_only_lens.engine.input_warnings import warn
from attn_only_lens.engine.model_checks import evaluation_without_hooks
from attn_only_lens.errors import UnsupportedCallError

_PROMPT = 3  # tokens; the cache holds all but the last
_works: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


class RecordedCache(Cache):
    """A cache that a replay fills or reads; the replay itself is compared with a full run."""


def watch_cache(bridge: Any) -> RemovableHandle | None:
    """Test cached generation before this bridge first uses a cache; None if it is watched already.

    If the test fails, `generate` and `generate_stream` go on without the cache, with a warning. A
    pass that is given a cache is refused, because its input may lack the tokens in the cache.
    """
    wrapped: Any = bridge.original_model
    hooks = wrapped._forward_pre_hooks.values()
    if not isinstance(wrapped, PreTrainedModel) or watch in hooks:
        return None
    return wrapped.register_forward_pre_hook(watch, with_kwargs=True)


def watch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a forward pass use a cache only if cached generation works (a torch pre-hook)."""
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    if any(isinstance(cache, RecordedCache) for cache in caches):
        return None
    if not (caches or kwargs.get("use_cache")) or _cache_works(model):
        return None
    wrong = (
        f"{type(model).__name__} computes other logits with a key-value cache than without, "
        f"because transformer-lens {version('transformer-lens')} does not fit "
        f"transformers {version('transformers')}"
    )
    if caches:
        raise UnsupportedCallError(
            f"{wrong}; this call passes a cache. Call model.generate, which goes on without a "
            "cache; or hf_generate with use_past_kv_cache=False and use_cache=False; or install "
            "another version of one of the two"
        )
    warn({"cache": "this call goes on without a cache, which is slower, and returns none"}, wrong)
    return args, {**kwargs, "use_cache": False}


def _cache_works(model: PreTrainedModel) -> bool:
    """Return whether the next token's logits are the same with a cache and without."""
    if model not in _works:
        with torch.no_grad(), evaluation_without_hooks([model]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _works[model] = _same_logits(model)
    return _works[model]


def _same_logits(model: PreTrainedModel) -> bool:
    forward: Any = model.forward
    d_vocab = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, 1 + _PROMPT, device=model.device)[None] % d_vocab
    with_mask = {"attention_mask": torch.ones_like(tokens)}
    expected: Tensor = forward(input_ids=tokens, use_cache=False, **with_mask).logits[:, -1]
    mask = with_mask["attention_mask"][:, :-1]
    output = forward(input_ids=tokens[:, :-1], attention_mask=mask, use_cache=True)
    cache = {name: x for name, x in output.items() if isinstance(x, Cache)}
    if not cache:
        return False
    logits = forward(input_ids=tokens[:, -1:], use_cache=True, **cache, **with_mask).logits[:, -1]
    # Rounding (in float32 in some parts of float64 models) leaves at least half of the digits.
    tolerance = max(torch.finfo(dtype).eps for dtype in (logits.dtype, torch.float32)) ** 0.5
    bound = tolerance * expected.abs().max().nan_to_num().item()
    return torch.allclose(logits, expected, rtol=0, atol=bound, equal_nan=True)
