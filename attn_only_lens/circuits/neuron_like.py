"""Attention heads that behave like neurons: they attend to their own token, or to nothing.

A neuron-head divides its attention between its own token and a bias token whose value is zero. An
attention head does nearly the same if it attends to itself or to a sink: the first token, where
trained heads leave attention that they do not need (Xiao et al. 2023, "Efficient Streaming
Language Models with Attention Sinks"), or a learned sink outside the text. Measured on data:

    to_self      mean attention to the query's own token
    to_first     mean attention to the first token
    to_sink      1 less the sum of a row: the attention to a learned sink, 0 without one
    to_others    mean attention to all other tokens: unlike a neuron
    self_spread  standard deviation of the attention to self: 0 for a gate that never moves

The first four add up to 1. Queries at the first token are left out: there, self and first are one.
"""

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.inputs import checked_tokens
from attn_only_lens.engine.sites import LayerSites, heads, resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of

_PROBLEM = "the attention of these heads cannot be measured"
_ROUNDING = 1e-2  # of a row of a pattern that adds up to 1, in half precision


@torch.no_grad()
def neuron_like_heads(model: Any, tokens: Tokens | str) -> pd.DataFrame:
    """Return how each head divides its attention between its own token, a sink and other tokens.

    Patterns are reduced as they are computed, one layer at a time.

    Args:
        model: converted, or with exposed neuron-heads.
        tokens: integers [batch, pos] without padding, at least two tokens long; or a text.

    Returns:
        A row for each head, by rising `to_others`: `name`, `layer`, `head`, `to_self`, `to_first`,
        `to_sink`, `to_others`, `self_spread`: means over all queries but those at the first token.

    Raises:
        InputError: one token, or a model without patterns [query_pos, key_pos].
        InputError: the model has no neuron-heads.
        UnsupportedCallError: tokens that the model does not take.

    Example:
        >>> from attn_only_lens import circuits, convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> frame = circuits.neuron_like_heads(model, pretrained.modular_addition_tokens()[:50])
        >>> shares = frame[["to_self", "to_first", "to_sink", "to_others"]]
        >>> len(frame), bool((shares.sum(axis=1) - 1).abs().max() < 1e-6)
        (4, True)
    """
    chosen = resolve_sites(model, heads())
    checked = checked_tokens(model, tokens)
    if checked.shape[1] < 2:
        raise InputError(
            ["got one token a prompt; expected two or more: a first token is its own"], _PROBLEM
        )
    shares: dict[int, pd.DataFrame] = {}
    batch, n_pos = checked.shape

    def reduce(sites: LayerSites) -> Callable[[Tensor, Any], None]:
        expected = batch, len(sites.names), n_pos, n_pos

        def hook(pattern: Tensor, hook: Any) -> None:
            got = list(pattern.shape)
            if tuple(got) != expected:
                raise InputError(
                    [f"layer {sites.layer}: got a pattern {got}; expected {list(expected)}"],
                    _PROBLEM,
                )
            shares[sites.layer] = _shares(to_float64_device(pattern[:, :, 1:]).double())

        return hook

    host = host_of(model)
    hooks = [
        (host.hook_name(sites.layer, "attention", "pattern"), reduce(sites)) for sites in chosen
    ]
    with model.hooks(fwd_hooks=hooks):
        model(checked)
    missing = [sites.layer for sites in chosen if sites.layer not in shares]
    InputError.raise_if(
        [f"layer {layer}: its attention shows no pattern" for layer in missing], _PROBLEM
    )
    frames = [
        shares[sites.layer].assign(
            name=list(sites.names), layer=sites.layer, head=sites.index.numpy()
        )
        for sites in chosen
    ]
    frame = pd.concat(frames)[["name", "layer", "head", *_COLUMNS]]
    return frame.sort_values("to_others", kind="stable", ignore_index=True)


_COLUMNS = ["to_self", "to_first", "to_sink", "to_others", "self_spread"]


def _shares(pattern: Tensor) -> pd.DataFrame:
    """From rows of the second query on, [batch, head, query_pos, key_pos]."""
    total = pattern.sum(dim=-1)
    if not (total.isfinite().all() and (total <= 1 + _ROUNDING).all()):
        raise InputError(["a pattern's rows are not finite, or add up to more than 1"], _PROBLEM)
    own = pattern.diagonal(offset=1, dim1=-2, dim2=-1)
    first = pattern[..., 0]
    each = [own, first, 1.0 - total, total - own - first]
    columns = [share.mean(dim=(0, 2)) for share in each] + [own.std(dim=(0, 2), correction=0)]
    return pd.DataFrame({name: c.cpu().numpy() for name, c in zip(_COLUMNS, columns, strict=True)})
