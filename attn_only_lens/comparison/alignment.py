"""Matching the components of a model with those of one grown from it, by provenance.

Components are heads and neurons by name, so that the kind of model does not matter. The provenance
says where each component of the original went; whatever else the grown model has is new. A
provenance that does not fit the two models is refused: with one name off, every later component
would be compared with its neighbour.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.sites import LayerSites, all_heads, resolve_sites
from attn_only_lens.errors import ComparisonError, UnknownHeadError
from attn_only_lens.expansion import Provenance
from attn_only_lens.heads import HeadName
from attn_only_lens.heads.host import HeadKind

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class SharedComponents:
    """The same components, in the same order, of one kind in one layer of two models."""

    first: LayerSites
    second: LayerSites

    @property
    def kind(self) -> HeadKind:
        """Attention heads, or neurons."""
        return self.first.kind


@dataclass(frozen=True, eq=False)
class Alignment:
    """The components of both models, by layer of the first one, and those of the second alone.

    `coordinates` are those of the first residual stream, as indices into the second.
    """

    shared: tuple[SharedComponents, ...]
    new: tuple[LayerSites, ...]
    coordinates: Int[Tensor, "d_model"]

    def with_null(self, d_model: int) -> "Alignment":
        """Align the second model, of this width, with another of its shape."""
        shared = tuple(replace(pair, first=pair.second) for pair in self.shared)
        return Alignment(shared, self.new, torch.arange(d_model, device="cpu"))


def align(model: Any, grown: Any, provenance: Provenance) -> Alignment:
    """Match the components of a model with those of one grown from it."""
    old, new = resolve_sites(model, all_heads()), resolve_sites(grown, all_heads())
    known = {name for group in new for name in group.names}
    reasons: list[str] = []
    old_names: dict[str, str] = {}
    shared = []
    for group in old:
        new_names = []
        for name in group.names:
            try:
                new_name = provenance[name]
            except UnknownHeadError as error:
                reasons.append(f"the original has {name}, unknown to the provenance: {error}")
                continue
            if new_name not in known:
                reasons.append(f"{name} went to {new_name}, which the grown model has not")
            elif new_name in old_names:
                reasons.append(f"{old_names[new_name]} and {name} both went to {new_name}")
            else:
                old_names[new_name] = name
                new_names.append(new_name)
        if not reasons:
            sites = LayerSites.of(map(HeadName.parse, new_names))
            shared.append(SharedComponents(group, sites))
    gained = tuple(
        LayerSites.of(map(HeadName.parse, names))
        for group in new
        if (names := [name for name in group.names if name not in old_names])
    )
    expected = {*provenance.new_heads, *provenance.new_neurons}
    odd = sorted(expected ^ {name for group in gained for name in group.names})
    if odd and not reasons:
        reasons.append(
            f"{len(odd)} heads and neurons, such as {odd[0]}, are new in the provenance and not in "
            "the models, or the other way round"
        )
    coordinates = torch.as_tensor(provenance.coordinates, dtype=torch.long, device="cpu")
    narrow, wide = model.cfg.d_model, grown.cfg.d_model
    if coordinates.shape != (narrow,):
        reasons.append(f"it has {list(coordinates.shape)} coordinates; the original has {narrow}")
    elif len(coordinates.unique()) < narrow or coordinates.min() < 0 or coordinates.max() >= wide:
        reasons.append(f"its coordinates are not {narrow} different ones from 0 to {wide - 1}")
    if len(reasons) > _SHOWN + 1:
        reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more"]
    ComparisonError.raise_if(reasons, "this provenance does not fit these models")
    return Alignment(tuple(shared), gained, coordinates)
