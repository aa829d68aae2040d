"""What bilinear gates make of activations: put into the source, and measured layer by layer."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.gates import BilinearGate, RangeGate
from attn_only_lens.heads import neuron_heads
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.gating import AnyGate
from attn_only_lens.in_place import InPlace, sockets_of
from attn_only_lens.tl import GatedMLP

__all__ = ["activation_errors", "approximated_logits"]


def approximated_logits(source: Any, gates: list[AnyGate], tokens: Tensor) -> Tensor:
    """Logits of the source, each activation replaced by the approximation of its layer's gate."""
    with ExitStack() as stack:
        for block, gate in zip(source.blocks, gates, strict=True):
            sockets, read = sockets_of(block.mlp), dict[str, Tensor]()
            taps = [
                (sockets.pre, _keep(read, "q")),
                (sockets.post, _replace(read, gate, block.mlp)),
            ]
            if sockets.linear is not None:
                taps.append((sockets.linear, _keep(read, "u")))
            for point, tap in taps:
                stack.callback(point.register_forward_hook(tap).remove)
        logits: Tensor = source(tokens)
    return logits


def _keep(read: dict[str, Tensor], name: str) -> Callable[..., None]:
    def tap(module: Any, inputs: Any, x: Tensor) -> None:
        read[name] = x

    return tap


def _replace(read: dict[str, Tensor], gate: Any, mlp: Any) -> Callable[..., Tensor]:
    def tap(module: Any, inputs: Any, post: Tensor) -> Tensor:
        q = read["q"]
        out = gate.mixture(q) * read.get("u", q)
        return (out + mlp.b_in if isinstance(mlp, GatedMLP) else out).to(post.dtype)

    return tap


def activation_errors(converted: Any, act_fns: list[str], tokens: Tensor) -> pd.DataFrame:
    """Certified and measured error of the activation in each layer; empty for exact gates.

    Args:
        converted: a model with neuron-heads, in either layout.
        act_fns: the source's activation in each layer.
        tokens: what to run it on.
    """
    layers: list[Any] = neuron_heads(converted)
    if not all(isinstance(heads, BilinearHeads) for heads in layers):
        return pd.DataFrame()
    rows: dict[int, dict[str, float]] = {}

    def measure(layer: int, q: Tensor) -> None:
        heads, gate = layers[layer], layers[layer].gate
        assert isinstance(gate, BilinearGate | RangeGate)
        limit = gate.range if isinstance(gate, RangeGate) else float("inf")
        errors = {"bound": gate.bound, "measured": heads.error(q, act_fns[layer])}
        largest = q.abs().max().item()
        rows[layer] = {"layer": layer, **errors, "largest": largest, "range": limit}

    with ExitStack() as stack:
        for layer, heads in enumerate(layers):
            stack.callback(_watch(heads, layer, measure).remove)
        converted(tokens)
    return pd.DataFrame([rows[layer] for layer in range(len(layers))])


def _watch(
    heads: Any, layer: int, measure: Callable[[int, Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    """Have q measured whenever the heads of a layer read it."""
    if isinstance(heads, InPlace):
        return heads.sockets.pre.register_forward_hook(lambda _, x, q: measure(layer, q))
    return heads.register_forward_pre_hook(lambda _, x: measure(layer, heads.pre_activation(x[0])))
