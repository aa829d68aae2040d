"""Check that a bridge's generation with a key-value cache gives the same logits as without one.

A bridge replaces the attention of a transformers model, and transformers passes the cache to it by
a name that has changed between versions. TransformerLens 3.9 to 4.3 ignores the cache that
transformers 5.24 passes: generation with a cache then sees only the last token, without any error.
So no version is trusted: before a model first uses a cache, six short passes test that model.

Two prompts differ in all but the last token. If their logits differ, a cache that is ignored gives
wrong logits for at least one of them. If not, for example because the output weights of attention
are zero, the test shows nothing: the model goes on without a cache and is tested again next time.
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
from attn_only_lens.engine.model_checks import (
    edits_nothing,
    evaluation_without_hooks,
    without_user_hooks,
)
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


@edits_nothing
def watch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a forward pass use a cache only if cached generation works (a torch pre-hook)."""
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    if any(isinstance(cache, RecordedCache) for cache in caches):
        return None
    works = _cache_works(model) if caches or kwargs.get("use_cache") else True
    if works:
        return None
    name = type(model).__name__
    versions = ", ".join(f"{x} {version(x)}" for x in ("transformer-lens", "transformers"))
    problem = f"{name} computes other logits with a key-value cache than without ({versions})"
    if works is None:
        problem = (
            f"a test of the key-value cache of {name} shows nothing, because the logits depend "
            "too little on earlier tokens"
        )
    if caches:
        install = "" if works is None else " Or install another version of one of the two."
        raise UnsupportedCallError(
            f"{problem}. This call passes a cache. Call model.generate: it goes on without a "
            f"cache. Or call hf_generate with use_past_kv_cache=False and use_cache=False.{install}"
        )
    warn({"cache": "this call goes on without a cache: it is slower and returns none"}, problem)
    return args, {**kwargs, "use_cache": False}


def _cache_works(model: PreTrainedModel) -> bool | None:
    """Return whether logits are the same with a cache and without; None if this is unknown."""
    works = _works.get(model)
    if works is None:
        with (
            torch.no_grad(),
            evaluation_without_hooks([model]),
            without_user_hooks(model),  # includes `watch`
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            works = _same_logits(model)
        if works is not None:
            _works[model] = works
    return works


def _same_logits(model: PreTrainedModel) -> bool | None:
    d_vocab = model.config.get_text_config().vocab_size
    first = torch.arange(1, 1 + _PROMPT, device=model.device) % d_vocab
    other = (first + 1) % d_vocab
    other[-1] = first[-1]
    pairs = [_with_and_without(model, tokens[None]) for tokens in (first, other)]
    if any(logits is None for _, logits in pairs):
        return False
    expected, got = (torch.stack(logits) for logits in zip(*pairs, strict=True))
    # Rounding (in float32 in some parts of float64 models) leaves at least half of the digits.
    tolerance = max(torch.finfo(dtype).eps for dtype in (got.dtype, torch.float32)) ** 0.5
    bound = tolerance * expected.abs().max().nan_to_num().item()
    if not torch.allclose(got, expected, rtol=0, atol=bound, equal_nan=True):
        return False
    # Equal logits for both prompts cannot be within the bound of both.
    return True if (expected[0] - expected[1]).abs().max().item() > 2 * bound else None


def _with_and_without(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the last logits of a prompt without a cache and with one; None if there is no cache.

    The batch has one prompt, because the bridge around the model may be in a run of a larger batch.
    """
    with_mask = {"attention_mask": torch.ones_like(tokens)}
    expected = model(input_ids=tokens, use_cache=False, **with_mask).logits[0, -1]
    mask = with_mask["attention_mask"][:, :-1]
    output = model(input_ids=tokens[:, :-1], attention_mask=mask, use_cache=True)
    cache = {name: x for name, x in output.items() if isinstance(x, Cache)}
    if not cache:
        return expected, None
    logits = model(input_ids=tokens[:, -1:], use_cache=True, **cache, **with_mask).logits[0, -1]
    return expected, logits
