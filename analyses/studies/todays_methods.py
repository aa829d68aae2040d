"""Compare today's gradient methods with secants: agreement with patching, and held-out circuits.

The methods are those of `analyses/tools/gradient_rules.py`. Every method gets the same pairs and
the same recorded runs, and its multipliers are taken in the run that is patched: the corrupted run
estimates denoising, the clean run noising. There are four tables:

    ""          correlations of estimates with exact patches, in both directions, by kind of head
    kept        what the highest-ranked sites keep, on the pairs that the ranking was made on, and
                on other pairs of the same task ("held out")
    costs       floating-point operations, in forward passes of the pair, and seconds
    labels      edges between heads, with labels K, Q and V, by Unpack and by this package's graphs,
                compared with exact path patches

SmolLM2, with `--smollm2 FOLDER`, is only in `kept`, because its exact patches would take hours.
"""

import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from analyses.studies import circuits_that_hold, contrast_vs_patching
from analyses.study import Setting, Study, Tables
from analyses.tools.benching import table
from analyses.tools.flops import FlopCounter
from analyses.tools.gradient_rules import METHODS, STEPS, Runs, sweep_of
from analyses.tools.real_models import pairs, trained
from analyses.tools.study_files import t_interval
from analyses.tools.unpack_credit import edge_credit
from attn_only_lens import Contrast, Work, circuits, expose_neuron_heads, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.stability import share_of_sums
from attn_only_lens.engine.metrics import bind
from attn_only_lens.patching.results import Sweep
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

Rows: TypeAlias = Iterator[dict[str, Any]]

QUIET = Work(progress=False)
DIRECTIONS = ("denoise", "noise")
SIZES = (10, 20, 40, 80, 160, 320, 640)
N_FIND, N_JUDGE = 8, 24
WITHOUT_SIGN = ("AtP*",)
SLOW = ("EAP-IG, activations",)
"""Methods that are left out on SmolLM2: a run for each sublayer and step would take hours."""
NEAR = 0.005
"""Errors that differ by less are counted as equal, in the table of the best methods."""
KINDS = ("q", "k", "value")
STRUCTURES = ("prepositional", "relative")


def sweeps(model: Any, contrast: Contrast, direction: str, methods: Any = METHODS) -> Any:
    """Return the sweep of each method."""
    runs = Runs(model, contrast, direction)
    how: dict[str, Any] = {"direction": direction, "work": QUIET}
    like = p.attribution(model, contrast, method=p.Estimate("secant", budget=0), **how)
    return {name: sweep_of(runs, METHODS[name], like) for name in methods}


def truths(model: Any, contrast: Contrast) -> Rows:
    """Yield the correlations of every method with patching, by direction and kind of head.

    `magnitudes` is the correlation of absolute values, the only one for methods without a sign.
    """
    for direction in DIRECTIONS:
        exact = p.activation_patch(model, contrast, direction=direction, work=QUIET)
        for method, sweep in sweeps(model, contrast, direction).items():
            for kind in ("attention", "neuron"):
                here = (exact.frame["kind"] == kind).to_numpy()
                effect, estimate = (x.effect.to_numpy()[here] for x in (exact, sweep))
                signed = float("nan")
                if method not in WITHOUT_SIGN:
                    signed = np.corrcoef(effect, estimate)[0, 1]
                size = np.corrcoef(abs(effect), abs(estimate))[0, 1]
                row = {"direction": direction, "kind": kind, "method": method}
                yield row | {"signed": signed, "magnitudes": size}


def kept(model: Any, find: Contrast, judges: dict[str, Contrast], methods: Any = METHODS) -> Rows:
    """Yield what the first k sites of each ranking by magnitude keep, on each set of pairs."""
    rankings: dict[tuple[str, str], Sweep] = {
        (direction, method): sweep
        for direction in DIRECTIONS
        for method, sweep in sweeps(model, find, direction, methods).items()
    }
    frame = next(iter(rankings.values())).frame
    for name, contrast in judges.items():
        given = model, contrast.pair(model), contrast.metric, frame
        ablated = ablated_model(*given, ablation="resample", work=QUIET)
        sizes = [size for size in SIZES if size < len(frame)]
        chosen = {
            (*key, size): ablated.ranked(ranking, "magnitude")[:size]
            for key, ranking in rankings.items()
            for size in sizes
        }
        left = ablated.by_prompt(list(chosen.values()))
        whole, nothing = ablated.whole_by_prompt, ablated.nothing_by_prompt
        shares = (share_of_sums(x - nothing, whole - nothing, ablated.weights)[0] for x in left)
        for key, share, error in zip(chosen, shares, ablated.errors(left), strict=True):
            names = dict(zip(("direction", "method", "size"), key, strict=True))
            yield {"pairs": name, **names, "faithfulness": share, "error": error}


def costs(model: Any, contrast: Contrast) -> Rows:
    """Yield the cost of each method's multipliers for denoising, without what all methods need."""
    runs = Runs(model, contrast, "denoise")
    target, _, _ = runs.recordings[0], runs.change, runs.metric  # all methods need these
    with FlopCounter() as unit:
        model(target.tokens)
    for method, function in METHODS.items():
        started = time.perf_counter()
        with FlopCounter() as cost:
            function(runs)
        seconds = time.perf_counter() - started
        yield {"method": method, "passes": cost.total / unit.total, "seconds": seconds}


def labels(model: Any, contrast: Contrast) -> Rows:
    """Yield how well |edges| between heads agree with |path patches|, by label K, Q and V.

    An edge goes from a head to a head, summed over positions. `spearman` is the rank correlation
    with the mean of denoising and noising, and `share` the label's share of Σ |weight|.
    """
    pair = contrast.pair(model)
    exposed = expose_neuron_heads(model, copy=True).model
    one_run = Contrast(contrast.clean, None, contrast.metric)
    exact = pd.concat([_path_patches(exposed, contrast, part) for part in KINDS]).sort_index()
    every = {"Unpack": edge_credit(model, pair.clean[0], _weights(exposed, contrast))}
    for name, runs in (("graph of one run", one_run), ("secant graph", contrast)):
        edges = circuits.attribution_graph(exposed, runs, sites="heads").edges
        heads = {end: edges[end].str.partition("@")[0] for end in ("source", "target")}
        every[name] = edges.assign(**heads)
    for method, edges in every.items():
        sums = edges.groupby(["source", "target", "kind"])["weight"].sum()
        sizes = sums.reindex(exact.index).fillna(0.0).abs()
        for kind in KINDS:
            some, truth = (x.xs(kind, level="kind") for x in (sizes, exact))
            row = {"method": method, "kind": kind, "share": some.sum() / sizes.sum()}
            yield row | {"spearman": float(spearmanr(some, truth).statistic)}
        row = {"method": method, "kind": "all", "share": 1.0}
        yield row | {"spearman": float(spearmanr(sizes, exact).statistic)}


def _weights(model: Any, contrast: Contrast) -> Tensor:
    """Return the metric's gradient at the logits of the last token."""
    pair = contrast.pair(model)
    with torch.enable_grad():
        logits = model(pair.clean).detach().requires_grad_()
        metric = bind(contrast.metric, model, pair, logits).of_logits(logits)
        (gradient,) = torch.autograd.grad(metric, logits)
    return gradient[0, -1]


def _path_patches(model: Any, contrast: Contrast, part: str) -> "pd.Series[float]":
    """Return |path patch| of all edges between heads into one part, the mean of both directions."""
    edges, total = p.Edges(p.Sites("heads", "all"), "heads", part), 0.0
    for direction in DIRECTIONS:
        patch = p.path_patch(model, contrast, edges, direction=direction, work=QUIET)
        total = total + abs(patch.effect.to_numpy()) / 2
    ends = patch.frame[["sender", "receiver"]].astype(str).assign(kind=part, size=total)
    index = ["source", "target", "kind"]
    return ends.set_axis([*index, "size"], axis=1).set_index(index)["size"]


def with_labels(setting: Setting) -> Iterator[tuple[str, Any, list[Contrast]]]:
    """Yield HookedTransformers that Unpack explains: with LayerNorm, without gated MLPs."""
    if setting.smoke:
        cfg = {"n_layers": 2, "d_model": 12, "n_heads": 2, "d_head": 6, "d_mlp": 17, "n_ctx": 16}
        config = HookedTransformerConfig(**cfg, d_vocab=19, act_fn="gelu", seed=0)
        tiny = HookedTransformer(config).to(torch.float64)
        tokens = torch.randint(19, (7, 5), generator=torch.Generator().manual_seed(0))
        yield "tiny", tiny, list(pairs(tiny, tokens, 1, 0))
    for name, source, tokens in trained(setting.models, setting.device, smoke=setting.smoke):
        if name.startswith(("char", "sort")):
            yield name, source, list(pairs(source, tokens, 3, 0))


def held_out(setting: Setting) -> Iterator[tuple[str, str, Any, Contrast]]:
    """Yield models with tasks whose prompts have tokens of the same role at the same position."""
    model = expose_neuron_heads(load("small-english"), copy=True).model
    for structure in STRUCTURES[:1] if setting.smoke else STRUCTURES:
        pairs = tasks.agreement(model.tokenizer, 80, structure=structure).solved_by(model)
        yield "small_english", structure, model, same_length(model, pairs)
    if setting.smollm2 is not None:
        model = expose_neuron_heads(load(setting.smollm2)).model
        pairs = circuits_that_hold.pairs(model, "number", N_FIND + N_JUDGE)
        yield "SmolLM2-135M", "number", model, same_length(model, pairs)


def same_length(model: Any, contrast: Contrast) -> Contrast:
    """Return the pairs with the commonest number of tokens."""
    mask = contrast.pair(model).mask
    if mask is None:
        return contrast
    lengths = mask.sum(1)
    rows = (lengths == lengths.mode().values).nonzero().flatten().tolist()
    return contrast[rows]


def run(setting: Setting) -> Tables:
    """Measure all models."""
    rows: dict[str, list[dict[str, Any]]] = {"": [], "kept": [], "costs": [], "labels": []}
    for name, source, some in with_labels(setting):
        for pair, contrast in enumerate(some):
            about = {"model": name, "pair": pair}
            rows["labels"] += (about | row for row in labels(source, contrast))
    few = Setting(**vars(setting) | {"smollm2": None})
    for subject in tqdm(contrast_vs_patching.subjects(few), "models"):
        for pair, contrast in enumerate(subject.few):
            about = {"model": subject.name, "pair": pair}
            rows[""] += (about | row for row in truths(subject.model, contrast))
            same = kept(subject.model, contrast, {"same": contrast})
            rows["kept"] += (about | {"task": "pairs"} | row for row in same)
        rows["costs"] += ({"model": subject.name} | x for x in costs(subject.model, contrast))
    for name, task, model, contrast in held_out(setting):
        methods = [x for x in METHODS if x not in SLOW or name == "small_english"]
        judges = {"found on": contrast[:N_FIND], "held out": contrast[N_FIND:][:N_JUDGE]}
        measured = kept(model, contrast[:N_FIND], judges, methods)
        rows["kept"] += ({"model": name, "pair": 0, "task": task} | row for row in measured)
    tables = {part: pd.DataFrame(some) for part, some in rows.items()}
    return tables | {"kept": over_pairs(tables["kept"])}


def over_pairs(kept: pd.DataFrame) -> pd.DataFrame:
    """Return means over the pairs of a model."""
    keys = ["model", "task", "pairs", "direction", "method", "size"]
    return kept.groupby(keys, sort=False)[["faithfulness", "error"]].mean().reset_index()


# The page


def figure(rows: pd.DataFrame) -> Figure:
    """Draw errors on held-out pairs by size, a panel for each task; the clean run's gradients."""
    rows = rows[(rows["pairs"] == "held out") & (rows["direction"] == "noise")]
    of_tasks = list(rows.groupby(["model", "task"], sort=False))
    picture = Figure(figsize=(3.2 * max(2, len(of_tasks)), 3.4), layout="constrained")
    panels = np.atleast_1d(picture.subplots(1, len(of_tasks), sharey=True))
    for panel, (names, some) in zip(panels, of_tasks, strict=True):
        for method in METHODS:
            line = some[some["method"] == method].sort_values("size")
            style = "k-" if method == "secant" else "-"
            panel.plot(
                line["size"], line["error"].clip(0, 1), style, lw=1, marker=".", label=method
            )
        panel.set(title=", ".join(names), xscale="log", xlabel="sites")
        panel.minorticks_off()
    panels[0].set_ylabel("error on held-out pairs")
    handles = panels[0].get_legend_handles_labels()
    picture.legend(*handles, loc="outside lower center", ncols=4, fontsize="small")
    return picture


def correlations(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean correlations of magnitudes by method, direction and kind of head."""
    wide = frame.pivot_table("magnitudes", "method", ["direction", "kind"], sort=False)
    return wide.reindex(list(METHODS))


def against_secants(frame: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean correlation minus that of secants, with intervals over pairs."""
    keys = ["model", "pair", "direction", "kind"]
    wide = frame.pivot(index=keys, columns="method", values="magnitudes")
    less = wide.sub(wide["secant"], axis=0).drop(columns="secant")
    rows = {}
    for (direction, kind), some in less.groupby(["direction", "kind"], sort=False):
        rows[f"{direction}, {kind}"] = {
            method: "{:+.3f} [{:+.3f}, {:+.3f}]".format(*t_interval(some[method].dropna()))
            for method in METHODS
            if method != "secant"
        }
    return pd.DataFrame(rows).rename_axis("method").reset_index()


def errors(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return mean errors by size, with a row for each method and direction."""
    keys = [*by, "direction", "method"]
    return rows.pivot_table("error", keys, "size", sort=False).rename(columns=str)


def least(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the methods with the least error at each size, or within .005 of it, by task."""
    found = []
    for (model, task, direction), some in rows.groupby(["model", "task", "direction"], sort=False):
        wide = some.pivot(index="method", columns="size", values="error").reindex(list(METHODS))
        names = {
            str(size): "; ".join(column.index[column <= column.min() + NEAR])
            for size, column in wide.items()
        }
        found.append({"model": model, "task": task, "gradients for": direction} | names)
    return pd.DataFrame(found)


def alone(rows: pd.DataFrame) -> tuple["pd.Series[int]", int]:
    """Return how often each method has the least error by more than `NEAR`, and of how many.

    A case is a task, a direction and a size.
    """
    keys = ["model", "task", "direction", "size"]
    wide = rows.pivot(index=keys, columns="method", values="error")
    first, second = np.sort(wide.fillna(np.inf).to_numpy(), axis=1)[:, :2].T
    wins = wide[second - first > NEAR].idxmin(axis=1).value_counts()
    return wins.reindex(list(METHODS), fill_value=0), len(wide)


def fixed(frame: pd.DataFrame, digits: int = 3) -> str:
    """Return a table whose numbers have the same number of digits after the point."""
    if isinstance(frame.columns, pd.MultiIndex):
        frame = frame.set_axis([", ".join(names) for names in frame.columns], axis=1)
    frame = frame.reset_index() if frame.index.names[0] else frame

    def cell(x: Any) -> Any:
        return "–" if pd.isna(x) else f"{x:.{digits}f}" if isinstance(x, float) else x

    return table(frame.map(cell))


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    kept = tables["kept"]
    judged = kept[kept["pairs"] == "held out"]
    means = correlations(tables[""])
    ours = means.loc["secant"]
    at_40 = judged[judged["size"] == 40].groupby(["model", "method"], sort=False)["error"].mean()
    same = kept[kept["pairs"] == "same"]
    found = tables["labels"]
    costs = tables["costs"].groupby("method", sort=False)[["passes", "seconds"]].median()
    return {
        **{"fixed": fixed, "errors": errors, "near": NEAR, "steps": STEPS},
        "means": means,
        "best": [
            f"{column.idxmax()} {column.max():.3f} ({', '.join(names)})"
            for names, column in means.items()
        ],
        "better": [
            f"{method} in {n} of {len(ours)}"
            for method, n in means.gt(ours, axis=1).sum(axis=1).items()
            if n and method != "secant"
        ],
        "against": against_secants(tables[""]),
        "by_model": tables[""].pivot_table(
            "magnitudes", ["model", "direction", "kind"], "method", sort=False
        )[list(METHODS)],
        "same": same,
        "same_at_40": same[same["size"] == 40].groupby("method")["error"].mean().sort_values(),
        "judged": judged,
        "least": least(judged),
        "alone": alone(judged),
        "at_40": {name: at_40[name].sort_values() for name in judged["model"].unique()},
        "costs": costs,
        "labels": found.pivot_table("spearman", ["model", "method"], "kind", sort=False),
        "label_shares": found[found["kind"] != "all"].pivot_table(
            "share", ["model", "method"], "kind", sort=False
        ),
        "paths": found[found["kind"] == "all"].groupby("method", sort=False)["spearman"].mean(),
        "n_labelled": len(found[["model", "pair"]].drop_duplicates()),
        "n_pairs": tables[""].drop_duplicates(["model", "pair"]).groupby("model").size(),
        "n_find": N_FIND,
        "n_judge": N_JUDGE,
    }


STUDY = Study(run, lambda tables: {"": figure(tables["kept"])}, facts)
