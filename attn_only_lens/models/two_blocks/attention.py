"""The neurons of one MLP as attention heads of width 1, behind TransformerLens' hook points.

For token t with normalised residual x_t, head i of a plain MLP computes

    q = x · W_in[:, i] + b_in[i]      the query, and the value: W_Q = W_V
    scores    (self, bias) = (0, -logit p(q))
    pattern   (self, bias) = (p(q), 1 - p(q))
    z = p(q) · v = act(q)             the bias token's value is 0
    result = z · W_out[i, :]

For p = σ this is Theorem 3 of "Attention-Only Transformers and Implementing MLPs with Attention
Heads". A gated MLP has q = g = x · W_gate[:, i] and v = g · u with u = x · W_in[:, i]: the pattern
is that of the gate, and the value is a *product*, not a linear map of x. TransformerLens adds b_in
after the product, so b_in @ W_out is not part of z but of the block's b_O.

A token's key is 0 and the bias token's key is constant, so `hook_k` carries zeros; a patch of it
adds q · k to the self score, as in any head.

With no live hook before z, act(q) is computed as in the source: bitwise the same, at the same cost.
With bilinear gates, m heads share each neuron (`heads/bilinear.py`).
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.utilities.addmm import batch_addmm

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates import Gate
from attn_only_lens.gates.bilinear import largest_query
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.computation import NeuronHeads, is_live
from attn_only_lens.heads.gating import AnyGate
from attn_only_lens.models.two_blocks.config import BlockConfig
from attn_only_lens.models.two_blocks.stacks import QKAndOV
from attn_only_lens.tl import MLP, GatedMLP


class NeuronAttention(NeuronHeads, QKAndOV, nn.Module):
    """d_mlp neuron-heads with the parameters of one source MLP.

    Parameters keep the names and shapes of the MLP, so that the two vectors of a neuron-head are
    stored once (W_Q = W_V); `W_Q`, `W_K`, `W_V`, `W_O` are views with the shape of heads.
    """

    W_in: nn.Parameter
    b_in: nn.Parameter
    W_out: nn.Parameter
    b_out: nn.Parameter
    W_gate: nn.Parameter | None

    attn_type = "neuron"

    def __init__(self, mlp: MLP | GatedMLP, cfg: BlockConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.act_fn: Callable[[Tensor], Tensor] = mlp.act_fn
        self.W_in = mlp.W_in  # type: ignore[assignment]
        self.b_in = mlp.b_in
        self.W_out = mlp.W_out  # type: ignore[assignment]
        self.b_out = mlp.b_out
        self.W_gate = mlp.W_gate if isinstance(mlp, GatedMLP) else None
        self._add_hook_points()

    @property
    def gate(self) -> AnyGate:
        """The gate of this block's activation (looked up, so that a saved model holds no code)."""
        gate: AnyGate = self.cfg.gating.gate(self.cfg.act_fn, self.cfg.layer)
        return gate

    @property
    def module(self) -> nn.Module:
        """This module."""
        return self

    @property
    def value_is_product(self) -> bool:
        """True for a gated MLP."""
        return self.W_gate is not None

    def forward(self, x: Residual) -> Residual:
        """Return the output of the source MLP for the normalised residual stream `x`."""
        q, up = self.projections(x)
        z = self._through_hooks(q, up, lambda: self._plainly(q, up))
        return self._write(z)

    def pre_activation(self, x: Residual) -> PreActivation:
        """Return q, which the gates read, for the normalised residual stream `x`."""
        return self.projections(x)[0]

    def _plainly(self, q: PreActivation, up: PreActivation | None) -> PreActivation:
        """Return z as the source computes it."""
        return self.act_fn(q) if up is None else self.act_fn(q) * up

    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """Return the pre-activation q, and u in a gated MLP."""
        if self.W_gate is None:
            return batch_addmm(self.b_in, self.W_in, x), None
        # The calls of the source: other ways to write these products round differently.
        gate = F.linear(x, self.W_gate.T.contiguous())
        return gate, F.linear(x, self.W_in.T.contiguous())

    def _write(self, z: PreActivation) -> Residual:
        if self.cfg.use_attn_result and is_live(self.hook_result):
            result = self.hook_result(z.unsqueeze(-1) * self.W_out)
            return result.sum(dim=-2) + self.b_O
        if self.W_gate is None:
            return batch_addmm(self.b_out, self.W_out, z.contiguous())
        return F.linear(z + self.b_in, self.W_out.T.contiguous(), self.b_out)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The block's output bias: b_out, plus b_in @ W_out for a gated MLP."""
        return self.b_out if self.W_gate is None else self.b_in @ self.W_out + self.b_out

    # Weights in a head's shape

    def _scale(self, factor: str, rows: Tensor) -> Tensor:
        """Multiply the row of each neuron by a factor of its heads: value, w, b or c."""
        return cast(Gate, self.gate).values(rows) if factor == "value" else rows

    @property
    def W_Q(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Query weights: W_in, or W_gate in a gated MLP; times the slope b_j of a bilinear head."""
        weights = self.W_in if self.W_gate is None else self.W_gate
        return self._scale("b", weights.T.unsqueeze(-1))

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """Query biases: b_in, or zero in a gated MLP; b_j b_in + c_j for a bilinear head."""
        return self._scale("b", self._bias)

    @property
    def W_K(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Key weights: zero, since a neuron-head's keys do not depend on the token."""
        return torch.zeros_like(self.W_Q)

    @property
    def b_K(self) -> Float[Tensor, "head_index d_head=1"]:
        """Key biases of the token itself: zero (the bias token's key is a constant)."""
        return torch.zeros_like(self.b_Q)

    @property
    def W_V(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Value weights: W_in, stored once with W_Q; times a_1 a_2 for a generalized SiLU."""
        self._refuse_product_value("W_V")
        return self._scale("value", self.W_in.T.unsqueeze(-1))

    @property
    def b_V(self) -> Float[Tensor, "head_index d_head=1"]:
        """Value biases: b_in, or zero in a gated MLP."""
        self._refuse_product_value("b_V")
        return self._scale("value", self._bias)

    @property
    def W_O(self) -> Float[Tensor, "head_index d_head=1 d_model"]:
        """Output weights: W_out, times the weight w_j of a bilinear head."""
        return self._scale("w", self.W_out.unsqueeze(-2))

    @property
    def _bias(self) -> Float[Tensor, "d_mlp 1"]:
        return (self.b_in if self.W_gate is None else torch.zeros_like(self.b_in)).unsqueeze(-1)

    def _refuse_product_value(self, name: str) -> None:
        if self.value_is_product:
            raise UnsupportedCallError(
                f"{name} of a neuron-head of a gated MLP: its value is the product "
                "(x · W_gate) · (x · W_in), which no value matrix computes. Use W_gate and W_in of "
                "model.blocks[i].attn, or hook_v for the values themselves"
            )


class BilinearAttention(BilinearHeads, NeuronAttention):
    """d_mlp · m neuron-heads with the parameters of one source MLP."""

    def forward(self, x: Residual) -> Residual:
        """Return the output of the source MLP for the normalised `x`, within the gate's bound."""
        q, up = self.projections(x)
        value = q if up is None else up
        results = self.cfg.use_attn_result and is_live(self.hook_result)
        if not (results or any(map(is_live, (*self._before_z, self.hook_z)))):
            return self._write(self._sum_of_heads(q, value))
        z = self._attend(q, value)
        z = self.hook_z(z.unsqueeze(-1)).squeeze(-1)
        if results:
            result = self.hook_result(z.unsqueeze(-1) * self.W_O.squeeze(-2))
            return (result.sum(dim=-2) + self.b_O).to(q.dtype)
        return self._write(self.neuron_outputs(z).to(q.dtype))

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """Query biases: b_j b_in[i] + c_j, with a large number for c_j = ∞."""
        return super().b_Q + self._scale("c", torch.ones_like(self._bias))

    def _scale(self, factor: str, rows: Tensor) -> Tensor:
        gate, limit = self.bilinear_gate, largest_query(rows.dtype)
        values = (1.0,) * len(gate.w) if factor == "value" else getattr(gate, factor)
        factors = rows.new_tensor(values).clamp(-limit, limit)
        return torch.einsum("j,n...->nj...", factors, rows).flatten(0, 1)
