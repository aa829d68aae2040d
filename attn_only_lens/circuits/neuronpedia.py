"""Write attribution graphs as JSON files that the viewers of Neuronpedia and circuit-tracer read.

The format is defined by circuit-tracer's data classes (`circuit_tracer/frontend/graph_models.py`)
and by Neuronpedia's schema (`apps/webapp/app/api/graph/graph-schema.json`). Its nodes are features
of transcoders, errors, embeddings of tokens, and logits. Ours are written as

    ours                      feature_type in the file
    feature                   "cross layer transcoder"
    attention, neuron, skip   "attention head", "mlp neuron", "transcoder skip": the viewers draw a
                              dot, as for a feature, and look for no examples
    error, rest               "mlp reconstruction error": what no node explains
    embed, bias, offset       "embedding"
    metric                    "logit"; its probability is always given as 1

Edges of several kinds between two nodes are added. The weights of the links into a node add up to
its attribution, as in the graph. `influence` is the share of Σ |attribution| that a node and all
larger nodes have, by which the viewers prune. The file has no values of the corrupted run, no
patterns and no kinds of edges, so it cannot be read back.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.errors import InputError
from attn_only_lens.heads.names import HeadName
from attn_only_lens.storage.atomic import AnyPath, write_text

_ERROR, _FEATURE, _LOGIT = "mlp reconstruction error", "cross layer transcoder", "logit"
_TYPES = {
    "feature": _FEATURE,
    "attention": "attention head",
    "neuron": "mlp neuron",
    "skip": "transcoder skip",
    "error": _ERROR,
    "router": "router",
    "rest": _ERROR,
    "embed": "embedding",
    "bias": "embedding",
    "offset": "embedding",
    "metric": _LOGIT,
}
_WITHOUT_LAYER = ("embed", "rest", "bias", "offset")
_PROBLEM = "this graph cannot be written"


def write_neuronpedia(
    path: AnyPath,
    graph: Any,
    labels: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
) -> None:
    """Write a `CircuitGraph` to a file atomically, with labels, and groups as supernodes."""
    ids = graph.nodes["id"].tolist()
    InputError.raise_if(_reasons(ids, labels, groups), _PROBLEM)
    nodes = dict(zip(ids, _nodes(graph, labels), strict=True))
    edges = graph.edges[graph.edges["kind"].isin(graph.additive_kinds)]
    sums = edges.groupby(["source", "target"], sort=False, observed=True)["weight"].sum()
    links = [
        {"source": nodes[source]["node_id"], "target": nodes[target]["node_id"], "weight": weight}
        for source, target, weight in sums.reset_index().itertuples(index=False)
    ]
    tokens = list(graph.tokens[0])
    metadata = {
        "slug": re.sub(r"[^a-z0-9]+", "-", f"{graph.model} {graph.metric}".lower()).strip("-"),
        "scan": graph.model,
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": (" " if graph.roles else "").join(tokens),
        "node_threshold": 1.0,
        "schema_version": 1,
        "info": {"description": repr(graph), "generator": {"name": "attn-only-lens"}},
    }
    supernodes = [
        [name, *(nodes[member]["node_id"] for member in members)]
        for name, members in groups.items()
    ]
    saved_view = {
        "pinnedIds": [nodes["metric"]["node_id"], *(x for some in supernodes for x in some[1:])],
        "supernodes": supernodes,
        "linkType": "both",
        "clickedId": nodes["metric"]["node_id"],
        "sg_pos": "",
    }
    content = {
        "metadata": metadata,
        "qParams": saved_view,
        "nodes": [*nodes.values()],
        "links": links,
    }
    write_text(path, json.dumps(content, allow_nan=False))


def _nodes(graph: Any, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the nodes of the file, in the order of the graph's nodes."""
    frame, last = graph.nodes, max(map(len, graph.tokens)) - 1
    sizes = frame["attribution"].abs().where(frame["id"].isin(graph.heads["id"]), 0.0)
    descending = np.argsort(-sizes.to_numpy(), kind="stable")
    influence = np.empty(len(frame))
    influence[descending] = np.cumsum(sizes.to_numpy()[descending]) / max(sizes.sum(), 1e-30)
    nodes = list[dict[str, Any]]()
    for row, share in zip(frame.to_dict("records"), influence.tolist(), strict=True):
        kind = row["kind"]
        pos = last if kind == "metric" else 0 if pd.isna(row["position"]) else int(row["position"])
        layer, index = "E", pos
        if kind == "metric":
            layer, index = str(graph.n_layers + 1), 0
        elif kind not in _WITHOUT_LAYER:
            layer, index = str(int(row["layer"])), HeadName.parse(row["name"]).index
        number = _number(kind, index)
        label = labels.get(row["id"], row["id"])
        if kind == "metric":  # the viewers read the name and the probability from the label
            name = graph.metric.replace('"', "'").replace("(p=", "(p =")
            label = f'Output "{name} {graph.value:.3g}" (p=1.000)'
        node = {
            "node_id": f"{layer}_{number}_{pos}",
            "feature": _cantor(int(layer), index) if kind == "feature" else number,
            "layer": layer,
            "ctx_idx": pos,
            "feature_type": _TYPES[kind],
            "token_prob": float(kind == "metric"),
            "is_target_logit": kind == "metric",
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "jsNodeId": f"{layer}_{number}-{pos}",
            "clerp": label,
            "influence": min(share, 1.0),
            "activation": None if pd.isna(row["value"]) else float(row["value"]),
        }
        nodes.append(node)
    return nodes


def _reasons(ids: list[str], labels: object, groups: object) -> list[str]:
    """Return a message for each wrong label and group, and for neurons of experts."""
    reasons = list[str]()
    if of_experts := [x for x in ids if x.startswith("L") and "E" in x and "N" in x]:
        reasons.append(
            f"got node {of_experts[0]}, a neuron of an expert, for which this format has no "
            "number; expected format='attn_only_lens'"
        )
    if not isinstance(labels, Mapping) or not all(
        isinstance(text, str) for pair in labels.items() for text in pair
    ):
        reasons.append("got wrong labels; expected {node id: text}, such as `why.labels`")
    if not isinstance(groups, Mapping) or not all(
        isinstance(name, str) and isinstance(members, Sequence) and not isinstance(members, str)
        for name, members in groups.items()
    ):
        return [*reasons, 'got wrong groups; expected {"a name": [node ids]}']
    members = {str(member) for members in groups.values() for member in members}
    if unknown := sorted(members - {*ids}):
        expected = f"expected nodes of the graph, such as {ids[0]!r}"
        reasons.append(f"got {unknown[:5]} in groups; {expected}")
    return reasons


def _number(kind: str, index: int) -> int:
    """Return a number that differs for nodes of different kinds in one layer, at one position.

    It is the index itself for features and tokens, and negative for other kinds.
    """
    if kind in ("feature", "embed", "metric"):
        return index
    kinds = [other for other in _TYPES if other not in ("feature", "embed", "metric")]
    return -1 - kinds.index(kind) - len(kinds) * index


def _cantor(x: int, y: int) -> int:
    """Return the number by which the viewers look up feature y of layer x (Cantor's pairing)."""
    return (x + y) * (x + y + 1) // 2 + y
