"""The neurons of one MLP as bilinear heads, m of them to a neuron, behind hook points of their own.

The mathematics is in `heads/bilinear.py`; here are their weights in a head's shape.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.gates import BilinearGate, RangeGate
from attn_only_lens.heads.bilinear import BilinearHeads, largest_query
from attn_only_lens.heads.computation import is_live
from attn_only_lens.tl import MLP, GatedMLP
from attn_only_lens.two_blocks.attention import NeuronAttention
from attn_only_lens.two_blocks.config import BlockConfig

__all__ = ["BilinearAttention"]


class BilinearAttention(BilinearHeads, NeuronAttention):
    """d_mlp · m neuron-heads with the parameters of one source MLP."""

    def __init__(self, mlp: MLP | GatedMLP, cfg: BlockConfig) -> None:
        super().__init__(mlp, cfg)
        assert isinstance(self.gate, BilinearGate | RangeGate)

    def forward(self, x: Residual) -> Residual:
        """What the source MLP returns for the normalised residual `x`, within the gate's bound."""
        q, up = self._project(x)
        value = q if up is None else up
        results = self.cfg.use_attn_result and is_live(self.hook_result)
        if not (results or any(map(is_live, (*self._before_z, self.hook_z)))):
            return self._write(self._unseen(q, value))
        z = self._attend(q, value)
        z = self.hook_z(z.unsqueeze(-1)).squeeze(-1)
        if results:
            result = self.hook_result(z.unsqueeze(-1) * self.W_O.squeeze(-2))
            return (result.sum(dim=-2) + self.b_O).to(q.dtype)
        return self._write(self.neurons(z).to(q.dtype))

    # Weights in a head's shape

    def _each(self, numbers: tuple[float, ...], of: Tensor) -> Tensor:
        """Numbers, one for each head of a neuron, times a tensor with a row for each neuron."""
        row = of.new_tensor(numbers).clamp(-largest_query(of.dtype), largest_query(of.dtype))
        return torch.einsum("j,n...->nj...", row, of).flatten(0, 1)

    @property
    def W_Q(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Query weights: b_j W_in[:, i], or b_j W_gate[:, i]."""
        return self._each(self._mixture.slopes, super().W_Q)

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """Query biases: b_j b_in[i] + c_j; the largest number for a head that sees itself alone."""
        scaled = self._each(self._mixture.slopes, super().b_Q)
        return scaled + self._each(self._mixture.offsets, torch.ones_like(super().b_Q))

    @property
    def W_K(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Key weights: zero, since a neuron-head's keys do not depend on the token."""
        return torch.zeros_like(self.W_Q)

    @property
    def b_K(self) -> Float[Tensor, "head_index d_head=1"]:
        """Key biases of the token itself: zero (the bias token's key is -1)."""
        return torch.zeros_like(self.b_Q)

    @property
    def W_V(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Value weights: W_in, the same for every head of a neuron."""
        return self._each((1.0,) * self.heads_per_neuron, self.W_in.T.unsqueeze(-1))

    @property
    def b_V(self) -> Float[Tensor, "head_index d_head=1"]:
        """Value biases: b_in, or zero in a gated MLP."""
        each = (1.0 if self.W_gate is None else 0.0,) * self.heads_per_neuron
        return self._each(each, self.b_in.unsqueeze(-1))

    @property
    def W_O(self) -> Float[Tensor, "head_index d_head=1 d_model"]:
        """Output weights: w_j W_out[i]."""
        return self._each(self._mixture.weights, self.W_out.unsqueeze(-2))
