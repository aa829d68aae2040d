"""Run a model on one set of prompts, or on clean and corrupted prompts, and record activations."""

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint, LensHandle
from transformers.cache_utils import Cache, DynamicLayer

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import SELF, Residual, Tokens
from attn_only_lens.engine.answers import WRONG, preference
from attn_only_lens.engine.input_warnings import all_in_this_call, warn
from attn_only_lens.engine.kept_runs import kept_runs
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    as_metric,
    bind,
    require_distinct,
)
from attn_only_lens.engine.model_weights import HALF, float32_weights
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import SHARED_PARTS, LayerSites, Part, hook_name
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.heads.host import LATER_WRITES, NEURON_KINDS

Hooks = Sequence[tuple[str, Callable[..., Any]]]
Side = Literal["clean", "corrupted"]
_POINTS = ("z", "v", "pattern")
# Up to this many tokens, a forward pass over both prompts takes little longer than over one prompt,
# because reading the weights takes most of the time.
_FEW_TOKENS = 512
_CHECKED_AT_ONCE = 16  # prompts


@dataclass(frozen=True)
class NeuronRun:
    """The outputs z = weight · v of one layer's neuron-heads.

    `gates` holds the heads' values v and attention weights; it is empty if only z was recorded.
    """

    z: Float[Tensor, "batch pos head_index"]
    gates: tuple[Float[Tensor, "batch pos head_index"], ...] = ()

    @property
    def v(self) -> Float[Tensor, "batch pos head_index"]:
        return self.gates[0]

    @property
    def weight(self) -> Float[Tensor, "batch pos head_index"]:
        """Each neuron-head's attention to its own token (the rest is on the bias token)."""
        return self.gates[1]


@dataclass(frozen=True)
class Recording:
    """The recorded activations of one forward pass.

    Attributes:
        mask: 1 for tokens and 0 for padding; None if there is no padding.
        streams: the residual stream at each block's input, and at the last block's output.
        extra_outputs: how many values each block returned after the stream; None if the block did
            not return a tuple.
        neurons: the outputs of neuron-heads in the requested layers, by the original layer.
        hooked: the activations at the requested hook points, by hook name.
        key_values: the keys and values of each block, if they were requested and the model is a
            bridge that keeps them.
        later: what features of a cross-layer transcoder wrote to later layers (`LaterWrites`).
    """

    tokens: Tokens
    mask: Int[Tensor, "batch pos"] | None
    streams: tuple[Residual, ...]
    extra_outputs: tuple[int | None, ...]
    logits: Float[Tensor, "batch pos d_vocab"]
    neurons: dict[int, NeuronRun]
    hooked: dict[str, Tensor]
    key_values: tuple[tuple[Tensor, Tensor], ...] = ()
    later: Mapping[tuple[int, int], tuple[Residual, Residual]] = field(default_factory=dict)

    def __getitem__(self, rows: slice) -> "Recording":
        """Return a recording that holds only some of this recording's prompts."""
        return replace(
            self,
            tokens=self.tokens[rows],
            mask=None if self.mask is None else self.mask[rows],
            streams=tuple(stream[rows] for stream in self.streams),
            logits=self.logits[rows],
            neurons={
                layer: NeuronRun(x.z[rows], tuple(gate[rows] for gate in x.gates))
                for layer, x in self.neurons.items()
            },
            hooked={name: value[rows] for name, value in self.hooked.items()},
            key_values=tuple((keys[rows], values[rows]) for keys, values in self.key_values),
            later={key: (x[rows], unedited[rows]) for key, (x, unedited) in self.later.items()},
        )


@dataclass(frozen=True, eq=False)
class RunPair:
    """Two runs of a model, with the metric of every prompt in each run."""

    pair: PromptPair
    clean: Recording
    corrupted: Recording
    metric: BoundMetric
    clean_values: Float[Tensor, "prompt"]
    corrupted_values: Float[Tensor, "prompt"]

    @property
    def clean_value(self) -> float:
        """The metric's mean over all prompts in the clean run."""
        return self.metric.mean(self.clean_values).item()

    @property
    def corrupted_value(self) -> float:
        """The metric's mean over all prompts in the corrupted run."""
        return self.metric.mean(self.corrupted_values).item()

    def target(self, direction: str) -> tuple[Recording, Recording, Float[Tensor, "prompt"]]:
        """Return the run to patch, the run that patches come from, and the patched run's metric."""
        if direction == "denoise":
            return self.corrupted, self.clean, self.corrupted_values
        return self.clean, self.corrupted, self.clean_values


def record(
    model: Any,
    tokens: Tokens,
    mask: Int[Tensor, "batch pos"] | None,
    *,
    layers: Iterable[int] = (),
    names: Iterable[str] = (),
    gates: bool = True,
    hooks: Hooks = (),
    keep_graph: bool = False,
    keep_key_values: bool = False,
) -> Recording:
    """Run a model once, and record activations."""
    seen: dict[str, Tensor] = {}
    caches: list[Cache] = []
    later: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    points = _POINTS if gates else ("z",)
    neuron_names = {
        layer: [host_of(model).hook_name(layer, "neuron", point) for point in points]
        for layer in sorted(set(layers))
    }
    names = set(names)
    every_name = sorted(names.union(*neuron_names.values()))

    def keep(value: Tensor, hook: Any, name: str) -> None:
        seen[name] = value.detach().clone()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Cache))

    def look_later(module: nn.Module, args: Any, output: Any) -> None:
        written = host_of(model).passing.values[LATER_WRITES].written
        later.update({key: (x.detach(), y.detach()) for key, (x, y) in written.items()})

    keepers = [(name, partial(keep, name=name)) for name in every_name]
    with ExitStack() as stack:
        streams, extra_outputs = stack.enter_context(record_streams(model))
        stack.enter_context(torch.set_grad_enabled(keep_graph))
        if keep_key_values:
            look_here = of_this_thread(look)
            handle = model.blocks[-1].register_forward_pre_hook(look_here, with_kwargs=True)
            stack.callback(handle.remove)
        if has_neuron_heads(model) and host_of(model).writes_later:
            stack.enter_context(model.blocks[-1].register_forward_hook(of_this_thread(look_later)))
        logits = run(model, tokens, mask, [*hooks, *keepers])  # edits come first
    require_seen({name: name for name in every_name}, seen)
    neurons = {}
    for layer, of_layer in neuron_names.items():
        z, *both = (seen[name] for name in of_layer)
        v_and_weight = (both[0].squeeze(-1), both[1][..., SELF].transpose(1, 2)) if gates else ()
        neurons[layer] = NeuronRun(z.squeeze(-1), v_and_weight)
    hooked = {name: seen[name] for name in sorted(names)}
    outputs = tuple(streams), tuple(extra_outputs), logits
    key_values = keys_and_values(caches[0], tokens) if caches else ()
    recording = Recording(tokens, mask, *outputs, neurons, hooked, key_values, later)
    require_finite(model, recording)
    return recording


@torch.no_grad()
def require_finite(model: Any, recording: Recording, *, padding: bool = False) -> None:
    """Raise InputError if a run has nan or inf at real tokens or, if `padding`, at any token."""
    device, mask = recording.tokens.device, recording.mask
    tokens = [x.isfinite().all(-1) for x in recording.streams]
    # The logits of tokens that a model never predicts may be -∞.
    tokens.append(recording.logits.amax(-1).isfinite())
    finite = torch.stack([x.to(device) for x in tokens])
    if (finite if padding or mask is None else finite | (mask == 0)).all():
        return
    first = int((~finite).flatten(1).any(1).int().argmax())
    place = f"blocks.{first - 1}.hook_resid_post" if first else "blocks.0.hook_resid_pre"
    place = "the logits" if first == len(recording.streams) else place
    if mask is None or bool(mask.all()):  # nan at padding may be harmless
        place = _first_not_finite(model, recording) or place
    n_runs = int((~finite[first]).any(1).sum())
    dtype = recording.logits.dtype
    advice = ""
    if dtype in (torch.float16, torch.bfloat16):
        advice = ": numbers may be too large for it; load the model in float32"
    elif mask is not None and not bool(mask.all()):
        advice = (
            ": in float64, the attention of many transformers models returns nan for padding that "
            "can attend to no real token (on the left, or on the right if it is longer than a "
            "sliding window); use float32, or prompts of one length"
        )
    reason = (
        f"the model itself computes nan or inf in {dtype}, first at {place}, in {n_runs} of "
        f"{len(recording.tokens)} runs{advice}"
    )
    raise InputError([reason], "this run is not finite")


def _first_not_finite(model: Any, recording: Recording) -> str | None:
    """Run a model again; return the first hook point with values that are not finite."""
    names = list[str]()

    def look(point: nn.Module, args: Any, output: Any, *, name: str) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            names.append(name)

    with ExitStack() as stack:
        for name, point in model.hook_dict.items():
            if not name.endswith("hook_attn_scores"):  # -∞ where a token is masked
                hook = of_this_thread(partial(look, name=name))
                stack.enter_context(point.register_forward_hook(hook))
        run(model, recording.tokens, recording.mask)
    return names[0] if names else None


@contextmanager
def float32_runs(model: Any, pair: PromptPair) -> Iterator[None]:
    """Context manager that runs a half-precision model in float32 (see `float32_weights`).

    It raises InputError if the model's own runs, in half precision, have nan or inf.
    """
    if next(model.parameters()).dtype in HALF:
        for tokens in {id(side): side for side in (pair.clean, pair.corrupted)}.values():
            for rows in torch.arange(len(tokens), device=tokens.device).split(_CHECKED_AT_ONCE):
                record(model, tokens[rows], None if pair.mask is None else pair.mask[rows])
    with float32_weights(model):
        yield


def keys_and_values(cache: Cache, tokens: Tokens) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return each block's keys and values from a cache, or () if the cache is incomplete."""
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    shapes = {x.keys.shape[::2] for x in layers if x.is_initialized and x.keys is not None}
    if len(layers) < len(cache.layers) or shapes != {tokens.shape}:
        return ()
    return tuple((layer.keys.detach(), layer.values.detach()) for layer in layers)


def record_again(model: Any, recording: Recording) -> Recording:
    """Run a model again on a recording's prompts, and record the same activations."""
    return record(
        *(model, recording.tokens, recording.mask),
        layers=recording.neurons,
        names=recording.hooked,
        gates=any(layer.gates for layer in recording.neurons.values()),
        keep_key_values=bool(recording.key_values),
    )


def record_pair(
    model: Any,
    pair: PromptPair,
    metric: AnyMetric,
    sites: Sequence[LayerSites],
    part: Part,
    *,
    names: Sequence[str] = (),
    gates: bool = False,
    traced: Side | None = None,
    hooks: Hooks = (),
    distinct: bool = True,
) -> RunPair:
    """Record the clean and the corrupted run at the sites, and compute the metric of both runs."""
    layers = [site.layer for site in sites if site.kind in NEURON_KINDS]
    others = [site for site in sites if site.kind not in NEURON_KINDS]
    hook_names = {site: hook_name(model, site.layer, part, site.kind) for site in others}
    z = [hook_name(model, site.layer, "z") for site in others if part in SHARED_PARTS]

    options: dict[str, Any] = {
        "layers": layers,
        "names": [*hook_names.values(), *z, *names],
        "gates": gates or part != "z",
        "keep_key_values": True,
    }

    def record_side(side: Side) -> Recording:
        trace: dict[str, Any] = {"hooks": hooks, "keep_graph": True} if side == traced else {}
        return record(model, getattr(pair, side), pair.mask, **options, **trace)

    both = None
    if traced is None:
        both = _kept_recordings(model, pair, options) or _record_both(model, pair, options)
    if both is not None:
        clean, corrupted = both
    else:
        clean = record_side("clean")
        corrupted = clean if pair.corrupted is pair.clean else record_side("corrupted")
    _require_heads(model, hook_names, part, clean)
    return run_pair(model, pair, clean, corrupted, metric, distinct=distinct)


def _record_both(
    model: Any, pair: PromptPair, options: dict[str, Any]
) -> tuple[Recording, Recording] | None:
    """Record both runs in one forward pass if this is faster and does not change activations."""
    n = len(pair.clean)
    if pair.corrupted is pair.clean or pair.clean.numel() > _FEW_TOKENS // 2:
        return None
    both = record(model, *pair.together, **options)
    if any(len(value) != 2 * n for value in both.hooked.values()):
        return None
    return _if_equal_before_change(model, pair, both[:n], both[n:])


def _kept_recordings(
    model: Any, pair: PromptPair, options: dict[str, Any]
) -> tuple[Recording, Recording] | None:
    """Return both runs if they are kept with the wanted activations and in the model's dtype."""
    known = None if options["gates"] else kept_runs(model, pair)
    if known is None or not known.recording.hooked.keys() >= {*options["names"]}:
        return None
    # Conversions to float32 are skipped in kept runs of float64 models.
    if next(model.parameters()).dtype != torch.float32:
        return None
    return _if_equal_before_change(model, pair, *known.recordings())


def _if_equal_before_change(
    model: Any, pair: PromptPair, clean: Recording, corrupted: Recording
) -> tuple[Recording, Recording] | None:
    """Return two runs of one batch if they are equal before the first token that differs."""
    # In one batch, a matrix product may round equal rows differently. Patches of activations that
    # are equal in both runs would then seem to have an effect.
    first = int((pair.clean != pair.corrupted).any(dim=0).int().argmax())
    same = torch.equal(clean.streams[-1][:, :first], corrupted.streams[-1][:, :first])
    causal = getattr(model.cfg, "attention_dir", "causal") == "causal"
    return (clean, corrupted) if same or not causal else None


def run_pair(
    model: Any,
    pair: PromptPair,
    clean: Recording,
    corrupted: Recording,
    metric: AnyMetric,
    *,
    distinct: bool = True,
) -> RunPair:
    """Return both runs' recordings (cached activations), with the metric of each run."""
    bound = bind(metric, model, pair, reference=clean.logits.detach())
    values = bound.of_run(clean.logits)
    if len(as_metric(metric).answers) == 2:
        _warn_of_wrong_answers(pair, bound.name, values)
    zeros = torch.zeros_like(values)
    corrupted_values = zeros if corrupted is clean else bound.of_run(corrupted.logits)
    runs = RunPair(pair, clean, corrupted, bound, values, corrupted_values)
    if distinct:
        require_distinct(runs.clean_value, runs.corrupted_value, clean.logits.dtype)
    return runs


def _warn_of_wrong_answers(pair: PromptPair, metric: str, values: Float[Tensor, "prompt"]) -> None:
    """Warn if the model prefers the wrong answer on most clean prompts of the whole analysis."""
    prompts, n = pair.select(range(pair.n_all)), pair.n_all
    wrong = {prompts[row] for row in (values < 0).nonzero()[:, 0].tolist()}
    if pair.among is not None:  # add the prompts of earlier chunks
        wrong = all_in_this_call((metric, n), wrong)
    if 2 * len(wrong) > n:
        reason = preference(WRONG, "for most pairs, " * (n > 1))
        warn({WRONG: f"{reason}, or swap the answers"}, metric)


def _require_heads(model: Any, names: dict[LayerSites, str], part: Part, run: Recording) -> None:
    """Raise an error if recorded activations have no axis for heads or groups of heads."""
    reasons = []
    for site, name in names.items():
        shape, n_heads = run.hooked[name].shape, host_of(model).count(site.layer, site.kind)
        n_shown = shape[1 if part == "pattern" else 2] if len(shape) == 4 else 0
        grouped = part in SHARED_PARTS and n_shown and n_heads % n_shown == 0
        if n_shown != n_heads and not grouped:
            reasons.append(
                f"{name} has shape {list(shape)}; expected an axis of {n_heads} heads"
                + ", or of groups of heads" * (part in SHARED_PARTS)
                + "; patch z instead"
            )
    InputError.raise_if(reasons, "these heads cannot be patched one by one")


def require_seen(expected: dict[str, str], seen: Container[str]) -> None:
    """Raise an error if a forward pass did not run the modules with the expected hook points."""
    silent = [name for key, name in expected.items() if key not in seen]
    if silent:
        more = f" and {len(silent) - 3} more" * (len(silent) > 3)
        reason = (
            f"{', '.join(silent[:3])}{more} did not fire in a forward pass: the model does not run "
            "the module with this hook point"
        )
        raise UnsupportedModelError([reason], "these heads cannot be recorded")


def run(
    model: Any,
    tokens: Tokens,
    mask: Int[Tensor, "batch pos"] | None,
    hooks: Hooks = (),
    **kwargs: Any,
) -> Float[Tensor, "batch pos d_vocab"]:
    with _hooked(model, hooks) if hooks else nullcontext():
        logits: Tensor = model(tokens, attention_mask=mask, return_type="logits", **kwargs)
    return logits


@contextmanager
def _hooked(model: Any, hooks: Hooks) -> Iterator[None]:
    """Context manager that adds hooks for runs in the current thread.

    `model.hooks` takes as long as a short forward pass on a bridge, where it collects all aliases.
    """
    points, added = model.hook_dict, list[tuple[HookPoint, LensHandle]]()
    try:
        for name, hook in hooks:
            points[name].add_hook(of_this_thread(hook))
            added.append((points[name], points[name].fwd_hooks[-1]))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that acts only in forward passes that run in the current thread."""
    thread = threading.get_ident()

    def act(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return act


class StopForward(Exception):
    """An exception that stops a forward pass when its remaining results are not needed."""


def run_blocks(
    model: Any,
    tokens: Tokens,
    mask: Int[Tensor, "batch pos"] | None,
    hooks: Hooks = (),
    **kwargs: Any,
) -> None:
    """Run a model with hooks up to its last block's output, without computing logits."""

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise StopForward

    with suppress(StopForward), model.blocks[-1].register_forward_hook(of_this_thread(stop)):
        run(model, tokens, mask, hooks, **kwargs)


@contextmanager
def record_streams(model: Any) -> Iterator[tuple[list[Residual], list[int | None]]]:
    """Yield the lists `streams` and `extra_outputs` of a `Recording`, which the next run fills."""
    streams: list[Residual] = []
    extra_outputs: list[int | None] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append(input_stream(args, kwargs).detach().clone())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        extra_outputs.append(len(output) - 1 if isinstance(output, tuple | list) else None)
        if module is model.blocks[-1]:
            streams.append(output_stream(output).detach().clone())

    with ExitStack() as stack:
        for block in model.blocks:
            before = block.register_forward_pre_hook(of_this_thread(enter), with_kwargs=True)
            stack.enter_context(before)
            stack.enter_context(block.register_forward_hook(of_this_thread(leave)))
        yield streams, extra_outputs


def input_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Residual:
    """Return the residual stream that enters a block, taken from the block's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def output_stream(output: Any) -> Residual:
    """Return the residual stream, or a sublayer's output, from a module's return value."""
    stream: Residual = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(stream, Tensor):
        reason = (
            f"a block returns {a_type(stream)}; expected the residual stream, or a tuple "
            "or list that begins with it"
        )
        raise UnsupportedModelError([reason], "this model cannot be recorded")
    return stream
