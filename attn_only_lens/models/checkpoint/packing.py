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
    for names in sharing.values():
        first, tensors = names[0], {name: named[name].detach() for name in names}
        if len(names) == 1 and _end(tensors[first]) != tensors[first].numel():  # part of something
            tensors[first] = tensors[first].clone(memory_format=torch.contiguous_format)
        flat[first] = tensors[first].as_strided((max(map(_end, tensors.values())),), (1,), 0)
        for name, tensor in tensors.items():
            if tensor.dtype != flat[first].dtype:
                raise CheckpointError(
                    f"{name} shares memory with {first}, which is of another type: copy one of them"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout = list(tensor.shape), list(tensor.stride())
            placements[name] = [first, int(tensor.storage_offset()), *layout, dtype]
    return {name: placements[name] for name in named}, flat


def _end(tensor: Tensor) -> int:
    """The number of entries of its memory up to the last that a tensor has."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)


def unpack(placements: dict[str, Placement], flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the tensors that were packed.

    Raises:
        CheckpointError: a flat tensor is missing, not known, too short or of another type.
    """
    flat = {name: tensor.clone().flatten() for name, tensor in flat.items()}
    firsts = {placement[0] for placement in placements.values()}
    wrong = [f"{name} is missing" for name in sorted(firsts - flat.keys())]
    wrong += [f"{name} is not known" for name in sorted(flat.keys() - firsts)]
    tensors = {}
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
            tensors[name] = flat[first].as_strided(shape, stride, offset)
        except RuntimeError as error:
            wrong.append(f"{first} does not hold {name}: {error}")
    if wrong:
        raise CheckpointError(f"the weights do not fit their manifest: {'; '.join(wrong[:5])}")
    return tensors
