"""Warnings about prompts and answers: at the user's line, and each once in a call.

A function of the package may read the same prompts several times, and meet the same answers in one
run of prompts after another. Inside of `warned_once`, which decorates such functions, a warning
about something that was warned about before is left out.
"""

import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from reprlib import Repr
from typing import Any

from attn_only_lens.errors import InputWarning

_SHOWN = 3  # cases in a warning
_INTERNAL = ("attn_only_lens", "contextlib", "torch")
_warned: ContextVar[set[Hashable] | None] = ContextVar("warned", default=None)


@contextmanager
def warned_once() -> Iterator[None]:
    """Leave out warnings about what was warned about before, inside the outermost such context.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught, warned_once():
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         warn({"prompt 3": "'kezs' in prompt 3"}, "unknown words")
        >>> len(caught)
        1
    """
    if _warned.get() is not None:
        yield
        return
    reset = _warned.set(set())
    try:
        yield
    finally:
        _warned.reset(reset)


def warn(cases: Mapping[Any, str], problem: str) -> None:
    """Raise one `InputWarning` of all cases that are new in this call; none if none is.

    Args:
        cases: what to warn about, and how to say it; the first three are named.
        problem: what they have in common, and what to do.
    """
    before = _warned.get()
    if before is not None:
        cases = {case: text for case, text in cases.items() if case not in before}
        before.update(cases)
    if not cases:
        return
    texts = list(cases.values())
    lines = texts[:_SHOWN] + [f"and {len(texts) - _SHOWN} more"] * (len(texts) > _SHOWN)
    message = "".join([f"{problem}:", *(f"\n  - {line}" for line in lines)])
    warnings.warn(message, InputWarning, stacklevel=_users_level())


_REPR = Repr()
_REPR.maxstring = 60


def shortened(text: str) -> str:
    """Return a text in quotes, with its middle left out if it is long."""
    return _REPR.repr(text)


def quoted(texts: Sequence[str]) -> str:
    """Return texts in quotes with commas between, the first three of more."""
    return ", ".join(map(repr, texts[:_SHOWN])) + ", …" * (len(texts) > _SHOWN)


def _users_level() -> int:
    """Return the stack level, seen from the caller, of the code that called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in _INTERNAL
