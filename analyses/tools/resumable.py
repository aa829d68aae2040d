"""The training loop of all studies, which writes a curve and checkpoints, and resumes from them.

An interrupted run resumes from its last checkpoint; the result is the same, bit for bit.

    run.txt, study.json   the settings of the run; a folder with other settings is refused
    curve.csv             one row for each evaluated step
    checkpoint.safetensors
    STEP.safetensors      the weights at that step, before the model grows
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from analyses.tools.growth_training import Training
from attn_only_lens.storage import atomic_write, write_text


def claim(said: Path, settings: str) -> None:
    """Write what the runs of a folder are, the first time.

    Raises:
        ValueError: the folder holds runs of another study.
    """
    if said.exists() and said.read_text("utf-8") != settings:
        raise ValueError(f"{said} is of another study: choose another --runs")
    write_text(said, settings)


def train(
    training: Training,
    until: int,
    folder: Path,
    step: Callable[[Training, int], Mapping[str, int]],
    figures: Callable[[Any], Mapping[str, float]],
    totals: Mapping[str, int],
    *,
    check_every: int,
    save_every: int,
    tick: Callable[[int], Any],
    first: int = 0,
    kept: Iterable[int] = (),
) -> pd.DataFrame:
    """Train from where the folder's checkpoint stands to the end.

    Args:
        training: at its start; it grows by its own schedule.
        until: the number of steps.
        folder: of this run alone.
        step: does one step, and returns what it adds to each total.
        figures: of a model, such as its loss on text that it has not read.
        totals: such as flops, and where they start.
        check_every: steps from one row of the curve to the next.
        save_every: steps from one checkpoint to the next, a multiple of `check_every`.
        tick: told how many steps were done.
        first: the steps that are done when it starts.
        kept: steps whose weights are kept.

    Returns:
        A row at the start, at each checked step, and at the end: `step`, the totals and the seconds
        until then, the figures.
    """
    checkpoint, curve = folder / "checkpoint.safetensors", folder / "curve.csv"
    rows: list[dict[str, Any]] = []
    spent, cpu, wall = dict(totals), 0.0, 0.0
    if not checkpoint.exists():
        training.done = first
    else:
        training.resume(checkpoint)
        written = pd.read_csv(curve)
        *rows, last = written.query(f"step <= {training.done}").to_dict("records")
        spent = {name: last[name] for name in spent}
        cpu, wall = last["cpu_seconds"], last["wall_seconds"]
    tick(training.done - first)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall

    def note(number: int) -> None:
        seconds = {
            "cpu_seconds": time.process_time() - cpu,
            "wall_seconds": time.perf_counter() - wall,
        }
        rows.append({"step": number} | spent | seconds | dict(figures(training.model)))
        if number % save_every == 0 or number == until:
            # The curve may be ahead of the checkpoint, never behind it.
            write_text(curve, pd.DataFrame(rows).to_csv(index=False))
            training.save(checkpoint)

    stops = sorted({stop for stop in kept if first <= stop <= until})
    for stop in [*stops, until]:
        for number in training.steps(stop):
            if number % check_every == 0 or number == first:
                note(number)
            for name, more in step(training, number).items():
                spent[name] += more
            tick(1)
        if stop in stops and training.done == stop:
            keep(training.model, folder / f"{stop}.safetensors")
    note(until)
    return pd.DataFrame(rows)


def keep(model: Any, path: Path) -> None:
    """Write a model's weights, unless they are there."""
    if not path.exists():
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        with atomic_write(path) as partial:
            save_file(weights, partial)


@torch.no_grad()
def put_back(model: Any, path: Path) -> Any:
    """Put weights that were kept into a model of that size; return it."""
    weights = load_file(path)
    for name, tensor in model.named_parameters():
        tensor.copy_(weights.pop(name))
    assert not weights, f"{path} has weights that the model lacks: {', '.join(weights)}"
    return model
