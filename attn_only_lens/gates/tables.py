"""Choose a bilinear gate: from formulas, or from tables of fitted coefficients.

`plain.json` has the gates of plain MLPs that no formula gives: gelu and its tanh form with 1 to 8
heads (`analyses/tools/fit_gates.py`). A head with c ≠ 0 has a mirror image of the same weight and
slope,
offset -c, next to it. So the mixture is odd around one half, p(-q) = 1 - p(q), as the gate that it
stands for is, and its error is even. The heads minimise the largest error over the real line under
Σ|w| < 2. Then each w was rounded to a multiple of 2^-23, so that float32 holds every w and every
partial sum of them: they add up to exactly 1, and for large q the activation is q to the last bit.
b and c were fitted again around the rounded w, and rounded to ten decimals; the two roundings cost
less than 0.1 % of the error. The bounds are certificates rounded up to four digits.

`gated.json` has the gates of gated MLPs, for limits that are powers of two and 4 to 12 heads
(`analyses/tools/fit_gated_gates.py`); relu has one limit, 1, and is scaled to others.

gelu_new stands for three spellings of one formula. Its bounds hold for gelu_fast too, which rounds
sqrt(2/π) to ten digits and moves the activation by less than 1e-11.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Literal

from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.certificates import certified_bound
from attn_only_lens.gates.exact import GATES, QUICK_GELU_SLOPE

_DEFAULT_TOLERANCE = 1e-3  # gelu then takes 4 heads
_DEFAULT_GATED_HEADS = 8
_LEAST_TOLERANCE = 1e-12  # what float64 keeps of an activation; relu's slope stays in float32
_LARGEST_LIMIT = 2.0**64  # of any use, and far within float32
_RELU_CONSTANT = 0.2784645427611  # max of x / (1 + exp x), rounded up
_EXACT_SLOPES = {name: gate.slope for name, gate in GATES.items() if gate.slope is not None}
_PAPERS_SLOPE = QUICK_GELU_SLOPE
_STEEPEST = _RELU_CONSTANT / _LEAST_TOLERANCE
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

    For plain MLPs (no `limit`), the fewest heads whose certified bound is within `tolerance`; or
    the given number of heads, if they are within it. For relu, which has one head, the tolerance
    sets the slope. With `slope` the gate is one head, SiLU(slope · q) / slope. For gated MLPs, the
    gate of the smallest limit in the table that covers `limit`.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2, for
    gates of one head.

    Args:
        act_fn: silu, quick_gelu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh or relu; quick_gelu
            for plain MLPs only.
        heads: heads a neuron. For plain MLPs 1, 2, 4, 6 or 8 for the gelus and 1 for the others;
            for gated ones 4, 6, 8 (the default) or 12.
        tolerance: for plain MLPs, the largest allowed error over all real q, at least 1e-12; by
            default 1e-3.
        slope: for plain MLPs with one head. For relu, k, with an error of 0.2785/k at most; for
            the gelus from 1 to 3.2, or "paper" for the paper's 1.702, whose bound is 0.0204, or
            0.0207 for the tanh forms. silu and quick_gelu have their own.
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
                "a tolerance or a slope was given for gated MLPs, whose error depends on the "
                "limit: choose the number of heads, and read the bounds off the gates"
            )
        return _gated(act_fn, _DEFAULT_GATED_HEADS if heads is None else heads, limit)
    if tolerance is not None and not _LEAST_TOLERANCE <= tolerance < math.inf:
        raise ValueError(
            f"got tolerance={tolerance!r}; expected a number of at least {_LEAST_TOLERANCE}. Exact "
            "gates (GATES) have no error beyond rounding"
        )
    if slope is not None:
        if heads not in (None, 1) or tolerance is not None:
            raise ValueError(
                f"got slope={slope!r} with heads={heads!r} and tolerance={tolerance!r}; expected a "
                "slope alone, which is that of one head and settles its error"
            )
        return _of_slope(act_fn, slope)
    within = _DEFAULT_TOLERANCE if tolerance is None else tolerance
    gates = _plain(act_fn, relu_tolerance=within)
    if heads is not None:
        gates = _with_heads(gates, heads)
        if tolerance is None:
            return gates[0]
    for gate in gates:
        if gate.bound <= within:
            return gate
    bounds = ", ".join(f"{gate.heads_per_neuron} heads: {gate.bound:.4g}" for gate in gates)
    raise ValueError(
        f"no bilinear gate of {act_fn} is within {within!r} of it ({bounds}): allow more heads or "
        f"a larger tolerance, or use the exact gate, GATES[{act_fn!r}]"
    )


@cache
def _of_slope(act_fn: str, slope: float | Literal["paper"]) -> BilinearGate:
    """One head for plain MLPs."""
    if slope == "paper" and act_fn not in ("relu", *_EXACT_SLOPES):
        slope = _PAPERS_SLOPE
    if isinstance(slope, str) or not 0.0 < slope <= _STEEPEST:
        raise ValueError(
            f"got slope={slope!r} for {act_fn}; expected a number from 0 to {_STEEPEST:.3g}, or "
            "'paper' for a gelu"
        )
    if act_fn in _EXACT_SLOPES and slope != _EXACT_SLOPES[act_fn]:
        raise ValueError(f"got slope={slope!r}; that of {act_fn} is {_EXACT_SLOPES[act_fn]}")
    gate = _plain(act_fn, _DEFAULT_TOLERANCE)[0]
    gate = replace(gate, b=(float(slope),))
    if act_fn == "relu":
        return replace(gate, bound=_RELU_CONSTANT / slope)
    return gate if act_fn in _EXACT_SLOPES else replace(gate, bound=certified_bound(gate))


def _plain(act_fn: str, relu_tolerance: float) -> Sequence[BilinearGate]:
    """Gates for plain MLPs, fewest heads first."""
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
            f"ask for limit={largest:g} and see with `verify` what larger inputs cost"
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
    if found := [gate for gate in gates if gate.heads_per_neuron == heads]:
        return found
    counts = sorted({gate.heads_per_neuron for gate in gates})
    raise ValueError(f"got heads={heads!r}; {gates[0].name} has gates of {counts} heads a neuron")


def _fitted(
    kind: Literal["plain", "gated"], act_fn: str, others: Iterable[str] = ()
) -> Sequence[BilinearGate]:
    fitted = _SPELLINGS.get(act_fn, act_fn)
    if found := [replace(gate, name=act_fn) for gate in table(kind) if gate.name == fitted]:
        return found
    known = sorted({gate.name for gate in table(kind)} | set(_SPELLINGS) | set(others))
    raise ValueError(
        f"no bilinear gate of {act_fn!r} for {kind} MLPs; expected one of {', '.join(known)}"
    )


@cache
def table(kind: Literal["plain", "gated"]) -> tuple[BilinearGate, ...]:
    """Return every fitted gate for one kind of MLP, fewest heads first for each activation."""
    file = resources.files("attn_only_lens.gates").joinpath(f"{kind}.json")
    return gates_from_json(file.read_text("utf-8"))


def gates_from_json(text: str) -> tuple[BilinearGate, ...]:
    """Return the gates of a table in JSON: objects with the fields of `BilinearGate`."""
    return tuple(
        BilinearGate(
            name=entry["name"],
            w=tuple(entry["w"]),
            b=tuple(entry["b"]),
            c=tuple(entry["c"]),
            bound=entry["bound"],
            limit=entry["limit"],
        )
        for entry in json.loads(text)
    )
