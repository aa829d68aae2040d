"""Compute float32 matrix products in full float32, whatever the user's settings are.

With `torch.set_float32_matmul_precision("high")`, GPUs round the factors of a float32 matrix
product to TF32's 10 bits. One model, run twice on batches of different size, then differs by 1e-3,
where rounding in float32 makes 1e-6. So code that compares numbers with a tolerance uses
`full_precision`. `rounded_products` rounds on purpose, to TF32 or to bfloat16's 7 bits, and only
inside the given modules.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

_LOWER = {"high": "tf32", "medium": "bf16", "tf32": "tf32", "bf16": "bf16"}
_lock = Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[bool]:
    """Compute float32 matrix products in full float32; restore the user's setting afterwards.

    The setting is global to the process: other threads compute in full meanwhile, too.

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
    set_to = [backend.fp32_precision for backend in _backends()] or [
        torch.get_float32_matmul_precision()
    ]
    return min(
        (_LOWER.get(setting, "ieee") for setting in set_to), key=("bf16", "tf32", "ieee").index
    )


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
    settings = [getattr(backend, "matmul", None) for backend in every]
    return [setting for setting in settings if hasattr(setting, "fp32_precision")]


def _set_products(precision: str) -> Callable[[], None]:
    """Set the precision of float32 products, and return a function that restores the user's."""
    backends: list[Any] = _backends()
    before = [backend.fp32_precision for backend in backends]
    # A backend that has no setting takes that of the device's library, or of all of them.
    above = [
        getattr(backend, "fp32_precision", None)
        for backend in (torch.backends.cudnn, torch.backends.mkldnn)
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
            for backend, value, default in zip(backends, before, above, strict=False):
                if backend.fp32_precision != value:
                    backend.fp32_precision = "none" if value == default else value

    return restore
