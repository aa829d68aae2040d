"""Tensors that share memory, written once and read back sharing it.

A bridge of a model with joint attention has q, k and v as views of one weight; training one trains
the other. Every piece of memory is written once, flat, under the name of the first tensor in it,
and of each tensor its placement: (that name, offset, shape, stride, dtype). Strides and offsets
come back too, since a matrix product rounds by how its factors lie in memory.
"""

from typing import Any

import torch
from torch import Tensor

from attn_only_lens.errors import CheckpointError

__all__ = ["Placement", "pack", "unpack"]

Placement = list[Any]  # as JSON has it


def pack(named: dict[str, Tensor]) -> tuple[dict[str, Placement], dict[str, Tensor]]:
    """Return the placement of each tensor, and the flat tensors to write.

    Raises:
        CheckpointError: tensors of different types share memory.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in named.items():
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    placements, flat = {}, {}
    for name, tensor in named.items():
        memory = tensor.untyped_storage()
        first = sharing[memory._cdata][0]
        if tensor.dtype != named[first].dtype:
            raise CheckpointError(
                f"{name} shares memory with {first}, which is of another type: copy one of them"
            )
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
        CheckpointError: a flat tensor is missing, not known, too short or of another type.
    """
    flat = {name: tensor.clone().flatten() for name, tensor in flat.items()}
    firsts = {placement[0] for placement in placements.values()}
    wrong = [f"{name} is missing" for name in sorted(firsts - flat.keys())]
    wrong += [f"{name} is not known" for name in sorted(flat.keys() - firsts)]
    found = {}
    for name, (first, offset, shape, stride, dtype) in placements.items():
        if first not in flat:
            continue
        if str(flat[first].dtype) != f"torch.{dtype}":
            wrong.append(f"{first} is {flat[first].dtype}; expected {dtype}")
        reach = 1  # of the entries along the axes before, which no later axis may step within
        for step, size in sorted(zip(stride, shape, strict=False)):
            if size > 1 and step < reach:
                wrong.append(f"entries of {name} would lie in one place")
            reach = max(reach, step * size)
        try:
            found[name] = flat[first].as_strided(shape, stride, offset)
        except RuntimeError as error:
            wrong.append(f"{first} does not hold {name}: {error}")
    if wrong:
        raise CheckpointError(f"the weights do not fit their manifest: {'; '.join(wrong[:5])}")
    return found
