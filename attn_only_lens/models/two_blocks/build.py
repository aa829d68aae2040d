"""Build a converted model around the parameters of its source.

Models without numbers, and how they get them: for loading, growing, and layers that differ.

A model is built from a configuration on the meta device, so that nothing is computed and no random
number is drawn; then it is given its tensors. What does not fit the skeleton is refused.

TransformerLens has one size for all layers in its configuration, and none in its forward pass: a
block asks its own `cfg`. So a skeleton has, in the place of a layer of another size, the block that
a configuration with that size leads to; its modules are then given the configuration of the model,
and conversion gives its attention a view of that (`BlockConfig`).
"""

import copy as _copy
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads.gating import Gating
from attn_only_lens.heads.host import heads_block, neurons_block
from attn_only_lens.heads.pass_state import PassState
from attn_only_lens.models.two_blocks.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.models.two_blocks.config import (
    BlockConfig,
    LayerSizes,
    attention_only_config,
    sizes_of,
)
from attn_only_lens.models.two_blocks.model import AttentionOnlyTransformer, assemble
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, TransformerBlock, quiet

__all__ = [
    "convert_as",
    "converted_skeleton",
    "fill",
    "misfits",
    "rebuilt",
    "stock_skeleton",
    "tensor_misfits",
]


def convert_as(
    model: HookedTransformer,
    gating: Gating,
    *,
    copy: bool = False,
    sizes: Sequence[LayerSizes] | None = None,
) -> AttentionOnlyTransformer:
    """Convert a model that nothing speaks against, with gates that are settled.

    Args:
        model: the source.
        gating: its gates.
        copy: whether to copy the weights.
        sizes: of each of its layers, where they are not those that its `cfg` says (`skeleton.py`).

    Raises:
        ValueError: the gates are of another kind of MLP, or of another number of layers.
    """
    gating.require_fit(model.cfg.act_fn, model.cfg.gated_mlp, model.cfg.n_layers)
    cfg = attention_only_config(model.cfg, gating, sizes)
    parts = _clone(model, cfg, copy_weights=copy)
    passing = PassState()
    blocks: list[nn.Module] = []
    for layer, block in enumerate(parts["_modules"].pop("blocks")):
        attention = AttentionBlock.of(block, BlockConfig(cfg, heads_block(layer)), passing)
        neurons = NeuronBlock(block, BlockConfig(cfg, neurons_block(layer)), passing)
        blocks += [attention, neurons.train(block.training)]
    block_list = TypedModuleList(blocks)
    block_list.training = model.blocks.training
    return assemble(parts, block_list)


def _clone(model: HookedTransformer, cfg: Any, *, copy_weights: bool) -> dict[str, Any]:
    """The model's `__dict__`, deeply copied around its tensors.

    `deepcopy` with its memo filled in beforehand: tied parameters stay tied, unknown attributes
    come along, and the tokenizer is handed over, where TransformerLens would load it anew.
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
    cloned: dict[str, Any] = _copy.deepcopy({**model.__dict__, **unneeded}, memo)
    return cloned


_POSITIONS = ("standard", "rotary", "shortformer", "alibi")


def stock_skeleton(fields: Mapping[str, Any]) -> HookedTransformer:
    """A stock model without numbers.

    Args:
        fields: of its configuration, all of them.

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


def converted_skeleton(
    source: HookedTransformer, gating: Gating, sizes: Sequence[LayerSizes]
) -> AttentionOnlyTransformer:
    """A converted model without numbers, of layers of these sizes.

    Args:
        source: of `stock_skeleton`, whose `cfg` has the sizes of layer 0. Used up.
        gating: the gates of neuron-heads.
        sizes: of each source layer.
    """
    for layer, each in enumerate(sizes):
        if each == sizes_of(source.cfg):
            continue
        cfg = copy(source.cfg)
        vars(cfg).update(asdict(each))
        with torch.device("meta"):
            block = TransformerBlock(cfg, layer)
        for module in block.modules():
            if hasattr(module, "cfg"):
                module.cfg = source.cfg  # type: ignore[assignment]
        source.blocks[layer] = block
    return convert_as(source, gating, sizes=sizes)


def rebuilt(
    model: AttentionOnlyTransformer,
    tensors: Mapping[str, Tensor],
    sizes: Sequence[LayerSizes],
    *,
    frozen: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    gating: Gating | None = None,
    **changes: Any,
) -> AttentionOnlyTransformer:
    """A new model of the same kind, with other weights in layers of other sizes, or more layers.

    Args:
        model: what to take everything else from: configuration, gates, mode, tokenizer and other
            attributes. It is not changed.
        tensors: every parameter and buffer of the new model, by its name there. They become its
            own: give copies of what is still needed.
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
        >>> from attn_only_lens.models.two_blocks import LayerSizes, rebuilt
        >>> model = convert(pretrained.modular_addition())
        >>> few = {"W_in": (..., slice(7)), "b_in": (slice(7),), "W_out": (slice(7),)}
        >>> tensors = {
        ...     name: tensor[few.get(name.rpartition(".")[2], ...)].clone()
        ...     for name, tensor in model.state_dict().items()
        ... }
        >>> (sizes,) = model.cfg.layer_sizes
        >>> pruned = rebuilt(model, tensors, [LayerSizes(4, None, 32, 7, sizes.attn_scale)])
        >>> pruned.blocks[1].cfg.n_heads, pruned.all_head_labels()[-1]
        (7, 'L0N6')
    """
    fields = {**vars(model.cfg.layer_cfg(0)), **asdict(sizes[0]), "n_layers": len(sizes), **changes}
    gating = model.cfg.gating if gating is None else gating
    new = converted_skeleton(stock_skeleton(fields), gating, sizes)
    tied = tied or {}
    if wrong := misfits(new, tensors, tied):
        raise UnsupportedModelError(wrong, "these weights make no model of these sizes")
    fill(new, tensors, tied, frozen)
    own = {"cfg", "mod_dict", "hook_dict"}
    for name, value in vars(model).items():  # tokenizer, dataset, and what others have put there
        if not name.startswith("_") and name not in own:
            setattr(new, name, value)
    return new.train(model.training)


def misfits(skeleton: nn.Module, tensors: Mapping[str, Tensor], tied: Collection[str]) -> list[str]:
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
    """Give a skeleton its numbers, which fit it."""
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
