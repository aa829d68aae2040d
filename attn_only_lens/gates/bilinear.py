"""Bilinear gates: an activation as several heads a neuron, each a softmax over a bilinear score.

The theorem allows softmax over bilinear scores and nothing else. A neuron whose activation is not
silu then takes m heads, which read the same value q, differ in the affine map inside the score, and
write along the same output vector:

    head j   score of the token itself 0, of the bias token -(b_j q + c_j)
             pattern σ(b_j q + c_j), 1 - σ(b_j q + c_j)
             output  w_j · σ(b_j q + c_j) · q · W_out[i]

Their sum is q · p(q) · W_out[i] with the neuron's effective gate

    p(q) = Σ_j w_j σ(b_j q + c_j),     Σ_j w_j = 1,

which is within `bound` of the activation, α(q), for every real q. Σ_j w_j = 1 is needed: p(q) goes
to Σ_j w_j as q grows, and the error to (Σ_j w_j - 1) q. Σ_j |w_j| is what rounding is amplified by,
and stays below 2.

* silu is one head with b = 1, quick_gelu one with b = 1.702, both exact: Theorem 2 of
  "Attention-Only Transformers and Implementing MLPs with Attention Heads" to the letter.
* gelu and its tanh forms take 1, 2, 4, 6 or 8 heads. With one, the paper's slope 1.702 errs by
  0.0203, the best slope by 0.0139; with four the error is 2.4e-5 (`coefficients.py`).
* relu is one head of slope k. With x = k |q|, |q σ(k q) - relu(q)| = x / (1 + exp x) / k, at most
  0.27846.../k (W(1/e)/k, with Lambert's W). A steep slope does not amplify rounding, for
  |d/dq q σ(k q)| < 1.1 whatever k. It costs range: scores grow to k |q|, and float16 ends at 65504.

Weights are computed in the working precision, or in float32 for half precision.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.gates.exact import QUICK_GELU_SLOPE, working_precision
from attn_only_lens.gates.tables import MIXTURES, Mixture

__all__ = ["DEFAULT_TOLERANCE", "BilinearGate", "bilinear_gate", "sum_of_sigmoids"]

DEFAULT_TOLERANCE = 1e-3
"""Allowed activation error where neither heads nor tolerance are given: gelu then takes 4 heads."""

_LEAST_TOLERANCE = 1e-12  # what float64 keeps of an activation; relu's slope stays in float32
_RELU_CONSTANT = 0.2784645427611  # max of x / (1 + exp x), rounded up
_MIXTURE_OF = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class BilinearGate:
    """How the m heads of one neuron choose between a token and the bias token.

    Attributes:
        name: the activation's name in TransformerLens (`cfg.act_fn`).
        w: each head's share of the neuron's output; they add up to 1.
        b: each head's slope.
        c: each head's offset.
        bound: certified max |α(q) - q Σ_j w_j σ(b_j q + c_j)| over all real q.

    Example:
        >>> import torch
        >>> from attn_only_lens.gates import bilinear_gate
        >>> gate, q = bilinear_gate("gelu", heads_per_neuron=4), torch.linspace(-7, 7, 15)
        >>> gate.pattern(q).shape
        torch.Size([15, 4, 2])
        >>> error = gate.activation(q) - torch.nn.functional.gelu(q)
        >>> bool(error.abs().max() < 2.5e-5)
        True
    """

    name: str
    w: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    bound: float

    def __post_init__(self) -> None:
        if not len(self.w) == len(self.b) == len(self.c) > 0:
            raise ValueError(
                f"got {len(self.w)} numbers w, {len(self.b)} b and {len(self.c)} c; expected as "
                "many of each, one for each head"
            )

    @property
    def heads_per_neuron(self) -> int:
        """m."""
        return len(self.w)

    @property
    def weights(self) -> tuple[float, ...]:
        """What each head multiplies W_out[i] by: w."""
        return self.w

    @property
    def slopes(self) -> tuple[float, ...]:
        """Each head's query in q: b."""
        return self.b

    @property
    def offsets(self) -> tuple[float, ...]:
        """What is added to each head's query: c."""
        return self.c

    @property
    def sum_abs_w(self) -> float:
        """Σ_j |w_j|: by how much at most the heads' roundings are amplified."""
        return math.fsum(map(abs, self.w))

    def scores(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Each head's scores of (self, bias) before the softmax: (0, -(b_j q + c_j)).

        Kept finite: a score that leaves the range of the dtype becomes its largest number.
        """
        limit = torch.finfo(q.dtype).max
        bias = -self._log_odds(q).clamp(min=-limit, max=limit).to(q.dtype)
        return torch.stack([torch.zeros_like(bias), bias], dim=-1)

    def pattern(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Each head's pattern over (self, bias): (σ(b_j q + c_j), σ(-b_j q - c_j))."""
        log_odds = self._log_odds(q)
        weights = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)
        return torch.stack(weights, dim=-1).to(q.dtype)

    def self_weight(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The neuron's effective gate, Σ_j w_j σ(b_j q + c_j).

        Within bound / |q| of the exact gate; so it may leave [0, 1] by that much.
        """
        return self.mixture(q).to(q.dtype)

    def activation(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """q Σ_j w_j σ(b_j q + c_j), within `bound` of the activation."""
        return (self.mixture(q) * q).to(q.dtype)

    def _log_odds(self, q: Tensor) -> Tensor:
        q = working_precision(q)[..., None]
        return q * q.new_tensor(self.b) + q.new_tensor(self.c)

    def mixture(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`self_weight` in the precision it is computed in: float32 for half precision."""
        return sum_of_sigmoids(working_precision(q), 0.0, self.w, self.b, self.c)


def sum_of_sigmoids(
    q: Float[Tensor, "*shape"],
    constant: float,
    w: tuple[float, ...],
    b: tuple[float, ...],
    c: tuple[float, ...],
) -> Float[Tensor, "*shape"]:
    """constant + Σ_j w_j σ(b_j q + c_j), one head at a time and in place.

    A sum over a new axis would take m times the memory, and a new tensor a step more time than the
    sigmoids. No step overwrites what a gradient needs: σ's is formed from its own result.
    """
    total = torch.full_like(q, constant)
    for weight, slope, offset in zip(w, b, c, strict=True):
        total.add_(q.mul(slope).add_(offset).sigmoid_(), alpha=weight)
    return total


def bilinear_gate(
    name: str, heads_per_neuron: int | None = None, tolerance: float | None = None
) -> BilinearGate:
    """The bilinear gate of an activation, of a given number of heads or a given accuracy.

    With a tolerance alone, the fewest heads whose certified bound is within it; with neither, the
    same for `DEFAULT_TOLERANCE`. For relu, which has one head, the tolerance sets the slope.

    Args:
        name: silu, quick_gelu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh or relu.
        heads_per_neuron: 1, 2, 4, 6 or 8 for the gelus, 1 for the others.
        tolerance: largest allowed |α(q) - approximation| over all real q, at least 1e-12.

    Returns:
        The gate, with its coefficients and its certified bound.

    Raises:
        ValueError: no such activation, no such number of heads, or no gate within the tolerance;
            the message lists what there is.

    Example:
        >>> from attn_only_lens.gates import bilinear_gate
        >>> bilinear_gate("gelu_new", tolerance=1e-5).heads_per_neuron
        6
        >>> bilinear_gate("silu")
        BilinearGate(name='silu', w=(1.0,), b=(1.0,), c=(0.0,), bound=0.0)
    """
    if tolerance is not None and not _LEAST_TOLERANCE <= tolerance < math.inf:
        raise ValueError(
            f"tolerance is {tolerance!r}; expected a number of at least {_LEAST_TOLERANCE}. "
            f"Exact gates (GATES) have no error beyond rounding."
        )
    within = DEFAULT_TOLERANCE if tolerance is None else tolerance
    choices = _choices(name, slope_tolerance=within)
    if heads_per_neuron is not None:
        if heads_per_neuron not in choices:
            raise ValueError(
                f"heads_per_neuron is {heads_per_neuron!r}; "
                f"for {name}, expected one of {sorted(choices)}."
            )
        choices = {heads_per_neuron: choices[heads_per_neuron]}
        if tolerance is None:
            return choices[heads_per_neuron]
    for gate in choices.values():
        if gate.bound <= within:
            return gate
    bounds = ", ".join(f"{m} heads: {gate.bound:.4g}" for m, gate in choices.items())
    raise ValueError(
        f"no bilinear gate of {name} is within {within!r} of it ({bounds}). "
        f"Allow more heads or a larger tolerance, or use the exact gate, GATES[{name!r}]."
    )


def _choices(name: str, slope_tolerance: float) -> dict[int, BilinearGate]:
    """The gates of an activation by heads a neuron, fewest first."""
    if name in _MIXTURE_OF:
        mixtures = MIXTURES[_MIXTURE_OF[name]]
        return {m: _gate(name, mixture) for m, mixture in sorted(mixtures.items())}
    if name == "relu":
        slope, bound = _RELU_CONSTANT / slope_tolerance, slope_tolerance
    elif name in ("silu", "quick_gelu"):
        slope, bound = {"silu": 1.0, "quick_gelu": QUICK_GELU_SLOPE}[name], 0.0
    else:
        known = ", ".join(["silu", "quick_gelu", "relu", *_MIXTURE_OF])
        raise ValueError(f"no bilinear gate for the activation {name!r}; there is one for: {known}")
    return {1: BilinearGate(name, (1.0,), (slope,), (0.0,), bound)}


def _gate(name: str, mixture: Mixture) -> BilinearGate:
    """A mixture's terms as heads: a term with c > 0 is two of them."""
    heads = [
        (term.w, term.b, c)
        for term in mixture.terms
        for c in ((term.c, -term.c) if term.c else (0.0,))
    ]
    w, b, c = zip(*heads, strict=True)
    return BilinearGate(name, w, b, c, mixture.bound)
