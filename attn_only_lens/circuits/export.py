"""Attribution graphs as JSON: a schema of our own, with a version, that is read back to the bit.

    {"format": "attn_only_lens.CircuitGraph", "format_version": 2,
     "sha256": of the rest, as JSON with sorted keys,
     "graph": {"tokens": …, "metric": …, …,
               "nodes": {"id": […], "kind": […], …},
               "edges": {"source": [0, …], "target": [3, …], "kind": […], "weight": […]}}}

Tables are lists by column; ends of edges are rows of the nodes. What is not there is null. Numbers
are written so that reading gives the same float64.

Attribution graphs in the schema that circuit-tracer writes and Neuronpedia shows.

The schema (`circuit_tracer/frontend/graph_models.py` of safety-research/circuit-tracer, schema
version 1) knows features of a layer at a token, errors, tokens and logits, and links of one kind.

    here            there
    embed@3         feature_type "embedding", layer "E"
    L5H3@7          "cross layer transcoder", layer "10", feature (Cantor) of (10, 3)
    L5N1234@7       "cross layer transcoder", layer "11", feature (Cantor) of (11, 1234)
    metric          "logit", layer n_layers + 1 of there, at the last token
    bias, rest,     "mlp reconstruction error", layer "0", at the first token, with features
    offset          -1, -2, -3

A layer there is a block of the converted model, 2l for attention heads and 2l + 1 for neurons, so
that heads of a layer are drawn below its neurons and no two ids are the same. Names of the package
are in `clerp`, ours, and in `node_id`s by layer, index and position. Links are edges of kind
"value": the schema has no second kind, and edges into patterns add up to nothing that it shows.
`influence` is |attribution|, `activation` the value. What a head is cannot be looked up at
Neuronpedia: there is no dictionary of features behind it.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd

from attn_only_lens.circuits.graph import EDGE_COLUMNS, NODE_COLUMNS, CircuitGraph
from attn_only_lens.errors import CheckpointError, CircuitError
from attn_only_lens.heads.host import heads_block, neurons_block
from attn_only_lens.heads.names import HeadName
from attn_only_lens.runs.token_texts import join_tokens
from attn_only_lens.storage import Document, write_text

__all__ = ["from_json", "to_json", "to_neuronpedia"]

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


_DOCUMENT = Document("attn_only_lens.CircuitGraph", 2, _Whole)


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
        CheckpointError: it is missing, damaged, newer than this package, or no such graph.
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
        raise CheckpointError(f"{path} holds no graph: {type(error).__name__}: {error}") from error


_OTHERS = ("bias", "rest", "offset")


def to_neuronpedia(graph: CircuitGraph, path: str | Path, *, slug: str, scan: str = "") -> None:
    """Write a graph as an attribution graph of circuit-tracer, for its viewer or Neuronpedia.

    Args:
        graph: of one prompt.
        path: the file, SLUG.json where a viewer is to find it.
        slug: what viewers call it.
        scan: what model they call it of; by default the graph's.

    Raises:
        CircuitError: it is of several prompts, for which the schema has no place.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> graph = circuits.attribution_graph(
        ...     convert(pretrained.modular_addition()), torch.tensor([3, 4, 113]),
        ...     p.logit_diff(correct=7, wrong=8), top=20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "addition.json"
        ...     circuits.to_neuronpedia(graph, path, slug="addition")
        ...     sorted(json.loads(path.read_text()))
        ['links', 'metadata', 'nodes', 'qParams']
    """
    if len(graph.tokens) != 1:
        raise CircuitError(
            [f"got a graph of {len(graph.tokens)} prompts; expected one"],
            "this graph cannot be written as one of circuit-tracer",
        )
    (tokens,) = graph.tokens
    rows = graph.nodes.to_dict("records")
    nodes = [_node(row, graph, len(tokens) - 1) for row in rows]
    ids = {row["id"]: node["node_id"] for row, node in zip(rows, nodes, strict=True)}
    value = graph.edges[graph.edges["kind"] == "value"]
    columns = [value[column].tolist() for column in ("source", "target", "weight")]
    links = [
        {"source": ids[source], "target": ids[target], "weight": weight}
        for source, target, weight in zip(*columns, strict=True)
    ]
    whole = {
        "metadata": {
            "slug": slug,
            "scan": scan or graph.model,
            "transcoder_list": [],
            "prompt_tokens": list(tokens),
            "prompt": join_tokens(tokens),
            "node_threshold": graph.mass,
            "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": links,
    }
    write_text(Path(path), json.dumps(whole, allow_nan=False, ensure_ascii=False))


def _node(row: dict[Any, Any], graph: CircuitGraph, last: int) -> dict[str, Any]:
    kind, name, position = row["kind"], row["name"], row["position"]
    made: dict[str, Any] = {
        "ctx_idx": 0 if kind in _OTHERS else last if kind == "metric" else int(position),
        "clerp": f"{graph.metric} = {graph.value:.4g}" if kind == "metric" else name,
        "token_prob": 0.0,
        "is_target_logit": kind == "metric",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "influence": abs(row["attribution"]),
        "activation": row["value"],
    }
    if kind == "embed":
        layer, index, feature, what = "E", 0, int(position), "embedding"
        made["clerp"] = graph.tokens[0][int(position)]
    elif kind == "metric":
        layer, index, feature, what = str(2 * graph.n_layers + 1), 0, 0, "logit"
    elif kind in _OTHERS:
        index = feature = -1 - _OTHERS.index(kind)
        layer, what = "0", "mlp reconstruction error"
    else:
        head = HeadName.parse(name)
        # Their viewer wants one number for a layer: attention's and the MLP's are two.
        block = (heads_block if head.kind == "attention" else neurons_block)(head.layer)
        layer, index, what = str(block), head.index, "cross layer transcoder"
        feature = _cantor(block, head.index)
    return {
        "node_id": f"{layer}_{index}_{made['ctx_idx']}",
        "jsNodeId": f"{layer}_{index}-{made['ctx_idx'] if kind in ('embed', 'metric') else 0}",
        "feature": feature,
        "layer": layer,
        "feature_type": what,
        **made,
    }


def _cantor(x: int, y: int) -> int:
    """One number for two, as circuit-tracer numbers features."""
    return (x + y) * (x + y + 1) // 2 + y
