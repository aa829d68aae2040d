"""Write the page and figure of the growth study on Small English."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analyses.tools.benching import markdown
from analyses.tools.study_files import t_interval

__all__ = ["curves_figure", "difference", "page"]

STARTS = {"plain": "Plain MLPs and LayerNorm", "gated": "Gated MLPs and RMS norm"}
EARLY = (20, 100)  # numbers of steps after growth
LONGER = "scratch, all flops, "  # the first part of an arm's name; the width follows
COLOURS = {"small": "0.6", "full": "0.0"}


def difference(
    ends: pd.DataFrame, part: str, arm: str, other_arm: str
) -> tuple[float, float, float]:
    """Return the mean loss difference of two arms over seeds, and its 95 % t-interval."""
    losses = ends[ends["part"] == part].pivot(index="seed", columns="arm", values="loss")
    return t_interval(losses[arm] - losses[other_arm])


def said(estimate: tuple[float, float, float]) -> str:
    """Return a difference with its interval, as text."""
    mean, low, high = estimate
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def sizes(config: Any) -> str:
    """Return the sizes as text."""
    heads = "1 head" if config.n_heads == 1 else f"{config.n_heads} heads"
    return f"d_model {config.d_model}, {heads} and {config.d_mlp} neurons a layer"


def of(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Return the rows of one part."""
    return frame[frame["part"] == part]


def tasks(ends: pd.DataFrame) -> list[str]:
    """Return the columns with shares of right answers."""
    return list(ends.columns[ends.columns.get_loc("loss") + 1 :])


def compared(
    ends: pd.DataFrame, part: str, reference: str, early: Mapping[str, Sequence[float]]
) -> str:
    """Return a row per arm of a part: its losses by seed, compared with the reference."""
    frame, rows = of(ends, part), []
    seeds = sorted(frame["seed"].unique())
    for arm in frame["arm"].unique():
        of_arm = frame[frame["arm"] == arm].sort_values("seed")
        against = "" if arm == reference else said(difference(ends, part, arm, reference))
        rows.append(
            [
                arm,
                f"{of_arm['flops'].mean() / 1e9:.0f}",
                *(f"{loss:.3f}" for loss in early.get(arm, [float("nan")] * len(EARLY))),
                *(f"{loss:.3f}" for loss in of_arm["loss"]),
                f"{of_arm['loss'].mean():.3f}",
                against,
                f"{of_arm[tasks(ends)].to_numpy().mean():.1%}",
            ]
        )
    header = ["", "Gflop", *(f"+{step}" for step in EARLY), *(f"seed {seed}" for seed in seeds)]
    header += ["mean", f"less that of {reference}", "right"]
    return markdown(header, rows).replace("nan", "–")


def soon(curves: pd.DataFrame, part: str, grows_at: int) -> dict[str, list[float]]:
    """Return the mean loss of each grown arm, EARLY steps after growth."""
    frame = of(curves, part)
    frame = frame[~frame["arm"].isin(list(COLOURS))]
    means = frame.groupby(["arm", "step"])["loss"].mean()
    return {
        arm: [means.get((arm, grows_at + step), float("nan")) for step in EARLY]
        for arm in frame["arm"].unique()
    }


def starts(frames: Mapping[str, pd.DataFrame], study: Any) -> str:
    """Return a table for each kind of model."""
    return "\n\n".join(
        f"### {STARTS[kind]}\n\n"
        + compared(frames["ends"], kind, "own", soon(frames["curves"], kind, study.before))
        for kind in study.kinds
    )


def families(ends: pd.DataFrame, budgets: Iterable[int], widths: Sequence[int]) -> str:
    """Return a row per budget and grown size, compared with both models from scratch."""
    rows = []
    for budget in budgets:
        part = f"family {budget}"
        frame = of(ends, part).groupby("arm")[["step", "flops", "loss"]].mean()
        for width in widths[1:]:
            grown, *scratch = f"grown, {width}", f"scratch, {width}", f"{LONGER}{width}"
            row = [budget, width]
            for arm in (grown, *scratch):
                step, flops, loss = frame.loc[arm]
                row += [f"{loss:.3f} ({step:.0f} steps, {flops / 1e9:.0f} Gflop)"]
            rows.append([*row, *(said(difference(ends, part, grown, rival)) for rival in scratch)])
    header = ["steps of each", "d_model", "one checkpoint", "from scratch", "for all flops"]
    return markdown([*header, "less the first", "less the second"], rows).replace("nan", "–")


def rates(ends: pd.DataFrame) -> str:
    """Return the losses by learning rate."""
    frame = of(ends, "rates").copy()
    frame[["kind", "size", "rate"]] = frame["arm"].str.split(", ", expand=True)
    wide = frame.pivot(index=["kind", "size"], columns="rate", values="loss")
    wide = wide[sorted(wide, key=float)]
    lowest = wide.sum().idxmin()
    rows = [
        [*index, *(f"{loss:.3f}" for loss in row)]
        for index, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return f"{markdown(['', '', *wide.columns], rows)}\n\nThe lowest sum is that of {lowest}."


def title(part: str) -> str:
    """Return the title of a panel."""
    if part.startswith("family"):
        return f"Family of sizes, {part.split()[1]} steps each, by d_model"
    return STARTS.get(part, "New layers")


def curves_figure(curves: pd.DataFrame) -> Figure:
    """Draw the mean loss of each arm against flops, and its range, one panel per part."""
    parts = [part for part in curves["part"].unique() if part != "rates"]
    picture = Figure(figsize=(11, 3.7 * -(-len(parts) // 2)), layout="constrained")
    panels = picture.subplots(-(-len(parts) // 2), 2, squeeze=False).flat
    for part, panel in zip(parts, panels, strict=False):
        frame = of(curves, part)
        colours = dict(COLOURS)
        for number, arm in enumerate(a for a in frame["arm"].unique() if a not in colours):
            colours[arm] = f"C{number}"
        for arm in frame["arm"].unique():
            by_step = frame[frame["arm"] == arm].groupby("step")
            seen = by_step[["flops", "loss"]].mean().assign(n=by_step["seed"].nunique())
            seen = seen[(seen["n"] == seen["n"].max()) & (seen["flops"] > 0)]
            spread = by_step["loss"].agg(["min", "max"]).loc[seen.index]
            style = {"color": colours[arm], "lw": 1.3}
            if arm.startswith("scratch"):
                style["ls"] = ":" if arm.startswith(LONGER) else "--"
                twin = f"grown, {arm.rpartition(' ')[2]}"
                style["color"] = colours.get(twin, style["color"])
            panel.plot(seen["flops"] / 1e9, seen["loss"], label=arm, **style)
            panel.fill_between(
                seen["flops"] / 1e9, spread["min"], spread["max"], color=style["color"], alpha=0.1
            )
        ends = frame.groupby(["arm", "seed"])["loss"].last()
        low, high = ends.min(), ends.max()
        panel.set_ylim(low - 0.1 * (high - low + 0.1), high + 1.5 * (high - low + 0.1))
        panel.set_title(title(part), fontsize="medium")
        panel.set_xlabel("Gflop of matrix products")
        panel.set_ylabel("loss, part of the held-out text")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small", ncols=2)
    for panel in list(panels):
        panel.set_visible(False)
    return picture


def page(
    frames: Mapping[str, pd.DataFrame],
    study: Any,
    fresh: Sequence[float],
    seconds: float,
    flag: str,
) -> str:
    """Return the whole page in Markdown."""
    ends, curves = frames["ends"], frames["curves"]
    widths = [config.d_model for config in study.family]
    flops = ends.groupby(["part", "arm"])["flops"].mean() / 1e9
    totals = [
        sum(flops[f"family {budget}", f"scratch, {width}"] for width in widths)
        for budget in study.budgets
    ]
    return PAGE.format(
        n=ends["seed"].nunique(),
        flag=flag,
        lr=study.lr,
        tried=study.tried,
        before=study.before,
        after=study.after,
        decay=study.decay,
        plan=study.plan,
        small=sizes(study.family[0]),
        full=sizes(study.family[-1]),
        layers=" to ".join(map(str, study.layers)),
        widths=", ".join(map(str, widths)),
        budgets=" and ".join(map(str, study.budgets)),
        totals=" and ".join(f"{total:.0f}" for total in totals),
        first=fresh[0],
        most=max(fresh),
        read=study.read,
        at=fresh.index(max(fresh)) + 1,
        starts=starts(frames, study),
        families=families(ends, study.budgets, widths),
        depths=compared(ends, "layers", "top", soon(curves, "layers", study.before)),
        rates=rates(ends),
        findings=findings(frames, study),
        answer=answer(ends, study),
        seconds=seconds,
        early=" and ".join(map(str, EARLY)),
    )


def verdicts(frames: Mapping[str, pd.DataFrame], study: Any) -> Iterator[tuple[str, bool]]:
    """Yield each prediction of `growth_small_english.py`, and whether it held."""
    ends = frames["ends"]
    for kind in study.kinds:
        means = of(ends, kind).groupby("arm")["loss"].mean()
        early = {
            arm: losses[0] for arm, losses in soon(frames["curves"], kind, study.before).items()
        }
        others = [arm for arm in early if arm not in ("own", "zeros")]
        ahead = [arm for arm in others if difference(ends, kind, arm, "own")[2] < 0]
        start = STARTS[kind]
        yield (
            f"{start}: no live start ends better than own ({', '.join(ahead) or 'none'})",
            not ahead,
        )
        leads = [arm for arm in ("pairs", "GradMax") if arm in early]
        lower = [f"{arm} {early[arm]:.3f}" for arm in leads]
        said_early = f"{start}, {EARLY[0]} steps after growth: {', '.join(lower)} lead own"
        held = all(early[arm] < early["own"] for arm in leads)
        yield f"{said_early} ({early['own']:.3f})", held
        last = means[["own", *others]].idxmax()
        yield f"{start}: of the live starts unequal ends last ({last} does)", last == "unequal"
        if "zeros" in means:
            apart = difference(ends, kind, "zeros", "own")
            yield f"{start}: zeros end behind own, {said(apart)}", apart[1] > 0
        apart = difference(ends, kind, "full", "own")
        close = apart[1] > 0 and apart[0] < 0.1
        yield f"{start}: full ends behind own by less than 0.1, {said(apart)}", close
        best = all(difference(ends, kind, "small", arm)[2] < 0 for arm in ("own", "full"))
        yield f"{start}: small, {means['small']:.3f}, ends better than both", best
    gains = {}
    for budget in study.budgets:
        for width in [config.d_model for config in study.family[1:]]:
            arms = f"grown, {width}", f"scratch, {width}"
            apart = gains[width, budget] = difference(ends, f"family {budget}", *arms)
            said_here = (
                f"{budget} steps each, those of the checkpoint not counted: d_model {width} is "
                "better from the checkpoint"
            )
            yield f"{said_here}, {said(apart)}", apart[2] < 0
    few, most = min(study.budgets), max(study.budgets)
    more = all(gains[w, few][0] < gains[w, most][0] for w, n in gains if n == few)
    yield f"it gains more at {few} steps than at {most}", more or few == most
    layers = (
        of(ends, "layers").query("arm != 'full'").pivot(index="seed", columns="arm", values="loss")
    )
    places, seeds = layers.mean(), layers.mean(axis=1)
    apart, between = places.max() - places.min(), seeds.max() - seeds.min()
    yield (
        f"new layers' places differ by {apart:.3f}, less than seeds by {between:.3f}",
        apart < between,
    )
    against_top = said(difference(ends, "layers", "bottom", "top"))
    yield (
        f"at the bottom is worst, by means ({places.idxmax()} is; against the top {against_top})",
        places.idxmax() == "bottom",
    )


def findings(frames: Mapping[str, pd.DataFrame], study: Any) -> str:
    """Return the predictions as a list, each with its result."""
    lines = [f"- {'Held' if held else 'Failed'}: {text}." for text, held in verdicts(frames, study)]
    return "\n".join(lines)


def answer(ends: pd.DataFrame, study: Any) -> str:
    """Return a short answer whose numbers come from the tables."""

    def against(arm: str, part: str = "") -> str:
        parts = [part] if part else list(study.kinds)
        return " and ".join(said(difference(ends, part, arm, "own")) for part in parts)

    width = study.family[-1].d_model
    checkpoint = "; ".join(
        f"after {budget} steps of each size, the difference from a model from scratch is "
        f"{said(difference(ends, f'family {budget}', f'grown, {width}', f'scratch, {width}'))} "
        "with as many steps at this size, and "
        f"{said(difference(ends, f'family {budget}', f'grown, {width}', f'{LONGER}{width}'))} "
        "with as many flops in all"
        for budget in study.budgets
    )
    places = of(ends, "layers").query("arm != 'full'").groupby("arm")["loss"].mean()
    lines = [
        f"*Initialisation.* Losses minus the loss with the paper's initialisation ("
        f"{' and '.join(study.kinds)} models): pairs {against('pairs')}",
        f"full size from scratch {against('full')}; the small model without growth "
        f"{against('small')}",
    ]
    if "copies" not in study.left_out:
        lines.insert(1, f"copies with output weights of zero {against('copies')}")
        lines.insert(1, f"splits {against('splits')}")
    apart = places.max() - places.min()
    return (
        "; ".join(lines)
        + f".\n\n*One checkpoint.* For the largest model, {checkpoint}. The first comparison is "
        "the right one if all sizes are wanted, because the smaller sizes have paid for the "
        "checkpoint; the second is right if only this model is wanted.\n\n*New layers.* The best "
        f"and the worst place differ by {apart:.3f}."
    )


PAGE = """# Does it pay to grow? Small English

**Questions.** §5 of the growth paper leaves three questions open, which we ask for small language
models: which initialisation of new units trains best after growth, whether one checkpoint saves
compute for a family of sizes, and where new layers should go.

`growth_small_english.py` describes the arms and our expectations before the runs, and
`english_runs.py` trains. There are {n} seeds. Losses are nats per word of {read[1]} held-out texts
of all lengths; lower is better. "right" is the share of right answers to the questions of eight
tasks. Differences are paired by seed, with Student's intervals of 95 %. Arms are compared at equal
flops, including the flops of growth, unless the text names steps.

Made by `python -m analyses.studies.growth_small_english{flag}`; training took {seconds:.0f} s of
one thread.

**Answer.**

{answer}

**Caution.** The models are tiny and trained for a short time; "What limits this" below has more.

## What we expected, and what came out

Differences are means over seeds with their intervals. "better" and "behind" mean that the interval
excludes zero. We predicted that zeros end "far" behind, without a bound; the check is only that
they end behind.

{findings}

![Loss against compute](growth_small_english.svg)

## Which start trains best?

Two layers, {small}, for {before} steps; then growth at once to
{full}; then {after} steps, the rate falling over the last {decay}.
The columns "+" are the mean loss {early} steps after growth, on {read[0]} texts. All grown arms
take the same flops; "small" and "full" take as many from scratch, without growth.

AdamW's step does not depend on the size of a gradient. With fresh moments in a tensor whose bias
correction is over, the first step of an entry is {first:.2f} learning rates, and with a steady
gradient it rises to {most:.2f} at step {at}. So at a rate of {lr}, an entry that starts at zero is
as large as a random initial entry (0.04) after about ten steps, for every initialisation.

{starts}

## One checkpoint for a family of sizes?

The widths are {widths}. Each size trains for {budgets} steps, so a whole family takes {totals}
Gflop, both if all sizes start from scratch and if each size grows from the next smaller one ("own"
random entries, output weights zero). A grown model also has the steps and flops of its checkpoint,
for which the smaller sizes have paid. So we compare it with two models of its size from scratch:
one has the same number of steps at this size, and the other has all flops of its line. The table
has losses, with all steps and flops:

{families}

The smallest models are the same in both cases.

## Where should new layers go?

{layers} layers, gated, {small}: {before} steps before growth and {after} after it.

{depths}

## Learning rates

The loss from scratch, for seed 0, after {tried} steps, by the highest learning rate. All other runs
use {lr:g}.

{rates}

Before the runs, we planned to use the rate with the lowest sum over both sizes of both kinds. The
runs used {lr:g}, which is best for the full size. Small models would have gained from another rate,
so this page rather understates the results of "small".

## What limits this

The models have at most about 140,000 parameters and read at most two million words. There is one
grammar, one schedule of the rate, one time of growth, and one learning rate, which suits the full
size better than the small one. No size is trained until its loss stops falling, and small models
still gain the most per flop. Intervals over three seeds are wide, so differences that we could not
measure may exist.

Units from splits ("splits", "unequal") were run again after an error in their moments was fixed; we
knew the first results then, and no verdict changed. Later, everything was run again, with held-out
texts of all lengths and with models from scratch for all flops. The first losses were means over
batches sorted by length, so words of short texts, which have higher losses, counted more. That
first page gave the gain of the widest model from the checkpoint, but did not say that this model
had taken 1,000 steps and 368 Gflop, and its rival 400 steps and 275 Gflop.
"""
