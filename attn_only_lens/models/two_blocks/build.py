"""Build converted models: around the parameters of a source, or from a configuration and tensors.

Without a source, a model is built on the meta device, so that nothing is computed and no random
number is drawn; then it is given its tensors. Those that do not fit the skeleton are refused.

TransformerLens has one size for all layers in its configuration, and none in its forward pass: a
block asks its own `cfg`. So where a layer is to have another size, the skeleton gets the block that
a configuration with that size leads to, and parameters for values of another width; its modules are
then given the configuration of the model, and conversion gives its attention a view of that
(`BlockConfig`).
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads.gating import Gating
from attn_only_lens.heads.host import PassState
from attn_only_lens.models.two_blocks.block_numbers import heads_block, neurons_block
from attn_only_lens.models.two_blocks.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.models.two_blocks.config import (
    BlockConfig,
    LayerSizes,
    attention_only_config,
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
    """Convert a model against which `reasons_against` finds nothing.

    Args:
        model: the source.
        gating: the gates of its neuron-heads.
        copy_weights: whether to copy the weights.
        sizes: of each of its layers, where they differ from those in its `cfg`.

    Raises:
        ValueError: the gates are of another kind of MLP or number of layers, or do not exist.
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
    """Copy the model's `__dict__` deeply, but share its tensors and tokenizer.

    With the memo of `deepcopy` filled beforehand, tied parameters stay tied, unknown attributes
    come along, and TransformerLens does not load the tokenizer again.
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
    unneeded: dict[str, Any] = {"mod_dict": {}, "hook_dict": {}}  # `setup` makes them anew
    cloned: dict[str, Any] = copy.deepcopy({**model.__dict__, **unneeded}, memo)
    return cloned


_POSITIONS = ("standard", "rotary", "shortformer", "alibi")


def stock_skeleton(fields: Mapping[str, Any]) -> HookedTransformer:
    """Build a stock model without numbers.

    Args:
        fields: all fields of its configuration.

    Raises:
        ValueError: it has positions that TransformerLens would refuse when the model runs.
    """
    positions = fields.get("positional_embedding_type", _POSITIONS[0])
    if positions not in _POSITIONS:
        raise ValueError(f"got positional_embedding_type={positions!r}; expected {_POSITIONS}")
    # Building must not touch the caller's random state (a seed would), nor ask a hub for a
    # tokenizer by its name, nor look for a device; these fields are put back afterwards.
    held_back = {"seed": None, "tokenizer_name": None, "init_weights": False, "device": "cpu"}
    cfg = HookedTransformerConfig(**{**fields, **held_back})
    with quiet(), torch.device("meta"):
        source = HookedTransformer(cfg, move_to_device=False)
    vars(cfg).update(fields)
    return source


_OF_VALUES = {"W_V": 2, "b_V": 1, "W_O": 1}  # and the axis that is as wide


def converted_skeleton(
    source: HookedTransformer, gating: Gating, sizes: Sequence[LayerSizes]
) -> AttentionOnlyTransformer:
    """Build a converted model without numbers, with layers of these sizes.

    Args:
        source: of `stock_skeleton`, whose `cfg` has the sizes of layer 0. Used up. Its MLPs get the
            activation of the gates, where that has no name.
        gating: the gates of neuron-heads.
        sizes: of each source layer.
    """
    for layer, each in enumerate(sizes):
        if each == sizes_of(source.cfg):
            continue
        cfg = copy.copy(source.cfg)
        vars(cfg).update(each.stock_fields)
        with torch.device("meta"):
            block = TransformerBlock(cfg, layer)
        for name, parameter in list(block.attn.named_parameters()):
            if (axis := _OF_VALUES.get(name.removeprefix("_"))) is not None:
                shape = list(parameter.shape)
                shape[axis] = each.d_value
                setattr(block.attn, name, nn.Parameter(parameter.new_empty(shape)))
        for module in block.modules():
            if hasattr(module, "cfg"):
                module.cfg = source.cfg  # type: ignore[assignment]
        source.blocks[layer] = block
    give_activation(source, gating)
    return convert_as(source, gating, sizes=sizes)


def give_activation(source: HookedTransformer, gating: Gating) -> None:
    """Give the MLPs of a skeleton the activation of gates, where no configuration names it."""
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
    gating: Gating | None = None,
    **changes: Any,
) -> AttentionOnlyTransformer:
    """Build a model of the same kind, with other weights in layers of other sizes, or more layers.

    Args:
        model: the source of all else: configuration, gates, mode, tokenizer and other attributes.
            It is not changed.
        tensors: every parameter and buffer of the new model, by its name there. They become its
            own: copy those that are still needed elsewhere.
        sizes: of each source layer of the new model.
        frozen: parameters that get no gradient.
        tied: for every further name of a tied parameter, its first name.
        gating: the gates; by default those of `model`, which must then have a range for each layer
            if it has ranges.
        **changes: fields of the source's configuration that differ besides: `d_model`, `eps`, …

    Returns:
        The new model, without hooks.

    Raises:
        UnsupportedModelError: tensors are missing, not known, or of another shape.
        ValueError: the gates have ranges, and not one for each layer.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, pretrained
        >>> from attn_only_lens.models.two_blocks import LayerSizes, rebuild
        >>> model = convert(pretrained.modular_addition())
        >>> few = {"W_in": (..., slice(7)), "b_in": (slice(7),), "W_out": (slice(7),)}
        >>> tensors = {
        ...     name: tensor[few.get(name.rpartition(".")[2], ...)].clone()
        ...     for name, tensor in model.state_dict().items()
        ... }
        >>> (sizes,) = model.cfg.layer_sizes
        >>> pruned = rebuild(model, tensors, [LayerSizes(4, None, 32, 32, 7, sizes.attn_scale)])
        >>> pruned.blocks[1].cfg.n_heads, pruned.all_head_labels(neurons=True)[-1]
        (7, 'L0N6')
    """
    fields = vars(model.cfg.layer_cfg(0)) | sizes[0].stock_fields | {"n_layers": len(sizes)}
    gating = model.cfg.gating if gating is None else gating
    new = converted_skeleton(stock_skeleton(fields | changes), gating, sizes)
    tied = tied or {}
    if wrong := skeleton_misfits(new, tensors, tied):
        raise UnsupportedModelError(wrong, "these weights make no model of these sizes")
    fill(new, tensors, tied, frozen)
    own = {"cfg", "mod_dict", "hook_dict"}
    for name, value in vars(model).items():  # tokenizer, dataset, and what others have put there
        if not name.startswith("_") and name not in own:
            setattr(new, name, value)
    return new.train(model.training)


def skeleton_misfits(
    skeleton: nn.Module, tensors: Mapping[str, Tensor], tied: Collection[str]
) -> list[str]:
    """List where tensors do not fit a skeleton; `tied` names have none of their own."""
    named = skeleton.named_parameters(remove_duplicate=False)
    expected: dict[str, Tensor] = {name: each for name, each in named if name not in tied}
    buffers = dict(skeleton.named_buffers())
    # Rotary tables grow with the longest prompt seen: along their first axis.
    return tensor_misfits(expected | buffers, tensors, growing=buffers)


def tensor_misfits(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], growing: Collection[str] = ()
) -> list[str]:
    """List the tensors that are missing, not known, or of another shape than expected.

    Args:
        expected: tensors of the shapes expected.
        tensors: those given.
        growing: names of tensors whose first axis may have any length.
    """
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{name} is not known" for name in sorted(tensors.keys() - expected.keys())]
    for name in filter(tensors.__contains__, expected):
        got, wanted = tuple(tensors[name].shape), tuple(expected[name].shape)
        free = 1 if name in growing and wanted and got else 0
        if (len(got), got[free:]) != (len(wanted), wanted[free:]):
            wrong.append(f"{name} has shape {got}; expected {wanted}")
    return wrong


def fill(
    skeleton: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    frozen: Collection[str],
) -> None:
    """Give a skeleton tensors that fit it."""
    for name in dict(skeleton.named_parameters(remove_duplicate=False)):
        module, leaf = _owner(skeleton, name)
        if name not in tied:
            setattr(module, leaf, nn.Parameter(tensors[name], requires_grad=name not in frozen))
    for name, first in tied.items():
        module, leaf = _owner(skeleton, name)
        setattr(module, leaf, skeleton.get_parameter(first))
    for name in dict(skeleton.named_buffers()):
        module, leaf = _owner(skeleton, name)
        setattr(module, leaf, tensors[name])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
