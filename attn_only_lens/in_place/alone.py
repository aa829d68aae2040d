"""An MLP run by itself, to see what it computes, and left as it was.

Meanwhile it is in evaluation mode, no gradient is taken, the state of the random generators is
kept, and the hooks of others do not fire: they are set aside, and put back.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.in_place.sockets import Sockets, UnknownMLPError
from attn_only_lens.numerics import same_randomness

__all__ = ["run_alone", "undisturbed"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@torch.no_grad()
def run_alone(mlp: Any, sockets: Sockets, x: Tensor) -> Tensor:
    """The output of an MLP for x.

    Where its two halves sit in a layer that has no module for the MLP (`Sockets.layer`), that
    layer is run, and the output is what W_out puts out.

    Raises:
        UnknownMLPError: it does not run on an input alone.
    """
    if sockets.layer is None:
        output = _run(mlp, x)
        if not isinstance(output, Tensor):
            raise UnknownMLPError(f"its MLP puts out a {type(output).__name__}, not a tensor")
        return output
    assert sockets.out is not None
    seen: list[Tensor] = []
    handle = sockets.out.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        _run(sockets.layer, x)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise UnknownMLPError(f"its W_out ran {len(seen)} times in one pass of its layer, not once")
    return seen[0]


def _run(module: nn.Module, x: Tensor) -> Any:
    try:
        with same_randomness(x.device):
            return module(x)
    except UnknownMLPError:
        raise
    except Exception as error:  # whatever code of others raises on an input of ours
        raise UnknownMLPError(f"its MLP does not run alone: {error}") from error


@contextmanager
def undisturbed(mlps: Iterable[object]) -> Iterator[None]:
    """Run MLPs in evaluation mode and without the hooks on their hook points, then restore both."""
    roots = [(mlp, mlp.training) for mlp in mlps if isinstance(mlp, nn.Module)]
    modules = [module for root, _ in roots for module in root.modules()]
    modes = [(module, module.training) for module in modules]
    # The very dictionaries, which the handles of the hooks refer to.
    points = list(filter(_is_point, modules))
    hooks = [(point, name, getattr(point, name)) for point in points for name in _HOOKS]
    try:
        for module in modules:
            module.training = False
        for point, name, _ in hooks:
            setattr(point, name, OrderedDict())
        yield
    finally:
        for root, training in roots:
            for point in filter(_is_point, root.modules()):  # the new ones too
                point.training = training
        for module, training in modes:
            module.training = training
        for point, name, registered in hooks:
            setattr(point, name, registered)


def _is_point(module: nn.Module) -> bool:
    return isinstance(module, HookPoint)
