"""Measure how much goes through patterns and how much through values, and what this predicts.

    python -m analyses.studies.patterns_and_values --models-dir MODELS --smollm2 FOLDER

The difference of two runs is split exactly into a part through the patterns of heads and neurons
(gates) and a part through their values (`engine/contrast.py`).
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure

from analyses.studies.attribution_vs_patching import LENGTH, pairs
from analyses.tools.benching import markdown
from analyses.tools.options import Device, ModelsDir, Out, Seed, Smoke, SmolLM2
from analyses.tools.real_models import trained
from analyses.tools.study_files import as_stored, keep, t_interval, verdict, wrapped
from attn_only_lens import circuits, expose_neuron_heads, load, pretrained, tasks
from attn_only_lens import patching as p

Prompts = list[tuple[Any, Any, Any]]
N_NAMES, FEWEST, N_SHUFFLES, FOLDS = 100, 40, 200, 5
SIZES = (20, 40, 80, 160)
GAIN, USEFUL = 0.02, 0.1  # of R²
OUTSIDE = 0.05  # of the shuffles
DIGITS = "%.6g"
NOUNS = ("cabinet", "table", "door", "house", "garden", "window", "car", "box")
PREDICTIONS = """Written before the run:

1. Values carry most: patterns carry less than a third of what neurons carry, and less than a third
   of what attention heads carry. Heads of the first layer act mostly by their patterns.
2. Upstream heads do not split into those that set gates and those that set values: the spread of
   their shares is within that of the shuffled null.
3. The parts predict held-out patches of patterns better than z alone does (ΔR² of .02 or more), but
   not held-out patches of z.
4. Ranking by |pattern| + |value| needs no fewer sites for the same faithfulness.
"""


def subjects(
    models_dir: Path, smollm2: Path | None, device: str, seed: int, *, smoke: bool
) -> Iterator[tuple[str, Any, Prompts]]:
    """Yield models with neuron-heads and pairs of prompts with their metrics."""
    english = expose_neuron_heads(pretrained.small_english(), copy=True).model
    task = tasks.agreement(english.tokenizer, 4 if smoke else 24, structure="relative", seed=seed)
    right, wrong = ([row[0] for row in rows] for rows in task.metric.answers)
    yield (
        "small_english",
        english,
        [
            (clean, corrupted, p.logit_diff(a, b))
            for clean, corrupted, a, b in zip(task.clean, task.corrupted, right, wrong, strict=True)
        ],
    )
    if smoke:
        return
    for name, source, tokens in trained(models_dir, LENGTH, device, smoke=smoke):
        if name in ("words_swiglu_4l", "stories_swiglu_5l"):
            model = expose_neuron_heads(source).model
            some = pairs(model, tokens, 24, seed)
            prompts = [(x.clean, x.corrupted, p.logit_diff(x.correct, x.wrong)) for x in some]
            yield name, model, prompts
    if smollm2 is not None:
        verb = p.logit_diff(" are", " is")
        texts = [(f"The keys to the old {n}", f"The key to the old {n}", verb) for n in NOUNS]
        yield "SmolLM2-135M", expose_neuron_heads(load(smollm2)).model, texts


def split(model: Any, prompts: Prompts) -> pd.DataFrame:
    """Return the parts of all sites for all pairs, as shares of the difference."""
    frames = []
    for number, one in enumerate(prompts):
        sweep = p.attribution(
            model, *one, method="secant", budget=0, split=True, progress=False
        ).to_frame()
        frames.append(sweep.assign(pair=number))
    return pd.concat(frames, ignore_index=True)


def carried(parts: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield sums of |parts| through patterns and through values, by kind of head and layer."""
    for (kind, layer), rows in parts.groupby(["kind", "layer"], observed=True):
        by_pattern, by_value = (rows[c].abs().sum() for c in ("by_pattern", "by_value"))
        row = {"what": "carried", "kind": kind, "layer": layer}
        yield row | {"pattern": by_pattern, "value": by_value}


def splitting(model: Any, prompts: Prompts, seed: int) -> Iterator[dict[str, Any]]:
    """Yield how much heads differ in the share that gates get, and the same for shuffled heads."""
    edges = []
    for clean, corrupted, metric in prompts:
        graph = circuits.attribution_graph(model, clean, metric, corrupted=corrupted, top=150)
        kinds = graph.nodes.set_index("id")["kind"]
        frame = graph.edges
        frame = frame[frame["source"].map(kinds).eq("attention")]
        frame = frame[frame["target"].map(kinds).eq("neuron")]
        wide = frame.pivot_table(
            index=["source", "target"], columns="kind", values="weight", aggfunc="sum"
        )
        edges.append(wide.reindex(columns=["gate", "value"]).fillna(0.0).abs().reset_index())
    table = pd.concat(edges, ignore_index=True)
    table["head"] = table["source"].str.partition("@")[0]
    table = table[table.groupby("target")["head"].transform("nunique") > 1]

    def spread(heads: "pd.Series[str]") -> float:
        sums = table.groupby(heads.to_numpy())[["gate", "value"]].sum()
        return float((sums["gate"] / sums.sum(axis=1)).std())

    generator = np.random.default_rng(seed)
    null = []
    for _ in range(N_SHUFFLES):
        order = table.assign(r=generator.random(len(table))).sort_values(["target", "r"]).index
        by_target = table.sort_values("target", kind="stable").index
        shuffled = pd.Series(table.loc[order, "head"].to_numpy(), index=by_target)
        null.append(spread(shuffled.reindex(table.index)))
    got = spread(table["head"])
    yield {"what": "splitting", "spread": got, "null": float(np.mean(null))} | {
        "above": float(np.mean(np.array(null) < got)),
        "n": int(table["head"].nunique()),
    }


def predicted(model: Any, parts: pd.DataFrame, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yield how well parts on half of the pairs predict patching effects on the other half."""
    n_train = len(prompts) // 2
    train = parts[parts["pair"] < n_train]
    for kind in ("neuron", "attention"):
        columns = ["score", "by_pattern", "by_value"]
        sums = train[train["kind"] == kind].groupby("name", observed=True)[columns].sum() / n_train
        names = sums["score"].abs().nlargest(N_NAMES).index
        if len(names) < FEWEST:  # too few names for a regression with held-out fifths
            continue
        sums = sums.loc[names]
        for part in ("z", "q", "pattern", "value"):
            effects = [
                p.activation_patch(
                    *(model, *one), sites=list(names), part=part, positions="all", progress=False
                )
                for one in prompts[n_train:]
            ]
            frame = pd.DataFrame(
                {i: pd.Series(e.effect.to_numpy(), index=e.frame["name"].astype(str))
                 for i, e in enumerate(effects)}
            )  # fmt: skip
            target = frame.mean(axis=1).reindex(names.astype(str)).to_numpy()
            z = _r2(sums[["score"]].to_numpy(), target)
            both = _r2(sums[["by_pattern", "by_value"]].to_numpy(), target)
            row = {"what": "predicted", "kind": kind, "part": part, "n": len(names)}
            yield row | {"z": z, "parts": both}


def _r2(x: np.ndarray, y: np.ndarray) -> float:
    """Return the R² of a linear regression, predicted on held-out fifths of the names."""
    design, folds = np.column_stack([np.ones(len(x)), x]), np.arange(len(y)) % FOLDS
    guess = np.empty(len(y))
    for fold in range(FOLDS):
        rows = folds != fold
        weights = np.linalg.lstsq(design[rows], y[rows], rcond=None)[0]
        guess[~rows] = design[~rows] @ weights
    return float(1 - ((y - guess) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def ranked(model: Any, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yield the faithfulness of rankings by whole attributions, and by |pattern| + |value|."""
    for number, one in enumerate(prompts[:6]):
        whole = p.attribution(model, *one, method="secant", budget=0, split=True, progress=False)
        frame = whole.to_frame()
        size = frame["by_pattern"].abs() + frame["by_value"].abs()
        span = whole.clean_value - whole.corrupted_value
        value = whole.corrupted_value + span * size
        columns = ["by_pattern", "by_value", "exact"]
        parts = replace(whole, frame=frame.drop(columns=columns).assign(value=value))
        shares = [k * (1 + 1e-9) / len(frame) for k in SIZES if k < len(frame)]
        for name, ranking in (("by the whole", whole), ("by the parts", parts)):
            curve = circuits.faithfulness(model, *one, ranking, shares=shares, n_random=0).frame
            for k, f in zip(curve["n_sites"], curve["faithfulness"], strict=True):
                yield {"what": "ranked", "pair": number, "part": name, "k": k, "f": f}


def main(
    out: Out = Path("out/patterns"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    smollm2: SmolLM2 = None,
    seed: Seed = 0,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the tables."""
    warnings.simplefilter("ignore")
    started, rows = time.perf_counter(), list[dict[str, Any]]()
    for name, model, prompts in subjects(models_dir, smollm2, device, seed, smoke=smoke):
        parts = split(model, prompts)
        measures = (
            carried(parts),
            splitting(model, prompts[:8], seed),
            predicted(model, parts, prompts),
            ranked(model, prompts),
        )
        for measure in measures:
            rows += [{"model": name} | row for row in measure]
            typer.echo(f"{name} {rows[-1]['what']} {time.perf_counter() - started:.0f} s", err=True)
    frames = as_stored({"": pd.DataFrame(rows)}, DIGITS)
    settings = {"seed": seed, "smoke": smoke}
    text = page(frames, settings)
    typer.echo(text)
    keep(__file__, out, text, frames, figure(frames[""]), started=started, **settings)


def page(frames: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> str:
    """Return the page; all numbers come from the table."""
    frame = frames[""]
    text = PAGE.format(
        predictions=PREDICTIONS,
        gain=GAIN,
        useful=USEFUL,
        flag=" --smoke" if settings["smoke"] else "",
        **in_short(frame),
        **_tables(frame),
    )
    return wrapped(text)


def in_short(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of the answer, and whether each prediction held."""
    of = {what: rows.dropna(axis=1, how="all") for what, rows in frame.groupby("what")}
    heads, neurons, heads_of_0 = (
        shares(of["carried"], kind, first=first)
        for kind, first in (("attention", False), ("neuron", False), ("attention", True))
    )
    above = of["splitting"].set_index("model")["above"]
    gain = of["predicted"].assign(gain=of["predicted"]["parts"] - of["predicted"]["z"])
    # For neurons, patches of q and of the pattern are the same.
    distinct = gain.drop_duplicates(["model", "kind", "z", "parts"])
    useful = distinct[distinct[["z", "parts"]].max(axis=1) >= USEFUL]
    helps = {part: gain.loc[gain["part"] == part, "gain"] >= GAIN for part in ("pattern", "z")}
    ranked = of["ranked"].pivot_table(index=["model", "pair"], columns="part", values="f")
    more = t_interval(ranked["by the parts"] - ranked["by the whole"])
    return {
        "heads": _range(heads),
        "neurons": _range(neurons),
        "models": len(heads),
        "outside": f"{(above > 1 - OUTSIDE).sum()} of {len(above)}",
        "n_predicted": len(distinct),
        "n_twice": len(gain) - len(distinct),
        "n_useful": len(useful),
        "n_useless": len(distinct) - len(useful),
        "inside": 1 - OUTSIDE,
        "gains": (useful["gain"] >= GAIN).sum(),
        "losses": (useful["gain"] <= -GAIN).sum(),
        "all_gains": (distinct["gain"] >= GAIN).sum(),
        "all_losses": (distinct["gain"] <= -GAIN).sum(),
        "more": "{:+.3f} [{:+.3f}, {:+.3f}]".format(*more),
        "n_pairs": len(ranked),
        "verdicts": "\n".join(
            [
                verdict(
                    "1. Patterns carry less than a third of what neurons carry.",
                    bool(neurons.max() < 1 / 3),
                    _range(neurons),
                ),
                verdict(
                    "1. Patterns carry less than a third of what attention heads carry.",
                    bool(heads.max() < 1 / 3),
                    _range(heads),
                ),
                verdict(
                    "1. Patterns carry more than half of what heads of the first layer carry.",
                    bool(heads_of_0.min() > 1 / 2),
                    _range(heads_of_0),
                ),
                verdict(
                    f"2. In no model is the spread above {1 - OUTSIDE:.0%} of the shuffles.",
                    bool((above <= 1 - OUTSIDE).all()),
                    "above "
                    + ", ".join(f"{share:.0%} ({model})" for model, share in above.items()),
                ),
                verdict(
                    f"3. ΔR² is {GAIN:g} or more for patches of patterns, and less for z.",
                    bool(helps["pattern"].all() and not helps["z"].any()),
                    f"{GAIN:g} or more in {helps['pattern'].sum()} of {len(helps['pattern'])} "
                    f"cases for patterns, and in {helps['z'].sum()} of {len(helps['z'])} for z",
                ),
                verdict(
                    "4. The first k sites by |pattern| + |value| are not measurably more faithful "
                    "than those by |pattern + value|.",
                    not more[1] > 0,
                    "a mean difference in faithfulness of {:+.3f} [{:+.3f}, {:+.3f}]".format(*more),
                ),
            ]
        ),
    }


def shares(carried_rows: pd.DataFrame, kind: str, *, first: bool) -> "pd.Series[float]":
    """Return by model what patterns carry of a kind of head, of all layers or of the first."""
    rows = carried_rows[carried_rows["kind"] == kind]
    rows = rows[rows["layer"] == 0] if first else rows
    sums = rows.groupby("model", sort=False)[["pattern", "value"]].sum()
    return sums["pattern"] / sums.sum(axis=1)


def _range(values: "pd.Series[float]") -> str:
    return f"{100 * values.min():.0f} to {100 * values.max():.0f} %"


def _tables(frame: pd.DataFrame) -> dict[str, str]:
    of = {what: rows.dropna(axis=1, how="all") for what, rows in frame.groupby("what")}
    kinds = ("attention", "neuron")
    cells = pd.concat(
        [shares(of["carried"], kind, first=first) for first in (False, True) for kind in kinds],
        axis=1,
    )
    heads = ["model", "attention heads", "neurons", "heads of layer 0", "neurons of layer 0"]
    carried_table = markdown(
        heads, [[model, *(f"{x:.0%}" for x in row)] for model, *row in cells.itertuples()]
    )
    some = of["splitting"][["model", "n", "spread", "null", "above"]].itertuples(index=False)
    splitting_table = markdown(
        ["model", "heads", "spread of shares", "shuffled", "shuffles below it"],
        [[m, f"{n:.0f}", f"{s:.3f}", f"{z:.3f}", f"{a:.0%}"] for m, n, s, z, a in some],
    )
    some = of["predicted"][["model", "kind", "part", "z", "parts"]].itertuples(index=False)
    predicted_table = markdown(
        ["model", "kind", "patched", "R² of z", "R² of the parts", "ΔR²"],
        [[m, k, x, f"{z:.3f}", f"{b:.3f}", f"{b - z:+.3f}"] for m, k, x, z, b in some],
    )
    wide = of["ranked"].groupby(["model", "k", "part"], sort=False)["f"].mean().unstack()
    ranked_table = markdown(
        ["model", "sites", *(str(name) for name in wide.columns)],
        [[m, f"{k:.0f}", *(f"{x:.3f}" for x in row)] for (m, k), *row in wide.itertuples()],
    )
    return {
        "carried": carried_table,
        "splitting": splitting_table,
        "predicted": predicted_table,
        "ranked": ranked_table,
    }


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the share that patterns carry, by layer."""
    rows = frame[frame["what"] == "carried"]
    picture = Figure(figsize=(8, 3), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, ("attention", "neuron"), strict=True):
        for model, some in rows[rows["kind"] == kind].groupby("model", sort=False):
            share = some["pattern"] / (some["pattern"] + some["value"])
            depth = some["layer"] / max(1, some["layer"].max())
            panel.plot(depth, share, marker=".", label=model)
        panel.set(title=kind, xlabel="layer / last layer", ylim=(0, 1))
    panels[0].set_ylabel("share of patterns")
    panels[1].legend(fontsize="small")
    return picture


PAGE = """# What patterns and values carry

**Question.** Secants split the difference between two runs exactly: each head or neuron-head acts
in part through its pattern (for a neuron, its gate), and in part through its value. How large are
the two parts, and does it help to know them?

**Answer.** In {models} models, patterns carry {heads} of the effects of attention heads, and
{neurons} of the effects of neurons.

The two parts help in some cases only. Rankings by |pattern| + |value| and rankings by the sum of
pattern and value differ in faithfulness by {more} (the parts minus the sum, the mean over {n_pairs}
pairs of prompts). In {n_useful} of {n_predicted} cases, the parts or their sum predict patches on
other pairs with an R² of {useful:g} or more. Of these {n_useful} cases, the parts predict better
than the sum in {gains}, and worse in {losses} (by {gain:g} in R² or more). In {outside} models, the
shares of gates differ between upstream heads more than in {inside:.0%} of the shuffles.

**Caution.** In many cases, nothing predicts the patches: R² is below {useful:g} for the sum and for
the parts in {n_useless} of {n_predicted} cases. If these are counted too, the parts are better in
{all_gains} cases and worse in {all_losses}. A case is a row of table (c); {n_twice} rows that
repeat another row are not counted, because patches of a neuron's q and of its pattern are the same.
The shares are those of secants; another exact split of the same difference gives other shares.

Small English and SmolLM2-135M answer prompts on agreement (24 and 8 pairs); words and stories have
24 random pairs each. Every row is in `patterns_and_values.csv`; this page was made by

    python -m analyses.studies.patterns_and_values{flag}

{predictions}
What we found, by the bounds of the predictions. Predictions 2 and 4 had no bound, so we chose one
after the run:

{verdicts}

## (a) What patterns carry

Σ |by pattern| / (Σ |by pattern| + Σ |by value|), over all sites and pairs.

{carried}

![by layer](patterns_and_values.svg)

## (b) Do upstream heads set gates or values?

For every attention head, we compute the share of its edges into neurons that go through gates. The
table has the standard deviation of this share over heads ("spread"), and its mean over 200 shuffles
of the heads of each target.

{splitting}

## (c) Do the parts predict patches on other pairs?

The 100 heads or neurons with the largest effects on one half of the pairs are patched on the other
half, at all positions. A linear regression predicts the mean effect of each patch from its
attribution on the first half: from the sum z alone, or from both parts. R² is that of predictions
for held-out fifths of the names. There is no row for fewer than 40 names. We call a ΔR² below
{gain:g} no improvement.

{predicted}

## (d) Do rankings by parts need fewer sites?

The mean faithfulness of the first k sites, over six pairs. "By the whole" ranks sites by |pattern +
value|, and "by the parts" by |pattern| + |value|.

{ranked}
"""

if __name__ == "__main__":
    typer.run(main)
