"""Texts for plotly, which reads a few HTML tags and entities in every title, label and tooltip."""

from html import escape

from attn_only_lens.viz.page import shown

__all__ = ["text"]


def text(raw: str) -> str:
    """A text that plotly shows as it is: spaces stay, what cannot be seen gets a sign.

    Example:
        >>> text("' <b>' & co\\n")
        "' &lt;b&gt;' &amp; co↵"
    """
    return escape(" ".join(map(shown, raw.split(" "))), quote=False)
