"""Do edge scores find the edges that a compiled program has? AUROC on the Tracr programs.

Every edge that the architecture allows gets a score from each method, and the edges that are true
are known (`tracr_edges.py`): AUROC is the probability that a true edge, drawn at random, has a
higher score than another, ties counting half. 0.5 is chance.

    graph            |weight| of `circuits.attribution_graph`: edges of kind "value" for what heads
                     read as values and for what neurons and the output read; "q" and "k" for
                     queries and keys; "q" of a neuron besides its value
    value edges      the same, with 0 for queries and keys: what the frozen model alone can tell
    gradient edges   |Δwriter · ∂metric/∂reader's input|, between an input and another one of the
                     same length: edge attribution patching (Syed, Rager and Conmy, 2023)
    random           a score drawn at random: the mean over draws

Scores are summed over positions and inputs, as absolute values. The metric is the logit of each
expected output less the mean of the others, summed over positions where an output is defined; the
logit itself where there is one.
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
from benching import table
from matplotlib.figure import Figure
from studies import keep
from torch import Tensor
from tracr_edges import Edge
from tracr_models import PROGRAMS, TracrProgram, load_program

from attn_only_lens import circuits, convert
from attn_only_lens import patching as p
from attn_only_lens.runs.metrics import Metric, bind

LABELS = {"all": "all true edges", "changing": "true edges that change a logit when cut alone"}
N_RANDOM = 100
WRITTEN = ("hook_resid_pre", "hook_z", "hook_post")
READ = ("hook_q", "hook_k", "hook_v", "hook_pre")


def auroc(scores: Iterable[float], labels: Iterable[bool]) -> float:
    """The probability that a positive has a higher score than a negative; ties count half."""
    ranks = pd.Series(list(scores)).rank()
    positive = np.asarray(list(labels), dtype=bool)
    n, m = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


def metric_of(program: TracrProgram, expected: list[Any]) -> Metric:
    """What the model says for one input, as one number."""
    at = [pos for pos, value in enumerate(expected, start=1) if value is not None]

    def said(logits: Tensor) -> Tensor:
        rows = logits[0, at]
        if program.outputs is None:
            return rows.sum()
        right = torch.tensor([program.outputs.index(expected[pos - 1]) for pos in at])
        chosen = rows.gather(1, right[:, None])[:, 0]
        return (chosen - (rows.sum(1) - chosen) / (rows.shape[1] - 1)).sum()

    return p.custom(said, name="what is expected")


def graph_scores(
    model: Any, tokens: Tensor, metric: Metric, *, patterns: bool
) -> dict[Edge, float]:
    """|weights| of the attribution graph of one input, summed over positions."""
    graph = circuits.attribution_graph(model, tokens[None], metric, mass=1, patterns=patterns)
    names = graph.nodes.set_index("id")["name"]
    found: dict[Edge, float] = defaultdict(float)
    for row in graph.edges.itertuples():
        writer, reader = names[row.source], names[row.target]
        reader = "output" if reader == "metric" else reader
        side = {"value": "v"}.get(row.kind, row.kind) if "H" in reader else "in"
        found[Edge(writer, reader, side)] += abs(row.weight)
    return found


def gradient_scores(model: Any, tokens: Tensor, other: Tensor, metric: Metric) -> dict[Edge, float]:
    """Edge attribution patching between one input and another, summed over positions."""
    bound = bind(metric, model, p.PromptPair(tokens[None], other[None]))
    seen: list[dict[str, Tensor]] = []
    for each in (tokens, other):
        kept: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: Any, kept: dict[str, Tensor] = kept) -> None:
            kept[hook.name] = x

        hooks = [(lambda name: name.endswith((*WRITTEN, *READ)), keep)]
        logits = model.run_with_hooks(each[None], fwd_hooks=hooks)
        seen.append(kept)
        if each is tokens:
            value = bound.value(bound.select(logits)[None])[0]
            inner = {name: x for name, x in kept.items() if name.endswith(READ)}
            grads = torch.autograd.grad(value, [logits, *inner.values()], allow_unused=True)
    of = {n: g for n, g in zip(inner, grads[1:], strict=True) if g is not None}
    moved = {n: (seen[1][n] - seen[0][n])[0].detach() for n in seen[0]}
    written = {"embed": moved["blocks.0.hook_resid_pre"]}
    read: dict[tuple[str, str], Tensor] = {("output", "in"): grads[0][0] @ model.unembed.W_U.T}
    for layer, block in enumerate(model.blocks):
        for head in range(model.cfg.n_heads):
            name, at = f"L{layer}H{head}", f"blocks.{layer}.attn.hook_"
            written[name] = moved[f"{at}z"][:, head] @ block.attn.W_O[head]
            for side in "qkv":
                W = getattr(block.attn, f"W_{side.upper()}")[head]
                if f"{at}{side}" in of:
                    read[name, side] = of[f"{at}{side}"][0][:, head] @ W.T
        for neuron in range(model.cfg.d_mlp):
            name, at = f"L{layer}N{neuron}", f"blocks.{layer}.mlp.hook_"
            written[name] = moved[f"{at}post"][:, neuron, None] * block.mlp.W_out[neuron]
            read[name, "in"] = of[f"{at}pre"][0][:, neuron, None] * block.mlp.W_in[:, neuron]
    return {
        Edge(writer, reader, side): float((delta * gradient).detach().sum(-1).abs().sum())
        for writer, delta in written.items()
        for (reader, side), gradient in read.items()
    }


def scores(program: TracrProgram, n_inputs: int) -> dict[str, dict[Edge, float]]:
    """Scores of the candidates by every method, over some inputs of the greatest length."""
    tokens, expected, _ = next(program.batches())
    converted = convert(program.model, copy_weights=True)
    total: dict[str, dict[Edge, float]] = {
        name: defaultdict(float) for name in ("graph", "gradient edges")
    }
    for i in range(min(n_inputs, len(tokens))):
        metric = metric_of(program, expected[i])
        other = tokens[(i + 1) % len(tokens)]
        found = {
            "graph": graph_scores(converted, tokens[i], metric, patterns=True),
            "gradient edges": gradient_scores(program.model, tokens[i], other, metric),
        }
        for name, of_edges in found.items():
            for edge, score in of_edges.items():
                total[name][edge] += score
    total["value edges"] = {e: s for e, s in total["graph"].items() if e.side not in ("q", "k")}
    return total


def rows_of(name: str, n_inputs: int, seed: int) -> list[dict[str, Any]]:
    """AUROC of each method on a program, for both sets of labels."""
    program = load_program(name)
    candidates = program.candidates()
    changing = program.edges[program.edges["changes_logits"]]
    true = {
        "all": program.true_edges(),
        "changing": {Edge(*row) for row in changing[list(Edge._fields)].itertuples(index=False)},
    }
    found = scores(program, n_inputs)
    draw = np.random.default_rng(seed)
    rows = []
    for label, edges in true.items():
        labels = [edge in edges for edge in candidates]
        about = {"program": name, "edges": label, "true": sum(labels), "of": len(candidates)}
        for method in ("graph", "value edges", "gradient edges"):
            of_edges = [found[method].get(edge, 0.0) for edge in candidates]
            rows.append({**about, "method": method, "auroc": auroc(of_edges, labels)})
        random = [auroc(draw.random(len(labels)), labels) for _ in range(N_RANDOM)]
        rows.append({**about, "method": "random", "auroc": float(np.mean(random))})
    return rows


def page(frame: pd.DataFrame, n_inputs: int, flag: str) -> str:
    """The tables as Markdown."""
    text = [PAGE.format(n_inputs=n_inputs, flag=flag)]
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
    """AUROC by program: a panel for each set of labels, a colour for each method."""
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
program has: {n_inputs} inputs of the greatest length for each program. What the methods and the
metric are, `analyses/tracr_edges_auroc.py` says; what a true edge is, `tracr_edges.py`.

Edges that change nothing when cut alone carry values that these inputs never have, or repeat what
others carry: no method that looks at activations can score the former.

Where these methods are blind, they are so for a reason that holds in any model. With patterns
frozen, a part whose only use is to set a pattern has attribution 0, and so has every edge into it:
edges of kinds "q" and "k" reach one step beyond the value edges, and no further. Gradients that are
not frozen go on, as far as saturated softmaxes let them. The programs "reverse" and "sort_unique"
compute positions in their first layers and move values in their last head alone.

Made by `python analyses/tracr_edges_auroc.py{flag}`; every row is in `tracr_edges_auroc.csv`.

![Edge AUROC by program](tracr_edges_auroc.svg)
"""


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/tracr_edges"),
    n_inputs: Annotated[int, typer.Option(help="inputs of each program")] = 12,
    seed: Annotated[int, typer.Option(help="of the random scores")] = 0,
    smoke: Annotated[bool, typer.Option(help="two programs and two inputs")] = False,
) -> None:
    """Measure, print, and keep what `studies.py` says."""
    started = time.perf_counter()
    n_inputs = 2 if smoke else n_inputs
    programs = ("hist", "pair_balance") if smoke else PROGRAMS
    frame = pd.DataFrame([row for name in programs for row in rows_of(name, n_inputs, seed)])
    text = page(frame, n_inputs, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"n_inputs": n_inputs, "seed": seed, "smoke": smoke}
    keep(__file__, out, text, frame, figure(frame), started=started, digits="%.4f", **settings)


if __name__ == "__main__":
    typer.run(main)
