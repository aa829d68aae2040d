"""What a page adds to a graph's nodes: exact effects, examples, stability, and groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.arguments import a_type
from attn_only_lens.circuits._group_nodes import NodeGroups
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.heads import HeadName
from attn_only_lens.neurons.statistics import COLUMNS
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.viz.circuit_data import ALONE
from attn_only_lens.viz.page import refuse, short_numbers

_FIRST = 5  # so many of the sites outside a graph are shown as early as equally strong nodes


@dataclass(frozen=True, eq=False)
class Overlays:
    """Results that the page of a graph shows for the graph's nodes.

    Attributes:
        exact: a sweep over the graph's contrast with positions "each". The page shows its effects
            next to the attributions. For example, `activation_patch(model, contrast,
            sites=list(graph.heads["name"].unique()), direction="zero")` computes how much the
            metric decreases when a node is set to zero.
        examples: the frame from `neurons.top_examples`.
        stability: the `stability` of the circuit whose sites are the nodes, if `discover` resampled
            prompts. Core nodes have a solid outline, contingent nodes a dashed outline.
        groups: groups from `circuits.group_nodes`. At first, each group is drawn as one node, with
            its exact effect; a click opens a panel with the button "Unfold". Nodes in groups of the
            page's state stay in those groups.
        alone: the effects of patching one site alone: a frame with columns `id` (such as "L3H3@5"),
            `denoise` and `noise`, which are shares of the difference between two runs. A site
            that is not a node of the graph is drawn in grey, without edges.
        notes: texts that say how to read these results; the page folds them.
        marks: what marks in the names of nodes mean, such as {"←": "← names a token."}; the notes
            and the picture say it, if a name contains the mark.

    Raises:
        InputError: a result has another type, or the examples lack columns; the error lists every
            reason.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p, viz
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), None, p.logit_diff(correct=7, wrong=8))
        >>> graph = circuits.attribution_graph(model, sums, top=20)
        >>> names = list(graph.heads["name"].unique())
        >>> sweep = p.activation_patch(model, sums, sites=names, direction="zero")
        >>> page = viz.circuit_view(graph, overlays=viz.Overlays(exact=sweep))
        >>> "set to zero" in page
        True
    """

    exact: Sweep | None = None
    examples: pd.DataFrame | None = None
    stability: Stability | None = None
    groups: NodeGroups | None = None
    alone: pd.DataFrame | None = None
    notes: Sequence[str] = ()
    marks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reasons = [
            f"got {a_type(value)} as {name}; expected {expected}"
            for name, value, kind, expected in (
                ("exact", self.exact, Sweep, "a sweep from activation_patch"),
                ("examples", self.examples, pd.DataFrame, "a frame from top_examples"),
                ("stability", self.stability, Stability, "the stability of a circuit"),
                ("groups", self.groups, NodeGroups, "groups from circuits.group_nodes"),
                ("alone", self.alone, pd.DataFrame, "a frame with columns id, denoise, noise"),
            )
            if value is not None and not isinstance(value, kind)
        ]
        reasons += text_reasons(self.notes)
        frame = self.examples
        if isinstance(frame, pd.DataFrame) and not {"name", *COLUMNS} <= set(frame):
            reasons.append(
                f"got examples with columns {list(frame)}; expected those of top_examples"
            )
        frame = self.alone
        if isinstance(frame, pd.DataFrame) and not {"id", *ALONE} <= set(frame):
            reasons.append(f"got alone with columns {list(frame)}; expected id, denoise, noise")
        refuse(*reasons)


def text_reasons(notes: object) -> list[str]:
    """Return [error message] if notes are no list of texts."""
    if isinstance(notes, list | tuple) and all(isinstance(note, str) for note in notes):
        return []
    return [f"got notes={notes!r}; expected a list of texts"]


def exact_reasons(graph: CircuitGraph, exact: Sweep | None) -> list[str]:
    """Return every reason why a sweep does not have the graph's exact effects."""
    if exact is None:
        return []
    base = exact.corrupted_value if graph.corrupted else 0.0
    apart = abs(exact.clean_value - base - graph.value)
    if graph.circuit is not None:  # the graph's value is what the circuit keeps
        apart = abs(exact.clean_value - graph.circuit.whole)
    reasons = list[str]()
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
    places = graph.roles or set(range(len(graph.tokens[0])))
    if "prompt" in frame or not frame["position"].isin(places).all():
        expected = "roles" if graph.roles else "each"
        reasons.append(f'got a sweep without a row for each place; expected positions "{expected}"')
    return reasons


def exact_effects(exact: Sweep) -> "pd.Series[float]":
    """Return the effect of each node in the sweep, in units of the metric, by node id."""
    frame = exact.to_frame()
    rises = exact.direction == "denoise"
    effect = frame["value"] - exact.corrupted_value if rises else exact.clean_value - frame["value"]
    return effect.set_axis(site_ids(frame))


def with_sites_alone(nodes: pd.DataFrame, alone: pd.DataFrame, difference: float) -> pd.DataFrame:
    """Add the effects of single sites to a page's nodes, and nodes for sites outside the graph.

    A page shows the strongest nodes first. The strength of a node in the graph is its
    |attribution|. Of the sites outside, the strongest few have the strength of their larger effect
    on the metric, whose difference is `difference`; all others come after the graph's nodes.
    """
    tokens = nodes[nodes["kind"] == "embed"]
    place_of = dict(zip(tokens["id"].str.partition("@")[2], tokens["position"], strict=True))
    effects = alone.set_index("id")[list(ALONE)].astype(float)
    new = effects[~effects.index.isin(nodes["id"])].abs().max(axis=1)
    new = new.sort_values(ascending=False, kind="stable")
    inside = nodes.assign(outside=False, strength=nodes["attribution"].abs())
    weakest = inside["strength"].min() / (new.max() if len(new) else 1.0)
    scale = np.where(np.arange(len(new)) < _FIRST, abs(difference), weakest)
    heads = [HeadName.parse(name.partition("@")[0]) for name in new.index]
    sites = {
        "id": new.index,
        "kind": [head.kind for head in heads],
        "layer": [head.layer for head in heads],
        "name": list(map(str, heads)),
        "position": [place_of[name.partition("@")[2]] for name in new.index],
        "outside": True,
        "strength": scale * new.to_numpy(),
    }
    more = pd.DataFrame(sites).reindex(columns=list(inside))
    both = pd.concat([inside, more.astype(inside.dtypes.to_dict())], ignore_index=True)
    return both.join(effects, on="id")


def inclusion_of_nodes(graph: CircuitGraph, stability: Stability) -> pd.DataFrame:
    """Return how often circuits of resampled prompts include each node, indexed by node id."""
    sites = stability.sites
    frame = sites[["inclusion", "inclusion_low", "inclusion_high"]].assign(stability=sites["class"])
    frame.index = pd.Index(site_ids(sites))
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
