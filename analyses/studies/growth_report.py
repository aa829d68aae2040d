"""Write the page and figures of the growth study."""

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analyses.studies.growth_measures import KEY, TUNED
from analyses.tools.benching import table
from analyses.tools.study_files import wrapped

__all__ = ["curves_figure", "neurons_figure", "page"]

ARMS = ("small", "early", "late", "full")
SOLVED = 0.99


def finals(curves: pd.DataFrame) -> pd.DataFrame:
    """Return a row per arm: final results and the cost to solve the task, as medians over seeds."""
    rows = []
    for arm in dict.fromkeys(curves["arm"]):
        ends, costs, epochs = [], [], []
        for _, curve in curves[curves["arm"] == arm].groupby("seed"):
            ends.append(curve.iloc[-1])
            solved = curve[curve["test_accuracy"] >= SOLVED]
            if len(solved):
                costs.append(solved["flops"].iloc[0] / 1e9)
                epochs.append(solved["epoch"].iloc[0])
        end = pd.DataFrame(ends)
        loss = end["test_loss"]
        rows.append(
            {
                "arm": arm,
                "Gflop": end["flops"].median() / 1e9,
                "test loss": loss.median(),
                "lowest": loss.min(),
                "highest": loss.max(),
                "test accuracy": end["test_accuracy"].median(),
                "seeds that solve it": f"{len(costs)} of {len(end)}",
                "Gflop until then": pd.Series(costs, dtype=float).median(),
                "epochs until then": f"{statistics.median(epochs):.0f}" if epochs else "–",
            }
        )
    return pd.DataFrame(rows)


def costs(curves: pd.DataFrame, arm: Any) -> list[tuple[Any, float]]:
    """Return the Gflop that each seed needed to solve the task, for seeds that solve it."""
    solved = curves[(curves["arm"] == arm) & (curves["test_accuracy"] >= SOLVED)]
    return list((solved.groupby("seed")["flops"].min() / 1e9).items())


def at_equal_compute(curves: pd.DataFrame, column: str = "test_loss") -> pd.DataFrame:
    """Return medians over seeds at each arm's total compute: a row per budget, columns by arm."""
    curves = curves[curves["arm"].isin(ARMS)]
    budgets = {arm: of_arm["flops"].max() for arm, of_arm in curves.groupby("arm")}
    rows = []
    for arm in sorted(budgets, key=lambda arm: budgets[arm]):
        row: dict[str, Any] = {"all that it takes": arm, "Gflop": budgets[arm] / 1e9}
        for rival in ARMS:
            within = curves[(curves["arm"] == rival) & (curves["flops"] <= budgets[arm])]
            value = within.groupby("seed")[column].last().median()
            row[rival] = value if budgets[rival] >= budgets[arm] else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def keys(frequencies: pd.DataFrame) -> pd.DataFrame:
    """Return key frequencies by arm, seed and time."""
    key = frequencies[frequencies["share"] >= KEY]
    lists = key.groupby(["arm", "seed", "when"], sort=False)["frequency"].agg(
        lambda ks: " ".join(map(str, sorted(ks)))
    )
    wide = lists.unstack("when").fillna("")
    return wide[[w for w in ("before", "after") if w in wide]].reset_index()


def overlaps(circuits: pd.DataFrame) -> pd.DataFrame:
    """Return the rows about common nodes and value edges, without columns about new parts."""
    columns = ["arm", "seed", "when", "pair", "what", "original", "grown"]
    columns += ["kept", "lost", "gained", "jaccard", "jaccard_low", "jaccard_high"]
    return circuits.loc[circuits["what"].isin(["nodes", "value edges"]), columns]


def curves_figure(curves: pd.DataFrame) -> Figure:
    """Draw test loss and accuracy against flops: a line per seed, dots at growth steps."""
    picture = Figure(figsize=(10, 4.2), layout="constrained")
    panels = picture.subplots(1, 2)
    for panel, column, label in zip(
        panels,
        ("test_loss", "test_accuracy"),
        ("loss on pairs not trained on", "accuracy on them"),
        strict=True,
    ):
        for number, arm in enumerate(ARMS):
            for seed, curve in curves[curves["arm"] == arm].groupby("seed"):
                curve = curve[curve["flops"] > 0]
                x = curve["flops"] / 1e9
                label_once = arm if seed == 0 else None
                panel.plot(x, curve[column], color=f"C{number}", lw=1, alpha=0.8, label=label_once)
                grew = curve[["d_mlp", "n_heads", "d_model"]].diff().abs().sum(axis=1) > 0
                panel.plot(x[grew], curve.loc[grew, column], "o", ms=4, color=f"C{number}")
        panel.set_xscale("log")
        panel.set_xlabel("Gflop of matrix products")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].legend(title="dots: it grew", fontsize="small")
    return picture


def neurons_figure(neurons: pd.DataFrame) -> Figure:
    """Draw each neuron-head's share of the margin by the frequency it is tuned to, old and new."""
    shown = neurons[neurons["arm"].isin(["early", "late"]) & (neurons["when"] == "after")]
    cases = list(shown.groupby(["arm", "seed"]))
    picture = Figure(figsize=(3.6 * max(1, len(cases) // 2), 5.6), layout="constrained")
    panels = picture.subplots(2, -(-len(cases) // 2), sharey=True, squeeze=False).flat
    for panel, ((arm, seed), frame) in zip(panels, cases, strict=False):
        places = {k: i for i, k in enumerate(sorted(frame["frequency"].unique()))}
        for is_new, label in ((False, "old"), (True, "new")):
            sums = frame[frame["is_new"] == is_new].groupby("frequency")["share"].sum()
            places_of_bars = [
                places[frequency] + (0.2 if is_new else -0.2) for frequency in sums.index
            ]
            panel.bar(places_of_bars, sums, width=0.4, label=label)
        panel.set_xticks(list(places.values()), [str(frequency or "–") for frequency in places])
        panel.set_title(f"{arm}, seed {seed}", fontsize="medium")
        panel.set_xlabel("frequency (–: tuned to none)", fontsize="small")
    panels = picture.axes
    panels[0].legend(title="neuron-heads", fontsize="small")
    panels[0].set_ylabel("share of the margin")
    return picture


def findings(frames: Mapping[str, pd.DataFrame]) -> str:
    """Return sentences whose numbers come from the tables."""
    ends = finals(frames["curves"]).set_index("arm")
    cost = ends["Gflop until then"]
    lines = [
        f"{arm}: {row['seeds that solve it']} seeds solve the task"
        + (
            ""
            if pd.isna(cost[arm])
            else f", after {cost[arm]:.3g} Gflop (the median over these seeds; "
            + ", ".join(f"seed {seed} {cost:.3g}" for seed, cost in costs(frames["curves"], arm))
            + ")"
        )
        for arm, row in ends.iterrows()
    ]
    joined, circuits = frames["joined"], frames["circuits"]
    shares = joined["share_new_on_old_keys"]
    old = joined["share_old_neurons"]
    lines.append(
        f"{joined['tuned_to_old_keys'].sum()} of {joined['new_neurons'].sum()} new neuron-heads "
        "are tuned to key frequencies of the model before growth, and "
        f"{joined['tuned_to_others'].sum()} to other frequencies; the former hold "
        f"{shares.min():.0%} to {shares.max():.0%} of the margin, and old neuron-heads "
        f"{old.min():.0%} to {old.max():.0%}"
    )
    nodes = circuits[(circuits["what"] == "nodes") & (circuits["when"] == "at the end")]
    overlap = nodes.groupby("pair")["jaccard"].agg(["min", "max"])
    of_old = nodes.loc[nodes["pair"] == "grown", "kept"].sum()
    of = nodes.loc[nodes["pair"] == "grown", "original"].sum()
    lines.append(
        f"{of_old:.0f} of {of:.0f} nodes of the old circuits are in the new ones; the Jaccard "
        f"index is {overlap['min']['grown']:.2f} to {overlap['max']['grown']:.2f}, and for two "
        f"trainings after the same growth {overlap['min']['again']:.2f} to "
        f"{overlap['max']['again']:.2f}"
    )
    return "\n".join(f"- {line}." for line in lines)


def shown(frame: pd.DataFrame) -> str:
    """Return a Markdown table with numbers to three digits and – for missing values."""
    return table(frame).replace("| nan |", "| – |").replace("| nan |", "| – |")


def page(frames: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> str:
    """Return the whole page in Markdown; all numbers come from the tables and settings."""
    study = settings["study"]
    cpu = ", ".join(f"{arm} {s:.0f}" for arm, s in settings["cpu_seconds"].items())
    words = {name: _sizes(study[name]) for name in ("small", "full")}
    words |= {name: ", ".join(map(str, study[name])) for name in ("early", "late")}
    text = PAGE.format(
        **study | words,
        n=study["n_seeds"],
        flag=" --smoke" if settings["smoke"] else "",
        machine=settings["machine"],
        load=settings["load_average"][0],
        wall=sum(settings["wall_seconds"].values()),
        cpu=cpu,
        solved=SOLVED,
        KEY=KEY,
        TUNED=TUNED,
        findings=findings(frames),
        finals=shown(finals(frames["curves"])),
        losses=shown(at_equal_compute(frames["curves"])),
        accuracies=shown(at_equal_compute(frames["curves"], "test_accuracy")),
        keys=shown(keys(frames["frequencies"])),
        joined=shown(frames["joined"]),
        circuits=shown(overlaps(frames["circuits"])),
    )
    return wrapped(text)


def _sizes(sizes: Mapping[str, int]) -> str:
    return "width {d_model}, {n_heads} heads and {d_mlp} neurons".format(**sizes)


PAGE = """# Does it pay to grow? Addition modulo {modulus}

The small model has {small}, and the full-size model {full}. Training takes
{epochs} epochs of AdamW (lr {lr}, weight decay 1) on {train_fraction} of the pairs, which are the
same for every arm of a seed; there are {n} seeds. "early" grows at epochs {early}, and "late" at
epochs {late}: in neurons, then in heads, then in width, together with AdamW's state. "late again"
is "late" with different random numbers in the new entries.

Compute is the flops of matrix products, forward and backward, counted by torch for one step of
every size. `growth_measures.py` defines all measures.

Made by `python -m analyses.studies.growth_modular_addition{flag}` on {machine}.
Training all arms took {wall:.0f} s, at a load average of {load:.1f}; in seconds of processor time
over all seeds: {cpu}.

![Loss and accuracy against compute](growth_modular_addition.svg)

## What the tables show

{findings}

## How each arm ends

Medians over seeds. A seed solves the task when its accuracy on pairs not trained on first reaches
{solved}; its cost until then is the median over the seeds that solve it.

{finals}

## At equal compute

The loss on pairs not trained on, at the total compute of each arm:

{losses}

The accuracy on them:

{accuracies}

## Key frequencies, before and after

Frequencies with a share of at least {KEY} of the margin between the answer and other offsets.

{keys}

## What the new neuron-heads do

A neuron-head is tuned to a frequency that explains at least {TUNED} of the variance of its self
weight. Old keys are the key frequencies before growth. Shares are shares of the margin; together
with the direct outputs of attention and the embedding, they add up to 1.

![Neuron-heads by frequency](growth_modular_addition_neurons.svg)

{joined}

## The circuit before growth and after

The table shows what circuits of equal faithfulness have in common, by `compare`, on {n_compared}
pairs. The pair "again" is a null: "late" with "late again".

{circuits}
"""
