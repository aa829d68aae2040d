"""Write the page and figures of the study of attention-only training, only from its tables."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analyses.tools.benching import markdown, table

__all__ = ["curves_figure", "finals", "heads_figure", "page", "summary", "verdicts"]

METRICS = Path(str(files("attn_only_lens.pretrained") / "data/small_english/metrics.json"))
SOLVED = 0.99
LOST = 0.9
NEAR = 0.02  # losses count as equal if they differ by less than this fraction
APART = 0.1  # a difference of |cos| that counts
COLOURS = {
    "mlp": "black",
    "mlp, twice": "grey",
    "mlp, an eighth": "C5",
    "keyless": "C2",
    "bias token": "C0",
    "bias token, as many": "C9",
    "set free": "C1",
    "persistent": "C3",
    "all-attention": "C4",
}


def solved(curves: pd.DataFrame, column: str = "step") -> pd.Series:
    """Return by arm and seed when the held-out accuracy first reaches SOLVED, or NaN."""
    by = curves[curves["task"] == "addition"].set_index(["arm", "seed"]).sort_index()
    keys = by.index.unique()
    first = by[by["accuracy"] >= SOLVED].groupby(["arm", "seed"])[column].first()
    return first.reindex(keys)


def ends(curves: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return the last losses, [seed, arm]."""
    last = curves[curves["task"] == task].groupby(["seed", "arm"], sort=False)["loss"].last()
    return last.unstack("arm")


def finals(curves: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return a row per arm: its flops, and the last losses of all seeds."""
    of_task = curves[curves["task"] == task]
    flops = of_task.groupby("arm", sort=False)["flops"].max() / 1e12
    losses = ends(curves, task)[flops.index]
    frame = pd.DataFrame({"arm": flops.index, "Tflop": flops.to_numpy()})
    for seed, row in losses.iterrows():
        frame[f"loss, seed {seed}"] = row.to_numpy()
    frame["median"] = losses.median().to_numpy()
    if task == "addition":
        steps, cost = (solved(curves, name).unstack("seed") for name in ("step", "flops"))
        for seed in steps:
            frame[f"solved, seed {seed}"] = [_step(steps.loc[arm, seed]) for arm in flops.index]
        frame["Tflop until then"] = cost.median(axis=1).reindex(flops.index).to_numpy() / 1e12
    return frame


def _step(value: float) -> str:
    return "no" if pd.isna(value) else f"{value:.0f}"


def _fell(curves: pd.DataFrame) -> str:
    """Return the runs that reached SOLVED once, and end below LOST."""
    best = curves[curves["task"] == "addition"].groupby(["arm", "seed"], sort=False)["accuracy"]
    runs = pd.DataFrame({"most": best.max(), "last": best.last()})
    fell = runs[(runs["most"] >= SOLVED) & (runs["last"] < LOST)]
    runs_lost = [f"{arm}, seed {seed} ({last:.0%})" for (arm, seed), last in fell["last"].items()]
    return "; ".join(runs_lost) or "none"


def summary(frames: Mapping[str, pd.DataFrame]) -> str:
    """Return the table for the theory page: parameters, losses, and when addition is solved."""
    losses, steps = ends(frames[""], "text"), solved(frames[""]).unstack("seed")
    sizes = frames["sizes"].query("task == 'text'").set_index("arm").drop(columns="task")
    rows = []
    for arm in sizes.index:
        of_arm = losses[arm]
        epochs = [_step(step) for step in steps.loc[arm]] if arm in steps.index else ["–"]
        share = sizes.loc[arm] / sizes.loc["mlp"]
        rows.append(
            [
                *(arm, f"{share['heads']:.2g}", f"{share['flops a token']:.2g}"),
                f"{of_arm.median():.3f} ({of_arm.min():.3f} to {of_arm.max():.3f})",
                f"{(of_arm / losses['mlp'] - 1).median():+.1%}",
                ", ".join(epochs),
            ]
        )
    header = ["", "heads a neuron", "flops", "loss on text", "than the MLP's"]
    return markdown([*header, f"epochs to {SOLVED:.0%} of addition, by seed"], rows)


def became(frame: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return medians over seeds of the heads' properties, at the start and at the end."""
    of_task = frame[frame["task"] == task].drop(columns=["task", "seed"])
    return of_task.groupby(["arm", "when"], sort=False).median().reset_index()


def costs(cuts: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return how much each cut adds to the loss, as medians over seeds."""
    of_task = cuts[cuts["task"] == task].set_index("arm")
    added = of_task[["key", "value_b", "gate"]].sub(of_task["whole"], axis=0)
    return pd.concat([of_task[["whole"]], added], axis=1).groupby("arm", sort=False).median()


def verdicts(frames: Mapping[str, pd.DataFrame]) -> list[tuple[bool, str]]:
    """Return whether each prediction starting at the second holds, with the evidence."""
    curves, text = frames[""], ends(frames[""], "text")
    relative = (text.div(text["mlp"], axis=0) - 1).median()
    steps = solved(curves).unstack("seed")
    first = steps.fillna(float("inf")).median(axis=1)
    turn = frames["become"].groupby(["task", "arm", "when"])["cos_qv"].median()
    part = {task: costs(frames["cuts"], task).loc["bias token"] for task in ("text", "addition")}
    tasks = ("text", "addition")
    moved = {
        task: turn[task, "bias token", "end"] - turn[task, "bias token", "start"] for task in tasks
    }
    kept = {task: turn[task, "set free", "end"] for task in tasks}
    lines = [
        (
            abs(relative["bias token"]) < NEAR,
            f"half as many heads to the letter end {relative['bias token']:+.1%} from the MLP's "
            f"loss on text, keyless ones {relative['keyless']:+.1%} (medians of seeds)",
        ),
        (
            bool((text["bias token, as many"] < text["mlp"]).all())
            and not (text["bias token, as many"] < text["mlp, twice"]).all(),
            f"as many heads as neurons end {relative['bias token, as many']:+.1%} from the MLP's "
            f"loss, the MLP of twice the neurons {relative['mlp, twice']:+.1%}",
        ),
        (
            all(abs(change) < APART for change in moved.values())
            and all(share < 1 - APART for share in kept.values()),
            "the median |cos(W_Q, W_V)| of heads to the letter goes "
            + ", ".join(
                f"from {turn[task, 'bias token', 'start']:.2f} to "
                f"{turn[task, 'bias token', 'end']:.2f} on {task}"
                for task in tasks
            )
            + "; set free from the theorem, it ends at "
            + " and ".join(f"{kept[task]:.2f}" for task in tasks),
        ),
        (
            all(row["key"] > row["value_b"] for row in part.values())
            and abs(relative["keyless"] - relative["bias token"]) < NEAR,
            "with every key at its mean, heads to the letter lose "
            + ", ".join(f"{part[task]['key']:.3g} on {task}" for task in tasks)
            + "; without the bias token's value "
            + ", ".join(f"{part[task]['value_b']:.3g}" for task in tasks)
            + f"; trained without token keys they end {relative['keyless']:+.1%} from the MLP",
        ),
        (
            abs(relative["persistent"] - relative["bias token"]) < NEAR,
            f"persistent vectors end {relative['persistent']:+.1%} from the MLP on text, the bias "
            f"token {relative['bias token']:+.1%}",
        ),
        (
            bool(first["bias token"] <= first["mlp"] < float("inf")),
            "the median step at which addition is solved is "
            + ", ".join(
                f"{'never' if first[arm] == float('inf') else f'{first[arm]:.0f}'} ({arm})"
                for arm in COLOURS
                if arm in first.index
            ),
        ),
    ]
    return lines


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
        scale = "log" if task == "addition" else "linear"
        panel.set(title=task, xscale=scale, yscale=scale, xlabel="Tflop of matrix products")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("loss on what is held out, nats")
    panels[0].legend(fontsize="small", title="dashed: other flops than mlp")
    return picture


def heads_figure(heads: pd.DataFrame) -> Figure:
    """Draw the heads of one seed at the end: cosines between their vectors, and their gates."""
    picture = Figure(figsize=(11, 6.5), layout="constrained")
    panels = picture.subplots(2, 3, sharex="col")
    titles = {
        "cos_qv": "|cos(W_Q, W_V)|: 1 in an MLP",
        "weight": "mean weight on itself",
        "score_linear_in_q": "share of the score linear in q: 1 in an MLP",
    }
    for row, task in zip(panels, ("text", "addition"), strict=True):
        for panel, (column, title) in zip(row, titles.items(), strict=True):
            for arm in ("keyless", "bias token", "set free", "persistent"):
                of_arm = heads[(heads["task"] == task) & (heads["arm"] == arm)]
                bins = [i / 25 for i in range(26)]
                weights = [1 / len(of_arm)] * len(of_arm)
                panel.hist(
                    of_arm[column],
                    bins=bins,
                    weights=weights,
                    histtype="step",
                    color=COLOURS[arm],
                    label=arm,
                    linewidth=1.5,
                )
            panel.grid(alpha=0.3)
            if task == "text":
                panel.set_title(title, fontsize="medium")
        row[0].set_ylabel(f"{task}: share of heads")
    panels[0][1].legend(fontsize="small")
    return picture


def shown(frame: pd.DataFrame) -> str:
    """Return a Markdown table with numbers to three digits and – for missing values."""
    return table(frame).replace("| nan |", "| – |").replace("| nan |", "| – |")


def page(frames: Mapping[str, pd.DataFrame], about: Mapping[str, Any], flag: str) -> str:
    """Return the whole page in Markdown."""
    lines = [
        f"{number}. {'As predicted' if holds else 'Not as predicted'}: {evidence}."
        for number, (holds, evidence) in enumerate(verdicts(frames), start=2)
    ]
    tables = {
        f"{name}_{task}": shown(made)
        for task in ("text", "addition")
        for name, made in {
            "finals": finals(frames[""], task),
            "became": became(frames["become"], task),
            "costs": costs(frames["cuts"], task).reset_index(),
            "sizes": frames["sizes"].query(f"task == '{task}'").drop(columns="task"),
            "search": searched(frames["search"], task),
        }.items()
    }
    spent = frames[""].groupby(["task", "arm", "seed"])["seconds"].last().sum()
    settings = about["study"] | {
        "summary": summary(frames),
        "machine": about["machine"],
        "shipped": json.loads(METRICS.read_text("utf-8"))["loss"],
        "fell": _fell(frames[""]),
        "minutes": (spent + frames["search"]["seconds"].sum()) / 60,
    }
    return PAGE.format(
        verdicts="\n".join(lines),
        flag=flag,
        SOLVED=SOLVED,
        LOST=LOST,
        NEAR=NEAR,
        **tables,
        **settings,
    )


def searched(search: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return the losses by learning rate, with the chosen rate in bold."""
    of_task = search[search["task"] == task]
    marked = [
        f"**{loss:.4g}**" if chosen else f"{loss:.4g}"
        for loss, chosen in zip(of_task["loss"], of_task["chosen"], strict=True)
    ]
    wide = of_task.assign(loss=marked).pivot(index="arm", columns="lr", values="loss")
    return wide.loc[of_task["arm"].unique()].reset_index()


PAGE = """# Attention-only transformers, trained from scratch

Are transformers of attention heads alone, neurons among them as heads of width 1, as good to train
as those with MLPs? The paper leaves that open (section 5). The arms, and what was predicted before
the run, are at the top of `analyses/studies/train_attention_only.py`;
`analyses/studies/attention_only_models.py`
has the heads' formulas. Predictions, by their numbers there:

1. As predicted: the theorem's form, trained, is the MLP, to rounding. A test trains both in float64
   on both tasks, and shows that one as an MLP, exposed by this package.
{verdicts}

![Loss against compute](train_attention_only.svg)

"keyless", "bias token", "set free" and "persistent" have the parameters and flops of "mlp", and
fewer heads. Bands go from the lowest to the highest of the seeds.

Read together: at equal parameters and flops, three seeds of text do not tell any form of
neuron-head from the MLP, this early in training; nor do they an MLP of twice the size, and only one
of an eighth is told apart. On addition the MLP generalises first in every seed, all forms at the
highest rate that was tried. Solved there and lost again, below {LOST:.0%} of the other pairs at the
end: {fell}.
Trained heads are no MLP neurons, but gated units with W_Q and W_V apart; those that start as the
MLP's leave it. Those with keys use them. The bias token's value hardly matters on text, and does on
addition; that of persistent vectors hardly matters on either.

## In short

{summary}

Losses are medians of seeds, with the lowest and the highest; "than the MLP's" compares seed with
seed.

## How each arm ends

Text (Small English, {text[n_layers]} layers, d_model {text[d_model]}, {text[steps]} steps of
{text[rows]} texts), loss in nats a token:

{finals_text}

Addition modulo {addition[modulus]} ({addition[steps]} epochs, {addition[train_fraction]} of the
pairs trained on), with the epoch at which {SOLVED:.0%} of the other pairs are right:

{finals_addition}

## What the arms have

Of a layer's MLP or neuron-heads; flops of matrix products for a token, forward. What is needed is
the product of x with each vector that reads, and what is written. The dense form also has every
token score every token of the longest text of a batch and the bias token, and masks all but two.

{sizes_text}

{sizes_addition}

## What the neuron-heads become

Medians over heads, and over seeds: at the start, as they were drawn, and at the end. `cos_qv` and
`cos_qk`: |cos| of W_Q with W_V and W_K. `weight`: the mean weight on the token itself; the rest is
on the bias token. `saturated`: the share of tokens where that is below 0.05 or above 0.95.
`score_linear_in_q`: of the variance of the score, the share that is linear in q, as in the theorem.
`linear_in_v`, `of_v`, `of_q`: of the variance of the output, the share that is linear in v, a
function of v alone, and of q alone; an MLP's neuron is a function of either. `dead`: the share of
heads with less than 0.01 of the mean strength of their layer.

Text:

{became_text}

Addition:

{became_addition}

![Heads of seed 0](train_attention_only_heads.svg)

## What matters to them

What is added to the loss when a part of every head is left out: each key is put at its mean over
tokens; the bias token's value is 0; the gate is put at its mean, which leaves a linear map.

Text:

{costs_text}

Addition:

{costs_addition}

## Learning rates

Each arm tries the same rates on a seed of its own, {text[search_steps]} steps of text and
{addition[search_steps]} epochs of addition; the median loss of the last quarter decides.

{search_text}

{search_addition}

On addition all take the highest of the rates, so that a higher one may be better for any.

## Into this package

Models of the theorem's form, and the MLPs that they are, come in as they are: `in_package` of
`attention_only_models.py` gives the GPT-2 or HookedTransformer, and `expose_neuron_heads` its
heads. The others do not: neuron-heads of this package are those of MLPs, with the value q and a
key that does not depend on the token. What these heads compute is no MLP of any model that
TransformerLens has: σ(q) v is a gated unit whose gate is not its activation's, and σ(q (k - key_b))
has a product of two tokens' projections within the gate.

## What limits this

Small models and short runs: on text the loss still falls fast at the end (the model that ships
gets to {shipped:.2f} on such texts), and "mlp, an eighth" says how little of it depends on neurons
by then. {n_seeds} seeds, one optimizer, one scale of what is drawn, no search of weight decay.
A longer run, of 2400 steps of text, was begun and broken off for time; nothing here is of it.
The bias token is the same row in all layers: by Definition 1 heads would write to its row as well.
Flops are not time: see `bench_training_step.md`. Tokens of text include the padding of shorter
texts in what is measured of heads, not in losses.

Made by `python -m analyses.studies.train_attention_only{flag}` on {machine}; all runs, those of
the search
too, took {minutes:.0f} minutes of processor time.
"""
