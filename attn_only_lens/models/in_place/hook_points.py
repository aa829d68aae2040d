"""Find the hook points of an MLP, which its neuron-heads intercept, if its class is known."""

from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    GatedMLPBridge,
    JointGateUpMLPBridge,
    MLPBridge,
    MoEBridge,
)
from transformers.pytorch_utils import Conv1D

from attn_only_lens.arguments import a_type, with_article
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.heads.host import stock_class
from attn_only_lens.models.in_place.mixtures import is_mixture, mixture_points
from attn_only_lens.models.in_place.mlp_hooks import TAPS, MLPHookPoints, UnknownMLPError
from attn_only_lens.tl import MLP, GatedMLP

_BRIDGES = (MLPBridge, GatedMLPBridge, JointGateUpMLPBridge, MoEBridge)


def find_hook_points(mlp: Any) -> MLPHookPoints:
    """Return the hook points of an MLP; raise UnknownMLPError if its class is unknown."""
    if mlp is None:
        raise UnknownMLPError("it has no MLP")
    kind = stock_class(mlp)
    if kind in (MLP, GatedMLP):
        points = MLPHookPoints(
            mlp.hook_pre, getattr(mlp, "hook_pre_linear", None), mlp.hook_post, None
        )
    elif is_mixture(mlp):
        points = mixture_points(mlp)
    elif kind in _BRIDGES:
        points = _bridge_hook_points(mlp)
    elif kind is FeatureMLP:
        points = MLPHookPoints(mlp.hook_pre, None, mlp.hook_post, mlp.hook_written, layer=mlp)
    else:
        raise UnknownMLPError(
            f"its mlp is {a_type(mlp)}, whose forward pass is not known; expected one "
            f"of {', '.join(known.__name__ for known in (MLP, GatedMLP, *_BRIDGES))}"
        )
    changed = [point.name for point in points if type(point) not in (HookPoint, *TAPS)]
    if changed:
        raise UnknownMLPError(f"its hook points {changed} are of an unknown class")
    # OPT's MLP has activations [batch · pos, d_mlp], but its hooks receive [batch, pos, d_mlp].
    converted = [point.name for point in points if point.hook_conversion is not None]
    if converted:
        raise UnknownMLPError(
            f"its hook points {converted} pass a reshaped tensor to hooks (in OPT, one axis holds "
            "the tokens of all prompts); expected hooks to receive the tensor itself"
        )
    return points


def _bridge_hook_points(mlp: Any) -> MLPHookPoints:
    linears: dict[str, Any] = {
        name.removeprefix("dense_" * isinstance(mlp, MoEBridge)): child
        for name, child in mlp.named_children()
    }
    missing = [name for name in ("in", "out") if name not in linears]
    if missing:
        raise UnknownMLPError(f"its MLP has no component {' and '.join(missing)}")
    # An adapter or quantised module would do more than multiply by one weight matrix.
    W_out = getattr(linears["out"], "original_component", None)
    kind = type(W_out)
    if kind not in (nn.Linear, Conv1D):
        got = kind.__qualname__
        advice = "merge adapters, dequantise, or remove parametrizations first"
        if kind.__module__.startswith("peft."):  # some peft classes are called Linear, too
            got = f"{kind.__module__}.{got}"
            advice = (
                "call merge_and_unload() before you build the bridge; or in the bridge, for every "
                "component with an adapter `layer`, call layer.merge() and "
                "component.set_original_component(layer.get_base_layer())"
            )
        raise UnknownMLPError(
            f"its W_out is {with_article(got)}; expected a Linear or a Conv1D: {advice}"
        )
    q = linears["gate" if "gate" in linears else "in"].hook_out
    u = linears["in"].hook_out if "gate" in linears else None
    layer = mlp.original_component if mlp.name is None else None
    return MLPHookPoints(q, u, linears["out"].hook_in, linears["out"].hook_out, layer)
