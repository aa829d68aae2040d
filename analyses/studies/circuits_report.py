"""Write the page and figures of the study of circuits in growth, with predictions and answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from analyses.studies.growth_small_english_report import said as with_interval
from analyses.tools.benching import table
from analyses.tools.study_files import t_interval, wrapped

Frames: TypeAlias = Mapping[str, pd.DataFrame]
KINDS = ("neurons", "heads", "width", "depth")
WITH_NEW = ("neurons", "heads", "depth")
NONE, EQUAL_STEPS, OTHER_TEXTS = "none", "none, equal steps", "none, other texts"
SMALL_MODEL = "small model"
AGREEMENTS = ("kept", "overlap", "correlation")
COPIES, CANCELLING, SPLITS = "neurons, copies", "neurons, cancelling", "neurons, splits"
WROTE_ZEROS = (*KINDS, COPIES)
WROTE_AT_ONCE = (CANCELLING, SPLITS)
STARTS = ("neurons", COPIES, *WROTE_AT_ONCE)
TAKES_PART = 0.05
COMPARED_BY = ("seed", "arm", "growth_seed", "check", "task")
COMPARED = ("correlation", "kept", "overlap", "gates", "examples", "new_share", "idle_share")


@dataclass(frozen=True)
class Prediction:
    """A question, what we expected before the run, and how the tables answer it.

    Attributes:
        question: the question in one line.
        expected: the expected answer, with the bound that decides.
        answer: returns whether it held (None if the data cannot tell), and the evidence.
    """

    question: str
    expected: str
    answer: Callable[[Frames], tuple[bool | None, str]]


def over_seeds(
    frames: Frames, arm: str, column: str, check: float = 1.0, part: str = ""
) -> "pd.Series[float]":
    """Return means over tasks and growths, by seed."""
    frame = frames[part]
    rows = frame[(frame["arm"] == arm) & (frame["check"] == check)]
    return rows.groupby("seed")[column].mean()


def less(
    frames: Frames, column: str, arm: str, other_arm: str, check: float = 1.0
) -> tuple[float, float, float]:
    """Return the mean difference between two arms over small models, and its 95 % t-interval."""
    one, two = (over_seeds(frames, name, column, check) for name in (arm, other_arm))
    return t_interval(one - two)


def tells(difference: tuple[float, float, float]) -> bool:
    """Return whether the interval of a difference excludes zero."""
    _, low, high = difference
    return low > 0 or high < 0


def said(values: "pd.Series[float]") -> str:
    """Return the mean over seeds and the range, as text."""
    return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


def by_arm(frames: Frames, names: tuple[str, ...], column: str, **how: Any) -> dict[str, Any]:
    """Return `over_seeds` for several arms."""
    return {arm: over_seeds(frames, arm, column, **how) for arm in names}


def listed(values: Mapping[str, "pd.Series[float]"]) -> str:
    """Return arms with their means and ranges, as text."""
    return "; ".join(f"{arm} {said(estimate)}" for arm, estimate in values.items())


def means(values: Mapping[str, "pd.Series[float]"]) -> dict[str, float]:
    """Return means over seeds, by arm."""
    return {arm: float(value.mean()) for arm, value in values.items()}


def _at_once(frames: Frames) -> tuple[bool, str]:
    first = frames[""][frames[""]["check"] == 0]
    zeros = first[first["arm"].isin(WROTE_ZEROS)]
    others = first[first["arm"].isin(WROTE_AT_ONCE)]
    least, most, new = (
        zeros["correlation"].min(),
        zeros["new_share"].max(),
        others["new_share"].min(),
    )
    changed = others["correlation"].min()
    return bool(least > 0.9999 and most < 0.001 and new > 0.1), (
        f"if new output weights are zero, the lowest correlation is {least:.4f} and the largest "
        f"new share {most:.1g}; for pairs that cancel and for splits, the lowest new share is "
        f"{new:.2f}, and the lowest correlation of old neurons is {changed:.2f}"
    )


def _keep(frames: Frames) -> tuple[bool, str]:
    kept, gates = (by_arm(frames, KINDS, column) for column in ("kept", "gates"))
    chance = frames[""].query("check == 1")["kept_chance"].mean()
    held = min(means(kept).values()) >= 0.5 and min(means(gates).values()) >= 0.7
    return held, f"kept: {listed(kept)}; by chance {chance:.2f}. Gates: {listed(gates)}"


def _whose(frames: Frames) -> tuple[bool, str]:
    correlations = by_arm(frames, (NONE, EQUAL_STEPS, *KINDS), "correlation")
    least = min(means(correlations)[arm] for arm in KINDS)
    most = max(means(correlations)[arm] for arm in (NONE, EQUAL_STEPS))
    return most - least <= 0.1, f"correlation: {listed(correlations)}"


def _alone(frames: Frames) -> tuple[bool | None, str]:
    order = sorted(KINDS, key=means(by_arm(frames, KINDS, "kept")).__getitem__)
    apart = less(frames, "kept", "heads", "width")
    held = (order[-1] == "heads" and order[0] == "width") if tells(apart) else None
    return held, (
        f"kept, from lowest to highest: {', '.join(order)}; heads minus width "
        f"{with_interval(apart)}, and {between_kinds(frames, 'kept')}"
    )


def between_kinds(frames: Frames, column: str) -> str:
    """Return how many differences between two kinds of growth have an interval without zero."""
    n, of, largest = _between(frames, column)
    return (
        f"{n or 'none'} of the {of} differences between two kinds "
        f"{'has' if n < 2 else 'have'} an interval that excludes zero (the largest difference is "
        f"{largest:.2f})"
    )


def _between(frames: Frames, column: str) -> tuple[int, int, float]:
    """Return how many differences exclude zero, of how many, and the largest difference."""
    differences = [less(frames, column, *two) for two in combinations(KINDS, 2)]
    largest = max(abs(mean) for mean, _, _ in differences)
    return sum(map(tells, differences)), len(differences), largest


def first_times(frames: Frames, arm: str) -> "pd.Series[float]":
    """Return by seed, growth and task the first check whose interval is above TAKES_PART."""
    rows = frames[""][(frames[""]["arm"] == arm) & (frames[""]["check"] > 0)]
    above = rows["check"].where(rows["new_share_low"] > TAKES_PART, float("inf"))
    return above.groupby([rows["seed"], rows["growth_seed"], rows["task"]]).min()


def _when(frames: Frames) -> tuple[bool, str]:
    times = {arm: first_times(frames, arm) for arm in WITH_NEW}
    middle = {arm: float(value.median()) for arm, value in times.items()}
    held = middle["neurons"] <= 1 / 8 and middle["depth"] <= 1 / 8 and middle["heads"] >= 1 / 4
    words = [
        f"{arm} {_at(middle[arm])} (median; {(times_of_arm < 2).sum()} of {len(times_of_arm)} ever)"
        for arm, times_of_arm in times.items()
    ]
    return held, "; ".join(words)


def _parity(frames: Frames) -> tuple[bool, str]:
    share, parity, left = (
        by_arm(frames, WITH_NEW, column) for column in ("new_share", "parity", "without_new")
    )
    held = all(means(share)[a] < means(parity)[a] and means(left)[a] < 0.9 for a in WITH_NEW)
    return held, (
        f"new share: {listed(share)}; parity: {listed(parity)}; share of the metric that is left "
        f"without them: {listed(left)}"
    )


def _starts(frames: Frames) -> tuple[bool, str]:
    soon = by_arm(frames, STARTS, "new_share", check=1 / 8)
    end = by_arm(frames, STARTS, "new_share")
    alike = by_arm(frames, STARTS, "resemblance")
    plain, copies, _, splits = STARTS
    held = (
        means(soon)[copies] > means(soon)[plain] + 0.02
        and means(end)[splits] > means(end)[plain]
        and means(alike)[copies] > means(alike)[plain] + 0.1
    )
    return held, (
        f"new share after 1/8: {listed(soon)}; at the end: {listed(end)}. Resemblance: "
        f"{listed(alike)}"
    )


def _again(frames: Frames) -> tuple[bool, str]:
    before, again = (by_arm(frames, KINDS, "correlation", part=part) for part in ("", "again"))
    held = all(means(again)[arm] > means(before)[arm] for arm in KINDS)
    return held, (
        f"correlation of two growths: {listed(again)}; with the model before growth: "
        f"{listed(before)}"
    )


def _idle(frames: Frames) -> tuple[bool, str]:
    new = over_seeds(frames, "neurons", "new_share")
    idle, as_soon = (over_seeds(frames, arm, "idle_share") for arm in (NONE, EQUAL_STEPS))
    was = over_seeds(frames, NONE, "idle_share", check=0.0)
    return bool(new.mean() > 1.5 * max(idle.mean(), as_soon.mean())), (
        f"new neurons hold {said(new)}; without growth, the idle half holds {said(was)} at first, "
        f"{said(as_soon)} after as many steps, and {said(idle)} after as many flops"
    )


PREDICTIONS = (
    Prediction(
        "Does growth itself change a circuit?",
        "Not where the new entries that write are zero: right after growth every correlation is "
        "above .9999 and every new share below .001. Where new units write at once, in pairs that "
        "cancel and in splits, the same function has another circuit: new shares above .1.",
        _at_once,
    ),
    Prediction(
        "Do old neurons keep their job?",
        "Mostly: at the end at least half of a circuit's neurons are kept in every kind of growth, "
        "and their gates correlate with what they were by .7 or more.",
        _keep,
    ),
    Prediction(
        "Is it growth that makes them drift?",
        "No, training is: without growth the effects drift as far, so that their correlation with "
        "those before is at most .1 above that of any kind of growth.",
        _whose,
    ),
    Prediction(
        "Which kind of growth leaves old neurons most alone?",
        "Heads, which compete with heads; width least, as every norm reads the new coordinates.",
        _alone,
    ),
    Prediction(
        "When do new components take part?",
        "The interval of their share is above .05 after 1/8 of the flops or sooner for neurons and "
        "a new layer; for heads after 1/4 or later, since their patterns must form first.",
        _when,
    ),
    Prediction(
        "Do they take over?",
        "No: at the end their share is below parity in every kind of growth. But the model leans "
        "on them: patched together, they take more than a tenth of the metric.",
        _parity,
    ),
    Prediction(
        "What difference does the start make?",
        "Copies take part sooner (after 1/8 their share is larger than that of own draws by .02 or "
        "more) and stay like what they copied (resemblance larger by .1 or more); splits, which "
        "begin with half of every job, hold more at the end than own draws.",
        _starts,
    ),
    Prediction(
        "How much is chance?",
        "Less than training: at the end two growths of one model with other new entries are more "
        "alike, in their old neurons, than each is like the model before, in every kind.",
        _again,
    ),
    Prediction(
        "Would idle neurons have come in without growth?",
        "Less: at the end new neurons hold more than 1.5 times what the idle half of the old ones "
        "holds in the model that did not grow.",
        _idle,
    ),
)


def _spread(values: "pd.Series[float]") -> str:
    return "–" if values.isna().all() else said(values)


def at_the_end(frames: Frames) -> pd.DataFrame:
    """Return a row per arm: means over tasks and growths, and over seeds with their range."""
    columns = {
        "loss": "loss",
        "steps": "steps",
        "correlation": "correlation",
        "kept": "kept",
        "overlap": "overlap",
        "gates": "gates",
        "examples": "examples",
        "heads": "heads",
        "new share": "new_share",
        "parity": "parity",
        "without new": "without_new",
        "without old": "without_old",
        "resemblance": "resemblance",
    }
    rows = []
    for arm in dict.fromkeys(frames[""]["arm"]):
        seeds_of = {name: over_seeds(frames, arm, column) for name, column in columns.items()}
        steps = f"{seeds_of['steps'].mean():.0f}"
        rows.append(
            {"arm": arm}
            | {name: _spread(values) for name, values in seeds_of.items()}
            | {"steps": steps}
        )
    return pd.DataFrame(rows)


def by_task(frames: Frames, column: str, check: float = 1.0) -> pd.DataFrame:
    """Return a row per arm and task, and a column per seed: the first growth, with intervals."""
    rows = frames[""]
    rows = rows[(rows["check"] == check) & (rows["growth_seed"] == 0)]
    shown = [
        f"{value:.2f} [{low:.2f}, {high:.2f}]"
        for value, low, high in rows[[column, f"{column}_low", f"{column}_high"]].to_numpy()
    ]
    wide = rows.assign(shown=shown).pivot(index=["arm", "task"], columns="seed", values="shown")
    wide = wide.loc[pd.MultiIndex.from_frame(rows[["arm", "task"]].drop_duplicates())]
    return wide.rename(columns="seed {}".format).reset_index()


def small_models(frames: Frames) -> pd.DataFrame:
    """Return what the small models have learned: a row per seed and task."""
    rows = frames[""]
    rows = rows[(rows["arm"] == "none") & (rows["check"] == 0)]
    return rows[["seed", "task", "loss", "metric", "nothing", "right", "old_share_heads"]].rename(
        columns={"right": "right answers", "old_share_heads": "share of heads"}
    )


def twins(frames: Frames) -> pd.DataFrame:
    """Return a row per arm: how well two growths of one model agree at the end."""
    rows = []
    for arm in dict.fromkeys(frames["again"]["arm"]):
        row = {"arm": arm}
        for column in (*AGREEMENTS, "gates", "examples", "heads"):
            row[column] = _spread(over_seeds(frames, arm, column, part="again"))
        rows.append(row)
    return pd.DataFrame(rows)


def scale(frames: Frames) -> pd.DataFrame:
    """Return how well effects agree, from chance to a model with itself: a row per comparison."""
    prompts = frames["prompts"]
    itself = {"prompts": prompts[prompts["with"] == "itself"]}
    end = frames[""][frames[""]["check"] == 1]

    def row(name: str, values: Mapping[str, "pd.Series[float]"]) -> dict[str, str]:
        return {"what is compared": name} | {
            column: _spread(values[column]) for column in AGREEMENTS
        }

    def of(arms: Iterable[str], frames: Frames, part: str, check: float = 1.0) -> dict[str, Any]:
        return {
            column: pd.concat([over_seeds(frames, arm, column, check, part) for arm in arms])
            .groupby("seed")
            .mean()
            for column in AGREEMENTS
        }

    by_chance = {
        column: end[end["arm"].isin(KINDS)].groupby("seed")[f"{column}_chance"].mean()
        for column in ("kept", "overlap")
    }
    by_chance["correlation"] = pd.Series([float("nan")])
    grown = [(f"before and after growth: {kind}", of([kind], frames, "")) for kind in KINDS]
    return pd.DataFrame(
        [
            row("neurons of a layer matched at random", by_chance),
            row("before and after, no growth, equal flops", of([NONE], frames, "")),
            row("before and after, no growth, equal steps", of([EQUAL_STEPS], frames, "")),
            row(
                "before and after, no growth, other texts (two trainings)",
                of([OTHER_TEXTS], frames, ""),
            ),
            *(row(name, values) for name, values in grown),
            row("two trainings on different texts, no growth", of([OTHER_TEXTS], frames, "again")),
            row("two growths on the same texts, all kinds", of(KINDS, frames, "again")),
            row("one grown model on other prompts, all kinds", of(KINDS, itself, "prompts")),
            row("the small model on other prompts", of([SMALL_MODEL], itself, "prompts", 0.0)),
        ]
    )


def against_training(frames: Frames) -> pd.DataFrame:
    """Return differences of growth to training without growth, and between kinds of growth."""
    pairs = [(kind, EQUAL_STEPS) for kind in KINDS]
    pairs += [(NONE, EQUAL_STEPS), *combinations(KINDS, 2)]
    return pd.DataFrame(
        {"arm": arm, "minus": rival}
        | {column: with_interval(less(frames, column, arm, rival)) for column in AGREEMENTS}
        for arm, rival in pairs
    )


def missing_zero(frames: Frames) -> str:
    """Return how many intervals in the table of differences exclude zero, as text."""
    pairs = [(kind, EQUAL_STEPS) for kind in (*KINDS, NONE)] + [*combinations(KINDS, 2)]
    excludes_zero = [tells(less(frames, column, *pair)) for pair in pairs for column in AGREEMENTS]
    return f"{sum(excludes_zero)} of {len(excludes_zero)}"


def in_short(frames: Frames) -> str:
    """Return a summary of the tables in a few sentences."""
    kept = means(by_arm(frames, (NONE, EQUAL_STEPS, *KINDS), "kept"))
    kinds = [kept[kind] for kind in KINDS]
    prompts = frames["prompts"]
    itself = {"prompts": prompts[prompts["with"] == "itself"]}
    ceiling = over_seeds(itself, SMALL_MODEL, "kept", 0.0, "prompts").mean()
    texts = over_seeds(frames, OTHER_TEXTS, "kept", part="again").mean()
    chance = frames[""].query("check == 1 and arm in @KINDS")["kept_chance"].mean()
    steps = {arm: over_seeds(frames, arm, "steps") for arm in (NONE, EQUAL_STEPS, *KINDS)}
    apart = {
        column: [less(frames, column, arm, EQUAL_STEPS) for arm in KINDS] for column in AGREEMENTS
    }
    n = {column: sum(map(tells, intervals)) for column, intervals in apart.items()}
    idle, as_soon = (over_seeds(frames, arm, "idle_share").mean() for arm in (NONE, EQUAL_STEPS))
    on_texts = frames[""].query("check == 1 and arm == @OTHER_TEXTS")
    by_texts = on_texts.groupby(["seed", "growth_seed"])["kept"].mean().unstack()
    new = means(by_arm(frames, (*WITH_NEW, COPIES), "new_share"))
    split = frames[""].query("check == 1 and arm == @SPLITS")["new_share"]
    return SHORT.format(
        low=min(kinds),
        high=max(kinds),
        few=min(float(steps[kind].mean()) for kind in KINDS),
        many=max(float(steps[kind].mean()) for kind in KINDS),
        equal_steps=steps[EQUAL_STEPS].mean(),
        equal=kept[EQUAL_STEPS],
        flops_steps=steps[NONE].mean(),
        none=kept[NONE],
        chance=chance,
        texts=texts,
        ceiling=ceiling,
        apart="; ".join(
            f"{arm} {with_interval(kept)}" for arm, kept in zip(KINDS, apart["kept"], strict=True)
        ),
        excluded=", ".join(f"{n[column]} of {len(KINDS)} for {column}" for column in AGREEMENTS),
        between=", ".join(
            "{} of {} for {column} (the largest difference is {:.2f})".format(
                *_between(frames, column), column=column
            )
            for column in AGREEMENTS
        ),
        at_once=at_once_by_patching(frames),
        missing=missing_zero(frames),
        n=frames[""]["seed"].nunique(),
        by_texts=by_texts.diff(axis=1).iloc[:, 1].abs().mean(),
        new_low=min(new.values()),
        new_high=max(new.values()),
        cancelling=over_seeds(frames, CANCELLING, "new_share").mean(),
        split=over_seeds(frames, SPLITS, "new_share").mean(),
        split_low=split.min(),
        split_high=split.max(),
        split_at_once=over_seeds(frames, SPLITS, "new_share", check=0.0).mean(),
        as_soon=as_soon,
        idle=idle,
    )


SHORT = """\
**Question.** Does growth change the circuits of a transformer, more than training without growth
does? And when do new neurons, heads and layers take part?

**Answer.** Growth itself does not change circuits if new output weights are zero: {at_once} (by
patching, in small model 0). Then training changes them. After growth and {few:.0f} to {many:.0f}
steps, {low:.0%} to {high:.0%} of a circuit's 20 neurons are still among the 20 strongest old
neurons (the means of the four kinds of growth). Without growth, {equal:.0%} are after
{equal_steps:.0f} steps, and {none:.0%} after {flops_steps:.0f} steps, which cost as many flops as
the growths. Chance gives {chance:.0%}. The ceiling is below 100 %: on other prompts, the same model
keeps {ceiling:.0%}, and two trainings without growth on different texts share {texts:.0%}.

At equal steps, the share kept after growth minus the share kept without growth is: {apart}. The
95 % interval excludes zero in {excluded}. Of the differences between two kinds of growth, it
excludes zero in {between}.

New neurons, heads and layers that start with zero outputs hold {new_low:.0%} to {new_high:.0%} of
all effects at the end (means of the kinds), and new neurons that start in pairs that cancel hold
{cancelling:.0%}. If neurons are split, the new halves hold {split:.0%} at the end
({split_low:.0%} to {split_high:.0%} by task and small model), and already {split_at_once:.0%} right
after growth.
Without growth, the idle half of the old neurons (those with the smallest effects) holds
{as_soon:.1%} after as many steps, and {idle:.1%} after as many flops.

**Caution.** There are {n} small models, so intervals are wide, and differences that we could not
measure may exist. In all, {missing} intervals exclude zero, but one or two would by chance, and the
intervals are not independent. Without growth, two trainings of a small model on different texts
differ by {by_texts:.3f} in the share kept (the mean over small models). Growth comes once, after
the circuits have formed, and on one grammar. In [addition modulo 53](../../studies.md#removed-studies),
new components take more part; this study cannot say why."""


def by_patching(frames: Frames) -> pd.DataFrame:
    """Return differences between measures by patching and by estimates: a row per measure."""
    exact, keys = frames["exact"], list(COMPARED_BY)
    estimated = frames[""].merge(exact[keys], on=keys).set_index(keys).sort_index()
    exact = exact.set_index(keys).sort_index()
    rows = []
    for name in COMPARED:
        off = (exact[name] - estimated[name]).abs()
        row = {"measure": name, "mean difference": off.mean(), "largest": off.max()}
        rows.append(row | {"of": len(off)})
    return pd.DataFrame(rows)


def at_once_by_patching(frames: Frames) -> str:
    """Return a sentence about patching results right after growth."""
    exact = frames["exact"]
    first = exact[(exact["check"] == 0) & exact["arm"].isin(WROTE_ZEROS)]
    return (
        f"right after growth, the lowest correlation is {first['correlation'].min():.6f}, and the "
        f"largest new share is {first['new_share'].max():.1g}"
    )


def _at(check: float) -> str:
    return f"at {check:.3g} of the flops" if check < 2 else "never"


def chances(frames: Frames) -> str:
    """Return a sentence about the chance levels."""
    end = frames[""][frames[""]["check"] == 1]
    kept, gates, examples = (end[f"{name}_chance"].mean() for name in ("kept", "gates", "examples"))
    return f"kept {kept:.2f}, gates {gates:.2f}, examples {examples:.2f}"


COLOURS = {
    NONE: "black",
    EQUAL_STEPS: "0.55",
    "neurons": "C0",
    "heads": "C1",
    "width": "C2",
    "depth": "C3",
    "neurons, copies": "C9",
    "neurons, cancelling": "C4",
    "neurons, splits": "C6",
}


def _panels(frames: Frames, rows: Sequence[tuple[str, str, tuple[str, ...]]]) -> Figure:
    """Draw a row of panels per measure and a column per task: means, and ranges over seeds."""
    frame = frames[""]
    tasks, checks = (list(dict.fromkeys(frame[name])) for name in ("task", "check"))
    picture = Figure(figsize=(3.6 * len(tasks), 2.9 * len(rows) + 0.6), layout="constrained")
    panels = picture.subplots(len(rows), len(tasks), squeeze=False, sharex=True, sharey="row")
    for line, (column, label, names) in zip(panels, rows, strict=True):
        line[0].set_ylabel(label)
        for panel, task in zip(line, tasks, strict=True):
            panel.set_title(task, fontsize="medium")
            for number, name in enumerate(names):
                of_arm = frame[(frame["arm"] == name) & (frame["task"] == task)]
                if of_arm.empty:
                    continue
                seeds = of_arm.groupby(["check", "seed"])[column].mean().unstack()
                places = [i + 0.06 * (number - len(names) / 2) for i in range(len(checks))]
                middle = seeds.mean(axis=1)
                # If all seeds have the same value, their mean may differ from it by rounding.
                off = [middle - seeds.min(axis=1), seeds.max(axis=1) - middle]
                off = [size.clip(lower=0) for size in off]
                style = {"color": COLOURS[name], "lw": 1.4, "elinewidth": 0.8, "ms": 4}
                panel.errorbar(places, middle, yerr=off, fmt="o-", label=name, **style)
            panel.set_xticks(range(len(checks)), [_share(check) for check in checks])
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("share of the training after growth")
    return picture


def _share(check: float) -> str:
    return str(Fraction(check).limit_denominator(64))


def _legend(picture: Figure, title: str) -> Figure:
    handles, labels = {}, []
    for panel in picture.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = list(handles)
    picture.legend(
        handles.values(),
        labels,
        loc="outside upper center",
        ncols=len(labels),
        title=title,
        fontsize="small",
    )
    return picture


def old_figure(frames: Frames) -> Figure:
    """Draw how the effects and the gates of old neurons change."""
    shown = (NONE, EQUAL_STEPS, *KINDS)
    rows = [
        ("correlation", "correlation of effects\nwith before growth", shown),
        ("kept", "share of the circuit's\nneurons that are kept", shown),
        ("overlap", "overlap of effects", shown),
        ("gates", "correlation of\nthe circuit's gates", shown),
    ]
    return _legend(_panels(frames, rows), "bars: least and largest of the seeds")


def new_figure(frames: Frames) -> Figure:
    """Draw the share of new components in each task."""
    shown = (*WITH_NEW, *STARTS[1:])
    rows = [
        ("new_share", "share that new\ncomponents hold", shown),
        ("without_new", "metric with all\nnew ones patched", shown),
    ]
    picture = _panels(frames, rows)
    frame = frames[""]
    styles = {NONE: "k:", EQUAL_STEPS: "k--"}
    idle = frame.groupby(["arm", "task", "check"])["idle_share"].mean()
    for panel, task in zip(picture.axes, dict.fromkeys(frame["task"]), strict=False):
        for arm, style in styles.items():
            panel.plot(idle[arm, task].to_numpy(), style, lw=1, label=f"idle half, {arm}")
    return _legend(picture, "bars: least and largest of the seeds")


def answers(frames: Frames) -> str:
    """Return every question with what we expected and what we found."""
    parts = []
    for number, prediction in enumerate(PREDICTIONS, 1):
        held, figures = prediction.answer(frames)
        verdict = {True: "It held", False: "It failed", None: "These data cannot tell"}[held]
        text = f"{number}. **{prediction.question}** *Expected:* {prediction.expected}"
        parts.append(f"{text} **{verdict}:** {figures}.")
    return "\n\n".join(parts)


def _sizes(sizes: Mapping[str, int]) -> str:
    return "{n_layers} layers, width {d_model}, {n_heads} heads and {d_mlp} neurons a layer".format(
        **sizes
    )


def page(frames: Frames, settings: Mapping[str, Any]) -> str:
    """Return the whole page in Markdown; all numbers come from the tables and settings."""
    study = settings["study"]
    held = [prediction.answer(frames)[0] for prediction in PREDICTIONS]
    text = PAGE.format(
        **study | {name: _sizes(study[name]) for name in ("small", "grown")},
        n=study["n_seeds"],
        flag=" --smoke" if settings["smoke"] else "",
        machine=settings["machine"],
        seconds=settings["training_seconds"],
        held=held.count(True),
        untold=held.count(None),
        of=len(held),
        in_short=in_short(frames),
        scale=table(scale(frames)),
        missing=missing_zero(frames),
        against_training=table(against_training(frames)),
        answers=answers(frames),
        small_models=table(small_models(frames)),
        end=table(at_the_end(frames)),
        chances=chances(frames),
        correlation=table(by_task(frames, "correlation")),
        share=table(by_task(frames, "new_share")),
        twins=table(twins(frames)),
        at_once=at_once_by_patching(frames),
        by_patching=table(by_patching(frames)),
    )
    return wrapped(text)


PAGE = """# What happens to circuits when a transformer grows

{in_short}

A LLaMA with {small} learns Small English in {steps} steps of {rows} texts. Then it grows in
neurons, heads, width or depth only, to the size that a model with {grown} has there. Its training
continues, for the flops of {more} more steps of the small model. We measure every component's
effect on three tasks before growth, right after growth, and several times until the end. There are
{n} small models, two growths of each kind, and {prompts} prompts per task, which begin no sentence
of the texts. `circuits_in_growth.py` describes the arms, and `circuit_measures.py` defines the
measures. `circuits_in_growth_effects.csv` has every component's effects before growth and at the
end, so "kept", "overlap", correlations and shares at the end can be computed again.

This page was made on {machine}, by

    python -m analyses.studies.circuits_in_growth{flag}

Training took {seconds} s of processor time in all, with much other work on the machine. Several
processes trained and measured, one for each small model.

## From chance to the ceiling

Means over tasks, growths and small models; in brackets, the lowest and the highest of the small
models. "Other prompts" are {prompts} more prompts per task, none of them among the first ones. The
two trainings on different texts continue from the same small model, with as many steps as
"neurons"; each reads texts that no other arm reads.

{scale}

Differences at the end, paired by small model, with 95 % intervals (Student's). {missing} intervals
exclude zero; one or two would by chance alone:

{against_training}

## Questions and answers

The predictions were written before the first run, with their bounds. {held} of {of} held, and for
{untold} these data cannot tell. Numbers are means over tasks, growths and small models; in
brackets, the lowest and the highest of the small models. Question 4 had no bound: the order
decided. We later decided to answer it only if the interval of heads minus width excludes zero.

{answers}

![What happens to old neurons](circuits_in_growth.svg)

![What new components hold](circuits_in_growth_new.svg)

## What the small models have learned

`metric` is the logit of the right answer minus the logit of the wrong answer, the mean over
prompts. `nothing` is the same if every head and neuron is patched from the corrupted prompt.

{small_models}

## At the end

Every arm has had as many flops since growth as the others, except the arms that are named after
steps and texts: they have the steps of "neurons". If each neuron is matched with another neuron of
its layer by chance: {chances}.

{end}

## By task and small model

The correlation of old neurons' effects at the end with their effects before growth; in brackets,
95 % intervals over prompts. Arms with two growths show the first one.

{correlation}

The share that new components hold at the end:

{share}

## Two growths of one model

We compare the old components at the end of the two growths. In arms that grow, the new entries
start from different random numbers, and both growths read the same texts in the same order, so the
difference comes from the new entries. In "none, other texts", nothing grows, and each training
reads different texts, so the difference comes from the texts.

{twins}

## How good the estimates are

Effects are estimates (`patching.attribution`), and the strongest ones are patched. A model and its
grown model may differ in which sites are patched. For small model 0, we also computed every measure
by patching every component; if new output weights are zero, {at_once}. The differences over all its
growths, times and tasks:

{by_patching}

## What limits this

Growth comes after circuits have formed: {more} steps of the small model's cost follow {steps}
steps. In [addition modulo 53](../../studies.md#removed-studies), most new neurons take over the job of
old ones, whether growth is early or late; this study cannot say why. There is one grammar, one
family of models, and three tasks that such a model solves almost without errors.

In a first run, training continued for 300 steps, and new components held 1 to 2 % of all effects,
except for splits and copies; so this run is longer. The predictions are older than both runs, and
have not been changed. The first version of this page compared arms at equal flops only, had no
ceiling, and computed the loss from texts of few lengths. All numbers are new, because all models
were trained again.

Growth comes once, at one time, and doubles (or nearly doubles) what it adds to. The learning rate
is the same for old and new entries. Arms with more weights have fewer steps, so they have less time
to drift, and end with a higher loss. Therefore, training without growth is there twice, at equal
flops and at equal steps, but not at equal loss. Effects are effects of single components: if
several components can replace each other, each has a small effect.
"""
