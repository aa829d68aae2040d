"""What patching costs: ours against TransformerLens' loop, on the same sites, in one run.

The model has GPT-2 small's shape and random weights, as a HookedTransformer or as transformers' own
in a TransformerBridge (`--model bridge`); the prompts have 15 tokens. A site is one
neuron at one position (or at all). TransformerLens runs a whole forward pass with a hook for each;
it is timed on one or two neurons of every layer at every position, ours on some tens or hundreds of
each: a stratified sample of the 36,864 neurons, since the slow side would take hours. Theirs is run
in two halves around ours, and the values of the sites that both ran are compared.

Flops of a site at position t of layer l, counted as multiplications and additions of matrix
products, for a patch of T tokens after which S are left (S = T - t; for all positions, S = T less
the tokens before the first that differs):

    ours              S (L - 1 - l) 2 (12 d_model² + 2 d_model T)
    TransformerLens   T (L 2 (12 d_model² + 2 d_model T) + 2 d_model d_vocab)

and none of ours where the two prompts have not yet differed, or in the last layer at positions
that the metric does not read. The bound is ours at the speed of this machine's matrix product.

    python analyses/bench_patching.py --out analyses/results
"""

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import transformers
import typer
from bench_peak_memory import GPT2_SMALL, TINY, model_of
from benching import Device, machine, medians, page_name, speeds, table
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.patching import generic_activation_patch

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.runs.metrics import bind
from attn_only_lens.storage import write_text

POS = 15
FIRST = (10, 2)  # where prompts differ: at a late name, as in "… John gave a drink to"; early


def prompts(first: int, d_vocab: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """A pair that differs in one token."""
    clean = (torch.arange(POS, device=device)[None] * 7) % d_vocab
    corrupted = clean.clone()
    corrupted[0, first] = (corrupted[0, first] + 1) % d_vocab
    return clean, corrupted


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


def flops(cfg: Any, layer: int, start: int, first: int) -> float:
    """Of one site that begins at a position, as the module has it."""
    if start < first or layer == cfg.n_layers - 1:
        return 0.0
    per_token = 2 * (4 * cfg.d_model * cfg.n_heads * cfg.d_head + 2 * cfg.d_model * cfg.d_mlp)
    per_token += 4 * POS * cfg.n_heads * cfg.d_head
    return float((POS - start) * (cfg.n_layers - 1 - layer) * per_token)


def their_loop(
    model: Any, clean: Tensor, corrupted: Tensor, metric: Any, sites: pd.DataFrame
) -> Tensor:
    """TransformerLens' own sweep over an explicit frame of sites."""
    _, cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_post"))

    def setter(post: Tensor, index: Any, clean_post: Tensor) -> Tensor:
        _, position, neuron = index
        where = slice(None) if position == -1 else position
        post[:, where, neuron] = clean_post[:, where, neuron]
        return post

    with torch.no_grad():
        return generic_activation_patch(
            model, corrupted, cache, metric, setter, "post", index_df=sites
        )


def sweep(
    source: Any, positions: str, first: int, neurons: tuple[int, int], speed: float
) -> dict[str, Any]:
    """One row: our sites a second and theirs; `speed` is the machine's flops a second."""
    ours_each, theirs_each = neurons
    cfg = source.cfg
    clean, corrupted = prompts(first, cfg.d_vocab, next(source.parameters()).device)
    metric = p.logit_diff(correct=11, wrong=12)
    labels = list(range(POS)) if positions == "each" else [-1]
    chosen = range(0, cfg.d_mlp, max(1, cfg.d_mlp // ours_each))[:ours_each]
    few = chosen[:: max(1, len(chosen) // theirs_each)][:theirs_each]
    layers = range(cfg.n_layers)
    frame = pd.DataFrame(product(layers, labels, few), columns=["layer", "pos", "neuron"])
    bound = bind(metric, source, p.prompt_pair(source, clean, corrupted))

    def value(logits: Tensor) -> Tensor:
        return bound.value(bound.select(logits)[None])[0]

    # Theirs in two halves around ours, so that what else the machine does falls on both.
    expected: list[float] = []
    theirs = 0.0
    found = None
    for half in (frame[::2], frame[1::2]):
        start = time.perf_counter()
        expected += their_loop(source, clean, corrupted, value, half).tolist()
        theirs += time.perf_counter() - start  # each value was read: the device is idle
        if found is None:
            start = time.perf_counter()
            names = [f"L{layer}N{neuron}" for layer in layers for neuron in chosen]
            with expose_neuron_heads(source) as model:
                found = p.activation_patch(
                    model, clean, corrupted, metric, sites=names, positions=positions
                )
            ours = time.perf_counter() - start
    values = found.to_frame().set_index(["name", "position"])["value"]
    sampled = pd.concat([frame[::2], frame[1::2]]).itertuples()
    keys = [(f"L{r.layer}N{r.neuron}", "all" if r.pos == -1 else r.pos) for r in sampled]
    worst = max(abs(values[key] - other) for key, other in zip(keys, expected, strict=True))
    n_ours, n_theirs = len(values), len(frame)
    sites = product(layers, [first if label == -1 else label for label in labels])
    counted = len(chosen) * sum(flops(cfg, layer, start, first) for layer, start in sites)
    return {
        "positions": positions,
        "prompts differ at": first,
        "sites": n_ours,
        "seconds": ours,
        "TransformerLens sites/s": n_theirs / theirs,
        "ours sites/s": n_ours / ours,
        "ratio": (n_ours / ours) / (n_theirs / theirs),
        "bound sites/s": n_ours / (counted / speed),
        "Mflop a site": counted / n_ours / 1e6,
        "largest difference": worst / (abs(found.clean_value) + abs(found.corrupted_value)),
    }


def estimates(source: Any, rounds: int, device: str) -> pd.DataFrame:
    """Attribution of every neuron at every position, against a forward pass, in turns."""
    clean, corrupted = prompts(FIRST[0], source.cfg.d_vocab, device)
    metric, sites = p.logit_diff(correct=11, wrong=12), p.neuron_heads()

    def forward() -> Tensor:
        with torch.no_grad():
            return source(clean)

    with expose_neuron_heads(source) as model:
        calls: dict[str, Callable[[], Any]] = {"forward": forward}
        for method in ("exact_gate", "gradient", "frozen_pattern", "integrated"):
            calls[method] = partial(
                p.attribution,
                *(model, clean, corrupted, metric),
                sites=sites,
                method=method,
                progress=False,
            )
        took = medians(calls, rounds, device)
    return pd.DataFrame(
        {
            "call": list(took),
            "ms": list(took.values()),
            "in forward passes": [ms / took["forward"] for ms in took.values()],
        }
    )


def report(model: str, smoke: bool, device: str, neurons: tuple[int, int]) -> str:
    """All tables, as the text of a page."""
    ours, theirs = (5, neurons[1]) if smoke else neurons
    load = os.getloadavg()[0]
    source = (bridge_of if model == "bridge" else model_of)(device, smoke=smoke)
    source.requires_grad_(False)
    speed, _ = speeds(device, smoke)
    rows = [
        sweep(source, positions, first, (ours, theirs), speed)
        for first in FIRST
        for positions in ("each", "all")
    ]
    shape = "A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    called = f"--model {model} --neurons {ours} --theirs {theirs}{' --smoke' if smoke else ''}"
    kind = "TransformerBridge" if model == "bridge" else "HookedTransformer"
    return f"""# What patching costs: a {kind}

{shape}, float32, {POS} tokens, `part="z"`, a logit difference at the last token;
{ours} neurons of each layer for ours, {theirs} for TransformerLens. Machine: {machine(device)};
matrix product {speed / 1e9:.0f} GFLOP/s; {load:.1f} other processes ran when it began.
Made by `python analyses/bench_patching.py {called}`.

{table(pd.DataFrame(rows))}

## Attribution of every neuron at every position

By flops, "exact_gate" and "gradient" cost 3 forward passes (`_attribution.py`); times have the
making of a frame with a row for each site in them.

{table(estimates(source, 2 if smoke else 5, device))}
"""


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/bench"),
    device: Device = "cpu",
    neurons: Annotated[int, typer.Option(help="of each layer, for ours")] = 384,
    theirs: Annotated[int, typer.Option(help="of each layer, for TransformerLens")] = 2,
    model: Annotated[
        Literal["hooked", "bridge"], typer.Option(help="a HookedTransformer, or a bridge")
    ] = "hooked",
    smoke: Annotated[bool, typer.Option(help="tiny sizes")] = False,
) -> None:
    """Measure, print, and write `bench_patching.md`, or `bench_patching_bridge.md`."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(model, smoke, device, (neurons, theirs))
    typer.echo(text)
    kind = ["bridge"] * (model == "bridge")
    write_text(out / page_name(__file__, device, *kind), text)


if __name__ == "__main__":
    typer.run(main)
