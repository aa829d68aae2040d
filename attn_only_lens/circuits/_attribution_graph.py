"""The attribution graph of a run: nodes chosen by attribution, then the edges between them.

One run gives the attribution of every head and neuron at every position. The largest become nodes,
and products of what they read and write give the edges (`linear_graph.py`). Edges from heads that
are not chosen are summed into one edge from "rest", so sums hold for any choice.

A neuron and a query read their own position alone; the values and keys of attention heads come from
every position. So the number of edges into a target is at most the number of earlier chosen nodes,
at the same position or at any. It is counted before edges are computed, and refused beyond a limit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.arguments import is_count
from attn_only_lens.circuits.graph import EDGE_COLUMNS, CircuitGraph, select_largest
from attn_only_lens.circuits.linear_graph import AttributedRun, LinearGraph, Node, attribute
from attn_only_lens.engine.in_float32 import in_float32
from attn_only_lens.engine.inputs import reasons_not_to_run
from attn_only_lens.engine.metrics import AnyMetric, no_gradient_reasons, one_run_reasons
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.token_texts import token_texts
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of, reasons_without_heads
from attn_only_lens.precision import full_precision

_TOP = 300
_BYTES = 40  # of an edge: source, target, kind, weight, and its contribution for one prompt


@in_float32
@full_precision()
def attribution_graph(
    model: Any,
    prompts: Prompts,
    metric: AnyMetric,
    *,
    top: int | None = None,
    mass: float | None = None,
    patterns: bool = True,
    max_edges: int = 10_000_000,
    mask: Tensor | None = None,
) -> CircuitGraph:
    """Return what each head and neuron contributes to a metric, and through which others.

    Exact for the model with patterns and norm scales held at their values in this run: edges of
    kind "value" into a node add up to its attribution, and those into the metric to the metric.
    Edges of kinds "q" and "k" say how patterns would change, to first order.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
            A model in half precision is run in float32 during the call, with the same weights.
        prompts: a text, texts, or tokens [batch, pos]. Contributions of several prompts at one
            position are summed.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits
            [batch, pos, d_vocab]; not `kl`, whose gradient at the run itself is 0.
        top: how many heads and neurons become nodes; 300 if neither this nor mass is given.
        mass: or the share of Σ |attribution| that nodes must have; 1 for all of them.
        patterns: whether to include edges of kinds "q" and "k".
        max_edges: the largest number of edges; an upper bound is counted before any is computed.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.

    Returns:
        The graph.

    Raises:
        InputError: with every reason: invalid top, mass or max_edges; prompts or a metric that do
            not fit; unknown norms or matrices.
        InputError: too many edges, with their memory and the largest top that stays below.
        UnsupportedModelError: the model is not linear when patterns are held.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> graph = circuits.attribution_graph(
        ...     model, torch.tensor([3, 4, 113]), p.logit_diff(correct=7, wrong=8), top=20)
        >>> sorted(set(graph.edges["kind"]))  # relu: no query of a neuron moves its pattern
        ['k', 'q', 'value']
    """
    reasons = [*reasons_not_to_run(model), *reasons_without_heads(model)]
    if not is_count(max_edges, 1):
        reasons.append(f"got max_edges={max_edges!r}; expected 1 or more")
    reasons += one_run_reasons(metric) + no_gradient_reasons()
    InputError.raise_if(reasons, "no attribution graph can be made")
    top = _TOP if top is None and mass is None else top
    pair = single_prompts(model, prompts, mask)
    run = attribute(model, pair, metric, patterns)
    attributions = [run.attributions(i).flatten().cpu().double() for i in range(len(run.gradients))]
    every = torch.cat(attributions).numpy()
    sizes = np.abs(every)
    index = select_largest(sizes, top=top, mass=mass)
    _require_affordable(run, sizes, index, max_edges)
    graph = LinearGraph(run, pair, _by_sublayer(run, index))
    edges, _ = graph.edges()
    if run.offset:
        offset = pd.DataFrame([["offset", "metric", "value", run.offset]], columns=EDGE_COLUMNS)
        edges = pd.concat([edges, offset], ignore_index=True)
    total = sizes.sum()
    return CircuitGraph(
        graph.nodes(float(np.delete(every, index).sum())),
        edges,
        tokens=tuple(tuple(token_texts(model, row)) for row in pair.clean.tolist()),
        metric=run.metric,
        value=run.value,
        model=str(getattr(model.cfg, "model_name", "")),
        n_layers=host_of(model).n_layers,
        n_heads=len(sizes),
        mass=float(sizes[index].sum() / total) if total else 1.0,
    )


def _by_sublayer(run: AttributedRun, index: npt.NDArray[np.int64]) -> list[list[Node]]:
    """Return the (position, node) of the chosen nodes of each sublayer."""
    chosen, first = [], 0
    for gradients in run.gradients:
        n_pos, n_nodes = gradients.shape[1:3]
        here = index[(index >= first) & (index < first + n_pos * n_nodes)] - first
        chosen.append([(i // n_nodes, i % n_nodes) for i in here.tolist()])
        first += n_pos * n_nodes
    return chosen


def _count_edges(run: AttributedRun, chosen: Sequence[Sequence[Node]]) -> int:
    """Return how many edges there are at most."""
    n_pos = run.linear.run.embedding.shape[1]
    before, n_edges = np.zeros(n_pos, dtype=np.int64), 0
    for index, nodes in enumerate(chosen):
        here = np.bincount(np.array([pos for pos, _ in nodes], dtype=np.int64), minlength=n_pos)
        is_neuron = run.linear.sublayers[index].writes.kind == "neuron"
        for kind in run.kinds(index):
            reads_own = is_neuron or kind == "q"
            # Also from the embedding, "rest" and "bias".
            sources = before + 3 if reads_own else before.sum() + n_pos + 2
            n_edges += int((here * sources).sum())
        before += here
    return n_edges + int(before.sum()) + n_pos + 2


def _require_affordable(
    run: AttributedRun,
    sizes: npt.NDArray[np.float64],
    index: npt.NDArray[np.int64],
    max_edges: int,
) -> None:
    """Refuse more edges than the limit, with their memory and the largest top that is allowed."""
    n_edges = _count_edges(run, _by_sublayer(run, index))
    if n_edges <= max_edges:
        return

    def largest(top: int) -> npt.NDArray[np.int64]:
        return select_largest(sizes, top=top) if top else np.empty(0, dtype=np.int64)

    def fits(top: int) -> bool:
        return _count_edges(run, _by_sublayer(run, largest(top))) <= max_edges

    few = bisect_left(range(1, len(index)), True, key=lambda top: not fits(top))
    n_bytes = n_edges * (_BYTES - 8 + 8 * len(run.linear.run.embedding))
    share, left = (sizes[rows].sum() / sizes.sum() for rows in (index, largest(few)))
    met_by = f"top={few:,} ({left:.0%} of the mass)" if few else "not even top=1"
    reason = (
        f"{len(index):,} nodes ({share:.0%} of the mass) have up to {n_edges:,} edges, "
        f"{n_bytes / 2**30:.1f} GiB; expected up to max_edges={max_edges:,}, which {met_by} meets: "
        "take fewer nodes, pass patterns=False, or raise max_edges"
    )
    raise InputError([reason], "this graph is too large")
