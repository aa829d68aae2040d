"""The command-line options that studies, benchmarks and tools share: one declaration for all."""

from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer


def known_device(name: str) -> str:
    """Return the name of a device that torch can use here."""
    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError, ImportError) as error:
        raise typer.BadParameter(f"torch has no {name!r} here: {str(error)[:200]}") from error
    return name


Device: TypeAlias = Annotated[
    str,
    typer.Option(
        "--device", help="device of models and prompts: cpu, cuda, cuda:1, …", callback=known_device
    ),
]
Out: TypeAlias = Annotated[Path, typer.Option("--out", help="folder for the results")]
Smoke: TypeAlias = Annotated[
    bool, typer.Option("--smoke", help="try the script: tiny sizes and few steps")
]
Runs: TypeAlias = Annotated[
    Path, typer.Option("--runs", help="folder of checkpoints: an interrupted run resumes from it")
]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", help="seed of the random numbers")]
Rounds: TypeAlias = Annotated[
    int, typer.Option("--rounds", help="number of times that each measurement is repeated")
]
ModelsDir: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--models-dir",
        envvar="ATTN_ONLY_LENS_MODELS",
        help="folder of trained models, one folder for each",
    ),
]
SmolLM2: TypeAlias = Annotated[
    Path | None, typer.Option("--smollm2", help="folder of SmolLM2-135M, made by `make smollm2`")
]
