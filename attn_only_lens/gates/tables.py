"""Choose a bilinear gate: from formulas, or from tables of fitted coefficients.

`plain.json` holds the fitted gates of plain MLPs: gelu and its tanh form with 1 to 8 heads
(`analyses/tools/fit_gates.py`). A head with c ≠ 0 stands next to its mirror image, which has the
same weight and slope and the offset -c. So p(-q) = 1 - p(q), as for the exact gate, and the error
is even. The coefficients minimise the largest error over the real line under Σ|w| < 2. Each w is a
multiple of 2^-23, so that float32 holds every w and every partial sum: they add up to exactly 1,
and for large q the activation equals q to the last bit. b and c were fitted again around the
rounded w, and rounded to ten decimals; both roundings cost less than 0.1 % of the error. The bounds
are certificates (`analyses/tools/certificates.py`), rounded up to four digits.

`gated.json` holds the gates of gated MLPs, for limits that are powers of two and 4 to 12 heads
(`analyses/tools/fit_gated_gates.py`). relu has one limit, 1, and is scaled to the others.

gelu_new stands for three spellings of one formula. Its bounds also hold for gelu_fast, which rounds
sqrt(2/π) to ten digits and changes the activation by less than 1e-11.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Literal

import torch

from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import GATES, QUICK_GELU_SLOPE

_DEFAULT_TOLERANCE = 1e-3  # gelu then takes 4 heads
_DEFAULT_GATED_HEADS = 8
_LEAST_TOLERANCE = 1e-12  # the precision of an activation in float64; relu's slope fits float32
_LARGEST_LIMIT = 2.0**64  # far within float32
_RELU_CONSTANT = 0.2784645427611  # max of x / (1 + exp x), rounded up
_EXACT_SLOPES = {name: gate.slope for name, gate in GATES.items() if gate.slope is not None}
_SPELLINGS = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}


def bilinear_gate(
    act_fn: str,
    heads: int | None = None,
    *,
    tolerance: float | None = None,
    slope: float | Literal["paper"] | None = None,
    limit: float | None = None,
) -> BilinearGate:
    """Return the bilinear gate of an activation.

    For plain MLPs (no `limit`), return the gate with the fewest heads whose certified bound is
    within `tolerance`, or with the given number of heads. relu has one head, and the tolerance sets
    its slope. With `slope` the gate is one head, SiLU(slope · q) / slope. For gated MLPs, return
    the gate of the smallest limit in the table that covers `limit`.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2, for
    gates of one head.

    Args:
        act_fn: silu, quick_gelu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh or relu; quick_gelu
            for plain MLPs only.
        heads: heads a neuron. For plain MLPs 1, 2, 4, 6 or 8 for the gelus and 1 for the others;
            for gated MLPs 4, 6, 8 (the default) or 12.
        tolerance: for plain MLPs, the largest allowed error over all real q, at least 1e-12; by
            default 1e-3.
        slope: for plain MLPs with one head. For relu any slope k, with an error of at most
            0.2785/k; for the gelus from 1 to 3.2, or "paper" for the paper's 1.702, whose bound is
            0.0204 (0.0207 for the tanh forms). The slopes of silu and quick_gelu are fixed.
        limit: for gated MLPs, the largest |q| to cover, as measured on data.

    Returns:
        The gate, with its coefficients and its certified bound; its `limit` is at least the given.

    Raises:
        ValueError: no such activation, number of heads or limit, or no gate within the tolerance;
            the message lists the choices.

    Example:
        >>> from attn_only_lens.gates import bilinear_gate
        >>> bilinear_gate("gelu_new", tolerance=1e-5).heads_per_neuron
        6
        >>> bilinear_gate("silu")
        BilinearGate(name='silu', w=(1.0,), b=(1.0,), c=(0.0,), bound=0.0, limit=inf)
        >>> gate = bilinear_gate("gelu_new", limit=11.0)
        >>> gate.limit, gate.heads_per_neuron, gate.bound < 1e-3
        (16.0, 8, True)
        >>> gate = bilinear_gate("gelu", slope="paper")
        >>> gate.b, 0.0203 < gate.bound < 0.0204
        ((1.702,), True)
    """
    if limit is not None:
        if tolerance is not None or slope is not None:
            raise ValueError(
                "got a tolerance or a slope for gated MLPs, whose error depends on the limit: "
                "choose the number of heads instead"
            )
        return _gated(act_fn, _DEFAULT_GATED_HEADS if heads is None else heads, limit)
    if slope is not None:
        if heads not in (None, 1) or tolerance is not None:
            raise ValueError(
                f"got slope={slope!r} with heads={heads!r} and tolerance={tolerance!r}; expected "
                "only a slope, which means one head and sets its error"
            )
        return _of_slope(act_fn, slope)
    if tolerance is not None and not _LEAST_TOLERANCE <= tolerance < math.inf:
        raise ValueError(
            f"got tolerance={tolerance!r}; expected a number of at least {_LEAST_TOLERANCE}. Exact "
            "gates (GATES) have no error beyond rounding"
        )
    return _within(act_fn, heads, tolerance)


def _within(act_fn: str, heads: int | None, tolerance: float | None) -> BilinearGate:
    """Return the smallest gate for plain MLPs within a tolerance, perhaps of so many heads."""
    allowed = _DEFAULT_TOLERANCE if tolerance is None else tolerance
    gates = _plain(act_fn, relu_tolerance=allowed)
    if heads is not None:
        gates = _with_heads(gates, heads)
        if tolerance is None:
            return gates[0]
    for gate in gates:
        if gate.bound <= allowed:
            return gate
    bounds = ", ".join(f"{gate.heads_per_neuron} heads: {gate.bound:.4g}" for gate in gates)
    raise ValueError(
        f"no bilinear gate of {act_fn} is within {allowed!r} of it ({bounds}): allow more heads or "
        f"a larger tolerance, or use the exact gate, GATES[{act_fn!r}]"
    )


@cache
def _of_slope(act_fn: str, slope: float | Literal["paper"]) -> BilinearGate:
    """Return a gate of one head for plain MLPs."""
    gate = _plain(act_fn, _DEFAULT_TOLERANCE)[0]
    if slope == "paper" and act_fn not in ("relu", *_EXACT_SLOPES):
        slope = QUICK_GELU_SLOPE
    least, most = 1.0, 3.2
    if act_fn == "relu":
        least, most = math.ulp(0.0), _RELU_CONSTANT / _LEAST_TOLERANCE
    elif act_fn in _EXACT_SLOPES:
        least = most = _EXACT_SLOPES[act_fn]
    if isinstance(slope, str) or not least <= slope <= most:
        raise ValueError(
            f"got slope={slope!r} for {act_fn}; expected a number from {least:.4g} to {most:.4g}, "
            "or 'paper' for a gelu"
        )
    if act_fn == "relu":
        bound = _RELU_CONSTANT / slope
    else:
        bound = gate.bound if act_fn in _EXACT_SLOPES else _slope_bound(act_fn, slope)
    return replace(gate, b=(float(slope),), bound=bound)


def _slope_bound(act_fn: str, slope: float) -> float:
    """Bound the error of SiLU(slope · q) / slope against a gelu, for a slope from 1 to 3.2.

    The error is even in q. `analyses/tools/certificates.py` proves that it exceeds its values at
    nodes h = 2^-10 apart by less than h²/8 · (3.1 + 0.87 · 3.2) < 7e-7, and is below 5e-8 for q >
    20.
    """
    q = torch.arange(20 * 2**10 + 1, dtype=torch.float64, device="cpu") / 2**10
    error = q * (torch.sigmoid(-slope * q) - GATES[act_fn].bias_weight(q))
    return error.abs().max().item() + 1e-6


def _plain(act_fn: str, relu_tolerance: float) -> Sequence[BilinearGate]:
    """Return the gates for plain MLPs, fewest heads first."""
    if act_fn == "relu":
        slope = _RELU_CONSTANT / relu_tolerance
        return [BilinearGate(act_fn, (1.0,), (slope,), (0.0,), relu_tolerance)]
    if act_fn in _EXACT_SLOPES:
        return [BilinearGate(act_fn, (1.0,), (_EXACT_SLOPES[act_fn],), (0.0,), 0.0)]
    return _fitted("plain", act_fn, ("relu", *_EXACT_SLOPES))


def _gated(act_fn: str, heads: int, limit: float) -> BilinearGate:
    gates = _with_heads(_fitted("gated", act_fn), heads)
    if not 0.0 < limit <= _LARGEST_LIMIT:
        raise ValueError(
            f"got limit={limit}; expected a positive number, the largest |q| measured, up to "
            f"{_LARGEST_LIMIT:g}"
        )
    if act_fn == "relu":
        mantissa, exponent = math.frexp(limit)  # limit = mantissa · 2^exponent, 1/2 <= mantissa < 1
        return _scaled(gates[0], 2.0 ** (exponent - (mantissa == 0.5)))
    covering = [gate for gate in gates if gate.limit >= limit]
    if not covering:
        largest = max(gate.limit for gate in gates)
        raise ValueError(
            f"got limit={limit:g}; {act_fn} has gates up to {largest:g}: use the exact gate, or "
            f"pass limit={largest:g} and let `verify` measure the error of larger inputs"
        )
    return min(covering, key=lambda gate: gate.limit)


def _scaled(gate: BilinearGate, factor: float) -> BilinearGate:
    """Return the gate of factor · α(q / factor); exact for a power of two."""
    return replace(
        gate,
        w=tuple(factor * w for w in gate.w),
        b=tuple(b / factor for b in gate.b),
        bound=factor * gate.bound,
        limit=factor * gate.limit,
    )


def _with_heads(gates: Sequence[BilinearGate], heads: int) -> Sequence[BilinearGate]:
    if matching := [gate for gate in gates if gate.heads_per_neuron == heads]:
        return matching
    counts = sorted({gate.heads_per_neuron for gate in gates})
    raise ValueError(f"got heads={heads!r}; {gates[0].name} has gates of {counts} heads a neuron")


def _fitted(
    kind: Literal["plain", "gated"], act_fn: str, formulas: Iterable[str] = ()
) -> Sequence[BilinearGate]:
    spelling = _SPELLINGS.get(act_fn, act_fn)
    if gates := [replace(gate, name=act_fn) for gate in table(kind) if gate.name == spelling]:
        return gates
    known = sorted({gate.name for gate in table(kind)} | set(_SPELLINGS) | set(formulas))
    raise ValueError(
        f"no bilinear gate of {act_fn!r} for {kind} MLPs; expected one of {', '.join(known)}"
    )


@cache
def table(kind: Literal["plain", "gated"]) -> tuple[BilinearGate, ...]:
    """Return every fitted gate for one kind of MLP, fewest heads first for each activation."""
    file = resources.files("attn_only_lens.gates").joinpath(f"{kind}.json")
    return gates_from_json(file.read_text("utf-8"))


def gates_from_json(text: str) -> tuple[BilinearGate, ...]:
    """Return the gates of a table in JSON: a list of objects with the fields of `BilinearGate`."""
    return tuple(
        BilinearGate(**entry | {name: tuple(entry[name]) for name in "wbc"})
        for entry in json.loads(text)
    )
