"""What patching costs: ours, TransformerLens' loop, and its hooks batched by hand, in one run.

The model has GPT-2 small's shape and random weights, as a HookedTransformer or as transformers' own
in a TransformerBridge (`--model bridge`), or is one of Hugging Face in a folder (`--folder`). A
site is one neuron at one position (or at all). TransformerLens' own sweep runs a whole forward pass
with a hook for each; by hand, a skilled user runs 48, of any layers, in one. Both are timed on a
sample of the sites that we run, in halves around ours, and the values of those are compared.

Flops of a site at position t of layer l, counted as multiplications and additions of matrix
products, for prompts of T tokens after which S = T - t are left (for all positions, S = T less the
tokens before the first that differs), with P the parameters of a block's matrices:

    ours              (L - 1 - l) (2 S P + 4 n_heads d_head Σ_{t < i ≤ T} i)
    TransformerLens   L (2 T P + 4 n_heads d_head T²) + 2 T d_model d_vocab

and none of ours where the two prompts have not yet differed, or in the last layer at positions
that the metric does not read. The bound is ours at the speed of this machine's matrix product of
2,048 rows and columns, measured before and after each of our runs. Seconds are of the wall; shares
of the bound and ratios are of processor time where that is known, since others use the machine too.

    python analyses/bench_patching.py --out analyses/results
"""

import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import transformers
import typer
from bench_peak_memory import GPT2_SMALL, TINY, model_of
from benching import Device, machine, page_name, table, wait
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.patching import generic_activation_patch
from transformer_lens.utilities import get_act_name

from attn_only_lens import expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.runs.metrics import bind
from attn_only_lens.storage import write_text

BY_HAND = 48  # variants in a forward pass
METRIC = p.logit_diff(correct=11, wrong=12)


@dataclass(frozen=True)
class Task:
    """Sites to patch, of prompts that differ from one token on.

    Attributes:
        sites: "every neuron", some of them in equal steps; "scattered", a thousand anywhere; or
            "25 names".
        positions: "each" or "all".
        n_pos: the length of the prompts.
        first: where they differ.
    """

    sites: str
    positions: str
    n_pos: int
    first: int


# At a late name, as in "… John gave a drink to"; early; in the middle and at the end of long ones.
TASKS = [
    *(Task("every neuron", at, 15, first) for first in (10, 2) for at in ("each", "all")),
    *(Task("25 names", "each", 15, first) for first in (10, 2)),
    *(Task("scattered", "each", n_pos, first) for n_pos, first in ((64, 24), (64, 60), (128, 96))),
]


def prompts(task: Task, d_vocab: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """A pair that differs in one token."""
    clean = (torch.arange(task.n_pos, device=device)[None] * 7) % d_vocab
    corrupted = clean.clone()
    corrupted[0, task.first] = (corrupted[0, task.first] + 1) % d_vocab
    return clean, corrupted


def sites_of(task: Task, cfg: Any, neurons: int, scattered: int) -> pd.DataFrame:
    """Layer, position (-1 for all) and neuron of each site, as TransformerLens' loop takes them."""
    layers, width = range(cfg.n_layers), cfg.d_mlp
    positions = range(task.n_pos) if task.positions == "each" else [-1]
    if task.sites == "every neuron":
        chosen = range(0, width, max(1, width // neurons))[:neurons]
        rows = list(product(layers, positions, chosen))
    else:
        draw = random.Random(0)
        names = [(draw.choice(layers), draw.randrange(width)) for _ in range(scattered)]
        if task.sites == "scattered":
            rows = [(layer, draw.randrange(task.first, task.n_pos), n) for layer, n in names]
        else:
            rows = [(layer, at, n) for layer, n in names[:25] for at in positions]
    return pd.DataFrame(sorted(set(rows)), columns=["layer", "pos", "neuron"])


def bridge_of(device: str, *, smoke: bool) -> TransformerBridge:
    """The same shape as `model_of` has, as a bridge."""
    sizes = TINY if smoke else GPT2_SMALL
    names = {"n_layer": "n_layers", "n_embd": "d_model", "n_head": "n_heads", "n_inner": "d_mlp"}
    names |= {"vocab_size": "d_vocab", "n_positions": "n_ctx"}
    config = transformers.GPT2Config(
        **{theirs: sizes[ours] for theirs, ours in names.items()},
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    return build_bridge_from_module(model.to(device).eval(), "GPT2LMHeadModel", hf_config=config)


def flops(cfg: Any, task: Task, sites: pd.DataFrame) -> float:
    """Of all sites, as the module has it."""
    key_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    matrices = 3 if getattr(cfg, "gated_mlp", False) else 2
    parameters = cfg.d_model * cfg.d_head * 2 * (cfg.n_heads + key_heads)
    parameters += cfg.d_model * cfg.d_mlp * matrices
    start = sites["pos"].where(sites["pos"] >= 0, task.first)
    felt = sites[start >= task.first]
    start, end = start[start >= task.first], task.n_pos
    seen = (end * (end + 1) - start * (start + 1)) / 2  # Σ i
    each = 2 * (end - start) * parameters + 4 * cfg.n_heads * cfg.d_head * seen
    return float((each * (cfg.n_layers - 1 - felt["layer"])).sum())


def their_loop(
    model: Any, cache: Any, corrupted: Tensor, metric: Any, sites: pd.DataFrame
) -> Tensor:
    """TransformerLens' own sweep over an explicit frame of sites."""

    def setter(post: Tensor, index: Any, clean_post: Tensor) -> Tensor:
        _, position, neuron = index
        where = slice(None) if position == -1 else position
        post[:, where, neuron] = clean_post[:, where, neuron]
        return post

    with torch.no_grad():
        return generic_activation_patch(
            model, corrupted, cache, metric, setter, "post", index_df=sites
        )


def by_hand(model: Any, cache: Any, corrupted: Tensor, metric: Any, sites: pd.DataFrame) -> Tensor:
    """The same by hooks, 48 sites of any layers in one forward pass, in the order of the sites."""
    device, values = corrupted.device, []
    for start in range(0, len(sites), BY_HAND):
        some = sites.iloc[start : start + BY_HAND].reset_index(drop=True)
        hooks = []
        for layer, of_layer in some.groupby("layer"):
            row, neuron, at = (
                torch.tensor(each, device=device)
                for each in (
                    of_layer.index.tolist(),
                    *(of_layer[c].tolist() for c in ("neuron", "pos")),
                )
            )
            here = (at[:, None] == torch.arange(corrupted.shape[1], device=device)) | (
                at[:, None] == -1
            )

            name = get_act_name("post", layer)

            def setter(post: Tensor, hook: Any, given: Any = (name, row, neuron, here)) -> Tensor:
                name, row, neuron, here = given
                new = cache[name][0, :, neuron].T
                post[row, :, neuron] = torch.where(here, new, post[row, :, neuron])
                return post

            hooks.append((name, setter))
        with torch.no_grad():
            logits = model.run_with_hooks(corrupted.expand(len(some), -1), fwd_hooks=hooks)
        values += [metric(each[None]) for each in logits]
    return torch.stack(values)


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """What a call returns, its seconds, and what of it the processor worked; on a GPU, as long."""
    wait(device)
    start, worked = time.perf_counter(), time.process_time()
    found = call()
    wait(device)
    took = time.perf_counter() - start
    return found, took, time.process_time() - worked if device == "cpu" else took


def rate(device: str, *, smoke: bool) -> float:
    """Float operations of a matrix product in a second, of the processor as `timed` has it."""
    size = 256 if smoke else 2048
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    worked = [timed(lambda: a @ b, device)[2] for _ in range(8)]
    return 2 * size**3 / statistics.median(worked[1:])


def sweep(source: Any, task: Task, sizes: dict[str, int], device: str) -> dict[str, Any]:
    """One row: seconds, and processor time a site of ours over those of the others."""
    cfg = source.cfg
    clean, corrupted = prompts(task, cfg.d_vocab, device)
    sites = sites_of(task, cfg, sizes["neurons"], sizes["scattered"])
    felt = sites[(sites["pos"] >= task.first) | (sites["pos"] == -1)]
    bound = bind(METRIC, source, p.prompt_pair(source, clean, corrupted))

    def value(logits: Tensor) -> Tensor:
        return bound.value(bound.select(logits)[None])[0]

    # Theirs in two halves around ours, so that what else the machine does falls on both.
    chosen = {"loop": sizes["loop"] // (1 + task.n_pos // 32), "by hand": sizes["by hand"]}
    samples = {
        name: (run, felt.sample(min(len(felt), chosen[name]), random_state=0))
        for name, run in (("loop", their_loop), ("by hand", by_hand))
    }
    _, cache = source.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_post"))
    worked = dict.fromkeys(samples, 0.0)
    theirs, found, rates = list[tuple[Any, float]](), None, []
    for half in (0, 1):
        for name, (run, sample) in samples.items():
            some = sample[half::2]
            values, _, spent = timed(partial(run, source, cache, corrupted, value, some), device)
            worked[name] += spent / len(sample)
            theirs += zip(some.itertuples(index=False), values.tolist(), strict=True)
        if found is None:
            rates.append(rate(device, smoke=sizes["neurons"] < 10))
            names = [
                f"L{row.layer}N{row.neuron}" + f"@{row.pos}" * (task.positions == "each")
                for row in sites.itertuples()
            ]
            at = {} if task.positions == "each" else {"positions": "all"}
            with expose_neuron_heads(source) as model:
                patch = partial(p.activation_patch, model, clean, corrupted, METRIC, sites=names)
                found, seconds, ours = timed(partial(patch, progress=False, **at), device)
            rates.append(rate(device, smoke=sizes["neurons"] < 10))
    values = found.to_frame().set_index(["name", "position"])["value"]
    worst = max(
        abs(values[f"L{row.layer}N{row.neuron}", "all" if row.pos == -1 else row.pos] - other)
        for row, other in theirs
    )
    least = flops(cfg, task, sites) / statistics.mean(rates)
    # The others run sites where the prompts do not differ yet as they run any.
    return {
        "sites": f"{task.sites}, {task.positions}",
        "tokens": task.n_pos,
        "differ at": task.first,
        "n": len(sites),
        "seconds": seconds,
        "processor seconds": ours,
        "of the bound": least / ours,
        "loop / ours": worked["loop"] * len(sites) / ours,
        "by hand / ours": worked["by hand"] * len(sites) / ours,
        "largest difference": worst / (abs(found.clean_value) + abs(found.corrupted_value)),
    }


def report(
    source: Any, kind: str, shape: str, sizes: dict[str, int], device: str, called: str
) -> str:
    """The table, as the text of a page."""
    load = os.getloadavg()[0]
    source.requires_grad_(False)
    smoke = sizes["neurons"] < 10
    tasks = [
        replace(task, n_pos=15, first=min(task.first, 12)) if smoke else task for task in TASKS
    ]
    rows = [sweep(source, task, sizes, device) for task in tasks]
    speed = rate(device, smoke=smoke)
    return f"""# What patching costs: a {kind}

{shape}, float32, `part="z"`, a logit difference at the last token; of "every neuron",
{sizes["neurons"]} of each layer, with tests and recordings in the time. {sizes["loop"]} of the
sites run in TransformerLens' loop, about {sizes["by hand"]} by hand.
Machine: {machine(device)}; matrix product {speed / 1e9:.0f} GFLOP/s;
{load:.1f} other processes ran when it began.
Made by `python analyses/bench_patching.py {called}`.

{table(pd.DataFrame(rows))}
"""


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/bench"),
    device: Device = "cpu",
    neurons: Annotated[int, typer.Option(help="of each layer, of every neuron")] = 128,
    model: Annotated[
        Literal["hooked", "bridge"], typer.Option(help="a HookedTransformer, or a bridge")
    ] = "hooked",
    folder: Annotated[Path | None, typer.Option(help="a model of Hugging Face instead")] = None,
    smoke: Annotated[bool, typer.Option(help="tiny sizes")] = False,
) -> None:
    """Measure, print, and write `bench_patching.md`, or `bench_patching_bridge.md`."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    sizes = {"neurons": 5 if smoke else neurons, "scattered": 50 if smoke else 1000}
    sizes |= {"loop": 4, "by hand": 8} if smoke else {"loop": 24, "by hand": 2 * BY_HAND}
    called = f"--neurons {sizes['neurons']} --model {model}{' --smoke' * smoke}"
    shape = "A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    kind = "TransformerBridge" if model == "bridge" else "HookedTransformer"
    if folder is not None:
        source: Any = load(folder, device=device)
        kind, shape = type(source).__name__, f"Trained weights of {folder.name}"
        called = f"--neurons {neurons} --folder {folder.name}"
    else:
        source = (bridge_of if model == "bridge" else model_of)(device, smoke=smoke)
    text = report(source, kind, shape, sizes, device, called)
    typer.echo(text)
    parts = [folder.name] if folder is not None else ["bridge"] * (model == "bridge")
    write_text(out / page_name(__file__, device, *parts), text)


if __name__ == "__main__":
    typer.run(main)
