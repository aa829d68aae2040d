"""Compute float32 matrix products in full precision, regardless of the user's settings.

With `torch.set_float32_matmul_precision("high")`, GPUs round the factors of a float32 matrix
product to TF32's 10 bits. A model's outputs for the same prompt then differ by about 1e-3 between
batch sizes, instead of 1e-6 in full precision. Code that compares outputs within a tolerance
therefore uses `full_precision`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_LOWER = {"high": "tf32", "medium": "bf16", "tf32": "tf32", "bf16": "bf16"}
_lock = Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[bool]:
    """Context manager that computes float32 products in full precision, then restores the setting.

    The setting applies to the whole process, so other threads also compute in full precision.

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
        with _lock:  # the last thread to leave the `with` restores the setting
            _inside -= 1
            if not _inside and _restore is not None:
                _restore()
                _restore = None


def matmul_precision() -> str:
    """Return the lowest precision set for float32 matrix products: "ieee", "tf32" or "bf16"."""
    set_to = [backend.fp32_precision for backend in _backends()] or [
        torch.get_float32_matmul_precision()
    ]
    return min(
        (_LOWER.get(setting, "ieee") for setting in set_to), key=("bf16", "tf32", "ieee").index
    )


def _backends() -> list[Any]:
    """Return the torch backends that have their own precision setting (none before torch 2.9)."""
    every = (torch.backends.cuda, torch.backends.mkldnn)
    settings = [getattr(backend, "matmul", None) for backend in every]
    return [setting for setting in settings if hasattr(setting, "fp32_precision")]


def _set_products(precision: str) -> Callable[[], None]:
    """Set the precision of float32 products; return a function that restores the old settings."""
    backends: list[Any] = _backends()
    before = [backend.fp32_precision for backend in backends]
    # torch uses the parent's setting for a backend that has none of its own.
    above = [
        getattr(backend, "fp32_precision", None)
        for backend in (torch.backends.cudnn, torch.backends.mkldnn)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates this older setting
        try:
            whole = torch.get_float32_matmul_precision()
        except RuntimeError:  # the user has set only the newer settings
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
