"""Measure how the graph of a compiled program changes when neurons become heads.

A program is compiled to attention heads and MLPs. If an MLP is one node, its edges do not show
which neuron reads what; if neurons are heads, every neuron is a node. For each program of
`compile_tracr.py`, the table has:

    error           largest |Δ logit| / largest |logit| after conversion, over all stored inputs
    nodes           embed, heads, and MLPs or neurons, and the output
    edges           edges that the architecture allows: q, k and v of a head, "in" of other parts
    true edges      edges of the program (`tracr_edges.py`); an MLP has those of all its neurons
    found           true edges among the edges of `circuits.attribution_graph` with |weight| above
                    1e-6, joined over positions and inputs

If the share of true edges falls, the graph grows faster than the program. Edges that are not found
act on a pattern through another pattern, or carry values that these inputs never have.
"""

import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from analyses.studies.tracr_edges import Edge
from analyses.studies.tracr_models import PROGRAMS, TracrProgram, load_program
from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep
from attn_only_lens import circuits, convert
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import Metric

LEAST = 1e-6  # above the leak of a compiled head, and below the values that programs take


def metric_of(program: TracrProgram, expected: list[Any]) -> Metric:
    """What the model says for one input, as one number."""
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


def graph_scores(model: Any, tokens: Tensor, metric: Metric) -> dict[Edge, float]:
    """Return |weights| of the graph of one input, summed over positions."""
    graph = circuits.attribution_graph(model, tokens[None], metric, mass=1)
    names = graph.nodes.set_index("id")["name"]
    weights_of: dict[Edge, float] = defaultdict(float)
    for row in graph.edges.itertuples():
        writer, reader = names[row.source], names[row.target]
        reader = "output" if reader == "metric" else reader
        side = {"value": "v"}.get(row.kind, row.kind) if "H" in reader else "in"
        weights_of[Edge(writer, reader, side)] += abs(row.weight)
    return weights_of


def with_whole_mlps(edges: set[Edge]) -> set[Edge]:
    """Return the edges with all neurons of a layer merged into one node."""

    def whole(name: str) -> str:
        return f"{name.split('N')[0]}MLP" if "N" in name else name

    return {Edge(whole(e.writer), whole(e.reader), e.side) for e in edges}


def nodes_of(edges: set[Edge]) -> int:
    """Return the number of parts, given all edges that the architecture allows."""
    return len({e.writer for e in edges} | {e.reader for e in edges})


@torch.no_grad()
def error_of(program: TracrProgram) -> float:
    """Return the largest logit difference, divided by the largest logit, with all hooks active."""
    converted = convert(program.model, copy_weights=True)
    moved = largest = 0.0
    for tokens, _, _ in program.batches():
        expected = program.model(tokens)
        logits, _ = converted.run_with_cache(tokens)
        moved = max(moved, float((logits - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return moved / largest


def edges_of_graphs(program: TracrProgram, n_inputs: int) -> set[Edge]:
    """Return the edges in the attribution graphs of some inputs with the greatest length."""
    tokens, expected, _ = next(program.batches())
    converted = convert(program.model, copy_weights=True)
    scored_edges: set[Edge] = set()
    for row, wanted in zip(tokens[:n_inputs], expected[:n_inputs], strict=True):
        metric = metric_of(program, wanted)
        of_edges = graph_scores(converted, row, metric)
        scored_edges |= {edge for edge, score in of_edges.items() if score > LEAST}
    # The nodes "bias", "rest" and "offset" are not parts of the program.
    return {e for e in scored_edges if e.writer not in ("bias", "rest", "offset")}


def row_of(name: str, n_inputs: int, device: str) -> dict[str, Any]:
    """Return the row of one program."""
    program = load_program(name, device=device)
    every, true = set(program.candidates()), program.true_edges()
    graph_edges = edges_of_graphs(program, n_inputs)
    coarse, coarse_true = with_whole_mlps(every), with_whole_mlps(true)
    return {
        "program": name,
        "error": error_of(program),
        "nodes, MLPs": nodes_of(coarse),
        "nodes, neurons": nodes_of(every),
        "edges, MLPs": len(coarse),
        "edges, neurons": len(every),
        "true, MLPs": len(coarse_true),
        "true, neurons": len(true),
        "share true, MLPs": len(coarse_true) / len(coarse),
        "share true, neurons": len(true) / len(every),
        "found": len(graph_edges),
        "found and true": len(graph_edges & true),
    }


def main(
    out: Out = Path("out/tracr_growth"),
    n_inputs: Annotated[int, typer.Option(help="inputs of each program")] = 12,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    n_inputs = 2 if smoke else n_inputs
    programs = ("frac_prevs", "pair_balance") if smoke else PROGRAMS
    frame = pd.DataFrame([row_of(name, n_inputs, device) for name in programs])
    shown = frame.assign(error=[f"{error:.1e}" for error in frame["error"]])
    text = PAGE.format(table=table(shown), n_inputs=n_inputs, flag=" --smoke" if smoke else "")
    typer.echo(text)
    settings = {"n_inputs": n_inputs, "device": device, "smoke": smoke}
    keep(__file__, out, text, frame, figure(frame), started=started, digits="%.4g", **settings)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw edges by program, allowed and true, with MLPs and with neurons as nodes."""
    picture = Figure(figsize=(11, 5), layout="constrained")
    panel = picture.subplots()
    for colour, nodes in enumerate(("MLPs", "neurons")):
        for what, marker in (("edges", "o"), ("true", "x")):
            style = {"color": f"C{colour}", "marker": marker, "linestyle": ""}
            panel.plot(
                frame["program"], frame[f"{what}, {nodes}"], label=f"{what}, {nodes}", **style
            )
    panel.set_yscale("log")
    panel.set_ylabel("edges")
    panel.tick_params("x", rotation=45)
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize="small")
    return picture


PAGE = """# Compiled programs, before and after neurons are heads

The table compares each compiled program, whose MLPs are nodes, with its converted form, whose
neurons are heads (in float64). `analyses/studies/tracr_growth.py` describes the columns.
Attribution graphs are computed on {n_inputs} inputs of the greatest length.
[Another study](known_circuits.md) measures how well scores find true edges.

{table}

![Edges by program](tracr_growth.svg)

Made by `python -m analyses.studies.tracr_growth{flag}`.
"""

if __name__ == "__main__":
    typer.run(main)
