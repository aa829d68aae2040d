"""Which MLPs in place are known, told by what they compute and not by what they are called.

An MLP is recognised if, for any q (and u) that its hook points are made to hand on, what enters
hook_post is act(q), or act(q) · u, + b_in, for an activation that has a gate. It is run on the spot
with q from -12 to 12 and random u: no name, of a class or of an activation, can lie about that.
"""

from collections.abc import Iterator
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

from attn_only_lens.gates import GATES
from attn_only_lens.heads.computation import is_live
from attn_only_lens.in_place.beside import Sockets
from attn_only_lens.tl import MLP, GatedMLP

__all__ = ["KnownMLP", "UnknownMLPError", "recognise", "run_alone", "sockets_of"]

_BRIDGES = (MLPBridge, GatedMLPBridge, JointGateUpMLPBridge)
_BATCH, _POS = 2, 7
_ROUNDINGS = 16  # of an activation that is computed in several steps, in its own precision


class UnknownMLPError(Exception):
    """An MLP whose neurons are not known to be heads; its text says why."""


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
    changed = [point.name for point in sockets.points if type(point) is not HookPoint]
    if changed:
        raise UnknownMLPError(f"its hook points {changed} are of a class that is not known")
    hooked = [m.name for m in mlp.modules() if isinstance(m, HookPoint) and is_live(m)]
    if hooked:
        raise UnknownMLPError(
            f"hooks are attached to its MLP ({', '.join(map(str, hooked[:3]))}), which is run to "
            "see what it computes; remove them first: model.reset_hooks(including_permanent=True)"
        )
    return KnownMLP(mlp, sockets, _activation(mlp, sockets, cfg))


def sockets_of(mlp: Any) -> Sockets:
    """Where an MLP can be tapped.

    Raises:
        UnknownMLPError: it is of a kind, or lacks the parts, that are known.
    """
    if type(mlp) is MLP:
        return Sockets(mlp.hook_pre, None, mlp.hook_post, None)
    if type(mlp) is GatedMLP:
        return Sockets(mlp.hook_pre, mlp.hook_pre_linear, mlp.hook_post, None)
    if type(mlp) not in _BRIDGES:
        raise UnknownMLPError(
            f"its mlp is a {type(mlp).__qualname__}, whose forward pass is not known; expected one "
            f"of {', '.join(known.__name__ for known in (MLP, GatedMLP, *_BRIDGES))}"
        )
    if mlp.name is None:
        raise UnknownMLPError(
            "its MLP has no module of its own in the source (its two halves sit in the layer), so "
            "that it cannot be run alone and checked"
        )
    parts = dict(mlp.named_children())
    missing = [part for part in ("in", "out") if part not in parts]
    if missing:
        raise UnknownMLPError(f"its MLP has no part {' and no part '.join(missing)}")
    if "gate" not in parts:
        return Sockets(parts["in"].hook_out, None, parts["out"].hook_in, parts["out"].hook_out)
    up = parts["in"].hook_out
    return Sockets(parts["gate"].hook_out, up, parts["out"].hook_in, parts["out"].hook_out)


def _activation(mlp: Any, sockets: Sockets, cfg: Any) -> str:
    """The name of the activation, or why it is none."""
    W_in = mlp.W_in
    d_model, d_mlp = W_in.shape
    shape = (_BATCH, _POS, d_mlp)
    q = torch.linspace(-12, 12, _BATCH * _POS * d_mlp, dtype=torch.float64).reshape(shape).to(W_in)
    u = torch.ones_like(q) if sockets.linear is None else random(shape, 1).to(W_in)
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
        run_alone(mlp, random((_BATCH, _POS, d_model), 0).to(W_in))

    fired = [len(seen["pre"]), len(seen["post"])] + [len(seen["linear"])] * bool(sockets.linear)
    if set(fired) != {1}:
        raise UnknownMLPError(f"its hook points fired {fired} times in one forward pass, not once")
    shapes = {tuple(output[0].shape) for output in seen.values() if output}
    if shapes != {shape}:
        raise UnknownMLPError(f"its activations have shapes {shapes}; expected {shape}")
    return _name(seen["post"][0], q, u, mlp, cfg)


def _name(post: Tensor, q: Tensor, u: Tensor, mlp: Any, cfg: Any) -> str:
    """The activation that made `post` of q and u; the one that the model names, of equals."""
    b_in = mlp.b_in.double() if isinstance(mlp, GatedMLP) else torch.zeros(())
    rounding = _ROUNDINGS * torch.finfo(post.dtype).eps
    allowed = rounding * ((1.0 + q.double().abs()) * (1.0 + u.double().abs()) + b_in.abs())
    errors = {}
    for name, gate in GATES.items():
        expected = gate.activation(q.double()) * u.double() + b_in
        errors[name] = ((post.double() - expected).abs() / allowed).max().item()
    within = [name for name, error in errors.items() if error <= 1.0]
    if cfg.act_fn in within:
        return str(cfg.act_fn)
    if within:
        return min(within, key=errors.__getitem__)
    training = "; in training mode, dropout may be why: call model.eval()" if mlp.training else ""
    raise UnknownMLPError(
        f"what its MLP makes of its pre-activations is not q times a weight in [0, 1] of q alone: "
        f"none of {', '.join(sorted(GATES))}{training}"
    )


@torch.no_grad()
def run_alone(mlp: Any, x: Tensor) -> Tensor:
    """The output of an MLP for x, with the same dropout whenever it is called.

    Raises:
        UnknownMLPError: it does not run on an input alone.
    """
    try:
        with _fixed_seed(x):
            output: Tensor = mlp(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnknownMLPError(f"its MLP does not run alone: {error}") from error
    return output


@contextmanager
def _fixed_seed(x: Tensor) -> Iterator[None]:
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal numbers, the same every time, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
