"""Compare how edge scores and exact cuts rank the edges of trained models.

On the shipped model and on the real models in the models folder, in float64, the nodes with the
largest attribution to the largest logits are taken on some prompts. Every edge between these nodes
has three scores:

    exact         `circuits.score_edges`, its column `exact`: the change of the logits by each cut
    two factors   its score
    EAP           `edge_attribution_patching.py`: the cut to first order, with a zero reference

Norm scales before the reader are held fixed. EAP is compared with exact cuts with a zero reference;
two factors are compared with exact cuts with zero and mean references.

    python -m analyses.studies.edges_against_cuts --models-dir MODELS --out analyses/results
"""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from matplotlib.figure import Figure
from torch import Tensor

from analyses.studies.edge_attribution_patching import edge_attribution_patching
from analyses.tools.benching import table
from analyses.tools.options import Device, ModelsDir, Out, Smoke
from analyses.tools.real_models import REAL, trained
from analyses.tools.study_files import keep
from attn_only_lens import circuits, convert
from attn_only_lens import patching as p

LENGTH = {"sort_gelu_new_3l": 12, "modular_addition_relu_1l": 3}  # prompt lengths; texts: 16
TOP = 100
KINDS = ("all", "q", "k", "value", "in")
REFERENCES = {"zero": ("zero",), "zero and mean": ("zero", "mean")}


def rows_of(source: Any, tokens: Tensor, n_nodes: int) -> Iterator[dict[str, Any]]:
    """Yield how well each score ranks edges, for each reference and kind of edge."""
    model = convert(source, copy_weights=True)
    metric = p.custom(lambda logits: logits.amax(-1).mean(), name="largest logits")
    ranked = circuits.score_edges(
        model, tokens, metric=metric, top=n_nodes, to=["zero"], progress=False
    )
    nodes = sorted(set(ranked["reader"]) - {"output"})
    eap = edge_attribution_patching(source, model, [tokens], nodes)
    for reference, to in REFERENCES.items():
        frame = circuits.score_edges(
            model, tokens, nodes, to=to, exact=len(ranked), progress=False
        ).rename(columns={"score": "two factors"})
        frame["EAP"] = [eap[e.writer, e.reader, e.kind] for e in frame.itertuples()]
        for kind in KINDS:
            edges = frame if kind == "all" else frame[frame["kind"] == kind]
            k = min(TOP, len(edges) // 2)
            best = set(edges["exact"].nlargest(k).index)
            for method in ("two factors", "EAP")[: 1 + (reference == "zero")]:
                yield {
                    "reference": reference,
                    "kind": kind,
                    "nodes": len(nodes),
                    "edges": len(edges),
                    "method": method,
                    "spearman": edges[method].corr(edges["exact"], method="spearman"),
                    "k": k,
                    "overlap": len(best & set(edges[method].nlargest(k).index)) / k,
                }


def summary(frame: pd.DataFrame, kind: str, measure: str) -> str:
    """Return a Markdown table with a row per model and a column per method and reference."""
    rows = frame[frame["kind"] == kind]
    label = rows["method"] + ", " + rows["reference"]
    rows = rows.assign(label=pd.Categorical(label, list(dict.fromkeys(label))))
    wide = rows.pivot(index=["model", "nodes", "edges"], columns="label", values=measure)
    wide.columns = list(wide.columns)
    mean = pd.DataFrame([["mean", "", "", *wide.mean()]], columns=[*wide.index.names, *wide])
    return table(pd.concat([wide.reset_index().astype(object), mean]))


def figure(frame: pd.DataFrame) -> Figure:
    """Draw Spearman's correlation with exact cuts by kind of edge: a dot per model and method."""
    picture = Figure(figsize=(9, 4), layout="constrained")
    panel = picture.subplots()
    rows = frame[frame["reference"] == "zero"]
    for offset, (method, points) in enumerate(rows.groupby("method", sort=False)):
        x = [KINDS.index(kind) + 0.2 * (offset - 0.5) for kind in points["kind"]]
        panel.plot(x, points["spearman"], "o", label=method, alpha=0.7)
    panel.set_xticks(range(len(KINDS)), KINDS)
    panel.set_ylabel("Spearman with exact cuts")
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize="small")
    return picture


def where_eap_wins(frame: pd.DataFrame) -> str:
    """Return the models and kinds of edges for which EAP agrees better with exact cuts."""
    rows = frame[frame["reference"] == "zero"]
    wide = rows.pivot(index=["model", "kind"], columns="method", values="spearman")
    wins = wide[wide["EAP"] > wide["two factors"]]
    lines = [
        f"{model}, {kind} ({row['EAP']:.3f} against {row['two factors']:.3f})"
        for (model, kind), row in wins.iterrows()
    ]
    return f"{len(wins)} of {len(wide)}: {'; '.join(lines)}." if lines else f"0 of {len(wide)}."


PAGE = """# Edge scores against exact cuts, on trained models

For each model, we take the {n_nodes} heads and neurons with the largest attribution to the largest
logits on {n_prompts} prompts, and every edge between them, the embedding and the logits. All is in
float64, and norm scales are held fixed at the reader. `analyses/studies/edges_against_cuts.py`
describes the methods. Exact cuts replace the cut edge by zero ("zero"), or we add up the effects of
cuts that replace it by zero and by its mean ("zero and mean"); EAP uses zero.

{missing}Made by `python -m analyses.studies.edges_against_cuts{flag}`; every row, by kind of edge
too, is in `edges_against_cuts.csv`.

![Spearman with exact cuts by kind of edge](edges_against_cuts.svg)

## Spearman with exact cuts, all edges

{spearman}

## Share of the {top} edges with the largest effects among the {top} with the highest scores

If a model has fewer than twice as many edges, half of its edges are used.

{overlap}

## Cases in which EAP agrees better with exact cuts, by Spearman

{wins}
"""


def main(
    out: Out = Path("out/edges_against_cuts"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    n_nodes: Annotated[int, typer.Option(help="nodes of each model")] = 60,
    n_prompts: Annotated[int, typer.Option(help="prompts of each model")] = 8,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    n_nodes = 17 if smoke else n_nodes
    rows, seen = [], []
    for name, source, tokens in trained(models_dir, LENGTH, device, smoke=smoke):
        chosen = tokens[:: len(tokens) // n_prompts][:n_prompts]
        rows += [{"model": name} | row for row in rows_of(source, chosen, n_nodes)]
        seen.append(name)
    frame = pd.DataFrame(rows)
    missing = [] if smoke else [name for name in REAL if name not in seen]
    text = PAGE.format(
        n_nodes=n_nodes,
        n_prompts=n_prompts,
        top=TOP,
        flag=" --smoke" if smoke else "",
        missing="".join(f"Left out, its weights were not there: {name}.\n\n" for name in missing),
        spearman=summary(frame, "all", "spearman"),
        overlap=summary(frame, "all", "overlap"),
        wins=where_eap_wins(frame),
    )
    typer.echo(text)
    settings = {
        "models": seen,
        "n_nodes": n_nodes,
        "n_prompts": n_prompts,
        "device": device,
        "smoke": smoke,
    }
    keep(__file__, out, text, frame, figure(frame), started=started, digits="%.4f", **settings)


if __name__ == "__main__":
    typer.run(main)
