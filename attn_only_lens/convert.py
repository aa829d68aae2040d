"""Convert a model: every MLP neuron becomes an attention head of width 1 (Theorem 4)."""

import copy as _copy
from typing import Any

from torch import nn
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList

from attn_only_lens.calibrate import Calibration
from attn_only_lens.choice import BilinearRequest, choose_gating
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import AttentionOnlyTransformer, Gating, assemble
from attn_only_lens.heads.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.heads.config import BlockConfig, attention_only_config
from attn_only_lens.heads.names import heads_block, neurons_block
from attn_only_lens.heads.support import reasons_against

__all__ = ["convert", "convert_as"]


def convert(
    model: HookedTransformer,
    *,
    copy: bool = False,
    gate: str = "exact",
    heads_per_neuron: int | None = None,
    tolerance: float | None = None,
    calibration: Calibration | None = None,
) -> AttentionOnlyTransformer:
    """Make an attention-only `HookedTransformer` that computes what `model` computes.

    Source layer l becomes block 2l, its attention heads, and block 2l + 1, its d_mlp neurons as
    heads of width 1 under `attn`: each token attends to itself with weight p(q) and to a static
    bias token with weight 1 - p(q), where act(q) = q · p(q). With no hook on a neuron block the
    logits are bitwise those of `model`; with hooks they agree to rounding.

    With `gate="bilinear"`, nothing but softmax over bilinear scores is used, as in the theorem:
    each neuron becomes m heads `L5N1234.0 … .m-1` that write along one vector, and the activation
    is approximated within a certified bound (`gates/bilinear.py`), for every real input; silu
    needs one head, and no approximation. In a gated MLP it holds on a range that `calibrate` takes
    from data (`gates/gated.py`). The approximation is the model's function, with hooks or without.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorems 2
    and 4, with p in place of σ for activations other than SiLU; gated MLPs, whose value g · u is a
    product, are beyond the paper.

    Args:
        model: a `HookedTransformer` with MLPs. It is not changed.
        copy: whether to copy the weights. By default they are shared, so that conversion costs no
            memory; then training either model trains both.
        gate: "exact", one head a neuron with the activation's own pattern; or "bilinear".
        heads_per_neuron: m, for bilinear gates; by default the fewest within `tolerance`.
        tolerance: largest error of the activation, for bilinear gates; by default 1e-3.
        calibration: `calibrate(model, tokens)`, for bilinear gates of a gated MLP.

    Returns:
        The converted model, on the device and in the dtype of `model`, without its hooks.

    Raises:
        UnsupportedModelError: with every reason why the model cannot be converted exactly.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, pretrained
        >>> model = pretrained.modular_addition()
        >>> attn_only = convert(model)
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> torch.equal(attn_only(tokens), model(tokens))
        True
        >>> convert(model, gate="bilinear").heads_per_neuron  # silu is bilinear with one head
        1
    """
    reasons = reasons_against(model)
    wanted = BilinearRequest(heads_per_neuron, tolerance, calibration)
    gating, more = choose_gating(model, gate, wanted)
    if reasons or more:
        raise UnsupportedModelError([*reasons, *more])
    assert gating is not None
    return convert_as(model, gating, copy=copy)


def convert_as(
    model: HookedTransformer, gating: Gating, *, copy: bool = False
) -> AttentionOnlyTransformer:
    """Convert a model that nothing speaks against, with gates that are settled.

    Raises:
        ValueError: the gates are of another kind of MLP, or of another number of layers.
    """
    ranged = gating.kind == "bilinear" and model.cfg.gated_mlp
    n_ranges = None if gating.ranges is None else len(gating.ranges)
    if n_ranges != (model.cfg.n_layers if ranged else None):
        raise ValueError(
            f"got {gating}; expected {'a range for each layer' if ranged else 'no ranges'}"
        )
    cfg = attention_only_config(model.cfg, gating)
    parts = _clone(model, cfg, copy_weights=copy)
    parallel = model.cfg.parallel_attn_mlp
    blocks: list[nn.Module] = []
    for layer, block in enumerate(parts["_modules"].pop("blocks")):
        attention_cfg = BlockConfig(cfg, heads_block(layer))
        attention = AttentionBlock.of(block, attention_cfg, parallel=parallel)
        neuron_cfg = BlockConfig(cfg, neurons_block(layer))
        neurons = NeuronBlock(block, neuron_cfg, attention if parallel else None)
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
