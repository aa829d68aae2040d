"""Read attention patterns of neuron-heads (single-neuron heads) from an activation cache."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import BIAS, SELF
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.heads.host import (
    HEAD_PLURALS,
    NEURON_KINDS,
    WIDE_KINDS,
    HeadKind,
    has_neuron_heads,
    host_of,
)
from attn_only_lens.heads.names import HeadName, place_of

_PROBLEM = "this is no neuron-head"


def neuron_pattern(
    cache: ActivationCache, name: str, *, dense: bool = False
) -> Float[Tensor, "batch pos key"]:
    """Return a neuron's attention (as an attention head) to the token itself and the bias token.

    Args:
        cache: the cache of a converted or exposed model, with the patterns of the neuron's layer.
        name: a neuron-head by layer, `L5N1234`.
        dense: return a row with one entry for each token, instead of two entries. Plotting tools
            such as circuitsvis expect this; they would silently draw a wrong picture of the two.

    Returns:
        The attention weights, which sum to 1 over the last axis (no batch axis if the cache has
        none). The last axis has two entries: `pattern[..., 0]` is the neuron's gate, the weight on
        the token itself, which multiplies its value; `pattern[..., 1]` is the weight on the bias
        token. If `dense`, these are on the diagonal of a square matrix over tokens, and in one more
        column.

    Raises:
        InputError: the name is malformed, names an attention head, or is not in the model.
        UnsupportedCallError: the cache comes from a model without neuron-heads, lacks this pattern,
            or was made when the neurons had another number of heads.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neuron_pattern, pretrained
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> pattern = neuron_pattern(cache, "L0N7")
        >>> pattern.shape, bool((pattern.sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([5, 3, 2]), True)
        >>> neuron_pattern(cache, "L0N7", dense=True).shape
        torch.Size([5, 3, 4])
    """
    head = _neuron(cache, name)
    # The head axis is third from the end, with or without a batch axis.
    compact = _block_pattern(cache, head).select(-3, place_of(head, cache.model))
    if not dense:
        return compact
    return torch.cat([torch.diag_embed(compact[..., SELF]), compact[..., BIAS, None]], dim=-1)


def _neuron(cache: ActivationCache, name: str) -> HeadName:
    """Parse a neuron's name, and check that the cache's model has this neuron."""
    head = HeadName.parse(name)
    model = getattr(cache, "model", None)
    if head.kind in WIDE_KINDS:
        reason = (
            f"got {name!r}, one of the {HEAD_PLURALS[head.kind]}, which have no gate and no "
            f"pattern; expected a neuron-head such as 'L{head.layer}N7' or 'L{head.layer}F7'"
        )
        raise InputError([reason], _PROBLEM)
    if head.kind not in NEURON_KINDS:
        exposed = has_neuron_heads(model)
        block = host_of(model).block(head.layer, head.kind) if exposed else head.layer
        reason = (
            f"got {name!r}, an attention head; expected a neuron-head such as "
            f"'L{head.layer}N{head.index}'. For attention heads use cache['pattern', {block}]"
        )
        raise InputError([reason], _PROBLEM)
    require_neuron_heads(cache)
    head.require_in(model)
    return head


def _block_pattern(
    cache: ActivationCache, head: HeadName
) -> Float[Tensor, "batch head_index pos key=2"]:
    pattern = cached_activation(cache, head.layer, head.kind, "pattern")
    n_heads = host_of(cache.model).neurons[head.layer].n_neurons
    if pattern.shape[-3] != n_heads:
        raise UnsupportedCallError(
            f"the cache holds the patterns of {pattern.shape[-3]} neuron-heads in layer "
            f"{head.layer}, but its model now has {n_heads}, because its gates have changed; call "
            "run_with_cache again"
        )
    return pattern


def require_neuron_heads(cache: Any) -> None:
    """Raise UnsupportedCallError unless the cache comes from a model with neuron-heads."""
    model = getattr(cache, "model", None)
    if not has_neuron_heads(model):
        kind = "" if model is None else f" of {a_type(model)} without neuron-heads"
        raise UnsupportedCallError(
            f"got {a_type(cache)}{kind}; expected the cache of a converted or exposed "
            "model: call convert or expose_neuron_heads, then run_with_cache"
        )


def cached_activation(cache: ActivationCache, layer: int, kind: HeadKind, point: str) -> Tensor:
    """Return the cached activation at a hook point of the heads in an original layer."""
    hook = host_of(cache.model).hook_name(layer, kind, point)
    if hook not in cache.cache_dict:
        raise UnsupportedCallError(
            f"the cache does not hold {hook}: its names_filter excluded it, or the model had no "
            "neuron-heads yet; call run_with_cache again"
        )
    return cache.cache_dict[hook]
