"""A run as a sum of writes: what each part of a model adds to the residual stream, and reads of it.

The stream that a sublayer reads is a sum over what was written before,

    x = embedding + Σ_h z_h W_O[h] + Σ_i z_i W_out[i] + biases

with h every attention head, i every neuron-head, z their outputs in the run, and each term at each
position. Where a norm follows a sublayer (OLMo 2; Gemma 2 has both), what a head with output o
writes is o N / s: N is the norm's linear part (`models/norms.py`) and s the scale that it divided
by in the run, which is that of the whole sublayer; so the terms still add up. The norm's bias is a
write of the sublayer's bias.

What a head reads moves, when the stream x moves by δ, from x N / s + b by

    scale="held"    δ N / s                          linear in δ: effects of several δ add up
    scale="anew"    (x + δ) N / s' - x N / s         s' of x + δ, as the model would compute it

and behind that come the head's own projections. s is measured, from what entered the norm and what
left it, and s'² - s² is the change of the mean square. Norms of queries and keys (Qwen 3) belong to
the reader, as do its rotations and its softmax: its own code computes them (`readers.py`).

Use:

    parts = decompose(model, tokens, mask)          one forward pass, checked: the writes add up
    parts.embedding                                  [batch, pos, d_model]
    parts.of(5, "attention").written(sites)          [site, batch, pos, d_model]; sites of layer 5
    parts.of(5, "neuron").bias                       [batch, pos, d_model]
    parts.before(5, "neuron")                        the sublayers whose writes that one reads
    parts.of(5, "neuron").reads.change(δ, "held")    of what the MLP of layer 5 reads (after a norm)
    parts.final.change(δ, "held")                    of what the unembedding reads
    Readers(replay, parts)                           what heads put out, given such a change
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.engine.edits import neuron_changes
from attn_only_lens.engine.recording import Recording, output_stream, record
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.heads.host import HEAD_KINDS, HeadKind
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

Positions: TypeAlias = slice | Int[Tensor, "pos"]
Scale = Literal["held", "anew"]
SCALES: tuple[str, ...] = get_args(Scale)
_LARGEST_EPS = 1e-2
# Many bridged norms compute in float32, in whatever dtype the model is.
_ROUNDING = LOGIT_TOLERANCE[torch.float32]
_PROBLEM = "what parts of this model write cannot be told apart"


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm in a run: it made x N / s + b of x.

    Attributes:
        norm: N and b (`models/norms.py`).
        stream: x.
        scale: s.
    """

    norm: Any
    stream: Residual
    scale: Float[Tensor, "batch pos 1"]

    @classmethod
    def of(cls, norm: Any, stream: Residual, returned: Residual) -> "FrozenNorm":
        """Measure the scale.

        Raises:
            UnsupportedModelError: it made something else of x.
        """
        if norm.module is None:
            return cls(norm, stream, torch.ones_like(stream[..., :1]))
        linear = norm.after(stream)
        wanted = returned if norm.bias is None else returned - norm.bias
        square = linear.square().sum(-1, keepdim=True)
        scale = (square / (linear * wanted).sum(-1, keepdim=True)).nan_to_num(1.0, 1.0, 1.0)
        made = cls(norm, stream, scale)
        error = (linear / scale - wanted).abs().amax()
        centred = made._centred(stream)
        eps = scale.square() - centred.square().mean(-1, keepdim=True)
        rounded = _ROUNDING * scale.square()
        is_root_mean_square = (square == 0) | ((eps > -rounded) & (eps < _LARGEST_EPS + rounded))
        if not (error <= _ROUNDING * wanted.abs().amax() and is_root_mean_square.all()):
            raise UnsupportedModelError(
                [f"a {type(norm.module).__name__} does not divide by a root mean square"], _PROBLEM
            )
        return made

    def at(self, positions: Positions) -> "FrozenNorm":
        """Return the norm at some positions."""
        return FrozenNorm(self.norm, self.stream[:, positions], self.scale[:, positions])

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.norm.centres else x

    def change(
        self, change: Float[Tensor, "*any batch pos d_model"], scale: Scale = "held"
    ) -> Float[Tensor, "*any batch pos d_model"]:
        """Return by how much the norm's output moves when its input does.

        Args:
            change: of its input.
            scale: "held" at that of the run, or computed "anew".
        """
        change = change.to(self.scale.device)  # it may come from a layer on another
        moved: Tensor = self.norm.after(change)
        if scale == "held" or self.norm.module is None:
            return moved / self.scale
        x, centred = self._centred(self.stream), self._centred(change)
        more = (centred * (2 * x + centred)).mean(-1, keepdim=True)
        anew = (self.scale.square() + more).sqrt()
        linear: Tensor = self.norm.after(self.stream)
        return moved / anew + linear * (1 / anew - 1 / self.scale)


@dataclass(frozen=True, eq=False)
class SublayerWrites:
    """The attention heads, or the neurons, of one source layer in a run.

    Attributes:
        layer: the source layer.
        kind: "attention" or "neuron".
        reads: the norm before it.
        entered: what it was given, behind that norm.
        writes: the norm after it.
        z: of its heads; of neuron-heads, each of width 1.
        matrix: W_O, or W_out as rows of width 1.
        bias: what it writes besides.
        neurons: the neuron-heads; None of attention.
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

    def written(
        self, sites: LayerSites, positions: Positions = slice(None)
    ) -> Float[Tensor, "site batch pos d_model"]:
        """Return what some of its heads wrote into the stream, at all or some positions."""
        index, writes = sites.index.to(self.z.device), self.writes.at(positions)
        z = self.z[:, positions]
        if self.neurons is not None:
            z = neuron_changes(self.neurons, sites, z.squeeze(-1))
            rows: Tensor = writes.norm.after(self.matrix[index, 0])
            return (z / writes.scale.squeeze(-1)).unsqueeze(-1) * rows[:, None, None]
        of_heads = torch.einsum("bphd,hdm->hbpm", z[:, :, index], self.matrix[index])
        return writes.change(of_heads)

    def total(self) -> Residual:
        """Return all that it wrote."""
        z = self.z
        if self.neurons is not None:
            z = self.neurons.neuron_outputs(z.squeeze(-1)).unsqueeze(-1)
        return self.writes.change(z.flatten(2) @ self.matrix.flatten(0, 1)) + self.bias


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A run taken apart.

    Attributes:
        recording: the run, with every neuron-head and the z of every attention head.
        embedding: the stream that enters the first block: tokens, and positions.
        sublayers: in the order of computation.
        final: the norm before the unembedding.
        parallel: of each source layer, whether its MLP reads what its attention reads.
    """

    recording: Recording
    embedding: Residual
    sublayers: tuple[SublayerWrites, ...]
    final: FrozenNorm
    parallel: tuple[bool, ...]

    def of(self, layer: int, kind: HeadKind) -> SublayerWrites:
        """Return a sublayer."""
        return self.sublayers[2 * layer + HEAD_KINDS.index(kind)]

    def before(self, layer: int, kind: HeadKind) -> tuple[SublayerWrites, ...]:
        """Return the sublayers that have written when one reads."""
        n = 2 * layer + (kind == "neuron" and not self.parallel[layer])
        return self.sublayers[:n]


@torch.no_grad()
@full_precision()
def decompose(
    model: Any, tokens: Tokens, mask: Tensor | None, *, names: tuple[str, ...] = ()
) -> Decomposition:
    """Run a model once, and return what each of its parts wrote.

    Args:
        model: converted, or with exposed neuron-heads.
        tokens: its input.
        mask: 1 for real tokens, 0 for padding.
        names: further hook points of attention heads to record.

    Raises:
        InputError: with every reason: norms or matrices of a bridge are unknown; half precision,
            in which sums of writes are not the stream; the run is not finite, padding included.
        UnsupportedModelError: the writes do not add up to the stream.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> from attn_only_lens.engine.sites import resolve_sites
        >>> from attn_only_lens.engine.writes import decompose
        >>> model = convert(pretrained.modular_addition())
        >>> parts = decompose(model, torch.tensor([[3, 4, 113]]), None)
        >>> (sites,) = resolve_sites(model, p.heads())
        >>> written = parts.of(0, "attention").written(sites)
        >>> written.shape
        torch.Size([4, 1, 3, 128])
    """
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise InputError([f"got a model in {dtype}; expected float32 or float64"], _PROBLEM)
    host = host_of(model)
    host.require_weights()
    norms, last = host.norms(), host.final_norm()
    layers = range(host.n_layers)
    z_names = [host.hook_name(layer, "attention", "z") for layer in layers]
    modules: set[nn.Module] = {model.unembed}
    for layer, each in zip(layers, norms, strict=True):
        modules |= {host.attention(layer), host.neurons[layer].module}
        modules |= {n.module for n in (*each.attention, *each.neuron, last) if n.module is not None}
    with _traffic(modules) as (entered, returned):
        recording = record(model, tokens, mask, layers=layers, names=[*z_names, *names])
    _require_finite(recording)

    def passed(norm: Any, at: nn.Module, seen: dict[nn.Module, Tensor]) -> FrozenNorm:
        """A norm, or the lack of one, at a module's input or output."""
        if norm.module is None:
            return FrozenNorm.of(norm, seen[at], seen[at])
        return FrozenNorm.of(norm, entered[norm.module], returned[norm.module])

    sublayers = []
    for layer, each in zip(layers, norms, strict=True):
        attention, heads = host.attention(layer), host.neurons[layer]
        for kind in HEAD_KINDS:
            module = attention if kind == "attention" else heads.module
            around = each.attention if kind == "attention" else each.neuron
            reads = passed(around[0], module, entered)
            writes = passed(around[1], module, returned)
            if kind == "attention":
                z, matrix, neurons = recording.hooked[z_names[layer]], attention.W_O, None
            else:
                z, neurons = recording.neurons[layer].z.unsqueeze(-1), heads
                matrix = heads.W_out.unsqueeze(1)
            own = torch.zeros_like(reads.stream)
            b = module.b_O if neurons is None else neurons.b_O
            bias = writes.change(own if b is None else own + b)
            bias = bias if writes.norm.bias is None else bias + writes.norm.bias
            matrix, bias = matrix.detach(), bias.detach()
            sublayers.append(
                SublayerWrites(
                    layer, kind, reads, entered[module], writes, z, matrix, bias, neurons
                )
            )
    final = passed(last, model.unembed, entered)
    parallel = tuple(bool(each.parallel) for each in norms)
    parts = Decomposition(recording, recording.streams[0], tuple(sublayers), final, parallel)
    _require_sums(parts)
    return parts


def _require_finite(recording: Recording) -> None:
    """Refuse a run with nan: what is nan at padding would be nan in every sum over positions."""
    device = recording.tokens.device
    finite = torch.stack([x.isfinite().all(-1).to(device) for x in recording.streams]).all(0)
    if finite.all():
        return
    prompts = (~finite).any(1).nonzero()[:, 0].tolist()
    padded = recording.mask is not None and not bool(recording.mask.all())
    advice = "; some models give nan to padding on the left: pad on the right" if padded else ""
    raise InputError([f"the model's own run is not finite for prompts {prompts}{advice}"], _PROBLEM)


def _require_sums(parts: Decomposition) -> None:
    """Hold the sum of all writes against the stream that every sublayer read."""
    totals = [each.total() for each in parts.sublayers]
    readers = [(each.layer, each.kind, each.reads.stream) for each in parts.sublayers]
    readers.append((len(parts.parallel), "attention", parts.final.stream))
    real = parts.recording.mask
    reasons = []
    for layer, kind, stream in readers:
        n = len(totals) if layer == len(parts.parallel) else len(parts.before(layer, kind))
        off = (sum((x.to(stream) for x in totals[:n]), parts.embedding.to(stream)) - stream).abs()
        off, size = (
            x if real is None else x[real.bool().to(x.device)] for x in (off, stream.abs())
        )
        if not off.amax() <= _ROUNDING * size.amax():
            at = (
                "the unembedding"
                if layer == len(parts.parallel)
                else f"the {kind} of layer {layer}"
            )
            reasons.append(
                f"what {at} reads differs by {float(off.amax()):.2g} from the sum of what was "
                f"written before it (largest: {float(size.amax()):.2g}): something else writes, or "
                "outputs are multiplied"
            )
    UnsupportedModelError.raise_if(reasons[:1], _PROBLEM)


@contextmanager
def _traffic(
    modules: set[nn.Module],
) -> Iterator[tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]]:
    """Yield two dictionaries that the next forward pass fills: what modules get, and return."""
    entered: dict[nn.Module, Tensor] = {}
    returned: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = module_input(args, kwargs)
        if given.ndim != 3:
            raise InputError(
                [
                    f"a {type(module).__name__} is given {list(given.shape)}; expected [batch, "
                    "pos, d_model]: turn off use_split_qkv_input and use_attn_in"
                ],
                _PROBLEM,
            )
        returned[module] = output_stream(output).detach()
        # Where its weights are: a model over several devices moves there what it is given.
        entered[module] = given.detach().to(returned[module].device)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        yield entered, returned


_INPUTS = ("hidden_states", "value_input")  # of a bridge; of a HookedTransformer


def module_input(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return what a sublayer, or a norm, is given."""
    found: Tensor = next((kwargs[name] for name in _INPUTS if name in kwargs), (*args, None)[0])
    return found


@contextmanager
def add_to_input(module: nn.Module, change: Tensor) -> Iterator[None]:
    """Add to what an attention module is given: to its query, key and value inputs alike."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        named = [
            n for n in ("hidden_states", "query_input", "key_input", "value_input") if n in kwargs
        ]
        if named:
            return args, {**kwargs, **{name: kwargs[name] + change for name in named}}
        return (args[0] + change, *args[1:]), kwargs

    handle = module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
