"""The hook points of an MLP that its neuron-heads tap, by the class of the MLP."""

from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    GatedMLPBridge,
    JointGateUpMLPBridge,
    MLPBridge,
)
from transformers.pytorch_utils import Conv1D

from attn_only_lens.heads.host import stock_class
from attn_only_lens.models.in_place.heads import TAPS, MLPHookPoints
from attn_only_lens.tl import MLP, GatedMLP

_BRIDGES = (MLPBridge, GatedMLPBridge, JointGateUpMLPBridge)


class UnknownMLPError(Exception):
    """Raised for an MLP whose neurons cannot be exposed as heads; its text says why."""


def find_hook_points(mlp: Any) -> MLPHookPoints:
    """Find the hook points of an MLP.

    Raises:
        UnknownMLPError: its class, or that of one of its parts, is not known.
    """
    if mlp is None:
        raise UnknownMLPError("it has no MLP")
    kind = stock_class(mlp)
    if kind in (MLP, GatedMLP):
        points = MLPHookPoints(
            mlp.hook_pre, getattr(mlp, "hook_pre_linear", None), mlp.hook_post, None
        )
    elif kind in _BRIDGES:
        points = _bridge_hook_points(mlp)
    else:
        raise UnknownMLPError(
            f"its mlp is a {type(mlp).__qualname__}, whose forward pass is not known; expected one "
            f"of {', '.join(known.__name__ for known in (MLP, GatedMLP, *_BRIDGES))}"
        )
    changed = [point.name for point in points if type(point) not in (HookPoint, *TAPS)]
    if changed:
        raise UnknownMLPError(f"its hook points {changed} are of a class that is not known")
    # OPT: what passes is [batch · pos, d_mlp], and hooks are shown [batch, pos, d_mlp].
    converted = [point.name for point in points if point.hook_conversion is not None]
    if converted:
        raise UnknownMLPError(
            f"its hook points {converted} show something else than what passes through them (in "
            "OPT, tokens of all batch entries pass on one axis)"
        )
    return points


def _bridge_hook_points(mlp: Any) -> MLPHookPoints:
    parts: dict[str, Any] = dict(mlp.named_children())
    missing = [part for part in ("in", "out") if part not in parts]
    if missing:
        raise UnknownMLPError(f"its MLP has no part {' and no part '.join(missing)}")
    # The weight of an adapted or quantised W_out is not all of what it computes.
    W_out = getattr(parts["out"], "original_component", None)
    kind = type(W_out)
    if kind not in (nn.Linear, Conv1D):
        got = kind.__qualname__
        advice = "merge adapters, dequantise, or remove parametrizations first"
        if kind.__module__.startswith("peft."):  # whose classes are called Linear too
            got = f"{kind.__module__}.{got}"
            advice = (
                "call merge_and_unload() before the model is bridged; or in a bridge, for every "
                "part with an adapter `layer`, call layer.merge() and "
                "part.set_original_component(layer.get_base_layer())"
            )
        raise UnknownMLPError(f"its W_out is a {got}, expected a Linear or a Conv1D: {advice}")
    first = parts["gate" if "gate" in parts else "in"].hook_out
    second = parts["in"].hook_out if "gate" in parts else None
    layer = mlp.original_component if mlp.name is None else None
    return MLPHookPoints(first, second, parts["out"].hook_in, parts["out"].hook_out, layer)
