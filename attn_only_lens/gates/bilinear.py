"""Bilinear gates: an activation as several heads a neuron, each a softmax over a bilinear score.

The theorem allows only softmax over bilinear scores. A neuron whose activation α is not silu then
needs m heads. They share one value, apply different affine maps inside the score, and write along
the same output vector. q is the pre-activation that the gate reads:

    head j   score of the token itself 0, of the bias token -(b_j q + c_j)
             pattern σ(b_j q + c_j), 1 - σ(b_j q + c_j)
             output  w_j · σ(b_j q + c_j) · value · W_out[i]

Their sum is value · p(q) · W_out[i] with the mixture p(q) = Σ_j w_j σ(b_j q + c_j).

Plain MLPs
----------
The value is q itself, so q · p(q) approximates α(q), within `bound` for every real q. This needs
Σ_j w_j = 1: for large q, p(q) approaches Σ_j w_j, and the error (Σ_j w_j - 1) q. Rounding is
amplified by Σ_j |w_j|, which is below 2.

* silu is one head with b = 1, and quick_gelu one with b = 1.702, both exact: this is Theorem 3 of
  "Attention-Only Transformers and Implementing MLPs with Attention Heads".
* gelu and its tanh forms take 1, 2, 4, 6 or 8 heads. With one head, the paper's slope 1.702 has an
  error of 0.0203 and the best slope 0.0139; with four heads the error is 2.4e-5 (`tables.py`).
* relu is one head of slope k. With x = k |q|, |q σ(k q) - relu(q)| = x / (1 + exp x) / k, at most
  0.27846.../k (W(1/e)/k, with Lambert's W). A steep slope does not amplify rounding, because
  |d/dq q σ(k q)| < 1.1 for every k. But scores grow to k |q|, and the range of float16 ends at
  65504.

Gated MLPs (SwiGLU, GEGLU, ReGLU)
---------------------------------
A neuron is α(q) · u with q = x · W_gate[:, i] and u = x · W_in[:, i]. The value is u, so the
mixture itself approximates α(q), within `bound` for |q| <= `limit`. The last head has b = 0 and c =
∞: the bias token is masked, the pattern is (1, 0), and the head is linear, as in Theorem 7. Every
score is still bilinear and every value linear in the residual stream. The error of the neuron is at
most bound · |u| · |W_out[i]|. The paper only covers plain MLPs; we know of no published form of
this.

*Limit.* A sum of sigmoids is bounded and α is not, so no number of heads covers every q. The linear
part of α, q/2 for a silu or a gelu, comes from the rising flank of wide sigmoids. The flatter they
are (small b), the straighter the flank; but w grows as 1/b, and the cancelling heads lose up to
about 2^-22 Σ|w| in float32. The fits (`analyses/tools/fit_gated_gates.py`) minimise the sum of both
errors, with slopes near 1/limit and Σ|w| from 2 to 17 times the limit.

*Scale.* R relu(q/R) = relu(q), so one fit of relu on [-1, 1] covers all limits, with error and
weights times R. Over a long range silu and gelu look like relu with a rounded corner, so they are
no harder: no bound exceeds that of relu, which is R times 8.3e-3, 2.3e-3, 8.1e-4 and 1.9e-4 for 4,
6, 8 and 12 heads. For small limits the bounds of silu and gelu are far lower.

*Accuracy.* The bound is absolute: where α is small, for q near 0 or negative, it may exceed α.
Beyond the limit the sigmoids saturate and the error grows like |q|. The output of one head may be
many times the output of the neuron; only the sum of the heads is meaningful, and half precision
cannot hold the terms of such a sum. The kink of relu leaves an error proportional to the limit.

The bounds hold in real arithmetic (`analyses/tools/certificates.py`). The weights are computed in
the working precision, or in float32 for half precision, whose rounding adds to the bound
(`analyses/results/`).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import float32_if_half


@dataclass(frozen=True)
class BilinearGate:
    """Choose between a token and the bias token with the m heads of one neuron.

    Attributes:
        name: the activation α, as in TransformerLens (`cfg.act_fn`).
        w: for each head, the factor of W_out[i].
        b: for each head, the slope of its query in q.
        c: for each head, the offset of its query; ∞ for a head that sees only its own token.
        bound: certified largest error of `activation` over all |q| <= limit.
        limit: the largest |q| for which the bound holds. ∞ for a plain MLP, where the mixture
            approximates α(q) / q; finite for a gated MLP, where it approximates α(q).

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
                f"got {len(self.w)} numbers w, {len(self.b)} b and {len(self.c)} c; expected the "
                "same number of each, one per head"
            )

    @property
    def heads_per_neuron(self) -> int:
        """m."""
        return len(self.w)

    @property
    def gated(self) -> bool:
        """True for gated MLPs: the mixture approximates α(q), and the value of the heads is u."""
        return self.limit < math.inf

    @property
    def sum_abs_w(self) -> float:
        """Σ_j |w_j|: times a few roundings, the error of the mixture in working precision."""
        return math.fsum(map(abs, self.w))

    @property
    def amplification(self) -> float:
        """The rounding of the mixture relative to that of α: Σ_j |w_j| / limit, at least 1."""
        return max(1.0, self.sum_abs_w / self.limit)

    def query(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head"]:
        """Return the query b_j q + c_j of each head, in float32 or float64.

        It is clamped to `largest_query` of q's dtype, so that arithmetic on scores never computes
        ∞ - ∞; the softmax is the same.
        """
        largest = largest_query(q.dtype)
        q = float32_if_half(q).clamp(-largest, largest)[..., None]
        return (q * q.new_tensor(self.b) + q.new_tensor(self.c)).clamp(-largest, largest)

    def scores(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return the scores of (self, bias) of each head: (0, -(b_j q + c_j))."""
        bias = -self.query(q).to(q.dtype)
        return torch.stack([torch.zeros_like(bias), bias], dim=-1)

    def pattern(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return the pattern over (self, bias) of each head: (σ(b_j q + c_j), σ(-b_j q - c_j))."""
        query = self.query(q)
        return torch.stack([query.sigmoid(), (-query).sigmoid()], dim=-1).to(q.dtype)

    def mixture(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return Σ_j w_j σ(b_j q + c_j), in float32 or float64: α(q) / q, or α(q) for a gated MLP.

        Heads are added one at a time and in place: a sum over a new axis would take m times the
        memory, and new tensors would take longer than the sigmoids. No step overwrites a value that
        a gradient needs, because the gradient of σ is computed from its result.
        """
        q = float32_if_half(q)
        heads = list(zip(self.w, self.b, self.c, strict=True))
        total = torch.full_like(q, sum(w for w, _, c in heads if c == math.inf))
        for w, b, c in heads:
            if c < math.inf:
                total.add_(q.mul(b).add_(c).sigmoid_(), alpha=w)
        return total

    def activation(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the approximation of α(q), within `bound` of it for |q| <= `limit`."""
        mixture = self.mixture(q)
        return (mixture if self.gated else mixture * q).to(q.dtype)


def largest_query(dtype: torch.dtype) -> float:
    """Return a quarter of the largest number of a dtype, which leaves room for a patched key."""
    return torch.finfo(dtype).max / 4
