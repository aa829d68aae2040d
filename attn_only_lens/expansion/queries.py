"""Theorem 3.4: wider queries and keys.

A score is q · k / √k̂: new coordinates add nothing where the key's are zero (equation 20), whatever
the query's are; the old ones are divided by √k̂ where it was √k, so keys are multiplied by √(k̂/k)
(equation 19). A scale that is a number of its own stays, and then so do the keys. (What b_K adds
to a score is the same for all keys, which softmax does not see; but scores, soft caps, sinks and
rotary positions do, so b_K is treated as W_K is.)

Rotary positions turn the first `rotary_dim` coordinates as before; new ones come last and are not
turned. Refused where the factor or the new coordinates would pass through something else first: a
norm of queries and keys, or a bound on keys (`clip_qkv`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    only_for,
    reasons_against_count,
    reasons_against_heads,
)
from attn_only_lens.expansion.provenance import IndexMap
from attn_only_lens.expansion.weights import Axis, Weights, block_name


@dataclass(frozen=True)
class WidenQueriesAndKeys(Expansion):
    """Grow the width of queries and keys, k in the paper: Definition and Theorem 3.4.

    Zero: the new columns of W_K and b_K. Scaled: the old ones, by √(k̂/k). Free: the new columns of
    W_Q and b_Q.

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
        if constants.qk_norm is not None:
            reasons.append("its queries and keys are normed, and the norm is over their width")
        if constants.clip_qkv is not None and constants.scale is None:
            reasons.append(
                "its clip_qkv bounds keys, which must be multiplied as scores are divided by "
                "√d_head"
            )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for these weights."""
        layers, sizes = layers_of(self.layers, weights), weights.sizes
        axes = {layer: Axis("d_query", layer) for layer in layers}
        keys = [block_name(layer, of) for layer in layers for of in ("attn.W_K", "attn.b_K")]
        scales: dict[str, float] = {}
        activation_scales: dict[str, float] = {}
        if weights.constants.scale is None:
            for layer, axis in axes.items():
                factor = math.sqrt((sizes[axis] + self.n) / sizes[axis])
                scales |= {block_name(layer, of): factor for of in ("attn.W_K", "attn.b_K")}
                activation_scales |= {
                    block_name(layer, of): factor for of in ("attn.hook_k", "attn.hook_rot_k")
                }
        return Plan(
            axes={axis: IndexMap.append(sizes[axis], self.n) for axis in axes.values()},
            zero=frozenset(keys),
            scales={name: factor for name, factor in scales.items() if name in weights.tensors},
            activation_scales=activation_scales,
            only=only_for(self.heads, layers, ("attn.W_Q", "attn.b_Q"), weights),
        )
