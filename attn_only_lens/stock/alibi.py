"""ALiBi by way of rotary embeddings of two coordinates more.

Two things keep stock alibi layers from holding neurons. Slopes depend on the number of heads, which
padding changes. And TransformerLens keeps its biases for the longest sequence it has seen: for a
shorter one they are off by a constant along each row. Softmax forgives that, but not beside a sink.

So the bias m_h (j - i) of head h, query i and key j is written into queries and keys instead. With
two coordinates rotated by an angle θ a position, query (0, m_h / θ) and key (1, 0),

    (m_h / θ) (sin θj cos θi - cos θj sin θi) = m_h sin(θ (j - i)) / θ.

θ is a power of two with θ n_ctx <= 2^-28, where float64 and float32 round sin x to x and cos x to
1; so the score is m_h j - m_h i, whose terms are rounded to the precision of the dtype. (A dtype of
few digits would lose near tokens' biases far into a text: half precision is refused.)

Linear RoPE scaling gives the angle: with rotary_dim = 2 TransformerLens turns by
1 / rotary_scaling_factor radians a position in global layers.
"""

import math
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from attn_only_lens.stock.heads import StockHeads
from attn_only_lens.tl import Attention, GroupedQueryAttention, HookedTransformerConfig

__all__ = ["ROTATED", "rotary_settings", "with_alibi"]

ROTATED = 2
"""Coordinates, the first of each head, that hold the positions."""


def rotary_settings(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """The configuration, in what differs, under which `with_alibi` heads are those of `cfg`."""
    return {
        "positional_embedding_type": "rotary",
        "rotary_dim": ROTATED,
        "rotary_adjacent_pairs": False,
        "rotary_scaling_factor": _inverse_angle(cfg.n_ctx),
    }


def with_alibi(heads: StockHeads, attn: Attention | GroupedQueryAttention) -> StockHeads:
    """The heads of `attn`, wider by the two coordinates, which hold its alibi biases.

    A local layer of window 1 needs none: a token's bias to itself is 0.
    """
    wider = {
        name: F.pad(getattr(heads, name), (ROTATED, 0))
        for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V")
    }
    if attn.attn_type == "global":
        slopes = attn.create_alibi_multipliers(len(heads.b_Q), heads.b_Q.device)
        wider["b_Q"][:, 1] = slopes * _inverse_angle(attn.cfg.n_ctx)
        wider["b_K"][:, 0] = 1.0
    return replace(heads, W_O=F.pad(heads.W_O, (0, 0, ROTATED, 0)), **wider)


def _inverse_angle(n_ctx: int) -> float:
    """1 / θ."""
    return 2.0 ** (28 + math.ceil(math.log2(n_ctx)))
