"""A model made linear: every pattern and every norm scale held at its value in one run.

With the patterns of attention heads and of neuron-heads, and the scale that each norm divides by,
as constants, only linear maps and biases are left between the embedding and the logits. Gradients
of that model attribute the metric to every writer, and attributions add up: with c the gradient of
the metric with respect to the logits, x the stream that enters the first block and b all biases,

    c · logits = (∂/∂x) · x + Σ_b (∂/∂b) · b

and likewise at every later block, with the stream there for x and the biases from there on. That is
relevance propagation by the LN rule, the identity rule and frozen patterns: Achtibat et al.,
"AttnLRP" (2024); Rezaei Jafari et al., "RelP: Faithful and Efficient Circuit Discovery in Language
Models via Relevance Patching" (2025).

A head of a gated MLP has a value v = g u that is a product. It is replaced by the linear form that
agrees with it, (g_0 u + g u_0)/2 with g_0, u_0 of the run: half of each gradient, those papers'
half rule. Heads that share a neuron (bilinear gates) need none: their v is linear.

A soft cap on attention scores is part of the pattern. One on the logits lies after the linear
model: it counts as part of the metric, and c is the gradient with respect to the logits before it.

Whether everything else in the model is linear (no clipped values, no norms without hook points) is
tested on every run: see `require_linear`.
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
from attn_only_lens.runs.gradients import Tape, edit_input, gradients, start_graph
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording, run

_PROBLEM = "this model cannot be frozen"


class FrozenPass:
    """Hooks that record patterns and norm scales as constants, and hold other runs at them.

    Attributes:
        recorded: the constants, by hook name.
    """

    def __init__(self, model: Any) -> None:
        host = host_of(model)
        points = [str(m.name) for m in model.modules() if isinstance(m, HookPoint)]
        self._patterns = [
            host.hook_name(layer, kind, "pattern")
            for layer in range(host.n_layers)
            for kind in HEAD_KINDS
        ]
        scales = sorted({name for name in points if name.endswith("hook_scale")})
        self._constant = [*self._patterns, *scales]
        self._products = [
            host.hook_name(layer, "neuron", "v")
            for layer, each in enumerate(host.neurons)
            if each.value_is_product
        ]
        self.recorded: dict[str, Tensor] = {}

    @property
    def record_hooks(self) -> Hooks:
        """For the run at which everything is frozen: its logits stay the same."""

        def detach(value: Tensor) -> Tensor:
            return value.detach()

        def halve_gradient(value: Tensor) -> Tensor:
            return (value + value.detach()) / 2

        def recording(change: Callable[[Tensor], Tensor], name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                self.recorded[name] = value.detach().clone()
                return change(value)

            return hook

        return [
            *((name, recording(detach, name)) for name in self._constant),
            *((name, recording(halve_gradient, name)) for name in self._products),
        ]

    @property
    def linear_hooks(self) -> Hooks:
        """For a run of pairs of rows, x + δ and x - δ: the linear model itself.

        There g u, at both, gives 2 (g_0 δu + u_0 δg) as its difference.
        """

        def constant(name: str) -> Callable[..., Tensor]:
            return lambda value, hook: torch.cat([self.recorded[name]] * 2)

        def linear(name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                more, less = value.chunk(2)
                change = (more - less) / 4
                return torch.cat([self.recorded[name] + change, self.recorded[name] - change])

            return hook

        return [
            *((name, constant(name)) for name in self._constant if name in self.recorded),
            *((name, linear(name)) for name in self._products),
        ]

    def missing_patterns(self) -> list[str]:
        """Return the patterns whose hook points did not fire in the run."""
        return [name for name in self._patterns if name not in self.recorded]


def frozen_gradients(
    model: Any, target: Recording, metric: BoundMetric, tape: Tape
) -> dict[str, Tensor]:
    """Return gradients of a metric in the model frozen at a run: a forward, a backward, a check.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run.
        metric: to be differentiated.
        tape: the nodes.

    Raises:
        UnsupportedModelError: it is not linear when its patterns and norm scales are frozen.
    """
    frozen = FrozenPass(model)
    with (
        torch.enable_grad(),
        start_graph(model) as roots,
        uncapped_logits(model) as before,
    ):
        hooks = [*frozen.record_hooks, *tape.hooks]
        logits = run(model, target.tokens, target.mask, hooks)
        found = gradients(
            metric.of_logits(logits), {"x": roots[-1], "logits": before[-1], **tape.nodes}
        )
    error = float((logits.detach() - target.logits).abs().max())
    # Many bridged norms compute in float32 in whatever dtype the model is; their hooked form not.
    heads, dtypes = host_of(model).neurons, (logits.dtype, torch.float32)
    allowed = max(logit_tolerance(heads, dtype) for dtype in dtypes)
    allowed *= float(target.logits.abs().max())
    reasons = []
    if missing := frozen.missing_patterns():
        reasons.append(f"it does not show the patterns {missing}")
    if not error <= allowed:
        reasons.append(f"to freeze it changes its logits, by {error:.2g}")
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    require_linear(model, target, frozen, found.pop("x"), found.pop("logits"))
    return found


@torch.no_grad()
def require_linear(
    model: Any,
    target: Recording,
    frozen: FrozenPass,
    gradient: Residual,
    weights: Float[Tensor, "batch pos d_vocab"],
) -> None:
    """Compare the effect of noise in the stream that enters the first block with its gradient.

    Args:
        model: frozen at `target`.
        target: the run.
        frozen: the constants.
        gradient: of the metric with respect to the stream that enters the first block.
        weights: of the metric with respect to the logits, before any cap.

    Raises:
        UnsupportedModelError: weights · Δlogits is not gradient · Δx.
    """
    x = target.streams[0]
    noise = normal_numbers(x.shape).to(x) * x.std()
    mask = None if target.mask is None else target.mask.repeat(2, 1)
    both = torch.cat([x + noise, x - noise])
    with (
        edit_input(model, lambda _: both),
        uncapped_logits(model) as before,
    ):
        run(model, target.tokens.repeat(2, 1), mask, frozen.linear_hooks)
    more, less = before[-1].chunk(2)
    terms = weights * (more - less) / 2
    expected, got = float((gradient * noise).sum()), float(terms.sum())
    scale = float(terms.abs().sum())
    if not abs(got - expected) <= logit_tolerance(host_of(model).neurons, x.dtype) * scale:
        raise UnsupportedModelError(
            [
                "with its patterns and norm scales frozen it is still not linear: a change of the "
                f"input of its first block moves the metric by {got:.6g}, its gradient says "
                f"{expected:.6g}. Something else in it is not a linear map, such as values that "
                "are clipped, norms without hook_scale, or patterns of which hooks see a copy. "
                "Take method='gradient'"
            ],
            _PROBLEM,
        )


@contextmanager
def uncapped_logits(model: Any) -> Iterator[list[Tensor]]:
    """List the output of the unembedding, before any soft cap, for each run."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    handle = model.unembed.register_forward_hook(look)
    try:
        with silent_scale_edits():
            yield seen
    finally:
        handle.remove()


@contextmanager
def silent_scale_edits() -> Iterator[None]:
    """Silence the warning of bridges about edits of norm scales, which are intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A forward hook edited hook_scale")
        yield
