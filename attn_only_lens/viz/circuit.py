"""A circuit as one interactive page: layers upward, tokens across.

The graph is drawn by cytoscape.js, which is part of the page (`vendor/`), as are the data. What the
page does with them is in `assets/circuit.js`: it hides what lies under two thresholds, searches,
and tells of the node that is clicked what it reads, writes, attends to and promotes.

The frames of a circuit, held against each other before anything is drawn.

A page with a node missing, or an edge at the wrong node, looks like any other page; so whatever
does not fit is refused, with every reason.

Where the nodes of a circuit stand: layers upward, tokens across.

A row is a kind of node of one layer, in the order in which a model computes them: embeddings and
what is of no layer, then for each layer its attention heads, its neuron-heads, its biases and what
is left of it, and the metric on top. A column is a position of the prompt, as wide as its fullest
cell; nodes without a position stand in a column of their own on the left. The nodes of a cell stand
in lines, by |attribution|, so that the strongest are in the same corner of every cell.

The patterns of a circuit's nodes, from the run that the circuit is of.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, sqrt
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from transformer_lens import ActivationCache

from attn_only_lens.axes import SELF
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, NODE_KINDS
from attn_only_lens.heads import HeadName, has_neuron_heads, host_of, neuron_pattern
from attn_only_lens.viz.attention import attention_of
from attn_only_lens.viz.page import (
    Page,
    document,
    for_script,
    inline,
    of_prompt,
    refuse,
    resource,
    shown,
    token_reasons,
)

__all__ = [
    "STATUSES",
    "Layout",
    "NodeDetails",
    "circuit_page",
    "columns_of",
    "details_of",
    "node_patterns",
    "place",
    "reasons_against",
]

STATUSES = ("kept", "lost", "gained")

_NODES = ("id", "kind", "layer", "name", "position", "value", "attribution")
_META = ("tokens", "metric", "value", "model")
_FIGURES = 5  # significant, of every number in the page


@dataclass(frozen=True)
class NodeDetails:
    """What a click on a node tells beyond its edges.

    Attributes:
        pattern: a weight in [0, 1] for each token of the prompt: of a neuron-head, what each token
            attends to itself, the rest being the bias token's; of an attention head, what the
            token at the node's position attends to.
        top_tokens: tokens that the node raises most, each with how much; the strongest first.
        read_tokens: tokens that a neuron reads most, likewise.

    Example:
        >>> from attn_only_lens.viz import NodeDetails
        >>> NodeDetails(pattern=[0.1, 0.9], top_tokens=[(" the", 2.5)]).pattern
        [0.1, 0.9]
    """

    pattern: Sequence[float] | None = None
    top_tokens: Sequence[tuple[str, float]] = ()
    read_tokens: Sequence[tuple[str, float]] = ()


def reasons_against(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails],
) -> list[str]:
    """Everything that does not fit together; none where the circuit can be drawn."""
    reasons = [f"meta has no {key!r}" for key in _META if key not in meta]
    for what, frame, wanted in (("nodes", nodes, _NODES), ("edges", edges, EDGE_COLUMNS)):
        missing = [column for column in wanted if column not in frame]
        reasons += [f"{what} have no column {column!r}" for column in missing]
    if reasons:
        return reasons
    reasons = _of_meta(meta)
    if reasons:
        return reasons
    reasons = _of_nodes(nodes, len(meta["tokens"]))
    return reasons + _of_edges(edges, nodes) + _of_details(details, nodes, len(meta["tokens"]))


def columns_of(frame: pd.DataFrame, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """A frame as lists by column: missing values as null, numbers to five figures."""
    return {column: [_plain(value) for value in frame[column]] for column in wanted}


def details_of(details: Mapping[str, NodeDetails]) -> dict[str, dict[str, Any]]:
    """Details as plain lists, without those that are not given."""
    return {key: {name: of for name, of in _told(each) if of} for key, each in details.items()}


def _told(details: NodeDetails) -> Iterator[tuple[str, list[Any]]]:
    yield "pattern", [_plain(weight) for weight in details.pattern or ()]
    for name, tokens in (("top", details.top_tokens), ("read", details.read_tokens)):
        yield name, [[shown(token), _plain(amount)] for token, amount in tokens]


def _plain(value: Any) -> Any:
    if not isinstance(value, str) and pd.isna(value):
        return None
    if isinstance(value, float | np.floating):
        return float(f"{value:.{_FIGURES}g}")
    return value.item() if isinstance(value, np.generic) else value


def _of_meta(meta: Mapping[str, Any]) -> list[str]:
    reasons = token_reasons(meta["tokens"])
    odd = [key for key in ("metric", "model") if not isinstance(meta[key], str)]
    reasons += [f"got meta {key} {meta[key]!r}; expected a text" for key in odd]
    value = meta["value"]
    if not isinstance(value, float | int) or not np.isfinite(value):
        reasons.append(f"got meta value {value!r}; expected a finite number")
    notes = meta.get("notes", ())
    if isinstance(notes, str) or any(not isinstance(each, str) for each in notes):
        reasons.append(f"got meta notes {notes!r}; expected a list of texts")
    return reasons


def _of_nodes(nodes: pd.DataFrame, n_tokens: int) -> list[str]:
    reasons = ["the circuit has no nodes"] * (not len(nodes))
    for column in ("id", "name"):
        odd = [each for each in nodes[column] if not isinstance(each, str)]
        reasons += [f"got {each!r} for a node's {column}; expected a text" for each in odd[:1]]
    twice = nodes.loc[nodes["id"].duplicated(), "id"]
    reasons += [f"{len(twice)} ids are there twice, such as {each!r}" for each in twice[:1]]
    reasons += _words(nodes["kind"], NODE_KINDS, "nodes of kind")
    numbers: dict[str, Any] = {}
    for column in ("layer", "position", "value", "attribution"):
        try:
            numbers[column] = pd.to_numeric(nodes[column]).to_numpy(dtype=float)
        except (TypeError, ValueError):
            reasons.append(f"the column {column!r} of nodes holds what is not a number")
            continue
        infinite = int(np.isinf(numbers[column]).sum())
        reasons += [f"{infinite} nodes have an infinite {column}"] * bool(infinite)
    for column, end in (("layer", np.inf), ("position", n_tokens)):
        given = numbers.get(column, np.empty(0))
        given = given[np.isfinite(given)]
        outside = given[(given < 0) | (given >= end) | (given != np.floor(given))]
        if len(outside):
            expected = f"0 to {n_tokens - 1}" if column == "position" else "0 or more"
            reasons.append(
                f"{len(outside)} nodes have a {column} such as {outside[0]:g}; expected "
                f"{expected}, or none"
            )
    if "status" in nodes:
        reasons += _words(nodes["status"].dropna(), STATUSES, "nodes of status")
    return reasons


def _of_edges(edges: pd.DataFrame, nodes: pd.DataFrame) -> list[str]:
    reasons = _words(edges["kind"], EDGE_KINDS, "edges of kind")
    for end in ("source", "target"):
        unknown = edges.loc[~edges[end].isin(nodes["id"]), end]
        if len(unknown):
            reasons.append(
                f"{len(unknown)} edges have a {end} that is no node, such as {unknown.iloc[0]!r}"
            )
    twice = edges.duplicated(["source", "target", "kind"])
    if twice.any():
        reasons.append(f"{int(twice.sum())} edges repeat a source, target and kind")
    try:
        bad = int((~np.isfinite(pd.to_numeric(edges["weight"]).to_numpy(dtype=float))).sum())
        reasons += [f"{bad} edges have a weight that is not finite"] * bool(bad)
    except (TypeError, ValueError):
        reasons.append("the column 'weight' of edges holds what is not a number")
    if "status" in edges:
        reasons += _words(edges["status"].dropna(), STATUSES, "edges of status")
    return reasons


def _of_details(
    details: Mapping[str, NodeDetails], nodes: pd.DataFrame, n_tokens: int
) -> list[str]:
    known, reasons = {*nodes["id"], *nodes["name"]}, []
    for key, each in details.items():
        if key not in known:
            reasons.append(f"details are given for {key!r}, which is no node's id or name")
        if each.pattern is not None:
            weights = np.asarray(each.pattern, dtype=float)
            if weights.shape != (n_tokens,):
                reasons.append(
                    f"the pattern of {key!r} has the shape {list(weights.shape)}; expected one "
                    f"weight for each of {n_tokens} tokens"
                )
            elif not ((weights >= 0) & (weights <= 1)).all():
                reasons.append(f"the pattern of {key!r} leaves [0, 1]")
        for what, tokens in (("top", each.top_tokens), ("read", each.read_tokens)):
            if any(not isinstance(t, str) or not np.isfinite(a) for t, a in tokens):
                reasons.append(f"the {what} tokens of {key!r} are not (text, finite number)")
    return reasons


def _words(given: "pd.Series[Any]", expected: Sequence[str], what: str) -> list[str]:
    odd = [word for word in given.unique() if word not in expected]
    return [f"there are {what} {word!r}; expected one of {list(expected)}" for word in odd[:1]]


_PLURAL = {"attention": "heads", "neuron": "neurons"}
_STEP_X, _STEP_Y = 84.0, 58.0  # between nodes: a label such as L11N3071 fits
_GAP_X, _GAP_Y = 46.0, 22.0  # between cells, beyond that
_FLAT = 2.5  # how much longer a cell's lines are than they are many: screens are wide


@dataclass(frozen=True)
class Layout:
    """Places on a plane with y downward, as screens have it.

    Attributes:
        xy: of each node.
        rows: the name of each row and its y.
        columns: the position of each column (-1: none) and its x.
    """

    xy: Float[np.ndarray, "n_nodes 2"]
    rows: list[tuple[str, float]]
    columns: list[tuple[int, float]]


def place(nodes: pd.DataFrame, n_tokens: int) -> Layout:
    """A place for every node, no two the same.

    Args:
        nodes: with `kind`, `layer`, `position` (missing where a node has none) and `attribution`.
        n_tokens: positions of the prompt; each has a column, with nodes or without.

    Returns:
        The places.

    Example:
        >>> import pandas as pd
        >>> nodes = pd.DataFrame({"kind": ["embed", "metric"], "layer": [None, None],
        ...                       "position": [0, 1], "attribution": [1.0, 1.0]})
        >>> layout = place(nodes, n_tokens=2)
        >>> bool(layout.xy[0, 0] < layout.xy[1, 0]), bool(layout.xy[0, 1] > layout.xy[1, 1])
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
    return Layout(
        xy,
        [(_row_name(*names[r]), bottom[r] - (heights[r] - 1) * _STEP_Y / 2) for r in heights],
        [(c, left[c] + (widths[c] - 1) * _STEP_X / 2) for c in widths],
    )


def _rank(kind: str, layer: float | None) -> tuple[int, int]:
    """What is computed first is lowest; biases of no layer stand beside the embeddings."""
    at = NODE_KINDS.index(kind)
    if kind == "metric":
        return np.iinfo(int).max, at
    return (-1 if kind == "embed" or pd.isna(layer) else int(layer or 0)), at


def _row_name(kind: str, layer: float | None) -> str:
    what = _PLURAL.get(kind, kind)
    return what if kind in ("embed", "metric") or pd.isna(layer) else f"L{int(layer or 0)} {what}"


def node_patterns(
    cache: ActivationCache, nodes: pd.DataFrame, *, prompt: int = 0
) -> dict[str, NodeDetails]:
    """What the heads of a circuit attend to, as details for `circuit_page`.

    Args:
        cache: of the converted or exposed model on the circuit's prompt, with the patterns.
        nodes: as for `circuit_page`.
        prompt: which prompt of the cache's batch.

    Returns:
        By the name of each neuron-head, its self weight at every token; by the id of each attention
        head, what the token at its position attends to. None of a neuron that several heads share:
        they have patterns (`L5N12.0` …), and it has not.

    Raises:
        PictureError: a node lies beyond the prompt.
        UnknownHeadError: a node of kind "neuron" or "attention" has a name that is not of a head.
        UnsupportedCallError: the cache does not hold a pattern.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> nodes = pd.DataFrame({"id": ["L0H3@2", "L0N7@2"], "kind": ["attention", "neuron"],
        ...                       "name": ["L0H3", "L0N7"], "position": [2, 2]})
        >>> sorted(viz.node_patterns(cache, nodes))
        ['L0H3@2', 'L0N7']
    """
    found: dict[str, NodeDetails] = {}
    for kind, key, name, position in nodes[["kind", "id", "name", "position"]].to_numpy():
        if kind == "neuron" and name not in found:
            head, model = HeadName.parse(name), getattr(cache, "model", None)
            shared = has_neuron_heads(model) and host_of(model).neurons[0].heads_per_neuron > 1
            if head.member is None and shared:
                continue
            pattern = of_prompt(neuron_pattern(cache, name), prompt, cache.has_batch_dim)
            found[name] = NodeDetails(pattern[:, SELF].tolist())
        elif kind == "attention":
            head = HeadName.parse(name)
            rows = attention_of(cache, head.layer, prompt)
            if head.index >= len(rows) or not 0 <= position < rows.shape[1]:
                refuse(
                    [f"got {key!r}; the cache holds {len(rows)} heads over {rows.shape[1]} tokens"]
                )
            found[key] = NodeDetails(rows[head.index, int(position)].tolist())
    return found


def circuit_page(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails] | None = None,
) -> Page:
    """One HTML page with the graph of a circuit, which works offline.

    Args:
        nodes: `id` (a text, such as "L5N1234@7"), `kind` ("embed", "attention", "neuron", "bias",
            "rest", "offset", "metric": those of `CircuitGraph`), `layer` and `position` (missing
            where a node has none), `name`, `value`, `attribution` (missing where there is none:
            such a node is always shown); and `status` ("kept", "lost", "gained"), if two circuits
            are compared.
        edges: `source` and `target` (ids), `kind` ("value", or "q" and "k" of the query side, drawn
            dashed), `weight`; and `status`, if wanted.
        meta: `tokens` (the texts of the prompt's), `metric` (its name), `value` (the metric's),
            `model` (its name); and `notes`, texts that the page shows, if wanted.
        details: by id, or by name for all positions of a node; where both are there, each field of
            the id's counts that is given.

    Returns:
        The page, numbers in it to five significant figures. `write_html` writes it to a file.

    Raises:
        PictureError: with every reason: columns are missing, ids repeat, an edge ends at no node, a
            number is not finite, a position is not the prompt's, details fit no node.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import viz
        >>> nodes = pd.DataFrame({
        ...     "id": ["embed@0", "L0N5@1", "metric"], "kind": ["embed", "neuron", "metric"],
        ...     "layer": [None, 0, None], "name": ["embed", "L0N5", "metric"],
        ...     "position": [0, 1, None], "value": [0.5, 1.5, 2.0], "attribution": [0.5, 1.5, 2.0]})
        >>> edges = pd.DataFrame({"source": ["embed@0", "L0N5@1"], "target": ["L0N5@1", "metric"],
        ...                       "kind": "value", "weight": [0.5, 1.5]})
        >>> page = viz.circuit_page(nodes, edges, {"tokens": ["a", "b"], "metric": "logit",
        ...                                        "value": 2.0, "model": "m"},
        ...                         {"L0N5": viz.NodeDetails(pattern=[0.0, 0.9])})
        >>> page[:15], "L0N5@1" in page
        ('<!DOCTYPE html>', True)
    """
    details = details or {}
    refuse(reasons_against(nodes, edges, meta, details))
    layout = place(nodes, len(meta["tokens"]))
    tokens = [shown(token) for token in meta["tokens"]]
    wanted = ["id", "kind", "layer", "name", "position", "value", "attribution"]
    ends = {name: at for at, name in enumerate(nodes["id"])}
    at_ends = edges.assign(source=edges["source"].map(ends), target=edges["target"].map(ends))
    data = {
        "nodes": columns_of(nodes, [*wanted, *(["status"] * ("status" in nodes))])
        | {"x": layout.xy[:, 0].round(1).tolist(), "y": layout.xy[:, 1].round(1).tolist()},
        "edges": columns_of(
            at_ends, ["source", "target", "kind", "weight", *(["status"] * ("status" in edges))]
        ),
        "rows": layout.rows,
        "columns": layout.columns,
        "tokens": tokens,
        "details": details_of(details),
        "notes": list(meta.get("notes", ())),
    }
    title = f"{meta['model']}: {meta['metric']} = {float(meta['value']):.5g}"
    body = "\n".join(
        [
            resource("assets/circuit.html").replace("TITLE", escape(title)),
            f'<script type="application/json" id="circuit">{for_script(data)}</script>',
            inline(resource("vendor/cytoscape.min.js")),
            inline(resource("assets/circuit.js")),
        ]
    )
    return document(title, body, resource("assets/circuit.css"))
