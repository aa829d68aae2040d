"""Sites at positions, in the groups that a sweep runs one after another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.engine.positions import Positions, PositionSet, resolve_positions
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import (
    LayerSites,
    Part,
    Sites,
    all_heads,
    heads,
    resolve_sites,
    split_positions,
)
from attn_only_lens.errors import InputError

_PROBLEM = "these sites cannot be patched"
ROWS = 2048  # of a group: enough for one that is written to a file of its own


@dataclass(frozen=True, eq=False)
class SiteGroup:
    """Heads of one kind in one layer, each at some sets of positions.

    Attributes:
        sites: the heads.
        positions: the sets of positions.
        head: of each row, its place in `sites`.
        where: of each row, its place in `positions`.
    """

    sites: LayerSites
    positions: tuple[PositionSet, ...]
    head: Int[Tensor, "row"]
    where: Int[Tensor, "row"]

    @classmethod
    def product(cls, sites: LayerSites, positions: Sequence[PositionSet]) -> "SiteGroup":
        """Every head at every set of positions: positions outmost, heads inmost."""
        n = len(sites.names)
        rows = torch.arange(n * len(positions), device="cpu")
        return cls(sites, tuple(positions), rows % n, rows // n)

    @classmethod
    def joined(cls, groups: Sequence["SiteGroup"]) -> "SiteGroup":
        """The rows of groups of the same heads, one group after another."""
        positions = tuple(position for group in groups for position in group.positions)
        sizes = [len(group.positions) for group in groups]
        wheres = [group.where + sum(sizes[:i]) for i, group in enumerate(groups)]
        heads = [group.head for group in groups]
        return cls(groups[0].sites, positions, torch.cat(heads), torch.cat(wheres))

    @property
    def is_product(self) -> bool:
        """Whether the rows are those of `product`, in order."""
        n = len(self.sites.names)
        rows = torch.arange(n * len(self.positions), device="cpu")
        return len(self) == len(rows) and torch.equal(self.where * n + self.head, rows)

    def __len__(self) -> int:
        return len(self.head)

    def __getitem__(self, rows: Int[Tensor, "some"]) -> "SiteGroup":
        """Return some of the rows, and the sets of positions that they have."""
        kept, used = self.where[rows].unique(return_inverse=True)
        positions = tuple(self.positions[i] for i in kept.tolist())
        return SiteGroup(self.sites, positions, self.head[rows], used)

    def of_prompts(self, pair: PromptPair) -> "SiteGroup":
        """Return the same sites at a run of the prompts, which knows which it is."""
        if pair.among is None:
            return self
        n_pos = pair.clean.shape[1]
        positions = tuple(position.of_prompts(pair.among[0], n_pos) for position in self.positions)
        return replace(self, positions=positions)

    @property
    def everywhere(self) -> Bool[Tensor, "set batch pos"]:
        """Where each set of positions is."""
        return torch.stack([position.where for position in self.positions])

    def sums(self, of_heads: Float[Tensor, "head batch pos"]) -> Float[Tensor, "row batch"]:
        """Sum a quantity of each row's head over its positions."""
        everywhere = self.everywhere.to(of_heads)
        if all(position.column is not None for position in self.positions):
            columns = torch.tensor(
                [position.column for position in self.positions], device=of_heads.device
            )
            here = everywhere.gather(-1, columns[:, None, None].expand(-1, everywhere.shape[1], 1))
            values = of_heads.permute(2, 0, 1)[columns] * here.transpose(1, 2)
        else:
            values = torch.einsum("hbp,sbp->shb", of_heads, everywhere)
        if self.is_product:
            return values.flatten(0, 1)
        return values[self.where.to(values.device), self.head.to(values.device)]

    @property
    def rows(self) -> pd.DataFrame:
        """What names each row: its layer, kind, index, name and position."""
        head, position = self.head.numpy(), self.where.numpy()
        return pd.DataFrame(
            {
                "layer": self.sites.layer,
                "kind": self.sites.kind,
                "index": self.sites.index.cpu().numpy()[head],
                "name": np.array(self.sites.names, dtype=object)[head],
                "position": np.array([position.label for position in self.positions])[position],
            }
        )


def site_groups(
    model: Any,
    pair: PromptPair,
    sites: Sites | None,
    positions: Positions,
    part: Part,
    *,
    most_rows: int | None = ROWS,
) -> tuple[SiteGroup, ...]:
    """Return the sites to patch, in groups whose order depends on nothing else."""
    if sites is None:
        sites = heads() if part == "k" else all_heads()
    groups = _site_groups(model, pair, sites, positions, most_rows)
    neurons = [group.sites.names[0] for group in groups if group.sites.kind == "neuron"]
    if part == "k" and neurons:
        raise InputError(
            [f"got part='k' and {neurons[0]}: a neuron-head's keys are constant; expected heads()"],
            _PROBLEM,
        )
    return groups


def _site_groups(
    model: Any, pair: PromptPair, sites: Sites, positions: Positions, most_rows: int | None
) -> tuple[SiteGroup, ...]:
    split = split_positions(sites)
    if split is None:
        heads = resolve_sites(model, sites)
        return tuple(_groups(heads, resolve_positions(pair, positions), most_rows))
    free = {name for name, position in split if position is None}
    if not free and not (isinstance(positions, str) and positions == "each"):
        raise InputError(
            [f"got positions={positions!r} and names that all say where, such as {_at(split[0])}"],
            _PROBLEM,
        )
    sets = list(resolve_positions(pair, positions)) if free else []
    n_free, labels = len(sets), [position_set.label for position_set in sets]
    asked = dict.fromkeys(position for _, position in split if position is not None)
    if asked and any(isinstance(label, str) for label in labels):
        raise InputError(
            [
                f"got positions={positions!r} for {min(free)}, and names that say where by number; "
                "expected numbers, or 'each', for both"
            ],
            _PROBLEM,
        )
    reasons = list[str]()
    for position in asked:
        try:
            resolved = resolve_positions(pair, position)
        except InputError as error:
            reasons += error.reasons
        else:
            sets += resolved if position not in labels else ()
    InputError.raise_if(reasons, _PROBLEM)
    places = {position_set.label: place for place, position_set in enumerate(sets)}
    # -1 may be 4, which is a site of its own for another head.
    first = [
        next(
            i
            for i, other_set in enumerate(sets)
            if torch.equal(other_set.where, position_set.where)
        )
        for position_set in sets
    ]
    rows = [
        (name, place)
        for name, position in split
        for place in (range(n_free) if position is None else [places[position]])
    ]
    n_rows = Counter((name, first[place]) for name, place in rows)
    twice = [_at((name, sets[place].label)) for (name, place), n in n_rows.items() if n > 1]
    InputError.raise_if(
        [f"got {site} more than once; expected each site once" for site in twice[:5]], _PROBLEM
    )
    groups = []
    for one_site in resolve_sites(model, list(dict.fromkeys(name for name, _ in split))):
        index = {name: head for head, name in enumerate(one_site.names)}
        here = sorted((place, index[name]) for name, place in rows if name in index)
        position, head = torch.tensor(here, device="cpu").T
        groups.append(SiteGroup(one_site, tuple(sets), head, position))
    return tuple(groups)


def _at(site: tuple[str, object]) -> str:
    return f"{site[0]}@{site[1]}"


def _groups(
    sites: Sequence[LayerSites], positions: Sequence[PositionSet], most_rows: int | None
) -> list[SiteGroup]:
    """Group all heads at all positions: many neurons by position, few with several positions."""
    groups: list[SiteGroup] = []
    products: dict[tuple[int, int], SiteGroup] = {}  # of one size, which share their rows
    for site in sites:
        at_once = len(positions)
        if site.kind == "neuron" and most_rows is not None:
            at_once = max(1, most_rows // len(site.names))
        for first in range(0, len(positions), at_once):
            here = tuple(positions[first : first + at_once])
            size = len(site.names), len(here)
            if size not in products:
                products[size] = SiteGroup.product(site, here)
            groups.append(replace(products[size], sites=site, positions=here))
    return groups
