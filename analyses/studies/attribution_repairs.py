"""Measure how well attribution agrees with exact patching, with and without exact repairs.

`attribution` is compared with `activation_patch` at every site, separately for neuron-heads and
attention heads, in float64:

    repairs   by budget: Pearson correlations with patching, the correlations that `attribution`
              expects, and the cost of "auto". None of the pairs of prompts was used to develop the
              repairs. The models are a saturated classifier (`tools/brackets.py`), the shipped
              language model, and real models
    methods   without repairs, by method and part: means over pairs of prompts, on the shipped model
              for modular addition and on real models
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from analyses.study import Setting, Study, Tables
from analyses.tools import brackets
from analyses.tools.benching import markdown
from analyses.tools.real_models import pairs, trained
from attn_only_lens import Contrast, Work, expose_neuron_heads, load, pretrained
from attn_only_lens import patching as p
from attn_only_lens.engine.directions import DIRECTIONS
from attn_only_lens.engine.sites import PARTS
from attn_only_lens.patching.estimate import METHODS
from attn_only_lens.patching.repairs import _AT_LEAST, _AT_MOST

QUIET = Work(progress=False)
KINDS = {"neuron": "neuron-heads", "attention": "attention heads"}
MEASURES = ("pearson", "spearman", "top_k")
DIGITS = 9  # digits of scores; float64 sweeps have about 12
TOP = 20
BUDGETS = (0, 1, 3, 10, "auto")
WITH_EXPECTED = BUDGETS[2:]  # lower budgets have no expected correlation
WAYS = (("z", "each"), ("pattern", "each"), ("z", "all"), ("z", "each"), ("value", "each"))
AIM, MARGIN = 0.98, 0.02
MANY = 1 / 3  # a share of patched sites with which the method saves little
N_PAIRS = {"repairs": 15, "methods": 6}
FEW = {"words_swiglu_4l": 3}  # a third of the pairs, because its sweeps take so long


def subjects(setting: Setting) -> Iterator[tuple[str, Any, list[Contrast], list[Contrast]]]:
    """Yield models, each with pairs of prompts for repairs, and others for methods."""

    def drawn(model: Any, tokens: Tensor, n: int, seed: int) -> list[Contrast]:
        return list(pairs(model, tokens, n, seed))

    of_repairs, of_methods = (1, 1) if setting.smoke else N_PAIRS.values()
    classifier = expose_neuron_heads(brackets.load().to(setting.device)).model
    some = islice(brackets.pairs(classifier, 1), of_repairs)
    yield "brackets", classifier, [Contrast(*pair, brackets.BALANCED) for pair in some], []
    if not setting.smoke:
        source = load("small-english", device=setting.device, dtype=torch.float64)
        encoded = [source.to_tokens(text)[0, :12] for text in pretrained.small_english_texts()]
        tokens = torch.stack([ids for ids in encoded if len(ids) == 12])
        english = expose_neuron_heads(source).model
        yield "small_english", english, drawn(english, tokens, of_repairs, 1), []
    for name, source, tokens in trained(setting.models, setting.device, smoke=setting.smoke):
        model = expose_neuron_heads(source).model
        # A one-layer model is nearly linear.
        n = 0 if source.cfg.n_layers == 1 else of_repairs // FEW.get(name, 1)
        repaired = drawn(model, tokens[:, :12], n, 1) if n else []
        yield name, model, repaired, drawn(model, tokens, of_methods, 0)


def repairs(model: Any, contrast: Contrast, way: tuple[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each direction and kind of head: agreement with patching, by budget."""
    part, positions = way
    n_flops = flops_of_forward(model, contrast.clean)
    for direction in DIRECTIONS:
        how = {"sites": p.Sites(positions=positions), "part": part, "direction": direction}
        how["work"] = QUIET
        exact = p.activation_patch(model, contrast, **how)
        sweeps = {
            budget: p.attribution(model, contrast, method=p.Estimate(budget=budget), **how)
            for budget in BUDGETS
        }
        auto = sweeps["auto"]
        for kind in KINDS:
            here = (exact.frame["kind"] == kind).to_numpy()
            true, *got = (
                x.effect.to_numpy()[here].round(DIGITS) for x in (exact, *sweeps.values())
            )
            if np.ptp(true) == 0:  # no patch has an effect
                continue
            row: dict[str, Any] = {"direction": direction, "kind": kind}
            for budget, effects in zip(BUDGETS, got, strict=True):
                row[str(budget)] = np.corrcoef(true, effects)[0, 1] if np.ptp(effects) else 0.0
            for budget in WITH_EXPECTED:
                row[f"expected_{budget}"] = sweeps[budget].expected_pearson.get(kind)
            row |= {"patched": auto.frame["exact"][here].mean(), "forwards": auto.forwards}
            yield row | {"gflop": auto.forwards * n_flops / 1e9}


def flops_of_forward(model: Any, tokens: Tensor) -> float:
    """Return the flops of a forward pass of one prompt, in blocks' matrices and the unembedding."""
    matrices = [x for block in model.blocks for x in block.parameters() if x.ndim > 1]
    per_token = 2 * (sum(map(Tensor.numel, matrices)) + model.cfg.d_model * model.cfg.d_vocab)
    return float(len(tokens) * per_token)


def methods(model: Any, contrast: Contrast) -> Iterator[dict[str, Any]]:
    """Yield a row per part, method and kind of head; positions are separate, in one direction."""
    for part in PARTS:
        exact = p.activation_patch(model, contrast, part=part, work=QUIET)
        for method in METHODS:
            if method == "secant" and part != "z":  # not possible: split=True divides z
                continue
            estimates = p.Estimate(method, budget=0)
            sweep = p.attribution(model, contrast, part=part, method=estimates, work=QUIET)
            sites = [result.frame[["name", "position"]].astype(str) for result in (exact, sweep)]
            assert sites[0].equals(sites[1])
            for kind in KINDS:
                here = (sweep.frame["kind"] == kind).to_numpy()
                first, second = (result.effect.to_numpy()[here] for result in (exact, sweep))
                if here.any() and np.ptp(first.round(DIGITS)) > 0:  # some patch has an effect
                    yield {"kind": kind, "part": part, "method": method} | agree(first, second)


def agree(exact: np.ndarray, estimated: np.ndarray) -> dict[str, float]:
    """Return how well effects agree; nan if all estimates are equal.

    Effects are rounded, so that all sites without an effect have equal ranks.
    """
    first, second = (effects.round(DIGITS) for effects in (exact, estimated))
    if np.ptp(second) == 0:
        return dict.fromkeys(MEASURES, float("nan"))
    k = min(TOP, len(first) // 2)
    largest = [set(np.argsort(-abs(effects), kind="stable")[:k]) for effects in (first, second)]
    return {
        "pearson": float(np.corrcoef(first, second)[0, 1]),
        "spearman": spearmanr(first, second).statistic,
        "top_k": len(largest[0] & largest[1]) / k,
    }


def run(setting: Setting) -> Tables:
    """Measure all models."""
    repaired, estimated = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, model, of_repairs, of_methods in tqdm(subjects(setting), "models"):
        for number, contrast in enumerate(of_repairs):
            rows = repairs(model, contrast, WAYS[number % len(WAYS)])
            repaired += [{"model": name, "pair": number} | row for row in rows]
        for contrast in of_methods:
            estimated += [{"model": name} | row for row in methods(model, contrast)]
    frame = pd.DataFrame(estimated)
    for column, order in {"kind": list(KINDS), "part": PARTS, "method": METHODS}.items():
        frame[column] = pd.Categorical(frame[column], order)
    means = frame.groupby(["model", "kind", "part", "method"], observed=True).mean().reset_index()
    return {"": pd.DataFrame(repaired), "methods": means}


# The page


def overstated(frame: pd.DataFrame, budget: object) -> "pd.Series[bool]":
    """Return whether the expected correlation exceeds the true one by more than the margin."""
    known = frame[frame[f"expected_{budget}"].notna()]
    return known[f"expected_{budget}"] - known[str(budget)] > MARGIN


def by_budget(frame: pd.DataFrame) -> str:
    """Return means and minima by budget, and how often the expected correlation was too high."""
    rows = []
    for budget in BUDGETS:
        for kind, of in frame.groupby("kind", sort=False):
            pearson, cells = of[str(budget)], ["0", "–", "–"]
            if budget in WITH_EXPECTED:
                wrong = overstated(of, budget)
                median = (pearson - of[f"expected_{budget}"]).median()
                cells = [f"{len(wrong)}", f"{wrong.sum()}", f"{median:.4f}"]
            row = [budget, KINDS[kind], len(of), f"{pearson.mean():.4f}", f"{pearson.min():.3f}"]
            rows.append([*row, (pearson < AIM).sum(), *cells])
    header = ["budget", "heads", "runs", "mean Pearson", "least", f"< {AIM:g}"]
    header += ["runs with an expectation", f"too high by > {MARGIN:g}"]
    return markdown([*header, "median of reached - expected"], rows)


def by_model(frame: pd.DataFrame) -> str:
    """Return results by model: with the default budget and its cost, and without repairs."""
    rows = []
    for (model, kind), of in frame.groupby(["model", "kind"], sort=False):
        least = [f"{of[column].min():.3f}" for column in ("0", "auto", "expected_auto")]
        costs = [
            f"{of[column].median():.{digits}f} ({of[column].max():.{digits}f})"
            for column, digits in (("forwards", 0), ("gflop", 2))
        ]
        patched = f"{of['patched'].median():.0%}"
        rows.append([model, KINDS[kind], len(of), *least, patched, *costs])
    header = ["model", "heads", "runs", "least Pearson, estimates alone", "least, by default"]
    header += ["least expected", "sites patched, median", "forward passes, median (most)"]
    return markdown([*header, "Gflop, median (most)"], rows)


def by_method(means: pd.DataFrame) -> str:
    """Return means over models; an uninformative estimate counts as 0."""
    of = means.fillna(0.0).groupby(["kind", "part", "method"], sort=False)[list(MEASURES)].mean()
    rows = ([KINDS[key[0]], *key[1:], *(f"{x:.3f}" for x in row)] for key, row in of.iterrows())
    return markdown(["heads", "part", "method", "Pearson", "Spearman", "top-k"], rows)


def pearson_by_model(means: pd.DataFrame) -> str:
    """Return mean correlations: a row per model, kind of head and part, a column per method."""
    wide = means.pivot_table("pearson", ["model", "kind", "part"], "method", sort=False)
    rows = []
    for (model, kind, part), row in wide[list(METHODS)].iterrows():
        shown = ["–" if pd.isna(x) else f"{x:.3f}" for x in row]
        best = f"{row.max():.3f}"
        cells = [f"**{cell}**" if cell == best else cell for cell in shown]
        rows.append([model, KINDS[kind], part, *cells])
    return markdown(["model", "heads", "part", *METHODS], rows)


def ranked(means: pd.DataFrame, parts: list[str], kind: str) -> str:
    """Return mean correlations by method, the best one first."""
    some = means[means["part"].isin(parts) & (means["kind"] == kind)].fillna({"pearson": 0.0})
    by = some.groupby("method", sort=False)["pearson"].mean().round(3)
    by = by.reindex([x for x in METHODS if x in by]).sort_values(ascending=False, kind="stable")
    return ", ".join(f"{method} {mean:.3f}" for method, mean in by.items())


def patched_shares(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the models in which many sites are patched, and the median shares of these and others.

    Shares are those of the kinds of heads.
    """
    median = frame.groupby(["model", "kind"], sort=False)["patched"].median()
    many = median.groupby(level="model", sort=False).max() > MANY
    is_many = median.index.get_level_values("model").map(many)
    return {"models": list(many.index[many]), "many": median[is_many], "few": median[~is_many]}


def figures(tables: Tables) -> dict[str, Figure]:
    """Draw expected against true correlations, and correlations by method without repairs."""
    frame, means = tables[""], tables["methods"]
    first = Figure(figsize=(8.5, 3), layout="constrained")
    panels = first.subplots(1, len(WITH_EXPECTED), sharex=True, sharey=True)
    for panel, budget in zip(panels, WITH_EXPECTED, strict=True):
        for number, kind in enumerate(KINDS):
            of = frame.loc[frame["kind"] == kind, [f"expected_{budget}", str(budget)]].dropna()
            dots = ((of / 0.0025).round() * 0.0025).drop_duplicates().to_numpy().T
            panel.plot(*dots, ".", color=f"C{number}", alpha=0.6, markersize=4, label=KINDS[kind])
        panel.plot([0.8, 1], [0.8, 1], color="grey", linewidth=0.7)
        panel.set_title(f"budget {budget}", fontsize="small")
    panels[0].set_ylabel("Pearson reached", fontsize="small")
    panels[0].legend(fontsize="x-small", loc="lower right")
    first.supxlabel("Pearson expected", fontsize="small")
    second = Figure(figsize=(9, 5), layout="constrained")
    models = list(means["model"].unique())
    panels = second.subplots(len(KINDS), sharex=True)
    for panel, (kind, heads) in zip(panels, KINDS.items(), strict=True):
        of_kind = means[means["kind"] == kind].fillna({"pearson": 0.0})
        for number, method in enumerate(METHODS):
            some = of_kind[of_kind["method"] == method]
            x = some["model"].map(models.index) + 0.18 * (number - 1.5)
            panel.plot(x, some["pearson"], ".", color=f"C{number}", alpha=0.6, label=method)
        panel.set_xticks(range(len(models)), models, fontsize="small")
        panel.set_ylabel(f"{heads}: Pearson", fontsize="small")
        panel.grid(axis="y", alpha=0.3)
    second.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return {"": first, "methods": second}


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame, means = tables[""], tables["methods"]
    return {
        "too_high": {budget: overstated(frame, budget) for budget in WITH_EXPECTED},
        "patched": patched_shares(frame),
        "by_budget": by_budget(frame),
        "by_model": by_model(frame),
        "by_method": by_method(means),
        "pearson_by_model": pearson_by_model(means),
        "ranked": lambda parts, kind: ranked(means, parts, kind),
        "limits": {"least": _AT_LEAST, "most": _AT_MOST},
        **{"n_pairs": N_PAIRS, "n_few": N_PAIRS["repairs"] // 3, "margin": MARGIN, "top": TOP},
    }


STUDY = Study(run, figures, facts)
