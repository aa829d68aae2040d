"""Plotly figures that also have a static picture, which Python draws as SVG, without a browser.

Notebooks store the picture next to the figure's data, for viewers without plotly, such as
`nbconvert --to html` and GitHub; `viz.write` writes the picture to a file, for a paper. Only the
traces of this package's figures are drawn: one heatmap, or horizontal bars.
"""

import re
from collections.abc import Sequence
from html import escape, unescape
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go

from attn_only_lens.viz.page import import_extra

_MIME_TYPE = "application/vnd.plotly.v1+json"
_WIDTH = 760  # fits into a notebook's cell in a window of 900 pixels
_RIGHT, _LEAST_LEFT = 30, 60  # margins
_COLOUR_BAR = 115  # the width of a heatmap's colour bar, with its labels
_SMALL, _LARGE, _LINE = 12, 15, 20  # font sizes, and the height of a line of the title
_CHARACTER = 0.55  # the mean width of a character, as a share of the font size
_FONT = "'Open Sans', Verdana, Arial, sans-serif"
_INK, _GRID, _ZERO = "#2a3f5f", "#dfe3ea", "#444444"
_Colour: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
_DARK = 0.5  # texts on cells with a smaller luminance are white


class StaticFigure(go.Figure):
    """A plotly figure with the attribute `picture`, an SVG of the figure, or None."""

    @property
    def picture(self) -> str | None:
        """The figure as SVG, without interaction; None if it has traces of other kinds."""
        kinds = {trace.type for trace in self.data}
        if kinds == {"heatmap"} and len(self.data) == 1:
            return _heatmap(self)
        if kinds == {"bar"} and {trace.orientation for trace in self.data} == {"h"}:
            return _bars(self)
        return None

    def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(*arguments, **options)
        if _MIME_TYPE in bundle and (picture := self.picture) is not None:
            bundle["image/svg+xml"] = picture
        return bundle

    def _ipython_display_(self) -> None:
        bundle = self._repr_mimebundle_()
        if _MIME_TYPE in bundle:
            import_extra("IPython.display").display(bundle, raw=True)
        else:  # another renderer, such as a browser
            super()._ipython_display_()


def _heatmap(figure: go.Figure) -> str:
    (trace,) = figure.data
    rows, columns = list(map(_plain, trace.y)), list(map(_plain, trace.x))
    left, top = _left(rows), figure.layout.margin.t
    right = _WIDTH - _RIGHT - _COLOUR_BAR
    wide, tall = (right - left) / len(columns), _height(figure, columns) / len(rows)
    is_from_top = figure.layout.yaxis.autorange == "reversed"
    parts = [_box(left, top, right - left, tall * len(rows), figure.layout.plot_bgcolor or "#fff")]
    for i, row in enumerate(np.asarray(trace.z, dtype=float)):
        y = top + tall * (i if is_from_top else len(rows) - 1 - i)
        parts.append(_text(left - 8, y + tall / 2, rows[i], anchor="end"))
        for j, value in enumerate(row):
            if np.isnan(value):
                continue
            colour = _colour(trace, value)
            parts.append(_box(left + wide * j + 0.5, y + 0.5, wide - 1, tall - 1, _hex(colour)))
            if text := _cell(trace, i, j):
                ink = "#ffffff" if colour @ (0.299, 0.587, 0.114) < 255 * _DARK else "#333333"
                parts.append(_text(left + wide * (j + 0.5), y + tall / 2, text, colour=ink))
    bottom = top + tall * len(rows)
    below = _column_labels(columns, left, wide, bottom, figure.layout.xaxis.tickmode == "auto")
    parts += [*below, *_colour_bar(trace, right + 30, top, min(bottom - top, 300))]
    return _svg(figure, parts, (left + right) / 2, bottom + _depth(columns, wide))


def _bars(figure: go.Figure) -> str:
    names = list(figure.layout.yaxis.categoryarray)[::-1]  # from the top
    left, top = _left([_plain(name) for name in names]), figure.layout.margin.t
    right = float(_WIDTH - _RIGHT)
    tall = _height(figure, []) / len(names)
    ends = [(0.0, 0.0)]
    for trace in figure.data:
        for x, error in zip(trace.x, _errors(trace), strict=True):
            ends.append((x - error, x + error))
    low, high = min(a for a, _ in ends), max(b for _, b in ends)
    low, high = low * 1.05, high * 1.05 or 1.0 * (low == 0)
    ticks = [tick for tick in _ticks(low, high) if low <= tick <= high]

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    bottom, parts = top + tall * len(names), list[str]()
    for tick in ticks:
        parts.append(_stroke(across(tick), top, across(tick), bottom, _GRID))
        parts.append(_text(across(tick), bottom + 16, f"{tick:g}"))
    legend = float(left)
    for trace in figure.data:
        parts += [_box(legend, top - 22, 12, 12, trace.marker.color)]
        parts.append(_text(legend + 18, top - 16, _plain(trace.name), anchor="start"))
        legend += 40 + len(trace.name) * _SMALL * _CHARACTER
        for name, x, error in zip(trace.y, trace.x, _errors(trace), strict=True):
            y = top + tall * names.index(name)
            start, end = sorted((across(0), across(x)))
            parts.append(_box(start, y + 0.1 * tall, end - start, 0.8 * tall, trace.marker.color))
            parts.append(_text(left - 8, y + tall / 2, _plain(name), anchor="end"))
            if error:
                middle, (a, b) = y + tall / 2, (across(x - error), across(x + error))
                parts.append(_stroke(a, middle, b, middle, "#222222"))
                parts += [_stroke(x, middle - 3, x, middle + 3, "#222222") for x in (a, b)]
    parts.append(_stroke(across(0), top, across(0), bottom, _ZERO))
    return _svg(figure, parts, (left + right) / 2, bottom + 24)


def _svg(figure: go.Figure, parts: Sequence[str], middle: float, bottom: float) -> str:
    """Return the picture with the figure's title and the titles of its axes."""
    height = bottom + 44
    title = re.split(r"<br>", figure.layout.title.text or "")
    texts = []
    for i, line in enumerate(title):
        size = _SMALL if "font-size:12px" in line else _LARGE
        texts.append(_text(20, 36 + _LINE * i, _plain(line), size, "start"))
    texts.append(_text(middle, bottom + 22, _plain(figure.layout.xaxis.title.text or ""), 13))
    if side := _plain(figure.layout.yaxis.title.text or ""):
        middle = (figure.layout.margin.t + bottom) / 2
        texts.append(_text(20, middle, side, 13, turned=-90))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="{_FONT}" '
            'style="max-width:100%;height:auto" role="img">',
            f"<title>{escape(_plain(title[0]))}</title>",
            _box(0, 0, _WIDTH, height, "#ffffff"),
            *parts,
            *texts,
            "</svg>",
        ]
    )


def _left(names: Sequence[str]) -> float:
    return max(_LEAST_LEFT, 30 + max(map(len, names)) * _SMALL * _CHARACTER)


def _height(figure: go.Figure, columns: Sequence[str]) -> float:
    """Return the height of the plot, without its labels."""
    margin = figure.layout.margin
    return float(max(100, figure.layout.height - margin.t - margin.b - 10 * bool(columns)))


def _column_labels(
    columns: Sequence[str], left: float, wide: float, bottom: float, is_sparse: bool
) -> list[str]:
    """Return labels below columns, turned if they are too wide; in sparse axes, some of them."""
    turned, size = _turned(columns, wide), _SMALL if wide >= 17 else max(8, min(10, int(wide)))
    step = max(1, -(-12 // max(1, int(wide)))) if is_sparse else 1
    anchor, y = ("end", bottom + 8) if turned else ("middle", bottom + 14)
    return [
        _text(left + wide * (j + 0.5), y, name, size, anchor, turned=turned)
        for j, name in enumerate(columns)
        if j % step == 0
    ]


def _turned(columns: Sequence[str], wide: float) -> int:
    """Return by how many degrees labels of columns have to be turned so that they fit."""
    longest = max(map(len, columns)) * _SMALL * _CHARACTER
    return 0 if longest <= wide - 4 else -45 if wide >= 17 else -90


def _depth(columns: Sequence[str], wide: float) -> float:
    """Return the height of the labels below the columns."""
    share = {0: 0.0, -45: 0.7, -90: 0.9}[_turned(columns, wide)]
    return 24 + share * max(map(len, columns)) * _SMALL * _CHARACTER


def _colour_bar(trace: Any, x: float, top: float, height: float) -> list[str]:
    title = re.split(r"<br>", trace.colorbar.title.text or "")
    parts = [_text(x, top + 14 * i, _plain(line), anchor="start") for i, line in enumerate(title)]
    top += 14 * len(title)
    height = max(height - 14 * len(title), 60)
    steps = np.linspace(trace.zmax, trace.zmin, 41)
    for i, value in enumerate(steps):
        y = top + height * i / len(steps)
        parts.append(_box(x, y, 15, height / len(steps) + 0.5, _hex(_colour(trace, value))))
    for tick in _ticks(trace.zmin, trace.zmax):
        if trace.zmin <= tick <= trace.zmax:
            y = top + height * (trace.zmax - tick) / (trace.zmax - trace.zmin)
            parts.append(_text(x + 21, y, f"{tick:g}", anchor="start"))
    return parts


def _colour(trace: Any, value: float) -> _Colour:
    """Return the red, green and blue of a value on the trace's colour scale, 0 to 255."""
    places, colours = zip(*trace.colorscale, strict=True)
    share = (value - trace.zmin) / (trace.zmax - trace.zmin)
    return np.array(
        [np.interp(share, places, part) for part in zip(*map(_rgb, colours), strict=True)]
    )


def _rgb(colour: str) -> list[float]:
    if colour.startswith("#"):
        return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return [float(number) for number in re.findall(r"[\d.]+", colour)[:3]]


def _hex(colour: _Colour) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in colour.tolist())


def _cell(trace: Any, i: int, j: int) -> str:
    """Return the text in a heatmap's cell."""
    if trace.texttemplate == "%{text}":
        return _plain(str(trace.text[i][j]))
    return f"{trace.z[i][j]:.2f}" if trace.texttemplate else ""


def _errors(trace: Any) -> list[float]:
    if trace.error_x.array is None:
        return [0.0] * len(trace.x)
    return [0.0 if np.isnan(error) else float(error) for error in trace.error_x.array]


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from below `low` to above `high`, at equal distances."""
    apart = (high - low) / 5
    size = 10.0 ** np.floor(np.log10(apart)) if apart > 0 else 1.0
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= 0.8 * apart)
    first, last = np.floor(low / step + 1e-9), np.ceil(high / step - 1e-9)
    return [float(round(i * step, 12)) for i in range(int(first), int(last) + 1)]


def _plain(text: str) -> str:
    """Return a text of plotly without its markup."""
    return unescape(re.sub(r"</?(?:span|b|i|sub|sup)\b[^>]*>", "", text))


def _text(
    x: float,
    y: float,
    text: str,
    size: int = _SMALL,
    anchor: str = "middle",
    *,
    colour: str = _INK,
    turned: int = 0,
) -> str:
    turn = f' transform="rotate({turned} {x:.1f} {y:.1f})"' * bool(turned)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" dy="0.35em" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}"{turn}>{escape(text)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _stroke(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}" fill="none"/>'
