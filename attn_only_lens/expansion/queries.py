"""Theorem 3.4: wider queries and keys.

A score is q · k / √k̂: new coordinates add nothing where the key's are zero (equation 20), whatever
the query's are; the old ones are divided by √k̂ where it was √k, so keys are multiplied by √(k̂/k)
(equation 19). A scale that is a number of its own stays, and then so do the keys. (What b_K adds
to a score is the same for all keys, which softmax does not see; but scores, soft caps, sinks and
rotary positions do, so b_K is treated as W_K is.)

Rotary positions turn the first coordinates as before; new ones come last and are not turned. Where
they turn whole heads, coordinate i together with i + k/2 by θ^(-2i/k) a position, old coordinates
keep their halves: i ≥ k/2 becomes i + (k̂ - k)/2, and θ becomes θ^(k̂/k), which keeps their angles.

A norm of queries and keys, of mean square 1/k̂ Σ q², sees new coordinates. So those of queries are
zero as well, and no gradient ever moves them: queries and keys get no wider in effect, which values
do if they grow along. Old ones are multiplied by √(k̂/k), and the norm's gain is divided by it, so
that ε is to them what it was.

Refused where a factor would pass through a bound first (`clip_qkv`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.arguments import is_count
from attn_only_lens.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    only_for,
    reasons_against_count,
    reasons_against_heads,
)
from attn_only_lens.expansion.provenance import IndexMap
from attn_only_lens.expansion.weights import Axis, Constants, Weights, block_name

_QUERIES, _KEYS = ("attn.W_Q", "attn.b_Q"), ("attn.W_K", "attn.b_K")


@dataclass(frozen=True)
class WidenQueriesAndKeys(Expansion):
    """Grow the width of queries and keys, k in the paper: Definition and Theorem 3.4.

    Zero: the new columns of W_K and b_K. Scaled: the old ones, by √(k̂/k). Free: the new columns of
    W_Q and b_Q, which are zero too if queries and keys are normed.

    Attributes:
        n: how many coordinates to add to each head's query and key.
        layers: in which layers; None for all.
        heads: in which heads, whole groups; None for all. For the others W_Q and b_Q are zero too,
            and stay so under gradient descent.

    Example:
        >>> from attn_only_lens import expansion as ex, pretrained
        >>> from attn_only_lens.growth import read
        >>> _, provenance = ex.WidenQueriesAndKeys(40)(read(pretrained.modular_addition()))
        >>> provenance.scales["blocks.0.attn.W_K"]  # 32 became 72
        1.5
    """

    n: int
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why these weights cannot be expanded."""
        constants = weights.constants
        reasons = reasons_against_count(self.n, self.layers, weights)
        reasons = reasons or reasons_against_heads(self.heads, self.layers, weights)
        if constants.rotary == "whole head" and is_count(self.n) and self.n % 2:
            reasons.append(
                f"got {self.n} to add to rotary heads, half to each half; expected an even number"
            )
        if constants.clip_qkv is not None and (
            constants.scale is None or constants.qk_norm is not None
        ):
            reasons.append(
                "its clip_qkv bounds keys, which must be multiplied as scores are divided by "
                "√d_head, and as their norm divides them"
            )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for these weights."""
        layers, sizes, constants = layers_of(self.layers, weights), weights.sizes, weights.constants
        is_normed = constants.qk_norm is not None
        axes: dict[Axis, IndexMap] = {}
        scales: dict[str, float] = {}
        activation_scales: dict[str, float] = {}
        for layer in layers:
            axis = Axis("d_query", layer)
            axes[axis] = self._places(sizes[axis], constants)
            factor = math.sqrt((sizes[axis] + self.n) / sizes[axis])
            key = factor if constants.scale is None else 1.0
            by_tail = dict.fromkeys(("attn.W_K", "attn.b_K"), factor if is_normed else key)
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
        """The new indices of a head's coordinates."""
        if constants.rotary == "fixed":
            return IndexMap.append(size, self.n)
        half = size // 2
        return IndexMap(
            tuple(index + (index >= half) * (self.n // 2) for index in range(size)), size + self.n
        )
