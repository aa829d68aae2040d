"""Build a converted model around the parameters of its source."""

import copy as _copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList

from attn_only_lens.heads.blocks import heads_block, neurons_block
from attn_only_lens.heads.gating import Gating
from attn_only_lens.heads.passing import Passing
from attn_only_lens.tl import HookedTransformer
from attn_only_lens.two_blocks.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.two_blocks.config import BlockConfig, attention_only_config
from attn_only_lens.two_blocks.model import AttentionOnlyTransformer, assemble
from attn_only_lens.two_blocks.sizes import LayerSizes

__all__ = ["convert_as"]


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
    ranged = gating.kind == "bilinear" and model.cfg.gated_mlp
    n_ranges = None if gating.ranges is None else len(gating.ranges)
    if n_ranges != (model.cfg.n_layers if ranged else None):
        raise ValueError(
            f"got {gating}; expected {'a range for each layer' if ranged else 'no ranges'}"
        )
    cfg = attention_only_config(model.cfg, gating, sizes)
    parts = _clone(model, cfg, copy_weights=copy)
    passing = Passing()
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
