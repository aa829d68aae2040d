"""Tensors that share memory, written once and read back sharing it.

A bridge of a model with joint attention has q, k and v as views of one weight; training one trains
the other. Every piece of memory is written once, flat, under the name of the first tensor in it,
and of each tensor its placement: (that name, offset, shape, stride, dtype). Strides and offsets
come back too, since a matrix product rounds by how its factors lie in memory.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Placement", "pack", "unpack"]

Placement = list[Any]  # as JSON has it


def pack(named: dict[str, Tensor]) -> tuple[dict[str, Placement], dict[str, Tensor]]:
    """Return the placement of each tensor, and the flat tensors to write.

    Raises:
        ValueError: tensors of different types share memory.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in named.items():
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    placements, flat = {}, {}
    for name, tensor in named.items():
        memory = tensor.untyped_storage()
        first = sharing[memory._cdata][0]
        if tensor.dtype != named[first].dtype:
            raise ValueError(f"{name} shares memory with {first}, which is of another type")
        alone = len(sharing[memory._cdata]) == 1
        if alone and memory.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        if name == first:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat[name] = empty.set_(tensor.untyped_storage())
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = list(tensor.shape), list(tensor.stride())
        placements[name] = [first, int(tensor.storage_offset()), *layout, dtype]
    return placements, flat


def unpack(placements: dict[str, Placement], flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the tensors that were packed.

    Raises:
        ValueError: a flat tensor is missing, not known, too short or of another type.
    """
    flat = {name: tensor.clone().flatten() for name, tensor in flat.items()}
    found = {}
    for name, (first, offset, shape, stride, dtype) in placements.items():
        if first not in flat:
            raise ValueError(f"{first} is missing")
        if str(flat[first].dtype) != f"torch.{dtype}":
            raise ValueError(f"{first} is {flat[first].dtype}; expected {dtype}")
        reach = 1  # of the entries along the axes before, which no later axis may step within
        for step, size in sorted(zip(stride, shape, strict=False)):
            if size > 1 and step < reach:
                raise ValueError(f"entries of {name} would lie in one place")
            reach = max(reach, step * size)
        try:
            found[name] = flat[first].as_strided(shape, stride, offset)
        except RuntimeError as error:
            raise ValueError(f"{first} does not hold {name}: {error}") from error
    unknown = sorted(flat.keys() - {placement[0] for placement in placements.values()})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} not known")
    return found
