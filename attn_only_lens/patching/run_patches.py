"""Run the patches of a sweep, group by group, in batches that fit memory."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import psutil
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.patching.processes import n_launched
from attn_only_lens.runs.edits import (
    attention_edit,
    change_of_z,
    differences,
    neuron_changes,
    neuron_variants,
)
from attn_only_lens.runs.positions import PositionSet
from attn_only_lens.runs.recording import Recording
from attn_only_lens.runs.replay import Replay, Variants
from attn_only_lens.runs.sites import LayerSites, Part, hook_name

# At GPT-2 small's shape on one thread 512, 1024 and 2048 are within a tenth of each other, 128 is
# slower by a tenth, 4096 and 8192 by a sixth: they only leave the caches.
_CPU_TOKENS = 2048
_SHARE = 0.5  # of the free memory

_Patch: TypeAlias = tuple[Bool[Tensor, "site batch pos"], int, Callable[[Tensor, int], Variants]]
"""Where each site changes its block's stream, that block, and the variants of some of the sites."""


class Batching:
    """Run variants in forward passes of a size that fits, and a smaller one where it did not.

    Args:
        model: for its device and dtype.
        batch_size: variants in one forward pass; None for as many as memory allows.
        on_done: called with the number of sites that are done.
        numbers_per_token: how many numbers a forward pass holds at once for a token.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int | None,
        on_done: Callable[[int], None],
        numbers_per_token: int = 1,
    ) -> None:
        self._size = batch_size
        self._numbers = _numbers_that_fit(model, numbers_per_token) if batch_size is None else 0
        self._on_done = on_done

    def silent(self) -> "Batching":
        """Return the same batches, which count nothing as done."""
        other = copy(self)
        other._on_done = lambda n: None
        return other

    def fill(
        self,
        values: Tensor,
        effective: Tensor,
        numbers_per_variant: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Set `values` to `run(indices)` where effective, in chunks; halve them if memory runs out.

        Args:
            values: one for each variant, filled in place.
            effective: the variants to run.
            numbers_per_variant: how many numbers one variant holds at once.
            run: returns the values of some variants.
        """
        left = effective.nonzero()[:, 0]
        self._on_done(len(values) - len(left))
        while len(left):
            size = self._size or max(1, self._numbers // numbers_per_variant)
            chunk = left[:size]
            found = _unless_out_of_memory(run, chunk)
            if found is None:
                self._halve(len(chunk), numbers_per_variant)
                continue
            values[chunk.cpu()] = found.cpu().to(values.dtype)
            self._on_done(len(chunk))
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
    parameter = next(model.parameters())
    each = parameter.element_size()
    if parameter.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(parameter.device)
        return int(_SHARE * free / each)
    # Processes launched together share the memory; each may get there before the others.
    free = psutil.virtual_memory().available // n_launched()
    return min(_CPU_TOKENS * numbers_per_token, int(_SHARE * free / each))


@dataclass(frozen=True, eq=False)
class SiteGroup:
    """Sites that run together: heads of one kind in one layer, at some positions.

    Attributes:
        sites: the heads.
        positions: every head is patched at each of these sets of positions in turn.
    """

    sites: LayerSites
    positions: tuple[PositionSet, ...]

    def __len__(self) -> int:
        return len(self.sites.names) * len(self.positions)

    def frame(self, values: Float[Tensor, "site"]) -> pd.DataFrame:
        """Return a frame for `Sweep` of the group's values, positions outmost, heads inmost."""
        names = np.array(self.sites.names, dtype=object)
        labels = np.array([each.label for each in self.positions])
        return pd.DataFrame(
            {
                "layer": self.sites.layer,
                "kind": self.sites.kind,
                "index": np.tile(self.sites.index.cpu().numpy(), len(labels)),
                "name": np.tile(names, len(labels)),
                "position": np.repeat(labels, len(names)),
                "value": values.cpu().numpy(),
            }
        )


def site_groups(
    sites: Sequence[LayerSites], positions: Sequence[PositionSet]
) -> tuple[SiteGroup, ...]:
    """Group all sites, in an order that depends on nothing else.

    Neurons are many, and are grouped by position, so that a group starts where its position does;
    attention heads are few.
    """
    groups: list[SiteGroup] = []
    for each in sites:
        if each.kind == "attention":
            groups.append(SiteGroup(each, tuple(positions)))
        else:
            groups += [SiteGroup(each, (where,)) for where in positions]
    return tuple(groups)


@dataclass(eq=False)
class PatchRunner:
    """Run groups of sites of one model, one pair of prompts, one metric and one part.

    Attributes:
        replay: of the run that is patched into.
        source: the activations that are patched in.
        part: the part of heads.
        baseline: the metric of the run that is patched into.
        batching: the batches to run in.
    """

    replay: Replay
    source: Recording
    part: Part
    baseline: float
    batching: Batching

    @torch.no_grad()
    def values(self, group: SiteGroup) -> Float[Tensor, "site"]:
        """Return the metric after each patch: positions outmost, heads inmost.

        A patch that cannot affect the metric gives the baseline, without a run.
        """
        patch = self._patch_neurons if group.sites.kind == "neuron" else self._patch_attention
        changed, block, variants = patch(group)
        values = torch.full((len(group),), self.baseline, dtype=torch.float64, device="cpu")
        first, effective = self._effective_sites(changed, block)

        def run(chosen: Tensor) -> Tensor:
            return self.replay.values(variants(chosen, first))

        self.batching.fill(values, effective, self.replay.numbers_per_variant(first), run)
        return values

    def _patch_neurons(self, group: SiteGroup) -> _Patch:
        sites, (where,) = group.sites, group.positions
        heads = self.replay.host.neurons[sites.layer]
        target = self.replay.recording.neurons[sites.layer]
        dz = change_of_z(target, self.source.neurons[sites.layer], self.part)
        change = neuron_changes(heads, sites, dz)
        change = change * where.where.to(change.device)
        block = self.replay.host.block(sites.layer, "neuron")
        block += self.replay.adds_mlp_output(block, heads.output_module)
        directions = heads.W_out[sites.index.to(change.device)]

        def variants(chosen: Tensor, first: int) -> Variants:
            moving = change[chosen, :, first:].flatten(0, 1).unsqueeze(-1)
            rows = directions[chosen].repeat_interleave(self.replay.batch, dim=0).unsqueeze(1)
            added = (moving * rows).to(directions.dtype)
            return neuron_variants(self.replay, sites.layer, first, added)

        return change != 0, block, variants

    def _patch_attention(self, group: SiteGroup) -> _Patch:
        sites, part, host = group.sites, self.part, self.replay.host
        name = hook_name(self.replay.model, sites.layer, part)
        target, source = self.replay.recording.hooked[name], self.source.hooked[name]
        index = sites.index.to(target.device).repeat(len(group.positions))
        heads = nn.functional.one_hot(index, host.n_heads[sites.layer]).bool()
        where = torch.stack([each.where for each in group.positions]).to(target.device)
        where = where.repeat_interleave(len(sites.names), dim=0)
        changed = where & differences(target, source, part)[..., index].permute(2, 0, 1)
        block = host.block(sites.layer, "attention")

        def variants(chosen: Tensor, first: int) -> Variants:
            hook = attention_edit(source, part, heads[chosen], where[chosen], first)
            stream = self.replay.recorded_stream(block, first, len(chosen))
            return Variants(block, first, stream, [(name, hook)])

        return changed, block, variants

    def _effective_sites(
        self, changed: Bool[Tensor, "site batch pos"], block: int
    ) -> tuple[int, Tensor]:
        """Return the first position that any site changes, and which sites affect the metric."""
        effective = (changed & self.replay.effective_positions(block).to(changed.device)).any(
            (1, 2)
        )
        if not effective.any():
            return 0, effective
        positions = changed[effective].any(dim=(0, 1)).nonzero()[:, 0]
        return self.replay.start(block, int(positions[0])), effective
