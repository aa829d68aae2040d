"""The methods that the benchmark compares: functions from a task to a frame of scores.

`NODES` has methods for parts: a frame with columns `name` and `score`. `EDGES` has methods for
edges: columns `writer`, `reader`, `side` and `score`. Baselines are in `gradients.py`. Our methods
are functions of the package, and two factors, which the package does not have because EAP is better
on trained models at a fortieth of the cost:

    secants         attribution with method="secant": Σ |M · Δ| over positions and pairs, with exact
                    multipliers between the two runs of a pair
    exact repairs   nodes: attribution with its default budget of exact patches. Edges: two factors,
                    where the quarter of all edges with the highest scores is cut exactly.
    exact patches   `activation_patch` of each part at each position: Σ |effect|
    two factors     `two_factors.py`, of all different prompts, with zero and mean references. A
                    part's score is the highest score of the edges that it writes.
    exact cuts      its column `exact` of every edge; for parts, its column `node`: the change of
                    the logits if the part's output is replaced

`random` draws scores from a uniform distribution. "gradient, zero" and "EAP, zero" compare outputs
with 0 instead of another prompt, and take the gradient of all logits with random signs.
"""

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analyses.benchmark import gradients as g
from analyses.benchmark.tasks import Task
from analyses.benchmark.tracr_edges import Edge
from analyses.benchmark.two_factors import score_edges
from attn_only_lens import Work, convert
from attn_only_lens import patching as p
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.multipliers import run_both, secant_multipliers
from attn_only_lens.heads import host_of
from attn_only_lens.patching.results import Sweep

Method = Callable[[Task], pd.DataFrame]
REPAIRED = 0.25
_SIDES = {"value": "v"}


def node_frame(task: Task, scores: Any) -> pd.DataFrame:
    """Return a frame of scores in the order of the task's parts."""
    return pd.DataFrame({"name": task.nodes, "score": scores})


def edge_frame(task: Task, scores: Any) -> pd.DataFrame:
    """Return a frame of scores in the order of the task's edges."""
    return pd.DataFrame(task.edges, columns=Edge._fields).assign(score=scores)


def _gradient_nodes(way: g.Way, task: Task) -> pd.DataFrame:
    return node_frame(task, g.node_scores(task, way))


def _zero_nodes(task: Task) -> pd.DataFrame:
    return node_frame(task, g.node_scores_from_zero(task))


def _gradient_edges(way: g.Way, task: Task, *, exact_patterns: bool = False) -> pd.DataFrame:
    return edge_frame(task, g.edge_scores(task, way, exact_patterns=exact_patterns))


def _random(n: int, task: Task) -> Any:
    seed = zlib.crc32(f"{task.name} {task.form}".encode()) + task.seed
    return np.random.default_rng(seed).random(n)


def _random_nodes(task: Task) -> pd.DataFrame:
    return node_frame(task, _random(len(task.nodes), task))


def _random_edges(task: Task) -> pd.DataFrame:
    return edge_frame(task, _random(len(task.edges), task))


def _sweep_scores(sweep: Callable[..., Sweep], task: Task, **options: Any) -> pd.DataFrame:
    """Return Σ |effect on the metric| over positions and pairs, by a function of the package."""
    model, total = convert(task.model, copy_weights=True), dict.fromkeys(task.nodes, 0.0)
    for pairs in task.pairs:
        how = options | {"per_prompt": True, "work": Work(progress=False)}
        frame = sweep(model, pairs.contrast, **how).frame
        effects = (frame["value"] - frame["unpatched"]).abs().groupby(frame["name"].astype(str))
        for name, size in effects.sum().items():
            total[str(name)] += size
    return node_frame(task, list(total.values()))


def scored_edges(task: Task, exact: int = 0) -> pd.DataFrame:
    """Return the frame of `score_edges`, with the sides that tasks have."""
    model = convert(task.model, copy_weights=True)
    frame = score_edges(model, task.batches(), task.nodes, exact)
    return frame.assign(side=frame["kind"].replace(_SIDES))


def _two_factor_edges(task: Task) -> pd.DataFrame:
    return scored_edges(task)[["writer", "reader", "side", "score"]]


def _two_factor_nodes(task: Task) -> pd.DataFrame:
    best = scored_edges(task).groupby("writer")["score"].max()
    return node_frame(task, best.reindex(list(task.nodes)).fillna(0.0).to_numpy())


def _cut_edges(task: Task) -> pd.DataFrame:
    frame = scored_edges(task, exact=len(task.edges))
    return frame.assign(score=frame["exact"])[["writer", "reader", "side", "score"]]


def _cut_nodes(task: Task) -> pd.DataFrame:
    node = scored_edges(task).groupby("reader")["node"].first()
    return node_frame(task, node.reindex(list(task.nodes)).to_numpy())


def _repaired_edges(task: Task) -> pd.DataFrame:
    frame = scored_edges(task, exact=round(REPAIRED * len(task.edges)))
    score = frame["exact"].fillna(frame["score"])
    return frame.assign(score=score)[["writer", "reader", "side", "score"]]


def _zero_edges(task: Task) -> pd.DataFrame:
    return edge_frame(task, g.edge_scores_from_zero(task))


def _secant_edges(task: Task) -> pd.DataFrame:
    """Return Σ |M · Δw|, with secant multipliers M at the inputs of readers."""
    return edge_frame(task, g.edge_scores(task, _secants))


def _secants(model: Any, pairs: Any) -> list[g.Gradients]:
    """Return secant multipliers under the names of the source model's hook points."""
    converted = convert(model, copy_weights=True)
    host, points = host_of(converted), {}
    for layer in range(host.n_layers):
        for side in "qkv":
            points[f"blocks.{layer}.attn.hook_{side}"] = host.hook_name(layer, "attention", side)
        points[f"blocks.{layer}.mlp.hook_post"] = host.hook_name(layer, "neuron", "z")
    contrast = pairs.contrast
    pair = contrast.pair(converted)
    runs = run_both(converted, pair)
    bound = bind(contrast.metric, converted, pair, runs.logits.chunk(2)[0])
    result = secant_multipliers(converted, runs, bound, Tape(points.values()))
    n = len(pairs.clean)  # the metric is the mean over prompts
    by_hook = {name: n * result.gradients[point] for name, point in points.items()}
    one, other = (g.activations(model, tokens) for tokens in (pairs.clean, pairs.corrupted))
    for layer in range(host.n_layers):
        name = f"blocks.{layer}.mlp.hook_"
        # z = relu(q): the multiplier of q is the secant slope of relu times the multiplier of z.
        change = one[f"{name}pre"] - other[f"{name}pre"]
        slope = (one[f"{name}post"] - other[f"{name}post"]) / change.where(change != 0, 1.0)
        slope = slope.where(change.abs() > 1e-9, (one[f"{name}pre"] > 0).to(slope))
        by_hook[f"{name}pre"] = slope * by_hook[f"{name}post"].squeeze(-1)
    by_hook[f"blocks.{host.n_layers - 1}.hook_resid_post"] = n * result.final
    return [g.Gradients(by_hook, other)]


NODES: Mapping[str, Method] = {
    "random": _random_nodes,
    "gradient": partial(_gradient_nodes, g.plain),
    "gradient, zero": _zero_nodes,
    "AtP*": partial(_gradient_nodes, g.dropped),
    "EAP-IG": partial(_gradient_nodes, g.interpolated_embeddings),
    "EAP-IG, activations": partial(_gradient_nodes, g.interpolated_outputs),
    "RelP": partial(_gradient_nodes, g.held_patterns),
    "GIM": partial(_gradient_nodes, g.softened),
    "integrated": partial(_gradient_nodes, g.integrated),
    "secants": partial(_sweep_scores, p.attribution, method=p.Estimate("secant", budget=0)),
    "exact repairs": partial(_sweep_scores, p.attribution),
    "exact patches": partial(_sweep_scores, p.activation_patch),
    "two factors": _two_factor_nodes,
    "exact cuts": _cut_nodes,
}
EDGES: Mapping[str, Method] = {
    "random": _random_edges,
    "EAP": partial(_gradient_edges, g.plain),
    "EAP, zero": _zero_edges,
    "AtP*": partial(_gradient_edges, g.dropped, exact_patterns=True),
    "EAP-IG": partial(_gradient_edges, g.interpolated_embeddings),
    "EAP-IG, activations": partial(_gradient_edges, g.interpolated_outputs),
    "RelP": partial(_gradient_edges, g.held_patterns),
    "GIM": partial(_gradient_edges, g.softened),
    "integrated": partial(_gradient_edges, g.integrated),
    "secants": _secant_edges,
    "exact repairs": _repaired_edges,
    "two factors": _two_factor_edges,
    "exact cuts": _cut_edges,
}
# The package computes exact patches and cuts too, but they are everybody's slow reference.
OURS = ("secants", "exact repairs", "two factors")
EXACT = ("exact patches", "exact cuts")
