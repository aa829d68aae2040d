"""Read attention patterns of neuron-heads (single-neuron heads) from an activation cache."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import BIAS, SELF
from attn_only_lens.errors import UnknownHeadError, UnsupportedCallError
from attn_only_lens.heads.host import (
    HEAD_PLURALS,
    NEURON_KINDS,
    WIDE_KINDS,
    HeadKind,
    has_neuron_heads,
    host_of,
)
from attn_only_lens.heads.names import HeadName


def neuron_pattern(cache: ActivationCache, name: str) -> Float[Tensor, "batch pos key=2"]:
    """Return a neuron's attention (as an attention head) to the token itself and the bias token.

    The last axis has two entries, one for the token itself and one for the bias token, instead of
    one entry for each token. Plotting tools such as circuitsvis expect a square pattern over tokens
    and would silently draw a wrong picture; use `dense_pattern` with such tools.

    Args:
        cache: the cache of a converted or exposed model, with the patterns of the neuron's layer.
        name: a neuron-head by layer, `L5N1234`.

    Returns:
        The attention weights, which sum to 1 over the last axis (no batch axis if the cache has
        none).

    Raises:
        UnknownHeadError: the name is malformed, names an attention head, or is not in the model.
        UnsupportedCallError: the cache comes from a model without neuron-heads, lacks this pattern,
            or was made when the neurons had another number of heads.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neuron_pattern, pretrained
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> pattern = neuron_pattern(cache, "L0N7")
        >>> pattern.shape, bool((pattern.sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([5, 3, 2]), True)
    """
    head = _neuron(cache, name)
    # The head axis is third from the end, with or without a batch axis.
    return _block_pattern(cache, head).select(-3, head.index)


def neuron_gate(cache: ActivationCache, name: str) -> Float[Tensor, "batch pos"]:
    """Return the gate of a neuron: its attention to its own token, which multiplies its value.

    Args:
        cache: see `neuron_pattern`.
        name: a neuron in a layer of the original model, `L5N1234`.

    Returns:
        One number per token; there is no batch axis if the cache has none.

    Raises:
        UnknownHeadError: see `neuron_pattern`.
        UnsupportedCallError: see `neuron_pattern`.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neuron_gate, pretrained
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> neuron_gate(cache, "L0N7").shape
        torch.Size([5, 3])
    """
    return neuron_pattern(cache, name)[..., SELF]


def _neuron(cache: ActivationCache, name: str) -> HeadName:
    """Parse a neuron's name, and check that the cache's model has this neuron."""
    head = HeadName.parse(name)
    model = getattr(cache, "model", None)
    if head.kind in WIDE_KINDS:
        raise UnknownHeadError(
            f"got {name!r}, one of the {HEAD_PLURALS[head.kind]}, which have no gate and no "
            f"pattern; expected a neuron-head such as 'L{head.layer}N7' or 'L{head.layer}F7'"
        )
    if head.kind not in NEURON_KINDS:
        exposed = has_neuron_heads(model)
        block = host_of(model).block(head.layer, head.kind) if exposed else head.layer
        raise UnknownHeadError(
            f"got {name!r}, an attention head; expected a neuron-head such as "
            f"'L{head.layer}N{head.index}'. For attention heads use cache['pattern', {block}]"
        )
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


def dense_pattern(
    cache: ActivationCache, name: str
) -> Float[Tensor, "batch query_pos key_pos_and_bias"]:
    """Return `neuron_pattern` as a square matrix over tokens, plus a column for the bias token.

    Plotting tools such as circuitsvis expect a square matrix. Each token's attention to itself is
    on the diagonal; other weights between tokens are zero. The arguments and errors are the same as
    for `neuron_pattern`.

    Example:
        >>> from attn_only_lens import dense_pattern, expose_neuron_heads, load, pretrained
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> dense_pattern(cache, "L0N7").shape
        torch.Size([5, 3, 4])
    """
    compact = neuron_pattern(cache, name)
    diagonal = torch.diag_embed(compact[..., SELF])
    return torch.cat([diagonal, compact[..., BIAS, None]], dim=-1)
