"""Attribute the change of a metric between two runs exactly to the model's activations.

The model runs on the clean and the corrupted prompts. In a third forward pass, with gradients, each
nonlinear step outputs the mean of its outputs in the two runs. In the backward pass, the step's
derivative is replaced by its slope between the two runs (`secants.py`). A product of two
activations, such as pattern times value, needs no rule: its gradient at the mean is exact. The
backward pass therefore returns multipliers M, whose products with the changes in the activations
add up to the metric's change:

    Σ M_y · Δy = Δmetric        Δy = y of the clean run minus y of the corrupted run

The equation holds for every set of activations y that together cut all paths from the tokens to the
metric. Multipliers can be computed at hook points, for example for queries, scores, patterns or z.
They count what reads the hook point's output; multipliers of `hook_resid_mid` count everything that
reads the stream there, because in bridges only the MLP reads this hook point. If three factors
of a product change, their shares depend on the order of multiplication in the model's code.

The nonlinear steps are norms, attention softmaxes (with soft caps and clamps), neuron-heads
(single-neuron attention heads) and the soft cap of the logits. Calls of torch's softmax are
intercepted, because hooks on some bridges see only a copy of the pattern. If the model has another
nonlinear step, `contrast` raises an error, because the sum of M · Δ over the first block's input
differs from the metric's change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import Logits, Residual
from attn_only_lens.engine.gradients import Tape, edit_input, start_graph
from attn_only_lens.engine.input_warnings import warn
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, as_metric, bind
from attn_only_lens.engine.model_weights import HALF, float32_weights
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import (
    Hooks,
    Recording,
    input_stream,
    of_this_thread,
    output_stream,
    record,
    run,
)
from attn_only_lens.engine.secants import (
    Both,
    FunctionRules,
    at_mean,
    gate_derivative,
    mean,
    norm_change,
    replaced,
    slope,
    together,
)
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import Gate
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import WIDE_KINDS, HeadKind
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE, disagreement

_EXACT = 1e-9  # the smallest tolerance: in float64, rounding errors grow from layer to layer
_PROBLEM = "the difference of two runs of this model cannot be attributed"


@dataclass(frozen=True, eq=False)
class BothRuns:
    """The activations of two runs, in one batch: first the clean prompts, then the corrupted ones.

    Attributes:
        pair: the prompts.
        logits: the logits of both runs.
        stream: the residual stream that enters the first block.
        norms: the inputs and outputs of norms.
        functions: the inputs and outputs of nonlinear functions in attention, in calling order.
        gates: the queries and values of neuron-heads.
        recording: the recording of both runs, with every z.
    """

    pair: PromptPair
    logits: Float[Tensor, "both pos d_vocab"]
    stream: Float[Tensor, "both pos d_model"]
    norms: dict[nn.Module, Both]
    functions: list[Both]
    gates: dict[Any, Both]
    recording: Recording

    def recordings(self) -> tuple[Recording, Recording]:
        """Return the recording of the clean run and the recording of the corrupted run."""
        n = len(self.pair.clean)
        return self.recording[:n], self.recording[n:]


@dataclass(frozen=True, eq=False)
class Contrast:
    """The multipliers that turn changes in activations between two runs into a metric's change.

    Attributes:
        runs: both runs.
        logits: the multipliers of the logits.
        stream: the multipliers of the stream that enters the first block.
        final: the multipliers of the residual stream after the last block.
        patterns: the multipliers of the softmax in each layer's attention.
        gradients: the multipliers at the nodes of the tape, by hook name.
        functions: the rules of softmaxes; softmax outputs are differentiable if the graph was kept.
        total: Σ M Δ over the logits; it is the change in the metric if all its functions have
            rules.
        remainder: the change in the metric minus the total.
    """

    runs: BothRuns
    logits: Float[Tensor, "batch pos d_vocab"]
    stream: Residual
    final: Residual
    patterns: list[Float[Tensor, "batch head_index query_pos key"]]
    gradients: dict[str, Tensor] = field(repr=False)
    functions: FunctionRules = field(repr=False)
    total: float
    remainder: float

    def through_patterns(
        self, model: Any, layer: int, kind: HeadKind
    ) -> Float[Tensor, "batch pos head_index"]:
        """Return the part of each head's attribution that is due to the change in its pattern."""
        if kind in WIDE_KINDS:
            return torch.zeros_like(self.stream[..., :1])
        if kind == "attention":
            clean, corrupted = self.functions.softmax_runs[layer].chunk(2)
            terms: Tensor = self.patterns[layer] * (clean - corrupted)
            return terms.sum(-1).transpose(1, 2)
        host = host_of(model)
        heads, z = host.neurons[layer], self.gradients[host.hook_name(layer, kind, "z")]
        query, v = self.runs.gates[heads]
        clean, corrupted = heads._self_weight(query).chunk(2)
        through: Tensor = z.squeeze(-1) * (clean - corrupted)
        return through * mean(v)


@torch.no_grad()
@full_precision()
def run_both(model: Any, pair: PromptPair) -> BothRuns:
    """Run a model on clean and corrupted prompts; record inputs and outputs of nonlinear steps."""
    host = host_of(model)
    layers = range(host.n_layers)
    _require_separate_gates(host)
    names = host.hook_names("z")
    tokens = torch.cat([pair.clean, pair.corrupted])
    mask = None if pair.mask is None else pair.mask.repeat(2, 1)
    steps = _Steps(model)
    with steps.recorded():
        both = record(
            model, tokens, mask, layers=layers, names=names, gates=False, keep_key_values=True
        )
    seen = steps.functions.seen
    return BothRuns(pair, both.logits, both.streams[0], steps.norms, seen, steps.gates, both)


@torch.enable_grad()
@full_precision()
def run_softmax(
    model: Any, pair: PromptPair, tape: Tape
) -> list[Float[Tensor, "batch head_index query_pos key"]]:
    """Return each layer's attention patterns in the clean run, as differentiable tensors."""
    steps = _Steps(model)
    with steps.recorded(), start_graph(model):
        run(model, pair.clean, pair.mask, tape.hooks)
    return steps.functions.softmax


@torch.enable_grad()
@full_precision()
def contrast(
    model: Any, runs: BothRuns, metric: BoundMetric, tape: Tape, *, keep_graph: bool = False
) -> Contrast:
    """Return a metric's multipliers at the hook points of `tape`.

    With `keep_graph=True`, softmax outputs can be differentiated with respect to these activations.

    Raises:
        UnsupportedModelError: the sum over the first block's input is not the change in the metric.
    """
    steps = _Steps(model, runs)
    streams, inputs = list[Tensor](), list[Tensor]()

    def start(stream: Residual) -> Residual:
        streams.append(mean(runs.stream).to(stream).requires_grad_())
        return streams[-1]

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(input_stream(args, kwargs))

    with ExitStack() as stack:
        stack.enter_context(edit_input(model, start))
        tape_hooks = stack.enter_context(steps.replaced(tape.hooks))
        ends: list[Tensor] = []
        end = of_this_thread(lambda block, args, output: ends.append(output_stream(output)))
        stack.enter_context(model.blocks[-1].register_forward_hook(end))
        for block in model.blocks[1:]:
            hook = of_this_thread(enter)
            stack.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        errors = host_of(model).hook_names("z", ("error",))
        leaves: dict[str, Tensor] = {}
        means = [
            (name, partial(_leaf, leaves, both) if name in errors else partial(_average, both))
            for name, both in runs.recording.hooked.items()
        ]
        logits = run(model, runs.pair.clean, runs.pair.mask, [*means, *tape_hooks])
    clean, corrupted = runs.logits.chunk(2)
    multiplier = metric_multiplier(metric, clean, corrupted)
    value = (logits * multiplier).sum()
    softmax = {f"softmax {i}": x for i, x in enumerate(steps.functions.softmax)}
    read = {f"input {i}": x for i, x in enumerate([*streams, *inputs, *ends])}
    gradients = tape.gradients(value, read | softmax | leaves, keep_graph=keep_graph)
    cuts, patterns = ([gradients.pop(name) for name in some] for some in (read, softmax))
    total = float((multiplier * (clean - corrupted)).sum())
    result = Contrast(
        *(runs, multiplier, cuts[0], cuts[-1], patterns, gradients),
        functions=steps.functions,
        total=total,
        remainder=_remainder(metric, multiplier, clean, corrupted),
    )
    _require_complete(model, result, cuts, list(leaves))
    return result


def metric_multiplier(metric: BoundMetric, clean: Logits, corrupted: Logits) -> Logits:
    """Return the logits' multipliers, exact if `FunctionRules` covers the metric's functions."""
    seen = []
    for logits in (clean, corrupted):
        with torch.no_grad(), FunctionRules() as functions:
            metric.of_logits(logits)
        seen.append(functions.seen)
    both = [
        (torch.cat([x_1, x_0]), torch.cat([y_1, y_0]))
        for (x_1, y_1), (x_0, y_0) in zip(*seen, strict=True)
    ]
    with torch.enable_grad(), FunctionRules(both):
        middle = ((clean + corrupted) / 2).detach().requires_grad_()
        (multiplier,) = torch.autograd.grad(metric.of_logits(middle), middle)
    return multiplier


def _remainder(metric: BoundMetric, multiplier: Logits, clean: Logits, corrupted: Logits) -> float:
    """Return the metric's change minus Σ M Δ over the logits, or 0 if the rest is only rounding."""
    with torch.no_grad():
        change = metric.of(clean) - metric.of(corrupted)
    terms = multiplier * (clean - corrupted)
    remainder = change - float(terms.sum())
    size = float((multiplier * clean).abs().sum() + (multiplier * corrupted).abs().sum())
    return remainder if abs(remainder) > LOGIT_TOLERANCE[terms.dtype] * size else 0.0


@contextmanager
def float32_slopes(model: Any, pair: PromptPair, metric: AnyMetric) -> Iterator[None]:
    """Context manager that runs half-precision models in float32 (see `float32_weights`)."""
    if next(model.parameters()).dtype not in HALF:
        with float32_weights(model):
            yield
        return
    changes = [_change(model, pair, metric)]
    with float32_weights(model):
        changes.append(_change(model, pair, metric))
        reason = (
            f"slopes are computed in float32: {as_metric(metric).name} changes by "
            f"{changes[1]:.6g} in float32, and by {changes[0]:.6g} in the model's precision"
        )
        warn({"half precision": reason}, "this model is in half precision")
        yield


@torch.no_grad()
def _change(model: Any, pair: PromptPair, metric: AnyMetric) -> float:
    """Return a metric's value in the clean run minus its value in the corrupted run."""
    logits = [record(model, x, pair.mask).logits for x in (pair.clean, pair.corrupted)]
    bound = bind(metric, model, pair, logits[0])
    return bound.of(logits[0]) - bound.of(logits[1])


def _require_complete(
    model: Any, result: Contrast, cuts: Sequence[Tensor], errors: Sequence[str]
) -> None:
    """Check that the effects of embeddings and error nodes add up to the change in the metric.

    If they do not, the error names the block between whose output and input the sum changes. `cuts`
    has the multipliers of every block's input and of the last block's output.
    """
    host, recording = host_of(model), result.runs.recording
    block_of = {name: int(name.split(".")[1]) for name in errors}
    parts = result.logits * result.runs.logits[: len(result.logits)]

    def off(cut: int) -> str:
        ends = [(cuts[cut], recording.streams[cut])]
        ends += [
            (result.gradients[name], recording.hooked[name])
            for name, block in block_of.items()
            if block >= cut
        ]
        terms = torch.cat([(x * _difference(both)).flatten().to(parts) for x, both in ends])
        total, size = terms.sum(), terms.abs().sum() + parts.abs().sum()
        tolerance = max(LOGIT_TOLERANCE[terms.dtype], _EXACT)
        return disagreement(total, total.new_tensor(result.total), tolerance, size=size)

    if not off(0):
        return
    last = max(cut for cut in range(len(cuts)) if off(cut))
    steps = [
        f"layer {layer}'s {kind} heads"
        for layer in range(host.n_layers)
        for kind in host.kinds(layer)
        if host.block(layer, kind) == last
    ]
    step = " or ".join(steps) or "the final norm"
    reason = (
        f"the tokens' contributions do not add up to the metric's change, {result.total:.6g} "
        f"({off(0)}). Counted from the logits, the first wrong sum is at {step} "
        f"({off(last)}); use method='gradient'"
    )
    raise UnsupportedModelError([reason], _PROBLEM)


def _require_separate_gates(host: Any) -> None:
    """Raise an error if gates of transcoder features depend on other features, as with topk."""
    layers = [str(heads.layer) for heads in host.neurons if heads.joint_gates]
    if layers:
        reason = (
            f"the gates of the features in layer {', '.join(layers)} (topk) depend on each other, "
            "so their change cannot be split exactly into parts for single features; use "
            "method='gradient', a graph of one run, or a transcoder with thresholds ('jumprelu')"
        )
        raise UnsupportedModelError([reason], _PROBLEM)


def _difference(both: Tensor) -> Tensor:
    clean, corrupted = both.chunk(2)
    return clean - corrupted


def _leaf(leaves: dict[str, Tensor], both: Tensor, value: Tensor, hook: Any) -> Tensor:
    """Replace an error node's output by its mean over both runs, a leaf of the autograd graph."""
    leaves[hook.name] = mean(both).to(value).requires_grad_()
    return leaves[hook.name]


def _average(both: Tensor, value: Tensor, hook: Any) -> Tensor:
    return at_mean(value, both)


def _gate_slopes(alike: Sequence[Any], queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens' mean attention to themselves, and its slope, for layers with equal gates."""
    weights = alike[0]._self_weight(queries)
    (y_1, y_0), (x_1, x_0) = weights.chunk(2), queries.chunk(2)
    return mean(weights), slope(y_1, y_0, x_1, x_0, partial(gate_derivative, alike[0]))


class _Steps:
    """Record or replace a model's norms and gates, and the nonlinear functions in its attention."""

    def __init__(self, model: Any, runs: BothRuns | None = None) -> None:
        self._host = host_of(model)
        self.norms: dict[nn.Module, Both] = {} if runs is None else runs.norms
        self.gates: dict[Any, Both] = {} if runs is None else runs.gates
        self.functions = FunctionRules(None if runs is None else runs.functions, paused=True)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager that records the inputs and outputs of norms and nonlinear functions."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            self.norms[module] = input_stream(args, kwargs).detach(), output.detach()

        def look_at_gate(heads: Any, q: Tensor, up: Tensor | None) -> None:
            query, v = heads._query_and_value(q, up)
            self.gates[heads] = query.detach(), v.detach()

        with self._attached({module: look for module in self._host.norm_modules()}, look_at_gate):
            yield

    @contextmanager
    def replaced(self, hooks: Hooks) -> Iterator[Hooks]:
        """Context manager that puts rules in place of norms and nonlinearities; adapts `hooks`.

        Some bridges have hook points inside norms, such as Gemma 2's `hook_attn_out`. A hook there
        gets a detached activation, which receives the gradient of the norm's new output.
        """
        points = {
            point: module
            for module in self.norms
            for point in module.modules()
            if isinstance(point, HookPoint) and point is not getattr(module, "hook_in", None)
        }
        inside = {name: points.get(self._host.model.hook_dict.get(name)) for name, _ in hooks}
        # One prompt is enough to recognise a norm, so only this prompt is moved to the CPU.
        norms = self._host.norms_of({m: (x[:1], y[:1]) for m, (x, y) in self.norms.items()})
        norm_hooks = {
            module: self._norm(norms[module], *both, continues=module in inside.values())
            for module, both in self.norms.items()
        }
        queries = {heads: (query,) for heads, (query, _) in self.gates.items()}
        kinds = {x: x.gate if isinstance(x.gate, Gate) else x for x in queries}
        slopes = dict(together(_gate_slopes, queries, kinds))

        def attend(heads: Any, q: Tensor, up: Tensor | None) -> Tensor:
            query, v = heads._query_and_value(q, up)
            weight, along = slopes[heads]
            weight = replaced(query, weight.clone, partial(torch.mul, along))
            return (weight * at_mean(v, self.gates[heads][1])).to(q.dtype)

        def start(value: Tensor, hook: Any, then: Callable[..., Any]) -> Any:
            return then(value.detach(), hook=hook)

        with self._attached(norm_hooks, attend):
            yield [
                (name, hook if inside[name] is None else partial(start, then=hook))
                for name, hook in hooks
            ]

    @contextmanager
    def _attached(self, norm_hooks: dict[nn.Module, Any], gate_rule: Any) -> Iterator[None]:
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
            stack.callback(setattr, self._host.passing, "gate_rule", None)
            self._host.passing.gate_rule = gate_rule
            yield

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
            result = at_mean(input_stream(args, kwargs), y, back)
            return result + (output - output.detach()) if continues else result

        return hook
