"""Gradients of a metric with respect to what heads did: one backward pass for all of them.

A hook at each hook point hands on what it is shown, and remembers it; the gradient is taken there.
For the neurons of a layer it is grad(mlp_out) @ W_out^T, of size batch × pos × d_mlp, which the
backward pass computes anyway: nothing of size neurons × d_model arises, and no gradient of a weight
is computed. The graph begins at the stream that enters the first block, so that it is there whether
or not parameters want gradients.

Where a gradient is taken for each kind of head, and what a patch changes there.

heads        part                    node            Δ, source run minus the run patched into
neuron       "z" "pattern" "value"   z               Δz of that part (`parts.py`)
neuron       "q", gate linear        q               q' - q
neuron       "q", gate closed        z               (w(q') - w(q)) v
attention    any                     its hook point  what it shows in one run, less the other
attention    "q", gate closed        z               softmax(q' · K) V - z (`closed_form.py`)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.axes import Logits, Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.runs.edits import Part, by_site, hook_name, moved
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording, require_shown, stream_of
from attn_only_lens.runs.sites import LayerSites

__all__ = [
    "Node",
    "Tape",
    "entering",
    "gradients",
    "leaf",
    "node_of",
    "rooted",
    "shares",
    "value_of",
]


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


Node = str
"""The name of a hook point."""


def node_of(model: Any, sites: LayerSites, part: Part, *, closed: bool) -> Node:
    """The hook point at which the gradient is taken.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: heads of one kind in one layer.
        part: what is patched.
        closed: whether what a query does to its pattern is computed, not linearised.
    """
    if sites.kind == "attention":
        return hook_name(model, sites.layer, "z" if part == "q" and closed else part)
    activation = "q" if part == "q" and not closed else "z"
    return host_of(model).hook_name(sites.layer, "neuron", activation)


def shares(
    model: Any,
    sites: LayerSites,
    part: Part,
    node: Node,
    gradient: Tensor,
    target: Recording,
    source: Recording,
) -> Float[Tensor, "site batch pos"]:
    """Gradient times change at each head and position: what the estimate is the sum of.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: heads of one kind in one layer.
        part: what is patched.
        node: where.
        gradient: there.
        target: the run patched into.
        source: the other run; but for z of neurons, `hooked[node]` is what the patch puts there.
    """
    if node == host_of(model).hook_name(sites.layer, "neuron", "z"):
        change = moved(target.neurons[sites.layer], source.neurons[sites.layer], part).unsqueeze(-1)
    else:
        change = source.hooked[node] - target.hooked[node]
    each = (gradient * change).sum(dim=-1)
    if sites.kind == "neuron":
        return by_site(host_of(model).neurons[sites.layer], sites, each)
    if node.endswith("hook_pattern"):  # [batch, head_index, query_pos]
        each = each.transpose(1, 2)
    return each[:, :, sites.index.to(each.device)].permute(2, 0, 1)
