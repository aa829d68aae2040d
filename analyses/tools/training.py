"""The training loop of all studies: it grows models by a schedule, and resumes after interruptions.

An interrupted run resumes from its last checkpoint; the result is the same, bit for bit.

    run.txt, study.txt    the settings of the run; a folder with other settings is refused
    curve.csv             one row for each evaluated step
    checkpoint.safetensors
    STEP.safetensors      the weights at that step, before the model grows

A checkpoint holds the parameters and the optimizer's moments, but not the architecture. To resume,
the schedule is first repeated on the initial model, and then the checkpoint's tensors are loaded.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from attn_only_lens import grow
from attn_only_lens.growth.expansion.expansion import Expansion
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.models._grow import Grown
from attn_only_lens.storage import atomic_write, write_text


@dataclass
class Training:
    """A plain loop of PyTorch, in which the model grows at the steps of a schedule.

    Take `training.model` and `training.optimizer` anew in every step: growth replaces both.

    Attributes:
        model: the current model; the initial one is trained in place until it first grows.
        optimizer: its settings do not change, except those that every step sets.
        schedule: expansions by the step before which they happen.
        init: the initialiser of free entries; by default the distribution of the initial weights.
        seed: the seed of the first growth; each later growth adds 1.
        done: the number of finished steps.
        history: all growths so far.
    """

    model: Any
    optimizer: Optimizer
    schedule: Mapping[int, Expansion]
    init: Initialiser | None = None
    seed: int = 0
    done: int = 0
    history: tuple[Grown, ...] = ()

    def steps(self, until: int) -> Iterator[int]:
        """Yield the remaining steps, after growing the model as scheduled before each.

        A step counts as done when the loop's body ends, and not if it is interrupted.
        """
        for step in range(self.done, until):
            if step in sorted(self.schedule)[len(self.history) :]:
                self._grow(step)
            yield step
            self.done = step + 1

    def _grow(self, step: int) -> None:
        """Grow model and optimizer as the schedule says for a step."""
        seed = self.seed + len(self.history)
        grown = grow(self.model, self.schedule[step], init=self.init, seed=seed)
        self.optimizer = grown.optimizer(self.optimizer, self.model)
        self.model, self.history = grown.model, (*self.history, grown)

    def save(self, path: Path) -> None:
        """Write the parameters, the optimizer's moments and the number of steps."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            for kind, moment in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = moment
        metadata = {"done": str(self.done), "growths": str(len(self.history))}
        with atomic_write(path) as partial:
            save_file({name: x.contiguous() for name, x in tensors.items()}, partial, metadata)

    @torch.no_grad()
    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of a training that was made in the same way."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        for step in sorted(self.schedule)[: int(metadata["growths"])]:
            self._grow(step)
        parameters = dict(self.model.named_parameters())
        for key, tensor in load_file(path).items():
            kind, _, name = key.partition("/")
            parameter = parameters[name]
            if kind == "model":
                parameter.copy_(tensor)
            else:  # AdamW's count of steps stays on the CPU
                device = "cpu" if kind == "step" else parameter.device
                self.optimizer.state[parameter][kind] = tensor.to(device)
        self.done = int(metadata["done"])


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
    rows: list[dict[Any, Any]] = []
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
