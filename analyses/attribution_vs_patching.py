"""How well each method of attribution agrees with patching: every site, every part, exact sweeps.

On the shipped model and on the real ones that are there, for pairs of prompts drawn with a seed,
`attribution` is held against `activation_patch`, neuron-heads and attention heads apart.

    python analyses/attribution_vs_patching.py --models-dir MODELS --out analyses/results
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from exactness_measures import REAL
from matplotlib.figure import Figure
from safetensors.torch import load_file
from studies import keep
from torch import Tensor
from tqdm import tqdm

from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens import patching as p
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.patching._attribution import METHODS
from attn_only_lens.runs.sites import PARTS

LENGTH = {"sort_gelu_new_3l": 6, "modular_addition_relu_1l": 3}  # prompts of tasks; texts: 16
KINDS = {"neuron": "neuron-heads", "attention": "attention heads"}
MEASURES = {"pearson": "Pearson", "spearman": "Spearman", "top_k": "top-k"}
TOP = 20
DIGITS = 9  # of scores; float64 sweeps have about 12


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in one token, and the top tokens after either."""

    clean: Tensor
    corrupted: Tensor
    correct: int
    wrong: int


def subjects(folder: Path, *, smoke: bool) -> Iterator[tuple[str, Any, Tensor]]:
    """Models with neuron-heads, and prompts."""
    shipped = pretrained.modular_addition()
    shipped.to(torch.float64, print_details=False)
    yield (
        "modular_addition",
        expose_neuron_heads(shipped).model,
        pretrained.modular_addition_tokens(),
    )
    for name in () if smoke else REAL:
        if (folder / name).is_dir():
            source = load_source(folder / name).eval()
            source.to(torch.float64, print_details=False)
            if source.cfg.n_key_value_heads is not None:
                source.set_ungroup_grouped_query_attention(True)
            tokens = load_file(folder / name / "tokens.safetensors")["tokens"].long()
            yield name, expose_neuron_heads(source).model, tokens[:, : LENGTH.get(name, 16)]


@torch.no_grad()
def pairs(model: Any, tokens: Tensor, n: int, seed: int) -> Iterator[Pair]:
    """Prompts with one token replaced by another prompt's, where that changes the top token."""
    generator = torch.Generator().manual_seed(seed)
    found = 0
    for _ in range(1000):
        row, other = torch.randint(len(tokens), (2,), generator=generator).tolist()
        at = int(torch.randint(tokens.shape[1], (1,), generator=generator))
        clean, corrupted = tokens[row], tokens[row].clone()
        corrupted[at] = tokens[other, at]
        correct, wrong = model(torch.stack([clean, corrupted]))[:, -1].argmax(-1).tolist()
        if correct != wrong:
            found += 1
            yield Pair(clean, corrupted, correct, wrong)
        if found == n:
            return
    raise RuntimeError(f"of 1000 pairs of prompts, {found} have other top tokens; wanted {n}")


def compare(model: Any, pair: Pair) -> Iterator[dict[str, Any]]:
    """A row for each part, method and kind of head."""
    prompts = pair.clean, pair.corrupted, p.logit_diff(pair.correct, pair.wrong)
    for part in PARTS:
        exact = p.activation_patch(model, *prompts, part=part, progress=False)
        for method in METHODS:
            if part == "q" and method == "frozen_pattern":
                continue  # refused: no query moves a frozen pattern
            estimate = p.attribution(model, *prompts, part=part, method=method, progress=False)
            for kind in KINDS:
                one, other = of_kind(exact, kind), of_kind(estimate, kind)
                if one.frame["score"].nunique() > 1:  # some patch has an effect
                    yield {"kind": kind, "part": part, "method": method} | agree(one, other)


def of_kind(sweep: p.Sweep, kind: str) -> p.Sweep:
    """Heads of one kind; without the rounding that would rank sites that have no effect."""
    found = sweep.query(f"kind == {kind!r}")
    return replace(found, frame=found.frame.round({"score": DIGITS}))


def agree(one: p.Sweep, other: p.Sweep) -> dict[str, Any]:
    """Agreement of an estimate with patching; none where it is the same for all sites."""
    k = min(TOP, len(one.frame) // 2)
    if other.frame["score"].nunique() < 2:
        return {"k": k, "n": len(one.frame)}
    return p.agreement(one, other, k).iloc[0].to_dict()


def table(frame: pd.DataFrame, measure: str) -> str:
    """Means over pairs in Markdown: a row for each model, kind and part, a column a method."""
    means = frame.groupby(["model", "kind", "part", "method"], sort=True, observed=True)[
        measure
    ].mean()
    wide = means.unstack("method")[list(METHODS)]
    lines = [["model", "heads", "part", *METHODS], ["---"] * (3 + len(METHODS))]
    for (model, kind, part), row in wide.iterrows():
        shown = ["–" if pd.isna(x) else f"{x:.3f}" for x in row]
        best = f"{row.max():.3f}"
        cells = [f"**{cell}**" if cell == best else cell for cell in shown]
        lines.append([model, KINDS[kind], part, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(frame: pd.DataFrame) -> str:
    """Means over models, by kind of head and part; an estimate without information counts as 0."""
    filled = frame.fillna(dict.fromkeys(MEASURES, 0.0))
    means = filled.groupby(["kind", "part", "method"], observed=True)[list(MEASURES)].mean()
    lines = [["heads", "part", "method", *MEASURES.values()], ["---"] * (3 + len(MEASURES))]
    for (kind, part, method), row in means.iterrows():
        lines.append([KINDS[kind], part, method, *(f"{x:.3f}" for x in row)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def findings(frame: pd.DataFrame) -> str:
    """Which method is nearest, overall: over the parts that all of them estimate, and over "q"."""
    filled = frame.fillna(dict.fromkeys(MEASURES, 0.0))
    lines = []
    for label, rows in (
        ('parts "z", "pattern" and "value"', filled[filled["part"] != "q"]),
        ('part "q"', filled[filled["part"] == "q"]),
    ):
        for kind, of_kind in rows.groupby("kind", observed=True):
            means = of_kind.groupby("method", observed=True)["pearson"].mean().round(3)
            means = means.sort_values(ascending=False, kind="stable")  # of equals, as in METHODS
            ranked = ", ".join(f"{method} {mean:.3f}" for method, mean in means.items())
            lines.append(f"- {label}, {KINDS[kind]}: mean Pearson {ranked}.")
    return "\n".join(lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Pearson by part, for each kind of head: a dot for each pair, a colour for each method."""
    picture = Figure(figsize=(11, 7), layout="constrained")
    axes = picture.subplots(len(KINDS), 1, sharex=True)
    models = list(frame["model"].unique())
    places = {(m, part): (i, j) for i, m in enumerate(models) for j, part in enumerate(PARTS)}
    for panel, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for offset, method in enumerate(METHODS):
            rows = frame[(frame["kind"] == kind) & (frame["method"] == method)]
            at = [places[key] for key in zip(rows["model"], rows["part"], strict=True)]
            x = [i * (len(PARTS) + 1) + j + 0.18 * (offset - 1.5) for i, j in at]
            panel.plot(x, rows["pearson"], ".", color=f"C{offset}", label=method, alpha=0.7)
        panel.set_title(title)
        panel.set_ylabel("Pearson with patching")
        panel.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize="small")
    ticks = {i * (len(PARTS) + 1) + j: (part, m) for (m, part), (i, j) in places.items()}
    labels = [f"{m}, {part}" if part == PARTS[0] else part for part, m in ticks.values()]
    axes[-1].set_xticks(list(ticks), labels, rotation=60, ha="right", fontsize="small")
    return picture


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/attribution"),
    models_dir: Annotated[
        Path, typer.Option(envvar="ATTN_ONLY_LENS_MODELS", help="real models, a folder each")
    ] = Path(__file__).parents[2] / "shared" / "models",
    n_pairs: Annotated[int, typer.Option(help="pairs of prompts for each model")] = 6,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    smoke: Annotated[bool, typer.Option(help="the shipped model and two pairs")] = False,
) -> None:
    """Measure, print, and keep what `studies.py` says."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    rows, seen = [], []
    n_pairs = 2 if smoke else n_pairs
    with tqdm(unit="pair", leave=False) as bar:
        for name, model, tokens in subjects(models_dir, smoke=smoke):
            bar.set_description(name)
            seen.append(name)
            for number, pair in enumerate(pairs(model, tokens, n_pairs, seed)):
                rows += [{"model": name, "pair": number} | row for row in compare(model, pair)]
                bar.update()
    frame = pd.DataFrame(rows).astype({"k": int, "n": int})
    for column, order in (("kind", list(KINDS)), ("part", PARTS), ("method", METHODS)):
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
    settings = {"models": seen, "n_pairs": n_pairs, "seed": seed, "smoke": smoke}
    keep(__file__, out, page, frame, figure(frame), started=started, **settings)


PAGE = """# Attribution against patching

Every head at every position, clean activations into the corrupted run: the effect that
`attribution` estimates against the one that `activation_patch` measures, in float64, both to 1e-9.
Means over {n_pairs} pairs of prompts (seed {seed}) that differ in one token and in their top next
token; the metric is the logit difference of the two top tokens. Texts have 16 tokens; sorting, the
six digits; addition, all three.

- Pearson, Spearman: over all heads of the kind and all positions, those without effect included.
- top-k: the share of the {{20}} largest |effects| that are among the estimate's (of half of the
  sites, where there are fewer than 40).
- "exact_gate" is "gradient" but for part "q". "frozen_pattern" has no part "q", as no query moves a
  frozen pattern. – : the estimate is the same for every site. relu's gate is a step, whose slope is
  0 wherever it has one; in the means, such an estimate counts as 0. Where no patch has an effect at
  all (queries of the last token in addition, which never changes), there is no row.

{missing}Made by `python analyses/attribution_vs_patching.py{flag}`; every pair is in
`attribution_vs_patching.csv`.

![Pearson by method](attribution_vs_patching.svg)

## What the tables show

{findings}

## Means over models

{summary}

{tables}
""".replace("{{20}}", str(TOP))

if __name__ == "__main__":
    typer.run(main)
