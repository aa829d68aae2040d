"""Attribution graphs as JSON: a schema of our own, with a version, that is read back to the bit.

    {"format": "attn_only_lens.CircuitGraph", "format_version": 2,
     "sha256": of the rest, as JSON with sorted keys,
     "graph": {"tokens": …, "metric": …, …,
               "nodes": {"id": […], "kind": […], …},
               "edges": {"source": [0, …], "target": [3, …], "kind": […], "weight": […]}}}

Tables are lists by column; ends of edges are rows of the nodes. What is not there is null. Numbers
are written so that reading gives the same float64.
"""

from dataclasses import fields
from pathlib import Path
from typing import TypedDict

import pandas as pd

from attn_only_lens.circuits.graph import EDGE_COLUMNS, NODE_COLUMNS, CircuitGraph
from attn_only_lens.errors import CircuitError
from attn_only_lens.storage import Document

__all__ = ["from_json", "to_json"]

_TYPES = {"layer": "Int64", "position": "Int64", "gradient": "float64", "value": "float64"}


class _Nodes(TypedDict):
    id: list[str]
    kind: list[str]
    name: list[str]


class _Edges(TypedDict):
    source: list[int]
    target: list[int]
    kind: list[str]
    weight: list[float]


class _Graph(TypedDict):
    nodes: _Nodes
    edges: _Edges
    tokens: list[list[str]]
    metric: str
    value: float
    model: str
    n_layers: int
    n_heads: int
    mass: float


class _Whole(TypedDict):
    graph: _Graph


_SAID = [field.name for field in fields(CircuitGraph) if field.name not in ("nodes", "edges")]


def _refused(reason: str) -> CircuitError:
    return CircuitError([reason], "this is no attribution graph that can be read")


_DOCUMENT = Document("attn_only_lens.CircuitGraph", 2, _Whole, _refused)


def to_json(graph: CircuitGraph, path: str | Path) -> None:
    """Write a graph to a file, whole or not at all.

    Args:
        graph: to be written.
        path: the file.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> graph = circuits.attribution_graph(
        ...     convert(pretrained.modular_addition()), torch.tensor([3, 4, 113]),
        ...     p.logit_diff(correct=7, wrong=8), top=20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     circuits.to_json(graph, f"{folder}/graph.json")
        ...     again = circuits.from_json(f"{folder}/graph.json")
        >>> again.edges.equals(graph.edges)
        True
    """
    rows = {name: row for row, name in enumerate(graph.nodes["id"])}
    nodes = {
        column: [None if pd.isna(x) else x for x in graph.nodes[column].tolist()]
        for column in NODE_COLUMNS
    }
    edges = {column: graph.edges[column].tolist() for column in EDGE_COLUMNS}
    for end in ("source", "target"):
        edges[end] = [rows[name] for name in edges[end]]
    said = {name: getattr(graph, name) for name in _SAID}
    _DOCUMENT.write(Path(path), graph={**said, "nodes": nodes, "edges": edges})


def from_json(path: str | Path) -> CircuitGraph:
    """Read what `to_json` wrote.

    Args:
        path: the file.

    Returns:
        The same graph.

    Raises:
        CircuitError: it is missing, damaged, newer than this package, or no such graph.
    """
    body = _DOCUMENT.read(Path(path))["graph"]
    try:
        nodes, edges = pd.DataFrame(body["nodes"]).astype(_TYPES), pd.DataFrame(body["edges"])
        ids = nodes["id"].to_numpy()
        for end in ("source", "target"):
            if len(edges) and edges[end].min() < 0:
                raise IndexError(f"got ends such as {edges[end].min()}; expected rows of the nodes")
            edges[end] = ids[edges[end].to_numpy(dtype=int)]
        said = {name: body[name] for name in _SAID}
        said["tokens"] = tuple(tuple(row) for row in said["tokens"])
        return CircuitGraph(nodes, edges.astype({"weight": "float64"}), **said)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CircuitError):
            raise
        raise _refused(f"{path}: {type(error).__name__}: {error}") from error
