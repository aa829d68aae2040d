"""Measure the cost of patching: ours, a skilled user's code, batched hooks, TransformerLens' loop.

The model has GPT-2 small's shape and random weights, as a transformers model in a
TransformerBridge. A site is one neuron at one position (or at all positions). Only sites that can
have an effect are patched and counted: positions starting at the first token that differs between
the prompts, and in the last layer only the position that the metric reads. Four methods alternate
in one process, on one thread:

    ours              `activation_patch`: tests, recordings and patches
    skilled           record both runs once; for every site add Δz · W_out to the residual stream
                      after its layer, run the later blocks on 48 such streams at once, and
                      unembed the direction between the two answers alone
    hooks             48 sites of any layers in one forward pass, by hooks
    loop              TransformerLens' `generic_activation_patch`: one forward pass for every site

Every method runs with a few sites and with more sites, in several rounds. Ours first runs once,
because its first call tests the model. The marginal cost of a site is the difference in processor
time divided by the difference in the number of sites; the fixed cost is the extrapolated cost at no
sites. Both costs are medians over the rounds. The values of all
four methods are compared; a difference larger than float32's rounding is an error.

The bound counts the multiplications and additions in our matrix products, at the speed of this
machine's matrix product of 2,048 rows and columns. Let a site be at position t of layer l, in
prompts of T tokens, with S = T - t tokens left (for all positions, S is T minus the tokens before
the first that differs), and let P be the number of parameters in a block's matrices. The bound is

    (L - 2 - l) (2 S P + 4 n_heads d_head Σ_{t < i ≤ T} i)
    + 2 S P_KV + 2 (P - P_KV) + 4 n_heads d_head T

The second line is the last block: its keys and values (P_KV) are needed at all S tokens, and the
rest of the block only at the token that the metric reads. A site in the last layer costs nothing.

    python -m analyses.benchmarks.bench_patching --out analyses/results
"""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from transformer_lens.patching import generic_activation_patch
from transformer_lens.utilities import get_act_name

from analyses.benchmarks.models import bridge_of
from analyses.tools.benching import machine, table, wait
from analyses.tools.options import Device, Out, Rounds, Smoke
from analyses.tools.study_files import keep
from attn_only_lens import Contrast, Work, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind

AT_ONCE = 48  # patched runs in one forward pass
CORRECT, WRONG = 11, 12
METRIC = p.logit_diff(correct=CORRECT, wrong=WRONG)
TOLERANCE = 32 * torch.finfo(torch.float32).eps
"""Relative to the largest logit; the unembedding and earlier layers round many sums."""
SHARED = ("attention_mask", "position_embeddings", "position_ids", "cache_position")
"""A block's arguments that do not depend on its input."""
Patch: TypeAlias = Callable[[Any, Tensor, Tensor, pd.DataFrame], Tensor]
"""Takes a model, two prompts and sites; returns the metric after a patch of each site."""


@dataclass(frozen=True)
class Task:
    """Sites to patch, in prompts that differ starting at one token.

    Attributes:
        sites: "every neuron", sampled in equal steps; or "scattered", at random.
        positions: "each" or "all".
        n_pos: the length of the prompts.
        first: the first token that differs.
    """

    sites: str
    positions: str
    n_pos: int
    first: int


# The prompts differ late, as in "… John gave a drink to"; early; or in the middle of a long prompt.
TASKS = [
    Task("every neuron", "each", 15, 10),
    Task("every neuron", "all", 15, 10),
    Task("every neuron", "each", 15, 2),
    Task("scattered", "each", 64, 24),
    Task("scattered", "each", 64, 60),
]


def prompts(task: Task, d_vocab: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Return a pair of prompts that differ in one token."""
    clean = (torch.arange(task.n_pos, device=device)[None] * 7) % d_vocab
    corrupted = clean.clone()
    corrupted[0, task.first] = (corrupted[0, task.first] + 1) % d_vocab
    return clean, corrupted


def sites_of(task: Task, cfg: Any, number: int) -> pd.DataFrame:
    """Return sites that can have an effect: layer, position (-1 for all) and neuron.

    Args:
        task: the kind of sites.
        cfg: the model's configuration.
        number: the approximate number of sites.
    """
    last, end = cfg.n_layers - 1, task.n_pos - 1
    if task.positions == "all":
        places = [(layer, -1) for layer in range(cfg.n_layers)]
    else:
        every = product(range(cfg.n_layers), range(task.first, task.n_pos))
        places = [(layer, pos) for layer, pos in every if layer < last or pos == end]
    if task.sites == "every neuron":
        per_place = min(max(1, number // len(places)), cfg.d_mlp)
        neurons = range(0, cfg.d_mlp, cfg.d_mlp // per_place)[:per_place]
        rows = [(*place, neuron) for place, neuron in product(places, neurons)]
    else:
        draw = random.Random(0)
        rows = [(*draw.choice(places), draw.randrange(cfg.d_mlp)) for _ in range(number)]
    return pd.DataFrame(sorted(set(rows)), columns=["layer", "pos", "neuron"])


def sample(sites: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return about this number of sites, in equal steps, so that every layer has its share."""
    return sites.iloc[:: max(1, len(sites) // number)].reset_index(drop=True)


def flops(cfg: Any, task: Task, sites: pd.DataFrame) -> float:
    """Return the flops of all sites, by the formula in the module docstring."""
    of_keys = 2 * cfg.d_model * cfg.d_head * cfg.n_heads
    parameters = 2 * of_keys + 2 * cfg.d_model * cfg.d_mlp
    start, end = sites["pos"].where(sites["pos"] >= 0, task.first), task.n_pos
    seen = (end * (end + 1) - start * (start + 1)) / 2  # Σ i
    attention = 4 * cfg.n_heads * cfg.d_head
    per_block = 2 * (end - start) * parameters + attention * seen
    last = 2 * (end - start) * of_keys + 2 * (parameters - of_keys) + attention * end
    later = cfg.n_layers - 1 - sites["layer"]  # the number of later blocks
    return float(((later - 1) * per_block + last)[later > 0].sum())


# Four ways to patch


def ours(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Patch with `activation_patch` on a model with exposed neuron-heads."""
    everywhere = (sites["pos"] == -1).all()
    names = [
        f"L{row.layer}N{row.neuron}" + ("" if everywhere else f"@{row.pos}")
        for row in sites.itertuples()
    ]
    contrast = Contrast(clean, corrupted, METRIC)
    chosen = p.Sites(names, "all" if everywhere else "each")
    sweep = p.activation_patch(model, contrast, sites=chosen, work=Work(progress=False))
    values = sweep.to_frame().set_index(["name", "position"])["value"]
    rows = sites.itertuples()
    return torch.tensor(
        [values[f"L{r.layer}N{r.neuron}", "all" if r.pos == -1 else r.pos] for r in rows],
        dtype=torch.float64,
    )


def skilled(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Run only the blocks after a site, on the residual stream plus the site's change."""
    values = torch.zeros(len(sites), dtype=model.W_U.dtype)
    answer = model.W_U[:, CORRECT] - model.W_U[:, WRONG]
    bias = model.b_U[CORRECT] - model.b_U[WRONG]
    names = ("mlp.hook_post", "hook_resid_post")
    with torch.no_grad(), later_blocks(model) as run_later_blocks:
        _, clean_cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith(names))
        _, cache = model.run_with_cache(corrupted, names_filter=lambda name: name.endswith(names))
        for layer, rows, here, neurons in batches(sites, corrupted):
            change = (clean_cache["post", layer] - cache["post", layer])[0].T[neurons] * here
            written = change[:, :, None] * model.blocks[layer].mlp.W_out[neurons][:, None]
            stream = run_later_blocks(layer + 1, cache["resid_post", layer] + written)
            values[rows.cpu()] = (model.ln_final(stream[:, -1:])[:, 0] @ answer + bias).cpu()
    return values


@contextmanager
def later_blocks(model: Any) -> Iterator[Callable[[int, Tensor], Tensor]]:
    """Yield a function that runs a bridge from a given layer on, without the last norm.

    A bridge has no `start_at_layer`. So its blocks are called directly, with the arguments that
    the first block gets when the whole model runs.
    """
    options: dict[str, Any] = {}

    def note(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        options.update({name: kwargs[name] for name in SHARED if name in kwargs})

    def run(layer: int, stream: Tensor) -> Tensor:
        for block in model.blocks[layer:]:
            stream = block(stream, **options)
            stream = stream[0] if isinstance(stream, tuple) else stream
        return stream

    handle = model.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield run
    finally:
        handle.remove()


def hooks(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Patch 48 sites of any layers in one forward pass."""
    metric = metric_of(model, clean, corrupted)
    _, cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_post"))
    values = []
    for start in range(0, len(sites), AT_ONCE):
        some = sites.iloc[start : start + AT_ONCE].reset_index(drop=True)
        setters = []
        for layer, *site in batches(some, corrupted):
            name = get_act_name("post", layer)

            def setter(post: Tensor, hook: Any, name: str = name, site: Any = site) -> Tensor:
                rows, here, neurons = site
                new = cache[name][0, :, neurons].T
                post[rows, :, neurons] = torch.where(here, new, post[rows, :, neurons])
                return post

            setters.append((name, setter))
        with torch.no_grad():
            logits = model.run_with_hooks(corrupted.expand(len(some), -1), fwd_hooks=setters)
        values += [metric(row[None]) for row in logits]
    return torch.stack(values).cpu()


def batches(sites: pd.DataFrame, tokens: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield up to 48 sites of one layer: layer, rows, mask of patched positions, neurons."""
    for layer, of_layer in sites.groupby("layer"):
        for start in range(0, len(of_layer), AT_ONCE):
            some = of_layer.iloc[start : start + AT_ONCE]
            rows, pos, neurons = (
                torch.tensor(list(column), device=tokens.device)
                for column in (some.index, some["pos"], some["neuron"])
            )
            every = torch.arange(tokens.shape[1], device=tokens.device)
            yield layer, rows, (pos[:, None] == every) | (pos[:, None] == -1), neurons


def loop(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Patch with TransformerLens' own sweep over an explicit frame of sites."""
    metric = metric_of(model, clean, corrupted)
    _, cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_post"))

    def setter(post: Tensor, index: Any, clean_post: Tensor) -> Tensor:
        _, position, neuron = index
        here = slice(None) if position == -1 else position
        post[:, here, neuron] = clean_post[:, here, neuron]
        return post

    with torch.no_grad():
        patched = generic_activation_patch(
            model, corrupted, cache, metric, setter, "post", index_df=sites
        )
    return patched.cpu()


def metric_of(model: Any, clean: Tensor, corrupted: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the metric as a function of logits."""
    bound = bind(METRIC, model, Contrast(clean, corrupted, METRIC).pair(model))

    def value(logits: Tensor) -> Tensor:
        return bound.value(bound.select(logits)[None])[0]

    return value


WAYS: dict[str, Patch] = {"ours": ours, "skilled": skilled, "hooks": hooks, "loop": loop}

# Measurements

SIZES = {"ours": (240, 960), "skilled": (24, 96), "hooks": (24, 48), "loop": (2, 8)}
LONG = {"ours": (120, 480), "skilled": (12, 36), "hooks": (12, 24), "loop": (2, 4)}
SMOKE = {"ours": (10, 40), "skilled": (5, 20), "hooks": (5, 20), "loop": (2, 5)}


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return a call's result and its processor time (on a GPU, its wall time)."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait(device)
    start = clock()
    result = call()
    wait(device)
    return result, clock() - start


def rate(device: str, *, smoke: bool) -> float:
    """Return the flops per second of a matrix product."""
    size = 256 if smoke else 2048
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return 2 * size**3 / statistics.median(timed(lambda: a @ b, device)[1] for _ in range(3))


def measure(source: Any, task: Task, rounds: int, device: str, *, smoke: bool) -> pd.DataFrame:
    """Time all methods alternately, each with two numbers of sites, and compare their values.

    Returns:
        A row per method, number of sites and round; "expose" is the time that exposing took.

    Raises:
        ValueError: a method's values differ from ours.
    """
    cfg = source.cfg
    clean, corrupted = prompts(task, cfg.d_vocab, device)
    sizes = SMOKE if smoke else LONG if task.n_pos > 15 else SIZES
    sites = sites_of(task, cfg, sizes["ours"][1])
    with torch.no_grad():
        runs = [source(tokens)[:, -1] for tokens in (clean, corrupted)]
    largest = max(run.abs().max().item() for run in runs)
    unpatched = (runs[1][0, CORRECT] - runs[1][0, WRONG]).item()
    labels = {"sites": f"{task.sites}, {task.positions}", "tokens": task.n_pos, "first": task.first}
    rows, values = [], dict[str, pd.Series]()
    for turn in range(rounds):
        speed = rate(device, smoke=smoke)
        for way, patch in WAYS.items():
            exposing, first_call = 0.0, 0.0
            if way == "ours":
                exposed, exposing = timed(partial(expose_neuron_heads, source), device)
            with exposed if way == "ours" else nullcontext():
                for number in sizes[way]:
                    some = sites if number == sizes["ours"][1] else sample(sites, number)
                    call = partial(patch, source, clean, corrupted, some)
                    if way == "ours" and not first_call:  # the first call tests the model
                        first_call = timed(call, device)[1]
                    result, seconds = timed(call, device)
                    index = pd.MultiIndex.from_frame(some)
                    values[way] = pd.Series(result.tolist(), index)
                    work = flops(cfg, task, some)
                    rows.append(
                        labels
                        | {"way": way, "round": turn, "n": len(some), "seconds": seconds}
                        | {"bound": work / speed, "expose": exposing, "first_call": first_call}
                    )
    effect = (values["ours"] - unpatched).abs().max()
    for way, others in values.items():
        off = (others - values["ours"].reindex(others.index)).abs().max()
        if not off <= TOLERANCE * largest:
            raise ValueError(
                f"{task}: {way} and ours differ by {off:.2g}; expected {TOLERANCE * largest:.2g} "
                f"at most, which float32 explains"
            )
        for row in rows:
            if row["way"] == way:
                row |= {"effect": effect / largest, "difference": off / largest}
    return pd.DataFrame(rows)


# The page


def fit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return fixed and marginal costs in seconds, by task and method: medians over rounds."""
    keys = ["sites", "tokens", "first", "way"]
    fits = []
    for names, of_round in rows.groupby([*keys, "round"], sort=False):
        few, many = of_round.sort_values("n").itertuples()
        added = many.n - few.n
        marginal = (many.seconds - few.seconds) / added
        fits.append(
            dict(zip(keys, names, strict=False))
            | {"marginal": marginal, "fixed": few.seconds - few.n * marginal}
            | {"bound": (many.bound - few.bound) / added, "expose": few.expose}
            | {"tests": few.first_call - few.seconds}
            | {"n": many.n, "effect": many.effect, "difference": many.difference}
        )
    return pd.DataFrame(fits).groupby(keys, sort=False).median().reset_index()


def tables(fits: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return marginal costs next to the bound; then fixed costs and value differences."""
    marginal, fixed = [], []
    for (sites, tokens, first), of_task in fits.groupby(["sites", "tokens", "first"], sort=False):
        way = {row.way: row for row in of_task.itertuples()}
        ours = way["ours"]
        labels = {"sites": sites, "tokens": tokens, "differ from": first}
        marginal.append(
            labels
            | {"ours, ms": 1e3 * ours.marginal, "bound, ms": 1e3 * ours.bound}
            | {"bound / ours": ours.bound / ours.marginal}
            | {
                f"{name} / ours": way[name].marginal / ours.marginal
                for name in WAYS
                if name != "ours"
            }
        )
        saved = way["skilled"].marginal - ours.marginal
        even = max(1, math.ceil((ours.fixed - way["skilled"].fixed) / saved)) if saved > 0 else None
        fixed.append(
            labels
            | {f"{name}, s": way[name].fixed for name in WAYS}
            | {"exposing once, s": ours.expose, "testing once, s": ours.tests}
            | {"ours is cheaper than skilled from": f"{even} sites" if even else "never"}
            | {"largest effect": ours.effect, "largest difference": of_task["difference"].max()}
        )
    return pd.DataFrame(marginal), pd.DataFrame(fixed)


def figure(fits: pd.DataFrame) -> Figure:
    """Draw the cost of a sweep by its number of sites, one panel per task."""
    tasks = list(fits.groupby(["sites", "tokens", "first"], sort=False))
    picture = Figure(figsize=(3.4 * len(tasks), 3.2), layout="constrained")
    panels = picture.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    numbers = [10 ** (power / 4) for power in range(21)]
    for panel, ((sites, tokens, first), of_task) in zip(panels, tasks, strict=True):
        for row in of_task.itertuples():
            seconds = [max(row.fixed, 0.0) + number * row.marginal for number in numbers]
            panel.loglog(numbers, seconds, label=row.way)
        panel.set_title(f"{sites}\n{tokens} tokens, differ from {first}", fontsize=9)
        panel.set_xlabel("sites")
        panel.minorticks_off()
    panels[0].set_ylabel("processor seconds")
    panels[0].legend(frameon=False, fontsize=8)
    return picture


def page(fits: pd.DataFrame, about: str) -> str:
    """Return the page, computed only from the fits."""
    marginal, fixed = map(table, tables(fits))
    return f"""{about}

## TransformerBridge

### One more site

{marginal}

### Before the first site

{fixed}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    rounds: Rounds = 3,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_patching.md`, its table, its figure and its record."""
    started, load_then = time.perf_counter(), os.getloadavg()[0]
    torch.set_num_threads(1)
    source = bridge_of(device, smoke=smoke)
    source.requires_grad_(False)
    frames = []
    for task in TASKS[:2] if smoke else TASKS:
        small = replace(task, n_pos=15, first=task.first % 13) if smoke else task
        frames.append(measure(source, small, rounds, device, smoke=smoke))
        typer.echo(f"{small}: measured after {time.perf_counter() - started:.0f} s")
    rows = pd.concat(frames)
    fits = fit(rows)
    shape = "a tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    about = f"""# What patching costs

{shape[0].upper()}{shape[1:]}, float32, batch 1. A site is one neuron's `part="z"` at one position
or at all of them; the metric is a logit difference at the last token. Only sites that can matter
are patched and counted: from the first token that differs between the prompts on, and in the last
layer at the last token alone.

- **ours**: `activation_patch`, with its recordings. The first call also tests the model; the model
  remembers these tests, so their cost has its own column, *testing once*.
- **skilled**: what a skilled user writes in a dozen lines. It records both runs once, adds
  Δz · W_out to the residual stream after the layer, runs the later blocks for 48 sites of a layer
  at once, and unembeds the direction between the two answers alone.
- **hooks**: 48 sites of any layers in one forward pass, by hooks.
- **loop**: TransformerLens' `generic_activation_patch`, one forward pass for every site.

All four run in turns in one process, in {rounds} rounds; figures are medians over them, and
[bench_patching.csv](bench_patching.csv) has every row. Seconds are of processor time on one thread,
since the machine did other work too ({load_then:.1f} other processes ran when it began). The
marginal cost is the slope between two numbers of sites, which are in the CSV; the fixed cost is
what is left at no site, and uncertain by tenths of a second. Effects and differences are over the
largest logit. A difference of more than {TOLERANCE:.2g}, 32 roundings of float32, is an error, and
nothing is written.

Machine: {machine(device)}.
Made by `python -m analyses.benchmarks.bench_patching`."""
    text = page(fits, about)
    typer.echo(text)
    settings = {"rounds": rounds, "device": device, "smoke": smoke}
    keep(__file__, out, text, {"": rows}, {"": figure(fits)}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
