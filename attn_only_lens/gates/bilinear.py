"""Bilinear gates: an activation as several heads a neuron, each a softmax over a bilinear score.

The theorem allows softmax over bilinear scores and nothing else. A neuron whose activation α is not
silu then takes m heads. They share one value, differ in the affine map inside the score, and write
along the same output vector; q is the pre-activation that the gate reads:

    head j   score of the token itself 0, of the bias token -(b_j q + c_j)
             pattern σ(b_j q + c_j), 1 - σ(b_j q + c_j)
             output  w_j · σ(b_j q + c_j) · value · W_out[i]

Their sum is value · p(q) · W_out[i] with p(q) = Σ_j w_j σ(b_j q + c_j), the mixture.

Plain MLPs
----------
The value is q itself, so q · p(q) stands for α(q), within `bound` for every real q. Σ_j w_j = 1 is
needed: p(q) goes to Σ_j w_j as q grows, and the error to (Σ_j w_j - 1) q. Σ_j |w_j| is what
rounding is amplified by, and stays below 2.

* silu is one head with b = 1, quick_gelu one with b = 1.702, both exact: Theorem 3 of
  "Attention-Only Transformers and Implementing MLPs with Attention Heads" to the letter.
* gelu and its tanh forms take 1, 2, 4, 6 or 8 heads. With one, the paper's slope 1.702 errs by
  0.0203, the best slope by 0.0139; with four the error is 2.4e-5 (`tables.py`).
* relu is one head of slope k. With x = k |q|, |q σ(k q) - relu(q)| = x / (1 + exp x) / k, at most
  0.27846.../k (W(1/e)/k, with Lambert's W). A steep slope does not amplify rounding, for
  |d/dq q σ(k q)| < 1.1 whatever k. It costs range: scores grow to k |q|, and float16 ends at 65504.

Gated MLPs (SwiGLU, GEGLU, ReGLU)
---------------------------------
A neuron is α(q) · u with q = x · W_gate[:, i] and u = x · W_in[:, i]. The value is u, so the
mixture itself stands for α(q), within `bound` for |q| <= `limit`. The last head has b = 0 and
c = ∞: the bias token is masked, its pattern is (1, 0), and it is linear, as in Theorem 7. Every
score is still bilinear and every value linear in the residual stream. The paper stops at plain
MLPs; as far as we know nobody has published this. The neuron is off by at most
bound · |u| · |W_out[i]|.

*Limit.* A sum of sigmoids is bounded and α is not, so no number of heads serves every q. The linear
part of α, q/2 for a silu or a gelu, comes from the rising flank of wide sigmoids: the flatter
(b small), the straighter, but w grows as 1/b, and float32 then loses digits to cancelling heads, up
to about 2^-22 Σ|w|. The fits weigh one against the other (`analyses/tools/fit_gated_gates.py`) and
settle
at slopes near 1/limit and Σ|w| from 2 to 17 times the limit.

*Scale.* As R relu(q/R) = relu(q), one fit of relu on [-1, 1] serves all limits, with error and
weights times R. Over a long range silu and gelu look like relu rounded off near 0, which is no
harder: no bound is above relu's, R times 8.3e-3, 2.3e-3, 8.1e-4 and 1.9e-4 for 4, 6, 8 and 12
heads, and for lower limits they are far below.

*Accuracy.* The bound is absolute: where α is small, q near 0 or negative, it may exceed α itself.
Beyond the limit the sigmoids saturate and the error grows like |q|. One head's output may be many
times the neuron's, and only their sum means something; half precision cannot hold such sums at all.
relu's kink leaves an error in proportion to the limit for any number of heads.

Bounds are certified in real arithmetic (`certificates.py`). Weights are computed in the working
precision, or in float32 for half precision; float32's rounding comes on top of the bound, and is in
`analyses/results/`.
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
        w: each head's share of the neuron's output, what it multiplies W_out[i] by.
        b: each head's slope, its query in q.
        c: each head's offset; ∞ for a head that sees its own token alone.
        bound: certified largest error of `activation` over all |q| <= limit.
        limit: the largest |q| that the bound holds for. ∞ for a plain MLP, where the mixture stands
            for α(q) / q; finite for a gated MLP, where it stands for α(q).

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
                f"got {len(self.w)} numbers w, {len(self.b)} b and {len(self.c)} c; expected as "
                "many of each, one for each head"
            )

    @property
    def heads_per_neuron(self) -> int:
        """m."""
        return len(self.w)

    @property
    def gated(self) -> bool:
        """True for gated MLPs: the mixture is α(q), and the heads' value is u."""
        return self.limit < math.inf

    @property
    def sum_abs_w(self) -> float:
        """Σ_j |w_j|: times a few roundings, the error of the mixture in working precision."""
        return math.fsum(map(abs, self.w))

    @property
    def amplification(self) -> float:
        """Rounding of the mixture over that of α on the range: Σ_j |w_j| / limit, at least 1."""
        return max(1.0, self.sum_abs_w / self.limit)

    def query(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head"]:
        """Return each head's query b_j q + c_j, in float32 at least.

        It is clamped to `largest_query` of q's dtype, so that no arithmetic on scores meets ∞ - ∞;
        the softmax is the same.
        """
        largest = largest_query(q.dtype)
        q = float32_if_half(q).clamp(-largest, largest)[..., None]
        return (q * q.new_tensor(self.b) + q.new_tensor(self.c)).clamp(-largest, largest)

    def scores(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return each head's scores of (self, bias) before the softmax: (0, -(b_j q + c_j))."""
        bias = -self.query(q).to(q.dtype)
        return torch.stack([torch.zeros_like(bias), bias], dim=-1)

    def pattern(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape head key=2"]:
        """Return each head's pattern over (self, bias): (σ(b_j q + c_j), σ(-b_j q - c_j))."""
        query = self.query(q)
        return torch.stack([query.sigmoid(), (-query).sigmoid()], dim=-1).to(q.dtype)

    def mixture(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return Σ_j w_j σ(b_j q + c_j), in float32 at least: α(q) / q, or α(q) for a gated MLP.

        One head at a time and in place. A sum over a new axis would take m times the memory, and a
        new tensor a step more time than the sigmoids. No step overwrites what a gradient needs:
        σ's is formed from its own result.
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
    """Return a quarter of the largest number of a dtype: room for a patched key."""
    return torch.finfo(dtype).max / 4
