"""Attention over a text: of neuron-heads to themselves or the bias token, and of original heads.

A token t of a neuron-head attends to itself with σ(score) and to the bias token with the rest, so
its whole pattern is one number a token. It is drawn twice: as the colour of each token, and as
heads are, query by key, with the bias token as one more key column. The bias token asks for
nothing, so its row stays empty.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.axes import SELF
from attn_only_lens.heads import HeadName, dense_pattern, host_of, neuron_pattern
from attn_only_lens.heads.patterns import cached_activation, require_neuron_heads
from attn_only_lens.numerics import is_count
from attn_only_lens.viz.checks import prompt_values, refuse, token_reasons
from attn_only_lens.viz.circuitsvis_page import Component, circuitsvis_page, safe_tokens
from attn_only_lens.viz.page import Page

MOST_CELLS = 400_000
"""Cells of heatmaps in one page: each is drawn by itself, twice as many keep a browser waiting."""

MOST_NEURONS = 24
"""Neuron-heads in one page, each a line of tokens and a heatmap."""

_BIAS = "[bias]"
_DIGITS = 4
_SCALE = {"minValue": -1, "maxValue": 1}


def original_attention(
    cache: ActivationCache, layer: int, prompt: int
) -> Float[Tensor, "head_index query_pos key_pos"]:
    """Return the weights of every head of a source layer over one prompt, in float64 on the CPU.

    Raises:
        InputError: there is no such layer or prompt, or the run had a KV cache.
        UnsupportedCallError: the cache is not of a model with neuron-heads, or lacks the pattern.
    """
    require_neuron_heads(cache)
    n_layers = host_of(cache.model).n_layers
    if not is_count(layer, 0, n_layers - 1):
        refuse(f"got layer={layer!r}; the model has source layers 0 to {n_layers - 1}")
    pattern = cached_activation(cache, layer, "attention", "pattern")
    pattern = prompt_values(pattern, prompt, cache.has_batch_dim)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        refuse(f"the pattern is of {n_queries} queries over {n_keys} keys: run without a KV cache")
    return pattern


def neuron_pattern_view(
    cache: ActivationCache, names: str | Iterable[str], tokens: Sequence[str], *, prompt: int = 0
) -> Page:
    """Draw the patterns of neuron-heads over one prompt.

    A layer has thousands: filter first, by a sweep (`sweep.top(7)["name"]`) or an attribution.

    Args:
        cache: of a converted or exposed model, with the patterns of the neurons' blocks.
        names: a neuron-head, `L5N1234`, or up to 24 of them; a name given twice is drawn once.
        tokens: the texts of the prompt's tokens, `token_texts(model, prompt)`.
        prompt: which prompt of the cache's batch.

    Returns:
        One page: each name with its tokens coloured by self weight, from 0 white to 1 blue; then
        each pattern, pos × (pos + 1).

    Raises:
        InputError: no names or too many, tokens that do not fit, a text too long to draw.
        UnknownHeadError: a name is not of a neuron-head of the model.
        UnsupportedCallError: the cache does not hold that block's pattern.
        ImportError: circuitsvis is not installed.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> page = viz.neuron_pattern_view(cache, ["L0N7", "L0N11"], ["0", "3", "="], prompt=3)
        >>> page.count("L0N11") >= 2
        True
    """
    # A list of top results repeats some names.
    unique = list(dict.fromkeys([names] if isinstance(names, str) else names))
    if not 1 <= len(unique) <= MOST_NEURONS:
        refuse(
            f"got {len(unique)} neuron-heads; expected 1 to {MOST_NEURONS}: filter first, such as "
            'sweep.top(7)["name"]'
        )

    def of_prompt(values: Tensor) -> Tensor:
        return prompt_values(values, prompt, cache.has_batch_dim)

    weights = [of_prompt(neuron_pattern(cache, name))[:, SELF] for name in unique]
    n_tokens = len(weights[0])
    refuse(
        *token_reasons(tokens, n_tokens), *_size_reasons(len(unique) * n_tokens * (n_tokens + 1))
    )
    texts = safe_tokens(tokens)
    coloured = [
        Component("ColoredTokens", {"tokens": texts, "values": _rounded(each), **_SCALE}, name)
        for name, each in zip(unique, weights, strict=True)
    ]
    heads = {
        "attention": [_rounded(of_prompt(dense_pattern(cache, name))) for name in unique],
        "attentionHeadNames": unique,
        "tokens": [*texts, _BIAS],
        # Circuitsvis' mask would grey the bias token's column out, which comes after all tokens.
        "maskUpperTri": False,
        **_SCALE,
    }
    return circuitsvis_page(
        f"Neuron-heads: {', '.join(unique)}" if len(unique) <= 3 else f"{len(unique)} neuron-heads",
        "Each token attends to itself and to the bias token. Blue is the weight on itself, 0 to 1; "
        f"point at a token for the number. Below, query by key, with {_BIAS} as the last column.",
        [*coloured, Component("AttentionHeads", heads, "Patterns")],
    )


def attention_view(
    cache: ActivationCache, layer: int, tokens: Sequence[str], *, prompt: int = 0
) -> Page:
    """Draw the patterns of the original attention heads of a layer over one prompt.

    Args:
        cache: of a converted or exposed model, with that layer's pattern.
        layer: a source layer (not a block).
        tokens: the texts of the prompt's tokens.
        prompt: which prompt of the cache's batch.

    Returns:
        One page: circuitsvis' attention heads, named `L5H3`.

    Raises:
        InputError: there is no such layer, tokens do not fit, the text is too long to draw.
        UnsupportedCallError: the cache is not of such a model, or does not hold the pattern.
        ImportError: circuitsvis is not installed.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> "L0H3" in viz.attention_view(cache, 0, ["0", "3", "="], prompt=3)
        True
    """
    pattern = original_attention(cache, layer, prompt)
    n_heads, n_queries, _ = pattern.shape
    refuse(*token_reasons(tokens, n_queries), *_size_reasons(pattern.numel()))
    heads = {
        "attention": _rounded(pattern),
        "attentionHeadNames": [str(HeadName(layer, "attention", i)) for i in range(n_heads)],
        "tokens": safe_tokens(tokens),
        # Grey only what no head can see; a bidirectional model has nothing of the kind.
        "maskUpperTri": bool((pattern.triu(1) == 0).all()),
        **_SCALE,
    }
    return circuitsvis_page(
        f"Attention heads of layer {layer}",
        "Blue is the weight of a query on a key, 0 to 1; point at a cell for the number.",
        [Component("AttentionHeads", heads)],
    )


def _size_reasons(n_cells: int) -> list[str]:
    if n_cells <= MOST_CELLS:
        return []
    return [
        f"these patterns have {n_cells:,} cells, and a browser draws {MOST_CELLS:,}: shorten the "
        "text"
    ]


def _rounded(weights: Tensor) -> Any:
    """Return nested lists to four decimals: a page ten times as short, in the same colours."""
    if weights.ndim > 1:
        return [_rounded(row) for row in weights]
    return [round(weight, _DIGITS) for weight in weights.tolist()]
