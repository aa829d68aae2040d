"""Measure the cost of `compare`: tokens per second, against plain forward passes of both models.

The model has GPT-2 small's shape and random weights, and is grown by neurons, heads and a layer.
Every batch takes two forward passes and one backward pass per model, and some sums. A backward pass
that stops at activations costs as many flops as a forward pass. So a batch costs 6 passes, "two
plain forwards" costs 2, and `compare` can reach at most a third of the tokens per second. The first
batch also includes circuits and patching, whose time is reported separately.

Peak memory excludes the models and the Gram matrices of their weights. On a CPU, peak memory is
that of a process, with a new process for each number of batches.

    python -m analyses.benchmarks.bench_compare --out analyses/results
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pandas as pd
import torch
import typer
from torch import Tensor, nn

from analyses.benchmarks.bench_peak_memory import held_and_peak, model_of, reset_peak
from analyses.tools.benching import MIB, leave, machine, page_name, table, wait
from analyses.tools.options import Device, Out, Rounds, Smoke
from attn_only_lens import circuits, compare, expose_neuron_heads, grow
from attn_only_lens import expansion as ex
from attn_only_lens import patching as p
from attn_only_lens.comparison.alignment import align
from attn_only_lens.comparison.batches import batches
from attn_only_lens.comparison.statistics import Statistics
from attn_only_lens.growth import Grown

PLAIN, STREAMED = "two plain forwards", "compare, streamed"


def models_of(smoke: bool, device: str, layers: int) -> tuple[Any, Grown]:
    """Return a model, and a model grown from it."""
    source = model_of(device, smoke=smoke, **({} if smoke else {"n_layers": layers}))
    source.requires_grad_(False)
    more = ex.compose(ex.AddNeurons(16 if smoke else 256), ex.AddHeads(1), ex.InsertLayer(at=1))
    return source, grow(source, more, seed=0)


def prompts_of(source: Any, n: int, pos: int) -> Tensor:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, source.cfg.d_vocab, (n, pos), generator=generator)


def throughput(
    source: Any, grown: Grown, tokens: Tensor, rounds: int, device: str
) -> dict[str, float]:
    """Return tokens per second; the calls alternate, and the first round is not counted."""
    took: dict[str, list[float]] = {PLAIN: [], STREAMED: []}
    moved = tokens.to(device)
    with expose_neuron_heads(source), expose_neuron_heads(grown.model):
        statistics = Statistics([source, grown.model], align(source, grown.model, grown.provenance))
        for count in range(rounds + 1):
            for name, times in took.items():
                wait(device)
                start = time.perf_counter()
                if name == PLAIN:
                    with torch.no_grad():
                        for model in (source, grown.model):
                            model(moved)
                else:
                    for batch in batches(source, tokens, p.loss(), None, len(tokens)):
                        statistics.add(batch)
                wait(device)
                if count:
                    times.append(time.perf_counter() - start)
    return {name: tokens.numel() / sorted(times)[len(times) // 2] for name, times in took.items()}


@contextmanager
def block_calls() -> Iterator[list[int]]:
    """Count how often blocks of models with neuron-heads run, without using hooks."""
    called, calls = nn.Module.__call__, [0]

    def count(self: nn.Module, *args: Any, **how: Any) -> Any:
        calls[0] += type(self).__name__.endswith(("Block", "BlockBridge"))
        return called(self, *args, **how)

    with mock.patch.object(nn.Module, "__call__", count):
        yield calls


def cost(call: Callable[[], Any], n_blocks: int, device: str) -> dict[str, float]:
    """Return the wall time, processor time, number of forward passes and machine load of a call."""
    wait(device)
    start, cpu_start = time.perf_counter(), time.process_time()
    with block_calls() as calls:
        call()
    wait(device)
    took = {"s": time.perf_counter() - start, "CPU s": time.process_time() - cpu_start}
    return {**took, "forward passes": calls[0] / n_blocks, "load": os.getloadavg()[0]}


def circuit_costs(source: Any, tokens: Tensor, device: str, top: int) -> list[dict[str, Any]]:
    """Return the costs of graphs, a circuit search and faithfulness, on one pair of prompts."""
    clean, corrupted = tokens[:1].to(device), tokens[:1].to(device).clone()
    corrupted[0, -2] = (clean[0, -2] + 1) % source.cfg.d_vocab
    metric = p.logit_diff(7, 8)
    with expose_neuron_heads(source):
        pair = source, clean, corrupted, metric
        ranking = p.attribution(*pair, positions="each", budget=0, progress=False)
        calls = {
            f"attribution_graph, top {top}": lambda: circuits.attribution_graph(
                source, clean, metric, top=top
            ),
            "discover": lambda: circuits.discover(*pair, budget=0),
            "faithfulness, 10 shares": lambda: circuits.faithfulness(*pair, ranking),
        }
        n_blocks = len(source.blocks)
        return [{"call": name, **cost(call, n_blocks, device)} for name, call in calls.items()]


def cost_of_the_first_batch(
    source: Any, grown: Grown, tokens: Tensor, n_patched: int, device: str
) -> dict[str, float]:
    """Return the cost of `compare` on one batch; forward passes are those through both models."""
    n_blocks = len(source.blocks) + len(grown.model.blocks)
    call = partial(
        compare,
        *(source, grown, tokens, p.loss()),
        batch_size=len(tokens),
        n_patched=n_patched,
        n_nodes=20,
        n_resamples=50,
        progress=False,
    )
    return cost(call, n_blocks, device)


def peak(n_batches: int, batch: int, pos: int, smoke: bool, device: str, layers: int) -> float:
    """Return the peak memory in MiB of some batches, without the models, in this process."""
    source, grown = models_of(smoke, device, layers)
    with expose_neuron_heads(source), expose_neuron_heads(grown.model):
        statistics = Statistics([source, grown.model], align(source, grown.model, grown.provenance))
        stream = (prompts_of(source, batch, pos) for _ in range(n_batches))
        reset_peak(device)
        before, _ = held_and_peak(device)
        for prompts in batches(source, stream, p.loss(), None, batch):
            statistics.add(prompts)
        return (held_and_peak(device)[1] - before) / MIB


def peak_apart(*arguments: Any) -> float:
    """Return `peak` from a new process, whose memory has no earlier peak."""
    code = f"from {__spec__.name} import peak; print(peak(*{arguments!r}))"
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return float(finished.stdout.splitlines()[-1])


def report(smoke: bool, device: str, batch: int, pos: int, rounds: int, layers: int) -> str:
    """Return the page with all tables."""
    source, grown = models_of(smoke, device, layers)
    tokens = prompts_of(source, batch, pos)
    speeds = throughput(source, grown, tokens, rounds, device)
    rows = [
        {"call": name, "tokens/s": speed, "of two plain forwards": speed / speeds[PLAIN]}
        for name, speed in speeds.items()
    ]
    n_patched = 5 if smoke else 20
    first = cost_of_the_first_batch(source, grown, tokens, n_patched, device)
    costs = circuit_costs(source, tokens, device, 5 if smoke else 300)
    peaks = [
        {"batches": n, "peak MiB": peak_apart(n, batch, pos, smoke, device, layers)} for n in (1, 4)
    ]
    shape = "a tiny model (--smoke)" if smoke else f"GPT-2 small's shape, {layers} layers"
    cfg = grown.model.cfg
    options = f" --batch {batch} --pos {pos} --rounds {rounds} --layers {layers}"
    options = " --smoke" if smoke else options
    return f"""# What `compare` costs

{shape}, random weights, float32;
grown to {cfg.n_layers} layers of {cfg.n_heads} heads and {cfg.d_mlp} neurons;
batches of {batch} prompts of {pos} tokens, `loss`. Machine: {machine(device)};
{os.getloadavg()[0]:.0f} processes were running on {os.cpu_count()} cores.
Made by `python -m analyses.benchmarks.bench_compare{options}`. The two calls of the first
table take turns, so that other work on the machine slows both down.

{table(pd.DataFrame(rows))}

By flops, the bound is 1/3: two forward passes and a backward one of each model.

The first batch takes {first["s"]:.1f} s, {first["CPU s"]:.1f} s of processor time, and
{first["forward passes"]:.0f} forward passes of both models. It includes the search for both
circuits, the edges between 20 of their nodes, and patches of {n_patched} components in each model.

On one pair of prompts of the original, which differ at the last token but one; "forward passes" are
runs of blocks over the number of blocks, however many variants run at once:

{table(pd.DataFrame(costs))}

Peak memory of the batches, without both models:

{table(pd.DataFrame(peaks))}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    batch: Annotated[int, typer.Option(help="prompts of a batch")] = 4,
    pos: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    rounds: Rounds = 3,
    layers: Annotated[int, typer.Option(help="of the original")] = 12,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_compare.md`."""
    started = time.perf_counter()
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(smoke, device, batch, min(pos, 13) if smoke else pos, rounds, layers)
    typer.echo(text)
    settings = {
        "device": device,
        "smoke": smoke,
        "batch": batch,
        "pos": pos,
        "rounds": rounds,
        "layers": layers,
    }
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
