"""Which converted models stock parts can hold; every reason why one cannot."""

from typing import Any

import torch

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.hooks import hook_reasons
from attn_only_lens.stock.heads import mixture
from attn_only_lens.stock.layout import gates, stock_bytes, stock_config
from attn_only_lens.tl import USE_INSTEAD
from attn_only_lens.two_blocks import AttentionOnlyTransformer

__all__ = ["reasons_against"]

_GIB = 2**30
_BOTH = "would act on the neurons too: a stock model has one setting for all of its layers"


def reasons_against(model: object, max_bytes: int) -> list[str]:
    """Why `to_stock` cannot take this model; empty where it can. Allocates next to nothing."""
    if not isinstance(model, AttentionOnlyTransformer):
        return [
            f"got a {type(model).__module__}.{type(model).__qualname__}; expected what "
            f"attn_only_lens.convert returns{USE_INSTEAD}"
        ]
    cfg = model.cfg.layer_cfg(0)  # nothing below looks at what layers may differ in
    reasons = hook_reasons(model) + _structure_reasons(cfg) + _attention_reasons(cfg)
    if any(block.attn.q_norm is not None for block in model.blocks[::2]):
        reasons.append(f"its norms of queries and keys {_BOTH}")
    heads_per_neuron = 1  # the least, where the gate is refused
    if cfg.gated_mlp and model.cfg.gating.kind == "exact":
        reasons.append(
            "its MLPs are gated, exactly: a neuron's value is the product of two linear maps, "
            'which no stock head has. Convert the source with gate="bilinear" first'
        )
    for gate in set(gates(model)):
        try:
            heads_per_neuron = max(heads_per_neuron, len(mixture(gate).w))
        except UnsupportedModelError as error:
            reasons += error.reasons
    reasons += _precision_reasons(model)
    return reasons + _size_reasons(model, heads_per_neuron, max_bytes)


def _structure_reasons(cfg: Any) -> list[str]:
    reasons = []
    if cfg.parallel_attn_mlp:
        reasons.append(
            "its attention and MLPs run in parallel: a stock neuron layer reads the stream after "
            "the attention layer before it, not the stream that entered that layer"
        )
    if cfg.positional_embedding_type == "shortformer":
        reasons.append(
            "its positions are shortformer's, added to every layer's queries and keys: they "
            "would be added to the neurons' pre-activations"
        )
    if cfg.attention_dir != "causal":
        reasons.append(
            f"its attention_dir is {cfg.attention_dir!r}: TransformerLens then applies no mask, so "
            "a stock layer of window 1 would see every token"
        )
    kinds = (cfg.attn_types or [])[: cfg.n_layers] if cfg.use_local_attn else []
    if "local" in kinds and cfg.window_size != 1:
        reasons.append(
            f"layers of its own are local with window {cfg.window_size}: a stock model has one "
            "window_size for all of its local layers, and the neurons' is 1"
        )
    return reasons


def _attention_reasons(cfg: Any) -> list[str]:
    reasons = []
    if cfg.clip_qkv is not None:
        reasons.append(f"its clip_qkv={cfg.clip_qkv:g} {_BOTH}")
    if cfg.attn_scores_soft_cap > 0:
        reasons.append(f"its attn_scores_soft_cap={cfg.attn_scores_soft_cap:g} {_BOTH}")
    if cfg.use_logn_attn:
        reasons.append(f"its use_logn_attn, a scale of queries by position, {_BOTH}")
    if cfg.use_dynamic_ntk_rope:
        reasons.append(
            "its use_dynamic_ntk_rope rebuilds rotary tables as it runs: a state dict does not say "
            "for which length they were built last"
        )
    half = cfg.dtype in (torch.float16, torch.bfloat16)
    if cfg.positional_embedding_type == "alibi" and half:
        reasons.append(
            f"its alibi biases in {cfg.dtype} would lose the digits that tell near tokens apart; "
            "call .to(torch.float32) first"
        )
    return reasons


def _precision_reasons(model: AttentionOnlyTransformer) -> list[str]:
    cfg = model.cfg
    if cfg.dtype not in (torch.float16, torch.bfloat16) or cfg.gating.kind == "exact":
        return []
    if cfg.gated_mlp:
        return [
            f"its heads in {cfg.dtype} are many times larger than their sum, which a stock layer "
            "forms in that precision; call .to(torch.float32) first"
        ]
    if cfg.act_fn == "relu":
        return [
            f"its slopes are steep, and scores in {cfg.dtype} would overflow or be too coarse; "
            "call .to(torch.float32) first"
        ]
    return []


def _size_reasons(
    model: AttentionOnlyTransformer, heads_per_neuron: int, max_bytes: int
) -> list[str]:
    cfg = stock_config(model.cfg, heads_per_neuron)
    size = stock_bytes(cfg)
    if size <= max_bytes:
        return []
    now = sum(tensor.nbytes for tensor in model.state_dict().values())
    return [
        f"its weights would take {size:,} bytes ({size / _GIB:.3g} GiB), {cfg.n_layers} layers of "
        f"{cfg.n_heads} heads of width {cfg.d_head} padded with zeros, and max_bytes is "
        f"{max_bytes:,}. Take a source with fewer layers or a smaller d_mlp, raise max_bytes, or "
        f"use the converted model itself, which takes {now:,} bytes ({now / _GIB:.3g} GiB)"
    ]
