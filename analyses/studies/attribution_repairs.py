"""Measure how exact repairs improve attribution, on prompt pairs not used to tune the repairs.

`attribution` is compared with `activation_patch` at every site, and the expected correlation is
compared with the true one. The models are a saturated classifier (`train_brackets.py`), the shipped
language model, and the real models in the models folder.

    python -m analyses.studies.attribution_repairs --models-dir MODELS --out analyses/results
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analyses.studies.attribution_vs_patching import DIGITS, KINDS, LENGTH
from analyses.studies.attribution_vs_patching import pairs as pairs_of_tokens
from analyses.tools import train_brackets
from analyses.tools.benching import markdown
from analyses.tools.options import Device, ModelsDir, Out, Seed, Smoke
from analyses.tools.real_models import REAL, trained
from analyses.tools.study_files import as_stored, keep, wrapped
from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens import patching as p
from attn_only_lens.engine.interventions import DIRECTIONS
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.patching.repairs import _AT_LEAST, _AT_MOST

BUDGETS = (1, 3, 10, "auto")
WAYS = (("z", "each"), ("pattern", "each"), ("z", "all"), ("z", "each"), ("value", "each"))
AIM, MARGIN = 0.98, 0.02
MANY = 1 / 3  # a share of patched sites with which the method saves little
FEW = {"words_swiglu_4l": 3}  # a third of the pairs, because its sweeps take so long
_Prompts: TypeAlias = tuple[Tensor, Tensor, Metric]


def subjects(
    folder: Path, seed: int, device: str, *, smoke: bool
) -> Iterator[tuple[str, Any, Callable[[Any], Iterator[_Prompts]]]]:
    """Yield models in float64, each with a function that draws its prompts."""

    def of_brackets(model: Any) -> Iterator[_Prompts]:
        for clean, corrupted in train_brackets.pairs(model, seed):
            yield clean, corrupted, train_brackets.BALANCED

    def of_texts(tokens: Tensor, n: int = 1000) -> Callable[[Any], Iterator[_Prompts]]:
        def draw(model: Any) -> Iterator[_Prompts]:
            for pair in pairs_of_tokens(model, tokens, n, seed):
                metric = p.logit_diff(pair.correct, pair.wrong)
                yield pair.clean, pair.corrupted, metric

        return draw

    yield "brackets", train_brackets.load().to(device), of_brackets
    if smoke:
        return
    english = pretrained.small_english(device, torch.float64, hooked=True)
    encoded = [english.to_tokens(text)[0, :12] for text in pretrained.small_english_texts()]
    tokens = torch.stack([ids for ids in encoded if len(ids) == 12])
    yield "small_english", english, of_texts(tokens)
    for name, source, tokens in trained(folder, LENGTH, device, smoke=False):
        if name in REAL and source.cfg.n_layers > 1:  # a one-layer model is nearly linear
            yield name, source, of_texts(tokens[:, :12])


def compare(model: Any, prompts: _Prompts, way: tuple[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each direction, budget and kind of head."""
    part, positions = way
    for direction in DIRECTIONS:
        how = {"part": part, "positions": positions, "direction": direction, "progress": False}
        exact = p.activation_patch(model, *prompts, **how)
        of_kind = {kind: (exact.frame["kind"] == kind).to_numpy() for kind in KINDS}
        n_flops = flops_of_forward(model, prompts[0])
        for budget in (0, *BUDGETS):
            repaired = p.attribution(model, *prompts, **how, budget=budget)
            for kind, here in of_kind.items():
                true, got = (
                    sweep.effect[here].to_numpy().round(DIGITS) for sweep in (exact, repaired)
                )
                if np.ptp(true) == 0:  # no patch has an effect
                    continue
                yield {
                    "kind": kind,
                    "part": part,
                    "direction": direction,
                    "positions": positions,
                    "budget": budget,
                    "pearson": float(np.corrcoef(true, got)[0, 1]) if np.ptp(got) else 0.0,
                    "expected": repaired.expected_pearson.get(kind),
                    "exact": int(repaired.frame["exact"][here].sum()),
                    "n": int(here.sum()),
                    "forwards": repaired.forwards,
                    "gflop": repaired.forwards * n_flops / 1e9,
                }


def flops_of_forward(model: Any, tokens: Tensor) -> float:
    """Return the flops of a forward pass of one prompt, in blocks' matrices and the unembedding."""
    matrices = [x for block in model.blocks for x in block.parameters() if x.ndim > 1]
    per_token = 2 * (sum(map(Tensor.numel, matrices)) + model.cfg.d_model * model.cfg.d_vocab)
    return float(len(tokens) * per_token)


def overstated(frame: pd.DataFrame) -> pd.Series:
    """Return whether the expected correlation exceeds the true one by more than the margin."""
    return frame["expected"] - frame["pearson"] > MARGIN


def by_budget(frame: pd.DataFrame) -> str:
    """Return means and minima by budget, and how often the expected correlation was too high."""
    rows = []
    for (budget, kind), of in frame.groupby(["budget", "kind"], observed=True):
        known = of[of["expected"].notna()]
        rows.append(
            [
                budget,
                KINDS[kind],
                len(of),
                f"{of['pearson'].mean():.4f}",
                f"{of['pearson'].min():.3f}",
                f"{(of['pearson'] < AIM).sum()}",
                len(known),
                f"{overstated(known).sum()}" if len(known) else "–",
                f"{(known['pearson'] - known['expected']).median():.4f}" if len(known) else "–",
            ]
        )
    header = ["budget", "heads", "runs", "mean Pearson", "least", f"< {AIM:g}"]
    header += [
        "runs with an expectation",
        f"too high by > {MARGIN:g}",
        "median of reached - expected",
    ]
    return markdown(header, rows)


def by_model(frame: pd.DataFrame) -> str:
    """Return results by model: with the default budget and its cost, and without repairs."""
    rows = []
    for (model, kind), of in frame.groupby(["model", "kind"], observed=True):
        default, alone = (of[of["budget"] == budget] for budget in ("auto", "0"))
        rows.append(
            [
                model,
                KINDS[kind],
                len(default),
                f"{alone['pearson'].min():.3f}",
                f"{default['pearson'].min():.3f}",
                f"{default['expected'].min():.3f}",
                f"{(default['exact'] / default['n']).median():.0%}",
                f"{default['forwards'].median():.0f} ({default['forwards'].max():.0f})",
                f"{default['gflop'].median():.2f} ({default['gflop'].max():.2f})",
            ]
        )
    header = ["model", "heads", "runs", "least Pearson, estimates alone", "least, by default"]
    header += ["least expected", "sites patched, median", "forward passes, median (most)"]
    return markdown([*header, "Gflop, median (most)"], rows)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw expected against true correlations, one panel per budget, one dot per run."""
    picture = Figure(figsize=(11, 3), layout="constrained")
    panels = picture.subplots(1, len(BUDGETS), sharex=True, sharey=True)
    for panel, budget in zip(panels, BUDGETS, strict=True):
        of_budget = frame[frame["budget"] == str(budget)]
        for number, kind in enumerate(KINDS):
            of = of_budget[of_budget["kind"] == kind]
            x, y = of["expected"].clip(0.5), of["pearson"].clip(0.5)
            panel.plot(x, y, ".", color=f"C{number}", alpha=0.6, markersize=4, label=KINDS[kind])
        panel.plot([0.5, 1], [0.5, 1], color="grey", linewidth=0.7)
        panel.set_title(f"budget {budget}", fontsize="small")
    panels[0].set_ylabel("Pearson reached", fontsize="small")
    panels[0].legend(fontsize="x-small", loc="lower right")
    picture.supxlabel("Pearson expected (below .5: drawn at .5)", fontsize="small")
    return picture


def main(
    out: Out = Path("out/attribution"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    n_pairs: Annotated[int, typer.Option(help="pairs of prompts for each model")] = 15,
    seed: Seed = 1,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    rows, seen = [], []
    with tqdm(unit="pair", leave=False) as bar:
        for name, source, draw in subjects(models_dir, seed, device, smoke=smoke):
            model = expose_neuron_heads(source).model
            bar.set_description(name)
            seen.append(name)
            n = 1 if smoke else max(1, n_pairs // FEW.get(name, 1))
            for number, prompts in enumerate(islice(draw(model), n)):
                way = WAYS[number % len(WAYS)]
                rows += [
                    {"model": name, "pair": number} | row for row in compare(model, prompts, way)
                ]
                bar.update()
    settings = {"models": seen, "n_pairs": n_pairs, "seed": seed, "device": device, "smoke": smoke}
    frames = as_stored({"": pd.DataFrame(rows)}, "%.6g")
    text = page(frames, settings)
    typer.echo(text)
    picture = figure(typed(frames[""]))
    keep(__file__, out, text, frames, picture, started=started, **settings)


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a stored table with kinds of heads and budgets in the order of the page."""
    budgets = list(map(str, (0, *BUDGETS)))
    return frame.astype({"expected": float}).assign(
        kind=pd.Categorical(frame["kind"], list(KINDS)),
        budget=pd.Categorical(frame["budget"].astype(str), budgets),
    )


def page(frames: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> str:
    """Return the page; all numbers come from the table."""
    frame, seen, smoke = typed(frames[""]), settings["models"], settings["smoke"]
    known = frame[frame["expected"].notna()]
    lines = [
        f"- budget {budget}: {overstated(of).sum()} of {len(of)} ({overstated(of).mean():.1%})"
        for budget, of in known.groupby("budget", observed=True)
    ]
    missing = [] if smoke else [name for name in REAL if name not in seen and "relu" not in name]
    text = PAGE.format(
        n_pairs=settings["n_pairs"],
        seed=settings["seed"],
        n_few=settings["n_pairs"] // 3,
        flag=" --smoke" if smoke else "",
        honest="\n".join(lines),
        by_budget=by_budget(frame),
        by_model=by_model(frame),
        missing="".join(
            f"Weights of {name} were missing, so it is left out.\n\n" for name in missing
        ),
        margin=MARGIN,
        at_least=_AT_LEAST,
        gflop_least=_AT_LEAST[1] / 1e9,
        at_most=_AT_MOST,
        gflop_most=_AT_MOST[1] / 1e9,
        **in_short(frame),
    )
    return wrapped(text)


def in_short(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of the page's answer and caution."""
    auto, alone = (frame[frame["budget"] == budget] for budget in ("auto", "0"))
    known = frame[frame["expected"].notna()]
    shares = auto["exact"] / auto["n"]
    median = shares.groupby([auto["model"], auto["kind"]], observed=True).median()
    most = median.groupby(level="model", sort=False).max()
    is_many = median.index.get_level_values("model").map(most > MANY)
    return {
        "models": auto["model"].nunique(),
        "runs": len(auto),
        "least": f"{auto['pearson'].min():.3f}",
        "least_alone": f"{alone['pearson'].min():.2f}",
        "too_high": overstated(known).sum(),
        "expectations": len(known),
        "gflop": f"{auto['gflop'].max():.2f}",
        "passes": f"{auto['forwards'].min():.0f} to {auto['forwards'].max():.0f}",
        "many": " and ".join(most.index[most > MANY]) or "no model",
        "of_many": _percents(median[is_many]),
        "of_few": _percents(median[~is_many]),
    }


def _percents(values: "pd.Series[float]") -> str:
    return f"{100 * values.min():.0f} to {100 * values.max():.0f} %" if len(values) else "–"


PAGE = """# Exact repairs of attribution, on new pairs of prompts

**Question.** `attribution` estimates the effect of every head and neuron from gradients, and
patches a few sites exactly (`budget="auto"`). How well does it then agree with `activation_patch`,
and is the correlation that it expects reliable?

**Answer.** With the default budget, the lowest Pearson correlation over all {runs} runs of {models}
models is {least}; without exact patches, it is {least_alone}. With any budget, the expected
correlation exceeds the true one by more than {margin:g} in {too_high} of {expectations} runs.

**Caution.** The correlation includes the sites that are patched exactly. In {many}, their median
is {of_many} of all sites, so the method saves little there; in the other models, it is {of_few}.
The models are small: the default spends {passes} forward passes, but at most {gflop} Gflop. A large
model gets fewer passes, and [SmolLM2](../../studies.md#removed-studies) was measured on a sample of sites.

In every run, we compare the effects of all attention heads and neurons by `attribution`
with their effects by `activation_patch`, in float64. There are {n_pairs} pairs of prompts for each
model ({n_few} for words_swiglu_4l; seed {seed}). None of these pairs was used to develop the method
or its expected correlations. Both directions are used; the parts "z", "pattern" and "value", and
single positions or all positions together, take turns.

The bracket classifier is right on nearly every text, so its logits hardly change until a patch
changes its answer. Its pairs consist of a balanced text and a text that it calls unbalanced (one
bracket is turned, or two brackets are swapped). Texts of the other pairs differ in one token and in
their most probable next token.

{missing}Every row is in `attribution_repairs.csv`; this page was made by

    python -m analyses.studies.attribution_repairs{flag}

## The default

`budget="auto"` spends at least {at_least[0]:g} forward passes or {gflop_least:g} Gflop, and at most
{at_most[0]:g} forward passes (10 with the estimates) or {gflop_most:g} Gflop; the larger limit
applies. In between, it stops when the 20 largest effects are exact, the expected correlation is .99
for both kinds of heads, and no site before a switch is left. The upper limit is 2.5 times as large
if one of the 20 largest estimates has the wrong sign, or if these 20 need more.

{by_model}

## Expected and true correlations

Runs with an expected correlation in which it exceeds the true one by more than {margin:g}:

{honest}

There is no expected correlation for a budget below 3 forward passes; for a kind of head with fewer
than 16 patched sites (and not all), or with unpatched sites before a switch (a position at which
the norm of the residual stream differs by a factor of two between the runs); or if it is below .8.

{by_budget}

![Expected and true correlations](attribution_repairs.svg)
"""

if __name__ == "__main__":
    typer.run(main)
