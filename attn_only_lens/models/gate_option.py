"""The `gate` option of `convert` and `expose_neuron_heads`, and its calibration for gated MLPs."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import as_plain, is_number
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.gates import GeneralizedSiLU, bilinear_gate
from attn_only_lens.gates.gating import EXACT, Gating
from attn_only_lens.models.in_place.known_mlps import known_mlps
from attn_only_lens.models.in_place.mixtures import is_mixture
from attn_only_lens.tl import HookedTransformer

_PROBLEM = "this model cannot be calibrated"


@dataclass(frozen=True)
class Calibration:
    """The ranges of pre-activations over which bilinear gates must approximate gated MLPs.

    Attributes:
        ranges: for each layer, `margin` times the largest |g| on the tokens, for g = x · W_gate.
        margin: the factor by which `ranges` exceed the largest |g| seen, to leave room for other
            data.
        n_tokens: the number of tokens that the model was run on.
    """

    ranges: tuple[float, ...]
    margin: float
    n_tokens: int


_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "heads": ("a whole number", (int,)),
    "tolerance": ("a number", (int, float)),
    "slope": ("a number, or 'paper'", (int, float)),
    "calibration": ("the calibration of Bilinear.calibrated(model, tokens)", (Calibration,)),
}


@dataclass(frozen=True)
class Bilinear:
    """The `gate` option for bilinear gates, as in `convert(model, gate=Bilinear(heads=4))`.

    With bilinear gates, neuron-heads compute a softmax over bilinear scores, like attention heads.
    The model then has m times as many neurons: neuron i of an MLP of the original becomes the m
    neurons i · m to i · m + m - 1, each of them one head. Their sum approximates the activation of
    neuron i within a certified bound, which is in `verification.activations` of the result.
    Analyses treat them as any other neurons; `HeadName.original_neuron` returns the name of neuron
    i for any of them. In a plain MLP, the bound holds for every real input, and silu is exact with
    one head. In a gated MLP, the bound holds only on the range that `Bilinear.calibrated` measures.

    With m = 1, 2, 4, 6 or 8 heads, the bounds for gelu are 0.0140, 4.2e-3, 2.4e-5, 1.0e-6 and
    5.9e-8. relu has one steep head.

    Attributes:
        heads: m, the number of heads that replace one neuron; by default 8 for gated MLPs, and for
            plain MLPs the smallest number whose error is within `tolerance`.
        tolerance: for plain MLPs, the largest allowed error of the activation; by default 1e-3.
        calibration: the ranges of gated MLPs, which `Bilinear.calibrated(model, tokens)` measures.
        slope: for plain MLPs and m = 1, the slope in SiLU(slope · x) / slope: any positive number
            for relu, 1 to 3.2 for the gelus, or "paper" for the paper's gelu with slope 1.702.

    Raises:
        InputError: a field has the wrong type.

    Example:
        >>> from attn_only_lens import Bilinear
        >>> Bilinear(heads=4)
        Bilinear(heads=4, tolerance=None, calibration=None, slope=None)
    """

    heads: int | None = None
    tolerance: float | None = None
    calibration: Calibration | None = None
    slope: float | Literal["paper"] | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name, (expected, types) in _FIELDS.items():
            value = as_plain(getattr(self, name))
            object.__setattr__(self, name, value)
            named = name == "slope" and value == "paper"
            if value is not None and not named and type(value) not in types:  # refuses bool
                wrong.append(f"got {name}={value!r}; expected {expected}")
        InputError.raise_if(wrong, "Bilinear cannot use these values")

    @classmethod
    def calibrated(
        cls,
        model: HookedTransformer | TransformerBridge,
        tokens: Tokens | str,
        heads: int | None = None,
        *,
        margin: float = 1.25,
    ) -> "Bilinear":
        """Return the option for a gated MLP, after measuring the ranges of its pre-activations.

        Bilinear heads can approximate the activation of a gated MLP only on a bounded range,
        because a sum of sigmoids is bounded and the activation is not (`gates/bilinear.py`). The
        range of each layer is `margin` times the largest |x · W_gate| on the given tokens, where x
        is the MLP's input. To check the range on other input, pass it as `check` to `convert` or
        `expose_neuron_heads`, whose report has the largest pre-activation and error.

        Args:
            model: an original model with gated MLPs, or a bridge with exposed neuron-heads.
            tokens: representative input [batch, pos], or a string if the model has a tokenizer.
            heads: m, the number of heads that replace one neuron; by default 8.
            margin: the factor by which the largest |x · W_gate| seen is multiplied.

        Raises:
            UnsupportedModelError: the model has no gated MLPs (other gates need no calibration),
                cannot be converted, or computes values that are not finite on these tokens.
            UnsupportedCallError: the model cannot run on these tokens.
            InputError: the margin is not a number of at least 1, or `heads` has the wrong type.

        Example:
            >>> from attn_only_lens import Bilinear, expose_neuron_heads, load
            >>> model = load("small-english")
            >>> gate = Bilinear.calibrated(model, "The keys near the cabinet are old.", heads=4)
            >>> exposed = expose_neuron_heads(model, gate=gate, check="The key is new.")
            >>> exposed.verification.ok
            True
        """
        return cls(heads, calibration=_measured(model, tokens, margin))


GateOption = Literal["exact"] | GeneralizedSiLU | Bilinear


@torch.no_grad()
def _measured(model: Any, tokens: Tokens | str, margin: float) -> Calibration:
    mlps = known_mlps(model, _PROBLEM)
    if any(mlp.points.pre_linear is None for mlp in mlps):
        reason = "its MLPs are not gated, so their bilinear gates need no calibration"
        if any(is_mixture(mlp.mlp) for mlp in mlps):
            reason = "its MLPs are mixtures of experts, which can only have exact gates"
        raise UnsupportedModelError([reason], _PROBLEM)
    margin = as_plain(margin)
    if not is_number(margin, 1):
        raise InputError([f"got margin={margin!r}; expected a number of at least 1"], _PROBLEM)
    tokens = checked_tokens(model, tokens)
    largest = [0.0] * len(mlps)

    def measure(layer: int, module: Any, inputs: Any, gate: Tensor) -> None:
        largest[layer] = gate.abs().max().item()

    with ExitStack() as stack:
        for layer, mlp in enumerate(mlps):
            hook = partial(measure, layer)
            stack.enter_context(mlp.points.pre.register_forward_hook(hook))
        model(tokens)
    if infinite := [layer for layer, value in enumerate(largest) if not value < float("inf")]:
        reason = f"x · W_gate is not finite in layers {infinite}"
        raise UnsupportedModelError([reason], _PROBLEM)
    ranges = tuple(max(margin * value, 1e-6) for value in largest)
    return Calibration(ranges, margin, tokens.numel())


def gating_for(
    gate: GateOption, act_fn: str, gated: bool, dtype: torch.dtype, n_layers: int
) -> tuple[Gating, list[str]]:
    """Return the gates that a `gate` option selects, and error messages if it does not fit."""
    if isinstance(gate, str) and gate == "exact":
        return EXACT, []
    if isinstance(gate, GeneralizedSiLU):
        return Gating(silu=gate), []
    if not isinstance(gate, Bilinear):
        return EXACT, [
            f"got gate={gate!r}; expected 'exact', attn_only_lens.Bilinear(...) or "
            "attn_only_lens.GeneralizedSiLU(a_1, a_2)"
        ]
    try:
        gating = _gated(gate, act_fn, n_layers) if gated else _plain(gate, act_fn, dtype)
    except ValueError as error:
        return EXACT, [str(error)]
    return gating, []


def _plain(option: Bilinear, act_fn: str, dtype: torch.dtype) -> Gating:
    if option.calibration is not None:
        raise ValueError(
            "got a calibration, but the MLPs are plain, and their bilinear gates hold for every "
            "input: leave it out"
        )
    gate = bilinear_gate(act_fn, option.heads, tolerance=option.tolerance, slope=option.slope)
    # The attention scores, slope · q, must not overflow for pre-activations q up to 64.
    slope, room = max(gate.b), torch.finfo(dtype).max / 64
    if slope > room:
        raise ValueError(
            f"the gate's slope, {slope:.3g}, would be too steep for attention scores in {dtype}: "
            f"pass a tolerance of {gate.bound * slope / room:.1g} or more, or convert in float32"
        )
    chosen = act_fn == "relu" or option.slope is not None
    return Gating("bilinear", gate.heads, slope if chosen else None)


def _gated(option: Bilinear, act_fn: str, n_layers: int) -> Gating:
    if option.calibration is None:
        raise ValueError(
            "its MLPs are gated, and bilinear gates approximate their activation only on a bounded "
            "range: pass gate=Bilinear.calibrated(model, tokens)"
        )
    ranges = option.calibration.ranges
    if len(ranges) != n_layers:
        raise ValueError(
            f"the calibration has ranges for {len(ranges)} layers, but the model has {n_layers}: "
            "call Bilinear.calibrated with this model"
        )
    heads: set[int] = set()
    wrong: dict[str, list[int]] = {}
    for layer, limit in enumerate(ranges):
        try:
            gate = bilinear_gate(
                act_fn, option.heads, tolerance=option.tolerance, slope=option.slope, limit=limit
            )
            heads.add(gate.heads)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(layer)
    if wrong:
        raise ValueError("; ".join(f"layers {layers}: {text}" for text, layers in wrong.items()))
    return Gating("bilinear", heads.pop(), ranges=ranges)
