"""Gated MLPs with bilinear heads: an activation as a sum of sigmoids on a range.

A neuron of a gated MLP (SwiGLU, GEGLU, ReGLU) is α(g) · u, with g = x · W_gate[:, i] and
u = x · W_in[:, i]. A head that chooses between its own token and the bias token by a score affine
in g, and whose value is u, writes σ(b g + c) · u. For |g| <= R, some of them write nearly α(g) · u:

    α(g) ≈ a_0 + Σ_{j=1..m} a_j σ(b_j g + c_j)

    head j     scores (0, -(b_j g + c_j)), value u, output weight a_j W_out[i]
    last head  bias token masked, so pattern (1, 0): linear, as in Theorem 6; weight a_0 W_out[i]

Every score is bilinear and every value linear in the residual stream: the form of "Attention-Only
Transformers and Implementing MLPs with Attention Heads", which stops at plain MLPs. As far as we
know nobody has published this. With |α(g) - sum| <= `bound`, the neuron is off by at most
bound · |u| · |W_out[i]|.

*Why a range.* A sum of sigmoids is bounded and α is not, so no number of heads serves every g.
The linear part of α, g/2 for a silu or a gelu, comes from the rising flank of wide sigmoids: the
flatter (b small), the straighter, but a grows as 1/b, and float32 then loses digits to cancelling
heads, up to about 2^-22 Σ|a|. The fits weigh one against the other
(`analyses/fit_gated_gates.py`) and settle at slopes near 1/R and Σ|a| from 2 R to 17 R.

*Why it scales.* As R relu(g/R) = relu(g), one fit of relu on [-1, 1] serves all ranges, with
error and weights times R. On a long range silu and gelu look like relu rounded off near 0, which is
no harder: no bound is above relu's, R times 8.3e-3, 2.3e-3, 8.1e-4 and 1.9e-4 for 4, 6, 8 and 12
heads, and on shorter ranges they are far below.

*Limits.* The bound is absolute: where α is small, g near 0 or negative, it may exceed α itself.
Outside of the range the sigmoids saturate and the error grows like |g|; `error_at` measures it. One
head's output may be many times the neuron's, and only their sum means something. Half precision
cannot hold such sums at all: they are formed in float32. relu's kink leaves an error in proportion
to R for any number of heads. `bound` is certified in real arithmetic (`range_certificate.py`);
float32's rounding comes on top, and is in `analyses/results/gated_gates.md`.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.gates.bilinear import sum_of_sigmoids
from attn_only_lens.gates.exact import GATES, working_precision
from attn_only_lens.numerics import where_float64_is

__all__ = ["RangeGate", "range_gate"]

_LARGEST = 2.0**64  # of any use, and far within float32

# One fit for three spellings of the same formula.
_TANH_FORMS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class RangeGate:
    """m sigmoids and a constant in place of one activation on [-range, range]: m + 1 heads.

    Every head has the value u = x · W_in[:, i]; head j writes `weights[j]` · W_out[i].

    Attributes:
        name: the activation α, as in TransformerLens (`cfg.act_fn`).
        range: R; the bound holds for |g| <= R.
        constant: a_0, the output weight of the last head, which sees itself alone.
        a: output weights a_j of the other heads.
        b: slopes b_j of their scores in g.
        c: offsets c_j of their scores.
        bound: certified max |α(g) - approximation| over [-R, R], in real arithmetic.

    Example:
        >>> import torch
        >>> from attn_only_lens.gates.gated import range_gate
        >>> gate = range_gate("silu", heads_per_neuron=6, range=7.5)
        >>> g = torch.linspace(-7.5, 7.5, 101, dtype=torch.float64)
        >>> error = (gate.activation(g) - torch.nn.functional.silu(g)).abs().max().item()
        >>> gate.range, error <= gate.bound < 1e-3
        (8.0, True)
        >>> mixed = (gate.pattern(g)[..., 0] * torch.tensor(gate.weights)).sum(-1)
        >>> torch.allclose(mixed, gate.activation(g))
        True
    """

    name: str
    range: float
    constant: float
    a: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    bound: float

    @property
    def heads_per_neuron(self) -> int:
        """m + 1: the sigmoids, and the head that sees itself alone."""
        return len(self.a) + 1

    @property
    def weights(self) -> tuple[float, ...]:
        """What each head multiplies W_out[i] by: (a_1, .., a_m, a_0)."""
        return (*self.a, self.constant)

    @property
    def slopes(self) -> tuple[float, ...]:
        """Each head's query in g: b, and 0 for the last."""
        return (*self.b, 0.0)

    @property
    def offsets(self) -> tuple[float, ...]:
        """What is added to each head's query: c, and ∞ for the last, which sees itself alone."""
        return (*self.c, math.inf)

    @property
    def conditioning(self) -> float:
        """|a_0| + Σ |a_j|: times a few roundings, the error of the sum in working precision."""
        return sum(map(abs, self.weights))

    @property
    def amplification(self) -> float:
        """`conditioning` over the range: by how much the sum is rounded more than α is."""
        return max(1.0, self.conditioning / self.range)

    def log_odds(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape m"]:
        """b_j g + c_j, in float32 at least."""
        working = working_precision(g)[..., None]
        return working * working.new_tensor(self.b) + working.new_tensor(self.c)

    def scores(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Scores of (self, bias), head by head: (0, -(b_j g + c_j)), and last (0, -largest).

        The last head's mask is the dtype's most negative number, which softmax takes for -∞. Half
        precision rounds them: a sum over their patterns loses digits that `activation` keeps.
        """
        limit = torch.finfo(g.dtype).max
        bias = (-self.log_odds(g)).clamp(min=-limit, max=limit).to(g.dtype)
        bias = torch.cat([bias, torch.full_like(bias[..., :1], -limit)], dim=-1)
        return torch.stack([torch.zeros_like(bias), bias], dim=-1)

    def pattern(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Patterns over (self, bias), head by head: (σ(z), σ(-z)), z = b_j g + c_j; last (1, 0)."""
        z = self.log_odds(g)
        z = torch.cat([z, torch.full_like(z[..., :1], math.inf)], dim=-1)
        return torch.stack([torch.sigmoid(z), torch.sigmoid(-z)], dim=-1).to(g.dtype)

    def mixture(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`activation` in the precision it is computed in: float32 for half precision."""
        return sum_of_sigmoids(working_precision(g), self.constant, self.a, self.b, self.c)

    def activation(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """a_0 + Σ a_j σ(b_j g + c_j), the approximation."""
        return self.mixture(g).to(g.dtype)

    def error_at(self, g: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Approximation minus α(g), in float64: at most `bound` on the range, any size outside."""
        g = where_float64_is(g).double()
        return self.activation(g) - GATES[self.name].activation(g)


def range_gate(name: str, heads_per_neuron: int, range: float) -> RangeGate:
    """The pinned gate of the smallest range that covers a request.

    Args:
        name: silu, gelu, relu, gelu_new, or its other spellings gelu_pytorch_tanh and gelu_fast.
        heads_per_neuron: m + 1, the self-only head counted; see `analyses/results/gated_gates.md`.
        range: the largest |g| there is, as measured on data.

    Returns:
        A gate with `gate.range >= range`. relu has one for every range, as R relu(g / R) = relu(g);
        the others up to a largest one.

    Raises:
        ValueError: no such activation, number of heads, or range.

    Example:
        >>> from attn_only_lens.gates.gated import range_gate
        >>> gate = range_gate("gelu_new", heads_per_neuron=8, range=11.0)
        >>> gate.range, gate.heads_per_neuron, gate.bound < 1e-3
        (16.0, 8, True)
        >>> range_gate("relu", heads_per_neuron=8, range=1000.0).range
        1024.0
    """
    fitted = _TANH_FORMS[0] if name in _TANH_FORMS else name
    of_name = [gate for gate in _table() if gate.name == fitted]
    if not of_name:
        known = sorted({gate.name for gate in _table()} | set(_TANH_FORMS))
        raise ValueError(f"no gate on a range for {name!r}; expected one of {', '.join(known)}")
    gates = [gate for gate in of_name if gate.heads_per_neuron == heads_per_neuron]
    if not gates:
        counts = sorted({gate.heads_per_neuron for gate in of_name})
        raise ValueError(f"got heads_per_neuron={heads_per_neuron}; {name} has gates of {counts}")
    if not 0.0 < range <= _LARGEST:
        raise ValueError(
            f"got range={range}; expected a positive number, the largest |g| measured, up to "
            f"{_LARGEST:g}"
        )
    if name == "relu":
        mantissa, exponent = math.frexp(range)  # range = mantissa · 2^exponent, 1/2 <= mantissa < 1
        return _scaled(gates[0], 2.0 ** (exponent - (mantissa == 0.5)))
    covering = [gate for gate in gates if gate.range >= range]
    if not covering:
        largest = max(gate.range for gate in gates)
        raise ValueError(
            f"got range={range:g}; {name} has gates up to {largest:g}: take the exact gate, or "
            f"ask for range={largest:g} and report error_at what lies outside"
        )
    found = min(covering, key=lambda gate: gate.range)
    return replace(found, name=name)


def _scaled(gate: RangeGate, factor: float) -> RangeGate:
    """The gate of factor · α(g / factor); exact for a power of two."""
    return replace(
        gate,
        range=factor * gate.range,
        constant=factor * gate.constant,
        a=tuple(factor * w for w in gate.a),
        b=tuple(slope / factor for slope in gate.b),
        bound=factor * gate.bound,
    )


@lru_cache(maxsize=1)
def _table() -> tuple[RangeGate, ...]:
    """Every pinned gate, as `analyses/fit_gated_gates.py` wrote them."""
    text = resources.files("attn_only_lens.gates").joinpath("gated.json").read_text("utf-8")
    return tuple(
        RangeGate(
            name=entry["name"],
            range=entry["range"],
            constant=entry["constant"],
            a=tuple(entry["a"]),
            b=tuple(entry["b"]),
            c=tuple(entry["c"]),
            bound=entry["bound"],
        )
        for entry in json.loads(text)
    )
