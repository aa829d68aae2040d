"""Exact gates: attention patterns with which one head computes a neuron's activation exactly.

If an activation has the form α(q) = q · p(q) with p(q) in [0, 1], a head can compute it by
attending to its own token with weight p(q) and to a static bias token with weight 1 - p(q). The
bias token's value is zero and the token's own value is q, so the head's output is p(q) · q = α(q).
(For a generalized SiLU, the token's value is also multiplied by a constant; see `gating.py`.)

As in the paper cited below, the token's score for itself is 0. The weights above then require the

    score of the bias token = -logit p(q) = -log_odds(q)

so that softmax([0, -log_odds(q)]) = [p(q), 1 - p(q)]. For silu and quick_gelu, `log_odds` is linear
in q, exactly as in Theorem 3 of "Attention-Only Transformers and Implementing MLPs with Attention
Heads". For the other activations, `log_odds` is a monotone but nonlinear function of q, so the
score is not bilinear.

Attention weights are computed in the model's dtype, or in float32 for half-precision models. In
float16, the cubic term of gelu_new would overflow near |q| = 100, long before gelu_new itself
overflows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import float32_if_half

QUICK_GELU_SLOPE = 1.702
_GELU_TANH_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_TANH_CUBIC = 0.044715
# transformers' "gelu_fast" rounds sqrt(2/pi) to ten digits, and so does TransformerLens.
_GELU_FAST_SLOPE = 2.0 * 0.7978845608


@dataclass(frozen=True)
class Gate:
    """An attention pattern over a token and the bias token that makes a head compute an activation.

    Attributes:
        name: the activation's name in TransformerLens (`cfg.act_fn`).
        log_odds: logit p(q), elementwise; may be infinite.
        self_weight: p(q), elementwise, accurate in both tails.
        slope: the slope if log_odds(q) = slope · q, so that the score is bilinear; otherwise None.
        scale: the token's value divided by q; it is 1 except for generalized SiLUs.
        is_step: whether p(q) is always 0 or 1.

    Example:
        >>> import torch
        >>> from attn_only_lens.gates.exact import GATES
        >>> q = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
        >>> pattern = GATES["gelu"].pattern(q)
        >>> torch.allclose(pattern[..., 0] * q, torch.nn.functional.gelu(q))
        True
        >>> torch.allclose(pattern.sum(-1), torch.ones_like(q))
        True
    """

    name: str
    log_odds: Callable[[Tensor], Tensor]
    self_weight: Callable[[Tensor], Tensor]
    slope: float | None = None
    scale: float = 1.0
    is_step: bool = False

    @property
    def side(self) -> float:
        """-1 if a token attends mostly to itself for negative q (negative slopes), otherwise 1."""
        return -1.0 if self.slope is not None and self.slope < 0 else 1.0

    def scores(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape key=2"]:
        """Return the attention scores for the token itself and the bias token: (0, -logit p(q)).

        Scores are clamped to the dtype's finite range (relu's are ±∞). Clamping does not change the
        softmax, and prevents ∞ - ∞ in computations with cached scores.
        """
        bias = -self.log_odds(float32_if_half(q))
        limit = torch.finfo(q.dtype).max
        bias = bias.clamp(min=-limit, max=limit).to(q.dtype)
        # In memory, all scores for one token come first, because the softmax is faster so.
        return torch.stack([torch.zeros_like(bias), bias]).movedim(0, -1)

    def pattern(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape key=2"]:
        """Return the attention weights on the token itself and the bias token: (p(q), 1 - p(q)).

        Unless p is a step function, 1 - p(q) is computed as p(-q), because a subtraction would lose
        digits.
        """
        working = float32_if_half(q)
        weights = self.self_weight(working), self.bias_weight(working)
        return torch.stack(weights).movedim(0, -1).to(q.dtype)

    def bias_weight(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return 1 - p(q), computed without cancellation."""
        if self.is_step:
            return 1.0 - self.self_weight(q)
        return self.self_weight(-q)

    def activation(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the activation, scale · q · p(q)."""
        working = float32_if_half(q)
        return (self.self_weight(working) * self.values(working)).to(q.dtype)

    def values(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the value of a token in a plain MLP: scale · q, or q itself if the scale is 1."""
        return q if self.scale == 1.0 else self.scale * q


def _logistic(name: str, log_odds: Callable[[Tensor], Tensor]) -> Gate:
    return Gate(name, log_odds, lambda q: torch.sigmoid(log_odds(q)))


def linear_gate(name: str, slope: float, scale: float = 1.0) -> Gate:
    """Return the gate of the activation scale · q · σ(slope · q)."""
    return replace(
        _logistic(name, lambda q: q if slope == 1.0 else slope * q), slope=slope, scale=scale
    )


def _clamp(q: Tensor) -> Tensor:
    """Clamp q to ±1e9, beyond which p is 0 or 1, so that gradients of log-odds stay finite."""
    return q.clamp(-1e9, 1e9)


def _gelu_tanh(q: Tensor) -> Tensor:
    q = _clamp(q)
    return _GELU_TANH_SLOPE * q * (1.0 + _GELU_TANH_CUBIC * q * q)


def _gelu_fast(q: Tensor) -> Tensor:
    q = _clamp(q)
    return _GELU_FAST_SLOPE * q * (1.0 + _GELU_TANH_CUBIC * q * q)


def _gelu(q: Tensor) -> Tensor:
    q = _clamp(q)
    return torch.special.log_ndtr(q) - torch.special.log_ndtr(-q)


def _gelu_weight(q: Tensor) -> Tensor:
    # torch.special.ndtr computes (1 + erf) / 2, which has no correct digits below q = -8.
    return 0.5 * torch.special.erfc(-math.sqrt(0.5) * q)


def step_gate(name: str, active: Callable[[Tensor], Tensor]) -> Gate:
    """Return a gate whose attention to the own token is 1 where `active(q)`, otherwise 0."""
    return Gate(
        name,
        lambda q: _step(q, active(q), math.inf, -math.inf),
        lambda q: _step(q, active(q), 1.0, 0.0),
        is_step=True,
    )


def _step(q: Tensor, active: Tensor, above: float, below: float) -> Tensor:
    """Return `above` where `active` is true, otherwise `below`; the gradient at q is zero."""
    value = torch.where(active, above, below).to(q.dtype)
    return torch.where(torch.zeros_like(q, dtype=torch.bool), q, value)


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        linear_gate("silu", 1.0),
        linear_gate("quick_gelu", QUICK_GELU_SLOPE),
        _logistic("gelu_new", _gelu_tanh),
        _logistic("gelu_fast", _gelu_fast),
        _logistic("gelu_pytorch_tanh", _gelu_tanh),
        Gate("gelu", _gelu, _gelu_weight),
        step_gate("relu", lambda q: q > 0),
    )
}
