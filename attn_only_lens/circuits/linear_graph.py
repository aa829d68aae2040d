"""Nodes and edges of the linear model of a run (`engine/linear_run.py`).

The attribution of a target t is A_t = c_t · z_t, with c_t the gradient of the metric at its output.
z_t is a sum over everything written before it, so A_t is a sum too. Its terms are the edges:

    value   w(s → t) = c_t · W_ts z_s          Σ_s w(s → t) + c_t · b_t = A_t
                                               Σ_t w(s → t) = A_s, over all targets t

Both sums hold for every node, so a graph of all nodes is a flow from the embedding and the biases
to the metric. W_ts z_s is what s wrote into the stream, read by t: an edge is the product of a
covector of the target and a vector of the source. Heads that are not nodes of the graph are summed
as vectors, so a graph of K nodes costs K² products, whatever the size of the model.

Patterns are held, so what sets a pattern is another kind of edge, to first order. With P the
pattern's row of t, p the gradient of the metric there, P' the derivative of the row by the query q,
and q_s the part of q that s wrote (a linear map of s, because norm scales are held),

    q       w(s → t) = p · P' q_s              k       the same with keys in place of queries

Those add up to p · P' q. That is not a share of A_t: it is the effect on the metric of scaling the
query by 1 + ε, divided by ε. A neuron-head's keys are constant, so it has no edges of kind "k"; if
its gate is a step (relu), it has none of kind "q" either.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import SELF, Residual
from attn_only_lens.circuits.graph import NODE_COLUMNS
from attn_only_lens.devices import free_bytes, normal_numbers
from attn_only_lens.engine.contrast import Contrast, contrast, run_both
from attn_only_lens.engine.frozen_pass import silent_scale_edits
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.linear_pair import SecantNorm, gate_term, linear_sublayers
from attn_only_lens.engine.linear_run import (
    LinearAttention,
    LinearRun,
    LinearSublayer,
    Outputs,
    by_head,
    linearize,
)
from attn_only_lens.engine.metrics import AnyMetric, bind, require_differentiable
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.secants import FunctionRules
from attn_only_lens.engine.writes import add_to_input, decompose
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.tolerances import LOGIT_TOLERANCE

Node = tuple[int, int]
"""Position, and index in the sublayer."""
_PROBLEM = "the edges into patterns of this model are unknown; pass patterns=False"


@dataclass(frozen=True, eq=False)
class AttributedRun:
    """A linear run with the gradients of a metric.

    Attributes:
        linear: the run.
        metric: the metric's name.
        value: the metric.
        offset: the metric less its gradient times the logits: 0 for a metric linear in the logits.
        gradients: the gradients at the outputs of each sublayer.
        first: the gradient at the embedding.
        last: the gradient at the stream that is unembedded.
        logit_bias: what the biases of the last norm and the unembedding add, by prompt.
        bias: what all biases add.
        slopes: how queries and keys move the patterns of each sublayer; by "q" and "k".
    """

    linear: LinearRun
    metric: str
    value: float
    offset: float
    gradients: list[Outputs]
    first: Residual
    last: Residual
    logit_bias: Float[Tensor, "batch"]
    bias: float
    slopes: list[dict[str, "_NeuronSlope | _AttentionSlope"]]

    def attributions(self, index: int) -> Float[Tensor, "pos node"]:
        """Return the attribution of each node of a sublayer, summed over prompts."""
        outputs = self.linear.sublayers[index].writes.outputs
        return (self.gradients[index] * outputs).sum((0, 3))

    def kinds(self, index: int) -> list[str]:
        """Return the kinds of edges into nodes of a sublayer."""
        return ["value", *self.slopes[index]]


def attribute(
    model: Any, pair: PromptPair, metric: AnyMetric, patterns: bool = True
) -> AttributedRun:
    """Run a model, and attribute a metric to its heads with patterns and norm scales held.

    Args:
        model: a model with neuron-heads.
        pair: the clean prompts are run.
        metric: whose shares attributions are.
        patterns: also compute what moves patterns.
    """
    if pair.corrupted is not pair.clean:
        return _attribute_pair(model, pair, metric)
    host = host_of(model)
    layers = range(host.n_layers) if patterns else range(0)
    names = [host.hook_name(layer, "attention", point) for layer in layers for point in "qk"]
    linear = linearize(model, pair.clean, pair.mask, names=names)
    logits = linear.run.recording.logits
    bound = bind(metric, model, pair, logits)
    require_differentiable(bound, logits)
    gradient, _ = linear.metric_gradient(bound)
    value = bound.of(logits)
    outputs, streams = linear.gradients(linear.stream_gradient(gradient))
    slopes: list[dict[str, _NeuronSlope | _AttentionSlope]] = [{} for _ in linear.sublayers]
    if patterns:
        slopes = _slopes(linear, outputs)
    offset = value - float((gradient * linear.logits).sum())
    zero = torch.zeros_like(linear.run.final.stream)
    logit_bias = (gradient * linear.unembed(zero[None])[0]).sum((1, 2))
    bias = float(logit_bias.sum())
    for sublayer, along, behind in zip(linear.sublayers, outputs, streams[1:], strict=True):
        bias += float((along * sublayer.constant).sum())
        bias += float((behind.to(sublayer.writes.bias) * sublayer.writes.bias).sum())
    ends = streams[0], streams[-1], logit_bias, bias
    return AttributedRun(linear, bound.name, value, offset, outputs, *ends, slopes)


def _attribute_pair(model: Any, pair: PromptPair, metric: AnyMetric) -> AttributedRun:
    """Attribute the change of a metric between two runs to the heads of a model."""
    host = host_of(model)
    layers = range(host.n_layers)
    points = {
        (layer, kind, point): host.hook_name(layer, kind, point)
        for layer in layers
        for kind, point in (
            ("attention", "q"),
            ("attention", "k"),
            ("attention", "z"),
            ("neuron", "z"),
        )
    }
    mask = None if pair.mask is None else pair.mask.repeat(2, 1)
    names = tuple(host.hook_name(layer, "attention", "pattern") for layer in layers)
    with FunctionRules(paused=True):  # in float64 throughout, as `run_both`
        both = decompose(model, torch.cat([pair.clean, pair.corrupted]), mask, names=names)
    runs = run_both(model, pair)
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(metric, model, pair, clean)
    tape = Tape(points.values())
    result = contrast(model, runs, bound, tape, keep_graph=True)
    sublayers = linear_sublayers(model, both)
    gradients, slopes = list[Outputs](), list[dict[str, Any]]()
    for sublayer, writes in zip(sublayers, both.sublayers, strict=True):
        layer, kind = writes.layer, writes.kind
        along = result.gradients[points[layer, kind, "z"]]
        if writes.neurons is None:
            slopes.append(_pair_slopes(model, sublayer, result, tape.nodes))
        else:
            heads = writes.neurons
            weights = heads.neuron_outputs(heads.head_outputs(torch.ones_like(along[..., 0])))
            along = (heads.neuron_outputs(along.squeeze(-1)) / weights).unsqueeze(-1)
            W, factor = gate_term(writes, both.recording.neurons[layer])
            nothing = torch.zeros_like(factor)
            slope = _NeuronSlope(sublayer, along.squeeze(-1) * factor, W, nothing)
            slopes.append({"gate": slope} if factor.any() else {})
        gradients.append(along)
    embedding = both.embedding[: len(clean)] - both.embedding[len(clean) :]
    changes = tuple(sublayer.writes for sublayer in sublayers)
    final = SecantNorm.between(both.final)
    run = replace(both, embedding=embedding, sublayers=changes, final=final)
    linear = LinearRun(model, run, tuple(sublayers), clean - corrupted)
    change = bound.of(clean) - bound.of(corrupted)
    bias = torch.zeros_like(embedding[:, 0, 0])
    ends = result.stream, result.final, bias, 0.0
    return AttributedRun(
        linear, bound.name, change, change - result.total, gradients, *ends, slopes
    )


def _pair_slopes(
    model: Any, sublayer: LinearSublayer, result: Contrast, nodes: dict[str, Tensor]
) -> dict[str, "_NeuronSlope | _AttentionSlope"]:
    """Return how queries and keys move the patterns of attention heads between two runs."""
    host, layer = host_of(model), sublayer.writes.layer
    attention, slopes = host.attention(layer), dict[str, Any]()
    for kind in "qk":
        inputs = nodes[host.hook_name(layer, "attention", kind)]
        W = _by_group(getattr(attention, f"W_{kind.upper()}"), inputs.shape[2])
        pattern, along = result.softmax[layer], result.patterns[layer]
        nothing = torch.zeros_like(inputs)
        slopes[kind] = _AttentionSlope(sublayer, pattern, along, inputs, W, nothing)
    return slopes


def _slopes(
    linear: LinearRun, gradients: list[Outputs]
) -> list[dict[str, "_NeuronSlope | _AttentionSlope"]]:
    graphs = iter(_pattern_graphs(linear))
    slopes: list[dict[str, _NeuronSlope | _AttentionSlope]] = []
    for sublayer, gradient in zip(linear.sublayers, gradients, strict=True):
        if isinstance(sublayer, LinearAttention):
            slopes.append(_attention_slopes(linear, sublayer, gradient, next(graphs)))
        else:
            slope = _NeuronSlope.of(sublayer, gradient)
            slopes.append({} if slope is None else {"gate": slope})
    return slopes


@dataclass(frozen=True, eq=False)
class _NeuronSlope:
    """The effect of neurons' pre-activations q on the metric through their patterns alone.

    Attributes:
        sublayer: the neurons.
        gradient: the gradient of the metric at q.
        W: the projection that makes q.
        constant: the effect of scaling the constant part of queries by 1 + ε, over ε.
    """

    sublayer: LinearSublayer
    gradient: Float[Tensor, "batch pos d_mlp"]
    W: Float[Tensor, "d_model d_mlp"]
    constant: Float[Tensor, "batch pos d_mlp"]

    @classmethod
    def of(cls, sublayer: LinearSublayer, gradient: Outputs) -> "_NeuronSlope | None":
        heads: Any = sublayer.writes.neurons
        q, up = heads.projections(sublayer.writes.entered)
        with torch.enable_grad():
            q = q.detach().requires_grad_()
            query, v = heads._query_and_value(q, up)
            outputs = heads.neuron_outputs(heads._gate_pattern(query)[..., SELF] * v.detach())
            if not outputs.requires_grad:  # the gate is a step
                return None
            along = gradient.squeeze(-1)
            by_q, by_query = torch.autograd.grad(outputs, (q, query), along)
        gate = getattr(heads.module, "W_gate", None)
        W = (heads.module.W_in if gate is None else gate).detach()
        reads = sublayer.writes.reads.norm
        bias, _ = heads.projections(torch.zeros_like(sublayer.writes.entered[:1, :1]))
        bias = bias if reads.bias is None else bias + reads.bias.to(W) @ W
        # Heads that share a neuron have queries b q + c.
        scaled = (by_query * query.detach()).unflatten(-1, (heads.n_neurons, -1)).sum(-1)
        constant = scaled - by_q * q.detach() + by_q * bias.detach()
        return cls(sublayer, by_q, W, constant)

    def covectors(
        self, positions: Tensor, nodes: Tensor
    ) -> tuple[Float[Tensor, "batch target d_model"], Float[Tensor, "batch target"]]:
        """Return what targets read at their own position, and the part of biases inside them."""
        read = self.gradient[:, positions, nodes].unsqueeze(-1) * self.W.T[nodes]
        covectors = self.sublayer.writes.reads.back(read, positions)
        return covectors, self.constant[:, positions, nodes]


@dataclass(frozen=True, eq=False)
class _PatternGraph:
    """The pattern of a layer's attention heads, in a graph that begins at queries and keys."""

    pattern: Float[Tensor, "batch head_index query_pos key"]
    inputs: dict[str, Float[Tensor, "batch pos group d_head"]]


def _pattern_graphs(linear: LinearRun) -> list[_PatternGraph]:
    """Run the model with queries and keys as leaves, and the scales of their norms held.

    Noise is added to the input of every attention. It must reach queries and keys by W_Q and W_K;
    the recorded ones, and the recorded z, then replace what the noise has moved.
    """
    host, recording = host_of(linear.model), linear.run.recording
    graphs: dict[str, Tensor] = {}
    hooks: list[tuple[str, Callable[..., Tensor]]] = []
    with ExitStack() as stack:
        for sublayer in linear.sublayers:
            writes = sublayer.writes
            if writes.kind == "attention":
                noise = normal_numbers(writes.entered.shape).to(writes.entered)
                noise = noise * writes.entered.std(correction=0)
                stack.enter_context(add_to_input(host.attention(writes.layer), noise))
                hooks += _graph_hooks(linear, writes.layer, noise, graphs)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(silent_scale_edits())
        run(linear.model, recording.tokens, recording.mask, hooks)
    found = []
    for layer in range(host.n_layers):
        q, k, pattern = (
            graphs[host.hook_name(layer, "attention", point)] for point in ("q", "k", "pattern")
        )
        if not pattern.requires_grad:
            reason = f"layer {layer}: its pattern is not computed from the queries that hooks see"
            raise UnsupportedModelError([reason], _PROBLEM)
        found.append(_PatternGraph(pattern, {"q": q, "k": k}))
    return found


def _graph_hooks(
    linear: LinearRun, layer: int, noise: Residual, graphs: dict[str, Tensor]
) -> list[tuple[str, Callable[..., Tensor]]]:
    host, recorded = host_of(linear.model), linear.run.recording.hooked
    attention = host.attention(layer)
    name = {x: host.hook_name(layer, "attention", x) for x in ("q", "k", "pattern", "z")}

    def leaf(kind: str) -> Callable[..., Tensor]:
        def hook(value: Tensor, hook: Any) -> Tensor:
            inputs = recorded[name[kind]]
            W = _by_group(getattr(attention, f"W_{kind.upper()}"), inputs.shape[2])
            expected = inputs + torch.einsum("bpm,gmd->bpgd", noise, W)
            error = (value.detach() - expected).abs().amax()
            if not error <= LOGIT_TOLERANCE[torch.float32] * expected.abs().amax():
                reason = f"layer {layer}: W_{kind.upper()} does not make what its hook {kind} sees"
                raise UnsupportedModelError([reason], _PROBLEM)
            graphs[name[kind]] = inputs.clone().requires_grad_()
            return graphs[name[kind]]

        return hook

    def keep_pattern(value: Tensor, hook: Any) -> Tensor:
        graphs[name["pattern"]] = value
        return value.detach()

    points = (m for m in attention.modules() if isinstance(m, HookPoint))
    scales = sorted({str(m.name) for m in points if str(m.name).endswith("hook_scale")})
    return [
        *((name[kind], leaf(kind)) for kind in "qk"),
        *((scale, lambda value, hook: value.detach()) for scale in scales),
        (name["pattern"], keep_pattern),
        (name["z"], lambda value, hook: recorded[name["z"]]),
    ]


@dataclass(frozen=True, eq=False)
class _AttentionSlope:
    """The effect of attention heads' queries, or keys, on the metric through their patterns.

    Attributes:
        sublayer: the heads.
        pattern: the patterns, in a graph from the inputs.
        gradient: the gradient of the metric at the patterns.
        inputs: the queries or keys.
        W: W_Q or W_K, of each head or each group of heads that share keys.
        constant: the queries or keys for a stream of 0.
    """

    sublayer: LinearAttention
    pattern: Float[Tensor, "batch head_index query_pos key"]
    gradient: Float[Tensor, "batch head_index query_pos key"]
    inputs: Float[Tensor, "batch pos group d_head"]
    W: Float[Tensor, "group d_model d_head"]
    constant: Float[Tensor, "batch pos group d_head"]

    def input_gradients(
        self, positions: Tensor, nodes: Tensor
    ) -> Float[Tensor, "target batch pos group d_head"]:
        """Return the gradient at the inputs through the pattern's row of each target alone."""
        rows = self.gradient.new_zeros(len(nodes), *self.gradient.shape)
        target = torch.arange(len(nodes), device=rows.device)
        rows[target, :, nodes, positions] = self.gradient[:, nodes, positions].transpose(0, 1)

        # Not is_grads_batched, which takes some operations row by row, such as softmax.
        def gradient(row: Tensor) -> Tensor:
            graph = (self.pattern, self.inputs, row)
            (slope,) = torch.autograd.grad(*graph, retain_graph=True, allow_unused=True)
            return torch.zeros_like(self.inputs) if slope is None else slope

        slopes: Tensor = torch.func.vmap(gradient)(rows)
        return slopes

    def covectors(
        self, gradients: Float[Tensor, "target batch pos group d_head"]
    ) -> Float[Tensor, "batch target pos d_model"]:
        """Return what targets read at every position, from the gradients at the inputs."""
        n_targets, _, n_pos = gradients.shape[:3]
        entering = torch.einsum("tbpgd,gmd->btpm", gradients, self.W).flatten(1, 2)
        positions = torch.arange(n_pos, device=entering.device).repeat(n_targets)
        return self.sublayer.writes.reads.back(entering, positions).unflatten(1, (-1, n_pos))


def _attention_slopes(
    linear: LinearRun, sublayer: LinearAttention, gradient: Outputs, graph: _PatternGraph
) -> dict[str, "_NeuronSlope | _AttentionSlope"]:
    writes = sublayer.writes
    attention = host_of(linear.model).attention(writes.layer)
    b_V = getattr(attention, "b_V", None)
    values = torch.einsum("bkm,hmd->bkhd", writes.entered, sublayer.W_V)
    if b_V is not None:
        values = values + by_head(b_V.view(-1, values.shape[3]), values.shape[2])
    pattern_gradient = torch.einsum("bqhd,bkhd->bhqk", gradient, values)
    slopes: dict[str, _NeuronSlope | _AttentionSlope] = {}
    for kind, inputs in graph.inputs.items():
        n_groups, d_head = inputs.shape[2:]
        W = _by_group(getattr(attention, f"W_{kind.upper()}"), n_groups)
        b, bias = getattr(attention, f"b_{kind.upper()}", None), writes.reads.norm.bias
        constant = torch.zeros_like(inputs)
        if b is not None:
            constant = constant + _by_group(b.view(-1, d_head), n_groups)
        if bias is not None:
            constant = constant + torch.einsum("m,gmd->gd", bias.to(W), W)
        entering = writes.reads.change(writes.reads.stream)
        left = inputs.detach() - torch.einsum("bpm,gmd->bpgd", entering, W) - constant
        if left.abs().amax() > LOGIT_TOLERANCE[torch.float32] * inputs.abs().amax():
            constant = constant + left  # positions that only queries and keys have (Shortformer)
        slopes[kind] = _AttentionSlope(
            sublayer, graph.pattern, pattern_gradient, inputs, W, constant
        )
    return slopes


def _by_group(weights: Tensor, n_groups: int) -> Tensor:
    if len(weights) > n_groups:
        return weights.detach()[:: len(weights) // n_groups]
    return by_head(weights, n_groups)


class LinearGraph:
    """Nodes and edges of an attributed run as frames, for chosen nodes of each sublayer."""

    def __init__(
        self, attributed: AttributedRun, pair: PromptPair, chosen: Sequence[Sequence[Node]]
    ) -> None:
        self._attributed, self._linear, self._chosen = attributed, attributed.linear, chosen
        self._real: list[int] = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._sources = _Sources(self._linear, self._real, chosen)

    def _ids(self, index: int, nodes: Sequence[Node]) -> list[str]:
        writes = self._linear.sublayers[index].writes
        return [f"{HeadName(writes.layer, writes.kind, node)}@{pos}" for pos, node in nodes]

    def edges(
        self, on_done: Callable[[int], object] = lambda n: None
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Return edges from chosen nodes, "bias" and "rest" into chosen nodes and the metric.

        Args:
            on_done: called with the number of nodes that are done.

        Returns:
            A row for each edge that is not 0, and the contribution of each prompt to its weight.
        """
        sources = [f"embed@{pos}" for pos in self._real]
        for index, nodes in enumerate(self._chosen):
            sources += self._ids(index, nodes)
        blocks = [_edges_of(sources, ["metric"], "value", self._into_metric())]
        for index, nodes in enumerate(self._chosen):
            for kind in self._attributed.kinds(index) if nodes else ():
                for some, by_prompt in self._into(index, kind, nodes):
                    blocks.append(_edges_of(sources, self._ids(index, some), kind, by_prompt))
                    on_done(len(some) * (kind == "value"))
        frames, weights = zip(*blocks, strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _into_metric(self) -> Float[Tensor, "batch target column"]:
        """Return the contributions to the metric."""
        attributed, n = self._attributed, len(self._linear.sublayers)
        sums = self._sources.contributions(n, 1, attributed.logit_bias[:, None])
        sums.add_all(attributed.last[:, None])
        return sums.columns

    def _into(
        self, index: int, kind: str, nodes: Sequence[Node]
    ) -> Iterator[tuple[Sequence[Node], Float[Tensor, "batch target column"]]]:
        """Yield blocks of nodes of a sublayer, and the contributions to them."""
        gradient = self._attributed.gradients[index]
        slope = self._attributed.slopes[index].get(kind)
        size = len(self._sources.positions) + self._linear.run.embedding[0].numel()
        if isinstance(slope, _AttentionSlope):
            size += slope.gradient[0].numel() + slope.inputs[0].numel()
        at_once = max(1, _numbers_at_once(gradient) // (len(gradient) * size))
        for first in range(0, len(nodes), at_once):
            some = nodes[first : first + at_once]
            places = torch.tensor(some, dtype=torch.int64, device=gradient.device)
            yield some, self._contributions(index, slope, *places.T)

    def _contributions(
        self,
        index: int,
        slope: "_NeuronSlope | _AttentionSlope | None",
        positions: Tensor,
        nodes: Tensor,
    ) -> Float[Tensor, "batch target column"]:
        sublayer, gradient = self._linear.sublayers[index], self._attributed.gradients[index]
        of_targets = gradient[:, positions, nodes]
        n_before, n_pos = self._linear.n_before(index), gradient.shape[1]
        if isinstance(slope, _AttentionSlope):
            inputs = slope.input_gradients(positions, nodes)
            bias = torch.einsum("tbpgd,bpgd->bt", inputs, slope.constant)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            sums.add_all(slope.covectors(inputs))
        elif isinstance(slope, _NeuronSlope):
            covectors, bias = slope.covectors(positions, nodes)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            sums.add(covectors, positions)
        else:
            bias = (of_targets * sublayer.constant[:, positions, nodes]).sum(-1)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            if isinstance(sublayer, LinearAttention):  # a target reads at every position
                keys = torch.arange(n_pos, device=nodes.device).repeat(len(nodes))
                node, node_positions = (x.repeat_interleave(n_pos) for x in (nodes, positions))
                gradients = of_targets.repeat_interleave(n_pos, dim=1)
                covectors = sublayer.covectors(gradients, node, node_positions, keys)
                sums.add_all(covectors.unflatten(1, (-1, n_pos)))
            else:
                sums.add(sublayer.covectors(of_targets, nodes, positions, positions), positions)
        return sums.columns

    def nodes(self, rest: float) -> pd.DataFrame:
        """Return the nodes: the embedding, heads by layer, and "bias", "rest", "offset", "metric".

        Args:
            rest: the attribution of the heads that are no nodes.
        """
        attributed, linear = self._attributed, self._linear
        embedding, gradient = linear.run.embedding, attributed.first
        rows: list[tuple[object, ...]] = [
            (f"embed@{pos}", "embed", None, "embed", pos, length, np.nan, attribution)
            for pos, length, attribution in zip(
                range(embedding.shape[1]),
                embedding.norm(dim=-1).mean(0).tolist(),
                (gradient.to(embedding) * embedding).sum((0, 2)).tolist(),
                strict=True,
            )
            if pos in self._real
        ]
        for index, nodes in enumerate(self._chosen):
            rows += self._rows(index, nodes)
        ends = {"bias": (0.0, attributed.bias), "rest": (0.0, rest), "offset": (0.0, attributed.offset)}
        for name, (size, attribution) in (ends | {"metric": (attributed.value,) * 2}).items():
            rows.append((name, name, None, name, None, size, np.nan, attribution))
        frame = pd.DataFrame(rows, columns=list(NODE_COLUMNS))
        return frame.astype({"layer": "Int64", "position": "Int64"})

    def _rows(self, index: int, nodes: Sequence[Node]) -> list[tuple[object, ...]]:
        """Return rows of the frame of nodes for heads of one sublayer."""
        if not nodes:
            return []
        attributed, writes = self._attributed, self._linear.sublayers[index].writes
        gradients, attributions = attributed.gradients[index], attributed.attributions(index)
        n_nodes, batch = gradients.shape[2], len(gradients)
        positions, index_of = torch.tensor(nodes, dtype=torch.int64, device=gradients.device).T
        slopes = torch.full_like(gradients[0, ..., 0], torch.nan)
        if writes.kind == "attention":
            values = writes.z.norm(dim=-1).mean(0)
        else:
            values = writes.z.unflatten(2, (n_nodes, -1)).sum((3, 4)).mean(0)
            if batch == 1 and writes.z.shape[2] == n_nodes:
                slopes = gradients[0, ..., 0]
        columns = (x[positions, index_of].tolist() for x in (values, slopes, attributions))
        ids = self._ids(index, nodes)
        return [
            (id_, writes.kind, writes.layer, id_.partition("@")[0], pos, *numbers)
            for id_, (pos, _), *numbers in zip(ids, nodes, *columns, strict=True)
        ]


def _edges_of(
    sources: list[str], targets: list[str], kind: str, by_prompt: Tensor
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    """Return edges that are not 0 into targets, and the contribution of each prompt."""
    weights = by_prompt.sum(0)
    row, column = (x.numpy() for x in weights.nonzero(as_tuple=True))
    names = [*sources[: weights.shape[1] - 2], "rest", "bias"]
    frame = pd.DataFrame(
        {
            "source": np.array(names, dtype=object)[column],
            "target": np.array(targets, dtype=object)[row],
            "kind": kind,
            "weight": weights[row, column].double().numpy(),
        }
    )
    return frame, by_prompt[:, row, column].T.double().numpy()


class _Sources:
    """What the embedding and chosen nodes wrote, one by one; all others and biases, together."""

    def __init__(
        self, linear: LinearRun, real: Sequence[int], chosen: Sequence[Sequence[Node]]
    ) -> None:
        embedding = linear.run.embedding
        vectors, positions = [embedding[:, real]], list(real)
        others = embedding.clone()
        others[:, real] = 0.0
        self._n_columns, self._rest = [len(real)], [others]
        self._bias = [torch.zeros_like(embedding)]
        for sublayer, nodes in zip(linear.sublayers, chosen, strict=True):
            outputs = sublayer.writes.outputs
            place = torch.tensor(nodes, dtype=torch.int64, device=outputs.device).reshape(-1, 2)
            node_positions, index = place.T
            vectors.append(
                sublayer.write_vectors(outputs[:, node_positions, index], index, node_positions).to(
                    embedding
                )
            )
            positions += node_positions.tolist()
            others = outputs.clone()
            others[:, node_positions, index] = 0.0
            written = sublayer.written(others[None])[0].to(embedding)
            self._n_columns.append(len(positions))
            self._rest.append(self._rest[-1] + written)
            self._bias.append(self._bias[-1] + sublayer.writes.bias.to(embedding))
        self._vectors, self.positions = torch.cat(vectors, dim=1), np.array(positions)
        # The sources of a position, numbered from 0: rows of a table with a place for each.
        self._slots = pd.Series(positions).groupby(positions).cumcount().to_numpy()

    def contributions(
        self, n_before: int, n_targets: int, bias: Float[Tensor, "batch target"]
    ) -> "_Contributions":
        """Return empty sums for targets that read after `n_before` sublayers."""
        n = self._n_columns[n_before]
        columns = self._vectors.new_zeros(len(self._vectors), n_targets, n + 2)
        columns[:, :, -1] = bias.to(columns)
        of_all = self._rest[n_before], self._bias[n_before]
        places = torch.from_numpy(np.stack([self.positions[:n], self._slots[:n]]))
        width = int(self._slots[:n].max(initial=0)) + 1
        vectors = self._vectors[:, :n]
        positions, slots = places.to(columns.device)
        return _Contributions(columns, vectors, positions, slots, width, *of_all)


@dataclass(frozen=True, eq=False)
class _Contributions:
    """Sums over what targets read of each source; the last two columns are "rest" and "bias"."""

    sums: Float[Tensor, "batch target column"]
    vectors: Float[Tensor, "batch column d_model"]
    positions: Int[Tensor, "column"]
    slots: Int[Tensor, "column"]
    width: int
    rest: Residual
    bias: Residual

    def add(
        self, covectors: Float[Tensor, "batch target d_model"], positions: Int[Tensor, "target"]
    ) -> None:
        """Add what each target reads at one position."""
        covectors, positions = covectors.to(self.vectors), positions.to(self.positions.device)
        products = covectors @ self.vectors.transpose(1, 2)
        self.sums[:, :, :-2] += products * (self.positions == positions[:, None])
        for column, stream in ((-2, self.rest), (-1, self.bias)):
            self.sums[:, :, column] += (covectors * stream[:, positions]).sum(-1)

    def add_all(self, covectors: Float[Tensor, "batch target pos d_model"]) -> None:
        """Add what each target reads at every position."""
        covectors = covectors.to(self.vectors)
        batch, _, n_pos, d_model = covectors.shape
        table = self.vectors.new_zeros(batch, n_pos, self.width, d_model)
        table[:, self.positions, self.slots] = self.vectors
        products = torch.einsum("btpm,bpwm->btpw", covectors, table)
        self.sums[:, :, :-2] += products[:, :, self.positions, self.slots]
        for column, stream in ((-2, self.rest), (-1, self.bias)):
            self.sums[:, :, column] += torch.einsum("btpm,bpm->bt", covectors, stream)

    @property
    def columns(self) -> Float[Tensor, "batch target column"]:
        """The sums, on the CPU."""
        return self.sums.cpu()


_BLOCK = 2**24  # on a CPU: 64 MiB in float32
_SHARE = 0.1  # of the free memory of another device


def _numbers_at_once(x: Tensor) -> int:
    """Return how many numbers a block of targets may take."""
    fit = int(_SHARE * free_bytes(x.device) / x.element_size())
    return min(_BLOCK, fit) if x.device.type == "cpu" else fit
