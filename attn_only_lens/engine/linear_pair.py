"""Compute linear maps between heads that reproduce the change between two runs exactly.

The change in a head's output is a linear function of the changes in all earlier outputs:

    Δz_t = Σ_s W_ts Δz_s + W_te Δx_0

Here Δ is the clean run minus the corrupted run, s an earlier head, x_0 the embedding and each W a
matrix. W_ts has two terms: the effect of s on the values of t, weighted by the mean pattern, and
its effect on the pattern of t, multiplied by the slope of the softmax or gate (`secants.py`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.engine.linear_run import (
    LinearAttention,
    LinearError,
    LinearNeurons,
    LinearSkip,
    LinearSublayer,
    by_head,
)
from attn_only_lens.engine.secants import gate_derivative, mean, norm_change, slope
from attn_only_lens.engine.writes import (
    Decomposition,
    FrozenNorm,
    Positions,
    Scale,
    SublayerWrites,
    read_matrices,
)
from attn_only_lens.heads import host_of


@dataclass(frozen=True, eq=False)
class SecantNorm(FrozenNorm):
    """A norm as a linear map from its input's change between two runs to its output's change.

    Attributes:
        norm: the norm's matrix N and its bias.
        stream: the mean input of the two runs, centred if the norm subtracts the mean.
        scale: the harmonic mean of the scales s of both runs.
        scales: 1 / s in both runs.
    """

    scales: tuple[Float[Tensor, "batch pos 1"], Float[Tensor, "batch pos 1"]]

    @classmethod
    def between(cls, both: FrozenNorm) -> "SecantNorm":
        """Return a norm's linear map, given its scales and inputs in a batch of both runs."""
        clean, corrupted = (1 / both.scale).chunk(2)
        middle = both.norm.centred(mean(both.stream))
        return cls(both.norm, middle, 2 / (clean + corrupted), (clean, corrupted))

    def at(self, positions: Positions) -> "SecantNorm":
        """Return the same norm, restricted to the given positions."""
        clean, corrupted = (scale[:, positions] for scale in self.scales)
        stream, scale = self.stream[:, positions], self.scale[:, positions]
        return SecantNorm(self.norm, stream, scale, (clean, corrupted))

    def change(
        self, change: Float[Tensor, "*any batch pos d_model"], scale: Scale = "held"
    ) -> Float[Tensor, "*any batch pos d_model"]:
        """Return the change in the norm's output that is due to a part of its input's change."""
        change = self.norm.centred(change.to(self.stream.device))
        result: Tensor = self.norm.gain(self._secant(change))
        return result

    def back(self, gradient: Residual, positions: Positions = slice(None)) -> Residual:
        """Return the multiplier of the norm's input, given the multiplier of its output."""
        gain: Tensor = self.norm.gain(gradient.to(self.stream.device))
        result: Tensor = self.norm.centred(self.at(positions)._secant(gain))
        return result

    def _secant(self, change: Tensor) -> Tensor:
        if self.norm.module is None:
            return change
        return norm_change(self.stream, *self.scales, change)


def linear_sublayers(model: Any, both: Decomposition) -> list[LinearSublayer]:
    """Return the linear maps of every sublayer, given one run on clean and corrupted prompts."""
    host = host_of(model)
    sublayers: list[LinearSublayer] = []
    for writes in both.sublayers:
        between = _between(writes)
        constant = torch.zeros_like(between.z)
        if writes.kind == "skip":
            sublayers.append(LinearSkip(between, constant))
        elif writes.kind == "error":
            sublayers.append(LinearError(between, constant))
        elif writes.neurons is None:
            name = host.hook_name(writes.layer, "attention", "pattern")
            W_V = by_head(host.attention(writes.layer).W_V, host.n_heads[writes.layer])
            pattern = mean(both.recording.hooked[name])
            sublayers.append(LinearAttention(between, constant, pattern, W_V))
        else:
            gates = both.recording.neurons[writes.layer]
            terms = _value_terms(writes, mean(gates.weight))
            sublayers.append(LinearNeurons(between, constant, terms))
    return sublayers


def _between(writes: SublayerWrites) -> SublayerWrites:
    """Return a sublayer's writes to the residual stream, clean minus corrupted run."""
    clean, corrupted = writes.z.chunk(2)
    reads, after = (SecantNorm.between(norm) for norm in (writes.reads, writes.writes))
    z, entered = clean - corrupted, mean(writes.entered)
    bias = torch.zeros_like(entered)
    return replace(writes, reads=reads, entered=entered, writes=after, z=z, bias=bias)


def _leaves(writes: SublayerWrites) -> tuple[Any, Tensor, Tensor | None]:
    """Return the neuron-heads, and the means of q and u over both runs as autograd leaves."""
    heads: Any = writes.neurons
    q, up = (None if x is None else mean(x) for x in heads.projections(writes.entered))
    assert q is not None
    return heads, q.requires_grad_(), None if up is None else up.requires_grad_()


def _value_terms(
    writes: SublayerWrites, weight: Float[Tensor, "batch pos head_index"]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the weight matrices of q and u, each with the outputs' derivative at fixed gates."""
    heads, q, up = _leaves(writes)
    with torch.enable_grad():
        _, v = heads._query_and_value(q, up)
        outputs = weight * v
        leaves = [q] if up is None else [q, up]
        factors = torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)
    return tuple(
        (W.detach(), factor)
        for W, factor in zip(read_matrices(heads), factors, strict=True)
        if factor is not None
    )


def gate_term(
    writes: SublayerWrites, gates: Any
) -> tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, "batch pos d_mlp"]]:
    """Return q's weight matrix, and the neurons' slope with respect to q at constant values.

    Args:
        writes: the neurons' writes in one run on clean and corrupted prompts.
        gates: the neurons' values and weights in this run.
    """
    heads, q, up = _leaves(writes)
    queries, _ = heads._query_and_value(*heads.projections(writes.entered))
    (x_1, x_0), (y_1, y_0) = queries.chunk(2), gates.weight.chunk(2)
    along = slope(y_1, y_0, x_1, x_0, partial(gate_derivative, heads))
    with torch.enable_grad():
        query, _ = heads._query_and_value(q, up)
        outputs = along * query * mean(gates.v)
        (factor,) = torch.autograd.grad(outputs.sum(), q)
    return read_matrices(heads)[0].detach(), factor
