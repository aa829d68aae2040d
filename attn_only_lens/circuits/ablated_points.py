"""Replace z at the hook points of ablated sites, for many circuits in one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.recording import Recording
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind

Rows: TypeAlias = npt.NDArray[np.int64]
"""Row indices in the frame of all sites."""
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
_NO_PROMPTS: Rows = np.empty(0, dtype=np.int64)


def digest(circuits: Sequence[Rows], prompts: Rows = _NO_PROMPTS) -> str:
    """Return a digest of circuits on some prompts; the order of a circuit's sites is left out."""
    result = blake2b(np.int64(len(prompts)).tobytes() + prompts.tobytes(), digest_size=16)
    for circuit in circuits:
        result.update(np.int64(len(circuit)).tobytes() + np.sort(circuit).tobytes())
    return result.hexdigest()


@dataclass(frozen=True, eq=False)
class AblatedPoint:
    """The sites at one hook point, and the values that replace the z of ablated sites.

    A place is the index of a position or role, or 0 for sites at all positions together. `place_of`
    maps tokens to places, and is -1 for tokens without a role. If places are not roles, `place_of`
    has one row for all prompts.
    """

    name: str
    replacement: Float[Tensor, "batch pos head_index d_head"]
    rows: Rows  # each site's row in the frame of all sites
    index: Rows
    place: Rows
    place_of: Int[np.ndarray, "row pos"]

    def hook(
        self, kept: Flags, first: int, computed: dict[str, Tensor] | None
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

    def ablated(self, kept: Flags, first: int) -> Bool[Tensor, "circuit row pos head_index 1"]:
        """Return which heads are outside each circuit, at the tokens from position `first` on."""
        gone = np.zeros((len(kept), *self._shape), dtype=bool)
        gone[:, self.place, self.index] = ~kept[:, self.rows]
        gone = np.ascontiguousarray(gone[:, self.place_of[:, first:]])  # models read z as views
        return torch.from_numpy(gone).unsqueeze(-1)

    def by_site(self, by_head: Float[np.ndarray, "row pos head_index"], first: int) -> Floats:
        """Sum `by_head`, which starts at position `first`, over each site's tokens."""
        by_place = np.zeros(self._shape)
        np.add.at(by_place, self.place_of[:, first:], by_head)
        return by_place[self.place, self.index]

    @property
    def _shape(self) -> tuple[int, int]:
        """The number of places (and one for tokens without a place), and the number of nodes."""
        n_places = max(self.place.max(), self.place_of.max()) + 2
        return int(n_places), self.replacement.shape[2]


def ablated_points(
    model: Any, source: Recording, sites: pd.DataFrame, roles: Sequence[PositionSet]
) -> list[AblatedPoint]:
    """Return the sites by hook point; ablated sites take their z from the run `source`."""
    points = []
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
        columns = rows.index.to_numpy(), index, places, place_of
        points.append(AblatedPoint(name, replacement, *columns))
    return points
