"""How many variants run at once.

The sweep itself: the metric of every site, group by group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.heads import host_of
from attn_only_lens.patching.processes import launched
from attn_only_lens.runs.edits import Part, changed, changes, editing, hook_name, moved, writing
from attn_only_lens.runs.positions import PositionSet
from attn_only_lens.runs.replacements import Source
from attn_only_lens.runs.replay import Replay, Variants
from attn_only_lens.runs.sites import LayerSites

__all__ = ["Batching", "Group", "Sweeper", "frame_of", "groups_of"]

# At GPT-2 small's shape on one thread 512, 1024 and 2048 are within a tenth of each other, 128 is
# slower by a tenth, 4096 and 8192 by a sixth: they only leave the caches.
_CPU_TOKENS = 2048
_SHARE = 0.5  # of the free memory


class Batching:
    """Runs many variants in forward passes of a size that fits, and a smaller one where it did not.

    Args:
        model: for its device and dtype.
        batch_size: variants in one forward pass; None for what memory allows.
        on_done: told how many sites are done.
        of_token: how many numbers a forward pass holds at once for a token.
    """

    def __init__(
        self, model: Any, batch_size: int | None, on_done: Callable[[int], None], of_token: int = 1
    ) -> None:
        self._size = batch_size
        self._numbers = _numbers_that_fit(model, of_token) if batch_size is None else 0
        self._on_done = on_done

    def fill(
        self,
        values: Tensor,
        alive: Tensor,
        numbers_each: int,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        """Put `run(indices)` where `alive` is set, in chunks; halve them when memory runs out.

        Args:
            values: one for each variant, filled in place.
            alive: which of them to run.
            numbers_each: how many numbers one variant holds at once.
            run: gives the values of some variants.
        """
        left = alive.nonzero()[:, 0]
        self._on_done(len(values) - len(left))
        while len(left):
            size = self._size or max(1, self._numbers // numbers_each)
            chunk = left[:size]
            found = _unless_out_of_memory(run, chunk)
            if found is None:
                self._halve(len(chunk), numbers_each)
                continue
            values[chunk.cpu()] = found.cpu().to(values.dtype)
            self._on_done(len(chunk))
            left = left[size:]

    def _halve(self, size: int, numbers_each: int) -> None:
        if self._size is None:
            self._numbers = max(1, size // 2) * numbers_each
        else:
            self._size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor | None:
    """What `run` gives; None where memory ran out, when what it held is free again."""
    try:
        return run(chunk)
    except RuntimeError as error:
        # torch.OutOfMemoryError is for GPUs; on a CPU it is an error like any other.
        gone = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(chunk) == 1 or not gone:
            raise
        return None


def _numbers_that_fit(model: Any, of_token: int) -> int:
    parameter = next(model.parameters())
    each = parameter.element_size()
    if parameter.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(parameter.device)
        return int(_SHARE * free / each)
    # Processes launched together share the memory; each may get there before the others.
    free = psutil.virtual_memory().available // launched()
    return min(_CPU_TOKENS * of_token, int(_SHARE * free / each))


@dataclass(frozen=True, eq=False)
class Group:
    """Sites that are run together: heads of one kind in one layer, at some positions.

    Attributes:
        sites: the heads.
        positions: every head is patched at each of these sets of positions in turn.
    """

    sites: LayerSites
    positions: tuple[PositionSet, ...]

    def __len__(self) -> int:
        return len(self.sites.names) * len(self.positions)


def groups_of(sites: Sequence[LayerSites], positions: Sequence[PositionSet]) -> tuple[Group, ...]:
    """All sites, in an order that depends on nothing else.

    Neurons are many, and are grouped by position, so that a group begins where its position does;
    attention heads are few.
    """
    groups: list[Group] = []
    for each in sites:
        if each.kind == "attention":
            groups.append(Group(each, tuple(positions)))
        else:
            groups += [Group(each, (where,)) for where in positions]
    return tuple(groups)


def frame_of(group: Group, values: Float[Tensor, "site"]) -> pd.DataFrame:
    """What `Sweep.of` takes: the values of a group, positions outmost, heads inmost."""
    names = np.array(group.sites.names, dtype=object)
    labels = np.array([each.label for each in group.positions])
    return pd.DataFrame(
        {
            "layer": group.sites.layer,
            "kind": group.sites.kind,
            "index": np.tile(group.sites.index.cpu().numpy(), len(labels)),
            "name": np.tile(names, len(labels)),
            "position": np.repeat(labels, len(names)),
            "value": values.cpu().numpy(),
        }
    )


class Sweeper:
    """Runs groups of sites of one model, one pair of prompts, one metric and one part."""

    def __init__(
        self, replay: Replay, source: Source, part: Part, baseline: float, batching: Batching
    ) -> None:
        self._replay = replay
        self._model = replay.model
        self._source = source
        self._part: Part = part
        self._baseline = baseline
        self._batching = batching

    @torch.no_grad()
    def values(self, group: Group) -> Float[Tensor, "site"]:
        """The metric after each patch: positions outmost, heads inmost.

        A patch that changes nothing that the metric can see gives the value of the run it was to
        be patched into, without a run.
        """
        return self._neurons(group) if group.sites.kind == "neuron" else self._attention(group)

    def _result(self, group: Group) -> Float[Tensor, "site"]:
        return torch.full((len(group),), self._baseline, dtype=torch.float64, device="cpu")

    # Neurons

    def _neurons(self, group: Group) -> Float[Tensor, "site"]:
        sites, (where,) = group.sites, group.positions
        heads = host_of(self._model).neurons[sites.layer]
        target = self._replay.recording.neurons[sites.layer]
        change = changes(heads, sites, moved(target, self._source.neurons[sites.layer], self._part))
        change = change * where.where.to(change.device)
        block = host_of(self._model).block(sites.layer, "neuron")
        block += self._replay.adds(block, heads.written_at)
        values = self._result(group)
        first, alive = self._reach(change != 0, block)
        directions = heads.directions[sites.index.to(change.device)]

        def run(chosen: Tensor) -> Tensor:
            moving = change[chosen, :, first:].flatten(0, 1).unsqueeze(-1)
            rows = directions[chosen].repeat_interleave(self._replay.batch, dim=0).unsqueeze(1)
            added = (moving * rows).to(directions.dtype)
            return self._replay.values(writing(self._replay, sites.layer, first, added))

        self._batching.fill(values, alive, self._replay.numbers_from(first), run)
        return values

    # Attention heads

    def _attention(self, group: Group) -> Float[Tensor, "site"]:
        sites, part = group.sites, self._part
        name = hook_name(self._model, sites.layer, part)
        target, source = self._replay.recording.hooked[name], self._source.hooked[name]
        n_sites = len(sites.names)
        index = sites.index.to(target.device).repeat(len(group.positions))
        heads = nn.functional.one_hot(index, host_of(self._model).n_heads[sites.layer]).bool()
        where = torch.stack([each.where for each in group.positions]).to(target.device)
        where = where.repeat_interleave(n_sites, dim=0)
        reached = where & changed(target, source, part)[..., index].permute(2, 0, 1)
        block = host_of(self._model).block(sites.layer, "attention")
        values = self._result(group)
        first, alive = self._reach(reached, block)

        def run(chosen: Tensor) -> Tensor:
            hook = editing(source, part, heads[chosen], where[chosen], first)
            entering = self._replay.unchanged(block, first, len(chosen))
            return self._replay.values(Variants(block, first, entering, [(name, hook)]))

        self._batching.fill(values, alive, self._replay.numbers_from(first), run)
        return values

    def _reach(self, moved: Bool[Tensor, "site batch pos"], block: int) -> tuple[int, Tensor]:
        """The first position that any site moves, and which sites the metric can feel."""
        seen = self._replay.seen(block).to(moved.device)
        alive = (moved & seen).any(dim=(1, 2))
        if not alive.any():
            return 0, alive
        positions = moved[alive].any(dim=(0, 1)).nonzero()[:, 0]
        return self._replay.start(block, int(positions[0])), alive
