r"""Search for a small circuit that is nearly as faithful as the whole model.

Let f(C) be the faithfulness of a circuit C (`ablation.py`). The circuit is sufficient if |1 - f(C)|
≤ 1 - wanted, where `wanted` is the requested faithfulness. A prefix of a ranking is its k
highest-ranked sites. Faithfulness does not always rise with circuit size, because the effects of
sites can cancel. Bisection over k may therefore miss the shortest sufficient prefix. The search has
three steps. Each step starts from the best circuit so far:

    prefixes   Prefixes of two rankings, by |effect| and by signed effect, are tried for k on a grid
               with ratio √√2. The grid is refined where f becomes sufficient or crosses 1.
    worth      Sites are ranked again by what they add to the current circuit, to first order
               (`AblatedModel.worth`), averaged with earlier rounds. The step ends after two rounds
               without a smaller circuit.
    pruning    The circuit is evaluated without each chunk of sites; then as many chunks as possible
               are removed together. If none can be, chunks are halved, down to single sites.

At the end, the search evaluates every prefix of both rankings (by |effect| and by signed effect)
that is shorter than the circuit. A circuit of at most 1,000 sites is therefore minimal in two ways:
it becomes insufficient if any single site is removed, and no shorter prefix of the two rankings is
sufficient. A smaller circuit may still exist.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import (
    option_reasons,
    positive_reasons,
    resamples_reasons,
    share_reasons,
)
from attn_only_lens.circuits.ablation import (
    ORDERS,
    AblatedModel,
    Ablation,
    Order,
    Rows,
    ablated_model,
    checked_places,
    reasons_against_draws,
)
from attn_only_lens.circuits.circuit import SITE, SITE_KEY, Circuit
from attn_only_lens.circuits.stability import (
    INCLUSION,
    inclusion_interval,
    random_halves,
    require_resamples,
    resampled,
)
from attn_only_lens.engine.contrast import run_both
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.engine.recording import RunPair, run_pair
from attn_only_lens.engine.sites import Sites, all_heads
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import METHODS, Method, attribute, plan_attribution
from attn_only_lens.patching.repairs import Budget
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.patching.site_groups import site_groups, site_rows

_PER_DOUBLING = 4  # the number of prefix sizes to try from k to 2k
_BETWEEN = 16  # the number of sizes that a refined grid has between two neighbouring sizes
_AT_ONCE = 16  # the number of prefix sizes that are evaluated as one batch, small sizes first
_IDLE_ROUNDS = 2
_AROUND = 4  # sizes within this factor of `near`, another circuit's size, are tried first
_LARGE = 1000  # larger circuits are pruned in chunks, not site by site
_Step: TypeAlias = Literal["magnitude", "signed", "worth", "pruning", "prefix"]
_Questions: TypeAlias = Generator[list[Rows], Float[np.ndarray, "circuit"], int | None]
"""A generator that yields circuits, receives their faithfulness, and returns a size."""


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
    reasons = option_reasons("method", method, (*METHODS, MEASURED))
    if order is not None:
        reasons += option_reasons("order", order, ORDERS)
    reasons += (
        share_reasons(faithfulness=faithfulness)
        + reasons_against_draws(n_random, seed)
        + resamples_reasons(resamples)
    )
    if prompts_at_once is not None:
        reasons += positive_reasons(prompts_at_once=prompts_at_once)
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
    plan = plan_attribution(prompts, method, budget, **settings)
    shared = method == "secant" and not budget and len(plan.prompts) == 1
    # `run_both` runs half precision in float32, and skips conversions to float32 in float64 models.
    shared &= next(plan.model.parameters()).dtype == torch.float32
    if not shared:
        return attribute(plan, None, cast("Method", method), budget), None
    both = run_both(plan.model, plan.pair)
    runs = run_pair(plan.model, plan.pair, *both.recordings(), plan.metric)
    return attribute(plan, both, "secant", budget), runs


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


def smallest_prefix(ablated: AblatedModel, order: Rows, wanted: float) -> Rows:
    """Return the shortest sufficient prefix of the sites in the given order."""
    return _Search(ablated, wanted).prefixes({"magnitude": order})[0]


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
    search = _Search(ablated, wanted, near)
    orders: dict[_Step, Rows] = {
        name: ablated.ranked(ranking, name, effects) for name in ([order] if order else ORDERS)
    }
    return search.smallest(orders, prune=order is None, rank_again=rank_again), search.tried


class _Search:
    """A search for circuits in one ablated model; `tried` lists the evaluated circuits.

    `near` is the size of a circuit that was found for other prompts. With `near`, the search tries
    similar sizes first, and skips the final test of all shorter prefixes.
    """

    def __init__(self, ablated: AblatedModel, wanted: float, near: int | None = None) -> None:
        self._ablated, self._wanted, self._near = ablated, wanted, near
        self.tried: list[dict[str, Any]] = []

    def smallest(self, orders: Mapping[_Step, Rows], *, prune: bool, rank_again: bool) -> Rows:
        """Return the smallest circuit found; if prune=False, the shortest sufficient prefix."""
        circuit = min(self.prefixes(orders), key=len)
        if not prune:
            return circuit
        circuit = self.prune(self.rank_again(circuit) if rank_again else circuit)
        if self._near is not None:
            return circuit
        shorter = self.shorter_prefix(orders.values(), circuit)
        return self.prune(shorter) if len(shorter) < len(circuit) else circuit

    def prefixes(self, orders: Mapping[_Step, Rows], longest: int | None = None) -> list[Rows]:
        """Return each ranking's shortest sufficient prefix, or all sites if no prefix suffices."""
        searches = {step: self._search(order, longest) for step, order in orders.items()}
        asked = {step: next(search) for step, search in searches.items()}
        prefixes: dict[_Step, Rows] = {}
        while asked:
            circuits = [circuit for some in asked.values() for circuit in some]
            steps = [step for step, some in asked.items() for _ in some]
            ends = np.cumsum([len(some) for some in asked.values()])[:-1]
            answers = np.split(self._measure(steps, circuits), ends)
            for step, answer in zip(list(asked), answers, strict=True):
                try:
                    asked[step] = searches[step].send(answer)
                except StopIteration as done:
                    prefixes[step] = orders[step][: done.value]
                    del asked[step]
        return [prefixes[step] for step in orders]

    def _search(self, order: Rows, longest: int | None) -> _Questions:
        """Yield prefixes to evaluate, and return the size of the shortest sufficient prefix."""
        longest = len(order) if longest is None else min(longest, len(order))
        # The prefix sizes to try do not depend on the number of sites. So the search finds the same
        # prefix after growth adds sites without an effect, which are ranked last.
        grid = 2.0 ** (np.arange(_PER_DOUBLING * np.log2(longest)) / _PER_DOUBLING)
        sizes = np.unique([*grid.round().astype(int), longest])
        if self._near is not None:
            few = sizes[(sizes * _AROUND >= self._near) & (sizes <= _AROUND * self._near)]
            size = yield from self._first(order, 0, 0.0, few)
            if size is not None:
                return size
        return (yield from self._first(order, 0, 0.0, sizes))

    def _first(self, order: Rows, short: int, f: float, sizes: Rows) -> _Questions:
        """Search a grid of sizes, then refine it; return the shortest sufficient size or None.

        `short` is the size of an insufficient prefix below the grid, and `f` is its faithfulness.
        """
        for start in range(0, len(sizes), _AT_ONCE):
            some = sizes[start : start + _AT_ONCE]
            measured = yield [order[:size] for size in some]
            for size, g in zip(some.tolist(), measured.tolist(), strict=True):
                suffices = self._suffices(g, size)
                if suffices or (f - 1) * (g - 1) < 0:  # f crosses 1
                    if size - short > 1:
                        between = np.linspace(short + 1, size, _BETWEEN).round().astype(np.int64)
                        earlier = yield from self._first(order, short, f, np.unique(between))
                        if earlier is not None:
                            return earlier
                    elif suffices:
                        return size
                short, f = size, g
        return None

    def rank_again(self, circuit: Rows) -> Rows:
        """Repeatedly rank sites by what they add to the circuit; return the smallest circuit."""
        best, idle, worth = circuit, 0, self._ablated.worth(circuit)
        while idle < _IDLE_ROUNDS:
            order = np.argsort(-worth, kind="stable")
            (circuit,) = self.prefixes({"worth": order}, 2 * len(circuit))
            if len(circuit) == len(order):
                break
            best, idle = (circuit, 0) if len(circuit) < len(best) else (best, idle + 1)
            worth = (worth + self._ablated.worth(circuit)) / 2
        return best

    def prune(self, circuit: Rows) -> Rows:
        """Remove chunks of sites, down to single sites, while the circuit remains sufficient."""
        n_chunks = 16
        while True:
            finest = min(len(circuit), _LARGE)
            n_chunks = min(n_chunks, finest)
            fewer = self._without_chunks(circuit, np.array_split(circuit, n_chunks))
            if len(fewer) < len(circuit):
                circuit = fewer
            elif n_chunks == finest:
                return circuit
            else:
                n_chunks *= 2

    def _without_chunks(self, circuit: Rows, chunks: Sequence[Rows]) -> Rows:
        """Return the smallest sufficient circuit found by removing several chunks together."""
        without = [np.setdiff1d(circuit, chunk, assume_unique=True) for chunk in chunks]
        *values, whole = self._measure(["pruning"] * (len(chunks) + 1), [*without, circuit])
        can_go = [i for i, rest in enumerate(without) if self._suffices(values[i], len(rest))]
        # Remove chunks in two orders: first those whose removal changes f least, or first those
        # whose removal leaves the largest f.
        orders = [
            sorted(can_go, key=lambda i: abs(values[i] - whole)),
            sorted(can_go, key=lambda i: -values[i]),
        ]
        rests = [
            np.setdiff1d(circuit, np.concatenate([chunks[i] for i in order[:n]]))
            for order in orders
            for n in np.unique(np.geomspace(1, max(1, len(order)), 17).round().astype(int))
            if len(order)
        ]
        return self._smallest_sufficient("pruning", circuit, rests)

    def shorter_prefix(self, orders: Iterable[Rows], circuit: Rows) -> Rows:
        """Return the shortest sufficient prefix, or the circuit if no shorter prefix suffices."""
        sizes = range(1, len(circuit) if len(circuit) <= _LARGE else 1)
        prefixes = [order[:size] for order in orders for size in sizes]
        return self._smallest_sufficient("prefix", circuit, prefixes)

    def _smallest_sufficient(self, step: _Step, circuit: Rows, others: list[Rows]) -> Rows:
        values = self._measure([step] * len(others), others)
        enough = [
            rows for rows, f in zip(others, values, strict=True) if self._suffices(f, len(rows))
        ]
        return min([circuit, *enough], key=len)

    def _measure(
        self, steps: Sequence[_Step], circuits: Sequence[Rows]
    ) -> Float[np.ndarray, "circuit"]:
        values = self._ablated.faithfulness(circuits)
        self.tried += [
            {"step": step, "n_sites": len(circuit), "faithfulness": f}
            for step, circuit, f in zip(steps, circuits, values.tolist(), strict=True)
        ]
        return values

    def _suffices(self, f: float, size: int) -> bool:
        # The circuit of all sites has f = 1 up to rounding errors, so it always suffices.
        return size == self._ablated.n_sites or (size > 0 and abs(1 - f) <= 1 - self._wanted)
