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
1/32, 1/8, 3/8 and all of the training (`tools/circuit_measures.py` defines all measures), with
intervals over prompts. Baselines: neurons of a layer matched at random; training without growth for
equal flops, and for equal steps; an arm's two growths against each other; two trainings on other
texts against each other; as the ceiling, one model against itself on disjoint prompts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analyses.study import Setting, Study, Tables
from analyses.tools import circuit_measures as measures
from analyses.tools import small_english_grammar as grammar
from analyses.tools.english_runs import (
    Done,
    Plan,
    Sizes,
    batch,
    figures,
    model_at,
    run,
    step_flops,
)
from analyses.tools.small_english import questions, tokenizer
from analyses.tools.study_files import as_csv, as_stored, said, t_interval
from analyses.tools.training import claim
from attn_only_lens import grow, growth
from attn_only_lens import patching as p
from attn_only_lens.growth.expansion.expansion import Expansion
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.models._grow import Grown, read

Floats: TypeAlias = "pd.Series[float]"
TASKS = ("number, prepositional", "gender", "brackets, simple")
NONE, EQUAL_STEPS, OTHER_TEXTS = "none", "none, equal steps", "none, other texts"
COPIES, CANCELLING, SPLITS = "neurons, copies", "neurons, cancelling", "neurons, splits"
KINDS = ("neurons", "heads", "width", "depth")
WITH_NEW = ("neurons", "heads", "depth")
STARTS = ("neurons", COPIES, CANCELLING, SPLITS)
ARMS = (NONE, EQUAL_STEPS, OTHER_TEXTS, *KINDS, *STARTS[1:])
WROTE_ZEROS, WROTE_AT_ONCE = (*KINDS, COPIES), (CANCELLING, SPLITS)
SMALL, GROWN = Sizes(2, 48, 3, 96), Sizes(3, 64, 7, 192)
SMALL_MODEL = "small model"  # its name in tables, next to the arms: the model before growth
AGREEMENTS = ("kept", "overlap", "correlation")
TAKES_PART = 0.05
COMPARED_BY = ("seed", "arm", "growth_seed", "check", "task")
COMPARED = ("correlation", "kept", "overlap", "gates", "examples", "new_share", "idle_share")
# The table has these measures at the end only.
AT_THE_END = ("loss", "steps", "correlation_low", "correlation_high", "new_share_high", "parity")
AT_THE_END += ("heads", "resemblance")
AT_THE_END += tuple(f"{name}_chance" for name in ("kept", "overlap", "gates", "examples"))
WITH_EFFECTS = (EQUAL_STEPS, "neurons")  # arms whose effects are stored, for small model 0
OTHER_SEEDS = 100  # exceeds the number of small models: the seed of texts for one arm
SEED_OF_TEXTS = 888_888


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the result."""

    small: Sizes = SMALL
    grown: Sizes = GROWN
    steps: int = 1400  # training steps of the small model before growth
    more: int = 2000  # after growth, all arms have the flops of this many small-model steps
    checks: tuple[float, ...] = (1 / 32, 1 / 8, 3 / 8, 1)
    lr: float = 6e-3
    rows: int = 32
    save_every: int = 200
    tasks: tuple[str, ...] = TASKS
    arms: tuple[str, ...] = ARMS
    prompts: int = 48
    texts: int = 64
    read: int = 512  # held-out texts for the loss


SMOKE = Recipe(
    small=Sizes(1, 8, 2, 7),
    grown=Sizes(2, 12, 3, 11),
    steps=2,
    more=2,
    checks=(1,),
    lr=0.5,
    rows=2,
    save_every=2,
    tasks=("gender",),
    arms=(NONE, OTHER_TEXTS, "neurons"),
    prompts=5,
    texts=3,
    read=3,
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


def arms(recipe: Recipe) -> dict[str, Arm]:
    """Return all arms by name."""
    small, grown = recipe.small, recipe.grown
    neurons = growth.AddNeurons(grown.d_mlp - small.d_mlp)
    return {
        NONE: Arm(None, growth_seeds=(0,)),
        EQUAL_STEPS: Arm(None, growth_seeds=(0,), steps_of=neurons),
        OTHER_TEXTS: Arm(None, steps_of=neurons, other_texts=True),
        "neurons": Arm(neurons),
        "heads": Arm(growth.AddHeads(grown.n_heads - small.n_heads)),
        "width": Arm(growth.WidenStream(grown.d_model - small.d_model)),
        "depth": Arm(growth.InsertLayer(small.n_layers)),
        COPIES: Arm(neurons, growth.init.copies(), (0,)),
        CANCELLING: Arm(neurons, growth.init.cancelling(), (0,)),
        SPLITS: Arm(neurons, growth.init.splits(), (0,)),
    }


@dataclass(frozen=True)
class Asked:
    """The inputs for every model: questions by task, as many other questions, and texts."""

    questions: dict[str, measures.Question]
    others: dict[str, measures.Question]
    texts: list[Tensor]

    @classmethod
    def of(cls, recipe: Recipe, device: str) -> "Asked":
        """Return prompts that begin no sentence of the training texts, and texts not trained on."""
        of, write = tokenizer(), grammar.Grammar(SEED_OF_TEXTS)
        made, n = questions(2 * recipe.prompts), recipe.prompts
        texts = [torch.tensor(of(write.text())["input_ids"]) for _ in range(recipe.texts)]
        first, others = (
            {task: measures.Question.of(made[task], of, some).to(device) for task in recipe.tasks}
            for some in (slice(n), slice(n, None))
        )
        return cls(first, others, [text.to(device) for text in texts])


def plan_of(recipe: Recipe, seed: int) -> Plan:
    """Return the plan of the small model's training."""
    return Plan(
        recipe.small,
        recipe.steps,
        seed=seed,
        data_seed=seed,
        lr=recipe.lr,
        rows=recipe.rows,
        check_every=recipe.save_every,
        save_every=recipe.save_every,
        read=recipe.read,
        asked=0,
    )


def plan_after(recipe: Recipe, arm: Arm, small: Done, growth_seed: int) -> tuple[Plan, list[int]]:
    """Return the plan that continues the small model's training, and the steps of all checks."""
    start, expansion = small.plan.steps, arm.steps_of or arm.expansion or []
    first = batch(small.plan, start)
    weights = read(grow(small.model, expansion).model)
    ratio = step_flops(read(small.model), first) / step_flops(weights, first)
    n_steps = max(len(recipe.checks), round(recipe.more * ratio))
    stops = [max(1, round(check * n_steps)) for check in recipe.checks]
    texts = OTHER_SEEDS * (1 + growth_seed) if arm.other_texts else 0
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


def trained(
    recipe: Recipe, arm: Arm, grown: Grown, growth_seed: int, small: Done, folder: Path
) -> Iterator[tuple[float, Any, dict[str, float]]]:
    """Train one grown model, and yield it at each check, with its steps and its loss."""
    start, device = small.plan.steps, str(next(small.model.parameters()).device)
    plan, stops = plan_after(recipe, arm, small, growth_seed)
    with tqdm(total=plan.steps - start, desc=folder.name, unit="step", mininterval=5) as bar:
        done = run(plan, folder, device, bar.update, start=small)
    for check, stop in zip((0.0, *recipe.checks), (0, *stops), strict=True):
        model = grown.model
        if start + stop == plan.steps:
            model = done.model
        elif stop:
            model = model_at(done, start + stop, folder, start=small).to(device)
        yield check, model, {"steps": stop, **figures(model, plan.read, 0)}


def measured(
    recipe: Recipe,
    name: str,
    small: Done,
    before: measures.Look,
    asked: Asked,
    folder: Path,
    method: measures.Method,
) -> dict[str, pd.DataFrame]:
    """Train one arm; measure its models, and how well they agree: frames by part."""
    arm, rows, prompts, frames = arms(recipe)[name], [], [], {}
    ends: list[measures.Look] = []
    for growth_seed in arm.growth_seeds:
        expansion = arm.expansion or []
        grown = grow(small.model, expansion, init=arm.init, seed=growth_seed)
        old = {name: grown.provenance[name] for name in before.names}
        new = {*grown.provenance.new_heads, *grown.provenance.new_neurons}
        runs = folder.with_name(f"{folder.name}-{growth_seed}")
        for check, model, about in trained(recipe, arm, grown, growth_seed, small, runs):
            look = measures.look(model, asked.questions, asked.texts, new, method)
            pair = measures.Pair(before, look, old)
            alike = pair.similarities()
            for task in recipe.tasks:
                idle = [old[name] for name in measures.idle_half(before, task)]
                row = {
                    **about,
                    **measures.new_measures(look, task, new, idle),
                    **measures.kept_measures(pair, task, alike),
                    "heads": pair.heads(),
                    "resemblance": measures.resemblance(look, task, new),
                }
                kept = {key: x for key, x in row.items() if check == 1 or key not in AT_THE_END}
                rows.append({"growth_seed": growth_seed, "check": check, "task": task, **kept})
        ends.append(look)
        again = measures.on_prompts(model, look, asked.others, new, method)
        prompts.append(agreements(measures.Pair(look, again, same(old.values()))))
        if name in WITH_EFFECTS and not growth_seed:
            frames["effects"] = measures.effects(look, new)
    if len(ends) > 1:
        pair = measures.Pair(ends[0], ends[1], same(old.values()))
        frames["again"] = agreements(pair, "gates", "examples").assign(heads=pair.heads())
    return frames | {"": pd.DataFrame(rows), "prompts": pd.concat(prompts)}


def measured_small(
    small: Done, before: measures.Look, asked: Asked, method: measures.Method
) -> dict[str, pd.DataFrame]:
    """Return what the small model has learned, its effects, and its agreement on other prompts."""
    again = measures.on_prompts(small.model, before, asked.others, (), method)
    loss = figures(small.model, small.plan.read, 0)
    rows = [{"task": task, **loss, **measures.learned(before, task)} for task in before.parts]
    return {
        "small": pd.DataFrame(rows),
        "effects": measures.effects(before),
        "prompts": agreements(measures.Pair(before, again, same(before.names))),
    }


def same(names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each name to itself."""
    return {name: name for name in names}


def agreements(pair: measures.Pair, *more: str) -> pd.DataFrame:
    """Return a row per task: how well effects agree, and more measures of the circuit."""
    alike = pair.similarities()
    rows = [
        {"task": task, **measures.kept_measures(pair, task, alike)} for task in pair.first.parts
    ]
    return pd.DataFrame(rows)[["task", *AGREEMENTS, *more]]


def of_seed(
    recipe: Recipe, seed: int, folder: Path, device: str, method: measures.Method = p.attribution
) -> dict[str, pd.DataFrame]:
    """Train a small model and all its arms; return frames with columns `seed` and `arm`.

    An interrupted training resumes from the folder's checkpoints.
    """
    asked = Asked.of(recipe, device)
    with tqdm(total=recipe.steps, desc=f"small {seed}", unit="step") as bar:
        small = run(plan_of(recipe, seed), folder / f"{seed}-small", device, bar.update)
    before = measures.look(small.model, asked.questions, asked.texts, method=method)
    collected: dict[str, list[pd.DataFrame]] = {}
    for name in (SMALL_MODEL, *recipe.arms):
        if name == SMALL_MODEL:
            frames = measured_small(small, before, asked, method)
        else:
            here = folder / f"{seed}-{name.replace(', ', '-')}"
            frames = measured(recipe, name, small, before, asked, here, method)
        for part, frame in frames.items():
            frame.insert(0, "arm", name)
            frame.insert(0, "seed", seed)
            collected.setdefault(part, []).append(frame)
    return {part: pd.concat(frames) for part, frames in collected.items()}


def run_all(setting: Setting) -> Tables:
    """Train and measure all models."""
    recipe = SMOKE if setting.smoke else Recipe()
    claim(setting.runs / "study.txt", f"{recipe}\n")
    seeds = range(setting.n_seeds)
    by_seed = [of_seed(recipe, seed, setting.runs, setting.device) for seed in seeds]
    made = {part: pd.concat([frames[part] for frames in by_seed]) for part in by_seed[0]}
    made["effects"] = made["effects"].query("seed == 0").drop(columns="seed")
    patched = replace(recipe, arms=(NONE,)) if setting.smoke else recipe
    exact = of_seed(patched, 0, setting.runs, setting.device, p.activation_patch)[""]
    made["exact"] = exact[[*COMPARED_BY, *COMPARED]]
    return as_stored(as_csv(made, "%.4g"))


# What the page says


def over_seeds(tables: Tables, arm: str, column: str, check: float = 1.0, part: str = "") -> Floats:
    """Return means over tasks and growths, by seed."""
    frame = tables[part]
    rows = frame[(frame["arm"] == arm) & (frame.get("check", check) == check)]
    return rows.groupby("seed")[column].mean()


def means(tables: Tables, arms: Iterable[str], column: str, **how: Any) -> dict[str, float]:
    """Return means over tasks, growths and seeds, by arm."""
    return {arm: float(over_seeds(tables, arm, column, **how).mean()) for arm in arms}


def ranged(values: Floats) -> str:
    """Return the mean over seeds and the range, as text."""
    if values.isna().all():
        return "–"
    return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


def listed(tables: Tables, arms: Iterable[str], column: str, **how: Any) -> str:
    """Return arms with their means and ranges, as text."""
    return "; ".join(f"{arm} {ranged(over_seeds(tables, arm, column, **how))}" for arm in arms)


def less(tables: Tables, column: str, arm: str, rival: str = EQUAL_STEPS) -> Floats:
    """Return the differences between two arms at the end, by small model."""
    return over_seeds(tables, arm, column) - over_seeds(tables, rival, column)


def is_clear(differences: Floats) -> bool:
    """Return whether the 95 % interval (Student's) excludes zero."""
    _, low, high = t_interval(differences)
    return low > 0 or high < 0


def n_clear(tables: Tables, column: str, pairs: Iterable[tuple[str, str]]) -> int:
    """Return for how many pairs of arms the interval of the difference excludes zero."""
    return sum(is_clear(less(tables, column, *pair)) for pair in pairs)


AGAINST_TRAINING = [(kind, EQUAL_STEPS) for kind in KINDS]
BETWEEN_KINDS = [*combinations(KINDS, 2)]
ALL_PAIRS = [*AGAINST_TRAINING, (NONE, EQUAL_STEPS), *BETWEEN_KINDS]


def differences(tables: Tables) -> pd.DataFrame:
    """Return differences of growth to training without growth, and between kinds of growth."""
    return pd.DataFrame(
        {"arm": arm, "minus": rival}
        | {column: said(less(tables, column, arm, rival), "+.3f") for column in AGREEMENTS}
        for arm, rival in ALL_PAIRS
    )


def first_times(tables: Tables, arm: str) -> Floats:
    """Return by seed, growth and task the first check whose interval is above TAKES_PART."""
    rows = tables[""][(tables[""]["arm"] == arm) & (tables[""]["check"] > 0)]
    above = rows["check"].where(rows["new_share_low"] > TAKES_PART, float("inf"))
    return above.groupby([rows["seed"], rows["growth_seed"], rows["task"]]).min()


def verdicts(tables: Tables) -> dict[str, bool | None]:
    """Return whether each prediction held; None if the data cannot tell."""
    of = partial(means, tables)
    first = tables[""].query("check == 0")
    zeros, at_once = (first[first["arm"].isin(arms)] for arms in (WROTE_ZEROS, WROTE_AT_ONCE))
    kept, correlation = of(KINDS, "kept"), of((NONE, EQUAL_STEPS, *KINDS), "correlation")
    order = sorted(KINDS, key=kept.__getitem__)
    when = {arm: float(first_times(tables, arm).median()) for arm in WITH_NEW}
    share, parity, left = (
        of(WITH_NEW, column) for column in ("new_share", "parity", "without_new")
    )
    soon, end = of(STARTS, "new_share", check=1 / 8), of(STARTS, "new_share")
    alike, again = of(STARTS, "resemblance"), of(KINDS, "correlation", part="again")
    drift = max(correlation[NONE], correlation[EQUAL_STEPS]) - min(map(correlation.get, KINDS))
    idle = max(of((NONE, EQUAL_STEPS), "idle_share").values())
    return {
        "at_once": bool(
            zeros["correlation"].min() > 0.9999
            and zeros["new_share"].max() < 0.001
            and at_once["new_share"].min() > 0.1
        ),
        "keep": min(kept.values()) >= 0.5 and min(of(KINDS, "gates").values()) >= 0.7,
        "whose": drift <= 0.1,
        "alone": (order[-1] == "heads" and order[0] == "width")
        if is_clear(less(tables, "kept", "heads", "width"))
        else None,
        "when": max(when["neurons"], when["depth"]) <= 1 / 8 and when["heads"] >= 1 / 4,
        "parity": all(share[arm] < parity[arm] and left[arm] < 0.9 for arm in WITH_NEW),
        "starts": soon[COPIES] > soon["neurons"] + 0.02
        and end[SPLITS] > end["neurons"]
        and alike[COPIES] > alike["neurons"] + 0.1,
        "again": all(again[arm] > correlation[arm] for arm in KINDS),
        "idle": end["neurons"] > 1.5 * idle,
    }


def by_arm(tables: Tables, *columns: str, part: str = "") -> pd.DataFrame:
    """Return a row per arm at the end: means over tasks and growths, and over seeds with range."""
    rows = []
    for arm in dict.fromkeys(tables[part]["arm"]):
        values = {column: over_seeds(tables, arm, column, part=part) for column in columns}
        row = {column.replace("_", " "): ranged(x) for column, x in values.items()}
        row |= {"steps": f"{values['steps'].mean():.0f}"} if "steps" in values else {}
        rows.append({"arm": arm, **row})
    return pd.DataFrame(rows)


def by_task(tables: Tables, column: str) -> pd.DataFrame:
    """Return a row per arm and task, and a column per seed: the first growth, with intervals."""
    rows = tables[""].query("check == 1 and growth_seed == 0")
    if column == "new_share":
        rows = rows[rows["parity"] > 0]
    shown = [
        f"{value:.2f} [{low:.2f}, {high:.2f}]"
        for value, low, high in rows[[column, f"{column}_low", f"{column}_high"]].to_numpy()
    ]
    wide = rows.assign(shown=shown).pivot(index=["arm", "task"], columns="seed", values="shown")
    wide = wide.loc[pd.MultiIndex.from_frame(rows[["arm", "task"]].drop_duplicates())]
    return wide.rename(columns="seed {}".format).reset_index()


def scale(tables: Tables) -> pd.DataFrame:
    """Return how well effects agree, from chance to a model with itself: a row per comparison."""

    def row(name: str, arms: Sequence[str], part: str = "", ending: str = "") -> dict[str, str]:
        cells = {"what is compared": name}
        for column in AGREEMENTS:
            try:
                values = [over_seeds(tables, arm, column + ending, part=part) for arm in arms]
            except KeyError:  # there is no chance level of the correlation
                cells[column] = "–"
            else:
                cells[column] = ranged(pd.concat(values).groupby("seed").mean())
        return cells

    before, none = "before and after", "before and after, no growth"
    return pd.DataFrame(
        [
            row("neurons of a layer matched at random", KINDS, ending="_chance"),
            row(f"{none}, equal flops", [NONE]),
            row(f"{none}, equal steps", [EQUAL_STEPS]),
            row(f"{none}, other texts (two trainings)", [OTHER_TEXTS]),
            *(row(f"{before} growth: {kind}", [kind]) for kind in KINDS),
            row("two trainings on different texts, no growth", [OTHER_TEXTS], "again"),
            row("two growths on the same texts, all kinds", KINDS, "again"),
            row("one grown model on other prompts, all kinds", KINDS, "prompts"),
            row("the small model on other prompts", [SMALL_MODEL], "prompts"),
        ]
    )


def by_patching(tables: Tables) -> pd.DataFrame:
    """Return differences between measures by patching and by estimates: a row per measure."""
    keys = list(COMPARED_BY)
    exact = tables["exact"].set_index(keys).sort_index()
    estimated = tables[""].set_index(keys).sort_index().loc[exact.index]
    off = (exact - estimated[list(COMPARED)]).abs()
    made = pd.DataFrame({"mean difference": off.mean(), "largest": off.max(), "of": len(off)})
    return made.rename_axis("measure").reset_index()


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame, exact = tables[""], tables["exact"].query("check == 0 and arm in @WROTE_ZEROS")
    first, end = frame.query("check == 0"), frame.query("check == 1")
    texts = end.query("arm == @OTHER_TEXTS").groupby(["seed", "growth_seed"])["kept"].mean()
    return {
        "recipe": Recipe(),
        "arms": {"kinds": KINDS, "with_new": WITH_NEW, "starts": STARTS},
        "end": end,
        "of": partial(means, tables),
        "listed": partial(listed, tables),
        "less": partial(less, tables),
        "n_clear": partial(n_clear, tables),
        "clear": sum(n_clear(tables, column, ALL_PAIRS) for column in AGREEMENTS),
        "pairs": {"training": AGAINST_TRAINING, "kinds": BETWEEN_KINDS, "all": ALL_PAIRS},
        "largest": {
            column: max(abs(less(tables, column, *pair).mean()) for pair in BETWEEN_KINDS)
            for column in AGREEMENTS
        },
        "chance": end.query("arm in @KINDS")["kept_chance"].mean(),
        "by_texts": texts.unstack().diff(axis=1).iloc[:, 1].abs().mean(),
        "at_once": {
            "by patching": exact[["correlation", "new_share"]].agg(["min", "max"]),
            "zeros": first.query("arm in @WROTE_ZEROS"),
            "others": first.query("arm in @WROTE_AT_ONCE"),
        },
        "times": {arm: first_times(tables, arm) for arm in WITH_NEW},
        "verdicts": verdicts(tables),
        "scale": scale(tables),
        "differences": differences(tables),
        "by_arm": partial(by_arm, tables),
        "by_task": partial(by_task, tables),
        "by_patching": by_patching(tables),
    }


COLOURS = dict(zip((NONE, EQUAL_STEPS, *KINDS), ("k", "0.55", "C0", "C1", "C2", "C3"), strict=True))
COLOURS |= {COPIES: "C9", CANCELLING: "C4", SPLITS: "C6"}


def panels(
    tables: Tables, labels: Mapping[str, str], arms: Sequence[str], idle: Mapping[str, str]
) -> Figure:
    """Draw a row of panels per measure and a column per task: means, and ranges over seeds.

    `idle` has the line styles of arms whose `idle_share` is drawn beside `new_share`.
    """
    frame = tables[""]
    tasks, checks = (list(dict.fromkeys(frame[name])) for name in ("task", "check"))
    picture = Figure(figsize=(3.6 * len(tasks), 2.9 * len(labels) + 0.6), layout="constrained")
    grid = picture.subplots(len(labels), len(tasks), squeeze=False, sharex=True, sharey="row")
    places = np.arange(len(checks))
    for (column, label), line in zip(labels.items(), grid, strict=True):
        line[0].set_ylabel(label)
        for panel, task in zip(line, tasks, strict=True):
            panel.set_title(task, fontsize="medium")
            of_task = frame[frame["task"] == task].groupby(["arm", "check", "seed"])
            for number, arm in enumerate(arm for arm in arms if arm in set(frame["arm"])):
                seeds = of_task[column].mean()[arm].unstack()
                here = places + 0.06 * (number - len(arms) / 2)
                panel.plot(here, seeds.mean(axis=1), color=COLOURS[arm], lw=1.4, label=arm)
                # One path with gaps is smaller than a line for each bar.
                bars = [seeds.min(axis=1), seeds.max(axis=1), np.full(len(here), np.nan)]
                bars_at = np.repeat(here, 3)
                panel.plot(bars_at, np.stack(bars, 1).ravel(), color=COLOURS[arm], lw=0.8)
            for arm, style in idle.items() if column == "new_share" else ():
                if arm in set(frame["arm"]):  # a trial has fewer arms
                    shares = of_task["idle_share"].mean()[arm].groupby("check").mean()
                    panel.plot(places, shares, style, lw=1, label=f"idle half, {arm}")
            panel.set_xticks(places, [str(Fraction(x).limit_denominator(64)) for x in checks])
    for panel in grid[-1]:
        panel.set_xlabel("share of the training after growth")
    handles, names = grid[0][0].get_legend_handles_labels()
    place = {"loc": "outside upper center", "ncols": 4, "fontsize": "small"}
    picture.legend(handles, names, title="bars: least and largest of the seeds", **place)
    return picture


def figures_of(tables: Tables) -> dict[str, Figure]:
    """Draw how the effects of old neurons change, and what new components do."""
    kept = {"correlation": "correlation of effects\nwith before growth"}
    kept["kept"] = "share of the circuit's\nneurons that are kept"
    new = {"new_share": "share that new\ncomponents hold"}
    new["without_new"] = "metric with all\nnew ones patched"
    return {
        "": panels(tables, kept, (NONE, EQUAL_STEPS, *KINDS), {}),
        "new": panels(tables, new, (*WITH_NEW, *STARTS[1:]), {NONE: "k:", EQUAL_STEPS: "k--"}),
    }


STUDY = Study(run_all, figures_of, facts, n_seeds=3)
