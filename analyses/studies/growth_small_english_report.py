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
    lines = [f"- {'Held' if held else 'FAILED'}: {text}." for text, held in verdicts(frames, study)]
    return "\n".join(lines)


def answer(ends: pd.DataFrame, study: Any) -> str:
    """Return a short answer whose numbers come from the tables."""

    def against(arm: str, part: str = "") -> str:
        parts = [part] if part else list(study.kinds)
        return " and ".join(said(difference(ends, part, arm, "own")) for part in parts)

    width = study.family[-1].d_model
    checkpoint = "; ".join(
        f"after {budget} steps of each size, against scratch for as many steps of its own "
        f"{said(difference(ends, f'family {budget}', f'grown, {width}', f'scratch, {width}'))}, "
        "for as many flops in all "
        f"{said(difference(ends, f'family {budget}', f'grown, {width}', f'{LONGER}{width}'))}"
        for budget in study.budgets
    )
    places = of(ends, "layers").query("arm != 'full'").groupby("arm")["loss"].mean()
    lines = [
        f"Which start: against the paper's, pairs {against('pairs')} ({' and '.join(study.kinds)})",
        f"full size from scratch {against('full')}, small all along {against('small')}",
    ]
    if "copies" not in study.left_out:
        lines.insert(1, f"copies with zero outputs {against('copies')}")
        lines.insert(1, f"shared-out units {against('splits')}")
    apart = places.max() - places.min()
    return (
        "; ".join(lines)
        + f".\n\nOne checkpoint, the largest model: {checkpoint}. The former counts where all "
        "sizes are wanted, as smaller ones have paid for the checkpoint's steps; of one model, "
        f"the latter does.\n\nPlaces of new layers: {apart:.3f} between the best and the worst."
    )


PAGE = """# Does it pay to grow? Small English

Three questions about small language models, those of §5 of the growth paper: which start trains
best after growth, whether one checkpoint pays for a family of sizes, and where new layers go.
`growth_small_english.py` says what is compared and what we expected before the runs;
`english_runs.py` trains. {n} seeds; losses are nats a word of {read[1]} held-out texts of all
lengths, lower is better; "right" is the share of right answers to the questions of eight tasks.
Differences are paired by seed, with Student's interval of 95 %. Comparisons are at equal flops,
growth's own included, except where steps are named.

Made by `python -m analyses.studies.growth_small_english{flag}`; training took {seconds:.0f} s of
one
thread.

## In short

{answer}

## What we expected, and what came out

Differences are means over seeds with their intervals; "better" and "behind" are of intervals that
do not hold zero. We wrote that zeros end "far" behind, and gave no bound; what is checked is that
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
gradient it rises to {most:.2f} at step {at}: at a rate of {lr}, a zero is as large as what is drawn
(0.04) within some ten steps, whichever start it is.

{starts}

## One checkpoint for a family of sizes?

Widths {widths}; each size trains for {budgets} steps of its own, so that a whole
family takes {totals} Gflop, either way: from scratch, or each size grown from the one before it
(own draws, outputs zero). A grown model has taken the steps and flops of the checkpoint, too, which
the smaller sizes have paid for. So it is compared with two models of its size from scratch: for the
steps of its own, and for all the flops of its line. Losses, with all steps and flops behind them:

{families}

The smallest models are the same either way.

## Where should new layers go?

{layers} layers, gated, {small}: {before} steps before growth and {after} after it.

{depths}

## Learning rates

The loss from scratch, seed 0, after {tried} steps, by the highest rate. All other runs take
{lr:g}.

{rates}

Before the runs we wrote that the rate with the lowest sum over both sizes of both kinds is taken.
The runs took {lr:g}, the best of full size: the small ones would have gained from another, so what
is said of "small" is if anything too little.

## What limits this

Models of at most some 140,000 parameters that read at most two million words, one grammar, one
schedule of the rate, one moment of growth, one learning rate, which suits the full size better than
the small one. At these lengths no size is trained to its end: small models still gain the most for
their flops. Intervals of three seeds are wide: what they do not tell apart may differ. Shared-out
units (splits, unequal) were run again after their moments had been mended, with the results of the
first time known; no prediction's fate changed then. Later everything was run again,
with held-out texts of all lengths and with models from scratch for all flops; the first losses were
means of batches sorted by length, so that words of short texts counted more, and higher. That page
gave the gain of the widest model from the checkpoint without saying that it had taken 1,000 steps
and 368 Gflop, against 400 and 275.
"""
