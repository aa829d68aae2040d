"""Helpers for device-independent code: float64, random numbers, copies to the CPU, free memory.

MPS devices have no float64. The same seed gives different random numbers on different devices.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor


def to_float64_device(x: Tensor) -> Tensor:
    """Move a tensor to the CPU if the tensor's device does not support float64.

    Example:
        >>> to_float64_device(torch.ones(2)).double().device
        device(type='cpu')
    """
    try:
        torch.ones((), device=x.device).double()
    except (RuntimeError, TypeError):  # MPS raises TypeError
        return x.cpu()
    return x


def added(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors on any devices, on the device of the first."""
    total, *others = parts
    for part in others:
        total = total + part.to(total.device)
    return total


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy small tensors to the CPU, with one transfer per dtype.

    Example:
        >>> [x.shape for x in on_cpu([torch.ones(2, 3), torch.ones(5)])]
        [torch.Size([2, 3]), torch.Size([5])]
    """
    copies, groups = list(tensors), dict[tuple[torch.dtype, str], list[int]]()
    for i, x in enumerate(tensors):
        groups.setdefault((x.dtype, x.device.type), []).append(i)
    for rows in groups.values():
        device = tensors[rows[0]].device
        flat = torch.cat([tensors[i].detach().flatten().to(device) for i in rows]).cpu()
        for i, part in zip(rows, flat.split([tensors[i].numel() for i in rows]), strict=True):
            copies[i] = part.view(tensors[i].shape)
    return copies


def to_devices(arrays: Sequence[np.ndarray], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy arrays to a device each, with one transfer per device and dtype.

    Example:
        >>> cpu = torch.device("cpu")
        >>> to_devices([np.array([[1, 2]]), np.array([3])], [cpu, cpu])
        [tensor([[1, 2]]), tensor([3])]
    """
    moved: list[Any] = [None] * len(arrays)
    keys = [(device, array.dtype) for array, device in zip(arrays, devices, strict=True)]
    for key in dict.fromkeys(keys):
        numbers = [i for i, other in enumerate(keys) if other == key]
        flat = np.concatenate([arrays[i].ravel() for i in numbers])
        parts = torch.from_numpy(flat).to(key[0]).split([arrays[i].size for i in numbers])
        for i, part in zip(numbers, parts, strict=True):
            moved[i] = part.view(arrays[i].shape)
    return moved


def read_all(numbers: Sequence[Tensor]) -> list[Any]:
    """Convert scalar tensors to Python numbers, with one device-to-CPU transfer per dtype."""
    return [x.item() for x in on_cpu(numbers)]


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device.

    On an accelerator, this is the free memory plus the memory that torch reserves but does not use.
    Free gaps in partly used memory segments are not counted, because a large tensor does not fit
    into them. On a device that shares the machine's memory (MPS), this is the machine's free
    memory.

    Example:
        >>> free_bytes(torch.device("cpu")) > 0
        True
    """
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return int(psutil.virtual_memory().available)
    free, _ = module.mem_get_info(device)
    stats = module.memory_stats(device)
    in_use = ("active_bytes", "inactive_split_bytes")
    held, *used = (stats.get(f"{name}.all.current", 0) for name in ("reserved_bytes", *in_use))
    return int(free + held - sum(used))


def float32_if_half(x: Tensor) -> Tensor:
    """Convert a half-precision tensor to float32; return any other tensor unchanged.

    Example:
        >>> float32_if_half(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normal_numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Draw standard normal float64 numbers on the CPU, so that all devices get the same numbers.

    Example:
        >>> torch.equal(normal_numbers((2, 3)), normal_numbers((2, 3)))
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@contextmanager
def keep_random_state(device: torch.device) -> Iterator[None]:
    """Context manager that restores the random generator states of the CPU and a device.

    Example:
        >>> with keep_random_state(torch.device("cpu")):
        ...     first = torch.rand(3)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    which = () if device.type == "mps" else (device,)  # torch.mps functions take no device
    states = torch.get_rng_state(), None if module is None else module.get_rng_state(*which)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1], *which)
