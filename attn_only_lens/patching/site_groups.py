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
        positions = tuple(each for group in groups for each in group.positions)
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
        kept, where = self.where[rows].unique(return_inverse=True)
        positions = tuple(self.positions[i] for i in kept.tolist())
        return SiteGroup(self.sites, positions, self.head[rows], where)

    def of_prompts(self, pair: PromptPair) -> "SiteGroup":
        """Return the same sites at a run of the prompts, which knows which it is."""
        if pair.among is None:
            return self
        n_pos = pair.clean.shape[1]
        positions = tuple(each.of_prompts(pair.among[0], n_pos) for each in self.positions)
        return replace(self, positions=positions)

    @property
    def everywhere(self) -> Bool[Tensor, "set batch pos"]:
        """Where each set of positions is."""
        return torch.stack([each.where for each in self.positions])

    def sums(self, of_heads: Float[Tensor, "head batch pos"]) -> Float[Tensor, "row batch"]:
        """Sum a quantity of each row's head over its positions."""
        everywhere = self.everywhere.to(of_heads)
        if all(each.column is not None for each in self.positions):
            columns = torch.tensor([each.column for each in self.positions], device=of_heads.device)
            here = everywhere.gather(-1, columns[:, None, None].expand(-1, everywhere.shape[1], 1))
            found = of_heads.permute(2, 0, 1)[columns] * here.transpose(1, 2)
        else:
            found = torch.einsum("hbp,sbp->shb", of_heads, everywhere)
        if self.is_product:
            return found.flatten(0, 1)
        return found[self.where.to(found.device), self.head.to(found.device)]

    @property
    def rows(self) -> pd.DataFrame:
        """What names each row: its layer, kind, index, name and position."""
        head, where = self.head.numpy(), self.where.numpy()
        return pd.DataFrame(
            {
                "layer": self.sites.layer,
                "kind": self.sites.kind,
                "index": self.sites.index.cpu().numpy()[head],
                "name": np.array(self.sites.names, dtype=object)[head],
                "position": np.array([each.label for each in self.positions])[where],
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
    """Return the sites to patch, in groups whose order depends on nothing else.

    Args:
        model: converted, or with exposed neuron-heads.
        pair: the prompts.
        sites: as `resolve_sites` takes them; names may say where, `L3N7@13`. None for all heads
            that have the part.
        positions: as `resolve_positions` takes them, for names that do not say where.
        part: the part that is patched.
        most_rows: of a group, unless the heads of one layer are more; None for a group a layer.

    Raises:
        InputError: with every reason: sites that the model has not, positions that are none of
            the prompts'; positions for names that all have their own; keys of neuron-heads.
    """
    if sites is None:
        sites = heads() if part == "k" else all_heads()
    groups = _site_groups(model, pair, sites, positions, most_rows)
    neurons = [each.sites.names[0] for each in groups if each.sites.kind == "neuron"]
    if part == "k" and neurons:
        raise InputError(
            [f"got part='k' and {neurons[0]}: a neuron-head's keys are constant; expected heads()"],
            _PROBLEM,
        )
    return groups


def _site_groups(
    model: Any, pair: PromptPair, sites: Sites, positions: Positions, most_rows: int | None
) -> tuple[SiteGroup, ...]:
    given = split_positions(sites)
    if given is None:
        heads = resolve_sites(model, sites)
        return tuple(_groups(heads, resolve_positions(pair, positions), most_rows))
    free = {name for name, at in given if at is None}
    if not free and not (isinstance(positions, str) and positions == "each"):
        raise InputError(
            [f"got positions={positions!r} and names that all say where, such as {_at(given[0])}"],
            _PROBLEM,
        )
    sets = list(resolve_positions(pair, positions)) if free else []
    n_free, labels = len(sets), [each.label for each in sets]
    asked = dict.fromkeys(at for _, at in given if at is not None)
    if asked and any(isinstance(label, str) for label in labels):
        raise InputError(
            [
                f"got positions={positions!r} for {min(free)}, and names that say where by number; "
                "expected numbers, or 'each', for both"
            ],
            _PROBLEM,
        )
    reasons = list[str]()
    for at in asked:
        try:
            found = resolve_positions(pair, at)
        except InputError as error:
            reasons += error.reasons
        else:
            sets += found if at not in labels else ()
    InputError.raise_if(reasons, _PROBLEM)
    places = {each.label: place for place, each in enumerate(sets)}
    # -1 may be 4, which is a site of its own for another head.
    first = [
        next(i for i, other in enumerate(sets) if torch.equal(other.where, each.where))
        for each in sets
    ]
    rows = [
        (name, place)
        for name, at in given
        for place in (range(n_free) if at is None else [places[at]])
    ]
    n_rows = Counter((name, first[place]) for name, place in rows)
    twice = [_at((name, sets[place].label)) for (name, place), n in n_rows.items() if n > 1]
    InputError.raise_if(
        [f"got {site} more than once; expected each site once" for site in twice[:5]], _PROBLEM
    )
    groups = []
    for each in resolve_sites(model, list(dict.fromkeys(name for name, _ in given))):
        index = {name: head for head, name in enumerate(each.names)}
        here = sorted((place, index[name]) for name, place in rows if name in index)
        where, head = torch.tensor(here, device="cpu").T
        groups.append(SiteGroup(each, tuple(sets), head, where))
    return tuple(groups)


def _at(site: tuple[str, object]) -> str:
    return f"{site[0]}@{site[1]}"


def _groups(
    sites: Sequence[LayerSites], positions: Sequence[PositionSet], most_rows: int | None
) -> list[SiteGroup]:
    """Group all heads at all positions: many neurons by position, few with several positions."""
    groups: list[SiteGroup] = []
    products: dict[tuple[int, int], SiteGroup] = {}  # of one size, which share their rows
    for each in sites:
        at_once = len(positions)
        if each.kind == "neuron" and most_rows is not None:
            at_once = max(1, most_rows // len(each.names))
        for first in range(0, len(positions), at_once):
            here = tuple(positions[first : first + at_once])
            size = len(each.names), len(here)
            if size not in products:
                products[size] = SiteGroup.product(each, here)
            groups.append(replace(products[size], sites=each, positions=here))
    return groups
