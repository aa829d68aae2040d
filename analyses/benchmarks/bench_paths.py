"""Measure the cost of a path: ours against hand-written hooks, on the same paths, in one run.

The model has GPT-2 small's shape and random weights, as transformers' own in a TransformerBridge.
The prompts have 15 tokens and differ starting at a token in the middle, where the senders write. By
hand, a path is one TransformerLens forward pass with a hook. The hook adds a change to the
receiver's query or pre-activation: the change of the sender's output, divided by the run's norm
scale, times a column of weights. For a path to the logits, the hook changes the normalized stream.
These changes are computed before the clock starts. The hand-written method runs a sample of the
paths, and its values are compared with ours. Times are processor time on one thread.

Flops of a path from position t of layer k to layer l, as in the module `_path_patch.py`, with S
tokens from t to the end (T = 1):

    neuron r       2 d_model + S (L - 1 - l) 2 (12 d_model² + 2 d_model T')     T' tokens in all
    attention r    the same with L - l
    logits         2 d_model · 2                    two columns of the vocabulary
    by hand        T' (L 2 (12 d_model² + 2 d_model T') + 2 d_model d_vocab)

    python -m analyses.benchmarks.bench_paths --out analyses/results
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from analyses.benchmarks.bench_patching import Task, bridge_of, prompts
from analyses.tools.benching import conditions, leave, page_name, seconds, speeds, table
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import Contrast, HeadName, Work, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind

POS, AT = 15, 10  # the prompts' length, and the position where they differ
METRIC = p.logit_diff(correct=11, wrong=12)


class ByHand:
    """Path patching with TransformerLens' hooks on a GPT-2 bridge, one forward pass per path."""

    def __init__(self, model: Any, clean: Tensor, corrupted: Tensor) -> None:
        self.model, self.tokens, self.device = model, corrupted, str(corrupted.device)
        with torch.no_grad():
            self.runs = [model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
        bound = bind(METRIC, model, Contrast(clean, corrupted, METRIC).pair(model))
        self.value = lambda logits: bound.value(bound.select(logits)[None])[0]

    def sent(self, name: HeadName) -> Tensor:
        """Return a head's output in the clean run minus its output in the corrupted run."""
        block = self.model.blocks[name.layer]
        point = "attn.hook_z" if name.kind == "attention" else "mlp.hook_post"
        hook = f"blocks.{name.layer}.{point}"
        clean, corrupted = (run[hook][:, AT, name.index] for run in self.runs)
        if name.kind == "attention":
            return (clean - corrupted) @ block.attn.W_O[name.index]
        return (clean - corrupted)[:, None] * block.mlp.W_out[name.index]

    def edit(self, sender: str, receiver: str) -> tuple[str, Callable[..., Tensor]]:
        """Return the hook point of a receiver, and the hook that adds the path's change there."""
        delta = self.sent(HeadName.parse(sender))
        delta = delta - delta.mean(-1, keepdim=True)
        cache = self.runs[1]
        if receiver == "logits":
            more = delta / cache["ln_final.hook_scale"][:, AT]
            return "ln_final.hook_normalized", self.adding(more, (slice(None), AT))
        name = HeadName.parse(receiver)
        block, prefix = self.model.blocks[name.layer], f"blocks.{name.layer}"
        norm = "ln1" if name.kind == "attention" else "ln2"
        weight = getattr(block, norm).original_component.weight
        entering = delta / cache[f"{prefix}.{norm}.hook_scale"][:, AT] * weight
        if name.kind == "attention":
            more = entering @ block.attn.W_Q[name.index]
            return f"{prefix}.attn.hook_q", self.adding(more, (slice(None), AT, name.index))
        more = entering @ block.mlp.W_in[:, name.index]
        return f"{prefix}.mlp.hook_pre", self.adding(more, (slice(None), AT, name.index))

    @staticmethod
    def adding(more: Tensor, index: tuple[Any, ...]) -> Callable[..., Tensor]:
        """Return a hook that adds a tensor at an index."""

        def hook(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()
            value[index] += more
            return value

        return hook

    @torch.no_grad()
    def patch(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], float]:
        """Return the values of paths, and the seconds of their forward passes."""
        edits, values, took = [self.edit(*pair) for pair in pairs], [], 0.0
        for edit in edits:
            start = seconds(self.device)
            logits = self.model.run_with_hooks(self.tokens, fwd_hooks=[edit])
            values.append(float(self.value(logits)))
            took += seconds(self.device) - start
        return values, took


def flops(cfg: Any, layer: int | None, kind: str) -> float:
    """Return the flops of one path, by the formulas in the module docstring."""
    if layer is None:
        return 4.0 * cfg.d_model
    d_model = cfg.d_model
    per_token = 2 * (4 * d_model * cfg.n_heads * cfg.d_head + 2 * d_model * cfg.d_mlp)
    per_token += 4 * POS * cfg.n_heads * cfg.d_head
    blocks = cfg.n_layers - layer - (kind == "neuron")
    return float(2 * d_model + (POS - AT) * blocks * per_token)


@dataclass(frozen=True)
class Case:
    """Paths of one kind.

    Attributes:
        title: a description.
        edges: from heads in the first layer, at the token `AT`, to heads in the last layer, or to
            "logits".
        layer: the last layer; None for the logits.
    """

    title: str
    edges: p.Edges
    layer: int | None


def cases(cfg: Any, first: int, last: int, few: int) -> Iterator[Case]:
    """Yield five kinds of paths from one layer to another layer, or to the logits."""
    indices = range(0, cfg.d_mlp, max(1, cfg.d_mlp // few))[:few]
    neurons, to_neurons = ([f"L{layer}N{i}" for i in indices] for layer in (first, last))
    neurons, heads = p.Sites(neurons, AT), p.Sites("heads", AT, first)
    to_heads = p.Sites("heads", layers=last)
    yield Case("neurons to neurons", p.Edges(neurons, to_neurons, "z"), last)
    yield Case("heads to neurons", p.Edges(heads, to_neurons, "z"), last)
    yield Case("neurons to heads, by q", p.Edges(neurons, to_heads, "q"), last)
    yield Case("heads to heads, by q", p.Edges(heads, to_heads, "q"), last)
    yield Case("neurons to the logits", p.Edges(p.Sites("neurons", AT, first), "logits", "z"), None)


def measure(
    case: Case, patch: Callable[..., p.Paths], by_hand: ByHand, n_by_hand: int, speed: float
) -> dict[str, Any]:
    """Time all paths of a case, and a sample of them with hooks, and compare their values."""
    start = seconds(by_hand.device)
    paths = patch(case.edges)
    ours = seconds(by_hand.device) - start
    sampled = paths.frame.iloc[:: max(1, len(paths.frame) // n_by_hand)][:n_by_hand]
    pairs = list(zip(sampled["sender"], sampled["receiver"], strict=True))
    values, took = by_hand.patch(pairs)
    worst = max(abs(a - b) for a, b in zip(values, sampled["value"], strict=True))
    kind = "neuron" if "to neurons" in case.title else "attention"
    counted = flops(by_hand.model.cfg, case.layer, kind)
    rate = len(paths.frame) / ours
    return {
        "paths": case.title,
        "number": len(paths.frame),
        "seconds": ours,
        "by hand paths/s": len(pairs) / took,
        "ours paths/s": rate,
        "ratio": rate * took / len(pairs),
        "bound paths/s": speed / counted,
        "Mflop a path": counted / 1e6,
        "largest difference": worst / (abs(paths.clean_value) + abs(paths.corrupted_value)),
    }


def report(smoke: bool, device: str, few: int, n_by_hand: int) -> str:
    """Return the page with all tables."""
    about = conditions(device)
    source = bridge_of(device, smoke=smoke)
    source.requires_grad_(False)
    cfg, (speed, _) = source.cfg, speeds(device, smoke)
    first, last = (0, 1) if smoke else (4, 8)
    clean, corrupted = prompts(Task("paths", "each", POS, AT), cfg.d_vocab, device)
    by_hand = ByHand(source, clean, corrupted)
    with expose_neuron_heads(source, copy=True) as model:

        def patch(edges: p.Edges, top: int | None = None) -> p.Paths:
            # A contrast keeps its recorded runs, so each measured call gets a new one.
            contrast = Contrast(clean, corrupted, METRIC)
            return p.path_patch(model, contrast, edges, top=top, work=Work(progress=False))

        rows = [
            measure(case, patch, by_hand, n_by_hand, speed) for case in cases(cfg, first, last, few)
        ]
        start = seconds(device)
        senders, receivers = p.Sites("neurons", AT, first), p.Sites("neurons", layers=last)
        top = patch(p.Edges(senders, receivers, "z"), top=100)
        took = seconds(device) - start
    shape = "A tiny model (--smoke)" if smoke else "GPT-2 small's shape, random weights"
    called = f"--few {few} --by-hand {n_by_hand}{' --smoke' if smoke else ''}"
    errors = (top.frame["estimate"] - top.frame["score"]).abs() / top.effect.abs()
    return f"""# What a path costs

{shape}, float32, {POS} tokens, from layer {first} to layer {last}, written at token {AT}; a logit
difference at the last token; {n_by_hand} paths of each kind by hand. {about}
Matrix product {speed / 1e9:.0f} GFLOP/s.
Made by `python -m analyses.benchmarks.bench_paths {called}`.

{table(pd.DataFrame(rows))}

Seconds are those of a whole call, with the work that it does once: taking both runs apart, and
tests of the model. The package remembers tests that a model has passed, so the first row pays for
them. `top=100` of all {top.n_paths:,} paths from neurons of layer {first} to neurons of layer
{last} took {took:.3g} seconds: {top.n_paths / took:,.0f} paths a second. All of them were estimated
and 100 patched. Of those 100, the estimate of the effect is off by {100 * errors.median():.2g} % in
the median, by {100 * errors.max():.2g} % at most.
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    few: Annotated[int, typer.Option(help="neurons of a layer, as senders or receivers")] = 96,
    by_hand: Annotated[int, typer.Option(help="paths of each kind by hand")] = 24,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_paths.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(smoke, device, *((5, 3) if smoke else (few, by_hand)))
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "few": few, "by_hand": by_hand}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
