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


def claim(path: Path, settings: str) -> None:
    """Write the settings of a folder's runs when it is first used.

    Raises:
        ValueError: the folder holds runs of another study.
    """
    if path.exists() and path.read_text("utf-8") != settings:
        raise ValueError(f"{path} is of another study: choose another --runs")
    write_text(path, settings)


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
    """Train to the end, resuming from the folder's checkpoint if there is one.

    Args:
        training: the training before its first step; it grows by its own schedule.
        until: the total number of steps.
        folder: a folder for this run only.
        step: does one step, and returns what it adds to each total.
        figures: returns measures of a model, such as its loss on held-out text.
        totals: initial values of totals, such as flops.
        check_every: the number of steps between rows of the curve.
        save_every: the number of steps between checkpoints, a multiple of `check_every`.
        tick: called with the number of steps that were done since the last call.
        first: the number of steps that are done before the start.
        kept: steps whose weights are kept.

    Returns:
        A frame with a row at the start, at each checked step, and at the end: `step`, the totals
        and the seconds so far, and the figures.

    Raises:
        ValueError: the folder's checkpoint has done more steps than `until`.
    """
    checkpoint, curve = folder / "checkpoint.safetensors", folder / "curve.csv"
    rows: list[dict[str, Any]] = []
    spent, cpu, wall = dict(totals), 0.0, 0.0
    if not checkpoint.exists():
        training.done = first
    else:
        training.resume(checkpoint)
        if training.done > until:
            done = f"{folder} has a training of {training.done} steps"
            raise ValueError(f"{done}; got until={until}: use another folder")
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
            # The curve may be ahead of the checkpoint, but never behind it.
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
    """Write a model's weights, unless the file exists."""
    if not path.exists():
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        with atomic_write(path) as partial:
            save_file(weights, partial)


@torch.no_grad()
def put_back(model: Any, path: Path) -> Any:
    """Load kept weights into a model with the same sizes, and return the model."""
    weights = load_file(path)
    for name, tensor in model.named_parameters():
        tensor.copy_(weights.pop(name))
    assert not weights, f"{path} has weights that the model lacks: {', '.join(weights)}"
    return model
