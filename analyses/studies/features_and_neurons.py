"""Compare circuits of transcoder features with circuits of neurons, at equal faithfulness.

    python -m analyses.studies.features_and_neurons --out analyses/results

Small English is analysed in three forms. On the same prompts of a task, `discover` searches for a
circuit of heads and

    neurons              the model itself
    features, errors     with transcoders in the place of all MLPs, and error nodes, which may be
                         part of a circuit
    features             the same model, but error nodes are never ablated, so they belong to every
                         circuit

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

N_PROMPTS, SEEDS, RESAMPLES = 20, 3, 20
HELD_OUT_SEED = 700
COVERED = 0.8
"""The share of an activation that the tokens in a label have."""
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
    """Yield Small English in the form of an arm."""
    model = pretrained.small_english(device)
    if arm == "neurons":
        yield expose_neuron_heads(model).model
    else:
        with transcoders.attach(model, pretrained.small_english_transcoders(device)) as attached:
            yield attached


@torch.no_grad()
def label_lengths(model: Any, texts: list[str]) -> dict[tuple[int, int], int]:
    """Return, for each neuron or feature, how many different tokens cover most of its |z|.

    The label of a site that is active on few kinds of tokens is short.
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
    """Return what was predicted before the first run, and whether it held."""
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
    """The number of sites and the held-out faithfulness by task: a dot for each circuit."""
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
    out: Out = Path("out/features_and_neurons"), device: Device = "cpu", smoke: Smoke = False
) -> None:
    """Measure, print, and write the page, the table and the figure (`study_files.py`)."""
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
(`pretrained.small_english_transcoders`). On the same {n} pairs of prompts of a task, with positions
by role, `discover` searches for a circuit that keeps .9 of the metric while all other sites are
patched from the corrupted prompts: of heads and neurons; of heads, features and error nodes; and of
heads and features, where error nodes are never patched. Means over {seeds} sets of prompts. Made by
`python -m analyses.studies.features_and_neurons{flag}`; every circuit is in the CSV.

- **sites**, **mlp sites**: the size of the circuit, with and without attention heads.
- **held out**: the faithfulness of the circuit on {n} other prompts.
- **jaccard**: the mean Jaccard index of circuits on {resamples} random halves of the prompts.
- **error share**: the share of error nodes in Σ |attribution| over neurons or features and errors.
- **label**: how many different tokens have 80 % of a site's activation on held-out texts; the
  median over the circuit's neurons or features.

## Predictions, written before the first run

{predictions}

## Results

{table}

![sites and held-out faithfulness](features_and_neurons.svg)
"""

if __name__ == "__main__":
    typer.run(main)
