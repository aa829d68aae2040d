"""Write circuits and graphs as JSON files that the evaluation of the MIB benchmark reads.

The format is that of `Graph.from_json` in hannamw/EAP-IG, the library of MIB's circuit localization
track (Mueller et al., arXiv 2504.13151). A file lists all nodes and edges of the model, with
`score` and `in_graph`:

    ours                            MIB's
    embed@3                         "input", always in the graph, without a score
    L5H3@7                          "a5.h3"
    L5N1234@7                       "m5", the whole MLP
    metric                          "logits"
    edges of kind q, k, value       "a0.h1->a5.h3<q>", …<k>, …<v>
    all edges into a neuron         "a0.h1->m5"

MIB's nodes have no positions: scores are sums over positions, and over the neurons of a layer.
Edges from "bias", "rest" and "offset" have no place there. A circuit has no edges of its own: edges
between its nodes are in the graph, with score 1, as in MIB's evaluation of nodes. MIB's optional
lists of "neurons" are about coordinates of a node's output, not about neurons of an MLP.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import pandas as pd

from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, has_neuron_heads, host_of
from attn_only_lens.storage.atomic import AnyPath, write_text

_ENDS = {"embed": "input", "metric": "logits"}
_SIDES = {"q": "<q>", "k": "<k>", "value": "<v>"}
_PROBLEM = "this cannot be written for MIB"


def write_mib_circuit(path: AnyPath, sites: pd.DataFrame, model: Any) -> None:
    """Write a circuit's sites, a frame with columns `name`, `kind` and `effect`."""
    InputError.raise_if(_reasons(model, sites), _PROBLEM)
    scores = Counter[str]()
    for name, effect in zip(sites["name"].astype(str), sites["effect"].tolist(), strict=True):
        scores[_node(name)] += effect
    inside = {*scores, *_ENDS.values()}
    edges = {edge: 1.0 for edge, *ends in _edges(_config(model)) if inside.issuperset(ends)}
    _write(path, model, scores, edges)


def write_mib_graph(path: AnyPath, graph: Any, model: Any) -> None:
    """Write a `CircuitGraph` of the difference between two runs."""
    reasons = _reasons(model, graph.heads)
    if not graph.corrupted:
        expected = "expected one of the difference between clean and corrupted prompts"
        reasons.append(f"got a graph of one run; {expected}, which MIB compares")
    InputError.raise_if(reasons, _PROBLEM)
    scores, edges = Counter[str](), Counter[str]()
    names = {node: _node(node) for node in graph.heads["id"]}
    for node, attribution in graph.heads[["id", "attribution"]].itertuples(index=False):
        scores[names[node]] += attribution
    for node, kind in graph.nodes[["id", "kind"]].itertuples(index=False):
        names |= {node: _ENDS[kind]} if kind in _ENDS else {}
    for source, target, kind, weight, *_ in graph.edges.itertuples(index=False):
        if source in names and target in names:
            side = _SIDES[kind] if names[target].startswith("a") else ""
            edges[f"{names[source]}->{names[target]}{side}"] += weight
    _write(path, model, scores, edges)


def _write(path: AnyPath, model: Any, scores: Counter[str], kept: Mapping[str, float]) -> None:
    """Write the scores of nodes, and of the edges that are in the graph; the others get 0."""
    config = _config(model)
    nodes = {
        name: {"in_graph": name in scores, "score": float(scores[name])}
        for layer in range(config["n_layers"])
        for name in _layer(config, layer)
    }
    edges = {
        name: {"in_graph": name in kept, "score": float(kept.get(name, 0.0))}
        for name, *_ in _edges(config)
    }
    ends = {name: {"in_graph": True} for name in _ENDS.values()}
    odd = [name for name, entry in (nodes | edges).items() if not isfinite(entry["score"])]
    reason = f"the scores of {odd[:5]} are not finite; expected finite effects and weights"
    InputError.raise_if([reason] if odd else [], _PROBLEM)
    content = {"cfg": config, "nodes": ends | nodes, "edges": edges}
    write_text(path, json.dumps(content, allow_nan=False))


def _config(model: Any) -> dict[str, Any]:
    host = host_of(model)
    return {
        "n_layers": host.n_layers,
        "n_heads": host.n_heads[0],
        "parallel_attn_mlp": bool(host.norms()[0].parallel),
        "d_model": int(model.cfg.d_model),
    }


def _layer(config: Mapping[str, Any], layer: int) -> list[str]:
    """Return the names of a layer's nodes: its heads, then its MLP."""
    return [*(f"a{layer}.h{head}" for head in range(config["n_heads"])), f"m{layer}"]


def _edges(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the source and the target of every edge of the model."""
    sources = ["input"]
    for layer in range(config["n_layers"]):
        *heads, mlp = _layer(config, layer)
        for source in sources:
            yield from ((f"{source}->{x}<{side}>", source, x) for x in heads for side in "qkv")
        before = sources if config["parallel_attn_mlp"] else [*sources, *heads]
        yield from ((f"{source}->{mlp}", source, mlp) for source in before)
        sources += [*heads, mlp]
    yield from ((f"{source}->logits", source, "logits") for source in sources)


def _node(name: str) -> str:
    """Return MIB's name of a head or neuron, whose name may have a position."""
    head = HeadName.parse(name.partition("@")[0])
    return f"a{head.layer}.h{head.index}" if head.kind == "attention" else f"m{head.layer}"


def _reasons(model: Any, sites: pd.DataFrame) -> list[str]:
    """Return a message for everything that has no place in the file."""
    if not has_neuron_heads(model):
        return [f"got model={model!r:.80}; expected the model, with neuron-heads"]
    host, reasons = host_of(model), []
    if others := sorted({*sites["kind"].astype(str)} - {"attention", "neuron"}):
        expected = "expected attention heads and neurons, so detach transcoders first"
        reasons.append(f"got nodes of kinds {others}, which MIB does not have; {expected}")
    if len({*host.n_heads}) > 1 or len({bool(norms.parallel) for norms in host.norms()}) > 1:
        reasons.append("got layers that differ; expected layers with as many heads, in one order")
    names = [HeadName.parse(name) for name in sites["name"].astype(str).unique()]
    unknown = [
        str(head)
        for head in names
        if head.layer >= host.n_layers or head.index >= host.count(head.layer, head.kind)
    ]
    if unknown:
        reasons.append(f"got {unknown[:5]}, which this model does not have; expected its own model")
    return reasons
