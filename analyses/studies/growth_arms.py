"""The arms of the growth study: which models are trained, and for how long."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from analyses.studies.growth_measures import step_flops
from analyses.tools.growth_training import Training
from analyses.tools.resumable import claim, put_back, train
from analyses.tools.train_modular_addition import Recipe, adamw, fast_logits, loss_of, pairs, step
from attn_only_lens import expansion as ex
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.tl import HookedTransformer


@dataclass(frozen=True)
class Study:
    """The settings that determine the result."""

    modulus: int = 53
    small: dict[str, int] = field(
        default_factory=lambda: {"d_model": 24, "n_heads": 2, "d_mlp": 32}
    )
    full: dict[str, int] = field(
        default_factory=lambda: {"d_model": 48, "n_heads": 4, "d_mlp": 128}
    )
    early: tuple[int, ...] = (200, 300, 400)
    late: tuple[int, ...] = (1000, 1150, 1300)
    epochs: int = 3000
    train_fraction: float = 0.6
    lr: float = 2e-3
    check_every: int = 20
    save_every: int = 200
    n_seeds: int = 3
    n_compared: int = 128

    def recipe(self, size: str, seed: int) -> Recipe:
        """Return the recipe of the small or the full model."""
        return Recipe(
            modulus=self.modulus,
            seed=seed,
            train_fraction=self.train_fraction,
            lr=self.lr,
            **(self.small if size == "small" else self.full),
        )

    def schedule(self, epochs: tuple[int, ...]) -> dict[int, Expansion]:
        """Return the schedule from small to full: neurons, then heads, then width."""
        missing = {name: self.full[name] - self.small[name] for name in self.small}
        steps = (
            ex.AddNeurons(missing["d_mlp"]),
            ex.AddHeads(missing["n_heads"]),
            ex.WidenStream(missing["d_model"]),
        )
        return dict(zip(epochs, steps, strict=True))


SMOKE = Study(
    modulus=7,
    small={"d_model": 6, "n_heads": 2, "d_mlp": 5},
    full={"d_model": 9, "n_heads": 3, "d_mlp": 11},
    early=(3, 5, 7),
    late=(11, 13, 17),
    epochs=23,
    check_every=2,
    save_every=4,
    n_compared=10,
)


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    size: str
    schedule: dict[int, Expansion]
    growth_seed: int = 0


@dataclass(frozen=True)
class Run:
    """One finished run: an arm with a seed."""

    arm: str
    seed: int
    training: Training
    curve: pd.DataFrame
    before: HookedTransformer | None  # the model before its first growth


def arms(study: Study) -> dict[str, Arm]:
    """Return all arms by name."""
    return {
        "small": Arm("small", {}),
        "early": Arm("small", study.schedule(study.early)),
        "late": Arm("small", study.schedule(study.late)),
        "full": Arm("full", {}),
        "late again": Arm("small", study.schedule(study.late), growth_seed=1000),
    }


@torch.no_grad()
def figures_of(model: HookedTransformer, data: tuple[Tensor, ...]) -> dict[str, float]:
    """Return losses, the accuracy on held-out pairs, and sizes."""
    tokens, answers, trained = data
    logits = fast_logits(model, tokens)
    hits = logits.argmax(-1) == answers
    return {
        "train_loss": loss_of(logits[trained], answers[trained]).item(),
        "test_loss": loss_of(logits[~trained], answers[~trained]).item(),
        "test_accuracy": hits[~trained].double().mean().item(),
        **{name: getattr(model.cfg, name) for name in ("d_model", "n_heads", "d_mlp")},
    }


def run(
    study: Study, name: str, seed: int, folder: Path, device: str, tick: Callable[[int], Any]
) -> Run:
    """Train one arm to the end, resuming from its checkpoint."""
    arm = arms(study)[name]
    recipe = study.recipe(arm.size, seed)
    model = recipe.model().to(device)
    data = tuple(tensor.to(device) for tensor in pairs(recipe))
    tokens, answers, trained = data
    fed = tokens[trained], answers[trained]
    growth_seed = 1 + 10 * seed + arm.growth_seed
    training = Training(model, adamw(recipe, model), arm.schedule, seed=growth_seed)
    cost: dict[int, int] = {}  # flops of a step, by the number of growths so far

    def one(training: Training, _: int) -> dict[str, int]:
        stage = len(training.history)
        if stage not in cost:
            cost[stage] = step_flops(training.model, *fed)
        step(training.model, training.optimizer, *fed)
        return {"flops": cost[stage]}

    first_growth = sorted(arm.schedule)[:1]
    curve = train(
        training,
        study.epochs,
        folder,
        one,
        lambda model: figures_of(model, data),
        {"flops": 0},
        check_every=study.check_every,
        save_every=study.save_every,
        tick=tick,
        kept=first_growth,
    )
    ungrown = None
    for epoch in first_growth:
        ungrown = put_back(recipe.model(), folder / f"{epoch}.safetensors").to(device)
    return Run(name, seed, training, curve.rename(columns={"step": "epoch"}), ungrown)


def runs(study: Study, folder: Path, device: str) -> Iterator[Run]:
    """Yield the runs of every arm with every seed.

    Raises:
        ValueError: the folder holds runs of another study.
    """
    claim(folder / "study.json", json.dumps(asdict(study), indent=2) + "\n")
    names = list(arms(study))
    with tqdm(total=len(names) * study.n_seeds * study.epochs, unit="epoch") as bar:
        for seed in range(study.n_seeds):
            for name in names:
                bar.set_description(f"{name}, seed {seed}")
                yield run(study, name, seed, folder / f"{name}-{seed}", device, bar.update)
