"""Divide a sweep's sites into groups, which are patched together, and into chunks of work.

A chunk contains some sites and some prompts of a sweep. If splitting the prompts gives fewer than
`_CHUNKS` chunks, the sites are split too, into chunks that cost about the same. The cost of a patch
is the number of tokens × blocks that the patch can change. Because chunks are small and cost the
same, processes that share them end at about the same time, and an interrupted job loses little
work. The division into chunks depends only on the size of the model, the prompts and the sites.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.engine.directions import DIRECTIONS
from attn_only_lens.engine.positions import (
    OF_SWEEPS,
    Positions,
    PositionSet,
    aligned,
    is_by_role,
    resolve_positions,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import (
    LayerSites,
    Part,
    Sites,
    SomeSites,
    resolve_sites,
)
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS

_PROBLEM = "these sites cannot be patched"
ROWS = 2048  # maximum number of rows in a group of neurons at several positions
_CHUNKS = 128  # enough for eight processes to end within 1/16 of the running time
_LEAST = 4096  # minimum cost of a chunk: this many tokens through all blocks (1 s on a CPU)


class _PositionSets(tuple[PositionSet, ...]):
    """Sets of positions, with cached tensors that the groups of all layers share."""

    @cached_property
    def everywhere(self) -> Bool[Tensor, "set batch pos"]:
        """The positions in each set, as a mask."""
        return torch.stack([position.chosen for position in self])

    @cached_property
    def columns(self) -> Int[Tensor, "set"] | None:
        """The column of tokens that each set contains, or None if a set has several columns."""
        columns = [position.column for position in self]
        return None if None in columns else torch.tensor(columns, device="cpu")

    @cached_property
    def in_column(self) -> Bool[Tensor, "set 1 batch"]:
        """For each one-column set of positions, the prompts that have this position."""
        assert self.columns is not None
        sets = torch.arange(len(self), device="cpu")
        return self.everywhere[sets, :, self.columns].unsqueeze(1)

    @cached_property
    def _moved(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def on(self, device: torch.device, name: str) -> Tensor:
        """Return one of the tensors above on a device; it is moved there once."""
        if (name, device) not in self._moved:
            self._moved[name, device] = getattr(self, name).to(device)
        return self._moved[name, device]


@dataclass(frozen=True, eq=False)
class SiteGroup:
    """Sites to patch: heads of one kind in one layer, each paired with some sets of positions.

    Attributes:
        sites: the heads.
        positions: the sets of positions.
        head: for each row, the index of its head in `sites`.
        place: for each row, the index of its set of positions in `positions`.
    """

    sites: LayerSites
    positions: tuple[PositionSet, ...]
    head: Int[Tensor, "row"]
    place: Int[Tensor, "row"]

    def __post_init__(self) -> None:
        if not isinstance(self.positions, _PositionSets):
            object.__setattr__(self, "positions", _PositionSets(self.positions))

    @classmethod
    def product(cls, sites: LayerSites, positions: Sequence[PositionSet]) -> "SiteGroup":
        """Return a group with every head at every set of positions. Heads vary fastest."""
        n = len(sites.names)
        rows = torch.arange(n * len(positions), device="cpu")
        return cls(sites, _PositionSets(positions), rows % n, rows // n)

    @classmethod
    def joined(cls, groups: Sequence["SiteGroup"]) -> "SiteGroup":
        """Join groups that have the same heads into one group."""
        positions = tuple(position for group in groups for position in group.positions)
        sizes = [len(group.positions) for group in groups]
        places = [group.place + sum(sizes[:i]) for i, group in enumerate(groups)]
        heads = [group.head for group in groups]
        return cls(groups[0].sites, positions, torch.cat(heads), torch.cat(places))

    @property
    def is_product(self) -> bool:
        """True if the rows equal those that `product` builds, in the same order."""
        n = len(self.sites.names)
        rows = torch.arange(n * len(self.positions), device="cpu")
        return len(self) == len(rows) and torch.equal(self.place * n + self.head, rows)

    def __len__(self) -> int:
        return len(self.head)

    def __getitem__(self, rows: Int[Tensor, "some"]) -> "SiteGroup":
        """Return a group with only the given rows, and only the sets of positions that they use."""
        kept, used = self.place[rows].unique(return_inverse=True)
        positions = tuple(self.positions[i] for i in kept.tolist())
        return SiteGroup(self.sites, positions, self.head[rows], used)

    def of_prompts(self, pair: PromptPair) -> "SiteGroup":
        """Return the same sites, with positions only in the given prompts."""
        if pair.among is None:
            return self
        n_pos = pair.clean.shape[1]
        positions = tuple(position.of_prompts(pair.among[0], n_pos) for position in self.positions)
        return replace(self, positions=positions)

    @property
    def everywhere(self) -> Bool[Tensor, "set batch pos"]:
        """The positions in each set, as a mask on the CPU."""
        return self._sets.everywhere

    def everywhere_on(self, device: torch.device) -> Bool[Tensor, "set batch pos"]:
        """Return the positions in each set, as a mask on a device."""
        return self._sets.on(device, "everywhere")

    @property
    def columns(self) -> Int[Tensor, "set"] | None:
        """The column of tokens that each set contains, or None if a set has several columns."""
        return self._sets.columns

    @property
    def _sets(self) -> _PositionSets:
        assert isinstance(self.positions, _PositionSets)
        return self.positions

    def sums(self, of_heads: Float[Tensor, "head batch pos"]) -> Float[Tensor, "row batch"]:
        """Return, for each row, the sum of its head's entries over its positions."""
        device, columns = of_heads.device, self.columns
        if columns is not None:
            in_column = self._sets.on(device, "in_column")
            values = of_heads.permute(2, 0, 1)[self._sets.on(device, "columns")] * in_column
        else:
            mask = self.everywhere_on(device).to(of_heads.dtype)
            values = torch.einsum("hbp,sbp->shb", of_heads, mask)
        if self.is_product:
            return values.flatten(0, 1)
        return values[self.place.to(device), self.head.to(device)]


def site_rows(groups: Sequence[SiteGroup]) -> pd.DataFrame:
    """Return a frame with the layer, kind, index, name and position of each row in the groups."""
    layers = list(dict.fromkeys(group.sites for group in groups))
    sizes = [len(sites.names) for sites in layers]
    first = dict(zip(layers, np.cumsum([0, *sizes]).tolist(), strict=False))
    head = np.concatenate([group.head.numpy() + first[group.sites] for group in groups])
    layer = np.repeat(np.arange(len(layers)), sizes)[head]
    labels = [np.array([p.label for p in group.positions])[group.place.numpy()] for group in groups]
    names = [name for sites in layers for name in sites.names]
    return pd.DataFrame(
        {
            "layer": np.array([sites.layer for sites in layers])[layer],
            "kind": pd.Categorical([sites.kind for sites in layers])[layer],
            "index": np.concatenate([sites.index.cpu().numpy() for sites in layers])[head],
            "name": pd.Categorical.from_codes(head, pd.Index(names, dtype=object)),
            "position": np.concatenate(labels),
        }
    )


def position_sets(groups: Iterable[SiteGroup]) -> list[PositionSet]:
    """Return the distinct sets of positions in the given groups."""
    return list(dict.fromkeys(position for group in groups for position in group.positions))


def roles(groups: Iterable[SiteGroup]) -> list[PositionSet]:
    """Return the sets of positions that are labelled with a role."""
    return [
        position
        for position in position_sets(groups)
        if isinstance(position.label, str) and position.label != "all"
    ]


def site_groups(
    model: Any,
    pair: PromptPair,
    sites: SomeSites,
    part: Part,
    *,
    averaged: bool = False,
    most_rows: int | None = ROWS,
) -> tuple[SiteGroup, ...]:
    """Return the sites to patch as groups, whose order depends only on the sites and prompts.

    If rows are `averaged` over prompts, positions must mean the same in all of them (`aligned`).
    """
    sites, reasons = Sites.of(sites), list[str]()
    if part == "k":  # a neuron-head's keys are constant, so there is nothing to patch
        sites = sites.without(*NEURON_KINDS)
    split = sites.split()
    with InputError.collected(reasons):
        names = sites if split is None else list(dict.fromkeys(name for name, _ in split))
        resolved = resolve_sites(model, names)
    with InputError.collected(reasons):
        if averaged:
            sites = _aligned(pair, sites, split)
        if split is None:
            everywhere = resolve_positions(pair, sites.positions)
        else:
            placed = _resolve_placed(pair, split, sites.positions)
    if part != "z" and not reasons:
        resolved, reasons = _with_parts(resolved, part, bool(sites.kinds))
    InputError.raise_if(reasons, _PROBLEM)
    if split is None:
        groups = _products(resolved, everywhere, most_rows)
    else:
        groups = _placed_groups(resolved, split, *placed)
    neurons = [group.sites.names[0] for group in groups if group.sites.kind in NEURON_KINDS]
    if part == "k" and neurons:
        raise InputError(
            [f"got part='k' and {neurons[0]}, whose keys are constant; expected attention heads"],
            _PROBLEM,
        )
    if part == "q":
        InputError.raise_if(_query_reasons(model, resolved), _PROBLEM)
    return groups


def _query_reasons(model: Any, resolved: Sequence[LayerSites]) -> list[str]:
    """Return an error message for neurons of experts, whose queries are not always computed."""
    host = host_of(model)
    return [
        f"got part='q' and {site.names[0]} in a mixture of experts: there are no queries at tokens "
        "that do not visit an expert; expected part='pattern', which has the same effect"
        for site in resolved
        if host.experts(site.layer, site.kind)[0]
    ][:1]


def _aligned(
    pair: PromptPair, sites: Sites, split: Sequence[tuple[str, int | str | None]] | None
) -> Sites:
    """Return sites at positions that mean the same in all prompts."""
    in_names = [position for _, position in split or () if position is not None]
    aligned(pair, in_names, others=OF_SWEEPS)
    if split is not None and len(in_names) == len(split):
        return sites
    return replace(sites, positions=aligned(pair, sites.positions, others=OF_SWEEPS))


def _with_parts(
    resolved: tuple[LayerSites, ...], part: Part, is_selection: bool
) -> tuple[tuple[LayerSites, ...], list[str]]:
    """Return the sites that have queries, patterns and values. Refuse names of other sites."""
    wide = [site.names[0] for site in resolved if site.kind in WIDE_KINDS]
    with_parts = tuple(site for site in resolved if site.kind not in WIDE_KINDS)
    if not wide or (is_selection and with_parts):
        return with_parts, []
    reason = f"got part={part!r} and {wide[0]}, which has only an output z; expected part='z'"
    return resolved, [reason]


def _products(
    sites: Sequence[LayerSites], positions: Sequence[PositionSet], most_rows: int | None
) -> tuple[SiteGroup, ...]:
    """Return groups of all heads at all positions. Groups of few neurons have many positions."""
    groups: list[SiteGroup] = []
    products: dict[tuple[int, int, int], SiteGroup] = {}  # layers of equal size share a group
    for site in sites:
        at_once = len(positions)
        if site.kind in NEURON_KINDS and most_rows is not None:
            at_once = max(1, most_rows // len(site.names))
        for first in range(0, len(positions), at_once):
            size = len(site.names), first, at_once
            if size not in products:
                products[size] = SiteGroup.product(site, positions[first : first + at_once])
            groups.append(replace(products[size], sites=site))
    return tuple(groups)


def _placed_groups(
    resolved: Sequence[LayerSites],
    split: Sequence[tuple[str, int | str | None]],
    everywhere: Sequence[PositionSet],
    placed: Mapping[int | str, PositionSet],
) -> tuple[SiteGroup, ...]:
    """Group sites that the user named; a name such as L0N5@1 includes a position."""
    labels = [position_set.label for position_set in everywhere]
    sets = [*everywhere, *(placed[p] for p in placed if p not in labels)]
    index = {position_set.label: i for i, position_set in enumerate(sets)}
    rows = [
        (name, i)
        for name, position in split
        for i in (range(len(everywhere)) if position is None else [index[position]])
    ]
    _require_each_once(rows, sets)
    groups = []
    for site in resolved:
        head_index = {name: head for head, name in enumerate(site.names)}
        pairs = sorted((i, head_index[name]) for name, i in rows if name in head_index)
        place, head = torch.tensor(pairs, device="cpu").T
        groups.append(SiteGroup(site, tuple(sets), head, place))
    return tuple(groups)


def _resolve_placed(
    pair: PromptPair, split: Sequence[tuple[str, int | str | None]], positions: Positions
) -> tuple[list[PositionSet], dict[int | str, PositionSet]]:
    """Return the positions for names without a position, and the positions that names include."""
    free = {name for name, position in split if position is None}
    asked = dict.fromkeys(position for _, position in split if position is not None)
    by_name = [name for name in asked if isinstance(name, str)]
    if by_name and len(by_name) == len(asked) and not (free and not is_by_role(positions)):
        by_role = {str(role.label): role for role in resolve_positions(pair, by_name)}
        everywhere = list(resolve_positions(pair, positions)) if free else []
        return everywhere, {role: by_role[role] for role in by_name}
    reasons = [
        f"got {name}@{role}, which names a role, but other names have other positions; expected "
        "roles for all names"
        for name, role in split
        if isinstance(role, str)
    ]
    if not free and not (isinstance(positions, str) and positions == "each"):
        first = f"{split[0][0]}@{split[0][1]}"
        raise InputError(
            [
                f"got positions={positions!r} and names that all include a position, such as "
                f"{first}; leave positions out"
            ],
            _PROBLEM,
        )
    everywhere = list(resolve_positions(pair, positions)) if free else []
    if asked and any(isinstance(position_set.label, str) for position_set in everywhere):
        raise InputError(
            [
                f"got positions={positions!r} for {min(free)}, but other names include numbers as "
                "positions; expected numbers, or 'each', for both"
            ],
            _PROBLEM,
        )
    placed = dict[int | str, PositionSet]()
    for position in (position for position in asked if isinstance(position, int)):
        of_position = list[str]()
        with InputError.collected(of_position):
            (placed[position],) = resolve_positions(pair, position)
        sites = ", ".join(f"{name}@{number}" for name, number in split if number == position)
        reasons += [f"{sites}: {reason}" for reason in of_position]
    InputError.raise_if(reasons, _PROBLEM)
    return everywhere, placed


def _require_each_once(rows: Sequence[tuple[str, int]], sets: Sequence[PositionSet]) -> None:
    # Two labels such as -1 and 4 may mean the same position. Two roles may share a token.
    known = [x.label if isinstance(x.label, str) else x.chosen.numpy().tobytes() for x in sets]
    first = {key: i for i, key in reversed([*enumerate(known)])}
    counts = Counter((name, first[known[i]]) for name, i in rows)
    twice = [f"{name}@{sets[i].label}" for (name, i), n in counts.items() if n > 1]
    InputError.raise_if(
        [f"got {site} more than once; expected each site once" for site in twice[:5]], _PROBLEM
    )


@dataclass(frozen=True)
class Chunk:
    """A range of a sweep's prompts, and a range of its rows, which are numbered across groups."""

    prompts: range
    rows: range

    @property
    def key(self) -> str:
        """The name under which results of the chunk are stored."""
        ranges = {"prompts": self.prompts, "rows": self.rows}
        return ".".join(f"{name}-{span.start}-{span.stop}" for name, span in ranges.items())

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def groups(self, groups: Sequence[SiteGroup], pair: PromptPair) -> list[SiteGroup]:
        """Return this chunk's rows as groups of sites, for the prompts in `pair`."""
        chosen, first = [], 0
        for group in groups:
            start, stop = (
                min(max(row - first, 0), len(group)) for row in (self.rows.start, self.rows.stop)
            )
            if start < stop:
                group_here = group.of_prompts(pair)
                whole = stop - start == len(group)
                rows = torch.arange(start, stop, device="cpu")
                chosen.append(group_here if whole else group_here[rows])
            first += len(group)
        return chosen


def split_prompts(n_prompts: int, prompts_at_once: int) -> list[range]:
    """Return consecutive ranges of prompts."""
    starts = range(0, n_prompts, prompts_at_once)
    return [range(n_prompts)[start : start + prompts_at_once] for start in starts]


def split_sweep(
    model: Any,
    pair: PromptPair,
    groups: Sequence[SiteGroup],
    prompts_at_once: int,
    direction: str,
) -> list[Chunk]:
    """Split a sweep by prompts, and then by sites, into chunks that cost about the same."""
    prompts = split_prompts(len(pair.clean), prompts_at_once)
    costs = torch.cat(_costs(model, pair, groups, direction))
    least = _LEAST * len(model.blocks)
    n = min(-(-_CHUNKS // len(prompts)), prompts_at_once * int(costs.sum()) // least)
    ends = costs.cumsum(0)
    bins = (ends - costs) * max(n, 1) // ends[-1].clamp(min=1)
    stops = bins.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    rows = [range(*bounds) for bounds in zip([0, *stops], stops, strict=False)]
    return [Chunk(some_prompts, some_rows) for some_prompts in prompts for some_rows in rows]


def _costs(
    model: Any, pair: PromptPair, groups: Sequence[SiteGroup], direction: str
) -> list[Int[Tensor, "row"]]:
    """Estimate each patch's cost, in tokens × blocks, on the prompt where the patch costs most."""
    host, n_pos = host_of(model), pair.clean.shape[1]
    differ = ((pair.clean != pair.corrupted) & pair.real).any(dim=0)
    first = int(differ.int().argmax()) if direction in DIRECTIONS else 0
    costs = []
    for group in groups:
        sites = group.sites
        entered = host.block(sites.layer, sites.kind) + (sites.kind in NEURON_KINDS)
        blocks_left = len(model.blocks) - entered + 1  # the unembedding counts as 1 block
        patched = group.everywhere.any(dim=1)[:, first:]
        tokens = (n_pos - first - patched.int().argmax(dim=1)) * patched.any(dim=1)
        costs.append((tokens * blocks_left)[group.place])
    return costs
