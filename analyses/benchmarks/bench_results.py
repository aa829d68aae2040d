"""Benchmark attribution against AtP with plain hooks, and results with millions of sites.

    python -m analyses.benchmarks.bench_results                      # GPT-2 small's shape
    python -m analyses.benchmarks.bench_results --model out/smollm2  # a model's folder, as a bridge
    python -m analyses.benchmarks.bench_results --smoke              # tiny sizes

AtP with plain hooks is minimal code for the estimates: a forward pass that keeps the MLPs'
activations, a second forward pass that records gradients starting at the first block, a backward
pass to the activations, and (clean - corrupted) · gradient, divided by the metric's range. It has
no checks and no names, while ours makes a `Sweep`. All calls run on one thread. Seconds are medians
over alternating rounds, as wall time and processor time. Heads are exposed before the clock starts.
A model's first attribution includes tests that later ones need not repeat.

A large result has random values for 32 layers of 14,336 neurons at 28 positions, as in a model with
8 billion parameters. `frame` is the memory that pandas needs; the other lines need no frame.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from analyses.benchmarks import bench_patching
from analyses.tools.benching import conditions, leave, page_name, table, wait
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import Contrast, Work, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.patching.site_groups import SiteGroup, site_rows

LENGTHS = (15, 128)
LARGE, SMALL = (32, 14336, 28), (2, 37, 3)  # layers, neurons, positions
METRIC = p.logit_diff(correct=11, wrong=12)
RUN: dict[str, Any] = {
    **{"part": "z", "direction": "denoise", "metric": "logit_diff", "model": "random"},
    **{"clean_value": 3.0, "corrupted_value": -1.0, "n_prompts": 1},
}


def timed(call: Callable[[], Any], device: str) -> tuple[Any, tuple[float, float]]:
    """Return a call's result, and its wall and processor seconds."""
    wait(device)
    start = time.perf_counter(), time.process_time()
    result = call()
    wait(device)
    return result, (time.perf_counter() - start[0], time.process_time() - start[1])


def turns(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> pd.DataFrame:
    """Return median wall and processor seconds of alternating calls, after one uncounted round."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name, call in calls.items():
            seconds = timed(call, device)[1]
            if count or not rounds:
                took[name].append(seconds)
    wall, processor = (
        [statistics.median(pair[i] for pair in times) for times in took.values()] for i in (0, 1)
    )
    return pd.DataFrame({"call": list(calls), "wall s": wall, "processor s": processor})


def plain_hooks(model: Any, clean: Tensor, corrupted: Tensor) -> Tensor:
    """Return AtP of every neuron, [layer, batch, pos, neuron], with TransformerLens' hooks."""
    names = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    points = ("blocks.0.hook_resid_pre", "blocks.0.hook_in")
    first = next(name for name in points if name in model.hook_dict)
    kept: dict[str, Tensor] = {}
    nodes: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any, name: str, into: dict[str, Tensor]) -> None:
        into[name] = value

    def start(value: Tensor, hook: Any) -> Tensor:
        return value.detach().requires_grad_()

    def value_of(tokens: Tensor, into: dict[str, Tensor], *hooks: Any) -> Tensor:
        hooks += tuple((name, partial(keep, name=name, into=into)) for name in names)
        with model.hooks(fwd_hooks=list(hooks)):
            last = model(tokens)[:, -1]
        return (last[:, 11] - last[:, 12]).mean()

    with torch.no_grad():
        of_clean = value_of(clean, kept)
    of_corrupted = value_of(corrupted, nodes, (first, start))
    gradients = torch.autograd.grad(of_corrupted, [nodes[name] for name in names])
    moves = [
        gradient * (kept[name] - nodes[name].detach())
        for name, gradient in zip(names, gradients, strict=True)
    ]
    return torch.stack(moves) / (of_clean - of_corrupted.detach())


def attributions(source: Any, lengths: tuple[int, ...], rounds: int, device: str) -> pd.DataFrame:
    """Time attribution of every neuron without repairs, and AtP by plain hooks, by length."""
    frames = []
    for n_pos in lengths:
        clean = torch.arange(n_pos, device=device).remainder(source.cfg.d_vocab)[None] + 1
        corrupted = clean.clone()
        corrupted[:, n_pos // 3 : -1] += 7
        exposed = expose_neuron_heads(source, copy=True).model  # shares weights; runs no tests

        def forward(tokens: Tensor = clean) -> Tensor:
            with torch.no_grad():
                return source(tokens)  # type: ignore[no-any-return]

        def ours(
            clean: Tensor = clean, corrupted: Tensor = corrupted, exposed: Any = exposed
        ) -> Any:
            # A contrast keeps its recorded runs, so each measured call gets a new one.
            contrast, estimates = Contrast(clean, corrupted, METRIC), p.Estimate(budget=0)
            quiet = Work(progress=False)
            return p.attribution(exposed, contrast, sites="neurons", method=estimates, work=quiet)

        plain = partial(plain_hooks, source, clean, corrupted)
        calls = {"forward pass": forward, "AtP by plain hooks": plain, "attribution": ours}
        expected = plain().flatten().double().cpu()
        sweep, first = timed(ours, device)
        effects = torch.tensor(sweep.effect.tolist(), dtype=torch.float64)
        apart = (effects - expected).abs().max() / expected.abs().max()
        took = turns(calls, rounds, device)
        took.loc[len(took)] = ["attribution, the first", *first]
        for clock in ("wall", "processor"):
            seconds = took[f"{clock} s"]
            took[f"in forward passes ({clock})"] = seconds / seconds[0]
        took.insert(0, "tokens", n_pos)
        took["largest difference"] = ["", "", f"{float(apart):.1e}", ""]
        frames.append(took)
    return pd.concat(frames)


def large_result(sizes: tuple[int, int, int], folder: Path) -> pd.DataFrame:
    """Return the seconds to make, rank, compare, save and load a result with random values."""
    layers, n, n_pos = sizes
    masks = torch.eye(n_pos, dtype=torch.bool)[:, None]
    positions = [PositionSet(pos, masks[pos]) for pos in range(n_pos)]
    index = torch.arange(n)
    sites = [
        LayerSites(layer, "neuron", tuple(f"L{layer}N{i}" for i in range(n)), index)
        for layer in range(layers)
    ]
    torch.manual_seed(0)
    values = torch.randn(layers, n_pos * n, dtype=torch.float64)
    noisy = values + 0.1 * torch.randn_like(values)

    def made(of_layers: Tensor) -> p.Sweep:
        groups = [SiteGroup.product(of_layer, positions) for of_layer in sites]
        return p.Sweep(site_rows(groups).assign(value=of_layers.numpy().ravel()), **RUN)

    first, second = made(values), made(noisy)
    path = folder / "sweep.parquet"
    first.save(path)
    calls: dict[str, Callable[[], Any]] = {
        "made of tensors": lambda: made(values),
        "top(20)": lambda: first.top(20),
        "agreement": lambda: p.agreement(first, second),
        "saved (parquet)": lambda: first.save(path),
        "loaded": lambda: p.Sweep.load(path),
        "frame": lambda: made(values).frame,
        "made of the frame": lambda: p.Sweep(first.frame, **RUN),
    }
    return turns(calls, 0, "cpu")


def report(folder: str, smoke: bool, device: str) -> str:
    """Return the page with both tables."""
    about = conditions(device)
    if folder:
        source, shape = load(folder).to(device), f"`{Path(folder).name}`"
    else:
        source = bench_patching.bridge_of(device, smoke=smoke)
        shape = "A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    lengths, rounds = ((5,), 1) if smoke else (LENGTHS, 5)
    sizes = SMALL if smoke else LARGE
    millions = sizes[0] * sizes[1] * sizes[2] / 1e6
    costs = attributions(source, lengths, rounds, device)
    with tempfile.TemporaryDirectory() as kept:
        large = large_result(sizes, Path(kept))
    return f"""# Attribution against plain hooks, and large results

{about}
Made by `python -m analyses.benchmarks.bench_results{f" --model {folder}" if folder else ""}`.

## Attribution of every neuron at every position, `budget=0`

{shape}, a bridge, float32. The gradient costs a forward pass by flops, so AtP costs
three. The first attribution of a model includes its tests.

{table(costs)}

## A result of {millions:.3g} million sites

{table(large)}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    model: Annotated[str, typer.Option(help="a folder to load; GPT-2 small's shape if none")] = "",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_results.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    text = report(model, smoke, device)
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "model": Path(model).name}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
