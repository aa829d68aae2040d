"""Tensors that share memory, written once and read back sharing it.

A bridge of a model with joint attention has q, k and v as views of one weight; training one trains
the other. What is written of tensors with a common storage is the largest, and of each its place in
that: (root, offset, shape, stride, dtype). Strides and alignment come back too, since a product of
matrices rounds by how they lie in memory.
"""

from typing import Any

from torch import Tensor

__all__ = ["View", "roots_of", "viewed", "views_of"]

View = list[Any]  # as JSON has it: [root, offset, shape, stride, dtype]


def views_of(named: dict[str, Tensor]) -> dict[str, View]:
    """Where each tensor lies.

    Raises:
        ValueError: one shares the memory of others and is not part of the largest of them.
    """
    together: dict[int, list[str]] = {}
    for name, tensor in named.items():
        together.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    found = {}
    for names in together.values():
        root = max(names, key=lambda name: named[name].numel())
        if len(names) == 1:
            found[root] = _view(root, 0, _as_written(named[root])[0])
            continue
        whole = named[root]
        for name in names:
            tensor = named[name]
            offset = int(tensor.storage_offset()) - int(whole.storage_offset())
            reach = offset + sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            inside = offset >= 0 and reach < whole.numel() and whole.is_contiguous()
            if not inside or tensor.dtype != whole.dtype:
                raise ValueError(f"{name} shares memory with {root} and is not part of it")
            found[name] = _view(root, offset, tensor)
    return {name: found[name] for name in named}


def _view(root: str, offset: int, tensor: Tensor) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [root, offset, list(tensor.shape), list(tensor.stride()), dtype]


def _as_written(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor as it is to come back, and what is written of it: itself, or flat as it lies."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor, tensor
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor, tensor.as_strided((tensor.numel(),), (1,), 0)  # a transpose, say
    return tensor.contiguous(), tensor.contiguous()


def roots_of(named: dict[str, Tensor], views: dict[str, View]) -> dict[str, Tensor]:
    """What has to be written."""
    return {name: _as_written(named[name])[1] for name, view in views.items() if view[0] == name}


def viewed(roots: dict[str, Tensor], views: dict[str, View]) -> dict[str, Tensor]:
    """The tensors again.

    Raises:
        ValueError: a root is missing, is too short or of another type.
    """
    flat = {name: tensor.contiguous().clone().flatten() for name, tensor in roots.items()}
    found = {}
    for name, (root, offset, shape, stride, dtype) in views.items():
        if root not in flat:
            raise ValueError(f"{root} is missing")
        if str(flat[root].dtype) != f"torch.{dtype}":
            raise ValueError(f"{root} is {flat[root].dtype}; expected {dtype}")
        reach = 1  # of the entries along the axes before, by which no other may step less
        for step, size in sorted(zip(stride, shape, strict=False)):
            if size > 1 and step < reach:
                raise ValueError(f"entries of {name} would lie in one place")
            reach = max(reach, step * size)
        try:
            found[name] = flat[root].as_strided(shape, stride, offset)
        except RuntimeError as error:
            raise ValueError(f"{root} does not hold {name}: {error}") from error
    unknown = sorted(set(roots) - {view[0] for view in views.values()})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} not known")
    return found
