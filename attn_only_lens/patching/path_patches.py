"""Patch paths chunk by chunk: what a job stores, and the frame that the chunks add up to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch

from attn_only_lens.engine.metrics import (
    Metric,
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.readers import Readers, input_hooks
from attn_only_lens.engine.recording import RunPair, Side, run_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.writes import Decomposition, Scale, decompose
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.patching._activation_patch import prompt_settings
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.job import Arrays, Job
from attn_only_lens.patching.path_blocks import (
    PROBLEM,
    by_block,
    path_blocks,
    split_blocks,
)
from attn_only_lens.patching.path_estimates import estimates, largest, receiver_gradients
from attn_only_lens.patching.path_runner import PathRunner
from attn_only_lens.patching.prompt_chunks import PromptChunk, PromptChunks
from attn_only_lens.patching.results import Paths, run_settings
from attn_only_lens.patching.run_patches import Batching, check_edits
from attn_only_lens.patching.site_groups import (
    Chunk,
    SiteGroup,
    position_sets,
    site_rows,
    split_prompts,
)

_AT_ONCE = 256  # number of paths per chunk when computing exact values
_ESTIMATES_AT_ONCE = 2**24  # number of paths per chunk of estimates: about ten seconds of work


@dataclass(frozen=True, eq=False)
class PathPlan:
    """The prompts, senders, receivers, metric and options of path patching."""

    model: Any
    pair: PromptPair
    metric: Metric
    senders: tuple[SiteGroup, ...]
    receivers: list[SiteGroup | None]
    part: str
    direction: str
    scale: Scale
    prompts_at_once: int

    @property
    def prompts(self) -> list[range]:
        """The indices of the prompts in each chunk, in order."""
        return split_prompts(len(self.pair.clean), self.prompts_at_once)

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect results. Only jobs with equal settings are resumed."""
        reading = [group for group in self.receivers if group is not None]
        return {
            **prompt_settings(self.model, self.pair, self.metric, [*self.senders, *reading]),
            "senders": [[*site_rows([group])["name"]] for group in self.senders],
            "positions": [site_rows([group])["position"].tolist() for group in self.senders],
            "receivers": [[*site_ids(site_rows([group]))] for group in reading],
            "logits": None in self.receivers,
            "part": self.part,
            "direction": self.direction,
            "scale": self.scale,
            "prompts_at_once": self.prompts_at_once,
        }


class PathPatches:
    """Computes the metric after each path's patch, or estimates it, chunk by chunk."""

    def __init__(
        self, plan: PathPlan, top: int | None, per_prompt: bool, batch_size: int | None
    ) -> None:
        self._plan, self._batch_size = plan, batch_size
        host = host_of(plan.model)
        sites = {group.sites for group in plan.receivers if group}
        layers = sorted({x.layer for x in sites if x.kind == "attention"})
        self._names = tuple(name for layer in layers for name in input_hooks(host, layer))
        self._runs: dict[Side, Decomposition] = {}
        self._prompts = PromptChunks(
            plan.model, plan.pair, plan.metric, plan.direction, self._record
        )
        first, run = self._prompts.first(plan.prompts), self._runs["clean"]
        self.blocks = list(path_blocks(run, plan.senders, plan.receivers, plan.prompts_at_once))
        reason = (
            "no receiver reads what a sender writes; expected a receiver in a later layer, or an "
            "attention head as sender and a neuron of the same layer as receiver (unless attention "
            "and MLP run in parallel)"
        )
        InputError.raise_if([reason] * (not self.blocks), PROBLEM)
        self.n_paths = sum(block.n_paths for block in self.blocks)
        n_rows = min(top or self.n_paths, self.n_paths)
        self.totals = self._prompts.totals(plan.prompts, n_rows, per_prompt)
        if top is not None:
            runs = first.runs
            require_differentiable(runs.metric, first.target.logits)
            span = runs.clean_value - runs.corrupted_value
            require_slope(runs.metric, first.target.logits, first.source.logits, span)
        self.on_done: Callable[[int], object] = lambda n: None
        self._tested = set[bool]()

    def _record(self, pair: PromptPair, *, distinct: bool) -> RunPair:
        """Record both runs on the given prompts, including the output of each sublayer."""
        model, names = self._plan.model, self._names
        self._runs["clean"] = decompose(model, pair.clean, pair.mask, names=names)
        self._runs["corrupted"] = decompose(model, pair.corrupted, pair.mask, names=names)
        recordings = self._runs["clean"].recording, self._runs["corrupted"].recording
        return run_pair(model, pair, *recordings, self._plan.metric, distinct=distinct)

    def all_paths(self) -> tuple[pd.DataFrame, list[range]]:
        """Return all paths, and each chunk's range of rows. Chunks never split a path block."""
        work = pd.concat([block.paths(number) for number, block in enumerate(self.blocks)])
        ends = np.cumsum([0, *(block.n_paths for block in self.blocks)]).tolist()
        cuts = split_blocks(self.blocks, _AT_ONCE)
        return work, [range(ends[cut.start], ends[cut.stop]) for cut in cuts]

    def largest_paths(self, job: Job, top: int) -> tuple[pd.DataFrame, list[range]]:
        """Return the paths with the largest |mean estimate|, and each chunk's range of rows."""
        # The rows of these chunks are path blocks. Their ranges of prompts are not used.
        chunks = [Chunk(range(0), cut) for cut in split_blocks(self.blocks, _ESTIMATES_AT_ONCE)]
        estimated = job.run(chunks, partial(self.estimate, top=top), unit="block")
        work = largest([pd.DataFrame(arrays) for _, arrays in estimated], top)
        ends = [*range(0, len(work), _AT_ONCE), len(work)]
        return work, [range(*bounds) for bounds in pairwise(ends)]

    def estimate(self, chunk: Chunk, top: int) -> Arrays:
        """Estimate all paths of some path blocks; return those with the largest |mean estimate|."""
        blocks = {number: self.blocks[number] for number in chunk.rows}
        total: dict[int, Any] = dict.fromkeys(blocks, 0.0)
        for some_prompts in self._plan.prompts:
            prompts = self._prompts.of(some_prompts)
            runner = self._runner(prompts)
            gradients = receiver_gradients(self._plan.model, self._plan.receivers, prompts)
            for number, block in blocks.items():
                changes = estimates(runner, block.of_prompts(prompts.pair), gradients)
                weight = self.totals.weight(some_prompts)
                total[number] = total[number] + weight * changes.cpu().double().numpy()
        frames = [
            largest([block.paths(number).assign(estimate=np.ravel(total[number]))], top)
            for number, block in blocks.items()
        ]
        picked = largest(frames, top)
        return {str(name): picked[name].to_numpy(copy=True) for name in picked}

    def compute(self, chunk: Chunk, work: pd.DataFrame) -> Arrays:
        """Run a chunk's patches, and return the statistics that a job stores."""
        prompts = self._prompts.of(chunk.prompts)
        runner = self._runner(prompts)
        values = [
            runner.values(self.blocks[number].of_prompts(prompts.pair), i, j)
            for number, i, j in by_block(work.iloc[chunk.rows.start : chunk.rows.stop])
        ]
        return {"kept": prompts.reduced(self.totals, torch.cat(values)).numpy()}

    def results(self, work: pd.DataFrame) -> Paths:
        """Return the results of all chunks as a frame: one row per path, or per path and prompt."""
        plan = self._plan
        settings = run_settings(plan.model, plan.pair, plan.senders, self.totals, plan.part)
        paths = pd.concat(
            [self.blocks[number].frame(i, j) for number, i, j in by_block(work)],
            ignore_index=True,
        )
        if "estimate" in work:
            clean, corrupted = self.totals.ends
            baseline = 0.0 if plan.direction == "denoise" else 1.0
            paths["estimate"] = baseline + work["estimate"] / (clean - corrupted)
        columns = self.totals.columns()
        repeated = np.repeat(np.arange(len(paths)), len(columns["value"]) // len(paths))
        frame = paths.iloc[repeated].reset_index(drop=True).assign(**columns)
        return Paths(frame=frame, scale=plan.scale, n_paths=self.n_paths, **settings)

    def _runner(self, prompts: PromptChunk) -> PathRunner:
        """Return a path runner for these prompts, after testing edits in full forward passes."""
        if prompts.runner is None:
            plan, runs = self._plan, self._runs
            replay = make_replay(plan.model, prompts.target, prompts.runs.metric)
            if prompts.padded not in self._tested:
                positions = position_sets(plan.senders)
                groups = [SiteGroup.product(x.sites, positions) for x in plan.receivers if x]
                check_edits(replay, [group.of_prompts(prompts.pair) for group in groups], "z")
                self._tested.add(prompts.padded)
            target, source = runs["clean"], runs["corrupted"]
            if plan.direction == "denoise":
                target, source = source, target
            numbers = replay.numbers_per_token
            batching = Batching(plan.model, self._batch_size, self.on_done, numbers)
            prompts.runner = PathRunner(
                Readers(replay, target), source, plan.part, plan.scale, prompts.unpatched, batching
            )
        runner: PathRunner = prompts.runner
        return runner
