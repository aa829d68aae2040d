"""Measure how far circuits depend on their prompts, and whether they hold for other nouns.

Small English: circuits for many fresh batches of agreement prompts give the probability that a
batch's circuit includes a site. `Search(resamples=20)` estimates this probability from one
batch of twice the size, with an interval. The coverage is the share of sites whose interval
contains the probability. Then the circuits of several tasks are evaluated on the prompts of the
other tasks.

SmolLM2: circuits for agreement are chosen on 100 pairs, and evaluated on 40 pairs with six other
nouns; the same is done for five tasks of Small English. `--data` is a folder with
`nounpp_train.json` and `nounpp_test.json` from Marks et al., "Sparse Feature Circuits" (2024), in
the repository TransluceAI/circuits. That repository has no licence, so its files are not stored
here. Attention heads at all positions are kept, except in the rows "all sites".
"""

import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.study import Setting, Study, Tables
from analyses.tools import small_english as small
from analyses.tools.learn_mask import BATCH as BATCH_OF_MASK
from analyses.tools.learn_mask import learn_mask
from attn_only_lens import Contrast, Work, circuits, expose_neuron_heads, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.circuits.stability import inclusion_interval
from attn_only_lens.engine.linear_map import of_run
from attn_only_lens.engine.prompts import PromptPair

QUIET, ALONE = Work(progress=False), circuits.Search(n_random=0)
BY_ROLE = p.Sites(positions="roles")
BATCH, RESAMPLES, N_FRESH = 20, 20, 230  # a fresh batch has half as many prompts as BATCH
FIRST_FRESH, FIRST_BATCH = 10_000, 500  # the first seeds
RARE = 0.02
N_TRAINING, N_HELD_OUT, HELD_OUT_NOUNS, LENGTH = 100, 40, 6, 5
SIZES, LEARNED = (25, 50, 100, 200, 400), (100, 200)
STEPS, PASSES = 300, 3  # of `learn_mask`; a backward pass costs two forward passes
COST = {"gradient": 5, "RelP": 5, "secant": 5, "integrated": 17}
"""The number of passes over all prompts; a backward pass counts twice."""


# ---- other prompts of the same task, and other tasks


def agreement(model: Any, n: int, seed: int) -> Contrast:
    """Return a batch of agreement prompts with a relative clause."""
    return tasks.agreement(model.tokenizer, n, seed, structure="relative")


def site_names(frame: pd.DataFrame) -> list[str]:
    """Return a name for each site."""
    return (frame["name"].astype(str) + "@" + frame["position"].astype(str)).tolist()


def probabilities(model: Any, n: int) -> "pd.Series[float]":
    """Return for each site the share of fresh batches whose circuit includes it."""
    counts = Counter[str]()
    for seed in tqdm(range(FIRST_FRESH, FIRST_FRESH + n), desc="fresh batches"):
        task = agreement(model, BATCH // 2, seed)
        circuit = circuits.discover(model, task, sites=BY_ROLE, search=ALONE)
        counts.update(site_names(circuit.frame))
    return pd.Series(counts, dtype=float) / n


def resampled(model: Any, n: int, resamples: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the inclusion of sites in every resampled batch, and a row for each batch."""
    sites, batches = [], []
    for seed in tqdm(range(FIRST_BATCH, FIRST_BATCH + n), desc="resampled batches"):
        task, other = agreement(model, BATCH, seed), agreement(model, BATCH, FIRST_FRESH - seed)
        search = circuits.Search(n_random=0, resamples=resamples, seed=seed)
        circuit = circuits.discover(model, task, sites=BY_ROLE, search=search)
        stability = circuit.stability
        assert stability is not None
        names = site_names(stability.sites)
        sites.append(stability.sites[["inclusion"]].assign(batch=seed, site=names))
        held_out = stability.held_out.loc["faithfulness"]
        fresh = circuits.evaluate(model, circuit, other)
        batches.append(
            {
                "n_sites": len(circuit),
                "core": stability.n_core,
                "union": stability.n_union,
                "jaccard": stability.jaccard,
                "fitted": circuit.faithfulness,
                "held out": held_out["mean"],
                "standard error": held_out["standard_error"],
                "fresh batch": fresh.faithfulness,
                "fresh error": fresh.error,
                "core alone": stability.core_faithfulness[0],
            }
        )
    return pd.concat(sites), pd.DataFrame(batches)


def intervals(sites: pd.DataFrame, truth: "pd.Series[float]") -> pd.DataFrame:
    """Return how often an interval of inclusion belongs to a site of some probability.

    A site in no circuit of a batch has the interval of a site in none of the resamples.
    """
    known = sites.set_index(["batch", "site"])["inclusion"]
    index = pd.MultiIndex.from_product([sites["batch"].unique(), truth.index])
    every = known.reindex(index.union(known.index), fill_value=0.0)
    frame = pd.DataFrame({"inclusion": every.to_numpy()})
    frame["probability"] = every.index.get_level_values(1).map(truth).fillna(0.0)
    counted = frame.value_counts(sort=False).rename("n").reset_index()
    ends = [inclusion_interval(round(x * RESAMPLES), RESAMPLES) for x in counted["inclusion"]]
    counted[["low", "high"]] = ends
    return counted


def between_tasks(model: Any, n: int, n_tasks: int = 4) -> pd.DataFrame:
    """Return the faithfulness of each task's circuit on all tasks, at the last tokens."""
    make = {
        "agreement": agreement(model, n, 0),
        "agreement, other prompts": agreement(model, n, 1),
        "gender": tasks.agreement(model.tokenizer, n, feature="gender"),
        "indirect object": tasks.ioi(model.tokenizer, n),
    }
    make, by_task = dict(islice(make.items(), n_tasks)), {}
    for name, task in make.items():
        last = p.Sites(positions="end")
        by_task[name] = circuits.discover(model, task, sites=last, search=ALONE)
    return circuits.transfer(model, by_task, make).rename_axis("circuit").reset_index()


# ---- other nouns


def noun(text: str) -> str:
    """Return the subject of a prompt, in the singular."""
    word = text.split()[1]
    return {"men": "man", "women": "woman"}.get(word, word.removesuffix("s"))


def read(
    tokenizer: Any, folder: Path, sizes: tuple[int, int] = (N_TRAINING, N_HELD_OUT)
) -> list[Contrast]:
    """Return pairs for finding circuits, and pairs with other nouns."""

    def fits(row: Any, nouns: set[str] | None = None) -> bool:
        prompts = [row["clean_prefix"], row["patch_prefix"]]
        counts = {len(x) for x in tokenizer(prompts, add_special_tokens=False)["input_ids"]}
        return counts == {LENGTH} and (nouns is None or noun(prompts[0]) in nouns)

    files = [folder / f"nounpp_{part}.json" for part in ("train", "test")]
    with tempfile.TemporaryDirectory() as kept:
        joined = Path(kept, "nounpp.jsonl")
        joined.write_text("\n".join(x.read_text("utf-8").rstrip("\n") for x in files), "utf-8")
        every = tasks.from_jsonl(tokenizer, sizes[0], joined, keep=fits)
        nouns = sorted({noun(clean) for clean in every.clean})
        Random(0).shuffle(nouns)
        groups = set(nouns[HELD_OUT_NOUNS:]), set(nouns[:HELD_OUT_NOUNS])
        return [
            tasks.from_jsonl(tokenizer, n, joined, keep=partial(fits, nouns=some))
            for n, some in zip(sizes, groups, strict=True)
        ]


def relp(model: Any, task: Contrast, frame: pd.DataFrame) -> np.ndarray:
    """Return z's change times its gradient, with patterns and norms held fixed (RelP)."""
    total = np.zeros(len(frame))
    pair = task.pair(model)
    for first in tqdm(range(0, len(task), 10), desc="RelP"):
        some = range(first, min(first + 10, len(task)))
        here = PromptPair(pair.clean[some], pair.corrupted[some])
        back = PromptPair(here.corrupted, here.clean)
        answers = ([column[i][0] for i in some] for column in (task.answers, task.wrong))
        metric = p.logit_diff(*answers)
        clean, corrupted = (of_run(model, x, metric, patterns=False) for x in (here, back))
        for index, writes in enumerate(clean.sublayers):
            change = clean.z[index] - corrupted.z[index]
            effects = (clean.multipliers[index] * change).sum(dim=(0, -1)).cpu().numpy()
            rows = (frame["layer"] == writes.layer) & (frame["kind"] == writes.kind)
            chosen = frame[rows]
            total[rows] += effects[chosen["position"].to_numpy(int), chosen["index"].to_numpy(int)]
    return total / len(task)


def judged(ablated: AblatedModel, rows: np.ndarray) -> dict[str, float]:
    """Return the faithfulness, completeness and mean error of a circuit."""
    faithful, complete, _ = ablated.curves([rows])
    (left,) = ablated.by_prompt([rows])
    spans = abs(ablated.whole_by_prompt - ablated.nothing_by_prompt)
    errors = abs(left - ablated.whole_by_prompt) / spans
    return {
        "faithfulness": float(faithful[0]),
        "completeness": float(complete[0]),
        "error": float(errors.mean()),
        "median error": float(np.median(errors)),
    }


def ablated_on(model: Any, task: Contrast, frame: pd.DataFrame) -> AblatedModel:
    """Return a model whose sites outside a circuit are resampled, on a task's prompts."""
    return AblatedModel(model, task.pair(model), task.metric, frame, ablation="resample")


def arms(
    model: Any, training: Contrast, held_out: Contrast, *, smoke: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for each circuit: how it was chosen, its size, and what it keeps."""
    groups = [noun(clean) for clean in training.clean]
    for kind, sites in (("neurons", "neurons"), ("all sites", "all")):
        ranked: dict[str, Any] = {"sites": sites, "direction": "noise", "work": QUIET}
        rankings = {
            method: p.attribution(model, training, method=p.Estimate(method, budget=0), **ranked)
            for method in COST
            if method != "RelP"
        }
        frame = rankings["secant"].frame
        here, there = (ablated_on(model, task, frame) for task in (training, held_out))
        effects = {name: ranking.effect.to_numpy() for name, ranking in rankings.items()}
        effects["RelP"] = -relp(model, training, frame)
        for name, effect in effects.items():
            for order in ("magnitude", "signed"):
                best = here.ranked(rankings["secant"], order, effect)
                for size in SIZES[:1] if smoke else SIZES:
                    row = {"sites": kind, "arm": f"{name}, {order}", "size": size}
                    yield row | {"passes": COST[name]} | judged(there, best[:size])
        for size in LEARNED[:1] if smoke else LEARNED:
            started, steps = time.perf_counter(), 3 if smoke else STEPS
            how: dict[str, Any] = {"steps": steps, "groups": groups, "sites": sites}
            learned = learn_mask(model, training, size, label=f"mask of {size} {kind}", **how)
            row = {"sites": kind, "size": size, "seconds": time.perf_counter() - started}
            row["passes"] = PASSES * steps * BATCH_OF_MASK / len(training)
            rows = np.flatnonzero(learned.contains(frame))
            yield row | {"arm": "learned mask"} | judged(there, rows)
            yield row | {"arm": "learned mask, its own prompts"} | judged(here, rows)


def small_english(model: Any, *, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield such rows for five tasks of Small English, by role, on other prompts of the task."""
    make = {
        "agreement": partial(tasks.agreement, model.tokenizer, structure="relative"),
        "gender": partial(tasks.agreement, model.tokenizer, feature="gender"),
        "brackets": partial(tasks.brackets, model.tokenizer),
        "indirect object": partial(tasks.ioi, model.tokenizer),
        "induction": partial(tasks.induction, model.tokenizer, length=5),
    }
    for name, task_of in list(make.items())[4 if smoke else 0 :]:
        training, held_out = (task_of(n=8 if smoke else N_HELD_OUT, seed=seed) for seed in (0, 1))
        secants = p.Estimate("secant", budget=0)
        how: dict[str, Any] = {"direction": "noise", "method": secants, "work": QUIET}
        ranking = p.attribution(model, training, sites=BY_ROLE, **how)
        here, there = (ablated_on(model, task, ranking.frame) for task in (training, held_out))
        found = circuits.discover(model, training, sites=BY_ROLE, search=ALONE)
        steps = 3 if smoke else 100
        learned = learn_mask(model, training, len(found), steps=steps, sites=BY_ROLE)
        chosen = {
            f"secant, {order}": here.ranked(ranking, order)[: len(found)]
            for order in ("magnitude", "signed")
        }
        for arm, circuit in (("discover", found), ("learned mask", learned)):
            chosen[arm] = np.flatnonzero(circuit.contains(ranking.frame))
        for arm, rows in chosen.items():
            row = {"sites": f"Small English, {name}", "arm": arm, "size": len(rows)}
            yield row | judged(there, rows)


def run(setting: Setting) -> Tables:
    """Measure coverage, stability, transfer, and errors on other nouns."""
    smoke, smollm2, data = setting.smoke, setting.smollm2, setting.data
    if not smoke and (smollm2 is None or data is None):
        raise ValueError("the study needs --smollm2 FOLDER and --data FOLDER")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source: Any = load("small-english")
        if smoke:
            source = small.bridged(small.Recipe(n_layers=1, d_model=8, n_heads=2, d_mlp=17).model())
        english = expose_neuron_heads(source.to(setting.device), copy=True).model
        truth = probabilities(english, 1 if smoke else N_FRESH)
        sites, batches = resampled(english, *((1, 2) if smoke else (BATCH, RESAMPLES)))
        model, pairs = english, [agreement(english, n, seed=n) for n in (17, 5)]
        if smollm2 and data and not smoke:
            model = expose_neuron_heads(load(smollm2).to(setting.device)).model
            pairs = read(model.tokenizer, data)
        rows = [*arms(model, *pairs, smoke=smoke), *small_english(english, smoke=smoke)]
        return {
            "": intervals(sites, truth),
            "batches": batches,
            "transfer": between_tasks(english, *((4, 2) if smoke else (BATCH,))),
            "agreement": pd.DataFrame(rows),
        }


# ---- the page


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the share of intervals that contain the probability, by the site's probability."""
    probability = frame["probability"]
    steps = (0.0, RARE, 0.1, 0.5, 0.9, 1.0)
    parts = {"in a union": frame["inclusion"] > 0, f"more than {RARE}": probability > RARE}
    parts |= {
        f"{low} to {high}": probability.between(low, high, inclusive="right")
        for low, high in pairwise(steps)
    }
    rows = []
    for label, chosen in parts.items():
        some = frame[chosen]
        covered = some["probability"].between(some["low"], some["high"])
        share, width = (
            np.average(x, weights=some["n"]) if len(some) else math.nan
            for x in (covered, some["high"] - some["low"])
        )
        rows.append([label, f"{share:.3f}", f"{width:.2f}", f"{some['n'].sum():,}"])
    return pd.DataFrame(
        rows, columns=["probability of the site", "coverage", "mean width", "intervals"]
    )


def cell(row: Mapping[str, float]) -> str:
    """Return the error of a circuit with its faithfulness and completeness."""
    return "{error:.2f} ({faithfulness:.2f}, {completeness:.2f})".format(**row)


def by_size(frame: pd.DataFrame, sites: str) -> pd.DataFrame:
    """Return errors on other nouns by arm and size."""
    rows = frame[(frame["sites"] == sites) & ~frame["arm"].str.endswith("its own prompts")]
    rows = rows.assign(cell=[cell(row) for row in rows.to_dict("records")])
    rows = rows.assign(passes=rows["passes"].map("{:.0f}".format))
    wide = rows.pivot(index=["arm", "passes"], columns="size", values="cell").fillna("")
    order = rows[["arm", "passes"]].drop_duplicates().itertuples(index=False, name=None)
    return wide.reindex(list(order)).add_suffix(" sites").reset_index()


def by_task(frame: pd.DataFrame) -> pd.DataFrame:
    """Return errors on other prompts of Small English's tasks, by arm."""
    rows = frame[frame["sites"].str.startswith("Small English, ")]
    cells = [cell(row) for row in rows.to_dict("records")]
    rows = rows.assign(task=rows["sites"].str.removeprefix("Small English, "), cell=cells)
    wide = rows.pivot(index=["task", "size"], columns="arm", values="cell")
    order = rows[["task", "size"]].drop_duplicates().itertuples(index=False, name=None)
    wide = wide.reindex(list(order))[list(dict.fromkeys(rows["arm"]))]
    return wide.reset_index().rename(columns={"size": "sites"})


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame, batches = tables["agreement"], tables["batches"]
    neurons = frame[frame["sites"] == "neurons"].sort_values("error")
    learned = neurons[neurons["size"] == neurons.loc[neurons["seconds"].notna(), "size"].max()]
    learned = learned.set_index("arm").to_dict("index")
    others = neurons[~neurons["arm"].str.endswith("its own prompts")]
    summary = pd.DataFrame({"mean": batches.mean(), "least": batches.min(), "most": batches.max()})
    return {
        "coverage": coverage(tables[""]),
        "batches": summary.map("{:.2f}".format).rename_axis("").reset_index(),
        "mean": batches.mean(),
        "transfer": tables["transfer"].map(lambda x: x if isinstance(x, str) else f"{x:.2f}"),
        "by_size": partial(by_size, frame),
        "by_task": by_task(frame),
        "best": others.iloc[0],
        "mask": learned["learned mask"],
        "its_own": learned["learned mask, its own prompts"],
        "seconds": frame["seconds"].max(),
        "all_mask": frame[(frame["sites"] == "all sites") & (frame["arm"] == "learned mask")],
    }


def inclusion_figure(frame: pd.DataFrame) -> Figure:
    """Draw inclusion by the probability of the site; a point may be several sites."""
    picture = Figure(figsize=(5, 4), layout="constrained")
    panel = picture.subplots()
    seen = frame[frame["inclusion"] > 0]
    covered = seen["probability"].between(seen["low"], seen["high"])
    for some, colour, label in (
        (seen[covered], "tab:blue", "interval contains the probability"),
        (seen[~covered], "tab:red", "it does not"),
    ):
        panel.plot(some["probability"], some["inclusion"], ".", color=colour, label=label)
    panel.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    panel.set(xlabel="probability over fresh batches", ylabel="inclusion in one batch")
    picture.legend(loc="outside upper center", ncols=2, fontsize="small")
    return picture


def agreement_figure(frame: pd.DataFrame) -> Figure:
    """Draw the error on held-out nouns by circuit size."""
    picture = Figure(figsize=(10, 4), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for panel, sites in zip(panels, ("neurons", "all sites"), strict=True):
        rows = frame[(frame["sites"] == sites) & ~frame["arm"].str.endswith("its own prompts")]
        for number, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
            line = "k-" if arm == "learned mask" else f"C{number // 2}{('--', ':')[number % 2]}"
            panel.plot(of_arm["size"], of_arm["error"].clip(0, 1.2), line, label=arm)
        panel.axhline(0.15, color="grey", linewidth=0.5)
        panel.set(title=sites, xscale="log", xlabel="sites")
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.minorticks_off()
    panels[0].set_ylabel("error on other nouns (1.2 and more at the top)")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize="small")
    return picture


STUDY = Study(
    run,
    lambda tables: {
        "": inclusion_figure(tables[""]),
        "agreement": agreement_figure(tables["agreement"]),
    },
    facts,
)
