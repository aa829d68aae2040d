"""Theorem 3.3: widen the values of attention heads.

A head's output, pattern · x W_V W_O, is a sum over the coordinates of the head's value. New
coordinates therefore add nothing to the output if their rows of W_O are zero (equations 13 to 17).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    only_for,
    reasons_against_count,
    reasons_against_heads,
)
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Axis, Stack, Weights, block_name

_READERS = ("attn.W_V", "attn.b_V", "cross_attn.W_V")
_WRITERS = ("attn.W_O", "cross_attn.W_O")


@dataclass(frozen=True)
class WidenValues(Expansion):
    """Grow the width v of values (Definition and Theorem 3.3).

    The new rows of W_O are zero in every head. The new columns of W_V and b_V can have any values.

    All heads of a layer share one tensor, so every head gets new entries. If `heads` is given, the
    new columns of W_V and b_V are zero in other heads. In other heads, all new entries stay zero
    during training, because W_V gets no gradient while W_O is zero, and vice versa.

    Attributes:
        n: how many coordinates to add to each head's value.
        layers: the layers to widen; None for all.
        heads: the query heads to widen, in whole groups; None for all.
        stack: "encoder" or "decoder", in which `layers` count from 0; None for both.

    Example:
        >>> from attn_only_lens import growth, load
        >>> from attn_only_lens.growth.models._grow import read
        >>> grown, _ = growth.WidenValues(3)(read(load("modular-addition")))
        >>> tuple(grown.tensors["blocks.0.attn.W_V"].shape)
        (4, 128, 35)
    """

    n: int
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    stack: Stack | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the values cannot be widened."""
        reasons = reasons_against_count(self.n, self.layers, weights, self.stack)
        return reasons or reasons_against_heads(self.heads, self.layers, weights, self.stack)

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for widening the values."""
        layers, sizes = layers_of(self.layers, weights, self.stack), weights.sizes
        axes = [Axis("d_value", layer) for layer in layers]
        written = frozenset(block_name(layer, of) for layer in layers for of in _WRITERS)
        return Plan(
            axes={axis: IndexMap.append(sizes[axis], self.n) for axis in axes},
            zero=written,
            cancel=written,
            share=written if self.heads is None else frozenset(),
            only=only_for(self.heads, layers, (*_READERS, *_WRITERS), weights),
        )
