"""A transformer's weights in one layout for all kinds of models, and constants such as ε.

For every kind of model, tensors have the names and shapes of HookedTransformer's parameters. Labels
of axes:

d_model    a coordinate of the residual stream
d_mlp      a neuron
head       a query head
kv_head    a key and value head (fewer than query heads if queries are grouped)
d_query    a coordinate of queries and keys (k in the growth paper)
d_value    a coordinate of values (v in the growth paper). TransformerLens uses d_head for both

The axis `d_model` is common to all layers. Every other axis in this list belongs to one layer.

In an encoder-decoder model, the layers of the encoder come first, then the layers of the decoder.
Self-attention (`attn`) and cross-attention (`cross_attn`) of a layer have the same axes of heads.
All layers of a stack share a table of relative positions, whose columns belong to the heads of the
first layer.

An `Identity` is a fingerprint of a model, which does not depend on the model's dtype, device or
format. For each tensor w, it contains the norm ‖w‖ and a weighted sum s of the entries. The weight
of an entry is a product of pseudorandom numbers r_a, one for each axis a:

    s = Σ_ij… r_0(i) r_1(j) … w_ij…        r_a(i) = 2 ((i + 1 + 1000 a) φ mod 1) - 1

with φ the golden ratio.

If the tensor changes by Δ, s changes by about ‖Δ‖ / 3, whichever entries change. If s changes by no
more than the rounding error of ‖w‖, which another dtype or machine can cause, the tensor therefore
counts as unchanged. A training step changes s by more than this rounding error.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import on_cpu, to_float64_device
from attn_only_lens.tolerances import rounding

Norm: TypeAlias = Literal["LN", "LNPre", "RMS", "RMSPre"] | None
NormPlace: TypeAlias = Literal["before", "after", "both", "stream"]
Stack: TypeAlias = Literal["encoder", "decoder"]

NOT_GROWN = "this model cannot be grown like this"
_ATTENTION = {
    "W_Q": ("head", "d_model", "d_query"),
    "W_K": ("kv_head", "d_model", "d_query"),
    "W_V": ("kv_head", "d_model", "d_value"),
    "W_O": ("head", "d_value", "d_model"),
}
_AXES: dict[str, tuple[str, ...]] = {
    "embed.W_E": ("d_vocab", "d_model"),
    "pos_embed.W_pos": ("pos", "d_model"),
    "token_type_embed.W_token_type": ("token_type", "d_model"),
    "pos_bias.encoder": ("bucket", "head"),
    "pos_bias.decoder": ("bucket", "head"),
    **{f"{of}.{name}": x for of in ("attn", "cross_attn") for name, x in _ATTENTION.items()},
    "attn.b_Q": ("head", "d_query"),
    "attn.b_K": ("kv_head", "d_query"),
    "attn.b_V": ("kv_head", "d_value"),
    "attn.b_O": ("d_model",),
    "attn.sinks": ("head",),
    "attn.q_norm.w": ("d_query",),
    "attn.k_norm.w": ("d_query",),
    "mlp.W_in": ("d_model", "d_mlp"),
    "mlp.W_gate": ("d_model", "d_mlp"),
    "mlp.b_in": ("d_mlp",),
    "mlp.b_gate": ("d_mlp",),
    "mlp.W_out": ("d_mlp", "d_model"),
    "mlp.b_out": ("d_model",),
    "mlm_head.W": ("d_model", "d_model"),
    "mlm_head.b": ("d_model",),
    "unembed.W_U": ("d_model", "d_vocab_out"),
    "unembed.b_U": ("d_vocab_out",),
    **{
        f"{norm}.{part}": ("d_model",)
        for norm in (
            *("embed_ln", "ln1", "ln2", "ln3", "ln1_post", "ln2_post", "encoder_ln_final"),
            "ln_final",
        )
        for part in ("w", "b")
    },
}
_ALL_HEADS = {  # one norm acts on the queries of all heads, a second norm on their keys
    "attn.q_norm.w": ("head", "d_query"),
    "attn.k_norm.w": ("kv_head", "d_query"),
}
_OF_FIRST_LAYER: dict[str, Stack] = {"pos_bias.encoder": "encoder", "pos_bias.decoder": "decoder"}
WRITERS = frozenset(
    {
        *("embed.W_E", "pos_embed.W_pos", "attn.W_O", "attn.b_O", "cross_attn.W_O"),
        *("mlp.W_out", "mlp.b_out"),
    }
)
"""The tails of tensors that write to the residual stream ("shortformer" positions do not)."""
_OF_MODEL = frozenset({"d_vocab", "d_vocab_out", "d_model", "pos", "token_type", "bucket"})
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_GOLDEN = (math.sqrt(5) + 1) / 2
_AT_ONCE = 2**18  # this many float64 entries fit into a processor's cache


class Axis(NamedTuple):
    """An axis of weight tensors: its label and its layer (None if all layers share the axis)."""

    label: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.label if self.layer is None else f"{self.label} of layer {self.layer}"


def in_layer(name: str) -> int | None:
    """Return the layer of a tensor or hook point, or None if it belongs to no layer."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else int(match[1])


def tail(name: str) -> str:
    """Return a tensor's name without the block's prefix: `attn.W_Q` for `blocks.3.attn.W_Q`."""
    match = _BLOCK.fullmatch(name)
    return name if match is None else match[2]


def block_name(layer: int, of: str) -> str:
    """Return the name of a tensor in a layer, for example `blocks.3.attn.W_Q`."""
    return f"blocks.{layer}.{of}"


def is_gain(name: str) -> bool:
    return name.endswith(".w")


def axes_of(name: str, constants: "Constants") -> tuple[Axis, ...]:
    """Return the axes of a tensor, in order."""
    of, layer = tail(name), in_layer(name)
    labels = _AXES[of]
    if constants.qk_norm == "all heads" and of in _ALL_HEADS:
        labels = _ALL_HEADS[of]
    if of in _OF_FIRST_LAYER:
        layer = constants.layers_in(_OF_FIRST_LAYER[of]).start
    return tuple(Axis(label, None if label in _OF_MODEL else layer) for label in labels)


@dataclass(frozen=True)
class Constants:
    """Constants that, together with the tensors, determine the function that a model computes.

    Attributes:
        n_layers: how many blocks.
        n_encoder_layers: how many of the blocks, the first ones, are an encoder; 0 if the model has
            one stack.
        norm: the kind of the norms in the blocks. Kinds that end in "Pre" have a folded gain.
        final_norm: the norm before the unembedding.
        norm_place: where a sublayer f has its norms: "before" is x + f(norm(x)); "after" is
            x + norm(f(x)); "both" is x + norm(f(norm(x))); "stream" (post-norm) is norm(x + f(x)).
        gain_offset: 1 if a norm's gain is 1 + w, else 0.
        eps: the ε of all norms, including the norms of queries and keys.
        embed_scaled: whether embeddings are multiplied by √d_model as they enter the stream.
        scale: divisor of attention scores; None for the layer's √d_query.
        scale_by_layer: whether scores are also divided by layer + 1.
        positions: "standard" (added to the stream), "shortformer" (added to the inputs of queries
            and keys), "rotary", "alibi", "relative" (each stack has a table of biases), …
        rotary: whether rotary positions rotate a fixed number of coordinates (the first ones), or
            a whole head (coordinate i with i + d_query / 2).
        qk_norm: whether queries and keys are normalized, per head or over all heads as one vector.
        clip_qkv: the largest absolute value of queries, keys and values, which are clipped; or
            None.
        attn_types: the kind of attention of each layer ("global", "local"); None if all are alike.
        tied: whether the unembedding and the embedding are one matrix.
        unembed_scaled: whether the last norm's output is divided by √d_model.
        pointwise: whether the activation function acts on each neuron alone; None without MLPs.
        grouped: whether heads may share keys and values.
        grouped_by_head: whether hook points of keys and values have an entry for every head even
            if heads share them.
        init: TransformerLens' `init_mode`, or "T5", and its gain (for "gpt2", the standard
            deviation).
    """

    n_layers: int
    norm: Norm
    final_norm: Norm
    norm_place: NormPlace = "before"
    gain_offset: float = 0.0
    eps: float = 1e-5
    embed_scaled: bool = False
    scale: float | None = None
    scale_by_layer: bool = False
    positions: str = "standard"
    rotary: Literal["fixed", "whole head"] = "fixed"
    qk_norm: Literal["by head", "all heads"] | None = None
    clip_qkv: float | None = None
    attn_types: tuple[str, ...] | None = None
    tied: bool = False
    unembed_scaled: bool = False
    pointwise: bool | None = True
    grouped: bool = False
    grouped_by_head: bool = False
    init: tuple[str, float] = ("gpt2", 0.02)
    n_encoder_layers: int = 0

    def layers_in(self, stack: Stack | None) -> range:
        """Return the layers of a stack; all layers for None."""
        first = self.n_encoder_layers if stack == "decoder" else 0
        return range(first, self.n_encoder_layers if stack == "encoder" else self.n_layers)

    @property
    def stacks(self) -> dict[Stack | None, range]:
        """The layers of each stack, by name; the name is None if there is only one stack."""
        names: tuple[Stack | None, ...] = (None,)
        if self.n_encoder_layers:
            names = ("encoder", "decoder")
        return {name: self.layers_in(name) for name in names}


@dataclass(frozen=True)
class Weights:
    """A model's tensors by name, and its constants. No function changes these tensors in place.

    Attributes:
        tensors: tensors by TransformerLens' names; `W_K`, `W_V`, `b_K`, `b_V` have one entry per
            kv_head.
        constants: the model's constants.

    Example:
        >>> from attn_only_lens import load
        >>> from attn_only_lens.growth.expansion.weights import Axis
        >>> from attn_only_lens.growth.models._grow import read
        >>> weights = read(load("modular-addition"))
        >>> weights.tensors["blocks.0.mlp.W_in"].shape == (
        ...     weights.sizes[Axis("d_model")], weights.sizes[Axis("d_mlp", 0)]
        ... )
        True
    """

    tensors: Mapping[str, Tensor]
    constants: Constants

    @property
    def sizes(self) -> dict[Axis, int]:
        """The length of every axis. Raise ValueError if an axis has two different lengths."""
        sizes: dict[Axis, int] = {}
        for name, tensor in self.tensors.items():
            axes = axes_of(name, self.constants)
            if len(axes) != tensor.ndim:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {axes}")
            for axis, size in zip(axes, tensor.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has size {size} along {axis}; expected {sizes[axis]}")
        return sizes

    def in_layers(self, of: str) -> list[int]:
        """Return the layers that have a tensor of the given kind, for example `attn.W_Q`."""
        layers = range(self.constants.n_layers)
        return [layer for layer in layers if block_name(layer, of) in self.tensors]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """Return new weights, with `change` applied to each tensor."""
        return replace(self, tensors={name: change(x) for name, x in self.tensors.items()})

    def sketch(self) -> "Weights":
        """Return the weights as meta tensors, which have no values, to try an expansion cheaply."""
        return self.map(lambda tensor: tensor.to("meta"))


@dataclass(frozen=True)
class Identity:
    """Numbers that identify a model's tensors, computed by `identity`.

    Attributes:
        marks: the weighted sum and the norm of each tensor, by name.
        precision: the largest rounding error of a weighted sum, relative to the tensor's norm.
    """

    marks: Mapping[str, tuple[float, float]] = field(repr=False)
    precision: float

    def differences(self, second: "Identity") -> list[str]:
        """Return the names of tensors that differ, and of nonzero tensors that only one model has.

        A tensor that one model lacks is treated as zeros, because TransformerBridge adds biases of
        zero in transformer-lens 3.9.
        """
        tolerance = max(self.precision, second.precision)
        both = {**self.marks, **second.marks}
        odd = {name for name in self.marks.keys() ^ second.marks.keys() if both[name][1] > 0}
        for name in self.marks.keys() & second.marks.keys():
            (one, size), (two, other_size) = self.marks[name], second.marks[name]
            if not abs(one - two) <= tolerance * max(size, other_size):
                odd.add(name)
        return sorted(odd)


def identity_of(tensors: Mapping[str, Tensor]) -> Identity:
    """Return the numbers that identify a model with the given tensors."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    numbers = on_cpu([_sums(tensor.detach()) for tensor in tensors.values()])
    marks = {
        name: (total, math.sqrt(squares))
        for name, (total, squares) in zip(tensors, map(Tensor.tolist, numbers), strict=True)
    }
    return Identity(marks, max(map(rounding, dtypes), default=0.0))


def _sums(tensor: Tensor) -> Float[Tensor, "2"]:
    """Return the weighted sum and the sum of squares of a tensor's entries, in float64."""
    tensor = to_float64_device(torch.atleast_1d(tensor))
    # Permute axes to their order in memory, so that transposed matrices are not copied.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    x = tensor.permute(order)
    first, *others = (_axis_weights(axis, tensor) for axis in order)
    sums = tensor.new_zeros(2, dtype=torch.float64)
    n_rows = max(1, _AT_ONCE * len(x) // max(1, x.numel()))
    for rows, weights in zip(x.split(n_rows), first.split(n_rows), strict=True):
        values = rows.double()
        flat = values.flatten()
        for along in reversed(others):
            values = values @ along
        sums += torch.stack([values @ weights, flat @ flat])
    return sums


def _axis_weights(axis: int, tensor: Tensor) -> Float[Tensor, "n"]:
    first = 1 + 1000 * axis
    turns = torch.arange(first, first + tensor.shape[axis], dtype=torch.float64, device="cpu")
    return ((turns * _GOLDEN).frac() * 2 - 1).to(tensor.device)
