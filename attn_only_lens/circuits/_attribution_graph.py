"""The attribution graph of a run: nodes chosen by attribution, then the edges between them.

One pass gives every head and neuron at every position its attribution (`linearised.py`). The
largest are chosen; each of them, and the metric, then takes one backward pass, whose gradient at
every head there is, chosen or not, gives its edges (`edges.py`). Edges from heads that are not
chosen are summed into one from "rest": sums hold, whatever is chosen. So K nodes cost K backward
passes, done a block at a time, and the memory of one block and of K² / 2 edges.

The frames of an attribution graph: the linear model of a run, at the nodes that were chosen.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, CircuitGraph, chosen
from attn_only_lens.circuits.linear_model import (
    Inflow,
    Linearised,
    Sublayer,
    linearised,
    metric_inflow,
    pattern_inflow,
    value_inflow,
)
from attn_only_lens.errors import CircuitError
from attn_only_lens.heads import host_of, reasons_without_heads
from attn_only_lens.numerics import full_precision
from attn_only_lens.runs.metrics import AnyMetric, as_metric, bind, require_differentiable
from attn_only_lens.runs.paired_runs import reasons_against
from attn_only_lens.runs.prompts import PromptPair, Prompts, unpaired
from attn_only_lens.runs.recording import record
from attn_only_lens.runs.token_texts import token_texts

__all__ = ["Drawn", "attribution_graph", "attributions"]


def attributions(at: Sublayer) -> Tensor:
    """Of each node, summed over prompts: [pos, node]."""
    return at.by_node((at.gradient * at.cut.detach()).sum(0))


class Drawn:
    """The linear model as frames: ids of the chosen nodes, and where they are among all."""

    def __init__(
        self, linear: Linearised, pair: PromptPair, picked: list[list[tuple[int, int]]]
    ) -> None:
        self._linear = linear
        self._picked = picked
        self._real = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._sources = [f"embed@{pos}" for pos in self._real] + [
            f"{at.name(node)}@{pos}"
            for at, here in zip(linear.sublayers, picked, strict=True)
            for pos, node in here
        ]

    def edges(self, patterns: bool) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Edges from chosen nodes, "bias" and "rest" into chosen nodes and the metric.

        Args:
            patterns: whether to find edges of kinds "q" and "k", too.

        Returns:
            A row for each that is not 0, and what each prompt has of its weight.
        """
        linear = self._linear
        found = [self._into(["metric"], metric_inflow(linear), "value")]
        for at, targets in zip(linear.sublayers, self._picked, strict=True):
            for kind in EDGE_KINDS if patterns else ("value",):
                blocks = (
                    value_inflow(linear, at, targets)
                    if kind == "value"
                    else pattern_inflow(linear, at, kind, targets)
                )
                for block in blocks:
                    ids = [f"{at.name(node)}@{pos}" for pos, node in block.targets]
                    found.append(self._into(ids, block, kind))
        frames, weights = zip(*found, strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _into(
        self, ids: list[str], inflow: Inflow, kind: str
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        pieces, rest = [inflow.embedding[:, :, self._real]], torch.zeros_like(inflow.constant)
        rest = rest + inflow.embedding.sum(2) - pieces[0].sum(2)  # of padding: none
        for found, here in zip(inflow.sublayers, self._picked, strict=True):
            apart = torch.ones(found.shape[2:], dtype=torch.bool, device=found.device)
            pos, node = ([each[i] for each in here] for i in (0, 1))
            apart[pos, node] = False
            rest = rest + (found * apart).flatten(2).sum(2)
            pieces.append(found[:, :, pos, node])
        sources = [*self._sources, "rest", "bias"]
        each = torch.cat([*pieces, rest[..., None], inflow.constant[..., None]], dim=2)
        weights = each.sum(0)
        row, column = weights.nonzero(as_tuple=True)
        frame = pd.DataFrame(
            {
                "source": np.array(sources, dtype=object)[column.cpu().numpy()],
                "target": np.array(ids, dtype=object)[row.cpu().numpy()],
                "kind": kind,
                "weight": weights[row, column].cpu().double().numpy(),
            }
        )
        return frame, each[:, row, column].T.cpu().double().numpy()

    def nodes(self, value: float, rest: float) -> pd.DataFrame:
        """The nodes: embedding, heads by layer, and the others."""
        linear = self._linear
        x = linear.embedding.detach()
        of_embedding = (linear.embedding_gradient * x).sum(dim=(0, -1))
        rows: list[tuple[object, ...]] = [
            (f"embed@{pos}", "embed", None, "embed", pos, length, np.nan, float(of_embedding[pos]))
            for pos in self._real
            for length in [float(x[:, pos].norm(dim=-1).mean())]
        ]
        bias = float((linear.weights * linear.logits_constant).sum())
        for at, here in zip(linear.sublayers, self._picked, strict=True):
            bias += float((at.gradient * at.constant).sum())
            each = attributions(at)
            for pos, node in here:
                name = at.name(node)
                about = at.kind, at.layer, name, pos, *_said(at, pos, node), float(each[pos, node])
                rows.append((f"{name}@{pos}", *about))
        rows += [
            ("bias", "bias", None, "bias", None, 0.0, np.nan, bias),
            ("rest", "rest", None, "rest", None, 0.0, np.nan, rest),
            ("offset", "offset", None, "offset", None, 0.0, np.nan, linear.offset),
            ("metric", "metric", None, "metric", None, value, np.nan, value),
        ]
        columns = ["id", "kind", "layer", "name", "position", "value", "gradient", "attribution"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"layer": "Int64", "position": "Int64"})


def _said(at: Sublayer, pos: int, node: int) -> tuple[float, float]:
    """The value of a node, and the gradient there where it is one number."""
    heads = slice(node * at.width, (node + 1) * at.width)
    z = at.cut.detach()[:, pos, heads].flatten(1)
    if at.kind == "attention":
        return float(z.norm(dim=-1).mean()), float("nan")
    gradient = at.gradient[:, pos, heads].flatten()
    return float(z.sum(-1).mean()), float(gradient) if len(gradient) == 1 else float("nan")


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
        n_layers=host_of(model).n_layers,
        n_heads=len(sizes),
        mass=float(sizes[index].sum() / total) if total else 1.0,
    )


def _check(model: Any, metric: AnyMetric) -> None:
    reasons = [*reasons_against(model), *reasons_without_heads(model)]
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
