"""Run half-precision models with float32 weights.

The outputs of a model's components add up to the residual stream, up to rounding. In half
precision, the rounding error is as large as the output of a single head, so analyses that split the
residual stream compute in float32. A bridge with hooks cannot be copied to float32. During the
analysis, the model's own half-precision tensors therefore hold float32 data in place of their
original data. Afterwards, they get the original data back, so views and tied weights stay intact.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.engine.model_checks import modules_of

HALF = (torch.float16, torch.bfloat16)
_lock = Lock()
_inside: dict[int, tuple[int, ExitStack]] = {}  # id(model) -> (number of running analyses, undo)


@contextmanager
def float32_weights(model: Any) -> Iterator[None]:
    """Context manager that gives a half-precision model float32 weights, then restores its own.

    The heads of each layer read one input, also if `use_split_qkv_input` or `use_attn_in` is on;
    these options change no value, but they move the norm into the attention. Several threads
    may analyse one model at once. The analysis that ends last restores the weights.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    key = id(model)
    with _lock:
        count, undo = _inside[key] if key in _inside else (0, _widen(model))
        _inside[key] = count + 1, undo
    try:
        yield
    finally:
        with _lock:
            count, undo = _inside.pop(key)
            if count > 1:
                _inside[key] = count - 1, undo
            else:
                undo.close()


def _widen(model: nn.Module) -> ExitStack:
    """Convert tensors to float32 and join heads' inputs; return an ExitStack that undoes both."""
    seen: set[int] = set()

    def restore(tensor: Tensor, narrow: Tensor, gradient: Tensor | None) -> None:
        tensor.data = narrow
        tensor.grad = gradient

    with ExitStack() as undo:
        config: Any = getattr(model, "cfg", None)
        for option in ("use_split_qkv_input", "use_attn_in"):
            if getattr(config, option, False):
                undo.callback(setattr, config, option, True)
                setattr(config, option, False)
        for _, module in modules_of(model):
            held = (module._parameters, module._buffers, vars(module))
            for tensor in (value for kind in held for value in kind.values()):
                if isinstance(tensor, Tensor) and tensor.dtype in HALF and id(tensor) not in seen:
                    seen.add(id(tensor))
                    gradient = tensor.grad if tensor.is_leaf else None
                    undo.callback(restore, tensor, tensor.data, gradient)
                    tensor.grad = None  # its dtype would differ from the tensor's
                    tensor.data = tensor.data.float()
        # TransformerLens' norms and rotary embeddings compute in cfg.dtype.
        for _, module in modules_of(model):
            cfg: Any = getattr(module, "cfg", None)
            if getattr(cfg, "dtype", None) in HALF:
                undo.callback(setattr, cfg, "dtype", cfg.dtype)
                cfg.dtype = torch.float32
        return undo.pop_all()
