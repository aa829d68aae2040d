"""The parts of a sweep: some of its sites, on a run of its prompts.

Prompts are taken a run at a time, as many as memory holds the activations of; and the sites of a
run are cut into parts of about equal cost, where there are fewer runs than `_PARTS`. So processes
that share the work end at about the same time, an interruption loses little, and both hang on
nothing but the model's size, the prompts and the sites.

Cost is counted in tokens × blocks: those that a patch can change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.interventions import DIRECTIONS
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.heads import host_of
from attn_only_lens.patching.site_groups import SiteGroup

_PARTS = 128  # of equal cost: eight processes end within a sixteenth of their time of each other
_LEAST = 4096  # tokens through all blocks in a part: a second of a small model's, on a CPU


@dataclass(frozen=True)
class SweepPart:
    """Some sites of a sweep, on a run of its prompts.

    Attributes:
        prompts: the run.
        rows: the sites, as rows of all groups.
    """

    prompts: range
    rows: range

    def groups(self, groups: Sequence[SiteGroup], pair: PromptPair) -> list[SiteGroup]:
        """Return its sites, of those of the whole sweep, at its prompts."""
        chunks, first = [], 0
        for group in groups:
            rows_of_group = range(
                max(self.rows.start, first), min(self.rows.stop, first + len(group))
            )
            if len(rows_of_group):
                of_run = group.of_prompts(pair)
                whole = len(rows_of_group) == len(group)
                index = torch.arange(
                    rows_of_group.start - first, rows_of_group.stop - first, device="cpu"
                )
                chunks.append(of_run if whole else of_run[index])
            first += len(group)
        return chunks


def sweep_parts(
    model: Any,
    pair: PromptPair,
    groups: Sequence[SiteGroup],
    prompts_at_once: int,
    direction: str | None,
) -> list[SweepPart]:
    """Split a sweep into chunks: one range of prompts after another, sites in order within it."""
    n_prompts = len(pair.clean)
    starts = range(0, n_prompts, prompts_at_once)
    runs = [range(n_prompts)[start : start + prompts_at_once] for start in starts]
    rows = [range(sum(map(len, groups)))]
    if direction is not None:
        costs = torch.cat(_costs(model, pair, groups, direction))
        least = _LEAST * len(model.blocks)
        n = min(-(-_PARTS // len(runs)), prompts_at_once * int(costs.sum()) // least)
        ends = costs.cumsum(0)
        bins = (ends - costs) * max(n, 1) // ends[-1].clamp(min=1)
        stops = bins.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
        rows = [range(*stop) for stop in zip([0, *stops], stops, strict=False)]
    return [SweepPart(run, row) for run in runs for row in rows]


def _costs(
    model: Any, pair: PromptPair, groups: Sequence[SiteGroup], direction: str
) -> list[Int[Tensor, "row"]]:
    """Return what a patch of each row costs for a prompt, in tokens × blocks, at most."""
    host, n_pos = host_of(model), pair.clean.shape[1]
    differ = ((pair.clean != pair.corrupted) & pair.real).any(dim=0)
    first = int(differ.int().argmax()) if direction in DIRECTIONS else 0
    costs = []
    for group in groups:
        sites = group.sites
        entered = host.block(sites.layer, sites.kind) + (sites.kind == "neuron")
        left = len(model.blocks) - entered + 1  # and the logits
        moved = group.everywhere.any(dim=1)[:, first:].cpu()
        tokens = (n_pos - first - moved.int().argmax(dim=1)) * moved.any(dim=1)
        costs.append((tokens * left)[group.where])
    return costs
