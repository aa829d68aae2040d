"""Write the page and the figure of the study of attention-only training, only from its tables."""

import math
from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analyses.tools.benching import markdown, table
from analyses.tools.study_files import said, t_interval, verdict

__all__ = ["FORMS", "answer", "curves_figure", "page", "summary", "verdicts"]

Frames: TypeAlias = Mapping[str, pd.DataFrame]
SOLVED = 0.99
LOST = 0.9
FALLING = 0.01  # twice as many steps lower the loss by more than this share
FORMS = ("paper's heads", "without keys", "persistent vectors", "started at the MLP")
COLOURS = {
    "mlp": "black",
    "mlp, an eighth": "C5",
    "without keys": "C2",
    "paper's heads": "C0",
    "persistent vectors": "C1",
    "started at the MLP": "C9",
    "mlp, twice": "C7",
    "all-attention": "C4",
}
BECOME = {
    "cos_qv": "cos(W_Q, W_V)",
    "cos_qk": "cos(W_Q, W_K)",
    "weight": "self weight",
    "saturated": "saturated",
    "score_linear_in_q": "score linear in q",
    "of_v": "output from v",
    "of_q": "output from q",
    "dead": "dead",
}
"""The columns of the table of what heads become, by their names in the frame."""


def solved(curves: pd.DataFrame) -> pd.DataFrame:
    """Return when the held-out accuracy first reaches SOLVED, or inf, [seed, arm]."""
    by = curves[curves["task"] == "addition"].set_index(["seed", "arm"])
    first = by[by["accuracy"] >= SOLVED].groupby(level=["seed", "arm"])["step"].first()
    return first.astype(float).reindex(by.index.unique()).fillna(float("inf")).unstack("arm")


def ends(curves: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return the last losses, [seed, arm]."""
    last = curves[curves["task"] == task].groupby(["seed", "arm"], sort=False)["loss"].last()
    return last.unstack("arm")


def differences(curves: pd.DataFrame) -> pd.DataFrame:
    """Return how far the last losses on text are above the MLP's with the same seed, in percent."""
    losses = ends(curves, "text")
    return 100 * (losses.div(losses["mlp"], axis=0) - 1)


def lost(curves: pd.DataFrame) -> str:
    """Return the runs of addition that reached SOLVED once, and end below LOST."""
    runs = curves[curves["task"] == "addition"].groupby(["arm", "seed"], sort=False)["accuracy"]
    best, last = runs.max(), runs.last()
    fell = last[(best >= SOLVED) & (last < LOST)]
    return "; ".join(f"{arm}, seed {seed} ({x:.0%})" for (arm, seed), x in fell.items()) or "none"


def epochs(values: "pd.Series[float]") -> str:
    """Return the epochs at which an arm solved addition, by seed, and their median."""
    every = ["no" if x == float("inf") else f"{x:.0f}" for x in (*values, values.median())]
    return f"{every.pop()} ({', '.join(every)})"


def summary(frames: Frames) -> str:
    """Return the table for the theory page: sizes, losses, and when addition is solved."""
    losses, more = ends(frames[""], "text"), differences(frames[""])
    steps = solved(frames[""])
    sizes = frames["sizes"].query("task == 'text'").set_index("arm").drop(columns="task")
    rows = []
    for arm in sizes.index:
        share = sizes.loc[arm] / sizes.loc["mlp"]
        counts = [f"{share[column]:.2g}" for column in ("parameters", "flops a token")]
        difference = "" if arm == "mlp" else said(more[arm], "+.1f")
        done = epochs(steps[arm]) if arm in steps else "–"
        rows.append([arm, *counts, said(losses[arm]), difference, done])
    header = ["", "parameters", "flops", "loss on text", "than the MLP, %"]
    return markdown([*header, f"epochs to {SOLVED:.0%} of addition"], rows)


def lengths_table(lengths: pd.DataFrame) -> str:
    """Return the MLP's loss by the number of steps, and how far it fell."""
    wide = lengths.pivot(index="steps", columns="lr", values="loss")
    best = wide.min(axis=1)
    rows = [
        [steps, *(f"{x:.3f}" for x in row), f"{best[steps]:.3f}", fell]
        for (steps, row), fell in zip(
            wide.iterrows(), ["–", *(f"{x:+.1%}" for x in best.pct_change()[1:])], strict=True
        )
    ]
    return markdown(["steps", *(f"rate {lr:g}" for lr in wide), "best", "than before"], rows)


def rates(frames: Frames) -> "pd.Series[float]":
    """Return the rate of each arm on text."""
    chosen = frames["search"].query("task == 'text' and chosen")
    return chosen.set_index("arm")["lr"]


def at_same_rate(frames: Frames) -> pd.DataFrame:
    """Return how far arms on text are above the MLP with their rate and seed, in percent."""
    losses = ends(frames[""], "text")
    mlp = frames["same_rate"].pivot(index="seed", columns="lr", values="loss")
    same = pd.DataFrame({arm: mlp[lr] for arm, lr in rates(frames).items()})
    return 100 * (losses.div(same)[losses.columns] - 1)


def rates_table(frames: Frames) -> str:
    """Return differences from the MLP if both use their own rate, or the same rate."""
    lrs, best, same = rates(frames), differences(frames[""]), at_same_rate(frames)
    rows = [
        [arm, f"{lr:g}", said(best[arm], "+.1f"), said(same[arm], "+.1f")]
        for arm, lr in lrs.items()
        if arm != "mlp"
    ]
    header = ["than the MLP, %", "rate", f"MLP with rate {lrs['mlp']:g}", "MLP with the same rate"]
    return markdown(header, rows)


def until_flat(frames: Frames) -> str:
    """Say how long all runs would take until the MLP's loss stops falling."""
    factor, steps = steps_until_flat(frames["lengths"])
    last = frames[""].query("task == 'text'").groupby(["arm", "seed"])[["step", "seconds"]].last()
    hours = steps * (last["seconds"] / last["step"]).sum() / 3600
    text = (
        f"The last fall is {factor:.2f} times the fall before it. If all later falls shrink by "
        f"this factor, twice as many steps gain less than {FALLING:.0%} only after about "
        f"{steps:,.0f} steps. At the speed of this run, all arms and seeds would then take "
        f"{hours:.0f} hours on one thread."
    )
    return fill(text, 100, break_on_hyphens=False)


def falls(lengths: pd.DataFrame) -> "pd.Series[float]":
    """Return by how much of its best loss the MLP improves with twice as many steps."""
    best = lengths.groupby("steps")["loss"].min()
    return -best.pct_change().shift(-1)[:-1]


def steps_until_flat(lengths: pd.DataFrame) -> tuple[float, float]:
    """Return the factor between the last two falls, and after how many steps falls are small.

    A fall is the share of its loss that the MLP loses if the number of steps doubles; it is small
    if it is at most FALLING. All later falls are assumed to shrink by the factor of the last two.
    """
    fall = falls(lengths)
    factor = fall.iloc[-1] / fall.iloc[-2]
    if not 0 < factor < 1:
        return factor, float("nan")
    doublings = max(0, math.ceil(math.log(FALLING / fall.iloc[-1]) / math.log(factor)))
    return factor, float(fall.index[-1] * 2**doublings)


def by_length(frames: Frames) -> str:
    """Return differences from the MLP by length of training, in earlier runs and in this one."""
    earlier = {
        f"{steps} steps": differences(run.assign(task="text"))
        for steps, run in frames["earlier"].groupby("steps")
    }
    steps = frames[""].query("task == 'text'")["step"].max()
    runs = earlier | {f"{steps} steps (this run)": differences(frames[""])}
    arms = [arm for arm in runs[f"{steps} steps (this run)"] if arm != "mlp"]
    rows = [
        [arm, *(said(run[arm], "+.1f") if arm in run else "–" for run in runs.values())]
        for arm in arms
    ]
    return markdown(["than the MLP, %", *runs], rows)


def became(frame: pd.DataFrame, task: str) -> str:
    """Return means over seeds of the heads' properties at the end."""
    of_task = frame[frame["task"] == task]
    means = of_task.groupby(["arm", "when"], sort=False)[list(BECOME)].mean()
    rows = []
    for arm in of_task["arm"].unique():
        start, end = means.loc[arm, "start"], means.loc[arm, "end"]
        cells = [f"{end[column]:.2f}" for column in BECOME]
        rows.append([arm, f"{start['cos_qv']:.2f}", *("–" if x == "nan" else x for x in cells)])
    return markdown(["", "cos(W_Q, W_V) at the start", *BECOME.values()], rows)


def costs(cuts: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return how much each cut adds to the loss, a row for each arm and seed."""
    of_task = cuts[cuts["task"] == task].set_index(["arm", "seed"])
    return of_task[["key", "value_b", "gate"]].sub(of_task["whole"], axis=0)


def costs_table(cuts: pd.DataFrame, task: str) -> str:
    """Return means and intervals of what each cut adds to the loss."""
    added = costs(cuts, task)
    rows = [
        [arm, *(said(added.loc[arm, column], ".3g") for column in added)]
        for arm in added.index.unique("arm")
    ]
    return markdown(
        ["", "keys at their means", "bias token's value at 0", "gate at its mean"], rows
    )


def at_end(frames: Frames, column: str, task: str, arm: str, when: str = "end") -> Any:
    """Return a property of an arm's heads, the median over heads, by seed."""
    rows = frames["become"].query("task == @task and arm == @arm and when == @when")
    return rows.set_index("seed")[column]


def verdicts(frames: Frames) -> Iterator[tuple[str, bool, str]]:
    """Yield each prediction for this run: a claim, whether it held, figures."""
    more, fall = differences(frames[""]), falls(frames["lengths"])
    mean = more.mean()

    def percent(*arms: str) -> str:
        return "; ".join(f"{arm} {said(more[arm], '+.1f')} %" for arm in arms)

    yield (
        f"from {fall.index[-1]} to {2 * fall.index[-1]} steps, the MLP's loss falls by more than "
        f"{FALLING:.0%}.",
        bool(fall.iloc[-1] > FALLING),
        f"{fall.iloc[-1]:.1%}",
    )
    yield (
        '"mlp, an eighth" ends at least 5 % above the MLP.',
        bool(mean["mlp, an eighth"] >= 5),
        percent("mlp, an eighth"),
    )
    yield (
        '"mlp, twice" ends below the MLP, by 1 % or more.',
        bool(mean["mlp, twice"] <= -1),
        percent("mlp, twice"),
    )
    yield (
        "neuron-heads of all four forms end within 3 % of the MLP.",
        bool((mean[list(FORMS)].abs() < 3).all()),
        percent(*FORMS),
    )
    above = t_interval(more["paper's heads"])[1] > 0
    _, low, high = t_interval(more["without keys"])
    yield (
        '"paper\'s heads" end above the MLP, and the interval excludes 0; that of "without keys" '
        "includes 0.",
        above and low <= 0 <= high,
        percent("paper's heads", "without keys"),
    )
    apart = more["persistent vectors"] - more["paper's heads"]
    mean_apart, low, high = t_interval(apart)
    yield (
        '"persistent vectors" and "paper\'s heads" differ by less than 2 points, and the interval '
        "includes 0.",
        abs(mean_apart) < 2 and low <= 0 <= high,
        said(apart, "+.1f"),
    )
    cos, set_free = (
        at_end(frames, "cos_qv", "text", arm) for arm in ("paper's heads", "started at the MLP")
    )
    yield (
        'on text, the median |cos(W_Q, W_V)| of "paper\'s heads" stays below .3, and that of '
        '"started at the MLP" falls below .4.',
        bool(cos.mean() < 0.3 and set_free.mean() < 0.4),
        f"{said(cos, '.2f')} and {said(set_free, '.2f')}",
    )
    cut = costs(frames["cuts"], "text").loc["paper's heads"]
    yield (
        'in "paper\'s heads" on text, keys at their means cost more than ten times as much as the '
        "bias token's value at 0.",
        bool(cut["key"].mean() > 10 * cut["value_b"].mean()),
        f"{said(cut['key'])} and {said(cut['value_b'])} nats",
    )
    yield (
        "all-attention layers end at least 10 % above the MLP.",
        bool(mean["all-attention"] >= 10),
        percent("all-attention"),
    )
    first = solved(frames[""]).median()
    yield (
        'on addition, "started at the MLP" needs less than twice as many epochs as the MLP, and '
        'the MLP or "without keys" solves the task first (medians).',
        bool(
            first["started at the MLP"] < 2 * first["mlp"]
            and first[["mlp", "without keys"]].min() == first.min()
        ),
        "; ".join(
            f"{arm} {'never' if x == float('inf') else f'{x:.0f}'}" for arm, x in first.items()
        ),
    )


def answer(frames: Frames) -> str:
    """Return the question, the answer and the caution."""
    more = differences(frames[""])
    steps, fall = solved(frames[""]), falls(frames["lengths"])
    earlier_steps = frames["earlier"]["steps"].max()
    before = differences(frames["earlier"].query("steps == @earlier_steps").assign(task="text"))
    text = ANSWER.format(
        n=len(more),
        steps=frames[""].query("task == 'text'")["step"].max(),
        lowest=f"{more[list(FORMS)].mean().min():+.1f}",
        highest=f"{more[list(FORMS)].mean().max():+.1f}",
        without_keys=said(more["without keys"], "+.1f"),
        paper=said(more["paper's heads"], "+.1f"),
        set_free=said(more["started at the MLP"], "+.1f"),
        persistent=said(more["persistent vectors"], "+.1f"),
        twice=said(more["mlp, twice"], "+.1f"),
        earlier_steps=earlier_steps,
        all_attention=said(more["all-attention"], "+.1f"),
        all_attention_earlier=said(before["all-attention"], "+.1f"),
        eighth_earlier=said(before["mlp, an eighth"], "+.1f"),
        eighth=said(more["mlp, an eighth"], "+.1f"),
        mlp_epochs=epochs(steps["mlp"]),
        without_keys_epochs=epochs(steps["without keys"]),
        paper_epochs=epochs(steps["paper's heads"]),
        cos=said(at_end(frames, "cos_qv", "text", "paper's heads"), ".2f"),
        cos_start=said(at_end(frames, "cos_qv", "text", "paper's heads", "start"), ".2f"),
        longest=2 * fall.index[-1],
        half=fall.index[-1],
        fall=f"{fall.iloc[-1]:.1%}",
        SOLVED=SOLVED,
    )
    paragraphs = text.split("\n\n")
    return "\n\n".join(fill(part, 100, break_on_hyphens=False) for part in paragraphs)


def curves_figure(curves: pd.DataFrame) -> Figure:
    """Draw loss against flops, one panel per task: medians over seeds, and their range."""
    picture = Figure(figsize=(11, 4.5), layout="constrained")
    panels = picture.subplots(1, 2)
    for panel, task in zip(panels, ("text", "addition"), strict=True):
        for arm, of_arm in curves[curves["task"] == task].groupby("arm", sort=False):
            summary = of_arm.groupby("step")[["flops", "loss"]].agg(["median", "min", "max"])
            summary = summary[summary["flops", "median"] > 0]
            x, colour = summary["flops", "median"] / 1e12, COLOURS[str(arm)]
            style = "--" if "," in str(arm) else "-"
            panel.plot(x, summary["loss", "median"], color=colour, linestyle=style, label=arm)
            panel.fill_between(
                x,
                summary["loss", "min"],
                summary["loss", "max"],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
        yscale = "linear" if task == "text" else "log"
        panel.set(title=task, xscale="log", yscale=yscale, xlabel="Tflop of matrix products")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("held-out loss, nats")
    panels[0].legend(fontsize="small", loc="lower left", title="dashed: other flops than mlp")
    return picture


def searched(search: pd.DataFrame, task: str) -> str:
    """Return the losses by learning rate, with the chosen rate in bold."""
    of_task = search[search["task"] == task]
    marked = [
        f"**{loss:.3g}**" if chosen else f"{loss:.3g}"
        for loss, chosen in zip(of_task["loss"], of_task["chosen"], strict=True)
    ]
    wide = of_task.assign(loss=marked).pivot(index="arm", columns="lr", values="loss")
    return table(wide.loc[of_task["arm"].unique()].fillna("").reset_index())


def page(frames: Frames, about: Mapping[str, Any], flag: str = "") -> str:
    """Return the whole page in Markdown."""
    curves, study = frames[""], about["study"]
    seconds = curves.groupby(["task", "arm", "seed"])["seconds"].last().groupby("task").sum()
    search = frames["search"].groupby("task")["seconds"].sum()
    spent = (seconds + search) / 60
    same = frames["same_rate"]
    added = same[same["lr"] != rates(frames)["mlp"]]
    extra = frames["lengths"]["seconds"].sum() + added["seconds"].sum()
    tables = {
        f"{name}_{task}": made
        for task in ("text", "addition")
        for name, made in {
            "became": became(frames["become"], task),
            "costs": costs_table(frames["cuts"], task),
            "search": searched(frames["search"], task),
        }.items()
    }
    return PAGE.format(
        **tables,
        **study["text"],
        n_seeds=study["n_seeds"],
        addition=study["addition"],
        SOLVED=SOLVED,
        LOST=LOST,
        summary=summary(frames),
        lengths=lengths_table(frames["lengths"]),
        until_flat=until_flat(frames),
        by_length=by_length(frames),
        rates=rates_table(frames),
        answer=answer(frames),
        sizes=table(frames["sizes"]),
        verdicts="\n".join(verdict(*prediction) for prediction in verdicts(frames)),
        lost=lost(curves),
        machine=about["machine"],
        text_minutes=spent["text"] + extra / 60,
        addition_minutes=spent["addition"],
        flag=flag,
    )


ANSWER = """**Question.** The paper leaves open whether transformers that consist only of attention
heads train as well as transformers with MLPs (section 5). We train small models from scratch, with
equal parameters and flops: with MLPs, with neuron-heads whose weights are free, and with
all-attention layers (Sukhbaatar et al., 2019).

**Answer.** Nearly: on text, after {steps} steps, the loss of the four forms of neuron-heads differs
from the MLP's by {lowest} to {highest} % (means).

Neuron-heads with the theorem's keys and a free W_V ("without keys": gated linear units) do not
differ measurably from the MLP: by {without_keys} % (the mean of {n} seeds, and its 95 %
interval). The other forms of heads have free keys too. The paper's heads differ by {paper} %; if
they start at the MLP's function, by {set_free} %; with a persistent key and value in each head, by
{persistent} %. All-attention layers differ by {all_attention} %.

These gaps depend on the length of training (and the rates were chosen again for this length). After
{earlier_steps} steps, all-attention layers differed by {all_attention_earlier} %, and an MLP with
an eighth of the neurons by {eighth_earlier} %; now the latter differs by {eighth} %. An MLP with
twice the neurons differs by {twice} %.

On addition, {SOLVED:.0%} of held-out pairs are
right after {mlp_epochs} epochs with an MLP, after {without_keys_epochs} without keys, and after
{paper_epochs} with the paper's heads (the median and, in brackets, the seeds).
The other two forms need more epochs; some of their runs never solve it, or lose it again.

Heads whose W_V is free do not become neurons of an MLP: in the paper's heads on text, the median
|cos(W_Q, W_V)| is {cos} at the end. It is {cos_start} at the start, and 1 in an MLP.

**Caution.** The models are small, and {steps} steps are few: even from {half} to {longest} steps,
the MLP's loss falls by {fall}. The MLP ends nearly as low at twice its rate, so the search can
hardly choose between rates that differ by a factor of two. With an eighth of the neurons, the loss
is not measurably higher, so this text hardly needs neurons, and is a weak test of what replaces
them.

On addition, five seeds cannot distinguish the MLP from the heads without keys. In the first run,
the MLP was first in every seed; there, all arms used the highest rate that was tried. All-attention
layers were published for large models; here, only their learning rate was tuned."""

PAGE = """# Do attention-only transformers train as well as transformers with MLPs?

{answer}

![Loss against compute](train_attention_only.svg)

{summary}

Means over {n_seeds} seeds, with Student's 95 % interval over seeds. "Than the MLP" compares runs
with the same seed: the same data in the same order, and the same initial attention and embeddings.
Parameters and flops are those of a layer's MLP or neuron-heads. Epochs are the median and, in
brackets, the epochs by seed until {SOLVED:.0%} of the held-out pairs are right.

Text is Small English: {n_layers} layers, d_model {d_model}, {steps} steps of {rows} texts, with a
rate that falls to zero. Addition is modulo {addition[modulus]}: one layer without a norm,
{addition[steps]} epochs, {addition[train_fraction]} of all pairs for training.
`train_attention_only.py` describes the arms, and `attention_only_models.py` has the formulas of the
heads. In the figure, bands go from the lowest to the highest seed.

Made by `python -m analyses.studies.train_attention_only{flag}` on {machine}.
Training took {text_minutes:.0f} minutes of processor time for text, and {addition_minutes:.0f} for
addition. Every figure can be computed again from the tables next to this page.

## Predictions

They were written before this run, and stand in full in the script, with those for earlier runs.

{verdicts}

Most predictions are about means over seeds. The theorem's form stays equal to the MLP in training,
up to rounding; a test shows this.

## How long to train

The MLP's held-out loss after trainings of several lengths, with another seed. "Than before"
compares with half as many steps.

{lengths}

{until_flat}

Two earlier runs were shorter. The run of 600 steps had three seeds and rates from a search over 240
steps; the run of 2400 steps had five seeds, a search over 1200 steps, and fewer arms:

{by_length}

The search hardly tells rates apart that differ by a factor of two. So we also trained the MLP at
the rates of the other arms:

{rates}

## What the heads become

Medians over heads, means over seeds, at the end of training. cos is |cos| between vectors. "Self
weight" is a token's mean weight on itself; the rest is on the bias token. "Saturated" is the share
of tokens with a self weight below 0.05 or above 0.95. "Score linear in q": the share of the score's
variance that is linear in q; it is 1 in an MLP. "Output from v" and "from q": the share of the
output's variance that is a function of v or of q alone; a neuron of an MLP is a function of both.
"Dead" is the share of heads with less than 0.01 of their layer's mean strength.

Text:

{became_text}

Addition:

{became_addition}

## What the parts are worth

What a change of all heads adds to the loss, in nats: each key is set to its mean over tokens; the
value of the bias token is set to 0; the gate is set to its mean, which leaves a linear map.

Text:

{costs_text}

Addition:

{costs_addition}

## Sizes

Flops are those of matrix products for a token, forward. The dense form scores every pair of a token
with another token or the bias token, and masks all but two scores per token.

{sizes}

## Learning rates

Losses by rate after {search_steps} steps of text (one other seed) and after
{addition[search_steps]} epochs of addition (the mean of {addition[search_seeds]} other seeds):
medians over the last quarter of a run. While the best rate was the lowest or the highest, another
one was tried. Addition first had one seed for this, which chose a rate at which the MLP does not
keep the task; then all arms got {addition[search_seeds]} seeds.

Text:

{search_text}

Addition:

{search_addition}

## What limits this

Models are small: two layers and one layer of width {d_model}. One optimizer, one scale of initial
weights, no search of weight decay. The rate on text is chosen with one seed. The bias token is the
same row in all layers; by Definition 1 heads would write to its row as well. Flops are not time:
see [the benchmark](../../studies.md#removed-studies). Properties of heads on text include padding tokens,
losses do not. Addition runs that solved the task and lost it again, below {LOST:.0%} at the end:
{lost}.

Models of the theorem's form can be exposed by this package (`in_package`). The other forms cannot:
the package's neuron-heads have the value q, and keys that do not depend on the token.
"""
