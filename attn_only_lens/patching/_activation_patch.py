"""Exact activation patching: compute the metric after a patch of each site."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from attn_only_lens.arguments import one_of
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.directions import ABLATIONS, DIRECTIONS, Ablation
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import Metric, as_metric
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import saved_state
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import RunPair, record_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import PARTS, LayerSites, Part, Sites, SomeSites
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import InputError
from attn_only_lens.patching.job import Arrays, Job
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.prompt_chunks import (
    AblatedRuns,
    PromptChunk,
    PromptChunks,
    Runs,
    prompts_per_chunk,
)
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.run_patches import (
    Batching,
    PatchRunner,
    batches_of_groups,
    check_edits,
)
from attn_only_lens.patching.site_groups import (
    ROWS,
    Chunk,
    SiteGroup,
    position_sets,
    roles,
    site_groups,
    split_prompts,
    split_sweep,
)
from attn_only_lens.precision import matmul_precision
from attn_only_lens.work import Work, work_reasons


@one_thread_per_model
@warned_once()
def activation_patch(
    model: Any,
    contrast: Contrast,
    *,
    sites: SomeSites = "all",
    part: Part = "z",
    direction: str | Ablation = "denoise",
    per_prompt: bool = False,
    work: Work = Work(),
) -> Sweep:
    """Patch each site (a head at a position) in turn, and compute the metric after each patch.

    Results are exact: each value equals the metric of a full forward pass with the patch, up to
    rounding errors. Many sites are patched at once, and only activations that change are recomputed
    (see `engine/replay`). If a patch cannot affect the metric, its value is the unpatched metric.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: the two runs and the metric; see `Contrast`. Without corrupted prompts, only
            ablations are possible, and scores are fractions of the clean run's metric.
        sites: which heads are patched, and at which positions; see `Sites`.
        part: the patched activation: "z", a head's output; "pattern", a head's attention pattern;
            "value"; "q"; or "k", for attention heads only. Heads that share a neuron are patched
            together unless a name selects a single head. If heads share values and keys
            (grouped-query attention), only one head reads the patch. Of attention heads, "value"
            and "k" are patched at the token that is read (the key's position), and "z", "pattern"
            and "q" at the token that reads (the query's position).
        direction: "denoise" patches clean activations into the corrupted run; "noise" patches
            corrupted activations into the clean run. An ablation, "zero", "mean", "resample" or
            "bias", replaces z in the clean run; see `Ablation`.
        per_prompt: whether to return one row per site and prompt; by default there is one row per
            site, with the mean over prompts and standard errors (see `Sweep`).
        work: how the patches are run; see `Work`.

    Returns:
        The metric and the score after each patch. The score is 0 for the corrupted run and 1 for
        the clean run.

    Raises:
        InputError: with every reason: invalid prompts, metric, sites or positions; `per_prompt`
            with a metric that has one value for all prompts; a folder with another sweep.
        UnsupportedModelError: a forward pass of the model cannot be split at block boundaries, or a
            patch would not have the same effect as a hook in a full forward pass (both are tested
            first).
        CheckpointError: files in the folder `resume` are damaged.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> sweep = p.activation_patch(model, sums, sites="neurons")
        >>> len(sweep.to_frame())  # 512 neurons at 3 positions
        1536
    """
    # Check
    reasons = sweep_reasons(model, contrast, part, direction) + work_reasons(work)
    InputError.raise_if(reasons, "this cannot be patched")

    # Plan
    plan = plan_sweep(model, contrast, sites, part, direction, per_prompt, work)
    processes = Processes.of(work.share)
    chunks = plan.chunks(by_cost=work.resume is not None or processes.size > 1)
    prompts = plan.prompt_chunks(plan.record)
    totals = prompts.totals(plan.prompts, plan.n_rows, plan.per_prompt)

    # Run
    job = Job(work.resume, plan.settings, work.progress, processes)
    patches = SitePatches(plan, prompts, totals, work.batch_size, job.advance)
    for chunk, arrays in job.run(chunks, patches.compute, unit="site"):
        totals.add(chunk, torch.from_numpy(arrays["kept"]))

    # Collect
    return Sweep.of_prompts(model, plan.pair, plan.groups, totals, part)


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """The prompts, sites, metric and options of a sweep."""

    model: Any
    pair: PromptPair
    metric: Metric
    asked: Sites
    groups: tuple[SiteGroup, ...]
    part: Part
    direction: str
    reference: Tokens | None
    per_prompt: bool
    prompts_at_once: int

    @cached_property
    def sites(self) -> tuple[LayerSites, ...]:
        """The heads to patch, grouped by layer and kind."""
        return tuple(dict.fromkeys(group.sites for group in self.groups))

    @property
    def n_rows(self) -> int:
        """The number of sites, where a site is a head at a position."""
        return sum(map(len, self.groups))

    @property
    def prompts(self) -> list[range]:
        """The indices of the prompts in each chunk, in order."""
        return split_prompts(len(self.pair.clean), self.prompts_at_once)

    def chunks(self, *, by_cost: bool) -> list[Chunk]:
        """Split the sweep into chunks of prompts; if `by_cost` is True, split the sites too."""
        if by_cost:
            at_once = self.prompts_at_once
            return split_sweep(self.model, self.pair, self.groups, at_once, self.direction)
        return [Chunk(prompts, range(self.n_rows)) for prompts in self.prompts]

    def record(self, pair: PromptPair, *, distinct: bool) -> RunPair:
        """Record the clean and the corrupted run on the given prompts."""
        return record_pair(self.model, pair, self.metric, self.sites, self.part, distinct=distinct)

    def prompt_chunks(self, record: Callable[..., Runs]) -> PromptChunks[Runs]:
        """Return the clean and corrupted runs on all prompts, which are recorded chunk by chunk."""
        ablated = None
        if self.direction in ABLATIONS:
            ablated = AblatedRuns(
                *(self.model, self.pair, self.direction, self.reference, self.sites),
                self.prompts_at_once,
            )
        return PromptChunks(self.model, self.pair, self.metric, self.direction, record, ablated)

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect results. Only sweeps with equal settings are resumed."""
        return {
            **prompt_settings(self.model, self.pair, self.metric, self.groups),
            "reference": None if self.reference is None else self.reference.tolist(),
            "sites": [name for site in self.sites for name in site.names],
            "positions": [position.label for position in position_sets(self.groups)],
            "at": self.asked.split(),
            "float32 products": matmul_precision(),
            "part": self.part,
            "direction": self.direction,
            "per_prompt": self.per_prompt,
            "prompts_at_once": self.prompts_at_once,
        }


def plan_sweep(
    model: Any,
    contrast: Contrast,
    sites: SomeSites,
    part: Part,
    direction: str | Ablation,
    per_prompt: bool,
    work: Work,
    *,
    traced: bool = False,
) -> SweepPlan:
    """Resolve the prompts, the sites and the metric, and choose the number of prompts per chunk."""
    pair, ablation, sites = contrast.pair(model), Ablation.of(direction), Sites.of(sites)
    most_rows = None if traced else ROWS  # estimates (`traced`) compute all rows at once
    groups = site_groups(model, pair, sites, part, averaged=not per_prompt, most_rows=most_rows)
    reference = ablation.reference
    tokens = None if reference is None else checked_tokens(model, reference)
    metric, layer_sites = as_metric(contrast.metric), tuple(dict.fromkeys(g.sites for g in groups))
    at_once = prompts_per_chunk(model, pair, metric, layer_sites, part, work, traced=traced)
    options: Any = (sites, groups, part, ablation.kind, tokens, bool(per_prompt), at_once)
    return SweepPlan(model, pair, metric, *options)


class SitePatches:
    """Patches all sites of a sweep, and computes the metric after each patch, chunk by chunk."""

    def __init__(
        self,
        plan: SweepPlan,
        prompts: PromptChunks,
        totals: OverPrompts,
        batch_size: int | None,
        on_done: Callable[[int], object],
    ) -> None:
        self._plan, self._prompts, self._totals = plan, prompts, totals
        self._batch_size, self._on_done = batch_size, on_done
        self._tested: set[tuple[bool, int]] = set()

    def compute(self, chunk: Chunk) -> Arrays:
        """Run a chunk's patches, and return the statistics that a job stores."""
        prompts = self._prompts.of(chunk.prompts)
        prompts.runner = prompts.runner or self._runner(prompts)
        groups = chunk.groups(self._plan.groups, prompts.pair)
        values = map(prompts.runner.values, batches_of_groups(groups))
        return {"kept": prompts.reduced(self._totals, torch.cat([*chain(*values)])).numpy()}

    def _runner(self, prompts: PromptChunk) -> PatchRunner:
        """Return a patch runner for these prompts, after comparing its edits with full passes."""
        plan = self._plan
        replay = make_replay(plan.model, prompts.target, prompts.runs.metric)
        batching = Batching(plan.model, self._batch_size, self._on_done, replay.numbers_per_token)
        runner = PatchRunner(replay, prompts.source, plan.part, prompts.unpatched, batching)
        groups = [group.of_prompts(prompts.pair) for group in plan.groups]
        first = runner.earliest(groups)
        if (prompts.padded, first) not in self._tested:
            check_edits(replay.precise, groups, plan.part, (0, first) if first else ())
            self._tested.add((prompts.padded, first))
        return runner


def sweep_reasons(
    model: Any, contrast: object, part: object, direction: str | Ablation
) -> list[str]:
    """Return every reason why the given options for patching or attribution are invalid."""
    reasons = [*reasons_not_to_run(model), *contrast_reasons(contrast, both=False)]
    reasons += one_of(*PARTS).reasons(part=part)
    ablation = Ablation.of(direction)
    reasons += one_of(*DIRECTIONS, *ABLATIONS).reasons(direction=ablation.kind)
    if isinstance(contrast, Contrast):
        reasons += ablation.reasons(contrast.corrupted is not None, part)
    return reasons


def prompt_settings(
    model: Any, pair: PromptPair, metric: Metric, groups: Sequence[SiteGroup]
) -> dict[str, Any]:
    """Return the model, the prompts and the metric, which all jobs store as settings."""
    return {
        **saved_state(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "metric": metric.name,
        "metric_identity": metric.identity(),
        "where": [role.chosen.nonzero().tolist() for role in roles(groups)],
    }
