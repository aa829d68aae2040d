"""When do new parts take over? Small English models that grow under more or less pressure.

*Capacity pressure* is the loss of a small model minus the loss of a larger one, both trained from
scratch for the same number of steps. It is measured before growth. Each ladder below changes one
size of a LLaMA with 2 layers, width 48, 4 heads and 48 neurons a layer:

    neurons   3, 12, 48, 192 a layer
    layers    1, 2, 4; new layers come last
    heads     1, 4, 16 a layer, each with 12 coordinates

A model of each size trains for `before` steps. Then it grows *to full* (to the last size of its
ladder) or *by one rung* (to the next size), and trains for `after` more steps. The rungs of a
ladder are equal: after one rung, the same fraction of all parts is new, whatever the size. So
shares can be compared between rungs without a correction. In models that grow to full, small models
get a larger fraction of new parts, so that even random labels "new" would hold more.

    grown                new entries as the model draws its own, output weights zero
    grown, equal loss    the grown model at the first of `checks` where its loss is no higher than
                         the loss of "not grown" at the end
    grown, other texts   grown with the same new entries, and trained on texts that no other arm of
                         the seed reads
    grown, strong decay  grown by one rung, if the size is in `strongly_decayed`; from then on, each
                         step of AdamW shrinks weights by 0.2 %, the same as in
                         `pressure_modular_addition.py`, and not by 0.04 %
    not grown            the small model, trained for as many steps
    full                 the larger size from the start, for as many steps in all

Texts, optimizer and loss are those of `english_runs.py`. All arms of a seed but "other texts" read
the same texts in the same order. `pressure_measures.py` defines what is measured, on prompts that
begin no sentence of the texts.

Predictions, written before the runs. Figures are means over tasks, then over seeds; ρ is Spearman's
correlation over the growths of a ladder, computed for each seed. Each holds for a ladder if the
mean over seeds says so.

1.  Over rungs, pressure ranks the share of new parts: ρ > .8.
2.  To full, pressure ranks the share of new parts: ρ > .8. (Random labels could give this.)
3.  Over rungs, pressure ranks the cost of new parts on texts, `text_new` / `text_all`: ρ > .8.
4.  New parts stay below parity in every growth: `new_share` < the fraction of new parts.
5.  Growth adds no drift: in every growth, the overlap of old parts' effects with their effects
    before growth, divided by the ceiling, is within .1 of the same ratio for "not grown".
6.  At equal loss it is the same: within .1 of "not grown", in every growth to full.
7.  Two trainings of a grown model on different texts agree better with each other than each of them
    agrees with the model before growth.
8.  New parts stand in for each other: in every growth, patching them together costs more than the
    sum of patching each one alone (`joint` > `single`).
9.  Patching new neurons or heads together costs less than patching as many random directions, in
    every growth.
10. New neurons act through values: `by_pattern` < 1/3, and within .1 of that of old neurons.
11. Weight decay, and not only pressure, moves effects into new neurons: with strong decay, their
    share is larger by .1 or more. (Added later, before any model
    on Small English had grown.)

What we knew: five models with seed 100 had been trained for up to 1,000 steps to measure the cost
of a step and to choose sizes and steps (all with batches of 32 texts). After 1,000 steps at a rate
of 0.006, models with 6, 24 and 192 neurons had losses of 2.155, 2.105 and 2.185; after 600 steps at
a rate of 0.003, models with 1 and 2 layers had losses of 2.190 and 2.211. So pressure is small or
negative at these lengths: more parts first slow training down. We therefore chose ladders that
begin with few parts. The sizes that we planned first were 6, 12, 24, 48 and 96 neurons. No model on
Small English had grown.

    python -m analyses.studies.pressure_small_english --out analyses/results
"""

import io
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from tqdm import tqdm

from analyses.studies import circuit_measures, pressure_measures
from analyses.studies.circuit_measures import Look, Pair, Question
from analyses.studies.english_runs import Done, Plan, Sizes, figures, model_at, run, texts_once
from analyses.studies.growth_small_english import between, inserted
from analyses.studies.pressure_report import english_page, figure
from analyses.tools.benching import machine
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim, training_seconds
from analyses.tools.study_files import as_stored, keep
from analyses.tools.train_small_english import questions, tokenizer
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.storage import write_text

SIZE = {"neurons": "d_mlp", "heads": "n_heads", "layers": "n_layers"}
OTHER_TEXTS = 100  # more than there are seeds
DIGITS = "%.4g"
BASE = Sizes(2, 48, 4, 48, 12)


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    base: Sizes = BASE
    ladders: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "neurons": (3, 12, 48, 192),
            "layers": (1, 2, 4),
            "heads": (1, 4, 16),
        }
    )
    other_texts: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"neurons": (3,), "layers": (1,), "heads": (1,)}
    )
    strongly_decayed: dict[str, tuple[int, ...]] = field(  # by one rung
        default_factory=lambda: {"neurons": (12, 48)}
    )
    strong_decay: float = 0.5
    tasks: tuple[str, ...] = ("number, prepositional", "number, relative", "brackets, simple")
    before: int = 600
    after: int = 350
    decay: int = 100  # steps at the end over which the rate falls
    checks: tuple[int, ...] = (100, 200, 250, 275, 300, 325)  # steps after growth
    lr: float = 4e-3
    rows: int = 16
    save_every: int = 350
    n_seeds: int = 5
    prompts: int = 32
    texts: tuple[int, int] = (128, 1024)  # held-out texts: for ablations, for losses
    draws: int = 3  # of random labels and directions


SMOKE = Study(
    base=Sizes(1, 8, 2, 6, 6),
    ladders={"neurons": (3, 6, 12), "layers": (1, 2), "heads": (1, 2)},
    strongly_decayed={"neurons": (6,)},
    other_texts={"neurons": (3,), "layers": (1,), "heads": (1,)},
    tasks=("gender",),
    before=2,
    after=4,
    decay=2,
    checks=(2,),
    lr=0.05,
    rows=2,
    save_every=2,
    prompts=3,
    texts=(3, 5),
    draws=2,
)


@dataclass(frozen=True)
class Case:
    """Growth from one size of a ladder to another."""

    ladder: str
    small: int
    full: int

    def sizes(self, study: Study) -> tuple[Sizes, Sizes]:
        """Return the sizes of the model before and after growth."""
        name = SIZE[self.ladder]
        return replace(study.base, **{name: self.small}), replace(study.base, **{name: self.full})

    def expansion(self, study: Study) -> Expansion:
        """Return the expansion from one size to the other."""
        if self.ladder == "layers":
            return inserted(tuple(range(self.small, self.full)))
        return between(*self.sizes(study))


def cases(study: Study, ladder: str) -> Iterator[Case]:
    """Yield the growths of a ladder: to full from each size, and to the next size."""
    sizes = study.ladders[ladder]
    for small, following in pairwise(sizes):
        for full in dict.fromkeys((following, sizes[-1])):
            yield Case(ladder, small, full)


@dataclass(frozen=True)
class Asked:
    """The prompts of each task, and as many others."""

    first: dict[str, Question]
    others: dict[str, Question]

    @classmethod
    def of(cls, study: Study, device: str) -> "Asked":
        """Return prompts that begin no sentence of the texts that models train on."""
        made, n, of = questions(2 * study.prompts), study.prompts, tokenizer()
        first, others = (
            {task: Question.of(made[task], of, some).to(device) for task in study.tasks}
            for some in (slice(n), slice(n, None))
        )
        return cls(first, others)


@dataclass(frozen=True)
class SeedRuns:
    """The training runs of one seed, which resume from the checkpoints in a folder."""

    study: Study
    seed: int
    folder: Path
    device: str

    def go(self, name: str, plan: Plan, start: Done | None = None) -> Done:
        """Train, or load what is trained."""
        first = start.plan.steps if start else 0
        with tqdm(
            total=plan.steps - first, desc=f"{name}, seed {self.seed}", mininterval=10
        ) as bar:
            return run(
                plan, self.folder / f"{self.seed}-{name}", self.device, bar.update, start=start
            )

    def trunk(self, sizes: Sizes) -> Done:
        """Return a model of this size before growth."""
        study = self.study
        plan = Plan(
            sizes,
            study.before,
            seed=self.seed,
            data_seed=self.seed + 1,
            growth_seed=self.seed,
            lr=study.lr,
            rows=study.rows,
            check_every=study.before,
            save_every=study.before,
            read=study.texts[0],
            asked=0,
        )
        return self.go(named(sizes), plan)

    def after(self, trunk: Done, name: str, **settings: Any) -> Done:
        """Train a model of `trunk` further, with these settings of the plan."""
        study = self.study
        every = {"check_every": study.save_every, "save_every": study.save_every}
        plan = replace(
            trunk.plan, steps=study.before + study.after, decay=study.decay, **(every | settings)
        )
        return self.go(f"{named(trunk.plan.sizes)}-{name}", plan, trunk)

    def alone(self, sizes: Sizes) -> Done:
        """Return the model of this size that does not grow, at the end."""
        return self.after(self.trunk(sizes), "alone")

    def grown(self, case: Case, *, other_texts: bool = False, strong_decay: bool = False) -> Done:
        """Return a grown model at the end."""
        study, trunk = self.study, self.trunk(case.sizes(self.study)[0])
        settings: dict[str, Any] = {"schedule": {study.before: case.expansion(study)}}
        name = f"{case.ladder}-{case.full}"
        if other_texts:
            name, settings["data_seed"] = f"{name}-texts", trunk.plan.data_seed + OTHER_TEXTS
        elif strong_decay:
            name, settings["weight_decay"] = f"{name}-decay", study.strong_decay
        elif case.full == study.ladders[case.ladder][-1]:
            settings["kept"] = tuple(study.before + check for check in study.checks)
        return self.after(trunk, name, **settings)

    def at_equal_loss(self, case: Case, grown: Done, loss: float) -> Any:
        """Return the grown model at the first check with at most this loss, or at the end."""
        trunk, study = self.trunk(case.sizes(self.study)[0]), self.study
        folder = self.folder / f"{self.seed}-{named(trunk.plan.sizes)}-{case.ladder}-{case.full}"
        for check in study.checks:
            model = model_at(grown, study.before + check, folder, start=trunk)
            if figures(model, study.texts[1], 0)["loss"] <= loss:
                return check, model
        return study.after, grown.model


def named(sizes: Sizes) -> str:
    """Return the name of a size, for folders."""
    return "{n_layers}L{n_heads}H{d_mlp}N".format(**asdict(sizes))


def loss_of(study: Study, model: Any) -> float:
    """Return the loss on the held-out texts."""
    return figures(model, study.texts[1], 0)["loss"]


def agreements(before: Look, now: Look, names: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return by task how far the effects of old parts agree: `overlap`, `correlation`, `kept`."""
    pair = Pair(before, now, names)
    columns = ("overlap", "overlap_chance", "correlation", "kept")
    measured = {task: circuit_measures.agreement(pair, task) for task in before.parts}
    return {task: {name: row[name] for name in columns} for task, row in measured.items()}


def measured_size(
    study: Study, runs: SeedRuns, sizes: Sizes, asked: Asked
) -> tuple[Look, dict[str, Any]]:
    """Return the effects in a model before growth, and rows for "not grown" and the ceiling."""
    trunk, alone = runs.trunk(sizes), runs.alone(sizes)
    before = pressure_measures.effects_of(trunk.model, asked.first)
    others = pressure_measures.effects_of(trunk.model, asked.others)
    after = pressure_measures.effects_of(alone.model, asked.first)
    names = {name: name for name in before.names}
    losses = {"before": loss_of(study, trunk.model), "after": loss_of(study, alone.model)}
    rows = {
        "ceiling": agreements(before, others, names),
        "not grown": agreements(before, after, names),
    }
    return before, {"losses": losses, "rows": rows}


def measured_case(
    study: Study, runs: SeedRuns, case: Case, before: Look, loss: float, asked: Asked
) -> list[dict[str, Any]]:
    """Return the rows of one growth, by arm and task.

    Args:
        study: the study.
        runs: of the seed.
        case: the growth.
        before: the effects in the small model.
        loss: of "not grown" at the end.
        asked: the prompts.
    """
    grown = runs.grown(case)
    provenance = grown.training.provenance
    assert provenance is not None
    new = {*provenance.new_heads, *provenance.new_neurons}
    old = {name: provenance[name] for name in before.names}
    rows: list[dict[str, Any]] = []

    def add(arm: str, model: Any, step: int) -> Look:
        look = pressure_measures.effects_of(model, asked.first, new)
        agreement = agreements(before, look, old)
        about = {"arm": arm, "step": step, "loss": loss_of(study, model)}
        for task in study.tasks:
            shares = pressure_measures.new_parts(look, task, new)
            rows.append(about | {"task": task} | agreement[task] | shares)
        return look

    look = add("grown", grown.model, study.after)
    random = pressure_measures.random_costs(grown.model, asked.first, look, new, study.draws)
    patterns = pressure_measures.by_pattern(grown.model, asked.first, new)
    texts = texts_once(study.texts[0])
    costs = pressure_measures.text_costs(grown.model, texts, look.names, new)
    for row in rows:
        row |= random[row["task"]] | patterns[row["task"]] | costs
    full = runs.alone(case.sizes(study)[1]).model
    labelled = pressure_measures.effects_of(full, asked.first)
    labels = pressure_measures.random_costs(full, asked.first, labelled, new, study.draws)
    about = {"arm": "full", "step": study.after, "loss": loss_of(study, full)}
    rows += [about | {"task": task, "labels": labels[task]["labels"]} for task in study.tasks]
    sizes = study.ladders[case.ladder]
    by_one_rung = case.full == sizes[sizes.index(case.small) + 1]
    if by_one_rung and case.small in study.strongly_decayed.get(case.ladder, ()):
        decayed = runs.grown(case, strong_decay=True)
        add("grown, strong decay", decayed.model, study.after)
    if case.full == sizes[-1]:
        check, model = runs.at_equal_loss(case, grown, loss)
        add("grown, equal loss", model, check)
        if case.small in study.other_texts[case.ladder]:
            there = runs.grown(case, other_texts=True)
            second = add("grown, other texts", there.model, study.after)
            twins = agreements(look, second, {name: name for name in old.values()})
            for row in rows[-len(study.tasks) :]:
                row["twins"] = twins[row["task"]]["overlap"]
    return rows


def of_seed(
    study: Study, ladder: str, seed: int, folder: Path, device: str
) -> dict[str, pd.DataFrame]:
    """Train and measure one ladder with one seed: the tables of growths and of sizes."""
    done = folder / f"{ladder}-{seed}.json"
    if not done.exists():
        asked, runs = Asked.of(study, device), SeedRuns(study, seed, folder, device)
        sizes, growths, looks, losses = [], [], {}, {}
        for size in study.ladders[ladder]:
            look, measured = measured_size(
                study, runs, Case(ladder, size, size).sizes(study)[0], asked
            )
            looks[size], losses[size] = look, measured["losses"]
            label = {"ladder": ladder, "seed": seed, "size": size}
            sizes += [
                label | {"arm": arm, "task": task} | row | measured["losses"]
                for arm, by_task in measured["rows"].items()
                for task, row in by_task.items()
            ]
        for case in cases(study, ladder):
            small = losses[case.small]
            label = {"ladder": ladder, "seed": seed, "small": case.small, "full": case.full}
            label["pressure"] = small["before"] - losses[case.full]["before"]
            rows = measured_case(study, runs, case, looks[case.small], small["after"], asked)
            growths += [label | row for row in rows]
        frames = {"": pd.DataFrame(growths), "sizes": pd.DataFrame(sizes)}
        texts = {part: frame.to_csv(index=False) for part, frame in frames.items()}
        write_text(done, json.dumps(texts))
    texts = json.loads(done.read_text("utf-8"))
    return {part: pd.read_csv(io.StringIO(text)) for part, text in texts.items()}


def main(
    out: Out = Path("out/pressure"),
    runs_dir: Runs = Path("out/pressure-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    ladders: Annotated[
        list[str] | None,
        typer.Option("--ladder", help="train and measure only these, and write no page"),
    ] = None,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    some = ladders or list(study.ladders)
    claim(runs_dir / "study.txt", repr(replace(study, n_seeds=0)) + "\n")
    parts = [
        of_seed(study, ladder, seed, runs_dir, device) for ladder in some for seed in range(n_seeds)
    ]
    if ladders:
        return
    made = {part: pd.concat([frames[part] for frames in parts]) for part in parts[0]}
    frames = as_stored(made, DIGITS)
    about = {
        "study": asdict(study),
        "machine": machine(device),
        "training_seconds": round(training_seconds(runs_dir)),
    }
    text = english_page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, **about}
    keep(__file__, out, text, frames, figure(frames), started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
