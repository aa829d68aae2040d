"""What happens to circuits when a transformer grows?

A 2-layer LLaMA learns Small English until it solves three tasks: number across a prepositional
phrase, gender, and brackets. Then the model grows, and continues training:

    none                nothing is added: drift without growth, for equal flops
    none, equal steps   the same, with as many steps as "neurons"
    none, other texts   the same, twice, on texts that no other arm reads
    neurons             doubles the number of neurons in every layer
    heads               adds 4 heads to the 3 heads in every layer
    width               widens the stream from 48 to 64
    depth               adds a third layer at the end
    neurons, copies     like neurons, but new neurons start as noisy copies of old neurons
    neurons, cancelling like neurons, but in pairs whose outputs cancel
    neurons, splits     like neurons, but each old neuron shares its output with a copy

In the arms neurons, heads, width and depth, new entries have the distribution of the model's
initial weights, and output weights are zero. Every arm continues from the same small model, with
AdamW's moments, the same texts and the same number of flops (except the arms with equal steps or
other texts); so an arm with more weights takes fewer steps. Neurons, heads, width and depth add
about equally many weights. The learning rate falls over the last quarter. There are three small
models, and two growths of each with different random numbers, to separate growth from chance.

Every component's effect on every task is measured before growth, right after growth, and after
1/32, 1/8, 3/8 and all of the training (`circuit_measures.py` defines all measures), with intervals
over prompts; all seeds are shown. Baselines: neurons of a layer matched at random; training without
growth for equal flops, and for equal steps; an arm's two growths against each other; two trainings
on other texts against each other; as the ceiling, one model against itself on disjoint prompts.

`PREDICTIONS` in `circuits_report.py` lists the questions and our predictions; they were written
before the run, together with what would make each prediction fail. A first run, which the page
mentions, continued training for 300 steps. Equal steps, other texts, disjoint prompts and overlap
were added afterwards, and everything was run again.

    python -m analyses.studies.circuits_in_growth --out analyses/results
"""

import io
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from analyses.studies import circuit_measures as measures
from analyses.studies.circuits_report import COMPARED, COMPARED_BY, new_figure, old_figure, page
from analyses.studies.english_runs import (
    Done,
    Plan,
    Sizes,
    batch,
    figures,
    model_at,
    run,
    step_flops,
)
from analyses.tools import small_english_grammar as grammar
from analyses.tools.benching import machine
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim, training_seconds
from analyses.tools.study_files import as_stored, keep
from analyses.tools.train_small_english import questions, tokenizer
from attn_only_lens import expansion as ex
from attn_only_lens import grow
from attn_only_lens import patching as p
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.expansion.initialise import Initialiser
from attn_only_lens.growth import Grown, read
from attn_only_lens.storage import write_text

TASKS = ("number, prepositional", "gender", "brackets, simple")
ARMS = ("none", "none, equal steps", "none, other texts", "neurons", "heads", "width", "depth")
ARMS = (*ARMS, "neurons, copies", "neurons, cancelling", "neurons, splits")
SMALL_MODEL = "small model"  # its name in tables, next to the arms: the model before growth
OTHER_TEXTS = 100  # exceeds the number of small models: the seed of texts for one arm
DIGITS = "%.4g"
EXACT = [*COMPARED_BY, *COMPARED]
SEED_OF_TEXTS = 888_888
SMALL, GROWN = Sizes(2, 48, 3, 96), Sizes(3, 64, 7, 192)


@dataclass(frozen=True)
class Study:
    """The settings that determine the result."""

    small: Sizes = SMALL
    grown: Sizes = GROWN
    steps: int = 1400  # training steps of the small model before growth
    more: int = 2000  # after growth, all arms have the flops of this many small-model steps
    checks: tuple[float, ...] = (1 / 32, 1 / 8, 3 / 8, 1)
    lr: float = 6e-3
    rows: int = 32
    save_every: int = 200
    n_seeds: int = 3
    tasks: tuple[str, ...] = TASKS
    arms: tuple[str, ...] = ARMS
    prompts: int = 48
    texts: int = 64


SMOKE = Study(
    small=Sizes(1, 8, 2, 7),
    grown=Sizes(2, 12, 3, 11),
    steps=2,
    more=2,
    checks=(1,),
    lr=0.5,
    rows=2,
    save_every=2,
    tasks=("gender",),
    arms=("none", "none, equal steps", "none, other texts", "neurons"),
    prompts=5,
    texts=3,
)


@dataclass(frozen=True)
class Arm:
    """One way to continue training.

    Attributes:
        expansion: the expansion by which the model grows; None for no growth.
        init: the initialiser of the new entries.
        growth_seeds: one seed for each growth.
        steps_of: the expansion that sets the number of steps; by default `expansion`.
        other_texts: whether each growth reads separate texts.
    """

    expansion: Expansion | None
    init: Initialiser | None = None
    growth_seeds: tuple[int, ...] = (0, 1)
    steps_of: Expansion | None = None
    other_texts: bool = False


def arms(study: Study) -> dict[str, Arm]:
    """Return all arms by name."""
    small, grown = study.small, study.grown
    neurons = ex.AddNeurons(grown.d_mlp - small.d_mlp)
    return {
        "none": Arm(None, growth_seeds=(0,)),
        "none, equal steps": Arm(None, growth_seeds=(0,), steps_of=neurons),
        "none, other texts": Arm(None, steps_of=neurons, other_texts=True),
        "neurons": Arm(neurons),
        "heads": Arm(ex.AddHeads(grown.n_heads - small.n_heads)),
        "width": Arm(ex.WidenStream(grown.d_model - small.d_model)),
        "depth": Arm(ex.InsertLayer(small.n_layers)),
        "neurons, copies": Arm(neurons, ex.init.copies(), (0,)),
        "neurons, cancelling": Arm(neurons, ex.init.cancelling(), (0,)),
        "neurons, splits": Arm(neurons, ex.init.splits(), (0,)),
    }


@dataclass(frozen=True)
class Asked:
    """The inputs for every model: questions by task, as many other questions, and texts."""

    questions: dict[str, measures.Question]
    others: dict[str, measures.Question]
    texts: list[Tensor]

    @classmethod
    def of(cls, study: Study, device: str) -> "Asked":
        """Return prompts that begin no sentence of the training texts, and texts not trained on."""
        of, write = tokenizer(), grammar.Grammar(SEED_OF_TEXTS)
        made, n = questions(2 * study.prompts), study.prompts
        texts = [torch.tensor(of(write.text())["input_ids"]) for _ in range(study.texts)]
        first, others = (
            {task: measures.Question.of(made[task], of, some).to(device) for task in study.tasks}
            for some in (slice(n), slice(n, None))
        )
        return cls(first, others, [text.to(device) for text in texts])


@dataclass(frozen=True)
class Seen:
    """A model at one time.

    Attributes:
        check: the fraction of the training after growth.
        model: the model at this time.
        look: its measurements.
        about: steps and flops since growth, and the loss on held-out text.
    """

    check: float
    model: Any
    look: measures.Look
    about: dict[str, float]


def plan_of(study: Study, seed: int) -> Plan:
    """Return the plan of the small model's training."""
    return Plan(
        study.small,
        study.steps,
        seed=seed,
        data_seed=seed,
        lr=study.lr,
        rows=study.rows,
        check_every=study.save_every,
        save_every=study.save_every,
        asked=0,
    )


def plan_after(study: Study, arm: Arm, small: Done, growth_seed: int) -> tuple[Plan, list[int]]:
    """Return the plan that continues the small model's training, and the steps of all checks."""
    start, expansion = small.plan.steps, arm.steps_of or arm.expansion or ex.compose()
    first = batch(small.plan, start)
    weights = read(grow(small.model, expansion).model)
    ratio = step_flops(read(small.model), first) / step_flops(weights, first)
    n_steps = max(len(study.checks), round(study.more * ratio))
    stops = [max(1, round(check * n_steps)) for check in study.checks]
    texts = OTHER_TEXTS * (1 + growth_seed) if arm.other_texts else 0
    plan = replace(
        small.plan,
        data_seed=small.plan.data_seed + texts,
        steps=start + n_steps,
        decay=n_steps // 4,
        schedule={start: arm.expansion} if arm.expansion else {},
        init=arm.init,
        growth_seed=growth_seed,
        kept=tuple(sorted({start + stop for stop in stops})),
    )
    return plan, stops


def trained(plan: Plan, small: Done, folder: Path) -> Done:
    """Train by a plan that continues the small model's, or resume from the folder's checkpoint."""
    n_steps, device = plan.steps - small.plan.steps, str(next(small.model.parameters()).device)
    with tqdm(total=n_steps, desc=folder.name, unit="step", mininterval=5) as bar:
        return run(plan, folder, device, bar.update, start=small)


def seen_through(
    study: Study,
    arm: Arm,
    grown: Grown,
    growth_seed: int,
    small: Done,
    asked: Asked,
    folder: Path,
    method: measures.Method,
) -> list[Seen]:
    """Train one grown model, and return its measurements from growth to the end."""
    start, weights = small.plan.steps, read(grown.model)
    plan, stops = plan_after(study, arm, small, growth_seed)
    done, n_steps = trained(plan, small, folder), plan.steps - start
    device = str(next(small.model.parameters()).device)
    flops = [0, *accumulate(step_flops(weights, batch(plan, start + i)) for i in range(n_steps))]
    new = {*grown.provenance.new_heads, *grown.provenance.new_neurons}
    seen_models = []
    for check, stop in zip((0.0, *study.checks), (0, *stops), strict=True):
        model = grown.model
        if stop == n_steps:
            model = done.model
        elif stop:
            model = model_at(done, start + stop, folder, start=small).to(device)
        look = measures.look(model, asked.questions, asked.texts, new, method)
        about = {"steps": stop, "flops": flops[stop], **figures(model, plan.read, 0)}
        seen_models.append(Seen(check, model, look, about))
    return seen_models


def measured(
    study: Study,
    name: str,
    small: Done,
    before: measures.Look,
    asked: Asked,
    folder: Path,
    method: measures.Method,
) -> dict[str, pd.DataFrame]:
    """Train one arm, and measure its model and its agreement with the small model: frames by name.

    Args:
        study: the study.
        name: the name of the arm.
        small: the model before growth.
        before: the measurements of the small model.
        asked: the inputs for all models.
        folder: the folder of this arm with this small model.
        method: computes effects.
    """
    arm, rows, effects, prompts = arms(study)[name], [], [], []
    again: dict[float, list[tuple[measures.Look, dict[str, str]]]] = {}
    for growth_seed in arm.growth_seeds:
        expansion = arm.expansion or ex.compose()
        grown = grow(small.model, expansion, init=arm.init, seed=growth_seed)
        runs = folder.with_name(f"{folder.name}-{growth_seed}")
        seen = seen_through(study, arm, grown, growth_seed, small, asked, runs, method)
        old = {name: grown.provenance[name] for name in before.names}
        new = {*grown.provenance.new_heads, *grown.provenance.new_neurons}
        for seen_model in seen:
            again.setdefault(seen_model.check, []).append((seen_model.look, old))
            pair = measures.Pair(before, seen_model.look, old)
            alike = pair.similarities()
            for task in study.tasks:
                idle = [old[name] for name in measures.idle_half(before, task)]
                rows.append(
                    {
                        "growth_seed": growth_seed,
                        "check": seen_model.check,
                        **seen_model.about,
                        "task": task,
                        **measures.new_measures(seen_model.look, task, new, idle),
                        **measures.kept_measures(pair, task, alike),
                        "heads": pair.heads(),
                        **measures.resemblances(seen_model.look, task, new),
                    }
                )
        end = seen[-1]
        effects.append(measures.effects(end.look, old).assign(growth_seed=growth_seed))
        second = measures.on_prompts(end.model, end.look, asked.others, new, method)
        again_here = {name: name for name in old.values()}
        pairs = {"itself": (end.look, again_here), "before": (before, old)}
        prompts += [
            {"growth_seed": growth_seed, "check": 1.0, "with": name, "task": task}
            | measures.agreement(measures.Pair(one, second, names), task)
            for name, (one, names) in pairs.items()
            for task in study.tasks
        ]
    frames = {"": pd.DataFrame(rows), "effects": pd.concat(effects)}
    frames["prompts"] = pd.DataFrame(prompts)
    twins = []
    for check, looks in again.items():
        if len(looks) > 1:
            (first, names), (second, _) = looks
            pair = measures.Pair(first, second, {name: name for name in names.values()})
            alike = pair.similarities()
            twins += [
                {"check": check, "task": task, **measures.kept_measures(pair, task, alike)}
                | {"heads": pair.heads()}
                for task in study.tasks
            ]
    return frames | ({"again": pd.DataFrame(twins)} if twins else {})


def measured_small(
    study: Study, small: Done, before: measures.Look, asked: Asked, method: measures.Method
) -> dict[str, pd.DataFrame]:
    """Measure the small model on both sets of prompts, and return frames by name."""
    same = {name: name for name in before.names}
    fresh = measures.on_prompts(small.model, before, asked.others, (), method)
    pair = measures.Pair(before, fresh, same)
    rows = [
        {"check": 0.0, "with": "itself", "task": task} | measures.agreement(pair, task)
        for task in study.tasks
    ]
    effects = pd.concat(
        [
            measures.effects(before, same),
            measures.effects(fresh, same).assign(arm=f"{SMALL_MODEL}, other prompts"),
        ]
    )
    frames = {"effects": effects, "prompts": pd.DataFrame(rows)}
    return {part: frame.assign(growth_seed=0) for part, frame in frames.items()}


def stored(text: str) -> pd.DataFrame:
    """Return the table that was stored as CSV text."""
    return pd.read_csv(io.StringIO(text))


def of_seed(
    study: Study,
    seed: int,
    folder: Path,
    device: str,
    method: measures.Method = p.attribution,
) -> dict[str, pd.DataFrame]:
    """Train a small model and all its arms; return frames with columns `seed` and `arm`."""
    small: Done | None = None
    asked = Asked.of(study, device)
    collected: dict[str, list[pd.DataFrame]] = {}
    for name in (SMALL_MODEL, *study.arms):
        here = folder / f"{seed}-{name.replace(', ', '-')}"
        done = here / f"{method.__name__}.json"
        if not done.exists():
            if small is None:
                with tqdm(total=study.steps, desc=f"small {seed}", unit="step") as bar:
                    plan = plan_of(study, seed)
                    small = run(plan, folder / f"{seed}-small", device, bar.update)
                before = measures.look(small.model, asked.questions, asked.texts, method=method)
            if name == SMALL_MODEL:
                frames = measured_small(study, small, before, asked, method)
            else:
                frames = measured(study, name, small, before, asked, here, method)
            texts = {part: frame.to_csv(index=False) for part, frame in frames.items()}
            write_text(done, json.dumps(texts))
        for part, text in json.loads(done.read_text("utf-8")).items():
            frame = stored(text)
            arm = frame.pop("arm").fillna(name) if "arm" in frame else name
            frame.insert(0, "arm", arm)
            frame.insert(0, "seed", seed)
            collected.setdefault(part, []).append(frame)
    return {part: pd.concat(frames) for part, frames in collected.items()}


def main(
    out: Out = Path("out/circuits"),
    runs_dir: Runs = Path("out/circuit-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 3,
    only: Annotated[int | None, typer.Option(help="run this seed, and report nothing")] = None,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    claim(runs_dir / "study.json", json.dumps(asdict(study), indent=2) + "\n")
    if only is not None:
        of_seed(study, only, runs_dir, device)
        return
    by_seed = [of_seed(study, seed, runs_dir, device) for seed in range(n_seeds)]
    made = {part: pd.concat([tables[part] for tables in by_seed]) for part in by_seed[0]}
    made["exact"] = of_seed(study, 0, runs_dir, device, p.activation_patch)[""][EXACT]
    frames = as_stored(made, DIGITS)
    about = {
        "study": asdict(study),
        "machine": machine(device),
        "training_seconds": round(training_seconds(runs_dir)),
    }
    settings = {"device": device, "smoke": smoke, **about}
    text = page(frames, settings)
    typer.echo(text)
    pictures = {"": old_figure(frames), "new": new_figure(frames)}
    keep(__file__, out, text, frames, pictures, started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
