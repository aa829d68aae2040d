"""Find a small circuit that is nearly as faithful as the whole model: rank, search, evaluate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm.auto import tqdm

from attn_only_lens.arguments import SHARE, a_type, one_of
from attn_only_lens.circuits.ablated_model import (
    ORDERS,
    AblatedModel,
    Order,
    ablated_model,
    checked_places,
)
from attn_only_lens.circuits.ablated_points import Rows
from attn_only_lens.circuits.circuit import SITE, SITE_KEY, Circuit
from attn_only_lens.circuits.held_out import SEARCH, Proposal, choose, prefixes
from attn_only_lens.circuits.search import HELD_OUT, Search, SearchRun, Step
from attn_only_lens.circuits.stability import (
    INCLUSION,
    Half,
    inclusion_interval,
    random_halves,
    require_resamples,
    resampled,
)
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.model_state import unchanged
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import aligned, token_columns
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import Sites, SomeSites
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch, prompt_settings
from attn_only_lens.patching._attribute import attribute
from attn_only_lens.patching._attribution import plan_attribution
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.estimate import METHODS, Estimate, Method
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.precision import matmul_precision
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "no circuit can be searched"
_HALF = "these prompts, a random half of all, cannot be searched; choose another seed or prompts"
_ALL = slice(None)
Ranking: TypeAlias = Method | Literal["patching"] | Estimate
"""How sites are ranked: by estimates, or by exact patches."""
SECANTS = Estimate("secant", budget=0)


@one_thread_per_model
@warned_once()
def discover(
    model: Any,
    contrast: Contrast,
    *,
    faithfulness: float = 0.9,
    method: Ranking = SECANTS,
    sites: SomeSites = "all",
    search: Search = Search(),
    work: Work = Work(),
) -> Circuit:
    """Find a small circuit that keeps the difference of the metric between two runs.

    The circuit's faithfulness is from `faithfulness` to 2 - `faithfulness`: with the default, from
    0.9 to 1.1. For several prompts, their mean error is at most 1 - `faithfulness`, too.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: the two runs and the metric; see `Contrast`. Several prompts share one circuit,
            for the mean of the metric.
        faithfulness: the wanted faithfulness, more than 0, up to 1.
        method: how sites are ranked: a method of `attribution`, or an `Estimate` with more options;
            or "patching" for `activation_patch`, which uses no gradients; the search then skips the
            step "worth". The default is secants, which gave the smallest circuits
            (`analyses/results/contrast_vs_patching.md`), without exact patches: the search ranks
            sites again, so patches make circuits no smaller, but take most of the ranking's time.
        sites: the heads to choose from, and their positions; see `Sites`. Other heads are never
            ablated. By role, a site is a head at a role's token, and tokens without a role are
            never ablated. In prompts of different lengths, "each" is all roles.
        search: how a circuit is searched for, and compared with random circuits; see `Search`.
        work: how the search is run; see `Work`, without its batch size. With fewer than all
            `prompts_at_once`, each evaluation records the runs again. A folder `resume` keeps what
            circuits keep: an interrupted search goes on with the first circuit that is not in it. A
            progress bar counts the circuits that are run; how many there will be is unknown.

    Returns:
        The circuit. The frame `Circuit.tried` lists all circuits that the search evaluated.

    Raises:
        InputError: with every reason: invalid settings, contrast, sites or positions; ablating
            every site changes nothing.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> circuit = circuits.discover(convert(load("modular-addition")), sums)
        >>> abs(1 - circuit.faithfulness) <= 0.1, len(circuit) < 0.1 * circuit.n_sites
        (True, True)
    """
    reasons = contrast_reasons(contrast) + SHARE.reasons(faithfulness=faithfulness)
    if not isinstance(method, Estimate):
        reasons += one_of(*METHODS, MEASURED).reasons(method=method)
    if not isinstance(search, Search):
        reasons.append(f"got {a_type(search)} as search; expected circuits.Search(…)")
    reasons += work_reasons(work, "batch_size", "share")
    InputError.raise_if(reasons, _PROBLEM)
    pair, metric, sites = contrast.pair(model), as_metric(contrast.metric), Sites.of(sites)
    n_prompts, resamples = len(pair.clean), search.resamples
    if resamples:
        require_resamples(n_prompts, metric)
    if sites.positions == "each" and sites.split() is None:
        sites = replace(sites, positions=aligned(pair, "each"))
    groups = site_groups(model, pair, sites, "z")
    candidates = site_rows(groups)
    places = checked_places(pair, candidates)
    # Rows of a ranking are in the order of the candidates.
    named = candidates[candidates["name"].isin({site.partition("@")[0] for site in search.start})]
    ids = site_ids(named)
    if unknown := sorted({*search.start} - {*ids}):
        example = site_ids(candidates[-1:]).iloc[0]
        reason = f"got a start with {unknown[:3]}; expected candidates, such as {example!r}"
        raise InputError([reason], _PROBLEM)
    start = ids.index[ids.isin(search.start)].to_numpy()
    if sites.positions == "roles":  # the circuit keeps their names, for contrasts with more roles
        sites = replace(sites, positions=[place.label for place in places])
    label = f"{work.progress}: " if isinstance(work.progress, str) else ""
    progress = tqdm(unit=" circuits", desc=f"{label}ranking", disable=not work.progress)
    with unchanged(model), progress as bar:
        store = None
        if work.resume is not None:
            settings = prompt_settings(model, pair, metric, groups)
            settings |= {"sites": site_ids(candidates).tolist(), "ablation": search.ablation}
            settings |= {"float32 products": matmul_precision()}
            store, work = ChunkStore(work.resume, settings), replace(work, resume=None)
        ranking = rank_sites(model, contrast, sites, method, bool(resamples), work)
        bar.set_description_str(f"{label}search")
        frame, effects = ranking.frame[SITE], ranking.effect.to_numpy()[:, None]
        if resamples:  # the frame has one row per site and prompt, sorted by site
            frame = frame.iloc[::n_prompts].reset_index(drop=True)
            effects = effects.reshape(-1, n_prompts)

        def ablated_with(some: PromptPair) -> AblatedModel:
            ablated = ablated_model(
                *(model, some, metric, frame),
                ablation=search.ablation,
                work=work,
                on_done=bar.update,
            )
            ablated.store = store
            return ablated

        @lru_cache(maxsize=2)  # the halves of a split follow each other
        def ablated_half(half: tuple[int, ...]) -> AblatedModel:
            ablated = ablated_with(pair.of_prompts(half, cut=False))
            reasons = list[str]()
            with InputError.collected(reasons):
                _ = ablated.span  # the metric must change
            InputError.raise_if([f"prompts {list(half)}: {x}" for x in reasons], _HALF)
            return ablated

        def ablate(half: Half) -> AblatedModel:
            return ablated_half(tuple(half.tolist()))

        finder = _Finder(ranking, search.order, faithfulness, start, effects)
        ablated = ablated_with(pair)
        halves = [*random_halves(n_prompts, resamples, search.seed)]
        circuits: Iterable[Rows]
        if search.objective == HELD_OUT:
            proposal, circuits, by_size = choose(
                *(finder.proposals, ablate, halves, ablated.weights, faithfulness)
            )
            rows, tried = finder.proposed(proposal, ablated)
        else:
            by_size = None
            rows, tried = finder.smallest(ablated)
            circuits = (finder.smallest(ablate(x), x, near=len(rows))[0] for x, _ in halves)
        circuit = circuit_of(
            *(ablated, ranking, finder.mean(ablated), rows, tried),
            method=ranking.method,
            wanted=faithfulness,
            columns=token_columns(pair),
            ablation=search.ablation,
            candidates=sites,
            draws=(search.n_random, search.seed),
        )
        if resamples:
            bar.set_description_str(f"{label}resamples")
            stability = resampled(
                *(circuits, ablate, ablated, frame, effects, halves), by_size=by_size
            )
            inclusion = stability.sites[[*SITE_KEY, *INCLUSION]]
            with_shares = circuit.frame.merge(inclusion, on=SITE_KEY, how="left")
            in_none = (0.0, *inclusion_interval(0, len(stability.resamples)), "noise")
            with_shares = with_shares.fillna(dict(zip(INCLUSION, in_none, strict=True)))
            circuit = replace(circuit, frame=with_shares, stability=stability)
        bar.total = bar.n  # the number of circuits is unknown until the search ends
        bar.refresh()
    return circuit


def rank_sites(
    model: Any,
    contrast: Contrast,
    sites: SomeSites,
    method: Ranking,
    per_prompt: bool = False,
    work: Work = Work(),
) -> Sweep:
    """Return the effect of replacing each site's clean output with its corrupted output."""
    work = replace(work, progress=False)
    if method == MEASURED:
        return activation_patch(
            *(model, contrast), sites=sites, direction="noise", per_prompt=per_prompt, work=work
        )
    estimate = Estimate.of(cast("Method | Estimate", method))
    plan = plan_attribution(model, contrast, sites, "z", "noise", estimate, per_prompt, work)
    return attribute(plan, estimate, work)


def circuit_of(
    ablated: AblatedModel,
    ranking: Sweep,
    effects: Float[np.ndarray, "site"],
    rows: Rows,
    tried: Sequence[Mapping[str, Any]],
    *,
    columns: range,
    draws: tuple[int, int] = (3, 0),
    **settings: Any,
) -> Circuit:
    """Evaluate a set of sites, and return a `Circuit` of them, sorted by decreasing |effect|.

    `columns` are the columns of the prompts' tokens, and `draws` is the number of random circuits
    and their seed; `settings` are further attributes of the `Circuit`.
    """
    measured, complete, random = ablated.curves([rows], *draws)
    frame = ablated.sites[SITE].assign(effect=effects).iloc[rows]
    by_effect = frame["effect"].abs().sort_values(ascending=False, kind="stable").index
    return Circuit(
        frame.loc[by_effect].reset_index(drop=True),
        n_sites=ablated.n_sites,
        n_pos=len(columns),
        start=columns.start,
        faithfulness=float(measured[0]),
        completeness=float(complete[0]),
        random=tuple(random[:, 0].tolist()),
        tried=pd.DataFrame(tried, columns=[*tried[0]]),
        metric=ranking.metric,
        whole=ablated.whole,
        nothing=ablated.nothing,
        **settings,
    )


@dataclass(frozen=True)
class _Finder:
    """Finds circuits from a ranking; `effects` has a column per prompt, or one for their mean."""

    ranking: Sweep
    order: Order | None
    wanted: float
    start: Rows
    effects: Float[np.ndarray, "site prompt"]

    def mean(
        self, ablated: AblatedModel, prompts: Half | slice = _ALL
    ) -> Float[np.ndarray, "site"]:
        """Return each site's effect, a mean over the prompts of the ablated model."""
        effects = self.effects[:, prompts]
        return effects[:, 0] if effects.shape[1] == 1 else effects @ ablated.weights

    def smallest(
        self,
        ablated: AblatedModel,
        prompts: Half | slice = _ALL,
        near: int | None = None,
        short: bool = False,
    ) -> tuple[Rows, list[dict[str, Any]]]:
        """Search for a small circuit; return the rows of its sites, and all evaluated circuits."""
        search, effects = SearchRun(ablated, self.wanted, near), self.mean(ablated, prompts)
        orders: dict[Step, Rows] = {
            name: ablated.ranked(self.ranking, name, effects)
            for name in ([self.order] if self.order else ORDERS)
        }
        prune, rank_again = self.order is None, self._has_slopes
        rows = search.smallest(orders, self.start, prune=prune, rank_again=rank_again, short=short)
        return rows, search.tried

    def proposals(self, prompts: Half | slice, ablated: AblatedModel) -> dict[Proposal, Rows]:
        """Return circuits of many sizes, which are found on these prompts; see `held_out.py`."""
        proposals = self._prefixes(prompts, ablated)
        rows, _ = self.smallest(ablated, prompts, short=True)
        return proposals if len(rows) == ablated.n_sites else {SEARCH: rows} | proposals

    def proposed(
        self, proposal: Proposal, ablated: AblatedModel
    ) -> tuple[Rows, list[dict[str, Any]]]:
        """Return the rows of one proposal for all prompts, and the evaluated circuits."""
        if proposal == SEARCH:
            return self.smallest(ablated)
        search, rows = SearchRun(ablated, self.wanted), self._prefixes(_ALL, ablated)[proposal]
        search.measure([proposal[0]], [rows])
        return rows, search.tried

    def _prefixes(self, prompts: Half | slice, ablated: AblatedModel) -> dict[Proposal, Rows]:
        help_by_prompt = self.effects[:, prompts] * ablated.helps(self.ranking)
        return prefixes(ablated, help_by_prompt, self._has_slopes)

    @property
    def _has_slopes(self) -> bool:
        return self.ranking.method != MEASURED
