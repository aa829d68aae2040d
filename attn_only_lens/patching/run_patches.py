"""Run the patches of a sweep, those of several groups together, in batches that fit memory.

A pass through the blocks takes up the patches of each layer on its way (`replay`), all from one
position on. So few names, spread over layers and positions, cost a pass for each position, or
fewer: patches that start later join a pass that starts before, where the tokens that they cannot
change cost less than a pass of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attn_only_lens.devices import free_bytes
from attn_only_lens.engine.edit_checks import require_groups, require_same_edit
from attn_only_lens.engine.edits import (
    attention_edit,
    change_of_z,
    differences,
    neuron_changes,
    neuron_variants,
    of_group,
    share_edits,
)
from attn_only_lens.engine.recording import Recording
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.sites import SHARED_PARTS, Part, hook_name
from attn_only_lens.heads.host import HEAD_KINDS
from attn_only_lens.patching.processes import n_launched
from attn_only_lens.patching.site_groups import ROWS, SiteGroup
from attn_only_lens.precision import full_precision

# At GPT-2 small's shape on one thread 512, 1024 and 2048 are within a tenth of each other, 128 is
# slower by a tenth, 4096 and 8192 by a sixth: they only leave the caches.
_CPU_TOKENS = 2048
_SHARE = 0.5  # of the free memory

_Patch: TypeAlias = tuple[Bool[Tensor, "head batch pos"], int, Callable[[Tensor, int], Variants]]
"""Where each head changes its block's stream, that block, and the variants of some of the rows."""


class Batching:
    """Run variants in forward passes of a size that fits, and a smaller one where it did not."""

    def __init__(
        self,
        model: Any,
        batch_size: int | None,
        on_done: Callable[[int], object],
        numbers_per_token: int = 1,
    ) -> None:
        self._size = batch_size
        self._numbers = _numbers_that_fit(model, numbers_per_token) if batch_size is None else 0
        self.on_done = on_done

    def silent(self) -> "Batching":
        """Return the same batches, without progress."""
        smaller = copy(self)
        smaller.on_done = lambda n: None
        return smaller

    def fill(
        self,
        values: Tensor,
        left: Int[Tensor, "run"],
        numbers_per_variant: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Set `values[left]` to `run(left)`, in chunks; halve them if memory runs out."""
        while len(left):
            size = self._size or max(1, self._numbers // numbers_per_variant)
            chunk = left[:size]
            patched = _unless_out_of_memory(run, chunk)
            if patched is None:
                self._halve(len(chunk), numbers_per_variant)
                continue
            values[chunk] = patched.cpu().to(values.dtype)
            self.on_done(len(chunk))
            left = left[size:]

    def _halve(self, size: int, numbers_per_variant: int) -> None:
        if self._size is None:
            self._numbers = max(1, size // 2) * numbers_per_variant
        else:
            self._size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor | None:
    """Return `run(chunk)`; None if memory ran out, which is then free again."""
    try:
        return run(chunk)
    except RuntimeError as error:
        # torch.OutOfMemoryError is for GPUs; on a CPU it is an error like any other.
        gone = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(chunk) == 1 or not gone:
            raise
        return None


def _numbers_that_fit(model: Any, numbers_per_token: int) -> int:
    n_bytes = next(model.parameters()).element_size()
    devices = {parameter.device for parameter in model.parameters()}
    fits = int(_SHARE * min(map(free_bytes, devices)) / n_bytes)
    if any(device.type == "cuda" for device in devices):
        return fits
    # Processes launched together share the memory; each may get there before the others.
    return min(_CPU_TOKENS * numbers_per_token, fits // n_launched())


@dataclass(eq=False)
class PatchRunner:
    """Run groups of sites of one model, one pair of prompts, one metric and one part.

    Attributes:
        replay: of the run that is patched into.
        source: the activations that are patched in.
        part: the part of heads.
        baseline: the metric of each prompt of the run that is patched into.
        batching: the batches to run in.
    """

    replay: Replay
    source: Recording
    part: Part
    baseline: Float[Tensor, "prompt"]
    batching: Batching

    @torch.no_grad()
    def values(self, groups: Sequence[SiteGroup]) -> list[Float[Tensor, "row prompt"]]:
        """Return the metric of each prompt after the patch of each row of each group.

        A patch that cannot affect the metric gives the baseline, without a run.
        """
        if not groups:
            return []
        patches = [self._patch(group, tested=True) for group in groups]
        blocks = torch.tensor([block for _, block, _ in patches], device="cpu")
        sizes = torch.tensor([len(group) for group in groups], device="cpu")
        offsets = sizes.cumsum(0) - sizes
        place = torch.arange(len(groups), device="cpu").repeat_interleave(sizes)
        starts = torch.cat(
            [
                self._starts(group, changed, block)
                for group, (changed, block, _) in zip(groups, patches, strict=True)
            ]
        )
        values = self.baseline.repeat(len(starts), 1)
        n_run = 0
        for first, rows in self._runs(blocks[place], starts):
            n_run += len(rows)

            def run(chosen: Tensor, first: int = first) -> Tensor:
                # In the order of blocks, in which the rows are, and of groups.
                of_groups, counts = place[chosen].unique_consecutive(return_counts=True)
                parts = zip(of_groups.tolist(), chosen.split(counts.tolist()), strict=True)
                variants = [patches[i][2](index - offsets[i], first) for i, index in parts]
                return self.replay.values(*variants)

            self.batching.fill(values, rows, self.replay.numbers_per_variant(first), run)
        self.batching.on_done(len(starts) - n_run)
        return list(values.split(sizes.tolist()))

    @torch.no_grad()
    def starts(self, group: SiteGroup) -> tuple[int, Int[Tensor, "row"]]:
        """Return the block that patches of a group enter, and the position from which each runs.

        For plans, without a test: neurons are taken to write into the stream unchanged. The
        position is -1 where a patch cannot affect the metric.
        """
        changed, block, _ = self._patch(group, tested=False)
        return block, self._starts(group, changed, block)

    def earliest(self, groups: Sequence[SiteGroup]) -> int:
        """Return the first position that patches of some groups run from, as the tokens tell."""
        differ = (self.replay.recording.tokens != self.source.tokens).any(dim=0)
        asked = torch.cat([group.everywhere.flatten(0, 1) for group in groups]).any(dim=0)
        first = max(int(index.int().argmax()) for index in (differ, asked))
        block = min(self.replay.host.block(group.sites.layer, group.sites.kind) for group in groups)
        return self.replay.start(block, first)

    def _starts(
        self, group: SiteGroup, changed: Bool[Tensor, "head batch pos"], block: int
    ) -> Int[Tensor, "row"]:
        """Return the first position that each row changes; -1 where it cannot affect the metric."""
        edited = group.everywhere.to(changed.device)
        read = self.replay.effective_positions(block).to(changed.device)
        if all(position.column is not None for position in group.positions):
            columns = torch.tensor(
                [position.column for position in group.positions], device=changed.device
            )
            sets = torch.arange(len(columns), device=changed.device)
            felt = (changed[:, :, columns] & (edited & read)[sets, :, columns].T).any(dim=1)
            first = columns[:, None].where(felt.T, -1)
        else:
            of_sets = []
            for position in edited:
                here = changed & position
                earliest = here.any(dim=1).int().argmax(dim=1)
                of_sets.append(earliest.where((here & read).flatten(1).any(dim=1), -1))
            first = torch.stack(of_sets)
        return first.cpu()[group.where, group.head]

    def _runs(
        self, blocks: Int[Tensor, "row"], starts: Int[Tensor, "row"]
    ) -> Iterator[tuple[int, Int[Tensor, "some"]]]:
        """Yield the position that rows which run together start at, and them, by block.

        Rows that start later join those before, and compute what they cannot change, where that
        costs less than a run of their own; unless the metric reads the logits of all positions,
        which stay the same to the bit before the patch.
        """
        replay = self.replay
        of_token = torch.tensor(
            [replay.flops_per_token(b) for b in range(replay.n_blocks + 1)], device="cpu"
        )
        firsts: list[int] = []
        for position in starts[starts >= 0].unique().tolist():
            of_rows = blocks[starts == position]
            joining = replay.batch * float(of_token[of_rows].sum())
            joins = not firsts or (position - firsts[-1]) * joining > replay.flops_per_run(
                int(of_rows.min()), position
            )
            if joins or replay.metric.positions is None:
                firsts.append(position)
        for first, end in pairwise([*firsts, replay.n_pos]):
            rows = ((starts >= first) & (starts < end)).nonzero()[:, 0]
            rows = rows[blocks[rows].argsort(stable=True)]
            yield replay.start(int(blocks[rows[0]]), first), rows

    def _patch(self, group: SiteGroup, *, tested: bool) -> _Patch:
        if group.sites.kind == "attention":
            return self._patch_attention(group)
        return self._patch_neurons(group, tested)

    def _patch_neurons(self, group: SiteGroup, tested: bool) -> _Patch:
        sites = group.sites
        heads = self.replay.host.neurons[sites.layer]
        target = self.replay.recording.neurons[sites.layer]
        dz = change_of_z(target, self.source.neurons[sites.layer], self.part)
        change = neuron_changes(heads, sites, dz)
        block = self.replay.host.block(sites.layer, "neuron")
        block += not tested or self.replay.adds_mlp_output(block, heads.output_module)
        directions = heads.W_out[sites.index.to(change.device)]
        edited = group.everywhere.to(change.device)

        def variants(chosen: Tensor, first: int) -> Variants:
            head, position = (
                indices[chosen].to(change.device) for indices in (group.head, group.where)
            )
            moving = (
                (change[head, :, first:] * edited[position, :, first:]).flatten(0, 1).unsqueeze(-1)
            )
            rows = directions[head].repeat_interleave(self.replay.batch, dim=0).unsqueeze(1)
            added = (moving * rows).to(directions.dtype)
            return neuron_variants(self.replay, sites.layer, first, added)

        return change != 0, block, variants

    def _patch_attention(self, group: SiteGroup) -> _Patch:
        sites, part, host = group.sites, self.part, self.replay.host
        name, z_name = (hook_name(self.replay.model, sites.layer, point) for point in (part, "z"))
        recorded, source = self.replay.recording.hooked, self.source.hooked[name]
        target = recorded[name]
        index, n_heads = sites.index.to(target.device), host.n_heads[sites.layer]
        shared = bool(_layers_that_share(self.replay, [sites.layer], part))
        read = of_group(index, n_heads, target.shape[2]) if shared else index
        edited = group.everywhere.to(target.device)
        changed = differences(target, source, part)[..., read].permute(2, 0, 1)
        block = host.block(sites.layer, "attention")

        def variants(chosen: Tensor, first: int) -> Variants:
            head, site = (rows[chosen].to(target.device) for rows in (group.head, group.where))
            heads, places = index[head], edited[site]
            if shared:
                z = recorded[z_name]
                hooks = share_edits(name, z_name, source, z, heads, places, first)
            else:
                these = nn.functional.one_hot(heads, n_heads).bool()
                hooks = [(name, attention_edit(source, part, these, places, first))]
            stream = self.replay.recorded_stream(block, first, len(chosen))
            return Variants(block, first, stream, hooks)

        return changed, block, variants


def together(groups: Sequence[SiteGroup]) -> Iterator[list[int]]:
    """Yield the places of groups that run together: few rows of each layer, or many of one."""
    batch, n_rows = list[int](), 0
    for place, group in enumerate(groups):
        batch.append(place)
        n_rows += len(group)
        if n_rows >= ROWS or place == len(groups) - 1:
            yield batch
            batch, n_rows = [], 0


@full_precision()
def check_edits(
    replay: Replay, groups: Sequence[SiteGroup], part: Part, starts: Sequence[int] = ()
) -> None:
    """Test the edits of a sweep."""
    sets = dict.fromkeys(position for group in groups for position in group.positions)
    some = [
        position_set.where.any(dim=0) for position_set in sets
    ]  # a run of prompts may lack a position
    asked = {int(group_.nonzero()[0]) for group_ in some if group_.any()}
    later = sorted(asked - {0}) or [0]
    for kind in HEAD_KINDS:
        layers = sorted({group_.sites.layer for group_ in groups if group_.sites.kind == kind})
        if layers:
            block = replay.host.block(layers[0], kind)
            tested = starts or (0, replay.start(block, later[len(later) // 2]))
            shared = _layers_that_share(replay, layers, part) if kind == "attention" else []
            if shared:
                require_groups(replay, shared)
            for start in sorted(set(tested)):
                require_same_edit(replay, kind, layers, part, start)
                if shared:  # where the z of other heads is restored
                    require_same_edit(replay, kind, shared, "z", start)


def _layers_that_share(replay: Replay, layers: Sequence[int], part: Part) -> list[int]:
    """Return the layers in which several attention heads share a part."""
    if part not in SHARED_PARTS:
        return []
    shown = replay.recording.hooked
    return [
        layer
        for layer in layers
        if shown[hook_name(replay.model, layer, part)].shape[2] != replay.host.n_heads[layer]
    ]
