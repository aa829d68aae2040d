"""Attribution graphs as JSON: a format of our own that is read back exactly, and circuit-tracer's.

    {"format": "attn_only_lens.CircuitGraph", "format_version": 3,
     "sha256": of the rest, as JSON with sorted keys,
     "graph": {"tokens": …, "metric": …, …,
               "nodes": {"id": […], "kind": […], …},
               "edges": {"source": [0, …], "target": [3, …], "kind": […], "weight": […]}}}

Tables are lists by column; sources and targets of edges are rows of the nodes. Neuronpedia shows
the other schema (`circuit_tracer/frontend/graph_models.py` of safety-research/circuit-tracer):

    embed@3         feature_type "embedding", layer "E"
    L5H3@7          "cross layer transcoder", layer "10", feature (Cantor) of (10, 3)
    L5N1234@7       "cross layer transcoder", layer "11", feature (Cantor) of (11, 1234)
    metric          "logit", layer n_layers + 1 of there, at the last token
    bias, rest,     "mlp reconstruction error", layer "0", at the first token, with features
    offset          -1, -2, -3

A layer there is a block of the converted model. Links are edges of kind "value", the only kind that
the schema has. `influence` is |attribution|, `activation` the value.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.engine.tokens import join_tokens
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.heads.names import HeadName
from attn_only_lens.models.two_blocks.config import heads_block, neurons_block
from attn_only_lens.storage import Document, write_text

_OTHERS = ("bias", "rest", "offset")
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
    """Write a graph to a file, all of it or nothing.

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
    """Read the graph that `to_json` wrote.

    Raises:
        CheckpointError: it is missing, damaged, newer than this package, or no such graph.
    """
    body = _DOCUMENT.read(path)["graph"]
    try:
        nodes, edges = pd.DataFrame(body["nodes"]).astype(_TYPES), pd.DataFrame(body["edges"])
        ids = nodes["id"].to_numpy()
        for end in ("source", "target"):
            if len(edges) and edges[end].min() < 0:
                raise IndexError(f"got ends such as {edges[end].min()}; expected rows of the nodes")
            edges[end] = ids[edges[end].to_numpy(dtype=int)]
        attributes = {name: body[name] for name in _ATTRIBUTES}
        for name in ("tokens", "corrupted"):
            attributes[name] = tuple(map(tuple, attributes[name]))
        floats = {name: "float64" for name in ("weight", "error") if name in edges}
        return CircuitGraph(nodes, edges.astype(floats), **attributes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} holds no graph: {type(error).__name__}: {error}") from error


def to_neuronpedia(graph: CircuitGraph, path: str | Path, *, slug: str, scan: str = "") -> None:
    """Write a graph in circuit-tracer's format, for its viewer or Neuronpedia.

    Args:
        graph: of one prompt.
        path: the file; viewers expect SLUG.json.
        slug: the graph's name in viewers.
        scan: the model's name; by default the graph's.

    Raises:
        InputError: the graph has several prompts, which the schema does not allow.

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
        raise InputError(
            [f"got a graph of {len(graph.tokens)} prompts; expected one"],
            "this graph cannot be written as one of circuit-tracer",
        )
    (tokens,) = graph.tokens
    nodes = [_node(row, graph, len(tokens) - 1) for row in graph.nodes.to_dict("records")]
    ids = dict(zip(graph.nodes["id"], (node["node_id"] for node in nodes), strict=True))
    links = graph.edges.loc[graph.edges["kind"] == "value", ["source", "target", "weight"]]
    links = links.assign(source=links["source"].map(ids), target=links["target"].map(ids))
    metadata = {
        "slug": slug,
        "scan": scan or graph.model,
        "transcoder_list": [],
        "prompt_tokens": list(tokens),
        "prompt": join_tokens(tokens),
        "node_threshold": graph.mass,
        "schema_version": 1,
    }
    view = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    whole = {"metadata": metadata, "qParams": view, "nodes": nodes}
    whole |= {"links": links.to_dict("records")}
    write_text(path, json.dumps(whole, allow_nan=False, ensure_ascii=False))


def _node(row: dict[Any, Any], graph: CircuitGraph, last: int) -> dict[str, Any]:
    kind, name, position = row["kind"], row["name"], row["position"]
    label = name
    if kind == "embed":
        layer, index, feature, feature_type = "E", 0, int(position), "embedding"
        label = graph.tokens[0][int(position)]
    elif kind == "metric":
        layer, index, feature, feature_type = str(2 * graph.n_layers + 1), 0, 0, "logit"
        position, label = last, f"{graph.metric} = {graph.value:.4g}"
    elif kind in _OTHERS:
        index = feature = -1 - _OTHERS.index(kind)
        layer, position, feature_type = "0", 0, "mlp reconstruction error"
    else:
        head = HeadName.parse(name)
        # Their viewer expects one number for a layer: attention and MLP get one each.
        block = (heads_block if head.kind == "attention" else neurons_block)(head.layer)
        layer, index, feature_type = str(block), head.index, "cross layer transcoder"
        feature = (block + index) * (block + index + 1) // 2 + index  # Cantor's number of a pair
    return {
        "node_id": f"{layer}_{index}_{position}",
        "jsNodeId": f"{layer}_{index}-{position if kind in ('embed', 'metric') else 0}",
        "feature": feature,
        "layer": layer,
        "feature_type": feature_type,
        "ctx_idx": int(position),
        "clerp": label,
        "token_prob": 0.0,
        "is_target_logit": kind == "metric",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "influence": abs(row["attribution"]),
        "activation": row["value"],
    }
