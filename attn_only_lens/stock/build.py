"""Turn a converted model into a plain `HookedTransformer`: no code of this package is left in it.

Its layers alternate as the converted model's blocks do. Layer 2l, global, holds the attention heads
of source layer l; layer 2l + 1, local with window 1 and sinks, its neurons (`heads.py`). A stock
model has one count and one width of heads for all of its layers, so the smaller are padded with
zeros (`layout.py`), and patterns are pos x pos. That is what makes it large.
"""

from typing import Any, cast

import torch
from torch import nn

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.stock.alibi import with_alibi
from attn_only_lens.stock.heads import PROBLEM, attention_heads, mixture, neuron_heads
from attn_only_lens.stock.layout import gates, stock_config
from attn_only_lens.stock.refusals import reasons_against
from attn_only_lens.tl import Attention, HookedTransformer, TransformerBlock
from attn_only_lens.two_blocks import AttentionOnlyTransformer

__all__ = ["to_stock"]


@torch.inference_mode(False)  # weights of inference mode could never be trained
def to_stock(
    attn_only: AttentionOnlyTransformer, *, max_bytes: int = 8 * 2**30
) -> HookedTransformer:
    """Make a plain `HookedTransformer` that computes what a converted model computes.

    It is of that very class, with `attn_only=True`, and made of TransformerLens' own parts, so its
    `cfg` and its state dict are all that is needed to run it:

        stock = HookedTransformer(HookedTransformerConfig.from_dict(cfg))
        stock.load_state_dict(state_dict)

    Layer 2l + 1 holds the neurons of source layer l: with m heads a neuron, head i · m + j is the
    j-th of neuron i, and its pattern [batch, head_index, query_pos, key_pos] is that neuron's
    weight of the token itself on the diagonal and 0 elsewhere.

    `max_bytes` counts weights only: a forward pass makes a pattern of heads · pos · pos numbers a
    prompt and layer, and a key-value cache holds 2 · heads · d_head numbers a token and layer.

    A token that a mask leaves out (padding) does not attend to itself in a stock model, so its own
    logits differ there from the converted model's; those of the other tokens do not.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorem 4.

    Args:
        attn_only: a model that `convert` returned, with bilinear gates (exact ones of silu and
            quick_gelu are). It is not changed, and shares no weights with the result. Its tokenizer
            is handed over.
        max_bytes: the largest size of the result's weights to accept.

    Returns:
        The stock model, on the device and in the dtype of `attn_only`, without hooks. Alibi
        positions come out as rotary ones, and hold for n_ctx tokens.

    Raises:
        UnsupportedModelError: with every reason why not: what no stock head computes, settings
            that would act on neurons too, or the size. Nothing has been allocated then.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, pretrained, to_stock
        >>> attn_only = convert(pretrained.modular_addition())
        >>> stock = to_stock(attn_only)
        >>> type(stock).__name__, stock.cfg.attn_only, stock.cfg.attn_types
        ('HookedTransformer', True, ['global', 'local'])
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> torch.allclose(stock(tokens), attn_only(tokens), rtol=0, atol=1e-3)
        True
        >>> _, cache = stock.run_with_cache(tokens)
        >>> cache["pattern", 1].shape  # [batch, d_mlp, query_pos, key_pos]
        torch.Size([11, 512, 3, 3])
    """
    reasons = reasons_against(attn_only, max_bytes)
    if reasons:
        raise UnsupportedModelError(reasons, problem=PROBLEM)
    stock = _empty(attn_only)
    with torch.no_grad():
        for name in ("embed", "pos_embed", "ln_final", "unembed"):
            if hasattr(stock, name):
                _copy(getattr(attn_only, name), getattr(stock, name))
        for source, target in zip(attn_only.blocks, stock.blocks, strict=True):
            _fill(source, target)
    return stock.train(attn_only.training)


def _empty(attn_only: AttentionOnlyTransformer) -> HookedTransformer:
    """The stock model, its weights not yet set, with the tokenizer."""
    m = max((len(mixture(gate).w) for gate in gates(attn_only)), default=1)
    stock = HookedTransformer(stock_config(attn_only.cfg, m))
    stock.cfg.tokenizer_name = attn_only.cfg.tokenizer_name
    stock.tokenizer = attn_only.tokenizer
    return stock


def _fill(source: Any, target: TransformerBlock) -> None:
    """Write one block of a converted model, of either kind, into a stock block."""
    for name in ("ln1", "ln1_post"):
        if hasattr(target, name):
            _copy(getattr(source, name), getattr(target, name))
    attn = cast(Attention, target.attn)
    if source.attn.attn_type == "neuron":
        mlp = source.attn
        weights = mlp.W_in, mlp.b_in, mlp.W_out, mlp.b_out
        heads = neuron_heads(*weights, *mixture(mlp.gate), mlp.W_gate)
        heads.pad_into(attn, at=attn.cfg.d_head - 1)
        return
    heads = attention_heads(source.attn)
    if source.attn.cfg.positional_embedding_type == "alibi":
        heads = with_alibi(heads, source.attn)
    elif source.attn.cfg.positional_embedding_type == "rotary":
        # As they are: a model that was cast has tables of the precision it was built in.
        attn.rotary_sin = source.attn.rotary_sin.clone()
        attn.rotary_cos = source.attn.rotary_cos.clone()
    heads.pad_into(attn, at=0)


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())
