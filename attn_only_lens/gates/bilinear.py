"""Bilinear gates: approximate an activation function with several softmax heads.

Each neuron is replaced by m attention heads that share one value and one output vector. For silu,
one head (m = 1) is enough. Let q be the neuron's pre-activation (in a gated MLP, x · W_gate[:,
i]). Then

    head j   scores  0 for the token itself, -(b_j q + c_j) for the bias token
             pattern σ(b_j q + c_j), 1 - σ(b_j q + c_j)
             output  w_j · σ(b_j q + c_j) · value · W_out[i]

With the mixture p(q) = Σ_j w_j σ(b_j q + c_j), the outputs of the m heads sum to value · p(q) ·
W_out[i].

In a plain MLP, the value is q, and q · p(q) approximates the activation α(q) within `bound` for
every real q. The approximation requires Σ_j w_j = 1. One head computes silu (b = 1) and quick_gelu
(b = 1.702) exactly, by Theorem 3 of "Attention-Only Transformers and Implementing MLPs with
Attention Heads". For gelu and its tanh approximations, there are gates with 1, 2, 4, 6 and 8 heads.
For gelu, the largest error is .0203 with one head of slope 1.702 (the paper's choice), .0139 with
one head of the best slope, and 2.4e-5 with four heads. One head of slope k approximates relu, with
scores up to k |q| and an error of at most W(1/e)/k = .27846…/k, where W is the Lambert function.

In a gated MLP, a neuron computes α(q) · u, where α is the activation function, q = x · W_gate[:, i]
and u = x · W_in[:, i]. The value of its heads is u, and the mixture p(q) approximates α(q) within
`bound` for |q| <= `limit`. The last head has b = 0 and c = ∞: it attends only to its own token, so
its output is linear in u, as in Theorem 7 of the same paper. We know of no publication in which
attention heads compute gated MLPs. A sum of sigmoids is bounded and α is not, so no finite number
of heads can approximate α for every q. The mixture builds the linear part of α from wide sigmoids
with large weights that nearly cancel, which causes rounding errors of about 2^-22 Σ_j |w_j| in
float32. For relu, the gates are fitted on [-1, 1] and rescaled to other limits, so their errors and
weights are proportional to the limit. `bound` is an absolute error. In half precision, the heads of
a neuron lose too much accuracy, because their outputs are much larger than the sum of the outputs.

`plain.json` and `gated.json` hold the fitted gates (`analyses/tools/README.md` says how they were
fitted). In `plain.json`, each w_j is a multiple of 2^-23, so float32 represents every partial sum
of the w_j exactly. `analyses/tools/certificates.py` proves the bounds, which do not include
rounding errors.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.gates.exact import GATES, QUICK_GELU_SLOPE

_DEFAULT_TOLERANCE = 1e-3  # gelu needs 4 heads for this tolerance
_DEFAULT_GATED_HEADS = 8
_LEAST_TOLERANCE = 1e-12  # near float64's rounding error; relu's slope still fits in float32
_LARGEST_LIMIT = 2.0**64  # well inside the range of float32
_RELU_CONSTANT = 0.2784645427611  # the maximum of x / (1 + exp x), rounded up
_EXACT_SLOPES = {name: gate.slope for name, gate in GATES.items() if gate.slope is not None}
_SPELLINGS = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}


@dataclass(frozen=True)
class BilinearGate:
    """The m softmax attention heads of one neuron, which approximate an activation function.

    Attributes:
        name: the activation α, as in TransformerLens (`cfg.act_fn`).
        w: for each head, the factor of W_out[i].
        b: for each head, the slope b_j of its query b_j q + c_j.
        c: for each head, the offset c_j of its query; ∞ if the head attends only to its own token.
        bound: the certified largest error of `activation` over all |q| <= limit.
        limit: the largest |q| for which the bound holds; ∞ for a plain MLP, finite for a gated one.

    Example:
        >>> import torch
        >>> from attn_only_lens.gates import bilinear_gate
        >>> gate, q = bilinear_gate("gelu", heads=4), torch.linspace(-7, 7, 15)
        >>> gate.pattern(q).shape
        torch.Size([15, 4, 2])
        >>> error = gate.activation(q) - torch.nn.functional.gelu(q)
        >>> bool(error.abs().max() < 2.5e-5)
        True
        >>> gate = bilinear_gate("silu", heads=6, limit=7.5)
        >>> error = gate.activation(q) - torch.nn.functional.silu(q)
        >>> gate.limit, bool(error.abs().max() < 1e-3)
        (8.0, True)
    """

    name: str
    w: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    bound: float
    limit: float = math.inf

    def __post_init__(self) -> None:
        if not len(self.w) == len(self.b) == len(self.c) > 0:
            raise ValueError(
                f"got {len(self.w)} values of w, {len(self.b)} of b and {len(self.c)} of c; "
                "expected one value of each per head"
            )

    @property
    def heads(self) -> int:
        """The number of heads per neuron, m."""
        return len(self.w)

    @property
    def gated(self) -> bool:
        """True for gated MLPs, in which the mixture approximates α(q) instead of α(q) / q."""
        return self.limit < math.inf

    @property
    def sum_abs_w(self) -> float:
        """The sum Σ_j |w_j|, to which the rounding error of the sum over heads is proportional."""
        return math.fsum(map(abs, self.w))

    @property
    def amplification(self) -> float:
        """The factor by which the sum over heads amplifies rounding: max(1, Σ_j |w_j| / limit)."""
        return max(1.0, self.sum_abs_w / self.limit)

    def query(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head"]:
        """Return each head's query b_j q + c_j, clamped to finite values, in float32 or float64."""
        largest = largest_query(q.dtype)
        q = float32_if_half(q).clamp(-largest, largest)[..., None]
        return (q * q.new_tensor(self.b) + q.new_tensor(self.c)).clamp(-largest, largest)

    def scores(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return each head's scores for its own token and the bias token: (0, -(b_j q + c_j))."""
        bias = -self.query(q).to(q.dtype)
        return torch.stack([torch.zeros_like(bias), bias], dim=-1)

    def pattern(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return each head's attention to (self, bias): (σ(b_j q + c_j), σ(-b_j q - c_j))."""
        query = self.query(q)
        return torch.stack([query.sigmoid(), (-query).sigmoid()], dim=-1).to(q.dtype)

    def mixture(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the mixture Σ_j w_j σ(b_j q + c_j), computed in float32 or float64.

        The mixture approximates α(q) / q in plain MLPs, and α(q) in gated MLPs. To save memory, the
        terms of the sum are added in place, one at a time. Gradients stay correct, because the
        backward pass of σ needs only the output of σ.
        """
        q = float32_if_half(q)
        heads = list(zip(self.w, self.b, self.c, strict=True))
        total = torch.full_like(q, sum(w for w, _, c in heads if c == math.inf))
        for w, b, c in heads:
            if c < math.inf:
                total.add_(q.mul(b).add_(c).sigmoid_(), alpha=w)
        return total

    def activation(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the approximation of α(q), whose error is at most `bound` for |q| <= `limit`."""
        mixture = self.mixture(q)
        return (mixture if self.gated else mixture * q).to(q.dtype)


def largest_query(dtype: torch.dtype) -> float:
    """Return the largest |query| for which scores stay finite, even if a hook edits the key."""
    return torch.finfo(dtype).max / 4


def bilinear_gate(
    act_fn: str,
    heads: int | None = None,
    *,
    tolerance: float | None = None,
    slope: float | Literal["paper"] | None = None,
    limit: float | None = None,
) -> BilinearGate:
    """Return the bilinear gate that approximates an activation function within a certified bound.

    For plain MLPs (without a `limit`), choose the gate with the fewest heads whose bound is at most
    `tolerance`. For gated MLPs, choose the gate with `heads` heads and the smallest tabulated limit
    that covers |q| <= `limit`.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2, for
    one-head gates.

    Args:
        act_fn: silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu or (plain MLPs) quick_gelu.
        heads: the number of heads per neuron. In plain MLPs it is 1, 2, 4, 6 or 8 for the gelus and
            1 for the other activations; in gated MLPs it is 4, 6, 8 (the default) or 12.
        tolerance: in plain MLPs, the largest error over all real q, at least 1e-12; 1e-3 by
            default. For relu, it determines the slope of the gate.
        slope: in plain MLPs, use one head, which computes SiLU(slope · q) / slope. For relu, pass
            any slope k; the error is at most 0.2785/k. For the gelus, pass a slope from 1 to 3.2,
            or "paper" for the paper's 1.702, which has the bound 0.0204 (0.0207 for the tanh
            forms).
        limit: in gated MLPs, the largest |q| at which the gate must approximate the activation.

    Raises:
        ValueError: an argument is invalid, or no gate has a bound within the tolerance.

    Example:
        >>> from attn_only_lens.gates import bilinear_gate
        >>> bilinear_gate("gelu_new", tolerance=1e-5).heads
        6
        >>> bilinear_gate("silu")
        BilinearGate(name='silu', w=(1.0,), b=(1.0,), c=(0.0,), bound=0.0, limit=inf)
        >>> gate = bilinear_gate("gelu_new", limit=11.0)
        >>> gate.limit, gate.heads, gate.bound < 1e-3
        (16.0, 8, True)
        >>> gate = bilinear_gate("gelu", slope="paper")
        >>> gate.b, 0.0203 < gate.bound < 0.0204
        ((1.702,), True)
    """
    if limit is not None:
        if tolerance is not None or slope is not None:
            raise ValueError(
                "got a tolerance or a slope for gated MLPs, whose error depends on the limit; "
                "choose the number of heads instead"
            )
        return _gated(act_fn, _DEFAULT_GATED_HEADS if heads is None else heads, limit)
    if slope is not None:
        if heads not in (None, 1) or tolerance is not None:
            raise ValueError(
                f"got slope={slope!r} with heads={heads!r} and tolerance={tolerance!r}; expected "
                "only a slope: it implies one head per neuron and determines the error"
            )
        return _of_slope(act_fn, slope)
    if tolerance is not None and not _LEAST_TOLERANCE <= tolerance < math.inf:
        raise ValueError(
            f"got tolerance={tolerance!r}; expected a number of at least {_LEAST_TOLERANCE}. An "
            "exact gate (GATES) has no error except rounding"
        )
    return _within(act_fn, heads, tolerance)


def _within(act_fn: str, heads: int | None, tolerance: float | None) -> BilinearGate:
    """Return the gate with `heads` heads, or the gate with the fewest heads within a tolerance."""
    allowed = _DEFAULT_TOLERANCE if tolerance is None else tolerance
    gates = _plain(act_fn, relu_tolerance=allowed)
    if heads is not None:
        gates = _with_heads(gates, heads)
        if tolerance is None:
            return gates[0]
    for gate in gates:
        if gate.bound <= allowed:
            return gate
    bounds = ", ".join(f"{gate.heads} heads: {gate.bound:.4g}" for gate in gates)
    raise ValueError(
        f"no bilinear gate approximates {act_fn} within {allowed!r} ({bounds}): allow more heads "
        f"or a larger tolerance, or use the exact gate, GATES[{act_fn!r}]"
    )


@cache
def _of_slope(act_fn: str, slope: float | Literal["paper"]) -> BilinearGate:
    """Return the one-head gate for plain MLPs with the slope that the user chose."""
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
    """Return a bound on |SiLU(slope · q) / slope - gelu(q)| for a gelu and a slope from 1 to 3.2.

    The error is even in q, so it is computed only for q from 0 to 20, on a grid with spacing h =
    2^-10. `analyses/tools/certificates.py` proves that the error between grid points exceeds the
    largest error on the grid by at most h²/8 · (3.1 + 0.87 · 3.2) < 7e-7, and that the error for q
    > 20 is below 5e-8.
    """
    q = torch.arange(20 * 2**10 + 1, dtype=torch.float64, device="cpu") / 2**10
    error = q * (torch.sigmoid(-slope * q) - GATES[act_fn].bias_weight(q))
    return error.abs().max().item() + 1e-6


def _plain(act_fn: str, relu_tolerance: float) -> Sequence[BilinearGate]:
    """Return all bilinear gates for an activation in plain MLPs, sorted by number of heads."""
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
            f"got limit={limit}; expected a positive number up to {_LARGEST_LIMIT:g}, the largest "
            "|q| for which the gate is needed"
        )
    if act_fn == "relu":  # rescale a gate fitted on [-1, 1], by a power of two to avoid rounding
        mantissa, exponent = math.frexp(limit)  # limit = mantissa · 2^exponent, 1/2 <= mantissa < 1
        gate, factor = gates[0], 2.0 ** (exponent - (mantissa == 0.5))
        w, b = tuple(factor * w for w in gate.w), tuple(b / factor for b in gate.b)
        return replace(gate, w=w, b=b, bound=factor * gate.bound, limit=factor * gate.limit)
    covering = [gate for gate in gates if gate.limit >= limit]
    if not covering:
        largest = max(gate.limit for gate in gates)
        raise ValueError(
            f"got limit={limit:g}; {act_fn} gates cover |q| <= {largest:g}: use the exact gate "
            f"or pass limit={largest:g} and let `check` measure the error on larger inputs"
        )
    return min(covering, key=lambda gate: gate.limit)


def _with_heads(gates: Sequence[BilinearGate], heads: int) -> Sequence[BilinearGate]:
    if matching := [gate for gate in gates if gate.heads == heads]:
        return matching
    counts = sorted({gate.heads for gate in gates})
    raise ValueError(
        f"got heads={heads!r}; {gates[0].name} has gates with {counts} heads per neuron"
    )


def _fitted(
    kind: Literal["plain", "gated"], act_fn: str, formulas: Iterable[str] = ()
) -> Sequence[BilinearGate]:
    spelling = _SPELLINGS.get(act_fn, act_fn)
    if gates := [replace(gate, name=act_fn) for gate in table(kind) if gate.name == spelling]:
        return gates
    known = sorted({gate.name for gate in table(kind)} | set(_SPELLINGS) | set(formulas))
    raise ValueError(
        f"no bilinear gate for {act_fn!r} in {kind} MLPs; expected one of {', '.join(known)}"
    )


@cache
def table(kind: Literal["plain", "gated"]) -> tuple[BilinearGate, ...]:
    """Return all fitted gates for plain or for gated MLPs, in the order of the JSON file."""
    file = resources.files(__package__).joinpath(f"{kind}.json")
    return gates_from_json(file.read_text("utf-8"))


def gates_from_json(text: str) -> tuple[BilinearGate, ...]:
    """Read gates from a JSON list of objects with the fields of `BilinearGate`."""
    return tuple(
        BilinearGate(**entry | {name: tuple(entry[name]) for name in "wbc"})
        for entry in json.loads(text)
    )
