"""Neuron-heads that are bilinear to the letter: m of them share a neuron.

For token t with normalised residual x_t, head j of neuron i computes

    query     b_j q + c_j               q = x · W_in[:, i] + b_in[i], or x · W_gate[:, i]
    scores    (self, bias) = (0, -query)           a softmax over a form bilinear in (x, 1)
    pattern   (σ(query), σ(-query))
    value     q, or u = x · W_in[:, i] in a gated MLP: linear in x
    z         pattern(self) · value
    result    z · w_j W_out[i, :]

and Σ_j w_j z_j is the neuron's activation within the bound of its gate (`gates/bilinear.py`,
`gates/gated.py`). Heads are ordered neuron by neuron: head_index = i · m + j.

With no live hook the sum is formed head by head without their patterns, and is the same function:
hooks change roundings, never the approximation.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF, PreActivation
from attn_only_lens.gates import GATES, BilinearGate, RangeGate
from attn_only_lens.gates.exact import working_precision
from attn_only_lens.heads.computation import NeuronHeads, is_live, tracked_like
from attn_only_lens.numerics import where_float64_is

__all__ = ["BilinearHeads", "largest_query"]


class BilinearHeads(NeuronHeads):
    """The way through the hook points of heads that share their neurons."""

    @property
    def heads_per_neuron(self) -> int:
        """m."""
        return self._mixture.heads_per_neuron

    @property
    def amplification(self) -> float:
        """Many times for a gated MLP; that of others, Σ|w| < 2, is within the tolerance."""
        return self._mixture.amplification if isinstance(self._mixture, RangeGate) else 1.0

    @property
    def value_is_product(self) -> bool:
        """Never: v is linear in the residual stream."""
        return False

    @property
    def _mixture(self) -> BilinearGate | RangeGate:
        gate = self.gate
        assert isinstance(gate, BilinearGate | RangeGate)
        return gate

    def error(self, q: PreActivation, act_fn: str) -> float:
        """The largest |approximation - activation| over pre-activations q, in float64."""
        q, gated = where_float64_is(q).double(), isinstance(self._mixture, RangeGate)
        approximate = self._mixture.mixture(q) * (1.0 if gated else q)
        return (approximate - GATES[act_fn].activation(q)).abs().max().item()

    def neurons(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any d_mlp"]:
        """What the heads of each neuron put out together: Σ_j w_j z_j."""
        each = working_precision(z.unflatten(-1, (-1, self.heads_per_neuron)))
        return (each @ each.new_tensor(self._mixture.weights)).to(z.dtype)

    def shares(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any head_index"]:
        """What each head adds to its neuron: w_j z_j."""
        each = working_precision(z.unflatten(-1, (-1, self.heads_per_neuron)))
        return (each * each.new_tensor(self._mixture.weights)).flatten(-2).to(z.dtype)

    def _unseen(self, q: PreActivation, value: PreActivation) -> PreActivation:
        """What the neurons put out, where nobody sees their heads."""
        return _passed(self._mixture.mixture(q), value).to(q.dtype)

    def _attend(self, q: PreActivation, value: PreActivation | None) -> PreActivation:
        """z of every head by way of queries, values, scores and pattern, through its hooks."""
        assert value is not None
        # Heads of a gated MLP are many times larger than their sum: half precision loses it.
        gated = isinstance(self._mixture, RangeGate)
        dtype = working_precision(q).dtype if gated else q.dtype
        m, value = self.heads_per_neuron, value.to(dtype)
        query = self._queries(q).to(dtype)
        v = value.repeat_interleave(m, dim=-1)
        query = self.hook_q(query.unsqueeze(-1)).squeeze(-1)
        v = self.hook_v(v.unsqueeze(-1)).squeeze(-1)
        weight = self._bilinear_pattern(query)[..., SELF].transpose(1, 2)
        return _passed(weight, v).to(dtype)

    def _queries(self, q: PreActivation) -> Float[Tensor, "batch pos head_index"]:
        working, gate = working_precision(q), self._mixture
        slopes, offsets = working.new_tensor(gate.slopes), working.new_tensor(gate.offsets)
        # A head that sees itself alone has slope 0 and offset ∞; its query is kept finite.
        limit = largest_query(q.dtype)
        working = working.clamp(-limit, limit).unsqueeze(-1)
        return (working * slopes + offsets).clamp(-limit, limit).flatten(-2)

    def _bilinear_pattern(
        self, query: Float[Tensor, "batch pos head_index"]
    ) -> Float[Tensor, "batch head_index pos key=2"]:
        if is_live(self.hook_attn_scores) or is_live(self.hook_k):
            own = torch.zeros_like(query)
            if is_live(self.hook_k):
                key = tracked_like(torch.zeros_like(query.unsqueeze(-1)), query)
                limit = torch.finfo(query.dtype).max
                own = (query * self.hook_k(key).squeeze(-1)).clamp(-limit, limit)
            scores = torch.stack([own, -query], dim=-1).transpose(1, 2)
            scores = self.hook_attn_scores(scores)
            pattern = torch.softmax(scores, dim=-1)
            pattern = torch.where(torch.isnan(pattern), torch.zeros_like(pattern), pattern)
        else:
            odds = working_precision(query)
            weights = torch.sigmoid(odds), torch.sigmoid(-odds)
            pattern = torch.stack(weights, dim=-1).to(query.dtype).transpose(1, 2)
        hooked: Tensor = self.hook_pattern(pattern)
        return hooked


def largest_query(dtype: torch.dtype) -> float:
    """The largest query: a quarter of the largest number, to leave room for a patched key."""
    return torch.finfo(dtype).max / 4


def _passed(weight: Tensor, value: Tensor) -> Tensor:
    """weight · value; 0 where the weight is, though a float16 value may have overflowed."""
    if value.dtype != torch.float16:
        return weight * value
    return weight * torch.where(torch.isinf(value) & (weight == 0), 0.0, value)
