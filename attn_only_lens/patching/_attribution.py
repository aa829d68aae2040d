"""Attribution: estimate the effects of all patches from a few forward and backward passes.

    value after the patch ≈ value + Σ_{patched positions} g · Δ

Here `value` is the metric of the target run, into which activations are patched. Δ is the
difference of a head's activation (source run minus target run), and g is the gradient of the metric
with respect to this activation. Scores are defined in `results.py`. For an ablation, the source run
is the clean run with z ablated. The methods differ in g:

    "gradient"    g is the gradient in the target run: attribution patching (Nanda 2023; Syed, Rager
                  and Conmy 2023, "Attribution Patching Outperforms Automated Circuit Discovery").
    "exact_gate"  g is the same, but the gate's change with its query is exact: w(q') - w(q), not
                  w'(q) Δq. For an attention head, z' = softmax(q' · K) V comes from one pass,
                  in which all queries are replaced and each z is restored before anything reads it.
    "integrated"  g is averaged over k runs with embeddings x + α_j (x' - x) between the two runs,
                  where α_j = (j - 1/2)/k: EAP-IG (Hanna, Pezzelle and Belinkov 2024, "Have Faith in
                  Faithfulness"), by the midpoint rule.
    "secant"      g is a multiplier between the two runs (`engine/contrast.py`), made of secant
                  slopes. Σ g · Δ over a layer's heads, plus the part of the residual stream that
                  bypasses them, is exactly the change in the metric. The direction changes only its
                  sign, so compare it with the mean of denoising and noising.

Every method treats z as linear in the keys of attention heads (part "k"); "gradient" and
"integrated" also treat z as linear in queries. In all other cases Δ is exact: a patch of any part
of a neuron-head (a neuron computed as an attention head) is treated as the change Δz that it causes
in the neuron-head's output (`edits.py`). The "gradient" estimate is exact to first order: as ε → 0,
a patch of ε Δ changes the metric by ε times the estimate.

The unit of cost is a forward pass, which takes 2 · n_pos · parameters flops (a backward pass
without weight gradients costs the same). "gradient" costs 3 forward passes; "exact_gate" costs 3,
plus 2 for queries of attention heads; "secant" costs 4; "integrated" costs 3 + 2 · steps.
Afterwards, the sites whose estimates are likely to be wrong are patched exactly (`repairs.py`). To
find these sites, "secant" and "integrated" also take the gradient in the target run, which costs 3
more passes for "secant" and 1 for "integrated". In `analyses/results`, `attribution_repairs.md` and
`contrast_vs_patching.md` report how well the estimates agree with exact patching.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import as_plain, is_count, option_reasons
from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.engine.contrast import BothRuns, Contrast, contrast, float32_slopes, run_both
from attn_only_lens.engine.directions import ABLATIONS
from attn_only_lens.engine.edits import by_site
from attn_only_lens.engine.gradients import (
    Tape,
    edit_input,
    gradient_node,
    site_estimates,
    start_graph,
)
from attn_only_lens.engine.input_warnings import warn, warned_once
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    no_gradient_reasons,
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts
from attn_only_lens.engine.recording import Recording, RunPair, Side, record_pair, run, run_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import SHARED_PARTS, Part, Sites, hook_name
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.patching._activation_patch import (
    SweepPlan,
    count_reasons,
    plan_sweep,
    sweep_reasons,
)
from attn_only_lens.patching.job import Arrays, Job
from attn_only_lens.patching.over_prompts import OverPrompts, mean_over, moved_values
from attn_only_lens.patching.prompt_chunks import PromptChunk, PromptChunks
from attn_only_lens.patching.repairs import (
    Budget,
    Repairer,
    Repairs,
    budget_reasons,
    expected_pearson,
    hook_points,
    lie_before_switch,
    on_one_device,
    repair_keys,
    run_with_part,
)
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.run_patches import Batching, PatchRunner
from attn_only_lens.patching.site_groups import Chunk, SiteGroup
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import disagreement

Method = Literal["gradient", "exact_gate", "integrated", "secant"]
METHODS: tuple[str, ...] = get_args(Method)
_TRACED = ("gradient", "exact_gate")  # methods that need an autograd graph of the target run
_STEPS = 5  # the number of steps in the EAP-IG paper's experiments


@one_thread_per_model
@warned_once()
def attribution(
    model: Any,
    clean: Prompts,
    corrupted: Prompts | None,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    part: Part = "z",
    positions: Positions = "each",
    direction: str = "denoise",
    method: Method = "exact_gate",
    steps: int | None = None,
    budget: Budget = "auto",
    split: bool = False,
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Estimate the results of activation patching for all sites at once.

    The scale of the scores and the columns of the frame are the same as in `activation_patch`.
    `agreement` compares estimates with exact results.

    Gradient estimates can miss the site with the largest effect, which is usually an early-layer
    neuron at the first token that differs between the prompts. Sites with the largest expected
    errors are thus patched exactly, and so are the rows that `top` shows, as far as the budget
    allows (`repairs.py`). Column `exact` marks these rows. In a small model, most or all sites are
    patched; with `budget=0`, none are. `expected_pearson` is the expected correlation with exact
    scores, for attention heads and for neuron-heads, or None; `unknown` then says why.

    Estimates are worst where the runs differ by a switch: at a position, the norm of the residual
    stream at some block's input differs by a factor of two or more. Column `before_switch` marks
    the sites that lie before a switch; no correlation is expected unless they all were patched.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
            The `requires_grad` and `grad` of its parameters do not change. "secant" runs a
            half-precision model in float32, and warns by how much this alters the metric's range
            (clean minus corrupted).
        clean: a text, a list of texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the corrupted prompts, with the same number of tokens; None for an ablation
            without corrupted prompts, whose scores are fractions of the clean run's metric.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits
            [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", "pattern", "value", "q", "k"; see `activation_patch`.
        positions: "each", "all", numbers, or roles; see `activation_patch`.
        direction: "denoise" or "noise"; or an ablation of z in the clean run, "zero", "mean",
            "resample" or "bias"; see `activation_patch`.
        method: "gradient", "exact_gate", "integrated" or "secant"; see the module docstring.
        steps: for "integrated", how many gradients to average; by default 5.
        budget: the cost of exact patches, in forward passes (counted in flops), or "auto". "auto"
            spends at least 2 forward passes or 0.2 GFLOP. "auto" then continues until the top 20
            rows and the sites before a switch are exact and the expected correlations are .99, or
            until it has spent 7 forward passes (10 with the estimates) or 4 GFLOP. Of the two
            limits, the larger one applies. It is 2.5 times as large if one of the top 20
            estimates has the wrong sign, or if the top 20 rows need more. Tests of a new model cost
            about ten passes.
        split: with method "secant" and budget=0, also return each head's effect through its pattern
            and through its values: columns `by_pattern` and `by_value`, which add up to the effect
            on the score.
        mask: 1 for real tokens, 0 for padding, if prompts are given as tokens.
        reference: the prompts for "mean" and "resample"; see `activation_patch`.
        per_prompt: whether to return one row per site and prompt; see `activation_patch`. The
            estimates of all prompts come from the same gradients.
        prompts_at_once: how many prompt pairs are run at once; see `activation_patch`. Each chunk
            of prompts has its own budget: a row is `exact` if it was patched in all chunks.
        resume: a checkpoint folder; see `activation_patch`.
        progress: whether to show progress bars. They count exact patches and the steps of
            "integrated", or sites if there are several chunks of prompts.

    Returns:
        The estimated metric and score after each patch. The score is 0 for the corrupted run and 1
        for the clean run.

    Raises:
        InputWarning: with "secant", the metric has no secant rule, and shares do not add up to the
            metric's change.
        InputError: with every reason: invalid prompts, metric, sites or positions; the metric has
            zero gradient in the target run (for instance `kl` in the clean run).
        UnsupportedModelError: the model has an operation without a secant rule ("secant"), reads
            tokens again after its embedding ("integrated"), or norms the queries of all heads
            together ("exact_gate"); a hook point of the sites does not fire, or is read-only.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
        >>> metric, sites = p.logit_diff(correct=7, wrong=8), p.neuron_heads()
        >>> estimate = p.attribution(model, *prompts, metric, sites=sites, positions=-1)
        >>> exact = p.activation_patch(
        ...     model, *prompts, metric, sites=sites, positions=-1, progress=False)
        >>> bool(p.agreement(exact, estimate)["pearson"].item() > 0.99)
        True
    """
    plan = plan_attribution(
        *((model, clean, corrupted, metric), method, budget, steps, split),
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
    return attribute(
        *(plan, None, method, budget),
        steps=steps,
        split=split,
        top_by_prompt=per_prompt,
        resume=resume,
        progress=progress,
    )


def plan_attribution(
    prompts: tuple[Any, ...],
    method: str,
    budget: Budget,
    steps: int | None = None,
    split: bool = False,
    **options: Any,
) -> SweepPlan:
    """Check all arguments of `attribution`, and plan the rows of its result."""
    model, _, corrupted, _ = prompts
    part, direction, per_prompt = options["part"], options["direction"], options["per_prompt"]
    reasons = sweep_reasons(model, corrupted, part, direction, options["reference"])
    reasons += count_reasons(prompts_at_once=options["prompts_at_once"])
    reasons += _method_reasons(part, direction, method, steps)
    reasons += budget_reasons(budget) + no_gradient_reasons()
    if split and (method != "secant" or budget != 0 or per_prompt):
        reasons.append(
            f"got split=True with method={method!r}, budget={budget!r}, per_prompt={per_prompt}; "
            "expected method='secant', budget=0 (an exact patch cannot be split) and "
            "per_prompt=False"
        )
    InputError.raise_if(reasons, "this cannot be attributed")
    return plan_sweep(*prompts, **options, traced=True)


@full_precision()
def attribute(
    plan: SweepPlan,
    both: BothRuns | None,
    method: Method,
    budget: Budget,
    *,
    steps: int | None = None,
    split: bool = False,
    top_by_prompt: bool = False,
    resume: str | Path | None = None,
    progress: bool = False,
) -> Sweep:
    """Estimate the results of patching all sites of a plan; see `attribution`.

    `both` holds the clean and corrupted runs of all prompts, or None. Only "secant" with budget=0
    uses `both`. The top rows, which are patched exactly, are those of the means over prompts, or
    those of single prompts.
    """
    model = plan.model
    with float32_slopes(model, plan.pair, plan.metric) if method == "secant" else nullcontext():
        chunks = plan.chunks(by_cost=False)
        bars = progress and len(chunks) == 1
        estimator = _Estimator(
            plan, both, method, steps or _STEPS, budget, bars, split, top_by_prompt
        )
        prompts = plan.prompt_chunks(estimator.record)
        totals = prompts.totals(plan.prompts, plan.n_rows, plan.per_prompt)

        # Run
        settings = {"method": method, "steps": steps, "budget": as_plain(budget), "split": split}
        job = Job(resume, lambda: plan.settings() | settings, progress and len(chunks) > 1)
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
            *(model, plan.pair, plan.groups, totals, plan.part, method),
            exact=exact,
            by_pattern=sums.get("by_pattern"),
            before_switch=before_switch if before_switch.any() else None,
            **_expected_pearson(plan, totals, sums["errors"], before_switch & ~exact, budget),
            forwards=float(sums["forwards"]),
        )


def _estimate_chunk(
    estimator: "_Estimator", prompts: PromptChunks, totals: OverPrompts, chunk: Chunk
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


@dataclass(eq=False)
class _Estimator:
    """Estimates the effects of patching all sites, one chunk of prompts at a time."""

    _plan: SweepPlan
    _both: BothRuns | None
    _method: Method
    _steps: int
    _budget: Budget
    _progress: bool
    _split: bool
    _top_by_prompt: bool

    def __post_init__(self) -> None:
        plan, method = self._plan, self._method
        self._closed = plan.part == "q" and method == "exact_gate"
        self._nodes = {
            site: gradient_node(plan.model, site, plan.part, closed=self._closed)
            for site in plan.sites
        }
        self._attention = [site.layer for site in plan.sites if site.kind == "attention"]
        # Heads may share a key and a value, so also record z of all heads that read these.
        self._readers = {
            node: hook_name(plan.model, site.layer, "z")
            for site, node in self._nodes.items()
            if site.kind == "attention" and plan.part in SHARED_PARTS
        }
        self._tested: set[Any] = set()
        self._tape = Tape(())

    def record(self, pair: PromptPair, *, distinct: bool) -> RunPair:
        """Record both runs on the given prompts, and keep the autograd graph of the target run."""
        plan, nodes = self._plan, self._nodes.values()
        written, kept = set[str](), set[str]()
        if self._budget:
            written, kept = hook_points(plan.model, plan.sites, plan.part)
        self._tape = Tape({*nodes, *written}, self._readers)
        if self._method == "secant" and not self._budget:
            self._both = self._run_both(pair)
            sides = self._both.recordings()
            return run_pair(plan.model, pair, *sides, plan.metric, distinct=distinct)
        side: Side = "corrupted" if plan.direction == "denoise" else "clean"
        with start_graph(plan.model):
            return record_pair(
                *(plan.model, pair, plan.metric, plan.sites, plan.part),
                names=[*kept, *(nodes if plan.part == "q" else ())],
                traced=side if self._method in _TRACED or self._budget else None,
                hooks=self._tape.hooks,
                distinct=distinct,
            )

    def _run_both(self, pair: PromptPair) -> BothRuns:
        """Return both runs on the given prompts; record them unless they are recorded already."""
        if self._both is not None and self._both.pair is pair:
            return self._both
        return run_both(self._plan.model, pair)

    def estimate(self, prompts: PromptChunk) -> tuple[Repairs, Tensor | None]:
        """Estimate the effects of all sites, and replace some estimates with exact values.

        If the attribution is split, also return the part of each effect that goes through patterns.
        """
        model, part = self._plan.model, self._plan.part
        target, source, metric = prompts.target, prompts.source, prompts.runs.metric
        groups = [group.of_prompts(prompts.pair) for group in self._plan.groups]
        require_differentiable(metric, target.logits.detach())
        tangents = self._tangents(prompts) if self._method in _TRACED or self._budget else {}
        by_pattern = None
        if self._method == "secant":
            result = self._contrast(prompts)
            gradients = result.gradients
            by_pattern = self._through_patterns(result, groups) if self._split else None
        elif self._method == "integrated":  # mean over interpolated runs
            tape, steps = self._tape, self._steps
            gradients = integrated_gradients(
                model, target, source, metric, tape, steps, self._progress
            )
        else:
            gradients = tangents
        values = self._estimated(prompts, groups, gradients)
        before_switch = lie_before_switch(model, groups, target, source)
        if not self._budget:
            return Repairs.nothing(values, groups, before_switch), by_pattern
        same = gradients is tangents
        by_tangents = values if same else self._estimated(prompts, groups, tangents)
        target = replace(target, logits=target.logits.detach())
        longer = gradients if same else _longer(gradients, tangents)
        keys = repair_keys(model, groups, part, target, source, longer)
        with tqdm(total=0, unit="site", desc="repairs", disable=not self._progress) as bar:
            replay = make_replay(model, target, metric)
            batching = Batching(model, None, bar.update, replay.numbers_per_token)
            runner = PatchRunner(replay, source, part, prompts.unpatched, batching)
            mean = partial(mean_over, shares=prompts.shares)
            repairer = Repairer(
                *(runner, groups, keys, before_switch, values, by_tangents, mean, bar),
                *(self._tested, prompts.pair.n_all),
                per_prompt=self._top_by_prompt,
            )
            return repairer.spend(self._budget), by_pattern

    def _estimated(
        self, prompts: PromptChunk, groups: Sequence[SiteGroup], gradients: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the metric after each row's patch, estimated with the given gradients."""
        model, part = self._plan.model, self._plan.part
        target, moved = prompts.target, prompts.source
        if self._closed and self._attention:
            closed = run_with_part(model, target, moved, self._attention, part)
            moved = replace(moved, hooked={**moved.hooked, **closed})
        changes = []
        for group in groups:
            node = self._nodes[group.sites]
            estimates = site_estimates(
                model, group.sites, part, node, gradients[node], target, moved
            )
            changes.append(group.sums(estimates))
        return moved_values(prompts.unpatched, on_one_device(changes), prompts.shares)

    def _contrast(self, prompts: PromptChunk) -> Contrast:
        """Return secant multipliers between the two runs. Warn if effects do not add up exactly."""
        runs = self._run_both(prompts.pair)
        result = contrast(self._plan.model, runs, prompts.runs.metric, self._tape)
        if result.remainder:
            reason = (
                f"the attributions of all sites add up to {result.total:.4g}, but the metric "
                f"changes by {result.total + result.remainder:.4g}; the rest is not attributed to "
                "any site"
            )
            warn({"remainder": reason}, "this metric has no exact secant rule")
        return result

    def _through_patterns(self, result: Contrast, groups: Sequence[SiteGroup]) -> Tensor:
        """Return how much of each site's effect goes through attention patterns."""
        model, sign = self._plan.model, 1 if self._plan.direction == "denoise" else -1
        moves = []
        for group in groups:
            sites = group.sites
            by_head = result.through_patterns(model, sites.layer, sites.kind)
            moves.append(group.sums(by_site(sites, by_head)).sum(1))
        return sign * on_one_device(moves).cpu().double()

    def _tangents(self, prompts: PromptChunk) -> dict[str, Tensor]:
        """Return the gradients in the target run, by hook point."""
        metric, target, source = prompts.runs.metric, prompts.target, prompts.source
        # A zero gradient is an error only in the first chunk, and only if estimates are made of it.
        if self._method in _TRACED and prompts.first:
            ablation = self._plan.direction in ABLATIONS
            source_logits = torch.zeros_like(target.logits) if ablation else source.logits
            span = prompts.runs.clean_value - prompts.runs.corrupted_value
            require_slope(metric, target.logits, source_logits, span)
        return self._tape.gradients(metric.of_logits(target.logits))


def _longer(some: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the longer of two gradients at each hook point and token."""
    longer = {}
    for name, x in some.items():
        y = others[name]
        is_longer = x.norm(dim=-1, keepdim=True) >= y.norm(dim=-1, keepdim=True)
        longer[name] = torch.where(is_longer, x, y)
    return longer


def _method_reasons(part: str, direction: str, method: str, steps: object) -> list[str]:
    """Return every reason why this method cannot be used with the given options."""
    reasons = option_reasons("method", method, METHODS)
    if direction in ABLATIONS and method == "integrated":
        reasons.append(
            f"got direction={direction!r} with method='integrated', which interpolates between the "
            "clean and the corrupted run; expected 'denoise' or 'noise', or another method"
        )
    if method == "secant" and (part != "z" or direction in ABLATIONS):
        reasons.append(
            f"got part={part!r}, direction={direction!r} with method='secant'; expected part='z' "
            "(split=True divides it into pattern and value) and 'denoise' or 'noise', or another "
            "method"
        )
    if steps is not None and method != "integrated":
        reasons.append(f"got steps={steps!r} with method={method!r}; expected steps=None")
    elif steps is not None and not is_count(steps, 1):
        reasons.append(f"got steps={steps!r}; expected 1 or more")
    return reasons


def integrated_gradients(
    model: Any,
    target: Recording,
    source: Recording,
    metric: BoundMetric,
    tape: Tape,
    steps: int,
    progress: bool,
) -> dict[str, Tensor]:
    """Return the gradients at hook points, averaged over runs with interpolated embeddings."""
    x, end = target.streams[0], source.streams[0]
    _require_whole(model, target, source)
    total = dict[str, Tensor]()
    for step in tqdm(range(steps), unit="step", disable=not progress):
        tape, point = tape.anew(), torch.lerp(x, end, (step + 0.5) / steps)
        # Hooks run in order: the first replaces the residual stream, the second starts the graph.
        start = partial(_replace_stream, point)
        with torch.enable_grad(), edit_input(model, start), start_graph(model):
            logits = run(model, target.tokens, target.mask, tape.hooks)
            gradients = tape.gradients(metric.of_logits(logits))
        total = {
            name: total.get(name, 0.0) + gradient / steps for name, gradient in gradients.items()
        }
    return total


def _replace_stream(stream: Residual, _: Residual) -> Residual:
    return stream


@torch.no_grad()
def _require_whole(model: Any, target: Recording, source: Recording) -> None:
    """Raise an error if anything in the model except the embedding reads the input tokens."""
    with edit_input(model, lambda _: source.streams[0]):
        logits = run(model, target.tokens, target.mask)
    tolerance = logit_tolerance(host_of(model).neurons, logits.dtype)
    if off := disagreement(logits, source.logits, tolerance):
        reason = (
            "given the other run's embeddings as input of the first block, the model does not "
            f"compute that run's logits ({off}), so the model reads tokens elsewhere too; use "
            "method='gradient'"
        )
        raise UnsupportedModelError([reason], "gradients cannot be integrated between these runs")
