"""The sweep itself: the metric of every site, group by group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.heads import attention_heads, block_of, neuron_heads
from attn_only_lens.patching.attention import changed, editing, hook_name
from attn_only_lens.patching.batching import Batching
from attn_only_lens.patching.parts import Part, changes, moved, writing
from attn_only_lens.patching.positions import PositionSet
from attn_only_lens.patching.replay import Replay, Variants
from attn_only_lens.patching.sites import LayerSites
from attn_only_lens.patching.sources import Source

__all__ = ["Group", "Sweeper", "frame_of", "groups_of"]


@dataclass(frozen=True, eq=False)
class Group:
    """Sites that are run together: heads of one kind in one layer, at some positions.

    Attributes:
        sites: the heads.
        positions: every head is patched at each of these sets of positions in turn.
    """

    sites: LayerSites
    positions: tuple[PositionSet, ...]

    def __len__(self) -> int:
        return len(self.sites.names) * len(self.positions)


def groups_of(sites: Sequence[LayerSites], positions: Sequence[PositionSet]) -> tuple[Group, ...]:
    """All sites, in an order that depends on nothing else.

    Neurons are many, and are grouped by position, so that a group begins where its position does;
    attention heads are few.
    """
    groups: list[Group] = []
    for each in sites:
        if each.kind == "attention":
            groups.append(Group(each, tuple(positions)))
        else:
            groups += [Group(each, (where,)) for where in positions]
    return tuple(groups)


def frame_of(group: Group, values: Float[Tensor, "site"]) -> pd.DataFrame:
    """What `Sweep.of` takes: the values of a group, positions outmost, heads inmost."""
    names = np.array(group.sites.names, dtype=object)
    labels = np.array([each.label for each in group.positions])
    return pd.DataFrame(
        {
            "layer": group.sites.layer,
            "kind": group.sites.kind,
            "index": np.tile(group.sites.index.cpu().numpy(), len(labels)),
            "name": np.tile(names, len(labels)),
            "position": np.repeat(labels, len(names)),
            "value": values.cpu().numpy(),
        }
    )


class Sweeper:
    """Runs groups of sites of one model, one pair of prompts, one metric and one part."""

    def __init__(
        self, replay: Replay, source: Source, part: Part, baseline: float, batching: Batching
    ) -> None:
        self._replay = replay
        self._model = replay.model
        self._source = source
        self._part: Part = part
        self._baseline = baseline
        self._batching = batching

    @torch.no_grad()
    def values(self, group: Group) -> Float[Tensor, "site"]:
        """The metric after each patch: positions outmost, heads inmost.

        A patch that changes nothing that the metric can see gives the value of the run it was to
        be patched into, without a run.
        """
        return self._neurons(group) if group.sites.kind == "neuron" else self._attention(group)

    def _result(self, group: Group) -> Float[Tensor, "site"]:
        return torch.full((len(group),), self._baseline, dtype=torch.float64, device="cpu")

    # Neurons

    def _neurons(self, group: Group) -> Float[Tensor, "site"]:
        sites, (where,) = group.sites, group.positions
        heads = neuron_heads(self._model)[sites.layer]
        target = self._replay.recording.neurons[sites.layer]
        change = changes(heads, sites, moved(target, self._source.neurons[sites.layer], self._part))
        change = change * where.where.to(change.device)
        block = block_of(self._model, sites.layer, "neuron")
        block += self._replay.adds(block, heads.written_at)
        values = self._result(group)
        first, alive = self._reach(change != 0, block)
        directions = heads.directions[sites.index.to(change.device)]

        def run(chosen: Tensor) -> Tensor:
            moving = change[chosen, :, first:].flatten(0, 1).unsqueeze(-1)
            rows = directions[chosen].repeat_interleave(self._replay.batch, dim=0).unsqueeze(1)
            added = (moving * rows).to(directions.dtype)
            return self._replay.values(writing(self._replay, sites.layer, first, added))

        self._batching.fill(values, alive, self._replay.numbers_from(first), run)
        return values

    # Attention heads

    def _attention(self, group: Group) -> Float[Tensor, "site"]:
        sites, part = group.sites, self._part
        name = hook_name(self._model, sites.layer, part)
        target, source = self._replay.recording.hooked[name], self._source.hooked[name]
        n_sites = len(sites.names)
        index = sites.index.to(target.device).repeat(len(group.positions))
        heads = nn.functional.one_hot(index, attention_heads(self._model)[sites.layer]).bool()
        where = torch.stack([each.where for each in group.positions]).to(target.device)
        where = where.repeat_interleave(n_sites, dim=0)
        reached = where & changed(target, source, part)[..., index].permute(2, 0, 1)
        block = block_of(self._model, sites.layer, "attention")
        values = self._result(group)
        first, alive = self._reach(reached, block)

        def run(chosen: Tensor) -> Tensor:
            hook = editing(source, part, heads[chosen], where[chosen], first)
            entering = self._replay.unchanged(block, first, len(chosen))
            return self._replay.values(Variants(block, first, entering, [(name, hook)]))

        self._batching.fill(values, alive, self._replay.numbers_from(first), run)
        return values

    def _reach(self, moved: Bool[Tensor, "site batch pos"], block: int) -> tuple[int, Tensor]:
        """The first position that any site moves, and which sites the metric can feel."""
        seen = self._replay.seen(block).to(moved.device)
        alive = (moved & seen).any(dim=(1, 2))
        if not alive.any():
            return 0, alive
        positions = moved[alive].any(dim=(0, 1)).nonzero()[:, 0]
        return self._replay.start(block, int(positions[0])), alive
