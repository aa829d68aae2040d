"""Compute the gradients of a metric with respect to all heads in one backward pass.

Gradients are taken with respect to nodes: activations that hooks keep in the forward pass. The
autograd graph starts at the first block's input, so parameters need no gradients. For each patched
part, the table shows the node, and its value in the other run minus its value in the patched run
(Δ):

    heads      part                   method      node        Δ
    neuron     "z" "pattern" "value"  any         z           change in z from this part
    neuron     "q"                    exact_gate  z           (w(q') - w(q)) v
    neuron     "q"                    other       q           q' - q
    attention  "q"                    exact_gate  z           softmax(q' · K) V - z
    attention  otherwise                          hook point  change in the activation

If several heads share keys and values, `gradient_by_head` computes one gradient for each head.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.axes import Residual
from attn_only_lens.engine.edits import by_head, by_site, change_of_z
from attn_only_lens.engine.recording import Hooks, Recording, input_stream, require_seen
from attn_only_lens.engine.sites import SHARED_PARTS, LayerSites, Part, hook_name
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS


class Tape:
    """Hooks that keep activations of a forward pass, so that gradients can be taken at them."""

    def __init__(
        self, names: Iterable[str], readers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.names = sorted({*names, *readers.values()})
        self._readers = readers
        self._seen: dict[str, Tensor] = {}

    def anew(self) -> "Tape":
        """Return a new, empty tape for the same hook points."""
        return Tape(self.names, self._readers)

    @property
    def nodes(self) -> dict[str, Tensor]:
        """The activations that the hooks kept, by hook name."""
        require_seen({name: name for name in self.names}, self._seen)
        return self._seen

    @property
    def hooks(self) -> Hooks:
        """The hooks for the forward pass."""

        def remember(name: str) -> Callable[[Tensor, Any], Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                # A constant, such as a frozen pattern, gets no gradient unless it becomes a leaf.
                node = value.view_as(value) if value.requires_grad else as_leaf(value)
                # In bridges, only the MLP reads this output; the sum reads the same tensor before.
                node = value if name.endswith("hook_resid_mid") else node
                self._seen[name] = node
                return node

            return hook

        return [(name, remember(name)) for name in self.names]

    def gradients(
        self,
        value: Float[Tensor, ""],
        more: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        keep_graph: bool = False,
    ) -> dict[str, Tensor]:
        """Return the gradients of `value` at every node and at the tensors in `more`.

        The graph is freed unless `keep_graph` is true or attention heads share keys or values.
        """
        nodes = self.nodes
        shared = {
            name: z
            for name, z in self._readers.items()
            if nodes[name].shape[2] != nodes[z].shape[2]
        }
        result = gradients(value, {**more, **nodes}, keep_graph=keep_graph or bool(shared))
        for name, z in shared.items():
            result[name] = gradient_by_head(nodes[name], nodes[z], result[z])
        return result


def as_leaf(value: Tensor) -> Tensor:
    """Return a detached tensor that is a leaf and requires a gradient."""
    return value.detach().requires_grad_()


def gradients(
    value: Float[Tensor, ""], nodes: dict[str, Tensor], *, keep_graph: bool = False
) -> dict[str, Tensor]:
    """Return the gradient of `value` at every node; free the graph unless `keep_graph` is true."""
    gradients = torch.autograd.grad(
        value, list(nodes.values()), retain_graph=keep_graph, allow_unused=True
    )
    unused = [name for name, gradient in zip(nodes, gradients, strict=True) if gradient is None]
    UnsupportedModelError.raise_if(
        [f"{name} has no gradient: the model does not use this activation" for name in unused],
        "this model cannot be attributed here",
    )
    return dict(zip(nodes, gradients, strict=True))


def gradient_by_head(
    shared: Float[Tensor, "batch pos group d"],
    z: Float[Tensor, "batch pos head_index d_head"],
    z_gradient: Float[Tensor, "batch pos head_index d_head"],
) -> Float[Tensor, "batch pos head_index d"]:
    """Return the gradient at shared keys or values, split by the head that it passes through.

    One backward pass handles one head of every group that shares keys and values, or a single head
    if a norm mixes the keys of all groups.
    """
    n_heads, n_shared = z.shape[2], shared.shape[2]
    size = n_heads // n_shared
    index = torch.arange(n_heads, device=z.device)

    def through(heads: Bool[Tensor, "head_index"]) -> Tensor:
        (gradient,) = torch.autograd.grad(z, shared, z_gradient * heads[:, None], retain_graph=True)
        return gradient

    if through(index == 0)[:, :, 1:].any():
        one_by_one = [through(index == head)[:, :, head // size] for head in range(n_heads)]
        return torch.stack(one_by_one, dim=2)
    of_groups = [through(index % size == member) for member in range(size)]
    return torch.stack(of_groups, dim=3).flatten(2, 3)


@contextmanager
def edit_input(model: Any, change: Callable[[Residual], Residual]) -> Iterator[None]:
    """Context manager that applies `change` to the residual stream entering the first block."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        stream = change(input_stream(args, kwargs))
        if args:
            return (stream, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream}

    with model.blocks[0].register_forward_pre_hook(enter, with_kwargs=True):
        yield


@contextmanager
def start_graph(model: Any) -> Iterator[list[Residual]]:
    """Start the autograd graph at the first block's input; append this input to a yielded list."""
    roots: list[Residual] = []

    def root(stream: Residual) -> Residual:
        roots.append(as_leaf(stream))
        return roots[-1]

    with edit_input(model, root):
        yield roots


def gradient_node(model: Any, sites: LayerSites, part: Part, *, closed: bool) -> str:
    """Return the name of the hook point at which the gradient for the given sites is taken."""
    if sites.kind not in NEURON_KINDS:
        seen: Part = "z" if part == "q" and closed else part
        return hook_name(model, sites.layer, seen, sites.kind)
    activation = "q" if part == "q" and not closed else "z"
    return host_of(model).hook_name(sites.layer, "neuron", activation)


def site_estimates(
    model: Any,
    sites: LayerSites,
    part: Part,
    node: str,
    gradient: Tensor,
    target: Recording,
    source: Recording,
) -> Float[Tensor, "site batch pos"]:
    """Return each site's estimated effect at each position: the gradient times the change."""
    if node == host_of(model).hook_name(sites.layer, "neuron", "z"):
        runs = target.neurons[sites.layer], source.neurons[sites.layer]
        estimates = gradient.squeeze(-1) * change_of_z(*runs, part)
    else:
        change = source.hooked[node] - target.hooked[node]
        if sites.kind == "attention" and part in SHARED_PARTS:
            change = by_head(change, gradient.shape[2])
        estimates = (gradient * change).sum(dim=-1)
    if node.endswith("hook_pattern"):  # [batch, head_index, query_pos]
        estimates = estimates.transpose(1, 2)
    return by_site(sites, estimates)


@contextmanager
def uncapped_logits(model: Any) -> Iterator[list[Tensor]]:
    """Yield a list that collects the unembedding's output in each run, before any soft cap."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    with model.unembed.register_forward_hook(look), silent_scale_edits():
        yield seen


@contextmanager
def silent_scale_edits() -> Iterator[None]:
    """Context manager that silences the bridges' warning about (intended) edits of norm scales."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A forward hook edited hook_scale")
        yield
