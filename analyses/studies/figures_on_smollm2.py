"""Two figures that the guides quote of SmolLM2-135M.

rounded     how far scores of a sweep in bfloat16 are from those in float32: neurons spread evenly
            over all layers, at the token where two prompts differ and at the last one. A score is 0
            in the corrupted run and 1 in the clean one.
graph       the share of the attribution that the 300 largest nodes of one prompt's graph have

    python -m analyses.studies.figures_on_smollm2 --smollm2 out/smollm2 --out analyses/results
"""

import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from analyses.studies.attribution_smollm2 import PAIRS
from analyses.tools.benching import leave, machine, table
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import circuits, expose_neuron_heads, load, pretrained
from attn_only_lens import patching as p

N_NEURONS, N_NODES = 160, 300


def rounded(model: Any, pair: tuple[str, str, str, str], n: int) -> pd.DataFrame:
    """The scores of n neurons at two tokens, in float32 and in bfloat16: a row for each site."""
    clean, corrupted, right, wrong = pair
    tokens, others = (model.to_tokens(text)[0] for text in (clean, corrupted))
    differ = int((tokens != others).nonzero()[0])
    names = [f"L{layer}N{i}" for layer in range(model.cfg.n_layers) for i in range(model.cfg.d_mlp)]
    places = (differ, len(tokens) - 1)
    sites = [f"{name}@{place}" for name in names[:: len(names) // n][:n] for place in places]
    prompts = clean, corrupted, p.logit_diff(right, wrong)
    frames = {
        precision: p.activation_patch(
            model, *prompts, sites=sites, precision=how, progress=False
        ).to_frame()
        for precision, how in (("float32", None), ("bfloat16", "bf16"))
    }
    found = frames["float32"][["name", "position"]].copy()
    for precision, frame in frames.items():
        found[precision] = frame["score"].to_numpy()
    return found.assign(n_tokens=len(tokens))


def main(
    out: Out = Path("out/bench"),
    smollm2: Annotated[Path, typer.Option(help="the folder of make smollm2")] = Path("out/smollm2"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write a page, its table and its record."""
    started = time.perf_counter()
    source = pretrained.small_english(device) if smoke else load(smollm2, device=device)
    model = expose_neuron_heads(source).model
    keys = ("The keys near the cabinet", "The key near the cabinet", " are", " is")
    names, capital = (keys, keys) if smoke else (PAIRS["names"], PAIRS["capital"])
    scores = rounded(model, names, 3 if smoke else N_NEURONS)
    off = scores["bfloat16"] - scores["float32"]
    clean, _, right, wrong = capital
    n_nodes = 5 if smoke else N_NODES
    graph = circuits.attribution_graph(model, clean, p.logit_diff(right, wrong), top=n_nodes)
    n_tokens = model.to_tokens(clean).shape[1]
    n_sites = model.cfg.n_layers * (model.cfg.n_heads + model.cfg.d_mlp) * n_tokens
    page = PAGE.format(
        prompt=names[0],
        sites=len(scores),
        n_tokens=scores["n_tokens"].iloc[0],
        rounded=table(
            pd.DataFrame(
                {
                    "what": ["scores in float32", "bfloat16 less float32"],
                    "root mean square": [(x**2).mean() ** 0.5 for x in (scores["float32"], off)],
                    "largest": [x.abs().max() for x in (scores["float32"], off)],
                }
            )
        ),
        capital=clean,
        n_nodes=n_nodes,
        n_sites=n_sites,
        mass=graph.mass,
        machine=machine(device),
    )
    typer.echo(page)
    files = {
        "figures_on_smollm2.md": page,
        "figures_on_smollm2.csv": scores.to_csv(index=False, float_format="%.6g"),
    }
    leave(__file__, out, files, started=started, device=device, smoke=smoke, mass=graph.mass)


PAGE = """# Figures on SmolLM2-135M

Made by `python -m analyses.studies.figures_on_smollm2`, on {machine}.

## A sweep in bfloat16

{sites} sites (neurons of all layers, at the token where the prompts differ and at the last) of the
pair “{prompt}” and its corrupted twin, {n_tokens} tokens. Scores are 0 in the corrupted run and 1
in the clean one; `figures_on_smollm2.csv` has every one of them.

{rounded}

## How much of the attribution a graph has

“{capital}”: the {n_nodes} largest of {n_sites} heads and neurons at all tokens have {mass:.1%} of
the sum of |attribution|.
"""

if __name__ == "__main__":
    typer.run(main)
