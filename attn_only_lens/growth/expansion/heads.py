"""Theorem 3.2: add attention heads.

The attention output Σ_h z_h W_O[h] + b_O is a sum over heads. Heads whose W_O is zero therefore add
nothing to the output (equations 11 and 12), whatever their patterns are.

If each group of r heads shares a key and a value, there are two ways to add heads. The new heads
can form new groups of r heads, each group with its own key and value. Alternatively, every existing
group gets the same number of new heads. In this case, each group's size r becomes r̂, and head j of
group g moves from index g·r + j to g·r̂ + j.

In some models (OLMo 2), one norm acts on the queries of all E heads of a layer, each of width k.
Such a norm divides by the root of the mean square 1/(E k) Σ q², which includes the new heads. New
heads must therefore have zero queries, and zero keys unless they use an old head's keys. New heads
whose queries and keys are both zero always attend uniformly, so only their values are trained. With
`into_groups`, new heads use the nonzero keys of old heads, so the new queries are trained too. Old
queries are multiplied by √(Ê/E), where Ê is the new number of heads. The norm's gain is divided by
the same factor, so that ε has the same effect as before. Keys have a separate factor.

Models with ALiBi cannot get new heads, because the slope of head h depends on the number of heads.
T5's relative positions add an entry of a table to each score. The table has a column per head, and
all layers of a stack share it. So all layers of a stack get new heads, which share new columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    reasons_against_count,
)
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Axis, Stack, Weights, block_name


@dataclass(frozen=True)
class AddHeads(Expansion):
    """Grow n_heads: Definition and Theorem 3.2.

    The new heads' W_O is zero. The new heads' W_Q, W_K, W_V, biases and sinks can have any values.
    If one norm acts on the queries of all heads, the new heads' W_Q, b_Q, W_K and b_K are zero too.

    Attributes:
        n: how many heads to add to each layer.
        layers: the layers that get new heads; None for all.
        into_groups: whether new heads use the existing keys and values, with the same number of new
            heads in each group.
        stack: "encoder" or "decoder", in which `layers` count from 0; None for both.

    Example:
        >>> from attn_only_lens import grow, growth, load
        >>> grow(load("modular-addition"), growth.AddHeads(2)).provenance.new_heads
        ('L0H4', 'L0H5')
    """

    n: int
    layers: Sequence[int] | None = None
    into_groups: bool = False
    stack: Stack | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the layers cannot get new heads."""
        reasons = reasons_against_count(self.n, self.layers, weights, self.stack)
        if weights.constants.positions == "alibi":
            reasons.append("ALiBi slopes depend on the number of heads, so old heads would change")
        if weights.constants.qk_norm == "all heads" and weights.constants.clip_qkv is not None:
            reasons.append("clip_qkv bounds queries, which must be scaled for their norm")
        if reasons:
            return reasons
        layers = layers_of(self.layers, weights, self.stack)
        if weights.constants.positions == "relative" and len(layers) < len(
            weights.constants.layers_in(self.stack)
        ):
            return [
                f"got layers {list(self.layers or ())}; expected all layers of the stack, because "
                "they share a table of relative positions, which has one column per head"
            ]
        sizes = weights.sizes
        for layer in layers:
            heads, groups = sizes[Axis("head", layer)], sizes[Axis("kv_head", layer)]
            whole = groups if self.into_groups else heads // groups
            if self.n % whole:
                what = f"{groups} groups" if self.into_groups else f"groups of {whole}"
                reasons.append(
                    f"got {self.n} heads to add to layer {layer}, which has {what}; expected a "
                    f"multiple of {whole}"
                )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for adding attention heads."""
        sizes, axes = weights.sizes, {}
        layers = layers_of(self.layers, weights, self.stack)
        writers = ("attn.W_O", "cross_attn.W_O")
        zero = {block_name(layer, of) for layer in layers for of in writers}
        written, runs = frozenset(zero), {}
        scales: dict[str, float] = {}
        activation_scales: dict[str, float] = {}
        for layer in layers:
            head, group = Axis("head", layer), Axis("kv_head", layer)
            per_group = sizes[head] // sizes[group]
            if self.into_groups:
                now = per_group + self.n // sizes[group]
                old_heads = (g * now + j for g in range(sizes[group]) for j in range(per_group))
                axes[head] = IndexMap(tuple(old_heads), sizes[group] * now)
                runs[head] = sizes[group], 1
            else:
                axes[head] = IndexMap.append(sizes[head], self.n)
                axes[group] = IndexMap.append(sizes[group], self.n // per_group)
                runs[head] = 1, per_group
            if weights.constants.qk_norm == "all heads":
                for axis, letter in ((head, "q"), (group, "k")):
                    if axis not in axes:
                        continue
                    factor = math.sqrt(axes[axis].size / sizes[axis])
                    made = [block_name(layer, f"attn.{x}_{letter.upper()}") for x in "Wb"]
                    zero |= set(made)
                    scales |= dict.fromkeys(made, factor)
                    scales[block_name(layer, f"attn.{letter}_norm.w")] = 1 / factor
                    activation_scales[block_name(layer, f"attn.hook_{letter}")] = factor
        return Plan(
            axes=axes,
            zero=frozenset(zero),
            cancel=written,
            share=frozenset() if weights.constants.qk_norm == "all heads" else written,
            runs=runs,
            scales={name: factor for name, factor in scales.items() if name in weights.tensors},
            activation_scales=activation_scales,
            constants={"grouped": weights.constants.grouped or self.into_groups},
        )
