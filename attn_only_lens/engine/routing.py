"""The change of routing weights between two runs, as a linear map of the change in router scores.

Where a token visits the same experts C in both runs, its routing weights r are a smooth function of
the scores s. These functions are known, with a constant c:

    softmax of the chosen    r = c exp(s) / Σ_C exp(s)       rules in `secants.py`
    softmax of all           r = c exp(s) / Σ exp(s)
    sigmoid                  r = c σ(s)
    shares of sigmoids       r = c σ(s) / Σ_C σ(s)           a quotient: y = a b, b = 1 / Σ a

Where the experts differ, or if the function is another one, Δr is not divided among the scores: the
router is a source itself, like the error node of a transcoder. The routing weights are then leaves
of the autograd graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.engine.secants import mean, replaced, slope, softmax_change, softmax_slopes
from attn_only_lens.tolerances import LOGIT_TOLERANCE


class Routing(NamedTuple):
    """The mean routing weights of two runs, as nodes of the autograd graph.

    Attributes:
        inside: the weights as a function of the router's scores.
        outside: the weights as factors of the neurons' values; between the two is a `Valve`.
        leaf: a leaf of the graph, which `inside` contains where the weights are sources.
        whole: the change in the weights that are sources; 0 for the others.
    """

    inside: Tensor
    outside: Tensor
    leaf: Tensor
    whole: Tensor


@dataclass(frozen=True, eq=False)
class RoutingRule:
    """The routing weights of one mixture in two runs, and how they depend on the router's scores.

    Attributes:
        weights: the routing weights of both runs, first the clean run.
        back: maps the weights' multipliers to the scores' multipliers.
        same: for each weight, whether it is a function of the scores; not if experts differ.
    """

    weights: Float[Tensor, "both pos weight"]
    back: Callable[[Tensor], Tensor]
    same: Bool[Tensor, "batch pos weight"]

    @classmethod
    def between(
        cls, scores: Float[Tensor, "both pos weight"], weights: Tensor, n_experts: int
    ) -> "RoutingRule":
        """Return the rule for two runs; weights after those of the experts are sigmoids."""
        s, r = scores[..., :n_experts], weights[..., :n_experts]
        back, known = _rule(s, r)
        clean, corrupted = (r != 0).chunk(2)
        same = (clean == corrupted).all(-1, keepdim=True) & known
        shared = _sigmoid_slope(scores[..., n_experts:])

        def back_all(multiplier: Tensor) -> Tensor:
            routed = back(multiplier[..., :n_experts]).masked_fill(~same, 0.0)
            return torch.cat([routed, multiplier[..., n_experts:] * shared], dim=-1)

        every = torch.cat([same.expand_as(clean), torch.ones_like(shared, dtype=torch.bool)], -1)
        return cls(weights, back_all, every)

    @property
    def whole(self) -> Float[Tensor, "batch pos weight"]:
        """The change in the routing weights that are sources; 0 for the others."""
        clean, corrupted = self.weights.chunk(2)
        return (clean - corrupted).masked_fill(self.same, 0.0)

    def applied(self, scores: Float[Tensor, "batch pos weight"]) -> tuple[Tensor, Tensor]:
        """Return the mean weights as a function of the scores, and a leaf for weights that are not.

        The leaf holds the weights whose change is a source.
        """
        inside = replaced(scores, lambda: mean(self.weights), self.back)
        leaf = mean(self.weights).requires_grad_(torch.is_grad_enabled())
        whole = (leaf - leaf.detach()).masked_fill(self.same, 0.0)
        return inside + whole, leaf


def _rule(scores: Tensor, weights: Tensor) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Return the rule of the function that maps scores to weights, and whether it is known."""
    chosen = weights != 0
    masked = scores.masked_fill(~chosen, -torch.inf)
    sigmoid = torch.where(chosen, scores.sigmoid(), 0.0)
    total = sigmoid.sum(-1, keepdim=True)
    # At tokens where the experts differ, the rule's result is not used.
    here = chosen.chunk(2)[0]
    along = _sigmoid_slope(scores) * here

    def of_shares(multiplier: Tensor) -> Tensor:
        one, other = (1 / total).chunk(2)
        of_total = (multiplier * mean(sigmoid)).sum(-1, keepdim=True) * one * other
        return along * (multiplier * (one + other) / 2 - of_total)

    def softmax(x: Tensor) -> Callable[[Tensor], Tensor]:
        L, w = softmax_slopes(*x.log_softmax(-1).chunk(2))
        return lambda multiplier: softmax_change(L, w, multiplier * here)

    functions: list[tuple[Tensor, Any]] = [
        (masked.softmax(-1), lambda: softmax(masked)),
        (torch.where(chosen, scores.softmax(-1), 0.0), lambda: softmax(scores)),
        (sigmoid, lambda: lambda multiplier: along * multiplier),
        (sigmoid / total, lambda: of_shares),
    ]
    for values, make in functions:
        factor = weights.sum() / values.sum()
        error = (factor * values - weights).abs().max()
        if bool(error <= LOGIT_TOLERANCE[weights.dtype] * weights.abs().max()):
            return _times(factor, make()), True
    return torch.zeros_like, False


def _times(factor: Tensor, rule: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda multiplier: factor * rule(multiplier)


def _sigmoid_slope(scores: Float[Tensor, "both *any"]) -> Float[Tensor, "batch *any"]:
    (y_1, y_0), (x_1, x_0) = scores.sigmoid().chunk(2), scores.chunk(2)
    return slope(y_1, y_0, x_1, x_0, lambda x: x.sigmoid() * (1 - x.sigmoid()))
