"""Edits, tried before they are trusted.

A sweep does not put a hook on a model and run it for every patch. It runs some blocks on some
positions, and adds what a neuron would write. That this does what a hook would is no matter of
course: a layer may not run the module that is edited, a hook point may show a copy of what the
model reads, and anybody may have put something in between. So it is tried on the model and the run
at hand, before the first patch. All heads of every layer of a sweep are moved by noise, by hooks
and as the sweep does it, and what leaves the block has to be the same:

    by hooks      a whole run. Each block is entered by what is on record, whatever the block before
                  puts out, so that one run shows what an edit does in every layer, and there alone
    as a sweep    each of those blocks once

for all positions, and again from a position on, if the sweep leaves earlier ones out. So a kind of
heads costs four forward passes at most. An edit without any effect is told from one that weights of
zero hide by what is not a number, which these hand on.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.axes import SELF, Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.numerics import normal_numbers, where_float64_is
from attn_only_lens.runs.edits import Part, editing, hook_name, moved, writing
from attn_only_lens.runs.recording import Hooks, Recording, returned_stream, run
from attn_only_lens.runs.replay import Replay, Variants
from attn_only_lens.tolerances import LOGIT_TOLERANCE

__all__ = ["require_read", "require_same"]

_LOUDNESS = (1.0, 2.0**5, 2.0**10)  # of noise, beside what a hook point shows
_FELT = 8.0  # times what rounding may make of a stream: then a difference would be, too
_PROBLEM = "these hook points cannot be patched"


@torch.no_grad()
def require_same(
    replay: Replay, kind: HeadKind, layers: Sequence[int], part: Part, first: int
) -> None:
    """Refuse a replay in which an edit does something else than a hook in a whole run.

    Args:
        replay: to be trusted.
        kind: of the heads that are edited.
        layers: source layers.
        part: what of a head is edited.
        first: the position from which on it is edited, and the replay runs.

    Raises:
        UnsupportedModelError: with every layer in which it does, or in which an edit has no effect.
    """
    recording, reasons = replay.recording, list[str]()
    left, unfelt = list(layers), list[int]()
    for loudness in _LOUDNESS:
        noise = _Noise(replay.model, kind, left, part, first, loudness)
        whole = _leaving(replay.model, recording, noise.hooks)
        quiet, unfelt = list[int](), []
        for layer in left:
            block = replay.host.block(layer, kind)
            theirs, before = whole[block], recording.streams[block + 1]
            edit = _written if kind == "neuron" else _attended
            mine = edit(replay, layer, part, first, noise)
            mine = torch.cat([before[:, :first], mine], dim=1)
            off, felt = (_beyond(one, theirs, recording) for one in (mine, before))
            if not off <= 1.0:
                reasons.append(
                    f"layer {layer}: noise at {noise.names[layer]}, from position {first} on, "
                    f"moves what leaves block {block} by {_most(theirs, before):.2g} in a whole "
                    f"run; in a sweep that would be {_most(mine, theirs):.2g} off. Something "
                    "between these heads and the stream is not known, such as a forward pass that "
                    "was replaced"
                )
            elif felt < _FELT:
                quiet.append(layer)
                if felt <= 1.0:
                    unfelt.append(layer)
        left = quiet
        if not left:
            break
    if reasons:
        raise UnsupportedModelError(reasons, _PROBLEM)
    if unfelt and not first:
        require_read(replay.model, recording, kind, unfelt, part)


@torch.no_grad()
def require_read(
    model: Any, recording: Recording, kind: HeadKind, layers: Sequence[int], part: Part
) -> None:
    """Refuse hook points that show activations and take no edits.

    Some bridges compute attention beside their `hook_pattern`: patches there would change nothing,
    and every score be 0.

    Args:
        model: converted, or with exposed neuron-heads.
        recording: a run of it.
        kind: of the heads.
        layers: source layers.
        part: what of a head is to be edited.

    Raises:
        UnsupportedModelError: with every such hook point.
    """
    names = {layer: hook_name(model, layer, part, kind) for layer in layers}
    other = "neuron_heads()" if kind == "attention" else "heads()"
    shown: dict[str, list[Tensor]] = {}

    def look(name: str) -> Callable[[Tensor, Any], None]:
        return lambda value, hook: shown.setdefault(name, []).append(value.clone())

    def nothing(value: Tensor, hook: Any) -> Tensor:
        # Not a number, which weights of zero hand on as well: heads that were grown write nothing.
        return torch.full_like(value, torch.nan)

    edits: Hooks = [(name, nothing) for name in names.values()]
    looks: Hooks = []
    if part == "q":  # of one key, a softmax makes 1 whatever the query; this shows in the pattern
        beside: tuple[Part, ...] = ("pattern", "z")
        witnesses = {layer: [hook_name(model, layer, at, kind) for at in beside] for layer in names}
        looks = [(name, look(name)) for each in witnesses.values() for name in each]
        _leaving(model, recording, looks)
    found = _leaving(model, recording, [*edits, *looks])
    reasons = []
    for layer, name in names.items():
        block = host_of(model).block(layer, kind)
        felt = _beyond(found[block], recording.streams[block + 1], recording) > 1.0
        if part == "q":
            felt = felt or not all(torch.equal(*shown[at]) for at in witnesses[layer])
        if not felt:
            reasons.append(
                f"{name} shows an activation that the model does not read back, so an edit of it "
                f"has no effect; patch another part, or {other} alone"
            )
    if reasons:
        raise UnsupportedModelError(reasons, _PROBLEM)


class _Noise:
    """Hooks that add noise at all heads of one kind in some layers.

    Attributes:
        names: of the hook points that are edited, by layer.
        shown: what hook points then show, by name.
    """

    def __init__(
        self,
        model: Any,
        kind: HeadKind,
        layers: Sequence[int],
        part: Part,
        first: int,
        loudness: float,
    ) -> None:
        self.names = {layer: hook_name(model, layer, part, kind) for layer in layers}
        self.shown: dict[str, Tensor] = {}
        self.hooks: list[tuple[str, Callable[..., Any]]] = []
        axis = 2 if part == "pattern" else 1  # of positions

        def add(value: Tensor, name: str) -> Tensor:
            moved = normal_numbers(value.shape).to(value)
            moved.narrow(axis, 0, first).zero_()
            finite = value[value.isfinite()]
            # Not the mean: a head that sees itself alone has the largest query that there is.
            size = float(finite.abs().median()) if finite.numel() else 0.0
            self.shown[name] = value + moved * (loudness * (size or 1.0))
            return self.shown[name]

        def keep(value: Tensor, name: str) -> None:
            self.shown[name] = value.clone()

        def hook(act: Callable[[Tensor, str], Any], name: str) -> None:
            self.hooks.append((name, lambda value, hook: act(value, name)))

        for layer, name in self.names.items():
            hook(add, name)
            if kind == "neuron" and part == "q":
                hook(keep, hook_name(model, layer, "pattern", kind))


def _leaving(model: Any, recording: Recording, hooks: Hooks) -> list[Residual]:
    """What leaves each block in a whole run with hooks, each entered by what is on record."""
    found: list[Residual] = []

    def restore(module: nn.Module, args: Any, output: Any) -> Any:
        found.append(returned_stream(output))
        stream = recording.streams[len(found)].clone()
        return (stream, *output[1:]) if isinstance(output, tuple | list) else stream

    with ExitStack() as stack:
        for block in model.blocks:
            stack.callback(block.register_forward_hook(restore).remove)
        run(model, recording.tokens, recording.mask, hooks)
    return found


def _written(replay: Replay, layer: int, part: Part, first: int, noise: _Noise) -> Residual:
    """What leaves the block when its neurons write what noise makes of them, as a sweep has it."""
    heads, target = replay.host.neurons[layer], replay.recording.neurons[layer]
    read: Part = "pattern" if part == "q" else part
    shown = noise.shown[hook_name(replay.model, layer, read, "neuron")]
    if read == "pattern":
        source = replace(target, weight=shown[..., SELF].transpose(1, 2))
    elif read == "value":
        source = replace(target, v=shown.squeeze(-1))
    else:
        source = replace(target, z=shown.squeeze(-1))
    dz = heads.shares(moved(target, source, part))[:, first:]
    change = dz.unflatten(-1, (-1, heads.heads_per_neuron)).sum(-1)
    variants = writing(replay, layer, first, change.to(heads.directions.dtype) @ heads.directions)
    if variants.block > replay.host.block(layer, "neuron"):
        return variants.entering
    return replay.leaving(variants)


def _attended(replay: Replay, layer: int, part: Part, first: int, noise: _Noise) -> Residual:
    """What leaves the block when all its attention heads are patched, as a sweep has it."""
    name, block = noise.names[layer], replay.host.block(layer, "attention")
    source = noise.shown[name]
    n_heads = source.shape[1 if part == "pattern" else 2]
    everywhere = torch.ones_like(replay.recording.tokens, dtype=torch.bool)
    every = torch.ones(1, n_heads, dtype=torch.bool, device=source.device)
    hook = editing(source, part, every, everywhere[None], first)
    entering = replay.unchanged(block, first, 1)
    return replay.leaving(Variants(block, first, entering, [(name, hook)]))


def _beyond(one: Residual, other: Residual, recording: Recording) -> float:
    """The largest difference of two streams at a token, over what rounding may make there."""
    if recording.mask is not None:  # nothing is patched at padding, and none attends to it
        real = recording.mask.bool()
        one, other = one[real], other[real]
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (
        where_float64_is(each.nan_to_num(0.0, 0.0, 0.0)).double() for each in (one, other)
    )
    scale = torch.maximum(one.abs(), other.abs()).amax(-1)
    error = (one - other).abs().amax(-1)
    allowed = LOGIT_TOLERANCE[recording.logits.dtype] * scale
    return float((error / allowed).nan_to_num(0.0).max())


def _most(one: Residual, other: Residual) -> float:
    return float((one - other).abs().max())
