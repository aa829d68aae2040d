"""Matching the components of a model with those of one grown from it, by provenance.

Components are heads and neurons of source layers, so that the kind of model does not matter. The
provenance says where each component of the original went; all others of the grown model are new. A
provenance that does not fit both models is refused: with one index off, every later component would
be compared with its neighbour.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.sites import ALL_MEMBERS, LayerSites, all_heads, resolve_sites
from attn_only_lens.errors import ComparisonError
from attn_only_lens.expansion import Axis, Provenance
from attn_only_lens.heads.host import HeadKind

_SHOWN = 5
_LABELS: dict[HeadKind, str] = {"attention": "head", "neuron": "d_mlp"}
_AXES = ("head", "d_mlp", "d_model")


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
    before = {axis: len(indices.new_of) for axis, indices in provenance.axes.items()}
    reasons = [
        *_size_reasons("the original", model, old, before),
        *_size_reasons("the grown model", grown, new, provenance.sizes),
    ]
    reasons = reasons or list(_place_reasons(provenance))
    if len(reasons) > _SHOWN + 1:
        reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more"]
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
    """Return some of all heads or neurons of a layer."""
    index = torch.tensor(indices, device="cpu")
    names = tuple(sites.names[i] for i in indices)
    return LayerSites(sites.layer, sites.kind, names, index, torch.full_like(index, ALL_MEMBERS))


def _size_reasons(
    label: str, model: Any, every: Sequence[LayerSites], sizes: Mapping[Axis, int]
) -> Iterator[str]:
    """Yield the axes along which a model has another size than the provenance says."""
    got = {Axis(_LABELS[sites.kind], sites.layer): len(sites.names) for sites in every}
    got[Axis("d_model")] = model.cfg.d_model
    expected = {axis: size for axis, size in sizes.items() if axis.label in _AXES}
    for axis in {**got, **expected}:
        if (size := got.get(axis, 0)) != (other := expected.get(axis, 0)):
            yield f"{label} has size {size} along {axis}; the provenance says {other}"


def _place_reasons(provenance: Provenance) -> Iterator[str]:
    """Yield the axes whose new indices are not different ones of the grown model."""
    layers = provenance.layers
    maps = [("its layers", layers)]
    if set(layers.new_of) <= set(range(layers.size)):
        maps += [
            (f"its indices along {axis}", replace(indices, size=provenance.sizes[axis_in_grown]))
            for axis, indices in provenance.axes.items()
            if axis.label in _AXES and (axis_in_grown := provenance.axis(axis)) in provenance.sizes
        ]
    for what, indices in maps:
        places = set(indices.new_of)
        if len(places) < len(indices.new_of) or not places <= set(range(indices.size)):
            yield f"{what} are not different numbers from 0 to {indices.size - 1}"
