"""What one module leaves for a later one of the same forward pass.

Several threads may run one model at the same time, and a hook may run it again in the middle of a
pass, so nothing of a pass is kept on the modules themselves.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

__all__ = ["Passing"]

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Passing(threading.local):
    """What the forward pass that this thread is in has left, by the key of who will take it.

    Each thread sees its own. A copy, or a pickle, is empty, as is that of a model which holds it.

    Example:
        >>> passing = Passing()
        >>> passing.left["u"] = 5
        >>> with passing.of_another_pass():
        ...     "u" in passing.left
        False
        >>> passing.left.pop("u")
        5
    """

    def __init__(self) -> None:
        self.left: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @contextmanager
    def of_another_pass(self, left: Mapping[Any, Any] = _NOTHING) -> Iterator[None]:
        """Begin a pass with `left`, and go back to what there was, however the pass ends."""
        outer, self.left = self.left, dict(left)
        try:
            yield
        finally:
            self.left = outer
