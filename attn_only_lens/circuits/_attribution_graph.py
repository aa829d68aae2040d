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
from itertools import groupby, product
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import is_count
from attn_only_lens.circuits.graph import (
    EDGE_COLUMNS,
    NODE_COLUMNS,
    CircuitGraph,
    select_largest,
)
from attn_only_lens.circuits.linear_model import (
    Inflows,
    LinearModel,
    edge_kinds,
    linearize,
)
from attn_only_lens.engine.in_float32 import in_float32
from attn_only_lens.engine.inputs import reasons_not_to_run
from attn_only_lens.engine.metrics import (
    AnyMetric,
    bind,
    no_gradient_reasons,
    one_run_reasons,
    require_differentiable,
)
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.recording import record
from attn_only_lens.engine.token_texts import token_texts
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of, reasons_without_heads
from attn_only_lens.precision import full_precision


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
        self._chosen = [
            (index, pos, node) for index, here in enumerate(chosen) for pos, node in here
        ]
        self._real = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._inflows = Inflows(linear, self._real, chosen)

    def _name(self, index: int, pos: int, node: int) -> str:
        return f"{self._linear.sublayers[index].name(node)}@{pos}"

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
        targets = [
            (index, kind, pos, node)
            for index, own in groupby(self._chosen, key=itemgetter(0))
            for kind, (_, pos, node) in product(
                edge_kinds(self._linear.sublayers[index], patterns), own
            )
        ]
        sources = [f"embed@{pos}" for pos in self._real] + [self._name(*at) for at in self._chosen]
        blocks = [(["metric"], ["value"], self._inflows.of_metric())]
        for some, by_prompt in self._inflows.of(targets):
            kinds = [kind for _, kind, _, _ in some]
            blocks.append(([self._name(at, *node) for at, _, *node in some], kinds, by_prompt))
            on_done(kinds.count("value"))
        frames, weights = zip(*(_edges_of(sources, *block) for block in blocks), strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def nodes(self, value: float, rest: float) -> pd.DataFrame:
        """Return the nodes: embedding, heads by layer, and those that are no heads."""
        linear = self._linear
        lengths, sums, attributions, gradients = self._inflows.of_nodes()
        terms = [at.gradient.flatten() @ at.constant.flatten() for at in linear.sublayers]
        terms.append((linear.weights * linear.logits_constant).sum())
        bias = float(torch.stack([term.to(linear.weights.device) for term in terms]).sum())
        rows: list[tuple[object, ...]] = [
            (f"embed@{pos}", "embed", None, "embed", pos, length, np.nan, attribution)
            for pos, length, attribution in zip(self._real, lengths, attributions, strict=False)
        ]
        for i, (index, pos, node) in enumerate(self._chosen, start=len(self._real)):
            at = linear.sublayers[index]
            numbers = (lengths[i], np.nan) if at.kind == "attention" else (sums[i], gradients[i])
            own = at.kind, at.layer, at.name(node), pos
            rows.append((self._name(index, pos, node), *own, *numbers, attributions[i]))
        single = {"bias": (0.0, bias), "rest": (0.0, rest), "offset": (0.0, linear.offset)}
        for name, (size, attribution) in (single | {"metric": (value, value)}).items():
            rows.append((name, name, None, name, None, size, np.nan, attribution))
        frame = pd.DataFrame(rows, columns=list(NODE_COLUMNS))
        return frame.astype({"layer": "Int64", "position": "Int64"})


def _edges_of(
    sources: list[str],
    ids: list[str],
    kinds: list[str],
    by_prompt: Float[Tensor, "batch target column"],
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    """Edges that are not 0 into targets, and the contribution of each prompt."""
    weights = by_prompt.sum(0)
    row, column = (each.numpy() for each in weights.nonzero(as_tuple=True))
    names = [*sources[: weights.shape[1] - 2], "rest", "bias"]
    frame = pd.DataFrame(
        {
            "source": np.array(names, dtype=object)[column],
            "target": np.array(ids, dtype=object)[row],
            "kind": np.array(kinds, dtype=object)[row],
            "weight": weights[row, column].double().numpy(),
        }
    )
    return frame, by_prompt[:, row, column].T.double().numpy()


_TOP = 300
_BYTES = 40  # of an edge: source, target, kind, its weight and its contribution for one prompt


def _count_edges(
    linear: LinearModel, chosen: list[list[tuple[int, int]]], patterns: bool
) -> tuple[int, int]:
    """Return how many backward passes the edges take, and how many edges there are at most."""
    n_pos = linear.embedding.shape[1]
    before = np.zeros(n_pos, dtype=np.int64)
    passes, n_edges = 1, 0
    for at, targets in zip(linear.sublayers, chosen, strict=True):
        here = np.bincount(np.array([pos for pos, _ in targets], dtype=np.int64), minlength=n_pos)
        for kind in edge_kinds(at, patterns):
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
    Inflows(linear, [], [[]] * len(linear.sublayers)).of_metric()
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

    Exact for the model with patterns and norm scales frozen at their values in this run: edges of
    kind "value" into a node add up to its attribution, and those into the metric to the metric.
    Edges of kinds "q" and "k" tell how patterns would change, to first order.

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
    bound = bind(metric, model, pair, run.logits)
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
    reasons += one_run_reasons(metric) + no_gradient_reasons()
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
