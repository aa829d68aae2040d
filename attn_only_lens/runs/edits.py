"""What a patch of one part of a neuron-head changes: always its z, and by how much.

A neuron-head puts out z = w v, with w its attention to its own token and v its value. So whatever
part is taken from another run, here with a prime, all later blocks see is a new z:

    "z"         z'
    "pattern"   w' v
    "value"     w v'
    "q"         w' v: a query moves the pattern and nothing else

and what the head writes moves by Δz times its neuron's row of W_out. The three changes add up,

    w'v' - wv = (w' - w) v + w (v' - v) + (w' - w)(v' - v)

pattern, value and interaction.

Patches of attention heads, as edits at the hook points of the block that runs them.

Unlike a neuron-head, an attention head moves information between positions, so a patch of its
value, query or pattern is not one of z at the same place. Its own block runs again, for many
variants at once, and row by row another head is edited at other positions.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.runs.recording import NeuronRun
from attn_only_lens.runs.replay import Replay, Variants
from attn_only_lens.runs.sites import WHOLE, LayerSites

__all__ = [
    "PARTS",
    "Part",
    "by_site",
    "changed",
    "changes",
    "editing",
    "hook_name",
    "interaction",
    "moved",
    "writing",
]

Part = Literal["z", "pattern", "value", "q"]
PARTS: tuple[str, ...] = get_args(Part)


def moved(
    target: NeuronRun, source: NeuronRun, part: Part
) -> Float[Tensor, "batch pos head_index"]:
    """By how much z changes, when a part of the source run enters the target run."""
    if part == "z":
        return source.z - target.z
    if part == "value":
        return target.weight * (source.v - target.v)
    return (source.weight - target.weight) * target.v


def interaction(target: NeuronRun, source: NeuronRun) -> Float[Tensor, "batch pos head_index"]:
    """What the whole change of z is more than those by pattern and by value."""
    return (source.weight - target.weight) * (source.v - target.v)


def changes(
    heads: NeuronHeads, sites: LayerSites, dz: Float[Tensor, "batch pos head_index"]
) -> Float[Tensor, "site batch pos"]:
    """By how much the activation of each site's neuron changes with z."""
    return by_site(heads, sites, heads.shares(dz))


def by_site(
    heads: NeuronHeads, sites: LayerSites, of_heads: Float[Tensor, "batch pos head_index"]
) -> Float[Tensor, "site batch pos"]:
    """What adds up over heads, for each site: the sum over its neuron's, or that of one."""
    each = of_heads.unflatten(-1, (-1, heads.heads_per_neuron))  # [batch, pos, neuron, member]
    index, member = sites.index.to(of_heads.device), sites.member.to(of_heads.device)
    chosen = each[:, :, index]
    one = chosen.gather(-1, member.clamp(min=0).expand(*chosen.shape[:2], -1).unsqueeze(-1))
    change = chosen.sum(-1).where(member == WHOLE, one.squeeze(-1))
    return change.permute(2, 0, 1)


def writing(replay: Replay, layer: int, first: int, added: Residual) -> Variants:
    """Runs in which the neurons of a layer write something more.

    Args:
        replay: of the run that is patched.
        layer: the source layer.
        first: the position from which on they do.
        added: what they write more, from there on: [variant · batch, pos, d_model].
    """
    heads, block = (
        replay.host.neurons[layer],
        replay.host.block(layer, "neuron"),
    )
    n = len(added) // replay.batch
    if replay.adds(block, heads.written_at):
        return Variants(block + 1, first, replay.unchanged(block + 1, first, n) + added)
    entering = replay.unchanged(block, first, n)
    return Variants(block, first, entering, mlp=heads.written_at, added=added)


_ACTIVATION: dict[Part, str] = {"z": "z", "pattern": "pattern", "value": "v", "q": "q"}


def hook_name(model: Any, layer: int, part: Part, kind: HeadKind = "attention") -> str:
    """The hook point of that part of the heads of a kind of a source layer."""
    return host_of(model).hook_name(layer, kind, _ACTIVATION[part])


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
