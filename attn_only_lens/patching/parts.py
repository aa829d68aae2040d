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
"""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.heads import block_of, neuron_heads
from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.patching.record import NeuronRun
from attn_only_lens.patching.replay import Replay, Variants
from attn_only_lens.patching.sites import WHOLE, LayerSites

__all__ = ["PARTS", "Part", "by_site", "changes", "interaction", "moved", "writing"]

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
    heads, block = neuron_heads(replay.model)[layer], block_of(replay.model, layer, "neuron")
    n = len(added) // replay.batch
    if replay.adds(block, heads.written_at):
        return Variants(block + 1, first, replay.unchanged(block + 1, first, n) + added)
    entering = replay.unchanged(block, first, n)
    return Variants(block, first, entering, mlp=heads.written_at, added=added)
