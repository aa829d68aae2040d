"""What `compare` costs: tokens a second against plain forward passes of the two models.

The model has GPT-2 small's shape and random weights, and is grown by neurons, heads and a layer.
What streams is two forward passes and a backward one for each model, and sums; by flops, a backward
pass that stops at activations costs a forward one, so 6 forward passes where "two plain forwards"
are 2, and the most that can be had is a third of their tokens a second. The first batch takes
circuits and patching besides, whose time is reported apart.

Peak memory is beyond the models and their weights' Gram matrices: on a CPU that of the process, in
one of its own for each number of batches.

    python analyses/bench_compare.py --out analyses/results
"""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from bench_peak_memory import held_and_peak, model_of, reset_peak
from benching import MIB, Device, machine, page_name, table, wait
from torch import Tensor

from attn_only_lens import compare, expose_neuron_heads, grow
from attn_only_lens import expansion as ex
from attn_only_lens import patching as p
from attn_only_lens.comparison.alignment import align
from attn_only_lens.comparison.batches import batches
from attn_only_lens.comparison.statistics import Statistics
from attn_only_lens.growth import Grown
from attn_only_lens.storage import write_text

PLAIN, STREAMED = "two plain forwards", "compare, streamed"


def models_of(smoke: bool, device: str, layers: int) -> tuple[Any, Grown]:
    """A model, and one grown from it."""
    source = model_of(device, smoke=smoke, **({} if smoke else {"n_layers": layers}))
    source.requires_grad_(False)
    more = ex.compose(ex.AddNeurons(16 if smoke else 256), ex.AddHeads(1), ex.InsertLayer(at=1))
    return source, grow(source, more, seed=0)


def prompts_of(source: Any, n: int, pos: int) -> Tensor:
    """Random prompts."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, source.cfg.d_vocab, (n, pos), generator=generator)


def throughput(
    source: Any, grown: Grown, tokens: Tensor, rounds: int, device: str
) -> dict[str, float]:
    """Tokens a second, the two taking turns; the first round is not counted."""
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
    return {name: tokens.numel() / sorted(each)[len(each) // 2] for name, each in took.items()}


def seconds_of_the_first_batch(source: Any, grown: Grown, tokens: Tensor, n_patched: int) -> float:
    """Of `compare` on one batch: circuits, edges, patching and all."""
    start = time.perf_counter()
    compare(
        *(source, grown, tokens, p.loss()),
        batch_size=len(tokens),
        n_patched=n_patched,
        n_nodes=20,
        n_resamples=50,
        progress=False,
    )
    return time.perf_counter() - start


def peak(n_batches: int, batch: int, pos: int, smoke: bool, device: str, layers: int) -> float:
    """MiB beyond the models at the highest, streaming so many batches; in this process."""
    source, grown = models_of(smoke, device, layers)
    with expose_neuron_heads(source), expose_neuron_heads(grown.model):
        statistics = Statistics([source, grown.model], align(source, grown.model, grown.provenance))
        stream = (prompts_of(source, batch, pos) for _ in range(n_batches))
        reset_peak(device)
        before, _ = held_and_peak(device)
        for each in batches(source, stream, p.loss(), None, batch):
            statistics.add(each)
        return (held_and_peak(device)[1] - before) / MIB


def peak_apart(*arguments: Any) -> float:
    """The same in a process of its own, whose high-water mark begins low."""
    code = f"import bench_compare; print(bench_compare.peak(*{arguments!r}))"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    return float(told.stdout.splitlines()[-1])


def report(smoke: bool, device: str, batch: int, pos: int, rounds: int, layers: int) -> str:
    """All tables, as the text of a page."""
    source, grown = models_of(smoke, device, layers)
    tokens = prompts_of(source, batch, pos)
    found = throughput(source, grown, tokens, rounds, device)
    rows = [
        {"call": name, "tokens/s": speed, "of two plain forwards": speed / found[PLAIN]}
        for name, speed in found.items()
    ]
    n_patched = 5 if smoke else 20
    seconds = seconds_of_the_first_batch(source, grown, tokens, n_patched)
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
Made by `python analyses/bench_compare.py{options}`. The two calls of the first
table take turns, so that what else the machine does falls on both.

{table(pd.DataFrame(rows))}

By flops the most is 1/3: two forward passes and a backward one for each model.

The first batch takes {seconds:.1f} s in all: it is searched for both circuits, the edges between
20 of their nodes are drawn, and {n_patched} components are patched in each model.

Peak memory of what streams, beyond both models:

{table(pd.DataFrame(peaks))}
"""


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/bench"),
    device: Device = "cpu",
    batch: Annotated[int, typer.Option(help="prompts of a batch")] = 4,
    pos: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    rounds: Annotated[int, typer.Option(help="of timing")] = 3,
    layers: Annotated[int, typer.Option(help="of the original")] = 12,
    smoke: Annotated[bool, typer.Option(help="tiny sizes")] = False,
) -> None:
    """Measure, print, and write `bench_compare.md`."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(smoke, device, batch, min(pos, 13) if smoke else pos, rounds, layers)
    typer.echo(text)
    write_text(out / page_name(__file__, device), text)


if __name__ == "__main__":
    typer.run(main)
