"""Find each layer's normalisation layers (norms), and whether attention and MLP run in parallel.

A norm before a head can be folded into the head's weights W. Apart from the norm's bias and scale
(one number per token), the head then computes x W' from the residual stream x (a row vector), where
W' = N W and

    LayerNorm   N = C diag(w)     C = I - 1 1ᵀ / d_model, which removes the mean
    RMSNorm     N = diag(w)

If a norm with matrix N follows a head with output o, the head adds o N to the residual stream
(apart from the norm's bias and scale). If queries and keys are normalised (Qwen 3, Gemma 3, OLMo
2), their folded weights are W_Q N and W_K N. Composition scores do not depend on positive factors
such as the norms' scales, so folded weights give exact scores. OLMo 2 has norms only after heads,
and Gemma 2 before and after heads.

In a `HookedTransformer`, the configuration says where the norms are. A bridge's norms have
different names in different TransformerLens versions, so they are found by running the bridge once
on two tokens (attached hooks run, too). A norm precedes a sublayer if the norm's output equals the
sublayer's input, and follows a sublayer if the norm's input equals the sublayer's output.
`require_bridge_weights` checks that a bridge's modules apply the matrices in the bridge's
attributes W_Q, W_in etc.

Granite multiplies what a sublayer adds to the residual stream by a constant. As a linear map of the
sublayer's output, this factor is the gain of a norm without a module after the sublayer.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import MoEBridge, NormalizationBridge
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.devices import normal_numbers, on_cpu
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import InputError
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.tl import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

_UNUSABLE = "some weights of this model cannot be used"
_PROBLEM = "this model has norms or sublayers of an unknown structure"
_TOLERANCE = 1e-2  # allows half-precision errors; a transposed matrix would give an error near 1
STOCK_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre)
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm's centring, gain and bias, without the scale that divides the norm's input."""

    weight: Float[Tensor, "d_model"] | None  # the gain w; None if all entries are 1
    centres: bool  # True if the norm subtracts the mean
    bias: Float[Tensor, "d_model"] | None = None  # the bias, added after scaling; None if zero
    module: nn.Module | None = None  # the norm module; None if there is no norm

    def before(self, weights: Float[Tensor, "*head d_model n"]) -> Float[Tensor, "*head d_model n"]:
        """Return N W: the weights W that read the norm's output, with this norm folded in."""
        if self.weight is not None:
            weights = self.weight.to(weights)[:, None] * weights
        return weights - weights.mean(dim=-2, keepdim=True) if self.centres else weights

    def after(self, rows: Float[Tensor, "*head d_model"]) -> Float[Tensor, "*head d_model"]:
        """Apply this norm, without its scale and bias, to head outputs o: return o N."""
        return self.gain(self.centred(rows))

    def centred(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Return x minus its mean if the norm subtracts the mean; otherwise return x."""
        return x - x.mean(dim=-1, keepdim=True) if self.centres else x

    def gain(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Return x times the gain w."""
        return x if self.weight is None else x * self.weight.to(x)


NO_NORM = Norm(None, centres=False)
"""The identity map, which stands for a missing norm."""


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """The normalisation modules of one layer of the original model."""

    attention: tuple[Norm, Norm]  # the norms before and after attention
    neuron: tuple[Norm, Norm]  # the norms before and after the MLP
    query: Norm  # the norm that normalises queries, per head or over all heads
    key: Norm  # the norm that normalises keys
    parallel: bool  # True if attention and the MLP read the same residual stream


def hooked_norms(
    cfg: Any, attention: Sequence[Any], modules: Sequence[Sequence[Any]]
) -> list[LayerNorms]:
    """Return the norms of each original layer of a HookedTransformer, given the norm modules.

    For each layer, `modules` holds the norm modules before attention, before the MLP, after
    attention and after the MLP; None means no norm.
    """
    layers = []
    for attn, norms in zip(attention, modules, strict=True):
        ln1, ln2, ln1_post, ln2_post = map(known_norm, norms)
        if cfg.original_architecture in POST_NORM_ARCHITECTURES:
            ln1, ln2, ln1_post, ln2_post = NO_NORM, NO_NORM, ln1, ln2
        query, key = (known_norm(getattr(attn, name, None)) for name in ("q_norm", "k_norm"))
        ends = (ln1, ln1_post), (ln2, ln2_post)
        layers.append(LayerNorms(*ends, query, key, cfg.parallel_attn_mlp))
    return layers


def hooked_block_norms(model: Any) -> list[LayerNorms]:
    """Return the norms of each layer of a HookedTransformer whose blocks have an MLP."""
    blocks = model.blocks
    modules = [[getattr(block, name, None) for name in _NORMS] for block in blocks]
    return hooked_norms(model.cfg, [block.attn for block in blocks], modules)


def bridge_final_norm(model: Any) -> Norm:
    """Return a bridge's final norm, found by running the bridge on two tokens."""
    last = getattr(model, "ln_final", None)
    traffic = _Traffic({"unembed": model.unembed} | ({} if last is None else {"ln_final": last}))
    _record_two_tokens(model, [traffic])
    inputs, outputs = traffic.inputs, traffic.outputs
    try:
        if "ln_final" not in inputs or not torch.equal(outputs["ln_final"], inputs["unembed"]):
            raise _UnknownError("the unembedding does not read the output of ln_final")
        return traffic.norm("ln_final")
    except _UnknownError as error:
        raise InputError([str(error)], _PROBLEM) from error


def known_norm(norm: Any) -> Norm:
    """Describe a HookedTransformer's norm module as a `Norm`."""
    weight = norm.w.detach() if isinstance(norm, LayerNorm | RMSNorm) else None
    assert norm is None or isinstance(norm, (*STOCK_NORMS, nn.Identity))
    bias = norm.b.detach() if isinstance(norm, LayerNorm) else None
    module = None if isinstance(norm, nn.Identity) else norm
    return Norm(weight, isinstance(norm, LayerNorm | LayerNormPre), bias, module)


def norm_modules(model: Any) -> list[nn.Module]:
    """Return the modules of a model that normalise the residual stream, the queries or the keys."""
    kinds = (*STOCK_NORMS, NormalizationBridge)
    return [module for module in model.modules() if isinstance(module, kinds)]


def norms_of(seen: Mapping[nn.Module, tuple[Tensor, Tensor]]) -> dict[nn.Module, Norm]:
    """Infer each module's norm from one input and output; raise InputError if no norm fits."""
    bridges = [module for module in seen if isinstance(module, NormalizationBridge)]
    names = [f"{type(module).__name__} {i}" for i, module in enumerate(bridges)]
    traffic = _Traffic(dict(zip(names, bridges, strict=True)))
    for name, module in traffic.modules.items():
        traffic.inputs[name], traffic.outputs[name] = seen[module]
    _read([traffic])
    try:
        fitted = {module: traffic.norm(name) for name, module in traffic.modules.items()}
    except _UnknownError as error:
        raise InputError([str(error)], _PROBLEM) from error
    return {module: fitted.get(module) or known_norm(module) for module in seen}


def bridge_norms(model: Any) -> list[LayerNorms]:
    """Return each layer's norms, found by running a bridge on two tokens."""
    blocks = [_BlockTraffic.of(block) for block in model.blocks]
    _record_two_tokens(model, blocks)
    layers, reasons = [], []
    for layer, block in enumerate(blocks):
        try:
            layers.append(block.norms())
        except _UnknownError as error:
            reasons.append(f"layer {layer}: {error}; fold_norms=False uses the weights unchanged")
    InputError.raise_if(reasons, _PROBLEM)
    return layers


def stream_is_centred(model: Any) -> bool:
    """Return whether all blocks compute norm(x + f(x)) with centring norms, as BERT does."""
    if any(getattr(block.mlp, "name", "") is not None for block in model.blocks):
        return False  # not BERT, where no single module runs the whole MLP
    blocks = []
    for block in model.blocks:
        modules = {"attn": block.attn, "o": getattr(block.attn, "o", None)}
        modules |= dict(block.mlp.named_children())
        modules |= {name: getattr(block, name, None) for name in ("ln1", "ln2")}
        if not {"o", "in", "out", "ln1", "ln2"} <= {n for n, m in modules.items() if m}:
            return False
        blocks.append(_Traffic(modules))
    _record_two_tokens(model, blocks)
    try:
        return all(
            _parallel(traffic.inputs[norm], traffic.inputs[reads] + traffic.outputs[writes])
            and traffic.norm(norm).centres
            for traffic in blocks
            for norm, reads, writes in (("ln1", "attn", "o"), ("ln2", "in", "out"))
        )
    except _UnknownError:
        return False


def residual_factor(block: Any) -> float:
    """Return the constant by which a bridge's block multiplies what it adds to the stream."""
    layer = block._modules.get("_original_component")
    return float(getattr(layer, "residual_multiplier", 1.0))  # Granite


class _UnknownError(Exception):
    """Raised if a bridge layer's structure is unknown; the message says why."""


class _Traffic:
    """A recording of modules' inputs and outputs, with the gains and biases of norms."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.modules = modules
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.vectors: dict[tuple[str, str], Tensor] = {}
        for name, module in modules.items():
            component = getattr(module, "original_component", None)
            for parameter in ("weight", "bias"):
                vector = getattr(component, parameter, None)
                if vector is not None and vector.ndim == 1:
                    self.vectors[name, parameter] = vector

    def watch(self, stack: ExitStack) -> None:
        for name, module in self.modules.items():

            def look(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                first = args or (*kwargs.values(),)
                self.inputs[name] = kwargs.get("hidden_states", first[0])
                self.outputs[name] = output[0] if isinstance(output, tuple | list) else output

            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)

    def norm(self, name: str | None) -> Norm:
        if name is None:
            return NO_NORM
        vectors = [self.vectors.get((name, parameter)) for parameter in ("weight", "bias")]
        return _fitted(self.modules[name], name, self.inputs[name], self.outputs[name], *vectors)


@torch.no_grad()
def _record_two_tokens(model: Any, blocks: Sequence[_Traffic]) -> None:
    """Run a bridge on two tokens, and record the inputs and outputs of the given modules."""
    first = model.cfg.d_vocab - 1  # not the padding token
    with ExitStack() as stack:
        for traffic in blocks:
            traffic.watch(stack)
        model(checked_tokens(model, torch.tensor([[first, 0]], device="cpu")))
    _read(blocks)


def _read(blocks: Sequence[_Traffic]) -> None:
    """Copy all recorded tensors to the CPU at once, because each copy synchronises the device."""
    sides: list[dict[Any, Tensor]] = []
    for traffic in blocks:
        sides += [traffic.inputs, traffic.outputs, traffic.vectors]
    copies = iter(on_cpu([x for side in sides for x in side.values()]))
    for side in sides:
        side |= dict(zip(list(side), copies, strict=False))


class _BlockTraffic(_Traffic):
    """A recording of the sublayers and norms in one block of a bridge."""

    factor: float  # multiplies the sublayers' outputs before they are added to the stream

    @classmethod
    def of(cls, block: Any) -> "_BlockTraffic":
        modules = {name: getattr(block, name, None) for name in (*_NORMS, "attn", "mlp")}
        modules |= {name: getattr(block.attn, name, None) for name in ("q_norm", "k_norm")}
        traffic = cls({name: module for name, module in modules.items() if module is not None})
        traffic.factor = residual_factor(block)
        return traffic

    def watch(self, stack: ExitStack) -> None:
        for seed, sublayer in enumerate(("attn", "mlp")):
            if sublayer in self.modules:
                hook = partial(_write_something, seed=seed)
                stack.callback(self.modules[sublayer].register_forward_hook(hook).remove)
        super().watch(stack)

    def norms(self) -> LayerNorms:
        sublayers, scaled = ("attn", "mlp"), ("q_norm", "k_norm")
        needed = [*sublayers, *(name for name in scaled if name in self.modules)]
        if missing := [name for name in needed if name not in self.inputs]:
            raise _UnknownError(f"its {' and '.join(missing)} did not run")
        before = {name: self._norm_with(self.outputs, self.inputs[name]) for name in sublayers}
        after = {name: self._norm_with(self.inputs, self.outputs[name]) for name in sublayers}
        read = {name: self.inputs[norm or name] for name, norm in before.items()}
        parallel = torch.equal(read["attn"], read["mlp"])
        written = self.outputs[after["attn"] or "attn"]
        if not (parallel or _parallel(read["mlp"] - read["attn"], self.factor * written)):
            raise _UnknownError(
                "the input of its MLP is neither the input of its attention, nor the sum of this "
                "input and the output of its attention"
            )
        around = {name: (self.norm(before[name]), self._scaled(after[name])) for name in sublayers}
        query, key = (self.norm(name if name in self.modules else None) for name in scaled)
        return LayerNorms(around["attn"], around["mlp"], query, key, parallel)

    def _scaled(self, name: str | None) -> Norm:
        """Return the norm after a sublayer, times the factor."""
        norm = self.norm(name)
        if self.factor == 1.0:
            return norm
        if name is not None:
            raise _UnknownError(f"its outputs are multiplied by {self.factor} after its {name}")
        return replace(norm, weight=torch.full_like(self.inputs["mlp"][0, 0], self.factor))

    def _norm_with(self, side: dict[str, Tensor], value: Tensor) -> str | None:
        return next((n for n in _NORMS if n in side and torch.equal(side[n], value)), None)


def _write_something(module: Any, args: Any, output: Any, *, seed: int) -> Any:
    """Replace a zero output by noise, so that the modules that read this output can be found."""
    first = output[0] if isinstance(output, tuple | list) else output
    noise = normal_numbers(first.shape, seed).to(first)
    written = torch.where(first.any(), first, noise)  # an `if` would synchronise
    return written if first is output else type(output)([written, *output[1:]])


def _fitted(
    module: Any,
    name: str,
    inputs: Tensor,
    outputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Norm:
    """Return the norm that maps `inputs` to `outputs`, or NO_NORM if both are equal."""
    if torch.equal(inputs, outputs):
        return NO_NORM
    known = inputs.any(-1)  # every norm maps a row of zeros, such as a padding token, to its bias
    if not known.any():
        raise _UnknownError(f"the input of its {name} is zero")
    x, y = inputs[known].double(), outputs[known].double()
    y = y if bias is None else y - bias.double()
    fits = []
    for centres, offset in product((True, False), (0.0, 1.0)):
        centred = x - x.mean(-1, keepdim=True) if centres else x
        scale = centred.square().mean(-1, keepdim=True).sqrt()
        # Some norms multiply by 1 + weight. Like the model, add the 1 in the weight's dtype.
        expected = (centred if weight is None else centred * (weight + offset).double()) / scale
        fits.append(((expected - y).norm().item(), expected, centres, offset))
    _, expected, centres, offset = min(fits, key=lambda fit: fit[0])
    silent = not (expected.any() or y.any())  # the gain is zero
    if not silent and not _parallel(expected, y):
        raise _UnknownError(f"its {name} is neither LayerNorm nor RMSNorm")
    gain = None if weight is None else module.original_component.weight.detach() + offset
    added = None if bias is None else module.original_component.bias.detach()
    return Norm(gain, centres, added, module)


def _parallel(a: Tensor, b: Tensor) -> bool:
    """Return whether the rows of `a` are nearly positive multiples of the rows of `b`."""
    cosine = torch.cosine_similarity(a.double(), b.double(), dim=-1)
    return bool((cosine > 1 - 1e-3).all())


@torch.no_grad()
def require_bridge_weights(model: Any) -> None:
    """Raise InputError unless a bridge's modules apply the bridge's matrices W_Q, W_in etc."""
    texts, finite, applied = list[tuple[str, str]](), list[Tensor](), list[Tensor]()
    for layer, block in enumerate(model.blocks):
        matrices = {f"attn.{letter}": f"W_{letter.upper()}" for letter in "qkvo"}
        if not isinstance(block.mlp, FeatureMLP | MoEBridge):
            matrices |= {"mlp.in": "W_in", "mlp.out": "W_out"}
        # In a layer without experts, the gate of a mixture's bridge is not that of its MLP.
        dense = "dense_" * isinstance(block.mlp, MoEBridge)
        if dense and getattr(block.mlp, "bound_dense", False):
            matrices |= {"mlp.dense_in": "W_in", "mlp.dense_out": "W_out"}
        if getattr(block.mlp, "W_gate", None) is not None:
            matrices[f"mlp.{dense}gate"] = "W_gate"
        for path, name in matrices.items():
            owner = block.attn if path.startswith("attn") else block.mlp
            module = getattr(owner, path.split(".")[1], None)
            try:
                weight = getattr(owner, name)
            except NotImplementedError as error:  # latent attention has no W_Q, W_K and W_V
                InputError.raise_if([f"layer {layer}: {error}"], _UNUSABLE)
            finite.append(weight.isfinite().all())
            applied.append(_applies(weight, module, path))
            texts.append((f"layer {layer}: {name}", f"the matrix that its {path} applies"))
    answers = on_cpu([*finite, *applied])
    checked = zip(texts, answers[: len(texts)], answers[len(texts) :], strict=True)
    reasons = [
        f"{name} is not {matrix}" if is_finite else f"{name} has weights that are not finite"
        for (name, matrix), is_finite, is_right in checked
        if not is_right
    ]
    InputError.raise_if(reasons, _UNUSABLE)


def _applies(weight: Tensor, module: Any, path: str) -> Tensor:
    """Return whether a module multiplies by `weight`, with the heads of `weight` concatenated."""
    linear = getattr(module, "original_component", None)
    if weight.ndim == 3:  # [head, d_model, d_head], or W_O: [head, d_head, d_model]
        flat = weight.flatten(0, 1) if path == "attn.o" else weight.transpose(0, 1).flatten(1)
    else:
        flat = weight
    if linear is None:
        return torch.tensor(False, device=weight.device)
    x = normal_numbers((3, flat.shape[0])).to(flat)
    computed = linear(x) - linear(torch.zeros_like(x))
    expected = x @ flat
    if computed.shape != expected.shape:
        return torch.tensor(False, device=weight.device)
    return (computed - expected).norm() <= _TOLERANCE * expected.norm()
