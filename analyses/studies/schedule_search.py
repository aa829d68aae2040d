"""Does it pay to search for a growth schedule? Addition modulo 43, with a small search space.

Section 5 of the growth paper proposes architecture search for schedules of growth. A schedule says
how large the model is at the start, when it grows, which sizes grow, how much, and how new entries
are initialized. `Space` states all schedules that can be drawn. Every schedule ends with the same
full size, at half of the budget or earlier. All runs have the same budget: the flops of `steps`
training steps at full size. Small models are cheaper, so they train for more steps.

The score of a run at a budget is the mean of log10(loss on held-out pairs) over the last fifth of
this budget. Lower is better, and -1 means a tenth of the loss. `Schedule.events` are at fractions
of the full budget, so a run with a small budget is the beginning of a run with the full budget.

    random      draws `n_random` schedules, and trains each with one seed and the full budget
    halving     draws `n_halving` schedules, trains each with one seed to 1/9 of the budget, and
                then the best third of them to 1/3, and the best third of those to the end. It
                takes as many flops as `random`
    re-draws    a null: as `random`, but all schedules are the same hand-made one ("early")
    evaluation  the best schedule of each search, and the hand-made schedules, on new seeds

Every run of a search has a seed of its own, and a seed determines the pairs that are trained on,
the initial weights and the new entries. In the evaluation, all arms have the same seeds.

Hand-made schedules are "full" (full size from the start), "half" (small, then full at half of the
budget), and "early" and "late" of `growth_modular_addition.py`:
neurons, then heads, then width. There, the full-size model solved the task with 176 Gflop, and
"early" grew at about .035, .08 and .13 of these flops, and "late" at .18, .24 and .31. Here, it
solves the task with about .6 of the budget, so fractions are about .6 times as large.

Predictions, written before the runs. Scores and their differences are in powers of ten of the loss.
Intervals are 95 % intervals over the evaluation's seeds, of paired differences.

1.  On new seeds, the best schedule of random search has a lower score than "full", and the interval
    of the difference excludes 0.
2.  So does the best schedule of halving.
3.  Neither of them beats the best hand-made schedule: both intervals include 0, or the hand-made
    schedule is better.
4.  The two searches do not differ: the interval of the difference of their best schedules
    includes 0.
5.  Winner's curse: the score of each best schedule is worse on new seeds than in its search, by .5
    or more.
6.  Much of this is luck with seeds: in the re-draws, the gap between the best and the mean is at
    least half of this gap in random search.
7.  Over random schedules, the rank correlation between scores at 1/3 of the budget and at the full
    budget is above .5.
8.  Between 1/9 of the budget and the full budget, it is below .3.
9.  Schedules whose first model is cheaper have lower scores: the interval of the slope over random
    schedules excludes 0.
10. Initialisation does not matter: the three intervals of the mean score all overlap.

What we knew: a model of full size and a small model that does not grow were trained with 3 seeds
(901 to 903) to choose the modulus, the rate and the budget. The full-size model solved the task (an
accuracy of .99) with 25, 27 and 40 Gflop, and the small one (width 24, 2 heads, 32 neurons) with 15
Gflop, never, and 21 Gflop. To measure the time of a run, eight random schedules were trained with
one seed each (scores from .7 to -2.6), and the hand-made ones with seed 901: "full" -1.6, "early"
-2.2, "late" -3.5, "half" -5.0. In `growth_modular_addition.md`, a small start saved
flops in two of three seeds.

The number of schedules was 42, 28, 14 and again 28, because the machine was busy and then free. No
score was seen before the last change.

    python -m analyses.studies.schedule_search --out analyses/results
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from analyses.studies.growth_measures import step_flops
from analyses.studies.schedule_report import figure, page
from analyses.tools.benching import machine
from analyses.tools.growth_training import Training
from analyses.tools.options import Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim, train, training_seconds
from analyses.tools.study_files import as_stored, keep
from analyses.tools.train_modular_addition import Recipe, adamw, fast_logits, loss_of, pairs, step
from attn_only_lens import expansion as ex
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.tl import HookedTransformer

Sizes: TypeAlias = tuple[int, int, int, int]
SIZES = ("d_mlp", "n_heads", "d_model", "d_head")
RUNGS = (1 / 9, 1 / 3, 1.0)
KEPT = 3  # one of this many schedules goes on to the next rung
DIGITS = "%.5g"
WINDOW = 0.8  # a score averages over the budget's part after this fraction
INITS = {"own": None, "cancelling": ex.init.cancelling(), "splits": ex.init.splits()}


@dataclass(frozen=True)
class Schedule:
    """Sizes at the start, and sizes after each growth, in the order of `SIZES`.

    Attributes:
        start: the sizes of the first model.
        events: fractions of the full budget, each with the sizes from then on.
        init: the initialization of new entries, a key of `INITS`.
    """

    start: Sizes
    events: tuple[tuple[float, Sizes], ...] = ()
    init: str = "own"

    @property
    def stages(self) -> list[Sizes]:
        """Return all sizes, in order."""
        return [self.start, *(sizes for _, sizes in self.events)]


@dataclass(frozen=True)
class Space:
    """All schedules that can be drawn.

    Attributes:
        sizes: for each of `SIZES`, the values at the start and in between; the last is the full
            size. The model has one layer, so layers do not grow.
        n_events: the number of growths; growths that would change nothing are left out.
        when: the first and last fraction of the budget at which a model grows; log-uniform.
        inits: initializations of new entries.
    """

    sizes: tuple[tuple[int, ...], ...] = (
        (16, 32, 64, 128),
        (1, 2, 4),
        (16, 24, 32, 48),
        (4, 8, 12),
    )
    n_events: tuple[int, ...] = (1, 2, 3)
    when: tuple[float, float] = (0.02, 0.5)
    inits: tuple[str, ...] = tuple(INITS)

    @property
    def full(self) -> Sizes:
        """Return the full sizes."""
        d_mlp, n_heads, d_model, d_head = (values[-1] for values in self.sizes)
        return d_mlp, n_heads, d_model, d_head

    def draw(self, random: np.random.Generator) -> Schedule:
        """Draw a schedule.

        Each size starts at a random value, and becomes full in a random growth. If it can take an
        intermediate value in an earlier growth, it does so with probability 1/2.
        """
        n = int(random.choice(self.n_events))
        low, high = np.log(self.when)
        fractions = np.sort(np.exp(random.uniform(low, high, n)))
        table = np.empty((n + 1, len(SIZES)), dtype=int)  # sizes by stage
        for column, values in enumerate(self.sizes):
            first, last = int(random.integers(len(values))), int(random.integers(n))
            table[:, column] = values[first]
            between = values[first + 1 : -1]
            if between and last and random.random() < 0.5:
                table[int(random.integers(last)) + 1 :, column] = int(random.choice(between))
            table[last + 1 :, column] = values[-1]
        stages: list[Any] = [tuple(row) for row in table.tolist()]
        events = tuple(
            (round(float(fraction), 4), after)
            for fraction, before, after in zip(fractions, stages, stages[1:], strict=False)
            if after != before
        )
        return Schedule(stages[0], events, str(random.choice(self.inits)))


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    modulus: int = 43
    train_fraction: float = 0.7
    lr: float = 3e-3
    steps: int = 378  # at full size: the budget
    space: Space = field(default_factory=Space)
    small: Sizes = (32, 2, 24, 12)
    early: tuple[float, float, float] = (0.02, 0.05, 0.08)
    late: tuple[float, float, float] = (0.1, 0.15, 0.2)
    n_random: int = 28
    n_halving: int = 108
    n_seeds: int = 10
    check_every: int = 5

    def recipe(self, sizes: Sizes, seed: int) -> "SizedRecipe":
        """Return the recipe for a model of these sizes."""
        d_mlp, n_heads, d_model, d_head = sizes
        return SizedRecipe(
            modulus=self.modulus,
            d_model=d_model,
            n_heads=n_heads,
            d_mlp=d_mlp,
            d_head=d_head,
            seed=seed,
            train_fraction=self.train_fraction,
            lr=self.lr,
        )

    def handmade(self) -> dict[str, Schedule]:
        """Return the hand-made schedules by name."""
        full, small = self.space.full, self.small
        by_neurons = (full[0], *small[1:])
        by_heads = (*full[:2], *small[2:])
        steps = (by_neurons, by_heads, full)
        return {
            "full": Schedule(full),
            "early": Schedule(small, tuple(zip(self.early, steps, strict=True))),
            "late": Schedule(small, tuple(zip(self.late, steps, strict=True))),
            "half": Schedule(small, ((0.5, full),)),
        }


SMOKE = Study(
    modulus=7,
    steps=36,
    space=Space(((3, 5, 11), (1, 2, 3), (5, 6, 9), (2, 3, 4))),
    small=(5, 2, 6, 4),
    n_random=5,
    n_halving=9,
    n_seeds=2,
    check_every=2,
)


@dataclass(frozen=True)
class SizedRecipe(Recipe):
    """A recipe in which the head size does not follow from the width."""

    d_head: int = 12

    def config(self) -> dict[str, Any]:
        """Return keyword arguments for HookedTransformerConfig."""
        return super().config() | {"d_head": self.d_head}


@cache
def cost_of_step(recipe: SizedRecipe) -> int:
    """Return the flops of one training step, counted by torch."""
    tokens, answers, trained = pairs(recipe)
    return step_flops(recipe.model(), tokens[trained], answers[trained])


def expansion(before: Sizes, after: Sizes) -> Expansion:
    """Return the expansion from some sizes to others."""
    d_mlp, n_heads, d_model, d_head = (new - old for old, new in zip(before, after, strict=True))
    steps: list[Expansion] = [ex.AddNeurons(d_mlp)] if d_mlp else []
    steps += [ex.AddHeads(n_heads)] if n_heads else []
    steps += [ex.WidenStream(d_model)] if d_model else []
    steps += [ex.WidenQueriesAndKeys(d_head), ex.WidenValues(d_head)] if d_head else []
    return ex.compose(*steps)


@dataclass(frozen=True)
class Plan:
    """A schedule in steps.

    Attributes:
        growths: the expansion before each step.
        steps: the number of steps in each stage.
        costs: the flops of a step in each stage.
    """

    growths: dict[int, Expansion]
    steps: tuple[int, ...]
    costs: tuple[int, ...]

    @classmethod
    def of(cls, study: Study, schedule: Schedule) -> "Plan":
        """Divide the budget into steps: each growth and the end are within a step of their flops.

        A stage has at least one step.
        """
        costs = tuple(cost_of_step(study.recipe(sizes, 0)) for sizes in schedule.stages)
        budget = study.steps * cost_of_step(study.recipe(study.space.full, 0))
        spent, steps = 0, []
        for cost, until in zip(costs, [*(when for when, _ in schedule.events), 1.0], strict=True):
            steps.append(max(1, round((until * budget - spent) / cost)))
            spent += steps[-1] * cost
        sizes = zip(schedule.stages, schedule.stages[1:], strict=False)
        firsts = np.cumsum(steps)[:-1].tolist()
        growths = {step: expansion(*pair) for step, pair in zip(firsts, sizes, strict=True)}
        return cls(growths, tuple(steps), costs)

    @property
    def flops(self) -> int:
        """Return the flops of the whole run."""
        return sum(n * cost for n, cost in zip(self.steps, self.costs, strict=True))

    def until(self, flops: float) -> int:
        """Return the number of steps that these flops pay for."""
        done = 0
        for n, cost in zip(self.steps, self.costs, strict=True):
            affordable = min(n, int((flops + 0.5) // cost))
            done, flops = done + affordable, flops - affordable * cost
            if affordable < n:
                break
        return done

    def cost_at(self, number: int) -> int:
        """Return the flops of a step."""
        ends = np.cumsum(self.steps)
        return self.costs[int(np.searchsorted(ends, number, side="right"))]


@torch.no_grad()
def held_out(model: HookedTransformer, tokens: Tensor, answers: Tensor) -> dict[str, float]:
    """Return the loss and the accuracy on held-out pairs."""
    logits = fast_logits(model, tokens)
    hits = logits.argmax(-1) == answers
    return {
        "test_loss": loss_of(logits, answers).item(),
        "test_accuracy": hits.double().mean().item(),
    }


def already(folder: Path, until: int) -> pd.DataFrame | None:
    """Return the curve of a run that has done these steps; None if it has not."""
    path = folder / "curve.csv"
    curve = pd.read_csv(path) if path.exists() else pd.DataFrame({"step": [-1]})
    done = curve["step"].iloc[-1] >= until and (folder / "checkpoint.safetensors").exists()
    return curve[curve["step"] <= until] if done else None


def score(curve: pd.DataFrame, budget: float, check_every: int) -> float:
    """Return the mean of log10(held-out loss) over the last fifth of a budget."""
    checked = curve[(curve["step"] % check_every == 0) & (curve["flops"] <= budget + 0.5)]
    window = checked[checked["flops"] > WINDOW * budget]
    window = window if len(window) else checked.iloc[-1:]
    return float(np.log10(window["test_loss"].clip(lower=1e-12)).mean())


@dataclass(frozen=True)
class Trainer:
    """Trains schedules, each run in a folder of its own, from which it resumes."""

    study: Study
    folder: Path
    tick: Callable[[int], Any] = lambda _: None

    def training(self, schedule: Schedule, plan: Plan, seed: int) -> Training:
        """Return a training before its first step."""
        recipe = self.study.recipe(schedule.start, seed)
        model = recipe.model()
        init = INITS[schedule.init]
        return Training(model, adamw(recipe, model), plan.growths, init=init, seed=seed)

    def run(
        self, name: str, schedule: Schedule, seed: int, rung: int = len(RUNGS) - 1
    ) -> dict[str, Any]:
        """Train to a rung, and return a row: the schedule, its scores, and the flops."""
        study, plan = self.study, Plan.of(self.study, schedule)
        tokens, answers, trained = pairs(study.recipe(schedule.start, seed))
        budget = plan.flops

        def one(training: Training, number: int) -> dict[str, int]:
            step(training.model, training.optimizer, tokens[trained], answers[trained])
            return {"flops": plan.cost_at(number)}

        until, folder = plan.until(RUNGS[rung] * budget), self.folder / f"{name}-{seed}"
        curve = already(folder, until)
        if curve is None:
            curve = train(
                self.training(schedule, plan, seed),
                until,
                folder,
                one,
                lambda model: held_out(model, tokens[~trained], answers[~trained]),
                {"flops": 0},
                check_every=study.check_every,
                save_every=10_000 * study.check_every,
                tick=lambda _: None,
            )
        self.tick(1)
        solved = curve.loc[curve["test_accuracy"] >= 0.99, "flops"]
        scores = {
            f"score_{i}": score(curve, share * budget, study.check_every) if i <= rung else math.nan
            for i, share in enumerate(RUNGS)
        }
        return {
            "name": name,
            "seed": seed,
            "rung": rung,
            "schedule": json.dumps(asdict(schedule)),
            **scores,
            "loss": curve["test_loss"].iloc[-1],
            "accuracy": curve["test_accuracy"].iloc[-1],
            "solved": solved.iloc[0] / budget if len(solved) else math.nan,
            "start_cost": plan.costs[0],
            "flops": curve["flops"].iloc[-1],
            "cpu_seconds": curve["cpu_seconds"].iloc[-1],
        }


def drawn(study: Study, n: int, seed: int) -> list[Schedule]:
    """Draw schedules."""
    random = np.random.default_rng(seed)
    return [study.space.draw(random) for _ in range(n)]


def searched(
    trainer: Trainer, search: str, schedules: Sequence[Schedule], first: int
) -> pd.DataFrame:
    """Train schedules with the full budget; their seeds start at `first`."""
    rows = [
        trainer.run(f"{search}-{number}", schedule, first + number)
        for number, schedule in enumerate(schedules)
    ]
    return pd.DataFrame(rows).assign(search=search)


def best(rows: pd.DataFrame, rung: int, n: int = 1) -> list[str]:
    """Return the names of the runs with the lowest scores at a rung."""
    results = rows.set_index("name")[f"score_{rung}"].dropna()
    return results.sort_values(kind="stable").index[:n].tolist()


def halved(trainer: Trainer, schedules: Sequence[Schedule], first: int) -> pd.DataFrame:
    """Return a row for each run of successive halving, with the scores up to its last rung."""
    names = {f"halving-{number}": number for number in range(len(schedules))}
    rows: dict[str, dict[str, Any]] = {}
    left = list(names)
    for rung in range(len(RUNGS)):
        for name in left:
            number = names[name]
            rows[name] = trainer.run(name, schedules[number], first + number, rung)
        left = best(pd.DataFrame(rows.values()), rung, max(1, len(left) // KEPT))
    return pd.DataFrame(rows.values()).assign(search="halving")


def schedule_of(row: Any) -> Schedule:
    """Return the schedule of a row."""
    stored = json.loads(row["schedule"])
    events = tuple((when, tuple(sizes)) for when, sizes in stored["events"])
    return Schedule(tuple(stored["start"]), events, stored["init"])


def chosen(rows: pd.DataFrame) -> Schedule:
    """Return the schedule of a search with the best score at full budget."""
    (name,) = best(rows, len(RUNGS) - 1)
    return schedule_of(rows[rows["name"] == name].iloc[0])


def at_flops(curve: pd.DataFrame, budget: float) -> pd.DataFrame:
    """Return the held-out loss at each twentieth of the budget, for the figure."""
    shares = np.arange(1, 21) / 20
    last = np.searchsorted(curve["flops"], shares * budget + 0.5, side="right") - 1
    return pd.DataFrame({"share": shares, "loss": curve["test_loss"].to_numpy()[last]})


def trained(study: Study, folder: Path) -> dict[str, pd.DataFrame]:
    """Do both searches, the null and the evaluation; return tables of runs and of curves.

    Raises:
        ValueError: the folder holds runs of another study.
    """
    claim(folder / "study.json", json.dumps(asdict(study), indent=2) + "\n")
    handmade, n_rungs = study.handmade(), sum(study.n_halving // KEPT**i for i in range(3))
    n = 2 * study.n_random + n_rungs + study.n_seeds * (len(handmade) + 2)
    with tqdm(total=n, unit="run", mininterval=10) as bar:
        trainer = Trainer(study, folder, bar.update)
        random = searched(trainer, "random", drawn(study, study.n_random, 1), 1000)
        halving = halved(trainer, drawn(study, study.n_halving, 2), 2000)
        again = [handmade["early"]] * study.n_random
        redraws = searched(trainer, "re-draws", again, 3000)
        arms = {"random search": chosen(random), "halving": chosen(halving)} | handmade
        rows = [
            trainer.run(f"evaluation-{arm}", schedule, 5000 + seed) | {"name": arm}
            for seed in range(study.n_seeds)
            for arm, schedule in arms.items()
        ]
    curves = []
    for row, (arm, schedule) in product(rows, arms.items()):
        if row["name"] == arm:
            curve = pd.read_csv(folder / f"evaluation-{arm}-{row['seed']}" / "curve.csv")
            points = at_flops(curve, Plan.of(study, schedule).flops)
            curves.append(points.assign(arm=arm, seed=row["seed"]))
    evaluation = pd.DataFrame(rows).assign(search="evaluation")
    runs = pd.concat([random, halving, redraws, evaluation], ignore_index=True)
    return {"": runs, "curves": pd.concat(curves, ignore_index=True)}


def main(
    out: Out = Path("out/schedules"),
    runs_dir: Runs = Path("out/schedule-runs"),
    n_seeds: Seeds = 10,
    smoke: Smoke = False,
) -> None:
    """Search, evaluate, print; write the page, tables and figure (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    frames = as_stored(trained(study, runs_dir), DIGITS)
    about = {
        "study": asdict(study),
        "step": cost_of_step(study.recipe(study.space.full, 0)),
        "machine": machine("cpu"),
        "training_seconds": round(training_seconds(runs_dir)),
    }
    text = page(frames[""], json.loads(json.dumps(about)), " --smoke" if smoke else "")
    typer.echo(text)
    picture = figure(frames[""], frames["curves"])
    settings = {"device": "cpu", "smoke": smoke, **about}
    keep(__file__, out, text, frames, picture, started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
