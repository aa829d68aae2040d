"""An attribution graph as a page: nodes, edges, and the patterns and top tokens of each node.

A page of 1,000 nodes stays under 3 MB: it holds the edges of largest |weight| into each node, with
the others added up in "rest" as `CircuitGraph.prune_edges` does, and the patterns of the nodes of
largest |attribution|. Where either bound cuts, the page says so; and always, how much of the
attribution the graph's nodes have.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.vocabulary import DirectEffects, TokenScores
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.numerics import full_precision, is_count
from attn_only_lens.runs.inputs import reasons_not_to_run
from attn_only_lens.runs.prompts import Prompts, single_prompts
from attn_only_lens.runs.recording import Recording, record
from attn_only_lens.runs.token_texts import token_text, token_texts
from attn_only_lens.tolerances import LOGIT_TOLERANCE
from attn_only_lens.viz.checks import refuse
from attn_only_lens.viz.circuit import circuit_page, node_patterns
from attn_only_lens.viz.circuit_data import NodeDetails
from attn_only_lens.viz.page import Page

_EDGES = 25_000
_WEIGHTS = 100_000  # of patterns, to three decimals
_FEWEST = 8  # edges into a node, however many nodes there are


def circuit_view(
    graph: CircuitGraph,
    model: Any = None,
    prompts: Prompts | None = None,
    *,
    prompt: int = 0,
    mask: Tensor | None = None,
    top_tokens: int = 10,
) -> Page:
    """Draw an attribution graph as one interactive page, layers upward and tokens across.

    Args:
        graph: of `circuits.attribution_graph`, pruned or not, or read from a file.
        model: the graph's model, for patterns and top tokens; without it, nodes and edges alone.
        prompts: the graph's prompts, as given to `attribution_graph`; needed with a model.
        prompt: index of the prompt whose tokens and patterns are shown.
        mask: as given to `attribution_graph`.
        top_tokens: of each node; 0 for none. Amounts are standard deviations above the mean over
            the vocabulary.

    Returns:
        The page. A click on a node shows its pattern, what it reads and writes, and its tokens.

    Raises:
        InputError: model and prompts are not those of the graph, or one comes without the other.
        InputError: the model's norms or embedding are not known, so that there are no top tokens.
        InputError: prompts that do not fit the model.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained, viz
        >>> model, prompt = convert(pretrained.modular_addition()), torch.tensor([3, 4, 113])
        >>> metric = p.logit_diff(correct=7, wrong=8)
        >>> graph = circuits.attribution_graph(model, prompt, metric, top=20)
        >>> len(viz.circuit_view(graph, model, prompt)) < 3_000_000
        True
    """
    reasons = []
    if not is_count(prompt, 0, len(graph.tokens) - 1):
        reasons.append(f"got prompt={prompt!r}; the graph is of {len(graph.tokens)} prompts")
    if not is_count(top_tokens):
        reasons.append(f"got top_tokens={top_tokens!r}; expected 0 or more")
    if (model is None) != (prompts is None):
        given = "prompts" if model is None else "a model"
        reasons.append(f"got {given} alone; expected a model and prompts, or neither")
    refuse(*reasons)
    notes = [
        f"Nodes: {len(graph.heads):,} of {graph.n_heads:,} heads and neurons, with "
        f"{graph.mass:.0%} of Σ |attribution|; the others add up in rest."
    ]
    details: dict[str, NodeDetails] = {}
    if prompts is not None:
        run = _record_run(graph, model, prompts, mask)
        heads = graph.heads
        details = _patterns(run, model, heads, prompt, notes)
        if top_tokens:
            details = _with_tokens(details, run, model, heads, prompt, top_tokens)
    drawn = _fewer_edges(graph, notes)
    meta = {
        "tokens": list(graph.tokens[prompt]),
        "metric": graph.metric,
        "value": graph.value,
        "model": graph.model or "model",
        "notes": notes,
    }
    return circuit_page(drawn.nodes, drawn.edges, meta, details)


def _fewer_edges(graph: CircuitGraph, notes: list[str]) -> CircuitGraph:
    into = graph.edges.groupby(["target", "kind"], observed=True).ngroups
    top = max(_FEWEST, _EDGES // max(into, 1))
    fewer = graph.prune_edges(top=top)
    if len(fewer.edges) < len(graph.edges):
        notes.append(
            f"Edges: the {top} strongest into each node, of each kind; the others add up in rest."
        )
    return fewer


@full_precision()
def _record_run(
    graph: CircuitGraph, model: Any, prompts: Prompts, mask: Tensor | None
) -> Recording:
    """Record the graph's run, with the patterns and z of its nodes.

    Raises:
        InputError: the model or its prompts are not those of the graph.
    """
    refuse(*reasons_not_to_run(model), *reasons_without_heads(model))
    pair = single_prompts(model, prompts, mask)
    if tuple(tuple(token_texts(model, row)) for row in pair.clean.tolist()) != graph.tokens:
        refuse(f"got prompts other than the graph's, {_listed(graph.tokens)}")
    heads = graph.heads
    names = {(head.layer, head.kind): head for head in map(HeadName.parse, heads["name"])}
    hooks = [hook for head in names.values() for hook in _hooks(model, head)]
    run = record(model, pair.clean, pair.mask, names=hooks)
    expected = heads["value"].to_numpy()
    values = np.array([_value(run, model, name, pos) for name, pos in _names_and_positions(heads)])
    # Another model, not rounding: many bridged norms compute in float32 in whatever dtype.
    allowed = max(1e-3, LOGIT_TOLERANCE[run.logits.dtype]) * abs(expected).max(initial=0)
    apart = np.flatnonzero(~(abs(expected - values) <= allowed))
    for row in apart[:1]:
        refuse(
            f"got a model in which {heads['id'].iloc[row]} is {values[row]:.4g}; in the graph it "
            f"is {expected[row]:.4g}: the graph is of another model"
        )
    return run


def _hooks(model: Any, head: HeadName) -> tuple[str, str]:
    host = host_of(model)
    z, pattern = (host.hook_name(head.layer, head.kind, point) for point in ("z", "pattern"))
    return z, pattern


def _names_and_positions(heads: pd.DataFrame) -> list[tuple[str, int]]:
    return [(name, int(pos)) for name, pos in heads[["name", "position"]].to_numpy()]


def _value(run: Recording, model: Any, name: str, pos: int) -> float:
    """Return the value of a node, as `CircuitGraph.nodes` defines it."""
    head = HeadName.parse(name)
    shared = host_of(model).neurons[head.layer].heads_per_neuron
    z = run.hooked[_hooks(model, head)[0]][:, pos, head.heads(shared)].flatten(1)
    return float((z.norm(dim=-1) if head.kind == "attention" else z.sum(-1)).mean())


def _patterns(
    run: Recording, model: Any, heads: pd.DataFrame, prompt: int, notes: list[str]
) -> dict[str, NodeDetails]:
    most = _WEIGHTS // run.tokens.shape[1]
    strongest = heads.loc[heads["attribution"].abs().nlargest(most).index]
    if len(strongest) < len(heads):
        notes.append(f"Patterns: of the {most} nodes of largest |attribution|.")
    cache = ActivationCache(run.hooked, model)
    return {
        key: NodeDetails(pattern=[round(weight, 3) for weight in each.pattern or ()])
        for key, each in node_patterns(cache, strongest, prompt=prompt).items()
    }


def _with_tokens(
    details: dict[str, NodeDetails],
    run: Recording,
    model: Any,
    heads: pd.DataFrame,
    prompt: int,
    k: int,
) -> dict[str, NodeDetails]:
    """Add the tokens that each node raises, by id, and that each neuron reads, by name."""
    try:
        effects = DirectEffects(model)
        raised = effects.promoted_tokens(run.hooked, _names_and_positions(heads), k, prompt=prompt)
        neurons = heads.loc[heads["kind"] == "neuron", "name"].unique().tolist()
        read = effects.read_tokens(neurons, k) if neurons else []
    except InputError as error:
        more = "top_tokens=0 draws the graph without its nodes' tokens"
        raise InputError([*error.reasons, more], "there are no top tokens of this model") from error
    ids = sorted({token for top in (*raised, *read) for token, _ in top})
    texts = {each: token_text(model, each) for each in ids}
    found = dict(details)

    def with_texts(top: TokenScores) -> list[tuple[str, float]]:
        return [(texts[token], amount) for token, amount in top]

    for key, top in zip(heads["id"], raised, strict=True):
        found[key] = replace(found.get(key, NodeDetails()), top_tokens=with_texts(top))
    for key, top in zip(neurons, read, strict=True):
        found[key] = replace(found.get(key, NodeDetails()), read_tokens=with_texts(top))
    return found


def _listed(tokens: Sequence[Sequence[str]]) -> str:
    return "; ".join("|".join(row[:12]) + ("|…" if len(row) > 12 else "") for row in tokens[:3])
