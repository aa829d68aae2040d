"""What a neuron-head computes between the projections of its MLP, in either layout.

Both layouts hand over a pre-activation q and, in a gated MLP, what it gates, u; and take z. The
mathematics is in `attention.py` (exact gates) and `bilinear.py` (heads that share a neuron).

How far two computations of the same logits may differ, given the neuron-heads on the way.

Heads of a gated MLP with bilinear gates are many times larger than their sum (`gates/gated.py`),
and so is their rounding. `verify` of small gated models in float32, with gates of 4 to 12 heads and
the arithmetic of four processors, measured up to 2.3 times that dtype's tolerance; over the gates'
amplification, up to 0.19 of it.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import BIAS, SELF, NeuronPattern, PreActivation
from attn_only_lens.heads.gating import AnyGate
from attn_only_lens.tolerances import LOGIT_TOLERANCE

__all__ = ["NeuronHeads", "is_live", "logit_tolerance", "tracked_like"]


def is_live(point: HookPoint) -> bool:
    """Whether anything would see or change what passes through this hook point."""
    return bool(
        point._forward_hooks
        or point._backward_hooks
        or point._forward_pre_hooks
        or point._backward_pre_hooks
    )


def tracked_like(constant: Tensor, like: Tensor) -> Tensor:
    """A tensor that depends on no parameter, in the graph wherever `like` is.

    So that a gradient reaches the hook that sees it. Not a leaf, which no hook could edit in place.
    """
    if constant.requires_grad or not (like.requires_grad and torch.is_grad_enabled()):
        return constant
    return constant.requires_grad_().clone()


class NeuronHeads:
    """The hook points of the neuron-heads of one MLP, and the way through them.

    Mixed into a module where it is a block's attention; beside the MLP where that stays in place.
    """

    def _add_hook_points(self) -> None:
        self.hook_q = HookPoint()  # [batch, pos, head_index, d_head=1]
        self.hook_k = HookPoint()  # [batch, pos, head_index, d_head=1]
        self.hook_v = HookPoint()  # [batch, pos, head_index, d_head=1]
        self.hook_attn_scores = HookPoint()  # [batch, head_index, query_pos, key=(self, bias)]
        self.hook_pattern = HookPoint()  # [batch, head_index, query_pos, key=(self, bias)]
        self.hook_z = HookPoint()  # [batch, pos, head_index, d_head=1]
        self.hook_result = HookPoint()  # [batch, pos, head_index, d_model], if use_attn_result

    @property
    def gate(self) -> AnyGate:
        """The gate of these heads' activation."""
        raise NotImplementedError

    @property
    def runs_in(self) -> nn.Module:
        """The module with the weights that these heads read and write by."""
        raise NotImplementedError

    @property
    def written_at(self) -> nn.Module:
        """The module whose output is what these heads write, where that is seen to pass."""
        return self.runs_in

    @property
    def n_neurons(self) -> int:
        """d_mlp."""
        raise NotImplementedError

    @property
    def directions(self) -> Float[Tensor, "d_mlp d_model"]:
        """What each neuron writes along: W_out."""
        raise NotImplementedError

    @property
    def heads_per_neuron(self) -> int:
        """Heads that share a neuron."""
        return 1

    @property
    def amplification(self) -> float:
        """By how much a neuron's rounding is larger than its activation's: heads may cancel."""
        return 1.0

    @property
    def value_is_product(self) -> bool:
        """Whether v is the product of two projections: exact heads of a gated MLP."""
        raise NotImplementedError

    def neurons(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any d_mlp"]:
        """What the heads of each neuron put out together: z itself, where each has one."""
        return z

    def shares(self, z: Float[Tensor, "*any head_index"]) -> Float[Tensor, "*any head_index"]:
        """What each head adds to its neuron: the terms of the sum that `neurons` forms."""
        return z

    @property
    def _before_z(self) -> tuple[HookPoint, ...]:
        scores = self.hook_attn_scores, self.hook_pattern
        return self.hook_q, self.hook_k, self.hook_v, *scores

    def _through_hooks(
        self,
        q: PreActivation,
        up: PreActivation | None,
        plainly: Callable[[], PreActivation],
    ) -> PreActivation:
        """z: as `plainly` has it where nobody sees how, and through the hook points elsewhere."""
        z = self._attend(q, up) if any(map(is_live, self._before_z)) else plainly()
        if is_live(self.hook_z):
            z = self.hook_z(z.unsqueeze(-1)).squeeze(-1)
        return z

    def _attend(self, q: PreActivation, up: PreActivation | None) -> PreActivation:
        """z by way of queries, values, scores and pattern, each through its hook point."""
        dtype = q.dtype
        if up is None:
            # A copy: patch setters edit in place, and an edited query must not move the value.
            v = q.clone() if is_live(self.hook_q) or is_live(self.hook_v) else q
        else:
            gate = q.clone() if is_live(self.hook_q) else q
            # A product of two float16 numbers does not fit float16.
            v = gate.float() * up.float() if dtype == torch.float16 else gate * up
        q = self.hook_q(q.unsqueeze(-1)).squeeze(-1)
        v = self.hook_v(v.unsqueeze(-1)).squeeze(-1)
        weight = self._pattern(q)[..., SELF].transpose(1, 2)
        # A float16 pre-activation may have overflowed; relu makes 0 of -∞, and so must 0 · v.
        v = torch.where(torch.isinf(v) & (weight == 0), 0.0, v)
        return (weight * v).to(dtype)

    def _pattern(self, q: PreActivation) -> NeuronPattern:
        if is_live(self.hook_attn_scores) or is_live(self.hook_k):
            scores = tracked_like(self._scores(q).transpose(1, 2), q)
            scores = self.hook_attn_scores(scores)
            pattern = torch.softmax(scores, dim=-1)
            # As in TransformerLens: a row that was masked everywhere attends to nothing.
            pattern = torch.where(torch.isnan(pattern), torch.zeros_like(pattern), pattern)
        else:
            pattern = self.gate.pattern(q).transpose(1, 2)
        hooked: Tensor = self.hook_pattern(tracked_like(pattern, q))
        return hooked

    def _scores(self, q: PreActivation) -> Float[Tensor, "batch pos d_mlp key=2"]:
        scores = self.gate.scores(q)
        if not is_live(self.hook_k):
            return scores
        key = tracked_like(torch.zeros_like(q.unsqueeze(-1)), q)
        key = self.hook_k(key).squeeze(-1)
        self_score = torch.where(torch.isinf(q), 0.0, q) * key
        return torch.stack([self_score, scores[..., BIAS]], dim=-1)


def logit_tolerance(heads: Iterable[NeuronHeads], dtype: torch.dtype) -> float:
    """Largest allowed max |Δ logit| / max |logit|.

    Args:
        heads: the neuron-heads of each layer.
        dtype: of the logits. Half precision forms the sums over heads in float32.
    """
    sums = dtype if dtype == torch.float64 else torch.float32
    amplification = max((each.amplification for each in heads), default=1.0)
    return max(LOGIT_TOLERANCE[dtype], amplification * LOGIT_TOLERANCE[sums])
