"""Patches of attention heads, as edits at the hook points of the block that runs them.

Unlike a neuron-head, an attention head moves information between positions, so a patch of its
value, query or pattern is not one of z at the same place. Its own block runs again, for many
variants at once, and row by row another head is edited at other positions.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import point_name
from attn_only_lens.heads.blocks import HeadKind
from attn_only_lens.patching.parts import Part

__all__ = ["changed", "editing", "hook_name"]

_ACTIVATION: dict[Part, str] = {"z": "z", "pattern": "pattern", "value": "v", "q": "q"}


def hook_name(model: Any, layer: int, part: Part, kind: HeadKind = "attention") -> str:
    """The hook point of that part of the heads of a kind of a source layer."""
    return point_name(model, layer, kind, _ACTIVATION[part])


def changed(target: Tensor, source: Tensor, part: Part) -> Bool[Tensor, "batch pos head_index"]:
    """Where a patch of all heads would change anything."""
    differs = (target != source).any(dim=-1)
    return differs.transpose(1, 2) if part == "pattern" else differs


def editing(
    source: Tensor,
    part: Part,
    heads: Bool[Tensor, "variant head_index"],
    where: Bool[Tensor, "variant batch pos"],
    first: int,
) -> Callable[[Tensor, Any], Tensor]:
    """A hook that patches other heads in each variant.

    Args:
        source: what the hook point showed in the run that is patched in, of the whole prompts.
        part: which hook point that is.
        heads: those of each variant.
        where: the positions of each variant (of a pattern: its queries).
        first: the position at which the rows that the hook will see begin.
    """
    n_variants = len(heads)
    # A pattern is [batch, head_index, query_pos, key_pos], all else [batch, pos, head_index, …].
    position_axis = 2 if part == "pattern" else 1
    kept = source.narrow(position_axis, first, source.shape[position_axis] - first)
    rows = kept.repeat(n_variants, 1, 1, 1)
    chosen = where[:, :, first:, None] & heads[:, None, None, :]
    chosen = chosen.flatten(0, 1)  # [row, pos, head_index]
    if part == "pattern":
        chosen = chosen.transpose(1, 2)

    def hook(value: Tensor, hook: Any) -> Tensor:
        if value.shape != rows.shape:  # one position would be stretched over others
            raise UnsupportedModelError(
                [
                    f"{hook.name} shows {list(value.shape)} where {n_variants} variants run from "
                    f"position {first} on; expected {list(rows.shape)}"
                ],
                "these hook points cannot be patched",
            )
        return torch.where(chosen.unsqueeze(-1), rows, value)

    return hook
