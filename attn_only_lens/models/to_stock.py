"""Build a stock `HookedTransformer`, which needs no code from this package, from a converted model.

Layer 2l of the stock model holds the attention heads of the original layer l. Layer 2l + 1 holds
the neurons, as heads with local attention (window 1) and attention sinks. The stock model is large:
all layers have equally many heads of equal width, with zeros as padding, and every attention
pattern has shape pos x pos.

**Neurons.** A stock head with an attention sink of logit s attends with softmax([scores, s]),
without the sink's weight. A neuron with the query q, the value v and the pattern σ(b q) becomes a
head with

    W_Q, W_V, W_O       those of the neuron
    W_K = 0, b_K = b    score of the token itself b q
    sink = 0            pattern over (self, sink) = softmax([b q, 0])

The construction is Theorem 3 of "Attention-Only Transformers and Implementing MLPs with Attention
Heads", with a sink instead of the bias token. Attention heads of models without sinks get the
dtype's lowest value as sink logit, so that the sink's weight is exactly 0.

**ALiBi** is replaced by rotary embeddings of two extra coordinates. The stock model cannot use
TransformerLens' ALiBi: the slopes depend on the number of heads, and each row of scores is shifted
by a constant, which changes the softmax if there is a sink. If two coordinates are rotated by θ per
position, a query (0, m / θ) at position i and a key (1, 0) at position j give the score m sin(θ (j
- i)) / θ. Up to rounding, this is the ALiBi bias m (j - i) of a head with slope m, because θ n_ctx
<= 2^-28 (θ is a power of two), and sin x rounds to x for such small x. ALiBi models in half
precision are refused. θ is set by linear RoPE scaling: with rotary_dim = 2, TransformerLens rotates
by an angle of 1 / rotary_scaling_factor per position.
"""

import math
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.model_checks import hook_reasons
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.models.two_blocks.blocks import NeuronAttention
from attn_only_lens.models.two_blocks.config import AttentionOnlyConfig
from attn_only_lens.tl import (
    USE_INSTEAD,
    Attention,
    HookedTransformer,
    HookedTransformerConfig,
    TransformerBlock,
)

_PROBLEM = "this model cannot be built from TransformerLens' own modules"
_ALIBI = 2  # extra coordinates at the start of each head, which replace ALiBi
_GIB = 2**30
_BOTH = "would act on the neurons too: a stock model has one setting for all layers"


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def to_stock(
    attn_only: AttentionOnlyTransformer, *, max_bytes: int = 8 * 2**30
) -> HookedTransformer:
    """Return a stock `HookedTransformer` with the same logits as a converted model.

    The stock model has only TransformerLens' modules, with `attn_only=True`. The model can be built
    again from its `cfg` and state dict:

        stock = HookedTransformer(HookedTransformerConfig.from_dict(cfg))
        stock.load_state_dict(state_dict)

    Layer 2l + 1 holds the neurons of layer l of `attn_only`, in the same order. The layer's pattern
    [batch, head_index, query_pos, key_pos] is diagonal: each token attends only to itself (and to
    the sink).

    `max_bytes` limits only the weights. In each layer, a forward pass also stores heads · pos · pos
    numbers per prompt for the pattern. A key-value cache stores 2 · heads · d_head numbers per
    token.

    The logits of padding tokens differ from those of the converted model, because padding tokens do
    not attend to themselves in a stock model. The logits of all other tokens agree.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorem 6.

    Args:
        attn_only: a model that `convert` returned, with bilinear gates (the exact gates of silu,
            quick_gelu and generalized SiLUs are bilinear). It is not changed. The result shares its
            tokenizer, but no weights.
        max_bytes: the largest accepted size of the result's weights.

    Returns:
        The stock model, with the device and dtype of `attn_only`, without hooks. ALiBi positions
        become rotary positions, which are valid for prompts of up to n_ctx tokens.

    Raises:
        UnsupportedModelError: the model has computations that no stock head performs, has settings
            that would act on neurons too, or would exceed `max_bytes`. The error lists all reasons.
            Nothing is allocated before this check.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, load, pretrained, to_stock
        >>> attn_only = convert(load("modular-addition"))
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
    UnsupportedModelError.raise_if(_reasons_against(attn_only, max_bytes), _PROBLEM)
    stock = _empty(attn_only)
    with torch.no_grad():
        for name in ("embed", "pos_embed", "ln_final", "unembed"):
            if hasattr(stock, name):
                getattr(stock, name).load_state_dict(getattr(attn_only, name).state_dict())
        for source, target in zip(attn_only.blocks, stock.blocks, strict=True):
            _fill(source, target)
    return stock.train(attn_only.training)


def _neuron_heads(attn: NeuronAttention) -> dict[str, Tensor]:
    """Return the weights of stock heads that compute the neurons of a block, by parameter name.

    The attention layer that gets these weights must have window 1 and unscaled scores.
    """
    heads = {
        name: getattr(attn, name) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O")
    }
    b_K = torch.full_like(heads["b_Q"], cast(float, attn.gate.slope))
    return heads | {"b_K": b_K, "sinks": torch.zeros_like(b_K[:, 0])}


def write_heads(attn: Attention, heads: dict[str, Tensor], coordinate: int) -> None:
    """Copy weights into the first heads of `attn`, at an offset along d_head.

    All other entries of the parameters are set to zero.
    """
    for parameter in attn.parameters():
        parameter.zero_()
    n_heads = len(heads["b_Q"])
    for name, values in heads.items():
        target = getattr(attn, name)
        if name != "b_O":
            target = target[:n_heads]
            if name != "sinks":
                axis = 1 if name == "W_O" else -1
                target = target.narrow(axis, coordinate, values.shape[axis])
        target.copy_(values)


def stock_bytes(cfg: HookedTransformerConfig) -> int:
    """Return the size in bytes of a stock model's state dict, without allocating the tensors."""
    with torch.device("meta"):
        shapes = HookedTransformer(cfg, move_to_device=False)
    return sum(tensor.nbytes for tensor in shapes.state_dict().values())


def _fill(source: Any, target: TransformerBlock) -> None:
    """Copy the weights of a block of the converted model into a stock block."""
    for name in ("ln1", "ln1_post"):
        if hasattr(target, name):
            getattr(target, name).load_state_dict(getattr(source, name).state_dict())
    attn, old = cast(Attention, target.attn), source.attn
    if old.attn_type == "neuron":
        write_heads(attn, _neuron_heads(old), coordinate=attn.cfg.d_head - 1)
        return
    # The properties of `old` repeat grouped keys and values for each head. The query weights are
    # divided by attn_scale, because the stock layer does not scale its scores.
    heads = {name: getattr(old, name) for name in ("W_K", "W_V", "W_O", "b_K", "b_V", "b_O")}
    heads |= {"W_Q": old.W_Q / old.attn_scale, "b_Q": old.b_Q / old.attn_scale}
    n_heads = len(heads["b_Q"])
    no_sinks = old.W_Q.new_full((n_heads,), torch.finfo(old.W_Q.dtype).min)
    heads["sinks"] = old.sinks if old.cfg.use_attention_sinks else no_sinks
    positions = old.cfg.positional_embedding_type
    write_heads(attn, heads, coordinate=_ALIBI if positions == "alibi" else 0)
    if positions == "alibi" and old.attn_type == "global":  # ALiBi biases are 0 in a window of 1
        slopes = old.create_alibi_multipliers(n_heads, old.b_Q.device)
        attn.b_Q[:n_heads, 1] = slopes * _inverse_angle(old.cfg.n_ctx)
        attn.b_K[:n_heads, 0] = 1.0
    elif positions == "rotary":
        # Copy the rotary tables, since casting the converted model did not round them.
        attn.rotary_sin = old.rotary_sin.clone()
        attn.rotary_cos = old.rotary_cos.clone()


def _inverse_angle(n_ctx: int) -> float:
    """Return 1 / θ, where θ is the rotary angle per position that replaces ALiBi."""
    return 2.0 ** (28 + math.ceil(math.log2(n_ctx)))


def _empty(attn_only: AttentionOnlyTransformer) -> HookedTransformer:
    """Build the stock model with the tokenizer of `attn_only`, but without its weights."""
    stock = HookedTransformer(_stock_config(attn_only.cfg))
    stock.cfg.tokenizer_name = attn_only.cfg.tokenizer_name
    stock.tokenizer = attn_only.tokenizer
    return stock


def _stock_config(converted: AttentionOnlyConfig) -> HookedTransformerConfig:
    """Return the stock model's configuration, with two layers per layer of the original model.

    Neurons use only the last coordinate of each head. Rotary embeddings rotate the first
    `rotary_dim` coordinates. If these are all coordinates, each head gets one more, so that
    positions do not affect neurons' scores. The configuration has no seed, with which
    TransformerLens would reset the global random generators, and no tokenizer name, for which it
    would load a tokenizer.
    """
    source, sizes = converted.layer_cfg(0), converted.layer_sizes
    kinds = source.attn_types if source.use_local_attn else None
    width = max(max(layer.d_head, layer.d_value) for layer in sizes)
    changes: dict[str, Any] = {}
    if source.positional_embedding_type == "rotary":
        width = max(width, (source.rotary_dim or width) + 1)
    elif source.positional_embedding_type == "alibi":
        width += _ALIBI
        changes = {
            "positional_embedding_type": "rotary",
            "rotary_dim": _ALIBI,
            "rotary_adjacent_pairs": False,
            "rotary_scaling_factor": _inverse_angle(source.n_ctx),
        }
    changes |= {
        "n_layers": 2 * source.n_layers,
        "attn_only": True,
        "n_heads": max(
            max(layer.n_heads, converted.gating.n_heads(layer.d_mlp)) for layer in sizes
        ),
        "d_head": width,
        "n_key_value_heads": None,
        "use_attn_scale": False,
        "attn_scale": -1.0,
        "scale_attn_by_inverse_layer_idx": False,
        "use_attention_sinks": True,
        "use_local_attn": True,
        "window_size": 1,
        "attn_types": [
            kind
            for layer in range(source.n_layers)
            for kind in (kinds[layer] if kinds else "global", "local")
        ],
        # Turn off flags that only add hook points.
        "use_attn_result": False,
        "use_attn_in": False,
        "use_split_qkv_input": False,
        "use_hook_mlp_in": False,
        "device": str(source.device),
        "init_weights": False,
        "seed": None,
        "tokenizer_name": None,
    }
    kept = {field.name: getattr(source, field.name) for field in fields(HookedTransformerConfig)}
    return HookedTransformerConfig(**kept | changes)


def _reasons_against(model: object, max_bytes: int) -> list[str]:
    """Return error messages if `to_stock` cannot convert a model, without allocating weights."""
    if not isinstance(model, AttentionOnlyTransformer):
        return [
            f"got {a_type(model, with_module=True)}; expected a "
            f"model from attn_only_lens.convert{USE_INSTEAD}"
        ]
    if reasons := host_of(model).reasons():
        return reasons
    obstacles = _attention_obstacles(model) | _neuron_obstacles(model) | _size(model, max_bytes)
    return hook_reasons(model) + [reason for reason, applies in obstacles.items() if applies]


def _attention_obstacles(model: AttentionOnlyTransformer) -> dict[str, bool]:
    """Return {error message: True if it applies to the model} for attention settings."""
    cfg: Any = model.cfg.layer_cfg(0)  # the fields below are the same in all layers
    kinds = (cfg.attn_types or [])[: cfg.n_layers] if cfg.use_local_attn else []
    half = cfg.dtype in (torch.float16, torch.bfloat16)
    return {
        "its attention and MLPs run in parallel: a stock neuron layer reads the stream after "
        "the attention layer before it, not the stream that entered that layer": (
            cfg.parallel_attn_mlp
        ),
        "its position embeddings are shortformer's, which are added to the queries and keys of "
        "every layer: they would be added to the neurons' pre-activations": (
            cfg.positional_embedding_type == "shortformer"
        ),
        f"its attention_dir is {cfg.attention_dir!r}: TransformerLens then applies no mask, so "
        "a stock layer with window 1 would see every token": cfg.attention_dir != "causal",
        f"its attention has local layers with window {cfg.window_size}: a stock model has one "
        "window_size for all local layers, and neurons need window_size=1": (
            "local" in kinds and cfg.window_size != 1
        ),
        f"its clip_qkv={cfg.clip_qkv} {_BOTH}": cfg.clip_qkv is not None,
        f"its attn_scores_soft_cap={cfg.attn_scores_soft_cap} {_BOTH}": (
            cfg.attn_scores_soft_cap > 0
        ),
        f"its use_logn_attn, which scales queries by position, {_BOTH}": cfg.use_logn_attn,
        "its use_dynamic_ntk_rope rebuilds rotary tables as it runs: a state dict does not say "
        "for which length they were built last": cfg.use_dynamic_ntk_rope,
        f"its alibi biases in {cfg.dtype} would be too coarse to distinguish nearby positions; "
        "call .to(torch.float32) first": half and cfg.positional_embedding_type == "alibi",
        f"its normalization of queries and keys {_BOTH}": any(
            block.attn.q_norm is not None for block in model.blocks[::2]
        ),
    }


def _neuron_obstacles(model: AttentionOnlyTransformer) -> dict[str, bool]:
    """Return {error message: True if it applies to the model} for the neurons."""
    cfg, exact = model.cfg.layer_cfg(0), model.cfg.gating.kind == "exact"
    half = cfg.dtype in (torch.float16, torch.bfloat16)
    return {
        "its MLPs are gated, with exact gates: the value of a neuron is the product of two linear "
        "maps, which no stock head computes. Convert the source with gate=Bilinear() first": (
            cfg.gated_mlp and exact
        ),
        f"the score of its exact {cfg.act_fn} gate is not linear in the pre-activation, and no "
        "stock head computes such a score. Convert the source with gate=Bilinear() "
        "first (the scores of silu and quick_gelu are already linear)": any(
            cast(NeuronAttention, block.attn).gate.slope is None for block in model.blocks[1::2]
        ),
        "the outputs of its heads are many times larger than their sum, which would lose precision "
        f"in {cfg.dtype}; call .to(torch.float32) first": (half and not exact and cfg.gated_mlp),
        f"its relu gates have steep slopes, so attention scores in {cfg.dtype} would overflow or "
        "lose precision; call .to(torch.float32) first": (
            half and not exact and not cfg.gated_mlp and cfg.act_fn == "relu"
        ),
    }


def _size(model: AttentionOnlyTransformer, max_bytes: int) -> dict[str, bool]:
    """Return {error message: True if the stock model is too large}."""
    stock_cfg = _stock_config(model.cfg)
    size = stock_bytes(stock_cfg)
    now = sum(tensor.nbytes for tensor in model.state_dict().values())
    return {
        f"the stock weights would take {size:,} bytes ({size / _GIB:.3g} GiB) for "
        f"{stock_cfg.n_layers} layers of {stock_cfg.n_heads} heads of width {stock_cfg.d_head}, "
        f"but max_bytes is {max_bytes:,}. Use a source with fewer layers or a smaller d_mlp, "
        "raise max_bytes, or use the converted model itself, which takes "
        f"{now:,} bytes ({now / _GIB:.3g} GiB)": size > max_bytes,
    }
