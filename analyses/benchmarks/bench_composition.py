"""Measure the cost of the largest composition scores over all pairs of a model, in blocks.

The model has GPT-2 small's shape and random weights, in float32: 37,009 writers (144 attention
heads, 36,864 neurons, the embedding) and 37,008 readers. The whole matrix of scores would be
5.1 GiB, and the products W R of attention heads would be 2.25 MiB per pair.

Memory is the peak above the memory of the exposed model, in a separate process for each figure,
after a small call that loads libraries. The bound on memory, in bytes, from
`circuits/_composition.py`:

    8 d_model Σ d_head + 4 d_model²                    factors of attention heads and embedding
    b (16 d_model + 8 b + 64 min(k, b))                a block, b at least d_model here

The bound on time counts the multiplications and additions of all products of factors, at the speed
of this machine's matrix product. Times are processor time on one thread.

    python -m analyses.benchmarks.bench_composition --out analyses/results
"""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from analyses.benchmarks.bench_peak_memory import held_and_peak, model_of, reset_peak
from analyses.tools.benching import MIB, conditions, leave, page_name, seconds, speeds, table
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import circuits, expose_neuron_heads

CALLS = (("v", 1024), ("v", 4096), ("k", 1024))
K = 100


def bound_mib(cfg: Any, block: int) -> float:
    """Return the bound on memory in MiB, by the formula in the module docstring."""
    d, ranks = cfg.d_model, cfg.n_layers * cfg.n_heads * cfg.d_head
    b = max(block, d)  # the embedding is one writer of rank d_model
    return float(8 * d * ranks + 4 * d * d + b * (16 * d + 8 * b + 64 * min(K, b))) / MIB


def flops(cfg: Any, kind: str) -> float:
    """Return the flops of all products of factors, over all pairs in computation order."""
    heads = cfg.n_heads * cfg.d_head
    neurons = cfg.d_mlp if kind != "k" else 0
    total, written = 0, cfg.d_model
    for _ in range(cfg.n_layers):
        total += written * heads
        written += heads
        total += written * neurons
        written += cfg.d_mlp
    return 2.0 * cfg.d_model * total


def measure(kind: str, block: int, device: str, smoke: bool) -> dict[str, Any]:
    """Return the time and memory of one call."""
    model = expose_neuron_heads(model_of(device, smoke=smoke)).model
    circuits.top_compositions(model, 1, kind, ["embed", "L0H0", "L0N0"], ["L1H0", "L1N0"])
    reset_peak(device)
    before, _ = held_and_peak(device)
    start = seconds(device)
    frame = circuits.top_compositions(model, K, kind, block=block)
    took = seconds(device) - start
    _, peak = held_and_peak(device)
    return {
        "kind": kind,
        "block": block,
        "pairs": frame.attrs["pairs"],
        "seconds": took,
        "peak MiB": (peak - before) / MIB,
        "bound MiB": bound_mib(model.cfg, block),
        "bound seconds": flops(model.cfg, kind) / speeds(device, smoke)[0],
        "largest / baseline": float(frame.ratio_to_baseline[0]),
    }


def report(smoke: bool, device: str) -> str:
    """Return the page with the table."""
    about, rows = conditions(device), []
    for kind, block in [("v", 7)] if smoke else CALLS:
        command = [sys.executable, "-m", __spec__.name]
        command += ["--device", device, "--one", f"{kind} {block}"]
        command += ["--smoke"] if smoke else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    flag = " --smoke" if smoke else ""
    shape = "a tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    return f"""# What composition scores cost

`circuits.top_compositions`, the {K} largest of all pairs; {shape}, float32.
{about}
Made by `python -m analyses.benchmarks.bench_composition{flag}`.
Memory is above that of the loaded model; the bounds are in the script.

{table(pd.DataFrame(rows))}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    smoke: Smoke = False,
    one: Annotated[str, typer.Option(help="print one figure: kind and block")] = "",
) -> None:
    """Measure, print, and write `bench_composition.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    if one:
        kind, block = one.split()
        typer.echo(json.dumps(measure(kind, int(block), device, smoke)))
        return
    text = report(smoke, device)
    typer.echo(text)
    settings = {"device": device, "smoke": smoke}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
