"""The questions, predictions, answers, page and figures of the study of circuits in growth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from benching import table
from matplotlib.figure import Figure

Frames: TypeAlias = Mapping[str, pd.DataFrame]
KINDS = ("neurons", "heads", "width", "depth")
WITH_NEW = ("neurons", "heads", "depth")
WROTE_ZEROS = (*KINDS, "neurons, copies")
WROTE_AT_ONCE = ("neurons, cancelling", "neurons, splits")
STARTS = ("neurons", "neurons, copies", *WROTE_AT_ONCE)
TAKES_PART = 0.05


@dataclass(frozen=True)
class Prediction:
    """A question, what we expected before the run, and how the tables answer.

    Attributes:
        question: in a line.
        expected: with the bound that decides.
        answer: whether it held, and the figures.
    """

    question: str
    expected: str
    answer: Callable[[Frames], tuple[bool, str]]


def over_seeds(
    frames: Frames, arm: str, column: str, check: float = 1.0, part: str = ""
) -> "pd.Series[float]":
    """The mean over tasks and growths, by seed."""
    frame = frames[part]
    rows = frame[(frame["arm"] == arm) & (frame["check"] == check)]
    return rows.groupby("seed")[column].mean()


def said(values: "pd.Series[float]") -> str:
    """The mean, and the least and largest of the seeds."""
    return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


def by_arm(frames: Frames, names: tuple[str, ...], column: str, **how: Any) -> dict[str, Any]:
    """`over_seeds` of several arms."""
    return {arm: over_seeds(frames, arm, column, **how) for arm in names}


def listed(values: Mapping[str, "pd.Series[float]"]) -> str:
    """Arms with their means and ranges, in a sentence."""
    return "; ".join(f"{arm} {said(each)}" for arm, each in values.items())


def means(values: Mapping[str, "pd.Series[float]"]) -> dict[str, float]:
    """The mean over seeds, by arm."""
    return {arm: float(each.mean()) for arm, each in values.items()}


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
        f"where zeros are written, the least correlation is {least:.5f} and the largest new share "
        f"{most:.1g}; of pairs that cancel and of splits the least new share is {new:.2f}, and the "
        f"least correlation of the old ones {changed:.2f}"
    )


def _keep(frames: Frames) -> tuple[bool, str]:
    kept, gates = (by_arm(frames, KINDS, column) for column in ("kept", "gates"))
    chance = frames[""].query("check == 1")["kept_chance"].mean()
    held = min(means(kept).values()) >= 0.5 and min(means(gates).values()) >= 0.7
    return held, f"kept: {listed(kept)}; by chance {chance:.2f}. Gates: {listed(gates)}"


def _whose(frames: Frames) -> tuple[bool, str]:
    found = by_arm(frames, ("none", *KINDS), "correlation")
    least = min(value for arm, value in means(found).items() if arm != "none")
    return means(found)["none"] - least <= 0.1, f"correlation: {listed(found)}"


def _alone(frames: Frames) -> tuple[bool, str]:
    found = by_arm(frames, KINDS, "kept")
    order = sorted(KINDS, key=means(found).__getitem__)
    return order[-1] == "heads" and order[0] == "width", f"kept, from least to most: {order}"


def first_times(frames: Frames, arm: str) -> "pd.Series[float]":
    """By seed, growth and task the first check at which the interval is above TAKES_PART."""
    rows = frames[""][(frames[""]["arm"] == arm) & (frames[""]["check"] > 0)]
    above = rows["check"].where(rows["new_share_low"] > TAKES_PART, float("inf"))
    return above.groupby([rows["seed"], rows["growth_seed"], rows["task"]]).min()


def _when(frames: Frames) -> tuple[bool, str]:
    found = {arm: first_times(frames, arm) for arm in WITH_NEW}
    middle = {arm: float(each.median()) for arm, each in found.items()}
    held = middle["neurons"] <= 1 / 8 and middle["depth"] <= 1 / 8 and middle["heads"] >= 1 / 4
    words = [
        f"{arm} at {middle[arm]:.3g} of the flops (median; {(each < 2).sum()} of {len(each)} ever)"
        for arm, each in found.items()
    ]
    return held, "; ".join(words)


def _parity(frames: Frames) -> tuple[bool, str]:
    share, parity, left = (
        by_arm(frames, WITH_NEW, column) for column in ("new_share", "parity", "without_new")
    )
    held = all(means(share)[a] < means(parity)[a] and means(left)[a] < 0.9 for a in WITH_NEW)
    return held, (
        f"new share: {listed(share)}; parity: {listed(parity)}; what is left without them: "
        f"{listed(left)}"
    )


def _starts(frames: Frames) -> tuple[bool, str]:
    soon = by_arm(frames, STARTS, "new_share", check=1 / 8)
    end = by_arm(frames, STARTS, "new_share")
    alike = by_arm(frames, STARTS, "resemblance")
    own, copies, _, splits = STARTS
    held = (
        means(soon)[copies] > means(soon)[own] + 0.02
        and means(end)[splits] > means(end)[own]
        and means(alike)[copies] > means(alike)[own] + 0.1
    )
    return held, (
        f"new share after 1/8: {listed(soon)}; at the end: {listed(end)}. Resemblance: "
        f"{listed(alike)}"
    )


def _again(frames: Frames) -> tuple[bool, str]:
    before, again = (
        by_arm(frames, KINDS, "correlation", part=part) for part in ("", "again")
    )
    held = all(means(again)[arm] > means(before)[arm] for arm in KINDS)
    return held, f"with each other: {listed(again)}; with before: {listed(before)}"


def _idle(frames: Frames) -> tuple[bool, str]:
    new = over_seeds(frames, "neurons", "new_share")
    idle = over_seeds(frames, "none", "idle_share")
    was = over_seeds(frames, "none", "idle_share", check=0.0)
    return bool(new.mean() > 1.5 * idle.mean()), (
        f"new neurons hold {said(new)}; without growth the idle half holds {said(idle)}, "
        f"where it held {said(was)}"
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


def page(frames: Frames, about: Mapping[str, Any], flag: str) -> str:
    """Everything in Markdown."""
    return ""


def old_figure(frames: Frames) -> Figure:
    return Figure()


def new_figure(frames: Frames) -> Figure:
    return Figure()
