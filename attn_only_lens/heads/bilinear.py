"""Compute each MLP neuron with m attention heads (neuron-heads) whose scores are bilinear.

For a token with the normalised residual x, head j of neuron i computes

    query     b_j q + c_j               q = x · W_in[:, i] + b_in[i], or x · W_gate[:, i]
    scores    (self, bias) = (0, -query)           a softmax over a form bilinear in (x, 1)
    pattern   (σ(query), σ(-query))
    value     q, or u = x · W_in[:, i] in a gated MLP: linear in x
    z         pattern(self) · value
    result    z · w_j W_out[i, :]

The sum Σ_j w_j z_j approximates the neuron's activation; `gates/bilinear.py` bounds the error.
Heads are ordered by neuron: head_index = i · m + j. Without hooks, the sum is computed without
patterns; the result differs only by rounding.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import PreActivation
from attn_only_lens.devices import float32_if_half
from attn_only_lens.gates import BilinearGate
from attn_only_lens.heads.computation import NeuronHeads


class BilinearHeads(NeuronHeads):
    """The neuron-heads of an MLP with a bilinear gate; several heads share a neuron."""

    @property
    def bilinear_gate(self) -> BilinearGate:
        """The `BilinearGate` of the heads."""
        gate = self.gate
        assert isinstance(gate, BilinearGate)
        return gate

    @property
    def heads_per_neuron(self) -> int:
        """The number of heads that share a neuron, m."""
        return self.bilinear_gate.heads_per_neuron

    @property
    def amplification(self) -> float:
        """The factor by which the gate amplifies rounding errors; 1 if the MLP is not gated."""
        return self.bilinear_gate.amplification

    @property
    def value_is_product(self) -> bool:
        """Always False, because v is linear in the residual stream."""
        return False

    def neuron_outputs(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any d_mlp"]:
        """Return each neuron's output: the sum over its heads of z times the head's weight w_j."""
        by_head = float32_if_half(z.unflatten(-1, (-1, self.heads_per_neuron)))
        return (by_head @ by_head.new_tensor(self.bilinear_gate.w)).to(z.dtype)

    def head_outputs(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any head_index"]:
        """Return each head's contribution to its neuron: z times the head's weight w_j."""
        by_head = float32_if_half(z.unflatten(-1, (-1, self.heads_per_neuron)))
        return (by_head * by_head.new_tensor(self.bilinear_gate.w)).flatten(-2).to(z.dtype)

    def _sum_of_heads(self, q: PreActivation, value: PreActivation) -> PreActivation:
        """Return the neurons' outputs without computing each head."""
        mixture = self.bilinear_gate.mixture(q)
        if q.dtype == torch.float16:  # a value may have overflowed to ±∞
            value = torch.where(torch.isinf(value) & (mixture == 0), 0.0, value)
        return (mixture * value).to(q.dtype)

    def _query_and_value(
        self, q: PreActivation, up: PreActivation | None
    ) -> tuple[PreActivation, PreActivation]:
        # In gated MLPs, use float32: head outputs are much larger than their sum.
        gate = self.bilinear_gate
        dtype = float32_if_half(q).dtype if gate.gated else q.dtype
        value = (q if up is None else up).to(dtype)
        query = gate.query(q).flatten(-2).to(dtype)
        return query, value.repeat_interleave(gate.heads_per_neuron, dim=-1)

    def _gate_scores(
        self, query: Float[Tensor, "batch pos head_index"]
    ) -> Float[Tensor, "batch pos head_index key=2"]:
        return torch.stack([torch.zeros_like(query), -query], dim=-1)

    def _gate_pattern(
        self, query: Float[Tensor, "batch pos head_index"]
    ) -> Float[Tensor, "batch pos head_index key=2"]:
        weights = self._self_weight(query), self._self_weight(-query)
        return torch.stack(weights, dim=-1)

    def _self_weight(
        self, query: Float[Tensor, "*any pos head_index"], index: Tensor | None = None
    ) -> Float[Tensor, "*any pos head_index"]:
        return float32_if_half(query).sigmoid().to(query.dtype)
