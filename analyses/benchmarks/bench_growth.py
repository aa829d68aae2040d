"""Measure the cost of growth: all six expansions, against copying weights and building a model.

The model has GPT-2 small's shape and random weights. The model grows by about a third in every
direction; under LayerNorm, growth also centres every weight that writes to the stream. Calls
alternate. Use the ratios to compare machines. Peak memory is counted above the memory of the loaded
model, in a new process for each call.

Bound: growth writes every tensor of the grown model once. So growth cannot be faster than "copy the
grown weights", and cannot use less memory. "build" is the time in which TransformerLens builds an
untrained model of the grown size. Growth also builds such a model, and replaces its weights; growth
draws the new entries itself ("grow, zeros" draws none).

    python -m analyses.benchmarks.bench_growth --out analyses/results
"""

import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from tqdm import tqdm

from analyses.benchmarks.models import GPT2_SMALL, TINY, model_of
from analyses.tools.benching import (
    MIB,
    in_new_process,
    leave,
    machine,
    medians,
    page_name,
    peak_of,
    table,
)
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import grow, growth
from attn_only_lens.tl import HookedTransformer

GROWN = {"n_layers": 16, "d_model": 1024, "n_heads": 16, "d_head": 80, "d_mlp": 4096}
TINY_GROWN = {"n_layers": 3, "d_model": 34, "n_heads": 3, "d_head": 17, "d_mlp": 41}
CALLS = ("copy the weights", "copy the grown weights", "build", "grow, zeros", "grow")


def call_of(name: str, model: HookedTransformer, sizes: dict[str, int]) -> Callable[[], Any]:
    """Return the call with this name, one of CALLS."""
    if name == "copy the weights":
        return lambda: deepcopy(model.state_dict())
    if name in ("copy the grown weights", "build"):
        smoke = model.cfg.d_model == TINY["d_model"]

        def build() -> HookedTransformer:
            return model_of(str(model.cfg.device), smoke=smoke, **sizes)

        if name == "build":
            return build
        state = build().state_dict()  # not grown: a peak could hide in freed memory
        return lambda: deepcopy(state)
    init = growth.init.zeros() if name == "grow, zeros" else None
    return lambda: grow(model, init=init, **sizes)


def peak(name: str, device: str, smoke: bool) -> float:
    """Return the peak memory of one call in MiB, above the memory held before it."""
    model, sizes = model_of(device, smoke=smoke), TINY_GROWN if smoke else GROWN
    return peak_of(call_of(name, model, sizes), device)[1]


@torch.no_grad()
def error(model: HookedTransformer, grown: HookedTransformer) -> float:
    """Return the largest logit difference, divided by the largest logit."""
    tokens = torch.arange(13, device=model.cfg.device)[None] % model.cfg.d_vocab
    expected = model(tokens)
    return ((grown(tokens) - expected).abs().max() / expected.abs().max()).item()


def report(device: str, smoke: bool) -> str:
    """Return the page with all figures."""
    model, sizes = model_of(device, smoke=smoke), TINY_GROWN if smoke else GROWN
    rounds = 2 if smoke else 3
    took = medians({name: call_of(name, model, sizes) for name in CALLS}, rounds, device)
    grown = grow(model, **sizes).model
    held = {
        name: sum(t.nbytes for t in m.parameters()) / MIB
        for name, m in (("source", model), ("grown", grown))
    }
    peaks = {
        name: in_new_process(peak, name, device, smoke)
        for name in tqdm(CALLS, "memory", leave=False)
    }
    copying, bytes_grown = took["copy the grown weights"], held["grown"]
    frame = pd.DataFrame(
        {
            "call": name,
            "seconds": took[name] / 1e3,
            "of copying the grown weights": took[name] / copying,
            "peak MiB": peaks[name],
            "of the grown weights": peaks[name] / bytes_grown,
        }
        for name in CALLS
    )
    before = TINY if smoke else GPT2_SMALL
    return PAGE.format(
        shape="A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights",
        growth=", ".join(f"{name} {before[name]} to {size}" for name, size in sizes.items()),
        rounds=rounds,
        source=held["source"],
        grown=bytes_grown,
        machine=machine(device),
        flag=" --smoke" if smoke else "",
        error=error(model, grown),
        table=table(frame),
    )


PAGE = """# What growth costs

{shape}, float32; {growth}:
{source:.4g} MiB of parameters become {grown:.4g}. Medians of {rounds} calls that take turns.
Machine: {machine}, with other work on it.
Made by `python -m analyses.benchmarks.bench_growth{flag}`.

{table}

The grown model's logits differ from the source's by {error:.1e} of the largest logit.
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_growth.md`."""
    started = time.perf_counter()
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(device, smoke)
    typer.echo(text)
    settings = {"device": device, "smoke": smoke}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
