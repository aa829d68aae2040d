"""Measure how far the gates of a gated MLP reach on data."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import as_plain, is_number
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.inputs import checked_tokens
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.models.in_place.known_mlps import known_mlps
from attn_only_lens.tl import HookedTransformer

_PROBLEM = "this model cannot be calibrated"


@dataclass(frozen=True)
class Calibration:
    """The ranges that bilinear gates of gated MLPs must serve.

    Attributes:
        ranges: for each source layer, the largest |g| seen, g = x · W_gate, times `margin`.
        margin: room for what other data may bring.
        n_tokens: tokens it was measured on.
    """

    ranges: tuple[float, ...]
    margin: float
    n_tokens: int


@torch.no_grad()
def calibrate(
    model: HookedTransformer | TransformerBridge, tokens: Tokens | str, *, margin: float = 1.25
) -> Calibration:
    """Measure the range of gate pre-activations in every layer.

    A sum of sigmoids is bounded and the activation is not, so heads that are bilinear can stand
    for a gate on a range only (`gates/bilinear.py`). Beyond it they saturate; `verify` reports how
    far a given input goes, and what that costs.

    Args:
        model: a source model with gated MLPs; a bridge may have its neuron-heads exposed already.
        tokens: representative input [batch, pos], or a text if the model has a tokenizer.
        margin: what the largest value seen is multiplied by.

    Returns:
        The ranges, for `convert(model, gate=Bilinear(calibration=…))`.

    Raises:
        UnsupportedModelError: the model has no gated MLPs (other gates need no calibration),
            cannot be converted, or computes numbers that are not finite on these tokens.
        UnsupportedCallError: the model cannot run on these tokens.
        InputError: the margin is no number, or below 1.

    Example:
        >>> import torch
        >>> from transformer_lens import HookedTransformer, HookedTransformerConfig
        >>> from attn_only_lens import Bilinear, calibrate, convert
        >>> sizes = {"n_layers": 2, "d_model": 10, "n_heads": 2, "d_head": 5, "d_mlp": 7}
        >>> vocabulary = {"d_vocab": 11, "n_ctx": 13, "act_fn": "silu", "gated_mlp": True}
        >>> cfg = HookedTransformerConfig(**sizes, **vocabulary, seed=0, device="cpu")
        >>> model = HookedTransformer(cfg)
        >>> calibration = calibrate(model, torch.arange(11)[None])
        >>> convert(model, gate=Bilinear(calibration=calibration)).all_head_labels(neurons=True)[2]
        'L0N0.0'
    """
    known = known_mlps(model, _PROBLEM)
    if any(each.points.pre_linear is None for each in known):
        reason = "its MLPs are not gated: bilinear gates hold for every input, uncalibrated"
        raise UnsupportedModelError([reason], _PROBLEM)
    margin = as_plain(margin)
    if not is_number(margin, 1):
        raise InputError([f"got margin={margin!r}; expected a number, at least 1"], _PROBLEM)
    tokens = checked_tokens(model, tokens)
    largest = [0.0] * len(known)

    def measure(layer: int) -> Any:
        def hook(module: Any, inputs: Any, gate: Tensor) -> None:
            largest[layer] = gate.abs().max().item()

        return hook

    with ExitStack() as stack:
        for layer, each in enumerate(known):
            stack.callback(each.points.pre.register_forward_hook(measure(layer)).remove)
        model(tokens)
    infinite = [layer for layer, value in enumerate(largest) if not value < float("inf")]
    if infinite:
        raise UnsupportedModelError(
            [f"its gate pre-activations are not finite in layers {infinite}"], _PROBLEM
        )
    ranges = tuple(max(margin * value, 1e-6) for value in largest)
    return Calibration(ranges, margin, tokens.numel())
