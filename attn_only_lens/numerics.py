"""Plain numbers from users, and arithmetic that does not depend on the device or its settings.

Some devices have no float64 (MPS). A generator of random numbers belongs to one device and draws
other numbers than another's. With `torch.set_float32_matmul_precision("high")`, GPUs round the
factors of a float32 matrix product to TF32's 10 bits: one model, run twice on batches of different
size, then differs by 1e-3 where rounding alone makes 1e-6. Whatever is compared with a tolerance is
computed with `full_precision`. `rounded_products` rounds on purpose, to TF32 or to bfloat16's 7
bits, inside of some modules alone.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor, nn


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
    given = [np.asarray(each, dtype=np.float64) for each in (first, second)]
    if any(len(each) < 2 or np.isnan(each).any() or np.ptp(each) == 0 for each in given):
        return float("nan")
    with ThreadPoolExecutor(2) as threads:  # sorts leave Python's lock
        ranks = list(threads.map(_ranks, given))
    return pearson(*ranks)


def pearson(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Return the correlation of two arrays that vary.

    Example:
        >>> round(pearson(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 9.0])), 9)
        1.0
    """
    one, other = (each - each.mean() for each in (first, second))
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def _ranks(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rank of each number, from 0; equals share their mean rank."""
    # Of ten million numbers torch sorts in half of NumPy's time; new memory costs as much.
    found, places = torch.sort(torch.from_numpy(np.require(x, requirements="W")))
    ranks, order = found.numpy(), places.numpy()
    differs = ranks[1:] != ranks[:-1]
    if differs.all():
        ranks[order] = np.arange(len(x))
    else:
        firsts = np.flatnonzero(np.append(True, differs))
        counts = np.diff(np.append(firsts, len(x)))
        ranks[order] = np.repeat(firsts + (counts - 1) / 2, counts)
    return ranks


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
            _restore = _set_products("highest")
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


PRECISIONS = ("tf32", "bf16")


def precision_reasons(precision: object, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return why products of a model are not rounded to one of `PRECISIONS`; None rounds nothing.

    Example:
        >>> precision_reasons("tf32", torch.float32, torch.device("cpu"))[0][:33]
        "got precision='tf32' on cpu; TF32"
    """
    if precision is None:
        return []
    if precision not in PRECISIONS:
        return [f"got precision={precision!r}; expected one of {PRECISIONS}, or None"]
    reasons = []
    if dtype != torch.float32:
        reasons.append(
            f"got precision={precision!r} with a model in {dtype}; expected one in float32, whose "
            "products it rounds"
        )
    if precision == "tf32" and not (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    ):
        reasons.append(
            f"got precision='tf32' on {device}; TF32 is of NVIDIA's GPUs from Ampere on: expected "
            "'bf16', or None"
        )
    if precision == "bf16" and not torch.amp.is_autocast_available(device.type):
        reasons.append(f"got precision='bf16' on {device}, which torch.autocast does not serve")
    return reasons


@contextmanager
def rounded_products(modules: Iterable[nn.Module], precision: str | None) -> Iterator[None]:
    """Round what enters matrix products inside of modules, and nowhere else; None rounds nothing.

    Outside of them, products are in full precision. What modules add to a stream in float32 leaves
    it in float32.

    Args:
        modules: those to round in, none inside of another.
        precision: one of `PRECISIONS`, for which there are no `precision_reasons`.

    Example:
        >>> layer, x = torch.nn.Linear(3, 2), torch.full((1, 3), 1 / 3)
        >>> with rounded_products([layer], "bf16"):
        ...     rounded = layer(x)
        >>> rounded.dtype, layer(x).dtype
        (torch.bfloat16, torch.float32)
    """
    if precision is None:
        yield
        return
    leave: list[Callable[[], object]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if precision == "tf32":
            leave.append(_set_products("high"))
            return
        context = torch.autocast(next(module.parameters()).device.type, torch.bfloat16)
        context.__enter__()
        leave.append(partial(context.__exit__, None, None, None))

    def left(module: nn.Module, args: Any, output: Any) -> None:
        leave.pop()()

    with full_precision(), ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(left, always_call=True).remove)
        yield


def _backends() -> list[Any]:
    """Return the backends that have a setting of their own; none before torch 2.9."""
    every = (torch.backends.cuda, torch.backends.mkldnn)
    found = [getattr(backend, "matmul", None) for backend in every]
    return [each for each in found if hasattr(each, "fp32_precision")]


def _set_products(precision: str) -> Callable[[], None]:
    """Set the precision of float32 products, and return a function that restores the user's."""
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
        torch.set_float32_matmul_precision(precision)

    def restore() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if whole is not None:
                torch.set_float32_matmul_precision(whole)
            for each, value, default in zip(backends, own, above, strict=False):
                if each.fp32_precision != value:
                    each.fp32_precision = "none" if value == default else value

    return restore
