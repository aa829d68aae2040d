"""Measure what an atlas of all heads and neurons costs, and extrapolate to a million tokens.

Flops of matrix products, and bytes that kernels read and write, are counted on the last batch: of
the forward pass alone, and of the whole step. Then the times of all batches are fitted by a + b u,
where u is the share of lists of top examples that a batch is expected to change: of k examples, one
is new in batch t with probability 1 - (1 - 1/t)^k if batches are alike. So the first batches cost
most. Times are processor time on one thread.

    python -m analyses.benchmarks.bench_atlas --model out/smollm2 --texts corpus.txt
"""

import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from analyses.tools.benching import conditions, leave, page_name, seconds, speeds, table
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import expose_neuron_heads, load, pretrained
from attn_only_lens.engine.recording import run_blocks
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.neurons.accumulate import IN_QUADRANT, QUADRANTS
from attn_only_lens.neurons.corpus import Batch, batches, corpus_rows
from attn_only_lens.neurons.summary import Options, Summary

MILLION = 1_000_000
K = 20


class Bytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the bytes of its arguments and results."""
        out = func(*args, **(kwargs or {}))
        read, returned = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        held = {x.untyped_storage().data_ptr() for x in read}
        new = [x for x in returned if x.untyped_storage().data_ptr() not in held]
        if new or func._schema.is_mutable:
            self.total += sum(x.numel() * x.element_size() for x in [*read, *new])
        return out


def counted(run: Any) -> tuple[float, float]:
    """Flops of matrix products, and bytes, of a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as flops, Bytes() as total:
        run()
    return float(flops.get_total_flops()), float(total.total)


def changed(batch: int, k: int, has_quadrants: bool) -> float:
    """The expected share of lists that batch 1, 2, … changes."""
    counts = [k] * 2 + [min(k, IN_QUADRANT)] * len(QUADRANTS) * has_quadrants
    return float(np.mean([1 - (1 - 1 / batch) ** count for count in counts]))


def measure(
    model: Any, texts: Any, tokens: int, options: Options, batch_size: int, device: str
) -> pd.DataFrame:
    """One row per batch: tokens, and seconds of the forward pass alone and of the whole step."""
    summary = Summary(model, resolve_sites(model, "all"), options)
    rows: list[dict[str, float]] = []

    def forward(batch: Batch) -> None:
        with torch.no_grad():
            run_blocks(model, batch.tokens, batch.mask, [])

    batch = None
    for batch, _ in batches(model, corpus_rows(model, texts, options.context), batch_size):
        start = seconds(device)
        if len(rows) % 5 == 0:
            forward(batch)
        middle = seconds(device)
        summary.add(batch, None)
        whole, alone = seconds(device) - middle, middle - start if len(rows) % 5 == 0 else np.nan
        rows.append({"tokens": len(batch.counted), "forward": alone, "whole": whole})
        typer.echo(f"{summary.n_tokens:,} tokens: {1e3 * whole / len(batch.counted):.1f} ms each")
        if summary.n_tokens >= tokens:
            break
    assert batch is not None
    last = batch
    names = ("flops", "bytes")
    counts = counted(lambda: forward(last)), counted(lambda: summary.add(last, None))
    frame = pd.DataFrame(rows)
    frame.attrs = {
        f"{what} {name}": count / len(last.counted)
        for what, both in zip(("forward", "whole"), counts, strict=True)
        for name, count in zip(names, both, strict=True)
    }
    frame.attrs["has quadrants"] = any("++" in states for states in summary.examples.values())
    return frame


def report(
    model: Any, frame: pd.DataFrame, context: int, batch_size: int, about: str, speed: float
) -> str:
    """The text of a page."""
    counts, n, ms = frame.attrs, int(frame["tokens"].sum()), 1e3
    some = frame.dropna()
    forward = ms * some["forward"].sum() / some["tokens"].sum()
    whole = ms * frame["whole"].sum() / n
    per_token = ms * frame["whole"] / frame["tokens"]
    n_batches = max(len(frame), round(MILLION / frame["tokens"].mean()))
    shares = [changed(t + 1, K, counts["has quadrants"]) for t in range(n_batches)]
    b, a = np.polyfit(shares[: len(frame)], per_token, 1)
    mean = float(a + b * np.mean(shares))
    hours = mean / ms * MILLION / 3600
    rows = {
        "forward pass": (counts["forward flops"], counts["forward bytes"], forward),
        "gates, statistics and examples": (
            counts["whole flops"] - counts["forward flops"],
            counts["whole bytes"] - counts["forward bytes"],
            whole - forward,
        ),
        "together": (counts["whole flops"], counts["whole bytes"], whole),
    }
    parts = pd.DataFrame(
        [
            {"part": part, "Mflop": flops / 1e6, "MB": size / 1e6, "ms": time_}
            for part, (flops, size, time_) in rows.items()
        ]
    )
    n_sites = sum(len(layer.names) for layer in resolve_sites(model, "all"))
    bound, first, last = ms * counts["forward flops"] / speed, per_token.iloc[0], per_token.iloc[-1]
    return f"""# What an atlas costs

All {n_sites:,} heads and neurons of {model.cfg.model_name}; {n:,} tokens, in pieces of at most
{context}, {batch_size} pieces in one forward pass.
{about}
Made by `python -m analyses.benchmarks.bench_atlas`.

For each token:

{table(parts)}

Mflop are of matrix products, which run at {speed / 1e9:.0f} GFLOP/s on this machine: those of the
forward pass take at least {bound:.2f} ms. MB are what kernels read and write, in caches too.

The first batch took {first:.2f} ms for each token, and the last {last:.2f}. Fitted: {a:.2f} ms,
plus {b:.2f} ms for the share of lists of top examples that a batch changes, which falls.

**A million tokens:** {mean:.2f} ms for each, or {hours:.2f} hours of one core. On two cores
this takes {hours / 2:.2f} hours if both are always busy.
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    model: Annotated[
        str, typer.Option("--model", help="a model's folder or name")
    ] = "small-english",
    texts: Annotated[Path | None, typer.Option("--texts", help="a file, one text per line")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="how many to measure")] = MILLION // 10,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_atlas.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    about = conditions(device)
    speed, _ = speeds(device, smoke)
    loaded = load(model, device=device)
    expose_neuron_heads(loaded)
    context, batch_size = min(128, loaded.cfg.n_ctx), 2 if smoke else 32
    options = Options(K, "z", "both", 12, 6, context, histograms=True)
    corpus: Any = texts or pretrained.small_english_texts()
    if smoke:
        corpus, tokens = list(islice(corpus, 20)), 100
    frame = measure(loaded, corpus, tokens, options, batch_size, device)
    text = report(loaded, frame, context, batch_size, about, speed)
    typer.echo(text)
    settings = {"device": device, "model": Path(model).name, "tokens": tokens, "smoke": smoke}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
