"""Run a planned attribution, chunk by chunk, and collect its results."""

from contextlib import nullcontext
from functools import partial
from math import nan
from typing import Any

import numpy as np
import torch

from attn_only_lens.engine.multipliers import float32_slopes
from attn_only_lens.patching._activation_patch import SweepPlan
from attn_only_lens.patching.estimate import Estimate
from attn_only_lens.patching.estimator import Estimator, TracedRuns
from attn_only_lens.patching.job import Arrays, Job
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.prompt_chunks import PromptChunks
from attn_only_lens.patching.repairs import Budget, expected_pearson
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.site_groups import Chunk
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work


@full_precision()
def attribute(
    plan: SweepPlan,
    options: Estimate,
    work: Work,
    *,
    top_by_prompt: bool = False,
) -> Sweep:
    """Estimate the results of patching all sites of a plan; see `attribution`.

    With `top_by_prompt`, the top rows, which are patched exactly, are those of single
    prompts; otherwise they are those of the means over prompts.
    """
    secant = options.method == "secant"
    with float32_slopes(plan.model, plan.pair, plan.metric) if secant else nullcontext():
        chunks = plan.chunks(by_cost=False)
        progress = bool(work.progress)
        estimator = Estimator(plan, options, top_by_prompt, progress and len(chunks) == 1)
        prompts = plan.prompt_chunks(estimator.record)
        totals = prompts.totals(plan.prompts, plan.n_rows, plan.per_prompt)

        # Run
        settings = options.settings()
        shown = work.progress if len(chunks) > 1 else False
        processes = Processes.of(work.share)
        job = Job(work.resume, lambda: plan.settings() | settings, shown, processes)
        compute = partial(_estimate_chunk, estimator, prompts, totals)
        exact, sums = np.ones(plan.n_rows, dtype=bool), dict[str, Any]()
        before_switch = ~exact
        for chunk, arrays in job.run(chunks, compute, unit="site"):
            totals.add(chunk, torch.from_numpy(arrays["kept"]))
            exact &= arrays["exact"]  # patched in all chunks
            before_switch |= arrays["before_switch"]
            weight = totals.weight(chunk.prompts)
            share = len(chunk.prompts) / totals.n_prompts
            # The mean's error is at most the weighted sum of the chunks' errors.
            for name, w in (("errors", weight), ("by_pattern", weight), ("forwards", share)):
                if name in arrays:
                    sums[name] = sums.get(name, 0.0) + w * arrays[name]

        # Collect
        return Sweep.of_prompts(
            *(plan.model, plan.pair, plan.groups, totals, plan.part, options.method),
            exact=exact,
            by_pattern=sums.get("by_pattern"),
            before_switch=before_switch if before_switch.any() else None,
            **_expected_pearson(
                plan, totals, sums["errors"], before_switch & ~exact, options.budget
            ),
            forwards=float(sums["forwards"]),
        )


def _estimate_chunk(
    estimator: Estimator, prompts: PromptChunks[TracedRuns], totals: OverPrompts, chunk: Chunk
) -> Arrays:
    """Estimate all effects on a chunk of prompts, and return the statistics that a job stores."""
    some_prompts = prompts.of(chunk.prompts)
    repairs, by_pattern = estimator.estimate(some_prompts)
    errors = [nan if error is None else error for error in repairs.expected_errors.values()]
    arrays = {
        "kept": some_prompts.reduced(totals, repairs.values).numpy(),
        "exact": repairs.exact,
        "before_switch": repairs.before_switch,
        "errors": np.array(errors, dtype=np.float64),
        "forwards": np.array(repairs.forwards),
    }
    return arrays if by_pattern is None else arrays | {"by_pattern": by_pattern.numpy()}


def _expected_pearson(
    plan: SweepPlan, totals: OverPrompts, errors: np.ndarray, doubtful: np.ndarray, budget: Budget
) -> dict[str, Any]:
    """Return each kind's expected correlation with exact scores, or why it is unknown.

    `doubtful` marks estimates of sites before a switch.
    """
    sizes = [len(group) for group in plan.groups]
    kind_of_row = np.repeat([group.sites.kind for group in plan.groups], sizes)
    expected, unknown = dict[Any, float | None](), dict[Any, str]()
    kinds = dict.fromkeys(site.kind for site in plan.sites) if budget else {}
    for kind, error in zip(kinds, errors.tolist(), strict=False):
        here = kind_of_row == kind
        expected[kind] = None
        if n := int((doubtful & here).sum()):
            unknown[kind] = f"{n:,} estimates are of sites before a switch"
        elif np.isnan(error):
            unknown[kind] = "too few sites were patched"
        else:
            expected[kind] = expected_pearson(error, totals.means.numpy()[here])
            if expected[kind] is None:
                unknown[kind] = "the estimates of patched sites were too far off"
    return {"expected_pearson": expected, "unknown": unknown}
