r"""Self-contained HTML pages, and functions that write pages to files.

A page contains its scripts and styles; its Content-Security-Policy, `default-src 'none'`, forbids
all requests. Text from outside the package, such as a token, enters a page in one of three forms,
and is escaped accordingly:

    text of an element     `html.escape`
    data for a script      JSON in a <script type="application/json">, with <, > and & as \u003c …,
                           so that no "</script>" or "<!--" can end the element; scripts put it
                           into the page as textContent
    a library's bundle     "</script" becomes "<\/script", the same string in JavaScript
"""

import gzip
import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from html import escape, unescape
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attn_only_lens.arguments import a_type, as_plain, ending_reasons
from attn_only_lens.errors import InputError
from attn_only_lens.storage import write_text
from attn_only_lens.storage.atomic import as_path

if TYPE_CHECKING:
    import plotly.graph_objects as go

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_UNPACK = """\
(async () => {
  const text = atob(document.getElementById("packed").textContent);
  const packed = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const page = await new Response(unpacked).text();
  document.open();
  document.write(page);
  document.close();
})();
"""
_NOT_WRITTEN = "this picture cannot be written"
_WHITE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


class Page(str):
    """The HTML text of a page, which notebooks show in a frame.

    Attributes:
        picture: an SVG of the initial view, or None; notebook viewers without frames show the
            picture.
        height: height of the frame in a notebook, in pixels.

    Example:
        >>> from attn_only_lens.viz.page import Page
        >>> Page("<p>hello")._repr_html_()[:7]
        '<iframe'
    """

    picture: str | None
    height: int

    def __new__(cls, text: str, picture: str | None = None, height: int = 760) -> "Page":
        """Make a page from HTML text, a picture, and the height of the frame in a notebook."""
        page = super().__new__(cls, text)
        page.picture, page.height = picture, height
        return page

    def _repr_html_(self) -> str:
        place = "grid-area:1/1;width:100%"
        size = f"{place};height:{self.height}px;border:1px solid #ccc"
        # Without allow-same-origin, the page cannot access the notebook.
        frame = (
            f'<iframe sandbox="allow-scripts allow-downloads" style="{size}" '
            f'srcdoc="{escape(_packed(self))}"></iframe>'
        )
        if self.picture is None:
            return frame
        coded = b64encode(self.picture.encode()).decode()
        title = escape(self._title())
        size = f"{place};max-height:{self.height}px;object-fit:contain"  # not below the frame
        image = f'<img alt="{title}" style="{size}" src="data:image/svg+xml;base64,{coded}">'
        return f'<div style="display:grid">{image}{frame}</div>'  # the frame covers the picture

    def _repr_svg_(self) -> str | None:
        return self.picture  # for viewers without HTML, such as a PDF export

    def _title(self) -> str:
        return unescape(self.partition("<title>")[2].partition("</title>")[0])

    def __repr__(self) -> str:
        # Notebooks store this repr, so it must not depend on rounding errors.
        return f"<Page {self._title()!r}>"


def _packed(page: str) -> str:
    """Return a page that contains another page, compressed, and a script that unpacks it."""
    packed = b64encode(gzip.compress(page.encode(), mtime=0)).decode()  # the same bytes every time
    return (
        f'<!DOCTYPE html><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<script type="text/plain" id="packed">{packed}</script><script>{_UNPACK}</script>'
    )


def unpacked(frame: str) -> str:
    """Return the page in the `srcdoc` of a notebook's frame.

    Example:
        >>> from html import unescape
        >>> from attn_only_lens.viz.page import Page, unpacked
        >>> frame = Page("<p>hello")._repr_html_().partition('srcdoc="')[2].partition('"')[0]
        >>> unpacked(unescape(frame))
        '<p>hello'
    """
    packed = frame.partition('id="packed">')[2].partition("<")[0]
    return gzip.decompress(b64decode(packed)).decode() if packed else frame


def write(picture: "str | go.Figure", path: str | Path) -> Path:
    """Write a page or figure to an HTML file, or the picture of a circuit or figure to an SVG file.

    The HTML file works offline. Files are written atomically, and missing folders are created.

    Args:
        picture: a page, or a plotly figure; for an SVG file, the page of a circuit, or the figure
            that `heatmap` or `bars` returned.
        path: a path that ends in .html or .svg.

    Returns:
        The path.

    Raises:
        InputError: the path has another ending; `picture` is neither a page nor a plotly figure, or
            it has no SVG and the path ends in .svg.

    Example:
        >>> import tempfile
        >>> from attn_only_lens import viz
        >>> from attn_only_lens.viz.page import Page
        >>> page = Page("<p>hello", "<svg/>")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("hello.html", "hello.svg"):
        ...         viz.write(page, f"{folder}/{name}").read_text()
        '<p>hello'
        '<svg/>'
    """
    path = as_path(path)
    InputError.raise_if(ending_reasons(path, ".html", ".svg"), _NOT_WRITTEN)
    plotly = sys.modules.get("plotly.basedatatypes")  # a figure exists only if plotly is loaded
    if path.suffix == ".svg":
        text = getattr(picture, "picture", None)
        if text is None:
            expected = "a circuit's page, the figure of a sweep, or a path that ends in .html"
            reason = f"got {a_type(picture)} without an SVG; expected {expected}"
            raise InputError([reason], _NOT_WRITTEN)
    elif isinstance(picture, str):
        text = picture
    elif plotly is not None and isinstance(picture, plotly.BaseFigure):
        title = re.sub("<.*?>", " ", picture.layout.title.text or "").partition("  ")[0]
        figure = picture.to_html(full_html=False, default_height="100vh")
        head = f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>'
        head += f"\n<style>{asset('assets/light_only.css')}</style>"
        body = f'<body style="margin: 0">\n<main class="light-only">\n{figure}\n</main>\n</body>'
        text = f"{head}\n{body}\n</html>\n"
    else:
        reason = f"got {a_type(picture)}; expected a page or a plotly figure"
        raise InputError([reason], _NOT_WRITTEN)
    write_text(path, text)
    return path


def import_extra(name: str) -> Any:
    """Import an optional module; if the module is missing, say how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this picture needs {package}: pip install {package}") from error


def refuse(*reasons: str) -> None:
    """Raise InputError with the reasons why a picture cannot be drawn, if there are any."""
    if reasons:
        raise InputError(reasons, "this picture cannot be drawn")


def document(title: str, body: str, style: str = "", picture: str | None = None) -> Page:
    """Return a page with the given title, HTML body, style and picture."""
    return Page(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n",
        picture,
    )


def page_of_tokens(
    title: str, note: str, main: str, data: Any, name: str, libraries: Sequence[str] = ()
) -> Page:
    """Return a page whose scripts colour tokens by the activations of neurons or heads."""
    body = [
        f'<header><h1>{escape(title)}</h1><span class="note">{escape(note)}</span>',
        '<button id="theme" type="button" title="Light or dark" aria-label="Light or dark">◐',
        f"</button></header>\n{main}",
        f'<script type="application/json" id="data">{script_data(data)}</script>',
        *map(inline_script, libraries),
        *(inline_script(asset(f"assets/{key}.js")) for key in ("tokens", name)),
    ]
    style = "".join(asset(f"assets/{key}.css") for key in ("page", "tokens", "light_only", name))
    return document(title, "\n".join(body), style)


def script_data(data: Any) -> str:
    """Return data as JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def inline_script(source: str) -> str:
    """Return a script element with the given JavaScript."""
    kept = [line for line in source.split("\n") if not line.startswith("//# sourceMappingURL=")]
    # With a source map, a browser with open developer tools would send a request.
    return "<script>\n" + "\n".join(kept).replace("</script", "<\\/script") + "\n</script>"


def asset(name: str) -> str:
    """Return the text of a file that ships with this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def model_title(name: str) -> str:
    """Return a model's name; if the name is an absolute path, return only its last part.

    A model that was built from a config has no name: TransformerLens calls it "custom".
    """
    name = Path(name).name if Path(name).is_absolute() else name
    return "" if name == "custom" else name


def visible_token(token: str) -> str:
    """Return a token in which white space is visible, and unprintable characters are escaped."""
    return "".join(
        _WHITE.get(c, c if c.isprintable() else c.encode("unicode_escape").decode()) for c in token
    )


def with_space(token: str) -> str:
    """Return the same text as `visible_token`, except that leading spaces stay spaces."""
    kept = token[: len(token) - len(token.lstrip(" "))] if token.strip(" ") else ""
    return kept + visible_token(token.removeprefix(kept))


def short_numbers(values: Iterable[Any], figures: int = 5) -> list[Any]:
    """Round numbers to significant figures, and replace missing values with None."""
    return [_short(value, figures) for value in values]


def _short(value: Any, figures: int) -> Any:
    if not isinstance(value, str) and pd.isna(value):
        return None
    value = as_plain(value)
    return float(f"{value:.{figures}g}") if isinstance(value, float) else value
