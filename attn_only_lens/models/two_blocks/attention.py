"""The neurons of one MLP as attention heads of width 1, behind TransformerLens' hook points.

For token t with normalised residual x_t, head i of a plain MLP computes

    q = x · W_in[:, i] + b_in[i]      the query, and the value: W_Q = W_V
    scores    (self, bias) = (0, -logit p(q))
    pattern   (self, bias) = (p(q), 1 - p(q))
    z = p(q) · v = act(q)             the bias token's value is 0
    result = z · W_out[i, :]

which is Theorem 2 of "Attention-Only Transformers and Implementing MLPs with Attention Heads" for
p = σ. A gated MLP has q = g = x · W_gate[:, i] and v = g · u with u = x · W_in[:, i]: the pattern
is that of the gate, and the value is a *product*, not a linear map of x. Its b_in, which
TransformerLens adds after the product, is not part of z: b_in @ W_out belongs to the block's b_O.

A token's key is 0 and the bias token's key is constant, so `hook_k` carries zeros; patching them
adds q · k to the self score, as it would in any head.

With no live hook before z, act(q) is computed as the source computes it: bitwise the same, at the
same cost. Only live hooks pay for scores and patterns.

The neurons of one MLP as bilinear heads, m of them to a neuron, behind hook points of their own.

The mathematics is in `heads/bilinear.py`; here are their weights in a head's shape.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.utilities.addmm import batch_addmm

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.bilinear import largest_query
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.computation import NeuronHeads, is_live, require_grad_like
from attn_only_lens.heads.gating import AnyGate
from attn_only_lens.models.two_blocks.config import BlockConfig
from attn_only_lens.tl import MLP, GatedMLP

__all__ = ["BilinearAttention", "NeuronAttention", "is_live", "require_grad_like"]


class NeuronAttention(NeuronHeads, nn.Module):
    """d_mlp neuron-heads with the parameters of one source MLP.

    Parameters keep their MLP names and shapes, so that the two vectors a neuron-head needs are
    stored once (Remark 3: W_Q = W_V); `W_Q`, `W_K`, `W_V`, `W_O` are views in a head's shape.
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
        found: AnyGate = self.cfg.gating.gate(self.cfg.act_fn, self.cfg.layer)
        return found

    @property
    def module(self) -> nn.Module:
        """This module."""
        return self

    @property
    def value_is_product(self) -> bool:
        """Whether the MLP is gated."""
        return self.W_gate is not None

    def forward(self, x: Residual) -> Residual:
        """What the source MLP returns for the normalised residual stream `x`."""
        q, up = self._project(x)
        z = self._through_hooks(q, up, lambda: self._plainly(q, up))
        return self._write(z)

    def pre_activation(self, x: Residual) -> PreActivation:
        """What the gates read of the normalised residual stream `x`: q."""
        return self._project(x)[0]

    def _plainly(self, q: PreActivation, up: PreActivation | None) -> PreActivation:
        """z as the source computes it."""
        return self.act_fn(q) if up is None else self.act_fn(q) * up

    def _project(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """What the neurons read: the pre-activation, and in a gated MLP what it gates."""
        if self.W_gate is None:
            return batch_addmm(self.b_in, self.W_in, x), None
        # The source's own calls: other ways to write these products round differently.
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
        """The block's output bias: b_out, and for a gated MLP b_in @ W_out besides."""
        return self.b_out if self.W_gate is None else self.b_in @ self.W_out + self.b_out

    @property
    def W_Q(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Query weights: W_in, or W_gate of a gated MLP."""
        return (self.W_in if self.W_gate is None else self.W_gate).T.unsqueeze(-1)

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """Query biases: b_in, or zero in a gated MLP."""
        return (self.b_in if self.W_gate is None else torch.zeros_like(self.b_in)).unsqueeze(-1)

    @property
    def W_K(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Key weights: zero, since a neuron-head's keys do not depend on the token."""
        return torch.zeros_like(self.W_in).T.unsqueeze(-1)

    @property
    def b_K(self) -> Float[Tensor, "head_index d_head=1"]:
        """Key biases of the token itself: zero (the bias token's key is a constant)."""
        return torch.zeros_like(self.b_in).unsqueeze(-1)

    @property
    def W_V(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Value weights: W_in, the same storage as W_Q."""
        self._refuse_product_value("W_V")
        return self.W_Q

    @property
    def b_V(self) -> Float[Tensor, "head_index d_head=1"]:
        """Value biases: b_in, the same storage as b_Q."""
        self._refuse_product_value("b_V")
        return self.b_Q

    @property
    def W_O(self) -> Float[Tensor, "head_index d_head=1 d_model"]:
        """Output weights: W_out."""
        return self.W_out.unsqueeze(-2)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K^T between tokens: zero by construction."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O, rank 1 for each neuron-head."""
        return FactoredMatrix(self.W_V, self.W_O)

    def _refuse_product_value(self, name: str) -> None:
        if self.W_gate is not None:
            raise UnsupportedCallError(
                f"{name} of a neuron-head of a gated MLP: its value is the product "
                "(x · W_gate) · (x · W_in), which no value matrix gives. Use W_gate and W_in of "
                "model.blocks[i].attn, or hook_v for the values themselves"
            )


class BilinearAttention(BilinearHeads, NeuronAttention):
    """d_mlp · m neuron-heads with the parameters of one source MLP."""

    def forward(self, x: Residual) -> Residual:
        """What the source MLP returns for the normalised residual `x`, within the gate's bound."""
        q, up = self._project(x)
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

    # Weights in a head's shape

    def _each(self, numbers: tuple[float, ...], of: Tensor) -> Tensor:
        """Numbers, one for each head of a neuron, times a tensor with a row for each neuron."""
        row = of.new_tensor(numbers).clamp(-largest_query(of.dtype), largest_query(of.dtype))
        return torch.einsum("j,n...->nj...", row, of).flatten(0, 1)

    @property
    def W_Q(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """Query weights: b_j W_in[:, i], or b_j W_gate[:, i]."""
        return self._each(self.bilinear_gate.b, super().W_Q)

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """Query biases: b_j b_in[i] + c_j; the largest number for a head that sees itself alone."""
        scaled = self._each(self.bilinear_gate.b, super().b_Q)
        return scaled + self._each(self.bilinear_gate.c, torch.ones_like(super().b_Q))

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
        return self._each(self.bilinear_gate.w, self.W_out.unsqueeze(-2))
