"""Warn about prompts and answers, once per call; the warning shows the user's line of code."""

import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from reprlib import Repr
from typing import Any

from attn_only_lens.errors import InputWarning

_SHOWN = 3  # the maximum number of cases in a warning
_INTERNAL = ("attn_only_lens", "contextlib", "torch", "transformer_lens")
_warned: ContextVar[set[Hashable] | None] = ContextVar("warned", default=None)
_REPR = Repr()
_REPR.maxstring = 60


@contextmanager
def warned_once(*known: Hashable) -> Iterator[None]:
    """Context manager in which each case is warned about once; nested contexts count as one.

    There is no warning about the cases `known`, for example because the result states them.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught, warned_once():
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         warn({"prompt 3": "'kezs' in prompt 3"}, "unknown words")
        >>> len(caught)
        1
    """
    before = _warned.get()
    if before is not None:
        before.update(known)
        yield
        return
    reset = _warned.set(set(known))
    try:
        yield
    finally:
        _warned.reset(reset)


def all_in_this_call(key: Hashable, items: Iterable[Hashable]) -> set[Any]:
    """Return these items, with those that earlier calls in the same `warned_once` gave for `key`.

    Example:
        >>> with warned_once():
        ...     [len(all_in_this_call("wrong", chunk)) for chunk in ([1, 2], [2, 5])]
        [2, 3]
    """
    before = _warned.get()
    if before is None:
        return {*items}
    before.update((key, item) for item in items)
    return {case[1] for case in before if isinstance(case, tuple) and case[0] == key}


def warn(cases: Mapping[Any, str], problem: str) -> None:
    """Issue one `InputWarning` that lists the cases not yet warned about, if any."""
    before = _warned.get()
    if before is not None:
        cases = {case: text for case, text in cases.items() if case not in before}
        before.update(cases)
    if not cases:
        return
    texts = list(cases.values())
    lines = texts[:_SHOWN] + [f"and {len(texts) - _SHOWN} more"] * (len(texts) > _SHOWN)
    message = "".join([f"{problem}:", *(f"\n  - {line}" for line in lines)])
    warnings.warn(message, InputWarning, stacklevel=level_of_caller())


def level_of_caller() -> int:
    """Return the `stacklevel` with which the calling function's warning shows the user's line."""
    level, frame = 0, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        level, frame = level + 1, frame.f_back
    return level


def shortened(text: str) -> str:
    """Return a string in quotes; cut out the middle of a long string."""
    return _REPR.repr(text)


def quoted(texts: Sequence[str]) -> str:
    """Return at most three strings in quotes, separated by commas."""
    return ", ".join(map(repr, texts[:_SHOWN])) + ", …" * (len(texts) > _SHOWN)
