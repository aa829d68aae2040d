"""Run paths from senders to receivers, block by block, in batches that fit memory.

A block is some senders of one layer and kind, at one set of positions, and some receivers of one
layer and kind. Its largest tensor, the changes of the receivers' outputs by all its senders, has at
most `_NUMBERS` numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.engine.edits import neuron_changes, neuron_variants, sum_by_site
from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.readers import Readers
from attn_only_lens.engine.replay import Variants
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.writes import Decomposition, Scale
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.run_patches import Batching
from attn_only_lens.patching.site_groups import SiteGroup

LOGITS = "logits"
_NUMBERS = 2**21  # several tensors of this size are held


@dataclass(frozen=True, eq=False)
class PathBlock:
    """Every path from some senders, at some positions, to some receivers.

    Attributes:
        senders: heads of one kind in one layer.
        positions: the positions at which their writes are replaced.
        receivers: heads of one kind in one layer; None for the logits.
        first: the index of the first sender (at these positions) and receiver among all.
    """

    senders: LayerSites
    positions: PositionSet
    receivers: LayerSites | None
    first: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of senders and of receivers."""
        return len(self.senders.names), len(names_of(self.receivers))

    def of_prompts(self, pair: PromptPair) -> "PathBlock":
        """Return the same paths on a chunk of the prompts."""
        if pair.among is None:
            return self
        positions = self.positions.of_prompts(pair.among[0], pair.clean.shape[1])
        return replace(self, positions=positions)

    def frame(self, i: Int[Tensor, "path"], j: Int[Tensor, "path"]) -> pd.DataFrame:
        """Return a row for each path from sender i to receiver j."""
        receivers = names_of(self.receivers)
        return pd.DataFrame(
            {
                "sender": np.array(self.senders.names, dtype=object)[i.cpu().numpy()],
                "receiver": np.array(receivers, dtype=object)[j.cpu().numpy()],
                "position": self.positions.label,
            }
        )


def path_blocks(
    run: Decomposition,
    senders: Sequence[SiteGroup],
    receivers: Sequence[LayerSites | None],
    prompts_at_once: int,
) -> Iterator[PathBlock]:
    """Yield every pair in which the receiver reads after the sender has written.

    The order and the sizes of blocks depend only on the prompts, the heads and `prompts_at_once`.
    """
    row = 0
    for group in senders:
        for place, position in enumerate(group.positions):
            heads = group.head[group.place == place]
            if not len(heads):
                continue
            sending, column = _take(group.sites, heads), 0
            for receiving in receivers:
                if _in_order(run, sending, receiving):
                    whole = PathBlock(sending, position, receiving, (row, column))
                    yield from _split(run, whole, prompts_at_once)
                column += len(names_of(receiving))
            row += len(heads)


def _in_order(run: Decomposition, sending: LayerSites, receiving: LayerSites | None) -> bool:
    if receiving is None:
        return True
    written = run.before(receiving.layer, receiving.kind)
    return run.of(sending.layer, sending.kind) in written


def _split(run: Decomposition, whole: PathBlock, prompts_at_once: int) -> Iterator[PathBlock]:
    """Cut a block into ones of a size that fits."""
    chosen, receivers = whole.positions.chosen, whole.receivers
    batch, n_pos = prompts_at_once, chosen.shape[1]
    some = chosen.any(dim=0)
    width = run.embedding.shape[-1]
    if receivers is not None and receivers.kind == "attention":
        tokens = batch * (n_pos - int(some.int().argmax()))
        width = max(width, run.of(receivers.layer, "attention").z[0, 0].numel())
        many = len(names_of(receivers))
    else:
        tokens = batch * int(some.sum())
        many = max(1, _NUMBERS // (tokens * min(len(whole.senders.names), 64)))
    few = max(
        1, min(_NUMBERS // (tokens * width), _NUMBERS // (tokens * min(many, whole.shape[1])))
    )
    for i in range(0, whole.shape[0], few):
        for j in range(0, whole.shape[1], many):
            yield PathBlock(
                _take(whole.senders, slice(i, i + few)),
                whole.positions,
                None if receivers is None else _take(receivers, slice(j, j + many)),
                (whole.first[0] + i, whole.first[1] + j),
            )


def names_of(receivers: LayerSites | None) -> tuple[str, ...]:
    """Return the names of receivers."""
    return (LOGITS,) if receivers is None else receivers.names


def _take(sites: LayerSites, chosen: slice | Int[Tensor, "site"]) -> LayerSites:
    indices = torch.arange(len(sites.names), device="cpu")[chosen]
    names = tuple(sites.names[i] for i in indices.tolist())
    return replace(sites, names=names, index=sites.index[chosen], member=sites.member[chosen])


def _local(sites: LayerSites) -> LayerSites:
    """Return the same sites, numbered from 0."""
    return replace(sites, index=torch.arange(len(sites.names), device="cpu"))


@dataclass(eq=False)
class PathRunner:
    """Run paths into one run.

    Attributes:
        readers: the readers of the run that is patched into.
        source: the other run.
        part: the inputs of receivers that senders reach.
        scale: the scale of the norms that receivers read through.
        baseline: the metric of each prompt of the run that is patched into.
    """

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
        """Return the metric of each prompt with the path from sender i to receiver j patched.

        A path that cannot affect the metric gives the baseline, without a run.
        """
        values = self.baseline.repeat(len(i), 1)
        if not block.positions.chosen.any():  # no prompt of this chunk has such a position
            self.batching.on_done(len(i))
            return values
        senders, i = i.unique(return_inverse=True)
        receivers, j = j.unique(return_inverse=True)
        block = replace(
            block,
            senders=_take(block.senders, senders),
            receivers=None if block.receivers is None else _take(block.receivers, receivers),
        )
        last = block.receivers or block.senders
        device = self.target.of(last.layer, last.kind).z.device
        if block.receivers is None:
            self._run_to_logits(block, i.to(device), values)
        elif block.receivers.kind == "neuron":
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
        """Run the paths whose change, at some positions of a block, can affect the metric."""
        replay = self.replay
        effective = changed & replay.effective_positions(block).to(changed.device)[:, positions]
        moving, first = effective.flatten(1).any(1), 0
        if moving.any():
            first = replay.start(block, int(positions[changed[moving].any(dim=0).any(dim=0)][0]))
        rows = moving.nonzero()[:, 0].cpu()
        self.batching.on_done(len(values) - len(rows))
        numbers = replay.numbers_per_variant(first)
        self.batching.fill(values, rows, numbers, lambda batch: run(batch, first))

    def _sent(self, block: PathBlock, positions: Any) -> Float[Tensor, "sender batch pos d_model"]:
        """Return what senders wrote in the source run minus what they wrote in the target run."""
        layer, kind = block.senders.layer, block.senders.kind
        if isinstance(positions, Tensor):
            positions = positions.to(self.target.of(layer, kind).z.device)
        source, target = (
            run.of(layer, kind).written(block.senders, positions)
            for run in (self.source, self.target)
        )
        chosen = block.positions.chosen.to(target.device)[:, positions]
        return (source - target) * chosen.unsqueeze(-1)

    def _run_to_logits(self, block: PathBlock, i: Tensor, values: Tensor) -> None:
        sent = self._sent(block, slice(None))[i]
        everywhere = torch.arange(self.replay.n_pos, device=sent.device)

        def run(some: Tensor, first: int) -> Tensor:
            return self.readers.values_at_end(sent[some, :, first:], first, self.scale)

        self._fill(values, (sent != 0).any(-1), everywhere, self.replay.n_blocks, run)

    def _neuron_dz(
        self, block: PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "row pos head_index"], Int[Tensor, "pos"]]:
        """Return the change of z of each receiver by each sender × prompt, and its positions."""
        neuron_run = self.target.of(receivers.layer, "neuron")
        columns = block.positions.chosen.any(dim=0).nonzero()[:, 0].to(neuron_run.z.device)
        reads = neuron_run.reads.at(columns)
        entering = reads.change(self._sent(block, columns), self.scale)
        change = self.readers.neuron_change(receivers, entering, self.part, columns)
        return change.flatten(0, 1), columns

    def _run_neurons(
        self, block: PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay = self.replay
        heads = replay.host.neurons[receivers.layer]
        dz, columns = self._neuron_dz(block, receivers)
        changes = neuron_changes(heads, _local(receivers), dz)  # [receiver, sender · batch, pos]
        moves = changes.unflatten(1, (-1, replay.batch))[j, i]
        block_number = replay.host.block(receivers.layer, "neuron")
        after = block_number + replay.adds_mlp_output(block_number, heads.output_module)
        rows = heads.W_out[receivers.index.to(dz.device)]

        def run(some: Tensor, first: int) -> Tensor:
            directions = rows[j[some]].repeat_interleave(replay.batch, dim=0).unsqueeze(1)
            change = moves.new_zeros(len(some), replay.batch, replay.n_pos)
            change[:, :, columns] = moves[some]
            added = change[:, :, first:].flatten(0, 1).unsqueeze(-1) * directions
            return replay.values(neuron_variants(replay, receivers.layer, first, added))

        self._fill(values, moves != 0, columns, after, run)

    def _attention_z(
        self, block: PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "sender batch pos head_index d_head"], int]:
        """Return z of all heads of the receivers' layer for each sender, from a position on."""
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
        return z_patched.to(values.device), first

    def _run_attention(
        self, block: PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay, layer = self.replay, receivers.layer
        number = replay.host.block(layer, "attention")
        z, begins = self._attention_z(block, receivers)
        z_values = self.target.of(layer, "attention").z
        index = receivers.index.to(z.device)[j]
        moved = z[i, :, :, index]  # [path, batch, pos, d_head]
        recorded = z_values[:, begins:, index].movedim(2, 0)
        columns = torch.arange(begins, replay.n_pos, device=z.device)
        name = replay.host.hook_name(layer, "attention", "z")

        def run(some: Tensor, first: int) -> Tensor:
            # Variants may begin before the path, at positions that it does not move.
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

    @torch.no_grad()
    def estimates(
        self, block: PathBlock, gradients: dict[tuple[int, HeadKind], Tensor]
    ) -> Float[Tensor, "sender receiver"]:
        """Return the expected change of the metric by each path; to the logits, the exact one."""
        receivers, n = block.receivers, len(block.senders.names)
        if not block.positions.chosen.any():
            return torch.zeros(block.shape, device="cpu")
        if receivers is None:
            senders = torch.arange(n, device="cpu")
            silent = replace(self, batching=self.batching.silent())
            mean = self.replay.metric.mean
            values = mean(silent.values(block, senders, torch.zeros_like(senders)))
            return (values - mean(self.baseline))[:, None]
        gradient = gradients[receivers.layer, receivers.kind]
        if receivers.kind == "neuron":
            dz, columns = self._neuron_dz(block, receivers)
            heads = self.replay.host.neurons[receivers.layer]
            index = receivers.index.to(gradient.device)
            by_member = gradient.squeeze(-1)[:, columns].unflatten(-1, (-1, heads.heads_per_neuron))
            by_member = by_member[:, :, index].flatten(2).repeat(n, 1, 1)
            terms = sum_by_site(heads, _local(receivers), dz * by_member)
            return terms.unflatten(1, (n, -1)).sum((-1, -2)).T
        z, begins = self._attention_z(block, receivers)
        dz = z - self.target.of(receivers.layer, "attention").z[:, begins:]
        index = receivers.index.to(z.device)
        return torch.einsum("nbphd,bphd->nh", dz[:, :, :, index], gradient[:, begins:, index])
