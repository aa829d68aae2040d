"""Draw the initial view of a circuit's page as SVG, for viewers that do not run JavaScript.

`assets/circuit.js` draws the same view in the page.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from math import inf
from textwrap import wrap
from typing import Any

from attn_only_lens.viz.circuit_data import EXTRAS, STATUSES
from attn_only_lens.viz.coordinates import (
    AXIS,
    BOX,
    GUTTER,
    Boxes,
    Layout,
    Point,
    curve,
    edge_paths,
    place,
)
from attn_only_lens.viz.page import asset

WIDTH = 900.0
_HEIGHT = 600.0
MOST, FEWEST = 40, 12
_TITLE, _LEGEND, _LINE = 28, 30, 14
_CHARACTER = 7.9  # width of a character in the title
_CORNERS = {"attention": 10, "metric": 4, "embed": 4, "skip": 4, "error": 4}
_SLANTED = ' transform="skewX(-14)"'  # features are parallelograms
_SHAPES = {"feature": "slanted: feature", "skip": "italic S: W_skip", "error": "italic E: error"}
_Data = Mapping[str, Any]


def first_view(data: _Data) -> dict[str, int]:
    """Return the largest numbers of nodes and edges with which the initial view is readable."""
    n = min(MOST, sum(kind not in EXTRAS for kind in data["nodes"]["kind"]))
    for k in range(n, FEWEST, -1):
        placed = _placed(data, _shown(data, k), _HEIGHT)
        if placed.width < WIDTH + 1 and placed.height < _HEIGHT + 1:
            break
    else:
        k = min(FEWEST, n)
    return {"nodes": k, "edges": 2 * k}


def circuit_picture(data: _Data, title: str) -> str:
    """Return the initial view of a circuit's page as SVG."""
    shown = _shown(data, data["first"]["nodes"])
    placed = _placed(data, shown, _HEIGHT)
    colours = _light_colours()
    edges = _shown_edges(data, set(shown), data["first"]["edges"])
    paths = edge_paths(placed, _boxes(data), [(a, b, kind) for a, b, kind, _, _ in edges])
    heaviest = max((abs(weight) for *_, weight, _ in edges), default=0.0) or 1.0
    colours_of = zip(data["nodes"]["attribution"], data["nodes"]["kind"], strict=True)
    largest = max((abs(a or 0) for a, kind in colours_of if kind != "metric"), default=0) or 1
    parts_drawn = _parts_drawn(data, edges)
    n_columns = int((placed.width - 16) / data["per_character"])
    legend = wrap(_legend(data), n_columns, break_on_hyphens=False)
    height = placed.height + _TITLE + _LEGEND + _LINE * (len(legend) - 1)
    longest = int((placed.width - 16) / _CHARACTER)
    shorter = title if len(title) <= longest else title[: longest - 1] + "…"
    style = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], data["style"])
    band = '<rect class="band" x="{:.0f}" y="{:.1f}" width="{:.0f}" height="{:.0f}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="circuit" width="{placed.width:.0f}" '
        f'height="{height:.0f}" viewBox="0 {-_TITLE} {placed.width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<rect class="back" y="{-_TITLE}" width="{placed.width:.0f}" height="{height:.0f}"/>',
        _text(8, -9, shorter, "title"),
        *(band.format(GUTTER - 8, y - tall / 2, placed.width, tall) for _, y, tall in placed.rows),
        *(
            _edge(path, kind, weight, heaviest, status)
            for path, (_, _, kind, weight, status) in zip(paths, edges, strict=True)
        ),
        *(_node(data, i, placed, largest, colours, parts_drawn.get(i)) for i in shown),
        *(_text(8, y, data["rows"][row], "row", "0.35em") for row, y, _ in placed.rows),
        *_axis(data, placed),
        *(_text(8, placed.height + 18 + _LINE * i, line, "row") for i, line in enumerate(legend)),
        "</svg>",
    ]
    return "\n".join(parts)


def _shown(data: _Data, k: int) -> list[int]:
    """Return the k strongest nodes; "rest" and biases are not counted, and shown if asked for."""
    sizes = [inf if size is None else size for size in data["nodes"]["strength"]]
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    plain = [i for i in order if data["nodes"]["kind"][i] not in EXTRAS]
    if not data["state"].get("extras"):
        return plain[:k]
    return plain[:k] + [i for i in order if i in set(data["edges"]["source"]) - set(plain)]


def _kinds(data: _Data) -> list[str]:
    """Return the kinds of edges that the initial view shows; by default, only value edges."""
    kinds: list[str] = data["state"].get("kinds", ["value"])
    return kinds


def _boxes(data: _Data) -> Boxes:
    nodes = data["nodes"]
    overhangs = [kind == "metric" for kind in nodes["kind"]]
    return Boxes(nodes["row"], nodes["column"], nodes["width"], overhangs)


def _placed(data: _Data, shown: Sequence[int], height: float) -> Layout:
    return place(_boxes(data), shown, data["axis_width"], WIDTH, height)


def _shown_edges(data: _Data, shown: set[int], k: int) -> list[tuple[int, int, str, float, Any]]:
    """Return the k strongest edges of the shown kinds between shown nodes."""
    edges, kinds = data["edges"], _kinds(data)
    statuses = edges.get("status", [None] * len(edges["kind"]))
    columns = (edges["source"], edges["target"], edges["kind"], edges["weight"], statuses)
    rows_ = [
        row for row in zip(*columns, strict=True) if row[2] in kinds and {row[0], row[1]} <= shown
    ]
    return sorted(rows_, key=lambda row: -abs(row[3]))[:k]


def _parts_drawn(
    data: _Data, drawn: Sequence[tuple[int, int, str, float, Any]]
) -> dict[int, tuple[float, float]]:
    """Return, by node, its inflow along drawn edges, without "rest", and its inflow that is not."""
    edges, sums = data["edges"], dict[int, tuple[float, float]]()
    if not data["has_bars"]:
        return sums
    for target, kind, weight in zip(edges["target"], edges["kind"], edges["weight"], strict=True):
        if kind in data["additive"]:
            sums[target] = 0.0, sums.get(target, (0.0, 0.0))[1] + weight
    for source, target, kind, weight, _ in drawn:
        if kind in data["additive"] and data["nodes"]["kind"][source] != "rest":
            seen, missing = sums[target]
            sums[target] = seen + weight, missing - weight
    return sums


def _edge(path: Sequence[Point], kind: str, weight: float, heaviest: float, status: Any) -> str:
    size = abs(weight) / heaviest
    width = 0.8 + 4.2 * size
    x, y = path[-1]
    half = width / 2
    if weight < 0:  # a T-bar instead of an arrowhead shows the sign without colours
        head = f"M{x - 4 - half:.1f} {y:.1f}H{x + 4 + half:.1f}"
    else:
        head = (
            f"M{x - 3 - half:.1f} {y + half:.1f}L{x:.1f} {y - 5:.1f}L{x + 3 + half:.1f} "
            f"{y + half:.1f}"
        )
    colour = status or ("negative" if weight < 0 else "positive")
    return (
        f'<path class="edge {kind} {colour}" d="{curve(path)}{head}" '
        f'stroke-width="{width:.2f}" opacity="{0.35 + 0.6 * size**0.5:.2f}"/>'
    )


def _node(
    data: _Data,
    i: int,
    placed: Layout,
    largest: float,
    colours: Mapping[str, str],
    inflow: tuple[float, float] | None,
) -> str:
    nodes = data["nodes"]
    kind, width, attribution = nodes["kind"][i], nodes["width"][i], nodes["attribution"][i]
    status = nodes["status"][i] if "status" in nodes else None
    stability = nodes["stability"][i] if "stability" in nodes else None
    size = 0.0 if attribution is None else min(1.0, abs(attribution) / largest) ** 0.5
    end = colours["negative" if (attribution or 0) < 0 else "positive"]
    outside = " outside" if "outside" in nodes and nodes["outside"][i] else ""
    fill = "" if status or outside else f' style="fill:{_mixed(colours["zero"], end, size)}"'
    sign = "" if not attribution else "− " if attribution < 0 else "+ "
    mark = f"{STATUSES[status]} " if status else sign
    strong = "strong" if size > 0.77 and not status else ""
    return (
        f'<g class="node {kind} {status or ""} {stability or ""}{outside}" '
        f'transform="translate({placed.x[i]:.1f},{placed.y[i]:.1f})">'
        f'<rect x="{-width / 2:.1f}" y="{-BOX / 2:.0f}" width="{width:.1f}" height="{BOX}" '
        f'rx="{_CORNERS.get(kind, 0)}"{_SLANTED * (kind == "feature")}{fill}/>'
        f"{_text(0, 0, mark + nodes['label'][i], strong, '0.35em')}"
        f"{_bar(inflow, width, strong, kind) if inflow else ''}</g>"
    )


def _bar(inflow: tuple[float, float], width: float, strong: str, kind: str) -> str:
    """Draw the part of a node's inflow that is drawn as a line; the rest of the line is dotted."""
    drawn, missing = inflow
    size, half = abs(drawn) + abs(missing), width / 2 - 8
    if not size:
        return ""
    x, y = half * (2 * abs(drawn) / size - 1), BOX / 2 - 1.5
    bar = f'<path class="bar {strong}" d="M{-half:.1f} {y}H{x:.1f}"/>'
    bar += f'<path class="bar missing {strong}" d="M{x:.1f} {y}H{half:.1f}"/>'
    return bar + _text(0, -BOX / 2 - 4, said_drawn(drawn, missing), "") * (kind == "metric")


def said_drawn(drawn: float, missing: float) -> str:
    """Say which part of an inflow is drawn, and which is not if the two have opposite signs."""
    whole = drawn + missing
    if abs(whole) < 1e-4 * (abs(drawn) + abs(missing)):  # weights have five digits
        return ""
    part, other = (round(100 * x / whole) for x in (drawn, missing))
    text = f"{part:,} % drawn" + f", {other:,} % not" * (part * other < 0)
    return text.replace("-", "−")


def _axis(data: _Data, placed: Layout) -> list[str]:
    parts = [f'<g class="axis" transform="translate(0,{placed.height - AXIS:.1f})">']
    for first, last, left, width in placed.columns:
        x = left + width / 2
        if first < 0:
            parts.append(_text(x, 17, "–", "token"))
        elif first < last:
            parts.append(_text(x, 17, "⋯", "token") + _text(x, 32, f"{first}–{last}", "index"))
        else:
            parts.append(_text(x, 17, data["axis"][first], "token"))
            parts.append(_text(x, 32, data["below"][first], "index"))
    return [*parts, "</g>"]


def _legend(data: _Data) -> str:
    if "status" in data["nodes"]:
        marks = " · ".join(f"{mark} {word}" for word, mark in STATUSES.items())
    else:
        marks = "+ raises the metric (blue) · − lowers it (red)"
    if any(data["nodes"].get("outside", ())):
        marks += " · grey: outside the circuit"
    if "stability" in data["nodes"]:
        marks += " · outline: solid core, dashed contingent"
    dashes = {"q": "long dashes", "k": "dots", "gate": "dashes and dots"}
    dashes["routing"] = "short dashes"
    kinds = "".join(f", {kind} {dashes[kind]}" for kind in _kinds(data) if kind in dashes)
    shapes = "".join(
        f" · {words}" for kind, words in _SHAPES.items() if kind in data["nodes"]["kind"]
    )
    kinds += " · bar: the inflow that is drawn" * data["has_bars"]
    said = "".join(f" · {text}" for text in data["caption"])
    return f"{marks}{shapes} · edges: arrow positive, T-bar negative{kinds}{said}"


def _text(x: float, y: float, text: str, name: str, dy: str = "0") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" dy="{dy}">{escape(text)}</text>'


def _light_colours() -> dict[str, str]:
    (light,) = re.findall(r":root \{(.*?)\}", asset("assets/page.css"), re.S)[:1]
    return dict(re.findall(r"--(\w+): (#\w+)", light))


def _mixed(start: str, end: str, t: float) -> str:
    mixed = (
        round(int(start[c : c + 2], 16) * (1 - t) + int(end[c : c + 2], 16) * t) for c in (1, 3, 5)
    )
    return "#" + "".join(f"{edge:02x}" for edge in mixed)
