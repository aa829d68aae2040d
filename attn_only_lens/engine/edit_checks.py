"""Before a patching sweep, test that its edits have the same effect as hooks in a full run.

A sweep patches many sites, each in its own copy of the run (a variant). It runs only the blocks and
positions that a patch can change, and adds the change in a neuron's output directly to the residual
stream. A hook in a full forward pass might have a different effect: a layer may not run the edited
module, or a hook point may show only a copy of an activation. Before the first patch, noise is thus
added to all heads of the sweep in two ways: by hooks in a full forward pass in which each block
gets its recorded input, and by the sweep's own computation. Both must give the same block outputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.axes import SELF, Residual
from attn_only_lens.devices import normal_numbers, to_float64_device
from attn_only_lens.engine.edits import attention_edit, change_of_z, neuron_variants
from attn_only_lens.engine.passed_tests import PassedTests
from attn_only_lens.engine.recording import (
    Hooks,
    Recording,
    of_this_thread,
    output_stream,
    run_blocks,
)
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.replay.base import stacked
from attn_only_lens.engine.sites import Part, hook_name
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_NOISE_LEVELS = (1.0, 2.0**5, 2.0**10)  # noise sizes, relative to the median absolute activation
_CLEAR_EFFECT = 8.0  # a multiple of the rounding tolerance; below it, the noise is increased
_VALUE_AND_Z: tuple[Part, ...] = ("value", "z")
_PROBLEM = "these hook points cannot be patched"


@torch.no_grad()
def require_same_edit(
    replay: Replay, kind: HeadKind, layers: Sequence[int], part: Part, first: int
) -> None:
    """Raise an error if edits in a replay do not have the same effect as hooks in a full run."""
    model, recording, reasons = replay.model, replay.recording, list[str]()
    # Only whether a replay starts at a later token changes what is computed, not at which token.
    tests = {layer: ("edit", kind, part, layer, first > 0) for layer in layers}
    untested = [x for x in layers if not replay.tested.covers(tests[x], recording)]
    if not untested:
        return
    ineffective, layers = list[int](), untested
    for level in _NOISE_LEVELS:
        names = {layer: hook_name(model, layer, part, kind) for layer in untested}
        noise = _noise(2 if part == "pattern" else 1, first, level)
        shown_part: Part = "pattern" if kind in NEURON_KINDS and part == "q" else part
        shown_names = {layer: hook_name(model, layer, shown_part, kind) for layer in untested}
        looks = {layer: [name] for layer, name in shown_names.items()}
        whole, shown = _outputs_by_layer(model, recording, names, noise, looks)
        unclear, ineffective = list[int](), []
        edit = _neuron_edit if kind in NEURON_KINDS else partial(_other_edit, kind)
        blocks = {layer: replay.host.block(layer, kind) for layer in untested}
        rows = list[tuple[int, int, Residual, Residual, Residual]]()
        if kind in NEURON_KINDS:
            heads = replay.host.neurons
            replay.test_mlp_outputs({block: heads[x].output_module for x, block in blocks.items()})
        for layer, block in blocks.items():
            changed = edit(replay, layer, part, first, shown[shown_names[layer]])
            for number, later in enumerate(changed, block):  # features may write to later blocks
                before = recording.streams[number + 1]
                edited = torch.cat([before[:, :first], later], dim=1)
                rows.append((layer, number, before, edited, whole[layer][number]))
        errors = _relative_errors(
            [(edited, expected) for *_, edited, expected in rows]
            + [(before, expected) for *_, before, _, expected in rows],
            recording,
        )
        for (layer, block, before, edited, expected), error, effect in zip(
            rows, errors[: len(rows)], errors[len(rows) :], strict=True
        ):
            if not error <= 1.0:
                reasons.append(
                    f"layer {layer}: noise at {names[layer]}, starting at position {first}, "
                    f"changes the output of block {block} by {_largest(expected, before):.2g} in a "
                    "full run; the output in a sweep would differ from this by "
                    f"{_largest(edited, expected):.2g}. "
                    "Something else, such as a replaced forward pass, changes the heads' output "
                    "before it is added to the stream"
                )
            elif effect < _CLEAR_EFFECT and block == blocks[layer]:
                unclear.append(layer)
                if effect <= 1.0:
                    ineffective.append(layer)
        untested = unclear
        if not untested:
            break
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    if ineffective and not first:
        require_edits_read(model, recording, kind, ineffective, part, replay.tested)
    for layer in set(layers) - set(untested):
        replay.tested.add(tests[layer], recording)


@torch.no_grad()
def require_edits_read(
    model: Any,
    recording: Recording,
    kind: HeadKind,
    layers: Sequence[int],
    part: Part,
    tested: PassedTests,
) -> None:
    """Raise an error if edits have no effect, such as edits of `hook_pattern` in some bridges."""
    tests = {layer: ("reads edits", kind, part, layer) for layer in layers}
    layers = [layer for layer in layers if not tested.covers(tests[layer], recording)]
    if not layers:
        return
    names = {layer: hook_name(model, layer, part, kind) for layer in layers}
    other_kind = "neurons" if kind == "attention" else "heads"
    # With a single key, every finite key gives the pattern 1. Only nan in the key changes it.
    later: tuple[Part, ...] = ("pattern", "z") if part in ("q", "k") else ()
    looks = {layer: [hook_name(model, layer, point, kind) for point in later] for layer in names}
    looked_at = list(chain(*looks.values()))
    before = _block_outputs(model, recording, (), looked_at)[1] if looked_at else {}
    outputs, after = _outputs_by_layer(model, recording, names, _destroy, looks)
    blocks = {layer: host_of(model).block(layer, kind) for layer in names}
    pairs = [(outputs[x][block], recording.streams[block + 1]) for x, block in blocks.items()]
    effects = _relative_errors(pairs, recording)
    reasons = []
    for (layer, name), effect in zip(names.items(), effects, strict=True):
        if effect <= 1.0 and all(torch.equal(before[look], after[look]) for look in looks[layer]):
            reasons.append(
                f"{name} shows only a copy, which the model does not use, so an edit has no "
                f"effect; patch another part, or only sites={other_kind!r}"
            )
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    for layer in layers:
        tested.add(tests[layer], recording)


@torch.no_grad()
def require_groups(replay: Replay, layers: Sequence[int]) -> None:
    """Raise an error if the heads that share keys and values are not consecutive in some layer.

    To test this, the last shared value is set to nan: z becomes nan in the heads that read it.
    """
    model = replay.model
    layers = [x for x in layers if not replay.tested.covers(("groups", x), replay.recording)]
    if not layers:
        return
    v_names, z_names = (
        {layer: hook_name(model, layer, part) for layer in layers} for part in _VALUE_AND_Z
    )
    looks = {layer: [v_names[layer], z_names[layer]] for layer in layers}
    _, shown = _outputs_by_layer(model, replay.recording, v_names, _destroy_last, looks)
    reasons = []
    for layer in layers:
        n_heads, n_shared = replay.host.n_heads[layer], shown[v_names[layer]].shape[2]
        z_is_nan = shown[z_names[layer]].isnan().transpose(0, 2).flatten(1).any(dim=1)
        reading = z_is_nan.nonzero()[:, 0].tolist()
        expected = list(range(n_heads - n_heads // n_shared, n_heads))
        if reading != expected:
            reasons.append(
                f"layer {layer}: heads {reading} use the last shared value; "
                f"expected heads {expected}; patch z instead"
            )
    UnsupportedModelError.raise_if(reasons, "the shared keys and values cannot be patched")
    for layer in layers:
        replay.tested.add(("groups", layer), replay.recording)


def _noise(axis: int, first: int, level: float) -> Callable[[Tensor, Any], Tensor]:
    """Return a hook that adds noise starting at position `first`; `axis` is the position axis."""

    def add(value: Tensor, hook: Any) -> Tensor:
        noise = normal_numbers(value.shape).to(value)
        noise.narrow(axis, 0, first).zero_()
        # Use the median: a mean could overflow if queries are huge.
        size = value.abs().where(value.isfinite(), torch.nan).nanmedian()
        return value + noise * (level * size.where(size > 0.0, 1.0))

    return add


def _destroy(value: Tensor, hook: Any) -> Tensor:
    # nan spreads even through zero weights, such as those of heads that growth has just added.
    return torch.full_like(value, torch.nan)


def _destroy_last(value: Tensor, hook: Any) -> Tensor:
    value = value.clone()
    value[:, :, -1] = torch.nan
    return value


def _block_outputs(
    model: Any, recording: Recording, edits: Hooks, looks: Iterable[str]
) -> tuple[list[Residual], dict[str, Tensor]]:
    """Run each block with `edits` on its recorded input; return outputs, and values at `looks`."""
    outputs: list[Residual] = []
    shown: dict[str, Tensor] = {}

    def restore(module: nn.Module, args: Any, output: Any) -> Any:
        outputs.append(output_stream(output))
        stream = recording.streams[len(outputs)].clone()
        return (stream, *output[1:]) if isinstance(output, tuple | list) else stream

    def look(value: Tensor, hook: Any, name: str) -> None:
        shown[name] = value.clone()

    hooks: Hooks = [*edits, *((name, partial(look, name=name)) for name in looks)]
    with ExitStack() as stack:
        for block in model.blocks:
            stack.enter_context(block.register_forward_hook(of_this_thread(restore)))
        run_blocks(model, recording.tokens, recording.mask, hooks)
    return outputs, shown


def _outputs_by_layer(
    model: Any,
    recording: Recording,
    names: Mapping[int, str],
    edit: Callable[[Tensor, Any], Tensor],
    looks: Mapping[int, Sequence[str]],
) -> tuple[dict[int, list[Residual]], dict[str, Tensor]]:
    """Run each block with an edit in some layers; return, for each layer, all blocks' outputs.

    One run has the edits of all layers. If features write to later layers, each layer has a run of
    its own, because the edits of earlier layers would change the outputs of later blocks.
    """
    outputs, shown = dict[int, list[Residual]](), dict[str, Tensor]()
    together = [[layer] for layer in names] if host_of(model).writes_later else [list(names)]
    for layers in together:
        edits = [(names[layer], edit) for layer in layers]
        looked_at = chain(*(looks[layer] for layer in layers))
        of_blocks, seen = _block_outputs(model, recording, edits, looked_at)
        outputs, shown = outputs | dict.fromkeys(layers, of_blocks), shown | seen
    return outputs, shown


def _neuron_edit(
    replay: Replay, layer: int, part: Part, first: int, shown: Tensor
) -> list[Residual]:
    """Compute the output of a block as a sweep does, with its neurons' activations set to `shown`.

    With a cross-layer transcoder, also return the outputs of later blocks on recorded inputs.
    """
    heads, target = replay.host.neurons[layer], replay.recording.neurons[layer]
    if part in ("q", "pattern"):
        source = replace(target, gates=(target.v, shown[..., SELF].transpose(1, 2)))
    elif part == "value":
        source = replace(target, gates=(shown.squeeze(-1), target.weight))
    else:
        source = replace(target, z=shown.squeeze(-1))
    dz = change_of_z(target, source, part)[:, first:]
    written = [dz.to(W) @ W for W in heads.decoders]
    variants = neuron_variants(replay, layer, first, written)
    own = variants.block > replay.host.block(layer, "neuron")
    outputs = [variants.stream if own else replay.block_output(variants)]
    for block, added in list(enumerate(written, layer))[1:]:
        stream, module = replay.recorded_stream(block, first, 1), replay.host.neurons[block]
        later = Variants(block, first, stream, added=[(module.output_module, added)])
        outputs.append(replay.block_output(later))
    return outputs


def _other_edit(
    kind: HeadKind, replay: Replay, layer: int, part: Part, first: int, shown: Tensor
) -> list[Residual]:
    """Compute a block's output as a sweep does, with its heads' activations set to `shown`."""
    name, block = hook_name(replay.model, layer, part, kind), replay.host.block(layer, kind)
    n_heads = shown.shape[1 if part == "pattern" else 2]
    positions = torch.ones_like(replay.recording.tokens, dtype=torch.bool)[None]
    heads = torch.ones(1, n_heads, dtype=torch.bool, device=shown.device)
    hook = attention_edit(shown, part, heads, positions, first)
    stream = replay.recorded_stream(block, first, 1)
    return [replay.block_output(Variants(block, first, stream, [(name, hook)]))]


def _relative_errors(
    pairs: Sequence[tuple[Residual, Residual]], recording: Recording
) -> list[float]:
    """Return each pair's largest difference as a multiple of the rounding tolerance."""
    errors = [_relative_error(a, b, recording) for a, b in pairs]
    return stacked(errors).tolist()


def _relative_error(a: Residual, b: Residual, recording: Recording) -> Tensor:
    if recording.mask is not None:  # patches do not change padding, and no token attends to it
        real = recording.mask.bool().to(a.device)
        a, b = a[real], b[real]
    alike = (a.isfinite() == b.isfinite()).all()
    a, b = (to_float64_device(x.nan_to_num(0.0, 0.0, 0.0)).double() for x in (a, b))
    scale = torch.maximum(a.abs(), b.abs()).amax(-1)
    error = (a - b).abs().amax(-1)
    allowed = LOGIT_TOLERANCE[recording.logits.dtype] * scale
    largest = (error / allowed).nan_to_num(0.0).max()
    return largest.where(alike.to(largest.device), torch.inf)


def _largest(a: Residual, b: Residual) -> float:
    return float((a - b).abs().max())
