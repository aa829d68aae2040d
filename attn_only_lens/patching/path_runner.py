"""Patch the paths of a path block into one run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.devices import added
from attn_only_lens.engine.edits import neuron_variants, writes_of
from attn_only_lens.engine.readers import Readers
from attn_only_lens.engine.replay import Variants
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.writes import Decomposition, Scale
from attn_only_lens.heads.host import NEURON_KINDS
from attn_only_lens.patching.path_blocks import PathBlock, take
from attn_only_lens.patching.run_patches import Batching


@dataclass(eq=False)
class PathRunner:
    """Patches paths into one run. `baseline` is each prompt's metric before any patch."""

    readers: Readers
    source: Decomposition
    part: str
    scale: Scale
    baseline: Float[Tensor, "prompt"]
    batching: Batching

    def __post_init__(self) -> None:
        self.replay, self.target = self.readers.replay, self.readers.decomposition

    @torch.no_grad()
    def values(
        self, block: PathBlock, i: Int[Tensor, "path"], j: Int[Tensor, "path"]
    ) -> Float[Tensor, "path prompt"]:
        """Return the metric of each prompt after a patch of each path, from sender i to receiver j.

        If a path cannot affect the metric, its value is the baseline, and no forward pass is run.
        """
        values = self.baseline.repeat(len(i), 1)
        if not block.positions.chosen.any():  # none of these prompts has these positions
            self.batching.on_done(len(i))
            return values
        senders, i = i.unique(return_inverse=True)
        receivers, j = j.unique(return_inverse=True)
        block = replace(
            block,
            senders=take(block.senders, senders),
            receivers=None if block.receivers is None else take(block.receivers, receivers),
        )
        last = block.receivers or block.senders
        device = self.target.of(last.layer, last.kind).z.device
        if block.receivers is None:
            self._run_to_logits(block, i.to(device), values)
        elif block.receivers.kind in NEURON_KINDS:
            self._run_neurons(block, block.receivers, i.to(device), j.to(device), values)
        else:
            self._run_attention(block, block.receivers, i.to(device), j.to(device), values)
        return values

    def _fill(
        self,
        values: Float[Tensor, "path prompt"],
        changed: Bool[Tensor, "path batch some"],
        positions: Int[Tensor, "some"],
        block: int,
        run: Callable[[Tensor, int], Tensor],
    ) -> None:
        """Fill in the metric after each patch, running only paths that can affect the metric."""
        replay = self.replay
        effective = replay.effective(changed, block, positions)
        moving, first = effective.flatten(1).any(1), 0
        if moving.any():
            first = replay.start(block, int(positions[changed[moving].any(dim=0).any(dim=0)][0]))
        rows = moving.nonzero()[:, 0].cpu()
        self.batching.on_done(len(values) - len(rows))
        numbers = replay.numbers_per_variant(first)
        self.batching.fill(values, rows, numbers, lambda batch: run(batch, first))

    def _sent(self, block: PathBlock, positions: Any) -> Float[Tensor, "sender batch pos d_model"]:
        """Return each sender's output in the source run minus its output in the target run."""
        layer, kind = block.senders.layer, block.senders.kind
        if isinstance(positions, Tensor):
            positions = positions.to(self.target.of(layer, kind).z.device)
        source, target = (
            self._read_writes(run, block, positions) for run in (self.source, self.target)
        )
        chosen = block.positions.chosen.to(target.device)[:, positions]
        return (source - target) * chosen.unsqueeze(-1)

    def _read_writes(
        self, run: Decomposition, block: PathBlock, positions: Any
    ) -> Float[Tensor, "sender batch pos d_model"]:
        """Return what the senders write to the stream that the receivers read."""
        senders, receivers = block.senders, block.receivers
        before = run.sublayers
        if receivers is not None:
            before = run.before(receivers.layer, receivers.kind)
        parts = run.parts_before(run.of(senders.layer, senders.kind), len(before))
        return added(x.written(senders, positions) for x in parts)

    def _run_to_logits(self, block: PathBlock, i: Tensor, values: Tensor) -> None:
        sent = self._sent(block, slice(None))[i]
        everywhere = torch.arange(self.replay.n_pos, device=sent.device)

        def run(some: Tensor, first: int) -> Tensor:
            return self.readers.values_at_end(sent[some, :, first:], first, self.scale)

        self._fill(values, (sent != 0).any(-1), everywhere, self.replay.n_blocks, run)

    def neuron_dz(
        self, block: PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "row pos head_index"], Int[Tensor, "pos"]]:
        """Return how each sender changes the receivers' z, and the positions of the changes."""
        assert block.receiving is not None
        neuron_run = self.target.of(receivers.layer, "neuron")
        chosen = (block.positions.chosen & block.receiving.chosen).to(neuron_run.z.device)
        columns = chosen.any(dim=0).nonzero()[:, 0]
        reads = neuron_run.reads.at(columns)
        entering = reads.change(self._sent(block, columns), self.scale)
        change = self.readers.neuron_change(receivers, entering, self.part, columns)
        change = change * chosen[:, columns, None]
        return change.flatten(0, 1), columns

    def _run_neurons(
        self, block: PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay = self.replay
        heads = replay.host.neurons[receivers.layer]
        dz, columns = self.neuron_dz(block, receivers)
        moves = dz.permute(2, 0, 1).unflatten(1, (-1, replay.batch))[j, i]
        block_number = replay.host.block(receivers.layer, "neuron")
        after = block_number + replay.adds_mlp_output(block_number, heads.output_module)
        index, decoders = receivers.index.to(dz.device), heads.decoders

        def run(some: Tensor, first: int) -> Tensor:
            of_row = index[j[some]].repeat_interleave(replay.batch)
            change = moves.new_zeros(len(some), replay.batch, replay.n_pos)
            change[:, :, columns] = moves[some]
            written = writes_of(decoders, change[:, :, first:].flatten(0, 1), of_row)
            return replay.values(neuron_variants(replay, receivers.layer, first, written))

        self._fill(values, moves != 0, columns, after, run)

    def attention_z(
        self, block: PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "sender batch pos head_index d_head"], int]:
        """Return z of the receivers' layer after each sender's patch, and the first position."""
        assert block.receiving is not None
        replay, layer = self.replay, receivers.layer
        number = replay.host.block(layer, "attention")
        begins = int(block.positions.chosen.any(dim=0).nonzero()[0])
        first = begins if replay.can_start_at(number, begins) else 0
        here = slice(first, None)
        sent = self._sent(block, here)
        entering = self.target.of(layer, "attention").reads.at(here).change(sent, self.scale)
        values = self.target.of(layer, "attention").z[:, here]
        z_patched = values.cpu().repeat(len(sent), 1, 1, 1, 1)
        self.batching.silent().fill(
            z_patched,
            (sent != 0).flatten(1).any(1).nonzero()[:, 0].cpu(),
            replay.numbers_per_variant(first),
            lambda some: self.readers.attention_z(layer, entering[some], self.part, first),
        )
        chosen = block.receiving.chosen[:, here, None, None].to(values.device)
        return torch.where(chosen, z_patched.to(values.device), values), first

    def _run_attention(
        self, block: PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay, layer = self.replay, receivers.layer
        number = replay.host.block(layer, "attention")
        z, begins = self.attention_z(block, receivers)
        z_values = self.target.of(layer, "attention").z
        index = receivers.index.to(z.device)[j]
        moved = z[i, :, :, index]  # [path, batch, pos, d_head]
        recorded = z_values[:, begins:, index].movedim(2, 0)
        columns = torch.arange(begins, replay.n_pos, device=z.device)
        name = replay.host.hook_name(layer, "attention", "z")

        def run(some: Tensor, first: int) -> Tensor:
            # The pass may start before the first position that the path changes.
            before = z_values[:, first:begins, index[some]].movedim(2, 0)
            rows = torch.cat([before, moved[some][:, :, max(first - begins, 0) :]], dim=2)
            rows, heads = rows.flatten(0, 1), index[some].repeat_interleave(replay.batch)

            def put(value: Tensor, hook: Any) -> Tensor:
                value = value.clone()
                value[torch.arange(len(heads), device=value.device), :, heads] = rows
                return value

            stream = replay.recorded_stream(number, first, len(some))
            return replay.values(Variants(number, first, stream, [(name, put)]))

        self._fill(values, (moved != recorded).any(-1), columns, number, run)
