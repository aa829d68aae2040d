"""Gradients of a model whose patterns and norm scales are constants of one run.

Hooks hold every pattern and every norm scale, so only linear maps and biases are left between the
embedding and the logits. With c the gradient of the metric at the logits, x the stream that enters
the first block, and b all biases,

    c · logits = (∂/∂x) · x + Σ_b (∂/∂b) · b

That is relevance propagation with frozen patterns and the LN rule (Achtibat et al., "AttnLRP",
2024; Rezaei Jafari et al., "RelP", 2025). A head of a gated MLP has a value v = g u that is a
product. The linear form (g_0 u + g u_0)/2 with g_0, u_0 of the run replaces it: half of each
gradient, the half rule of those papers. Heads that share a neuron (bilinear gates) need none.

`linear_run.py` has the same linear model in closed form, with the maps between heads. Here, the
model's own code is differentiated at any hook point. Whether everything else in the model is linear
(no clipped values, no norms without hook points) is tested on every run.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.devices import normal_numbers
from attn_only_lens.engine.gradients import Tape, edit_input, start_graph
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import Hooks, Recording, run
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.heads.host import HEAD_KINDS

_PROBLEM = "this model cannot be frozen"


class FrozenPass:
    """Hooks that record patterns and norm scales as constants, and hold other runs at them."""

    def __init__(self, model: Any) -> None:
        host = host_of(model)
        layers = range(host.n_layers)
        points = [str(m.name) for m in model.modules() if isinstance(m, HookPoint)]
        self.patterns = [host.hook_name(i, kind, "pattern") for i in layers for kind in HEAD_KINDS]
        scales = sorted({name for name in points if name.endswith("hook_scale")})
        self._constant = [*self.patterns, *scales]
        self._products = [
            host.hook_name(layer, "neuron", "v")
            for layer in layers
            if host.neurons[layer].value_is_product
        ]
        self.recorded: dict[str, Tensor] = {}

    @property
    def record_hooks(self) -> Hooks:
        """Hooks that record patterns and scales in a run without changing its logits."""

        def recording(change: Callable[[Tensor], Tensor], name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                self.recorded[name] = value.detach().clone()
                return change(value)

            return hook

        return [
            *((name, recording(Tensor.detach, name)) for name in self._constant),
            *((name, recording(lambda v: (v + v.detach()) / 2, name)) for name in self._products),
        ]

    @property
    def linear_hooks(self) -> Hooks:
        """The hooks for a run of the linear model on pairs of rows, x + δ and x - δ.

        The first half of the rows are x + δ, the second half x - δ. The values g u of a pair
        differ by 2 (g_0 δu + u_0 δg); the half rule keeps half of this difference.
        """

        def rows(name: str, n: int) -> Tensor:
            value = self.recorded[name]
            return value.repeat(n // len(value), *[1] * (value.ndim - 1))

        def linear(name: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                plus, minus = value.chunk(2)
                change, middle = (plus - minus) / 4, rows(name, len(plus))
                return torch.cat([middle + change, middle - change])

            return hook

        def constant(name: str) -> Callable[..., Tensor]:
            return lambda value, hook: rows(name, len(value))

        return [
            *((name, constant(name)) for name in self._constant if name in self.recorded),
            *((name, linear(name)) for name in self._products),
        ]


def frozen_gradients(
    model: Any, target: Recording, metric: BoundMetric, tape: Tape
) -> dict[str, Tensor]:
    """Return gradients of a metric at the tape's nodes, in the model frozen at a run.

    Raises:
        UnsupportedModelError: patterns or norm scales cannot be frozen, or the frozen model is not
            linear.
    """
    frozen = FrozenPass(model)
    with torch.enable_grad(), start_graph(model) as roots, uncapped_logits(model) as uncapped:
        logits = run(model, target.tokens, target.mask, [*frozen.record_hooks, *tape.hooks])
        ends = {"x": roots[-1], "logits": uncapped[-1]}
        gradients = tape.gradients(metric.of_logits(logits), ends)
    error = float((logits.detach() - target.logits).abs().max())
    # Many bridged norms compute in float32 whatever the model's dtype; their hooked form does not.
    heads, dtypes = host_of(model).neurons, (logits.dtype, torch.float32)
    allowed = max(logit_tolerance(heads, dtype) for dtype in dtypes)
    reasons = []
    if missing := [name for name in frozen.patterns if name not in frozen.recorded]:
        reasons.append(f"it does not show the patterns {missing}")
    if not error <= allowed * float(target.logits.abs().max()):
        reasons.append(f"freezing it changes its logits by {error:.2g}")
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    _require_linear(model, target, frozen, gradients)
    return {name: gradients[name] for name in tape.names}


@torch.no_grad()
def _require_linear(
    model: Any, target: Recording, frozen: FrozenPass, gradients: dict[str, Tensor]
) -> None:
    """Compare the effect of noise in the stream that enters the first block with its gradient."""
    x = target.streams[0]
    noise = normal_numbers(x.shape).to(x) * x.std()
    both = torch.cat([x + noise, x - noise])
    mask = None if target.mask is None else target.mask.repeat(2, 1)
    with edit_input(model, lambda _: both), uncapped_logits(model) as uncapped:
        run(model, target.tokens.repeat(2, 1), mask, frozen.linear_hooks)
    plus, minus = uncapped[-1].chunk(2)
    terms = gradients["logits"] * (plus - minus) / 2
    effects = [(gradients["x"] * noise).sum().to(terms), terms.sum(), terms.abs().sum()]
    expected, got, scale = torch.stack(effects).tolist()
    if not abs(got - expected) <= logit_tolerance(host_of(model).neurons, x.dtype) * scale:
        reason = (
            "with its patterns and norm scales frozen it is still not linear: a change of the "
            f"input of its first block moves the metric by {got:.6g}, but its gradient predicts "
            f"{expected:.6g}. Something else in it is not a linear map, for instance clipped "
            "values, norms without hook_scale, or patterns that hooks see only as a copy. Pass "
            "method='gradient'"
        )
        raise UnsupportedModelError([reason], _PROBLEM)


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
