"""Estimate the effects of patching all sites, on one chunk of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.engine.directions import ABLATIONS
from attn_only_lens.engine.edits import by_site
from attn_only_lens.engine.gradients import (
    Tape,
    gradient_node,
    site_estimates,
    start_graph,
)
from attn_only_lens.engine.input_warnings import warn
from attn_only_lens.engine.metrics import (
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.multipliers import BothRuns, Multipliers, run_both, secant_multipliers
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import RunPair, Side, record_pair, run_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import SHARED_PARTS, LayerSites, hook_name
from attn_only_lens.patching._activation_patch import SweepPlan
from attn_only_lens.patching.estimate import Estimate
from attn_only_lens.patching.integrated_gradients import integrated_gradients
from attn_only_lens.patching.over_prompts import mean_over, moved_values
from attn_only_lens.patching.prompt_chunks import PromptChunk
from attn_only_lens.patching.repairs import (
    Repairer,
    Repairs,
    hook_points,
    lie_before_switch,
    on_one_device,
    repair_keys,
    run_with_part,
)
from attn_only_lens.patching.run_patches import Batching, PatchRunner
from attn_only_lens.patching.site_groups import SiteGroup


@dataclass(frozen=True, eq=False)
class TracedRuns(RunPair):
    """Both runs on some prompts, and what gradients are taken from.

    Attributes:
        tape: the activations of the target run, with its autograd graph if it is needed.
        both: the runs between which secant multipliers are computed, if they are recorded.
    """

    tape: Tape
    both: BothRuns | None = None


@dataclass(frozen=True, eq=False)
class Estimator:
    """Estimates the effects of patching all sites, one chunk of prompts at a time.

    Attributes:
        plan: the sites, the prompts and the metric.
        options: how effects are estimated.
        top_by_prompt: whether the top rows are those of single prompts; see `attribute`.
        progress: whether to show progress bars.
        tested: what was tested on earlier chunks of prompts; see `Repairer`.
    """

    plan: SweepPlan
    options: Estimate
    top_by_prompt: bool = False
    progress: bool = False
    tested: set[tuple[int, bool]] = field(default_factory=set)

    @cached_property
    def _closed(self) -> bool:
        """Whether the change of z with the query is computed exactly."""
        return self.plan.part == "q" and self.options.method == "exact_gate"

    @cached_property
    def _nodes(self) -> dict[LayerSites, str]:
        """The hook point at which the gradient for each layer's sites is taken."""
        plan = self.plan
        return {
            site: gradient_node(plan.model, site, plan.part, closed=self._closed)
            for site in plan.sites
        }

    def record(self, pair: PromptPair, *, distinct: bool) -> TracedRuns:
        """Record both runs on the given prompts, and keep the autograd graph of the target run."""
        plan, budget, nodes = self.plan, self.options.budget, self._nodes.values()
        written, kept = set[str](), set[str]()
        if budget:
            written, kept = hook_points(plan.model, plan.sites, plan.part)
        # Heads may share a key and a value, so also record z of all heads that read these.
        readers = {
            node: hook_name(plan.model, site.layer, "z")
            for site, node in self._nodes.items()
            if site.kind == "attention" and plan.part in SHARED_PARTS
        }
        tape = Tape({*nodes, *written}, readers)
        if self.options.method == "secant" and not budget:
            both = run_both(plan.model, pair)
            runs = run_pair(plan.model, pair, *both.recordings(), plan.metric, distinct=distinct)
            return TracedRuns(**vars(runs), tape=tape, both=both)
        side: Side = "corrupted" if plan.direction == "denoise" else "clean"
        with start_graph(plan.model):
            runs = record_pair(
                *(plan.model, pair, plan.metric, plan.sites, plan.part),
                names=[*kept, *(nodes if plan.part == "q" else ())],
                traced=side if self.options.needs_tangents else None,
                hooks=tape.hooks,
                distinct=distinct,
            )
        return TracedRuns(**vars(runs), tape=tape)

    def estimate(self, prompts: PromptChunk[TracedRuns]) -> tuple[Repairs, Tensor | None]:
        """Estimate the effects of all sites, and replace some estimates with exact values.

        If the attribution is split, also return the part of each effect that goes through patterns.
        """
        model, method = self.plan.model, self.options.method
        target, source, metric = prompts.target, prompts.source, prompts.runs.metric
        groups = [group.of_prompts(prompts.pair) for group in self.plan.groups]
        require_differentiable(metric, target.logits.detach())

        # Gradients. The first call frees the target run's graph.
        tangents = self._tangents(prompts) if self.options.needs_tangents else {}
        gradients, by_pattern = tangents, None
        if method == "secant":
            result = self._multipliers(prompts)
            gradients = result.gradients
            by_pattern = self._through_patterns(result, groups) if self.options.split else None
        elif method == "integrated":
            tape, steps = prompts.runs.tape, self.options.n_steps
            gradients = integrated_gradients(
                *(model, target, source, metric, tape, steps), self.progress
            )

        # Estimates
        values = self._estimated(prompts, groups, gradients)
        before_switch = lie_before_switch(model, groups, target, source)
        if not self.options.budget:
            return Repairs.nothing(values, groups, before_switch), by_pattern

        # Repairs: where estimates by two gradients differ, they are probably wrong.
        by_tangents, longer = values, gradients
        if gradients is not tangents:
            by_tangents = self._estimated(prompts, groups, tangents)
            longer = _longer(gradients, tangents)
        target = replace(target, logits=target.logits.detach())
        keys = repair_keys(model, groups, self.plan.part, target, source, longer)
        with tqdm(total=0, unit="site", desc="repairs", disable=not self.progress) as bar:
            replay = make_replay(model, target, metric)
            batching = Batching(model, None, bar.update, replay.numbers_per_token)
            runner = PatchRunner(replay, source, self.plan.part, prompts.unpatched, batching)
            mean = partial(mean_over, shares=prompts.shares)
            repairer = Repairer(
                *(runner, groups, keys, before_switch, values, by_tangents, mean, bar),
                *(self.tested, prompts.pair.n_all),
                per_prompt=self.top_by_prompt,
            )
            return repairer.spend(self.options.budget), by_pattern

    def _estimated(
        self,
        prompts: PromptChunk[TracedRuns],
        groups: Sequence[SiteGroup],
        gradients: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the metric after each row's patch, estimated with the given gradients."""
        model, part = self.plan.model, self.plan.part
        target, moved = prompts.target, prompts.source
        attention = [site.layer for site in self.plan.sites if site.kind == "attention"]
        if self._closed and attention:
            closed = run_with_part(model, target, moved, attention, part)
            moved = replace(moved, hooked={**moved.hooked, **closed})
        changes = []
        for group in groups:
            node = self._nodes[group.sites]
            estimates = site_estimates(
                model, group.sites, part, node, gradients[node], target, moved
            )
            changes.append(group.sums(estimates))
        return moved_values(prompts.unpatched, on_one_device(changes), prompts.shares)

    def _multipliers(self, prompts: PromptChunk[TracedRuns]) -> Multipliers:
        """Return secant multipliers between the two runs. Warn if effects do not add up exactly."""
        runs, model = prompts.runs, self.plan.model
        both = run_both(model, runs.pair) if runs.both is None else runs.both
        result = secant_multipliers(model, both, runs.metric, runs.tape)
        if result.remainder:
            reason = (
                f"the attributions of all sites add up to {result.total:.4g}, but the metric "
                f"changes by {result.total + result.remainder:.4g}; the rest is not attributed to "
                "any site"
            )
            warn({"remainder": reason}, "this metric has no exact secant rule")
        return result

    def _through_patterns(self, result: Multipliers, groups: Sequence[SiteGroup]) -> Tensor:
        """Return how much of each site's effect goes through attention patterns."""
        model, sign = self.plan.model, 1 if self.plan.direction == "denoise" else -1
        moves = []
        for group in groups:
            sites = group.sites
            by_head = result.through_patterns(model, sites.layer, sites.kind)
            moves.append(group.sums(by_site(sites, by_head)).sum(1))
        return sign * on_one_device(moves).cpu().double()

    def _tangents(self, prompts: PromptChunk[TracedRuns]) -> dict[str, Tensor]:
        """Return the gradients in the target run, by hook point."""
        metric, target, source = prompts.runs.metric, prompts.target, prompts.source
        # A zero gradient is an error only in the first chunk, and only if estimates are made of it.
        if self.options.traces_target and prompts.first:
            ablation = self.plan.direction in ABLATIONS
            source_logits = torch.zeros_like(target.logits) if ablation else source.logits
            span = prompts.runs.clean_value - prompts.runs.corrupted_value
            require_slope(metric, target.logits, source_logits, span)
        return prompts.runs.tape.gradients(metric.of_logits(target.logits))


def _longer(some: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the longer of two gradients at each hook point and token."""
    longer = {}
    for name, y in others.items():
        x = some[name]  # secants also have multipliers of error nodes
        is_longer = x.norm(dim=-1, keepdim=True) >= y.norm(dim=-1, keepdim=True)
        longer[name] = torch.where(is_longer, x, y)
    return longer
