"""Compute the neurons of a mixture of experts, only for the experts that each token visits.

A mixture is one gated MLP with the neurons of all experts. For token x, expert e with the routing
weight r_e, and neuron i of this expert,

    q = x · W_gate[:, i]        u = r_e x · W_in[:, i]        z = act(q) u        output z W_out[i]

So the routing weight is a factor of the neuron's value, and z = 0 if the token does not visit the
expert, r_e = 0. The neurons of shared experts come last. Every token visits them; their factor is 1
or, in Qwen2-MoE, the sigmoid of a linear map of x, which is the last routing weight.

With clamps (gpt-oss), q and u are clamped, and u is 1 + the clamped projection, times r_e.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.axes import PreActivation, Residual


def unwrapped(module: Any) -> Any:
    """Return the transformers module that a bridge's component, or a module inside it, wraps."""
    while isinstance(inner := getattr(module, "original_component", None), nn.Module):
        module = inner
    return module


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of one mixture, as transformers stores them.

    Attributes:
        router: the module with the router's weight and perhaps bias.
        stacked: the module with the weights of all routed experts.
        shared: the module with the weights of the shared experts, or None.
        shared_gate: the linear map whose sigmoid multiplies the shared experts, or None.
    """

    router: Any
    stacked: Any
    shared: Any
    shared_gate: Any

    @property
    def n(self) -> int:
        """The number of routed experts."""
        return len(self.stacked.down_proj)

    @property
    def size(self) -> int:
        """The number of neurons of each routed expert."""
        return int(self.stacked.down_proj.shape[1 if self.stacked.is_transposed else 2])

    @property
    def n_shared(self) -> int:
        """The number of neurons of the shared experts."""
        return 0 if self.shared is None else len(self._shared("gate_proj").weight)

    @property
    def n_neurons(self) -> int:
        """The number of neurons of all experts."""
        return self.n * self.size + self.n_shared

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """The output weights of all neurons; in most families, this is a copy."""
        down = self.stacked.down_proj
        rows: Tensor = (down if self.stacked.is_transposed else down.mT).flatten(0, 1)
        if self.shared is None:
            return rows
        return torch.cat([rows, self._shared("down_proj").weight.T])

    @property
    def read_matrices(self) -> list[Float[Tensor, "d_model d_mlp"]]:
        """The matrices that map x to q and to u, without biases, clamps and routing weights."""
        both = self.stacked.gate_up_proj
        both = both if self.stacked.is_transposed else both.mT
        if self.stacked.is_concatenated:
            parts = both.chunk(2, dim=-1)
        else:
            parts = both[..., ::2], both[..., 1::2]
        matrices = [x.transpose(0, 1).flatten(1) for x in parts]
        if self.shared is None:
            return matrices
        of_shared = [self._shared(name).weight.T for name in ("gate_proj", "up_proj")]
        return [torch.cat(x, dim=1) for x in zip(matrices, of_shared, strict=True)]

    @property
    def biases(self) -> Float[Tensor, "expert d_model"] | None:
        """The bias of each routed expert's output, which its routing weight multiplies."""
        biases: Tensor | None = getattr(self.stacked, "down_proj_bias", None)
        return biases

    def _shared(self, name: str) -> Any:
        return unwrapped(getattr(self.shared, name))

    def weights(
        self, x: Residual, index: Tensor, chosen: Tensor
    ) -> Float[Tensor, "batch pos weight"]:
        """Return all routing weights, given the experts that each token visits and their weights.

        With a gate of the shared experts, its weight is the last one.
        """
        weights = chosen.new_zeros(len(chosen), self.n)
        weights = weights.scatter(-1, index, chosen).view(*x.shape[:-1], self.n)
        if self.shared_gate is None:
            return weights
        gate = torch.sigmoid(self.shared_gate(x))
        return torch.cat([weights.to(gate), gate], dim=-1)

    def scores(self, x: Residual) -> Float[Tensor, "batch pos weight"]:
        """Return the numbers from which the routing weights are computed: the router's logits."""
        scores = F.linear(x, self.router.weight.to(x), getattr(self.router, "bias", None))
        if self.shared_gate is None:
            return scores
        return torch.cat([scores, self.shared_gate(x)], dim=-1)

    def visits(
        self, weights: Float[Tensor, "batch pos weight"]
    ) -> Bool[Tensor, "batch pos expert"]:
        """Return which routed experts each token visits."""
        return weights[..., : self.n] != 0

    def of_neurons(self, by_expert: Tensor, shared: float | bool = 1.0) -> Tensor:
        """Repeat a number of each expert for its neurons; `shared` is that of shared experts."""
        routed = by_expert[..., : self.n].repeat_interleave(self.size, dim=-1)
        if self.shared is None:
            return routed
        shape = (*routed.shape[:-1], self.n_shared)
        if by_expert.shape[-1] > self.n:
            return torch.cat([routed, by_expert[..., self.n :].expand(shape)], dim=-1)
        return torch.cat([routed, routed.new_full(shape, shared)], dim=-1)

    def projections(
        self, x: Residual, pairs: Bool[Tensor, "batch pos expert"]
    ) -> tuple[PreActivation, PreActivation]:
        """Return q and u without routing weights, and 0 for the neurons of all other experts.

        `pairs` has the experts to compute for each token.
        """
        flat, of_token = x.flatten(0, -2), pairs.flatten(0, -2)
        q, u = (x.new_zeros(len(flat), self.n, self.size) for _ in range(2))
        for expert in of_token.any(0).nonzero()[:, 0].tolist():
            rows = of_token[:, expert].nonzero()[:, 0]
            for all_experts, part in zip((q, u), self._project(flat[rows], expert), strict=True):
                all_experts[rows, expert] = part
        q, u = (y.flatten(1) for y in (q, u))
        if self.shared is not None:
            of_shared = (self._shared(name)(flat) for name in ("gate_proj", "up_proj"))
            q, u = (torch.cat(y, dim=-1) for y in zip((q, u), of_shared, strict=True))
        return q.view(*x.shape[:-1], -1), u.view(*x.shape[:-1], -1)

    def _project(self, x: Float[Tensor, "token d_model"], expert: int) -> tuple[Tensor, Tensor]:
        """Return q and u of one expert's neurons."""
        stacked, W = self.stacked, self.stacked.gate_up_proj[expert]
        both = x @ W if stacked.is_transposed else F.linear(x, W)
        if stacked.has_bias:
            both = both + stacked.gate_up_proj_bias[expert]
        q, u = (
            both.chunk(2, dim=-1) if stacked.is_concatenated else (both[..., ::2], both[..., 1::2])
        )
        return self.clamped(q, u)

    def clamped(self, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and u after the clamps of gpt-oss; in other families, they stay the same."""
        limit = getattr(self.stacked, "limit", None)
        return (q, u) if limit is None else (q.clamp(max=limit), u.clamp(-limit, limit) + 1)

    def output(
        self, z: PreActivation, weights: Float[Tensor, "batch pos weight"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return Σ z W_out + Σ r b, the output of neurons with activations z.

        In passes without gradients, only experts with a nonzero activation are multiplied. With
        gradients, all are, because a neuron with z = 0 has a gradient, too.
        """
        if torch.is_grad_enabled() and (z.requires_grad or weights.requires_grad):
            out = z @ self.W_out
        else:
            out = self._nonzero(z)
        if self.biases is not None:
            out = out + weights[..., : self.n] @ self.biases
        return out

    def _nonzero(self, z: PreActivation) -> Float[Tensor, "batch pos d_model"]:
        flat = z.flatten(0, -2)
        routed = flat[:, : self.n * self.size].unflatten(-1, (self.n, self.size))
        hit, down = (routed != 0).any(-1), self.stacked.down_proj
        out = z.new_zeros(len(flat), down.shape[2 if self.stacked.is_transposed else 1])
        for expert in hit.any(0).nonzero()[:, 0].tolist():
            rows = hit[:, expert].nonzero()[:, 0]
            W = down[expert] if self.stacked.is_transposed else down[expert].T
            out = out.index_add(0, rows, routed[rows, expert] @ W)
        if self.shared is not None:
            out = out + F.linear(flat[:, -self.n_shared :], self._shared("down_proj").weight)
        return out.view(*z.shape[:-1], -1)
