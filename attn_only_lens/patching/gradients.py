"""Gradients of a metric with respect to what heads did: one backward pass for all of them.

A hook at each hook point hands on what it is shown, and remembers it; the gradient is taken there.
For the neurons of a layer it is grad(mlp_out) @ W_out^T, of size batch × pos × d_mlp, which the
backward pass computes anyway: nothing of size neurons × d_model arises, and no gradient of a weight
is computed. The graph begins at the stream that enters the first block, so that it is there whether
or not parameters want gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.axes import Logits, Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.patching.bound import BoundMetric
from attn_only_lens.patching.record import Hooks, require_shown, stream_of

__all__ = ["Tape", "entering", "gradients", "leaf", "rooted", "value_of"]


class Tape:
    """Hooks that remember, of one forward pass, the tensors to take gradients at."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(set(names))
        self._seen: dict[str, Tensor] = {}

    @property
    def nodes(self) -> dict[str, Tensor]:
        """The tensors, by hook name.

        Raises:
            UnsupportedModelError: there is none, as what a hook point is on did not run.
        """
        require_shown({name: name for name in self._names}, self._seen)
        return self._seen

    @property
    def hooks(self) -> Hooks:
        """To be run with."""

        def remember(name: str) -> Callable[[Tensor, Any], Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                # A constant, such as a frozen pattern, has a gradient too: a leaf of its own.
                node = value.view_as(value) if value.requires_grad else leaf(value)
                self._seen[name] = node
                return node

            return hook

        return [(name, remember(name)) for name in self._names]

    def gradients(self, value: Float[Tensor, ""]) -> dict[str, Tensor]:
        """The gradient at every node; the graph is given up."""
        return gradients(value, self.nodes)


def leaf(value: Tensor) -> Tensor:
    """The same numbers, with no past and a gradient."""
    return value.detach().requires_grad_()


def gradients(value: Float[Tensor, ""], nodes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient at every node; the graph is given up.

    Raises:
        UnsupportedModelError: the value does not depend on a node, so that no patch there would
            reach it.
    """
    found = torch.autograd.grad(value, list(nodes.values()), allow_unused=True)
    unheard = [name for name, each in zip(nodes, found, strict=True) if each is None]
    if unheard:
        raise UnsupportedModelError(
            [f"what hooks hand on at {name} goes nowhere: it only looks on" for name in unheard],
            "this model cannot be attributed here",
        )
    return dict(zip(nodes, found, strict=True))


@torch.enable_grad()
def value_of(metric: BoundMetric, logits: Logits) -> Float[Tensor, ""]:
    """The metric of a whole run, in its graph."""
    return metric.value(metric.select(logits)[None])[0]


@contextmanager
def entering(model: Any, change: Callable[[Residual], Residual]) -> Iterator[None]:
    """Change the stream that enters the first block."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        stream = change(stream_of(args, kwargs))
        if args:
            return (stream, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream}

    handle = model.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rooted(model: Any) -> Iterator[list[Residual]]:
    """Begin the graph at the stream that enters the first block: the last of the list, each run."""
    roots: list[Residual] = []

    def root(stream: Residual) -> Residual:
        roots.append(leaf(stream))
        return roots[-1]

    with entering(model, root):
        yield roots
