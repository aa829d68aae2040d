"""Record a model's nonlinear steps, or replace them with linear maps in a forward pass.

The nonlinear steps are norms, attention softmaxes (with soft caps and clamps), neuron-heads
(single-neuron attention heads) and the soft cap of the logits. Two kinds of linear maps are used:

    secants   each step outputs the mean of its outputs in two runs; in the backward pass, its
              derivative is replaced by its slope between the two runs (`secants.py`)
    held      norm scales and attention weights are constants from one run; what remains of a step
              is linear: x N / s + b for a norm, weight · value for a head

Calls of torch's softmax are intercepted, because hooks on some bridges see only a copy of the
pattern.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.devices import read_all
from attn_only_lens.engine.recording import Hooks, input_stream, of_this_thread
from attn_only_lens.engine.routing import Routing, RoutingRule
from attn_only_lens.engine.secants import (
    Both,
    FunctionRules,
    Weights,
    at_mean,
    gate_derivative,
    mean,
    norm_change,
    replaced,
    slope,
    together,
)
from attn_only_lens.engine.writes import FrozenNorm, edited_input, sublayer_input
from attn_only_lens.heads import host_of

Held = Literal["gate", "up", "half"]
"""The factor of gated neurons' values that is held constant, or each factor in half the product."""


class Steps:
    """A model's nonlinear steps in one forward pass, as they are recorded or replaced.

    Attributes:
        norms: the inputs and outputs of norms.
        projections: the pre-activations q and u of neuron-heads.
        routing: the inputs and the routing weights of mixtures of experts.
        functions: the nonlinear functions that attention calls.
        reads: the residual stream as each norm, or each module without a norm before it, reads it.
        gates: the attention weights of neuron-heads.
        normed: the outputs of replaced norms.
    """

    def __init__(self, model: Any, functions: FunctionRules | None = None) -> None:
        self._host = host_of(model)
        self.norms: dict[nn.Module, Both] = {}
        self.projections: dict[Any, tuple[Tensor, Tensor | None]] = {}
        self.routing: dict[Any, Both] = {}
        self.functions = FunctionRules(paused=True) if functions is None else functions
        self.reads: dict[nn.Module, Tensor] = {}
        self.normed: dict[nn.Module, list[Tensor]] = {}
        self._streams: dict[nn.Module, Tensor] = {}
        self.gates: dict[Any, Weights] = {}

    @contextmanager
    def recorded(self, *, both_runs: bool = False) -> Iterator[None]:
        """Context manager that records the inputs and outputs of norms and nonlinear functions.

        `both_runs` tells that the batch holds two runs, first the clean prompts. Experts that a
        token visits in one of the runs are then computed in both.
        """

        def look(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            self.norms[module] = input_stream(args, kwargs).detach(), output.detach()

        def look_at_gate(heads: Any, q: Tensor, up: Tensor | None) -> None:
            self.projections[heads] = q.detach(), None if up is None else up.detach()

        def look_at_routing(heads: Any, x: Tensor, weights: Tensor) -> Tensor:
            self.routing[heads] = x.detach(), weights.detach()
            return weights

        norms = {module: look for module in self._host.norm_modules()}
        with self._attached(norms, look_at_gate, look_at_routing, both_runs):
            yield

    @contextmanager
    def _attached(
        self,
        norm_hooks: Mapping[nn.Module, Any],
        gate_rule: Any,
        routing_rule: Any,
        both_runs: bool = False,
    ) -> Iterator[None]:
        """Hook norms; intercept gates, and the functions that attention calls outside its norms."""
        paused = [True]

        def enter(pause: bool, *_: Any) -> None:
            paused.append(pause)
            self.functions.paused = pause

        def leave(*_: Any) -> None:
            paused.pop()
            self.functions.paused = paused[-1]

        with ExitStack() as stack:

            def attach(module: nn.Module, hook: Any, **options: Any) -> None:
                stack.enter_context(module.register_forward_hook(of_this_thread(hook), **options))

            attention = [self._host.attention(layer) for layer in range(self._host.n_layers)]
            for module in (*norm_hooks, *attention):
                begin = partial(enter, module in norm_hooks)
                stack.enter_context(module.register_forward_pre_hook(of_this_thread(begin)))
                if module in norm_hooks:
                    attach(module, norm_hooks[module], with_kwargs=True)
                attach(module, leave)
            # Also intercept the nonlinear functions after a masked language model's last block.
            attach(self._host.model.blocks[-1], partial(enter, False))
            stack.enter_context(self.functions)
            rules = gate_rule, routing_rule, both_runs, self.functions
            stack.enter_context(self._host.passing.rules(*rules))
            yield

    def _read(self, module: nn.Module, stream: Tensor) -> Tensor:
        """Return the stream that a module reads, as a node that no other module reads.

        A HookedTransformer normalises the same stream three times: for queries, keys and values.
        """
        if self._streams.get(module) is not stream:
            self._streams[module], self.reads[module] = stream, stream.view_as(stream)
        return self.reads[module]

    @contextmanager
    def _reading(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Context manager that makes nodes of the inputs of modules without a norm before them."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            stream = sublayer_input(args, kwargs)
            node = self._read(module, stream)
            # Queries and keys may get another tensor than values, with a constant added to it.
            return edited_input(args, kwargs, lambda x: node + (x - stream).detach())

        with ExitStack() as stack:
            for module in modules:
                hook = of_this_thread(enter)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield


class SecantSteps(Steps):
    """Steps that are replaced with their secants between two recorded runs.

    `readers` are modules that read the residual stream without a norm.

    Attributes:
        routes: the routing weights of mixtures of experts.
    """

    def __init__(self, model: Any, both: Steps, readers: Sequence[nn.Module] = ()) -> None:
        super().__init__(model, FunctionRules(both.functions.seen, paused=True))
        self._both, self._readers = both, readers
        self.routes: dict[Any, Routing] = {}

    @contextmanager
    def replaced(self, hooks: Hooks) -> Iterator[Hooks]:
        """Context manager that puts rules in place of norms and nonlinearities; adapts `hooks`.

        Some bridges have hook points inside norms, such as Gemma 2's `hook_attn_out`. A hook there
        gets a detached activation, which receives the gradient of the norm's new output.
        """
        recorded = self._both.norms
        points = {
            point: module
            for module in recorded
            for point in module.modules()
            if isinstance(point, HookPoint) and point is not getattr(module, "hook_in", None)
        }
        by_name = self._host.model.hook_dict
        inside = {name: points.get(by_name.get(name)) for name, _ in hooks}
        # One prompt is enough to recognise a norm, so only this prompt is moved to the CPU.
        norms = self._host.norms_of({m: (x[:1], y[:1]) for m, (x, y) in recorded.items()})
        norm_hooks = {
            module: self._norm(norms[module], *both, continues=module in inside.values())
            for module, both in recorded.items()
        }
        both = {
            heads: heads._query_and_value(*projections)
            for heads, projections in self._both.projections.items()
        }
        queries = {heads: (query,) for heads, (query, _) in both.items()}
        slopes = dict(together(_gate_slopes, queries, {x: x.gate for x in queries}))
        # Without a slope, as with a step gate, the weights do not depend on the query.
        sloped = dict(
            zip(slopes, read_all([along.any() for _, along in slopes.values()]), strict=True)
        )

        def attend(heads: Any, q: Tensor, up: Tensor | None) -> Tensor:
            if heads in self._both.routing:  # u is a product with the routing weights
                assert up is not None
                of_both = self._both.projections[heads][1]
                assert of_both is not None
                up = at_mean(up, of_both)
            query, v = heads._query_and_value(q, up)
            weight, along = slopes[heads]
            inside = weight
            if sloped[heads]:
                inside = replaced(query, weight.clone, partial(torch.mul, along))
            self.gates[heads] = Weights(inside, self.functions.valve(inside), query)
            return (self.gates[heads].outside * at_mean(v, both[heads][1])).to(q.dtype)

        def route(heads: Any, x: Tensor, weights: Tensor) -> Tensor:
            entered, recorded = self._both.routing[heads]
            scores = heads.parts.scores
            rule = RoutingRule.between(scores(entered), recorded, heads.parts.n)
            inside, leaf = rule.applied(scores(x))
            self.routes[heads] = Routing(inside, self.functions.valve(inside), leaf, rule.whole)
            return self.routes[heads].outside

        def start(value: Tensor, hook: Any, then: Callable[..., Any]) -> Any:
            return then(value.detach(), hook=hook)

        with self._attached(norm_hooks, attend, route), self._reading(self._readers):
            yield [
                (name, hook if inside[name] is None else partial(start, then=hook))
                for name, hook in hooks
            ]

    def _norm(self, norm: Any, x: Tensor, y: Tensor, *, continues: bool) -> Callable[..., Tensor]:
        """Return a hook that replaces a norm's output by both runs' mean, with the rule's gradient.

        If `continues` is true, hook points inside the norm receive the output's gradient too.
        """
        linear, without_bias = norm.after(x), y if norm.bias is None else y - norm.bias
        square = linear.square().sum(-1, keepdim=True)
        scale = (linear * without_bias).sum(-1, keepdim=True) / square
        r_1, r_0 = scale.nan_to_num(1.0, 1.0, 1.0).chunk(2)  # nan for zero inputs
        middle = norm.centred(mean(x))

        def back(gradient: Tensor) -> Tensor:
            moved: Tensor = norm.centred(norm_change(middle, r_1, r_0, norm.gain(gradient)))
            return moved

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            result = at_mean(self._read(module, input_stream(args, kwargs)), y, back)
            self.normed.setdefault(module, []).append(result)
            return result + (output - output.detach()) if continues else result

        return hook


class HeldSteps(Steps):
    """Steps whose norm scales and attention weights are held at their values in a recorded run.

    Args:
        model: the model.
        recorded: the steps of the recorded run.
        norms: the norms of the residual stream in this run, by module.
        readers: modules that read the residual stream without a norm.
        held: which factor of gated neurons is constant.
        read: changes the residual stream that each sublayer reads.
    """

    def __init__(
        self,
        model: Any,
        recorded: Steps,
        norms: Mapping[nn.Module, FrozenNorm],
        readers: Sequence[nn.Module],
        held: Held,
        read: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(model, FunctionRules(held=recorded.functions.softmax, paused=True))
        self._recorded, self._norms, self._readers = recorded, norms, readers
        self._factor, self._change = held, read

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Context manager that holds the weights and norm scales."""
        hooks = {module: partial(self._norm, frozen) for module, frozen in self._norms.items()}
        with self._attached(hooks, self._attend, self._route), self._reading(self._readers):
            yield

    def _read(self, module: nn.Module, stream: Tensor) -> Tensor:
        return self._change(super()._read(module, stream))

    def _norm(
        self, frozen: FrozenNorm, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor:
        stream = self._read(module, input_stream(args, kwargs)).to(output.device)
        copies = len(stream) // len(frozen.scale)
        moved: Tensor = frozen.norm.after(stream) / frozen.scale.repeat(copies, 1, 1)
        moved = (moved if frozen.norm.bias is None else moved + frozen.norm.bias).to(output.dtype)
        self.normed.setdefault(module, []).append(moved)
        return moved

    def _route(self, heads: Any, x: Tensor, weights: Tensor) -> Tensor:
        """Hold the routing weights."""
        recorded = self._recorded.routing[heads][1]
        return recorded.repeat(len(x) // len(recorded), 1, 1)

    def _attend(self, heads: Any, q: Tensor, up: Tensor | None) -> Tensor:
        self.projections[heads] = q, up
        then = [
            None if x is None else x.repeat(len(q) // len(x), 1, 1)
            for x in self._recorded.projections[heads]
        ]
        query, v = heads._query_and_value(q, up)
        if heads.value_is_product and self._factor != "gate":
            _, of_gate = heads._query_and_value(q, then[1])
            _, of_up = heads._query_and_value(then[0], up)
            v = of_gate if self._factor == "up" else (of_gate + of_up) / 2
        elif heads.value_is_product:
            _, v = heads._query_and_value(then[0], up)
        with torch.no_grad():
            weight = heads._self_weight(heads._query_and_value(*then)[0])
        inside = heads._self_weight(query) if torch.is_grad_enabled() else weight
        outside = weight.detach().clone().requires_grad_(torch.is_grad_enabled())
        self.gates[heads] = Weights(inside, outside, query)
        return (outside * v).to(q.dtype)


def _gate_slopes(alike: Sequence[Any], queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens' mean attention to themselves, and its slope, for layers with equal gates."""
    weights = alike[0]._self_weight(queries)
    (y_1, y_0), (x_1, x_0) = weights.chunk(2), queries.chunk(2)
    return mean(weights), slope(y_1, y_0, x_1, x_0, partial(gate_derivative, alike[0]))
