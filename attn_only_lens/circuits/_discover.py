"""Find a small circuit that is nearly as faithful as the whole model: rank, search, evaluate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import COUNT, POSITIVE, RESAMPLES, SHARE, one_of
from attn_only_lens.circuits.ablated_model import (
    ORDERS,
    AblatedModel,
    Ablation,
    Order,
    ablated_model,
    checked_places,
)
from attn_only_lens.circuits.ablated_points import Rows
from attn_only_lens.circuits.circuit import SITE, SITE_KEY, Circuit
from attn_only_lens.circuits.search import Search, Step
from attn_only_lens.circuits.stability import (
    INCLUSION,
    inclusion_interval,
    random_halves,
    require_resamples,
    resampled,
)
from attn_only_lens.engine.multipliers import run_both
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.engine.recording import RunPair, run_pair
from attn_only_lens.engine.sites import Sites, all_heads
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribute import attribute
from attn_only_lens.patching._attribution import plan_attribution
from attn_only_lens.patching.attribution_options import METHODS, AttributionOptions, Method
from attn_only_lens.patching.repairs import Budget
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.patching.site_groups import site_groups, site_rows


@one_thread_per_model
@warned_once()
def discover(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float = 0.9,
    method: str = "secant",
    budget: Budget = "auto",
    ablation: Ablation = "resample",
    order: Order | None = None,
    sites: Sites | None = None,
    positions: Positions = "each",
    n_random: int = 3,
    resamples: int = 0,
    seed: int = 0,
    mask: Tensor | None = None,
    prompts_at_once: int | None = None,
    progress: bool | str = True,
) -> Circuit:
    """Find a small circuit whose faithfulness differs from 1 by at most 1 - `faithfulness`.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        clean: the prompts to explain; see `prompt_pair`. Several prompts share one circuit, for the
            mean of the metric.
        corrupted: prompts without the feature to explain, aligned with `clean` token by token.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits.
        faithfulness: the wanted faithfulness, more than 0, up to 1.
        method: how sites are ranked: a method of `attribution`, or "patching" for
            `activation_patch`, which uses no gradients; the search then skips the step "worth".
            The default, "secant", gave the smallest circuits
            (`analyses/results/contrast_vs_patching.md`).
        budget: how many sites of the ranking are patched exactly, as in `attribution`.
        ablation: how sites outside the circuit are ablated: "zero", "mean", "positional_mean" or
            "resample".
        order: None to search and prune. "magnitude" or "signed" returns the shortest sufficient
            prefix of the sites in this order of effects; "signed" puts sites that help the clean
            run first.
        sites: the heads to choose from, by default all. Other heads are never ablated.
        positions: "each" separately, "all" together, or by role: `task.roles`. By role, a site is
            a head at a role's token. Tokens without a role are never ablated. Prompts may differ
            in length only by role or with "all".
        n_random: how many random circuits of the same size to evaluate.
        resamples: how many times to search again on a random half of the prompts, for instance 20;
            the circuit then has a `stability`.
        seed: the seed of random circuits and halves.
        mask: the attention mask (0 for padding), if prompts are given as tokens.
        prompts_at_once: how many prompt pairs are in memory at once; by default as many as fit in
            a fifth of the memory. With fewer than all, each evaluation records the runs again. Mean
            ablation and custom metrics need all prompts at once.
        progress: whether to show a progress bar that counts the circuits that are run; how many
            there will be is unknown. A string is its label.

    Returns:
        The circuit. The frame `Circuit.tried` lists all circuits that the search evaluated.

    Raises:
        InputError: with every reason: invalid settings, prompts, metric, sites or positions;
            ablating every site changes nothing.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> circuit = circuits.discover(
        ...     convert(pretrained.modular_addition()), torch.tensor([3, 4, 113]),
        ...     torch.tensor([3, 5, 113]), p.logit_diff(correct=7, wrong=8))
        >>> abs(1 - circuit.faithfulness) <= 0.1, len(circuit) < 0.1 * circuit.n_sites
        (True, True)
    """
    reasons = one_of(*METHODS, MEASURED).reasons(method=method)
    reasons += one_of(*ORDERS).or_none.reasons(order=order)
    reasons += SHARE.reasons(faithfulness=faithfulness)
    reasons += COUNT.reasons(n_random=n_random, seed=seed)
    reasons += RESAMPLES.reasons(resamples=resamples)
    reasons += POSITIVE.or_none.reasons(prompts_at_once=prompts_at_once)
    InputError.raise_if(reasons, "no circuit can be searched")
    sites = all_heads() if sites is None else sites
    pair = prompt_pair(model, clean, corrupted, mask)
    if resamples:
        require_resamples(len(pair.clean), as_metric(metric))
    checked_places(
        model, pair, site_rows(site_groups(model, pair, sites, positions, "z")), positions
    )
    prompts = model, clean, corrupted, metric
    options: dict[str, Any] = {"positions": positions, "mask": mask}
    options |= {"prompts_at_once": prompts_at_once}
    label = f"{progress}: " if isinstance(progress, str) else ""
    with tqdm(unit=" circuits", desc=f"{label}ranking", disable=not progress) as bar:
        settings = options | {"sites": sites, "per_prompt": bool(resamples)}
        ranking, runs = rank_sites(prompts, method, budget, settings)
        bar.set_description_str(f"{label}search")
        frame, effects = ranking.frame[SITE], ranking.effect.to_numpy()[:, None]
        if resamples:  # the frame has one row per site and prompt, sorted by site
            n_prompts = len(pair.clean)
            frame = frame.iloc[::n_prompts].reset_index(drop=True)
            effects = effects.reshape(-1, n_prompts)
        options |= {"ablation": ablation, "on_done": bar.update}
        ablate = partial(ablated_model, *prompts, frame, **options)
        find = partial(_smallest, ranking, order, faithfulness, method != MEASURED)
        ablated = ablate(runs=runs)
        mean = effects @ ablated.weights if resamples else effects[:, 0]
        rows, tried = find(ablated, mean)
        circuit = circuit_of(
            *(ablated, ranking, mean, rows, tried),
            method=method,
            wanted=faithfulness,
            ablation=ablation,
            candidates=sites,
            positions=positions,
            draws=(n_random, seed),
        )
        if resamples:
            bar.set_description_str(f"{label}resamples")
            search_again = partial(find, near=len(rows))
            halves = random_halves(n_prompts, resamples, seed)
            stability = resampled(search_again, ablate, ablated, frame, effects, halves)
            inclusion = stability.sites[[*SITE_KEY, *INCLUSION]]
            with_shares = circuit.frame.merge(inclusion, on=SITE_KEY, how="left")
            in_none = (0.0, *inclusion_interval(0, len(stability.resamples)), "noise")
            with_shares = with_shares.fillna(dict(zip(INCLUSION, in_none, strict=True)))
            circuit = replace(circuit, frame=with_shares, stability=stability)
        bar.total = bar.n  # the number of circuits is unknown until the search ends
        bar.refresh()
    return circuit


def rank_sites(
    prompts: tuple[Any, ...], method: str, budget: Budget, options: Mapping[str, Any]
) -> tuple[Sweep, RunPair | None]:
    """Return the effect of replacing each site's clean output with its corrupted output.

    Also return both runs' recordings if an `AblatedModel` can reuse them, otherwise None.
    """
    settings: dict[str, Any] = {"per_prompt": False, "prompts_at_once": None}
    settings |= {**options, "direction": "noise"}
    if method == MEASURED:
        return activation_patch(*prompts, **settings, progress=False), None
    settings |= {"part": "z", "reference": None, "resume": None}
    how = AttributionOptions(cast("Method", method), budget)
    plan = plan_attribution(prompts, how, **settings)
    shared = method == "secant" and not budget and len(plan.prompts) == 1
    # `run_both` runs half precision in float32, and skips conversions to float32 in float64 models.
    shared &= next(plan.model.parameters()).dtype == torch.float32
    if not shared:
        return attribute(plan, how), None
    both = run_both(plan.model, plan.pair)
    runs = run_pair(plan.model, plan.pair, *both.recordings(), plan.metric)
    return attribute(plan, how, both=both), runs


def circuit_of(
    ablated: AblatedModel,
    ranking: Sweep,
    effects: Float[np.ndarray, "site"],
    rows: Rows,
    tried: Sequence[Mapping[str, Any]],
    *,
    draws: tuple[int, int] = (3, 0),
    **settings: Any,
) -> Circuit:
    """Evaluate a set of sites, and return a `Circuit` of them, sorted by decreasing |effect|.

    `draws` is the number of random circuits and their seed; `settings` are further attributes of
    the `Circuit`.
    """
    measured, complete, random = ablated.curves([rows], *draws)
    frame = ablated.sites[SITE].assign(effect=effects).iloc[rows]
    by_effect = frame["effect"].abs().sort_values(ascending=False, kind="stable").index
    return Circuit(
        frame.loc[by_effect].reset_index(drop=True),
        n_sites=ablated.n_sites,
        n_pos=ablated.n_pos,
        faithfulness=float(measured[0]),
        completeness=float(complete[0]),
        random=tuple(random[:, 0].tolist()),
        tried=pd.DataFrame(tried, columns=[*tried[0]]),
        metric=ranking.metric,
        **settings,
    )


def _smallest(
    ranking: Sweep,
    order: Order | None,
    wanted: float,
    rank_again: bool,
    ablated: AblatedModel,
    effects: Float[np.ndarray, "site"],
    near: int | None = None,
) -> tuple[Rows, list[dict[str, Any]]]:
    """Search for a small circuit; return the rows of its sites, and all evaluated circuits."""
    search = Search(ablated, wanted, near)
    orders: dict[Step, Rows] = {
        name: ablated.ranked(ranking, name, effects) for name in ([order] if order else ORDERS)
    }
    return search.smallest(orders, prune=order is None, rank_again=rank_again), search.tried
