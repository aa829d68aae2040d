"""The details of a graph's nodes: patterns, tokens that they read and write, and examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.axes import SELF
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.linear_graph import Places
from attn_only_lens.circuits.own_run import graph_runs, reasons_of_another_run
from attn_only_lens.circuits.weights.vocabulary import DirectEffects
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.recording import Recording, record
from attn_only_lens.engine.tokens import all_token_texts, token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.heads.names import place_of
from attn_only_lens.neurons.statistics import examples_of
from attn_only_lens.precision import full_precision
from attn_only_lens.viz.circuit_data import NodeDetails
from attn_only_lens.viz.page import refuse, short_numbers

_WEIGHTS = 100_000  # the maximum number of pattern weights on a page
_EXAMPLES = 30_000  # the maximum number of example tokens on a page


@dataclass(frozen=True, eq=False)
class ShownRuns:
    """The runs of a graph's prompts, and which prompt the page shows.

    Attributes:
        model: the graph's model.
        runs: the clean run and, if it is shown, the corrupted run.
        prompt: the index of the shown prompt.
        columns: the positions of the shown tokens: all or, for a graph by role, without padding.
        roles: the index of each role's token in `columns`, or None if the shown prompt has none;
            empty if the graph's nodes are at positions.
    """

    model: Any
    runs: tuple[Recording, ...]
    prompt: int
    columns: list[int]
    roles: dict[str, int | None]

    @classmethod
    def of(cls, graph: CircuitGraph, model: Any, contrast: Contrast, prompt: int) -> "ShownRuns":
        """Record the runs; raise InputError if the model or the prompts are not the graph's."""
        refuse(*reasons_not_to_run(model), *reasons_without_heads(model))
        pair = contrast.pair(model)
        sides = ((pair.clean, graph.tokens), (pair.corrupted, graph.corrupted))
        for tokens, texts in () if graph.roles else sides:
            if texts and all_token_texts(model, tokens) != texts:  # none for one run
                shown = ["|".join(row[:12]) + "|…" * (len(row) > 12) for row in texts[:3]]
                refuse(f"got prompts other than the graph's prompts, {'; '.join(shown)}")
        names = [name for head in _layers(graph.heads) for name in _hooks(model, head)]
        if not graph.corrupted:
            runs = [record(model, pair.clean, pair.mask, names=names)]
        else:
            runs = [*graph_runs(graph, model, pair, names)]
        places = Places.of(pair, graph.roles or "each")
        refuse(*reasons_of_another_run(graph, model, runs[0].hooked, places))
        columns = list(range(pair.clean.shape[1]))
        if places.chosen is None:
            return cls(model, tuple(runs), prompt, columns, {})
        if graph.circuit is None:  # without tokens in the graph, only its value tells the prompts
            metric = bind(contrast.metric, model, pair, runs[0].logits)
            clean, corrupted = (metric.of(run.logits) for run in runs)
            if not abs(clean - corrupted - graph.value) <= 1e-2 * max(abs(clean), abs(graph.value)):
                refuse(
                    f"got prompts between which the metric changes by {clean - corrupted:.4g}, but "
                    f"the graph's value is {graph.value:.4g}: the graph is from other prompts"
                )
        columns = pair.real[prompt].nonzero().flatten().tolist()
        at_role = (row.nonzero().flatten().tolist() for row in places.chosen[:, prompt])
        roles = {
            role: columns.index(some[0]) if some else None
            for role, some in zip(places.names, at_role, strict=True)
        }
        return cls(model, tuple(runs), prompt, columns, roles)

    @property
    def tokens(self) -> list[list[str]]:
        """The texts of the shown tokens, in each run."""
        rows = [run.tokens[self.prompt, self.columns] for run in self.runs]
        return [list(texts) for texts in all_token_texts(self.model, torch.stack(rows))]

    def position(self, place: float) -> int | None:
        """Return the position of a place in the shown prompt; None for a role without a token."""
        if not self.roles:
            return int(place)
        index = list(self.roles.values())[int(place)]
        return None if index is None else self.columns[index]


@dataclass(frozen=True, eq=False)
class DetailFields:
    """Some fields of the nodes' details, by node id or by neuron, and notes about what is missing.

    Fields of several objects are joined by `node_details`.
    """

    fields: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()


def node_details(parts: Sequence[DetailFields]) -> dict[str, NodeDetails]:
    fields: dict[str, dict[str, Any]] = {}
    for part in parts:
        for key, some in part.fields.items():
            fields.setdefault(key, {}).update(some)
    return {key: NodeDetails(**some) for key, some in fields.items()}


def example_fields(heads: pd.DataFrame, examples: pd.DataFrame) -> DetailFields:
    """Return top examples until the page is full, nodes with the largest |attribution| first."""
    known, left = set(examples["name"]), _EXAMPLES
    ranked = heads.sort_values("attribution", key=abs, ascending=False)["name"].unique()
    fields: dict[str, dict[str, Any]] = {}
    for name in (name for name in ranked if name in known):
        node_examples = examples_of(examples, name)
        left -= sum(len(example.tokens) for example in node_examples)
        if left < 0:
            note = f"Examples: only for the {len(fields)} nodes with the largest |attribution|."
            return DetailFields(fields, (note,))
        fields[name] = {"examples": node_examples}
    return DetailFields(fields)


def pattern_fields(shown: ShownRuns, heads: pd.DataFrame) -> DetailFields:
    """Return the patterns and z of neurons (by name), and the patterns of attention heads (by id).

    Skip and error nodes have no patterns. Heads at a role without a token in the shown prompt have
    no patterns either.
    """
    runs, columns = shown.runs, shown.columns
    most = _WEIGHTS // (len(runs) * len(columns))
    heads = heads[~heads["kind"].isin(WIDE_KINDS)]
    strongest = heads.loc[heads["attribution"].abs().nlargest(most).index]
    seen: dict[tuple[str, str], list[list[Tensor]]] = {}
    fields: dict[str, dict[str, Any]] = {}
    for key, name, position in strongest[["id", "name", "position"]].to_numpy():
        head = HeadName.parse(name)
        if name in fields:
            continue
        hooks, index = _hooks(shown.model, head), place_of(head, shown.model)
        if hooks not in seen:  # one transfer per layer
            seen[hooks] = [
                [run.hooked[x][shown.prompt].cpu().double() for x in hooks] for run in runs
            ]
        for side, (z, patterns) in zip(("", "corrupted_"), seen[hooks], strict=False):
            pattern = patterns[index].numpy().round(3)
            if head.kind in NEURON_KINDS:
                z_of_neuron = short_numbers(z[columns, index, 0].tolist(), 3)
                gates = pattern[columns, SELF].tolist()
                of_side = {f"{side}pattern": gates, f"{side}z": z_of_neuron}
                fields.setdefault(name, {}).update(of_side)
            elif (place := shown.position(position)) is not None:
                of_head = fields.setdefault(key, {})
                of_head[f"{side}pattern"] = pattern[place, columns].tolist()
    note = f"Patterns: only for the {most} nodes with the largest |attribution|."
    return DetailFields(fields, (note,) if len(strongest) < len(heads) else ())


def token_fields(shown: ShownRuns, heads: pd.DataFrame, k: int) -> DetailFields:
    """Return the tokens that each node promotes, and those that activate each neuron most.

    With a corrupted run, a node's output is its clean minus its corrupted output.
    """
    model, heads = shown.model, heads[heads["kind"] != "router"]  # routers write nothing
    z, *corrupted = (
        {hook: run.hooked[hook] for hook, _ in (_hooks(model, head) for head in _layers(heads))}
        for run in shown.runs
    )
    if corrupted:
        z = {hook: output - corrupted[0][hook] for hook, output in z.items()}
    here = list(map(shown.position, heads["position"]))
    heads = heads[[place is not None for place in here]]
    places = (place for place in here if place is not None)
    nodes = [(name, shown.prompt, place) for name, place in zip(heads["name"], places, strict=True)]
    try:
        effects = DirectEffects(model)
        raised = effects.promoted_tokens(z, nodes, k)
        neurons = heads.loc[heads["kind"].isin(NEURON_KINDS), "name"].unique().tolist()
        read = effects.read_tokens(neurons, k) if neurons else []
    except InputError as error:
        more = "pass top_tokens=0 to draw the graph without its nodes' tokens"
        raise InputError([*error.reasons, more], "there are no top tokens of this model") from error
    tokens = {token for top in (*raised, *read) for token, _ in top}
    texts = {token: token_text(model, token) for token in tokens}
    fields: dict[str, dict[str, Any]] = {}
    for field, keys, tops in (("writes", heads["id"], raised), ("reads", neurons, read)):
        for key, top in zip(keys, tops, strict=True):
            fields.setdefault(key, {})[field] = [(texts[token], amount) for token, amount in top]
    return DetailFields(fields)


@one_thread_per_model
@full_precision()
def _layers(heads: pd.DataFrame) -> list[HeadName]:
    """Return one head for each pair (layer, kind of head) in the graph."""
    names = map(HeadName.parse, heads["name"])
    return list({(head.layer, head.kind): head for head in names}.values())


def _hooks(model: Any, head: HeadName) -> tuple[str, str]:
    host = host_of(model)
    z, pattern = (host.hook_name(head.layer, head.kind, point) for point in ("z", "pattern"))
    return z, pattern
