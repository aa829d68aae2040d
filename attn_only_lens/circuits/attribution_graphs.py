"""The attribution graph of a run: nodes chosen by attribution, then the edges between them.

One pass gives every head and neuron at every position its attribution (`linearised.py`). The
largest are chosen; each of them, and the metric, then takes one backward pass, whose gradient at
every head there is, chosen or not, gives its edges (`edges.py`). Edges from heads that are not
chosen are summed into one from "rest": sums hold, whatever is chosen. So K nodes cost K backward
passes, done a block at a time, and the memory of one block and of K² / 2 edges.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.circuits.drawing import Drawn, attributions
from attn_only_lens.circuits.graph import EDGE_COLUMNS, CircuitGraph, chosen
from attn_only_lens.circuits.linearised import Linearised, linearised
from attn_only_lens.errors import CircuitError
from attn_only_lens.heads import layout_of, neuron_heads
from attn_only_lens.numerics import full_precision
from attn_only_lens.patching.bound import require_differentiable
from attn_only_lens.patching.custom_metric import AnyMetric, as_metric
from attn_only_lens.patching.metrics import bind
from attn_only_lens.patching.pairs import reasons_against
from attn_only_lens.patching.prompts import Prompts, unpaired
from attn_only_lens.patching.record import record
from attn_only_lens.texts import token_texts

__all__ = ["attribution_graph"]

_TOP = 300


@full_precision()
def attribution_graph(
    model: Any,
    prompts: Prompts,
    metric: AnyMetric,
    *,
    top: int | None = None,
    mass: float | None = None,
    patterns: bool = True,
    mask: Tensor | None = None,
) -> CircuitGraph:
    """What every part of a model contributes to a metric, and by way of which others.

    Exact for the model whose patterns and norm scales are held at what they are in this run: edges
    of kind "value" into a node add up to its attribution, and those into the metric to the metric.
    It says nothing of how patterns would change; edges of kinds "q" and "k" do, to first order.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
        prompts: a text, texts, or tokens [batch, pos]. Contributions of several prompts at one
            position are added up.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits
            [batch, pos, d_vocab]; not `kl`, whose gradient at the run itself is 0.
        top: how many heads and neurons to make nodes of; 300 if neither this nor mass is given.
        mass: or the share of their Σ |attribution| that nodes must have; 1 for all of them.
        patterns: whether to find edges of kinds "q" and "k", too.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.

    Returns:
        The graph.

    Raises:
        CircuitError: top or mass that make no sense.
        PatchingError: with every reason: prompts or a metric that do not fit.
        UnsupportedModelError: the model is not linear when frozen.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> graph = circuits.attribution_graph(
        ...     model, torch.tensor([3, 4, 113]), p.logit_diff(correct=7, wrong=8), top=20)
        >>> sorted(set(graph.edges["kind"]))  # relu: no query of a neuron moves its pattern
        ['k', 'q', 'value']
    """
    _check(model, metric)
    top = _TOP if top is None and mass is None else top
    pair = unpaired(model, prompts, mask)
    run = record(model, pair.clean, pair.mask)
    bound = bind(metric, model, pair)
    require_differentiable(bound, run.logits)
    value = bound.of(run.logits)
    linear = linearised(model, run, bound)
    every = torch.cat([attributions(at).flatten() for at in linear.sublayers]).cpu().double()
    sizes = np.abs(every.numpy())
    index = chosen(sizes, top=top, mass=mass)
    picked = _picked(linear, index)
    drawn = Drawn(linear, pair, picked)
    edges, _ = drawn.edges(patterns)
    if linear.offset:
        offset = pd.DataFrame([["offset", "metric", "value", linear.offset]], columns=EDGE_COLUMNS)
        edges = pd.concat([edges, offset], ignore_index=True)
    total = sizes.sum()
    nodes = drawn.nodes(value, float(every.sum() - every[torch.from_numpy(index)].sum()))
    return CircuitGraph(
        nodes,
        edges,
        tokens=tuple(tuple(token_texts(model, row)) for row in pair.clean.tolist()),
        metric=bound.name,
        value=value,
        model=str(getattr(model.cfg, "model_name", "")),
        n_layers=len(neuron_heads(model)),
        n_heads=len(sizes),
        mass=float(sizes[index].sum() / total) if total else 1.0,
    )


def _check(model: Any, metric: AnyMetric) -> None:
    reasons = reasons_against(model)
    if layout_of(model) is None:
        reasons.append(
            f"the model, a {type(model).__name__}, has no neuron-heads: call "
            "attn_only_lens.convert(model), or attn_only_lens.expose_neuron_heads(model), first"
        )
    if as_metric(metric).needs_reference:
        reasons.append(
            f"{as_metric(metric).name} compares with another run, and there is one run here; "
            "expected a metric of its logits alone"
        )
    if torch.is_inference_mode_enabled():
        reasons.append("no gradient is taken in torch.inference_mode(); torch.no_grad() will do")
    if reasons:
        raise CircuitError(reasons, "there is no attribution graph of this")


def _picked(linear: Linearised, index: Any) -> list[list[tuple[int, int]]]:
    """The chosen (position, node) of each sublayer."""
    n_pos = linear.embedding.shape[1]
    found, first = [], 0
    for at in linear.sublayers:
        here = index[(index >= first) & (index < first + n_pos * at.n_nodes)] - first
        found.append([(int(i) // at.n_nodes, int(i) % at.n_nodes) for i in here])
        first += n_pos * at.n_nodes
    return found
