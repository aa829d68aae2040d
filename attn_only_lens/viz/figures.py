"""Figures of plotly, which is imported when the first one is drawn."""

from html import escape
from typing import TYPE_CHECKING, Any

from attn_only_lens.viz.checks import import_extra
from attn_only_lens.viz.page import visible_token

if TYPE_CHECKING:
    import plotly.graph_objects as go

DIVERGING = [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#ffffff"], [0.75, "#92c5de"], [1, "#2166ac"]]
"""Red for less, white for 0, blue for more: told apart in any colour vision."""
HEAD_COLOURS = {"attention": "#0072B2", "neuron": "#E69F00"}  # tell apart in any colour vision


def empty_figure() -> "go.Figure":
    """Return a figure without traces."""
    return import_extra("plotly.graph_objects").Figure()


def style_figure(figure: "go.Figure", title: str, **layout: Any) -> "go.Figure":
    """Give a figure its title and the style that all have in common."""
    return figure.update_layout(
        title={"text": title, "font_size": 15}, template="plotly_white", **layout
    )


def plotly_text(raw: str) -> str:
    """Escape a text for plotly, which reads some HTML in titles and labels.

    Spaces stay; what cannot be seen gets a sign.

    Example:
        >>> plotly_text("' <b>' & co\\n")
        "' &lt;b&gt;' &amp; co↵"
    """
    return escape(" ".join(map(visible_token, raw.split(" "))), quote=False)
