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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import Residual
from attn_only_lens.devices import normal_numbers
from attn_only_lens.engine.gradients import Tape, edit_input, start_graph
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import Hooks, Recording, run
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.heads.host import HEAD_KINDS

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

        First x + δ of every δ, then x - δ of each. There g u, at both, gives 2 (g_0 δu + u_0 δg) as
        its difference.
        """

        def recorded(name: str, n_rows: int) -> Tensor:
            each = self.recorded[name]
            return each.repeat(n_rows // len(each), *[1] * (each.ndim - 1))

        def constant(name: str) -> Callable[..., Tensor]:
            return lambda value, hook: recorded(name, len(value))

        def linear(name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                more, less = value.chunk(2)
                change, middle = (more - less) / 4, recorded(name, len(more))
                return torch.cat([middle + change, middle - change])

            return hook

        return [
            *((name, constant(name)) for name in self._constant if name in self.recorded),
            *((name, linear(name)) for name in self._products),
        ]

    def missing_patterns(self) -> list[str]:
        """Return the patterns whose hook points did not fire in the run."""
        return [name for name in self._patterns if name not in self.recorded]


@dataclass(frozen=True, eq=False)
class FrozenRun:
    """A run at which a model is frozen.

    Attributes:
        frozen: the constants.
        x: the stream that enters the first block.
        logits: before any soft cap.
        value: the metric.
        gradients: of the metric at nodes, and at "x" and "logits".
    """

    frozen: FrozenPass
    x: Residual
    logits: Float[Tensor, "batch pos d_vocab"]
    value: Float[Tensor, ""]
    gradients: dict[str, Tensor]


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
    found = frozen_run(model, target, metric, tape)
    require_linear(model, target, found)
    return {name: each for name, each in found.gradients.items() if name in tape.names}


def frozen_run(
    model: Any,
    target: Recording,
    metric: BoundMetric,
    tape: Tape,
    *,
    before: Hooks = (),
    keep_graph: bool = False,
) -> FrozenRun:
    """Return a run at which the model is frozen, and gradients of a metric there.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run.
        metric: to be differentiated.
        tape: the nodes.
        before: hooks that see what is frozen before it is.
        keep_graph: whether to keep the graph.

    Raises:
        UnsupportedModelError: patterns or norm scales cannot be frozen.
    """
    frozen = FrozenPass(model)
    with (
        torch.enable_grad(),
        start_graph(model) as roots,
        uncapped_logits(model) as uncapped,
    ):
        hooks = [*before, *frozen.record_hooks, *tape.hooks]
        logits = run(model, target.tokens, target.mask, hooks)
        value = metric.of_logits(logits)
        ends = {"x": roots[-1], "logits": uncapped[-1]}
        gradients = tape.gradients(value, ends, keep_graph=keep_graph)
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
    return FrozenRun(frozen, roots[-1], uncapped[-1], value, gradients)


@torch.no_grad()
def require_linear(
    model: Any,
    target: Recording,
    at: FrozenRun,
    cut: Mapping[str, Tensor] = MappingProxyType({}),
    names: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Compare the effect of noise in the stream that enters the first block with its gradient.

    Args:
        model: frozen at `target`.
        target: the run.
        at: the frozen run.
        cut: outputs of heads, by hook name, whose constant part is asked for.
        names: hook points whose constant part is asked for.

    Returns:
        What heads would put out, and hook points and "logits" show, if the embedding and all heads
        that are cut put out 0; nothing if none is asked for.

    Raises:
        UnsupportedModelError: weights · Δlogits is not gradient · Δx.
    """
    x = target.streams[0]
    noise = normal_numbers(x.shape).to(x) * x.std()
    # Pairs x + δ, x - δ; with δ = -x they are 0 and 2x.
    changes = [noise, -x] if cut else [noise]
    both = torch.cat([*(x + change for change in changes), *(x - change for change in changes)])
    n = 2 * len(changes)
    constants: dict[str, Tensor] = {}

    def keep(name: str) -> tuple[str, Callable[..., Tensor | None]]:
        def hook(value: Tensor, hook: Any) -> Tensor | None:
            more, nothing, less, _ = value.chunk(n)
            constants[name] = nothing.clone()
            if name not in cut:
                return None
            z = cut[name].detach()
            return torch.cat([more, torch.zeros_like(z), less, 2 * z])

        return name, hook

    mask = None if target.mask is None else target.mask.repeat(n, 1)
    hooks: Hooks = [*map(keep, names), *at.frozen.linear_hooks, *map(keep, cut)]
    with (
        edit_input(model, lambda _: both),
        uncapped_logits(model) as uncapped,
    ):
        run(model, target.tokens.repeat(n, 1), mask, hooks)
    logits = uncapped[-1].chunk(n)
    terms = at.gradients["logits"] * (logits[0] - logits[n // 2]) / 2
    numbers = torch.stack(
        [(at.gradients["x"] * noise).sum().to(terms), terms.sum(), terms.abs().sum()]
    )
    expected, got, scale = numbers.tolist()
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
    return {**constants, "logits": logits[1]} if cut else {}


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
