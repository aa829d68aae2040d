"""Compare circuits of transcoder features with circuits of neurons of equal faithfulness.

    python -m analyses.studies.features_and_neurons --out analyses/results

On the same prompts of a task, `discover` searches for three circuits in Small English. Their sites
are attention heads and, in the three arms of the study,

    neurons              neurons of the original model
    features, errors     features and error nodes, with transcoders in place of all MLPs
    features             features, in the same model; error nodes are never ablated, so they belong
                         to every circuit

`predictions` were written before the first run.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.tools.benching import markdown
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep, verdict
from attn_only_lens import circuits, expose_neuron_heads, pretrained, tasks, transcoders
from attn_only_lens import patching as p
from attn_only_lens.engine.sites import Selection
from attn_only_lens.heads import HeadName

N_PROMPTS, SEEDS, RESAMPLES = 20, 2, 10
HELD_OUT_SEED = 700
COVERED = 0.8
"""The tokens in a label have at least this share of Σ |z| over all tokens."""
ARMS: dict[str, Selection] = {
    "neurons": Selection(("attention", "neuron")),
    "features, errors": Selection(("attention", "feature", "error")),
    "features": Selection(("attention", "feature")),
}
TASKS: dict[str, Callable[[Any, int, int], Any]] = {
    "number": lambda tokenizer, n, seed: tasks.agreement(tokenizer, n, seed, structure="relative"),
    "gender": lambda tokenizer, n, seed: tasks.agreement(tokenizer, n, seed, feature="gender"),
    "brackets": lambda tokenizer, n, seed: tasks.brackets(tokenizer, n, seed),
    "induction": lambda tokenizer, n, seed: tasks.induction(tokenizer, n, seed, length=11),
    "indirect object": lambda tokenizer, n, seed: tasks.ioi(tokenizer, n, seed),
}
MEASURES = ["sites", "mlp sites", "held out", "jaccard", "error share", "label"]


@contextmanager
def model_of(arm: str, device: str) -> Iterator[Any]:
    """Yield Small English, with neurons or with transcoders, as an arm of the study needs it."""
    model = pretrained.small_english(device)
    if arm == "neurons":
        yield expose_neuron_heads(model).model
    else:
        with transcoders.attach(model, pretrained.small_english_transcoders(device)) as attached:
            yield attached


@torch.no_grad()
def label_lengths(model: Any, texts: list[str]) -> dict[tuple[int, int], int]:
    """Return, for each (layer, index), how many different tokens have most of Σ |z|.

    A neuron or feature could be labelled by these tokens. If it is active at few different tokens,
    its label is short.
    """
    n_layers, d_vocab = len(model.blocks), model.cfg.d_vocab
    mass = [0.0] * n_layers
    for text in tqdm(texts, desc="labels", leave=False):
        tokens = model.to_tokens(text)[:, : model.cfg.n_ctx]
        names = [f"blocks.{layer}.mlp.hook_neuron_act" for layer in range(n_layers)]
        _, cache = model.run_with_cache(tokens, names_filter=names)
        which = torch.nn.functional.one_hot(tokens[0, 1:], d_vocab).T.to(torch.float32)
        for layer, name in enumerate(names):
            mass[layer] = mass[layer] + which @ cache[name][0, 1:, :, 0].abs().float()
    lengths = {}
    for layer, by_token in enumerate(mass):
        assert isinstance(by_token, torch.Tensor)
        shares = by_token.sort(dim=0, descending=True).values.cumsum(0)
        count = (shares < COVERED * shares[-1]).sum(0) + 1
        lengths |= {(layer, i): n for i, n in enumerate(count.tolist())}
    return lengths


def error_share(model: Any, task: Any, sites: Selection) -> float:
    """Return the share of error nodes in Σ |attribution| over neurons, features and errors."""
    sweep = p.attribution(
        *(model, task.clean, task.corrupted, task.metric),
        sites=sites,
        positions=task.roles,
        direction="noise",
        method="secant",
        budget=0,
        progress=False,
    )
    sizes = sweep.frame.assign(size=sweep.effect.abs().to_numpy()).groupby("kind")["size"].sum()
    return float(sizes.get("error", 0.0) / sizes.drop("attention").sum())


def row_of(model: Any, arm: str, name: str, seed: int, lengths: Any, n: int) -> dict[str, Any]:
    """Return the measures of one circuit."""
    task, fresh = (TASKS[name](model.tokenizer, n, x) for x in (seed, HELD_OUT_SEED + seed))
    sites = ARMS[arm]
    circuit = circuits.discover(
        *(model, task.clean, task.corrupted, task.metric),
        sites=sites,
        positions=task.roles,
        n_random=0,
        resamples=RESAMPLES if n == N_PROMPTS else 4,
        seed=seed,
    )
    held_out = circuits.evaluate(
        *(model, circuit, fresh.clean, fresh.corrupted, fresh.metric), positions=fresh.roles
    )
    heads = [HeadName.parse(x) for x in circuit.frame["name"]]
    labels = [lengths[x.layer, x.index] for x in heads if x.kind in ("neuron", "feature")]
    counts = circuit.frame["kind"].value_counts()
    assert circuit.stability is not None
    with_errors = ARMS["neurons" if arm == "neurons" else "features, errors"]
    return {
        "task": name,
        "arm": arm,
        "seed": seed,
        "sites": len(circuit),
        "heads": int(counts.get("attention", 0)),
        "mlp sites": len(circuit) - int(counts.get("attention", 0)),
        "errors": int(counts.get("error", 0)),
        "fitted": circuit.faithfulness,
        "held out": held_out.faithfulness,
        "held-out error": held_out.error,
        "core": circuit.stability.n_core,
        "union": circuit.stability.n_union,
        "jaccard": circuit.stability.jaccard,
        "error share": error_share(model, task, with_errors),
        "label": float(np.median(labels)) if labels else np.nan,
    }


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the means over seeds: one row per task and measure, one column per arm."""
    by_arm = frame.groupby(["task", "arm"], sort=False)[MEASURES].mean().stack()
    return by_arm.unstack("arm")[list(ARMS)].rename_axis(["task", "measure"])


def predictions(wide: pd.DataFrame) -> str:
    """Return the predictions that were made before the first run, and whether they held."""
    by_measure = {name: wide.xs(name, level="measure") for name in MEASURES}

    def tasks_with(name: str, test: Callable[[pd.DataFrame], Any]) -> int:
        return int(test(by_measure[name]).sum())

    n = len(wide.index.unique("task"))
    fewer = tasks_with("sites", lambda x: x["neurons"] < x["features, errors"])
    alike = tasks_with("held out", lambda x: (x["neurons"] - x["features, errors"]).abs() < 0.05)
    stable = tasks_with("jaccard", lambda x: x["neurons"] > x["features, errors"])
    errors = tasks_with("error share", lambda x: x["features, errors"] > 0.1)
    short = tasks_with("label", lambda x: x["features, errors"] < x["neurons"])
    lines = [
        ("Circuits of neurons have fewer sites in at least four tasks.", fewer >= 4, fewer),
        ("Held-out faithfulness differs by less than .05 in at least four.", alike >= 4, alike),
        ("Circuits of neurons have the larger Jaccard index in three.", stable >= 3, stable),
        ("Error nodes have more than 10 % of the attribution in four.", errors >= 4, errors),
        ("Features have the shorter labels in all tasks.", short == n, short),
    ]
    return "\n".join(verdict(claim, held, f"{count} of {n}") for claim, held, count in lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the number of sites and the held-out faithfulness by task, with a dot per circuit."""
    picture = Figure(figsize=(9, 3.5), layout="constrained")
    panels = picture.subplots(1, 2)
    for panel, measure in zip(panels, ("sites", "held out"), strict=True):
        for offset, (arm, rows) in enumerate(frame.groupby("arm", sort=False)):
            x = [list(TASKS).index(name) + 0.2 * (offset - 1) for name in rows["task"]]
            panel.plot(x, rows[measure], "o", label=arm, alpha=0.7)
        panel.set_xticks(range(len(TASKS)), list(TASKS), rotation=20)
        panel.set_ylabel(measure)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_yscale("log")
    panels[1].legend(fontsize="small")
    return picture


def main(
    out: Out = Path("out/features_and_neurons"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Run the study, print its page, and write page, table and figure (`study_files.py`)."""
    started = time.perf_counter()
    warnings.simplefilter("ignore")
    n, n_seeds, rows = (6, 1, []) if smoke else (N_PROMPTS, SEEDS, [])
    chosen = list(TASKS)[3:] if smoke else list(TASKS)
    texts = pretrained.small_english_texts()[: 2 if smoke else None]
    for arm in ARMS:
        with model_of(arm, device) as model:
            lengths = label_lengths(model, texts)
            for name in tqdm(chosen, desc=arm):
                rows += [row_of(model, arm, name, seed, lengths, n) for seed in range(n_seeds)]
    frame = pd.DataFrame(rows)
    wide = means(frame)
    cells = [[*map(str, key), *(f"{x:.3g}" for x in row)] for key, row in wide.iterrows()]
    page = PAGE.format(
        predictions=predictions(wide),
        table=markdown(["task", "measure", *ARMS], cells),
        n=n,
        seeds=n_seeds,
        resamples=RESAMPLES,
        flag=" --smoke" if smoke else "",
    )
    typer.echo(page)
    keep(__file__, out, page, frame, figure(frame), started=started, smoke=smoke, device=device)


PAGE = """# Circuits of features and circuits of neurons

Small English has four layers with 344 neurons each, and transcoders for all four
(`pretrained.small_english_transcoders`). A transcoder is a sparse MLP that imitates one MLP of the
model; its units are called features. The part of the MLP's output that it misses is a node of its
own, the error node.

For each task, `discover` searches for a circuit that keeps .9 of the metric's range (clean minus
corrupted) while all other sites are patched from the corrupted prompts. It does so with three sets
of sites, which are the last three columns of the table:

- **neurons**: attention heads and neurons of the original model.
- **features, errors**: attention heads, features and error nodes.
- **features**: attention heads and features; error nodes are never patched.

The three searches use the same {n} pairs of prompts, and sites are heads at positions with a role,
such as the subject. The table shows means over {seeds} sets of prompts. It was made by
`python -m analyses.studies.features_and_neurons{flag}`; the CSV has one row per circuit. The
measures are:

- **sites**, **mlp sites**: the number of sites in the circuit, with and without attention heads.
- **held out**: the faithfulness of the circuit on {n} other pairs of prompts.
- **jaccard**: {resamples} circuits are found on random halves of the prompts; this is the mean
  Jaccard index (shared sites divided by all sites) over pairs of these circuits.
- **error share**: the share of error nodes in Σ |attribution| over all sites except attention
  heads.
- **label**: the number of different tokens that have 80 % of a site's Σ |z| on held-out texts, as
  the median over the circuit's neurons or features. A small number means that few tokens are
  enough to describe when the site is active.

## Predictions, written before the first run

{predictions}

## Results

{table}

![sites and held-out faithfulness](features_and_neurons.svg)

## What this means for the choice of units

In the run whose table is stored here, neither unit gives smaller circuits in general: circuits of
neurons are smaller for number and brackets, circuits of features for gender and indirect objects.
Both are about equally faithful to other prompts, and equally stable. Features have much shorter
labels. Error nodes hold little of number, gender and brackets, but a quarter of the attribution of
MLPs for indirect objects, and half for induction, where MLPs hardly matter. So take features to
describe what units stand for, and look at the share of errors first; take neurons if nothing may
be left unexplained.
"""

if __name__ == "__main__":
    typer.run(main)
