"""Certify bilinear gates: an upper bound of their error, over all real inputs or over a range.

The tables of `attn_only_lens.gates` store these bounds, and tests compute them again.

Plain MLPs: q · p(q) against a gelu, for every real q
-----------------------------------------------------
Let t >= 0, Σ w_j = 1, and p(-t) = 1 - p(t) for the exact gate p. The errors at q = t and q = -t
are, up to sign,

    e(t) = t · |Σ_j w_j σ(-(b_j t + c_j)) - (1 - p(t))|,     and the same with -c_j for c_j

Every term goes to 0, so nothing cancels. (If Σ w_j ≠ 1 exactly, the error grows without limit, and
the bound is infinity.)

*Middle*, 0 <= t <= T. Between two nodes a distance h apart, a C² function is at most the larger of
its values there plus h²/8 times its largest |second derivative| (the interpolation error of a
chord). With z = b t + c, and s^n σ'(s) <= s^n e^-s <= (n/e)^n for s >= 0:

    head    (t σ(-z))'' = -b (2 σ'(z) + (z - c) σ''(z)),  σ' <= 1/4,  |σ''| <= σ',  |σ''| < 0.1
            |(t σ(-z))''| <= b (1/2 + 1/e + |c|/10) < b (0.87 + |c|/10)
    gelu    |(t Φ(t))''| = φ(t) |2 - t²| < 0.8
    tanh    s = k t (1 + a t²), k = 2 sqrt(2/π) < 1.6, a = 0.044715; k t <= s, t s' <= 3 s,
            s' = k + 3 k a t² <= k + (3a/k) s²,  t s'' = 6 k a t² <= (6a/k) s²
            |(t σ(s))''| <= 2 s' σ' + t s'' σ' + t s'² |σ''|
                         <= k/2 + (12a/k) (2/e)² + 3 k/e + (9a/k) (3/e)³ < 3.1

*Tail*, t >= T. σ(-z) <= e^-z, so a head adds at most |w| t e^-(b t + c). The target adds
t (1 - p(t)): at most φ(t) <= e^-1.5t for gelu (Mills' ratio, t >= 3), and t e^-(k t) for tanh. All
of these fall for t >= 1, so their sum at T, with t e^-1.5t for the target, bounds the tail.

*Rounding*, in units of u = 2^-53. Nodes are multiples of a power of two, hence exact. The argument
of a weight is at most 64 with three roundings, where σ has slope 1/4: 48 u; exp, erfc and the
division after them: 8 u (libraries state 1 to 4 for each); the sum over the heads: 10 u. That is
below 2^-46. A weight is allowed 2^-45, which covers the few operations after it.

Gated MLPs: the mixture against α, for |q| <= R
-----------------------------------------------
Let e = Σ_j w_j σ(b_j q + c_j) - α; a head with c = ∞ adds the constant w_j. On a cell of width h,
the bound of a chord holds as above. With max |σ''| = 1/(6√3) and nodes q_i over the whole range,

    max |e| <= max_i |e(q_i)| + h²/8 · (max |α''| + 1/(6√3) · Σ |w_j| b_j²) + rounding.

*Curvature of α*, for all q. The bounds are crude, which a fine grid forgives:

    silu    |2σ' + q σ''| <= 2/4 + |q| e^-|q| < 0.9
    gelu    φ(q) |2 - q²| < 0.8
    tanh    α = q σ(u), u = s (q + k q³), s = 2 sqrt(2/π), k = 0.044715, t = |q|; |σ'| and |σ''| are
            at most e^-|u| <= e^-st, and t^n e^-st <= (n/(es))^n, so term by term
            |2 σ' u'|     <= 2s (1 + 3k t²) e^-st       < 3.3
            |q σ'' u'²|   <= s² t (1 + 3k t²)² e^-st    < 1
            |q σ' u''|    <= 6sk t² e^-st               < 0.1
    relu    0 on both sides of 0, which is a node

*Rounding*, in units of u = 2^-53. R and the number of cells are powers of two, so nodes are exact.
The argument z = b q + c of a sigmoid has an error of u (|b q| + |z|) <= u (|c| + 2|z|); times σ',
since |z| σ'(z) < 1/4, below (|c| + 1) u. The sigmoid, the product and at most 15 sums: 20 u a term.
α: 8 u |q|.

gelu_fast rounds sqrt(2/π), which changes s by d = 5.8e-12. |∂α/∂s| = |u q σ'(u) / s| < 0.2, so the
activation changes by less than d / 5. The bounds of all spellings of gelu's tanh form include that.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import GATES

_PLAIN = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_END = 20  # T
_PLAIN_CURVATURE = 3.1
_ROUNDING = 2.0**-45
_FIRST_STEP = 2.0**-8
_SLACK = 1 / 250  # how much the chord bound may add to the error, as a fraction
_LARGEST_ARGUMENT = 64.0

_GATED_CURVATURE = {"silu": 0.9, "gelu": 0.8, "gelu_new": 4.4, "relu": 0.0}
_SIGMOID_CURVATURE = 1.0 / (6.0 * math.sqrt(3.0))
_SPELLING_ERROR = {"gelu_new": 1.2e-12}
_CELLS = 2**16


def certified_bound(gate: BilinearGate) -> float:
    """Return a bound of |α(q) - gate.activation(q)| for all real |q| <= gate.limit.

    The bound holds in real arithmetic, for the gate's name, limit and coefficients; the gate's
    `bound` is not used. For plain MLPs it exceeds the error by at most 0.5 %, except in the tail.

    Raises:
        ValueError: the proof does not cover this activation, these coefficients or this limit.
    """
    return _gated_bound(gate) if gate.gated else _plain_bound(gate)


def _plain_bound(gate: BilinearGate) -> float:
    if gate.name not in _PLAIN:
        raise ValueError(f"the certificate is for {', '.join(_PLAIN)}; got {gate.name!r}")
    largest = max(b * _END + abs(c) for b, c in zip(gate.b, gate.c, strict=True))
    if not (min(gate.b) >= 1.0 and largest <= _LARGEST_ARGUMENT):
        raise ValueError(
            f"the proof covers slopes of at least 1 with {_END} b + |c| <= {_LARGEST_ARGUMENT:g}; "
            f"got b = {gate.b}, c = {gate.c}"
        )
    if sum(map(Fraction, gate.w)) != 1:
        return math.inf
    right = list(zip(gate.w, gate.b, gate.c, strict=True))
    left = [(w, b, -c) for w, b, c in right]
    sides = [right] if sorted(left) == sorted(right) else [right, left]
    return max(_half_line_bound(gate.name, heads) for heads in sides)


def _half_line_bound(name: str, heads: list[tuple[float, float, float]]) -> float:
    curvature = _PLAIN_CURVATURE + sum(abs(w) * b * (0.87 + abs(c) / 10) for w, b, c in heads)
    measured = float(_errors(name, heads, _FIRST_STEP).max())
    # The largest power of two that keeps h²/8 · curvature within the slack.
    step = 2.0 ** math.floor(math.log2(math.sqrt(8 * measured * _SLACK / curvature)))
    rounding = _END * (1 + sum(abs(w) for w, _, _ in heads)) * _ROUNDING
    middle = float(_errors(name, heads, step).max()) + step**2 / 8 * curvature + rounding
    terms = [abs(w) * math.exp(-b * _END - c) for w, b, c in heads]
    tail = 1.01 * _END * (math.fsum(terms) + math.exp(-1.5 * _END))  # 1 % for rounding in the tail
    return max(middle, tail)


def _errors(name: str, heads: list[tuple[float, float, float]], step: float) -> Tensor:
    """Return e(t) at the nodes 0, step, ..., T."""
    t = torch.arange(round(_END / step) + 1, dtype=torch.float64, device="cpu") * step
    difference = -GATES[name].bias_weight(t)
    for w, b, c in heads:
        difference += w * torch.sigmoid(-(b * t + c))
    return t * difference.abs()


def _gated_bound(gate: BilinearGate) -> float:
    heads = list(zip(gate.w, gate.b, gate.c, strict=True))
    sigmoids = [head for head in heads if head[2] < math.inf]
    if (
        gate.name not in _GATED_CURVATURE
        or math.frexp(gate.limit)[0] != 0.5
        or len(sigmoids) > 15
        or any(b for _, b, c in heads if c == math.inf)
    ):
        raise ValueError(
            f"the proof covers up to 15 sigmoids and constants for {', '.join(_GATED_CURVATURE)} "
            f"up to a limit that is a power of two; got {gate}"
        )
    width = 2.0 * gate.limit / _CELLS
    nodes = width * torch.arange(-_CELLS // 2, _CELLS // 2 + 1, dtype=torch.float64, device="cpu")
    at_nodes = (gate.activation(nodes) - GATES[gate.name].activation(nodes)).abs().max().item()
    bends = sum(abs(w) * b * b for w, b, _ in sigmoids)
    between = width**2 / 8.0 * (_GATED_CURVATURE[gate.name] + _SIGMOID_CURVATURE * bends)
    terms = sum(abs(w) * (21.0 + abs(c)) for w, _, c in sigmoids)
    constants = sum(abs(w) for w, _, c in heads if c == math.inf)
    rounding = 2.0**-53 * (terms + 20.0 * constants + 8.0 * gate.limit)
    return at_nodes + between + rounding + _SPELLING_ERROR.get(gate.name, 0.0)
