"""Does growth save compute? Three questions about small language models (§5 of the growth paper).

All models are trained on Small English by `english_runs.py`. There are three seeds for weights,
texts and new entries; runs with the same seed read the same texts in the same order.

Which initialisation trains best? A small model trains, grows, and continues training; the arms
differ in how the new entries are initialised. The model grows in neurons, heads and width at once,
once with plain MLPs and LayerNorm, for which GradMax is defined, and once with gated MLPs and RMS
norm:

    own          the model's initial distribution, zero outputs: the growth paper's method
    zeros        zero everywhere, a control: new units are dead
    copies       old units copied with noise, outputs zero
    pairs        the model's own distribution; neurons and heads in pairs whose outputs cancel
    splits       Net2Net: a neuron or head keeps half of its output, copies have the rest; noise 0.1
    unequal      as in LEMON: a neuron or head keeps three quarters; noise 0.01
    GradMax      neurons whose outputs start with the largest gradient, outputs zero

All arms take the same flops; "small" never grows, and "full" has the full size from the start.

Does one checkpoint save compute for a family of sizes? The smallest model trains for n steps, with
a falling learning rate at the end. Each larger size grows from the previous size, as it was before
its rate fell, and also trains for n steps. So the grown family and the family from scratch take the
same flops at each size, and share the smallest model. There are two budgets n. But a grown model
has also used the steps and flops of its checkpoint, more than a model from scratch. So each size is
also trained from scratch for the flops of the whole line of checkpoints. (This arm was added after
the first run, and all arms were run again.)

Where should new layers go? Two layers become four, with new layers at the bottom, in the middle, at
the top, or above each old layer; the last also with copies (LLaMA Pro), and four from scratch.

Our predictions, written before the runs:

1.  Of the live starts none beats "own" at the end by more than seeds differ. AdamW moves an entry
    whose moments are fresh by about its learning rate (`fresh_steps`), however small its gradient:
    so zeros are gone after some ten steps. Right after growth, pairs and GradMax lead. "unequal" is
    the slowest, since Adam takes parallel gradients for equal ones and keeps its copies together.
    "zeros" stays the small model, and ends far behind.
2.  At equal flops "own" ends better than "full", by less than 0.1: it has read more text. "small"
    ends better than both, if the short runs below are a guide: these models are not yet limited by
    their size.
3.  The family from one checkpoint is better at both sizes that grew, and by more at the smaller
    budget.
4.  Where layers go matters less than seeds do; at the bottom is worst.

(Before this was written, learning rates had been tried for models of width 32 and 64 from scratch,
and neurons alone, 16 against 128, which made no difference after 300 steps; no model had grown.)

Measures: the loss on held-out text (`held_out_loss` in `train_small_english.py`), on the same 1,024
texts for all arms (during training, on the first 128), and the share of correct answers in eight
tasks. (In the first run, these were 64 texts of four lengths, and all losses were means over
batches, so that words in short texts counted more.) Differences are paired by seed, with Student's
95 % interval. `step_flops` counts the flops of matrix products. All runs use one learning rate: the
best of four for the full size of both kinds, from scratch with seed 0. (The rate was chosen at
widths 32 and 64; the smallest models learned faster at twice that rate. By our first rule, the
lowest sum over both sizes, the rate would have been 0.016: the rule was changed after the rates
were seen.)

    python -m analyses.studies.growth_small_english --out analyses/results
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import typer
from tqdm import tqdm

from analyses.studies.growth_small_english_report import LONGER, curves_figure, page
from analyses.tools.english_runs import Done, Plan, Sizes, batch, figures, run, step_flops
from analyses.tools.gradmax import grad_max, gradient_products
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim, training_seconds
from analyses.tools.study_files import keep
from attn_only_lens import expansion as ex
from attn_only_lens import growth
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.expansion.initialise import Initialiser


@dataclass(frozen=True)
class Study:
    """The settings that determine the result."""

    family: tuple[Sizes, ...] = (Sizes(2, 16, 1, 32), Sizes(2, 32, 2, 64), Sizes(2, 64, 4, 128))
    layers: tuple[int, int] = (2, 4)
    kinds: dict[str, str] = field(default_factory=lambda: {"plain": "gpt_neox", "gated": "llama"})
    before: int = 200  # steps before growth
    after: int = 200
    decay: int = 100
    budgets: tuple[int, ...] = (200, 400)
    tried: int = 200  # steps at each learning rate that is tried
    rates: tuple[float, ...] = (4e-3, 8e-3, 16e-3, 32e-3)
    lr: float = 8e-3
    n_seeds: int = 3
    plan: dict[str, int] = field(
        default_factory=lambda: {"warmup": 50, "rows": 32, "check_every": 20, "save_every": 100}
    )
    read: tuple[int, int] = (128, 1024)  # numbers of held-out texts: during training, at the end
    asked: int = 100
    left_out: tuple[str, ...] = ()  # names of arms


SMOKE = Study(
    family=(Sizes(1, 8, 2, 5), Sizes(1, 12, 3, 7)),
    layers=(1, 2),
    kinds={"plain": "gpt_neox"},
    before=4,
    after=4,
    decay=2,
    budgets=(4,),
    tried=4,
    rates=(8e-3,),
    plan={"warmup": 2, "rows": 2, "check_every": 4, "save_every": 4},
    read=(3, 5),
    asked=2,
    left_out=("zeros", "copies", "splits", "unequal", "middle", "spread", "spread, copies"),
)


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one seed, with their folder and progress bar."""

    study: Study
    seed: int
    folder: Path
    device: str
    bar: Any

    def plan(self, sizes: Sizes, steps: int, **settings: Any) -> Plan:
        """Return the plan of one run with this seed."""
        seeds = {"seed": self.seed, "data_seed": self.seed + 1, "growth_seed": 10 * self.seed + 1}
        study = self.study
        common = {"lr": study.lr, "read": study.read[0], "asked": 0} | study.plan
        return Plan(sizes, steps, **(seeds | common | settings))

    def go(self, name: str, plan: Plan, start: Done | None = None) -> Done:
        """Train a run in a folder named after the run and the seed."""
        self.bar.set_description(f"{name}, seed {self.seed}")
        folder = self.folder / f"{name}-{self.seed}"
        return run(plan, folder, self.device, self.bar.update, start=start)


def between(small: Sizes, full: Sizes) -> Expansion:
    """Return the expansion from one size to another, without new layers."""
    more = {name: size - getattr(small, name) for name, size in asdict(full).items()}
    steps = {"d_mlp": ex.AddNeurons, "n_heads": ex.AddHeads, "d_model": ex.WidenStream}
    return ex.compose(*(kind(more[name]) for name, kind in steps.items() if more[name]))


def inserted(places: tuple[int, ...], **how: Any) -> Expansion:
    """Return the expansion that inserts layers; places are layer numbers after growth."""
    return ex.compose(*(ex.InsertLayer(place, **how) for place in sorted(places)))


def steps_within(plan: Plan, flops: int) -> int:
    """Return the smallest number of steps that takes at least this many flops."""
    weights, spent = growth.read(plan.model()), 0
    for step in count():
        spent += step_flops(weights, batch(plan, step))
        if spent >= flops:
            return step + 1
    raise AssertionError


def inits(trunk: Done) -> dict[str, Initialiser]:
    """Return the initialisers by name."""
    initialisers = {
        "own": ex.init.own(),
        "zeros": ex.init.zeros(),
        "copies": ex.init.copies(noise=0.1),
        "pairs": ex.init.cancelling(),
        "splits": ex.init.splits(share=0.5, noise=0.1),
        "unequal": ex.init.splits(share=0.75, noise=0.01),
    }
    if not trunk.model.cfg.gated_mlp:
        tokens = batch(trunk.plan, trunk.plan.steps)[:, :-1]
        initialisers["GradMax"] = grad_max(gradient_products(trunk.model, tokens))
    return initialisers


Arms = Iterator[tuple[str, Done]]
T = TypeVar("T")


def kept(study: Study, arms: dict[str, T]) -> list[tuple[str, T]]:
    """Return the arms that are not left out."""
    return [(name, arm) for name, arm in arms.items() if name not in study.left_out]


def starts(runs: SeedRuns, part: str) -> Arms:
    """Train the arms for the question: which initialisation trains best?"""
    study, settings = runs.study, {"family": runs.study.kinds[part]}
    small, full = study.family[0], study.family[-1]
    plan = runs.plan(small, study.before, **settings)
    trunk = runs.go(f"{part}-trunk", plan)
    grown = replace(
        plan,
        steps=study.before + study.after,
        schedule={study.before: between(small, full)},
        decay=study.decay,
    )
    flops = 0
    for name, init in kept(study, inits(trunk)):
        done = runs.go(f"{part}-{name}", replace(grown, init=init), trunk)
        flops = int(done.curve["flops"].iloc[-1])
        yield name, with_trunk(done, trunk)
    yield from for_flops(runs, part, {"small": small, "full": full}, flops, **settings)


def for_flops(
    runs: SeedRuns, part: str, sizes: dict[str, Sizes], flops: int, **settings: Any
) -> Arms:
    """Train models from scratch for a number of flops."""
    for name, size in sizes.items():
        plan = runs.plan(size, 1, decay=runs.study.decay, **settings)
        plan = replace(plan, steps=steps_within(plan, flops))
        yield name, runs.go(f"{part}-{name}", plan)


def with_trunk(done: Done, trunk: Done) -> Done:
    """Return the run with the trunk's curve before its own."""
    return replace(done, curve=pd.concat([trunk.curve.iloc[:-1], done.curve], ignore_index=True))


def family(runs: SeedRuns, budget: int) -> Arms:
    """Train the arms for the question: does one checkpoint save compute for a family of sizes?"""
    study, part = runs.study, f"family {budget}"
    steady, trunk = budget - study.decay, None
    for number, sizes in enumerate(study.family):
        alone = runs.plan(sizes, budget, decay=study.decay)
        scratch = runs.go(f"{part}-scratch-{sizes.d_model}", alone)
        yield f"scratch, {sizes.d_model}", scratch
        schedule, began = {}, sizes
        if trunk is not None:
            began = study.family[number - 1]
            schedule = {number * steady: between(began, sizes)}
        plan = runs.plan(began, (number + 1) * steady, schedule=schedule)
        before = trunk
        trunk = runs.go(f"{part}-trunk-{sizes.d_model}", plan, before)
        if before is not None:
            last = runs.plan(sizes, plan.steps + study.decay, decay=study.decay)
            done = runs.go(f"{part}-grown-{sizes.d_model}", last, trunk)
            yield f"grown, {sizes.d_model}", with_trunk(with_trunk(done, trunk), before)
            # Models from scratch also train for the checkpoint's flops, not only for later flops.
            flops = int(done.curve["flops"].iloc[-1])
            yield from for_flops(runs, part, {f"{LONGER}{sizes.d_model}": sizes}, flops)


def depths(runs: SeedRuns) -> Arms:
    """Train the arms for the question: where should new layers go?"""
    study = runs.study
    small, (few, many) = study.family[0], study.layers
    more = many - few
    small = replace(small, n_layers=few)
    trunk = runs.go("layers-trunk", runs.plan(small, study.before))
    middle, spread = few // 2, tuple(range(1, 2 * more, 2))
    ways: dict[str, Expansion] = {
        "bottom": inserted(tuple(range(more))),
        "middle": inserted(tuple(range(middle, middle + more))),
        "top": inserted(tuple(range(few, many))),
        "spread": inserted(spread),
        "spread, copies": inserted(spread, copy=True),
    }
    flops = 0
    for name, expansion in kept(study, ways):
        plan = runs.plan(
            *(small, study.before + study.after),
            schedule={study.before: expansion},
            decay=study.decay,
        )
        done = runs.go(f"layers-{name}", plan, trunk)
        flops = int(done.curve["flops"].iloc[-1])
        yield name, with_trunk(done, trunk)
    yield from for_flops(runs, "layers", {"full": replace(small, n_layers=many)}, flops)


def rates(runs: SeedRuns) -> Arms:
    """Train with each learning rate that is tried."""
    study = runs.study
    ends = {"small": study.family[0], "full": study.family[-1]}
    for kind, family in study.kinds.items() if runs.seed == 0 else ():
        for size, sizes in ends.items():
            for lr in study.rates:
                plan = runs.plan(sizes, study.tried, lr=lr, decay=study.decay, family=family)
                yield f"{kind}, {size}, {lr:g}", runs.go(f"rates-{family}-{size}-{lr:g}", plan)


def parts(study: Study) -> dict[str, Callable[[SeedRuns], Arms]]:
    """Return the parts of the study by name."""
    return {
        "rates": rates,
        **{kind: lambda runs, kind=kind: starts(runs, kind) for kind in study.kinds},
        **{
            f"family {budget}": lambda runs, budget=budget: family(runs, budget)
            for budget in study.budgets
        },
        "layers": depths,
    }


def measured(study: Study, folder: Path, device: str) -> dict[str, pd.DataFrame]:
    """Train every arm; return the curves, and how each arm ends."""
    claim(folder / "study.txt", repr(replace(study, n_seeds=0)) + "\n")
    curves, ends = [], []
    with tqdm(unit="step", mininterval=5) as bar:
        for seed in range(study.n_seeds):
            for part, arms in parts(study).items():
                for arm, done in arms(SeedRuns(study, seed, folder, device, bar)):
                    label = {"part": part, "arm": arm, "seed": seed}
                    curves.append(done.curve.assign(**label))
                    measured = figures(done.model, study.read[1], study.asked)
                    last = done.curve.iloc[-1][["step", "tokens", "flops"]].astype(int)
                    ends.append(label | dict(last) | measured)
    curve = pd.concat(curves)[["part", "arm", "seed", "step", "flops", "loss"]]
    return {"curves": curve, "ends": pd.DataFrame(ends)}


def fresh_steps(steps: int, betas: tuple[float, float] = (0.9, 0.98)) -> list[float]:
    """Return AdamW's steps for a new entry with a constant gradient, in units of the learning rate.

    Moments of a new entry start at zero. But torch counts steps per tensor, so the tensor's bias
    correction is already 1. (Each step of an old entry with a constant gradient is 1.)
    """
    one, two = betas
    return [(1 - one**k) / (1 - two**k) ** 0.5 for k in range(1, steps + 1)]


def main(
    out: Out = Path("out/growth"),
    runs_dir: Runs = Path("out/english"),
    device: Device = "cpu",
    n_seeds: Seeds = 3,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    frames = measured(study, runs_dir, device)
    seconds = training_seconds(runs_dir)
    text = page(frames, study, fresh_steps(100), seconds, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "study": asdict(study)}
    settings["cpu_seconds"] = round(seconds, 1)
    keep(__file__, out, text, frames, curves_figure(frames["curves"]), started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
