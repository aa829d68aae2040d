"""The `gate=` option of `convert` and `expose_neuron_heads`, and the gates that it leads to."""

from dataclasses import dataclass
from typing import Literal

import torch

from attn_only_lens.arguments import as_plain
from attn_only_lens.errors import InputError
from attn_only_lens.gates import GeneralizedSiLU, bilinear_gate
from attn_only_lens.heads import EXACT, Gating
from attn_only_lens.models.calibrate import Calibration


@dataclass(frozen=True)
class Bilinear:
    """Ask for bilinear gates: `convert(model, gate=Bilinear(heads=4))`.

    Nothing but softmax over bilinear scores is then used, as in the theorem: each neuron becomes m
    heads `L5N1234.0 … .m-1` that write along one vector, and its activation is approximated within
    a certified bound (`bilinear_gate`). In a plain MLP that holds for every real input, and silu
    needs one head and no approximation; in a gated MLP it holds on the calibrated range.

    Attributes:
        heads: m, heads a neuron; by default the fewest within `tolerance`, or 8 for gated MLPs.
        tolerance: for plain MLPs, the largest error of the activation; by default 1e-3.
        calibration: for gated MLPs, which need it: `calibrate(model, tokens)`.
        slope: for plain MLPs with one head, SiLU(slope · x) / slope: k for relu, from 1 to 3.2 for
            the gelus, and "paper" for the paper's gelu, of slope 1.702 (`bilinear_gate`).

    Raises:
        InputError: the heads are no whole number, the tolerance or the slope no number, or the
            calibration not `calibrate`'s.

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
        expected: dict[str, tuple[str, tuple[type, ...]]] = {
            "heads": ("a whole number", (int,)),
            "tolerance": ("a number", (int, float)),
            "slope": ("a number, or 'paper'", (int, float)),
            "calibration": ("what calibrate returned", (Calibration,)),
        }
        for name, (what, types) in expected.items():
            value = as_plain(getattr(self, name))
            object.__setattr__(self, name, value)
            named = name == "slope" and value == "paper"
            if value is not None and not named and type(value) not in types:  # True is no number
                wrong.append(f"got {name}={value!r}; expected {what}")
        if wrong:
            raise InputError(wrong, "there are no such bilinear gates")


GateOption = Literal["exact"] | GeneralizedSiLU | Bilinear


def gating_for(
    gate: GateOption, *, act_fn: str, gated: bool, dtype: torch.dtype, n_layers: int
) -> Gating:
    """Return the gates that an option leads to in a model with such MLPs.

    Raises:
        ValueError: no gates, or none for these MLPs.
    """
    if isinstance(gate, str) and gate == "exact":
        return EXACT
    if isinstance(gate, GeneralizedSiLU):
        return Gating(silu=gate)
    if not isinstance(gate, Bilinear):
        raise ValueError(
            f"got gate={gate!r}; expected 'exact', attn_only_lens.Bilinear(...) or "
            "attn_only_lens.GeneralizedSiLU(a_1, a_2)"
        )
    return _gated(gate, act_fn, n_layers) if gated else _plain(gate, act_fn, dtype)


def _plain(option: Bilinear, act_fn: str, dtype: torch.dtype) -> Gating:
    if option.calibration is not None:
        raise ValueError(
            "a calibration was given for plain MLPs, whose bilinear gates hold for every input: "
            "leave it out"
        )
    gate = bilinear_gate(act_fn, option.heads, tolerance=option.tolerance, slope=option.slope)
    slope, room = max(gate.b), torch.finfo(dtype).max / 64  # for pre-activations
    if slope > room:
        raise ValueError(
            f"its slope would be {slope:.3g}, and scores of {dtype} end soon after: give a "
            f"tolerance of {gate.bound * slope / room:.1g} or more, or convert in float32"
        )
    chosen = act_fn == "relu" or option.slope is not None
    return Gating("bilinear", gate.heads_per_neuron, slope if chosen else None)


def _gated(option: Bilinear, act_fn: str, n_layers: int) -> Gating:
    if option.calibration is None:
        raise ValueError(
            "its MLPs are gated, and bilinear gates for them hold on a range only: give "
            "calibration=calibrate(model, tokens)"
        )
    ranges = option.calibration.ranges
    if len(ranges) != n_layers:
        raise ValueError(
            f"the calibration is of {len(ranges)} layers; expected {n_layers}: calibrate this model"
        )
    heads: set[int] = set()
    wrong: dict[str, list[int]] = {}
    for layer, limit in enumerate(ranges):
        try:
            gate = bilinear_gate(
                act_fn, option.heads, tolerance=option.tolerance, slope=option.slope, limit=limit
            )
            heads.add(gate.heads_per_neuron)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(layer)
    if wrong:
        raise ValueError("; ".join(f"layers {layers}: {text}" for text, layers in wrong.items()))
    return Gating("bilinear", heads.pop(), ranges=ranges)
