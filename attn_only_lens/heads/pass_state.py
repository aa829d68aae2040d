"""Values that one module leaves for a later one of the same forward pass.

Several threads may run one model at the same time, and a hook may run it again in the middle of a
pass, so nothing of a pass is kept on the modules themselves.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class PassState(threading.local):
    """Values of the forward pass that this thread is in, by the key of who will take them.

    Each thread sees its own. A copy, or a pickle, is empty, as is that of a model which holds it.

    Example:
        >>> state = PassState()
        >>> state.values["u"] = 5
        >>> with state.new_pass():
        ...     "u" in state.values
        False
        >>> state.values.pop("u")
        5
    """

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @contextmanager
    def new_pass(self, values: Mapping[Any, Any] = _NOTHING) -> Iterator[None]:
        """Begin a pass with these values, and restore those of the outer pass however it ends."""
        outer, self.values = self.values, dict(values)
        try:
            yield
        finally:
            self.values = outer
