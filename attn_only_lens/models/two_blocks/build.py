"""Build converted models from an original model, or from a configuration and tensors.

Without an original model, a model without weights (a skeleton) is built on the meta device, which
computes nothing and draws no random numbers. Layers that differ in size from layer 0 are built from
separate configurations.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates.gating import Gating
from attn_only_lens.heads.host import PassState
from attn_only_lens.models.two_blocks.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.models.two_blocks.config import (
    BlockConfig,
    LayerSizes,
    attention_only_config,
    heads_block,
    neurons_block,
    sizes_of,
)
from attn_only_lens.models.two_blocks.model import AttentionOnlyTransformer
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, TransformerBlock, quiet


def convert_as(
    model: HookedTransformer,
    gating: Gating,
    *,
    copy_weights: bool = False,
    sizes: Sequence[LayerSizes] | None = None,
) -> AttentionOnlyTransformer:
    """Convert a model for which `reasons_against` returns no reasons.

    The converted layers have the given `sizes`; by default, the sizes of the model's layers.
    """
    gating.require_fit(model.cfg.act_fn, model.cfg.gated_mlp, model.cfg.n_layers)
    cfg = attention_only_config(model.cfg, gating, sizes)
    attributes = _clone(model, cfg, copy_weights=copy_weights)
    passing = PassState()
    blocks: list[nn.Module] = []
    for layer, block in enumerate(attributes["_modules"].pop("blocks")):
        attention = AttentionBlock.of(block, BlockConfig(cfg, heads_block(layer)), passing)
        neurons = NeuronBlock(block, BlockConfig(cfg, neurons_block(layer)), passing)
        blocks += [attention, neurons.train(block.training)]
    converted = AttentionOnlyTransformer.__new__(AttentionOnlyTransformer)
    nn.Module.__init__(converted)
    converted.__dict__.update(attributes)
    block_list: Any = TypedModuleList(blocks)
    converted.blocks = block_list
    converted.blocks.training = model.blocks.training
    converted.setup()
    return converted


def _clone(model: HookedTransformer, cfg: Any, *, copy_weights: bool) -> dict[str, Any]:
    """Return a deep copy of the model's `__dict__`, but share its tokenizer and dataset.

    The copy also shares the model's tensors, unless `copy_weights` is set.
    """
    memo: dict[int, Any] = {id(model.cfg): cfg}
    for tensor in [*model.parameters(), *model.buffers()]:
        alias = tensor.detach().clone() if copy_weights else tensor.detach()
        memo[id(tensor)] = (
            nn.Parameter(alias, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else alias
        )
    for module in model.modules():
        if isinstance(module, HookPoint):
            memo[id(module)] = HookPoint().train(module.training)
    for shared in (model.tokenizer, model.dataset):
        memo[id(shared)] = shared
    unneeded: dict[str, Any] = {"mod_dict": {}, "hook_dict": {}}  # `setup` builds both again
    return copy.deepcopy({**model.__dict__, **unneeded}, memo)


_POSITIONS = ("standard", "rotary", "shortformer", "alibi")


def stock_skeleton(fields: Mapping[str, Any]) -> HookedTransformer:
    """Build a HookedTransformer without weights, from the fields of its configuration."""
    positions = fields.get("positional_embedding_type", _POSITIONS[0])
    if positions not in _POSITIONS:
        raise ValueError(f"got positional_embedding_type={positions!r}; expected {_POSITIONS}")
    # Set no seed, load no tokenizer and use no device; `update` below restores these fields.
    neutral = {"seed": None, "tokenizer_name": None, "init_weights": False, "device": "cpu"}
    cfg = HookedTransformerConfig(**{**fields, **neutral})
    with quiet(), torch.device("meta"):
        source = HookedTransformer(cfg, move_to_device=False)
    vars(cfg).update(fields)
    return source


_VALUE_AXES = {"W_V": 2, "b_V": 1, "W_O": 1}  # for each parameter, the axis with d_value entries


def converted_skeleton(
    source: HookedTransformer, gating: Gating, sizes: Sequence[LayerSizes]
) -> AttentionOnlyTransformer:
    """Build a converted model without weights from a stock skeleton, which it modifies."""
    for layer, layer_sizes in enumerate(sizes):
        if layer_sizes == sizes_of(source.cfg):
            continue
        cfg = copy.copy(source.cfg)
        vars(cfg).update(layer_sizes.stock_fields)
        with torch.device("meta"):
            block = TransformerBlock(cfg, layer)
        for name, parameter in list(block.attn.named_parameters()):
            if (axis := _VALUE_AXES.get(name.removeprefix("_"))) is not None:
                shape = list(parameter.shape)
                shape[axis] = layer_sizes.d_value
                setattr(block.attn, name, nn.Parameter(parameter.new_empty(shape)))
        for module in block.modules():
            if hasattr(module, "cfg"):
                module.cfg = source.cfg  # type: ignore[assignment]
        source.blocks[layer] = block
    give_activation(source, gating)
    return convert_as(source, gating, sizes=sizes)


def give_activation(source: HookedTransformer, gating: Gating) -> None:
    """If `gating` has a generalized SiLU, make it the activation function of all MLPs."""
    if gating.silu is not None:
        for block in source.blocks:
            block.mlp.act_fn = gating.silu


def rebuild(
    model: AttentionOnlyTransformer,
    tensors: Mapping[str, Tensor],
    sizes: Sequence[LayerSizes],
    *,
    frozen: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    **changes: Any,
) -> AttentionOnlyTransformer:
    """Build a converted model like `model`, with other weights, layer sizes or number of layers.

    `tensors` holds all parameters and buffers by name. Tied parameters appear only under the first
    name; `tied` maps the other names to it. `frozen` lists parameters that do not require
    gradients. `changes` are new values for configuration fields of the source, such as `d_model`.
    """
    fields = vars(model.cfg.layer_cfg(0)) | sizes[0].stock_fields | {"n_layers": len(sizes)}
    new = converted_skeleton(stock_skeleton(fields | changes), model.cfg.gating, sizes)
    tied = tied or {}
    UnsupportedModelError.raise_if(
        skeleton_misfits(new, tensors, tied), "these weights do not fit a model of these sizes"
    )
    fill(new, tensors, tied, frozen)
    for name, value in vars(model).items():  # tokenizer, dataset, user-added attributes
        if not name.startswith("_") and name not in ("cfg", "mod_dict", "hook_dict"):
            setattr(new, name, value)
    return new.train(model.training)


def skeleton_misfits(
    skeleton: nn.Module, tensors: Mapping[str, Tensor], tied: Collection[str]
) -> list[str]:
    """Return error messages for tensors that do not fit a model without weights."""
    named = skeleton.named_parameters(remove_duplicate=False)
    expected: dict[str, Tensor] = {name: tensor for name, tensor in named if name not in tied}
    buffers = dict(skeleton.named_buffers())
    # Rotary tables grow with the longest prompt, along their first axis.
    return tensor_misfits(expected | buffers, tensors, growing=buffers)


def tensor_misfits(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], growing: Collection[str] = ()
) -> list[str]:
    """Return error messages for tensors that are missing, unknown or have the wrong shape.

    Tensors named in `growing` may have any length along axis 0.
    """
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{name} is not known" for name in sorted(tensors.keys() - expected.keys())]
    for name in filter(tensors.__contains__, expected):
        shape, wanted = tuple(tensors[name].shape), tuple(expected[name].shape)
        free = 1 if name in growing and wanted and shape else 0
        if (len(shape), shape[free:]) != (len(wanted), wanted[free:]):
            wrong.append(f"{name} has shape {shape}; expected {wanted}")
    return wrong


def fill(
    skeleton: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    frozen: Collection[str],
) -> None:
    """Put tensors into a model without weights; parameters in `frozen` do not require gradients."""

    def put(name: str, tensor: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(path), leaf, tensor)

    for name in dict(skeleton.named_parameters(remove_duplicate=False)):
        if name not in tied:
            put(name, nn.Parameter(tensors[name], requires_grad=name not in frozen))
    for name, first in tied.items():
        put(name, skeleton.get_parameter(first))
    for name in dict(skeleton.named_buffers()):
        put(name, tensors[name])
