"""Which component of one model is which of the other: provenance as indices.

Components are heads and neurons by name, so that either layout will do. An old component is where
the provenance says that it went; whatever else the grown model has is new. A provenance that does
not fit the two models is refused whole: with one name off, everything after it would be compared
with its neighbour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.errors import ComparisonError, UnknownHeadError
from attn_only_lens.expansion import Provenance
from attn_only_lens.heads import HeadName
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.runs.sites import ALL_MEMBERS, LayerSites, all_heads, resolve_sites

__all__ = ["Aligned", "Alignment", "align"]

_PROBLEM = "this provenance does not fit these models"
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Aligned:
    """Components of one kind in one layer, as they are in two models.

    Attributes:
        first: in the first model.
        second: the same components in the second one, in the same order.
    """

    first: LayerSites
    second: LayerSites

    @property
    def kind(self) -> HeadKind:
        """Attention heads, or neurons."""
        return self.first.kind


@dataclass(frozen=True, eq=False)
class Alignment:
    """Two models, component by component.

    Attributes:
        pairs: the components that both have, by layer of the first; attention before neurons.
        new: those that the second alone has.
        coordinates: where each coordinate of the first one's stream is in the second one's.
    """

    pairs: tuple[Aligned, ...]
    new: tuple[LayerSites, ...]
    coordinates: Int[Tensor, "d_model"]

    @property
    def names(self) -> dict[str, str]:
        """Names in the first model, by names in the second."""
        return {
            new: old
            for pair in self.pairs
            for old, new in zip(pair.first.names, pair.second.names, strict=True)
        }

    def of_second(self, d_model: int) -> "Alignment":
        """The second model with itself, or another of its shape, of the same components."""
        pairs = tuple(replace(pair, first=pair.second) for pair in self.pairs)
        return Alignment(pairs, self.new, torch.arange(d_model, device="cpu"))


def align(model: Any, grown: Any, provenance: Provenance) -> Alignment:
    """Match the components of a model with those of one grown from it.

    Args:
        model: the original, with neuron-heads.
        grown: the grown one, with neuron-heads.
        provenance: of the grown one.

    Raises:
        ComparisonError: with every reason why it is not the provenance of these two models.
    """
    old, new = (resolve_sites(each, all_heads()) for each in (model, grown))
    there = {name: group for group in new for name in group.names}
    reasons: list[str] = []
    taken: dict[str, str] = {}
    pairs = []
    for group in old:
        went = [_went(provenance, name, there, reasons) for name in group.names]
        for name, to in zip(group.names, went, strict=True):
            if to is not None and to in taken:
                reasons.append(f"{taken[to]} and {name} both went to {to}")
            elif to is not None:
                taken[to] = name
        if not reasons:
            pairs.append(Aligned(group, _named([str(to) for to in went], group.kind)))
    gained = tuple(
        _named(names, group.kind)
        for group in new
        if (names := [name for name in group.names if name not in taken])
    )
    said = {*provenance.new_heads, *provenance.new_neurons}
    odd = sorted(said ^ {name for group in gained for name in group.names})
    if odd and not reasons:
        reasons.append(
            f"{len(odd)} heads and neurons, such as {odd[0]}, are new in the provenance and not in "
            "the models, or the other way round"
        )
    coordinates = _coordinates(model, grown, provenance, reasons)
    if len(reasons) > _SHOWN + 1:
        reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more"]
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)
    return Alignment(tuple(pairs), gained, coordinates)


def _went(
    provenance: Provenance, name: str, there: dict[str, LayerSites], reasons: list[str]
) -> str | None:
    """Where a component went, or a reason why it went nowhere."""
    try:
        to = provenance[name]
    except UnknownHeadError as error:
        reasons.append(f"the original has {name}, and its provenance has not: {error}")
        return None
    if to not in there:
        reasons.append(f"{name} went to {to}, which the grown model has not")
        return None
    return to


def _named(names: Sequence[str], kind: HeadKind) -> LayerSites:
    parsed = [HeadName.parse(name) for name in names]
    index = torch.tensor([name.index for name in parsed], device="cpu")
    return LayerSites(
        parsed[0].layer, kind, tuple(names), index, torch.full_like(index, ALL_MEMBERS)
    )


def _coordinates(
    model: Any, grown: Any, provenance: Provenance, reasons: list[str]
) -> Int[Tensor, "d_model"]:
    found = torch.as_tensor(provenance.coordinates, dtype=torch.long, device="cpu")
    narrow, wide = model.cfg.d_model, grown.cfg.d_model
    if found.shape != (narrow,):
        reasons.append(f"it has {list(found.shape)} coordinates; the original has {narrow}")
    elif len(found.unique()) < narrow or found.min() < 0 or found.max() >= wide:
        reasons.append(f"its coordinates are not {narrow} different ones from 0 to {wide - 1}")
    return found
