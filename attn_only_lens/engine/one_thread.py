"""Let only one thread at a time analyse a model; a thread that comes later waits.

Analyses attach hooks and replace forward passes, which would act in another thread's runs too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock, RLock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from attn_only_lens.engine.spinning_threads import warn_of_spinning_threads

_P = ParamSpec("_P")
_T = TypeVar("_T")
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_making = Lock()


@contextmanager
def one_thread(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that waits while other threads analyse these models, and lets them wait."""
    with _making:
        locks = [_locks.setdefault(model, RLock()) for model in models]
    with ExitStack() as stack:
        for lock in sorted(locks, key=id):  # in one order, or two threads could block each other
            stack.enter_context(lock)
        yield


def one_thread_per_model(analysis: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that it waits while other threads analyse the models it is given."""

    @wraps(analysis)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        models = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
        with one_thread(models):
            if models:
                warn_of_spinning_threads(models[0])
            return analysis(*args, **kwargs)

    return alone
