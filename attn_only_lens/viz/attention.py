"""Pictures of circuitsvis in one page that works offline and shows tokens as they are.

circuitsvis' own HTML loads its script from a content delivery network, and its notebook display
asks a public server first whether there is one. The bundle that it installs holds the same
components; here it is written into the page, once.

It sets the text of a coloured token as HTML, so that a token "<b>" would be a tag. An invisible
WORD JOINER after "<" and "&" keeps both what they are: neither a tag nor an entity can begin so,
and what is seen is the token, in its tooltip too.

The patterns of the original heads of a source layer, from the cache of either layout.

Attention over a text: of neuron-heads, to themselves or the bias token; of original heads.

A token t of a neuron-head attends to itself with σ(score) and to the bias token with the rest, so
its whole pattern is one number a token. It is drawn twice: as the colour of each token, and as
heads are, query by key, with the bias token as one more key column. The bias token asks for
nothing, so its row stays empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.axes import SELF
from attn_only_lens.heads import HeadName, dense_pattern, neuron_heads, neuron_pattern
from attn_only_lens.heads.patterns import cached_activation, require_neuron_heads
from attn_only_lens.numerics import is_count
from attn_only_lens.viz.page import (
    Page,
    distinct,
    document,
    for_script,
    inline,
    of_prompt,
    refuse,
    shown,
    token_reasons,
)

__all__ = [
    "MOST_CELLS",
    "Component",
    "attention_of",
    "attention_view",
    "circuitsvis_page",
    "few_enough",
    "neuron_pattern_view",
    "safe_tokens",
]

MOST_CELLS = 400_000
"""Cells of heatmaps in one page: each is drawn by itself, twice as many keep a browser waiting."""

_JOINER = "\u2060"
_STYLE = """
body { font: 15px system-ui, sans-serif; margin: 1.5em; max-width: 900px; }
h1 { font-size: 1.3em; } h2 { font-size: 1em; margin: 1.2em 0 .2em; }
p { color: #444; max-width: 75ch; }
.colored-tokens { padding-bottom: 0 !important; line-height: 1.7; }
"""


@dataclass(frozen=True)
class Component:
    """One component of circuitsvis, under a heading.

    Attributes:
        name: as circuitsvis exports it, such as "ColoredTokens".
        props: what it is given; plain lists, numbers and texts.
        heading: above it; none where empty.
    """

    name: str
    props: dict[str, Any]
    heading: str = ""


def circuitsvis_page(title: str, explained: str, components: Sequence[Component]) -> Page:
    """A page of components, one below the other.

    Raises:
        ImportError: circuitsvis is not installed.
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(explained)}</p>"]
    for index, component in enumerate(components):
        parts += [f"<h2>{escape(component.heading)}</h2>"] * bool(component.heading)
        parts.append(f'<div id="part-{index}"></div>')
    data = for_script([[component.name, component.props] for component in components])
    parts.append(f'<script type="application/json" id="data">{data}</script>')
    parts.append(inline(_bundle()))
    parts.append(
        "<script>\n"
        'const components = JSON.parse(document.getElementById("data").textContent);\n'
        "components.forEach(([name, props], index) =>\n"
        '  CircuitsVis.render("part-" + index, CircuitsVis[name], props));\n'
        "</script>"
    )
    return document(title, "\n".join(parts), _STYLE)


def safe_tokens(tokens: Sequence[str]) -> list[str]:
    r"""Tokens that circuitsvis shows as they are.

    Example:
        >>> safe_tokens(["<b>", " the"]) == ["<\u2060b>", "·the"]
        True
    """
    return [
        shown(token).replace("<", "<" + _JOINER).replace("&", "&" + _JOINER) for token in tokens
    ]


def few_enough(n_cells: int, what: str) -> None:
    """Hold a number of heatmap cells against MOST_CELLS.

    Raises:
        PictureError: there are more.
    """
    if n_cells > MOST_CELLS:
        refuse(
            [f"{what} have {n_cells:,} cells, and a browser draws {MOST_CELLS:,}: shorten the text"]
        )


def _bundle() -> str:
    try:
        return files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ImportError(
            "this picture needs circuitsvis: pip install 'attn-only-lens[viz]'"
        ) from error


def attention_of(
    cache: ActivationCache, layer: int, prompt: int
) -> Float[Tensor, "head_index query_pos key_pos"]:
    """The weights of every head of a source layer over one prompt, in float64 on the CPU.

    Raises:
        PictureError: there is no such layer or prompt, or keys are of more tokens than queries.
        UnsupportedCallError: the cache is not of a model with neuron-heads, or lacks the pattern.
    """
    require_neuron_heads(cache)
    n_layers = len(neuron_heads(cache.model))
    if not is_count(layer, 0, n_layers - 1):
        refuse([f"got layer={layer!r}; the model has source layers 0 to {n_layers - 1}"])
    held = cached_activation(cache, layer, "attention", "pattern")
    pattern = of_prompt(held, prompt, cache.has_batch_dim)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        refuse(
            [f"the pattern is of {n_queries} queries over {n_keys} keys: run without a KV cache"]
        )
    return pattern


MOST_NEURONS = 24
"""Neuron-heads in one page, each a line of tokens and a heatmap."""

_BIAS = "[bias]"
_DIGITS = 4


def neuron_pattern_view(
    cache: ActivationCache, names: str | Iterable[str], tokens: Sequence[str], *, prompt: int = 0
) -> Page:
    """What neuron-heads attend to over one prompt.

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
        PictureError: no names or too many, tokens that do not fit, a text too long to draw.
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
    chosen = distinct(names)
    if not 1 <= len(chosen) <= MOST_NEURONS:
        refuse(
            [
                f"got {len(chosen)} neuron-heads; expected 1 to {MOST_NEURONS}: filter first, such "
                'as sweep.top(7)["name"]'
            ]
        )
    weights = [
        of_prompt(neuron_pattern(cache, name), prompt, cache.has_batch_dim)[:, SELF]
        for name in chosen
    ]
    n_tokens = len(weights[0])
    refuse(token_reasons(tokens, n_tokens))
    few_enough(len(chosen) * n_tokens * (n_tokens + 1), "these patterns")
    texts = safe_tokens(tokens)
    scale = {"minValue": -1, "maxValue": 1}
    coloured = [
        Component("ColoredTokens", {"tokens": texts, "values": _rounded(each), **scale}, name)
        for name, each in zip(chosen, weights, strict=True)
    ]
    squares = [
        _rounded(of_prompt(dense_pattern(cache, name), prompt, cache.has_batch_dim))
        for name in chosen
    ]
    heads = {
        "attention": squares,
        "attentionHeadNames": chosen,
        "tokens": [*texts, _BIAS],
        # Circuitsvis' mask would grey the bias token's column out, which comes after all tokens.
        "maskUpperTri": False,
        **scale,
    }
    return circuitsvis_page(
        f"Neuron-heads: {', '.join(chosen)}" if len(chosen) <= 3 else f"{len(chosen)} neuron-heads",
        "Each token attends to itself and to the bias token. Blue is the weight on itself, 0 to 1; "
        f"point at a token for the number. Below, query by key, with {_BIAS} as the last column.",
        [*coloured, Component("AttentionHeads", heads, "Patterns")],
    )


def attention_view(
    cache: ActivationCache, layer: int, tokens: Sequence[str], *, prompt: int = 0
) -> Page:
    """The patterns of the original attention heads of a layer over one prompt.

    Args:
        cache: of a converted or exposed model, with that layer's pattern.
        layer: a source layer (not a block).
        tokens: the texts of the prompt's tokens.
        prompt: which prompt of the cache's batch.

    Returns:
        One page: circuitsvis' attention heads, named `L5H3`.

    Raises:
        PictureError: there is no such layer, tokens do not fit, the text is too long to draw.
        UnsupportedCallError: the cache is not of such a model, or does not hold the pattern.
        ImportError: circuitsvis is not installed.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> "L0H3" in viz.attention_view(cache, 0, ["0", "3", "="], prompt=3)
        True
    """
    pattern = attention_of(cache, layer, prompt)
    n_heads, n_queries, _ = pattern.shape
    refuse(token_reasons(tokens, n_queries))
    few_enough(pattern.numel(), "these patterns")
    heads = {
        "attention": _rounded(pattern),
        "attentionHeadNames": [str(HeadName(layer, "attention", i)) for i in range(n_heads)],
        "tokens": safe_tokens(tokens),
        # Grey only what no head can see; a bidirectional model has nothing of the kind.
        "maskUpperTri": bool((pattern.triu(1) == 0).all()),
        "minValue": -1,
        "maxValue": 1,
    }
    return circuitsvis_page(
        f"Attention heads of layer {layer}",
        "Blue is the weight of a query on a key, 0 to 1; point at a cell for the number.",
        [Component("AttentionHeads", heads)],
    )


def _rounded(weights: Tensor) -> Any:
    """Nested lists, to four decimals: a page ten times as short, and no colour changes."""
    return (
        [_rounded(row) for row in weights]
        if weights.ndim > 1
        else [round(weight, _DIGITS) for weight in weights.tolist()]
    )
