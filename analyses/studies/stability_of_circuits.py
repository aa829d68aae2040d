"""Measure how far circuits depend on their prompts, and the coverage of inclusion intervals.

    python -m analyses.studies.stability_of_circuits

Circuits for many fresh batches of agreement prompts give the probability that a batch's circuit
includes a site. `discover(…, resamples=20)` estimates this probability from one batch of twice the
size, with an interval. The coverage is the share of sites whose interval contains the probability.
Then the circuits of several tasks are evaluated on the prompts of the other tasks.
"""

import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.tools.benching import markdown
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep
from attn_only_lens import circuits, expose_neuron_heads, pretrained, tasks
from attn_only_lens.circuits.stability import inclusion_interval

BATCH = 20  # prompts in a resampled batch; a fresh batch has half as many
N_FRESH, N_BATCHES, RESAMPLES = 230, 20, 20
RARE = 0.02
FIRST_FRESH, FIRST_BATCH = 10_000, 500  # the first seeds
STEPS = (0.0, RARE, 0.1, 0.5, 0.9, 1.0)


def agreement(model: Any, n: int, seed: int) -> Any:
    """Return a batch of agreement prompts with a relative clause."""
    return tasks.agreement(model.tokenizer, n, seed, structure="relative")


def names(frame: pd.DataFrame) -> list[str]:
    """Return a name for each site."""
    return [
        f"{name}@{position}"
        for name, position in zip(frame["name"], frame["position"], strict=True)
    ]


def probabilities(model: Any, n: int) -> "pd.Series[float]":
    """Return for each site the share of fresh batches whose circuit includes it."""
    counts = Counter[str]()
    for seed in tqdm(range(FIRST_FRESH, FIRST_FRESH + n), desc="fresh batches"):
        task = agreement(model, BATCH // 2, seed)
        prompts = task.clean, task.corrupted, task.metric
        circuit = circuits.discover(model, *prompts, positions=task.roles, n_random=0)
        counts.update(names(circuit.frame))
    return pd.Series(counts, dtype=float) / n


def resampled(model: Any, n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the inclusion of sites in every resampled batch, and a row for each batch."""
    sites, batches = [], []
    for seed in tqdm(range(FIRST_BATCH, FIRST_BATCH + n), desc="resampled batches"):
        task = agreement(model, BATCH, seed)
        prompts = task.clean, task.corrupted, task.metric
        circuit = circuits.discover(
            *(model, *prompts), positions=task.roles, n_random=0, resamples=RESAMPLES, seed=seed
        )
        stability = circuit.stability
        assert stability is not None
        frame = stability.sites
        sites.append(frame.assign(batch=seed, site=names(frame)))
        held_out, new_task = stability.held_out, agreement(model, BATCH, FIRST_FRESH - seed)
        fresh = circuits.evaluate(
            *(model, circuit, new_task.clean, new_task.corrupted, new_task.metric),
            positions=new_task.roles,
        )
        batches.append(
            {
                "batch": seed,
                "n_sites": len(circuit),
                "core": stability.n_core,
                "union": stability.n_union,
                "jaccard": stability.jaccard,
                "fitted": circuit.faithfulness,
                "held out": held_out.loc["faithfulness", "mean"],
                "standard error": held_out.loc["faithfulness", "standard_error"],
                "fresh batch": fresh.faithfulness,
                "fresh error": fresh.error,
                "core alone": stability.core_faithfulness[0],
            }
        )
    columns = ["batch", "site", "inclusion", "inclusion_low", "inclusion_high", "class"]
    return pd.concat(sites)[columns], pd.DataFrame(batches)


def covered(sites: pd.DataFrame, truth: "pd.Series[float]") -> pd.DataFrame:
    """Return whether each interval contains its probability, also for sites outside all circuits.

    A site in no circuit of a batch has the interval of a site in none of the resamples.
    """
    index = pd.MultiIndex.from_product([sites["batch"].unique(), truth.index])
    known = sites.set_index(["batch", "site"])
    index = index.append(known.index.difference(index))
    frame = known.reindex(index).rename_axis(["batch", "site"]).reset_index()
    none = inclusion_interval(0, RESAMPLES)
    absent = frame["inclusion"].isna()
    frame.loc[absent, ["inclusion", "inclusion_low", "inclusion_high"]] = (0.0, *none)
    frame["probability"] = frame["site"].map(truth).fillna(0.0)
    low, high = frame["inclusion_low"], frame["inclusion_high"]
    frame["covered"] = (low <= frame["probability"]) & (frame["probability"] <= high)
    frame["in union"] = ~absent
    return frame


def coverage(frame: pd.DataFrame) -> str:
    """Return a table of coverage, by the probability of sites."""
    rows = []
    for label, some in [
        ("in a union", frame[frame["in union"]]),
        (f"more than {RARE}", frame[frame["probability"] > RARE]),
        *(
            (f"{low} to {high}", frame[frame["probability"].between(low, high, inclusive="right")])
            for low, high in pairwise(STEPS)
        ),
    ]:
        width = (some["inclusion_high"] - some["inclusion_low"]).mean()
        numbers = [f"{some['covered'].mean():.3f}", f"{width:.2f}", f"{len(some):,}"]
        rows.append([label, *numbers])
    return markdown(["probability of the site", "coverage", "mean width", "intervals"], rows)


def between_tasks(model: Any, n: int) -> pd.DataFrame:
    """Return the faithfulness of each task's circuit on all tasks, at the last tokens."""
    make = {
        "agreement": agreement(model, n, 0),
        "agreement, other prompts": agreement(model, n, 1),
        "gender": tasks.agreement(model.tokenizer, n, feature="gender"),
        "indirect object": tasks.ioi(model.tokenizer, n),
    }
    by_task = {}
    for name, task in make.items():
        prompts = task.clean, task.corrupted, task.metric
        roles = {"end": task.roles["end"]}
        by_task[name] = circuits.discover(model, *prompts, positions=roles, n_random=0)
    return circuits.transfer(model, by_task, make)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw inclusion by the probability of the site."""
    picture = Figure(figsize=(5, 4), layout="constrained")
    panel = picture.subplots()
    seen = frame[frame["in union"]]
    for is_covered, some in seen.groupby("covered"):
        color = "tab:blue" if is_covered else "tab:red"
        label = "interval holds the probability" if is_covered else "it does not"
        panel.plot(some["probability"], some["inclusion"], ".", color=color, alpha=0.3, label=label)
    panel.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    panel.set(xlabel="probability over fresh batches", ylabel="inclusion in one batch")
    panel.legend(fontsize="small")
    return picture


def main(
    out: Out = Path("out/stability"),
    smoke: Smoke = False,
    device: Device = "cpu",
) -> None:
    """Measure coverage, stability and transfer on Small English."""
    started = time.perf_counter()
    warnings.simplefilter("ignore")
    model = expose_neuron_heads(pretrained.small_english().to(device), copy=True).model
    truth = probabilities(model, 3 if smoke else N_FRESH)
    sites, batches = resampled(model, 2 if smoke else N_BATCHES)
    frame = covered(sites, truth)
    matrix = between_tasks(model, 4 if smoke else BATCH)
    numbers = batches.drop(columns="batch")
    summary = pd.DataFrame({"mean": numbers.mean(), "least": numbers.min(), "most": numbers.max()})
    page = PAGE
    for word, table in {
        "COVERAGE": coverage(frame),
        "BATCHES": _table(summary),
        "TRANSFER": _table(matrix),
    }.items():
        page = page.replace(word, table)
    tables = {
        "": frame,
        "batches": batches,
        "transfer": matrix.rename_axis("circuit").reset_index(),
    }
    keep(__file__, out, page, tables, figure(frame), started=started, smoke=smoke, device=device)


def _table(frame: pd.DataFrame) -> str:
    rows = [[str(name), *(f"{x:.2f}" for x in row)] for name, row in frame.iterrows()]
    return markdown(["", *map(str, frame.columns)], rows)


PAGE = f"""# Stability of circuits

The task is agreement with a relative clause ("The keys that the man …"), and the model is Small
English. Sites are at positions with a role, circuits keep .9 of the metric, and everything else is
resampled. Every row is in the tables next to this page. Made by
`python -m analyses.studies.stability_of_circuits`.

## Coverage of the intervals of inclusion

We measured on {N_FRESH} fresh batches how probable it is that a site is in the circuit of a batch
of {BATCH // 2} prompts. `discover(…, resamples={RESAMPLES})` estimates this probability from one
batch of {BATCH} prompts; the nominal coverage of its intervals is 90 %. The {RESAMPLES} circuits
share prompts, so we widened the intervals (`_DEPENDENCE`) until their coverage was right on other
batches. Sites that are in nearly no circuit are covered nearly always, because their intervals
begin at 0.

COVERAGE

![inclusion by probability](stability_of_circuits.svg)

## Batches of {BATCH} prompts

"fitted" is the faithfulness of the circuit on its prompts. "held out" is the mean faithfulness of
circuits of one half of the prompts on the other half, with its standard error over prompts. "fresh
batch" is the faithfulness of the circuit on {BATCH} other prompts, and "fresh error" is the mean
over these prompts of |m(C) - m(M)| / |m(M) - m(∅)|.

BATCHES

## Transfer

The faithfulness of each task's circuit (row) on the prompts of each task (column). Circuits contain
heads and neurons at the last token; those at other tokens are not ablated.

TRANSFER
"""

if __name__ == "__main__":
    typer.run(main)
