"""Where an MLP can be tapped, by its class; what it computes there is for `recognise` to find out.

    MLP, GatedMLP                hook_pre, hook_pre_linear, hook_post of their own
    MLPBridge and its gated      what leaves `in` (or `gate`) and `in`, what enters and leaves `out`
    kinds                        (the bridges' own hook_pre and hook_post are other names of these)

BERT has no module for its MLP: the two halves sit in the layer, and the bridge's `mlp` only names
them. Their hook points fire all the same, when the layer runs.

An MLP run by itself, to see what it computes, and left as it was.

Meanwhile it is in evaluation mode, no gradient is taken, the state of the random generators is
kept, and the hooks of others do not fire: they are set aside, and put back.

Which MLPs in place are known, told by what they compute and not by what they are called.

An MLP is recognised if, for any q (and u) that its hook points are made to hand on, what enters
hook_post is act(q), or act(q) · u, + b_in, for an activation that has a gate. It is run on the spot
with random u, and q from -12 to 12 and ten thousand times as far on either side, where an
activation that is clipped gives itself away: no name, of a class or of an activation, can lie.

Dropout between the two does not show, as the MLP runs in evaluation mode, nor does what is changed
later. `misfit` is therefore held against 1 again wherever heads take the place of what the MLP has
computed (`InPlace.put_out`).
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    GatedMLPBridge,
    JointGateUpMLPBridge,
    MLPBridge,
)
from transformers.pytorch_utils import Conv1D

from attn_only_lens.gates import GATES
from attn_only_lens.numerics import normal_numbers, same_randomness
from attn_only_lens.tl import MLP, GatedMLP

__all__ = [
    "KnownMLP",
    "Sockets",
    "UnknownMLPError",
    "misfit",
    "recognise",
    "run_alone",
    "sockets_of",
    "undisturbed",
]

_BRIDGES = (MLPBridge, GatedMLPBridge, JointGateUpMLPBridge)


class UnknownMLPError(Exception):
    """An MLP whose neurons are not known to be heads; its text says why."""


@dataclass(frozen=True)
class Sockets:
    """Where an MLP can be tapped.

    Attributes:
        pre: the hook point that the pre-activation q leaves.
        linear: in a gated MLP, the one that u leaves.
        post: the one that the activations enter on their way to W_out.
        out: the one that what W_out puts out enters; none where the MLP has no such hook point,
            and its class calls `InPlace.write` instead.
        layer: the layer of the source, where that has no module for its MLP.
    """

    pre: HookPoint
    linear: HookPoint | None
    post: HookPoint
    out: HookPoint | None
    layer: nn.Module | None = None

    @property
    def points(self) -> tuple[HookPoint, ...]:
        """The hook points that there are."""
        every = self.pre, self.linear, self.post, self.out
        return tuple(point for point in every if point is not None)


def sockets_of(mlp: Any) -> Sockets:
    """Where an MLP can be tapped.

    Raises:
        UnknownMLPError: its class, or that of one of its parts, is not known.
    """
    if type(mlp) is MLP:
        sockets = Sockets(mlp.hook_pre, None, mlp.hook_post, None)
    elif type(mlp) is GatedMLP:
        sockets = Sockets(mlp.hook_pre, mlp.hook_pre_linear, mlp.hook_post, None)
    elif type(mlp) in _BRIDGES:
        sockets = _of_bridge(mlp)
    elif mlp is None:
        raise UnknownMLPError("it has no MLP")
    else:
        raise UnknownMLPError(
            f"its mlp is a {type(mlp).__qualname__}, whose forward pass is not known; expected one "
            f"of {', '.join(known.__name__ for known in (MLP, GatedMLP, *_BRIDGES))}"
        )
    changed = [point.name for point in sockets.points if type(point) is not HookPoint]
    if changed:
        raise UnknownMLPError(f"its hook points {changed} are of a class that is not known")
    # OPT: what passes is [batch · pos, d_mlp], and hooks are shown [batch, pos, d_mlp].
    converted = [point.name for point in sockets.points if point.hook_conversion is not None]
    if converted:
        raise UnknownMLPError(
            f"its hook points {converted} show something else than what passes through them (in "
            "OPT, tokens of all batch entries pass on one axis)"
        )
    return sockets


def _of_bridge(mlp: Any) -> Sockets:
    parts: dict[str, Any] = dict(mlp.named_children())
    missing = [part for part in ("in", "out") if part not in parts]
    if missing:
        raise UnknownMLPError(f"its MLP has no part {' and no part '.join(missing)}")
    # The weight of an adapted or quantised W_out is not all of what it computes.
    W_out = getattr(parts["out"], "original_component", None)
    if type(W_out) not in (nn.Linear, Conv1D):
        raise UnknownMLPError(
            f"its W_out is a {type(W_out).__qualname__}, expected a Linear or a Conv1D: merge "
            "adapters, dequantise, or remove parametrizations first"
        )
    first = parts["gate" if "gate" in parts else "in"].hook_out
    linear = parts["in"].hook_out if "gate" in parts else None
    layer = mlp.original_component if mlp.name is None else None
    return Sockets(first, linear, parts["out"].hook_in, parts["out"].hook_out, layer)


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


_BATCH, _POS = 2, 7
_FAR = 1e4  # and its product with u is within float16
_ROUNDINGS = 16  # of an activation that is computed in several steps, in its own precision


@dataclass(frozen=True)
class KnownMLP:
    """An MLP that can be exposed.

    Attributes:
        mlp: the module.
        sockets: where it can be tapped.
        act_fn: the name of its activation, a key of `GATES`.
    """

    mlp: nn.Module
    sockets: Sockets
    act_fn: str


def recognise(mlp: Any, cfg: Any) -> KnownMLP:
    """Look at an MLP and run it.

    Args:
        mlp: what a block of a HookedTransformer or a TransformerBridge has as `mlp`.
        cfg: the model's configuration.

    Raises:
        UnknownMLPError: it is of a kind, or computes what, no neuron-heads stand for.
    """
    sockets = sockets_of(mlp)
    return KnownMLP(mlp, sockets, _activation(mlp, sockets, cfg))


def misfit(
    act_fn: str, post: Tensor, q: Tensor, u: Tensor | None, b_in: Tensor | float = 0.0
) -> float:
    """Largest difference of `post` from act(q) · u + b_in, as a multiple of what rounding makes.

    Args:
        act_fn: a key of `GATES`.
        post: what entered hook_post.
        q: pre-activations, in the precision that act is to be computed in.
        u: what they gate; none in a plain MLP.
        b_in: what a GatedMLP adds to the product.
    """
    u = torch.ones((), dtype=q.dtype, device=q.device) if u is None else u.to(q.dtype)
    expected = GATES[act_fn].activation(q) * u + b_in
    size = (1.0 + q.abs()) * (1.0 + u.abs())
    size = size + (b_in.abs() if isinstance(b_in, Tensor) else abs(b_in))
    limits = torch.finfo(post.dtype)
    error = (post.to(q.dtype) - expected).abs() / (_ROUNDINGS * limits.eps * size)
    # Half precision has no number for what overflows; a nan of the users' own stays theirs.
    there = expected.abs() <= 0.99 * limits.max
    return torch.where(there, error.nan_to_num(nan=torch.inf), 0.0).max().item()


def _activation(mlp: Any, sockets: Sockets, cfg: Any) -> str:
    """The name of the activation, or why it is none."""
    W_out = mlp.W_out
    d_mlp, d_model = W_out.shape
    shape = (_BATCH, _POS, d_mlp)
    q = _queries(shape).to(W_out)
    u = torch.ones_like(q) if sockets.linear is None else normal_numbers(shape, 1).to(W_out)
    seen: dict[str, list[Tensor]] = {"pre": [], "linear": [], "post": []}

    def hand_on(name: str, value: Tensor) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            seen[name].append(output)
            return value.clone()

        return hook

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["post"].append(output.clone())

    with ExitStack() as stack:
        hooks = [(sockets.pre, hand_on("pre", q)), (sockets.post, keep)]
        if sockets.linear is not None:
            hooks.append((sockets.linear, hand_on("linear", u)))
        for point, hook in hooks:
            stack.callback(point.register_forward_hook(hook).remove)
        run_alone(mlp, sockets, normal_numbers((_BATCH, _POS, d_model)).to(W_out))

    fired = [len(seen["pre"]), len(seen["post"])] + [len(seen["linear"])] * bool(sockets.linear)
    if set(fired) != {1}:
        raise UnknownMLPError(f"its hook points fired {fired} times in one forward pass, not once")
    shapes = {tuple(output[0].shape) for output in seen.values() if output}
    if shapes != {shape}:
        raise UnknownMLPError(f"its activations have shapes {shapes}; expected {shape}")
    return _name(seen["post"][0], q, u, mlp, cfg)


def _queries(shape: tuple[int, ...]) -> Tensor:
    """From -12 to 12 in even steps; at either end a few that are far out."""
    q = torch.linspace(-12, 12, math.prod(shape), dtype=torch.float64, device="cpu")
    far = torch.logspace(1.2, math.log10(_FAR), 5, dtype=torch.float64, device="cpu")
    q[:5], q[-5:] = -far.flip(0), far
    return q.reshape(shape)


def _name(post: Tensor, q: Tensor, u: Tensor, mlp: Any, cfg: Any) -> str:
    """The activation that made `post` of q and u; the one that the model names, of equals."""
    post, q, u = post.cpu(), q.cpu().double(), u.cpu()
    b_in = mlp.b_in.cpu().double() if isinstance(mlp, GatedMLP) else 0.0
    errors = {name: misfit(name, post, q, u, b_in) for name in GATES}
    within = [name for name, error in errors.items() if error <= 1.0]
    if cfg.act_fn in within:
        return str(cfg.act_fn)
    if within:
        return min(within, key=errors.__getitem__)
    raise UnknownMLPError(
        f"what its MLP makes of its pre-activations is not q times a weight in [0, 1] of q alone: "
        f"none of {', '.join(sorted(GATES))}"
    )
