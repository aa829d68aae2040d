"""Path expansion on a prompt: the logits as a sum over paths, through no head, one, two, or more.

Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits") expand the logits of an
attention-only model into end-to-end terms. With patterns frozen a head is linear, so the stream is

    x = Σ_paths  F_t … F_s x_0        F_t x = A_t (x N / s + b) W_V W_O of head t, frozen at a run

over all paths embedding → s → … → t → logits. A neuron-head is such a head: its pattern is its
gate, and with that frozen, its output is linear in its value. That is what lets the expansion reach
MLPs:

    z_i = p_i v_i           p_i: the pattern, on the token itself; v_i = x · W_in[:, i] + b_in[i]

An exact head of a gated MLP has a value that is a product, v_i = g_i u_i: one factor is held. With
`held="gate"`, p_i g_i is a number of the run and paths go through u_i = x · W_in[:, i]; with
`held="up"`, p_i u_i is, and paths go through the neuron's score, g_i = x · W_gate[:, i]. Bilinear
heads have a linear value, and hold their gates.

Scales of norms are held too, as patterns are; norms after a sublayer (OLMo 2, Gemma 2) are part of
the head. Nothing is approximated: the terms add up to the logits of the run. But a path says what
flows with this run's patterns, not what another prompt would do to them.

A path begins at the embedding, with positions, or at a bias. Biases that a sublayer writes by
itself (b_O, b_out) count as written before any head; those that a head reads or adds inside (b_V,
b_in, a norm's) begin in that head: one hop.

One pass over the sublayers carries the streams of 0, 1, 2, and more hops side by side. The effect
of a single path is a product of two vectors,

    embedding → s → t → logits       z_s W_O[s] · F_tᵀ c

with z_s what s puts out of the embedding alone, and c the gradient of a metric at the stream that
is unembedded. So the effects of all pairs are products of matrices, of which the largest are found
in blocks.

In numbers of the model's dtype, of batch B, N tokens, V the vocabulary and H heads and neurons:

    2 (h + 2) B N V                             logits, for `hops=h`, while they are made
    B N (8 (h + 3) (d_model + m) + Σ d_head)    the streams, m the largest Σ d_head of a sublayer,
                                                and what every head puts out of the embedding
    B N Σ (5 d_model + 6 d_head + N)            the run and its patterns (`engine/writes.py`): the
                                                sums are over sublayers, heads, attention heads
    4 b B d_model + 3 m B d_model               `paths`, a block of b heads, and what those of one
      + 2 b² + 16 b min(k, b)                   sublayer write
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import is_count
from attn_only_lens.axes import Residual
from attn_only_lens.engine.frozen_pass import uncapped_logits
from attn_only_lens.engine.gradients import start_graph
from attn_only_lens.engine.in_float32 import float32_weights, in_float32
from attn_only_lens.engine.inputs import option_reasons, reasons_not_to_run
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.metrics import (
    AnyMetric,
    bind,
    no_gradient_reasons,
    one_run_reasons,
    require_differentiable,
)
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.writes import Decomposition, FrozenNorm, SublayerWrites, decompose
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of, logit_tolerance, reasons_without_heads
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_MOST_HOPS = 1000
_HELD = ("gate", "up")
_PROBLEM = "the logits of this model cannot be expanded into paths"


@dataclass(frozen=True, eq=False)
class _Linear:
    """The heads of one sublayer in a run, linear in what they read.

    Attributes:
        run: the sublayer.
        pattern: of attention heads [batch, head, query, key]; of neurons, the factor of their
            value [batch, pos, neuron].
        matrix: W_V of each attention head, or what makes the values of neurons.
        constant: z of the heads where the stream is 0.
    """

    run: SublayerWrites
    pattern: Tensor
    matrix: Tensor
    constant: Float[Tensor, "batch pos head d_head"]

    def z(
        self, stream: Float[Tensor, "part batch pos d_model"]
    ) -> Float[Tensor, "part batch pos head d_head"]:
        """What the heads put out of a part of the stream."""
        return self.of_input(self.run.reads.change(stream))

    def of_input(self, entering: Tensor) -> Tensor:
        if self.run.neurons is None:
            values = torch.einsum("abkm,hmd->abhkd", entering, self.matrix)
            return torch.einsum("bhqk,abhkd->abqhd", self.pattern, values)
        return ((entering @ self.matrix) * self.pattern).unsqueeze(-1)

    def written(self, z: Float[Tensor, "part batch pos head d_head"]) -> Tensor:
        """What they then write, together."""
        return self.run.writes.change(z.flatten(3) @ self.run.matrix.flatten(0, 1))

    def write_vectors(self, z: Float[Tensor, "batch head d_head"], at: int) -> Tensor:
        """What each of them writes at a position: [head, batch, d_model]."""
        of_heads = torch.einsum("bhd,hdm->hbm", z, self.run.matrix)
        return self.run.writes.at(slice(at, at + 1)).change(of_heads.unsqueeze(2)).squeeze(2)

    def output_gradients(self, gradient: Float[Tensor, "batch d_model"], at: int) -> Tensor:
        """That at z of each head, from one at the stream at a position: [batch, head, d_head]."""
        back = _back(self.run.writes, gradient, at)
        return torch.einsum("bm,hdm->bhd", back, self.run.matrix)

    def input_gradients(
        self, gradient: Float[Tensor, "batch head d_head"], heads: slice, at: int, key: int
    ) -> Float[Tensor, "head batch d_model"]:
        """That at the stream at `key`, from one at z of some heads at a position."""
        if self.run.neurons is None:
            values = gradient[:, heads] * self.pattern[:, heads, at, key, None]
            entering = torch.einsum("bhd,hmd->hbm", values, self.matrix[heads])
        else:
            values = gradient[:, heads, 0] * self.pattern[:, at, heads]
            entering = values.T.unsqueeze(-1) * self.matrix.T[heads].unsqueeze(1)
        return _back(self.run.reads, entering, key)


def _back(norm: FrozenNorm, gradient: Float[Tensor, "*any batch d_model"], at: int) -> Tensor:
    """The gradient before a norm, its scale held, from that behind it at a position."""
    linear: Tensor = norm.norm.before(gradient.flatten(0, -2).T).T
    return linear.view_as(gradient) / norm.scale[:, at]


@dataclass(frozen=True, eq=False)
class PathExpansion:
    """The logits of a run by the number of heads and neuron-heads that paths go through.

    Attributes:
        logits: those of paths through no head, one, two, and so on; the last, of all that are
            longer. They add up to the logits of the run, before any soft cap.
        held: the factor of gated neurons that is held.
    """

    logits: Float[Tensor, "hops batch pos d_vocab"]
    held: Literal["gate", "up"]
    _model: Any = field(repr=False)
    _pair: PromptPair = field(repr=False)
    _parts: Decomposition = field(repr=False)
    _linear: tuple[_Linear, ...] = field(repr=False)
    _first: tuple[Tensor, ...] = field(repr=False)
    """z of each sublayer, out of the embedding and biases alone."""

    @full_precision()
    def effects(self, metric: AnyMetric) -> pd.DataFrame:
        """Return what paths of each length add to a metric.

        Args:
            metric: a function of the logits of one run; if it is not linear, to first order at
                the run's.

        Returns:
            `hops` ("0", "1", "2", …, "more") and `effect`. For a metric that is linear in logits
            without a cap, effects add up to it; `attrs["value"]` has it.

        Raises:
            InputError: a metric that compares two runs, or that no gradient passes through.
        """
        with float32_weights(self._model):
            gradient, value = self._gradient(metric)
        effect = (self.logits * gradient).sum((1, 2, 3)).cpu().double().numpy()
        hops = [*map(str, range(len(effect) - 1)), "more"]
        frame = pd.DataFrame({"hops": hops, "effect": effect})
        frame.attrs["value"] = value
        return frame

    @full_precision()
    def paths(
        self, metric: AnyMetric, k: int = 100, *, block: int = 1024, progress: bool = True
    ) -> pd.DataFrame:
        """Return the single paths with the largest effects on a metric, through one head or two.

        Args:
            metric: as in `effects`.
            k: how many paths; fewer if there are fewer.
            block: heads on either side at once.
            progress: whether to show a bar over positions and sublayers.

        Returns:
            Rows by falling |effect|: `hops` (1 or 2), `first` and `second` (names with positions,
            `L3N7@13`; `second` is empty for one hop), `effect`. `attrs["paths"]` is the number of
            all such paths; `attrs["value"]`, the metric.

        Raises:
            InputError: as in `effects`; k or block not positive.
        """
        reasons = [
            f"got {name}={given!r}; expected 1 or more"
            for name, given in (("k", k), ("block", block))
            if not is_count(given, 1)
        ]
        InputError.raise_if(reasons, _PROBLEM)
        with torch.no_grad(), float32_weights(self._model):
            gradient, value = self._gradient(metric)
            ranked = _Ranked(self._parts, self._linear, self._first, k, block)
            stream = self._stream_gradient(gradient)
            ends = stream.abs().amax((0, 2)).nonzero().flatten().tolist()
            for at in tqdm(ends, unit="position", disable=not progress):
                ranked.add(stream[:, at], at)
        frame = ranked.frame()
        frame.attrs["value"] = value
        return frame

    def _gradient(self, metric: AnyMetric) -> tuple[Float[Tensor, "batch pos d_vocab"], float]:
        """That of the metric at the logits before any soft cap, and the metric."""
        InputError.raise_if([*one_run_reasons(metric), *no_gradient_reasons()], _PROBLEM)
        recording = self._parts.recording
        bound = bind(metric, self._model, self._pair, recording.logits)
        require_differentiable(bound, recording.logits)
        with (
            torch.enable_grad(),
            start_graph(self._model),
            uncapped_logits(self._model) as uncapped,
        ):
            value = bound.of_logits(run(self._model, recording.tokens, recording.mask, []))
            (gradient,) = torch.autograd.grad(value, uncapped[-1])
        return gradient, float(value.detach())

    def _stream_gradient(self, gradient: Float[Tensor, "batch pos d_vocab"]) -> Residual:
        """That at the stream which is unembedded, the scale of its norm held."""
        with torch.enable_grad():
            change = torch.zeros_like(self._parts.final.stream).requires_grad_()
            logits = self._model.unembed(self._parts.final.change(change))
            (found,) = torch.autograd.grad(logits, change, gradient)
        return found


@in_float32
@torch.no_grad()
@full_precision()
def path_expansion(
    model: Any,
    prompts: Prompts,
    hops: int = 2,
    *,
    held: Literal["gate", "up"] = "gate",
    mask: Tensor | None = None,
) -> PathExpansion:
    """Expand the logits of a run into paths through heads and neuron-heads, patterns frozen.

    Exact: patterns and norm scales are those of the run, and what is linear with them held is
    expanded, not approximated. A neuron-head is linear in its value once its gate is frozen.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: converted, or with exposed neuron-heads. A model in half precision is run in float32
            during the call, with the same weights, and again in `effects` and `paths`.
        prompts: a text, texts, or tokens.
        hops: the most heads of paths that are told apart by their number.
        held: in a gated MLP with exact heads, the factor of the value that is held: "gate" (paths
            go through W_in), or "up" (through W_gate, the neuron's score).
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.

    Returns:
        Logits of paths through 0, 1, 2 and more heads. Its `effects` tells what they add to a
        metric, and its `paths` the single paths through one head or two that add most.

    Raises:
        InputError: with every reason: prompts that do not fit, unknown norms or
            matrices, `held="up"` where no value is a product.
        UnsupportedModelError: heads do not put out what is linear in what they read, as where
            values are clipped or normed; or paths do not add up to the logits.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> found = circuits.path_expansion(model, "The keys near the cabinet")
        >>> found.logits.shape
        torch.Size([4, 1, 6, 456])
        >>> metric = p.logit_diff(" are", " is")
        >>> effects = found.effects(metric)
        >>> bool(abs(effects["effect"].sum() - effects.attrs["value"]) < 1e-4)
        True
        >>> found.paths(metric, k=3, progress=False).columns.tolist()
        ['hops', 'first', 'second', 'effect']
    """
    reasons = [*reasons_without_heads(model), *reasons_not_to_run(model)]
    reasons += option_reasons("held", held, _HELD)
    if not is_count(hops, 1, _MOST_HOPS):
        reasons.append(f"got hops={hops!r}; expected 1 to {_MOST_HOPS}")
    InputError.raise_if(reasons, _PROBLEM)
    host = host_of(model)
    if held == "up" and not any(each.value_is_product for each in host.neurons):
        raise InputError(
            ["got held='up'; no value of these neuron-heads is a product: leave it out"], _PROBLEM
        )
    pair = single_prompts(model, prompts, mask)
    patterns = [host.hook_name(layer, "attention", "pattern") for layer in range(host.n_layers)]
    with uncapped_logits(model) as uncapped:
        parts = decompose(model, pair.clean, pair.mask, names=tuple(patterns))
    linear = tuple(
        _of_attention(host, each, parts.recording.hooked[patterns[each.layer]])
        if each.neurons is None
        else _of_neurons(each, parts, held)
        for each in parts.sublayers
    )
    _require_linear(parts, linear)
    streams, first = _expanded(parts, linear, hops)
    logits = _unembedded(model, parts.final, streams)
    _require_logits(model, logits, uncapped[-1], pair)
    return PathExpansion(logits, held, model, pair, parts, linear, first)


def _of_attention(host: Any, each: SublayerWrites, pattern: Tensor) -> _Linear:
    module, n_heads = host.attention(each.layer), host.n_heads[each.layer]
    W_V, b_V = module.W_V.detach(), getattr(module, "b_V", None)
    W_V = W_V.repeat_interleave(n_heads // len(W_V), dim=0)
    constant = torch.zeros_like(each.z)
    if b_V is not None:
        own = b_V.detach().view(-1, W_V.shape[2])
        own = own.repeat_interleave(n_heads // len(own), dim=0)
        constant = torch.einsum("bhqk,hd->bqhd", pattern, own)
    return _with_constant(each, pattern, W_V, constant)


def _of_neurons(each: SublayerWrites, parts: Decomposition, held: str) -> _Linear:
    heads: Any = each.neurons
    weight = parts.recording.neurons[each.layer].weight
    q, up = heads.projections(each.entered)
    W, value = heads.module.W_in, q if up is None else up
    if not heads.value_is_product:
        factor = heads.neuron_outputs(weight)
    elif held == "gate":
        factor = weight * q
    else:
        factor, W, value = weight * up, heads.module.W_gate, q
    W = W.detach()
    own = (value - each.entered @ W) * factor  # of the projection's bias
    return _with_constant(each, factor, W, own.unsqueeze(-1))


def _with_constant(
    run: SublayerWrites, pattern: Tensor, matrix: Tensor, constant: Tensor
) -> _Linear:
    """The heads, once what they put out of the norm that they read through is in the constant."""
    bias = run.reads.norm.bias
    if bias is not None:
        entering = bias.to(run.entered).expand_as(run.entered)
        constant = constant + _Linear(run, pattern, matrix, constant).of_input(entering[None])[0]
    return _Linear(run, pattern, matrix, constant)


def _require_linear(parts: Decomposition, linear: tuple[_Linear, ...]) -> None:
    """Hold what the linear heads put out of the whole stream against the run."""
    reasons = []
    for each in linear:
        z = each.run.z
        if each.run.neurons is not None:
            z = each.run.neurons.neuron_outputs(z.squeeze(-1)).unsqueeze(-1)
        off = (each.z(each.run.reads.stream[None])[0] + each.constant - z).abs()
        size = max(float(each.run.neurons.amplification) if each.run.neurons else 1.0, 1.0)
        mask = parts.recording.mask
        off, z = (x if mask is None else x[mask.bool().to(x.device)] for x in (off, z))
        allowed = LOGIT_TOLERANCE[torch.float32] * size * z.abs().amax()
        if not off.amax() <= allowed:
            reasons.append(
                f"layer {each.run.layer}: its {each.run.kind} heads put out what is not linear in "
                f"their values (off by {float(off.amax()):.2g} of {float(z.abs().amax()):.2g}), "
                "such as values that are clipped or normed"
            )
    UnsupportedModelError.raise_if(reasons, _PROBLEM)


def _expanded(
    parts: Decomposition, linear: tuple[_Linear, ...], hops: int
) -> tuple[Float[Tensor, "hops batch pos d_model"], tuple[Tensor, ...]]:
    """The final stream by hops, and z of each sublayer out of the embedding and biases alone."""
    none = torch.zeros_like(parts.embedding)
    streams = torch.stack([parts.embedding, *[none] * (hops + 1)])
    first = []
    for attention, neurons in zip(linear[::2], linear[1::2], strict=True):
        before = streams
        for each in (attention, neurons):
            parallel = each is neurons and parts.parallel[each.run.layer]
            read = (before if parallel else streams).to(each.run.entered.device)
            # A head makes paths of h hops longer by one; the longest stay together.
            z = each.z(torch.cat([read[:hops], read[hops:].sum(0, keepdim=True)]))
            z[0] += each.constant
            first.append(z[0])
            streams = streams.to(z.device) + torch.cat([each.run.bias[None], each.written(z)])
    return streams, tuple(first)


def _unembedded(model: Any, final: FrozenNorm, streams: Tensor) -> Tensor:
    nothing = torch.zeros_like(final.stream[:1, :1])
    constant = nothing if final.norm.bias is None else nothing + final.norm.bias
    base = model.unembed(nothing)
    logits = torch.stack([model.unembed(final.change(each)) - base for each in streams])
    logits[0] += model.unembed(constant.to(nothing))
    return logits


def _require_logits(model: Any, terms: Tensor, logits: Tensor, pair: PromptPair) -> None:
    real = pair.real.to(logits.device)
    # Terms of different lengths may be much larger than their sum.
    off = (terms.sum(0) - logits)[real].abs().amax()
    size = terms.abs().sum(0)[real].amax()
    allowed = max(
        logit_tolerance(host_of(model).neurons, dtype) for dtype in (logits.dtype, torch.float32)
    )
    if not off <= allowed * size:
        raise UnsupportedModelError(
            [
                f"its paths add up to logits that differ by {float(off):.2g} from those of the run "
                f"(the sizes of terms add up to {float(size):.2g})"
            ],
            _PROBLEM,
        )


class _Ranked:
    """The largest effects of single paths.

    Args:
        parts: the run.
        linear: its heads.
        first: what they put out of the embedding.
        k: how many to keep.
        block: heads at once.
    """

    def __init__(
        self,
        parts: Decomposition,
        linear: tuple[_Linear, ...],
        first: tuple[Tensor, ...],
        k: int,
        block: int,
    ) -> None:
        self._parts, self._linear, self._first = parts, linear, first
        self._block, self._counts = block, [each.shape[2] for each in first]
        self._n_pos = parts.embedding.shape[1]
        self._starts = list(accumulate(self._counts, initial=0))
        self._n = self._starts[-1]
        self._largest = LargestScores(k, by_size=True)

    def _number(self, index: int, at: int) -> int:
        """That of the first head of a sublayer at a position; 0 is no head."""
        return 1 + at * self._n + self._starts[index]

    def add(self, stream: Float[Tensor, "batch d_model"], at: int) -> None:
        """Add the paths whose last head writes at a position, given the gradient there."""
        for index, last in enumerate(self._linear):
            gradient = last.output_gradients(stream.to(last.run.z.device), at)
            alone = (gradient * self._first[index][:, at]).sum((0, 2))
            self._largest.add(alone[None], (0, self._number(index, at)))
            for some in self._slices(index):
                for key in range(self._n_pos) if last.run.neurons is None else (at,):
                    back = last.input_gradients(gradient, some, at, key).flatten(1)
                    if not back.any():  # masked
                        continue
                    for before, written in self._writers(last, key):
                        self._largest.add_products(
                            back,
                            written.to(back).flatten(1),
                            (self._number(index, at) + some.start, self._number(before, key)),
                            block=self._block,
                        )

    def _slices(self, index: int) -> Iterator[slice]:
        for start in range(0, self._counts[index], self._block):
            yield slice(start, min(start + self._block, self._counts[index]))

    def _writers(self, reader: _Linear, at: int) -> Iterator[tuple[int, Tensor]]:
        n = len(self._parts.before(reader.run.layer, reader.run.kind))
        for index, (each, z) in enumerate(zip(self._linear[:n], self._first, strict=False)):
            yield index, each.write_vectors(z[:, at], at)

    def frame(self) -> pd.DataFrame:
        """Return the paths, the largest first."""
        rows = []
        for (second, first), effect in zip(
            self._largest.pairs.tolist(), self._largest.values.tolist(), strict=True
        ):
            hops = 2 if second else 1
            rows.append((hops, self._name(first), self._name(second), effect))
        frame = pd.DataFrame(rows, columns=["hops", "first", "second", "effect"])
        frame.attrs["paths"] = self._largest.seen
        return frame

    def _name(self, number: int) -> str:
        if not number:
            return ""
        at, place = divmod(number - 1, self._n)
        index = bisect_right(self._starts, place) - 1
        own = self._linear[index].run
        return f"{HeadName(own.layer, own.kind, place - self._starts[index])}@{at}"
