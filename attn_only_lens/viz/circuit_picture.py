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
_TITLE, _TITLE_LINE = 28, 17
_LEGEND_LINE, _LINE = 20, 14  # heights of a line of the legend, and of the caption
_CHARACTER = 7.9  # width of a character in the title
_CORNERS = {"attention": 10, "metric": 4, "embed": 4, "skip": 4, "error": 4}
_SLANTED = ' transform="skewX(-14)"'  # features are parallelograms
_SHAPES = {
    "attention": "attention head",
    "neuron": "neuron",
    "feature": "feature of a transcoder",
    "skip": "W_skip",
    "error": "error of a transcoder",
}
_THROUGH = {
    "value": "through the value",
    "q": "through the query",
    "k": "through the key",
    "gate": "through the gate",
    "routing": "through the routing",
}
_STABILITY = {
    "core": "core: in 90 % of resampled circuits or more",
    "contingent": "contingent: in fewer",
    "noise": "in 10 % or fewer",
}
_Data = Mapping[str, Any]
_Edge = tuple[int, int, str, float, Any]
_Sample = tuple[float, str, str]
"""An entry of the legend: the width of a sample, the sample around y = 0, and a text."""


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
    edges = _edges_between(data, set(shown))[: data["first"]["edges"]]
    paths = edge_paths(placed, _boxes(data), [(a, b, kind) for a, b, kind, _, _ in edges])
    heaviest = max((abs(weight) for *_, weight, _ in edges), default=0.0) or 1.0
    colours_of = zip(data["nodes"]["attribution"], data["nodes"]["kind"], strict=True)
    largest = max((abs(a or 0) for a, kind in colours_of if kind != "metric"), default=0) or 1
    parts_drawn = _parts_drawn(data, edges)
    titles = wrap(title, int((placed.width - 16) / _CHARACTER), break_on_hyphens=False)
    top = _TITLE + _TITLE_LINE * (len(titles) - 1)
    samples = _legend(data, shown, edges, largest, heaviest, colours)
    legend, bottom = _in_lines(samples, placed, data["per_character"])
    n_columns = int((placed.width - 16) / data["per_character"])
    said = " ".join(_caption(data, shown, edges))
    caption = wrap(said, n_columns, break_on_hyphens=False)
    height = top + bottom + _LINE * len(caption)
    style = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], data["style"])
    band = '<rect class="band" x="{:.0f}" y="{:.1f}" width="{:.0f}" height="{:.0f}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="circuit" width="{placed.width:.0f}" '
        f'height="{height:.0f}" viewBox="0 {-top} {placed.width:.0f} {height:.0f}" '
        'style="max-width:100%;height:auto" role="img">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<rect class="back" y="{-top}" width="{placed.width:.0f}" height="{height:.0f}"/>',
        *(_text(8, 19 - top + _TITLE_LINE * i, line, "title") for i, line in enumerate(titles)),
        *(band.format(GUTTER - 8, y - tall / 2, placed.width, tall) for _, y, tall in placed.rows),
        *(
            _edge(path, kind, weight, heaviest, status)
            for path, (_, _, kind, weight, status) in zip(paths, edges, strict=True)
        ),
        *(_node(data, i, placed, largest, colours, parts_drawn.get(i)) for i in shown),
        *(_text(8, y, data["rows"][row], "row", "0.35em") for row, y, _ in placed.rows),
        *_axis(data, placed),
        *legend,
        *(_text(8, bottom + _LINE * i, line, "row") for i, line in enumerate(caption)),
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


def _edges_between(data: _Data, shown: set[int]) -> list[_Edge]:
    """Return the edges of the shown kinds between shown nodes, the strongest first."""
    edges, kinds = data["edges"], _kinds(data)
    statuses = edges.get("status", [None] * len(edges["kind"]))
    columns = (edges["source"], edges["target"], edges["kind"], edges["weight"], statuses)
    rows_ = [
        row for row in zip(*columns, strict=True) if row[2] in kinds and {row[0], row[1]} <= shown
    ]
    return sorted(rows_, key=lambda row: -abs(row[3]))


def _parts_drawn(data: _Data, drawn: Sequence[_Edge]) -> dict[int, tuple[float, float]]:
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
    top = placed.height - AXIS
    parts = [_text(8, top + y, name, "row") for y, name in zip((17, 32), data["axes"], strict=True)]
    parts.append(f'<g class="axis" transform="translate(0,{top:.1f})">')
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


def _legend(
    data: _Data,
    shown: Sequence[int],
    edges: Sequence[_Edge],
    largest: float,
    heaviest: float,
    colours: Mapping[str, str],
) -> list[_Sample]:
    """Return samples of what the picture contains; `legendEntries` in the page returns the same."""
    nodes, has_status = data["nodes"], "status" in data["nodes"]
    kinds = {nodes["kind"][i] for i in shown if not _is(nodes, "outside", i)}
    samples = list[_Sample]()
    if has_status:
        samples += [_chip("neuron", word, mark, word) for word, mark in STATUSES.items()]
    else:
        samples.append(_scale(largest, colours))
    samples += [_chip(kind, "", "", text) for kind, text in _SHAPES.items() if kind in kinds]
    if any(_is(nodes, "outside", i) for i in shown):
        samples.append(_chip("neuron", "outside", "", "outside the circuit"))
    if "stability" in nodes:
        seen = {nodes["stability"][i] for i in shown}
        samples += [_chip("neuron", x, "", text) for x, text in _STABILITY.items() if x in seen]
    if edges:
        samples.append(_widths(heaviest, has_status))
    sign = "" if has_status else "positive"
    through = [kind for kind in _THROUGH if kind in {edge[2] for edge in edges}]
    if through != ["value"]:
        for kind in through:
            samples.append((26, _stroke(f"{kind} {sign}", "M0 0H26", 2), _THROUGH[kind]))
    if edges and min(weight for *_, weight, _ in edges) < 0:
        samples.append((26, _stroke(sign, "M0 0H26M20 -4L26 0L20 4", 2), "positive"))
        negative = "" if has_status else "negative"
        samples.append((26, _stroke(negative, "M0 0H26M26 -5V5", 2), "negative"))
    if data["has_bars"]:
        bar = '<path class="bar" d="M0 0H16"/><path class="bar missing" d="M16 0H26"/>'
        samples.append((26, bar, "part of the inflow that is drawn"))
    return samples


def _caption(data: _Data, shown: Sequence[int], edges: Sequence[_Edge]) -> list[str]:
    """Return what readers of the picture have to know about its numbers, parts and marks."""
    kinds, labels = data["nodes"]["kind"], " ".join(data["nodes"]["label"][i] for i in shown)
    n_shown, n_nodes = (
        sum(kinds[i] not in EXTRAS for i in some) for some in (shown, range(len(kinds)))
    )
    n_edges, sentences = len(_edges_between(data, set(shown))), list(data["caption"])
    if n_shown < n_nodes or len(edges) < n_edges:
        nodes, lines = (
            _of(n_shown, n_nodes, "nodes"),
            _of(len(edges), n_edges, "edges between them"),
        )
        sentences.append(f"Drawn: {nodes}, and {lines}.")
    linked = {end for edge in edges for end in edge[:2]}
    if any(i not in linked and not _is(data["nodes"], "outside", i) for i in shown):
        sentences.append("A node without edges acts through nodes and edges that are not drawn.")
    return sentences + [text for mark, text in data["marks"] if mark in labels]


def _of(n: int, n_all: int, what: str) -> str:
    return f"the {n:,} strongest of {n_all:,} {what}" if n < n_all else f"all {n:,} {what}"


def _is(nodes: Mapping[str, Any], column: str, i: int) -> bool:
    return column in nodes and bool(nodes[column][i])


def _scale(largest: float, colours: Mapping[str, str]) -> _Sample:
    """Return the colours of attributions from the most negative to the most positive."""
    n, wide = 21, 4
    boxes = list[str]()
    for i in range(n):
        share = 2 * i / (n - 1) - 1
        end = colours["negative" if share < 0 else "positive"]
        fill = _mixed(colours["zero"], end, abs(share) ** 0.5)
        boxes.append(f'<rect x="{wide * i}" y="-6" width="{wide}" height="12" fill="{fill}"/>')
    frame = f'<rect class="frame" y="-6" width="{n * wide}" height="12"/>'
    text = f"attribution of a node, −{largest:.3g} to +{largest:.3g}"
    return n * wide, "".join(boxes) + frame, text


def _widths(heaviest: float, has_status: bool) -> _Sample:
    """Return lines as wide as edges of three weights."""
    shares, sample = (1.0, 0.5, 0.1), ""
    for i, share in enumerate(shares):
        name = "" if has_status else "positive"
        sample += _stroke(name, f"M{22 * i} 0H{22 * i + 18}", 0.8 + 4.2 * share)
    weights = ", ".join(f"{heaviest * share:.2g}" for share in shares)
    return 62, sample, f"weight of an edge: {weights}"


def _chip(kind: str, name: str, mark: str, text: str) -> _Sample:
    corner = min(_CORNERS.get(kind, 0), 7)
    slanted = _SLANTED * (kind == "feature")
    box = f'<rect x="-13" y="-7" width="26" height="14" rx="{corner}"{slanted}'
    empty = ' style="fill:none"' * (name not in STATUSES and name != "outside")
    inside = f"{box}{empty}/>{_text(0, 0, mark, '', '0.35em') * bool(mark)}"
    return 28, f'<g class="chip node {kind} {name}" transform="translate(14,0)">{inside}</g>', text


def _stroke(name: str, path: str, width: float) -> str:
    return f'<path class="edge {name}" d="{path}" stroke-width="{width:.1f}"/>'


def _in_lines(
    samples: Sequence[_Sample], placed: Layout, per_character: float
) -> tuple[list[str], float]:
    """Return the samples in lines below the drawing, and the y where the next text belongs."""
    x, y, parts = 8.0, placed.height + 18, list[str]()
    for width, sample, text in samples:
        end = x + width + 6 + per_character * len(text)
        if end > placed.width - 8 and x > 8:
            x, y = 8.0, y + _LEGEND_LINE
            end = x + width + 6 + per_character * len(text)
        drawn = f"{sample}{_text(width + 6, 0, text, 'row', '0.35em')}"
        parts.append(f'<g class="sample" transform="translate({x:.1f},{y:.1f})">{drawn}</g>')
        x = end + 18
    return parts, y + _LEGEND_LINE + 4


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
