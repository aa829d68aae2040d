"""Growth of converted models, which have two blocks per layer.

A converted model has the original model's parameters under other names: layer l of the original
becomes blocks 2l and 2l + 1, and the MLP's matrices become single-neuron attention heads
(neuron-heads). `AddNeurons` therefore appends neuron-heads, and `InsertLayer` inserts two blocks.
Growing then converting gives bitwise the same
weights as converting then growing. Layers of a converted model may differ in size, and the width of
values may differ from that of keys. Converted models, unlike others, can therefore grow in some
layers only, or by `WidenValues` or `WidenQueriesAndKeys` alone.

If bilinear gates compute an MLP neuron with several heads, these share the neuron's weights, so
that no head could be added or removed alone. Grow the original of such a model, then convert it.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from attn_only_lens.arguments import a_type
from attn_only_lens.growth.expansion.weights import Axis, Weights, block_name, in_layer, tail
from attn_only_lens.growth.models.growable import Growable, Parameter
from attn_only_lens.growth.models.hooked import (
    configuration_reasons,
    constants_of,
    joint_norm_reasons,
    parameter_of,
)
from attn_only_lens.heads import host_of
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, LayerSizes, rebuild
from attn_only_lens.models.two_blocks.config import (
    block_kind,
    block_layer,
    heads_block,
    neurons_block,
)
from attn_only_lens.models.two_blocks.known_modules import module_reasons

_BLOCK = re.compile(r"blocks\.(\d+)\.([^.]+)(.*)")
# For each module of a neuron-head block, the original model's module that it replaces.
_PARTS_IN_SOURCE = {"attn": "mlp", "ln1": "ln2", "ln1_post": "ln2_post"}
_PARTS = {source_name: ours for ours, source_name in _PARTS_IN_SOURCE.items()}
_SHARED = ("attn.W_K", "attn.W_V", "attn.b_K", "attn.b_V")  # shared by grouped heads


class ConvertedModel(Growable):
    """A model that `convert` made attention-only."""

    @staticmethod
    def is_kind(model: Any) -> bool:
        return isinstance(model, AttentionOnlyTransformer)

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        model = self.model
        if type(model) is not AttentionOnlyTransformer:
            return [f"got {a_type(model)}, a subclass that growth does not support"]
        reasons = [*module_reasons(model), *configuration_reasons(model, ("ln1", "ln1_post"))]
        if any(heads.n_neurons > len(heads.W_out) for heads in host_of(model).neurons):
            reasons.append(
                "its bilinear gates compute a neuron of an MLP with several heads, which share the "
                "neuron's weights: grow the original model, then convert it"
            )
        sizes = model.cfg.layer_sizes
        if len({size.n_key_value_heads is None for size in sizes}) > 1:
            reasons.append("only some layers have grouped keys and values")
        scales = {size.attn_scale for size in sizes}
        if model.cfg.use_attn_scale and not self._has_default_scales() and len(scales) > 1:
            reasons.append(
                f"layers divide scores by {sorted(scales)}; expected each layer's √d_head, or "
                "one value for all layers"
            )
        return reasons

    def _has_default_scales(self) -> bool:
        """Return True if every layer divides its scores by its own √d_head."""
        sizes = self.model.cfg.layer_sizes
        return all(size.attn_scale == math.sqrt(size.d_head) for size in sizes)

    def read(self) -> Weights:
        """Return the model's weights in the layout of the original model."""
        cfg = self.model.cfg.layer_cfg(0)
        constants = constants_of(cfg)
        if cfg.use_attn_scale and not self._has_default_scales():
            constants = replace(constants, scale=cfg.attn_scale)
        return Weights(self.tensors(), constants)

    def parameters(self) -> Mapping[str, Parameter]:
        tensors = {}
        for name, _ in self.model.named_parameters():
            source = _source_name(name)
            tensors[name] = parameter_of(source, self.model.cfg.layer_cfg(in_layer(source) or 0))
        return tensors

    def reasons_against_weights(self, weights: Weights) -> list[str]:
        """Return every reason why a converted model cannot have the given weights."""
        return joint_norm_reasons(weights)

    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
        template, constants = self.model, weights.constants
        frozen = self.frozen()
        names = {name: _converted_name(name, grouped=constants.grouped) for name in weights.tensors}
        cfg = template.cfg.layer_cfg(0)
        tensors = {
            names[name]: parameter_of(name, cfg).from_weights(tensor)
            for name, tensor in weights.tensors.items()
        }
        # For each layer, the old layer from which configuration values and buffers are copied.
        layers = [
            layer
            for layer_index in range(constants.n_layers)
            if (layer := in_layer(source_of(block_name(layer_index, "attn")))) is not None
        ]
        for layer, source in enumerate(layers):
            for name, buffer in template.blocks[heads_block(source)].named_buffers():
                tensors[block_name(heads_block(layer), name)] = buffer.clone()
        changes: dict[str, Any] = {"d_model": weights.sizes[Axis("d_model")], "eps": constants.eps}
        if constants.attn_types is not None:
            changes["attn_types"] = list(constants.attn_types)
        sizes = _layer_sizes(weights, template.cfg.attn_scale)
        still_frozen = [converted for name, converted in names.items() if source_of(name) in frozen]
        model = rebuild(template, tensors, sizes, frozen=still_frozen, **changes)
        for name, module in model.named_modules():
            parts = name.split(".")
            if parts[0] == "blocks" and len(parts) > 1:
                block = int(parts[1])
                parts[1] = str(heads_block(layers[block_layer(block)]) + block % 2)
            module.training = template.get_submodule(".".join(parts)).training
        return model


def _source_name(name: str) -> str:
    """Return the name of the `Weights` tensor that a converted model's parameter stores."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    block, part, rest = int(match[1]), match[2], match[3]
    if block_kind(block) == "neuron":
        part = _PARTS_IN_SOURCE[part]
    return block_name(block_layer(block), f"{part}{rest}".replace("attn._", "attn."))


def _converted_name(name: str, *, grouped: bool) -> str:
    """Return the name of the converted model's parameter that stores a `Weights` tensor."""
    layer, of = in_layer(name), tail(name)
    if layer is None:
        return name
    part, _, rest = of.partition(".")
    if part in _PARTS:
        return block_name(neurons_block(layer), f"{_PARTS[part]}.{rest}")
    shared = grouped and of in _SHARED
    return block_name(heads_block(layer), f"{part}.{'_' * shared}{rest}")


def _layer_sizes(weights: Weights, attn_scale: float) -> list[LayerSizes]:
    """Return each layer's sizes and score scale: √d_head, or `attn_scale` if it is constant."""
    constants, sizes, layers = weights.constants, weights.sizes, []
    for layer in range(constants.n_layers):
        n_heads, n_shared, width, d_value, neurons = (
            sizes[Axis(label, layer)]
            for label in ("head", "kv_head", "d_query", "d_value", "d_mlp")
        )
        scale = math.sqrt(width) if constants.scale is None else attn_scale
        grouped = n_shared if constants.grouped else None
        layers.append(LayerSizes(n_heads, grouped, width, d_value, neurons, scale))
    return layers
