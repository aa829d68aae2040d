"""Draw a graph whose nodes are named after what they read and write."""

from typing import Any

import pandas as pd

from attn_only_lens.circuits.graph import PATTERN_KINDS, CircuitGraph
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.model_state import unchanged
from attn_only_lens.engine.multipliers import float32_slopes
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import resolve_positions
from attn_only_lens.explanation.node_descriptions import describe_nodes
from attn_only_lens.precision import full_precision
from attn_only_lens.viz.graph_overlays import Overlays
from attn_only_lens.viz.graph_view import circuit_view
from attn_only_lens.viz.page import Page

MARKS = {
    "←": "← names the token to which a head attends most, in the circuit's run (grey: the clean "
    "run) / in the corrupted run.",
    "↑": "↑ names the answer whose logit a node raises most, by the direct path.",
    "↓": "↓ names the answer whose logit a node lowers most, by the direct path.",
    ", by ": "By pattern, by both (pattern and value): what carries a node's attribution, if it is "
    "not mainly the value.",
    "disputed": "Sign disputed: both exact patches have the opposite sign to this attribution.",
    " (": "Numbers in brackets: the shares of the difference that the site alone restores and "
    "removes, if it is patched from the clean and from the corrupted run.",
}
_BOTH = 1 / 3  # a label is "both" if the smaller part exceeds this share of |pattern| + |value|


@one_thread_per_model
@warned_once()
@full_precision()
def labelled_view(graph: CircuitGraph, model: Any, contrast: Contrast) -> Page:
    """Render the graph of a difference between two runs, with the labels of an explanation."""
    pair, metric = contrast.pair(model), contrast.metric
    with unchanged(model), float32_slopes(model, pair, metric):
        places = resolve_positions(pair, list(graph.roles) or "each")
        others = pd.Series(dtype=float)
        *_, labels, shown = describe_nodes(model, pair, metric, graph, others, places)
    names = names_of_nodes(graph, labels)
    overlays = Overlays(marks=MARKS)
    return circuit_view(
        graph, model, contrast, prompt=shown, overlays=overlays, state={"names": names}
    )


def names_of_nodes(graph: CircuitGraph, labels: dict[str, str]) -> dict[str, str]:
    """Return the labels of a graph's nodes, with what carries a node's attribution."""
    by_pattern = attribution_by_pattern(graph)
    by_value = graph.heads.set_index("id")["attribution"] - by_pattern
    parts = zip(by_pattern.index, by_pattern.tolist(), by_value.tolist(), strict=True)
    return {node: labels[node] + _by(pattern, value) for node, pattern, value in parts}


def attribution_by_pattern(graph: CircuitGraph) -> "pd.Series[float]":
    """Return the part of each node's attribution that its pattern carries, by id."""
    through = graph.edges[graph.edges["kind"].isin(PATTERN_KINDS)]
    sums = through.groupby("target")["weight"].sum()
    return sums.reindex(graph.heads["id"], fill_value=0.0)


def _by(by_pattern: float, by_value: float) -> str:
    """Return ", by pattern" or ", by both" if a node does not act mainly through its value."""
    pattern, value = abs(by_pattern), abs(by_value)
    if min(pattern, value) > _BOTH * (pattern + value):
        return ", by both"
    return ", by pattern" * (pattern > value)
