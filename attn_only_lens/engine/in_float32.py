"""Run a model in half precision in float32 for a while: the same weights, in a wider type.

The writes of all parts of a model add up to its residual stream, up to rounding. In half precision
the rounding is as large as the write of a single head. So analyses that split the stream into these
writes compute in float32; their results are those of a float32 model with the same weights.

A float32 copy of the model would be simpler, but a bridge with hooks of TransformerLens' own cannot
be copied. So each tensor in half precision gets float32 data for a while, and its own data back at
the end, with the same views and ties.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from attn_only_lens.engine.attached_hooks import modules_of

HALF = (torch.float16, torch.bfloat16)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = Lock()
_inside: dict[int, int] = {}  # by id of a model, how many analyses run it in float32
_restore: dict[int, Callable[[], None]] = {}


def in_float32(analysis: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate an analysis: if its first argument, `model`, is in half precision, use float32."""

    @wraps(analysis)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with float32_weights(args[0] if args else kwargs.get("model")):
            return analysis(*args, **kwargs)

    return run


@contextmanager
def float32_weights(model: Any) -> Iterator[None]:
    """Give a model in half precision float32 weights, and restore its own at the end, bit for bit.

    Several analyses, in threads, may run one model at once: the last one to end restores it.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    key = id(model)
    with _lock:
        if not _inside.get(key):
            _restore[key] = _widen(model)
        _inside[key] = _inside.get(key, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _inside[key] -= 1
            if not _inside[key]:
                del _inside[key]
                _restore.pop(key)()


def _widen(model: nn.Module) -> Callable[[], None]:
    """Widen every tensor in half precision, and return a function that undoes it."""
    undo: list[Callable[[], object]] = []
    seen: set[int] = set()

    def widen(tensor: Tensor) -> None:
        narrow, gradient = tensor.data, tensor.grad if tensor.is_leaf else None
        tensor.grad = None  # which would have to be of the same type
        tensor.data = narrow.float()

        def narrow_again() -> None:
            tensor.data = narrow
            tensor.grad = gradient

        undo.append(narrow_again)

    try:
        for _, module in modules_of(model):
            held = (module._parameters, module._buffers, vars(module))
            for tensor in (value for of_kind in held for value in of_kind.values()):
                if isinstance(tensor, Tensor) and tensor.dtype in HALF and id(tensor) not in seen:
                    seen.add(id(tensor))
                    widen(tensor)
        # TransformerLens' norms and rotary embeddings compute in the dtype of the configuration.
        for _, module in modules_of(model):
            cfg: Any = getattr(module, "cfg", None)
            if getattr(cfg, "dtype", None) in HALF:
                undo.append(partial(setattr, cfg, "dtype", cfg.dtype))
                cfg.dtype = torch.float32
    except BaseException:
        _run(undo)
        raise
    return lambda: _run(undo)


def _run(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()
