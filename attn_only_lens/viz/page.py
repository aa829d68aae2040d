"""What pictures ask of what they are given, in one voice.

One self-contained HTML page: how texts get into it unharmed, and how it gets into a file.

A page holds its scripts and styles, and a Content-Security-Policy that forbids it to fetch
anything else: `default-src 'none'` leaves no way to a network, whatever a token says.

Texts from outside reach a page in three ways only, each with its own escape:

    text of an element     `html.escape`
    data for a script      JSON in a <script type="application/json">, with <, > and & as \u003c …,
                           so that no "</script>" and no "<!--" can end or change the element;
                           scripts put it into the page as textContent
    a library's bundle     its own strings, where "</script" is written "<\\/script", which is the
                           same string to JavaScript

Texts for plotly, which reads a few HTML tags and entities in every title, label and tooltip.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape, unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import PictureError
from attn_only_lens.numerics import is_count
from attn_only_lens.storage import write_text

__all__ = [
    "Page",
    "distinct",
    "document",
    "for_script",
    "inline",
    "of_prompt",
    "refuse",
    "resource",
    "shown",
    "text",
    "token_reasons",
    "write_html",
]

_PROBLEM = "this picture cannot be drawn"


def refuse(reasons: Sequence[str]) -> None:
    """Raise PictureError with these reasons, if there are any."""
    if reasons:
        raise PictureError(reasons, _PROBLEM)


def distinct(names: str | Iterable[str]) -> list[str]:
    """One name as a list, or each of several once, in their order (a top list repeats some)."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names))


def token_reasons(tokens: Any, n_tokens: int | None = None) -> list[str]:
    """Why these are not the tokens of one prompt, as texts, of this length."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        return [f"got a {type(tokens).__name__} for tokens; expected a list of their texts"]
    odd = [token for token in tokens if not isinstance(token, str)]
    if odd:
        return [f"got {odd[0]!r} among the tokens; expected their texts, by token_texts"]
    if n_tokens is not None and len(tokens) != n_tokens:
        return [f"got {len(tokens)} tokens; expected {n_tokens}, as in the cache"]
    return []


def of_prompt(values: Tensor, prompt: int, has_batch: bool) -> Float[Tensor, "..."]:
    """The values of one prompt, in float64 on the CPU.

    Raises:
        PictureError: the cache holds no such prompt, or a value that is not finite.
    """
    n_prompts = len(values) if has_batch else 1
    if not is_count(prompt, 0, n_prompts - 1):
        refuse([f"got prompt={prompt!r}; the cache holds prompts 0 to {n_prompts - 1}"])
    one = (values[prompt] if has_batch else values).detach().cpu().double()
    if not bool(one.isfinite().all()):
        refuse(["the cache holds values that are not finite"])
    return one


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_WHITE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


class Page(str):
    """The text of a page; a notebook shows it in a frame of its own.

    Example:
        >>> from attn_only_lens.viz import Page
        >>> Page("<p>hello")._repr_html_()[:7]
        '<iframe'
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width:100%;height:760px;border:1px solid #ccc"
        # A sandbox without allow-same-origin: the page can reach nothing of the notebook's.
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self)}"></iframe>'

    def __repr__(self) -> str:
        # A notebook stores this beside the frame: not the whole page a second time.
        title = unescape(self.partition("<title>")[2].partition("</title>")[0])
        return f"<Page {title!r}, {len(self):,} characters>"


def write_html(picture: "str | go.Figure", path: str | Path) -> Path:
    """Write a picture to one HTML file that works offline: whole, or not at all.

    Args:
        picture: a page of this module, or a figure of plotly.
        path: the file; folders on the way to it are made.

    Returns:
        The path.

    Raises:
        TypeError: it is neither.

    Example:
        >>> import tempfile
        >>> from attn_only_lens import viz
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     viz.write_html(viz.Page("<p>hello"), f"{folder}/hello.html").read_text()
        '<p>hello'
    """
    if isinstance(picture, go.Figure):
        text: str = picture.to_html(include_plotlyjs=True, full_html=True)
    elif isinstance(picture, str):
        text = picture
    else:
        raise TypeError(f"got a {type(picture).__name__}; expected a page or a plotly figure")
    path = Path(path)
    write_text(path, text)
    return path


def document(title: str, body: str, style: str = "") -> Page:
    """A page of this title around a body that is HTML already."""
    return Page(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def for_script(data: Any) -> str:
    r"""JSON that can stand in a script element.

    Raises:
        ValueError: a number is not finite, which JSON has no word for.

    Example:
        >>> print(for_script("</script>"))
        "\u003c/script\u003e"
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def inline(source: str) -> str:
    """A script element that holds a library."""
    kept = [line for line in source.split("\n") if not line.startswith("//# sourceMappingURL=")]
    # A browser with its tools open would ask for the source map.
    return "<script>\n" + "\n".join(kept).replace("</script", "<\\/script") + "\n</script>"


def resource(name: str) -> str:
    """The text of a file that ships beside this module."""
    return files("attn_only_lens.viz").joinpath(name).read_text(encoding="utf-8")


def shown(token: str) -> str:
    r"""A token as one can read it: white space and what is not printable get a sign.

    Example:
        >>> shown(" the"), shown("a\n"), shown("\x00\ud800")
        ('·the', 'a↵', '\\x00\\ud800')
    """
    return "".join(
        _WHITE.get(c, c if c.isprintable() else c.encode("unicode_escape").decode()) for c in token
    )


def text(raw: str) -> str:
    """A text that plotly shows as it is: spaces stay, what cannot be seen gets a sign.

    Example:
        >>> text("' <b>' & co\\n")
        "' &lt;b&gt;' &amp; co↵"
    """
    return escape(" ".join(map(shown, raw.split(" "))), quote=False)
