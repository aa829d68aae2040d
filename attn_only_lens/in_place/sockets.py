"""Where an MLP can be tapped, by its class; what it computes there is for `recognise` to find out.

    MLP, GatedMLP                hook_pre, hook_pre_linear, hook_post of their own
    MLPBridge and its gated      what leaves `in` (or `gate`) and `in`, what enters and leaves `out`
    kinds                        (the bridges' own hook_pre and hook_post are other names of these)

BERT has no module for its MLP: the two halves sit in the layer, and the bridge's `mlp` only names
them. Their hook points fire all the same, when the layer runs.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    GatedMLPBridge,
    JointGateUpMLPBridge,
    MLPBridge,
)
from transformers.pytorch_utils import Conv1D

from attn_only_lens.tl import MLP, GatedMLP

__all__ = ["Sockets", "UnknownMLPError", "sockets_of"]

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
