"""Validate options, and convert NumPy, torch and pandas numbers to Python numbers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER = r"(0|[1-9]\d*)"
NAME = re.compile(rf"L{_NUMBER}(?:([SER])|(?:E{_NUMBER}(?=N))?([HNF]){_NUMBER})")
"""The name of a head, which `heads.names` explains; commands check it before they import torch."""


def as_plain(value: Any) -> Any:
    """Convert NumPy, torch or pandas numbers to Python numbers; return other values unchanged.

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


def a_type(value: object, *, with_module: bool = False) -> str:
    """Return the name of a value's type, with an article: "an int", "a Tensor"."""
    kind = type(value)
    return with_article(f"{kind.__module__}." * with_module + kind.__name__)


def with_article(name: str) -> str:
    """Return a name preceded by "a" or "an", chosen by how the name is pronounced.

    Example:
        >>> with_article("ExposedBridge"), with_article("Linear"), with_article("MLPBridge")
        ('an ExposedBridge', 'a Linear', 'an MLPBridge')
    """
    if name[:2].isupper():  # pronounced letter by letter: "an MLP", "a GPT2Model"
        return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"
    return f"{'an' if name[:1].lower() in {*'aeiou'} else 'a'} {name}"


def is_count(value: Any, least: int = 0, most: float = float("inf")) -> bool:
    """Return whether a value is an int (not a bool or a float) in [`least`, `most`]."""
    value = as_plain(value)
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float = -float("inf"), most: float = float("inf")) -> bool:
    """Return whether a value is a finite int or float (not a bool) in [`least`, `most`]."""
    return type(value) in (int, float) and least <= value <= most and abs(value) < float("inf")


@dataclass(frozen=True)
class Allowed:
    """The values that an option may have.

    Attributes:
        expected: a description of these values for error messages.
        includes: returns whether a value is one of them.

    Example:
        >>> POSITIVE.reasons(k=0, block=3), one_of("q", "k").or_none.reasons(kind=None)
        (['got k=0; expected a whole number, 1 or more'], [])
    """

    expected: str
    includes: Callable[[Any], bool]

    @property
    def or_none(self) -> "Allowed":
        """These values, and None."""
        return Allowed(f"{self.expected}, or None", lambda x: x is None or self.includes(x))

    def reasons(self, **options: Any) -> list[str]:
        """Return an error message for each option with another value."""
        return [
            f"got {name}={value!r}; expected {self.expected}"
            for name, value in options.items()
            if not self.includes(value)
        ]


def whole(least: int, most: float = float("inf")) -> Allowed:
    """Allow the whole numbers from `least` to `most`."""
    numbers = f", {least} or more" if most == float("inf") else f" from {least} to {most}"
    return Allowed(f"a whole number{numbers}", lambda value: is_count(value, least, most))


def one_of(*words: str) -> Allowed:
    """Allow some words."""
    return Allowed(f"one of {', '.join(words)}", lambda value: value in words)


COUNT, POSITIVE = whole(0), whole(1)
SHARE = Allowed(
    "a number above 0, up to 1", lambda value: is_number(as_plain(value), 0, 1) and value != 0
)
RESAMPLES = Allowed(
    "2 or more, or 0 for none", lambda value: is_count(value) and as_plain(value) != 1
)
# Only torch knows whether a device is available; its import takes seconds.
DEVICE = Allowed(
    "cpu, cuda, mps or another of torch's, or cuda:1",
    lambda value: re.fullmatch(r"(?!gpu)[a-z]+(:\d+)?", value) is not None,
)


def halves_reasons(n_prompts: int) -> list[str]:
    """Return a list with an error message if prompts cannot be split in halves, otherwise []."""
    if n_prompts >= 4:
        return []
    return [f"got {n_prompts} prompt pairs; expected 4 or more, to split into halves"]


def ending_reasons(path: Path, *endings: str) -> list[str]:
    """Return a list with an error message if a path has none of these endings, otherwise []."""
    if path.suffix in endings:
        return []
    return [f"got {str(path)!r}; expected a name that ends in {' or '.join(endings)}"]


def file_reasons(path: Path) -> list[str]:
    """Return a list with an error message if there is no such file, otherwise []."""
    if path.is_file():
        return []
    return [f"{path} {'is not a file' if path.exists() else 'is missing'}"]
