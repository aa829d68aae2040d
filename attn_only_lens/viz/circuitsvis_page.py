"""Pictures of circuitsvis in one page that works offline and shows tokens as they are.

circuitsvis' own HTML loads its script from a content delivery network, and its notebook display
asks a public server first whether there is one. The bundle that it installs holds the same
components; here it is written into the page, once.

It sets the text of a coloured token as HTML, so that a token "<b>" would be a tag. An invisible
WORD JOINER after "<" and "&" keeps both what they are: neither a tag nor an entity can begin so,
and what is seen is the token, in its tooltip too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from attn_only_lens.viz.checks import refuse
from attn_only_lens.viz.page import Page, document, for_script, inline, shown

__all__ = ["MOST_CELLS", "Component", "circuitsvis_page", "few_enough", "safe_tokens"]

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
