"""Measure how well secants agree with patching: heads, circuits and edges, on several models.

    python -m analyses.studies.contrast_vs_patching --models-dir MODELS --smollm2 FOLDER

Attributions of z are compared with denoising, with noising, and with the mean of both. Rankings are
compared by the faithfulness of their first k sites, searches by the sizes of their circuits, and
the strongest edges of graphs with exact path patches.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from scipy.stats import bootstrap, spearmanr

from analyses.studies.attribution_vs_patching import LENGTH, pairs
from analyses.tools.benching import markdown
from analyses.tools.options import Device, ModelsDir, Out, Seed, Smoke, SmolLM2
from analyses.tools.real_models import trained
from analyses.tools.study_files import as_stored, keep, wrapped
from attn_only_lens import HeadName, circuits, expose_neuron_heads, load, pretrained
from attn_only_lens import patching as p
from attn_only_lens.circuits.attributed_run import (
    AttributedRun,
    attribute_difference,
    attribute_run,
)
from attn_only_lens.circuits.linear_graph import LinearGraph
from attn_only_lens.engine.contrast import run_both
from attn_only_lens.engine.gradients import edit_input
from attn_only_lens.engine.prompts import PromptPair, prompt_pair

METHODS = ("exact_gate", "integrated", "secant")
SIZES = (10, 20, 40, 80, 160, 320)
N_NODES, N_EDGES = 30, 200
N_STEPS = 5  # integration steps of EAP-IG
K = 40  # the size of a ranking in the page's answer
N_BOOTSTRAPS = 10  # with different seeds; the page shows the interval of the first one
DIGITS = "%.6g"
NAMES = {"exact_gate": "gradients", "integrated": "integrated gradients"}
COMPARISONS = (
    (f"share that the first {K} sites keep", "ranking", f"magnitude, {K}", METHODS[:2]),
    (
        "correlation with patching, attention heads",
        "attribution",
        "attention, mean",
        METHODS[:2],
    ),
    ("correlation with patching, neurons", "attribution", "neuron, mean", METHODS[:2]),
    (
        "the same, denoising alone, attention heads",
        "attribution",
        "attention, denoise",
        METHODS[:1],
    ),
    ("the same, denoising alone, neurons", "attribution", "neuron, denoise", METHODS[:1]),
    (
        "rank correlation with path patches, edges",
        "edges",
        "mean",
        ("graph of one run", "EAP", "EAP-IG", "EAP, mean of both ends"),
    ),
    (
        "the same, denoising alone, edges",
        "edges",
        "denoise",
        ("EAP", "EAP-IG", "EAP, mean of both ends"),
    ),
)
BETTER, WORSE, SAME = "better", "worse", "not measurably different"
BORDERLINE = "borderline"


class Difference(NamedTuple):
    """How much better secants are than another method.

    Attributes:
        mean: the mean over pairs.
        low: the lower end of its interval.
        high: the upper end.
        n_pairs: the number of pairs.
        word: what the intervals of all bootstraps say, or `BORDERLINE` if they disagree.
    """

    mean: float
    low: float
    high: float
    n_pairs: int
    word: str

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


# By kind of comparison, case and method
Differences: TypeAlias = dict[tuple[str, str, str], Difference]
ENGLISH = [
    ("The keys near the cabinet", "The key near the cabinet", " are", " is"),
    ("The doctor behind the trees", "The doctors behind the trees", " is", " are"),
]
SMOLLM2 = [
    ("The keys to the old cabinet", "The key to the old cabinet", " are", " is"),
    (
        "The capital of France is the city of",
        "The capital of Italy is the city of",
        " Paris",
        " Rome",
    ),
]


def subjects(
    models_dir: Path, smollm2: Path | None, device: str, seed: int, *, smoke: bool
) -> Iterator[tuple[str, Any, list[tuple[Any, ...]]]]:
    """Yield models with neuron-heads, and their clean prompts, corrupted prompts and metrics."""
    english = expose_neuron_heads(pretrained.small_english(), copy=True).model
    texts = ENGLISH[: 1 if smoke else 2]
    yield "small_english", english, [(c, k, p.logit_diff(a, b)) for c, k, a, b in texts]
    if smoke:
        return
    for name, source, tokens in trained(models_dir, LENGTH, device, smoke=smoke):
        if name.startswith("modular"):  # a one-layer model
            continue
        model = expose_neuron_heads(source).model
        some = list(pairs(model, tokens, 3, seed))
        yield name, model, [(x.clean, x.corrupted, p.logit_diff(x.correct, x.wrong)) for x in some]
    if smollm2 is not None:
        model = expose_neuron_heads(load(smollm2)).model
        yield "SmolLM2-135M", model, [(c, k, p.logit_diff(a, b)) for c, k, a, b in SMOLLM2]


def attributions(model: Any, prompts: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the agreement of every method with patching, by kind of head and direction."""
    sites = None
    if model.cfg.n_layers > 6:  # a sample, because every site would take hours
        names = p.attribution(model, *prompts, method="secant", budget=0, progress=False)
        sites = list(names.top(150)["name"].unique()) + [f"L{i}N{7 * i}" for i in range(30)]
    one_way, other_way = (
        p.activation_patch(model, *prompts, sites=sites, direction=way, progress=False)
        for way in ("denoise", "noise")
    )
    exact = {"denoise": one_way.effect, "noise": -other_way.effect}
    exact["mean"] = (exact["denoise"] + exact["noise"]) / 2
    for method in METHODS:
        estimate = p.attribution(
            model, *prompts, sites=sites, method=method, budget=0, progress=False
        )
        for kind in ("attention", "neuron"):
            rows = (estimate.frame["kind"] == kind).to_numpy()
            for way, effect in exact.items():
                one, two = effect.to_numpy()[rows], estimate.effect.to_numpy()[rows]
                yield {"what": "attribution", "method": method, "kind": kind, "against": way} | {
                    "pearson": float(np.corrcoef(one, two)[0, 1])
                }


def rankings(model: Any, prompts: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the faithfulness of the k highest-ranked sites, where a ranking costs one pass."""
    for method in METHODS:
        ranking = p.attribution(
            model, *prompts, method=method, budget=0, direction="noise", progress=False
        )
        shares = [k / len(ranking.frame) for k in SIZES if k < len(ranking.frame)]
        for order in ("magnitude", "signed"):
            # Shares are slightly larger, so that rounding down keeps the size.
            curve = circuits.faithfulness(
                model, *prompts, ranking, shares=[s * (1 + 1e-9) for s in shares], order=order,
                n_random=0,
            ).frame  # fmt: skip
            for size, f in zip(curve["n_sites"], curve["faithfulness"], strict=True):
                yield {"what": "ranking", "method": method, "kind": order} | {"k": size, "f": f}


def searches(model: Any, prompts: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the sizes of circuits that `discover` finds, and their seconds."""
    for method in ("exact_gate", "secant"):
        for budget in ("auto", 0):
            started = time.perf_counter()
            circuit = circuits.discover(model, *prompts, method=method, budget=budget)
            yield {"what": "discover", "method": method, "kind": f"budget {budget}"} | {
                "k": len(circuit),
                "f": circuit.faithfulness,
                "seconds": time.perf_counter() - started,
            }


def edges(model: Any, prompts: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield rank correlations of edge scores with exact path patches, for edges of strong nodes.

    An edge goes from a head at one position to a head at all positions, as in path patching.
    """
    clean, corrupted, metric = prompts
    pair = prompt_pair(model, clean, corrupted)
    graph = circuits.attribution_graph(model, clean, metric, corrupted=corrupted, top=N_NODES)
    both, run = attribute_difference(model, pair, metric), attribute_run(model, pair, metric)
    names = [HeadName.parse(name) for name in graph.heads["name"].unique()]
    chosen = [
        [
            (pos, head.index)
            for head in names
            if (head.layer, head.kind) == (sublayer.writes.layer, sublayer.writes.kind)
            for pos in range(pair.clean.shape[1])
        ]
        for sublayer in both.linear.sublayers
    ]
    values = {"secant graph": _by_head(both, pair, chosen, graph)}
    strongest = values["secant graph"].abs().nlargest(N_EDGES).index
    values["graph of one run"] = _by_head(run, pair, chosen, graph)
    ends = (0.0, 1.0)  # from the corrupted run to the clean one
    inside = tuple((step + 0.5) / N_STEPS for step in range(N_STEPS))
    along = {
        place: _by_head(_tangent(model, pair, metric, both, place), pair, chosen, graph)
        for place in (*ends, *inside)
    }
    for name, points in {
        "EAP": ends[:1],
        "EAP, mean of both ends": ends,
        "EAP-IG": inside,
    }.items():
        total = along[points[0]]
        for point in points[1:]:
            total = total.add(along[point], fill_value=0)
        values[name] = total / len(points)
    exact = _paths(model, prompts, list(strongest))
    table = pd.DataFrame(values).reindex(exact.index).fillna(0.0)
    row = {"what": "edges", "k": len(exact)}
    for name in values:
        for way in exact.columns:
            rank = float(spearmanr(table[name], exact[way]).statistic)
            yield row | {"method": name, "against": way, "spearman": rank}
    rank = float(spearmanr(exact["denoise"], exact["noise"]).statistic)
    yield row | {"method": "denoising", "against": "noise", "spearman": rank}


def _tangent(model: Any, pair: PromptPair, metric: Any, both: AttributedRun, place: float) -> Any:
    """Return the difference with derivatives at one run, whose embeddings are interpolated."""
    corrupted, clean = run_both(model, pair).stream.chunk(2)[::-1]
    point = torch.lerp(corrupted, clean, place)
    same = replace(pair, corrupted=pair.clean)

    def move(stream: torch.Tensor) -> torch.Tensor:
        if stream.shape[1] != point.shape[1]:  # a run that tests the model's norms
            return stream
        return point.repeat(len(stream) // len(point), 1, 1)

    with edit_input(model, move):
        tangent = attribute_difference(model, same, metric)
    sublayers = tuple(
        replace(one, writes=replace(one.writes, z=two.writes.z))
        for one, two in zip(tangent.linear.sublayers, both.linear.sublayers, strict=True)
    )
    changes = replace(tangent.linear.run, embedding=both.linear.run.embedding)
    return replace(tangent, linear=replace(tangent.linear, run=changes, sublayers=sublayers))


def _by_head(run: Any, pair: Any, chosen: list[Any], graph: circuits.CircuitGraph) -> pd.Series:
    """Return edge weights from the graph's nodes into heads, summed over receiver positions."""
    frame, _ = LinearGraph(run, pair, chosen).edges()
    frame = frame[frame["source"].isin(graph.heads["id"]) & frame["target"].str.startswith("L")]
    if not run.is_difference:
        frame = frame[frame["kind"] == "value"]
    into = frame["target"].str.partition("@")[0]
    return frame.groupby([frame["source"], into])["weight"].sum()


def _paths(model: Any, prompts: tuple[Any, ...], chosen: list[tuple[str, str]]) -> pd.DataFrame:
    """Return the exact direct effects of edges, with all receiver inputs and recomputed scales."""
    columns = {}
    for way, sign in (("denoise", 1), ("noise", -1)):
        paths = [
            p.path_patch(
                *(model, *prompts),
                senders=[source.partition("@")[0]],
                receivers=[target for one, target in chosen if one == source],
                positions=[int(source.partition("@")[2])],
                part="z",
                direction=way,
                scale="anew",
                progress=False,
            )
            for source in dict.fromkeys(source for source, _ in chosen)
        ]
        frames = [one.to_frame().assign(effect=sign * one.effect) for one in paths]
        frame = pd.concat(frames, ignore_index=True)
        frame["sender"] = frame["sender"].astype(str) + "@" + frame["position"].astype(str)
        columns[way] = frame.set_index(["sender", "receiver"])["effect"]
    result = pd.DataFrame(columns)
    return result.assign(mean=result.mean(axis=1))


MEASURES = (attributions, rankings, searches, edges)


def main(
    out: Out = Path("out/contrast"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    smollm2: SmolLM2 = None,
    seed: Seed = 0,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the tables."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started, rows = time.perf_counter(), list[dict[str, Any]]()
    for name, model, all_prompts in subjects(models_dir, smollm2, device, seed, smoke=smoke):
        for number, prompts in enumerate(all_prompts):
            for measure in MEASURES:
                begun = time.perf_counter()
                rows += [{"model": name, "pair": number} | row for row in measure(model, prompts)]
                seconds = time.perf_counter() - begun
                typer.echo(f"{name} {number} {measure.__name__} {seconds:.0f} s", err=True)
    frames = as_stored({"": pd.DataFrame(rows)}, DIGITS)
    settings = {"seed": seed, "smoke": smoke}
    text = page(frames, settings)
    typer.echo(text)
    keep(__file__, out, text, frames, figure(frames[""]), started=started, **settings)


def page(frames: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> str:
    """Return the page; all numbers come from the table."""
    frame = frames[""]
    of = {what: rows for what, rows in frame.groupby("what")}
    differences = over_pairs(frame)
    columns = ["what", "", "compared with", "difference", "95 % interval", "pairs"]
    text = PAGE.format(
        **in_short(frame, differences),
        attributions=_table(of["attribution"], ["model", "kind"], "pearson"),
        rankings=_table(of["ranking"], ["model", "kind", "k"], "f"),
        searches=_table(of["discover"], ["model", "kind"], "k"),
        edges=_table(of["edges"], ["model"], "spearman"),
        differences=markdown(
            columns,
            (
                [*key, f"{x.mean:+.3f}", f"{x.low:+.3f} to {x.high:+.3f}", x.n_pairs]
                for key, x in differences.items()
            ),
        ),
        flag=" --smoke" if settings["smoke"] else "",
    )
    return wrapped(text)


def in_short(frame: pd.DataFrame, differences: Differences) -> dict[str, Any]:
    """Return the numbers and lines of the page's question, answer and caution."""
    largest = frame["model"].iloc[-1]
    n_pairs = frame.groupby("model")["pair"].nunique()
    magnitude = frame[(frame["what"] == "ranking") & (frame["kind"] == "magnitude")]
    kept = magnitude[magnitude["k"] == K].groupby(["model", "method"])["f"].mean()[largest]
    return {
        "models": frame["model"].nunique(),
        "pairs": int(n_pairs.sum()),
        "per_model": f"{n_pairs.min()} to {n_pairs.max()}",
        "largest": largest,
        "kept": {method: f"{kept[method]:.3f}" for method in METHODS},
        "with_patches": _sizes(frame, "auto", largest),
        "without_patches": _sizes(frame, 0, largest),
        "k": K,
        "sizes_apart": " ".join(_sizes_apart(differences, method) for method in METHODS[:2]),
        "n_bootstraps": N_BOOTSTRAPS,
        "edges_one_way": " and ".join(
            f"{differences['edges', way, 'EAP'].word} for {name} alone "
            f"({differences['edges', way, 'EAP']})"
            for way, name in (("denoise", "denoising"), ("noise", "noising"))
        ),
        "verdicts": markdown(
            ["compared by", "with", "secants are", "difference"],
            [
                [text, NAMES.get(method, method), difference.word, str(difference)]
                for text, what, case, methods in COMPARISONS
                for method in methods
                for difference in [differences[what, case, method]]
            ],
        ),
    }


def _sizes(frame: pd.DataFrame, budget: str | int, largest: str) -> str:
    """Return the sizes of circuits on the largest model, and how far apart others are."""
    rows = frame[(frame["what"] == "discover") & (frame["kind"] == f"budget {budget}")]
    sizes = rows.groupby(["model", "method"], sort=False)["k"].mean().unstack()
    secant, gradient = (sizes[method] for method in ("secant", "exact_gate"))
    text = (
        f"circuits of {secant[largest]:.1f} sites there with secants, and of "
        f"{gradient[largest]:.1f} with gradients"
    )
    apart = (secant - gradient).drop(largest).abs()
    if apart.empty:
        return text
    furthest = apart.idxmax()
    return (
        f"{text}; on the other models, the mean sizes differ by at most {apart.max():.2f} sites "
        f"({furthest}: {secant[furthest]:.1f} with secants, "
        f"{gradient[furthest]:.1f} with gradients)"
    )


def _sizes_apart(differences: Differences, method: str) -> str:
    """Return for which k the first sites by secants keep more than those by another method."""
    of_word: dict[str, list[str]] = {BETTER: [], WORSE: [], SAME: [], BORDERLINE: []}
    for k in SIZES:
        difference = differences.get(("ranking", f"magnitude, {k}", method))
        if difference is not None:
            shown = f"{k} ({difference})" if difference.word == BORDERLINE else str(k)
            of_word[difference.word].append(shown)
    parts = [f"{word} for k = {', '.join(ks)}" for word, ks in of_word.items() if ks]
    return f"Compared with {NAMES[method]}, secants are {'; '.join(parts)}."


def _word(low: float, high: float) -> str:
    """Return in words what an interval says of secants."""
    return BETTER if low > 0 else WORSE if high < 0 else SAME


def _table(frame: pd.DataFrame, rows: list[str], value: str) -> str:
    columns = ["method", "against"] if frame["against"].notna().any() else ["method"]
    wide = frame.pivot_table(index=rows, columns=columns, values=value, sort=False)
    heads = [" / ".join(c) if isinstance(c, tuple) else str(c) for c in wide.columns]
    cells = [
        [*map(str, key if isinstance(key, tuple) else (key,)), *(f"{x:.3f}" for x in row)]
        for key, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return markdown([*rows, *heads], cells)


def over_pairs(frame: pd.DataFrame) -> Differences:
    """Return how much better secants are over all pairs, with bootstrap intervals."""
    differences: Differences = {}
    for what, value, secants, keys in (
        ("attribution", "pearson", "secant", ["kind", "against"]),
        ("ranking", "f", "secant", ["kind", "k"]),
        ("edges", "spearman", "secant graph", ["against"]),
    ):
        for key, some in frame[frame["what"] == what].groupby(keys, sort=False):
            wide = some.pivot_table(index=["model", "pair"], columns="method", values=value)
            for method in wide.columns.difference([secants, "denoising"]):
                change = (wide[secants] - wide[method]).dropna().to_numpy()
                intervals = [(np.nan, np.nan)]
                if len(change) > 1:
                    intervals = [
                        tuple(bootstrap((change,), np.mean, rng=generator).confidence_interval)
                        for generator in map(np.random.default_rng, range(N_BOOTSTRAPS))
                    ]
                words = {_word(*interval) for interval in intervals}
                label = ", ".join(str(x).removesuffix(".0") for x in key)
                differences[what, label, method] = Difference(
                    change.mean(),
                    *intervals[0],
                    len(change),
                    words.pop() if len(words) == 1 else BORDERLINE,
                )
    return differences


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the faithfulness of the k highest-ranked sites, by method."""
    rows = frame[(frame["what"] == "ranking") & (frame["kind"] == "magnitude")]
    models = list(rows["model"].unique())
    picture = Figure(figsize=(3 * len(models), 3), layout="constrained")
    panels = picture.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for method in METHODS:
            of_method = rows[(rows["model"] == model) & (rows["method"] == method)]
            mean = of_method.groupby("k")["f"].mean().clip(-0.5, 1.5)
            panel.plot(mean.index, mean, marker=".", label=method)
        panel.set(title=model, xscale="log", xlabel="sites")
        panel.axhline(1, color="grey", linewidth=0.5)
    panels[0].set_ylabel("faithfulness")
    panels[0].legend(fontsize="small")
    return picture


PAGE = """# Secants compared with patching

**Question.** A secant splits the difference between two runs, of a clean prompt and a corrupted
prompt, exactly. Do attributions by secants (`method="secant"`) agree with activation patching, and
do they give better rankings, circuits and edges than gradients?

**Answer.** On {largest}, the first {k} sites of a ranking by secants keep {kept[secant]} of the
difference, those of integrated gradients {kept[integrated]}, and those of gradients
{kept[exact_gate]}. With `budget="auto"`, `discover` finds {with_patches}. With `budget=0`, which
ranks sites without exact patches, it finds {without_patches}.

The table has the differences (secants minus another method) over all {pairs} pairs of prompts of
{models} models, with 95 % intervals. Patching is the mean of denoising and noising, unless the
table says "denoising alone". We computed each interval with {n_bootstraps} seeds of the bootstrap,
and show the first. "Borderline" says that some of these intervals contain 0 and others do not.

{verdicts}

The share that the first k sites keep depends on k (ranked by magnitude, over the same pairs).
{sizes_apart}

**Caution.** Each model has {per_model} pairs, and the intervals treat all pairs as independent.
The edges were chosen by secants: exact path patches were computed only for the strongest edges of
the secant graph. On SmolLM2, attributions were compared on a sample of sites; secants chose most of
them. A share above 1 is not better than 1: signed rankings of many sites overshoot. Patching in one
direction gives other answers for edges: compared with EAP, secants are {edges_one_way}.

Unless a table says otherwise, values are means over the pairs of a model. Every row is in
`contrast_vs_patching.csv`; this page was made by

    python -m analyses.studies.contrast_vs_patching{flag}

## Attribution compared with exact patching

Pearson correlation over all heads and neurons at all positions, compared with denoising, noising,
and their mean. On SmolLM2, the sites are those with the 150 largest attributions and one neuron of
each layer, at all positions. Gradients (`exact_gate`) are those of the corrupted run, so they
estimate denoising. `integrated` is integrated gradients.

{attributions}

## Faithfulness of the k highest-ranked sites

Each ranking costs one pass, without exact patches; all other sites are resampled.

{rankings}

![faithfulness by size](contrast_vs_patching.svg)

## Sizes of circuits that `discover` finds for 90 %

{searches}

## Edges compared with exact path patches

Spearman correlation over the 200 strongest edges of the secant graph between its 30 strongest
nodes. EAP uses the gradients of the corrupted run, and "EAP, mean of both ends" the mean of the
gradients of both runs. EAP-IG uses the mean gradient of five runs, whose embeddings are
interpolated between the corrupted and the clean run (at (j - 1/2)/5 of the way). The last column is
the correlation between denoising and noising.

{edges}

## Differences over all pairs

The value for secants minus the value for another method: Pearson correlations of attributions,
the faithfulness of the first k sites (1 is best; a larger value is worse), and Spearman
correlations of edges. Intervals resample the pairs of all models together (bias-corrected
bootstrap).

{differences}
"""

if __name__ == "__main__":
    typer.run(main)
