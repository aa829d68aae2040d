"""Attribution: an estimate of every patch's score from a few forward passes and a backward one.

One convention for all methods. The estimate is of the value that `activation_patch` measures: with
`value` the metric of the run patched into, "corrupted" to denoise and "clean" for noise,

    value after the patch ≈ value + Σ_{patched positions} g · Δ
    score = (value after the patch - corrupted) / (clean - corrupted)

where Δ is the change at a head, source run minus the run patched into, and g is the gradient of the
metric there. So 0 is the corrupted run and 1 the clean one, in either direction,
and a head that carries the clean run's answer has a positive effect when denoised and a negative
one when noised (`Sweep.effect`). Methods differ in g, and for queries in Δ:

    "gradient"        g of the run patched into: attribution patching (Nanda 2023; Syed, Rager and
                      Conmy, "Attribution Patching Outperforms Automated Circuit Discovery", 2023).
                      Of part "q" it is w'(q) Δq that stands for the change of the pattern.
    "exact_gate"      the same g, and the gate in closed form: w(q') - w(q), not w'(q) Δq; an
                      attention head's row softmax(q' · K) V, not its derivative. It is "gradient"
                      for parts "z", "pattern" and "value", which do not pass through the gate.
    "integrated"      g averaged between the embeddings of the two runs (below).
    "frozen_pattern"  g of the model that is linear once patterns and norm scales are constants
                      (`frozen_pass.py`). There no query or key moves anything, and parts "q" and
                      "k" are refused.

Keys of attention heads, part "k", are linear in every method. In ablations (direction "zero" and
the like) the source run is the clean run with its z ablated.

Δ is exact but for keys, and for queries under "gradient" and "integrated": a patch of any part of
a neuron-head is one of its Δz (`edits.py`). Patches scaled by ε move the metric by ε times the
estimate of "gradient", as ε goes to 0.

Which agrees best with patching was measured (`analyses/results/attribution_vs_patching.md`: the
shipped model and five real ones, all sites). "exact_gate" is the default: mean Pearson with
patching .934 for neuron-heads and .965 for attention heads over parts "z", "pattern" and "value",
as "gradient" has, which it equals there, against .896 and .756 for "integrated" and .890 and .816
for "frozen_pattern"; and of part "q" .947 and .966, against .599 and .722 for "gradient".

Cost, in forwards of 2 · n_pos · parameters flops: a backward that stops at activations costs one
forward, as it multiplies by each weight once. "gradient" is two forwards and one backward, so 3,
for every head and position together; "exact_gate" the same, and 2 more for queries of attention
heads; "frozen_pattern" 3 forwards, a backward and a check of 2, so 6; "integrated" 3 + 2 · steps.

Repairs. The squared error of an estimate sits in few sites, mostly of early layers at the first
token that differs, where one neuron writes a tenth of the stream's length or more. And where a
model saturates, gradients tell little at all. So some sites are patched exactly (`repairs.py`,
`expected_error.py`). By default these patches cost 3 to 10 forward passes in a large model, and up
to 4 Gflop in a small one, where they may cover all sites. Results on held-out pairs of prompts:
`analyses/results/attribution_repairs.md`.

Queries of attention heads in closed form: a query moves one row of one head's pattern, and so that
head's z at that token and nothing else of its layer: z' = softmax(q' · K) V with keys and values as
they are. So one forward pass in which all queries are replaced at once shows every z', as long as z
itself is restored before anything reads it: the model's own code computes the rows, whatever its
masks, rotations and caps.

Integrated gradients: Hanna, Pezzelle and Belinkov, "Have Faith in Faithfulness: Going Beyond
Circuit Overlap When Finding Model Mechanisms" (2024), EAP-IG. With x and x' the stream that enters
the first block in the run patched into and in the other, and g(x) the gradient of the metric at a
head when x enters,

    g = (1/k) Σ_j g(x + α_j (x' - x)),    α_j = (j - 1/2)/k,  j = 1 … k

the midpoint rule for the integral over α, where the paper takes the right ends j/k. As integrated
gradients do (Sundararajan, Taly and Yan 2017), those of x itself are complete: Σ (x' - x) · g tends
to metric(x') - metric(x) as k grows, with an error of order 1/k². At heads, whose activations move
along no straight lines, no such sum is claimed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.engine.frozen_pass import frozen_gradients
from attn_only_lens.engine.gradients import (
    Tape,
    edit_input,
    gradient_node,
    site_estimates,
    start_graph,
)
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import checked_tokens, option_reasons, reasons_not_to_run
from attn_only_lens.engine.interventions import ABLATIONS, DIRECTIONS
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    Metric,
    as_metric,
    no_gradient_reasons,
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts
from attn_only_lens.engine.recording import Recording, RunPair, Side, record_pair, run
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import PARTS, SHARED_PARTS, Part, Sites, hook_name
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching._activation_patch import (
    ablation_reasons,
    count_reasons,
    one_prompt_reasons,
    pair_or_single,
    sweep_settings,
)
from attn_only_lens.patching.ablated_runs import AblatedRuns
from attn_only_lens.patching.expected_error import expected_errors, hook_points, run_with_part
from attn_only_lens.patching.over_prompts import mean_over, moved_values
from attn_only_lens.patching.processes import is_first
from attn_only_lens.patching.prompt_runs import (
    PromptRun,
    PromptRuns,
    measure_parts,
    prompts_per_run,
)
from attn_only_lens.patching.repairs import (
    Budget,
    Repairer,
    Repairs,
    budget_reasons,
    expected_pearson,
)
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import PartStore
from attn_only_lens.patching.run_patches import Batching, PatchRunner
from attn_only_lens.patching.site_groups import SiteGroup, site_groups
from attn_only_lens.patching.sweep_parts import SweepPart, sweep_parts
from attn_only_lens.precision import full_precision

Method = Literal["gradient", "exact_gate", "integrated", "frozen_pattern"]
METHODS: tuple[str, ...] = get_args(Method)
_TRACED = ("gradient", "exact_gate")  # by the very run that is recorded
_STEPS = 5  # as in the experiments of EAP-IG


@warned_once()
@full_precision()
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
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Estimate the results of patching every site, all sites at once.

    On the scale of `activation_patch`, and with its columns: `agreement` compares the two.

    An estimate by gradients alone can miss the one site that matters, mostly a neuron of an early
    layer at the first token that differs. So the sites whose estimates are expected to err most are
    patched exactly (`repairs.py`): their rows are marked `exact`. `expected_pearson` is the
    correlation with patching to expect, for attention heads and for neuron-heads. In a small model
    most sites, or all, are patched exactly. With `budget=0` none are.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
            Neither its parameters' `requires_grad` nor their `grad` are touched.
        clean: a text, texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the same for the other run, token for token; None for an ablation without one,
            whose scores are shares of the clean run's metric.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits
            [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", "pattern", "value", "q", "k"; see `activation_patch`.
        positions: "each", "all", numbers, or by role; see `activation_patch`.
        direction: "denoise", clean activations into the corrupted run; "noise", the other way; or
            an ablation of z in the clean run, "zero", "mean", "resample", "bias".
        method: "gradient", "exact_gate", "integrated", "frozen_pattern"; see the module. The
            default is the one that agreed best with patching where that was measured.
        steps: for "integrated", how many gradients to average; by default 5.
        budget: what exact patches may cost, in forward passes (counted in flops); or "auto": at
            least 3 forward passes or 0.2 Gflop, then more until the expected correlations are
            .99, but at most 10 forward passes or 4 Gflop; of each two limits the larger counts.
            Tests of the model before the first patch cost about ten more forward passes, whatever
            the budget.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.
        reference: prompts to take means or others' activations from; see `activation_patch`.
        per_prompt: whether to return a row for each prompt of each site; see `activation_patch`.
            Estimates of each prompt come from the same gradients.
        prompts_at_once: pairs that are run at once; see `activation_patch`. Each run of them has a
            budget of its own: a row is `exact` where it was patched in all.
        resume: a folder to write each run of prompts to; see `activation_patch`.
        progress: whether to show bars, over exact patches and the steps of "integrated"; of
            several runs, over prompts.

    Returns:
        The estimated metric after each patch, and its score: 0 is the corrupted run, 1 the clean
        one. Its `method` says that it is an estimate, and which.

    Raises:
        InputError: with every reason: prompts, metric, sites or positions that do not fit; the
            metric is flat at the run patched into, as `kl` is on the clean run.
        UnsupportedModelError: the model is not linear when frozen ("frozen_pattern"), has tokens
            enter past its embedding ("integrated"), or norms its queries together ("exact_gate");
            a hook point of the sites does not fire, or is read-only.

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
    _check(model, corrupted, part, direction, method, steps, budget, reference, prompts_at_once)
    pair = pair_or_single(model, clean, corrupted, mask)
    groups = site_groups(model, pair, sites, positions, part, most_rows=None)
    tokens = None if reference is None else checked_tokens(model, reference)
    chosen = tuple(dict.fromkeys(group.sites for group in groups))
    metric = as_metric(metric)
    at_once = prompts_per_run(
        model, pair, metric, chosen, part, prompts_at_once, resume, traced=True
    )
    parts = sweep_parts(model, pair, groups, at_once, None)
    several = len(parts) > 1
    estimator = _Estimator(
        model, groups, part, direction, method, steps or _STEPS, budget, progress and not several
    )

    def record(pair: PromptPair, whole: bool) -> RunPair:
        return estimator.record(pair, metric, distinct=whole)

    ablated = None
    if direction in ABLATIONS:
        ablated = AblatedRuns(model, pair, direction, tokens, chosen, at_once)
    runs = PromptRuns(model, pair, metric, direction, ablated, record)
    n_rows = sum(map(len, groups))
    over = runs.over(parts, n_rows, per_prompt)
    store = None
    if resume is not None:
        settings = sweep_settings(model, pair, metric, groups, sites, part, direction, tokens)
        settings |= {"per_prompt": bool(per_prompt), "prompts_at_once": at_once}
        settings |= {"method": method, "steps": steps, "budget": as_plain(budget)}
        store = PartStore(resume, settings, len(parts))
    exact = torch.ones(n_rows, dtype=torch.bool, device="cpu")
    kinds = tuple(dict.fromkeys(heads.kind for heads in chosen))
    errors, forwards = dict.fromkeys(kinds, 0.0), 0.0
    shown = progress and several and is_first()
    with tqdm(total=len(pair.clean), unit="prompt", disable=not shown) as bar:

        def measure(sweep_part: SweepPart) -> Tensor:
            repairs = estimator.estimate(runs.of(sweep_part.prompts))
            kept = runs.of(sweep_part.prompts).reduced(over, torch.cat(repairs.values))
            bar.update(len(sweep_part.prompts))
            expected = [repairs.expected_errors[kind] for kind in kinds]
            numbers = [nan if error is None else error for error in expected]
            numbers.append(repairs.forwards)
            return torch.cat(
                [
                    kept.flatten(),
                    torch.cat(repairs.exact).double(),
                    torch.tensor(numbers, dtype=torch.float64, device="cpu"),
                ]
            )

        def add(sweep_part: SweepPart, measured: Tensor) -> None:
            nonlocal exact, forwards
            n_numbers = len(kinds) + 1
            sizes = [len(measured) - n_rows - n_numbers, n_rows, n_numbers]
            kept, repaired, numbers = measured.split(sizes)
            over.add(sweep_part, kept)
            exact &= repaired.bool()
            # Of a mean: no more than the mean of the errors.
            weight = sum(over.weights[sweep_part.prompts.start : sweep_part.prompts.stop])
            for kind, error in zip(kinds, numbers.tolist(), strict=False):
                errors[kind] += weight * error
            forwards += len(sweep_part.prompts) / len(pair.clean) * numbers[-1].item()

        measure_parts(parts, store, measure, add, lambda i: bar.update(len(parts[i].prompts)))
    return Sweep.of_prompts(
        model,
        pair,
        groups,
        over,
        part,
        method,
        exact=exact,
        expected_pearson={
            kind: expected_pearson(error, over.means[_rows_of(groups, kind)])
            for kind, error in errors.items()
            if budget
        },
        forwards=forwards,
    )


class _Estimator:
    """Estimates of all sites, on a run of prompts."""

    def __init__(
        self,
        model: Any,
        groups: Sequence[SiteGroup],
        part: Part,
        direction: str,
        method: Method,
        steps: int,
        budget: Budget,
        progress: bool,
    ) -> None:
        self._model, self._groups, self._part = model, groups, part
        self._direction, self._method, self._steps = direction, method, steps
        self._budget, self._progress = budget, progress
        self._chosen = tuple(dict.fromkeys(group.sites for group in groups))
        self._closed = part == "q" and method == "exact_gate"
        self._nodes = {
            chosen: gradient_node(model, chosen, part, closed=self._closed)
            for chosen in self._chosen
        }
        # The z of the heads that read keys or values, which they may share.
        self._readers = {
            node: hook_name(model, heads.layer, "z")
            for heads, node in self._nodes.items()
            if heads.kind == "attention" and part in SHARED_PARTS
        }
        self._tested: set[Any] = set()
        self._tape = Tape(())

    def record(self, pair: PromptPair, metric: Metric, *, distinct: bool) -> RunPair:
        """Record the runs of some prompts, and keep the graph of the one that is patched into."""
        model, part, chosen = self._model, self._part, self._chosen
        nodes = self._nodes.values()
        written, kept = hook_points(model, chosen, part) if self._budget else (set(), set())
        self._tape = tape = Tape({*nodes, *written}, self._readers)
        side: Side = "corrupted" if self._direction == "denoise" else "clean"
        traced = side if self._method in _TRACED else None
        names = [*kept, *(nodes if part == "q" else ())]
        with start_graph(model):
            return record_pair(
                *(model, pair, metric, chosen, part),
                names=names,
                traced=traced,
                hooks=tape.hooks,
                distinct=distinct,
            )

    def estimate(self, run: PromptRun) -> Repairs:
        """Estimate the effects of all sites on a run of prompts, and repair some by patches."""
        model, part, target, source = self._model, self._part, run.target, run.source
        groups = [site_group.of_prompts(run.runs.pair) for site_group in self._groups]
        gradients = self._gradients(run)
        moved = source
        if self._closed and any(chosen.kind == "attention" for chosen in self._chosen):
            rows = [chosen.layer for chosen in self._chosen if chosen.kind == "attention"]
            shown = run_with_part(model, target, source, rows, part)
            moved = replace(source, hooked={**source.hooked, **shown})
        values = []
        for group in groups:
            node = self._nodes[group.sites]
            estimates = site_estimates(
                model, group.sites, part, node, gradients[node], target, moved
            )
            values.append(moved_values(run.unpatched, group.sums(estimates), run.shares))
        if not self._budget:
            exact = [torch.zeros(len(rows), dtype=torch.bool, device="cpu") for rows in values]
            return Repairs(values, exact, dict.fromkeys(g.sites.kind for g in groups), 0.0)
        target = replace(target, logits=target.logits.detach())
        keys = expected_errors(model, groups, part, target, source, gradients)
        with tqdm(total=0, unit="site", desc="repairs", disable=not self._progress) as bar:
            replay = make_replay(model, target, run.runs.metric)
            batching = Batching(model, None, bar.update, replay.numbers_per_token)
            runner = PatchRunner(replay, source, part, run.unpatched, batching)
            mean = partial(mean_over, shares=run.shares)
            n_prompts = run.runs.pair.n_all
            repairer = Repairer(runner, groups, keys, values, mean, bar, self._tested, n_prompts)
            return repairer.spend(self._budget)

    def _gradients(self, run: PromptRun) -> dict[str, Tensor]:
        """Return the gradients of the method, at the nodes of the tape."""
        model, target, source, metric = self._model, run.target, run.source, run.runs.metric
        require_differentiable(metric, target.logits.detach())
        if self._method == "integrated":  # which has gradients of its own, between the runs
            tape, steps = self._tape, self._steps
            return integrated_gradients(model, target, source, metric, tape, steps, self._progress)
        if run.first:  # later prompts may happen to be flat
            ablation = self._direction in ABLATIONS
            source_logits = torch.zeros_like(target.logits) if ablation else source.logits
            span = run.runs.clean_value - run.runs.corrupted_value
            require_slope(metric, target.logits, source_logits, span)
        if self._method == "frozen_pattern":
            return frozen_gradients(model, target, metric, self._tape)
        return self._tape.gradients(metric.of_logits(target.logits))


def _rows_of(groups: Sequence[SiteGroup], kind: HeadKind) -> Bool[Tensor, "row"]:
    """Return which rows are of a kind of head."""
    of_groups = [
        torch.full((len(group),), group.sites.kind == kind, device="cpu") for group in groups
    ]
    return torch.cat(of_groups)


def _check(
    model: Any,
    corrupted: object,
    part: str,
    direction: str,
    method: str,
    steps: object,
    budget: object,
    reference: object,
    prompts_at_once: object,
) -> None:
    reasons = [*reasons_not_to_run(model), *one_prompt_reasons(corrupted, direction)]
    reasons += count_reasons(prompts_at_once=prompts_at_once)
    reasons += option_reasons("part", part, PARTS)
    reasons += option_reasons("direction", direction, (*DIRECTIONS, *ABLATIONS))
    reasons += ablation_reasons(part, direction, reference)
    if direction in ABLATIONS and method == "integrated":
        reasons.append(
            f"got direction={direction!r} with method='integrated', which goes between the runs of "
            "two prompts; expected 'denoise' or 'noise', or another method"
        )
    reasons += option_reasons("method", method, METHODS)
    if part in ("q", "k") and method == "frozen_pattern":
        reasons.append(
            f"got part={part!r} with frozen patterns, which no query or key moves; expected another"
        )
    if steps is not None and method != "integrated":
        reasons.append(f"got steps={steps!r} with method={method!r}, which takes none")
    elif steps is not None and not is_count(steps, 1):
        reasons.append(f"got steps={steps!r}; expected 1 or more")
    reasons += budget_reasons(budget)
    reasons += no_gradient_reasons()
    InputError.raise_if(reasons, "this cannot be attributed")


def integrated_gradients(
    model: Any,
    target: Recording,
    source: Recording,
    metric: BoundMetric,
    tape: Tape,
    steps: int,
    progress: bool,
) -> dict[str, Tensor]:
    """Return gradients at hook points, averaged between the two runs: k forwards, k backwards."""
    x, end = target.streams[0], source.streams[0]
    _require_whole(model, target, source)
    total = dict[str, Tensor]()
    for step in tqdm(range(steps), unit="step", disable=not progress):
        tape, point = tape.anew(), torch.lerp(x, end, (step + 0.5) / steps)
        # The later of two hooks sees the output of the earlier: first the point, then a root.
        start = partial(_replace_stream, point)
        with torch.enable_grad(), edit_input(model, start), start_graph(model):
            logits = run(model, target.tokens, target.mask, tape.hooks)
            gradients = tape.gradients(metric.of_logits(logits))
        total = {
            name: total.get(name, 0.0) + gradient / steps for name, gradient in gradients.items()
        }
    return total


@torch.no_grad()
def _replace_stream(stream: Residual, _: Residual) -> Residual:
    return stream


def _require_whole(model: Any, target: Recording, source: Recording) -> None:
    """Refuse models in which tokens enter elsewhere too: no line of streams joins their runs."""
    with edit_input(model, lambda _: source.streams[0]):
        logits = run(model, target.tokens, target.mask)
    error = float((logits - source.logits).abs().max())
    largest = float(source.logits.abs().max())
    if not error <= logit_tolerance(host_of(model).neurons, logits.dtype) * largest:
        raise UnsupportedModelError(
            [
                "with the other run's embeddings entering its first block, its logits differ by "
                f"{error:.2g} from those of that run (largest: {largest:.2g}): tokens enter "
                "elsewhere too. Take method='gradient'"
            ],
            "gradients cannot be integrated between these runs",
        )
