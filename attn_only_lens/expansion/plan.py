"""What an expansion declares, and the one mechanism that carries it out.

Growing axes by new indices makes new entries in every tensor with such an axis. An expansion says
which axes grow, in which tensors the new entries are zero (its theorem's constraint; in all others
they are free), which old entries are multiplied, and which constants change. Inserting layers makes
new tensors; the expansion says which of them are zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import Tensor

from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion.initialise import Initialiser, New, drawn
from attn_only_lens.expansion.placement import Moved, Place, Zeros
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import Axis, Weights, axes_of, block_name, in_layer, tail

__all__ = ["Plan", "carry_out", "grown_by", "reasons_against_bytes"]


@dataclass(frozen=True)
class Plan:
    """An expansion of given weights, as data. Tensors and hook points go by their old names.

    Attributes:
        axes: where the old indices of axes go, at most one axis of each tensor; axes that are not
            named stay as they are.
        zero: the tensors whose new entries are zero.
        only: for tensors of which some heads get free new entries and the others zeros, the
            former's indices along the first axis.
        scaled: what the old entries of tensors are multiplied by.
        rescaled: what activations are multiplied by in consequence.
        constants: those that change.
        layers: where layers go; None where they stay.
        like: for each new layer the old one it has its shapes from.
        zero_in_new: the tails of tensors that are zero in new layers.
    """

    axes: Mapping[Axis, Place] = field(default_factory=dict)
    zero: frozenset[str] = frozenset()
    only: Mapping[str, frozenset[int]] = field(default_factory=dict)
    scaled: Mapping[str, float] = field(default_factory=dict)
    rescaled: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    layers: Place | None = None
    like: Mapping[int, int] = field(default_factory=dict)
    zero_in_new: frozenset[str] = frozenset()


def grown_by(n: int, size: int) -> Place:
    """n new indices after the old ones."""
    return Place(tuple(range(size)), size + n)


def reasons_against_bytes(needed: int) -> list[str]:
    """Why tensors of so many bytes cannot be made: they fit into no memory of this machine."""
    free = [psutil.virtual_memory().available]
    if torch.cuda.is_available():
        free += [torch.cuda.mem_get_info(at)[0] for at in range(torch.cuda.device_count())]
    if needed <= max(free):
        return []
    return [f"the grown model takes {needed:,} bytes, and {max(free):,} are free; grow it by less"]


def _bytes(weights: Weights, plan: Plan) -> int:
    """What the tensors take that a plan makes; of a sketch, all tensors of the grown model."""
    found = 0
    for name, old in weights.tensors.items():
        axes = axes_of(name, weights.constants)
        sizes = [
            plan.axes[axis].size if axis in plan.axes else size
            for axis, size in zip(axes, old.shape, strict=True)
        ]
        made = old.is_meta or sizes != list(old.shape)
        copies = made + sum(like == in_layer(name) for like in plan.like.values())
        tied = weights.constants.tied and name == "unembed.W_U"  # the embedding once more
        found += 0 if tied else copies * math.prod(sizes) * old.element_size()
    return found


def carry_out(
    weights: Weights, plan: Plan, init: Initialiser, seed: int
) -> tuple[Weights, Provenance]:
    """Weights with everything of the plan done, and where everything went.

    Tensors that do not change are those given, not copies.

    Raises:
        GrowthError: they would not fit into memory.
    """
    if reasons := reasons_against_bytes(_bytes(weights, plan)):
        raise GrowthError(reasons)
    constants = replace(weights.constants, **plan.constants)
    provenance = Provenance(
        layers=plan.layers or Place.same(weights.constants.n_layers),
        axes={axis: plan.axes.get(axis, Place.same(size)) for axis, size in weights.sizes.items()},
        sizes={},
        constants=weights.constants,
        like=plan.like,
        scales=plan.scaled,
        rescaled=plan.rescaled,
    )
    grown: dict[str, Tensor] = {}
    zeros: list[Zeros] = []
    for name, old in weights.tensors.items():
        moved = provenance.moved(name)
        tensor = old * moved.scale if moved.scale != 1.0 else old
        new = _new_entries(name, moved, tensor, weights, constants)
        if new is not None and new.dim is not None:
            is_zero = name in plan.zero
            entries = tensor.new_zeros(new.shape) if is_zero else drawn(init, new, seed)
            if is_zero:
                zeros.append(_all_of(new, moved.places[new.dim].new))
            elif name in plan.only:
                others = set(range(new.shape[0])) - plan.only[name]
                entries[sorted(others)] = 0.0
            tensor = moved.places[new.dim].filled(tensor, entries, new.dim)
        grown[moved.name] = tensor
    for layer, like in plan.like.items():
        for name in [each for each in weights.tensors if in_layer(each) == like]:
            old = weights.tensors[name]
            new = New(block_name(layer, tail(name)), None, None, tuple(old.shape), old, constants)
            is_zero = tail(name) in plan.zero_in_new
            grown[new.name] = torch.zeros_like(old) if is_zero else drawn(init, new, seed)
            zeros += [_all_of(new)] if is_zero else []
    result = Weights(grown, constants)
    return result, replace(provenance, sizes=result.sizes, zeros=tuple(zeros))


def _new_entries(
    name: str, moved: Moved, tensor: Tensor, weights: Weights, constants: Any
) -> New | None:
    """What is to be made along the axis of a tensor that grows; None where none does."""
    growing = [dim for dim, place in enumerate(moved.places) if place.new]
    if not growing:
        return None
    (dim,) = growing
    shape = list(tensor.shape)
    shape[dim] = len(moved.places[dim].new)
    axis = axes_of(name, weights.constants)[dim]
    return New(moved.name, axis, dim, tuple(shape), tensor, constants)


def _all_of(new: New, along: tuple[int, ...] = ()) -> Zeros:
    """All of these entries; `along` are their indices along the axis that grows."""
    where = [tuple(range(size)) for size in new.shape]
    if new.dim is not None:
        where[new.dim] = along
    return Zeros(new.name, tuple(where))
