"""Write the pages and figures of the two studies of capacity pressure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from analyses.tools import study_files
from analyses.tools.benching import markdown
from analyses.tools.study_files import verdict, wrapped

__all__ = ["addition_page", "english_page", "figure"]

Frames: TypeAlias = Mapping[str, pd.DataFrame]
Ladders: TypeAlias = Mapping[str, Sequence[int]]
CASE = ["ladder", "small", "full"]
CLOSE = 0.1
PRESSED = 0.1  # nats, in addition
RANKED = 0.8


def said(values: "pd.Series[float]", digits: int = 2) -> str:
    """Return the mean over seeds with Student's interval of 95 %, in words."""
    return study_files.said(values, f".{digits}f")


def by_seed(growths: pd.DataFrame, column: str, arm: str = "grown") -> pd.DataFrame:
    """Return a column as means over tasks: a row for each growth, a column for each seed."""
    rows = growths[growths["arm"] == arm]
    return rows.groupby([*CASE, "seed"], sort=False)[column].mean().unstack("seed")


def only(values: pd.DataFrame, cases: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return the rows of some growths, in their order."""
    return values.loc[[case for case in cases if case in values.index]]


def rungs(ladders: Ladders) -> list[tuple[str, int, int]]:
    """Return the growths by one rung."""
    return [
        (ladder, small, full)
        for ladder, sizes in ladders.items()
        for small, full in pairwise(sizes)
    ]


def to_full(ladders: Ladders) -> list[tuple[str, int, int]]:
    """Return the growths to the last size."""
    return [(ladder, small, sizes[-1]) for ladder, sizes in ladders.items() for small in sizes[:-1]]


def ranks(
    growths: pd.DataFrame, cases: Sequence[tuple[Any, ...]], column: str
) -> "pd.Series[float]":
    """Return for each seed Spearman's correlation of pressure with a column over growths."""
    pressure, values = (only(by_seed(growths, name), cases) for name in ("pressure", column))
    return pd.Series(
        {seed: spearmanr(pressure[seed], values[seed]).statistic for seed in pressure}, dtype=float
    )


def name_of(case: tuple[str, int, int]) -> str:
    """Return the name of a growth, for tables."""
    ladder, small, full = case
    return f"{ladder}, {small} to {full}"


def of_sizes(sizes: pd.DataFrame, arm: str, case: tuple[str, int, int]) -> "pd.Series[float]":
    """Return the overlap in the small model of a growth by seed, the mean over tasks."""
    ladder, small, _ = case
    rows = sizes[(sizes["ladder"] == ladder) & (sizes["size"] == small) & (sizes["arm"] == arm)]
    return rows.groupby("seed")["overlap"].mean()


def overlaps(frames: Frames, case: tuple[str, int, int], others: str) -> dict[str, Any]:
    """Return by arm the overlap with before growth, relative to the ceiling, by seed."""
    ceiling = of_sizes(frames["sizes"], "ceiling", case)
    shares = {"not grown": of_sizes(frames["sizes"], "not grown", case) / ceiling}
    for arm in ("grown", "grown, equal loss", others):
        values = by_seed(frames[""], "overlap", arm)
        if case in values.index:
            shares[arm] = values.loc[case] / ceiling
    twins = by_seed(frames[""], "twins", others) if "twins" in frames[""] else pd.DataFrame()
    if case in twins.index:
        shares["two trainings"] = twins.loc[case] / ceiling
    return shares


def shares_table(growths: pd.DataFrame, cases: Sequence[tuple[str, int, int]], cost: str) -> str:
    """Return a row for each growth: pressure, shares, odds, and the cost of ablation."""
    of_all = growths[f"{cost}_new"] / growths[f"{cost}_all"]
    growths = growths.assign(of_all=of_all)
    columns = {
        "pressure, nats": ("pressure", 3),
        "new share": ("new_share", 2),
        "parity": ("parity", 2),
        "new to old, per part": ("new_odds", 2),
        "cost in loss, nats": (f"{cost}_new", 3),
        "of all": ("of_all", 2),
    }
    rows = []
    for case in cases:
        row = [name_of(case)]
        for column, digits in columns.values():
            values = by_seed(growths, column).loc[case]
            row.append(f"{values.mean():.2f}" if column == "parity" else said(values, digits))
        rows.append(row)
    return markdown(["growth", *columns], rows)


def costs_table(growths: pd.DataFrame, cases: Sequence[tuple[str, int, int]]) -> str:
    """Return a row for each growth: what patching new parts costs, and nulls."""
    columns = {
        "alone, summed": ("single", "grown"),
        "together": ("joint", "grown"),
        "as many random directions": ("directions", "grown"),
        "random labels": ("labels", "grown"),
        "random labels, full size from the start": ("labels", "full"),
    }
    rows = [
        [name_of(case), *(said(by_seed(growths, *column).loc[case]) for column in columns.values())]
        for case in cases
    ]
    return markdown(["growth", *columns], rows)


def overlaps_table(frames: Frames, cases: Sequence[tuple[str, int, int]], others: str) -> str:
    """Return a row for each growth: the overlap of old parts with before growth."""
    arms = ("not grown", "grown", "grown, equal loss", others, "two trainings")
    rows = []
    for case in cases:
        shares = overlaps(frames, case, others)
        ceiling = of_sizes(frames["sizes"], "ceiling", case)
        empty = pd.Series(dtype=float)
        cells = [said(shares.get(arm, empty)) for arm in arms]
        chance = by_seed(frames[""], "overlap_chance").loc[case] / ceiling
        rows.append([name_of(case), said(ceiling), said(chance), *cells])
    return markdown(["growth", "ceiling", "chance", *arms], rows)


def patterns_table(growths: pd.DataFrame, cases: Sequence[tuple[str, int, int]]) -> str:
    """Return a row for each growth: the share of patterns in new and in old neurons."""
    new, old = (by_seed(growths, column) for column in ("by_pattern", "by_pattern_old"))
    rows = [[name_of(case), said(new.loc[case]), said(old.loc[case])] for case in cases]
    return markdown(["growth", "new neurons", "old neurons"], rows)


def decays_table(growths: pd.DataFrame, arm: str) -> str:
    """Return a row for each growth with another weight decay: the share of new parts."""
    of_arm, usual = by_seed(growths, "new_share", arm), by_seed(growths, "new_share")
    rows = []
    for case in of_arm.index:
        change = of_arm.loc[case] - usual.loc[case]
        row = [name_of(case), *(said(x) for x in (usual.loc[case], of_arm.loc[case], change))]
        rows.append(row)
    return markdown(["growth", "new share, grown", f"new share, {arm}", "change"], rows)


def every(
    cases: Sequence[tuple[str, int, int]], holds: Callable[[tuple[str, int, int]], bool]
) -> tuple[bool, str]:
    """Return whether a condition holds in every growth, and in how many it does."""
    held = [case for case in cases if holds(case)]
    failed = [name_of(case) for case in cases if case not in held]
    text = f"in {len(held)} of {len(cases)} growths"
    return not failed, text + (f", not in {'; '.join(failed)}" if failed else "")


def rank_verdicts(
    frames: Frames, ladders: Ladders, ladder: str, cost: str
) -> Iterator[tuple[str, bool, str]]:
    """Yield the predictions about ranks of one ladder: a claim, whether it held, figures."""
    growths = frames[""].assign(of_all=frames[""][f"{cost}_new"] / frames[""][f"{cost}_all"])
    some = {ladder: ladders[ladder]}
    for claim, cases, column in (
        ("over rungs, pressure ranks the share of new parts (ρ > .8)", rungs(some), "new_share"),
        ("to full, pressure ranks the share of new parts (ρ > .8)", to_full(some), "new_share"),
        ("over rungs, pressure ranks the cost in loss (ρ > .8)", rungs(some), "of_all"),
    ):
        if len(cases) < 3:
            continue
        correlations = ranks(growths, cases, column)
        text = f"ρ = {said(correlations)} over {len(cases)} growths"
        yield f"{ladder}: {claim}.", bool(correlations.mean() > RANKED), text


def drift_verdicts(
    frames: Frames, ladders: Ladders, others: str
) -> Iterator[tuple[str, bool, str]]:
    """Yield the predictions about the overlap of old parts."""
    cases = list(dict.fromkeys([*rungs(ladders), *to_full(ladders)]))
    shares = {case: overlaps(frames, case, others) for case in cases}
    for arm, some in (("grown", cases), ("grown, equal loss", to_full(ladders))):
        held, text = every(
            some,
            lambda case, arm=arm: (
                abs((shares[case][arm] - shares[case]["not grown"]).mean()) < CLOSE
            ),
        )
        yield f'old parts: "{arm}" is within .1 of "not grown" in every growth.', held, text
    with_twins = [case for case in cases if "two trainings" in shares[case]]
    held, text = every(
        with_twins,
        lambda case: (
            shares[case]["two trainings"].mean()
            > max(shares[case][arm].mean() for arm in ("grown", others))
        ),
    )
    yield "two trainings agree better with each other than with before growth.", held, text


def pattern_verdict(growths: pd.DataFrame, cases: Sequence[Any]) -> tuple[str, bool, str]:
    """Return the prediction about patterns."""
    new, old = (by_seed(growths, column) for column in ("by_pattern", "by_pattern_old"))
    held, text = every(
        cases,
        lambda case: (
            new.loc[case].mean() < 1 / 3 and abs((new.loc[case] - old.loc[case]).mean()) < CLOSE
        ),
    )
    return "new neurons: patterns carry < 1/3, within .1 of old neurons.", held, text


def english_verdicts(frames: Frames, ladders: Ladders) -> Iterator[tuple[str, bool, str]]:
    """Yield each prediction of `pressure_small_english.py`."""
    growths, others = frames[""], "grown, other texts"
    cases = list(dict.fromkeys([*rungs(ladders), *to_full(ladders)]))
    for ladder in ladders:
        yield from rank_verdicts(frames, ladders, ladder, "text")
    share, parity = by_seed(growths, "new_share"), by_seed(growths, "parity")
    below = every(cases, lambda case: share.loc[case].mean() < parity.loc[case].mean())
    yield "new parts stay below parity in every growth.", *below
    yield from drift_verdicts(frames, ladders, others)
    joint, single = by_seed(growths, "joint"), by_seed(growths, "single")
    more = every(cases, lambda case: joint.loc[case].mean() > single.loc[case].mean())
    yield "patching new parts together costs more than the sum of single patches.", *more
    no_layers = [case for case in cases if case[0] != "layers"]
    null = by_seed(growths, "directions")
    less = every(no_layers, lambda case: joint.loc[case].mean() < null.loc[case].mean())
    yield "patching new parts costs less than patching random directions.", *less
    yield pattern_verdict(growths, [case for case in cases if case[0] == "neurons"])
    decayed = by_seed(growths, "new_share", "grown, strong decay")
    change = decayed - only(share, list(decayed.index))
    if len(change):
        text = "; ".join(f"{name_of(case)} {said(change.loc[case])}" for case in change.index)
        yield (
            "strong decay raises the share by .1 or more.",
            bool(change.mean(axis=1).min() > CLOSE),
            text,
        )


def addition_verdicts(frames: Frames, ladders: Ladders) -> Iterator[tuple[str, bool, str]]:
    """Yield each prediction of `pressure_modular_addition.py`."""
    growths, others = frames[""], "grown, other pairs"
    yield from rank_verdicts(frames, ladders, "neurons", "loss")
    pressure, share, joint, null = (
        by_seed(growths, column) for column in ("pressure", "new_share", "joint", "directions")
    )

    def pressed(case: Any) -> bool:
        return bool(pressure.loc[case].mean() > PRESSED)

    some = rungs(ladders)
    held = every(some, lambda case: (share.loc[case].mean() >= 0.5) == pressed(case))
    yield "after one rung, new neurons reach parity if and only if the growth is pressed.", *held
    yield from drift_verdicts(frames, ladders, others)
    cases = list(dict.fromkeys([*some, *to_full(ladders)]))
    yield pattern_verdict(growths, cases)
    calm = [case for case in cases if not pressed(case)]
    less = every(calm, lambda case: joint.loc[case].mean() < null.loc[case].mean())
    yield "not pressed: patching new neurons costs less than patching random directions.", *less
    change = by_seed(growths, "new_share", "grown, no decay") - only(share, some)
    held = every(
        some,
        lambda case: (
            abs(change.loc[case].mean()) < CLOSE
            if pressed(case)
            else change.loc[case].mean() <= -CLOSE
        ),
    )
    claim = "without weight decay, shares fall by .1 if not pressed, and stay within .1 if pressed."
    yield claim, *held


def predictions(verdicts: Iterator[tuple[str, bool, str]]) -> str:
    """Return the predictions as a list, each with its outcome."""
    return "\n".join(verdict(claim, held, text) for claim, held, text in verdicts)


def losses_table(sizes: pd.DataFrame, before: str, after: str) -> str:
    """Return a row for each size: the loss before growth, and without growth at the end."""
    rows = []
    of_one_arm = sizes[sizes["arm"] == "not grown"]
    for (ladder, size), some in of_one_arm.groupby(["ladder", "size"], sort=False):
        by = some.groupby("seed")[[before, after]].mean()
        rows.append([ladder, size, said(by[before], 3), said(by[after], 3)])
    return markdown(["ladder", "size", "loss before growth", "not grown, at the end"], rows)


def figure(frames: Frames) -> Figure:
    """Draw the share of new parts against pressure: every growth, every seed."""
    growths = frames[""]
    share, pressure, parity = (by_seed(growths, c) for c in ("new_share", "pressure", "parity"))
    picture = Figure(figsize=(10, 3.6), layout="constrained")
    panels, colors = picture.subplots(1, 2), [*(f"C{number}" for number in range(10)), "black"]
    for number, case in enumerate(share.index):
        style = {"s": 18, "color": colors[number % len(colors)], "label": name_of(case)}
        panels[0].scatter(pressure.loc[case], share.loc[case], **style)
        panels[1].scatter(pressure.loc[case], share.loc[case] / parity.loc[case], **style)
    panels[0].set_ylabel("share of new parts")
    panels[1].set_ylabel("share of new parts / parity")
    panels[1].axhline(1, color="0.5", lw=0.8)
    for panel in panels:
        panel.set_xlabel("pressure, nats")
        panel.axvline(0, color="0.8", lw=0.8)
    if "test_loss" in growths:
        for panel in panels:
            panel.set_xscale("symlog", linthresh=0.01)
    picture.legend(
        *panels[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper"
    )
    return picture


def english_page(frames: Frames, about: Mapping[str, Any], flag: str) -> str:
    """Return the page of the study on Small English."""
    study = about["study"]
    ladders = study["ladders"]
    growths, cases = frames[""], list(dict.fromkeys([*rungs(ladders), *to_full(ladders)]))
    return ENGLISH.format(
        **study,
        n=study["n_seeds"],
        flag=flag,
        machine=about["machine"],
        seconds=about["training_seconds"],
        in_short=english_in_short(frames, ladders),
        predictions=predictions(english_verdicts(frames, ladders)),
        shares=shares_table(growths, cases, "text"),
        losses=losses_table(frames["sizes"], "before", "after"),
        costs=costs_table(growths, cases),
        overlaps=overlaps_table(frames, cases, "grown, other texts"),
        patterns=patterns_table(growths, [case for case in cases if case[0] == "neurons"]),
        decays=decays_table(growths, "grown, strong decay"),
        ends=ends_table(frames, cases, "loss", "after"),
        right=right_answers(growths),
    )


def addition_page(frames: Frames, about: Mapping[str, Any], flag: str) -> str:
    """Return the page of the study on addition."""
    study = about["study"]
    ladders = {"neurons": study["ladder"]}
    growths, cases = frames[""], list(dict.fromkeys([*rungs(ladders), *to_full(ladders)]))
    return ADDITION.format(
        **study,
        n=study["n_seeds"],
        flag=flag,
        machine=about["machine"],
        seconds=about["training_seconds"],
        in_short=addition_in_short(frames, ladders),
        predictions=predictions(addition_verdicts(frames, ladders)),
        shares=shares_table(growths, cases, "loss"),
        losses=losses_table(frames["sizes"], "train_loss_before", "train_loss_after"),
        held_out=losses_table(frames["sizes"], "test_loss_before", "test_loss_after"),
        ends=ends_table(frames, cases, "train_loss", "train_loss_after"),
        ends_held_out=ends_table(frames, cases, "test_loss", "test_loss_after"),
        pressed=PRESSED,
        costs=costs_table(growths, cases),
        overlaps=overlaps_table(frames, cases, "grown, other pairs"),
        patterns=patterns_table(growths, cases),
        decays=decays_table(growths, "grown, no decay"),
    )


def english_in_short(frames: Frames, ladders: Ladders) -> str:
    """Return question, answer and caution."""
    growths, some = frames[""], rungs(ladders)
    pressure, share, parity = (by_seed(growths, c) for c in ("pressure", "new_share", "parity"))
    relative = growths.assign(relative=growths["new_share"] / growths["parity"])
    decayed = by_seed(growths, "new_share", "grown, strong decay")
    cases = {ladder: rungs({ladder: ladders[ladder]}) for ladder in ladders}
    below = sum(share.loc[case].mean() < parity.loc[case].mean() for case in share.index)
    return wrapped(
        ENGLISH_IN_SHORT.format(
            rank=said(ranks(growths, cases["neurons"], "new_share")),
            heads_differ=said(share.loc[cases["heads"][0]] - share.loc[cases["heads"][-1]]),
            rank_all=said(ranks(relative, some, "relative")),
            n=growths["seed"].nunique(),
            n_growths=len(share),
            n_rungs=len(some),
            below=below,
            usual=listed(share, list(decayed.index)),
            decayed=listed(decayed, list(decayed.index)),
            change=said((decayed - only(share, list(decayed.index))).mean()),
            most=pressure.mean(axis=1).max(),
            **{f"share_{ladder}": listed(share, cases[ladder]) for ladder in ladders},
            **{f"pressure_{ladder}": listed(pressure, cases[ladder], 3) for ladder in ladders},
            **{f"parity_{ladder}": parity.loc[cases[ladder][0]].mean() for ladder in ladders},
        )
    )


def right_answers(growths: pd.DataFrame) -> str:
    """Return the share of right answers of grown models at the end, by task, in a sentence."""
    right = growths[growths["arm"] == "grown"].groupby("task", sort=False)["right"].mean()
    return ", ".join(f"{share:.0%} ({task})" for task, share in right.items())


def addition_in_short(frames: Frames, ladders: Ladders) -> str:
    """Return question, answer and caution."""
    growths, cases = frames[""], rungs(ladders)
    pressure, share, parity = (by_seed(growths, c) for c in ("pressure", "new_share", "parity"))
    no_decay = by_seed(growths, "new_share", "grown, no decay")
    ceiling = [of_sizes(frames["sizes"], "ceiling", case).mean() for case in cases]
    chance = by_seed(growths, "overlap_chance")
    text = ADDITION_IN_SHORT.format(
        rank=said(ranks(growths, cases, "new_share")),
        by_size=said(ranks(growths.assign(pressure=growths["small"]), cases, "new_share")),
        shares=listed(share, cases),
        pressures=listed(pressure, cases, 3),
        parity=parity.loc[cases[0]].mean(),
        no_decay=listed(no_decay, cases),
        change=said((no_decay - only(share, cases)).mean()),
        chance=sum(chance.loc[case].mean() for case in cases) / sum(ceiling),
    )
    return wrapped(text)


def listed(values: pd.DataFrame, cases: Sequence[tuple[str, int, int]], digits: int = 2) -> str:
    """Return means over seeds for several growths, in a sentence."""
    return ", ".join(
        f"{values.loc[case].mean():.{digits}f} ({case[1]} to {case[2]})" for case in cases
    )


def ends_table(frames: Frames, cases: Sequence[tuple[str, int, int]], loss: str, after: str) -> str:
    """Return a row for each growth: the loss at the end, by arm."""
    sizes, rows = frames["sizes"], []
    sizes = sizes[sizes["arm"] == "not grown"]
    for case in cases:
        ladder, small, _ = case
        some = sizes[(sizes["ladder"] == ladder) & (sizes["size"] == small)]
        alone = some.groupby("seed")[after].mean()
        grown, full = (by_seed(frames[""], loss, arm).loc[case] for arm in ("grown", "full"))
        rows.append([name_of(case), *(said(values, 3) for values in (alone, grown, full))])
    return markdown(["growth", "not grown", "grown", "full size from the start"], rows)


ENGLISH_IN_SHORT = """**Question.** A model grows. Do its new parts (neurons, heads or layers) take
over if the small model lacked such parts? We call this *capacity pressure*: the loss of the small
model minus the loss of the larger one, after the same number of steps, before growth. Two earlier
studies disagreed: new neurons held up to 82 % of the margin in addition (parity: 75 %), but 5 % of
all effects in Small English (parity: 23 %).

**Answer.** In Small English, new parts do not take over, and pressure predicts their share of
effects less well than we expected.

In {below} of {n_growths} growths, new parts hold less than
random labels would give. After growth by one rung, new neurons ({parity_neurons:.0%} of all
neurons) hold {share_neurons} of the effects of neurons, new heads ({parity_heads:.0%} of all heads)
hold {share_heads} of the effects of heads, and new layers ({parity_layers:.0%} of all parts) hold
{share_layers} of all effects.

Small models lack heads, but not neurons or layers, at this length of training: pressures are
{pressure_heads} nats for heads, {pressure_neurons} for neurons, and {pressure_layers} for layers.
Of the two growths of heads by one rung, the one with more pressure gives new heads a larger share,
but not measurably: the difference is {heads_differ}. Over the three growths of neurons, the rank
correlation of pressure with the share is {rank} (the mean of {n} seeds, with its 95 % interval); we
predicted above .8. Over all {n_rungs} growths by one rung, the rank correlation of pressure with
the share divided by parity is {rank_all}; we computed it after we saw the results.

Weight decay makes new neurons hold more. With the decay per step of the study on addition, their
share changes from {usual} to {decayed}, by {change} in the mean.
[The study on addition](pressure_modular_addition.md) agrees: without weight decay, new neurons hold
far less there, and shares are largest where pressure is near zero. So weight decay explains a part
of the disagreement between the two earlier studies. We did not show that pressure explains any of
it.

**Caution.** Pressure is at most {most:.2f} nats here, so this study cannot say what new parts of a
language model do under strong pressure. A rank correlation over three growths takes few values, and
for two growths of heads or layers it says nothing. The two earlier studies measured different
things (the margin, and single effects), so a part of their disagreement may come from this. New
layers come last; other places were not tried."""

ENGLISH = """# When do new parts take over? Small English

{in_short}

A LLaMA with {base[n_layers]} layers, width {base[d_model]}, {base[n_heads]} heads and
{base[d_mlp]} neurons a layer, or with another number of one of them, learns Small English for
{before} steps of {rows} texts, grows in this number, and trains for {after} more steps: AdamW with
weight decay 0.1 and a rate of {lr}, which falls over the last {decay} steps; {n} seeds.
`pressure_small_english.py` says what is compared, and
`pressure_measures.py` defines the measures. Effects are measured by patching every head and neuron,
on {prompts} prompts of each of three tasks. At the end, the share of right answers of grown models
is {right}.
Figures are means over tasks, then over seeds, with Student's 95 % interval over seeds.

Made by `python -m analyses.studies.pressure_small_english{flag}` on {machine}. \
Training took
{seconds} s of processor time. Every figure can be computed again from `pressure_small_english.csv`
(growths) and `pressure_small_english_sizes.csv` (models before growth, and models that do not
grow).

## Predictions

They were written before the runs, and stand in full in the script.

{predictions}

## The share of new parts

`new share` is the part of new neurons in the sum of |effects| of all neurons (of new heads in all
heads, of the heads and neurons of new layers in all heads and neurons); parity is their part of the
number. "New to old" is the mean |effect| of a new part over that of an old one. The cost
is the rise of the loss on {texts[0]} held-out texts if the outputs of all new parts are replaced
by their means; "of all" divides it by the cost of doing this to all parts of the kind.

{shares}

![The share of new parts against pressure](pressure_small_english.svg)

## What it costs to patch new parts

As a part of the fall of the metric if all heads and neurons are patched. If new parts stood in
for each other, patching them together would cost more than the sum. "Random directions" patches as
many random orthogonal directions in each layer's neurons (in its heads' outputs) as there are new
neurons (coordinates of new heads). Random labels call as many parts new: in the grown model, and in
a model that had the larger size from the start.

{costs}

## What old parts keep

The overlap of the old parts' effects with their effects before growth, divided by the ceiling:
the overlap of the small model with itself on {prompts} other prompts. "Two trainings" compares two
grown models that trained on different texts. Chance matches each part with a random one of its
layer.

{overlaps}

## Patterns and values

The part of patterns (gates) in what goes through patterns and values, for neurons.

{patterns}

## Weight decay

{decays}

## Losses

On {texts[1]} held-out texts, before growth and without growth:

{losses}

At the end:

{ends}

## What limits this

One language, one family of models, one moment of growth, {before} and {after} steps, batches of
{rows} texts: larger models learn more slowly at first, so some pressures are negative. To leave
time for five seeds, we reduced the plan: we planned d_mlp of 6, 12, 24, 48 and 96 before growth,
and ran 3, 12 and 48. "Other texts" was run for growth from the smallest to the largest size of each
ladder only, and strong decay for two growths by one rung. The ladder of neurons was run first;
those of heads and layers later, with the same code and predictions. After the first seed's
models were trained, its measures stopped with an error: secants refused prompts with padding, whose
embedding is zero. For the ladder of neurons, another token, which no token reads, stood for the
padding in the secants; secants accept such padding now.
"""

ADDITION_IN_SHORT = """**Question.** A model grows. Do its new neurons take over if the small model
lacked neurons? We call this *capacity pressure*: the loss of the small model minus the loss of the
larger one, after the same number of steps, before growth.

**Answer.** No, not in this task. After growth by one rung, half of the neurons are new. The rank
correlation of pressure with their share of all effects is {rank} over four growths (the mean of
five seeds, with its 95 % interval); we predicted above .8. The shares are {shares}; random labels
would give {parity:.2f}. The pressures are {pressures} nats. So new neurons hold most where pressure
is near zero. Weight decay moves effects into new neurons: if it is switched off at growth, the
shares are {no_decay}. They change by {change}, the mean over growths.

**Caution.** Four growths and five seeds leave wide intervals: these data do not show that the
correlation is negative. Pressure varies as much between seeds as between sizes, because seeds learn
the task at different times. The rank correlation of the size before growth with the share is
{by_size}; we computed it after we saw the results. All neurons do similar jobs here: if each old
neuron is matched with a random one, the overlap is still {chance:.0%} of the ceiling, so overlap
hardly shows drift. Effects add up exactly in this model, so redundancy cannot be measured on
logits."""

ADDITION = """# When do new neurons take over? Addition modulo 53

{in_short}

A one-layer transformer of width {d_model} with {n_heads} heads and 8 to 128 neurons learns addition
modulo {modulus} for {before} epochs, grows in neurons, and trains for {after} more epochs: AdamW
with weight decay 1 and a rate of {lr}, on {train_fraction} of all pairs, {n} seeds.
`pressure_modular_addition.py` says what is compared, and `pressure_measures.py` defines the
measures. [The same study on Small English](pressure_small_english.md) has the other half of the
answer. Figures are means over seeds, with Student's 95 % interval over seeds.

Made by `python -m analyses.studies.pressure_modular_addition{flag}` on {machine}. Training took
{seconds} s of processor time. Every figure can be computed again from
`pressure_modular_addition.csv` (growths) and `pressure_modular_addition_sizes.csv` (models before
growth, and models that do not grow).

## Predictions

They were written before the runs, and stand in full in the script. "Pressed" means a pressure above
{pressed} nats.

{predictions}

## The share of new neurons

A neuron's effect is how much the metric falls if only this neuron is patched from a prompt with
another second number. `new share` is the part of new neurons in the sum of |effects|; parity is
their part of all neurons. "New to old" is the mean |effect| of a new neuron over that of an old
one. The cost is the rise of the loss on all pairs if the outputs of all new neurons are replaced by
their means; "of all" divides it by the cost of doing this to all neurons.

{shares}

![The share of new neurons against pressure](pressure_modular_addition.svg)

## What it costs to patch new neurons

As a part of the fall of the metric if everything is patched. "Random directions" patches as many
random orthogonal directions of the hidden layer as there are new neurons. Random labels call as
many neurons new: in the grown model, and in a model that had the full size from the start.

{costs}

## What old neurons keep

The overlap of the old neurons' effects with their effects before growth, divided by the ceiling:
the overlap of the small model with itself on {prompts} other prompts. "Two trainings" compares two
grown models that trained on different pairs. Chance matches each neuron with a random other one.

{overlaps}

## Patterns and values

The part of patterns (gates) in what goes through patterns and values.

{patterns}

## Weight decay

{decays}

## Losses

On the pairs trained on, before growth and without growth:

{losses}

On the held-out pairs:

{held_out}

At the end, on the pairs trained on:

{ends}

At the end, on the held-out pairs:

{ends_held_out}

## What limits this

One task, one width, one moment of growth, five seeds. Pressure is defined on the pairs that models
train on, since the loss on held-out pairs measures when a model generalizes; rows in the table have
both (`pressure`, `pressure_test`). Models with 8 and 16 neurons have not learned the training pairs
when they grow, and those with 32 or more nearly have, so pressure takes few different values. The
arm without weight decay keeps the rate and the moments; it was run for growth by one rung only.
Other pairs were tried for growth from 8 and from 64 neurons only.
"""
