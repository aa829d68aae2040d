"""Measure how time and memory of the main calls grow with tokens, layers, prompts and sites.

The model is a bridge with GPT-2's architecture and random weights: d_model 224, 7 heads, d_mlp 896,
a vocabulary of 5,003 tokens, float32, one thread. Starting at 4 layers, 32 tokens and 1 pair of
prompts, one size grows at a time. Prompts differ in one token, after an eighth of the tokens.

    expose             `expose_neuron_heads`, of layers only
    activation_patch   100 neurons, at 4 positions in all
    attribution        every head at every position, default budget
    path_patch         100 paths, from neurons of layer 0 to neurons of a layer in the middle
    attribution_graph  of a difference, with 100 nodes
    discover           every head at every position
    corpus_statistics  every neuron

On the axis "sites", sites are also paths, nodes of a graph, candidates of `discover`, and neurons
of the statistics. Each measurement has a separate process with a new model. The process first loads
libraries by a small call on a tiny model. Then the process runs the call once, including all tests
of the model, and reports the peak memory above the exposed model (for `expose`, above the model).
If the call took less than 10 s, it runs twice more without the tests, and the time is the shorter
of the two. Times are processor time. An axis ends before a measurement that would take longer than
`--limit` seconds.

A slope is the exponent k in cost = c nᵏ, by least squares on logarithms, over all sizes; the last
slope uses only the two largest sizes, where fixed costs matter least. Costs of 10⁷ sites are
extrapolated by a line or a power law through the two largest sizes, whichever gives more.

    python -m analyses.benchmarks.growth_of_cost --out analyses/results
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure

from analyses.benchmarks.bench_patching import METRIC
from analyses.benchmarks.models import bridge_of
from analyses.tools.benching import conditions, in_new_process, markdown, peak_of, seconds, table
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep
from attn_only_lens import Contrast, Work, expose_neuron_heads
from attn_only_lens.circuits import attribution_graph, discover
from attn_only_lens.neurons import Corpus, corpus_statistics
from attn_only_lens.patching import Edges, Sites, activation_patch, attribution, path_patch

SHAPE = {"d_model": 224, "n_heads": 7, "d_mlp": 896, "d_vocab": 5003}
AXES = {
    "tokens": (16, 32, 64, 128, 256, 512),
    "layers": (2, 4, 8, 12),
    "prompts": (1, 10, 100, 1000),
    "sites": (100, 1000, 10_000, 100_000),
}
SMOKE = {"layers": (2,), "sites": (4,)}
FAR = 10**7
"""The number of sites whose costs are extrapolated."""
REPEATED = 10.0
"""A call that takes fewer seconds is repeated."""
PRELOADED = [
    "analyses.benchmarks.bench_patching",
    "attn_only_lens.circuits._attribution_graph",
    "attn_only_lens.circuits._discover",
    "attn_only_lens.neurons._top_examples",
    "attn_only_lens.patching._path_patch",
]
"""Modules that all measuring processes share, so that they are imported only once."""
QUIET = Work(progress=False)


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        call: one of CALLS.
        sites: the number of sites; None for all.
    """

    call: str
    tokens: int = 32
    layers: int = 4
    prompts: int = 1
    sites: int | None = None

    @property
    def first(self) -> int:
        """Return the position of the first token that differs."""
        return self.tokens // 8


def contrast_of(point: Point, d_vocab: int, device: str) -> Contrast:
    """Return pairs of random tokens that differ in one token."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(d_vocab, (point.prompts, point.tokens), generator=generator)
    corrupted = clean.clone()
    corrupted[:, point.first] = (corrupted[:, point.first] + 1) % d_vocab
    return Contrast(clean.to(device), corrupted.to(device), METRIC)


def spread(number: int, end: int, start: int = 0) -> list[int]:
    """Return `number` integers starting at `start`, in equal steps, below `end`."""
    return [start + i * (end - start) // number for i in range(number)]


def some_sites(point: Point, cfg: Any) -> Sites:
    """Return neurons of all layers at positions that can matter; everything if sites is None."""
    if point.sites is None:
        return Sites()
    neurons, later = cfg.n_layers * cfg.d_mlp, point.tokens - point.first
    positions = min(later, max(4, math.ceil(point.sites / neurons)))
    chosen = spread(min(neurons, round(point.sites / positions)), neurons)
    names = [f"L{i // cfg.d_mlp}N{i % cfg.d_mlp}" for i in chosen]
    return Sites(names, spread(positions, point.tokens, point.first))


def patch(model: Any, point: Point, contrast: Contrast) -> int:
    """Patch neurons at positions, and return the number of sites."""
    sites = some_sites(point, model.cfg)
    return len(activation_patch(model, contrast, sites=sites, work=QUIET).effect)


def estimate(model: Any, point: Point, contrast: Contrast) -> int:
    """Run `attribution` on all heads, or on some neurons, and return the number of sites."""
    sites = some_sites(point, model.cfg)
    return len(attribution(model, contrast, sites=sites, work=QUIET).effect)


def paths(model: Any, point: Point, contrast: Contrast) -> int:
    """Patch paths between two sets of neurons, and return the number of paths."""
    cfg, number = model.cfg, math.isqrt(point.sites or 0)
    senders = [f"L0N{i}" for i in spread(number, cfg.d_mlp)]
    receivers = [f"L{cfg.n_layers // 2}N{i}" for i in spread(number, cfg.d_mlp)]
    edges = Edges(Sites(senders, point.tokens // 2), receivers, "z")
    return len(path_patch(model, contrast, edges, work=QUIET).frame)


def graph(model: Any, point: Point, contrast: Contrast) -> int:
    """Build the graph of a difference, and return its number of nodes."""
    return len(attribution_graph(model, contrast, top=point.sites).nodes)


def search(model: Any, point: Point, contrast: Contrast) -> int:
    """Find a circuit among all heads or some neurons, and return its `n_sites`."""
    return discover(model, contrast, sites=some_sites(point, model.cfg), work=QUIET).n_sites


def statistics(model: Any, point: Point, contrast: Contrast) -> int:
    """Compute statistics with the clean prompts as the corpus, and return the number of neurons."""
    cfg = model.cfg
    neurons = cfg.n_layers * cfg.d_mlp
    chosen = spread(point.sites or neurons, neurons)
    names = [f"L{i // cfg.d_mlp}N{i % cfg.d_mlp}" for i in chosen]
    corpus_statistics(model, names, Corpus(list(contrast.clean)), work=QUIET)
    return len(names)


CALLS: dict[str, Callable[[Any, Point, Contrast], int] | None] = {
    "expose": None,
    "activation_patch": patch,
    "attribution": estimate,
    "path_patch": paths,
    "attribution_graph": graph,
    "discover": search,
    "corpus_statistics": statistics,
}
"""Each call returns its number of sites."""
COUNTED = {"activation_patch": 100, "path_patch": 100, "attribution_graph": 100}
"""The number of sites on the other axes, for calls that do not use all sites."""


def run(model: Any, point: Point, device: str) -> int:
    """Run the call of a point, and return its number of sites."""
    made = CALLS[point.call]
    if made is not None:
        return made(model, point, contrast_of(point, model.cfg.d_vocab, device))
    with expose_neuron_heads(model):
        return int(model.cfg.n_layers * model.cfg.d_mlp)


def measure(point: Point, device: str, smoke: bool) -> dict[str, Any]:
    """Return the processor time and peak memory of one call, measured in this process."""
    torch.set_num_threads(1)

    def exposed(**sizes: int) -> Any:
        model = bridge_of(device, smoke=smoke or not sizes, **sizes)
        model.requires_grad_(False)
        return model if CALLS[point.call] is None else expose_neuron_heads(model).model

    if not smoke:
        run(exposed(), Point(point.call, tokens=8, sites=5), device)  # loads libraries
    model = exposed(n_layers=point.layers, n_ctx=512, **({} if smoke else SHAPE))

    def timed() -> tuple[int, float]:
        start = seconds(device)
        number = run(model, point, device)
        return number, seconds(device) - start

    (number, first), peak = peak_of(timed, device)
    n_more = 2 if first < REPEATED and not smoke else 0
    times = [timed()[1] for _ in range(n_more)]
    return {
        "counted sites": number,
        "first, s": first,
        "seconds": min(times, default=first),
        "peak MiB": peak,
    }


def points(call: str, axis: str, sizes: tuple[int, ...], *, smoke: bool) -> Iterator[Point]:
    """Yield the measurements of a call along an axis."""
    base = Point(call, sites=COUNTED.get(call)) if not smoke else Point(call, tokens=8, sites=4)
    of_expose = call == "expose"
    if (of_expose and axis != "layers") or (smoke and axis == "layers" and not of_expose):
        return
    for size in sizes:
        yield replace(base, **{axis: size})


def measured(device: str, limit: float, *, smoke: bool) -> pd.DataFrame:
    """Return a row per measurement, each from a new process."""
    rows: list[dict[str, Any]] = []
    for call, (axis, sizes) in product(CALLS, (SMOKE if smoke else AXES).items()):
        expected = 0.0
        for point in points(call, axis, sizes, smoke=smoke):
            size = getattr(point, axis)
            if expected * size > limit or not possible(point, smoke):
                break
            row = in_new_process(measure, point, device, smoke, preload=PRELOADED)
            rows.append({"call": call, "axis": axis, "size": size} | row)
            expected = row["seconds"] / size
            typer.echo(f"{call}, {size} {axis}: {row['seconds']:.3g} s")
    return pd.DataFrame(rows)


def possible(point: Point, smoke: bool) -> bool:
    """Return whether the model has this number of sites, and the call accepts it."""
    if smoke or point.sites is None:
        return True
    if point.call == "corpus_statistics":
        return point.sites <= point.layers * SHAPE["d_mlp"]
    # 10,000 nodes have more edges than `max_edges`.
    return point.call != "attribution_graph" or point.sites < 10_000


def slope(sizes: pd.Series, costs: pd.Series) -> float:
    """Return the exponent of a power law, by least squares on logarithms."""
    known = costs.notna()
    sizes, costs = sizes[known], costs[known]
    if len(sizes) < 2 or (costs <= 0).any():
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def slopes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the exponents by call and axis, over all sizes and over the largest two."""
    fits = []
    for (call, axis), some in rows.groupby(["call", "axis"], sort=False):
        row: dict[str, Any] = {"call": call, "axis": axis}
        row["sizes"] = f"{some['size'].iloc[0]:,} to {some['size'].iloc[-1]:,}"
        for name, column in (("time", "seconds"), ("memory", "peak MiB")):
            row[f"{name}: slope"] = slope(some["size"], some[column])
            largest = some.dropna(subset=column)[-2:]
            row[f"{name}: last slope"] = slope(largest["size"], largest[column])
        fits.append(row)
    return pd.DataFrame(fits)


def at_far(sizes: pd.Series, costs: pd.Series) -> float:
    """Return the cost of FAR sites: the larger of a line and a power law through the last two."""
    sizes, costs = sizes[costs.notna()][-2:], costs.dropna()[-2:]
    if len(costs) < 2:
        return math.nan
    (x, size), (y, cost) = sizes, costs
    line = cost + (cost - y) / (size - x) * (FAR - size)
    power = cost * (FAR / size) ** slope(sizes, costs)
    return float(np.nanmax([line, power, cost]))


def far(rows: pd.DataFrame) -> pd.DataFrame:
    """Return costs of 10⁷ sites, extrapolated from the two largest measured numbers of sites."""
    out = []
    for call, some in rows[rows["axis"] == "sites"].groupby("call", sort=False):
        largest = some.iloc[-1]
        out.append(
            {"call": call, "largest measured": f"{largest['counted sites']:,} sites"}
            | {"its seconds": largest["seconds"], "its peak MiB": largest["peak MiB"]}
            | {"10⁷ sites, hours": at_far(some["counted sites"], some["seconds"]) / 3600}
            | {"10⁷ sites, GiB": at_far(some["counted sites"], some["peak MiB"]) / 1024}
        )
    return pd.DataFrame(out)


def costs(rows: pd.DataFrame, axis: str, column: str) -> str:
    """Return a Markdown table of one cost of every call along an axis."""
    some = rows[rows["axis"] == axis]
    wide = some.pivot(index="call", columns="size", values=column)
    lines = [
        [call, *("" if math.isnan(cost) else f"{cost:.3g}" for cost in wide.loc[call])]
        for call in CALLS
        if call in wide.index
    ]
    return markdown([axis, *(f"{size:,}" for size in wide.columns)], lines)


def figure(rows: pd.DataFrame) -> Figure:
    """Draw time above memory, one panel per axis."""
    axes = [axis for axis in AXES if axis in set(rows["axis"])]
    picture = Figure(figsize=(3.2 * len(axes), 5.6), layout="constrained")
    panels = picture.subplots(2, len(axes), sharex="col", sharey="row", squeeze=False)
    for column, axis in enumerate(axes):
        for panel, cost in zip(panels[:, column], ("seconds", "peak MiB"), strict=True):
            for number, call in enumerate(CALLS):
                some = rows[(rows["axis"] == axis) & (rows["call"] == call) & (rows[cost] > 0)]
                panel.loglog(some["size"], some[cost], "o-", ms=3, color=f"C{number}", label=call)
            panel.minorticks_off()
        sizes = sorted(set(rows["size"][rows["axis"] == axis]))
        panels[1, column].set_xticks(sizes, [f"{size:,}" for size in sizes])
        panels[1, column].set_xlabel(axis)
    panels[0, 0].set_ylabel("processor seconds")
    panels[1, 0].set_ylabel("peak memory, MiB")
    panels[0, -1].legend(frameon=False, fontsize=7)
    return picture


def page(rows: pd.DataFrame, about: str) -> str:
    """Return the page."""
    parts = [about]
    for axis in (axis for axis in AXES if axis in set(rows["axis"])):
        parts.append(f"## {axis.capitalize()}")
        parts.append(f"Processor seconds:\n\n{costs(rows, axis, 'seconds')}")
        parts.append(f"Peak memory above the model, MiB:\n\n{costs(rows, axis, 'peak MiB')}")
    parts.append(f"""## Slopes

The exponent k in cost = c nᵏ: over all sizes, and between the two largest. An axis ends before a
measurement that was expected to take too long. A slope is nan if it has fewer than two costs, or if
a call takes no memory above the model.

{table(slopes(rows))}

## 10⁷ sites, by arithmetic

The last two columns are not measured. They continue the line or the power law through the two
largest measured costs, whichever gives more.

{table(far(rows))}""")
    return "\n\n".join(parts) + "\n"


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    limit: Annotated[float, typer.Option(help="the longest measurement, in seconds")] = 45,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `growth_of_cost.md`, its table, its figure and its record."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    about = conditions(device)
    rows = measured(device, limit, smoke=smoke)
    shape = "a tiny model (--smoke)" if smoke else "d_model 224, 7 heads, d_mlp 896"
    text = page(
        rows,
        f"""# How cost grows

A bridge of GPT-2's architecture with random weights: {shape}, float32. One size grows at a time,
from 4 layers, 32 tokens and 1 pair of prompts, which differ from the fifth token on. Sweeps patch
100 neurons at positions, or 100 paths; graphs have 100 nodes; `attribution` and `discover` take
every head at every position, `corpus_statistics` every neuron. Each measurement has a process of
its own, after a small call that loads libraries. Times are those of a repeated call, which
remembers its tests of the model, except if the first takes more than {REPEATED:g} s;
[growth_of_cost.csv](growth_of_cost.csv) has both. {about}
Made by `python -m analyses.benchmarks.growth_of_cost`.""",
    )
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "limit": limit}
    keep(__file__, out, text, {"": rows}, {"": figure(rows)}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
