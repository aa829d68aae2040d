"""Theorem 3.4: widen the queries and keys of attention heads.

An attention score is q · k / √k̂, where k̂ is the new width of queries and keys. New coordinates of
the key that are zero add nothing to the score (equation 20), whatever the query's coordinates are.
The old model has width k and divides by √k, so growth multiplies old keys by √(k̂/k) (equation 19).
If the model's configuration sets a divisor other than √k, neither this divisor nor the keys change.
The bias b_K is scaled like W_K, because it is part of the key from which scores are computed.

If rotary positions rotate only the first coordinates, new coordinates come last and are not
rotated. If rotary positions rotate whole heads, each position rotates the coordinates i and i + k/2
by the angle θ^(-2i/k). Old coordinates then stay in the same half of the head: if i ≥ k/2,
coordinate i moves to i + (k̂ - k)/2. The base θ becomes θ^(k̂/k), which preserves the rotation
angles of old coordinates.

If queries and keys are normalized, they are divided by the root of their mean square 1/k̂ Σ q²,
which includes the new coordinates. The new coordinates of queries must therefore be zero as well.
All gradients of new coordinates then stay zero, so training never uses the new coordinates of
queries and keys. Old coordinates are multiplied by √(k̂/k), and the norm's gain is divided by this
factor, so that ε keeps its effect.

If keys must be scaled, models with `clip_qkv` cannot be widened, because this setting would clip
the scaled keys at the old bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.arguments import is_count
from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    only_for,
    reasons_against_count,
    reasons_against_heads,
)
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Axis, Constants, Stack, Weights, block_name

_QUERIES = ("attn.W_Q", "attn.b_Q", "cross_attn.W_Q")
_KEYS = ("attn.W_K", "attn.b_K", "cross_attn.W_K")


@dataclass(frozen=True)
class WidenQueriesAndKeys(Expansion):
    """Grow the width k of queries and keys (Definition and Theorem 3.4).

    The new columns of W_K and b_K are zero, and the old columns are multiplied by √(k̂/k). The new
    columns of W_Q and b_Q can have any values, but are zero too if queries and keys are normalized.

    Attributes:
        n: how many coordinates to add to each head's query and key.
        layers: the layers to widen; None for all.
        heads: the heads to widen, in whole groups; None for all. In other heads, the new columns
            of W_Q and b_Q are zero too, and stay zero under gradient descent.
        stack: "encoder" or "decoder", in which `layers` count from 0; None for both.

    Example:
        >>> from attn_only_lens import growth, load
        >>> from attn_only_lens.growth.models._grow import read
        >>> _, provenance = growth.WidenQueriesAndKeys(40)(read(load("modular-addition")))
        >>> provenance.scales["blocks.0.attn.W_K"]  # 32 became 72
        1.5
    """

    n: int
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    stack: Stack | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the queries and keys cannot be widened."""
        constants = weights.constants
        reasons = reasons_against_count(self.n, self.layers, weights, self.stack)
        reasons = reasons or reasons_against_heads(self.heads, self.layers, weights, self.stack)
        if constants.rotary == "whole head" and is_count(self.n) and self.n % 2:
            reasons.append(
                f"got n={self.n} coordinates to add to rotary heads; expected an even number, "
                "because each half of a head gets n/2 new coordinates"
            )
        if constants.clip_qkv is not None and (
            constants.scale is None or constants.qk_norm is not None
        ):
            reasons.append(
                "clip_qkv bounds keys, which must be multiplied because scores are divided by "
                "√d_head, or because keys are normalized"
            )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for widening the queries and keys."""
        layers = layers_of(self.layers, weights, self.stack)
        sizes, constants = weights.sizes, weights.constants
        is_normed = constants.qk_norm is not None
        axes: dict[Axis, IndexMap] = {}
        scales: dict[str, float] = {}
        activation_scales: dict[str, float] = {}
        for layer in layers:
            axis = Axis("d_query", layer)
            axes[axis] = self._places(sizes[axis], constants)
            factor = math.sqrt((sizes[axis] + self.n) / sizes[axis])
            key = factor if constants.scale is None else 1.0
            by_tail = dict.fromkeys(_KEYS, factor if is_normed else key)
            seen = {"attn.hook_k": factor if is_normed else key, "attn.hook_rot_k": key}
            if is_normed:
                by_tail |= dict.fromkeys(_QUERIES, factor)
                by_tail |= {"attn.q_norm.w": 1 / factor, "attn.k_norm.w": key / factor}
                seen["attn.hook_q"] = factor
            scales |= {block_name(layer, of): by for of, by in by_tail.items() if by != 1.0}
            activation_scales |= {block_name(layer, of): by for of, by in seen.items() if by != 1.0}
        zero, keys = (
            frozenset(block_name(layer, of) for layer in layers for of in tails)
            for tails in ((*_KEYS, *_QUERIES) if is_normed else _KEYS, _KEYS)
        )
        may_cancel = not is_normed and constants.rotary != "whole head"
        may_share = may_cancel and constants.positions != "rotary" and constants.clip_qkv is None
        may_share = may_share and self.heads is None
        only = only_for(self.heads, layers, (*_QUERIES, *_KEYS), weights)
        return Plan(
            axes=axes,
            zero=zero,
            cancel=keys if may_cancel else frozenset(),
            share=keys if may_share else frozenset(),
            scales={name: factor for name, factor in scales.items() if name in weights.tensors},
            activation_scales=activation_scales,
            only={} if is_normed else only,
        )

    def _places(self, size: int, constants: Constants) -> IndexMap:
        """Return the map from the old to the new coordinates of a head's query and key."""
        if constants.rotary == "fixed":
            return IndexMap.append(size, self.n)
        half = size // 2
        return IndexMap(
            tuple(index + (index >= half) * (self.n // 2) for index in range(size)), size + self.n
        )
