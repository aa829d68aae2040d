"""Write the page and figure of `schedule_search`, from its tables."""

import json
from collections.abc import Mapping
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import chi2, linregress, rankdata
from scipy.stats import t as student

from analyses.tools.benching import markdown
from analyses.tools.study_files import t_interval, verdict

__all__ = ["figure", "page"]

SIZES = ("neurons", "heads", "width", "head size")
FOUND = ("random search", "halving")
HANDMADE = ("full", "early", "late", "half")
BUDGETS = {"score_0": "1/9", "score_1": "1/3", "score_2": "all"}
FULL = "score_2"
N_RESAMPLED = 2000


def said(mean: float, low: float, high: float) -> str:
    """Return an estimate and its interval."""
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def interval(values: "pd.Series[float]") -> str:
    """Return the mean and its interval."""
    return said(*t_interval(values))


def scores(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of the evaluation: a row for each seed, a column for each arm."""
    rows = runs[runs["search"] == "evaluation"]
    return rows.pivot(index="seed", columns="name", values=FULL)


def best_handmade(runs: pd.DataFrame) -> str:
    """Return the hand-made schedule with the lowest mean score in the evaluation."""
    return str(scores(runs)[list(HANDMADE)].mean().idxmin())


def of_search(runs: pd.DataFrame, search: str) -> pd.DataFrame:
    """Return the scores of a search's runs at all budgets, by name."""
    return runs[runs["search"] == search].set_index("name")[list(BUDGETS)]


def search_score(runs: pd.DataFrame, arm: str) -> float:
    """Return the score that a search found for its best schedule."""
    return float(of_search(runs, arm.split()[0])[FULL].min())


def in_words(schedule: str) -> str:
    """Return a schedule in words."""
    stored = json.loads(schedule)
    before = stored["start"]
    parts = [", ".join(f"{n} {name}" for n, name in zip(before, SIZES, strict=True))]
    for when, after in stored["events"]:
        changes = [
            f"{name} {new}"
            for name, old, new in zip(SIZES, before, after, strict=True)
            if new != old
        ]
        parts.append(f"at {when:.2g}: {', '.join(changes)}")
        before = after
    init = f" ({stored['init']})" if stored["events"] else ""
    return "; ".join(parts) + init


def evaluation_table(runs: pd.DataFrame) -> str:
    """Return a row for each arm of the evaluation."""
    rows = []
    wide, rival = scores(runs), best_handmade(runs)
    evaluated = runs[runs["search"] == "evaluation"]
    for arm in (*FOUND, *HANDMADE):
        of_arm = evaluated[evaluated["name"] == arm]
        solved = of_arm["solved"].dropna()
        rows.append(
            [
                arm,
                interval(wide[arm]),
                "–" if arm == "full" else interval(wide[arm] - wide["full"]),
                "–" if arm == rival else interval(wide[arm] - wide[rival]),
                f"{of_arm['accuracy'].mean():.3f}",
                f"{len(solved)} of {len(of_arm)}",
                f"{solved.median():.2f}" if len(solved) else "–",
                f"{of_arm['cpu_seconds'].median():.1f}",
            ]
        )
    header = ["schedule", "score", 'minus "full"', f'minus "{rival}"', "accuracy", "solved"]
    return markdown([*header, "budget until then, median", "processor seconds"], rows)


def words_table(runs: pd.DataFrame) -> str:
    """Return the schedules of the evaluation in words."""
    firsts = runs[runs["search"] == "evaluation"].drop_duplicates("name").set_index("name")
    rows = [[arm, in_words(str(firsts.loc[arm, "schedule"]))] for arm in (*FOUND, *HANDMADE)]
    return markdown(["schedule", "sizes at the start; growths (initialization)"], rows)


def curse(runs: pd.DataFrame, arm: str) -> tuple[float, float, float]:
    """Return the score on new seeds minus the score in the search, with its interval."""
    return t_interval(scores(runs)[arm] - search_score(runs, arm))


def gap(runs: pd.DataFrame, search: str) -> float:
    """Return how much better the best run is than the mean run of a search."""
    results = of_search(runs, search)[FULL]
    return float(results.mean() - results.min())


def spread(runs: pd.DataFrame, search: str) -> tuple[float, float, float]:
    """Return the standard deviation of the runs of a search, with its interval (χ²)."""
    results = of_search(runs, search)[FULL].dropna()
    deviation, n = float(results.std()), len(results) - 1
    low, high = (deviation * np.sqrt(n / chi2.ppf(level, n)) for level in (0.975, 0.025))
    return deviation, float(low), float(high)


def spread_within(runs: pd.DataFrame) -> float:
    """Return the standard deviation over seeds of one schedule, pooled over the evaluation."""
    return float(np.sqrt(scores(runs).var().mean()))


def curse_table(runs: pd.DataFrame) -> str:
    """Return a row for each search: the best score, and what is left of it on new seeds."""
    rows = []
    for search, arm in (("random", "random search"), ("halving", "halving"), ("re-draws", "early")):
        results = of_search(runs, search)[FULL]
        new, at_full = scores(runs)[arm], results.dropna()
        flops = runs.loc[runs["search"] == search, "flops"].sum()
        counts = f"{len(results)} ({len(at_full)})"
        scored = [f"{at_full.mean():.2f}", f"{at_full.min():.2f}", interval(new)]
        rows.append([search, f"{flops / 1e12:.3f}", counts, *scored, interval(new - results.min())])
    header = ["search", "Tflop", "runs (with full budget)", "mean score of these", "best score"]
    return markdown([*header, "best schedule, new seeds", "winner's curse"], rows)


def ranked(pairs: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman's correlation of two columns, with a bootstrap interval over rows."""
    drawn = np.random.default_rng(0).integers(len(pairs), size=(N_RESAMPLED, len(pairs)))
    samples = rankdata(np.concatenate([pairs[None], pairs[drawn]]), axis=1)
    centred = samples - samples.mean(1, keepdims=True)
    norms = np.sqrt((centred**2).sum(1).prod(-1))
    products = centred.prod(-1).sum(1)
    values = products[norms > 0] / norms[norms > 0]
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return float(values[0]), float(low), float(high)


def correlations(runs: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return rank correlations with the full budget, by search and small budget."""
    return {
        (search, column): ranked(of_search(runs, search)[[column, FULL]].to_numpy())
        for search in ("random", "re-draws")
        for column in ("score_0", "score_1")
    }


def correlations_table(runs: pd.DataFrame) -> str:
    """Return a row for each small budget."""
    correlation_of = correlations(runs)
    rows = []
    for column in ("score_0", "score_1"):
        kept, third, chance = recalled(runs, column)
        rows.append(
            [
                BUDGETS[column],
                *(said(*correlation_of[search, column]) for search in ("random", "re-draws")),
                f"{kept} of {third} (by chance {chance:.1f})",
            ]
        )
    header = ["part of the budget", "random schedules", 'seeds of one schedule ("early")']
    return markdown([*header, "best third at full budget in the best third here"], rows)


def recalled(runs: pd.DataFrame, column: str) -> tuple[int, int, float]:
    """Return how many of the best third at full budget are in the best third at a small budget.

    Returns:
        The number, the size of a third, and the number that is expected by chance.
    """
    results = of_search(runs, "random")
    n = max(1, len(results) // 3)
    both = set(results[column].nsmallest(n).index) & set(results[FULL].nsmallest(n).index)
    return len(both), n, n * n / len(results)


def factors(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the factors of each random schedule, and its score."""
    firsts = runs[runs["search"] == "random"].set_index("name")
    stored = [json.loads(text) for text in firsts["schedule"]]
    starts = np.log2([schedule["start"] for schedule in stored])
    table = pd.DataFrame(starts, firsts.index, [f"{name} at the start, log₂" for name in SIZES])
    table.insert(0, "flops of a step at the start, log₂", np.log2(firsts["start_cost"]))
    when = [[fraction for fraction, _ in schedule["events"]] or [0.0] for schedule in stored]
    table["budget before the first growth"] = [times[0] for times in when]
    table["budget before the last growth"] = [times[-1] for times in when]
    table["number of growths"] = [len(schedule["events"]) for schedule in stored]
    table["init"] = [schedule["init"] for schedule in stored]
    return table.assign(score=firsts[FULL])


def slopes(runs: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Return the slope of the score on each factor per standard deviation, with intervals."""
    table = factors(runs)
    intervals = {}
    for name in table.columns.drop(["init", "score"]):
        values = table[name].astype(float)
        if values.std() == 0:
            continue
        fit = linregress((values - values.mean()) / values.std(), table["score"])
        half = float(student.ppf(0.975, len(table) - 2)) * fit.stderr
        intervals[name] = (float(fit.slope), float(fit.slope - half), float(fit.slope + half))
    return intervals


def by_init(runs: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Return the mean score of each initialization over random schedules, with its interval."""
    groups = factors(runs).groupby("init")["score"]
    return {str(init): t_interval(values) for init, values in groups}


def factors_table(runs: pd.DataFrame) -> str:
    """Return slopes, and means by initialization."""
    rows = [[name, said(*estimate)] for name, estimate in slopes(runs).items()]
    counts = factors(runs)["init"].value_counts()
    rows += [
        [f"mean score with {name}, {counts[name]} schedules", said(*estimate)]
        for name, estimate in by_init(runs).items()
    ]
    return markdown(["factor", "slope per standard deviation, or mean"], rows)


PREDICTIONS = (
    'On new seeds, the best schedule of random search beats "full".',
    "So does the best schedule of halving.",
    "Neither of them beats the best hand-made schedule.",
    "The best schedules of the two searches do not differ.",
    "Winner's curse: both best schedules are worse on new seeds by .5 or more.",
    "The gap between the best and the mean is at least half as large in the re-draws as in random "
    "search.",
    "The rank correlation between 1/3 of the budget and the full budget is above .5.",
    "Between 1/9 of the budget and the full budget, it is below .3.",
    "Schedules with a cheaper first model have lower scores.",
    "The three intervals of the mean score by initialization all overlap.",
)


def verdicts(runs: pd.DataFrame) -> str:
    """Return the predictions, and whether they held."""
    wide, rival = scores(runs), best_handmade(runs)
    of_full = [t_interval(wide[arm] - wide["full"]) for arm in FOUND]
    of_rival = [t_interval(wide[arm] - wide[rival]) for arm in FOUND]
    searches = t_interval(wide[FOUND[0]] - wide[FOUND[1]])
    curses = [curse(runs, arm) for arm in FOUND]
    gaps = gap(runs, "re-draws"), gap(runs, "random")
    third, ninth = (correlations(runs)["random", name] for name in ("score_1", "score_0"))
    slope = next(iter(slopes(runs).values()))
    inits = list(by_init(runs).values())
    overlap = max(low for _, low, _ in inits) <= min(high for *_, high in inits)
    held = [
        *((high < 0, said(mean, low, high)) for mean, low, high in of_full),
        (
            all(high >= 0 for *_, high in of_rival),
            f'{said(*of_rival[0])} and {said(*of_rival[1])} against "{rival}"',
        ),
        (searches[1] <= 0 <= searches[2], said(*searches)),
        (
            all(mean >= 0.5 for mean, *_ in curses),
            " and ".join(said(*estimate) for estimate in curses),
        ),
        (gaps[0] >= gaps[1] / 2, f"{gaps[0]:.2f} in the re-draws, {gaps[1]:.2f} in random search"),
        (third[0] > 0.5, said(*third)),
        (ninth[0] < 0.3, said(*ninth)),
        (slope[1] > 0, f"{said(*slope)} per standard deviation"),
        (
            overlap,
            ", ".join(f"{name} {said(*estimate)}" for name, estimate in by_init(runs).items()),
        ),
    ]
    return "\n".join(
        verdict(claim, bool(ok), finding)
        for claim, (ok, finding) in zip(PREDICTIONS, held, strict=True)
    )


def figure(runs: pd.DataFrame, curves: pd.DataFrame) -> Figure:
    """Draw losses against flops, scores by seed, and scores at small and full budgets."""
    picture = Figure(figsize=(12, 3.8), layout="constrained")
    losses, seeds, budgets = picture.subplots(1, 3)
    for number, arm in enumerate((*FOUND, *HANDMADE)):
        of_arm = curves[curves["arm"] == arm]
        logs = of_arm.assign(loss=np.log10(of_arm["loss"])).groupby("share")["loss"].mean()
        style = "-" if arm in FOUND else "--"
        losses.plot(logs.index, logs, style, color=f"C{number}", label=arm)
        results = scores(runs)[arm]
        seeds.plot(np.full(len(results), number), results, "o", color=f"C{number}", ms=3, alpha=0.6)
        seeds.plot(number, results.mean(), "_", color="k", ms=14)
    losses.set(xlabel="part of the budget", ylabel="log₁₀ of the held-out loss, mean over seeds")
    losses.legend(fontsize="x-small")
    seeds.set_xticks(
        range(len(FOUND) + len(HANDMADE)), (*FOUND, *HANDMADE), rotation=40, ha="right"
    )
    seeds.set_ylabel("score on new seeds (bars: means)")
    redraws = runs[runs["search"] == "re-draws"]
    budgets.plot(redraws["score_1"], redraws[FULL], ".", color=".7", label='"early", many seeds')
    random = of_search(runs, "random")
    budgets.plot(random["score_1"], random[FULL], "o", ms=4, label="random schedules")
    budgets.set(xlabel="score at 1/3 of the budget", ylabel="score at the full budget")
    budgets.legend(fontsize="x-small")
    for panel in (losses, seeds, budgets):
        panel.grid(alpha=0.3)
    return picture


def relation(difference: tuple[float, float, float]) -> str:
    """Return in words what an interval of a difference of scores says."""
    _, low, high = difference
    return (
        "better than" if high < 0 else "worse than" if low > 0 else "not measurably different from"
    )


def answer(runs: pd.DataFrame) -> str:
    """Return the answer in words."""
    wide, rival = scores(runs), best_handmade(runs)
    of_rival = {arm: t_interval(wide[arm] - wide[rival]) for arm in FOUND}
    of_full = {arm: t_interval(wide[arm] - wide["full"]) for arm in FOUND}
    yes = any(relation(difference) == "better than" for difference in of_rival.values())
    parts = [
        f"The best schedule of {arm} is {relation(of_rival[arm])} the best hand-made schedule, "
        f'"{rival}" ({said(*of_rival[arm])}), and {relation(of_full[arm])} full size from the '
        f"start ({said(*of_full[arm])})."
        for arm in FOUND
    ]
    curses = [curse(runs, arm)[0] for arm in FOUND]
    schedules, seeds = (spread(runs, search)[0] for search in ("random", "re-draws"))
    luck = (
        " So seeds explain most of this spread, and a search with one run for each schedule mostly "
        "selects lucky seeds."
        if seeds**2 >= schedules**2 / 2
        else ""
    )
    handmade = t_interval(wide[rival] - wide["full"])
    text = (
        f"**Answer.** {'Yes' if yes else 'No'}. We compared schedules on {len(wide)} new seeds. "
        "Differences are in powers of ten of the held-out loss; negative differences are better. "
        f"{parts[0]} {parts[1]} "
        f'"{rival}" itself is {relation(handmade)} full size from the start ({said(*handmade)}).'
        "\n\n"
        "In the searches, the scores of the two chosen schedules were better than on new seeds, by "
        f"{curses[0]:.1f} and {curses[1]:.1f} (the winner's curse). Random schedules, each with a "
        f"seed, have scores with a standard deviation of {schedules:.2f}; one schedule with as "
        f"many seeds has {seeds:.2f}.{luck}"
    )
    return "\n\n".join(fill(part, 100, break_on_hyphens=False) for part in text.split("\n\n"))


def page(runs: pd.DataFrame, about: Mapping[str, Any], flag: str) -> str:
    """Return the page of a run, from its table."""
    study = about["study"]
    full = runs[(runs["search"] == "evaluation") & (runs["name"] == "full")]
    solved = full["solved"].notna().sum()
    return PAGE.format(
        modulus=study["modulus"],
        percent=round(100 * study["train_fraction"]),
        n_seeds=study["n_seeds"],
        n_random=study["n_random"],
        budget=f"{study['steps'] * about['step'] / 1e9:.3g}",
        steps=study["steps"],
        machine=about["machine"],
        minutes=f"{about['training_seconds'] / 60:.0f}",
        flag=flag,
        answer=answer(runs),
        space=space_table(study["space"]),
        predictions=verdicts(runs),
        evaluation=evaluation_table(runs),
        words=words_table(runs),
        curse=curse_table(runs),
        gaps=f"{gap(runs, 'random'):.2f} in random search and {gap(runs, 're-draws'):.2f}",
        spreads=f"{said(*spread(runs, 'random'))} over random schedules, "
        f"{said(*spread(runs, 're-draws'))} over seeds",
        caution=fill(f"**Caution.** {CAUTION}".format(solved=solved, n=len(full)), 100),
        within=f"{spread_within(runs):.2f}",
        correlations=correlations_table(runs),
        factors=factors_table(runs),
    )


def space_table(space: Mapping[str, Any]) -> str:
    """Return the search space as a table."""
    rows = [
        [f"{name}: values at the start and in between; the last is full", _list(values)]
        for name, values in zip(SIZES, space["sizes"], strict=True)
    ]
    low, high = space["when"]
    rows += [
        ["number of growths", _list(space["n_events"])],
        ["part of the budget before a growth, log-uniform", f"{low} to {high}"],
        ["initialization of new entries", _list(space["inits"])],
    ]
    return markdown(["what", "values"], rows)


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


CAUTION = """One task, one layer, and a space of small models. The budget is tight: full size from
the start solves the task with {solved} of {n} new seeds, and most losses still fall at the end.
Each schedule has one seed in a search; more seeds for fewer schedules may find better ones. The
best hand-made schedule is chosen by the scores that it is then compared with, so it has a small
advantage. Growths are at fractions of the full budget: halving sees the beginning of each schedule,
often before it grows. Equal flops are not equal time, because small matrices are slow ("processor
seconds" in the table of new seeds)."""

PAGE = """# Does it pay to search for a growth schedule?

**Question.** Section 5 of the growth paper proposes architecture search for growth: when does a
model grow, in which sizes, and how much? Is the best schedule that a search finds better than
hand-made schedules, at equal flops and on new seeds?

{answer}

{caution}

A one-layer transformer learns addition modulo {modulus} on {percent} % of all pairs. Every run has
the same budget: {budget} Gflop of matrix products, or {steps} steps at full size.
`schedule_search.py` says what is drawn, searched and compared. The score is the mean of log₁₀(loss
on held-out pairs) over the last fifth of a budget; lower is better, and -1 means a tenth of the
loss. Intervals are 95 % intervals (Student's t) over {n_seeds} seeds that no search has seen,
unless a table says something else.

Made by `python -m analyses.studies.schedule_search{flag}` on {machine}. Training
took {minutes} minutes of processor time. Every figure can be computed again from
`schedule_search.csv`.

## Predictions

They were written before the runs, and stand in full in the script.

{predictions}

## New seeds

All schedules of this table have the same seeds; differences are paired. A run has solved the task
when its accuracy on held-out pairs first reaches .99, at any size.

{evaluation}

{words}

![Losses, scores on new seeds, and small against full budgets](schedule_search.svg)

## The winner's curse

All searches have the same flops. "re-draws" is the null: {n_random} runs of "early" with different
seeds. The winner's curse is the score on new seeds minus the best score of the search; the interval
is over new seeds.

{curse}

The best run is better than the mean run by {gaps} in the
re-draws. The standard deviation of scores is {spreads}
of "early" (χ² intervals), and {within} over seeds of one schedule, pooled over the schedules of the
evaluation.

## Do small budgets predict the full budget?

Spearman's correlation between the scores of a run at a small budget and at the full budget, with
95 % bootstrap intervals over runs. High values justify halving. The last column counts random
schedules.

{correlations}

## What matters in a schedule

Slopes of the score at full budget on one factor at a time, over the {n_random} random schedules,
and mean scores by initialization. With as many intervals as here, one may exclude 0 by chance.

{factors}

## The search space

Each size starts at a random value, and becomes full in a random growth; with probability 1/2 it
takes a value in between in an earlier growth.

{space}
"""
