"""Match the components of a model and its grown model, using the grown model's provenance.

Components are heads and neurons. Their layers are numbered as in the unconverted model, so that all
kinds of models can be compared. The provenance maps each component of the original to its index in
the grown model. All other components of the grown model are new. `align` raises an error if the
provenance does not fit both models, to prevent wrong pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.sites import LayerSites, resolve_sites
from attn_only_lens.errors import ComparisonError
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.expansion.weights import Axis
from attn_only_lens.heads.host import HeadKind

_SHOWN = 5
_LABELS: dict[HeadKind, str] = {"attention": "head", "neuron": "d_mlp"}
_AXES = ("head", "d_mlp", "d_model")


@dataclass(frozen=True, eq=False)
class SharedComponents:
    """The heads, or the neurons, of one layer that two models share, in the same order for both."""

    first: LayerSites
    second: LayerSites

    @property
    def kind(self) -> HeadKind:
        """The kind of the components: attention heads or neurons."""
        return self.first.kind


@dataclass(frozen=True, eq=False)
class Alignment:
    """The shared components, in the order of the first model's layers, and the new components.

    `coordinates[i]` is the index, in the second model's residual stream, of coordinate i of the
    first model's residual stream.
    """

    shared: tuple[SharedComponents, ...]
    new: tuple[LayerSites, ...]
    coordinates: Int[Tensor, "d_model"]

    @cached_property
    def names(self) -> dict[str, str]:
        """The grown model's name of each component of the original."""
        return {
            old: new
            for pair in self.shared
            for old, new in zip(pair.first.names, pair.second.names, strict=True)
        }

    @cached_property
    def original_names(self) -> dict[str, str]:
        """The original's name of each component that the grown model shares with it."""
        return {new: old for old, new in self.names.items()}

    def with_null(self, d_model: int) -> "Alignment":
        """Return the alignment of the second model with a null model (see `compare`)."""
        shared = tuple(replace(pair, first=pair.second) for pair in self.shared)
        return Alignment(shared, self.new, torch.arange(d_model, device="cpu"))


def align(model: Any, grown: Any, provenance: Provenance) -> Alignment:
    """Match the components of a model with the components of its grown model."""
    old, new = resolve_sites(model, "all"), resolve_sites(grown, "all")
    before = {axis: len(indices.new_of) for axis, indices in provenance.axes.items()}
    reasons = [
        *_size_reasons("the original", model, old, before),
        *_size_reasons("the grown model", grown, new, provenance.sizes),
    ]
    reasons = reasons or list(_place_reasons(provenance))
    if len(reasons) > _SHOWN + 1:
        reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more reasons"]
    ComparisonError.raise_if(reasons, "this provenance does not fit these models")
    grown_sites = {(sites.layer, sites.kind): sites for sites in new}
    shared, places = [], {}
    for sites in old:
        layer = provenance.layers.new_of[sites.layer]
        indices = provenance.axes[Axis(_LABELS[sites.kind], sites.layer)].new_of
        places[layer, sites.kind] = set(indices)
        second = _select(grown_sites[layer, sites.kind], indices)
        shared.append(SharedComponents(sites, second))
    others = [
        (sites, [i for i in range(len(sites.names)) if i not in places.get(key, ())])
        for key, sites in grown_sites.items()
    ]
    coordinates = torch.as_tensor(provenance.coordinates, dtype=torch.long, device="cpu")
    return Alignment(
        tuple(shared),
        tuple(_select(sites, indices) for sites, indices in others if indices),
        coordinates,
    )


def _select(sites: LayerSites, indices: Sequence[int]) -> LayerSites:
    """Return a subset of a layer's heads or neurons."""
    index = torch.tensor(indices, device="cpu")
    names = tuple(sites.names[i] for i in indices)
    return LayerSites(sites.layer, sites.kind, names, index)


def _size_reasons(
    label: str, model: Any, every: Sequence[LayerSites], sizes: Mapping[Axis, int]
) -> Iterator[str]:
    """Yield a message for each axis whose size differs between the model and the provenance."""
    got = {Axis(_LABELS[sites.kind], sites.layer): len(sites.names) for sites in every}
    got[Axis("d_model")] = model.cfg.d_model
    expected = {axis: size for axis, size in sizes.items() if axis.label in _AXES}
    for axis in {**got, **expected}:
        if (size := got.get(axis, 0)) != (wanted := expected.get(axis, 0)):
            yield f"{label} has size {size} along {axis}; the provenance has size {wanted}"


def _place_reasons(provenance: Provenance) -> Iterator[str]:
    """Yield a message for each axis whose new indices are repeated or out of range."""
    layers = provenance.layers
    maps = [("the layers", layers)]
    if set(layers.new_of) <= set(range(layers.size)):
        maps += [
            (f"the indices along {axis}", replace(indices, size=provenance.sizes[axis_in_grown]))
            for axis, indices in provenance.axes.items()
            if axis.label in _AXES and (axis_in_grown := provenance.axis(axis)) in provenance.sizes
        ]
    for what, indices in maps:
        places = set(indices.new_of)
        if len(places) < len(indices.new_of) or not places <= set(range(indices.size)):
            yield f"{what} are not distinct integers from 0 to {indices.size - 1}"
