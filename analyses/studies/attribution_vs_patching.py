"""Measure how well each attribution method agrees with exact patching, at every site and part.

On the shipped model and on the real models in the models folder, for seeded random prompt pairs,
`attribution` without exact repairs is compared with `activation_patch`, separately for neuron-heads
and attention heads. For the effect of repairs, see `attribution_repairs.py`.

    python -m analyses.studies.attribution_vs_patching --models-dir MODELS --out analyses/results
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from analyses.tools.benching import markdown
from analyses.tools.options import Device, ModelsDir, Out, Seed, Smoke
from analyses.tools.real_models import REAL, trained
from analyses.tools.study_files import keep
from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.sites import PARTS
from attn_only_lens.patching._attribution import METHODS

LENGTH = {"sort_gelu_new_3l": 6, "modular_addition_relu_1l": 3}  # prompt lengths; of texts 16
KINDS = {"neuron": "neuron-heads", "attention": "attention heads"}
MEASURES = {"pearson": "Pearson", "spearman": "Spearman", "top_k": "top-k"}
TOP = 20
AIMED = ("z", "pattern", "value")
DIGITS = 9  # digits of scores; float64 sweeps have about 12


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in one token, and the top token after each of them."""

    clean: Tensor
    corrupted: Tensor
    correct: int
    wrong: int


@torch.no_grad()
def pairs(model: Any, tokens: Tensor, n: int, seed: int) -> Iterator[Pair]:
    """Yield prompts in which one token from another prompt changes the top token."""
    generator = torch.Generator().manual_seed(seed)
    n_found = 0
    for _ in range(1000):
        row, other_row = torch.randint(len(tokens), (2,), generator=generator).tolist()
        place = int(torch.randint(tokens.shape[1], (1,), generator=generator))
        clean, corrupted = tokens[row], tokens[row].clone()
        corrupted[place] = tokens[other_row, place]
        correct, wrong = model(torch.stack([clean, corrupted]))[:, -1].argmax(-1).tolist()
        if correct != wrong:
            n_found += 1
            yield Pair(clean, corrupted, correct, wrong)
        if n_found == n:
            return
    raise RuntimeError(f"of 1000 pairs of prompts, {n_found} have other top tokens; wanted {n}")


def compare(model: Any, pair: Pair) -> Iterator[dict[str, Any]]:
    """Yield a row per part, method and kind of head; positions are separate, in one direction."""
    prompts = pair.clean, pair.corrupted, p.logit_diff(pair.correct, pair.wrong)
    for part in PARTS:
        exact = p.activation_patch(model, *prompts, part=part, progress=False)
        for method in METHODS:
            if method == "secant" and part != "z":  # not possible: split=True divides z
                continue
            sweep = p.attribution(
                model, *prompts, part=part, method=method, budget=0, progress=False
            )
            sites = [result.frame[["name", "position"]].astype(str) for result in (exact, sweep)]
            assert sites[0].equals(sites[1])
            for kind in KINDS:
                here = (sweep.frame["kind"] == kind).to_numpy()
                first, second = (result.effect.to_numpy()[here] for result in (exact, sweep))
                if here.any() and np.ptp(first.round(DIGITS)) > 0:  # some patch has an effect
                    yield {"kind": kind, "part": part, "method": method} | agree(first, second)


def agree(exact: np.ndarray, estimated: np.ndarray) -> dict[str, Any]:
    """Return the measures of `p.agreement`; only `k` and `n` if all estimates are equal.

    Effects are rounded, so that all sites without an effect have equal ranks.
    """
    first, second = (effects.round(DIGITS) for effects in (exact, estimated))
    k = min(TOP, len(first) // 2)
    if np.ptp(second) == 0:
        return {"k": k, "n": len(first)}
    largest = [set(np.argsort(-abs(effects), kind="stable")[:k]) for effects in (first, second)]
    return {
        "k": k,
        "n": len(first),
        "pearson": float(np.corrcoef(first, second)[0, 1]),
        "spearman": spearmanr(first, second).statistic,
        "top_k": len(largest[0] & largest[1]) / k,
    }


def table(frame: pd.DataFrame, measure: str) -> str:
    """Return means over pairs: one row per model, kind and part, one column per method."""
    keys = ["model", "kind", "part", "method"]
    wide = frame.groupby(keys, observed=True)[measure].mean().unstack("method")
    rows = []
    for (model, kind, part), row in wide[list(METHODS)].iterrows():
        shown = ["–" if pd.isna(x) else f"{x:.3f}" for x in row]
        best = f"{row.max():.3f}"
        cells = [f"**{cell}**" if cell == best else cell for cell in shown]
        rows.append([model, KINDS[kind], part, *cells])
    return markdown(["model", "heads", "part", *METHODS], rows)


def summary(frame: pd.DataFrame) -> str:
    """Return means over models, by kind of head and part; an uninformative estimate counts as 0."""
    filled = frame.fillna(dict.fromkeys(MEASURES, 0.0))
    means = filled.groupby(["kind", "part", "method"], observed=True)[list(MEASURES)].mean()
    return markdown(
        ["heads", "part", "method", *MEASURES.values()],
        (
            [KINDS[kind], part, method, *(f"{x:.3f}" for x in row)]
            for (kind, part, method), row in means.iterrows()
        ),
    )


def findings(frame: pd.DataFrame) -> str:
    """Return which method agrees best on average, over the parts of all methods, and for "q"."""
    filled = frame.fillna(dict.fromkeys(MEASURES, 0.0))
    lines = []
    for label, rows in (
        ('parts "z", "pattern" and "value"', filled[filled["part"].isin(AIMED)]),
        ('part "q"', filled[filled["part"] == "q"]),
    ):
        for kind, of_kind in rows.groupby("kind", observed=True):
            means = of_kind.groupby("method", observed=True)["pearson"].mean().round(3)
            means = means.sort_values(ascending=False, kind="stable")  # ties: as in METHODS
            ranked = ", ".join(f"{method} {mean:.3f}" for method, mean in means.items())
            lines.append(f"- {label}, {KINDS[kind]}: mean Pearson {ranked}.")
    return "\n".join(lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw Pearson correlations by method and kind of head: a dot per run, a panel per model."""
    picture = Figure(figsize=(11, 6), layout="constrained")
    models = list(frame["model"].unique())
    panels = picture.subplots(len(KINDS), len(models), sharex=True, sharey=True, squeeze=False)
    for row, kind in zip(panels, KINDS, strict=True):
        for panel, model in zip(row, models, strict=True):
            of = frame[(frame["kind"] == kind) & (frame["model"] == model)]
            for place, method in enumerate(METHODS):
                y = of.loc[of["method"] == method, "pearson"].fillna(0.0)
                x = place + 0.3 * (np.arange(len(y)) / max(1, len(y)) - 0.5)
                panel.plot(x, y, ".", color=f"C{place}", alpha=0.5, markersize=4, rasterized=True)
            panel.set_xticks(range(len(METHODS)), METHODS, rotation=90, fontsize="x-small")
            panel.grid(axis="y", alpha=0.3)
            if kind == next(iter(KINDS)):
                panel.set_title(model, fontsize="small")
        row[0].set_ylabel(f"{KINDS[kind]}: Pearson", fontsize="small")
    return picture


def main(
    out: Out = Path("out/attribution"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    n_pairs: Annotated[int, typer.Option(help="pairs of prompts for each model")] = 6,
    seed: Seed = 0,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    rows, seen = [], []
    n_pairs = 2 if smoke else n_pairs
    with tqdm(unit="pair", leave=False) as bar:
        for name, source, tokens in trained(models_dir, LENGTH, device, smoke=smoke):
            model = expose_neuron_heads(source).model
            bar.set_description(name)
            seen.append(name)
            for number, pair in enumerate(pairs(model, tokens, n_pairs, seed)):
                rows += [{"model": name, "pair": number} | row for row in compare(model, pair)]
                bar.update()
    frame = pd.DataFrame(rows).astype({"k": int, "n": int})
    orders = {"kind": list(KINDS), "part": PARTS, "method": METHODS}
    for column, order in orders.items():
        frame[column] = pd.Categorical(frame[column], order)
    missing = [] if smoke else [name for name in REAL if name not in seen]
    page = PAGE.format(
        n_pairs=n_pairs,
        seed=seed,
        flag=" --smoke" if smoke else "",
        missing="".join(f"Left out, its weights were not there: {name}.\n\n" for name in missing),
        findings=findings(frame),
        summary=summary(frame),
        tables="\n\n".join(
            f"## {title}, by model\n\n{table(frame, name)}" for name, title in MEASURES.items()
        ),
    )
    typer.echo(page)
    settings = {"models": seen, "n_pairs": n_pairs, "seed": seed, "device": device, "smoke": smoke}
    keep(__file__, out, page, frame, figure(frame), started=started, **settings)


PAGE = """# Attribution against patching

We compare the effects that `attribution` estimates with the effects that `activation_patch`
measures, for every head and neuron at every position, in float64 (rounded to 1e-9). Each model has
{n_pairs} pairs of prompts (seed {seed}), which differ in one token and in their most probable next
token. The metric is the logit difference of these two next tokens. Texts have 16 tokens; prompts of
sorting have the six digits, and prompts of addition three tokens.

- Pearson, Spearman: correlations over all heads of the kind and all positions, also those without
  effect.
- top-k: the share of the {{20}} largest |effects| that are among the estimate's (of half of the
  sites, where there are fewer than 40).
- If no patch has an effect, there is no row (queries of the last token in addition, which is always
  the same).

{missing}Made by `python -m analyses.studies.attribution_vs_patching{flag}`; every row is in
`attribution_vs_patching.csv`.

Clean activations into the corrupted run, each position by itself, `budget=0`: no site is patched
exactly; [what that makes of them](attribution_repairs.md). "exact_gate" is
"gradient" except for part "q". "secant" takes part "z" alone, and one estimate of it is for both
directions: [contrast_vs_patching.md](contrast_vs_patching.md) compares it with their mean. – : the
estimate is the same for every site. relu's gate is a step, whose slope is 0 wherever it has one; in
the means, such an estimate counts as 0. Part "k" is of attention heads alone, and its estimate is
linear.

{findings}

![Pearson by method](attribution_vs_patching.svg)

## Means over models

{summary}

{tables}
""".replace("{{20}}", str(TOP))

if __name__ == "__main__":
    typer.run(main)
