"""From what a caller asks of `convert` to the gates of a model, or the reasons why not."""

from dataclasses import dataclass
from typing import Any

import torch

from attn_only_lens.gates import bilinear_gate
from attn_only_lens.heads import EXACT, Gating
from attn_only_lens.models.calibrate import Calibration
from attn_only_lens.numerics import as_plain

__all__ = ["BilinearRequest", "choose_gating"]

_GATED_HEADS = 8  # by default


@dataclass(frozen=True)
class BilinearRequest:
    """What was asked of bilinear gates; see `convert`."""

    heads_per_neuron: int | None
    tolerance: float | None
    calibration: Calibration | None

    def __post_init__(self) -> None:
        for name in ("heads_per_neuron", "tolerance"):
            object.__setattr__(self, name, as_plain(getattr(self, name)))

    @property
    def empty(self) -> bool:
        """Whether nothing was asked."""
        return self == BilinearRequest(None, None, None)


def choose_gating(
    model: Any, gate: str, wanted: BilinearRequest
) -> tuple[Gating | None, list[str]]:
    """The gates, and the reasons against what was asked for (then there are none)."""
    if gate == "exact":
        if wanted.empty:
            return EXACT, []
        return None, [
            "heads_per_neuron, tolerance and calibration are of bilinear gates; give "
            'gate="bilinear" with them'
        ]
    if gate != "bilinear":
        return None, [f"got gate={gate!r}; expected 'exact' or 'bilinear'"]
    cfg = getattr(model, "cfg", None)
    if cfg is None:
        return None, []  # not a model: said already
    odd = _odd_arguments(wanted)
    if odd:
        return None, odd
    try:
        return (_gated if cfg.gated_mlp else _plain)(cfg, wanted), []
    except ValueError as error:
        return None, [str(error)]


def _odd_arguments(wanted: BilinearRequest) -> list[str]:
    reasons = []
    heads, tolerance, calibration = wanted.heads_per_neuron, wanted.tolerance, wanted.calibration
    if heads is not None and type(heads) is not int:
        reasons.append(f"got heads_per_neuron={heads!r}; expected a whole number")
    if tolerance is not None and type(tolerance) not in (int, float):
        reasons.append(f"got tolerance={tolerance!r}; expected a number")
    if calibration is not None and not isinstance(calibration, Calibration):
        reasons.append(f"got a {type(calibration).__name__} for calibration; expected calibrate's")
    return reasons


def _plain(cfg: Any, wanted: BilinearRequest) -> Gating:
    if wanted.calibration is not None:
        raise ValueError(
            "a calibration was given for plain MLPs, whose bilinear gates hold for every input: "
            "leave it out"
        )
    gate = bilinear_gate(cfg.act_fn, wanted.heads_per_neuron, wanted.tolerance)
    room = torch.finfo(cfg.dtype).max / 64  # for pre-activations
    if max(gate.b) > room:
        raise ValueError(
            f"its slope would be {max(gate.b):.3g}, and scores of {cfg.dtype} end soon after: give "
            f"a tolerance of {gate.bound * max(gate.b) / room:.1g} or more, or convert in float32"
        )
    tolerance = wanted.tolerance if cfg.act_fn == "relu" else None
    return Gating("bilinear", gate.heads_per_neuron, tolerance)


def _gated(cfg: Any, wanted: BilinearRequest) -> Gating:
    if wanted.tolerance is not None:
        raise ValueError(
            "a tolerance was given for gated MLPs, whose error depends on the range: choose "
            "heads_per_neuron, and read the bounds off the model's gates"
        )
    if wanted.calibration is None:
        raise ValueError(
            "its MLPs are gated, and bilinear gates for them hold on a range only: give "
            "calibration=calibrate(model, tokens)"
        )
    ranges = wanted.calibration.ranges
    if len(ranges) != cfg.n_layers:
        raise ValueError(
            f"the calibration is of {len(ranges)} layers; expected {cfg.n_layers}: calibrate this "
            "model"
        )
    heads = _GATED_HEADS if wanted.heads_per_neuron is None else wanted.heads_per_neuron
    gating = Gating("bilinear", heads, ranges=ranges)
    wrong: dict[str, list[int]] = {}
    for layer in range(cfg.n_layers):
        try:
            gating.gate(cfg.act_fn, layer)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(layer)
    if wrong:
        raise ValueError("; ".join(f"layers {layers}: {text}" for text, layers in wrong.items()))
    return gating
