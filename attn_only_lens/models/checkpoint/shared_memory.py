"""Tensors that share memory, written once and read back sharing it.

A bridge of a model with joint attention has q, k and v as views of one weight; training one trains
the other. Of tensors with a common storage the largest is written, and of each its placement there:
(name of the largest, offset, shape, stride, dtype). Strides and alignment come back too, since a
matrix product rounds by how its factors lie in memory.
"""

from typing import Any

from torch import Tensor

__all__ = ["Placement", "place", "placements_of", "tensors_to_write"]

Placement = list[Any]  # as JSON has it: [name, offset, shape, stride, dtype]


def placements_of(named: dict[str, Tensor]) -> dict[str, Placement]:
    """Find the placement of each tensor.

    Raises:
        ValueError: one shares the memory of others and is not part of the largest of them.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in named.items():
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    found = {}
    for names in sharing.values():
        largest = max(names, key=lambda name: named[name].numel())
        if len(names) == 1:
            found[largest] = _placement(largest, 0, _as_restored(named[largest]))
            continue
        whole = named[largest]
        for name in names:
            tensor = named[name]
            offset = int(tensor.storage_offset()) - int(whole.storage_offset())
            reach = offset + sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            inside = offset >= 0 and reach < whole.numel() and whole.is_contiguous()
            if not inside or tensor.dtype != whole.dtype:
                raise ValueError(f"{name} shares memory with {largest} and is not part of it")
            found[name] = _placement(largest, offset, tensor)
    return {name: found[name] for name in named}


def _placement(largest: str, offset: int, tensor: Tensor) -> Placement:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [largest, offset, list(tensor.shape), list(tensor.stride()), dtype]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _as_restored(tensor: Tensor) -> Tensor:
    """The tensor with the strides it will come back with: its own if it fills its storage."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def tensors_to_write(
    named: dict[str, Tensor], placements: dict[str, Placement]
) -> dict[str, Tensor]:
    """Select the tensors to write; one that is dense and not contiguous is flat, as it lies."""
    found = {}
    for name, (largest, *_) in placements.items():
        tensor = named[name].detach()
        if largest == name:
            if not tensor.is_contiguous() and _is_dense(tensor):  # a transpose, say
                tensor = tensor.as_strided((tensor.numel(),), (1,), 0)
            found[name] = tensor.contiguous()
    return found


def place(written: dict[str, Tensor], placements: dict[str, Placement]) -> dict[str, Tensor]:
    """Restore the tensors from those that were written.

    Raises:
        ValueError: one that was written is missing, is too short or of another type.
    """
    flat = {name: tensor.contiguous().clone().flatten() for name, tensor in written.items()}
    found = {}
    for name, (largest, offset, shape, stride, dtype) in placements.items():
        if largest not in flat:
            raise ValueError(f"{largest} is missing")
        if str(flat[largest].dtype) != f"torch.{dtype}":
            raise ValueError(f"{largest} is {flat[largest].dtype}; expected {dtype}")
        reach = 1  # of the entries along the axes before, which no later axis may step within
        for step, size in sorted(zip(stride, shape, strict=False)):
            if size > 1 and step < reach:
                raise ValueError(f"entries of {name} would lie in one place")
            reach = max(reach, step * size)
        try:
            found[name] = flat[largest].as_strided(shape, stride, offset)
        except RuntimeError as error:
            raise ValueError(f"{largest} does not hold {name}: {error}") from error
    unknown = sorted(set(written) - {placement[0] for placement in placements.values()})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} not known")
    return found
