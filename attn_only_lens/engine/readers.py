"""Compute heads' outputs z if their normalised input changes by δ, and nothing else changes.

`part` selects what changes; neuron-heads are single-neuron attention heads with pre-activation q:

    part          attention heads      neuron-heads
    "q"           queries              w(q') v
    "k"           keys                 w v, no change: keys do not depend on the token
    "pattern"     queries and keys     w(q') v
    "value"       values               w v', v' = q', or q' u' in a gated MLP
    "z"           all                  w(q') v'

For neuron-heads, z is computed from Δq = δ W_in or, in a gated MLP, from Δq = δ W_gate and Δu = δ
W_in for the up projection u. For attention heads, the block runs with δ added to its attention's
input; recorded queries, keys or values replace those that should not change. Both methods are
tested before their first use.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.devices import normal_numbers, read_all
from attn_only_lens.engine.edits import change_of_z
from attn_only_lens.engine.recording import NeuronRun
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.sites import LayerSites, Part
from attn_only_lens.engine.writes import (
    Decomposition,
    Positions,
    Scale,
    add_to_input,
)
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.tolerances import LOGIT_TOLERANCE

READ_PARTS = ("q", "k", "value", "pattern", "z")
_INPUTS = ("q", "k", "v")
_MOVED = {"q": "q", "k": "k", "value": "v", "pattern": "qk", "z": "qkv"}
_PROBLEM = "paths into these heads cannot be followed"


def input_hooks(host: Any, layer: int) -> tuple[str, ...]:
    """Return the hook points for the queries, keys and values of a layer's attention heads."""
    return tuple(host.hook_name(layer, "attention", point) for point in _INPUTS)


class _Stop(Exception):
    """Stop a forward pass; unlike `StopForward`, this is not caught by `Replay.block_output`."""


@dataclass(eq=False)
class Readers:
    """The outputs of a model's heads in one cached run, as functions of their normalised input.

    `decomposition` must record the `input_hooks` of each layer whose attention z is computed.
    """

    replay: Replay
    decomposition: Decomposition
    _projected: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    _joint: dict[int, bool] = field(default_factory=dict)

    @torch.no_grad()
    def neuron_change(
        self,
        sites: LayerSites,
        entering: Float[Tensor, "variant batch pos d_model"],
        part: str,
        positions: Positions = slice(None),
    ) -> Float[Tensor, "variant batch pos head_index"]:
        """Return the change in neuron-heads' z, given the change in their MLP's input."""
        heads: NeuronHeads = self.replay.host.neurons[sites.layer]
        index = sites.index.to(entering.device)
        q, up = (
            None if x is None else x[:, positions][..., index]
            for x in self._projections(sites.layer)
        )
        assert q is not None
        W_q, *W_up = heads.read_matrices
        new_up = None if up is None else up + entering @ W_up[0][:, index]
        new_q = q + entering @ W_q[:, index]
        named: Part = "pattern" if part == "q" else part  # type: ignore[assignment]
        if heads.joint_gates:  # hold gates fixed, because they depend on other features
            gates, _ = heads.weights_and_values(*self._projections(sites.layer))
            weight = gates[:, positions][..., index].expand_as(new_q)
            return change_of_z(_run_with(weight, q), _run_with(weight, new_q), named)
        before = _run_with(*heads.weights_and_values(q, up, index))
        after = _run_with(*heads.weights_and_values(new_q, new_up, index))
        return change_of_z(before, after, named)

    def _projections(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return q and u in the run; at the first call, test that W_in and W_gate compute them."""
        if layer not in self._projected:
            heads: NeuronHeads = self.replay.host.neurons[layer]
            _require_no_routing(heads, layer)
            x = self.decomposition.of(layer, "neuron").entered
            self._projected[layer] = heads.projections(x)
            test, recording = ("neurons read", layer), self.decomposition.recording
            if not self.replay.tested.covers(test, recording):
                _require_products(heads, x, self._projected[layer], layer)
                self.replay.tested.add(test, recording)
        return self._projected[layer]

    @torch.no_grad()
    def attention_z(
        self,
        layer: int,
        entering: Float[Tensor, "variant batch pos d_model"],
        part: str,
        first: int = 0,
    ) -> Float[Tensor, "variant batch pos head_index d_head"]:
        """Return attention heads' z if attention's input changes, starting at position `first`."""
        if not self._is_joint(layer):
            return self._z(layer, entering, _MOVED[part], first)
        heads = range(self.replay.host.n_heads[layer])
        z = [self._z(layer, entering, _MOVED[part], first, head)[:, :, :, head] for head in heads]
        return torch.stack(z, dim=3)

    def _z(
        self, layer: int, entering: Tensor, moved: str, first: int, head: int | None = None
    ) -> Tensor:
        """Return z if only the inputs named in `moved` change, for one head or for all heads."""
        replay, n = self.replay, len(entering)
        block, n_heads = replay.host.block(layer, "attention"), replay.host.n_heads[layer]
        outputs: list[Tensor] = []

        def restore(name: str, point: str) -> Callable[[Tensor, Any], Tensor]:
            def hook(value: Tensor, hook: Any) -> Tensor:
                recorded = self.decomposition.recording.hooked[name][:, first:].repeat(n, 1, 1, 1)
                if point in moved and head is not None:
                    shared_head = head * value.shape[2] // n_heads
                    recorded[:, :, shared_head] = value[:, :, shared_head]
                return recorded

            return hook

        def keep(value: Tensor, hook: Any) -> None:
            outputs.append(value.clone())
            raise _Stop

        names = dict(zip(_INPUTS, input_hooks(replay.host, layer), strict=True))
        hooks: list[tuple[str, Callable[..., Any]]] = [
            (name, restore(name, point))
            for point, name in names.items()
            if point not in moved or head is not None
        ]
        hooks.append((replay.host.hook_name(layer, "attention", "z"), keep))
        variants = Variants(block, first, replay.recorded_stream(block, first, n), hooks)
        with (
            suppress(_Stop),
            add_to_input(replay.host.attention(layer), entering.flatten(0, 1)),
        ):
            replay.block_output(variants)
        return outputs[0].unflatten(0, (n, -1))

    @torch.no_grad()
    def values_at_end(
        self, change: Float[Tensor, "variant batch pos d_model"], first: int, scale: Scale
    ) -> Float[Tensor, "variant prompt"]:
        """Return each prompt's metric if the final stream changes, starting at position `first`."""
        replay, final, n = self.replay, self.decomposition.final, len(change)
        stream = replay.recorded_stream(replay.n_blocks, first, n)
        if scale == "anew" or final.norm.module is None:
            moved = stream + change.flatten(0, 1).to(stream.device)
            return replay.values(Variants(replay.n_blocks, first, moved))
        more = final.at(slice(first, None)).change(change).flatten(0, 1)
        positions = replay.metric.positions

        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if positions is None or output.shape[1] == more.shape[1]:
                return output + more
            rows = torch.arange(
                len(more), device=more.device
            )  # the output holds only the token that the metric reads
            return output + more[rows, (positions.to(more.device) - first).repeat(n)].unsqueeze(1)

        with final.norm.module.register_forward_hook(add):
            return replay.values(Variants(replay.n_blocks, first, stream))

    def _is_joint(self, layer: int) -> bool:
        """Return whether a head's inputs affect other heads, for example through a shared norm.

        This also tests that noise in the input reaches z only through queries, keys and values.
        """
        test, recording = ("heads read alone", layer), self.decomposition.recording
        if layer not in self._joint and self.replay.tested.covers(test, recording):
            self._joint[layer] = False
        if layer not in self._joint:
            self._joint[layer] = self._test_heads(layer)
            if not self._joint[layer]:
                self.replay.tested.add(test, recording)
        return self._joint[layer]

    def _test_heads(self, layer: int) -> bool:
        sublayer, mask = (
            self.decomposition.of(layer, "attention"),
            self.decomposition.recording.mask,
        )
        noise = _noise(sublayer.entered)[None]
        runs = [self._z(layer, noise, part, 0)[0] for part in ("", "qkv")]
        runs += [self._z(layer, noise, "qkv", 0, head=0)[0], sublayer.z]
        kept, moved, alone, z = (x if mask is None else x[mask.bool().to(x.device)] for x in runs)
        differences = (kept - z, moved - z, (alone - moved)[..., 0, :], sublayer.z)
        depends, effect, of_others, size = read_all([x.abs().max() for x in differences])
        allowed = LOGIT_TOLERANCE[z.dtype] * size
        if not depends <= allowed:
            reason = (
                f"layer {layer}: attention's output depends on its input even with fixed queries, "
                "keys and values, so it does not use those at the hook points"
            )
            raise UnsupportedModelError([reason], _PROBLEM)
        # Zero weights, as in compiled programs, stop noise in the input, but let nan through.
        hidden = not effect > allowed
        if hidden and not self._z(layer, noise * torch.nan, "qkv", 0).isnan().any():
            reason = f"layer {layer}: a change of attention's input does not reach the heads"
            raise UnsupportedModelError([reason], _PROBLEM)
        return not of_others <= allowed


def _require_no_routing(heads: NeuronHeads, layer: int) -> None:
    """Raise an error for a mixture of experts, whose routing weights depend on the input, too."""
    if heads.experts[0]:
        reason = (
            f"layer {layer} is a mixture of experts: the values of its neurons have routing "
            "weights as factors, which depend on the input, too; choose attention heads, or the "
            "logits, as receivers"
        )
        raise UnsupportedModelError([reason], _PROBLEM)


def _require_products(
    heads: NeuronHeads, x: Tensor, projected: tuple[Tensor, Tensor | None], layer: int
) -> None:
    """Raise an error if an MLP does not multiply its input by W_in (and W_gate, if gated)."""
    noise = _noise(x)
    befores, afters = (
        [y for y in pair if y is not None] for pair in (projected, heads.projections(x + noise))
    )
    numbers = [
        number.abs().max()
        for W, before, after in zip(heads.read_matrices, befores, afters, strict=True)
        for number in (before + noise @ W - after, after)
    ]
    errors = read_all(numbers)
    for error, size in zip(errors[::2], errors[1::2], strict=True):
        if not error <= LOGIT_TOLERANCE[x.dtype] * size:
            reason = f"the MLP of layer {layer} does not multiply its input by its W_in"
            raise UnsupportedModelError([reason], _PROBLEM)


def _noise(x: Tensor) -> Tensor:
    """Return Gaussian noise with the shape and the standard deviation of x."""
    return normal_numbers(x.shape).to(x) * (x.std() if x.numel() > 1 else 1.0)


def _run_with(weight: Tensor, v: Tensor) -> NeuronRun:
    return NeuronRun(weight * v, (v, weight))
