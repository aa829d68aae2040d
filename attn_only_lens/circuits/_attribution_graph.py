"""The attribution graph of a run: nodes chosen by attribution, then the edges between them.

One pass gives the attribution of every head and neuron at every position (`linear_model.py`). The
largest become nodes; each of them, and the metric, then takes one backward pass, whose gradient at
all heads, chosen or not, gives its edges. Edges from heads that are not chosen are summed into one
from "rest", so that sums hold for any choice.

K nodes cost up to 3 K backward passes, one for each kind of edge, a block at a time, and the
memory of one block and of all edges. A neuron reads its own token alone, as queries do; the values
and keys of attention heads come from every token. So there are at most as many edges as chosen
nodes of earlier sublayers, at the same token or at any, summed over targets and kinds: counted
before any is computed, and refused beyond a limit.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.graph import (
    EDGE_COLUMNS,
    EDGE_KINDS,
    NODE_COLUMNS,
    CircuitGraph,
    select_largest,
)
from attn_only_lens.circuits.linear_model import (
    Inflow,
    LinearModel,
    Sublayer,
    inflows,
    linearize,
    metric_inflow,
)
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of, reasons_without_heads
from attn_only_lens.numerics import full_precision, is_count
from attn_only_lens.runs.inputs import reasons_not_to_run
from attn_only_lens.runs.metrics import AnyMetric, as_metric, bind, require_differentiable
from attn_only_lens.runs.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.runs.recording import record
from attn_only_lens.runs.token_texts import token_texts


class LinearGraph:
    """Nodes and edges of a linear model as frames, for chosen nodes.

    Args:
        linear: the linear model.
        pair: its prompts.
        chosen: (position, node) of the chosen nodes of each sublayer.
    """

    def __init__(
        self, linear: LinearModel, pair: PromptPair, chosen: list[list[tuple[int, int]]]
    ) -> None:
        self._linear = linear
        self._chosen = chosen
        self._real = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._sources = [f"embed@{pos}" for pos in self._real] + [
            f"{at.name(node)}@{pos}"
            for at, here in zip(linear.sublayers, chosen, strict=True)
            for pos, node in here
        ]

    def edges(
        self, patterns: bool, on_done: Callable[[int], object] = lambda n: None
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Return edges from chosen nodes, "bias" and "rest" into chosen nodes and the metric.

        Args:
            patterns: whether to include edges of kinds "q" and "k".
            on_done: called with the number of nodes that are done.

        Returns:
            A row for each edge that is not 0, and the contribution of each prompt to its weight.
        """
        linear = self._linear
        found = [self._edges_into(["metric"], metric_inflow(linear), "value")]
        for at, targets in zip(linear.sublayers, self._chosen, strict=True):
            for kind in EDGE_KINDS if patterns else ("value",):
                for inflow in inflows(linear, at, kind, targets):
                    ids = [f"{at.name(node)}@{pos}" for pos, node in inflow.targets]
                    found.append(self._edges_into(ids, inflow, kind))
            on_done(len(targets))
        frames, weights = zip(*found, strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _edges_into(
        self, ids: list[str], inflow: Inflow, kind: str
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        kept = [inflow.embedding[:, :, self._real]]
        rest = inflow.embedding.sum(2) - kept[0].sum(2)  # from padding: none
        for contributions, here in zip(inflow.sublayers, self._chosen, strict=True):
            others = torch.ones(
                contributions.shape[2:], dtype=torch.bool, device=contributions.device
            )
            pos, node = ([each[i] for each in here] for i in (0, 1))
            others[pos, node] = False
            rest = rest + (contributions * others).flatten(2).sum(2)
            kept.append(contributions[:, :, pos, node])
        sources = [*self._sources, "rest", "bias"]
        by_prompt = torch.cat([*kept, rest[..., None], inflow.constant[..., None]], dim=2)
        weights = by_prompt.sum(0)
        row, column = weights.nonzero(as_tuple=True)
        frame = pd.DataFrame(
            {
                "source": np.array(sources, dtype=object)[column.cpu().numpy()],
                "target": np.array(ids, dtype=object)[row.cpu().numpy()],
                "kind": kind,
                "weight": weights[row, column].cpu().double().numpy(),
            }
        )
        return frame, by_prompt[:, row, column].T.cpu().double().numpy()

    def nodes(self, value: float, rest: float) -> pd.DataFrame:
        """Return the nodes: embedding, heads by layer, and those that are no heads."""
        linear = self._linear
        x = linear.embedding.detach()
        lengths = x.norm(dim=-1).mean(0)
        attributions = (linear.embedding_gradient * x).sum(dim=(0, -1))
        rows: list[tuple[object, ...]] = []
        for pos in self._real:
            numbers = float(lengths[pos]), np.nan, float(attributions[pos])
            rows.append((f"embed@{pos}", "embed", None, "embed", pos, *numbers))
        bias = float((linear.weights * linear.logits_constant).sum())
        for at, here in zip(linear.sublayers, self._chosen, strict=True):
            bias += float((at.gradient * at.constant).sum())
            of_nodes = at.attributions()
            for pos, node in here:
                name = at.name(node)
                numbers = *_value_and_gradient(at, pos, node), float(of_nodes[pos, node])
                rows.append((f"{name}@{pos}", at.kind, at.layer, name, pos, *numbers))
        single = {"bias": (0.0, bias), "rest": (0.0, rest), "offset": (0.0, linear.offset)}
        for name, (size, attribution) in (single | {"metric": (value, value)}).items():
            rows.append((name, name, None, name, None, size, np.nan, attribution))
        frame = pd.DataFrame(rows, columns=list(NODE_COLUMNS))
        return frame.astype({"layer": "Int64", "position": "Int64"})


def _value_and_gradient(at: Sublayer, pos: int, node: int) -> tuple[float, float]:
    """The value of a node, and the gradient there if it is one number."""
    z = at.cut.detach()[:, pos, at.heads(node)].flatten(1)
    if at.kind == "attention":
        return float(z.norm(dim=-1).mean()), float("nan")
    gradient = at.gradient[:, pos, at.heads(node)].flatten()
    return float(z.sum(-1).mean()), float(gradient) if len(gradient) == 1 else float("nan")


_TOP = 300
_BYTES = 40  # of an edge: source, target, kind, its weight and its contribution for one prompt


def _edge_kinds(at: Sublayer, patterns: bool) -> list[str]:
    return ["value", *(at.queries if patterns and at.pattern.requires_grad else ())]


def _count_edges(
    linear: LinearModel, chosen: list[list[tuple[int, int]]], patterns: bool
) -> tuple[int, int]:
    """Return how many backward passes the edges take, and how many edges there are at most."""
    n_pos = linear.embedding.shape[1]
    before = np.zeros(n_pos, dtype=np.int64)
    passes, n_edges = 1, 0
    for at, targets in zip(linear.sublayers, chosen, strict=True):
        here = np.bincount(np.array([pos for pos, _ in targets], dtype=np.int64), minlength=n_pos)
        for kind in _edge_kinds(at, patterns):
            own = at.kind == "neuron" or kind == "q"
            # And from the embedding, "rest" and "bias".
            n_edges += int((here * (before + 3 if own else before.sum() + n_pos + 2)).sum())
            passes += len(targets)
        before += here
    return passes, n_edges + int(before.sum()) + n_pos + 2


def _require_affordable(
    linear: LinearModel,
    sizes: npt.NDArray[np.float64],
    index: npt.NDArray[np.int64],
    patterns: bool,
    max_edges: int,
) -> None:
    """Refuse more edges than the limit, and say what they would cost."""

    def cost(index: npt.NDArray[np.int64]) -> tuple[int, int]:
        return _count_edges(linear, _by_sublayer(linear, index), patterns)

    passes, n_edges = cost(index)
    if n_edges <= max_edges:
        return
    few, many = 0, len(index)
    while many - few > 1:
        middle = (few + many) // 2
        fits = cost(select_largest(sizes, top=middle))[1] <= max_edges
        few, many = (middle, many) if fits else (few, middle)
    started = time.perf_counter()
    metric_inflow(linear)
    seconds = (time.perf_counter() - started) * passes
    n_bytes = n_edges * (_BYTES - 8 + 8 * linear.embedding.shape[0])
    share, left = (sizes[each].sum() / sizes.sum() for each in (index, _largest(sizes, few)))
    met_by = f"top={few:,} ({left:.0%} of the mass)" if few else "not even top=1"
    raise InputError(
        [
            f"{len(index):,} nodes ({share:.0%} of the mass) have up to {n_edges:,} edges of "
            f"{n_bytes / 2**30:.1f} GiB, by {passes:,} backward passes: {seconds / 60:.0f} minutes "
            f"if each takes as long as the metric's. Expected up to max_edges={max_edges:,}, which "
            f"{met_by} meets: take fewer, patterns=False, or raise max_edges"
        ],
        "this graph is too large",
    )


def _largest(sizes: npt.NDArray[np.float64], top: int) -> npt.NDArray[np.int64]:
    return select_largest(sizes, top=top) if top else np.empty(0, dtype=np.int64)


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

    Exact for the model with patterns and norm scales frozen at their values in this run: edges of
    kind "value" into a node add up to its attribution, and those into the metric to the metric.
    Edges of kinds "q" and "k" tell how patterns would change, to first order.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
        prompts: a text, texts, or tokens [batch, pos]. Contributions of several prompts at one
            position are summed.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits
            [batch, pos, d_vocab]; not `kl`, whose gradient at the run itself is 0.
        top: how many heads and neurons become nodes; 300 if neither this nor mass is given.
        mass: or the share of Σ |attribution| that nodes must have; 1 for all of them.
        patterns: whether to include edges of kinds "q" and "k".
        max_edges: the most that there may be: they are counted, from above, before any is computed.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.

    Returns:
        The graph.

    Raises:
        InputError: invalid top, mass or max_edges; more edges than that, with what they would cost
            in memory and time, and the top that stays below.
        InputError: with every reason: prompts or a metric that do not fit.
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
    _check(model, metric, max_edges)
    top = _TOP if top is None and mass is None else top
    pair = single_prompts(model, prompts, mask)
    run = record(model, pair.clean, pair.mask)
    bound = bind(metric, model, pair)
    require_differentiable(bound, run.logits)
    value = bound.of(run.logits)
    linear = linearize(model, run, bound)
    device = pair.clean.device
    each = [at.attributions().flatten().to(device) for at in linear.sublayers]
    every = torch.cat(each).cpu().double()
    sizes = np.abs(every.numpy())
    index = select_largest(sizes, top=top, mass=mass)
    _require_affordable(linear, sizes, index, patterns, max_edges)
    graph = LinearGraph(linear, pair, _by_sublayer(linear, index))
    edges, _ = graph.edges(patterns)
    if linear.offset:
        offset = pd.DataFrame([["offset", "metric", "value", linear.offset]], columns=EDGE_COLUMNS)
        edges = pd.concat([edges, offset], ignore_index=True)
    total = sizes.sum()
    nodes = graph.nodes(value, float(every.sum() - every[torch.from_numpy(index)].sum()))
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


def _check(model: Any, metric: AnyMetric, max_edges: object) -> None:
    reasons = [*reasons_not_to_run(model), *reasons_without_heads(model)]
    if not is_count(max_edges, 1):
        reasons.append(f"got max_edges={max_edges!r}; expected 1 or more")
    if as_metric(metric).needs_reference:
        reasons.append(
            f"{as_metric(metric).name} compares with another run, and there is one run here; "
            "expected a metric of its logits alone"
        )
    if torch.is_inference_mode_enabled():
        reasons.append("no gradient is taken in torch.inference_mode(); torch.no_grad() will do")
    InputError.raise_if(reasons, "there is no attribution graph of this")


def _by_sublayer(linear: LinearModel, index: Any) -> list[list[tuple[int, int]]]:
    """The chosen (position, node) of each sublayer."""
    n_pos = linear.embedding.shape[1]
    found, first = [], 0
    for at in linear.sublayers:
        here = index[(index >= first) & (index < first + n_pos * at.n_nodes)] - first
        found.append([(int(i) // at.n_nodes, int(i) % at.n_nodes) for i in here])
        first += n_pos * at.n_nodes
    return found
