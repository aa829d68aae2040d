"""Find attention heads that behave like neurons: they attend to their own token or to a sink.

    python -m analyses.studies.neuron_like_heads "The keys near the cabinet"

A neuron-head divides its attention between its own token and a bias token whose value is zero. An
attention head does nearly the same if it attends to itself or to a sink: the first token, where
trained heads leave attention that they do not need (Xiao et al. 2023, "Efficient Streaming
Language Models with Attention Sinks"), or a learned sink outside the text. Measures, on data:

    to_self      mean attention to the query's own token
    to_first     mean attention to the first token
    to_sink      1 minus the sum of a row: the attention to a learned sink, 0 without a sink
    to_others    mean attention to all other tokens, which a neuron never has
    self_spread  standard deviation of the attention to self: 0 for a constant gate

The first four add up to 1. Queries at the first token are left out, because there, the own token is
also the first token.
"""

import sys
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.sites import heads, resolve_sites
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.heads import host_of

COLUMNS = ["to_self", "to_first", "to_sink", "to_others", "self_spread"]


@torch.no_grad()
def neuron_like_heads(model: Any, tokens: Tokens | str) -> pd.DataFrame:
    """Return how each head divides its attention between its own token, a sink and other tokens.

    Patterns are reduced one layer at a time.
    Args:
        model: a model with neuron-heads.
        tokens: integers [batch, pos] without padding, at least two tokens long; or a text.

    Returns:
        A frame with one row per head, sorted by `to_others`: `name`, `layer`, `head`, and the
        measures in the module docstring.
    """
    chosen = resolve_sites(model, heads())
    checked = checked_tokens(model, tokens)
    if checked.shape[1] < 2:
        raise ValueError("got prompts of one token; expected two or more")
    shares: dict[str, pd.DataFrame] = {}

    def reduce(pattern: Tensor, hook: Any) -> None:
        shares[hook.name] = _shares(to_float64_device(pattern[:, :, 1:]).double())

    names = [host_of(model).hook_name(sites.layer, "attention", "pattern") for sites in chosen]
    with model.hooks(fwd_hooks=[(name, reduce) for name in names]):
        model(checked)
    frames = [
        shares[name].assign(name=list(sites.names), layer=sites.layer, head=sites.index.numpy())
        for name, sites in zip(names, chosen, strict=True)
    ]
    frame = pd.concat(frames)[["name", "layer", "head", *COLUMNS]]
    return frame.sort_values("to_others", kind="stable", ignore_index=True)


def _shares(pattern: Tensor) -> pd.DataFrame:
    """Reduce patterns [batch, head, query_pos, key_pos], without the first query."""
    total = pattern.sum(dim=-1)
    to_self = pattern.diagonal(offset=1, dim1=-2, dim2=-1)
    to_first = pattern[..., 0]
    shares = [to_self, to_first, 1.0 - total, total - to_self - to_first]
    columns = [share.mean(dim=(0, 2)) for share in shares]
    columns.append(to_self.std(dim=(0, 2), correction=0))
    return pd.DataFrame({name: c.cpu().numpy() for name, c in zip(COLUMNS, columns, strict=True)})


if __name__ == "__main__":
    english = expose_neuron_heads(pretrained.small_english()).model
    print(neuron_like_heads(english, sys.argv[1]).round(3).to_string(index=False))
