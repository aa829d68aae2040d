"""What a page adds to a graph's nodes: exact effects, stability, and groups."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attn_only_lens.circuits._group_nodes import NodeGroups
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.patching import Sweep
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.viz.page import refuse, short_numbers


def exact_reasons(graph: CircuitGraph, exact: Sweep | None) -> list[str]:
    """Return every reason why a sweep does not have the graph's exact effects."""
    if exact is None:
        return []
    base = exact.corrupted_value if graph.corrupted else 0.0
    reasons, apart = [], abs(exact.clean_value - base - graph.value)
    if exact.metric != graph.metric:
        reasons.append(f"got a sweep with {exact.metric}; the graph's metric is {graph.metric}")
    elif apart > 1e-2 * max(abs(exact.clean_value - exact.corrupted_value), abs(graph.value)):
        reasons.append(
            f"got a sweep whose clean metric is {exact.clean_value:.4g}, but the graph's is "
            f"{graph.value:.4g}: the sweep is over other prompts"
        )
    if exact.part != "z" or exact.method != MEASURED:
        reasons.append(f"got a sweep of {exact.part} by {exact.method}; expected patching of z")
    frame = exact.to_frame()
    if "prompt" in frame or not pd.api.types.is_integer_dtype(frame["position"]):
        reasons.append('got a sweep without a row for each position; expected positions="each"')
    return reasons


def exact_effects(exact: Sweep) -> "pd.Series[float]":
    """Return the effect of each node in the sweep, in units of the metric, by node id."""
    frame = exact.to_frame()
    rises = exact.direction == "denoise"
    effect = frame["value"] - exact.corrupted_value if rises else exact.clean_value - frame["value"]
    return effect.set_axis(frame["name"].astype(str) + "@" + frame["position"].astype(str))


def inclusion_of_nodes(graph: CircuitGraph, stability: Stability) -> pd.DataFrame:
    """Return how often circuits of resampled prompts include each node, indexed by node id."""
    sites = stability.sites
    frame = sites[["inclusion", "inclusion_low", "inclusion_high"]].assign(stability=sites["class"])
    frame.index = sites["name"].astype(str) + "@" + sites["position"].astype(str)
    everywhere = graph.heads["name"].to_numpy() + "@all"
    ids = graph.heads["id"].where(graph.heads["id"].isin(frame.index), everywhere)
    here = frame.reindex(ids).set_axis(graph.heads["id"])
    if not here["inclusion"].notna().any():
        refuse("got the stability of a circuit without any of the graph's nodes")
    return here


def groups_and_state(
    graph: CircuitGraph, groups: NodeGroups | None, state: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    """Return the exact effects of groups, and the page's state with these groups added."""
    if groups is None:
        return [], state
    if unknown := sorted(set(groups.nodes["id"]) ^ set(graph.heads["id"])):
        refuse(f"got groups of another graph: one of the two graphs lacks the node {unknown[0]}")
    state, frame = state or {}, groups.frame
    kept = list(state.get("groups", ()))
    taken = {node for group in kept for node in group.get("members", ())}
    new = [
        {"name": name, "members": [node for node in members if node not in taken]}
        for name, members in zip(frame["name"], frame["members"], strict=True)
    ]
    columns = (
        frame["members"],
        *(short_numbers(frame[column]) for column in ("effect", "sum_of_effects")),
    )
    measured = [
        {"members": members, "effect": effect, "sum_of_effects": total}
        for members, effect, total in zip(*columns, strict=True)
    ]
    new = [group for group in new if len(group["members"]) > 1]
    return measured, {**state, "groups": [*kept, *new]}
