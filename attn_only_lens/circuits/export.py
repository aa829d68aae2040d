"""Write attribution graphs to JSON files, and read them back exactly.

    {"format": "attn_only_lens.CircuitGraph", "format_version": 3,
     "sha256": the hash of the rest, as JSON with sorted keys,
     "graph": {"tokens": …, "metric": …, …,
               "nodes": {"id": […], "kind": […], …},
               "edges": {"source": [0, …], "target": [3, …], "kind": […], "weight": […]}}}

Tables are stored as one list per column. Edge sources and targets are row indices of `nodes`.
"""

from pathlib import Path

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import Document

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
    corrupted: list[list[str]]
    metric: str
    value: float
    model: str
    n_layers: int
    n_heads: int
    mass: float


class _Body(TypedDict):
    graph: _Graph


_ATTRIBUTES = _Graph.__required_keys__ - {"nodes", "edges"}
_DOCUMENT = Document("attn_only_lens.CircuitGraph", 3, _Body)


def to_json(graph: CircuitGraph, path: str | Path) -> None:
    """Write a graph to a JSON file atomically.

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
    rows = pd.Index(graph.nodes["id"])
    ends = {end: rows.get_indexer(graph.edges[end]) for end in ("source", "target")}
    tables = {
        name: {
            column: [None if pd.isna(x) else x for x in frame[column].tolist()] for column in frame
        }
        for name, frame in (("nodes", graph.nodes), ("edges", graph.edges.assign(**ends)))
    }
    attributes = {name: getattr(graph, name) for name in sorted(_ATTRIBUTES)}
    _DOCUMENT.write(path, graph={**attributes, **tables})


def from_json(path: str | Path) -> CircuitGraph:
    """Read a graph from a file that was written by `to_json`.

    Raises:
        CheckpointError: the file is missing, damaged, newer than this package, or not a graph file.
    """
    body = _DOCUMENT.read(path)["graph"]
    try:
        nodes, edges = pd.DataFrame(body["nodes"]).astype(_TYPES), pd.DataFrame(body["edges"])
        ids = nodes["id"].to_numpy()
        for end in ("source", "target"):
            if len(edges) and edges[end].min() < 0:
                raise IndexError(f"got {end} {edges[end].min()}; expected a row index of nodes")
            edges[end] = ids[edges[end].to_numpy(dtype=int)]
        attributes = {name: body[name] for name in _ATTRIBUTES}
        for name in ("tokens", "corrupted"):
            attributes[name] = tuple(map(tuple, attributes[name]))
        floats = {name: "float64" for name in ("weight", "error") if name in edges}
        return CircuitGraph(nodes, edges.astype(floats), **attributes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} holds no graph: {type(error).__name__}: {error}") from error
