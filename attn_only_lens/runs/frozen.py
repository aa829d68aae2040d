"""A model made linear: every pattern and every norm scale held at what it was in one run.

With the patterns of attention heads and of neuron-heads, and the scale that each norm divides by,
taken as constants, what is left between the embedding and the logits is linear maps and biases.
Gradients of that model give every writer its share, and shares add up: with c the gradient of the
metric with respect to the logits, x what enters the first block and b all biases,

    c · logits = (∂/∂x) · x + Σ_b (∂/∂b) · b

and likewise at every later block, with the stream there for x and the biases from there on. That is
relevance propagation by the LN rule, the identity rule and frozen patterns: Achtibat et al.,
"AttnLRP" (2024); Rezaei Jafari et al., "RelP: Faithful and Efficient Circuit Discovery in Language
Models via Relevance Patching" (2025).

A head of a gated MLP has a value v = g u that is a product. It is replaced by the linear form that
agrees with it, (g_0 u + g u_0)/2 with g_0, u_0 of the run: half of each gradient, those papers'
half rule. Heads that share a neuron (bilinear gates) need none: their v is linear.

A soft cap on attention scores is within the pattern. One on the logits lies after the linear model:
it counts as part of the metric, and c is the gradient with respect to the logits before it.

What else a model may compute (clipped values, norms without hook points) is not known to be frozen,
so the claim is tried on every run: see `require_linear`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.heads.host import HEAD_KINDS
from attn_only_lens.numerics import normal_numbers
from attn_only_lens.runs.gradients import Tape, entering, gradients, rooted, value_of
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording, run

__all__ = ["Frozen", "frozen_gradients", "native", "require_linear", "unembedded"]

_PROBLEM = "this model cannot be frozen"


class Frozen:
    """Hooks that make constants of what passes, and then hold other runs at them.

    Attributes:
        kept: by hook name.
    """

    def __init__(self, model: Any) -> None:
        host = host_of(model)
        points = [m for m in model.modules() if isinstance(m, HookPoint)]
        scales = {str(point.name) for point in points if str(point.name).endswith("hook_scale")}

        self._patterns = [
            host.hook_name(layer, kind, "pattern")
            for layer in range(host.n_layers)
            for kind in HEAD_KINDS
        ]
        self._constant = [*self._patterns, *sorted(scales)]
        self._products = [
            host.hook_name(layer, "neuron", "v")
            for layer, each in enumerate(host.neurons)
            if each.value_is_product
        ]
        self.kept: dict[str, Tensor] = {}

    @property
    def freezing(self) -> Hooks:
        """For the run that everything is frozen at: its logits stay what they are."""

        def constant(value: Tensor, name: str) -> Tensor:
            return value.detach()

        def half(value: Tensor, name: str) -> Tensor:
            return (value + value.detach()) / 2

        def keeping(change: Callable[[Tensor, str], Tensor], name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                self.kept[name] = value.detach().clone()
                return change(value, name)

            return hook

        return [
            *((name, keeping(constant, name)) for name in self._constant),
            *((name, keeping(half, name)) for name in self._products),
        ]

    @property
    def held(self) -> Hooks:
        """For a run of pairs of rows, x + δ and x - δ: the linear model itself.

        There g u, at both, gives 2 (g_0 δu + u_0 δg) as its difference.
        """

        def constant(name: str) -> Callable[..., Tensor]:
            return lambda value, hook: torch.cat([self.kept[name]] * 2)

        def linear(name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                more, less = value.chunk(2)
                moved = (more - less) / 4
                return torch.cat([self.kept[name] + moved, self.kept[name] - moved])

            return hook

        return [
            *((name, constant(name)) for name in self._constant if name in self.kept),
            *((name, linear(name)) for name in self._products),
        ]

    def missing(self) -> list[str]:
        """Patterns that the run did not show."""
        return [name for name in self._patterns if name not in self.kept]


def frozen_gradients(
    model: Any, target: Recording, metric: BoundMetric, tape: Tape
) -> dict[str, Tensor]:
    """Gradients of a metric in the model frozen at a run: a forward, a backward, and a check.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run.
        metric: what to take the gradient of.
        tape: where to take it.

    Raises:
        UnsupportedModelError: it is not linear when its patterns and norm scales are frozen.
    """
    frozen = Frozen(model)
    with torch.enable_grad(), rooted(model) as roots, unembedded(model) as before, native():
        hooks = [*frozen.freezing, *tape.hooks]
        logits = run(model, target.tokens, target.mask, hooks)
        found = gradients(
            value_of(metric, logits), {"x": roots[-1], "logits": before[-1], **tape.nodes}
        )
    error = float((logits.detach() - target.logits).abs().max())
    # Many bridged norms compute in float32 in whatever dtype the model is; their hooked form not.
    heads, dtypes = host_of(model).neurons, (logits.dtype, torch.float32)
    allowed = max(logit_tolerance(heads, dtype) for dtype in dtypes)
    allowed *= float(target.logits.abs().max())
    reasons = [f"it does not show the patterns {frozen.missing()}"] * bool(frozen.missing())
    reasons += [f"to freeze it changes its logits, by {error:.2g}"] * (not error <= allowed)
    if reasons:
        raise UnsupportedModelError(reasons, _PROBLEM)
    require_linear(model, target, frozen, found.pop("x"), found.pop("logits"))
    return found


@torch.no_grad()
def require_linear(
    model: Any,
    target: Recording,
    frozen: Frozen,
    gradient: Residual,
    weights: Float[Tensor, "batch pos d_vocab"],
) -> None:
    """Move what enters the first block at random, and see that all follows its gradient.

    Args:
        model: frozen at `target`.
        target: the run.
        frozen: what is held.
        gradient: of the metric with respect to what enters the first block.
        weights: of the metric with respect to the logits, before any cap.

    Raises:
        UnsupportedModelError: weights · Δlogits is not gradient · Δx.
    """
    x = target.streams[0]
    moved = normal_numbers(x.shape).to(x) * x.std()
    mask = None if target.mask is None else target.mask.repeat(2, 1)
    both = torch.cat([x + moved, x - moved])
    with entering(model, lambda _: both), unembedded(model) as before, native():
        run(model, target.tokens.repeat(2, 1), mask, frozen.held)
    more, less = before[-1].chunk(2)
    terms = weights * (more - less) / 2
    expected, got = float((gradient * moved).sum()), float(terms.sum())
    scale = float(terms.abs().sum())
    if not abs(got - expected) <= logit_tolerance(host_of(model).neurons, x.dtype) * scale:
        raise UnsupportedModelError(
            [
                "with its patterns and norm scales frozen it is still not linear: a change of what "
                f"enters its first block moves the metric by {got:.6g}, its gradient says "
                f"{expected:.6g}. Something else in it is not a linear map, such as values that "
                "are clipped, norms without hook_scale, or patterns of which hooks see a copy. "
                "Take method='gradient'"
            ],
            _PROBLEM,
        )


@contextmanager
def unembedded(model: Any) -> Iterator[list[Tensor]]:
    """What the unembedding puts out, before any cap: the last of the list, each run."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    handle = model.unembed.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def native() -> Iterator[None]:
    """Bridges say that a norm whose scale is edited is computed otherwise: it is meant to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A forward hook edited hook_scale")
        yield
