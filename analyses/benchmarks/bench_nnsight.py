"""Patch a few neurons with nnsight, with `activation_patch` and with hooks, in one process.

nnsight (https://nnsight.net) is not a dependency of this package: run `pip install nnsight` first.
The model has GPT-2 small's shape and random weights. nnsight runs the transformers model; the other
methods run a bridge with the same weights. The prompts have 15 tokens and differ starting at the
11th. The sites are 25 neurons at single positions that can have an effect. nnsight is used in two
ways:

    invokes    one trace with an invoke for each site; nnsight joins them into one batch
    batch      one trace of 25 rows, with an edit of each layer's activations: the fewest operations

"ours" and "hooks" are the methods from `bench_patching.py`. All methods alternate on one thread,
and times are processor time. The first round is reported separately, because our first call also
tests the model.

    python -m analyses.benchmarks.bench_nnsight --out analyses/results
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nnsight
import pandas as pd
import tokenizers
import torch
import transformers
import typer
from torch import Tensor

from analyses.benchmarks import bench_patching as bench
from analyses.tools.benching import conditions, leave, page_name, seconds, table
from analyses.tools.options import Device, Out, Rounds, Smoke
from attn_only_lens import expose_neuron_heads

N_SITES = 25


def traceable(model: transformers.GPT2LMHeadModel) -> Any:
    """Return the model for nnsight, which needs a tokenizer to join invokes; prompts are tokens."""
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="a", eos_token="a"
    )
    return nnsight.TransformersModel(model, task="text-generation", tokenizer=tokenizer)


def activations(model: Any, tokens: Tensor) -> list[Tensor]:
    """Return the activations of all neurons, [batch, pos, neuron] for each layer."""
    with torch.no_grad(), model.trace(tokens):
        post = nnsight.save([])
        for block in model.transformer.h:
            post.append(block.mlp.act.output)
    return list(post)


def answer(logits: Tensor) -> Tensor:
    """Return the metric of each row."""
    return logits[:, -1, bench.CORRECT] - logits[:, -1, bench.WRONG]


def invokes(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Patch the sites in one trace, with an invoke for each site."""
    clean_values = activations(model, clean)
    rows = list(sites.itertuples(index=False))
    with torch.no_grad(), model.trace() as tracer:
        values = nnsight.save([])
        for layer, pos, neuron in rows:
            with tracer.invoke(corrupted):
                post = model.transformer.h[layer].mlp.act.output
                post[:, pos, neuron] = clean_values[layer][:, pos, neuron]
                values.append(answer(model.lm_head.output))
    return torch.cat(list(values)).cpu()


def batch(model: Any, clean: Tensor, corrupted: Tensor, sites: pd.DataFrame) -> Tensor:
    """Patch the sites in one trace, with a row for each site, edited layer by layer."""
    clean_values = activations(model, clean)
    edits = []
    for layer, some in sites.groupby("layer"):
        columns = (some.index, some["pos"], some["neuron"])
        rows, pos, neurons = (torch.tensor(list(x), device=clean.device) for x in columns)
        edits.append((layer, rows, pos, neurons, clean_values[layer][0, pos, neurons]))
    with torch.no_grad(), model.trace(corrupted.repeat(len(sites), 1)):
        for layer, rows, pos, neurons, new in edits:
            model.transformer.h[layer].mlp.act.output[rows, pos, neurons] = new
        values = nnsight.save(answer(model.lm_head.output))
    return values.cpu()


def measure(rounds: int, device: str, *, smoke: bool) -> pd.DataFrame:
    """Time every method, and compare the values that they return.

    Raises:
        ValueError: a method's values differ from ours.
    """
    task = bench.Task("scattered", "each", 15, 10)
    plain = traceable(bench.gpt2_of(smoke=smoke).to(device))
    bridge = bench.bridge_of(device, smoke=smoke)
    for model in (plain, bridge):
        model.requires_grad_(False)
    pair = bench.prompts(task, bridge.cfg.d_vocab, device)
    sites = bench.sites_of(task, bridge.cfg, N_SITES)
    exposed = expose_neuron_heads(bridge, copy=True).model  # shares weights; `bridge` is unexposed
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": partial(bench.ours, exposed, *pair, sites),
        "skilled": partial(bench.skilled, bridge, *pair, sites),
        "hooks": partial(bench.hooks, bridge, *pair, sites),
        "nnsight, invokes": partial(invokes, plain, *pair, sites),
        "nnsight, batch": partial(batch, plain, *pair, sites),
    }
    with torch.no_grad():
        largest = bridge(pair[1])[:, -1].abs().max().item()
        unpatched = answer(bridge(pair[1])).item()
    took: dict[str, list[float]] = {name: [] for name in ways}
    values: dict[str, Tensor] = {}
    for _ in range(rounds + 1):
        for name, patch in ways.items():
            start = seconds(device)
            values[name] = patch().double()
            took[name].append(seconds(device) - start)
    expected = values["ours"]
    ours = pd.Series(took["ours"][1:]).median()
    rows = []
    for name, times in took.items():
        off = (values[name] - expected).abs().max().item()
        if not off <= bench.TOLERANCE * largest:
            raise ValueError(
                f"{name} and ours differ by {off:.2g}; expected {bench.TOLERANCE * largest:.2g} at "
                f"most, which float32 explains"
            )
        again = pd.Series(times[1:]).median()
        rows.append(
            {"way": name, "first, s": times[0], "again, s": again, "again / ours": again / ours}
            | {"largest difference": off / largest}
            | {"largest effect": (expected - unpatched).abs().max().item() / largest}
        )
    return pd.DataFrame(rows)


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    rounds: Rounds = 4,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_nnsight.md` and its record."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    about = conditions(device)
    rows = measure(rounds, device, smoke=smoke)
    shape = "A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    text = f"""# Patching with nnsight

{shape}, float32; {N_SITES} neurons, each at one position, of prompts of 15 tokens that differ from
the 11th on; a logit difference at the last token. Every way records the clean run and patches all
sites. "First" is the first call in the process, with the package's tests of the model; "again" is
the median of {rounds} later ones. Effects and differences are over the largest logit.

- **ours**: `activation_patch` on a bridge whose neuron-heads are exposed.
- **skilled**, **hooks**: as in [what patching costs](bench_patching.md), on the same bridge.
- **nnsight, invokes**: one trace, with an invoke for each site; nnsight joins them into one batch.
- **nnsight, batch**: one trace of {N_SITES} rows, with one edit for each layer.

{about} nnsight {version("nnsight")}, transformers {version("transformers")}.
Made by `python -m analyses.benchmarks.bench_nnsight`.

{table(rows)}
"""
    typer.echo(text)
    settings = {"device": device, "rounds": rounds, "smoke": smoke, "nnsight": version("nnsight")}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
