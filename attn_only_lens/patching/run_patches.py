"""Run the patches of several groups of sites together, in batches that fit in memory.

One pass through the blocks starts at one position, and can run patches in all layers
(`engine/replay`). A few sites in many layers and at many positions therefore cost at most one pass
per position. Patches at later positions join an earlier pass if a separate pass would cost more.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attn_only_lens.devices import free_bytes, on_cpu
from attn_only_lens.engine.edit_checks import require_groups, require_same_edit
from attn_only_lens.engine.edits import (
    attention_edit,
    by_site,
    change_of_z,
    differences,
    neuron_variants,
    of_group,
    share_edits,
    writes_of,
)
from attn_only_lens.engine.recording import Recording
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.sites import SHARED_PARTS, Part, hook_name
from attn_only_lens.heads.host import HEAD_KINDS, NEURON_KINDS
from attn_only_lens.patching.processes import n_launched
from attn_only_lens.patching.site_groups import ROWS, SiteGroup, position_sets
from attn_only_lens.precision import full_precision

# Batches of 512 to 2048 tokens are the fastest (GPT-2 small's shape, one thread).
# Batches of 128 tokens take 10 % longer. Batches of 4096 do not fit in caches and take 17 % longer.
_CPU_TOKENS = 2048
_SHARE = 0.5  # fraction of the free memory to use

_Patch: TypeAlias = tuple[Bool[Tensor, "head batch pos"], int, Callable[[Tensor, int], Variants]]
"""The tokens that each head changes, the block, and a function that makes variants for rows."""


class Batching:
    """Runs patched forward passes in batches. Halves the batches if memory runs out."""

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
        """Return a copy that does not report progress."""
        silent = copy(self)
        silent.on_done = lambda n: None
        return silent

    def fill(
        self,
        values: Tensor,
        rows: Int[Tensor, "some"],
        numbers_per_variant: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Set `values[rows]` to `run(rows)`, batch by batch; halve batches if memory runs out."""
        while len(rows):
            size = self._size or max(1, self._numbers // numbers_per_variant)
            batch = rows[:size]
            patched = _unless_out_of_memory(run, batch)
            if patched is None:
                self._halve(len(batch), numbers_per_variant)
                continue
            values[batch] = patched.cpu().to(values.dtype)
            self.on_done(len(batch))
            rows = rows[size:]

    def _halve(self, size: int, numbers_per_variant: int) -> None:
        if self._size is None:
            self._numbers = max(1, size // 2) * numbers_per_variant
        else:
            self._size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor | None:
    """Return `run(batch)`, or None if a batch of several rows does not fit in memory."""
    try:
        return run(batch)
    except RuntimeError as error:
        # On a CPU, torch raises a plain RuntimeError instead of torch.OutOfMemoryError.
        gone = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(batch) == 1 or not gone:
            raise
        return None


def _numbers_that_fit(model: Any, numbers_per_token: int) -> int:
    n_bytes = next(model.parameters()).element_size()
    devices = {parameter.device for parameter in model.parameters()}
    fits = int(_SHARE * min(map(free_bytes, devices)) / n_bytes)
    if any(device.type == "cuda" for device in devices):
        return fits
    # Processes that share the work share the memory, too.
    return min(_CPU_TOKENS * numbers_per_token, fits // n_launched())


@dataclass(eq=False)
class PatchRunner:
    """Patches groups of sites in one target run.

    Attributes:
        replay: the replay of the target run.
        source: the run from which activations are copied.
        part: the part of each head that is patched.
        baseline: the metric of each prompt in the target run, before any patch.
    """

    replay: Replay
    source: Recording
    part: Part
    baseline: Float[Tensor, "prompt"]
    batching: Batching

    @torch.no_grad()
    def values(self, groups: Sequence[SiteGroup]) -> list[Float[Tensor, "row prompt"]]:
        """Return, for each group, the metric of each prompt after each row's patch.

        If a patch cannot affect the metric, no pass is run, and the value is the baseline.
        """
        if not groups:
            return []
        patches = [self._patch(group, tested=True) for group in groups]
        sizes = torch.tensor([len(group) for group in groups], device="cpu")
        offsets = sizes.cumsum(0) - sizes
        group_of_row = torch.arange(len(groups), device="cpu").repeat_interleave(sizes)
        blocks = torch.tensor([block for _, block, _ in patches], device="cpu")[group_of_row]
        starts = torch.cat(self._starts(groups, patches))
        values = self.baseline.repeat(len(starts), 1)
        self.batching.on_done(int((starts < 0).sum()))
        for first, rows in self._passes(blocks, starts):

            def run(batch: Tensor, first: int = first) -> Tensor:
                # Rows are sorted by block, so rows from the same group are consecutive.
                indices, counts = group_of_row[batch].unique_consecutive(return_counts=True)
                by_group = zip(indices.tolist(), batch.split(counts.tolist()), strict=True)
                variants = [patches[i][2](rows - offsets[i], first) for i, rows in by_group]
                return self.replay.values(*variants)

            self.batching.fill(values, rows, self.replay.numbers_per_variant(first), run)
        return list(values.split(sizes.tolist()))

    @torch.no_grad()
    def starts(self, group: SiteGroup) -> tuple[int, Int[Tensor, "row"]]:
        """Return a group's first changed block, and each patch's first changed position.

        The position is -1 if a patch cannot affect the metric. Use these positions only to estimate
        costs: they assume that neurons add to the residual stream directly.
        """
        patch = self._patch(group, tested=False)
        (starts,) = self._starts([group], [patch])
        return patch[1], starts

    def earliest(self, groups: Sequence[SiteGroup]) -> int:
        """Return the first position that any patch could change, computed from the tokens alone."""
        differ = (self.replay.recording.tokens != self.source.tokens).any(dim=0).cpu()
        patched = torch.cat([group.everywhere.flatten(0, 1) for group in groups]).any(dim=0)
        first = max(int(positions.int().argmax()) for positions in (differ, patched))
        block = min(self.replay.host.block(group.sites.layer, group.sites.kind) for group in groups)
        return self.replay.start(block, first)

    def _starts(
        self, groups: Sequence[SiteGroup], patches: Sequence[_Patch]
    ) -> list[Int[Tensor, "row"]]:
        """Return the first position that each patch changes; -1 if it cannot affect the metric."""
        unread, starts = list[Tensor](), []
        for group, (changed, block, _) in zip(groups, patches, strict=True):
            felt = self.replay.effective(changed, block)
            if group.columns is not None:
                unread.append(group.sums(felt).any(dim=1))
                continue
            firsts = []
            for position_set in group.everywhere_on(changed.device):
                earliest = (changed & position_set).any(dim=1).int().argmax(dim=1)
                firsts.append(earliest.where((felt & position_set).flatten(1).any(dim=1), -1))
            unread.append(torch.stack(firsts))
        for group, x in zip(groups, on_cpu(unread), strict=True):
            if group.columns is not None:
                columns = torch.tensor([p.column for p in group.positions], device="cpu")
                starts.append(columns[group.place].where(x, -1))
            else:
                starts.append(x[group.place, group.head])
        return starts

    def _passes(
        self, blocks: Int[Tensor, "row"], starts: Int[Tensor, "row"]
    ) -> Iterator[tuple[int, Int[Tensor, "some"]]]:
        """Divide rows among passes; yield each pass's first position, and its rows sorted by block.

        Rows whose patches start later join a pass that starts earlier, if its extra tokens cost
        less than a separate pass. If the metric reads the logits at all positions, rows never join
        an earlier pass, so that logits before a patch stay bitwise equal to the unpatched logits.
        """
        replay = self.replay
        flops = [replay.flops_per_token(block) for block in range(replay.n_blocks + 1)]
        flops_per_token = torch.tensor(flops, device="cpu")
        firsts: list[int] = []
        for position in starts[starts >= 0].unique().tolist():
            blocks_here = blocks[starts == position]
            joining = replay.batch * float(flops_per_token[blocks_here].sum())
            alone = replay.flops_per_run(int(blocks_here.min()), position)
            if (
                not firsts
                or replay.metric.positions is None
                or (position - firsts[-1]) * joining > alone
            ):
                firsts.append(position)
        for first, end in pairwise([*firsts, replay.n_pos]):
            rows = ((starts >= first) & (starts < end)).nonzero()[:, 0]
            rows = rows[blocks[rows].argsort(stable=True)]
            yield replay.start(int(blocks[rows[0]]), first), rows

    def _patch(self, group: SiteGroup, *, tested: bool) -> _Patch:
        if group.sites.kind in NEURON_KINDS:
            return self._patch_neurons(group, tested)
        return self._patch_by_hook(group)

    def _patch_neurons(self, group: SiteGroup, tested: bool) -> _Patch:
        sites = group.sites
        heads = self.replay.host.neurons[sites.layer]
        target = self.replay.recording.neurons[sites.layer]
        dz = change_of_z(target, self.source.neurons[sites.layer], self.part)
        change = by_site(sites, dz)
        block = self.replay.host.block(sites.layer, "neuron")
        block += not tested or self.replay.adds_mlp_output(block, heads.output_module)
        index = sites.index.to(change.device)
        edited, decoders = group.everywhere_on(change.device), heads.decoders

        def variants(chosen: Tensor, first: int) -> Variants:
            head, place = (rows[chosen].to(change.device) for rows in (group.head, group.place))
            moves = change[head, :, first:] * edited[place, :, first:]
            of_row = index[head].repeat_interleave(self.replay.batch)
            written = writes_of(decoders, moves.flatten(0, 1), of_row)
            return neuron_variants(self.replay, sites.layer, first, written)

        return change != 0, block, variants

    def _patch_by_hook(self, group: SiteGroup) -> _Patch:
        """Patch attention heads, or a transcoder's skip or error node."""
        sites, part, host = group.sites, self.part, self.replay.host
        name, z_name = (
            hook_name(self.replay.model, sites.layer, point, sites.kind) for point in (part, "z")
        )
        recorded, source = self.replay.recording.hooked, self.source.hooked[name]
        target = recorded[name]
        index, n_heads = sites.index.to(target.device), host.count(sites.layer, sites.kind)
        shared = bool(_layers_that_share(self.replay, [sites.layer], part))
        read = of_group(index, n_heads, target.shape[2]) if shared else index
        edited = group.everywhere_on(target.device)
        changed = differences(target, source, part)[..., read].permute(2, 0, 1)
        block = host.block(sites.layer, sites.kind)

        def variants(chosen: Tensor, first: int) -> Variants:
            head, place = (rows[chosen].to(target.device) for rows in (group.head, group.place))
            heads, positions = index[head], edited[place]
            if shared:
                z = recorded[z_name]
                hooks = share_edits(name, z_name, source, z, heads, positions, first)
            else:
                mask = nn.functional.one_hot(heads, n_heads).bool()
                hooks = [(name, attention_edit(source, part, mask, positions, first))]
            stream = self.replay.recorded_stream(block, first, len(chosen))
            return Variants(block, first, stream, hooks)

        return changed, block, variants


def batches_of_groups(groups: Sequence[SiteGroup]) -> Iterator[list[SiteGroup]]:
    """Yield lists of groups to run together; all lists but the last have at least `ROWS` rows."""
    batch = list[SiteGroup]()
    for group in groups:
        batch.append(group)
        if sum(map(len, batch)) >= ROWS or group is groups[-1]:
            yield batch
            batch = []


@full_precision()
def check_edits(
    replay: Replay, groups: Sequence[SiteGroup], part: Part, starts: Sequence[int] = ()
) -> None:
    """Test that edits in a replay have the same effects as hooks in a full forward pass."""
    somewhere = [position.chosen.any(dim=0) for position in position_sets(groups)]
    firsts = {int(mask.nonzero()[0]) for mask in somewhere if mask.any()}  # a role may be absent
    later = sorted(firsts - {0}) or [0]
    for kind in HEAD_KINDS:
        layers = sorted({group.sites.layer for group in groups if group.sites.kind == kind})
        if not layers:
            continue
        block = replay.host.block(layers[0], kind)
        shared = _layers_that_share(replay, layers, part) if kind == "attention" else []
        if shared:
            require_groups(replay, shared)
        for start in sorted(set(starts or (0, replay.start(block, later[len(later) // 2])))):
            require_same_edit(replay, kind, layers, part, start)
            if shared:  # edits of shared parts also restore the z of other heads
                require_same_edit(replay, kind, shared, "z", start)


def _layers_that_share(replay: Replay, layers: Sequence[int], part: Part) -> list[int]:
    """Return the layers in which several heads share this part (a key or a value)."""
    if part not in SHARED_PARTS:
        return []
    recorded = replay.recording.hooked
    return [
        layer
        for layer in layers
        if recorded[hook_name(replay.model, layer, part)].shape[2] != replay.host.n_heads[layer]
    ]
