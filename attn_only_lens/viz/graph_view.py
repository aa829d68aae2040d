"""Render an attribution graph as a page, with the patterns, tokens and examples of each node.

A page contains only the strongest edges into each node, and patterns and examples of only the
strongest nodes, so that a page with 1,000 nodes stays under 3 MB. Notes say what is missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from attn_only_lens.arguments import COUNT, a_type, is_count
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, CircuitGraph
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.positions import missing_role_reasons
from attn_only_lens.growth import Comparison
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.comparison_pages import comparison_circuit
from attn_only_lens.viz.graph_details import (
    DetailFields,
    ShownRuns,
    example_fields,
    node_details,
    pattern_fields,
    token_fields,
)
from attn_only_lens.viz.graph_notes import (
    caption,
    graph_title,
    notes_about,
    share_of_rest,
    what_is_exact,
)
from attn_only_lens.viz.graph_overlays import (
    Overlays,
    exact_effects,
    exact_reasons,
    groups_and_state,
    inclusion_of_nodes,
    text_reasons,
    with_sites_alone,
)
from attn_only_lens.viz.page import Page, refuse

_BOTH_RUNS = (
    "Details: attention of both runs, and tokens that the change of an output raises and lowers."
)
_EDGES = 24_000
_LEAST_REST = 0.001  # the least share of Σ |weight| with which "rest" is shown at first
_FEWEST = 8  # for each kind of edge, the number of edges into a node that a page always keeps


def circuit_view(
    graph: CircuitGraph | Comparison,
    model: Any = None,
    contrast: Contrast | None = None,
    *,
    prompt: int = 0,
    top_tokens: int = 10,
    overlays: Overlays = Overlays(),
    notes: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
) -> Page:
    """Render an attribution graph as an interactive page.

    Args:
        graph: a graph from `circuits.attribution_graph` or a file. Or the result of `compare`,
            which takes only `state`: both circuits are drawn as one graph of kept, lost and gained
            nodes and edges. Names, layers, shares and weights are from the grown model or, for lost
            nodes and edges, from the original model. If there are more than 300 nodes, the page has
            only the 300 with the largest shares.
        model: the graph's model, for patterns and top tokens; without it, the page has only nodes
            and edges.
        contrast: the graph's contrast; needed with a model. The page of a difference shows patterns
            of both runs, and the tokens that the change in a node's output (clean minus corrupted)
            raises and lowers.
        prompt: index of the prompt whose tokens and patterns are shown. In a graph by role, columns
            are roles, and the shown prompt's tokens are below their names; without a contrast, the
            page has only the roles.
        top_tokens: number of tokens to list that a node raises most, and lowers most.
            Amounts are standard deviations above the mean over the vocabulary.
        overlays: further results to show for the nodes: exact effects, examples, stability, groups.
        notes: texts that the page shows first; it folds the notes about the graph.
        state: what the page shows at first, as its menu "Save" writes it to JSON: pinned nodes,
            names, groups (drawn as one node unless `folded` is False), numbers of nodes and edges.
            If there are more than 300 nodes and no groups, the heads of each layer form a group,
            and so do the neurons and the features; users can unfold or ungroup these groups.

    Returns:
        The page. A click on a node shows its pattern, its edges, and the tokens that it reads and
        writes. If some edges come from "rest", a bar in every node shows how much of the node's
        inflow is drawn: the sum s of the shown edges that do not come from "rest", as a share of
        the sum of all edges into the node. At the metric, the share is also given as a number. It
        is negative or above 100 % if s and the inflow that is not drawn, u, have opposite signs;
        the bar is always |s| / (|s| + |u|). The page shows "rest" at first if its edges have at
        least 0.1 % of the sum of |weight|. `write` also writes the page's picture, to an SVG file.

    Raises:
        InputError: the model or the contrast is not the graph's, or only one of the two is passed;
            the sweep has another metric, other prompts, or no single positions; the stability has
            other sites, or the groups have other nodes; the model's norms or embedding are unknown,
            so that there are no top tokens; a comparison's circuits have no nodes, or it is passed
            with a model or a contrast.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p, viz
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), None, p.logit_diff(correct=7, wrong=8))
        >>> graph = circuits.attribution_graph(model, sums, top=20)
        >>> len(viz.circuit_view(graph, model, sums)) < 3_000_000
        True
    """
    if not isinstance(overlays, Overlays):
        refuse(f"got {a_type(overlays)} as overlays; expected viz.Overlays(…)")
    if isinstance(graph, Comparison):
        texts = overlays.notes, overlays.marks
        results = [x for x in vars(overlays).values() if all(x is not text for text in texts)]
        others = [x for x in (model, contrast, *results, *overlays.notes, *notes) if x is not None]
        given = [*map(a_type, others), *[f"prompt={prompt!r}"] * (prompt != 0)]
        refuse(*[f"got {some} with a comparison; expected only `state`" for some in given[:1]])
        return comparison_circuit(graph, state)
    if not isinstance(graph, CircuitGraph):
        refuse(f"got {a_type(graph)}; expected a graph, or a comparison")
    exact, stability = overlays.exact, overlays.stability
    reasons = _reasons(graph, model, contrast) + exact_reasons(graph, exact)
    n_prompts = len(contrast if graph.roles and isinstance(contrast, Contrast) else graph.tokens)
    if not is_count(prompt, 0, n_prompts - 1):
        reasons.append(f"got prompt={prompt!r}; the graph has {n_prompts} prompts")
    refuse(*reasons, *text_reasons(notes), *COUNT.reasons(top_tokens=top_tokens))
    measured, state = groups_and_state(graph, overlays.groups, state)

    # Nodes and their details
    columns = pd.DataFrame(index=graph.heads["id"])
    if exact is not None:
        columns["exact"] = exact_effects(exact)
    if stability is not None:
        columns = columns.join(inclusion_of_nodes(graph, stability))
    parts: list[DetailFields] = []
    if contrast is None:
        tokens, roles = [list(graph.tokens[prompt])], dict[str, int | None]()
    else:
        shown = ShownRuns.of(graph, model, contrast, prompt)
        tokens, roles = shown.tokens, shown.roles
        parts.append(pattern_fields(shown, graph.heads))
        if top_tokens:
            parts.append(token_fields(shown, graph.heads, top_tokens))
    if overlays.examples is not None:
        parts.append(example_fields(graph.heads, overlays.examples))
    drawn, edge_notes = _fewer_edges(graph)
    nodes = drawn.nodes.drop(columns="error", errors="ignore").join(columns, on="id")
    if overlays.alone is not None:
        whole = graph.value if exact is None else exact.clean_value - exact.corrupted_value
        nodes = with_sites_alone(nodes, overlays.alone, whole)

    # Texts
    absent = ", ".join(role for role, index in roles.items() if index is None)
    of_difference, has_details = bool(graph.corrupted), contrast is not None
    title = ""
    if exact is not None and of_difference:
        title = graph_title(graph, exact, prompt, model)
    meta = {
        "tokens": tokens[0],
        "corrupted": tokens[1] if of_difference and has_details else [],
        "roles": roles,
        "metric": "change of " * of_difference + graph.metric,
        "value": graph.value,
        "model": graph.model,
        "title": title,
        "exact": "" if exact is None else what_is_exact(graph, exact),
        "lead": list(notes),
        "notes": [
            *(*overlays.notes, *_meanings(overlays.marks, state)),
            *notes_about(graph, prompt, n_prompts),
            *[_BOTH_RUNS] * (of_difference and has_details),
            *(note for part in parts for note in part.notes),
            *[f"Prompt {prompt} has no token of these roles: {absent}; see the other prompts."]
            * bool(absent),
            *edge_notes,
            *([] if overlays.groups is None else [f"Groups: {overlays.groups!r}."]),
            *([] if stability is None else [f"Stability: {stability!r}."]),
        ],
        "groups": measured,
        "caption": caption(graph, prompt, n_prompts),
        "marks": dict(overlays.marks),
        "additive": list(EDGE_KINDS) if of_difference else ["value"],
    }
    shown_first: dict[str, Any] = {"kinds": meta["additive"]} if of_difference else {}
    if share_of_rest(drawn) >= _LEAST_REST:
        shown_first["extras"] = True
    state = {**shown_first, **(state or {})}
    edges = drawn.edges[list(EDGE_COLUMNS)]
    return circuit_page(nodes, edges, meta, node_details(parts), state=state)


def _reasons(graph: CircuitGraph, model: Any, contrast: Contrast | None) -> list[str]:
    """Return error messages for a model without a contrast, or for a contrast of another graph."""
    if (model is None) != (contrast is None):
        only = "a contrast" if model is None else "a model"
        return [f"got {only} alone; expected both a model and the graph's contrast, or neither"]
    if contrast is None:
        return []
    if reasons := contrast_reasons(contrast, both=bool(graph.corrupted)):
        return reasons
    reasons = missing_role_reasons(contrast.roles, graph.roles, "graph")
    if contrast.corrupted is not None and not graph.corrupted:
        reasons.append(
            "got a contrast with corrupted prompts for a graph of one run; expected corrupted=None"
        )
    if (name := as_metric(contrast.metric).name) != graph.metric:
        reasons.append(f"got a contrast with the metric {name}; the graph's is {graph.metric}")
    return reasons


def _meanings(marks: Mapping[str, str], state: Mapping[str, Any] | None) -> list[str]:
    """Return what those marks mean that names of nodes contain."""
    names = str((state or {}).get("names", ""))
    return [meaning for mark, meaning in marks.items() if mark in names]


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
