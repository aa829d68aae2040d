"""Measure how well secants agree with patching, and what patterns and values carry.

A secant splits the difference between two runs exactly: over heads and neurons, and for each of
them into a part through its pattern (for a neuron, its gate) and a part through its value
(`engine/multipliers.py`). On a few pairs of prompts for each model, we compare secants with other
methods:

    attributions   correlations with denoising, with noising, and with the mean of both
    rankings       the faithfulness of the first k sites, where a ranking costs one pass
    searches       the sizes of circuits that `discover` finds
    edges          rank correlations of the strongest edges with exact path patches
    differences    secants minus each other method, over all pairs, with bootstrap intervals

On more pairs, we measure the two parts:

    carried        sums of |parts| through patterns and through values, by kind of head and layer
    splitting      whether upstream heads divide into those that set gates and those that set values
    predicted      how well the parts predict patches on other pairs
    ranked         the faithfulness of rankings by |pattern| + |value|
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import bootstrap, spearmanr
from tqdm import tqdm

from analyses.study import Setting, Study, Tables
from analyses.tools import small_english as small
from analyses.tools.benching import table
from analyses.tools.real_models import pairs, trained
from analyses.tools.study_files import t_interval
from attn_only_lens import (
    Contrast,
    HeadName,
    Work,
    circuits,
    expose_neuron_heads,
    load,
    tasks,
)
from attn_only_lens import patching as p
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.linear_graph import LinearGraph
from attn_only_lens.engine.gradients import edit_input
from attn_only_lens.engine.linear_map import LinearMap, of_difference, of_run
from attn_only_lens.engine.multipliers import run_both
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.patching.results import Sweep

Rows: TypeAlias = Iterator[dict[str, Any]]

QUIET = Work(progress=False)
METHODS = ("exact_gate", "integrated", "secant")
SPLIT = p.Estimate("secant", budget=0, split=True)
SIZES = (10, 20, 40, 80, 160, 320)
SIZES_BY_PARTS = (20, 40, 80, 160)
N_BOOTSTRAPS = 10  # with different seeds; the page shows the interval of the first one
N_NAMES, FEWEST, FOLDS = 100, 40, 5
GAIN, USEFUL = 0.02, 0.1  # of R²
OUTSIDE = 0.05  # of the shuffles
VERB = (" are", " is")
ENGLISH = [
    ("The keys near the cabinet", "The key near the cabinet", " are", " is"),
    ("The doctor behind the trees", "The doctors behind the trees", " is", " are"),
]
SMOLLM2 = [
    ("The keys to the old cabinet", "The key to the old cabinet", *VERB),
    (
        "The capital of France is the city of",
        "The capital of Italy is the city of",
        " Paris",
        " Rome",
    ),
]
NOUNS = ("cabinet", "table", "door", "house", "garden", "window", "car", "box")


@dataclass(frozen=True)
class Sizes:
    """Sizes that a smoke run reduces."""

    nodes: int = 30  # of a graph whose edges are compared with path patches
    edges: int = 200
    steps: int = 5  # integration steps of EAP-IG
    shuffles: int = 200
    graph: int = 150  # nodes of the graphs for `splitting`


@dataclass(frozen=True)
class Subject:
    """A model with neuron-heads, with pairs to compare methods, and pairs to measure the parts."""

    name: str
    model: Any
    few: list[Contrast]
    many: list[Contrast]


def subjects(setting: Setting) -> Iterator[Subject]:
    """Yield the models."""

    def written(texts: list[tuple[str, str, str, str]]) -> list[Contrast]:
        return [Contrast(clean, corrupted, p.logit_diff(a, b)) for clean, corrupted, a, b in texts]

    if setting.smoke:
        tiny = small.bridged(small.Recipe(n_layers=2, d_model=12, n_heads=2, d_mlp=43).model())
        english = expose_neuron_heads(tiny).model
    else:
        english = expose_neuron_heads(load("small-english"), copy=True).model
    task = tasks.agreement(
        english.tokenizer, 2 if setting.smoke else 24, structure="relative", seed=0
    )
    right, wrong = ([row[0] for row in rows] for rows in (task.answers, task.wrong))
    many = written(list(zip(task.clean, task.corrupted, right, wrong, strict=True)))
    few = ENGLISH[: 1 if setting.smoke else 2]
    yield Subject("small_english", english, written(few), many)
    if setting.smoke:
        return
    for name, source, tokens in trained(setting.models, setting.device, smoke=False):
        if name.startswith("modular"):  # a one-layer model
            continue
        model = expose_neuron_heads(source).model
        with_parts = name in ("words_swiglu_4l", "stories_swiglu_5l")
        some = list(pairs(model, tokens, 24 if with_parts else 3, 0))
        yield Subject(name, model, some[:3], some if with_parts else [])
    if setting.smollm2 is not None:
        model = expose_neuron_heads(load(setting.smollm2)).model
        many = [(f"The keys to the old {n}", f"The key to the old {n}", *VERB) for n in NOUNS]
        yield Subject("SmolLM2-135M", model, written(SMOLLM2), written(many))


# Secants and other methods


def attributions(model: Any, contrast: Contrast) -> Rows:
    """Yield the correlation of every method with patching, by kind of head and direction."""
    sites: Any = "all"
    if model.cfg.n_layers > 6:  # a sample, because every site would take hours
        names = p.attribution(model, contrast, method=p.Estimate("secant", budget=0), work=QUIET)
        sites = list(names.top(150)["name"].unique()) + [f"L{i}N{7 * i}" for i in range(30)]
    one_way, other_way = (
        p.activation_patch(model, contrast, sites=sites, direction=way, work=QUIET)
        for way in ("denoise", "noise")
    )
    exact = {"denoise": one_way.effect, "noise": -other_way.effect}
    exact["mean"] = (exact["denoise"] + exact["noise"]) / 2
    for method in METHODS:
        how = p.Estimate(method, budget=0)
        estimate = p.attribution(model, contrast, sites=sites, method=how, work=QUIET)
        for kind in ("attention", "neuron"):
            here = (estimate.frame["kind"] == kind).to_numpy()
            of_kind = estimate.effect.to_numpy()[here]
            yield {"kind": kind, "method": method} | {
                way: float(np.corrcoef(effect.to_numpy()[here], of_kind)[0, 1])
                for way, effect in exact.items()
            }


def curve(
    model: Any, contrast: Contrast, ranking: Sweep, sizes: tuple[int, ...], **how: Any
) -> dict[int, float]:
    """Return the faithfulness of the first k sites by k; all other sites are resampled."""
    n = len(ranking.frame)
    # Shares are slightly larger, so that rounding down keeps the size.
    shares = [k * (1 + 1e-9) / n for k in sizes if k < n]
    frame = circuits.faithfulness(model, contrast, ranking, shares=shares, n_random=0, **how).frame
    return dict(zip(frame["n_sites"], frame["faithfulness"], strict=True))


def rankings(model: Any, contrast: Contrast) -> Rows:
    """Yield the faithfulness of the first k sites by each method."""
    for method in METHODS:
        how = p.Estimate(method, budget=0)
        ranking = p.attribution(model, contrast, direction="noise", method=how, work=QUIET)
        for order in ("magnitude", "signed"):
            of_size = curve(model, contrast, ranking, SIZES, order=order)
            row = {"kind": order, "method": method}
            yield row | {str(k): of_size.get(k, float("nan")) for k in SIZES}


def searches(model: Any, contrast: Contrast) -> Rows:
    """Yield the sizes of the circuits that `discover` finds for 90 %, by budget."""
    for budget in ("auto", 0):
        yield {"budget": budget} | {
            method: len(circuits.discover(model, contrast, method=p.Estimate(method, budget)))
            for method in ("exact_gate", "secant")
        }


def edges(model: Any, contrast: Contrast, sizes: Sizes) -> Rows:
    """Yield rank correlations of edge scores with exact path patches, for edges of strong nodes.

    An edge goes from a head at one position to a head at all positions, as in path patching.
    """
    pair, metric = contrast.pair(model), contrast.metric
    graph = circuits.attribution_graph(model, contrast, top=sizes.nodes)
    both = of_difference(model, pair, metric)
    names = [HeadName.parse(name) for name in graph.heads["name"].unique()]
    chosen = [
        [
            (pos, head.index)
            for head in names
            if (head.layer, head.kind) == (writes.layer, writes.kind)
            for pos in range(pair.clean.shape[1])
        ]
        for writes in both.sublayers
    ]
    by_head = partial(_by_head, pair=pair, chosen=chosen, graph=graph)
    values = {"secant graph": by_head(both)}
    strongest = values["secant graph"].abs().nlargest(sizes.edges).index
    values["graph of one run"] = by_head(of_run(model, pair, metric))
    ends = (0.0, 1.0)  # from the corrupted run to the clean one
    inside = tuple((step + 0.5) / sizes.steps for step in range(sizes.steps))
    along = {
        place: by_head(_tangent(model, pair, metric, both, place)) for place in (*ends, *inside)
    }
    for name, points in (
        ("EAP", ends[:1]),
        ("EAP, mean of both ends", ends),
        ("EAP-IG", inside),
    ):
        total = along[points[0]]
        for point in points[1:]:
            total = total.add(along[point], fill_value=0)
        values[name] = total / len(points)
    exact = _paths(model, contrast, list(strongest))
    scores = pd.DataFrame(values).reindex(exact.index).fillna(0.0)
    for name in values:
        yield {"kind": "edges", "method": name} | {
            way: float(spearmanr(scores[name], exact[way]).statistic) for way in exact.columns
        }
    rank = float(spearmanr(exact["denoise"], exact["noise"]).statistic)
    yield {"kind": "edges", "method": "denoising", "noise": rank}


def _tangent(model: Any, pair: PromptPair, metric: Any, both: LinearMap, place: float) -> Any:
    """Return the difference with derivatives at one run, whose embeddings are interpolated."""
    corrupted, clean = run_both(model, pair).stream.chunk(2)[::-1]
    point = torch.lerp(corrupted, clean, place)
    same = replace(pair, corrupted=pair.clean)

    def move(stream: torch.Tensor) -> torch.Tensor:
        if stream.shape[1] != point.shape[1]:  # a run that tests the model's norms
            return stream
        return point.repeat(len(stream) // len(point), 1, 1)

    with edit_input(model, move):
        tangent = of_difference(model, same, metric)
    sublayers = tuple(
        replace(one, z=two.z) for one, two in zip(tangent.sublayers, both.sublayers, strict=True)
    )
    changes = replace(tangent.run, embedding=both.run.embedding, sublayers=sublayers)
    return replace(tangent, run=changes)


def _by_head(run: Any, pair: Any, chosen: list[Any], graph: CircuitGraph) -> pd.Series:
    """Return edge weights from the graph's nodes into heads, summed over receiver positions."""
    frame, _ = LinearGraph(run, pair, chosen).edges()
    frame = frame[frame["source"].isin(graph.heads["id"]) & frame["target"].str.startswith("L")]
    if not run.is_difference:
        frame = frame[frame["kind"] == "value"]
    into = frame["target"].str.partition("@")[0]
    return frame.groupby([frame["source"], into])["weight"].sum()


def _paths(model: Any, contrast: Contrast, chosen: list[tuple[str, str]]) -> pd.DataFrame:
    """Return the exact direct effects of edges, with all receiver inputs and recomputed scales."""
    columns = {}
    edges = [
        p.Edges([source], [target for one, target in chosen if one == source], "z", scale="anew")
        for source in dict.fromkeys(source for source, _ in chosen)
    ]
    for way, sign in (("denoise", 1), ("noise", -1)):
        paths = [p.path_patch(model, contrast, x, direction=way, work=QUIET) for x in edges]
        frames = [one.to_frame().assign(effect=sign * one.effect) for one in paths]
        frame = pd.concat(frames, ignore_index=True)
        frame["sender"] = frame["sender"].astype(str) + "@" + frame["position"].astype(str)
        columns[way] = frame.set_index(["sender", "receiver"])["effect"]
    result = pd.DataFrame(columns)
    return result.assign(mean=result.mean(axis=1))


def over_pairs(tables: Tables) -> pd.DataFrame:
    """Return how much better secants are than each other method, over all pairs of prompts.

    `secants_are` is "borderline" if the intervals of bootstraps with other seeds disagree.
    """
    rows, keys = [], ["model", "pair", "kind", "method"]
    for part in ("attributions", "rankings", "edges"):
        for kind, some in tables[part].groupby("kind", sort=False):
            for against in some.columns.difference(keys, sort=False):
                wide = some.pivot(index=keys[:2], columns="method", values=against)
                secants = wide.pop("secant graph" if part == "edges" else "secant")
                for method in wide.columns.difference(["denoising"]):
                    change = (secants - wide[method]).dropna().to_numpy()
                    row = {"kind": kind, "against": against, "method": method}
                    rows.append(row | _with_intervals(change))
    return pd.DataFrame(rows)


def _with_intervals(change: np.ndarray) -> dict[str, Any]:
    """Return the mean of differences, its interval, their number, and what all intervals say."""
    intervals = [(float("nan"), float("nan"))]
    if len(change) > 1:
        intervals = [
            tuple(bootstrap((change,), np.mean, rng=generator).confidence_interval)
            for generator in map(np.random.default_rng, range(N_BOOTSTRAPS))
        ]
    words = {
        "better" if low > 0 else "worse" if high < 0 else "not measurably different"
        for low, high in intervals
    }
    low, high = intervals[0]
    return {
        **{"difference": change.mean(), "low": low, "high": high, "pairs": len(change)},
        "secants_are": words.pop() if len(words) == 1 else "borderline",
    }


# Patterns and values


def split(model: Any, contrasts: list[Contrast]) -> pd.DataFrame:
    """Return the parts of all sites for all pairs, as shares of the difference."""
    frames = [p.attribution(model, x, method=SPLIT, work=QUIET).to_frame() for x in contrasts]
    return pd.concat(dict(enumerate(frames)), names=["pair"]).reset_index("pair")


def carried(parts: pd.DataFrame) -> Rows:
    """Yield sums of |parts| through patterns and through values, by kind of head and layer."""
    for (kind, layer), rows in parts.groupby(["kind", "layer"], observed=True):
        sums = {x: rows[f"by_{x}"].abs().sum() for x in ("pattern", "value")}
        yield {"kind": kind, "layer": layer} | sums


def splitting(model: Any, contrasts: list[Contrast], sizes: Sizes) -> Rows:
    """Yield how much heads differ in the share that gates get, and the same for shuffled heads."""
    weights = []
    for contrast in contrasts:
        graph = circuits.attribution_graph(model, contrast, top=sizes.graph)
        kinds = graph.nodes.set_index("id")["kind"]
        frame = graph.edges
        frame = frame[frame["source"].map(kinds).eq("attention")]
        frame = frame[frame["target"].map(kinds).eq("neuron")]
        wide = frame.pivot_table(
            index=["source", "target"], columns="kind", values="weight", aggfunc="sum"
        )
        weights.append(wide.reindex(columns=["gate", "value"]).fillna(0.0).abs().reset_index())
    into = pd.concat(weights, ignore_index=True)
    into["head"] = into["source"].str.partition("@")[0]
    into = into[into.groupby("target")["head"].transform("nunique") > 1]

    def spread(heads: "pd.Series[str]") -> float:
        sums = into.groupby(heads.to_numpy())[["gate", "value"]].sum()
        return float((sums["gate"] / sums.sum(axis=1)).std())

    generator = np.random.default_rng(0)
    by_target = into.sort_values("target", kind="stable").index
    shuffled = []
    for _ in range(sizes.shuffles):  # the heads of each target
        order = into.assign(r=generator.random(len(into))).sort_values(["target", "r"]).index
        heads = pd.Series(into.loc[order, "head"].to_numpy(), index=by_target)
        shuffled.append(spread(heads.reindex(into.index)))
    got = spread(into["head"])
    yield {
        **{"heads": into["head"].nunique(), "spread": got, "shuffled": np.mean(shuffled)},
        "above": np.mean(np.array(shuffled) < got),
    }


def predicted(model: Any, parts: pd.DataFrame, contrasts: list[Contrast]) -> Rows:
    """Yield how well parts on half of the pairs predict patching effects on the other half."""
    n_train = len(contrasts) // 2
    train = parts[parts["pair"] < n_train]
    for kind in ("neuron", "attention"):
        columns = ["score", "by_pattern", "by_value"]
        sums = train[train["kind"] == kind].groupby("name", observed=True)[columns].sum() / n_train
        names = sums["score"].abs().nlargest(N_NAMES).index
        if len(names) < FEWEST:  # too few names for a regression with held-out fifths
            continue
        sums = sums.loc[names]
        for part in ("z", "q", "pattern", "value"):
            how = {"sites": p.Sites(list(names), "all"), "part": part, "work": QUIET}
            sweeps = [p.activation_patch(model, one, **how) for one in contrasts[n_train:]]
            effects = [
                pd.Series(x.effect.to_numpy(), index=x.frame["name"].astype(str)) for x in sweeps
            ]
            target = pd.concat(effects, axis=1).mean(axis=1).reindex(names.astype(str)).to_numpy()
            yield {
                **{"kind": kind, "part": part},
                "sum": r2(sums[["score"]].to_numpy(), target),
                "parts": r2(sums[["by_pattern", "by_value"]].to_numpy(), target),
            }


def r2(x: np.ndarray, y: np.ndarray) -> float:
    """Return the R² of a linear regression, predicted on held-out fifths of the names."""
    design, folds = np.column_stack([np.ones(len(x)), x]), np.arange(len(y)) % FOLDS
    guess = np.empty(len(y))
    for fold in range(FOLDS):
        rows = folds != fold
        weights = np.linalg.lstsq(design[rows], y[rows], rcond=None)[0]
        guess[~rows] = design[~rows] @ weights
    return float(1 - ((y - guess) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def ranked(model: Any, contrasts: list[Contrast]) -> Rows:
    """Yield the faithfulness of rankings by |pattern + value|, and by |pattern| + |value|."""
    for number, one in enumerate(contrasts):
        whole = p.attribution(model, one, method=SPLIT, work=QUIET)
        frame = whole.to_frame()
        span = whole.clean_value - whole.corrupted_value
        value = whole.corrupted_value + span * (frame["by_pattern"].abs() + frame["by_value"].abs())
        columns = ["by_pattern", "by_value", "exact"]
        parts = replace(whole, frame=frame.drop(columns=columns).assign(value=value))
        of_whole, of_parts = (curve(model, one, x, SIZES_BY_PARTS) for x in (whole, parts))
        for k, f in of_whole.items():
            yield {"pair": number, "k": k, "whole": f, "parts": of_parts[k]}


def run(setting: Setting) -> Tables:
    """Measure all models."""
    sizes = Sizes(nodes=11, edges=5, steps=1, shuffles=5, graph=60) if setting.smoke else Sizes()
    measures = {
        "attributions": attributions,
        "rankings": rankings,
        "searches": searches,
        "edges": partial(edges, sizes=sizes),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for subject in tqdm(subjects(setting), "models"):
        about, model = {"model": subject.name}, subject.model
        for part, measure in measures.items():
            for pair, contrast in enumerate(subject.few):
                rows.setdefault(part, []).extend(
                    about | {"pair": pair} | row for row in measure(model, contrast)
                )
        if subject.many:
            parts = split(model, subject.many)
            for part, some in (
                ("carried", carried(parts)),
                ("splitting", splitting(model, subject.many[:8], sizes)),
                ("predicted", predicted(model, parts, subject.many)),
                ("ranked", ranked(model, subject.many[:6])),
            ):
                rows.setdefault(part, []).extend(about | row for row in some)
    tables = {part: pd.DataFrame(some) for part, some in rows.items()}
    return tables | {"differences": over_pairs(tables)}


# The page


def figures(tables: Tables) -> dict[str, Figure]:
    """Draw the faithfulness of the first k sites, and the share of patterns by layer."""
    rows = tables["rankings"].query("kind == 'magnitude'")
    models = list(rows["model"].unique())
    first = Figure(figsize=(3 * len(models), 3), layout="constrained")
    panels = first.subplots(1, len(models), sharey=True, squeeze=False)[0]
    sizes = [str(k) for k in SIZES]
    for panel, model in zip(panels, models, strict=True):
        for method in METHODS:
            of_method = rows[(rows["model"] == model) & (rows["method"] == method)]
            panel.plot(
                SIZES, of_method[sizes].mean().clip(-0.5, 1.5), marker=".", lw=1, label=method
            )
        panel.set(title=model, xscale="log", xlabel="sites")
        panel.minorticks_off()
        panel.axhline(1, color="grey", linewidth=0.5)
    panels[0].set_ylabel("faithfulness")
    panels[0].legend(fontsize="small")
    rows = tables["carried"]
    second = Figure(figsize=(8, 3), layout="constrained")
    panels = second.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, ("attention", "neuron"), strict=True):
        for model, some in rows[rows["kind"] == kind].groupby("model", sort=False):
            share = some["pattern"] / (some["pattern"] + some["value"])
            depth = some["layer"] / max(1, some["layer"].max())
            panel.plot(depth, share, marker=".", label=model)
        panel.set(title=kind, xlabel="layer / last layer", ylim=(0, 1))
    panels[0].set_ylabel("share of patterns")
    panels[1].legend(fontsize="small")
    return {"": first, "layers": second}


def means(frame: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return means over the pairs of a model."""
    groups = frame.groupby(["model", *by], sort=False)
    return groups.mean(numeric_only=True).drop(columns="pair")


def fixed(frame: pd.DataFrame, digits: int = 3) -> str:
    """Return a table whose numbers have the same number of digits after the point."""
    frame = frame.reset_index() if frame.index.names[0] else frame

    def cell(x: Any) -> Any:
        return "–" if pd.isna(x) else f"{x:.{digits}f}" if isinstance(x, float) else x

    return table(frame.map(cell))


def apart(searches: pd.DataFrame, budget: str) -> "pd.Series[float]":
    """Return the sizes on the model where secants and gradients differ most, without SmolLM2."""
    sizes = means(searches, "budget").xs(budget, level="budget")
    sizes["difference"] = (sizes["secant"] - sizes["exact_gate"]).abs()
    return sizes.loc[sizes["difference"].drop("SmolLM2-135M", errors="ignore").idxmax()]


def shares(carried: pd.DataFrame) -> pd.DataFrame:
    """Return by model which share of the sums of |parts| patterns carry, in all layers and in 0."""

    def share(kind: str, rows: pd.DataFrame) -> "pd.Series[float]":
        sums = rows[rows["kind"] == kind].groupby("model", sort=False)[["pattern", "value"]].sum()
        return sums["pattern"] / sums.sum(axis=1)

    first = carried[carried["layer"] == 0]
    return pd.DataFrame(
        {
            "attention heads": share("attention", carried),
            "neurons": share("neuron", carried),
            "heads of layer 0": share("attention", first),
            "neurons of layer 0": share("neuron", first),
        }
    )


def sizes_by_word(differences: pd.DataFrame, method: str) -> dict[str, list[str]]:
    """Return for which k the first sites by secants keep more than those by another method."""
    rows = differences[(differences["kind"] == "magnitude") & (differences["method"] == method)]
    return rows.groupby("secants_are", sort=False)["against"].agg(list).to_dict()


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    gains = tables["predicted"].assign(gain=tables["predicted"].eval("parts - sum"))
    # For neurons, patches of q and of the pattern are the same.
    cases = gains.drop_duplicates(["model", "kind", "sum", "parts"])
    ranked = tables["ranked"].groupby(["model", "pair"])[["parts", "whole"]].mean()
    differences, above = tables["differences"], tables["splitting"].set_index("model")["above"]
    return {
        **{"means": means, "fixed": fixed, "apart": partial(apart, tables["searches"])},
        "differences": differences.set_index(["kind", "against", "method"]),
        "sizes_by_word": partial(sizes_by_word, differences),
        "kept": means(tables["rankings"], "kind", "method").xs("magnitude", level="kind"),
        "pairs_of": tables["searches"].groupby("model")["pair"].nunique(),
        "n_bootstraps": N_BOOTSTRAPS,
        **{"gain": GAIN, "useful": USEFUL, "inside": 1 - OUTSIDE},
        "shares": shares(tables["carried"]),
        "above": above,
        "above_text": [f"{100 * x:.0f} % ({model})" for model, x in above.items()],
        **{"gains": gains, "cases": cases},
        "helps": {x: gains.loc[gains["part"] == x, "gain"] >= GAIN for x in ("pattern", "z")},
        "predictable": cases[cases[["sum", "parts"]].max(axis=1) >= USEFUL],
        "more": t_interval(ranked["parts"] - ranked["whole"]),
        "n_ranked": len(ranked),
    }


STUDY = Study(run, figures, facts)
