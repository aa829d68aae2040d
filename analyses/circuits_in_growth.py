"""What becomes of circuits when a transformer grows?

A LLaMA of 2 layers learns Small English until it answers three of its tasks: number across a
prepositional phrase, gender, brackets. Then it grows, and trains on:

    none                nothing is added: drift without growth
    neurons             in every layer as many neurons again
    heads               in every layer 4 heads beside 3
    width               the stream from 48 to 64
    depth               a third layer, last
    neurons, copies     as neurons, but the new ones start as noisy copies of old ones
    neurons, cancelling as neurons, but in pairs whose outputs cancel
    neurons, splits     as neurons, but each old one is shared out with a copy of itself

The new entries of the first five are drawn as the model draws its own, and zero where they write.
Every arm goes on from the same small model, with AdamW's moments, the same texts, and as many flops
of training; so an arm with more weights does fewer steps. Neurons, heads, width and depth add about
as many weights each. The learning rate falls over the last quarter. Three small models; two growths
of each with other numbers in the new entries, to tell what is growth's from what is chance's.

Before growth, right after it, and after 1/32, 1/8, 3/8 and all of the flops every component's
effect on every task is measured (`circuit_measures.py` defines all measures), with intervals over
prompts; seeds are all shown. Nulls: an arm's two growths against each other, training without
growth, and neurons of a layer matched at random.

Questions, and what we expect of each, are `PREDICTIONS` in `circuits_report.py`; they were written
before the run, with what would make each of them fail.

    python analyses/circuits_in_growth.py --out analyses/results
"""

import io
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import circuit_measures as measures
import pandas as pd
import small_english_grammar as grammar
import torch
import typer
from benching import Device, machine
from circuits_report import COMPARED, COMPARED_BY, new_figure, old_figure, page
from english_runs import Done, Plan, Sizes, batch, figures, model_at, run, step_flops
from resumable import claim
from studies import keep
from torch import Tensor
from tqdm import tqdm
from train_small_english import questions, tokenizer

from attn_only_lens import Grown, grow
from attn_only_lens import expansion as ex
from attn_only_lens import patching as p
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.expansion.initialise import Initialiser
from attn_only_lens.growth import read
from attn_only_lens.storage import write_text

TASKS = ("number, prepositional", "gender", "brackets, simple")
ARMS = ("none", "neurons", "heads", "width", "depth")
ARMS = (*ARMS, "neurons, copies", "neurons, cancelling", "neurons, splits")
DIGITS = "%.4g"
EXACT = [*COMPARED_BY, *COMPARED]
SEED_OF_TEXTS = 888_888
SMALL, GROWN = Sizes(2, 48, 3, 96), Sizes(3, 64, 7, 192)


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    small: Sizes = SMALL
    grown: Sizes = GROWN
    steps: int = 1400  # of the small model, before growth
    more: int = 300  # steps of the small model, whose flops all arms have after growth
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
    arms=("none", "neurons"),
    prompts=5,
    texts=3,
)


@dataclass(frozen=True)
class Arm:
    """One way to go on."""

    expansion: Expansion | None
    init: Initialiser | None = None
    growth_seeds: tuple[int, ...] = (0, 1)


def arms(study: Study) -> dict[str, Arm]:
    """All of them, by name."""
    small, grown = study.small, study.grown
    neurons = ex.AddNeurons(grown.d_mlp - small.d_mlp)
    return {
        "none": Arm(None, growth_seeds=(0,)),
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
    """What every model is asked."""

    questions: dict[str, measures.Question]
    texts: list[Tensor]

    @classmethod
    def of(cls, study: Study, device: str) -> "Asked":
        """Prompts that begin no sentence of the texts trained on, and texts not read."""
        of, write = tokenizer(), grammar.Grammar(SEED_OF_TEXTS)
        made = questions(study.prompts)
        texts = [torch.tensor(of(write.text())["input_ids"]) for _ in range(study.texts)]
        return cls(
            {task: measures.Question.of(made[task], of).to(device) for task in study.tasks},
            [text.to(device) for text in texts],
        )


@dataclass(frozen=True)
class Seen:
    """A model at one time.

    Attributes:
        check: the share of the flops after growth.
        look: what it is like.
        about: steps and flops since growth, and the loss on held-out text.
    """

    check: float
    look: measures.Look
    about: dict[str, float]


def plan_of(study: Study, seed: int) -> Plan:
    """The small model's training."""
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
    """What one growth is like from its beginning to its end."""
    start, weights = small.plan.steps, read(grown.model)
    first = batch(small.plan, start)
    ratio = step_flops(read(small.model), first) / step_flops(weights, first)
    n_steps = max(len(study.checks), round(study.more * ratio))
    stops = {check: max(1, round(check * n_steps)) for check in study.checks}
    plan = replace(
        small.plan,
        steps=start + n_steps,
        decay=n_steps // 4,
        schedule={start: arm.expansion} if arm.expansion else {},
        init=arm.init,
        growth_seed=growth_seed,
        kept=tuple(sorted({start + stop for stop in stops.values()})),
    )
    device = str(next(small.model.parameters()).device)
    with tqdm(total=n_steps, desc=folder.name, unit="step", mininterval=5) as bar:
        done = run(plan, folder, device, bar.update, start=small)
    flops = [0, *accumulate(step_flops(weights, batch(plan, start + i)) for i in range(n_steps))]
    new = {*grown.provenance.new_heads, *grown.provenance.new_neurons}
    found = []
    for check, stop in {0.0: 0, **stops}.items():
        model = grown.model
        if stop == n_steps:
            model = done.model
        elif stop:
            model = model_at(done, start + stop, folder, start=small).to(device)
        look = measures.look(model, asked.questions, asked.texts, new, method)
        about = {"steps": stop, "flops": flops[stop], **figures(model, plan.read, 0)}
        found.append(Seen(check, look, about))
    return found


def measured(
    study: Study,
    name: str,
    small: Done,
    before: measures.Look,
    asked: Asked,
    folder: Path,
    method: measures.Method,
) -> dict[str, pd.DataFrame]:
    """Train and measure one arm: frames by name.

    Args:
        study: the study.
        name: of the arm.
        small: the model before growth.
        before: what it is like.
        asked: what models are asked.
        folder: of this arm with this small model.
        method: of effects.
    """
    arm, rows, neurons = arms(study)[name], [], []
    again: dict[float, list[tuple[measures.Look, dict[str, str]]]] = {}
    for growth_seed in arm.growth_seeds:
        expansion = arm.expansion or ex.compose()
        grown = grow(small.model, expansion, init=arm.init, seed=growth_seed)
        runs = folder.with_name(f"{folder.name}-{growth_seed}")
        seen = seen_through(study, arm, grown, growth_seed, small, asked, runs, method)
        old = {name: grown.provenance[name] for name in before.names}
        new = {*grown.provenance.new_heads, *grown.provenance.new_neurons}
        for each in seen:
            again.setdefault(each.check, []).append((each.look, old))
            pair = measures.Pair(before, each.look, old)
            alike = pair.similarities()
            for task in study.tasks:
                idle = [old[name] for name in measures.idle_half(before, task)]
                rows.append(
                    {
                        "growth_seed": growth_seed,
                        "check": each.check,
                        **each.about,
                        "task": task,
                        **measures.new_measures(each.look, task, new, idle),
                        **measures.kept_measures(pair, task, alike),
                        "heads": pair.heads(),
                        **measures.resemblances(each.look, task, new),
                    }
                )
        for task in study.tasks:
            frame = measures.foremost(measures.Pair(before, seen[-1].look, old), task)
            neurons.append(frame.assign(task=task, growth_seed=growth_seed))
    frames = {"": pd.DataFrame(rows), "neurons": pd.concat(neurons)}
    twins = []
    for check, looks in again.items():
        if len(looks) > 1:
            (one, names), (other, _) = looks
            pair = measures.Pair(one, other, {each: each for each in names.values()})
            alike = pair.similarities()
            twins += [
                {"check": check, "task": task, **measures.kept_measures(pair, task, alike)}
                | {"heads": pair.heads()}
                for task in study.tasks
            ]
    return frames | ({"again": pd.DataFrame(twins)} if twins else {})


def stored(text: str) -> pd.DataFrame:
    """A table that was written as text."""
    return pd.read_csv(io.StringIO(text))


def of_seed(
    study: Study,
    seed: int,
    folder: Path,
    device: str,
    method: measures.Method = p.attribution,
) -> dict[str, pd.DataFrame]:
    """All arms of one small model: frames with columns `seed` and `arm`."""
    small: Done | None = None
    asked = Asked.of(study, device)
    found: dict[str, list[pd.DataFrame]] = {}
    for name in study.arms:
        here = folder / f"{seed}-{name.replace(', ', '-')}"
        done = here / f"{method.__name__}.json"
        if not done.exists():
            if small is None:
                with tqdm(total=study.steps, desc=f"small {seed}", unit="step") as bar:
                    plan = plan_of(study, seed)
                    small = run(plan, folder / f"{seed}-small", device, bar.update)
                before = measures.look(small.model, asked.questions, asked.texts, method=method)
            frames = measured(study, name, small, before, asked, here, method)
            texts = {part: each.to_csv(index=False) for part, each in frames.items()}
            write_text(done, json.dumps(texts))
        for part, text in json.loads(done.read_text("utf-8")).items():
            frame = stored(text)
            frame.insert(0, "arm", name)
            frame.insert(0, "seed", seed)
            found.setdefault(part, []).append(frame)
    return {part: pd.concat(frames) for part, frames in found.items()}


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("out/circuits"),
    runs_dir: Annotated[Path, typer.Option("--runs", help="to go on from")] = Path(
        "out/circuit-runs"
    ),
    device: Device = "cpu",
    n_seeds: Annotated[int, typer.Option(help="small models")] = 3,
    only: Annotated[int | None, typer.Option(help="run this seed, and report nothing")] = None,
    smoke: Annotated[bool, typer.Option(help="tiny sizes and few steps")] = False,
) -> None:
    """Train, measure, print; write what a study leaves (`studies.py`)."""
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    claim(runs_dir / "study.json", json.dumps(asdict(study), indent=2) + "\n")
    if only is not None:
        of_seed(study, only, runs_dir, device)
        return
    by_seed = [of_seed(study, seed, runs_dir, device) for seed in range(n_seeds)]
    made = {part: pd.concat([each[part] for each in by_seed]) for part in by_seed[0]}
    made["neurons"] = made["neurons"][made["neurons"]["growth_seed"] == 0]
    made["exact"] = of_seed(study, 0, runs_dir, device, p.activation_patch)[""][EXACT]
    # As they are stored, so that the page is made of what the tables show.
    frames = {
        part: stored(each.to_csv(index=False, float_format=DIGITS)) for part, each in made.items()
    }
    curves = (pd.read_csv(each) for each in sorted(runs_dir.glob("*/curve.csv")))
    about = {
        "study": asdict(study),
        "machine": machine(device),
        "load_average": os.getloadavg(),
        "training_seconds": round(sum(each["cpu_seconds"].iloc[-1] for each in curves)),
    }
    text = page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    pictures = {"": old_figure(frames), "new": new_figure(frames)}
    settings = {"device": device, "smoke": smoke, **about}
    keep(__file__, out, text, frames, pictures, started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
