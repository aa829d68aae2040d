"""A converted model, two blocks a layer, as weights of its source, and back.

Its parameters are those of its source under other names: source layer l is blocks 2l and 2l + 1,
and the MLP's matrices are the neuron-heads'. So every expansion means there what it means in the
source: `AddNeurons` appends neuron-heads (all m of each neuron, where m share one), `InsertLayer`
inserts two blocks, and converting a grown model gives, bit for bit, the converted model grown.
Layers need not stay alike: expansions of some layers only are for these models.

Bilinear gates of a gated MLP hold on a range that was measured layer by layer. A new layer has the
range of the one it is like, and new neurons that of their layer: what they compute beyond it is
not the activation, but nothing reads it until they are trained. Where that matters, grow the source
and convert that, calibrated.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from attn_only_lens.expansion import Axis, Weights
from attn_only_lens.expansion.weights import block_name, in_layer, tail
from attn_only_lens.growth.growable import Parameter, Rim
from attn_only_lens.growth.hooked import (
    constant_reasons,
    constants_of,
    norm_reasons,
    shared_reasons,
)
from attn_only_lens.heads.host import block_kind, block_layer, heads_block, neurons_block
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, LayerSizes, rebuild
from attn_only_lens.models.two_blocks.known_modules import module_reasons
from attn_only_lens.runs.attached_hooks import hook_reasons

__all__ = ["TWO_BLOCKS"]

_BLOCK = re.compile(r"blocks\.(\d+)\.([^.]+)(.*)")
_IN_SOURCE = {"attn": "mlp", "ln1": "ln2", "ln1_post": "ln2_post"}  # of parts of a neuron block
_HERE = {theirs: ours for ours, theirs in _IN_SOURCE.items()}
_NORMS = ("ln1", "ln1_post")
_SHARED = ("attn.W_K", "attn.W_V", "attn.b_K", "attn.b_V")  # by heads that are grouped


def _takes(model: Any) -> bool:
    return isinstance(model, AttentionOnlyTransformer)


def _reasons_against(model: AttentionOnlyTransformer) -> list[str]:
    if type(model) is not AttentionOnlyTransformer:
        return [f"it is a {type(model).__qualname__}, a subclass that computes what is not known"]
    norms = [f"blocks.{at}.{norm}" for at in range(model.cfg.n_layers) for norm in _NORMS]
    reasons = [
        *module_reasons(model),
        *shared_reasons(model),
        *norm_reasons(model, norms),
        *constant_reasons(model),
    ]
    sizes = model.cfg.layer_sizes
    if len({each.n_key_value_heads is None for each in sizes}) > 1:
        reasons.append("some of its layers have grouped keys and values, and others have not")
    if model.cfg.use_attn_scale and not _own_scales(model):
        scales = {each.attn_scale for each in sizes}
        if len(scales) > 1:
            reasons.append(
                f"its layers divide scores by {sorted(scales)}; expected √d_head of each, or one "
                "number for all"
            )
    return reasons


def _own_scales(model: AttentionOnlyTransformer) -> bool:
    """Whether every layer divides its scores by the square root of its heads' width."""
    return all(each.attn_scale == math.sqrt(each.d_head) for each in model.cfg.layer_sizes)


def _in_source(name: str) -> str:
    """What a parameter of a converted model is called in `Weights`."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    block, part, rest = int(match[1]), match[2], match[3]
    if block_kind(block) == "neuron":
        part = _IN_SOURCE[part]
    return block_name(block_layer(block), f"{part}{rest}".replace("attn._", "attn."))


def _here(name: str, *, grouped: bool) -> str:
    """The way back: what a tensor of `Weights` is called in a converted model."""
    layer, of = in_layer(name), tail(name)
    if layer is None:
        return name
    part, _, rest = of.partition(".")
    if part in _HERE:
        return block_name(neurons_block(layer), f"{_HERE[part]}.{rest}")
    shared = grouped and of in _SHARED
    return block_name(heads_block(layer), f"{part}.{'_' * shared}{rest}")


def _read(model: AttentionOnlyTransformer) -> Weights:
    tensors = {_in_source(name): p.detach() for name, p in model.named_parameters()}
    cfg = model.cfg.layer_cfg(0)
    constants = replace(constants_of(cfg), heads_per_neuron=model.heads_per_neuron)
    if cfg.use_attn_scale and not _own_scales(model):
        constants = replace(constants, scale=cfg.attn_scale)
    return Weights(tensors, constants)


def _parameters(model: AttentionOnlyTransformer) -> Mapping[str, Parameter]:
    return {name: Parameter(_in_source(name)) for name, _ in model.named_parameters()}


def _reasons_against_weights(weights: Weights) -> list[str]:
    sizes = weights.sizes
    return [
        f"queries and keys of layer {layer} would have width {sizes[Axis('d_query', layer)]}, "
        f"values {sizes[Axis('d_value', layer)]}; a converted model has one d_head for both: widen "
        "both"
        for layer in range(weights.constants.n_layers)
        if sizes[Axis("d_query", layer)] != sizes[Axis("d_value", layer)]
    ]


def _sizes(weights: Weights, attn_scale: float) -> list[LayerSizes]:
    """Of every layer; `attn_scale` is of models that do not divide by √d_head."""
    constants, found = weights.constants, []
    for layer in range(constants.n_layers):
        n_heads, n_shared, width, neurons = (
            weights.sizes[Axis(label, layer)] for label in ("head", "kv_head", "d_query", "d_mlp")
        )
        scale = math.sqrt(width) if constants.scale is None else attn_scale
        grouped = n_shared if constants.grouped else None
        found.append(LayerSizes(n_heads, grouped, width, neurons, scale))
    return found


def _write(
    template: AttentionOnlyTransformer, weights: Weights, source_of: Callable[[str], str]
) -> AttentionOnlyTransformer:
    constants = weights.constants
    theirs = {_in_source(name): parameter for name, parameter in template.named_parameters()}
    here = {name: _here(name, grouped=constants.grouped) for name in weights.tensors}
    tensors = {here[name]: tensor for name, tensor in weights.tensors.items()}
    frozen = [mine for name, mine in here.items() if not theirs[source_of(name)].requires_grad]
    # For each layer, the template's that it takes everything else from.
    names = [source_of(block_name(layer, "attn")) for layer in range(constants.n_layers)]
    layers = [layer for name in names if (layer := in_layer(name)) is not None]
    for layer, source in enumerate(layers):
        for name, buffer in template.blocks[heads_block(source)].named_buffers():
            tensors[block_name(heads_block(layer), name)] = buffer.clone()
    gating = template.cfg.gating
    if gating.ranges is not None:
        gating = replace(gating, ranges=tuple(gating.ranges[source] for source in layers))
    changes: dict[str, Any] = {"d_model": weights.sizes[Axis("d_model")], "eps": constants.eps}
    if constants.attn_types is not None:
        changes["attn_types"] = list(constants.attn_types)
    sizes = _sizes(weights, template.cfg.attn_scale)
    model = rebuild(template, tensors, sizes, frozen=frozen, gating=gating, **changes)
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[0] == "blocks" and len(parts) > 1:
            block = int(parts[1])
            parts[1] = str(heads_block(layers[block_layer(block)]) + block % 2)
        module.training = template.get_submodule(".".join(parts)).training
    return model


TWO_BLOCKS = Rim(
    takes=_takes,
    reasons_against=_reasons_against,
    read=_read,
    parameters=_parameters,
    reasons_against_weights=_reasons_against_weights,
    write=_write,
    attached=hook_reasons,
)
