"""Do edge scores find the edges that a compiled program has? AUROC on the Tracr programs.

Every edge that the architecture allows gets a score from each method, and the true edges are known
(`tracr_edges.py`). AUROC is the probability that a random true edge has a higher score than a
random other edge, where ties count half. 0.5 is chance.

    two factors   `circuits.score_edges`: how much a cut changes the reader's output, times how much
                  replacing the reader's output changes the logits
    exact cut     its column `exact`: the change of the logits by every single cut
    EAP           `edge_attribution_patching.py`: the cut to first order
    graph         |weight| of `circuits.attribution_graph`: edges of kind "value" for what heads
                  read as values and for what neurons and the output read; "q" and "k" for queries
                  and keys; "gate" of a neuron besides its value
    secants       |weight| of the graph of a difference, from each input to the next two inputs of
                  its length
    random        random scores: the mean over draws

All methods use the same inputs, of every length, and all positions, including BOS. The first two
methods replace the cut term with 0 and with its mean, and add the two scores; EAP removes the term.
The graph's metric is the logit of each expected output minus the mean of the other logits, summed
over positions with a defined output (if there is only one logit, the logit itself). Scores below
1e-9 count as 0, because softmaxes of compiled heads leak.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from analyses.studies.edge_attribution_patching import edge_attribution_patching
from analyses.studies.tracr_edges import Edge
from analyses.studies.tracr_models import PROGRAMS, TracrProgram, load_program
from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Seed, Smoke
from analyses.tools.study_files import keep
from attn_only_lens import circuits, convert
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import Metric

LABELS = {"all": "all true edges", "changing": "true edges that change a logit when cut alone"}
N_RANDOM = 100
METHODS = ("two factors", "exact cut", "EAP", "graph", "secants")
LEAKED = 1e-9


def auroc(scores: Iterable[float], labels: Iterable[bool]) -> float:
    """Return the probability that a positive outranks a negative; ties count half."""
    ranks = pd.Series(list(scores)).rank()
    positive = np.asarray(list(labels), dtype=bool)
    n, m = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


def metric_of(program: TracrProgram, expected: list[Any]) -> Metric:
    """Return the metric of one input: logits of the expected outputs against other logits."""
    positions = [pos for pos, value in enumerate(expected, start=1) if value is not None]

    def said(logits: Tensor) -> Tensor:
        rows = logits[0, positions]
        if program.outputs is None:
            return rows.sum()
        right = torch.tensor([program.outputs.index(expected[pos - 1]) for pos in positions]).to(
            rows.device
        )
        chosen = rows.gather(1, right[:, None])[:, 0]
        return (chosen - (rows.sum(1) - chosen) / (rows.shape[1] - 1)).sum()

    return p.custom(said, name="what is expected")


def graph_scores(
    model: Any,
    tokens: Tensor,
    metric: Metric,
    *,
    patterns: bool = True,
    corrupted: Tensor | None = None,
) -> dict[Edge, float]:
    """Return |weights| of the graph of one input, or of a difference, summed over positions."""
    graph = circuits.attribution_graph(
        model,
        tokens[None],
        metric,
        corrupted=None if corrupted is None else corrupted[None],
        mass=1,
        patterns=patterns,
    )
    names = graph.nodes.set_index("id")["name"]
    weights_of: dict[Edge, float] = defaultdict(float)
    for row in graph.edges.itertuples():
        writer, reader = names[row.source], names[row.target]
        reader = "output" if reader == "metric" else reader
        side = {"value": "v"}.get(row.kind, row.kind) if "H" in reader else "in"
        weights_of[Edge(writer, reader, side)] += abs(row.weight)
    return weights_of


def side_of(kind: str) -> str:
    """Return the name in `tracr_edges.py` for a kind of edge."""
    return "v" if kind == "value" else kind


def scores(program: TracrProgram, per_length: int | None) -> dict[str, dict[Edge, float]]:
    """Return the scores of all candidates, by method.

    Args:
        program: the program.
        per_length: the number of inputs of each length; None for all.
    """
    converted = convert(program.model, copy_weights=True)
    inputs = [(tokens[:per_length], wanted[:per_length]) for tokens, wanted, _ in program.batches()]
    candidates = program.candidates()
    nodes = sorted({edge.writer for edge in candidates} - {"embed"})
    prompts = [row for tokens, _ in inputs for row in tokens]
    frame = circuits.score_edges(converted, prompts, nodes, exact=len(candidates), progress=False)
    keys = [Edge(e.writer, e.reader, side_of(e.kind)) for e in frame.itertuples()]
    eap = edge_attribution_patching(program.model, converted, [t for t, _ in inputs], nodes)
    graph: dict[Edge, float] = defaultdict(float)
    secants: dict[Edge, float] = defaultdict(float)
    for (tokens, wanted), (others, _, _) in zip(inputs, program.batches(), strict=True):
        for i, (row, expected) in enumerate(zip(tokens, wanted, strict=True)):
            if all(value is None for value in expected):
                continue
            metric = metric_of(program, expected)
            for edge, score in graph_scores(converted, row, metric).items():
                graph[edge] += score
            for step in (1, 2):
                partner = others[(i + step) % len(others)]
                if torch.equal(row, partner):
                    continue
                of_pair = graph_scores(converted, row, metric, corrupted=partner)
                for edge, score in of_pair.items():
                    secants[edge] += score
    return {
        "two factors": dict(zip(keys, frame["score"], strict=True)),
        "exact cut": dict(zip(keys, frame["exact"], strict=True)),
        "EAP": {Edge(w, r, side_of(kind)): score for (w, r, kind), score in eap.items()},
        "graph": graph,
        "secants": secants,
    }


def rows_of(
    name: str, per_length: int | None, seed: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return the AUROC of each method on a program, for both sets of labels."""
    program = load_program(name, device=device)
    candidates = program.candidates()
    changing = program.edges[program.edges["changes_logits"]]
    true = {
        "all": program.true_edges(),
        "changing": {Edge(*row) for row in changing[list(Edge._fields)].itertuples(index=False)},
    }
    scored = scores(program, per_length)
    draw = np.random.default_rng(seed)
    rows = []
    for label, edges in true.items():
        labels = [edge in edges for edge in candidates]
        about = {"program": name, "edges": label, "true": sum(labels), "of": len(candidates)}
        for method in METHODS:
            of_edges = [scored[method].get(edge, 0.0) for edge in candidates]
            of_edges = [0.0 if score < LEAKED else score for score in of_edges]
            rows.append({**about, "method": method, "auroc": auroc(of_edges, labels)})
        random = [auroc(draw.random(len(labels)), labels) for _ in range(N_RANDOM)]
        rows.append({**about, "method": "random", "auroc": float(np.mean(random))})
    return rows


def page(frame: pd.DataFrame, inputs: str, flag: str) -> str:
    """Return the tables as Markdown."""
    text = [PAGE.format(inputs=inputs, flag=flag)]
    for label, title in LABELS.items():
        rows = frame[frame["edges"] == label]
        wide = rows.pivot(index=["program", "true", "of"], columns="method", values="auroc")
        wide = wide[list(dict.fromkeys(rows["method"]))]
        mean = pd.DataFrame([["mean", "", "", *wide.mean()]], columns=[*wide.index.names, *wide])
        text.append(
            f"## Labels: {title}\n\n{table(pd.concat([wide.reset_index().astype(object), mean]))}\n"
        )
    return "\n".join(text)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw AUROC by program: one panel per set of labels, one colour per method."""
    picture = Figure(figsize=(11, 7), layout="constrained")
    panels = picture.subplots(len(LABELS), 1, sharex=True)
    for panel, (label, title) in zip(panels, LABELS.items(), strict=True):
        rows = frame[frame["edges"] == label]
        for method, points in rows.groupby("method", sort=False):
            panel.plot(points["program"], points["auroc"], "o", label=method, alpha=0.7)
        panel.axhline(0.5, color="gray", linewidth=0.8)
        panel.set_title(title)
        panel.set_ylabel("edge AUROC")
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize="small")
    panels[-1].tick_params("x", rotation=45)
    return picture


PAGE = """# Edge AUROC on compiled programs

Every edge that the architecture allows, scored by each method and held against the edges that the
program has, on {inputs} of each length and at all positions, BOS included. What the methods are,
`analyses/studies/tracr_edges_auroc.py` says; what a true edge is, `tracr_edges.py`.

Edges that change nothing when cut alone carry values that these inputs never have, or repeat what
others carry: no method that looks at activations can score the former. In "pair_balance" four dead
edges of 16 cap every method at .875.

"two factors" costs one forward pass a node and reference, "exact cut" one an edge and reference. Of
the edges that change a logit when cut alone, exact cuts find most, as they should: they measure
just that. Of all true edges two factors find more: what a reader writes does change where others
repeat it, or a later part rounds it away. EAP and the graph are blind where softmaxes are
saturated and relu is off: a slope of 0 says nothing of a step. With patterns frozen, a part whose
only use is to set a pattern has attribution 0, and so has every edge into it.

Made by `python -m analyses.studies.tracr_edges_auroc{flag}`; every row is in
`tracr_edges_auroc.csv`.

![Edge AUROC by program](tracr_edges_auroc.svg)
"""


def main(
    out: Out = Path("out/tracr_edges"),
    per_length: Annotated[int, typer.Option(help="inputs of each length; 0 for all")] = 0,
    seed: Seed = 0,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    per_length = 1 if smoke else per_length
    programs = ("hist", "pair_balance") if smoke else PROGRAMS
    rows = [row for name in programs for row in rows_of(name, per_length or None, seed, device)]
    frame = pd.DataFrame(rows)
    inputs = f"{per_length} inputs" if per_length else "all inputs"
    text = page(frame, inputs, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"per_length": per_length, "seed": seed, "device": device, "smoke": smoke}
    keep(__file__, out, text, frame, figure(frame), started=started, digits="%.4f", **settings)


if __name__ == "__main__":
    typer.run(main)
