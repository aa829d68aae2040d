"""Measure the cost of conversion: a converted model against its source, in one run.

The model has GPT-2 small's shape and random weights. Times are processor time on one thread, as
medians over rounds in which the source and the converted model alternate. Use ratios to compare
machines. Peak memory is measured in a separate process for each figure.

Bounds: a forward pass cannot be faster than its floating-point operations at the measured speed of
this machine's matrix product. Caching costs at least the time to write the cached bytes once, at
the measured speed of this machine's memory copy.

The naive method is TransformerLens' own attention component with one head per neuron, local
attention with window 1 and an attention sink with logit 0. It computes the same function, with
pos x pos patterns. One layer of the naive method is measured, at a length that fits in memory.

    python -m analyses.benchmarks.bench_convert --out analyses/results
"""

import gc
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from analyses.benchmarks.models import model_of
from analyses.tools.benching import (
    MIB,
    conditions,
    in_new_process,
    leave,
    medians,
    page_name,
    peak_of,
    speeds,
    table,
)
from analyses.tools.options import Device, Out, Rounds, Smoke
from attn_only_lens import Bilinear, convert
from attn_only_lens.tl import Attention, HookedTransformer, HookedTransformerConfig

HEADS_PER_NEURON = (1, 2, 4, 8)


def is_pattern(name: str) -> bool:
    """Return whether a hook point of a converted model is an attention pattern."""
    return name.endswith("hook_pattern")


def is_pattern_or_post(name: str) -> bool:
    """Return whether a source model's hook point is an attention pattern or its neurons' output."""
    return name.endswith(("hook_pattern", "mlp.hook_post"))


OPERATIONS: dict[str, dict[str, dict[str, Any]] | None] = {
    "forward, no hooks": None,
    "cache everything": {"source": {}, "converted": {}},
    "cache patterns": {
        "source": {"names_filter": is_pattern_or_post},
        "converted": {"names_filter": is_pattern},
    },
}
"""The keyword arguments of `run_with_cache`, for each model."""


def forward_flops(cfg: HookedTransformerConfig, pos: int) -> float:
    """Return the flops of the matrix products; TransformerLens computes whole patterns."""
    heads = cfg.n_heads * cfg.d_head
    layer = 4 * cfg.d_model * heads + 2 * cfg.d_model * cfg.d_mlp + 2 * pos * heads
    return 2.0 * pos * (cfg.n_layers * layer + cfg.d_model * cfg.d_vocab)


def cached_bytes(cache: Any) -> int:
    """Return the bytes of a cache; storage that several entries share is counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in cache.values()
    }
    return sum(storages.values())


def operation(
    model: HookedTransformer, tokens: Tensor, options: dict[str, Any] | None
) -> Callable[[], Any]:
    """Return a call: a forward pass, or a cached forward pass if options are given."""
    if options is None:
        return lambda: model(tokens)
    return lambda: model.run_with_cache(tokens, **options)


@torch.no_grad()
def timing(
    source: HookedTransformer,
    lengths: list[int],
    rounds: int,
    device: str,
    flops: float,
    bandwidth: float,
) -> pd.DataFrame:
    """Return times of forward passes and caching, source against converted, with the bound."""
    converted = convert(source)
    rows = []
    for pos in tqdm(lengths, desc="timing", leave=False):
        tokens = torch.arange(pos, device=device)[None] % source.cfg.d_vocab
        compute = 1e3 * forward_flops(source.cfg, pos) / flops
        for name, options in OPERATIONS.items():
            calls = {
                "source": operation(source, tokens, options and options["source"]),
                "converted": operation(converted, tokens, options and options["converted"]),
            }
            took = medians(calls, rounds, device)
            kept = 0
            if options is not None:
                kept = cached_bytes(calls["converted"]()[1])
            rows.append(
                {
                    "operation": name,
                    "pos": pos,
                    "source ms": took["source"],
                    "converted ms": took["converted"],
                    "ratio": took["converted"] / took["source"],
                    "kept MiB": kept / MIB,
                    "bound ms": compute + 1e3 * kept / bandwidth,
                }
            )
            gc.collect()
    return pd.DataFrame(rows)


@torch.no_grad()
def peak(which: str, name: str, pos: int, device: str, smoke: bool) -> float:
    """Return the peak memory of an operation in MiB, above the memory of the loaded model."""
    model = model_of(device, smoke=smoke)
    model = convert(model) if which == "converted" else model
    model(torch.zeros((1, 2), dtype=torch.long, device=device))  # one-time allocations happen here
    tokens = torch.arange(pos, device=device)[None] % model.cfg.d_vocab
    options = OPERATIONS[name]
    return peak_of(operation(model, tokens, options and options[which]), device)[1]


def peak_memory(lengths: list[int], device: str, smoke: bool) -> pd.DataFrame:
    """Return the peak memory above the loaded models, each figure from a separate process."""
    rows = []
    for pos, name in tqdm(list(product(lengths, OPERATIONS)), desc="memory", leave=False):
        row: dict[str, Any] = {"operation": name, "pos": pos}
        for which in ("source", "converted"):
            row[f"{which} MiB"] = in_new_process(peak, which, name, pos, device, smoke)
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.assign(ratio=frame["converted MiB"] / frame["source MiB"])


def conversion(source: HookedTransformer, rounds: int, device: str) -> pd.DataFrame:
    """Return the time of conversion, and the memory of tensors not shared with the source."""
    source_pointers = {t.untyped_storage().data_ptr() for t in source.state_dict().values()}
    weights = sum(t.nbytes for t in source.parameters())
    rows = []
    for copy in (False, True):
        took = medians({"convert": lambda c=copy: convert(source, copy_weights=c)}, rounds, device)
        state = convert(source, copy_weights=copy).state_dict()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()
        }
        new = sum(size for pointer, size in storages.items() if pointer not in source_pointers)
        rows.append(
            {
                "call": f"convert(model, copy_weights={copy})",
                "seconds": took["convert"] / 1e3,
                "new tensors MiB": new / MIB,
                "of the weights": new / weights,
            }
        )
    return pd.DataFrame(rows)


@torch.no_grad()
def bilinear(source: HookedTransformer, pos: int, rounds: int, device: str) -> pd.DataFrame:
    """Return times of forward passes without hooks, with m heads, so m sigmoids, per neuron."""
    tokens = torch.arange(pos, device=device)[None] % source.cfg.d_vocab
    models: dict[str, HookedTransformer] = {"source": source, "exact": convert(source)}
    for m in HEADS_PER_NEURON:
        models[f"bilinear, {m}"] = convert(source, gate=Bilinear(m))
    calls = {name: operation(model, tokens, None) for name, model in models.items()}
    took = medians(calls, rounds, device)
    return pd.DataFrame(
        {
            "gates, heads a neuron": list(took),
            "pos": pos,
            "ms": list(took.values()),
            "ratio": [ms / took["source"] for ms in took.values()],
        }
    )


def naive_attention(source: HookedTransformer) -> Attention:
    """Return the SiLU neurons of layer 0 as a stock `Attention`; every pattern is pos x pos."""
    cfg = source.cfg
    stock_cfg = HookedTransformerConfig(
        n_layers=1,
        d_model=cfg.d_model,
        d_head=1,
        n_heads=cfg.d_mlp,
        n_ctx=cfg.n_ctx,
        d_vocab=2,
        attn_only=True,
        use_attn_scale=False,
        use_local_attn=True,
        attn_types=["local"],
        window_size=1,
        use_attention_sinks=True,
        device=str(cfg.device),
    )
    stock, mlp = Attention(stock_cfg, "local", 0).to(cfg.device), source.blocks[0].mlp
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
        stock.W_Q.copy_(mlp.W_in.T[..., None])
        stock.W_V.copy_(mlp.W_in.T[..., None])
        stock.b_Q.copy_(mlp.b_in[:, None])
        stock.b_V.copy_(mlp.b_in[:, None])
        stock.b_K.fill_(1.0)
        stock.W_O.copy_(mlp.W_out[:, None])
        stock.b_O.copy_(mlp.b_out)
    return stock


@torch.no_grad()
def naive(source: HookedTransformer, pos: int, rounds: int, device: str) -> pd.DataFrame:
    """Return the times of one layer of neurons in three forms, which read all patterns."""
    neurons, stock = convert(source).blocks[1].attn, naive_attention(source)
    x = torch.randn(1, pos, source.cfg.d_model, device=device)
    seen: dict[str, Tensor] = {}

    def reading(name: str, attn: Any) -> Callable[[], Tensor]:
        attn.hook_pattern.add_hook(lambda pattern, hook: seen.__setitem__(name, pattern))
        return (lambda: attn(x)) if name == "converted" else (lambda: attn(x, x, x))

    mlp = source.blocks[0].mlp
    calls = {
        "source MLP, no pattern": lambda: mlp(x),
        "converted": reading("converted", neurons),
        "stock attention": reading("stock attention", stock),
    }
    expected = calls["source MLP, no pattern"]()
    rows = [
        {
            "neurons of one layer as": name,
            "pos": pos,
            "max error / max": ((call() - expected).abs().max() / expected.abs().max()).item(),
        }
        for name, call in calls.items()
    ]
    took = medians(calls, rounds, device)
    for row in rows:
        name = row["neurons of one layer as"]
        row["ms"] = took[name]
        row["pattern MiB"] = seen[name].nbytes / MIB if name in seen else 0.0
    return pd.DataFrame(rows)


def report(smoke: bool, device: str, rounds: int) -> str:
    """Return the page with all tables."""
    about = conditions(device)
    lengths, naive_pos = ([7], 7) if smoke else ([128, 512], 128)
    source = model_of(device, smoke=smoke)
    flops, bandwidth = speeds(device, smoke)
    times = timing(source, lengths, rounds, device, flops, bandwidth)
    memory = peak_memory(lengths, device, smoke)
    costs = conversion(source, rounds, device)
    gates = bilinear(source, lengths[0], rounds, device)
    silu = model_of(device, smoke=smoke, act_fn="silu", n_layers=1)
    ways = naive(silu, naive_pos, max(3, rounds // 3), device)
    shape = "a tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"

    return f"""# What conversion costs

{shape}, float32, batch 1, {rounds} rounds. {about}
Matrix product {flops / 1e9:.0f} GFLOP/s, copy {bandwidth / 1e9:.1f} GB/s.
Made by `python -m analyses.benchmarks.bench_convert{" --smoke" if smoke else ""}`.

## Time

"Patterns" of the source are its attention patterns and its neurons' `hook_post`; of the converted
model, all patterns, two numbers a neuron where the source has one. The bound counts the floating
point operations of the matrix products and the bytes kept by the converted model.

{table(times)}

## Peak memory above the loaded models

{table(memory)}

## Conversion

{table(costs)}

## Bilinear gates, forward without hooks

{table(gates)}

## The naive way

{table(ways)}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    rounds: Rounds = 15,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_convert.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(smoke, device, 2 if smoke else rounds)
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "rounds": rounds}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
