"""Coordinates of a circuit's nodes: layers upward, tokens across.

A row is a kind of node of one layer, in the order in which a model computes them: embeddings and
biases of no layer, then for each layer its attention heads, its neuron-heads, its biases and the
rest of it, and the metric on top. A column is a position of the prompt, as wide as its fullest
cell; nodes without a position have a column of their own on the left. The nodes of a cell stand in
lines, by |attribution|, so that the strongest are in the same corner of every cell.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits.graph import NODE_KINDS
from attn_only_lens.viz.page import HEAD_PLURALS

_STEP_X, _STEP_Y = 84.0, 58.0  # between nodes: a label such as L11N3071 fits
_GAP_X, _GAP_Y = 46.0, 22.0  # between cells, beyond that
_FLAT = 2.5  # how much longer a cell's lines are than they are many: screens are wide


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of nodes, rows and columns, with y downward as on screens.

    Attributes:
        xy: of each node.
        rows: the name of each row and its y.
        columns: the position of each column (-1: none) and its x.
    """

    xy: Float[np.ndarray, "n_nodes 2"]
    rows: list[tuple[str, float]]
    columns: list[tuple[int, float]]


def node_coordinates(nodes: pd.DataFrame, n_tokens: int) -> Coordinates:
    """Return coordinates of every node, no two the same.

    Args:
        nodes: with `kind`, `layer`, `position` (missing where a node has none) and `attribution`.
        n_tokens: positions of the prompt; each has a column, with nodes or without.

    Example:
        >>> import pandas as pd
        >>> nodes = pd.DataFrame({"kind": ["embed", "metric"], "layer": [None, None],
        ...                       "position": [0, 1], "attribution": [1.0, 1.0]})
        >>> at = node_coordinates(nodes, n_tokens=2)
        >>> bool(at.xy[0, 0] < at.xy[1, 0]), bool(at.xy[0, 1] > at.xy[1, 1])
        (True, True)
    """
    ranks = [_rank(kind, layer) for kind, layer in zip(nodes["kind"], nodes["layer"], strict=True)]
    columns = nodes["position"].fillna(-1).astype(int).tolist()
    strength = nodes["attribution"].abs().fillna(0).tolist()
    cells: dict[tuple[tuple[int, int], int], list[int]] = {}
    for node in sorted(range(len(nodes)), key=lambda node: -strength[node]):
        cells.setdefault((ranks[node], columns[node]), []).append(node)
    lines = {
        cell: ceil(sqrt(_FLAT * len(inside))) if len(inside) > 2 else len(inside)
        for cell, inside in cells.items()
    }
    heights = {
        rank: max(ceil(len(cells[cell]) / lines[cell]) for cell in cells if cell[0] == rank)
        for rank in sorted(set(ranks))
    }
    named = [-1, *range(n_tokens)] if -1 in columns else list(range(n_tokens))
    widths = {
        column: max((lines[cell] for cell in cells if cell[1] == column), default=1)
        for column in named
    }
    left, x = {}, 0.0
    for column, width in widths.items():
        left[column], x = x, x + width * _STEP_X + _GAP_X
    bottom, y = {}, 0.0
    for rank, height in heights.items():
        bottom[rank], y = y, y - height * _STEP_Y - _GAP_Y
    xy = np.zeros((len(nodes), 2))
    for (rank, column), inside in cells.items():
        for at, node in enumerate(inside):
            line, along = divmod(at, lines[rank, column])
            xy[node] = left[column] + along * _STEP_X, bottom[rank] - line * _STEP_Y
    names = dict(zip(ranks, zip(nodes["kind"], nodes["layer"], strict=True), strict=True))
    return Coordinates(
        xy,
        [(_row_name(*names[r]), bottom[r] - (heights[r] - 1) * _STEP_Y / 2) for r in heights],
        [(c, left[c] + (widths[c] - 1) * _STEP_X / 2) for c in widths],
    )


def _rank(kind: str, layer: float | None) -> tuple[int, int]:
    """Rank a row by when it is computed; biases of no layer stand beside the embeddings."""
    at = NODE_KINDS.index(kind)
    if kind == "metric":
        return np.iinfo(int).max, at
    return (-1 if kind == "embed" or pd.isna(layer) else int(layer or 0)), at


def _row_name(kind: str, layer: float | None) -> str:
    what = HEAD_PLURALS.get(kind, kind)
    return what if kind in ("embed", "metric") or pd.isna(layer) else f"L{int(layer or 0)} {what}"
