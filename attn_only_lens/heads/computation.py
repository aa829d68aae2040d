"""Compute the outputs z of neuron-heads (single-neuron attention heads) from pre-activations.

The inputs are the pre-activation q and, in a gated MLP, the projection u that q gates. The formulas
are in `gates/exact.py`; `heads/bilinear.py` computes the neurons of bilinear gates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import BIAS, SELF, NeuronPattern, PreActivation, Residual
from attn_only_lens.devices import float32_if_half
from attn_only_lens.gates.exact import Gate
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.tl import head_point
from attn_only_lens.tolerances import LOGIT_TOLERANCE


def is_live(point: HookPoint) -> bool:
    """Return whether any hook is attached to a hook point."""
    return bool(
        point._forward_hooks
        or point._backward_hooks
        or point._forward_pre_hooks
        or point._backward_pre_hooks
    )


def require_grad_like(constant: Tensor, like: Tensor) -> Tensor:
    """Connect a constant tensor to the autograd graph of `like`, so that backward hooks run.

    The result is not a leaf: hooks cannot edit leaves, and `torch.func` cannot create leaves.
    """
    if constant.requires_grad or not (like.requires_grad and torch.is_grad_enabled()):
        return constant
    never = torch.zeros((), dtype=torch.bool, device=like.device)
    return torch.where(never, like.sum().to(constant.dtype), constant)


class NeuronHeads(ABC):
    """The neuron-heads of one MLP: their hook points, and the computation of their outputs z.

    In a converted model, this class is a mixin of the block's attention. In an exposed model, each
    MLP has a separate object of this class.
    """

    kinds: tuple[HeadKind, ...] = ("neuron",)
    W_out: Float[Tensor, "d_mlp d_model"]
    passing: Any  # the model's `PassState`
    experts: tuple[int, int] = (0, 0)  # the number of experts, and of the neurons of each
    routed_bias = False  # whether routing weights multiply output biases

    def _add_hook_points(self) -> None:
        self.hook_q = head_point()  # [batch, pos, head_index, d_head=1]
        self.hook_k = head_point()  # [batch, pos, head_index, d_head=1]
        self.hook_v = head_point()  # [batch, pos, head_index, d_head=1]
        self.hook_attn_scores = head_point(2)  # [batch, head_index, query_pos, key=(self, bias)]
        self.hook_pattern = head_point(2)  # [batch, head_index, query_pos, key=(self, bias)]
        self.hook_z = head_point()  # [batch, pos, head_index, d_head=1]
        self.hook_result = head_point()  # [batch, pos, head_index, d_model], if use_attn_result

    @property
    @abstractmethod
    def gate(self) -> Gate:
        """The gate that computes the patterns of the heads."""

    @property
    def joint_gates(self) -> bool:
        """True if the gate of a head depends on other heads."""
        return False

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that holds the weights of the heads."""

    @property
    @abstractmethod
    def value_is_product(self) -> bool:
        """True if v is a product of two projections, as in a gated MLP with exact gates."""

    @property
    def W_O(self) -> Float[Tensor, "head_index d_head=1 d_model"]:
        """The output weights: the heads' outputs z times these are what the neurons write."""
        return self.W_out.unsqueeze(-2)

    @property
    def decoders(self) -> list[Float[Tensor, "head_index d_model"]]:
        """The output weights to the MLP output of this layer and, in order, of later layers."""
        return [self.W_O.squeeze(-2)]

    @property
    def read_matrices(self) -> list[Float[Tensor, "d_model head_index"]]:
        """The matrices with which the heads compute q and, if there are two projections, u."""
        gate = getattr(self.module, "W_gate", None)
        W_in: Tensor = self.module.W_in  # type: ignore[assignment]
        return [W_in] if gate is None else [gate, W_in]

    @abstractmethod
    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """Compute q and, in a gated MLP, u (otherwise None) from the MLP's normalised input."""

    def weights_and_values(
        self,
        q: PreActivation,
        up: PreActivation | None,
        index: Int[Tensor, "neuron"] | None = None,
    ) -> tuple[Float[Tensor, "*any pos head_index"], Float[Tensor, "*any pos head_index"]]:
        """Compute each head's attention to its own token, and its value, without running hooks.

        If q and `up` hold only some neurons, `index` holds the indices of these neurons.
        """
        query, v = self._query_and_value(q, up)
        return self._self_weight(query, index), v

    @property
    def output_module(self) -> nn.Module:
        """The module whose output is the sum of the heads' outputs."""
        return self.module

    @property
    def n_neurons(self) -> int:
        return int(self.W_out.shape[0])

    @property
    def amplification(self) -> float:
        """The factor by which cancellation between heads amplifies rounding errors."""
        return 1.0

    @property
    def _before_z(self) -> tuple[HookPoint, ...]:
        scores = self.hook_attn_scores, self.hook_pattern
        return self.hook_q, self.hook_k, self.hook_v, *scores

    def _through_hooks(
        self,
        q: PreActivation,
        up: PreActivation | None,
        plain_z: Callable[[], PreActivation],
    ) -> PreActivation:
        """Compute z; if the steps before z have no hooks, call `plain_z()`, which is faster."""
        z = self.passing.gate_rule(self, q, up) if self.passing.gate_rule else None
        if z is None:
            z = self._attend(q, up) if any(map(is_live, self._before_z)) else plain_z()
        if is_live(self.hook_z):
            z = self.hook_z(z.unsqueeze(-1)).squeeze(-1)
        return z

    def _attend(self, q: PreActivation, up: PreActivation | None) -> PreActivation:
        """Compute z in steps, and run the hooks on queries, keys, values, scores and patterns."""
        query, v = self._query_and_value(q, up)
        dtype = query.dtype
        query = self.hook_q(query.unsqueeze(-1)).squeeze(-1)
        v = self.hook_v(v.unsqueeze(-1)).squeeze(-1)
        weight = self._pattern(query)[..., SELF].transpose(1, 2)
        # A float16 pre-activation may be -∞; relu(-∞) is 0, so 0 · v must be 0 too, not nan.
        v = torch.where(torch.isinf(v) & (weight == 0), 0.0, v)
        return (weight * v).to(dtype)

    def _query_and_value(
        self, q: PreActivation, up: PreActivation | None
    ) -> tuple[PreActivation, PreActivation]:
        # Make copies, because some hooks edit in place: an edit of q must not change v.
        value = self.gate.values(q)
        if up is None:
            hooked = value is q and (is_live(self.hook_q) or is_live(self.hook_v))
            return q, value.clone() if hooked else value
        gate = value.clone() if value is q and is_live(self.hook_q) else value
        # A product of two float16 numbers can overflow float16.
        return q, gate.float() * up.float() if q.dtype == torch.float16 else gate * up

    def _pattern(self, query: PreActivation) -> NeuronPattern:
        if is_live(self.hook_attn_scores) or is_live(self.hook_k):
            scores = require_grad_like(self._scores(query).transpose(1, 2), query)
            scores = self.hook_attn_scores(scores).permute(3, 0, 2, 1)
            pattern = torch.softmax(scores, dim=0)  # over a last axis of 2, ten times slower
            # As in TransformerLens, a fully masked row attends to nothing.
            pattern = pattern.masked_fill(torch.isnan(pattern), 0.0).permute(1, 3, 2, 0)
        else:
            pattern = self._gate_pattern(query).transpose(1, 2)
        hooked: Tensor = self.hook_pattern(require_grad_like(pattern, query))
        return hooked

    def _gate_pattern(self, query: PreActivation) -> Float[Tensor, "batch pos head_index key=2"]:
        return self.gate.pattern(query)

    def _scores(self, query: PreActivation) -> Float[Tensor, "batch pos head_index key=2"]:
        scores = self.gate.scores(query)
        if not is_live(self.hook_k):
            return scores
        key = require_grad_like(torch.zeros_like(query.unsqueeze(-1)), query)
        key = self.hook_k(key).squeeze(-1)
        limit = torch.finfo(query.dtype).max
        self_score = (torch.where(torch.isinf(query), 0.0, query) * key).clamp(-limit, limit)
        return torch.stack([self_score, scores[..., BIAS]]).movedim(0, -1)

    def _self_weight(
        self, query: PreActivation, index: Int[Tensor, "neuron"] | None = None
    ) -> Float[Tensor, "*any pos head_index"]:
        """Return the patterns' weight of the token itself, of all heads or of those in `index`."""
        return self.gate.self_weight(float32_if_half(query)).to(query.dtype)


def logit_tolerance(heads: Iterable[NeuronHeads], dtype: torch.dtype) -> float:
    """Return the tolerance for max |Δ logit| / max |logit| between two computations of a model.

    In a gated MLP with bilinear gates, the outputs of single heads, and so their rounding errors,
    are many times larger than their sum. For such MLPs, the tolerance is multiplied by the
    amplification. In small gated models in float32, `models/verify.py` found differences of up to
    2.3 times the plain tolerance, and up to 0.19 times the amplified one. Half-precision heads are
    summed in float32, so the factor multiplies float32's tolerance.
    """
    sums = dtype if dtype == torch.float64 else torch.float32
    amplification = max((layer.amplification for layer in heads), default=1.0)
    return max(LOGIT_TOLERANCE[dtype], amplification * LOGIT_TOLERANCE[sums])
