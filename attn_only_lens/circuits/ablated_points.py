"""Replace z at the hook points of ablated sites, for many circuits in one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.devices import to_devices
from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.recording import Hooks, Recording
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind

Rows: TypeAlias = npt.NDArray[np.int64]
"""Row indices in the frame of all sites."""
Floats: TypeAlias = npt.NDArray[np.float64]
_NO_PROMPTS: Rows = np.empty(0, dtype=np.int64)


def digest(circuits: Sequence[Rows], prompts: Rows = _NO_PROMPTS) -> str:
    """Return a digest of circuits on some prompts; the order of a circuit's sites is left out."""
    result = blake2b(np.int64(len(prompts)).tobytes() + prompts.tobytes(), digest_size=16)
    for circuit in circuits:
        result.update(np.int64(len(circuit)).tobytes() + np.sort(circuit).tobytes())
    return result.hexdigest()


@dataclass(frozen=True, eq=False)
class KeptSites:
    """The sites that circuits keep at one hook point.

    Attributes:
        n_circuits: the number of circuits.
        heads: the heads of these sites, sorted.
        heads_there: the same, on the device of the hook point.
        at: the circuit, the place, the head, and the head's number in `heads`, of every site that a
            circuit keeps; on the device of the hook point.
    """

    n_circuits: int
    heads: Rows
    heads_there: Int[Tensor, "head"]
    at: Int[Tensor, "4 kept"]


@dataclass(frozen=True, eq=False)
class AblatedPoint:
    """The sites at one hook point, and the values that replace the z of ablated sites.

    A place is the index of a position or role, or 0 for sites at all positions together. `place_of`
    maps tokens to places, and is -1 for tokens without a role. If places are not roles, `place_of`
    has one row for all prompts. `is_site` says which heads are sites at each place; its last row is
    for tokens without a place. The last two fields are the same two on the device of `replacement`.
    """

    name: str
    layer: int
    kind: HeadKind
    replacement: Float[Tensor, "batch pos head_index d_head"]
    rows: Rows  # each site's row in the frame of all sites
    index: Rows
    place: Rows
    place_of: Int[np.ndarray, "row pos"]
    is_site: Bool[np.ndarray, "place head_index"]
    place_of_there: Int[Tensor, "row pos"]
    is_site_there: Bool[Tensor, "place head_index"]

    def hook(
        self, kept: KeptSites, first: int, computed: dict[str, Tensor] | None = None
    ) -> tuple[str, Callable[[Tensor, Any], Tensor]]:
        """Return a hook that ablates the sites outside each circuit.

        The hook receives activations starting at position `first`. If `computed` is a dict, the
        hook also stores these activations in it.
        """
        replacement = self.replacement[:, first:]

        def hook(value: Tensor, hook: Any) -> Tensor:
            if computed is not None:
                computed[self.name] = value.detach()
            by_circuit = value.unflatten(0, (-1, len(replacement)))
            gone = self.ablated(kept, first).to(value.device)
            return torch.where(gone, replacement.to(value), by_circuit).flatten(0, 1)

        return self.name, hook

    def ablated(
        self, kept: KeptSites, first: int, only_kept_heads: bool = False
    ) -> Bool[Tensor, "circuit row pos head_index 1"]:
        """Return which heads are outside each circuit, at the tokens from position `first` on.

        With `only_kept_heads`, only the heads that any circuit keeps are returned, in their order.
        """
        circuit, place, index, number = kept.at
        is_site = self.is_site_there
        if only_kept_heads:
            index, is_site = number, is_site[:, kept.heads_there]
        gone = is_site.repeat(kept.n_circuits, 1, 1)
        gone[circuit, place, index] = False
        # models read z as views
        return gone[:, self.place_of_there[:, first:]].contiguous().unsqueeze(-1)

    def covers_all(self, first: int) -> bool:
        """Return whether every head is a site at every token from position `first` on."""
        return bool(self.is_site[self.place_of[:, first:]].all())

    def by_site(self, by_head: Float[np.ndarray, "row pos head_index"], first: int) -> Floats:
        """Sum `by_head`, which starts at position `first`, over each site's tokens."""
        by_place = np.zeros(self.is_site.shape)
        np.add.at(by_place, self.place_of[:, first:], by_head)
        return by_place[self.place, self.index]


class AblatedPoints(tuple[AblatedPoint, ...]):
    """All hook points with sites."""

    @cached_property
    def _owners(self) -> tuple[Rows, Rows]:
        """The number of the hook point of each row, and the number of its site there."""
        n = sum(len(point.rows) for point in self)
        owner, site = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        for number, point in enumerate(self):
            owner[point.rows], site[point.rows] = number, np.arange(len(point.rows))
        return owner, site

    def kept(self, circuits: Sequence[Rows]) -> list[KeptSites]:
        """Return what circuits (rows of the frame of all sites) keep at each hook point."""
        owner, site = self._owners
        rows = np.concatenate([np.empty(0, dtype=np.int64), *circuits])
        circuit = np.repeat(np.arange(len(circuits)), [len(some) for some in circuits])
        order = np.argsort(owner[rows], kind="stable")
        ends = np.searchsorted(owner[rows][order], np.arange(1, len(self)))
        heads, at = list[Rows](), list[Rows]()
        for point, part in zip(self, np.split(order, ends), strict=True):
            sites = site[rows[part]]
            kept_heads, number = np.unique(point.index[sites], return_inverse=True)
            heads.append(kept_heads)
            places = point.place[sites], point.index[sites]
            at.append(np.stack([circuit[part], *places, number]))
        # Masks for all circuits are large, so the device gets only the indices of kept sites.
        devices = [point.replacement.device for point in self]
        there = to_devices([*heads, *at], devices * 2)
        columns = heads, there[: len(self)], there[len(self) :]
        return [KeptSites(len(circuits), *some) for some in zip(*columns, strict=True)]

    def hooks(
        self, circuits: Sequence[Rows], first: int, computed: dict[str, Tensor] | None = None
    ) -> Hooks:
        """Return hooks that ablate the sites outside each circuit (`AblatedPoint.hook`)."""
        points = zip(self, self.kept(circuits), strict=True)
        return [point.hook(kept, first, computed) for point, kept in points]


def ablated_points(
    model: Any, source: Recording, sites: pd.DataFrame, roles: Sequence[PositionSet]
) -> AblatedPoints:
    """Return the sites by hook point; ablated sites take their z from the run `source`."""
    points = list[tuple[Any, ...]]()
    for key, rows in sites.groupby(["layer", "kind"], observed=True):
        layer, kind = cast("tuple[int, HeadKind]", key)
        name = host_of(model).hook_name(layer, kind, "z")
        if kind not in NEURON_KINDS:
            replacement = source.hooked[name]
        else:
            replacement = source.neurons[layer].z.unsqueeze(-1)
        place = rows["position"]
        if roles:
            place = place.map({role.label: number for number, role in enumerate(roles)})
            is_role = torch.stack([role.chosen for role in roles]).numpy()
            place_of = np.where(is_role.any(axis=0), is_role.argmax(axis=0), -1)
        elif (place == "all").all():
            place, place_of = 0 * rows["index"], np.zeros((1, replacement.shape[1]), dtype=np.int64)
        else:
            place_of = np.arange(replacement.shape[1])[None]
        index, places = (x.to_numpy(dtype=np.int64) for x in (rows["index"], place))
        n_places = int(max(places.max(), place_of.max())) + 2
        is_site = np.zeros((n_places, replacement.shape[2]), dtype=bool)
        is_site[places, index] = True
        columns = rows.index.to_numpy(), index, places, place_of, is_site
        points.append((name, layer, kind, replacement, *columns))
    devices = [point[3].device for point in points]
    there = [to_devices([point[i] for point in points], devices) for i in (-2, -1)]
    complete = zip(points, *there, strict=True)
    return AblatedPoints(AblatedPoint(*point, *copies) for point, *copies in complete)
