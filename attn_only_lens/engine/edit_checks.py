"""Test edits before they are trusted.

A sweep runs some blocks on some positions and adds the change of a neuron's output. A hook might do
something else: a layer need not run the module that is edited, and a hook point may show a copy of
what the model reads. So before the first patch, all heads of a sweep are edited with noise in two
ways, which must agree on the output of the block: with hooks in a whole run in which each block's
input is restored, and as the sweep does it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.axes import SELF, Residual
from attn_only_lens.devices import normal_numbers, to_float64_device
from attn_only_lens.engine.edits import attention_edit, change_of_z, neuron_variants
from attn_only_lens.engine.recording import (
    Hooks,
    Recording,
    of_this_thread,
    output_stream,
    run_blocks,
)
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.sites import Part, hook_name
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_NOISE_LEVELS = (1.0, 2.0**5, 2.0**10)  # of noise, relative to the activation
_CLEAR_EFFECT = 8.0  # times the rounding of a stream: an error of that size would be seen
_VALUE_AND_Z: tuple[Part, ...] = ("value", "z")
_PROBLEM = "these hook points cannot be patched"


@torch.no_grad()
def require_same_edit(
    replay: Replay, kind: HeadKind, layers: Sequence[int], part: Part, first: int
) -> None:
    """Refuse a replay if an edit in it differs from a hook in a whole run."""
    recording, reasons = replay.recording, list[str]()
    untested, ineffective = list(layers), list[int]()
    for level in _NOISE_LEVELS:
        noise = _Noise(replay.model, kind, untested, part, first, level)
        whole = _block_outputs(replay.model, recording, noise.hooks)
        unclear, ineffective = list[int](), []
        for layer in untested:
            block = replay.host.block(layer, kind)
            expected, before = whole[block], recording.streams[block + 1]
            edit = _neuron_edit if kind == "neuron" else _attention_edit
            got = edit(replay, layer, part, first, noise)
            got = torch.cat([before[:, :first], got], dim=1)
            error, effect = (_relative_error(x, expected, recording) for x in (got, before))
            if not error <= 1.0:
                reasons.append(
                    f"layer {layer}: noise at {noise.names[layer]}, from position {first} on, "
                    f"changes the output of block {block} by {_largest(expected, before):.2g} in a "
                    f"whole run; a sweep would be off by {_largest(got, expected):.2g}. Something "
                    "unknown lies between these heads and the stream, such as a forward pass that "
                    "was replaced"
                )
            elif effect < _CLEAR_EFFECT:
                unclear.append(layer)
                if effect <= 1.0:
                    ineffective.append(layer)
        untested = unclear
        if not untested:
            break
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    if ineffective and not first:
        require_edits_read(replay.model, recording, kind, ineffective, part)


@torch.no_grad()
def require_edits_read(
    model: Any, recording: Recording, kind: HeadKind, layers: Sequence[int], part: Part
) -> None:
    """Refuse hook points that ignore edits, such as `hook_pattern` on some bridges."""
    names = {layer: hook_name(model, layer, part, kind) for layer in layers}
    other_kind = "neuron_heads()" if kind == "attention" else "heads()"
    shown: dict[str, list[Tensor]] = {}

    def look(name: str) -> Callable[[Tensor, Any], None]:
        return lambda value, hook: shown.setdefault(name, []).append(value.clone())

    def destroy(value: Tensor, hook: Any) -> Tensor:
        # Weights of zero, as of heads that were grown, pass nan on.
        return torch.full_like(value, torch.nan)

    edits: Hooks = [(name, destroy) for name in names.values()]
    looks: Hooks = []
    if part in ("q", "k"):  # the softmax of a single key is 1 for any key; the pattern shows nan
        later: tuple[Part, ...] = ("pattern", "z")
        witnesses = {
            layer: [hook_name(model, layer, point, kind) for point in later] for layer in names
        }
        looks = [(name, look(name)) for hook_names in witnesses.values() for name in hook_names]
        _block_outputs(model, recording, looks)
    outputs = _block_outputs(model, recording, [*edits, *looks])
    reasons = []
    for layer, name in names.items():
        block = host_of(model).block(layer, kind)
        read = _relative_error(outputs[block], recording.streams[block + 1], recording) > 1.0
        if part in ("q", "k"):
            read = read or not all(torch.equal(*shown[name]) for name in witnesses[layer])
        if not read:
            reasons.append(
                f"{name} shows an activation that the model does not read back, so an edit of it "
                f"has no effect; patch another part, or {other_kind} alone"
            )
    UnsupportedModelError.raise_if(reasons, _PROBLEM)


@torch.no_grad()
def require_groups(replay: Replay, layers: Sequence[int]) -> None:
    """Refuse layers in which the heads that share keys and values are not consecutive.

    The last value is set to nan; heads with a z of nan read it.
    """
    model, recording = replay.model, replay.recording
    shown: dict[str, Tensor] = {}
    n_shared: dict[str, int] = {}

    def destroy_last(value: Tensor, hook: Any, name: str) -> Tensor:
        value = value.clone()
        value[:, :, -1] = torch.nan
        n_shared[name] = value.shape[2]
        return value

    def look(value: Tensor, hook: Any, name: str) -> None:
        shown[name] = value.clone()

    names = {layer: [hook_name(model, layer, part) for part in _VALUE_AND_Z] for layer in layers}
    hooks: Hooks = [
        (name, partial(act, name=name))
        for pair in names.values()
        for name, act in zip(pair, (destroy_last, look), strict=True)
    ]
    _block_outputs(model, recording, hooks)
    reasons = []
    for layer, (v_name, z_name) in names.items():
        n_heads = replay.host.n_heads[layer]
        reading = shown[z_name].isnan().transpose(0, 2).flatten(1).any(dim=1).nonzero()[:, 0]
        expected = range(n_heads - n_heads // n_shared[v_name], n_heads)
        if reading.tolist() != list(expected):
            reasons.append(
                f"layer {layer}: its last value is read by heads {reading.tolist()}; expected "
                f"heads {list(expected)}; patch z"
            )
    UnsupportedModelError.raise_if(reasons, "its shared keys and values cannot be patched")


class _Noise:
    """Hooks that add noise at all heads of one kind in some layers; `shown` is the result."""

    def __init__(
        self,
        model: Any,
        kind: HeadKind,
        layers: Sequence[int],
        part: Part,
        first: int,
        level: float,
    ) -> None:
        self.names = {layer: hook_name(model, layer, part, kind) for layer in layers}
        self.shown: dict[str, Tensor] = {}
        self.hooks: list[tuple[str, Callable[..., Any]]] = []
        axis = 2 if part == "pattern" else 1  # of positions

        def add(value: Tensor, hook: Any, name: str) -> Tensor:
            noise = normal_numbers(value.shape).to(value)
            noise.narrow(axis, 0, first).zero_()
            finite = value[value.isfinite()]
            # Not the mean: a head that attends only to itself may have the largest finite query.
            size = float(finite.abs().median()) if finite.numel() else 0.0
            self.shown[name] = value + noise * (level * (size or 1.0))
            return self.shown[name]

        def keep(value: Tensor, hook: Any, name: str) -> None:
            self.shown[name] = value.clone()

        for layer, name in self.names.items():
            self.hooks.append((name, partial(add, name=name)))
            if kind == "neuron" and part == "q":
                pattern = hook_name(model, layer, "pattern", kind)
                self.hooks.append((pattern, partial(keep, name=pattern)))


def _block_outputs(model: Any, recording: Recording, hooks: Hooks) -> list[Residual]:
    """Return the output of each block in a run with hooks, from its recorded input."""
    outputs: list[Residual] = []

    def restore(module: nn.Module, args: Any, output: Any) -> Any:
        outputs.append(output_stream(output))
        stream = recording.streams[len(outputs)].clone()
        return (stream, *output[1:]) if isinstance(output, tuple | list) else stream

    with ExitStack() as stack:
        for block in model.blocks:
            stack.enter_context(block.register_forward_hook(of_this_thread(restore)))
        run_blocks(model, recording.tokens, recording.mask, hooks)
    return outputs


def _neuron_edit(replay: Replay, layer: int, part: Part, first: int, noise: _Noise) -> Residual:
    """Return the output of a block whose neurons have noise, as a sweep computes it."""
    heads, target = replay.host.neurons[layer], replay.recording.neurons[layer]
    read: Part = "pattern" if part == "q" else part
    shown = noise.shown[hook_name(replay.model, layer, read, "neuron")]
    if read == "pattern":
        source = replace(target, gates=(target.v, shown[..., SELF].transpose(1, 2)))
    elif read == "value":
        source = replace(target, gates=(shown.squeeze(-1), target.weight))
    else:
        source = replace(target, z=shown.squeeze(-1))
    dz = heads.head_outputs(change_of_z(target, source, part))[:, first:]
    change = dz.unflatten(-1, (-1, heads.heads_per_neuron)).sum(-1)
    variants = neuron_variants(replay, layer, first, change.to(heads.W_out.dtype) @ heads.W_out)
    if variants.block > replay.host.block(layer, "neuron"):
        return variants.stream
    return replay.block_output(variants)


def _attention_edit(replay: Replay, layer: int, part: Part, first: int, noise: _Noise) -> Residual:
    """Return the output of a block whose attention heads have noise, as a sweep computes it."""
    name, block = noise.names[layer], replay.host.block(layer, "attention")
    source = noise.shown[name]
    n_heads = source.shape[1 if part == "pattern" else 2]
    positions = torch.ones_like(replay.recording.tokens, dtype=torch.bool)[None]
    heads = torch.ones(1, n_heads, dtype=torch.bool, device=source.device)
    hook = attention_edit(source, part, heads, positions, first)
    stream = replay.recorded_stream(block, first, 1)
    return replay.block_output(Variants(block, first, stream, [(name, hook)]))


def _relative_error(a: Residual, b: Residual, recording: Recording) -> float:
    """Return the largest difference of two streams at a token, relative to the rounding there."""
    if recording.mask is not None:  # no token attends to padding, and none is patched there
        real = recording.mask.bool().to(a.device)
        a, b = a[real], b[real]
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = (to_float64_device(x.nan_to_num(0.0, 0.0, 0.0)).double() for x in (a, b))
    scale = torch.maximum(a.abs(), b.abs()).amax(-1)
    error = (a - b).abs().amax(-1)
    allowed = LOGIT_TOLERANCE[recording.logits.dtype] * scale
    return float((error / allowed).nan_to_num(0.0).max())


def _largest(a: Residual, b: Residual) -> float:
    return float((a - b).abs().max())
