"""Numbers of NumPy, torch and pandas as Python's own, wherever a caller may give them.

What differs between devices, and between settings of a process, and would change results.

Some devices have no float64 (MPS). A generator of random numbers belongs to one device, and draws
other numbers than another's. And where a user has asked for speed,
`torch.set_float32_matmul_precision("high")`, GPUs round what enters a matrix product in float32 to
TF32's 10 bits: one model, run twice on batches of unlike size, then differs by 1e-3 where rounding
alone makes 1e-6. What is held against a tolerance is computed with `full_precision`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_plain",
    "full_precision",
    "is_count",
    "matmul_precision",
    "normal_numbers",
    "same_randomness",
    "where_float64_is",
    "working_precision",
]


def as_plain(value: Any) -> Any:
    """A number, or several in an array, tensor, column, list or tuple, as Python's own.

    Example:
        >>> import numpy as np
        >>> as_plain(np.int64(3)), as_plain(np.arange(2)), as_plain([np.int8(5)]), as_plain("each")
        (3, [0, 1], [5], 'each')
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(as_plain, value))
    return value


def is_count(value: Any, least: int = 0, most: float = float("inf")) -> bool:
    """Whether this is a whole number from `least` to `most`; True and 1.0 are none."""
    value = as_plain(value)
    return type(value) is int and least <= value <= most


def where_float64_is(x: Tensor) -> Tensor:
    """A tensor on a device that has float64: its own, or the CPU.

    Example:
        >>> where_float64_is(torch.ones(2)).double().device
        device(type='cpu')
    """
    try:
        torch.ones((), device=x.device).double()
    except (RuntimeError, TypeError):  # as MPS says it, and others do
        return x.cpu()
    return x


def working_precision(x: Tensor) -> Tensor:
    """Return a tensor as float32 if it is of half precision, and unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normal_numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers in float64 on the CPU: the same every time, whatever device they go to.

    Example:
        >>> torch.equal(normal_numbers((2, 3)), normal_numbers((2, 3)))
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Put the random state of the CPU and of a device back: what is run next draws the same.

    Example:
        >>> with same_randomness(torch.device("cpu")):
        ...     first = torch.rand(3)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    own: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    which = () if device.type == "mps" else (device,)  # which has one state, and takes no device
    states = torch.get_rng_state(), None if own is None else own.get_rng_state(*which)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if own is not None:
            own.set_rng_state(states[1], *which)


_LOWER = {"high": "tf32", "medium": "bf16", "tf32": "tf32", "bf16": "bf16"}
_lock = Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[bool]:
    """Compute matrix products of float32 in float32, and then again as the user has set.

    The setting is the process': what other threads compute meanwhile is precise, too.

    Yields:
        Whether they would have been computed in less.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with full_precision() as raised:
        ...     raised, torch.get_float32_matmul_precision()
        (True, 'highest')
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    global _inside, _restore
    with _lock:
        if not _inside and matmul_precision() != "ieee":
            _restore = _raised()
        _inside += 1
        lowered = _restore is not None
    try:
        yield lowered
    finally:
        with _lock:  # the last to leave, of all threads
            _inside -= 1
            if not _inside and _restore is not None:
                _restore()
                _restore = None


def matmul_precision() -> str:
    """What matrix products of float32 are computed in, at the least: "ieee", "tf32" or "bf16"."""
    set_to = [each.fp32_precision for each in _backends()] or [torch.get_float32_matmul_precision()]
    return min((_LOWER.get(each, "ieee") for each in set_to), key=("bf16", "tf32", "ieee").index)


def _backends() -> list[Any]:
    """What has a setting of its own; nothing, before torch 2.9."""
    every = (torch.backends.cuda, torch.backends.mkldnn)
    found = [getattr(backend, "matmul", None) for backend in every]
    return [each for each in found if hasattr(each, "fp32_precision")]


def _raised() -> Callable[[], None]:
    """Set the highest precision, and give the way back."""
    backends: list[Any] = _backends()
    own = [each.fp32_precision for each in backends]
    # A backend that has no setting takes that of the device's library, or of all of them.
    above = [
        getattr(each, "fp32_precision", None)
        for each in (torch.backends.cudnn, torch.backends.mkldnn)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it thinks of its older settings
        try:
            whole = torch.get_float32_matmul_precision()
        except RuntimeError:  # they have been set by the newer ones
            whole = None
        torch.set_float32_matmul_precision("highest")

    def restore() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if whole is not None:
                torch.set_float32_matmul_precision(whole)
            for each, value, default in zip(backends, own, above, strict=False):
                if each.fp32_precision != value:
                    each.fp32_precision = "none" if value == default else value

    return restore
