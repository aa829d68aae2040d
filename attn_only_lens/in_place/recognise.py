"""Which MLPs in place are known, told by what they compute and not by what they are called.

An MLP is recognised if, for any q (and u) that its hook points are made to hand on, what enters
hook_post is act(q), or act(q) · u, + b_in, for an activation that has a gate. It is run on the spot
with random u, and q from -12 to 12 and ten thousand times as far on either side, where an
activation that is clipped gives itself away: no name, of a class or of an activation, can lie.

Dropout between the two does not show, as the MLP runs in evaluation mode, nor does what is changed
later. `misfit` is therefore held against 1 again wherever heads take the place of what the MLP has
computed (`InPlace.put_out`).
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.gates import GATES
from attn_only_lens.in_place.alone import run_alone
from attn_only_lens.in_place.sockets import Sockets, UnknownMLPError, sockets_of
from attn_only_lens.numerics import normal_numbers
from attn_only_lens.tl import GatedMLP

__all__ = ["KnownMLP", "misfit", "recognise"]

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
