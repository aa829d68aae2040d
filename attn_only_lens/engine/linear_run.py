"""Express a run as linear maps between heads, with all patterns and norm scales held constant.

With patterns and norm scales constant, only linear maps and biases are left between the embedding
and the logits. The output of a head t is then an affine function of all earlier outputs:

    z_t = Σ_s W_ts z_s + W_te x_0 + b_t

The sum is over all earlier attention heads and neuron-heads s; x_0 is the embedding, and b_t the
contribution of biases. Each path passes through norms and projections, but through no other head.
The gradient c_t of a metric at z_t thus splits c_t · z_t into contributions of heads and biases:

    c_t · z_t = Σ_s c_t · W_ts z_s + c_t · W_te x_0 + c_t · b_t

The split is relevance propagation with frozen attention patterns and norm scales: Achtibat et al.,
"AttnLRP" (2024); Rezaei Jafari et al., "RelP" (2025). Each term is the dot product of the vector
that s adds to the residual stream (`writes.py`) and the gradient of c_t · z_t at the stream. The
matrix W_ts is never computed.

An attention head with pattern A outputs A V with V = x N / s W_V + b_V: the norm multiplies the
residual stream x by N and divides it by the constant scale s. A neuron-head (a single-neuron
attention head) outputs p v, where p is its attention to its own token. In a gated MLP, the value v
= g u is a product of two projections. One factor is held constant, or each factor is held constant
in one half of the product:

    held="gate"    p g is constant: linear in the up projection u
    held="up"      p u is constant: linear in g, the gate's pre-activation
    held="half"    p (g_0 u + g u_0) / 2 with g_0, u_0 from the run: half of each gradient (RelP)

With bilinear gates, values are already linear in x.

A soft cap on attention scores is part of the pattern. A soft cap on the logits comes after the
linear model and counts as part of the metric. `linearize` checks that the heads are linear.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.devices import on_cpu
from attn_only_lens.engine.gradients import as_leaf, start_graph, uncapped_logits
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import run as run_model
from attn_only_lens.engine.writes import Decomposition, Positions, SublayerWrites, decompose
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import WIDE_KINDS
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

Held = Literal["gate", "up", "half"]
HELD: tuple[str, ...] = get_args(Held)
Nodes: TypeAlias = slice | Int[Tensor, "target"]
"""Indices of a sublayer's attention heads or neurons."""
Place: TypeAlias = int | Int[Tensor, "target"]
"""One position for all nodes, or one position for each node."""
Outputs: TypeAlias = Float[Tensor, "batch pos node d_head"]


@dataclass(frozen=True, eq=False)
class LinearSublayer(ABC):
    """One layer's attention heads or neurons, as a linear function of the residual stream.

    Attributes:
        writes: the sublayer's writes in the run.
        constant: the outputs of the sublayer's nodes when the stream is 0.
    """

    writes: SublayerWrites
    constant: Outputs

    def z(self, stream: Float[Tensor, "part batch pos d_model"]) -> Tensor:
        """Return each stream part's effect on the outputs: [part, batch, pos, node, d_head]."""
        return self.of_input(self.writes.reads.change(stream))

    @abstractmethod
    def of_input(self, entering: Float[Tensor, "part batch pos d_model"]) -> Tensor:
        """Return the contribution of each part of the normalised input to the outputs."""

    def of_sizes(self) -> "LinearSublayer":
        """Return the same map with the absolute values of all its numbers."""
        return self

    @abstractmethod
    def back(self, gradient: Outputs) -> Residual:
        """Backpropagate the outputs' gradients to the residual stream that the sublayer reads."""

    @abstractmethod
    def covectors(
        self,
        gradient: Float[Tensor, "batch target d_head"],
        nodes: Nodes,
        position: Place,
        key: Place,
    ) -> Float[Tensor, "batch target d_model"]:
        """Backpropagate each node's output gradient to position `key` of the residual stream."""

    def written(self, z: Float[Tensor, "part batch pos node d_head"]) -> Tensor:
        """Return the sublayer's output to the residual stream: [part, batch, pos, d_model]."""
        return self.writes.writes.change(z.flatten(3) @ self.writes.matrix.flatten(0, 1))

    def write_vectors(
        self, z: Float[Tensor, "batch target d_head"], nodes: Nodes, position: Place
    ) -> Float[Tensor, "batch target d_model"]:
        """Return the vector that each node adds to the residual stream at its position."""
        by_node = torch.einsum("btd,tdm->btm", z, self.writes.matrix[nodes])
        return self.writes.writes.at(places(position)).change(by_node)

    def output_gradients(self, gradient: Residual, positions: Positions = slice(None)) -> Outputs:
        """Backpropagate the gradient at the residual stream to the nodes' outputs."""
        back = self.writes.writes.back(gradient, positions)
        return torch.einsum("bpm,hdm->bphd", back, self.writes.matrix)


@dataclass(frozen=True, eq=False)
class LinearAttention(LinearSublayer):
    """Attention heads whose patterns are held fixed at their values in the run."""

    pattern: Float[Tensor, "batch head_index query_pos key"]
    W_V: Float[Tensor, "head_index d_model d_head"]

    def of_input(self, entering: Tensor) -> Tensor:
        """Return the heads' outputs: pattern times values."""
        values = torch.einsum("abkm,hmd->abhkd", entering, self.W_V)
        return torch.einsum("bhqk,abhkd->abqhd", self.pattern, values)

    def of_sizes(self) -> "LinearAttention":
        """Return the heads with |pattern| and |W_V|."""
        return replace(self, pattern=self.pattern.abs(), W_V=self.W_V.abs())

    def back(self, gradient: Outputs) -> Residual:
        """Return the gradient at the stream that the heads read."""
        values = torch.einsum("bhqk,bqhd->bkhd", self.pattern, gradient)
        return self.writes.reads.back(torch.einsum("bkhd,hmd->bkm", values, self.W_V))

    def covectors(self, gradient: Tensor, nodes: Nodes, position: Place, key: Place) -> Tensor:
        """Return the gradient at position `key` of the stream."""
        values = gradient * self.pattern[:, nodes, position, key].unsqueeze(-1)
        entering = torch.einsum("btd,tmd->btm", values, self.W_V[nodes])
        return self.writes.reads.back(entering, places(key))


@dataclass(frozen=True, eq=False)
class LinearNeurons(LinearSublayer):
    """Neurons whose gates are held fixed at their values in the run.

    Each output is a sum of projections, multiplied by factors recorded in the run.
    """

    terms: tuple[tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, "batch pos d_mlp"]], ...]

    def of_input(self, entering: Tensor) -> Tensor:
        """Return the neurons' outputs: the sum over `terms` of (x W) · factor, for the input x."""
        terms = [(entering @ W) * factor for W, factor in self.terms]
        return sum(terms[1:], terms[0]).unsqueeze(-1)

    def of_sizes(self) -> "LinearNeurons":
        """Return the neurons with |W| and |factor|."""
        return replace(self, terms=tuple((W.abs(), factor.abs()) for W, factor in self.terms))

    def back(self, gradient: Outputs) -> Residual:
        """Return the gradient at the stream that the neurons read."""
        terms = [(gradient.squeeze(-1) * factor) @ W.T for W, factor in self.terms]
        return self.writes.reads.back(sum(terms[1:], terms[0]))

    def covectors(self, gradient: Tensor, nodes: Nodes, position: Place, key: Place) -> Tensor:
        """Return the gradient at `position` of the stream; neurons read no other position."""
        terms = [
            (gradient.squeeze(-1) * factor[:, position, nodes]).unsqueeze(-1) * W.T[nodes]
            for W, factor in self.terms
        ]
        return self.writes.reads.back(sum(terms[1:], terms[0]), places(position))


@dataclass(frozen=True, eq=False)
class LinearSkip(LinearSublayer):
    """A transcoder's skip node, whose output z is the transcoder's input; W_skip is its W_O."""

    def of_input(self, entering: Tensor) -> Tensor:
        """Return the input, with a head_index axis of size 1."""
        return entering.unsqueeze(-2)

    def back(self, gradient: Outputs) -> Residual:
        """Return the gradient at the stream that the node reads."""
        return self.writes.reads.back(gradient.squeeze(-2))

    def covectors(self, gradient: Tensor, nodes: Nodes, position: Place, key: Place) -> Tensor:
        """Return the gradient at `position` of the stream."""
        return self.writes.reads.back(gradient, places(position))


@dataclass(frozen=True, eq=False)
class LinearError(LinearSublayer):
    """A transcoder's error node, whose output is held fixed at its value in the run."""

    def of_input(self, entering: Tensor) -> Tensor:
        """Return zeros, because the output is a constant."""
        return torch.zeros_like(entering).unsqueeze(-2)

    def back(self, gradient: Outputs) -> Residual:
        """Return zeros, because the output is a constant."""
        return torch.zeros_like(gradient.squeeze(-2))

    def covectors(self, gradient: Tensor, nodes: Nodes, position: Place, key: Place) -> Tensor:
        """Return zeros, because the output is a constant."""
        return torch.zeros_like(gradient)


def wide_sublayer(writes: SublayerWrites) -> LinearSublayer:
    """Return the linear function of a skip node or an error node."""
    if writes.kind == "error":
        return LinearError(writes, constant=writes.z)
    zero = torch.zeros_like(writes.z)
    linear = LinearSkip(writes, zero)
    return LinearSkip(writes, zero + _norm_bias(linear))


def places(position: Place) -> Positions:
    """Return an index for one position, or for one position per node; it keeps the pos axis."""
    return slice(position, position + 1) if isinstance(position, int) else position


@dataclass(frozen=True, eq=False)
class LinearRun:
    """A forward pass, expressed as linear maps between heads.

    Attributes:
        model: the model.
        run: the run's writes, and the patterns of attention heads.
        sublayers: the sublayers in the order of computation.
        logits: the logits before any soft cap.
    """

    model: Any
    run: Decomposition
    sublayers: tuple[LinearSublayer, ...]
    logits: Float[Tensor, "batch pos d_vocab"]

    def n_before(self, index: int) -> int:
        """Return the number of sublayers whose outputs the given sublayer reads."""
        writes = self.sublayers[index].writes
        return len(self.run.before(writes.layer, writes.kind))

    @property
    def _factor(self) -> float:
        return 1.0 if self.run.logit_factor is None else self.run.logit_factor

    def metric_gradient(self, metric: BoundMetric) -> tuple[Tensor, float]:
        """Return a metric's gradient at the logits before any soft cap, and the metric's value."""
        recording = self.run.recording
        if self.run.logit_factor is not None:  # no soft cap
            with torch.enable_grad():
                logits = as_leaf(recording.logits)
                value = metric.of_logits(logits)
                (gradient,) = torch.autograd.grad(value, logits)
            return gradient.to(self.logits), float(value.detach())
        with torch.enable_grad(), start_graph(self.model), uncapped_logits(self.model) as uncapped:
            logits = run_model(self.model, recording.tokens, recording.mask, [])
            value = metric.of_logits(logits)
            (gradient,) = torch.autograd.grad(value, uncapped[-1])
        return gradient, float(value.detach())

    def stream_gradient(self, gradient: Float[Tensor, "batch pos d_vocab"]) -> Residual:
        """Backpropagate the gradient at the logits to the final residual stream."""
        with torch.enable_grad():
            change = torch.zeros_like(self.run.final.stream).requires_grad_()
            logits = self._factor * self.model.unembed(self.run.final.change(change))
            (derivative,) = torch.autograd.grad(logits, change, gradient)
        return derivative

    @torch.no_grad()
    def unembed(self, streams: Float[Tensor, "part batch pos d_model"]) -> Tensor:
        """Return the logits of each part of the final stream, with all biases in the first part."""
        final = self.run.final
        zero = torch.zeros_like(final.stream[:1, :1])
        base = self.model.unembed(zero)
        logits = torch.stack([self.model.unembed(final.change(part)) - base for part in streams])
        bias = zero if final.norm.bias is None else zero + final.norm.bias
        logits[0] += self.model.unembed(bias.to(zero))
        return logits * self._factor

    @torch.no_grad()
    def gradients(self, final: Residual) -> tuple[list[Outputs], list[Residual]]:
        """Return the gradients at all outputs and at the residual stream around each sublayer.

        Args:
            final: the gradient at the final stream.
        """
        n = len(self.sublayers)
        readers: list[list[Residual]] = [[] for _ in range(n)]  # index: number of earlier sublayers
        outputs: list[Outputs] = []
        streams = [final]
        for index in reversed(range(n)):
            sublayer = self.sublayers[index]
            outputs.insert(0, sublayer.output_gradients(streams[0]))
            readers[self.n_before(index)].append(sublayer.back(outputs[0]))
            stream = sum((x.to(streams[0]) for x in readers[index]), streams[0])
            streams.insert(0, stream)
        return outputs, streams


@torch.no_grad()
@full_precision()
def linearize(
    model: Any,
    tokens: Tokens,
    mask: Tensor | None,
    *,
    held: Held = "half",
    names: Sequence[str] = (),
) -> LinearRun:
    """Run a model once, and return the model's linearisation at this run.

    Args:
        model: a model with neuron-heads.
        tokens: the model's input.
        mask: 1 for tokens and 0 for padding.
        held: the factor of gated neurons' values to hold constant.
        names: further hook points of attention heads to record.

    Raises:
        InputError: a bridge has unknown norms or matrices, or the run is not finite.
        UnsupportedModelError: writes do not add up to the stream, or heads are not linear in their
            input.
    """
    host = host_of(model)
    patterns = host.hook_names("pattern", ("attention",))
    run = decompose(model, tokens, mask, names=(*patterns, *names))
    sublayers = list[LinearSublayer]()
    for writes in run.sublayers:
        if writes.kind in WIDE_KINDS:
            sublayers.append(wide_sublayer(writes))
        elif writes.neurons is None:
            pattern = run.recording.hooked[patterns[writes.layer]]
            sublayers.append(_attention(host, writes, pattern))
        else:
            weight = run.recording.neurons[writes.layer].weight
            sublayers.append(_neurons(writes, weight, held))
    linear = LinearRun(model, run, tuple(sublayers), run.uncapped)
    _require_linear(linear)
    return linear


def by_head(weights: Tensor, n_heads: int) -> Tensor:
    """Repeat the weights of shared keys or values for each query head that reads them."""
    return weights.detach().repeat_interleave(n_heads // len(weights), dim=0)


def _attention(host: Any, writes: SublayerWrites, pattern: Tensor) -> LinearAttention:
    module, n_heads = host.attention(writes.layer), host.n_heads[writes.layer]
    W_V, b_V = by_head(module.W_V, n_heads), getattr(module, "b_V", None)
    constant = torch.zeros_like(writes.z)
    if b_V is not None:
        by_head_bias = by_head(b_V.view(-1, W_V.shape[2]), n_heads)
        constant = torch.einsum("bhqk,hd->bqhd", pattern, by_head_bias)
    linear = LinearAttention(writes, constant, pattern, W_V)
    return LinearAttention(writes, constant + _norm_bias(linear), pattern, W_V)


def _neurons(writes: SublayerWrites, weight: Tensor, held: Held) -> LinearNeurons:
    heads: Any = writes.neurons
    gate, up = heads.projections(writes.entered)
    gate_bias, up_bias = heads.projections(torch.zeros_like(writes.entered[:1, :1]))
    scale = heads.gate.scale
    if not heads.value_is_product:
        bias = gate_bias if up is None else up_bias
        projections = [(heads.read_matrices[-1], scale * weight, bias)]
    else:
        share = 0.5 if held == "half" else 1.0
        projections = [
            (W, scale * share * weight * factor, bias)
            for name, W, factor, bias in (
                ("gate", heads.module.W_in, gate, up_bias),
                ("up", heads.module.W_gate, up, gate_bias),
            )
            if held in (name, "half")
        ]
    terms = tuple((W.detach(), factor) for W, factor, _ in projections)
    constant = sum(bias * factor for _, factor, bias in projections)
    linear = LinearNeurons(writes, constant.detach().unsqueeze(-1), terms)
    return LinearNeurons(writes, linear.constant + _norm_bias(linear), terms)


def _norm_bias(sublayer: LinearSublayer) -> Tensor | float:
    """Return the part of the nodes' outputs that comes from the bias of the preceding norm."""
    entered, bias = sublayer.writes.entered, sublayer.writes.reads.norm.bias
    return 0.0 if bias is None else sublayer.of_input(bias.to(entered).expand_as(entered)[None])[0]


def _require_linear(linear: LinearRun) -> None:
    """Raise an error if the linear maps do not reproduce the outputs recorded in the run."""
    reasons, largest = list[str](), list[Tensor]()
    mask = linear.run.recording.mask
    for sublayer in linear.sublayers:
        outputs = sublayer.writes.z
        again = sublayer.z(sublayer.writes.reads.stream[None])[0] + sublayer.constant
        both = torch.stack([again - outputs, outputs]).abs().amax((-2, -1))
        if mask is not None:
            both = both.masked_fill(mask.to(both) == 0, 0.0)
        largest.append(both.amax((1, 2)))
    for sublayer, numbers in zip(linear.sublayers, on_cpu(largest), strict=True):
        writes, (error, size) = sublayer.writes, numbers.tolist()
        amplification = max(writes.neurons.amplification, 1.0) if writes.neurons else 1.0
        allowed = LOGIT_TOLERANCE[torch.float32] * amplification
        if error <= allowed * size:
            continue
        # Terms may be much larger than their sum, and rounding is relative to the terms.
        size = float(sublayer.of_sizes().of_input(writes.entered[None].abs()).abs().max())
        if not error <= allowed * size:
            reasons.append(
                f"layer {writes.layer}: the outputs of its {writes.kind} heads are not linear in "
                f"their values (off by {error:.2g}, and rounding allows {allowed * size:.2g})"
            )
    UnsupportedModelError.raise_if(reasons, "this run is not linear with constant patterns")
