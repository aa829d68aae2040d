"""Numbers of NumPy, torch and pandas as Python's own, wherever a caller may give them."""

from typing import Any

__all__ = ["as_plain", "is_count"]


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
