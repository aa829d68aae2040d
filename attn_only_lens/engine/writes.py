"""Split the residual stream into writes: the vectors that heads, neurons and biases add to it.

The residual stream that a sublayer reads is the sum of all earlier writes:

    x = embedding + Σ_h z_h W_O[h] + Σ_i z_i W_O[i] + biases

The sums run over attention heads h and neuron-heads i with outputs z, at each position. If a norm
follows a sublayer (as in OLMo 2, and in Gemma 2, which has norms before and after), a head whose
output is the vector o adds o N / s to the stream. N is the norm's linear part (`models/norms.py`).
The scale s, by which the norm divides in this run, depends on the sublayer's whole output; the
writes still add up to the stream. The norm's bias is part of the sublayer's bias. A constant factor
on a sublayer's output (Granite) is a norm with this gain, and s = 1.

If the residual stream x changes by δ, the change in a head's input x N / s + b depends on `scale`:

    scale="held"    δ N / s                          linear in δ: effects of several δ add up
    scale="anew"    (x + δ) N / s' - x N / s         s' of x + δ, as the model would compute it

The head's projections are applied to this change. The scale s is computed from the norm's input and
output; s'² - s² is the change in the input's mean square. Norms of queries and keys (Qwen 3),
rotations and the softmax are part of the head that reads the stream; the model's own code computes
them (`readers.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_only_lens.arguments import a_type, with_article
from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.devices import read_all
from attn_only_lens.engine.edits import by_site
from attn_only_lens.engine.passed_tests import PassedTests, passed_tests
from attn_only_lens.engine.recording import (
    Hooks,
    Recording,
    output_stream,
    record,
    require_finite,
)
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.heads.host import WIDE_KINDS, HeadKind
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

Positions: TypeAlias = slice | Int[Tensor, "pos"]
Scale = Literal["held", "anew"]
SCALES: tuple[str, ...] = get_args(Scale)
_LARGEST_EPS = 1e-2
# Use float32's tolerance, because many bridged norms always compute in float32.
_ROUNDING = LOGIT_TOLERANCE[torch.float32]
_PROBLEM = "the writes of this model cannot be separated"


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm x N / s + b whose scale s is fixed at its value in a run.

    Attributes:
        norm: the norm's N and b (`models/norms.py`).
        stream: the norm's input x.
        scale: the scale s.
    """

    norm: Any
    stream: Residual
    scale: Float[Tensor, "batch pos 1"]

    def at(self, positions: Positions) -> "FrozenNorm":
        """Return the same norm, restricted to the given positions."""
        return replace(self, stream=self.stream[:, positions], scale=self.scale[:, positions])

    def change(
        self, change: Float[Tensor, "*any batch pos d_model"], scale: Scale = "held"
    ) -> Float[Tensor, "*any batch pos d_model"]:
        """Return how the norm's output changes if its input changes."""
        change = change.to(self.scale.device)  # a layer may be on another device
        moved: Tensor = self.norm.after(change)
        if scale == "held" or self.norm.module is None:
            return moved / self.scale
        x, centred = self.norm.centred(self.stream), self.norm.centred(change)
        growth = (centred * (2 * x + centred)).mean(-1, keepdim=True)  # the mean square's change
        new_scale = (self.scale.square() + growth).sqrt()
        linear: Tensor = self.norm.after(self.stream)
        return moved / new_scale + linear * (1 / new_scale - 1 / self.scale)

    def back(
        self, gradient: Float[Tensor, "batch pos d_model"], positions: Positions = slice(None)
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the gradient at the norm's input, given the gradient at its output; s is fixed."""
        gradient = gradient.to(self.scale.device)
        linear: Tensor = self.norm.before(gradient.flatten(0, -2).T).T
        return linear.view_as(gradient) / self.scale[:, positions]


@dataclass(frozen=True, eq=False)
class SublayerWrites:
    """The vectors that one layer's attention heads, or neurons, added to the residual stream.

    Attributes:
        layer: the layer in the original model.
        kind: "attention", "neuron", "feature", "skip" or "error".
        reads: the norm before the sublayer.
        entered: the sublayer's input, after the norm `reads`.
        writes: the norm after the sublayer.
        z: the outputs of the sublayer's heads; d_head is 1 for neuron-heads, and d_model for skip
            and error nodes.
        matrix: W_O, or W_skip; the identity for error nodes.
        bias: the constant vector that the sublayer adds to the stream.
        neurons: the neuron-heads; None for the other kinds.
        later: what the features of a cross-layer transcoder add to the stream in later layers, with
            the same z; `layer` is then the layer that they write to.
    """

    layer: int
    kind: HeadKind
    reads: FrozenNorm
    entered: Residual
    writes: FrozenNorm
    z: Float[Tensor, "batch pos head_index d_head"]
    matrix: Float[Tensor, "head d_head d_model"]
    bias: Residual
    neurons: NeuronHeads | None
    later: tuple["SublayerWrites", ...] = ()

    @property
    def everywhere(self) -> tuple["SublayerWrites", ...]:
        """The writes to this layer and to later layers."""
        return (self, *self.later)

    def with_outputs(self, z: Float[Tensor, "batch pos head_index d_head"]) -> "SublayerWrites":
        """Return the same writes with other outputs of the heads."""
        later = tuple(replace(x, z=z.to(x.z.device)) for x in self.later)
        return replace(self, z=z, later=later)

    @property
    def n_heads(self) -> int:
        """The number of heads: attention heads, neurons, features, or 1 skip or error node."""
        return self.z.shape[2]

    def written(
        self, sites: LayerSites, positions: Positions = slice(None)
    ) -> Float[Tensor, "site batch pos d_model"]:
        """Return the vectors that the heads at the given sites added to the residual stream."""
        index, writes = sites.index.to(self.z.device), self.writes.at(positions)
        z = self.z[:, positions]
        if self.neurons is not None:
            z = by_site(sites, z.squeeze(-1))
            rows: Tensor = writes.norm.after(self.matrix[index, 0])
            return (z / writes.scale.squeeze(-1)).unsqueeze(-1) * rows[:, None, None]
        by_head = torch.einsum("bphd,hdm->hbpm", z[:, :, index], self.matrix[index])
        return writes.change(by_head)

    def total(self) -> Residual:
        """Return the sum of all vectors that the sublayer added to the residual stream."""
        return self.summed(self.z) + self.bias

    def summed(self, outputs: Float[Tensor, "batch pos node d_head"]) -> Residual:
        """Return what the nodes add to the residual stream if these are their outputs."""
        return self.writes.change(outputs.flatten(2) @ self.matrix.flatten(0, 1))

    def vectors(
        self,
        outputs: Float[Tensor, "batch target d_head"],
        nodes: slice | Int[Tensor, "target"],
        positions: Positions,
    ) -> Float[Tensor, "batch target d_model"]:
        """Return the vector that each node adds to the residual stream, each at its position."""
        by_node = torch.einsum("btd,tdm->btm", outputs, self.matrix[nodes])
        return self.writes.at(positions).change(by_node)

    def back(self, gradient: Residual) -> Float[Tensor, "batch pos head_index d_head"]:
        """Return the gradient at z, given the gradient at the residual stream after the heads."""
        return torch.einsum("bpm,hdm->bphd", self.writes.back(gradient), self.matrix)


@dataclass(frozen=True, eq=False)
class Decomposition:
    """One forward pass of a model, as a sum of writes to the residual stream.

    Attributes:
        recording: the run's recording, with every neuron-head and the z of every attention head.
        embedding: the stream that enters the first block: token and position embeddings.
        sublayers: the writes of each sublayer, in the order of computation.
        final: the norm before the unembedding.
        parallel: for each original layer, whether its MLP and its attention read the same stream.
        uncapped: the logits before any soft cap.
        logit_factor: the constant by which the model multiplies the unembedding's output (Granite,
            Cohere); None if the logits have a soft cap.
    """

    recording: Recording
    embedding: Residual
    sublayers: tuple[SublayerWrites, ...]
    final: FrozenNorm
    parallel: tuple[bool, ...]
    uncapped: Float[Tensor, "batch pos d_vocab"]
    logit_factor: float | None

    def of(self, layer: int, kind: HeadKind) -> SublayerWrites:
        """Return a sublayer's writes; "neuron" and "feature" name the same sublayer."""
        return self.sublayers[self._index(layer, kind)]

    def _index(self, layer: int, kind: HeadKind) -> int:
        return self._numbers[layer, _shared_kind(kind)]

    @cached_property
    def _numbers(self) -> dict[tuple[int, HeadKind], int]:
        return {(x.layer, _shared_kind(x.kind)): i for i, x in enumerate(self.sublayers)}

    def parts_before(self, writes: SublayerWrites, n_before: int) -> list[SublayerWrites]:
        """Return the writes of a sublayer that are in the stream after `n_before` sublayers."""
        return [x for x in writes.everywhere if self._index(x.layer, x.kind) < n_before]

    def arriving(self, index: int) -> Iterator[tuple[int, SublayerWrites]]:
        """Yield what earlier features write together with a sublayer, with their sublayer."""
        for source, writes in enumerate(self.sublayers[:index]):
            for later in writes.later:
                if self._index(later.layer, later.kind) == index:
                    yield source, later

    def before(self, layer: int, kind: HeadKind) -> tuple[SublayerWrites, ...]:
        """Return the sublayers whose outputs the given sublayer reads."""
        reads_attention = kind != "attention" and not self.parallel[layer]
        return self.sublayers[: self._index(layer, "attention") + reads_attention]


def _shared_kind(kind: HeadKind) -> HeadKind:
    return "neuron" if kind == "feature" else kind


@torch.no_grad()
@full_precision()
def decompose(
    model: Any,
    tokens: Tokens,
    mask: Tensor | None,
    *,
    names: tuple[str, ...] = (),
    hooks: Hooks = (),
    watch: AbstractContextManager[Any] | None = None,
) -> Decomposition:
    """Run a model once, and return what each sublayer adds to the residual stream.

    Args:
        model: a model with neuron-heads, in float32 or float64.
        tokens: the model's input.
        mask: 1 for tokens and 0 for padding.
        names: further hook points to record.
        hooks: hooks that edit the run, before activations are recorded.
        watch: a context manager to enter during the run.

    Raises:
        InputError: a bridge has unknown norms or matrices, the model is in half precision, or the
            run is not finite.
        UnsupportedModelError: the writes do not add up to the stream.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise InputError([f"got a model in {dtype}; expected float32 or float64"], _PROBLEM)
    host, tested = host_of(model), passed_tests(model)
    _require_constant_biases(host)
    norms, last = norms_of(model)
    layers = range(host.n_layers)
    z_names = [*names, *host.hook_names("z", ("attention", *WIDE_KINDS))]
    every_norm = [last, *(norm for n in norms for norm in (*n.attention, *n.neuron))]
    modules = {norm.module for norm in every_norm if norm.module is not None}
    modules |= {host.attention(layer) for layer in layers}
    modules |= {model.unembed, *(heads.module for heads in host.neurons)}
    recorded = {"layers": layers, "names": z_names, "keep_key_values": True}
    with _record_modules(modules) as traffic, watch or nullcontext():
        recording = record(model, tokens, mask, hooks=hooks, **recorded)  # type: ignore[arg-type]
    require_finite(model, recording, padding=True)  # nan would spread to sums over positions
    sublayers = _with_later_writes(
        [
            _sublayer(host, recording, traffic, around, layer, kind)
            for layer, around in enumerate(norms)
            for kind in host.kinds(layer)
            if kind != "router"  # it writes nothing
        ]
    )
    unembedded = traffic.returned[model.unembed]
    factor = _logit_factor(unembedded, recording.logits)
    run = Decomposition(
        recording,
        embedding=recording.streams[0],
        sublayers=sublayers,
        final=traffic.frozen(last, traffic.entered[model.unembed]),
        parallel=tuple(bool(around.parallel) for around in norms),
        uncapped=unembedded if factor in (None, 1.0) else unembedded * factor,
        logit_factor=factor,
    )
    if not tested.covers("writes add up", recording):
        traffic.require_norms()
        _require_sums(run)
        # Call `passed_tests` again, because the first run adds plain attributes to some modules.
        passed_tests(model).add("writes add up", recording)
    return run


def _require_constant_biases(host: Any) -> None:
    """Raise an error if routing weights multiply the output biases of experts (gpt-oss)."""
    layers = [str(layer) for layer, heads in enumerate(host.neurons) if heads.routed_bias]
    if layers:
        reason = (
            f"the experts in layer {', '.join(layers)} have output biases, which the routing "
            "weights multiply, so they are no constants; use activation_patch or attribution"
        )
        raise UnsupportedModelError([reason], _PROBLEM)


def _logit_factor(unembedded: Tensor, logits: Tensor) -> float | None:
    """Return the constant that maps the unembedding's output to the logits, or None."""
    logits = logits.to(unembedded)
    if torch.equal(unembedded, logits):
        return 1.0
    largest = unembedded.abs().argmax()
    factor = logits.flatten()[largest] / unembedded.flatten()[largest]
    is_linear = (unembedded * factor - logits).abs().amax() <= _ROUNDING * logits.abs().amax()
    return float(factor) if is_linear else None


_NORMS: "WeakKeyDictionary[PassedTests, tuple[list[Any], Any]]" = WeakKeyDictionary()


def norms_of(model: Any) -> tuple[list[Any], Any]:
    """Return each layer's norms and the final norm; check a model's weights only the first time."""
    known, host = _NORMS.get(passed_tests(model)), host_of(model)
    if known is None:
        host.require_weights()
        known = host.norms(), host.final_norm()
        # Call `passed_tests` again, because the first run adds plain attributes to some modules.
        _NORMS[passed_tests(model)] = known
    return known


class _Traffic:
    """The inputs and outputs of modules in a forward pass, and a test for norms."""

    def __init__(self) -> None:
        self.entered: dict[nn.Module, Tensor] = {}
        self.returned: dict[nn.Module, Tensor] = {}
        self._norms: list[tuple[str, Tensor]] = []  # (class name, is a norm)

    def frozen(self, norm: Any, outside: Tensor) -> FrozenNorm:
        """Return a norm with its scale in this run; without a norm module, the input is `outside`.

        The scale is computed from the norm's input and output.
        """
        if norm.module is None:
            return FrozenNorm(norm, outside, torch.ones_like(outside[..., :1]))
        stream, output = self.entered[norm.module], self.returned[norm.module]
        linear = norm.after(stream)
        expected = output if norm.bias is None else output - norm.bias
        square = linear.square().sum(-1, keepdim=True)
        scale = (square / (linear * expected).sum(-1, keepdim=True)).nan_to_num(1.0, 1.0, 1.0)
        error = (linear / scale - expected).abs().amax()
        eps = scale.square() - norm.centred(stream).square().mean(-1, keepdim=True)
        rounded = _ROUNDING * scale.square()
        is_root_mean_square = (square == 0) | ((eps > -rounded) & (eps < _LARGEST_EPS + rounded))
        is_norm = (error <= _ROUNDING * expected.abs().amax()) & is_root_mean_square.all()
        self._norms.append((type(norm.module).__name__, is_norm))
        return FrozenNorm(norm, stream, scale)

    def require_norms(self) -> None:
        """Raise an error if a module that was assumed to be a norm does not compute one."""
        are_norms = read_all([is_norm for _, is_norm in self._norms])
        others = {
            name for (name, _), is_norm in zip(self._norms, are_norms, strict=True) if not is_norm
        }
        reasons = [
            f"got {with_article(name)}, which does not divide by a root mean square; "
            "expected an RMSNorm or a LayerNorm"
            for name in sorted(others)
        ]
        UnsupportedModelError.raise_if(reasons, _PROBLEM)


def _sublayer(
    host: Any, recording: Recording, traffic: _Traffic, around: Any, layer: int, kind: HeadKind
) -> SublayerWrites:
    heads: Any = None
    if kind == "attention":
        module, (before, after) = host.attention(layer), around.attention
        z, matrix, b = recording.hooked[host.hook_name(layer, kind, "z")], module.W_O, module.b_O
    elif kind in WIDE_KINDS:
        module, (before, after) = host.neurons[layer].module, around.neuron
        z, b = recording.hooked[host.hook_name(layer, kind, "z")], None
        identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        matrix = (module.W_skip if kind == "skip" else identity)[None]
    else:
        heads, (before, after) = host.neurons[layer], around.neuron
        module, matrix, b = heads.module, heads.W_O, heads.b_O
        z = recording.neurons[layer].z.unsqueeze(-1)
    entered = traffic.entered[module]
    reads, writes = traffic.frozen(before, entered), traffic.frozen(after, traffic.returned[module])
    zero = torch.zeros_like(reads.stream)
    bias = writes.change(zero if b is None else zero + b)
    bias = bias if after.bias is None or kind in WIDE_KINDS else bias + after.bias
    matrix, bias = matrix.detach(), bias.detach()
    return SublayerWrites(layer, kind, reads, entered, writes, z, matrix, bias, heads)


def _with_later_writes(sublayers: Sequence[SublayerWrites]) -> tuple[SublayerWrites, ...]:
    """Add what the features of a cross-layer transcoder write to later layers."""
    features = {x.layer: x for x in sublayers if x.kind == "feature"}
    result = []
    for writes in sublayers:
        later = []
        decoders = [] if writes.neurons is None else writes.neurons.decoders[1:]
        for layer, W in enumerate(decoders, writes.layer + 1):
            after = features[layer].writes
            z, matrix = (x.detach().to(after.scale.device) for x in (writes.z, W[:, None]))
            later.append(replace(writes, layer=layer, writes=after, z=z, matrix=matrix))
        result.append(replace(writes, later=tuple(later)))
    return tuple(result)


def _require_sums(run: Decomposition) -> None:
    """Raise an error if the input of a sublayer is not the sum of all earlier writes."""
    readers = [
        (f"the {x.kind} of layer {x.layer}", x.reads.stream, len(run.before(x.layer, x.kind)))
        for x in run.sublayers
    ]
    readers.append(("the unembedding", run.final.stream, len(run.sublayers)))
    real, numbers = run.recording.mask, list[Tensor]()
    total, n_added = run.embedding, 0
    for _, stream, n_before in readers:
        for index in range(n_added, n_before):
            total = total.to(stream) + run.sublayers[index].total().to(stream)
            for _, later in run.arriving(index):
                total = total + later.summed(later.z).to(stream)
        n_added = n_before
        for x in ((total.to(stream) - stream).abs(), stream.abs()):
            numbers.append((x if real is None else x[real.bool().to(x.device)]).amax())
    values = read_all(numbers)
    for (reader, *_), error, size in zip(readers, values[::2], values[1::2], strict=True):
        if not error <= _ROUNDING * size:
            reason = (
                f"the input of {reader} differs by {error:.2g} from the sum of all earlier writes "
                f"(largest entry: {size:.2g}): another module adds to the stream, or outputs are "
                "multiplied by a factor that is not the layer's residual_multiplier"
            )
            raise UnsupportedModelError([reason], _PROBLEM)


@contextmanager
def _record_modules(modules: set[nn.Module]) -> Iterator[_Traffic]:
    """Yield a record of modules' inputs and outputs, which the next forward pass fills."""
    traffic = _Traffic()

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        x = sublayer_input(args, kwargs)
        if x.ndim != 3:
            reason = (
                f"{a_type(module)} gets an input of shape {list(x.shape)}; expected "
                "[batch, pos, d_model]: turn off use_split_qkv_input and use_attn_in"
            )
            raise InputError([reason], _PROBLEM)
        traffic.returned[module] = output_stream(output).detach()
        # Models on several devices move a module's input to the device of its weights.
        traffic.entered[module] = x.detach().to(traffic.returned[module].device)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        yield traffic


@contextmanager
def add_to_input(module: nn.Module, change: Tensor) -> Iterator[None]:
    """Add `change` to the query, key and value inputs of an attention module."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return edited_input(args, kwargs, lambda stream: stream + change)

    handle = module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def edited_input(args: Any, kwargs: Any, edit: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Return a sublayer's arguments, with an edit of its input for queries, keys and values."""
    inputs = ("hidden_states", "query_input", "key_input", "value_input")
    named = {name: edit(kwargs[name]) for name in inputs if name in kwargs}
    if named:
        return args, {**kwargs, **named}
    return (edit(args[0]), *args[1:]), kwargs


def sublayer_input(args: Any, kwargs: Any) -> Any:
    """Return a sublayer's input, taken from its arguments."""
    named = (kwargs[name] for name in ("hidden_states", "value_input") if name in kwargs)
    return next(named, (*args, None)[0])
