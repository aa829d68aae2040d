"""Write the page and figure of the study of all-attention layers, only from its tables."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from analyses.studies.all_attention_measures import summary_of
from analyses.tools import study_files
from analyses.tools.benching import markdown, table
from analyses.tools.study_files import verdict

__all__ = ["figure", "page"]

Frames: TypeAlias = Mapping[str, pd.DataFrame]
COLOURS = {
    "mlp": "black",
    "mlp, an eighth": "grey",
    "all-attention": "C4",
    "neither": "C3",
}
NEAR, GAP, HALF, FEW, COSTLY, CHEAP, RANKED = 0.02, 0.03, 0.5, 48, 0.5, 0.001, 0.8
EXACT = 1e-9


def said(values: "pd.Series[float]", digits: int = 3, *, percent: bool = False) -> str:
    """Return the mean over seeds with Student's interval of 95 %, in words."""
    return study_files.said(values, f".{digits}{'%' if percent else 'f'}")


def ends(frames: Frames) -> pd.DataFrame:
    """Return the last losses, [seed, arm]."""
    last = frames[""].groupby(["seed", "arm"], sort=False)["loss"].last()
    return last.unstack("arm")


def above(frames: Frames, arm: str) -> "pd.Series[float]":
    """Return by seed how far an arm's loss is above the MLP's, as a fraction."""
    losses = ends(frames)
    return losses[arm] / losses["mlp"] - 1


def closed(frames: Frames, arm: str) -> "pd.Series[float]":
    """Return by seed which part of the gap between "neither" and "mlp" an arm closes."""
    losses = ends(frames)
    return (losses["neither"] - losses[arm]) / (losses["neither"] - losses["mlp"])


def used(frames: Frames, column: str, arm: str = "all-attention") -> pd.DataFrame:
    """Return a column of `usage` as means over heads, [seed, layer]."""
    rows = frames["usage"].query("arm == @arm")
    return rows.groupby(["seed", "layer"])[column].mean().unstack("layer")


def layer_cost(frames: Frames, kind: str, arm: str = "all-attention") -> pd.DataFrame:
    """Return the cost of leaving out all vectors, [seed, layer or "all"]."""
    rows = frames["layers"].query("arm == @arm").astype({"layer": str})
    return rows.pivot(index="seed", columns="layer", values=kind)


def singles(frames: Frames, arm: str = "all-attention") -> pd.DataFrame:
    """Return `summary_of` single costs, a row per seed."""
    rows = frames["single"].query("arm == @arm").dropna(axis=1, how="all")
    return pd.DataFrame({seed: summary_of(x) for seed, x in rows.groupby("seed")}).T


def verdicts(frames: Frames) -> list[str]:
    """Return a line for each prediction."""
    near, gap, share = (
        above(frames, "all-attention"),
        above(frames, "neither"),
        closed(frames, "all-attention"),
    )
    weight, effective, explained = (used(frames, x) for x in ("weight", "effective", "explained"))
    cost, single = layer_cost(frames, "deleted"), singles(frames)
    layers = [name for name in cost if name != "all"]
    first, last = weight.columns[0], weight.columns[-1]
    return [
        verdict(
            '1. "all-attention" ends within 2 % of the loss of "mlp".',
            abs(near.mean()) < NEAR,
            f"{said(near, 1, percent=True)} above it",
        ),
        verdict(
            '2. "neither" ends at least 3 % above "mlp", and "all-attention" closes at least half '
            "of this gap.",
            gap.mean() >= GAP and share.mean() >= HALF,
            f"{said(gap, 1, percent=True)} above; {said(share, 2)} of the gap is closed",
        ),
        verdict(
            "3. Heads give more than half of their weight to persistent vectors in both layers, "
            "and more in the second.",
            bool((weight.mean() > HALF).all() and weight[last].mean() > weight[first].mean()),
            "; ".join(f"layer {layer}: {said(weight[layer], 2)}" for layer in weight),
        ),
        verdict(
            "4. The effective number of vectors at a token is less than a quarter of N in both "
            "layers.",
            bool((effective.mean() < FEW).all()),
            "; ".join(f"layer {layer}: {said(effective[layer], 1)}" for layer in effective),
        ),
        verdict(
            "5. Deleting all vectors of a layer costs more than 0.5 nats in each layer, and "
            "deleting one less than 0.001 nats in the median.",
            bool((cost[layers].mean() > COSTLY).all() and single["median"].mean() < CHEAP),
            "; ".join(f"layer {layer}: {said(cost[layer], 2)}" for layer in layers)
            + f"; one: {said(single['median'], 6)}",
        ),
        verdict(
            "6. Costs of zeroed and of deleted vectors have the same order (ρ > .8).",
            single["order"].mean() > RANKED,
            f"ρ = {said(single['order'], 2)}",
        ),
        verdict(
            "7. A vector's own score explains more than half of the variance of log p_n, in the "
            "median over vectors.",
            bool((explained.mean() > HALF).all()),
            "; ".join(f"layer {layer}: {said(explained[layer], 2)}" for layer in explained),
        ),
        verdict(
            "8. The strongest tenth of the vectors has more than half of the positive costs.",
            single["tenth"].mean() > HALF,
            f'{said(single["tenth"], 2)}; of neurons of "mlp": '
            f"{said(singles(frames, 'mlp')['tenth'], 2)}",
        ),
    ]


def losses_table(frames: Frames) -> str:
    """Return a row for each arm: its loss, and what it closes of the gap."""
    losses, rows = ends(frames), []
    rates = (
        frames["search"]
        .loc[frames["search"].groupby("arm")["loss"].idxmin()]
        .set_index("arm")["lr"]
    )
    for arm in losses:
        rows.append(
            [
                arm,
                f"{rates[arm]:g}",
                said(losses[arm]),
                said(above(frames, arm), 1, percent=True) if arm != "mlp" else "–",
                said(closed(frames, arm), 2) if arm not in ("mlp", "neither") else "–",
            ]
        )
    return markdown(["arm", "rate", "loss, nats", "above mlp", "part of the gap closed"], rows)


def usage_table(frames: Frames) -> str:
    """Return a row for each arm with persistent vectors, and layer."""
    rows = []
    for arm in frames["usage"]["arm"].unique():
        parts = {name: used(frames, name, arm) for name in ("weight", "effective", "explained")}
        costs = {kind: layer_cost(frames, kind, arm) for kind in ("deleted", "zeroed")}
        for layer in parts["weight"]:
            rows.append(
                [
                    arm,
                    layer,
                    *(
                        said(parts[name][layer], digits)
                        for name, digits in (("weight", 2), ("effective", 1), ("explained", 2))
                    ),
                    *(said(costs[kind][str(layer)], 2) for kind in ("deleted", "zeroed")),
                ]
            )
    header = [
        "arm",
        "layer",
        "weight on vectors",
        "effective number",
        "explained by a_n",
        "all deleted, nats",
        "all zeroed, nats",
    ]
    return markdown(header, rows)


def singles_table(frames: Frames) -> str:
    """Return a row for each arm whose neurons or vectors were left out one by one."""
    rows = []
    for arm in ("mlp", "all-attention"):
        summary = singles(frames, arm)
        rows.append([arm, said(summary["tenth"], 2)])
        for column, digits in (("median", 6), ("order", 2)):
            rows[-1].append(said(summary[column], digits) if column in summary else "–")
    return markdown(
        [
            "arm",
            "share of the strongest tenth",
            "median cost of deleting one, nats",
            "ρ, zeroed and deleted",
        ],
        rows,
    )


def exact_table(frame: pd.DataFrame) -> str:
    """Return a table of differences next to those of controls."""
    return table(frame.rename(columns={"of control": "difference of the control"}))


def finding(frames: Frames) -> str:
    """Return the sentence about what persistent vectors add to the trained model."""
    share = closed(frames, "all-attention")
    if share.mean() > 0:
        return f"So persistent vectors close {said(share, 2)} of the gap."
    deleted = layer_cost(frames, "deleted")
    costs = " and ".join(f"{deleted[layer].mean():.2f}" for layer in deleted if layer != "all")
    losses = ends(frames)
    more = losses["all-attention"] / losses["neither"] - 1
    return (
        "So at this length of training, the model with persistent vectors is worse than the one "
        f"without them, by {said(more, 1, percent=True)}. Nevertheless, the trained model uses its "
        f"vectors: heads give them {used(frames, 'weight').mean(axis=1).mean():.0%} of their "
        "weight, and the loss rises if all vectors of one layer are deleted (first and second "
        f"layer: by {costs} nats)."
    )


def pages_numbers(frames: Frames) -> dict[str, str]:
    """Return the figures in the page's sentences."""
    tools, memory = frames["tools"], frames["memory"]
    trained = memory[memory["model"].str.startswith("trained")].set_index("c")
    exact = pd.concat([frames["remark"], frames["vectors"]])
    return {
        "finding": finding(frames),
        "n_tools": str(tools["tool"].nunique()),
        "worst_tool": f"{tools['difference'].max():.0e}",
        "least_control": f"{tools['control'].min():.1g}",
        "worst_exact": f"{exact['difference'].max():.0e}",
        "least_broken": f"{exact['of control'].min():.1g}",
        "worst_memory": f"{trained['corrected'].max():.0e}",
        "uncorrected": f"{trained['uncorrected'].loc[1000]:.0e}",
        "mlp": said(ends(frames)["mlp"]),
        "loss": said(ends(frames)["all-attention"]),
        "above": said(above(frames, "all-attention"), 1, percent=True),
        "neither": said(above(frames, "neither"), 1, percent=True),
        "closed": said(closed(frames, "all-attention"), 2),
        "rank": " and ".join(map(str, sorted(set(frames["ranks"]["read"])))),
        "mlp_rank": " and ".join(map(str, sorted(set(frames["ranks"]["read "])))),
    }


def page(frames: Frames, about: Mapping[str, Any], flag: str) -> str:
    """Return the page in Markdown."""
    numbers, text = pages_numbers(frames), about["study"]["text"]
    spent = (
        frames[""].groupby(["arm", "seed"])["seconds"].last().sum()
        + frames["search"]["seconds"].sum()
    )
    opening = [fill(part.format(**numbers), 100) for part in OPENING.strip().split("\n\n")]
    tables = {
        "same": markdown(["", "persistent vectors", "neurons", "the same?"], SAME),
        "losses": losses_table(frames),
        "usage": usage_table(frames),
        "singles": singles_table(frames),
        "promoted": table(frames["promoted"]),
        "remark": exact_table(frames["remark"]),
        "gates": table(frames["gates"]),
        "vectors": exact_table(frames["vectors"]),
        "ranks": table(frames["ranks"]),
        "memory": table(frames["memory"]),
        "tools": exact_table(frames["tools"]),
        "every": table(frames["every"]),
        "refusals": table(frames["refusals"]),
    }
    return PAGE.format(
        opening="\n\n".join(opening),
        verdicts="\n".join(verdicts(frames)),
        flag=flag,
        machine=about["machine"],
        minutes=f"{spent / 60:.0f}",
        n_seeds=frames[""]["seed"].nunique(),
        steps=text["steps"],
        rows=text["rows"],
        width=text["d_model"],
        heads=text["n_heads"],
        d_mlp=text["d_mlp"],
        per_layer=about["study"]["per_layer"],
        period=about["study"]["every"],
        task=about["study"]["task"],
        **tables,
    )


def figure(frames: Frames) -> Figure:
    """Draw losses by step (mean and range), and the error of memory tokens by c."""
    picture = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    for arm, rows in frames[""].groupby("arm", sort=False):
        by = rows[rows["step"] > 0].groupby("step")["loss"].agg(["mean", "min", "max"])
        style = "--" if "," in str(arm) else "-"
        left.plot(by.index, by["mean"], color=COLOURS[str(arm)], linestyle=style, label=arm)
        left.fill_between(by.index, by["min"], by["max"], color=COLOURS[str(arm)], alpha=0.15, lw=0)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="Small English")
    left.legend(fontsize="small")
    for number, (name, rows) in enumerate(frames["memory"].groupby("model", sort=False)):
        right.plot(rows["c"], rows["uncorrected"], f"C{number}--")
        right.plot(rows["c"], rows["corrected"], f"C{number}-", label=name)
    right.set(
        xscale="log",
        yscale="log",
        xlabel="size c of memory tokens",
        title="error of logits (dashed: uncorrected)",
    )
    right.legend(fontsize="small")
    for panel in (left, right):
        panel.grid(alpha=0.3)
    return picture


SAME = (
    (
        "a part's output",
        "weight p_n times a constant vector value_n W_O",
        "activation times a constant vector W_out",
        "exact",
    ),
    (
        "the layer's output",
        "the sum over vectors, plus the text part",
        "the sum over neurons",
        "exact",
    ),
    (
        "what it reads",
        "a_n is linear in the token's input: W_Q key_n / √d_head",
        "q is linear: W_in",
        "exact",
    ),
    (
        "the gate",
        "exp(a_n - log Z); given all other scores, σ(a_n - log Z of the rest)",
        "σ(q) for SiLU, with a fixed 0 in place of log Z",
        "exact as a formula; Z is shared",
    ),
    (
        "what sets the gate",
        "all vectors of the head, and all tokens that the head sees",
        "the own token alone",
        "no: one softmax",
    ),
    (
        "the value",
        "constant; a patch of it does nothing",
        "q; the activation is σ(q) q, and can be negative",
        "no",
    ),
    (
        "the sum of gates",
        "at most 1 in each head",
        "up to the number of neurons",
        "no",
    ),
    (
        "leaving one out",
        "zeroing keeps the other weights; deleting multiplies them by 1 / (1 - p_n)",
        "one meaning",
        "two meanings, which differ by this factor",
    ),
    (
        "directions",
        "those of a head span at most d_head dimensions",
        "up to d_model",
        "no",
    ),
    (
        "identified",
        "keys only up to a shift that text keys share; values only up to W_O",
        "up to a permutation, for SiLU",
        "no",
    ),
    (
        "an MLP as vectors",
        "one vector, key -1, value 0, shared by all heads",
        "SiLU and its generalizations",
        "exact with a mask to the own token; not without",
    ),
    (
        "other gates",
        "the score -logit p(q) is not linear: several heads per neuron",
        "gelu, relu",
        "bounded",
    ),
)
"""Rows of the table of what is the same for persistent vectors and neurons."""

OPENING = """
**Question.** Sukhbaatar et al. (2019) replace MLPs by *persistent vectors*: N learned keys and
values in each ordinary head. Remark 3 of the paper says that neuron-heads can be written in this
architecture. Is the correspondence exact in both directions, can this package read such models,
and what do persistent vectors do in a trained one?

**Answer.** The correspondence is exact in both directions, but only under conditions. A SiLU MLP
is an all-attention layer with one persistent vector for all heads, if each token sees only itself;
the architecture does not have this mask.

In the other direction, a model with persistent vectors is exactly an ordinary attention-only
transformer with N memory tokens in front of the text. The memory rows do not depend on the text,
so the construction corrects for what heads write to them. Then the largest error of the trained
model's logits is {worst_memory} (relative, in float64), for every size of the memory tokens;
without the correction, it is {uncorrected} at c = 1000.

This package can read such models, and a persistent vector can be a head of its own. We checked
{n_tools} kinds of calls of the package's tools. They agree with direct computation to {worst_tool};
their controls, which should differ, do so by {least_control} or more.

Persistent vectors are like neurons in part. Each has an input direction, an output direction and an
exponential gate, and its weight is a sigmoid if the other scores are fixed. But all vectors of a
head share one denominator with the text, and they read and write within {rank} dimensions (neurons:
{mlp_rank}).

Trained on Small English, the all-attention model's loss is {above} above that of the MLP with as
many parameters ({loss} and {mlp} nats); a model with neither of them is {neither} above it.
{finding}

**Caution.** The models are small (two layers, width 48) and trained for a short time. With
four times as many steps, the gap is about half as large in
[another study](train_attention_only.md). Persistent vectors may need still longer training, another
scale of their parameters, or more and wider heads. One optimizer, one size and three learning rates
were tried, and no long texts. Positions are absolute: with rotary or relative positions, memory
tokens cannot replace persistent vectors.
"""

PAGE = """# All-attention layers: persistent vectors and neurons

{opening}

`all_attention_models.py` has the constructions with their derivations,
`all_attention_identities.py` and `all_attention_tools.py` the checks, and
`attention_only_models.py` the trained layer. Means are over {n_seeds} seeds, with Student's 95 %
interval over seeds.

![Losses, and the error of memory tokens](all_attention.svg)

## Which parts of the correspondence are exact

{same}

So a persistent vector is more like a feature with topk gates than like a neuron: gates are
computed together, and a patch of one weight keeps the others. The same convention holds here.

## MLP -> all-attention (Remark 3)

The trained "mlp" model of seed 0, in float64. Each neuron is a head of width 1 with the mask of
the paper. Differences are relative to the largest number. The control breaks the property.

{remark}

For other activations, the persistent vector's score must be -logit p(q). Scores of an
all-attention layer are linear in q, so they need several heads per neuron (and an offset, which a
query coordinate with a constant gives). `exact score`: the error with the exact score, for |q| ≤
12. Bounds hold for all real q; that of relu is for a slope of several hundred.

{gates}

## All-attention -> attention-only, with memory tokens

The error of logits, relative to the largest logit, by the size c of memory tokens. `corrected`:
what heads write to memory rows is taken into account. `uncorrected`: memory rows are taken as
static. `written`: the largest share of a memory row, before the last layer, that heads have
written. So rows are not static; they are constants. Causal heads cannot keep
them static: the first memory row sees only itself, so the heads add Σ value_1 W_O to it. With
RMSNorm, TransformerLens 4 computes norms in float32, which limits the error there; tests check
float64 with 3.9.

{memory}

LayerNorm is exact too: all writes are centred, which does not change a model with LayerNorm, and
each memory token has +c in a coordinate of its own and -c in a common one, so its mean is zero.

## Persistent vectors as neurons

The trained "all-attention" model of seed 0, on one text, in float64.

{vectors}

How many dimensions the directions of vectors of a head, and of all neurons of a layer, span:

{ranks}

## What each tool says

Model and prompts: "all-attention", seed 0, and a pair of the task "{task}". The {per_layer}
vectors of each layer with the largest first-order effects are heads of their own (their number is
limited only by memory: each computes its own pattern). Each number of a tool is compared with
direct computation of the all-attention model, without this package. Differences are relative to
the largest number of direct computation or of the control.

{tools}

With all vectors of the model as heads, in float32: the largest difference of logits from direct
computation, and of first-order effects of zeroing each vector (`attribution` with gradients),
relative to the largest.

{every}

Three things to know. Memory tokens count as tokens, so tools that read a corpus need `context=`,
and their examples at memory positions are no text. A vector's head attends to all rows like its
original head, but all other values are zero. A patch of "pattern" changes this copy only.

Tools for neurons do not take persistent vectors, because a neuron-head of this package has a
softmax of its own, with two rows, and the value q:

{refusals}

`convert` takes no bridge, and a `HookedTransformer` of this form gains nothing from it: its
neurons are placeholders with weights of zero, because the package asks for MLPs. `compare` and
transcoders are for MLPs and were not tried. Pages and figures (`viz`) show these heads as
attention heads.

## Trained on Small English

{steps} steps of {rows} texts; two layers, width {width}, {heads} heads; {d_mlp} neurons a layer,
or as many vectors in each head. The part of the gap closed is that between "neither" and "mlp".

{losses}

`effective number`: the exponential of the entropy of p_n / Σ p_n. `explained by a_n`: the share
of the variance over tokens of log p_n that the own score explains, in the median over vectors.

{usage}

Every {period}th vector or neuron was left out alone. `share of the strongest tenth`: of the summed
positive costs of zeroing; the tenth is chosen on half of the texts, and costs are of the other
half.

{singles}

The vectors of the last layer with the largest mean weight (seed 0): the tokens at which their
weight is largest, and the tokens whose logits they raise most.

{promoted}

## Predictions

They were written before the models were trained, and stand in full in the script.

{verdicts}

Made by `python -m analyses.studies.all_attention{flag}` on {machine}. Training took {minutes}
minutes of processor time. Every figure can be computed again from the tables
`all_attention*.csv`.
"""
