"""Compute a number about SmolLM2-135M that the guide quotes.

The number is the share of the attribution in the 300 largest nodes of one prompt's graph.

    python -m analyses.studies.figures_on_smollm2 --smollm2 out/smollm2 --out analyses/results
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from analyses.studies.attribution_smollm2 import PAIRS
from analyses.tools.benching import leave, machine
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import circuits, expose_neuron_heads, load, pretrained
from attn_only_lens import patching as p

N_NODES = 300


def main(
    out: Out = Path("out/bench"),
    smollm2: Annotated[Path, typer.Option(help="the folder of make smollm2")] = Path("out/smollm2"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write a page and its record."""
    started = time.perf_counter()
    source = pretrained.small_english(device) if smoke else load(smollm2, device=device)
    model = expose_neuron_heads(source).model
    keys = ("The keys near the cabinet", "The key near the cabinet", " are", " is")
    capital = keys if smoke else PAIRS["capital"]
    clean, _, right, wrong = capital
    n_nodes = 5 if smoke else N_NODES
    graph = circuits.attribution_graph(model, clean, p.logit_diff(right, wrong), top=n_nodes)
    n_tokens = model.to_tokens(clean).shape[1]
    n_sites = model.cfg.n_layers * (model.cfg.n_heads + model.cfg.d_mlp) * n_tokens
    page = PAGE.format(
        capital=clean,
        n_nodes=n_nodes,
        n_sites=n_sites,
        mass=graph.mass,
        machine=machine(device),
    )
    typer.echo(page)
    files = {"figures_on_smollm2.md": page}
    leave(__file__, out, files, started=started, device=device, smoke=smoke, mass=graph.mass)


PAGE = """# A figure on SmolLM2-135M

Made by `python -m analyses.studies.figures_on_smollm2`, on {machine}.

## How much of the attribution a graph has

“{capital}”: the {n_nodes} largest of {n_sites} heads and neurons at all tokens have {mass:.1%} of
the sum of |attribution|.
"""

if __name__ == "__main__":
    typer.run(main)
