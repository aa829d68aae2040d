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

`linear_rules.py` replaces the nonlinear steps. If the model has another nonlinear step,
`secant_multipliers` raises an error, because the sum of M · Δ over the first block's input differs
from the metric's change.

The two runs can be any two. With `held`, the first is the run of a circuit: on the clean prompts,
every head outside the circuit has its output in the corrupted run, or another output in both runs.
These outputs do not change, and no multiplier passes through them, so the circuit's heads and the
tokens account for the metric's whole change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.axes import Logits, Residual
from attn_only_lens.engine.gradients import Tape, edit_input
from attn_only_lens.engine.input_warnings import warn
from attn_only_lens.engine.kept_runs import keep_runs, kept_runs
from attn_only_lens.engine.linear_rules import SecantSteps, Steps
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, as_metric, bind
from attn_only_lens.engine.model_weights import HALF, float32_weights
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import (
    Recording,
    input_stream,
    of_this_thread,
    output_stream,
    record,
    run,
)
from attn_only_lens.engine.secants import FunctionRules, at_mean, mean
from attn_only_lens.engine.writes import Decomposition, decompose
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import WIDE_KINDS, HeadKind
from attn_only_lens.precision import full_precision
from attn_only_lens.storage import tensor_digest
from attn_only_lens.tolerances import LOGIT_TOLERANCE, disagreement

_EXACT = 1e-9  # the smallest tolerance: in float64, rounding errors grow from layer to layer
_PROBLEM = "the difference of two runs of this model cannot be attributed"


@dataclass(frozen=True, eq=False)
class Held:
    """The heads at one hook point that do not belong to a circuit, and the outputs that they have.

    Attributes:
        outside: whether a head does not belong to the circuit.
        z: the outputs of these heads in both runs; None for the outputs in the corrupted run.
    """

    outside: Bool[Tensor, "batch pos head_index 1"]
    z: Float[Tensor, "batch pos head_index d_head"] | None = None

    def hook(self, both: Float[Tensor, "both pos head_index d_head"], hook: Any) -> Tensor:
        """Replace the outputs of these heads in a batch of the clean and the corrupted prompts."""
        outside, (clean, corrupted) = self.outside.to(both.device), both.chunk(2)
        if self.z is None:
            return torch.cat([torch.where(outside, corrupted, clean), corrupted])
        held = self.z.to(both)
        return torch.cat([torch.where(outside, held, run) for run in (clean, corrupted)])


@dataclass(frozen=True, eq=False)
class BothRuns:
    """The activations of two runs, in one batch: first the clean prompts, then the corrupted ones.

    Attributes:
        pair: the prompts.
        logits: the logits of both runs.
        stream: the residual stream that enters the first block.
        steps: the inputs and outputs of nonlinear steps.
        recording: the recording of both runs, with every z.
        decomposition: the writes to the residual stream in both runs, if they were requested.
        held: the heads outside a circuit by hook name, if the first run is the circuit's run; see
            `run_both`.
    """

    pair: PromptPair
    logits: Float[Tensor, "both pos d_vocab"]
    stream: Float[Tensor, "both pos d_model"]
    steps: Steps
    recording: Recording
    decomposition: Decomposition | None = None
    held: Mapping[str, Held] = field(default_factory=dict)

    def recordings(self) -> tuple[Recording, Recording]:
        """Return the recording of the clean run and the recording of the corrupted run."""
        n = len(self.pair.clean)
        return self.recording[:n], self.recording[n:]


@dataclass(frozen=True, eq=False)
class Multipliers:
    """The multipliers that turn changes in activations between two runs into a metric's change.

    Attributes:
        runs: both runs.
        logits: the multipliers of the logits.
        stream: the multipliers of the stream that enters the first block.
        final: the multipliers of the residual stream after the last block.
        patterns: the multipliers of the softmax in each layer's attention.
        gradients: the multipliers at the nodes of the tape, by hook name.
        sources: the multipliers of error nodes and of the routing weights that are sources
            (`routing.py`), by hook name; 0 for other routing weights.
        steps: the replaced steps, with nodes of the autograd graph.
        nodes: the nodes of the tape, by hook name.
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
    sources: dict[str, Tensor] = field(repr=False)
    steps: SecantSteps = field(repr=False)
    nodes: dict[str, Tensor] = field(repr=False)
    total: float
    remainder: float

    def through_patterns(
        self, model: Any, layer: int, kind: HeadKind
    ) -> Float[Tensor, "batch pos head_index"]:
        """Return the part of each head's attribution that is due to the change in its pattern."""
        if kind in WIDE_KINDS:
            return torch.zeros_like(self.stream[..., :1])
        if kind == "attention":
            clean, corrupted = self.runs.steps.functions.softmax[layer].chunk(2)
            terms: Tensor = self.patterns[layer] * (clean - corrupted)
            return terms.sum(-1).transpose(1, 2)
        host = host_of(model)
        heads, z = host.neurons[layer], self.gradients[host.hook_name(layer, kind, "z")]
        query, v = heads._query_and_value(*self.runs.steps.projections[heads])
        clean, corrupted = heads._self_weight(query).chunk(2)
        through: Tensor = z.squeeze(-1) * (clean - corrupted)
        return through * mean(v)


@torch.no_grad()
@full_precision()
def run_both(
    model: Any,
    pair: PromptPair,
    *,
    decomposed: bool = False,
    held: Mapping[str, Held] | None = None,
) -> BothRuns:
    """Run a model on clean and corrupted prompts; record inputs and outputs of nonlinear steps.

    The runs are kept, and not repeated while the model is the same; see `kept_runs.py`.

    Args:
        model: a model with neuron-heads.
        pair: the prompts.
        decomposed: whether to also split the residual stream into writes; see `decompose`.
        held: for the run of a circuit, the heads outside the circuit, by the hook name of z.
    """
    key = _digest(held or {})
    known = kept_runs(model, pair, key)
    if known is not None and (known.decomposition is not None or not decomposed):
        return cast(BothRuns, known)
    host, steps, held = host_of(model), Steps(model), held or {}
    _require_separate_gates(host)
    names = host.hook_names("z")
    tokens, mask = pair.together
    hooks = [(name, heads.hook) for name, heads in held.items()]
    writes = None
    if decomposed:
        watch = steps.recorded(both_runs=True)
        writes = decompose(model, tokens, mask, names=tuple(names), hooks=hooks, watch=watch)
        both = writes.recording
    else:
        options: dict[str, Any] = {"names": names, "gates": False, "keep_key_values": True}
        with steps.recorded(both_runs=True):
            both = record(model, tokens, mask, layers=range(host.n_layers), hooks=hooks, **options)
    _require_heads(both)
    runs = BothRuns(pair, both.logits, both.streams[0], steps, both, writes, held)
    keep_runs(model, pair, runs, key)
    return runs


def _require_heads(both: Recording) -> None:
    """Raise an error if z has no axis of heads, as in bridges with latent attention (DeepSeek)."""
    reasons = [
        f"{name} has shape {list(z.shape)}; expected [batch, pos, head_index, d_head]"
        for name, z in both.hooked.items()
        if z.ndim != 4
    ]
    UnsupportedModelError.raise_if(reasons, _PROBLEM)


def _digest(held: Mapping[str, Held]) -> str:
    """Return a digest of the heads that are held and of their outputs; "" if there are none."""
    named = [
        (name, x) for name, heads in held.items() for x in (heads.outside, heads.z) if x is not None
    ]
    return tensor_digest(named) if held else ""


@torch.enable_grad()
@full_precision()
def secant_multipliers(
    model: Any,
    runs: BothRuns,
    metric: BoundMetric,
    tape: Tape,
    *,
    keep_graph: bool = False,
    readers: Sequence[nn.Module] = (),
) -> Multipliers:
    """Return a metric's multipliers at the hook points of `tape`.

    With `keep_graph=True`, the autograd graph is kept. `readers` are modules that read the residual
    stream without a norm, and whose inputs become nodes of the graph.

    Raises:
        UnsupportedModelError: the sum over the first block's input is not the change in the metric.
    """
    steps = SecantSteps(model, runs.steps, readers)
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
            (name, partial(_leaf, leaves, both) if name in errors else _averaged(runs, name))
            for name, both in runs.recording.hooked.items()
        ]
        logits = run(model, runs.pair.clean, runs.pair.mask, [*means, *tape_hooks])
    clean, corrupted = runs.logits.chunk(2)
    multiplier = metric_multiplier(metric, clean, corrupted)
    value = (logits * multiplier).sum()
    softmax = {f"softmax {i}": x.inside for i, x in enumerate(steps.functions.weights)}
    read = {f"input {i}": x for i, x in enumerate([*streams, *inputs, *ends])}
    host = host_of(model)
    routes = {
        host.hook_name(layer, "router", "z"): steps.routes[heads].leaf
        for layer, heads in enumerate(host.neurons)
        if heads in steps.routes
    }
    whole = {f"whole {name}": leaf for name, leaf in routes.items()}
    gradients = tape.gradients(value, read | softmax | leaves | whole, keep_graph=keep_graph)
    cuts, patterns, of_routes = (
        [gradients.pop(name) for name in some] for some in (read, softmax, whole)
    )
    sources = {name: gradients[name] for name in leaves}
    sources |= {name: x.unsqueeze(-2) for name, x in zip(routes, of_routes, strict=True)}
    total = float((multiplier * (clean - corrupted)).sum())
    result = Multipliers(
        *(runs, multiplier, cuts[0], cuts[-1], patterns, gradients, sources),
        steps=steps,
        nodes=tape.nodes,
        total=total,
        remainder=_remainder(metric, multiplier, clean, corrupted),
    )
    _require_complete(model, result, cuts)
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


def _require_complete(model: Any, result: Multipliers, cuts: Sequence[Tensor]) -> None:
    """Check that the effects of embeddings and other sources add up to the change in the metric.

    If they do not, the error names the block between whose output and input the sum changes. `cuts`
    has the multipliers of every block's input and of the last block's output.
    """
    host, recording = host_of(model), result.runs.recording
    block_of = {name: int(name.split(".")[1]) for name in result.sources}
    parts = result.logits * result.runs.logits[: len(result.logits)]

    def off(cut: int) -> str:
        ends = [(cuts[cut], recording.streams[cut])]
        ends += [
            (result.sources[name], recording.hooked[name])
            for name, block in block_of.items()
            if block >= cut
        ]
        terms = torch.cat([(x * _difference(both)).flatten().to(parts) for x, both in ends])
        total, size = terms.sum(), terms.abs().sum() + parts.abs().sum()
        tolerance = max(LOGIT_TOLERANCE[terms.dtype], _EXACT)
        return disagreement(total, total.new_tensor(result.total), tolerance, size=size)

    if not off(0):
        return
    # Features of earlier layers may write past a later block's input, so only cut 0 is complete.
    last = 0 if host.writes_later else max(cut for cut in range(len(cuts)) if off(cut))
    steps = [
        f"layer {layer}'s {kind} heads"
        for layer in range(host.n_layers)
        for kind in host.kinds(layer)
        if host.block(layer, kind) == last or host.writes_later
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


def _averaged(runs: BothRuns, name: str) -> Callable[..., Tensor]:
    return partial(_average, runs.recording.hooked[name], runs.held.get(name))


def _average(both: Tensor, held: Held | None, value: Tensor, hook: Any) -> Tensor:
    """Replace z by its mean over both runs; no multiplier passes through heads that are held."""
    if held is None:
        return at_mean(value, both)
    outside = held.outside.to(value.device)
    return at_mean(value, both, lambda gradient: gradient.masked_fill(outside, 0.0))
