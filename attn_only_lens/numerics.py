"""Plain numbers from users, and arithmetic that does not depend on the device or its settings.

Some devices have no float64 (MPS). A generator of random numbers belongs to one device and draws
other numbers than another's. With `torch.set_float32_matmul_precision("high")`, GPUs round the
factors of a float32 matrix product to TF32's 10 bits: one model, run twice on batches of different
size, then differs by 1e-3 where rounding alone makes 1e-6. Whatever is compared with a tolerance is
computed with `full_precision`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil
import torch
from torch import Tensor


def as_plain(value: Any) -> Any:
    """Return numbers of NumPy, torch or pandas as Python's own; other values as they are.

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
    """Return whether a value is a whole number from `least` to `most`; True and 1.0 are not."""
    value = as_plain(value)
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float = -float("inf"), most: float = float("inf")) -> bool:
    """Return True for a finite Python number (no bool) from `least` to `most`."""
    return type(value) in (int, float) and least <= value <= most and abs(value) < float("inf")


def to_float64_device(x: Tensor) -> Tensor:
    """Return a tensor on a device that has float64: its own, or the CPU.

    Example:
        >>> to_float64_device(torch.ones(2)).double().device
        device(type='cpu')
    """
    try:
        torch.ones((), device=x.device).double()
    except (RuntimeError, TypeError):  # MPS raises the one, others the other
        return x.cpu()
    return x


def free_bytes(device: torch.device) -> int:
    """Return how much more memory tensors can take on a device.

    Of an accelerator: what it has left, and what torch's allocator holds of it without a tensor in
    it, but for the rest of blocks that are partly in use, which no large tensor fits into. Of a
    device without memory of its own (MPS): the machine's.

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
    """Return a tensor in float32 if it is in half precision, else as it is.

    Example:
        >>> float32_if_half(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Return the rank correlation, equals sharing their mean rank; nan unless both have ranks.

    Example:
        >>> spearman([1.0, 2.0, 2.0, 9.0], [0.1, 0.5, 0.5, 0.7])
        1.0
    """
    ranks = [pd.Series(np.asarray(each)).rank().to_numpy() for each in (first, second)]
    if any(len(each) < 2 or np.ptp(each) == 0 for each in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def normal_numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Draw normal numbers in float64 on the CPU: the same for every device.

    Example:
        >>> torch.equal(normal_numbers((2, 3)), normal_numbers((2, 3)))
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@contextmanager
def keep_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of the CPU and of a device afterwards.

    Example:
        >>> with keep_random_state(torch.device("cpu")):
        ...     first = torch.rand(3)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    which = () if device.type == "mps" else (device,)  # MPS has one state, and takes no device
    states = torch.get_rng_state(), None if module is None else module.get_rng_state(*which)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1], *which)


_LOWER = {"high": "tf32", "medium": "bf16", "tf32": "tf32", "bf16": "bf16"}
_lock = Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[bool]:
    """Compute float32 matrix products in full float32; restore the user's setting afterwards.

    The setting is global to the process: other threads compute in full meanwhile, too.

    Yields:
        Whether the user's setting is lower.

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
            _restore = _set_highest()
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
    """Return the lowest precision of float32 matrix products: "ieee", "tf32" or "bf16"."""
    set_to = [each.fp32_precision for each in _backends()] or [torch.get_float32_matmul_precision()]
    return min((_LOWER.get(each, "ieee") for each in set_to), key=("bf16", "tf32", "ieee").index)


def _backends() -> list[Any]:
    """Return the backends that have a setting of their own; none before torch 2.9."""
    every = (torch.backends.cuda, torch.backends.mkldnn)
    found = [getattr(backend, "matmul", None) for backend in every]
    return [each for each in found if hasattr(each, "fp32_precision")]


def _set_highest() -> Callable[[], None]:
    """Set the highest precision, and return a function that restores the user's."""
    backends: list[Any] = _backends()
    own = [each.fp32_precision for each in backends]
    # A backend that has no setting takes that of the device's library, or of all of them.
    above = [
        getattr(each, "fp32_precision", None)
        for each in (torch.backends.cudnn, torch.backends.mkldnn)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its older settings
        try:
            whole = torch.get_float32_matmul_precision()
        except RuntimeError:  # the newer settings are in use
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
