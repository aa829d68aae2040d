"""Score the parts and edges of known circuits by every method of the benchmark.

The rules, the forms of models, and how to enter a method are in `analyses/benchmark/README.md`.
Every method of `methods.py` scores all heads and neurons ("nodes") and all edges of each model;
AUROC is measured against the ground truth. Intervals of the page are from the bootstrap over
programs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.benchmark import bounds, tasks, twins
from analyses.benchmark.bounds import LEVEL
from analyses.benchmark.methods import EDGES, EXACT, NODES, OURS, Method
from analyses.benchmark.scoring import LABELS, LEAK, compare, interval
from analyses.benchmark.tasks import KINDS, Problem
from analyses.study import Setting, Study, Tables
from analyses.tools.flops import FlopCounter
from attn_only_lens.storage import write_text

METHODS: Mapping[str, Mapping[str, Method]] = {"nodes": NODES, "edges": EDGES}
LITERATURE = {
    what: [x for x in methods if x not in (*OURS, *EXACT, "random")]
    for what, methods in METHODS.items()
}
LATER = ("EAP-IG, activations", "GIM")
"""Methods that were added on 2026-12-01; predictions that compare methods are judged without."""
FORMS = ("compiled", "disguised", "trained")
COSTED = ("is_vowel", "follows_a", "detect_ab", "hist", "frac_prevs", "sort")
"""One program of each kind, whose disguised form is used to count operations."""
SETS = {"covered": "all sites", "covered, with an effect": "with an effect",
        "covered, hard": "hard"}  # fmt: skip
COLOURS = {"literature": "C0", "package": "C1", "exact": "C2", "random": "C7"}
DIGITS = 4
_ROUNDING = 1e-9


def all_models(setting: Setting) -> list[tuple[str, str, int]]:
    """Return the form, program and seed of all models; for a trial, those of two programs."""
    names, trained = tasks.PROGRAMS, twins.names()
    if setting.smoke:
        names, trained = ("is_vowel",), ["repeats_previous"]
    models = [(form, name, 0) for name in names for form in tasks.FORMS]
    seeds = twins.SEEDS[: setting.n_seeds]
    return models + [("trained", name, seed) for name in trained for seed in seeds]


def problem_of(setting: Setting, form: str, name: str, seed: int) -> Problem:
    """Return the problem of a model; for a trial, with prompts of one length."""
    if form == "trained":
        (problem,) = twins.problems([name], [seed])
    else:
        problem = tasks.problem(tasks.load(name), form)
    if setting.smoke:
        problem = replace(problem, task=replace(problem.task, pairs=problem.task.pairs[-1:]))
    return problem.to(setting.device)


def scores(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield a row for nodes and for edges, for each label and each least score that counts.

    Columns are the AUROC of each method.
    """
    task = problem.task
    for what, methods in METHODS.items():
        truth, frames = getattr(problem.truth, what), {x: f(task) for x, f in methods.items()}
        for least in (LEAK, _ROUNDING):
            judged = {x: compare(problem, some, what, least) for x, some in frames.items()}
            for label in LABELS:
                row: dict[str, Any] = {"form": task.form, "program": task.name, "seed": task.seed}
                row |= {"what": what, "labels": label, "least": least}
                row |= {"positive": int(truth[label].sum()), "of": len(truth)}
                yield row | {x: auroc[label] for x, auroc in judged.items()}


def costs(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: its floating-point operations.

    The unit is a forward pass of the model on all prompts of the task's pairs, clean and corrupted.
    """
    task = problem.task
    with FlopCounter() as unit:
        for pairs in task.pairs:
            task.model(pairs.clean), task.model(pairs.corrupted)
    for what, methods in METHODS.items():
        for method, score in methods.items():
            with FlopCounter() as cost:
                score(task)
            row = {"what": what, "program": task.name, "method": method, "flops": cost.total}
            yield row | {"passes": cost.total / unit.total}


MEASURES: Mapping[str, Callable[[Problem], Any]] = {
    "scores": scores,
    "sites": bounds.sites_of,
    "cost": costs,
}


def run(setting: Setting) -> Tables:
    """Return the tables of scores, intervals around estimates, costs and faithful twins.

    The rows of each model are kept in the folder of runs, and read from it by the next run.
    """
    folder = setting.runs / ("smoke" if setting.smoke else setting.device)
    folder.mkdir(parents=True, exist_ok=True)
    costed = {("disguised", name) for name in COSTED}
    if setting.smoke:
        costed = {("compiled", COSTED[0])}
    parts: dict[str, list[pd.DataFrame]] = {part: [] for part in MEASURES}
    models = all_models(setting)
    for form, name, seed in tqdm(models, unit="model", leave=False):
        problem = cache(partial(problem_of, setting, form, name, seed))
        for part, measure in MEASURES.items():
            if part == "cost" and (form, name) not in costed:
                continue
            path = folder / f"{form}-{name}-{seed}-{part}.csv"
            if not path.exists():
                write_text(path, pd.DataFrame(measure(problem())).to_csv(index=False))
            parts[part].append(pd.read_csv(path))
    every = {part: pd.concat(frames, ignore_index=True) for part, frames in parts.items()}
    judged = every["scores"]
    keys, methods = ["what", "method"], list(dict.fromkeys([*NODES, *EDGES]))
    low = judged.query(f"least == {_ROUNDING} and form == 'disguised' and labels == 'true'")
    leaks = low.melt("what", methods, "method", "auroc").dropna().groupby(keys, sort=False).mean()
    faithful = [
        {"program": name, "seed": seed} | twins.faithfulness(name, seed)
        for form, name, seed in models
        if form == "trained"
    ]
    tables = {
        "": judged.query(f"least == {LEAK}").drop(columns="least"),
        "leaks": leaks.reset_index(),
        "bounds": bounds.coverage(every["sites"]),
        "cost": every["cost"],
    }
    rounded = {part: frame.round(DIGITS) for part, frame in tables.items()}
    return rounded | {"twins": pd.DataFrame(faithful)}


def values(
    frame: pd.DataFrame, what: str, form: str, method: str, label: str = "true"
) -> "pd.Series[float]":
    """Return a method's AUROC for each program: the mean over seeds."""
    some = frame[(frame["what"] == what) & (frame["form"] == form) & (frame["labels"] == label)]
    return some.groupby("program", sort=False)[method].mean().dropna()


def best(
    frame: pd.DataFrame, what: str, form: str, methods: Iterable[str], label: str = "true"
) -> str:
    """Return the method with the highest mean."""
    return max(methods, key=lambda method: values(frame, what, form, method, label).mean())


def duel(
    frame: pd.DataFrame, what: str, form: str, ours: str, other: str, label: str = "true"
) -> dict[str, Any]:
    """Return how much better a method is than another, with the interval over programs."""
    one, two = (values(frame, what, form, method, label) for method in (ours, other))
    difference, low, high = interval(one - two)
    row = {"what": what, "form": form, "labels": label, "ours": ours, "ours_mean": one.mean()}
    row |= {"other": other, "other_mean": two.mean(), "programs": len(one)}
    return row | {"difference": difference, "low": low, "high": high}


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how much better the best method of the package is than the best of the others.

    "literature" has the methods that are not in the package; "exact" has exact cuts and exact
    patches, which are references. The best have the highest mean for this form and label.
    """
    rows = []
    for what, methods in METHODS.items():
        groups = {"literature": LITERATURE[what], "exact": [x for x in EXACT if x in methods]}
        for form in FORMS:
            for label in LABELS:
                ours = best(frame, what, form, OURS, label)
                for group, others in groups.items():
                    other = best(frame, what, form, others, label)
                    rows.append(duel(frame, what, form, ours, other, label) | {"against": group})
    return pd.DataFrame(rows)


def two_factors(frame: pd.DataFrame, cost: pd.DataFrame) -> pd.DataFrame:
    """Return how two factors compares with the best method from the literature, and the costs."""
    passes, rows = cost.groupby(["what", "method"])["passes"].median(), []
    for what in METHODS:
        for form in FORMS:
            other = best(frame, what, form, LITERATURE[what])
            row = duel(frame, what, form, "two factors", other)
            row |= {"passes": passes[what, "two factors"], "other_passes": passes[what, other]}
            rows.append(row)
    return pd.DataFrame(rows)


def lost(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return the best methods for each program, and whether the best is from the literature."""
    some = frame[(frame["what"] == what) & (frame["labels"] == "true")]
    mean = some.groupby(["form", "program"])[list(METHODS[what])].mean().dropna(how="all")
    sides = {"ours": list(OURS), "other": LITERATURE[what]}
    table = pd.DataFrame(index=mean.index)
    for side, methods in sides.items():
        table[side] = mean[methods].idxmax(axis=1)
        table[f"{side}_mean"] = mean[methods].max(axis=1)
    return table.assign(lost=table["other_mean"] > table["ours_mean"] + 1e-3).reset_index()


def written(method: str) -> str:
    """Return a method's name in bold if it is the package's, and in italics if it is exact."""
    return f"**{method}**" if method in OURS else f"*{method}*" if method in EXACT else method


def mean_table(frame: pd.DataFrame, what: str, form: str) -> pd.DataFrame:
    """Return the mean AUROC of each method, with intervals, for both labels, the best first."""
    ranked = sorted(METHODS[what], key=lambda x: -values(frame, what, form, x).mean())
    rows = []
    for method in ranked:
        found = {
            words: "{:.3f} [{:.3f}, {:.3f}]".format(
                *interval(values(frame, what, form, method, label))
            )
            for label, words in LABELS.items()
        }
        rows.append({"method": written(method)} | found)
    return pd.DataFrame(rows)


def winners(frame: pd.DataFrame) -> pd.DataFrame:
    """Return, for each kind of program, the methods within .001 of the best mean."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    some, rows = frame[frame["labels"] == "true"].assign(kind=frame["program"].map(kind_of)), []
    for (what, form, kind), group in some.groupby(["what", "form", "kind"], sort=False):
        mean = group[[method for method in METHODS[what] if method != "random"]].mean()
        ahead = ", ".join(mean.index[mean >= mean.max() - 1e-3])
        row = {"what": what, "form": form, "kind": kind, "programs": group["program"].nunique()}
        rows.append(row | {"AUROC": f"{mean.max():.3f}", "best": ahead})
    return pd.DataFrame(rows)


def bounds_table(covered: pd.DataFrame, form: str) -> pd.DataFrame:
    """Return the coverage and the widths of each interval around estimates."""
    rows = []
    for arm, group in covered[covered["form"] == form].groupby("arm", sort=False):
        row = {"interval": arm}
        for name, words in SETS.items():
            row[words] = "{:.1%} [{:.1%}, {:.1%}]".format(*interval(group[name]))
        row["worst program, hard"] = f"{group['covered, hard'].min():.1%}"
        for name in ("width, hard", "width, hard, of Δ"):
            row[name.removeprefix("width, hard, ")] = f"{group[name].median():.2f}"
        shares = ("sign", "sign, hard", "small")
        rows.append(row | {name: f"{group[name].mean():.0%}" for name in shares})
    return pd.DataFrame(rows)


def by_seed(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return the mean over twins of each method, by seed, the best first; all true."""
    some = frame.query(f"what == '{what}' and form == 'trained' and labels == 'true'")
    table = some.groupby("seed")[sorted(METHODS[what])].mean().T
    return table.loc[table.mean(axis=1).sort_values(ascending=False, kind="stable").index]


def agreement(table: pd.DataFrame) -> float:
    """Return the smallest of Spearman's correlations between two seeds, without random."""
    return float(table.drop("random").corr("spearman").min().min())


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the AUROC of each method: mean, interval, and the range over programs."""
    picture = Figure(figsize=(11, 7), layout="constrained")
    panels = picture.subplots(len(METHODS), len(FORMS), sharex=True, sharey="row")
    for row, (what, methods) in zip(panels, METHODS.items(), strict=True):
        for panel, form in zip(row, FORMS, strict=True):
            for group, colour in COLOURS.items():
                drawn = []
                for place, method in enumerate(reversed(methods)):
                    if group_of(method) == group:
                        of = values(frame, what, form, method)
                        drawn.append((place, *interval(of), of.min(), of.max()))
                places, mean, low, high, least, most = zip(*drawn, strict=True)
                panel.hlines(places, least, most, colour, linewidth=1, alpha=0.5)
                panel.hlines(places, low, high, colour, linewidth=3, alpha=0.7, label=group)
                panel.plot(mean, places, "o", color=colour, markersize=5)
            panel.set_yticks(range(len(methods)), reversed(methods))
            panel.set_title(f"{what}, {form}", fontsize="medium")
            panel.grid(axis="x", alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("AUROC")
    picture.legend(
        *panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS)
    )
    return picture


def group_of(method: str) -> str:
    """Return the group of a method, a key of COLOURS."""
    if method == "random":
        return method
    return "package" if method in OURS else "exact" if method in EXACT else "literature"


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame, cost, bound = tables[""], tables["cost"], tables["bounds"]
    covered = bound.groupby(["form", "program", "arm"], sort=False).mean().reset_index()
    every, table = covered.groupby(["arm", "form"], sort=False), differences(frame)
    spread = covered.query("arm == 'spread'")
    easy = 1 - spread["hard sites"] / spread["sites with an effect"]
    seeds = {what: by_seed(frame, what) for what in METHODS}
    known = {what: x.drop(list(LATER)) for what, x in seeds.items()}
    fast = {what: x.drop([*EXACT, "random"], errors="ignore") for what, x in known.items()}
    ours, two = best(frame, "nodes", "trained", OURS), two_factors(frame, cost)
    return {
        "counts": frame.groupby("form", sort=False)["program"].nunique(),
        "n_models": len(frame[["form", "program", "seed"]].drop_duplicates()),
        "mean": lambda what, form, method, label="true": values(
            frame, what, form, method, label
        ).mean(),
        "first": {
            what: best(frame, what, "disguised", [x for x in methods if x != "exact cuts"])
            for what, methods in METHODS.items()
        },
        "rows": table,
        "ahead": {
            (x.what, x.form, x.labels): x for x in table.itertuples() if x.against == "literature"
        },
        "lowest": table[table["against"] == "literature"].groupby("form")["ours_mean"].min(),
        "two": {(x.what, x.form): x for x in two.itertuples()},
        "other_passes": two["other_passes"],
        "eap_ig": duel(frame, "nodes", "trained", ours, "EAP-IG"),
        "lost": partial(lost, frame),
        "mean_table": partial(mean_table, frame),
        "winners": winners(frame),
        "costs": cost.groupby(["what", "method"], sort=False)[["passes", "flops"]]
        .median()
        .reset_index(),
        "bounds_table": partial(bounds_table, covered),
        "easy": easy.groupby(spread["form"], sort=False).mean(),
        "cover": every.mean(numeric_only=True),
        "width": every["width, hard"].median(),
        "by_arm": covered.groupby("arm").mean(numeric_only=True),
        "calibrated_width": covered.query("arm == 'calibrated'")["width, with an effect"].median(),
        "seeds": seeds,
        "agreement": {what: agreement(x) for what, x in known.items()},
        "later": LATER,
        "fast": {what: x.mean(axis=1).idxmax() for what, x in fast.items()},
        "behind": {what: x.loc["two factors"] - x.drop([*OURS]).max() for what, x in fast.items()},
        "leak": most_leaks(frame, tables["leaks"]),
        "written": written,
        "forms": FORMS,
        "methods": METHODS,
        "exact": [*EXACT],
        "labels": LABELS,
        "sets": SETS,
        "level": LEVEL,
        "bounds": bounds,
    }


def most_leaks(frame: pd.DataFrame, leaks: pd.DataFrame) -> dict[str, Any]:
    """Return the method whose mean changes most if scores down to 1e-9 count."""
    now = [values(frame, x.what, "disguised", x.method).mean() for x in leaks.itertuples()]
    change = (leaks["auroc"] - now).abs()
    most = int(change.argmax())
    return leaks.iloc[most].to_dict() | {"usual": now[most]}


STUDY = Study(run, lambda tables: {"": figure(tables[""])}, facts, n_seeds=len(twins.SEEDS))
