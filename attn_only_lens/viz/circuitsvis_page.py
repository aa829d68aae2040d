"""Components of circuitsvis in one page that works offline and shows tokens as they are.

circuitsvis' own HTML loads its script from a content delivery network, and its notebook display
first asks a public server whether there is one. The bundle that it installs holds the same
components; here it is written into the page, once.

It sets the text of a coloured token as HTML, so that a token "<b>" would be a tag. An invisible
WORD JOINER after "<" and "&" keeps both what they are: neither a tag nor an entity can begin so,
and what is seen is the token, in its tooltip too.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from attn_only_lens.viz.checks import import_extra
from attn_only_lens.viz.page import Page, document, inline_script, script_data, visible_token

_JOINER = "\u2060"
_STYLE = """
body { font: 15px system-ui, sans-serif; margin: 1.5em; max-width: 900px; }
h1 { font-size: 1.3em; } h2 { font-size: 1em; margin: 1.2em 0 .2em; }
p { color: #444; max-width: 75ch; }
.colored-tokens { padding-bottom: 0 !important; line-height: 1.7; }
"""


class Component(NamedTuple):
    """One component of circuitsvis, under a heading.

    Attributes:
        name: as circuitsvis exports it, such as "ColoredTokens".
        props: its properties: plain lists, numbers and texts.
        heading: above it; none where empty.
    """

    name: str
    props: dict[str, Any]
    heading: str = ""


def circuitsvis_page(title: str, caption: str, components: Sequence[Component]) -> Page:
    """Return a page of components, one below the other.

    Raises:
        ImportError: circuitsvis is not installed.
    """
    import_extra("circuitsvis")
    bundle = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(caption)}</p>"]
    for index, component in enumerate(components):
        body += [f"<h2>{escape(component.heading)}</h2>"] * bool(component.heading)
        body.append(f'<div id="part-{index}"></div>')
    data = script_data([[component.name, component.props] for component in components])
    body += [
        f'<script type="application/json" id="data">{data}</script>',
        inline_script(bundle),
        "<script>\n"
        'const components = JSON.parse(document.getElementById("data").textContent);\n'
        "components.forEach(([name, props], index) =>\n"
        '  CircuitsVis.render("part-" + index, CircuitsVis[name], props));\n'
        "</script>",
    ]
    return document(title, "\n".join(body), _STYLE)


def safe_tokens(tokens: Sequence[str]) -> list[str]:
    r"""Return tokens that circuitsvis shows as they are.

    Example:
        >>> safe_tokens(["<b>", " the"]) == ["<\u2060b>", "·the"]
        True
    """
    return [
        visible_token(token).replace("<", "<" + _JOINER).replace("&", "&" + _JOINER)
        for token in tokens
    ]
