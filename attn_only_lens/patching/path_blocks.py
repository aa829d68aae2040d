"""Which paths are patched, in groups that are computed together.

Paths are computed in groups, called path blocks. In a path block, all senders are of one kind, in
one layer and at the same positions; all receivers are of one kind, in one layer. The size of a path
block is chosen so that its tensors have at most about `_NUMBERS` entries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import LayerSites, Sites
from attn_only_lens.engine.writes import Decomposition
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.patching.site_groups import SiteGroup, site_groups

PROBLEM = "these paths cannot be patched"
_LOGITS = "logits"
_NUMBERS = 2**21  # maximum number of entries in each tensor of a path block


def receiver_groups(
    model: Any, pair: PromptPair, receivers: Any, part: str, *, averaged: bool
) -> list[SiteGroup | None]:
    """Return receivers as groups of sites. Append None if the logits are a receiver."""
    sites = Sites.of(receivers).without(*WIDE_KINDS)
    named = sites.heads if isinstance(sites.heads, tuple) and not sites.kinds else ()
    logits = [name for name in map(str, named) if name.partition("@")[0] == _LOGITS]
    names = [name for name in named if str(name) not in logits]
    reasons = [
        "got 'logits' with a position; expected 'logits', also next to names such as 'L5H3@2': a "
        "sender changes the logits at its own positions"
    ] * bool(logits and (sites.positions != "each" or {*logits} != {_LOGITS}))
    # By default, a receiver reads at all positions together, unless its name has a position.
    placed = [name for name in names if "@" in str(name)] if sites.positions == "each" else []
    others = [name for name in names if name not in placed]
    selected = [Sites(placed)] if placed else []
    if others or not named:
        positions = "all" if sites.positions == "each" else sites.positions
        selected.append(replace(sites, heads=others or sites.heads, positions=positions))
    groups = list[SiteGroup | None]()
    for chosen in selected:
        with InputError.collected(reasons):
            groups += site_groups(model, pair, chosen, "z", averaged=averaged)
    first = {group.sites.kind: group.sites.names[0] for group in reversed(groups) if group}
    reasons += [
        f"got {name} as a receiver; expected attention heads, neurons or features: error nodes are "
        "held fixed on paths, and skip nodes pass on their input unchanged"
        for kind, name in first.items()
        if kind in WIDE_KINDS
    ]
    reasons += [
        f"got part='k' and receivers such as {name}; expected attention heads: a neuron-head's "
        "keys do not depend on the token"
        for kind, name in first.items()
        if kind in NEURON_KINDS and part == "k"
    ]
    InputError.raise_if(reasons, PROBLEM)
    return [*groups, *[None] * bool(logits)]


@dataclass(frozen=True, eq=False)
class PathBlock:
    """All paths from these senders, at these positions, to these receivers at `receiving`.

    If `receivers` and `receiving` are None, paths lead to the logits.
    """

    senders: LayerSites
    positions: PositionSet
    receivers: LayerSites | None
    receiving: PositionSet | None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of senders and the number of receivers."""
        return len(self.senders.names), 1 if self.receivers is None else len(self.receivers.names)

    @property
    def n_paths(self) -> int:
        return self.shape[0] * self.shape[1]

    def paths(self, number: int) -> pd.DataFrame:
        """Return a frame with one row per path: columns block, i (sender) and j (receiver)."""
        i, j = (index.ravel() for index in np.indices(self.shape))
        return pd.DataFrame({"block": number, "i": i, "j": j})

    def of_prompts(self, pair: PromptPair) -> "PathBlock":
        """Return the same paths, with positions only in the given prompts."""
        if pair.among is None:
            return self
        some = pair.among[0], pair.clean.shape[1]
        receiving = self.receiving and self.receiving.of_prompts(*some)
        return replace(self, positions=self.positions.of_prompts(*some), receiving=receiving)

    def frame(self, i: Int[Tensor, "path"], j: Int[Tensor, "path"]) -> pd.DataFrame:
        """Return a frame with one row per path from sender i to receiver j."""
        if self.receivers is None or self.receiving is None:
            receivers: Sequence[str] = [_LOGITS]
        elif self.receiving.label == "all":
            receivers = self.receivers.names
        else:
            receivers = [f"{name}@{self.receiving.label}" for name in self.receivers.names]
        return pd.DataFrame(
            {
                "sender": np.array(self.senders.names, dtype=object)[i.cpu().numpy()],
                "receiver": np.array(receivers, dtype=object)[j.cpu().numpy()],
                "position": self.positions.label,
            }
        )


def path_blocks(
    run: Decomposition,
    senders: Sequence[SiteGroup],
    receivers: Sequence[SiteGroup | None],
    prompts_at_once: int,
) -> Iterator[PathBlock]:
    """Yield path blocks that contain all pairs whose receiver can read the sender's output.

    Their order and sizes depend only on the prompts, the heads and `prompts_at_once`.
    """
    readers = [x for group in receivers for x in (_by_position(group) if group else [(None, None)])]
    for group in senders:
        for sending in _by_position(group):
            for receiving in readers:
                if _in_order(run, sending[0], receiving[0]):
                    yield from _split(run, PathBlock(*sending, *receiving), prompts_at_once)


def _by_position(group: SiteGroup) -> Iterator[tuple[LayerSites, PositionSet]]:
    """Yield each set of positions in a group, with the heads that the group has there."""
    for place, position in enumerate(group.positions):
        heads = group.head[group.place == place]
        if len(heads):
            yield take(group.sites, heads), position


def _in_order(run: Decomposition, sending: LayerSites, receiving: LayerSites | None) -> bool:
    if receiving is None:
        return True
    written = run.before(receiving.layer, receiving.kind)
    return run.of(sending.layer, sending.kind) in written


def _split(run: Decomposition, whole: PathBlock, prompts_at_once: int) -> Iterator[PathBlock]:
    """Split a path block into smaller ones whose tensors fit in memory."""
    chosen, receivers = whole.positions.chosen, whole.receivers
    batch, n_pos = prompts_at_once, chosen.shape[1]
    some = chosen.any(dim=0)
    width = run.embedding.shape[-1]
    if receivers is not None and receivers.kind == "attention":
        tokens = batch * (n_pos - int(some.int().argmax()))
        width = max(width, run.of(receivers.layer, "attention").z[0, 0].numel())
        many = len(receivers.names)
    else:
        tokens = batch * int(some.sum())
        many = max(1, _NUMBERS // (tokens * min(len(whole.senders.names), 64)))
    few = max(
        1, min(_NUMBERS // (tokens * width), _NUMBERS // (tokens * min(many, whole.shape[1])))
    )
    for i in range(0, whole.shape[0], few):
        for j in range(0, whole.shape[1], many):
            yield PathBlock(
                take(whole.senders, slice(i, i + few)),
                whole.positions,
                None if receivers is None else take(receivers, slice(j, j + many)),
                whole.receiving,
            )


def take(sites: LayerSites, chosen: slice | Int[Tensor, "site"]) -> LayerSites:
    indices = torch.arange(len(sites.names), device="cpu")[chosen]
    names = tuple(sites.names[i] for i in indices.tolist())
    return replace(sites, names=names, index=sites.index[chosen])


def split_blocks(blocks: Sequence["PathBlock"], n_paths: int) -> list[range]:
    """Group consecutive path blocks so that each group but the last has `n_paths` or more paths."""
    ends, n = [0], 0
    for number, block in enumerate(blocks):
        n += block.n_paths
        if n >= n_paths or number == len(blocks) - 1:
            ends.append(number + 1)
            n = 0
    return [range(*bounds) for bounds in pairwise(ends)]


def by_block(work: pd.DataFrame) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each path block's number, and the senders and receivers of its paths."""
    for number, rows in work.groupby("block"):
        i, j = (torch.from_numpy(rows[name].to_numpy(np.int64, copy=True)) for name in "ij")
        yield int(number), i, j  # type: ignore[arg-type]
