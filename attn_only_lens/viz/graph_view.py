"""Render an attribution graph as a page, with the patterns, tokens and examples of each node.

A page contains only the strongest edges into each node, and patterns and examples of only the
strongest nodes, so that a page with 1,000 nodes stays under 3 MB. Notes say what is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from attn_only_lens.arguments import a_type, is_count
from attn_only_lens.axes import SELF
from attn_only_lens.circuits._group_nodes import NodeGroups
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, CircuitGraph
from attn_only_lens.circuits.linear_graph import Places, reasons_of_another_run
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.circuits.weights.vocabulary import DirectEffects
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.recording import Recording, record
from attn_only_lens.engine.tokens import all_token_texts, joined, token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.heads.names import count_kinds
from attn_only_lens.neurons import examples_of
from attn_only_lens.neurons.statistics import COLUMNS as EXAMPLE_COLUMNS
from attn_only_lens.patching import Sweep
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.precision import full_precision
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.circuit_data import NodeDetails
from attn_only_lens.viz.page import Page, refuse, short_numbers

_EDGES = 24_000
_WEIGHTS = 100_000  # the maximum number of pattern weights on a page
_FEWEST = 8  # for each kind of edge, the number of edges into a node that a page always keeps
_EXAMPLES = 30_000  # the maximum number of example tokens on a page
_ABOUT_KINDS = {
    "feature": "Features (F) are the units of a transcoder, which imitates the MLP of its layer.",
    "skip": "Skip nodes (S): the input of a transcoder, which W_skip maps linearly to the output.",
    "error": "Error nodes (E): the part of the MLP's output that a transcoder misses.",
}
_WHAT_IS_EXACT = {
    direction: f"Exact effect, from running the model: how much the metric {what}."
    for direction, what in {
        "zero": "falls when the node's output is set to zero",
        "mean": "falls when the node's output is set to its mean",
        "resample": "falls when the node's output comes from another prompt",
        "bias": "falls when the neuron attends only to the bias token",
        "noise": "falls when the node's output comes from the corrupted run",
        "denoise": "rises in the corrupted run when the node's output comes from the clean run",
    }.items()
}


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
    if not is_count(top_tokens):
        reasons.append(f"got top_tokens={top_tokens!r}; expected 0 or more")
    refuse(*reasons, *_exact_reasons(graph, exact))
    notes = [*notes, *_notes_about(graph, prompt)]
    if graph.corrupted and prompts is not None:
        both = "attention of both runs, and tokens that the change of an output raises and lowers"
        clean = "attention and tokens of the clean run; corrupted= shows both runs"
        notes.append(f"Details: {clean if corrupted is None else both}.")
    measured, state = _groups(graph, groups, state)
    columns = pd.DataFrame(index=graph.heads["id"])
    if exact is not None:
        columns["exact"] = _exact_effects(exact)
    if stability is not None:
        columns = columns.join(_inclusion(graph, stability))
    details: dict[str, NodeDetails] = {}
    if prompts is not None:
        runs = [_record_prompts(graph, graph.tokens, model, prompts, mask)]
        if corrupted is not None:
            runs.append(_record_prompts(graph, graph.corrupted, model, corrupted, mask))
        _add_patterns(details, runs, model, graph.heads, prompt, notes)
        if top_tokens:
            _add_tokens(details, runs, model, graph.heads, prompt, top_tokens)
    if examples is not None:
        _add_examples(details, graph.heads, examples, notes)
    drawn = _fewer_edges(graph, notes)
    notes += [f"Groups: {groups!r}."] * (groups is not None)
    notes += [f"Stability: {stability!r}."] * (stability is not None)
    meta = {
        "tokens": list(graph.tokens[prompt]),
        "corrupted": [] if corrupted is None else list(graph.corrupted[prompt]),
        "metric": "change of " * bool(graph.corrupted) + graph.metric,
        "value": graph.value,
        "model": graph.model,
        "title": ""
        if exact is None or not graph.corrupted
        else _title(graph, exact, prompt, model),
        "exact": "" if exact is None else _what_is_exact(graph, exact),
        "notes": notes,
        "groups": measured,
        "additive": list(EDGE_KINDS) if graph.corrupted else ["value"],
    }
    if graph.corrupted:
        state = {"kinds": list(EDGE_KINDS), **(state or {})}
    nodes = drawn.nodes.drop(columns="error", errors="ignore").join(columns, on="id")
    return circuit_page(nodes, drawn.edges[list(EDGE_COLUMNS)], meta, details, state=state)


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


def _notes_about(graph: CircuitGraph, prompt: int) -> list[str]:
    """Return the page's notes about the nodes, prompts and edges of the graph."""
    kinds = set(graph.heads["kind"])
    counts = count_kinds(graph.heads["kind"]) or "none"
    sites, others = f"{len(graph.heads):,} of {graph.n_heads:,}", len(graph.nodes)
    notes = [
        f"Nodes: {counts} ({sites} sites; a site is a head or neuron at one position), and "
        f"{others - len(graph.heads):,} others for tokens, sums and the metric. The sites have "
        f"{graph.mass:.0%} of the sum of |attribution| over all sites; the other sites are summed "
        "into one node, 'rest'."
    ]
    notes += [note for kind, note in _ABOUT_KINDS.items() if kind in kinds]
    if len(graph.tokens) > 1:
        notes.append(
            f"Prompts: tokens, attention and written tokens are from prompt {prompt}; attributions "
            f"and edges add up to the mean over {len(graph.tokens)} prompts, and values are means."
        )
    if graph.corrupted:
        of_patterns = graph.edges[graph.edges["kind"] != "value"].groupby("target")["weight"].sum()
        by_pattern = of_patterns.reindex(graph.heads["id"]).fillna(0.0).to_numpy()
        by_value = graph.heads["attribution"].to_numpy() - by_pattern
        carried = np.abs(by_pattern).sum(), np.abs(by_value).sum()
        through = carried[0] / (sum(carried) or 1.0)
        notes.append(
            "Difference: edges of all kinds add up to attributions. Of these nodes' absolute "
            f"effects, {through:.0%} goes through patterns (edges q, k, gate) and "
            f"{1 - through:.0%} through values."
        )
    return notes


def _title(graph: CircuitGraph, exact: Sweep, prompt: int, model: Any) -> str:
    """Return the question that a graph of a difference answers, with the metric of both runs."""
    bos = getattr(getattr(model, "tokenizer", None), "bos_token", None)
    sides = (
        tokens[tokens[:1] == (bos,) :] for tokens in (graph.tokens[prompt], graph.corrupted[prompt])
    )
    texts = " and ".join(shortened(joined(tokens)) for tokens in sides)
    more = f", and {len(graph.tokens) - 1} more pairs" * (len(graph.tokens) > 1)
    return f"{exact.clean_and_corrupted}: {graph.metric} after {texts}{more}"


def _what_is_exact(graph: CircuitGraph, exact: Sweep) -> str:
    """Return a note for the page about how exact effects differ from attributions."""
    what = "The attribution is the node's share with unchanged patterns and norm scales."
    if graph.corrupted:
        what = (
            "The attribution divides the difference among all nodes, with slopes taken between the "
            "two runs; if nodes are redundant, patches of one of them differ by direction."
        )
    return f"{_WHAT_IS_EXACT[exact.direction]} {what}"


def _fewer_edges(graph: CircuitGraph, notes: list[str]) -> CircuitGraph:
    into = graph.edges.groupby(["target", "kind"], observed=True).ngroups
    top = max(_FEWEST, _EDGES // max(into, 1))
    fewer = graph.prune_edges(top=top)
    if len(fewer.edges) < len(graph.edges):
        notes.append(
            f"Edges: the {top} strongest into each node, of each kind; all others are summed into "
            "one node, 'rest'."
        )
    return fewer


@one_thread_per_model
@full_precision()
def _record_prompts(
    graph: CircuitGraph,
    tokens: Sequence[Sequence[str]],
    model: Any,
    prompts: Prompts,
    mask: Tensor | None,
) -> Recording:
    """Run the model on prompts with these tokens; record patterns and z for the graph's nodes."""
    refuse(*reasons_not_to_run(model), *reasons_without_heads(model))
    pair = single_prompts(model, prompts, mask)
    if all_token_texts(model, pair.clean) != tokens:
        shown = ["|".join(row[:12]) + "|…" * (len(row) > 12) for row in tokens[:3]]
        refuse(f"got prompts other than the graph's prompts, {'; '.join(shown)}")
    hooks = [hook for head in _layers(graph.heads) for hook in _hooks(model, head)]
    run = record(model, pair.clean, pair.mask, names=hooks)
    if tokens == graph.tokens:  # the clean run
        refuse(*reasons_of_another_run(graph, model, run.hooked, Places.of(pair)))
    return run


def _layers(heads: pd.DataFrame) -> list[HeadName]:
    """Return one head for each pair (layer, kind of head) in the graph."""
    names = map(HeadName.parse, heads["name"])
    return list({(head.layer, head.kind): head for head in names}.values())


def _hooks(model: Any, head: HeadName) -> tuple[str, str]:
    host = host_of(model)
    z, pattern = (host.hook_name(head.layer, head.kind, point) for point in ("z", "pattern"))
    return z, pattern


def _heads_and_positions(heads: pd.DataFrame) -> list[tuple[str, int]]:
    return [(name, int(pos)) for name, pos in heads[["name", "position"]].to_numpy()]


def _exact_reasons(graph: CircuitGraph, exact: Sweep | None) -> list[str]:
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


def _exact_effects(exact: Sweep) -> "pd.Series[float]":
    """Return the effect of each node in the sweep, in units of the metric, by node id."""
    frame = exact.to_frame()
    rises = exact.direction == "denoise"
    effect = frame["value"] - exact.corrupted_value if rises else exact.clean_value - frame["value"]
    return effect.set_axis(frame["name"].astype(str) + "@" + frame["position"].astype(str))


def _inclusion(graph: CircuitGraph, stability: Stability) -> pd.DataFrame:
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


def _groups(
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


def _add(details: dict[str, NodeDetails], key: str, **fields: Any) -> None:
    details[key] = replace(details.get(key, NodeDetails()), **fields)


def _add_examples(
    details: dict[str, NodeDetails], heads: pd.DataFrame, examples: pd.DataFrame, notes: list[str]
) -> None:
    """Add top examples until the page is full, nodes with the largest |attribution| first."""
    known, left = set(examples["name"]), _EXAMPLES
    ranked = heads.sort_values("attribution", key=abs, ascending=False)["name"].unique()
    for index, name in enumerate(name for name in ranked if name in known):
        node_examples = examples_of(examples, name)
        left -= sum(len(example.tokens) for example in node_examples)
        if left < 0:
            notes.append(f"Examples: only for the {index} nodes with the largest |attribution|.")
            break
        _add(details, name, examples=node_examples)


def _add_patterns(
    details: dict[str, NodeDetails],
    runs: Sequence[Recording],
    model: Any,
    heads: pd.DataFrame,
    prompt: int,
    notes: list[str],
) -> None:
    """Add the patterns and z of neurons (by name), and the patterns of attention heads (by id).

    `runs` holds the clean run and, if it is shown, the corrupted run. Skip and error nodes have no
    patterns.
    """
    most = _WEIGHTS // (len(runs) * runs[0].tokens.shape[1])
    heads = heads[~heads["kind"].isin(WIDE_KINDS)]
    strongest = heads.loc[heads["attribution"].abs().nlargest(most).index]
    if len(strongest) < len(heads):
        notes.append(f"Patterns: only for the {most} nodes with the largest |attribution|.")
    seen: dict[tuple[str, str], list[list[Tensor]]] = {}
    for key, name, position in strongest[["id", "name", "position"]].to_numpy():
        head = HeadName.parse(name)
        if name in details:
            continue
        hooks = _hooks(model, head)
        if hooks not in seen:  # one transfer per layer
            seen[hooks] = [[run.hooked[x][prompt].cpu().double() for x in hooks] for run in runs]
        for side, (z, patterns) in zip(("", "corrupted_"), seen[hooks], strict=False):
            pattern = patterns[head.index].numpy().round(3)
            if head.kind in NEURON_KINDS:
                z_of_neuron = short_numbers(z[:, head.index, 0].tolist(), 3)
                fields = {f"{side}pattern": pattern[:, SELF].tolist(), f"{side}z": z_of_neuron}
                _add(details, name, **fields)
            else:
                _add(details, key, **{f"{side}pattern": pattern[int(position)].tolist()})


def _add_tokens(
    details: dict[str, NodeDetails],
    runs: Sequence[Recording],
    model: Any,
    heads: pd.DataFrame,
    prompt: int,
    k: int,
) -> None:
    """Add the tokens that each node promotes, and the tokens that activate each neuron most.

    With a corrupted run, a node's output is its clean minus its corrupted output.
    """
    z, *corrupted = (
        {hook: run.hooked[hook] for hook, _ in (_hooks(model, head) for head in _layers(heads))}
        for run in runs
    )
    if corrupted:
        z = {hook: output - corrupted[0][hook] for hook, output in z.items()}
    try:
        effects = DirectEffects(model)
        raised = effects.promoted_tokens(z, _heads_and_positions(heads), k, prompt=prompt)
        neurons = heads.loc[heads["kind"].isin(NEURON_KINDS), "name"].unique().tolist()
        read = effects.read_tokens(neurons, k) if neurons else []
    except InputError as error:
        more = "pass top_tokens=0 to draw the graph without its nodes' tokens"
        raise InputError([*error.reasons, more], "there are no top tokens of this model") from error
    tokens = {token for top in (*raised, *read) for token, _ in top}
    texts = {token: token_text(model, token) for token in tokens}
    for field, keys, tops in (("writes", heads["id"], raised), ("reads", neurons, read)):
        for key, top in zip(keys, tops, strict=True):
            _add(details, key, **{field: [(texts[token], amount) for token, amount in top]})
