"""Compute each neuron of an MLP with m neurons, which are attention heads with bilinear scores.

For a token with the normalised residual x, neuron i · m + j computes term j of the MLP's neuron i:

    query     b_j q + c_j               q = x · W_in[:, i] + b_in[i], or x · W_gate[:, i]
    scores    (self, bias) = (0, -query)           a softmax over a form bilinear in (x, 1)
    pattern   (σ(query), σ(-query))
    value     q, or u = x · W_in[:, i] in a gated MLP: linear in x
    z         pattern(self) · value
    result    z · w_j W_out[i, :]

This is a gated MLP with m times as many neurons, whose activation function is σ. The sum of w_j z_j
over j approximates the activation of neuron i; `gates/bilinear.py` bounds the error. Without hooks,
the sum is computed without patterns; the result differs only by rounding.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.devices import float32_if_half
from attn_only_lens.gates.bilinear import BilinearGate, largest_query
from attn_only_lens.gates.exact import GATES, Gate
from attn_only_lens.heads.computation import NeuronHeads


class BilinearHeads(NeuronHeads):
    """The neurons of an MLP with a bilinear gate: one head for each term of each MLP neuron."""

    bilinear_gate: BilinearGate
    """The gate of the MLP's neurons."""

    @property
    def gate(self) -> Gate:
        """The gate of each head: as for silu, its score is its query."""
        return GATES["silu"]

    @property
    def n_neurons(self) -> int:
        """The number of heads, m times the MLP's number of neurons."""
        return super().n_neurons * self.bilinear_gate.heads

    @property
    def amplification(self) -> float:
        """The factor by which the gate amplifies rounding errors; 1 if the MLP is not gated."""
        return self.bilinear_gate.amplification

    @property
    def value_is_product(self) -> bool:
        """Always False, because v is linear in the residual stream."""
        return False

    @property
    def W_O(self) -> Float[Tensor, "head_index d_head=1 d_model"]:
        """The output weights w_j W_out[i]."""
        return self._times(self.bilinear_gate.w, super().W_O)

    @property
    def read_matrices(self) -> list[Float[Tensor, "d_model head_index"]]:
        """The matrices with which the heads compute their queries and values."""
        matrices = super().read_matrices
        return [self._times(self.bilinear_gate.b, matrices[0].T).T, self._shared(matrices[-1])]

    def _times(self, factors: Sequence[float], rows: Tensor) -> Tensor:
        """Return for each head the row of its MLP neuron, times one of w, b or c."""
        limit = largest_query(rows.dtype)  # stands for c = ∞
        numbers = rows.new_tensor(factors).clamp(-limit, limit)
        return torch.einsum("j,n...->nj...", numbers, rows).flatten(0, 1)

    def _shared(self, by_neuron: Float[Tensor, "*any d_mlp"]) -> Float[Tensor, "*any head_index"]:
        return by_neuron.repeat_interleave(self.bilinear_gate.heads, dim=-1)

    def mlp_projections(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """Compute q and, in a gated MLP, u (otherwise None) of the MLP's neurons."""
        return super().projections(x)  # type: ignore[safe-super]  # defined by the model's layout

    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation]:
        """Compute the queries and values of the heads from the MLP's normalised input."""
        return self._of_heads(*self.mlp_projections(x))

    def _of_heads(
        self, q: PreActivation, up: PreActivation | None
    ) -> tuple[PreActivation, PreActivation]:
        # In gated MLPs, use float32: head outputs are much larger than their sum.
        gate = self.bilinear_gate
        dtype = float32_if_half(q).dtype if gate.gated else q.dtype
        value = (q if up is None else up).to(dtype)
        return gate.query(q).flatten(-2).to(dtype), self._shared(value)

    def _query_and_value(
        self, q: PreActivation, up: PreActivation | None
    ) -> tuple[PreActivation, PreActivation]:
        assert up is not None
        return q, up

    def _weighted(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any d_mlp head"]:
        """Return each head's contribution w_j z_j to its MLP neuron, in float32 or float64."""
        by_neuron = float32_if_half(z.unflatten(-1, (-1, self.bilinear_gate.heads)))
        return by_neuron * by_neuron.new_tensor(self.bilinear_gate.w)

    def _sum_of_heads(self, q: PreActivation, value: PreActivation) -> PreActivation:
        """Return the outputs of the MLP's neurons without computing each head."""
        mixture = self.bilinear_gate.mixture(q)
        if q.dtype == torch.float16:  # a value may have overflowed to ±∞
            value = torch.where(torch.isinf(value) & (mixture == 0), 0.0, value)
        return (mixture * value).to(q.dtype)
