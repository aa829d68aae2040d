"""Patches of attention heads, as edits at the hook points of the block that runs them.

Unlike a neuron-head, an attention head moves information between positions, so a patch of its
value, query or pattern is not one of z at the same place. Its own block runs again, for many
variants at once, and row by row another head is edited at other positions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import block_of, point_name
from attn_only_lens.patching.parts import Part
from attn_only_lens.patching.replay import Replay, Variants

__all__ = ["changed", "editing", "hook_name", "require_read"]

_ACTIVATION: dict[Part, str] = {"z": "z", "pattern": "pattern", "value": "v", "q": "q"}


def hook_name(model: Any, layer: int, part: Part) -> str:
    """The hook point of that part of the attention heads of a source layer."""
    return point_name(model, layer, "attention", _ACTIVATION[part])


def changed(target: Tensor, source: Tensor, part: Part) -> Bool[Tensor, "batch pos head_index"]:
    """Where a patch of all heads would change anything."""
    differs = (target != source).any(dim=-1)
    return differs.transpose(1, 2) if part == "pattern" else differs


def editing(
    source: Tensor,
    part: Part,
    heads: Int[Tensor, "variant"],
    where: Bool[Tensor, "variant batch pos"],
    first: int,
) -> Callable[[Tensor, Any], Tensor]:
    """A hook that patches one head in each variant.

    Args:
        source: what the hook point showed in the run that is patched in, of the whole prompts.
        part: which hook point that is.
        heads: the head of each variant.
        where: the positions of each variant (of a pattern: its queries).
        first: the position at which the rows that the hook will see begin.
    """
    n_variants = len(heads)
    # A pattern is [batch, head_index, query_pos, key_pos], all else [batch, pos, head_index, …].
    position_axis, head_axis = (2, 1) if part == "pattern" else (1, 2)
    kept = source.narrow(position_axis, first, source.shape[position_axis] - first)
    rows = kept.repeat(n_variants, 1, 1, 1)
    n_heads = source.shape[head_axis]
    own = torch.nn.functional.one_hot(heads, n_heads).bool()  # [variant, head_index]
    chosen = where[:, :, first:, None] & own[:, None, None, :]
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


@torch.no_grad()
def require_read(replay: Replay, layers: Iterable[int], part: Part) -> None:
    """Refuse hook points that show a model's activations and take no edits.

    Some bridges compute attention beside their `hook_pattern`: patches there would change nothing,
    and every score be 0. Queries are not tried: where there is one key, none has an effect.

    Raises:
        UnsupportedModelError: with every such hook point.
    """
    if part == "q":
        return
    reasons = []
    for layer in layers:
        name = hook_name(replay.model, layer, part)
        block = block_of(replay.model, layer, "attention")
        # Not a number, which weights of zero pass on as well: heads that were grown write nothing.
        edit = (name, lambda value, hook: torch.full_like(value, torch.nan))
        same, other = (
            replay.leaving(Variants(block, 0, replay.unchanged(block, 0, 1), hooks))
            for hooks in ([], [edit])
        )
        if torch.equal(same, other):
            reasons.append(
                f"{name} shows an activation that the model does not read back, so an edit of it "
                "has no effect; patch another part of the attention heads, or neuron_heads() alone"
            )
    if reasons:
        raise UnsupportedModelError(reasons, "these hook points cannot be patched")
