"""Write attribution graphs to JSON files, and read them back exactly.

    {"format": "attn_only_lens.CircuitGraph", "format_version": 4,
     "sha256": the hash of the rest, as JSON with sorted keys,
     "graph": {"tokens": …, "metric": …, …,
               "nodes": {"id": […], "kind": […], …},
               "edges": {"source": [0, …], "target": [3, …], "kind": […], "weight": […]}}}

Tables are stored as one list per column. Edge sources and targets are row indices of `nodes`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.circuits.circuit import Circuit, CircuitBody
from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import Document
from attn_only_lens.storage.atomic import AnyPath

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
    circuit: CircuitBody | None


class _Body(TypedDict):
    graph: _Graph


_ATTRIBUTES = _Graph.__required_keys__ - {"nodes", "edges", "circuit"}
_DOCUMENT = Document("attn_only_lens.CircuitGraph", 4, _Body)


_T = TypeVar("_T")


def write_graph(path: str | Path, graph: Mapping[str, Any]) -> None:
    """Write the attributes of a graph to a JSON file atomically."""
    rows = pd.Index(graph["nodes"]["id"])
    ends = {end: rows.get_indexer(graph["edges"][end]) for end in ("source", "target")}
    tables = {
        name: {
            column: [None if pd.isna(x) else x for x in frame[column].tolist()] for column in frame
        }
        for name, frame in (("nodes", graph["nodes"]), ("edges", graph["edges"].assign(**ends)))
    }
    attributes = {name: graph[name] for name in sorted(_ATTRIBUTES)}
    circuit = None if graph["circuit"] is None else graph["circuit"].body()
    _DOCUMENT.write(path, graph={**attributes, **tables, "circuit": circuit})


def read_attributes(path: AnyPath, make: Callable[..., _T]) -> _T:
    """Return `make(**attributes)` with the attributes in a file that `write_graph` wrote."""
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
        circuit = body["circuit"] if body["circuit"] is None else Circuit.of_body(body["circuit"])
        attributes["circuit"] = circuit
        return make(nodes=nodes, edges=edges.astype(floats), **attributes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} holds no graph: {type(error).__name__}: {error}") from error
