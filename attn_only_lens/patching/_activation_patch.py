"""Exact activation patching: compute the metric after a patch of each site."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.arguments import POSITIVE, one_of
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.directions import ABLATIONS, DIRECTIONS, direction_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, Metric, as_metric
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import saved_state
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions, warn_of_unlike_tokens
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair, single_prompts
from attn_only_lens.engine.recording import RunPair, record_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import PARTS, LayerSites, Part, Sites, split_positions
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import InputError
from attn_only_lens.patching.job import Arrays, Job, require_folder
from attn_only_lens.patching.over_prompts import OverPrompts
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


@one_thread_per_model
@warned_once()
def activation_patch(
    model: Any,
    clean: Prompts,
    corrupted: Prompts | None,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    part: Part = "z",
    positions: Positions = "each",
    direction: str = "denoise",
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    batch_size: int | None = None,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> Sweep:
    """Patch each site (a head at a position) in turn, and compute the metric after each patch.

    Results are exact: each value equals the metric of a full forward pass with the patch, up to
    rounding errors. Many sites are patched at once, and only activations that change are recomputed
    (see `engine/replay`). If a patch cannot affect the metric, its value is the unpatched metric.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        clean: a text, a list of texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the corrupted prompts, with the same number of tokens; None for an ablation
            without corrupted prompts, whose scores are fractions of the clean run's metric.
        metric: `logit_diff(...)` or another metric, or any function of logits
            [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: the patched activation: "z", a head's output; "pattern", a head's attention pattern;
            "value"; "q"; or "k", for attention heads only. Heads that share a neuron are patched
            together unless a name selects a single head. If heads share values and keys
            (grouped-query attention), only one head reads the patch. Of attention heads, "value"
            and "k" are patched at the token that is read (the key's position), and "z", "pattern"
            and "q" at the token that reads (the query's position).
        positions: "each" in turn, "all" at once, a number (-1 is each prompt's last token), a list
            of numbers, or roles: `{"subject": [2, 4], "end": -1}`, with one number for all prompts
            or one number per prompt, counted without padding. If prompts differ in length, means
            over prompts at a number from 0 give a warning.
        direction: "denoise" patches clean activations into the corrupted run; "noise" patches
            corrupted activations into the clean run. An ablation replaces z in the clean run:
            "zero" by 0; "mean" by the mean over all non-padding tokens of all prompts; "resample"
            by z of the next prompt at the same position (for the last prompt, of the first prompt);
            "bias" by z with all of a neuron-head's attention on the bias token.
        mask: 1 for real tokens, 0 for padding, if prompts are given as tokens.
        reference: a text, or tokens [batch, pos] without padding, for "mean" and "resample" (prompt
            i is resampled from row i); by default the clean prompts.
        per_prompt: whether to return one row per site and prompt; by default there is one row per
            site, with the mean over prompts and standard errors (see `Sweep`).
        prompts_at_once: how many prompt pairs have their activations in memory at once; by default
            as many as fit in a fifth of the memory, or the number in the folder `resume`; for a
            custom metric, all of them.
        batch_size: how many sites run in one forward pass; by default as many as fit in memory.
        resume: a checkpoint folder: results are written to the folder as they are computed, and an
            interrupted sweep resumes from the folder. A custom metric then needs a version (see
            `custom`). Under `accelerate launch`, where processes share the work, the folder is
            required.
        progress: whether to show a progress bar; a string is its label.

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
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> sweep = p.activation_patch(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...     p.logit_diff(correct=7, wrong=8), sites=p.neuron_heads(), progress=False)
        >>> len(sweep.to_frame())  # 512 neurons at 3 positions
        1536
    """
    # Check
    reasons = sweep_reasons(model, corrupted, part, direction, reference)
    reasons += POSITIVE.or_none.reasons(batch_size=batch_size, prompts_at_once=prompts_at_once)
    InputError.raise_if(reasons, "this cannot be patched")
    require_folder(resume)

    # Plan
    plan = plan_sweep(
        *(model, clean, corrupted, metric),
        sites=sites,
        part=part,
        positions=positions,
        direction=direction,
        mask=mask,
        reference=reference,
        per_prompt=per_prompt,
        prompts_at_once=prompts_at_once,
        resume=resume,
    )
    chunks = plan.chunks(by_cost=resume is not None)
    prompts = plan.prompt_chunks(plan.record)
    totals = prompts.totals(plan.prompts, plan.n_rows, plan.per_prompt)

    # Run
    job = Job(resume, plan.settings, progress)
    patches = SitePatches(plan, prompts, totals, batch_size, job.advance)
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
    asked: Sites | None
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
            "at": None if self.asked is None else split_positions(self.asked),
            "float32 products": matmul_precision(),
            "part": self.part,
            "direction": self.direction,
            "per_prompt": self.per_prompt,
            "prompts_at_once": self.prompts_at_once,
        }


def plan_sweep(
    model: Any,
    clean: Prompts,
    corrupted: Prompts | None,
    metric: AnyMetric,
    *,
    sites: Sites | None,
    part: Part,
    positions: Positions,
    direction: str,
    mask: Tensor | None,
    reference: str | Tokens | None,
    per_prompt: bool,
    prompts_at_once: int | None,
    resume: str | Path | None,
    traced: bool = False,
) -> SweepPlan:
    """Resolve the prompts, the sites and the metric, and choose the number of prompts per chunk."""
    pair = (
        single_prompts(model, clean, mask)
        if corrupted is None
        else prompt_pair(model, clean, corrupted, mask)
    )
    most_rows = None if traced else ROWS  # estimates (`traced`) compute all rows at once
    groups = site_groups(model, pair, sites, positions, part, most_rows=most_rows)
    if not per_prompt:
        warn_of_unlike_tokens(model, pair, position_sets(groups))
    tokens = None if reference is None else checked_tokens(model, reference)
    metric, layer_sites = as_metric(metric), tuple(dict.fromkeys(g.sites for g in groups))
    at_once = prompts_per_chunk(
        *(model, pair, metric, layer_sites, part, prompts_at_once), resume=resume, traced=traced
    )
    runs = model, pair, metric
    return SweepPlan(*runs, sites, groups, part, direction, tokens, bool(per_prompt), at_once)


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
    model: Any, corrupted: object, part: object, direction: object, reference: object
) -> list[str]:
    """Return every reason why the given options for patching or attribution are invalid."""
    reasons = [*reasons_not_to_run(model)]
    reasons += one_of(*PARTS).reasons(part=part)
    reasons += one_of(*DIRECTIONS, *ABLATIONS).reasons(direction=direction)
    reasons += direction_reasons(corrupted, part, direction)
    if reference is not None and direction not in ("mean", "resample"):
        reasons.append(f"got a reference with direction={direction!r}; expected no reference")
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
