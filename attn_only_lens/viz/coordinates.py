"""Compute the coordinates of a circuit's nodes, and the paths of its edges.

A row contains the nodes of one kind in one layer; rows follow the order of computation, from bottom
to top. A column contains the nodes at one position of the prompt; nodes without a position are in a
column on the left. Nodes in the same row and column are side by side, in as few lines as the width
allows. Lines of one row are further apart than other rows, and take turns on the left and on the
right, so that a node with an arrow below it does not look as if it read the node below. If the
columns do not fit, adjacent columns without nodes are folded into one narrow column.

An edge goes up from the top of its source to the bottom of its target. If its curve would cross a
node, the edge is bent through the nearest gap in that node's line. Edges that meet at the top or
bottom of a node are spread over its width, sorted by kind, then by the other node's x coordinate.

Lengths are in pixels, and y increases downward. `assets/layout.js` computes the same layout in the
page, where the user can select other nodes; `tests/viz/test_circuit_page.py` compares the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TypeAlias

import numpy as np
import pandas as pd

from attn_only_lens.circuits.graph import NODE_KINDS
from attn_only_lens.heads.host import HEAD_PLURALS

GUTTER, AXIS, TOP = 96, 40, 12  # margins for row names, for tokens, and at the top
BOX = 20  # height of a node
_GAP = 12  # space between boxes
_COLUMN_GAP, _LINE, _ROW_GAP = 10, 34, 6
_STACKED, _STAGGER = 46, 24  # the distance of lines in one row, and how far they move sideways
_FOLDED = 34  # the width of a folded column
_RIGHT = 14
_WIDEST_ROW_GAP = 120
_MARGIN, _ARROW = 3, 6
_LANES, _LANE = 5, 5  # number and width of lanes for edges in a gap
_KIND_ORDER = ("q", "gate", "routing", "value", "k")

Point: TypeAlias = tuple[float, float]
Interval: TypeAlias = tuple[float, float]
Line: TypeAlias = tuple[float, list[Interval]]
"""A line of nodes: its y, and the intervals that its boxes cover, from left to right."""


@dataclass(frozen=True)
class Boxes:
    """Node boxes: row (from the bottom), column (-1: none), width, may exceed the column or not."""

    row: Sequence[int]
    column: Sequence[int]
    width: Sequence[float]
    overhangs: Sequence[bool]


@dataclass(frozen=True)
class Layout:
    """The layout of a drawing: the centres of boxes, the columns, the rows and the size.

    A column is (first position, last position, left edge, width); both positions are -1 for nodes
    without a position, and differ in a folded column. A row is (index, y, height).
    """

    x: dict[int, float]
    y: dict[int, float]
    columns: list[tuple[int, int, float, float]]
    rows: list[tuple[int, float, float]]
    width: float
    height: float


def rows_of(nodes: pd.DataFrame) -> tuple[list[int], list[str]]:
    """Return each node's row index, counted from below, and the row names."""
    pairs = list(zip(nodes["kind"], nodes["layer"], strict=True))
    ranks = [_rank(kind, layer) for kind, layer in pairs]
    names = {rank: _row_name(*pair) for rank, pair in zip(ranks, pairs, strict=True)}
    order = {rank: index for index, rank in enumerate(sorted(names))}
    return [order[rank] for rank in ranks], [names[rank] for rank in order]


def _rank(kind: str, layer: float | None) -> tuple[int, int]:
    """Return a row's rank in the order of computation; rows without a layer come first."""
    kind_index = NODE_KINDS.index(kind)
    if kind == "metric":
        return np.iinfo(int).max, kind_index
    return (-1, 0) if kind == "embed" or pd.isna(layer) else (int(layer or 0), kind_index)


def _row_name(kind: str, layer: float | None) -> str:
    if kind == "metric":
        return kind
    row = HEAD_PLURALS.get(kind, kind).removesuffix(" nodes")
    return "tokens" if pd.isna(layer) else f"L{int(layer or 0)} {row}"


def place(
    boxes: Boxes, shown: Sequence[int], tokens: Sequence[float], width: float, height: float
) -> Layout:
    """Compute the layout of the shown nodes."""
    cells: dict[tuple[int, int], list[int]] = {}
    for node in shown:
        cells.setdefault((boxes.row[node], boxes.column[node]), []).append(node)
    columns = _Columns(boxes, shown, cells, tokens, width - GUTTER - _RIGHT)
    spans, right = columns.spans()
    whole = max(right + _RIGHT, width)
    lines: dict[int, int] = {}
    for (row, c), cell in cells.items():
        lines[row] = max(lines.get(row, 1), ceil(len(cell) / columns.abreast[c]))
    heights = {row: _LINE + (n - 1) * _STACKED for row, n in lines.items()}
    tall = sum(heights.values()) + (len(lines) - 1) * _ROW_GAP + TOP + AXIS
    gaps = max(len(lines) - 1, 1)
    gap = _ROW_GAP + min(max(0.0, height - tall) / gaps, _WIDEST_ROW_GAP)
    bottom, rows = 0.0, []
    x: dict[int, float] = {}
    y: dict[int, float] = {}
    single = {a: (start, wide) for a, b, start, wide in spans if a == b}
    for row in sorted(lines):
        for c in columns.used:
            cell, abreast = cells.get((row, c), []), columns.abreast[c]
            start, wide = single[c]
            for index, node in enumerate(cell):
                line, along = divmod(index, abreast)
                beside = min(abreast, len(cell) - line * abreast)
                apart = min((wide - _COLUMN_GAP) / beside, 1.6 * columns.step[c])
                centre = start + wide / 2 + (along - (beside - 1) / 2) * apart
                if len(cell) > abreast:
                    spare = wide - _COLUMN_GAP - (beside - 1) * apart - columns.step[c] + _GAP
                    centre += min(max(spare, 0.0) / 2, _STAGGER) * (-1) ** line
                half = boxes.width[node] / 2 + 2
                if boxes.overhangs[node]:
                    centre = max(GUTTER + half, min(centre, whole - half))
                x[node], y[node] = centre, bottom - _LINE / 2 - line * _STACKED
        rows.append((row, bottom - heights[row] / 2, heights[row] - 6.0))
        bottom -= heights[row] + gap
    base = TOP - (bottom + gap)
    y = {node: height + base for node, height in y.items()}
    rows = [(row, height + base, tall) for row, height, tall in rows]
    return Layout(x, y, spans, rows, whole, base + AXIS)


class _Columns:
    """The columns of a drawing: how many nodes are side by side, and which columns are folded."""

    def __init__(
        self,
        boxes: Boxes,
        shown: Sequence[int],
        cells: Mapping[tuple[int, int], Sequence[int]],
        tokens: Sequence[float],
        free: float,
    ) -> None:
        self._tokens, self._free = tokens, free
        self.used = used = sorted({column for _, column in cells})
        self.step = dict.fromkeys(used, float(_GAP))
        full = dict.fromkeys(used, 0)
        for node in shown:
            if not boxes.overhangs[node]:
                c = boxes.column[node]
                self.step[c] = max(self.step[c], boxes.width[node] + _GAP)
        for (_, c), cell in cells.items():
            full[c] = max(full[c], len(cell))
        self._full, self.abreast = full, dict(full)
        self._runs = [(c, c) for c in range(-1 if -1 in used else 0, len(tokens))]
        self._narrow(2)
        self._fold()
        self._narrow(1)
        # Give the remaining width to columns, starting with those that have the most nodes.
        for c in sorted(used, key=lambda c: (-full[c], c)):
            while self.abreast[c] < full[c] and self._total() + self.step[c] <= free:
                self.abreast[c] += 1

    def _width(self, c: int) -> float:
        nodes = self.step[c] * self.abreast[c] if c in self.step else 0.0
        return max(nodes, self._tokens[c] if c >= 0 else 0.0) + _COLUMN_GAP

    def _total(self) -> float:
        return sum(_FOLDED if a < b else self._width(a) for a, b in self._runs)

    def _narrow(self, fewest: int) -> None:
        """Until all columns fit, narrow the column that needs the fewest lines when narrowed."""
        abreast, full = self.abreast, self._full
        while self._total() > self._free and max(abreast.values(), default=0) > fewest:
            wide = [c for c in self.used if abreast[c] > fewest]
            costs = {
                c: (ceil(full[c] / (abreast[c] - 1)), -self.step[c] * abreast[c]) for c in wide
            }
            abreast[min(wide, key=costs.__getitem__)] -= 1

    def _fold(self) -> None:
        """Fold runs of columns without nodes, the widest first, until the drawing fits."""
        excess = self._total() - self._free
        if excess <= 0:
            return
        ends = [-1, *(c for c in (*self.used, self._runs[-1][1] + 1) if c >= 0)]
        empty = [(a + 1, b - 1) for a, b in pairwise(ends) if b - a > 2]
        widths = {(a, b): sum(map(self._width, range(a, b + 1))) for a, b in empty}
        folded = []
        for run in sorted(empty, key=lambda run: (-widths[run], run)):
            if excess > 0:
                folded.append(run)
                excess -= widths[run] - _FOLDED
        kept = [run for run in self._runs if not any(a <= run[0] <= b for a, b in folded)]
        self._runs = sorted(kept + folded)

    def spans(self) -> tuple[list[tuple[int, int, float, float]], float]:
        """Return each column as in `Layout.columns`, and the right edge of the last column."""
        more = max(0.0, self._free - self._total()) / max(len(self.used), 1)
        left, spans = float(GUTTER), []
        for a, b in self._runs:
            wide = _FOLDED if a < b else self._width(a) + (more if a in self.step else 0.0)
            spans.append((a, b, left, wide))
            left += wide
        return spans, left


def edge_paths(
    layout: Layout, boxes: Boxes, edges: Sequence[tuple[int, int, str]]
) -> list[list[Point]]:
    """Return the path of each edge, from source to target, as points for `curve` to connect."""
    intervals: dict[float, list[Interval]] = {}
    for node, y in layout.y.items():
        half = boxes.width[node] / 2
        intervals.setdefault(y, []).append((layout.x[node] - half, layout.x[node] + half))
    lines = [(y, sorted(intervals[y])) for y in sorted(intervals, reverse=True)]  # from below
    up = [(a, b) if layout.y[a] >= layout.y[b] else (b, a) for a, b, _ in edges]
    kinds = [_KIND_ORDER.index(kind) for *_, kind in edges]
    starts = _ports(layout, boxes, up, kinds, end=0)
    stops = _ports(layout, boxes, up, kinds, end=1)
    paths = []
    for j, (low, high) in enumerate(up):
        start, stop, source = starts[j], stops[j], edges[j][0]
        y0, y1 = layout.y[low] - BOX / 2, layout.y[high] + BOX / 2
        if layout.y[low] == layout.y[high]:  # nodes in one line: the edge goes above them
            top = y0 - _LINE / 2
            paths.append([(start, y0), ((start + stop) / 2, top), (stop, y0 - _ARROW)])
            continue
        p = start, y0 - (_ARROW if low != source else 0)
        q = stop, y1 + (_ARROW if low == source else 0)
        between = [line for line in lines if layout.y[high] < line[0] < layout.y[low]]
        path = _bend(p, q, between, j % _LANES, layout.width)
        paths.append(path if low == source else path[::-1])
    return paths


def curve(path: Sequence[Point]) -> str:
    """Return an SVG path of curves that connect these points and are vertical at each of them."""
    text = [f"M{path[0][0]:.1f} {path[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(path):
        middle = (y0 + y1) / 2
        numbers = (x0, middle, x1, middle, x1, y1)
        text.append("C" + " ".join(f"{number:.1f}" for number in numbers))
    return "".join(text)


def _ports(
    layout: Layout,
    boxes: Boxes,
    pairs: Sequence[tuple[int, int]],
    kinds: Sequence[int],
    *,
    end: int,
) -> list[float]:
    """Return each edge's x coordinate at its lower node (end=0) or at its upper node (end=1)."""
    columns: dict[int, list[int]] = {}
    for j, pair in enumerate(pairs):
        columns.setdefault(pair[end], []).append(j)
    offsets = [0.0] * len(pairs)
    for node, line in columns.items():
        line.sort(key=lambda j: (kinds[j], layout.x[pairs[j][1 - end]]))
        apart = min(7.0, (boxes.width[node] - 10) / len(line))
        for rank, j in enumerate(line):
            offsets[j] = layout.x[node] + (rank - (len(line) - 1) / 2) * apart
    return offsets


def _bend(p: Point, q: Point, lines: Sequence[Line], lane: int, width: float) -> list[Point]:
    """Return points from p up to q such that a curve through them avoids the boxes in `lines`."""
    for index, (y, covered) in enumerate(lines):
        low, high = y + BOX / 2 + _MARGIN, y - BOX / 2 - _MARGIN
        a, b = sorted((_crossing(p, q, low), _crossing(p, q, high)))
        if any(left - _MARGIN < b and a < right + _MARGIN for left, right in covered):
            x = _nearest_gap(covered, (a + b) / 2, lane, width)
            before = _bend(p, (x, low), lines[:index], lane, width)
            return [*before, *_bend((x, high), q, lines[index + 1 :], lane, width)]
    return [p, q]


def _crossing(p: Point, q: Point, y: float) -> float:
    """Return the x coordinate at which the cubic curve from p to q has height y."""
    s = min(1.0, max(0.0, (p[1] - y) / (p[1] - q[1])))
    low, high = 0.0, 1.0
    for _ in range(24):
        t = (low + high) / 2
        low, high = (t, high) if 1.5 * t - 1.5 * t**2 + t**3 < s else (low, t)
    return p[0] + (q[0] - p[0]) * (3 * low**2 - 2 * low**3)


def _nearest_gap(covered: Sequence[Interval], x: float, lane: int, width: float) -> float:
    """Return the x coordinate of an edge in the gap, in a line of boxes, that is nearest to `x`."""
    free = []
    for (_, left), (right, _) in pairwise([(0, GUTTER - 8), *covered, (width, width)]):
        if right - left >= 2 * _MARGIN:
            room = _MARGIN + 1 + _LANE * lane
            if right - left >= 2 * room:
                free.append(max(left + room, min(right - room, x)))
            else:  # in a narrow gap, spread lanes evenly
                free.append(left + (right - left) * (lane + 1) / (_LANES + 1))
    return min(free, key=lambda candidate: abs(candidate - x))
