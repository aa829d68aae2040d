"""An upper bound, over all reals, of the error of a bilinear gate that stands for gelu.

For t >= 0, with Σ w_j = 1 and p(-t) = 1 - p(t), the errors at q = t and at q = -t are, up to sign,

    e(t) = t · |Σ_j w_j σ(-(b_j t + c_j)) - (1 - p(t))|,     and the same with -c_j for c_j:

everything is a number that goes to 0, so nothing cancels. (If Σ w_j ≠ 1 exactly, the error grows
without end and the answer is infinity.)

*Middle*, 0 <= t <= T. On an interval of length h between two nodes a C² function is at most the
larger of its values there plus h²/8 times the largest |second derivative| (the interpolation
error of a chord). With z = b t + c, and s^n σ'(s) <= s^n e^-s <= (n/e)^n for s >= 0:

    head    (t σ(-z))'' = -b (2 σ'(z) + (z - c) σ''(z)),  σ' <= 1/4,  |σ''| <= σ',  |σ''| < 0.1
            |(t σ(-z))''| <= b (1/2 + 1/e + |c|/10) < b (0.87 + |c|/10)
    gelu    |(t Φ(t))''| = φ(t) |2 - t²| < 0.8
    tanh    s = k t (1 + a t²), k = 2 sqrt(2/π) < 1.6, a = 0.044715; k t <= s, t s' <= 3 s,
            s' = k + 3 k a t² <= k + (3a/k) s²,  t s'' = 6 k a t² <= (6a/k) s²
            |(t σ(s))''| <= 2 s' σ' + t s'' σ' + t s'² |σ''|
                         <= k/2 + (12a/k) (2/e)² + 3 k/e + (9a/k) (3/e)³ < 3.1

*Tail*, t >= T. σ(-z) <= e^-z, so a head adds at most |w| t e^-(b t + c). The target adds
t (1 - p(t)): at most φ(t) <= e^-1.5t for gelu (Mills' ratio, t >= 3), and t e^-(k t) for tanh. Each
of these falls for t >= 1, so their sum at T, with t e^-1.5t for the target, bounds the tail.

*Rounding*, in units of u = 2^-53. Nodes are multiples of a power of two, hence exact. The argument
of a weight is at most 64 with three roundings, where σ has slope 1/4: 48 u; exp, erfc and the
division after them: 8 u (libraries state 1 to 4 for each); the sum over the heads: 10 u. That is
below 2^-46; 2^-45 a weight is allowed, and covers the few operations after it.

An upper bound, for every g of a range [-R, R], of the error of a gate on that range.

Let e = Σ_j a_j σ(b_j g + c_j) + a_0 - α. On a cell of width h between two nodes a C² function is at
most the larger of its values there plus h²/8 times its largest |second derivative| (it leaves its
chord by no more). So, with max |σ''| = 1/(6√3) and nodes g_i over the whole range,

    max |e| <= max_i |e(g_i)| + h²/8 · (max |α''| + 1/(6√3) · Σ |a_j| b_j²) + rounding.

*Curvature of α*, for all g; crude where a fine grid forgives it:

    silu    |2σ' + g σ''| <= 2/4 + |g| e^-|g| < 0.9
    gelu    φ(g) |2 - g²| < 0.8
    tanh    α = g σ(u), u = s (g + k g³), s = 2 sqrt(2/π), k = 0.044715, t = |g|; |σ'| and |σ''| are
            at most e^-|u| <= e^-st, and t^n e^-st <= (n/(es))^n, so term by term
            |2 σ' u'|     <= 2s (1 + 3k t²) e^-st       < 3.3
            |g σ'' u'²|   <= s² t (1 + 3k t²)² e^-st    < 1
            |g σ' u''|    <= 6sk t² e^-st               < 0.1
    relu    0 on both sides of 0, which is a node

*Rounding*, in units of u = 2^-53. R and the number of cells are powers of two, so nodes are exact.
The argument z = b g + c of a sigmoid has an error of u (|b g| + |z|) <= u (|c| + 2|z|); times σ',
as |z| σ'(z) < 1/4, below (|c| + 1) u. The sigmoid, the product and at most 15 sums: 20 u a term.
α: 8 u |g|.

gelu_fast rounds sqrt(2/π), which puts its s off by d = 5.8e-12. |∂α/∂s| = |u g σ'(u) / s| < 0.2, so
the activation moves by less than d / 5: added to the bound of all spellings of gelu's tanh form.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import GATES
from attn_only_lens.gates.gated import RangeGate

__all__ = ["certified_bound", "certified_range_bound"]

_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_END = 20  # T
_TARGET_CURVATURE = 3.1
_ROUNDING = 2.0**-45
_FIRST_STEP = 2.0**-8
_SLACK = 1 / 250  # of the error: what the chords' excess may add to it
_ARGUMENT = 64.0


def certified_bound(gate: BilinearGate) -> float:
    """A number that |α(q) - gate.activation(q)| exceeds for no real q, in real arithmetic.

    Reads the gate's name and coefficients, not its `bound`.

    Args:
        gate: a gate of one of the four gelus, with slopes b >= 1 and 20 b + |c| <= 64.

    Returns:
        The bound: at most 0.5 % above the largest error, unless the tail decides. Infinity if the
        weights do not add up to exactly 1.

    Raises:
        ValueError: another activation, or coefficients outside of what the proof covers.

    Example:
        >>> from attn_only_lens.gates import bilinear_gate, certified_bound
        >>> gate = bilinear_gate("gelu", heads_per_neuron=2)
        >>> 0.99 * gate.bound < certified_bound(gate) <= gate.bound
        True
    """
    if gate.name not in _NAMES:
        raise ValueError(f"the certificate is for {', '.join(_NAMES)}; got {gate.name!r}")
    largest = max(b * _END + abs(c) for b, c in zip(gate.b, gate.c, strict=True))
    if not (min(gate.b) >= 1.0 and largest <= _ARGUMENT):
        raise ValueError(
            f"the proof covers slopes of at least 1 with {_END} b + |c| <= {_ARGUMENT:g}; "
            f"got b = {gate.b}, c = {gate.c}"
        )
    if sum(map(Fraction, gate.w)) != 1:
        return math.inf
    right = list(zip(gate.w, gate.b, gate.c, strict=True))
    left = [(w, b, -c) for w, b, c in right]
    sides = [right] if sorted(left) == sorted(right) else [right, left]
    return max(_half_line(gate.name, heads) for heads in sides)


def _half_line(name: str, heads: list[tuple[float, float, float]]) -> float:
    curvature = _TARGET_CURVATURE + sum(abs(w) * b * (0.87 + abs(c) / 10) for w, b, c in heads)
    measured = float(_errors(name, heads, _FIRST_STEP).max())
    # The largest power of two that keeps h²/8 · curvature within the slack.
    step = 2.0 ** math.floor(math.log2(math.sqrt(8 * measured * _SLACK / curvature)))
    rounding = _END * (1 + sum(abs(w) for w, _, _ in heads)) * _ROUNDING
    middle = float(_errors(name, heads, step).max()) + step**2 / 8 * curvature + rounding
    terms = [abs(w) * math.exp(-b * _END - c) for w, b, c in heads]
    tail = 1.01 * _END * (math.fsum(terms) + math.exp(-1.5 * _END))  # 1 % for its own rounding
    return max(middle, tail)


def _errors(name: str, heads: list[tuple[float, float, float]], step: float) -> Tensor:
    """e(t) at the nodes 0, step, ..., T."""
    t = torch.arange(round(_END / step) + 1, dtype=torch.float64, device="cpu") * step
    difference = -GATES[name].bias_weight(t)
    for w, b, c in heads:
        difference += w * torch.sigmoid(-(b * t + c))
    return t * difference.abs()


_CURVATURE = {"silu": 0.9, "gelu": 0.8, "gelu_new": 4.4, "relu": 0.0}
_SIGMOID_CURVATURE = 1.0 / (6.0 * math.sqrt(3.0))
_SPELLING = {"gelu_new": 1.2e-12}
_CELLS = 2**16


def certified_range_bound(gate: RangeGate) -> float:
    """A number that |α(g) - gate.activation(g)| exceeds for no |g| <= R, in real arithmetic.

    Reads the gate's name, range and coefficients, not its `bound`.

    Args:
        gate: a gate of silu, gelu, gelu_new or relu whose range is a power of two.

    Returns:
        The bound; for the gates of this package less than 5 % above the largest error.

    Raises:
        ValueError: another activation, a range that is not a power of two, or over 15 sigmoids.

    Example:
        >>> from attn_only_lens.gates.gated import range_gate
        >>> from attn_only_lens.gates.certificates import certified_range_bound
        >>> gate = range_gate("silu", heads_per_neuron=6, range=8.0)
        >>> abs(certified_range_bound(gate) / gate.bound - 1) < 1e-6
        True
    """
    if gate.name not in _CURVATURE or math.frexp(gate.range)[0] != 0.5 or len(gate.a) > 15:
        raise ValueError(
            f"the proof covers up to 15 sigmoids for {', '.join(_CURVATURE)} on a range that is a "
            f"power of two; got {len(gate.a)} for {gate.name!r} on {gate.range!r}"
        )
    width = 2.0 * gate.range / _CELLS
    nodes = width * torch.arange(-_CELLS // 2, _CELLS // 2 + 1, dtype=torch.float64, device="cpu")
    at_nodes = (gate.activation(nodes) - GATES[gate.name].activation(nodes)).abs().max().item()
    bends = sum(abs(a) * b * b for a, b in zip(gate.a, gate.b, strict=True))
    between = width**2 / 8.0 * (_CURVATURE[gate.name] + _SIGMOID_CURVATURE * bends)
    terms = sum(abs(a) * (21.0 + abs(c)) for a, c in zip(gate.a, gate.c, strict=True))
    rounding = 2.0**-53 * (terms + 20.0 * abs(gate.constant) + 8.0 * gate.range)
    return at_nodes + between + rounding + _SPELLING.get(gate.name, 0.0)
