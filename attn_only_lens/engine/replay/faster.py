"""Speed up replays: use one kernel per activation function, and skip parts of the last block.

Libraries compute some activation functions with eight kernels where torch has one. Most metrics
read the last block's output at one token per prompt. For these metrics, this block's output
projections and MLP run only on that token. The resulting output [row, 1, d_model] is added to the
residual stream [row, pos, d_model], which is then correct only at that token. An activation
function is compared with torch's before it is replaced. `Replay.check` tests the resulting logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.utilities.activation_functions import gelu_fast, gelu_new
from transformers.activations import FastGELUActivation, NewGELUActivation

from attn_only_lens.errors import UnsupportedCallError

_FUSED = partial(functional.gelu, approximate="tanh")
_SLOW_MODULES = NewGELUActivation, FastGELUActivation
_SLOW_FUNCTIONS = gelu_new, gelu_fast
_ROUNDINGS = 8  # the largest allowed difference, in units of eps · |pre-activation|
FINE = torch.float32, torch.float64


class FusedActivations:
    """A model's activation functions that torch can compute in one kernel, up to rounding.

    If several threads run one model at once, the thread that ends last restores the functions.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        slow: list[tuple[nn.Module, str, Any]] = [
            *((x, "forward", None) for x in modules if type(x) in _SLOW_MODULES),
            *((x, "act_fn", x.act_fn) for x in modules if vars(x).get("act_fn") in _SLOW_FUNCTIONS),
        ]
        agree: dict[Any, bool] = {}
        self._replaced = []
        for module, name, function in slow:
            key = function or type(module)
            if key not in agree:
                device = next((x.device for x in modules[0].parameters()), torch.device("cpu"))
                agree[key] = dtype in FINE and _agree(function or module, dtype, device)
            if agree[key] and (function or "forward" not in vars(module)):
                self._replaced.append((module, name, function))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context manager that computes the activation functions with torch's kernels."""
        try:
            for module, name, _ in self._replaced:
                vars(module)[name] = _FUSED
            yield
        finally:
            for module, name, function in self._replaced:
                if function is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = function


def _agree(activation: Callable[[Tensor], Tensor], dtype: torch.dtype, device: Any) -> bool:
    """Return whether an activation function equals torch's between -20 and 20, up to rounding."""
    q = torch.linspace(-20.0, 20.0, 4001, dtype=dtype, device=device)
    allowed = _ROUNDINGS * torch.finfo(dtype).eps * q.abs()
    return bool(((activation(q) - _FUSED(q)).abs() <= allowed).all())


@contextmanager
def only_where_read(modules: Sequence[nn.Module], columns: Tensor) -> Iterator[None]:
    """Context manager that runs modules on only one token per prompt.

    Args:
        modules: modules that map a tensor [row, pos, …] token by token.
        columns: each prompt's token, counted from the first token that the modules get.
    """

    def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (at_columns(args[0], columns), *args[1:]) if args else None

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(pick).remove)
        yield


def at_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return one token of each row, [row, 1, …]; all variants of a prompt use the same column."""
    rows = torch.arange(len(x), device=x.device)
    return x[rows, columns.to(x.device).repeat(len(x) // len(columns))].unsqueeze(1)


class _Replacement(partial[Any]):
    """A function that replaces the forward pass of a module."""


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Context manager that replaces the forward pass of a module with `forward`."""
    instance_forward = vars(module).get("forward")  # accelerate sets `forward` on the instance
    if isinstance(instance_forward, _Replacement):
        raise UnsupportedCallError(
            "another thread is patching this model: let it finish first, or patch a copy"
        )
    vars(module)["forward"] = _Replacement(forward)
    try:
        yield
    finally:
        if instance_forward is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = instance_forward
