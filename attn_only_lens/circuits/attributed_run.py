"""Attribute a metric of one run, or its difference between two runs, to the model's heads.

A target head t reads the residual stream, a sum of the outputs of all earlier sources s. Let c_t be
the metric's gradient at the head's output z_t. The attribution of t is A_t = c_t · z_t.

In one run with fixed patterns and norm scales (`linear_run.py`), the edges of kind "value" into t
and the bias term c_t · b_t add up to A_t:

    value       w(s → t) = c_t · W_ts z_s          Σ_s w(s → t) + c_t · b_t = A_t
    q, k, gate  w(s → t) = p · P' q_s              how the pattern would change, to first order: p
                                                   is the gradient at the pattern, P' its derivative

For the difference between two runs (`linear_pair.py`), z_t is replaced by its change Δz_t, and c_t
by a gradient that is computed with secants in place of derivatives. Then the weights of the edges
of all kinds into t add up to A_t. Biases cancel:

    all kinds   Σ_s w(s → t) = A_t, over value, q and k of an attention head, value and gate of a
                neuron; Σ_t w(s → t) = A_s, over all targets t and the metric

A neuron-head (an MLP neuron viewed as an attention head) has constant keys, so it has no edges of
kind "k". If its gate is a step function (ReLU), a neuron-head has edges of kind "gate" only in a
graph of a difference, and only if the two runs are on different sides of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.devices import on_cpu, to_float64_device
from attn_only_lens.engine.contrast import Contrast, contrast, run_both, run_softmax
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
from attn_only_lens.engine.secants import FunctionRules
from attn_only_lens.engine.writes import Decomposition, decompose
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import WIDE_KINDS, HeadKind
from attn_only_lens.tolerances import LOGIT_TOLERANCE, rounding


@dataclass(frozen=True, eq=False)
class NeuronSlope:
    """The metric's gradient at neurons' pre-activations, counting only paths through their gates.

    `constant` is the first-order contribution of biases to the metric through these gates.
    """

    sublayer: LinearSublayer
    gradient: Float[Tensor, "batch pos d_mlp"]
    W: Float[Tensor, "d_model d_mlp"]
    constant: Float[Tensor, "batch pos d_mlp"]

    def covectors(
        self, positions: Tensor, nodes: Tensor
    ) -> tuple[Float[Tensor, "batch target d_model"], Float[Tensor, "batch target"]]:
        """Return the vector with which each target reads the residual stream, and a bias term."""
        read = self.gradient[:, positions, nodes].unsqueeze(-1) * self.W.T[nodes]
        covectors = self.sublayer.writes.reads.back(read, positions)
        return covectors, self.constant[:, positions, nodes]


@dataclass(frozen=True, eq=False)
class AttentionSlope:
    """Attention patterns, the metric's gradient at them, and the queries or keys they depend on.

    `inputs` are the queries or keys. `W` is W_Q or W_K, with one entry for each group of heads that
    share keys. `constant` is the part of `inputs` that does not depend on the residual stream.
    """

    sublayer: LinearSublayer
    pattern: Float[Tensor, "batch head_index query_pos key"]
    gradient: Float[Tensor, "batch head_index query_pos key"]
    inputs: Float[Tensor, "batch pos group d_head"]
    W: Float[Tensor, "group d_model d_head"]
    constant: Float[Tensor, "batch pos group d_head"]

    def input_gradients(
        self, positions: Tensor, nodes: Tensor
    ) -> Float[Tensor, "target batch pos group d_head"]:
        """Return the gradient at `inputs` that flows through the pattern row of each target."""
        rows = self.gradient.new_zeros(len(nodes), *self.gradient.shape)
        target = torch.arange(len(nodes), device=rows.device)
        rows[target, :, nodes, positions] = self.gradient[:, nodes, positions].transpose(0, 1)

        # With is_grads_batched, autograd would compute some functions, such as softmax, row by row.
        def gradient(row: Tensor) -> Tensor:
            graph = (self.pattern, self.inputs, row)
            (slope,) = torch.autograd.grad(*graph, retain_graph=True, allow_unused=True)
            return torch.zeros_like(self.inputs) if slope is None else slope

        slopes: Tensor = torch.func.vmap(gradient)(rows)
        return slopes

    def covectors(
        self, gradients: Float[Tensor, "target batch pos group d_head"]
    ) -> Float[Tensor, "batch target pos d_model"]:
        """Return the vector with which each target reads the residual stream at each position."""
        n_targets, _, n_pos = gradients.shape[:3]
        entering = torch.einsum("tbpgd,gmd->btpm", gradients, self.W).flatten(1, 2)
        positions = torch.arange(n_pos, device=entering.device).repeat(n_targets)
        return self.sublayer.writes.reads.back(entering, positions).unflatten(1, (-1, n_pos))


Slopes: TypeAlias = dict[str, NeuronSlope | AttentionSlope]
"""The slopes of a sublayer's patterns: "q" and "k" of attention heads, "gate" of neurons."""


@dataclass(frozen=True, eq=False)
class AttributedRun:
    """The linearisation of one run, or of the difference of two runs, and a metric's gradients.

    The lists `gradients`, `slopes` and `z` have one entry per sublayer.
    """

    linear: LinearRun
    metric: str
    value: float  # the metric, or its change between the runs
    offset: float  # the part of the metric that is not linear in the logits
    gradients: list[Outputs]
    first: Residual  # the metric's gradient at the embedding
    last: Residual  # the metric's gradient at the final residual stream
    logit_bias: Float[Tensor, "batch"]  # the bias terms of the last norm and the unembedding
    bias: float  # the sum of all bias terms
    slopes: list[Slopes]
    z: list[Outputs]  # the outputs of heads in the clean run
    shares: tuple[float, ...]  # the weight of each prompt in the metric's mean
    is_difference: bool = False

    def attributions(self, index: int) -> Float[Tensor, "batch pos node"]:
        """Return the attribution of each node of a sublayer, for each prompt."""
        outputs = self.linear.sublayers[index].writes.z
        return (self.gradients[index] * outputs).sum(-1)

    def kinds(self, index: int) -> list[str]:
        """Return the kinds of edges into the nodes of a sublayer."""
        is_error = self.linear.sublayers[index].writes.kind == "error"
        return [] if is_error else ["value", *self.slopes[index]]


def attribute_run(
    model: Any, pair: PromptPair, metric: AnyMetric, patterns: bool = True
) -> AttributedRun:
    """Attribute a metric of the clean run, with patterns and norm scales held fixed."""
    linear = linearize(model, pair.clean, pair.mask)
    logits = linear.run.recording.logits
    bound = bind(metric, model, pair, logits)
    require_differentiable(bound, logits)
    gradient, _ = linear.metric_gradient(bound)
    outputs, streams = linear.gradients(linear.stream_gradient(gradient))
    slopes: list[Slopes] = [{} for _ in linear.sublayers]
    if patterns:
        tape = Tape(name for (*_, point), name in _hook_names(model).items() if point != "z")
        softmax = run_softmax(model, pair, tape)
        slopes = [
            _run_slopes(model, sublayer, along, softmax, tape.nodes)
            for sublayer, along in zip(linear.sublayers, outputs, strict=True)
        ]
    offset = bound.of(logits) - float((gradient * linear.logits).sum())
    stream = linear.run.final.stream
    logit_bias = (gradient * linear.unembed(torch.zeros_like(stream)[None])[0]).sum((1, 2))
    # The logits are rounded: a difference of two large logits has few correct digits in float32.
    last, final = (to_float64_device(x).double() for x in (streams[-1], stream))
    value = offset + float((last * final).sum()) + float(logit_bias.sum())
    biases = [logit_bias.sum()]
    for sublayer, along, behind in zip(linear.sublayers, outputs, streams[1:], strict=True):
        if sublayer.writes.kind != "error":  # a transcoder's error is a node, not part of the bias
            biases.append((along * sublayer.constant).sum())
        biases.append((behind.to(sublayer.writes.bias) * sublayer.writes.bias).sum())
    ends = streams[0], streams[-1], logit_bias, sum(map(float, on_cpu(biases)))
    recorded = [sublayer.writes.z for sublayer in linear.sublayers]
    heads = slopes, recorded, bound.shares(len(pair.clean))
    return AttributedRun(linear, bound.name, value, offset, outputs, *ends, *heads)


def attribute_difference(model: Any, pair: PromptPair, metric: AnyMetric) -> AttributedRun:
    """Attribute a metric's difference, clean minus corrupted run, to the model's heads."""
    names, host = _hook_names(model), host_of(model)
    patterns = host.hook_names("pattern", ("attention",))
    tokens = torch.cat([pair.clean, pair.corrupted])
    mask = None if pair.mask is None else pair.mask.repeat(2, 1)
    with FunctionRules(paused=True):  # keep float64 models in float64, as in `run_both`
        both = decompose(model, tokens, mask, names=tuple(patterns))
    runs = run_both(model, pair)
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(metric, model, pair, clean)
    require_differentiable(bound, clean)
    tape = Tape(names.values())
    result = contrast(model, runs, bound, tape, keep_graph=True)
    sublayers = linear_sublayers(model, both)
    gradients, slopes = list[Outputs](), list[Slopes]()
    for sublayer, writes in zip(sublayers, both.sublayers, strict=True):
        along = result.gradients[names[writes.layer, writes.kind, "z"]]
        if writes.kind in WIDE_KINDS:
            here: Slopes = {}
        elif writes.neurons is None:
            pattern = result.functions.softmax[writes.layer], result.patterns[writes.layer]
            here = {**_pattern_slopes(model, sublayer, *pattern, tape.nodes)}
        else:
            W, factor = gate_term(writes, both.recording.neurons[writes.layer])
            slope = NeuronSlope(sublayer, along.squeeze(-1) * factor, W, torch.zeros_like(factor))
            here = {"gate": slope} if factor.any() else {}
        gradients.append(along)
        slopes.append(here)
    _require_flows(both, sublayers, gradients, slopes, result, names)
    first, second = both.embedding.chunk(2)
    run = replace(
        both,
        embedding=first - second,
        sublayers=tuple(sublayer.writes for sublayer in sublayers),
        final=SecantNorm.between(both.final),
    )
    linear = LinearRun(model, run, tuple(sublayers), clean - corrupted)
    change = bound.of(clean) - bound.of(corrupted)
    no_bias = torch.zeros_like(run.embedding[:, 0, 0])
    ends = result.stream, result.final, no_bias, 0.0
    recorded = [writes.z[: len(clean)] for writes in both.sublayers]
    heads = slopes, recorded, bound.shares(len(clean)), True
    return AttributedRun(linear, bound.name, change, result.remainder, gradients, *ends, *heads)


def _hook_names(model: Any) -> dict[tuple[int, HeadKind, str], str]:
    """Return a dict from (layer, kind, "q", "k" or "z") to the name of the hook point."""
    host = host_of(model)
    return {
        (layer, kind, point): host.hook_name(layer, kind, point)
        for layer in range(host.n_layers)
        for kind in host.kinds(layer)
        for point in ("qkz" if kind == "attention" else "z")
    }


def _run_slopes(
    model: Any,
    sublayer: LinearSublayer,
    along: Outputs,
    softmax: Sequence[Tensor],
    nodes: dict[str, Tensor],
) -> Slopes:
    """Return the slopes of a sublayer's patterns or gates in one run, by edge kind."""
    if sublayer.writes.kind in WIDE_KINDS:
        return {}
    if not isinstance(sublayer, LinearAttention):
        gate = _neuron_slope(sublayer, along)
        return {} if gate is None else {"gate": gate}
    writes = sublayer.writes
    attention = host_of(model).attention(writes.layer)
    b_V = getattr(attention, "b_V", None)
    values = torch.einsum("bkm,hmd->bkhd", writes.entered, sublayer.W_V)
    if b_V is not None:
        values = values + by_head(b_V.view(-1, values.shape[3]), values.shape[2])
    gradient, pattern = torch.einsum("bqhd,bkhd->bhqk", along, values), softmax[writes.layer]
    n_sinks = pattern.shape[-1] - gradient.shape[-1]
    gradient = torch.nn.functional.pad(gradient, (0, n_sinks))
    entering = writes.reads.change(writes.reads.stream)
    slopes: Slopes = {}
    for kind, slope in _pattern_slopes(model, sublayer, pattern, gradient, nodes).items():
        constant = slope.inputs.detach() - torch.einsum("bpm,gmd->bpgd", entering, slope.W)
        slopes[kind] = replace(slope, constant=constant)
    return slopes


def _neuron_slope(sublayer: LinearSublayer, along: Outputs) -> NeuronSlope | None:
    """Return the slope of the gates in one run, or None if the gates are step functions."""
    heads: Any = sublayer.writes.neurons
    q, up = heads.projections(sublayer.writes.entered)
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        query, v = heads._query_and_value(q, up)
        outputs = heads._self_weight(query) * v.detach()
        if not outputs.requires_grad:
            return None
        (by_q,) = torch.autograd.grad(outputs, q, along.squeeze(-1))
    W = heads.read_matrices[0].detach()
    reads = sublayer.writes.reads.norm
    bias, _ = heads.projections(torch.zeros_like(sublayer.writes.entered[:1, :1]))
    bias = bias if reads.bias is None else bias + reads.bias.to(W) @ W
    return NeuronSlope(sublayer, by_q, W, by_q * bias.detach())


def _pattern_slopes(
    model: Any,
    sublayer: LinearSublayer,
    pattern: Float[Tensor, "batch head_index query_pos key"],
    gradient: Float[Tensor, "batch head_index query_pos key"],
    nodes: dict[str, Tensor],
) -> dict[str, AttentionSlope]:
    """Return the slopes of attention patterns, given the metric's gradient at the patterns."""
    host, layer = host_of(model), sublayer.writes.layer
    slopes: dict[str, AttentionSlope] = {}
    for kind in "qk":
        inputs = nodes[host.hook_name(layer, "attention", kind)]
        W, n_groups = getattr(host.attention(layer), f"W_{kind.upper()}"), inputs.shape[2]
        W = W.detach()[:: len(W) // n_groups] if len(W) > n_groups else by_head(W, n_groups)
        constant = torch.zeros_like(inputs)
        slopes[kind] = AttentionSlope(sublayer, pattern, gradient, inputs, W, constant)
    return slopes


def _require_flows(
    both: Decomposition,
    sublayers: Sequence[LinearSublayer],
    gradients: Sequence[Outputs],
    slopes: Sequence[Slopes],
    result: Contrast,
    names: dict[tuple[int, HeadKind, str], str],
) -> None:
    """Raise an error if edges into a sublayer's nodes do not add up to the nodes' attributions."""
    numbers = list[Tensor]()
    for i, (sublayer, along, here) in enumerate(zip(sublayers, gradients, slopes, strict=True)):
        if sublayer.writes.kind == "error":  # error nodes have no incoming edges
            numbers += [torch.zeros((), device="cpu")] * 4
            continue
        writes, (clean, corrupted) = sublayer.writes, both.sublayers[i].reads.stream.chunk(2)
        covector = sublayer.back(along)
        for kind, slope in here.items():
            if isinstance(slope, NeuronSlope):
                entering = slope.gradient @ slope.W.T
            else:
                inputs = result.gradients[names[writes.layer, "attention", kind]]
                entering = torch.einsum("bpgd,gmd->bpm", inputs, slope.W)
            covector = covector + writes.reads.back(entering)
        terms, outputs = covector * (clean - corrupted).to(covector), along * writes.z
        numbers += [terms.sum(), outputs.sum(), terms.abs().sum(), outputs.abs().sum()]
    values = list(map(float, on_cpu(numbers)))
    rows = [values[i : i + 4] for i in range(0, len(values), 4)]
    sums, sizes = [row[:2] for row in rows], [max(row[2:]) for row in rows]
    allowed = LOGIT_TOLERANCE[torch.float32]
    # Small sums may be only rounding errors, so the tolerance is at least that for `smallest`.
    smallest = allowed * max([abs(result.total), *sizes])
    reasons = list[str]()
    for i, (sublayer, (got, expected)) in enumerate(zip(sublayers, sums, strict=True)):
        bound = allowed * max(sizes[i], smallest)
        if abs(got - expected) <= bound:
            continue
        # Terms inside a projection may be much larger than their sum.
        inner = _inner_size(both.sublayers[i].entered, sublayer, gradients[i], slopes[i])
        bound = max(bound, rounding(torch.float32) * inner)
        if not abs(got - expected) <= bound:
            reasons.append(
                f"layer {sublayer.writes.layer}: edges into its {sublayer.writes.kind} heads add "
                f"up to {got:.6g}; expected {expected:.6g}, and rounding allows a difference of "
                f"{bound:.2g}"
            )
    UnsupportedModelError.raise_if(reasons, "the graph of this model is unknown")


def _inner_size(entered: Residual, sublayer: LinearSublayer, along: Outputs, here: Slopes) -> float:
    """Return the sum of the absolute terms of all products from a sublayer's input to the sums."""
    clean, corrupted = entered.abs().chunk(2)
    both = clean + corrupted
    size = (along.abs() * sublayer.of_sizes().of_input(both[None])[0]).sum()
    for slope in here.values():
        if isinstance(slope, NeuronSlope):
            size = size + (slope.gradient.abs() * (both @ slope.W.abs())).sum()
    return float(size)
