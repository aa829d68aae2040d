"""Measure one figure of `bench_convert.py`: one operation's peak memory, in a separate process.

python -m analyses.benchmarks.bench_peak_memory converted "cache everything" 128 cpu
"""

import gc
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attn_only_lens import convert
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

GPT2_SMALL = {
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "d_head": 64,
    "d_mlp": 3072,
    "d_vocab": 50257,
    "n_ctx": 1024,
}
TINY = {
    "n_layers": 2,
    "d_model": 26,
    "n_heads": 2,
    "d_head": 13,
    "d_mlp": 37,
    "d_vocab": 41,
    "n_ctx": 17,
}


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


def model_of(device: str, *, smoke: bool = False, **changes: Any) -> HookedTransformer:
    """Return a model with GPT-2 small's shape and random weights, or a tiny model."""
    sizes = (TINY if smoke else GPT2_SMALL) | {"act_fn": "gelu_new", "seed": 0} | changes
    return HookedTransformer(HookedTransformerConfig(**sizes, device=device)).eval()


def reset_peak(device: str) -> None:
    """Start a new measurement of the peak memory."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to current memory


def held_and_peak(device: str) -> tuple[float, float]:
    """Return the bytes held now, and their peak since `reset_peak`."""
    if torch.device(device).type == "cuda":
        held = torch.cuda.memory_allocated(device)
        return float(held), float(torch.cuda.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return 1024.0 * int(sizes["VmRSS"]), 1024.0 * int(sizes["VmHWM"])


@torch.no_grad()
def main(
    which: Annotated[str, typer.Argument(help="source or converted")],
    operation: Annotated[str, typer.Argument(help=f"one of {', '.join(OPERATIONS)}")],
    pos: int,
    device: str,
    smoke: bool = False,
) -> None:
    """Print the peak memory in MiB above the memory of the loaded model."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    model = model_of(device, smoke=smoke)
    if which == "converted":
        model = convert(model)
    model(torch.zeros((1, 2), dtype=torch.long, device=device))  # one-time allocations happen here
    tokens = torch.arange(pos, device=device)[None] % model.cfg.d_vocab
    options = OPERATIONS[operation]
    reset_peak(device)
    before, _ = held_and_peak(device)
    kept = model(tokens) if options is None else model.run_with_cache(tokens, **options[which])
    _, peak = held_and_peak(device)
    del kept
    typer.echo(f"{(peak - before) / 2**20:.1f}")


if __name__ == "__main__":
    typer.run(main)
