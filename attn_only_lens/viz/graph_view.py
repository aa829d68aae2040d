"""Render an attribution graph as a page, with the patterns, tokens and examples of each node.

A page contains only the strongest edges into each node, and patterns and examples of only the
strongest nodes, so that a page with 1,000 nodes stays under 3 MB. Notes say what is missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from attn_only_lens.arguments import COUNT, a_type, is_count
from attn_only_lens.circuits._group_nodes import NodeGroups
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, CircuitGraph
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.engine.prompts import Prompts
from attn_only_lens.neurons.statistics import COLUMNS as EXAMPLE_COLUMNS
from attn_only_lens.patching import Sweep
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.graph_details import (
    DetailFields,
    ShownRuns,
    example_fields,
    node_details,
    pattern_fields,
    token_fields,
)
from attn_only_lens.viz.graph_notes import graph_title, notes_about, what_is_exact
from attn_only_lens.viz.graph_overlays import (
    exact_effects,
    exact_reasons,
    groups_and_state,
    inclusion_of_nodes,
)
from attn_only_lens.viz.page import Page, refuse

_EDGES = 24_000
_FEWEST = 8  # for each kind of edge, the number of edges into a node that a page always keeps


def circuit_view(
    graph: CircuitGraph,
    model: Any = None,
    prompts: Prompts | None = None,
    *,
    corrupted: Prompts | None = None,
    prompt: int = 0,
    mask: Tensor | None = None,
    top_tokens: int = 10,
    exact: Sweep | None = None,
    examples: pd.DataFrame | None = None,
    stability: Stability | None = None,
    groups: NodeGroups | None = None,
    notes: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
) -> Page:
    """Render an attribution graph as an interactive page.

    Args:
        graph: a graph from `circuits.attribution_graph` or a file.
        model: the graph's model, for patterns and top tokens; without it, the page has only nodes
            and edges.
        prompts: the prompts that were passed to `attribution_graph`; needed with a model.
        corrupted: the corrupted prompts of a graph of a difference. The page then shows patterns of
            both runs, and the tokens that the change in a node's output (clean minus corrupted)
            raises and lowers. Otherwise it shows patterns and tokens of the clean run.
        prompt: index of the prompt whose tokens and patterns are shown.
        mask: the mask that was passed to `attribution_graph`.
        top_tokens: number of tokens to list that a node raises most, and lowers most.
            Amounts are standard deviations above the mean over the vocabulary.
        exact: a sweep over the graph's prompts and metric with `positions="each"`. The page shows
            its effects next to the attributions. For example, `activation_patch(model, prompts,
            None, metric, direction="zero", sites=list(graph.heads["name"].unique()))` computes how
            much the metric decreases when a node is set to zero.
        examples: the frame from `neurons.top_examples`.
        stability: `discover(…, resamples=20).stability` for the circuit whose sites are the nodes.
            Core nodes have a solid outline, contingent nodes a dashed outline.
        groups: groups from `circuits.group_nodes`. At first, each group is drawn as one node, with
            its exact effect; a click opens a panel with the button "Unfold". Nodes in
            groups of `state` stay in those groups.
        notes: texts that the page shows before the notes about the graph.
        state: pins, names and groups, in the format of `circuit_page`.

    Returns:
        The page. A click on a node shows its pattern, its edges, and the tokens that it reads and
        writes.

    Raises:
        InputError: the model or the prompts are not the graph's, or only one of the two is passed;
            the sweep has another metric, other prompts, or no single positions; the stability has
            other sites, or the groups have other nodes; the model's norms or embedding are unknown,
            so that there are no top tokens.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained, viz
        >>> model, prompt = convert(pretrained.modular_addition()), torch.tensor([3, 4, 113])
        >>> metric = p.logit_diff(correct=7, wrong=8)
        >>> graph = circuits.attribution_graph(model, prompt, metric, top=20)
        >>> len(viz.circuit_view(graph, model, prompt)) < 3_000_000
        True
    """
    reasons = [
        f"got {a_type(value)} as {name}; expected {expected}"
        for name, value, kind, expected in (
            ("graph", graph, CircuitGraph, "a graph from attribution_graph or CircuitGraph.load"),
            ("exact", exact, Sweep | None, "a sweep from activation_patch"),
            ("stability", stability, Stability | None, "a result of discover(…, resamples=20)"),
            ("groups", groups, NodeGroups | None, "groups from circuits.group_nodes"),
            ("examples", examples, pd.DataFrame | None, "a frame from top_examples"),
        )
        if not isinstance(value, kind)
    ]
    refuse(*reasons)
    reasons = _reasons(graph, model, prompts, corrupted, examples)
    if not is_count(prompt, 0, len(graph.tokens) - 1):
        reasons.append(f"got prompt={prompt!r}; the graph has {len(graph.tokens)} prompts")
    reasons += COUNT.reasons(top_tokens=top_tokens)
    refuse(*reasons, *exact_reasons(graph, exact))
    measured, state = groups_and_state(graph, groups, state)

    # Nodes and their details
    columns = pd.DataFrame(index=graph.heads["id"])
    if exact is not None:
        columns["exact"] = exact_effects(exact)
    if stability is not None:
        columns = columns.join(inclusion_of_nodes(graph, stability))
    parts: list[DetailFields] = []
    if prompts is not None:
        shown = ShownRuns.of(graph, model, prompts, corrupted, mask, prompt)
        parts.append(pattern_fields(shown, graph.heads))
        if top_tokens:
            parts.append(token_fields(shown, graph.heads, top_tokens))
    if examples is not None:
        parts.append(example_fields(graph.heads, examples))
    drawn, edge_notes = _fewer_edges(graph)
    nodes = drawn.nodes.drop(columns="error", errors="ignore").join(columns, on="id")

    # Texts
    of_difference, title, about_details = bool(graph.corrupted), "", list[str]()
    if exact is not None and of_difference:
        title = graph_title(graph, exact, prompt, model)
    if of_difference and prompts is not None:
        both = "attention of both runs, and tokens that the change of an output raises and lowers"
        clean = "attention and tokens of the clean run; corrupted= shows both runs"
        about_details = [f"Details: {clean if corrupted is None else both}."]
    meta = {
        "tokens": list(graph.tokens[prompt]),
        "corrupted": [] if corrupted is None else list(graph.corrupted[prompt]),
        "metric": "change of " * of_difference + graph.metric,
        "value": graph.value,
        "model": graph.model,
        "title": title,
        "exact": "" if exact is None else what_is_exact(graph, exact),
        "notes": [
            *(*notes, *notes_about(graph, prompt), *about_details),
            *(note for part in parts for note in part.notes),
            *edge_notes,
            *([] if groups is None else [f"Groups: {groups!r}."]),
            *([] if stability is None else [f"Stability: {stability!r}."]),
        ],
        "groups": measured,
        "additive": list(EDGE_KINDS) if of_difference else ["value"],
    }
    if of_difference:
        state = {"kinds": list(EDGE_KINDS), **(state or {})}
    edges = drawn.edges[list(EDGE_COLUMNS)]
    return circuit_page(nodes, edges, meta, node_details(parts), state=state)


def _reasons(
    graph: CircuitGraph,
    model: Any,
    prompts: Prompts | None,
    corrupted: Prompts | None,
    examples: pd.DataFrame | None,
) -> list[str]:
    """Return error messages for inputs that do not belong together or to the graph."""
    reasons = []
    if (model is None) != (prompts is None):
        inputs = "prompts" if model is None else "a model"
        reasons.append(f"got {inputs} alone; expected both a model and prompts, or neither")
    first = graph.heads["id"].iloc[:1].astype(str)
    if prompts is not None and not first.str.fullmatch(r".*@\d+").all():
        reasons.append(
            f"got prompts for a graph over the roles {', '.join(graph.tokens[0])}, which are at "
            "other positions in each prompt; call circuit_view(graph), without a model and prompts"
        )
    if corrupted is not None and not graph.corrupted:
        reasons.append("got corrupted prompts for a graph of one run; expected corrupted=None")
    if corrupted is not None and prompts is None:
        reasons.append(
            "got corrupted prompts without a model and clean prompts; expected all three"
        )
    if examples is not None and not {"name", *EXAMPLE_COLUMNS} <= set(examples):
        reasons.append(
            f"got examples with columns {list(examples)}; expected those of top_examples"
        )
    return reasons


def _fewer_edges(graph: CircuitGraph) -> tuple[CircuitGraph, list[str]]:
    """Return the graph with the edges that fit on a page, and notes about those that do not."""
    into = graph.edges.groupby(["target", "kind"], observed=True).ngroups
    top = max(_FEWEST, _EDGES // max(into, 1))
    fewer = graph.prune_edges(top=top)
    note = (
        f"Edges: the {top} strongest into each node, of each kind; all others are summed into "
        "one node, 'rest'."
    )
    return fewer, [note] * (len(fewer.edges) < len(graph.edges))
