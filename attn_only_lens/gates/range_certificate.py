"""An upper bound, for every g of a range [-R, R], of the error of a gate on that range.

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

import torch

from attn_only_lens.gates.exact import GATES
from attn_only_lens.gates.gated import RangeGate

__all__ = ["certified_range_bound"]

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
        >>> from attn_only_lens.gates.range_certificate import certified_range_bound
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
