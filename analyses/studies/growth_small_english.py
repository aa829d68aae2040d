"""Does growth save compute? Three questions about small language models (§5 of the growth paper).

All models are trained on Small English by `tools/english_runs.py`. There are three seeds for
weights, texts and new entries; runs with the same seed read the same texts in the same order.

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

Measures: the loss on held-out text (`held_out_loss` in `small_english.py`), on the same 1,024
texts for all arms (during training, on the first 128), and the share of correct answers in eight
tasks. Differences are paired by seed, with Student's 95 % interval. `step_flops` counts the flops
of matrix products. All runs use one learning rate: the best of four for the full size of both
kinds, from scratch with seed 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.study import Setting, Study, Tables
from analyses.tools.english_runs import Done, Plan, Sizes, batch, figures, run, step_flops
from analyses.tools.gradmax import GradMax, gradient_products
from analyses.tools.study_files import said, t_interval
from analyses.tools.training import claim
from attn_only_lens import growth
from attn_only_lens.growth.expansion.expansion import Expansion
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.models._grow import read

Floats: TypeAlias = "pd.Series[float]"
KINDS = {"plain": "Plain MLPs and LayerNorm", "gated": "Gated MLPs and RMS norm"}
EARLY = (20, 100)  # numbers of steps after growth
LONGER = "scratch, all flops, "  # the first part of an arm's name; the width follows


@dataclass(frozen=True)
class Recipe:
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
    plan: dict[str, int] = field(
        default_factory=lambda: {"warmup": 50, "rows": 32, "check_every": 20, "save_every": 100}
    )
    read: tuple[int, int] = (128, 1024)  # numbers of held-out texts: during training, at the end
    asked: int = 100
    left_out: tuple[str, ...] = ()  # names of arms


SMOKE = Recipe(
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
    left_out=(
        "zeros",
        "copies",
        "pairs",
        "splits",
        "unequal",
        "middle",
        "spread",
        "spread, copies",
    ),
)


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one seed, with their folder and progress bar."""

    recipe: Recipe
    seed: int
    folder: Path
    device: str
    bar: Any

    def plan(self, sizes: Sizes, steps: int, **settings: Any) -> Plan:
        """Return the plan of one run with this seed."""
        seeds = {"seed": self.seed, "data_seed": self.seed + 1, "growth_seed": 10 * self.seed + 1}
        recipe = self.recipe
        common = {"lr": recipe.lr, "read": recipe.read[0], "asked": 0} | recipe.plan
        return Plan(sizes, steps, **(seeds | common | settings))

    def go(self, name: str, plan: Plan, start: Done | None = None) -> Done:
        """Train a run in a folder named after the run and the seed."""
        self.bar.set_description(f"{name}, seed {self.seed}")
        folder = self.folder / f"{name}-{self.seed}"
        return run(plan, folder, self.device, self.bar.update, start=start)


def between(small: Sizes, full: Sizes) -> Expansion:
    """Return the expansion from one size to another, without new layers."""
    more = {name: size - getattr(small, name) for name, size in asdict(full).items()}
    steps = {"d_mlp": growth.AddNeurons, "n_heads": growth.AddHeads, "d_model": growth.WidenStream}
    return [kind(more[name]) for name, kind in steps.items() if more[name]]


def inserted(places: tuple[int, ...], **how: Any) -> Expansion:
    """Return the expansion that inserts layers; places are layer numbers after growth."""
    return [growth.InsertLayer(place, **how) for place in sorted(places)]


def steps_within(plan: Plan, flops: int) -> int:
    """Return the smallest number of steps that takes at least this many flops."""
    weights, spent = read(plan.model()), 0
    for step in count():
        spent += step_flops(weights, batch(plan, step))
        if spent >= flops:
            return step + 1
    raise AssertionError


def inits(trunk: Done) -> dict[str, Initialiser]:
    """Return the initialisers by name."""
    initialisers = {
        "own": growth.init.own(),
        "zeros": growth.init.zeros(),
        "copies": growth.init.copies(noise=0.1),
        "pairs": growth.init.cancelling(),
        "splits": growth.init.splits(share=0.5, noise=0.1),
        "unequal": growth.init.splits(share=0.75, noise=0.01),
    }
    if not trunk.model.cfg.gated_mlp:
        tokens = batch(trunk.plan, trunk.plan.steps)[:, :-1]
        initialisers["GradMax"] = GradMax(gradient_products(trunk.model, tokens))
    return initialisers


Arms = Iterator[tuple[str, Done]]
T = TypeVar("T")


def kept(recipe: Recipe, arms: dict[str, T]) -> list[tuple[str, T]]:
    """Return the arms that are not left out."""
    return [(name, arm) for name, arm in arms.items() if name not in recipe.left_out]


def starts(runs: SeedRuns, part: str) -> Arms:
    """Train the arms for the question: which initialisation trains best?"""
    recipe, settings = runs.recipe, {"family": runs.recipe.kinds[part]}
    small, full = recipe.family[0], recipe.family[-1]
    plan = runs.plan(small, recipe.before, **settings)
    trunk = runs.go(f"{part}-trunk", plan)
    grown = replace(
        plan,
        steps=recipe.before + recipe.after,
        schedule={recipe.before: between(small, full)},
        decay=recipe.decay,
    )
    flops = 0
    for name, init in kept(recipe, inits(trunk)):
        done = runs.go(f"{part}-{name}", replace(grown, init=init), trunk)
        flops = int(done.curve["flops"].iloc[-1])
        yield name, with_trunk(done, trunk)
    yield from for_flops(runs, part, {"small": small, "full": full}, flops, **settings)


def for_flops(
    runs: SeedRuns, part: str, sizes: dict[str, Sizes], flops: int, **settings: Any
) -> Arms:
    """Train models from scratch for a number of flops."""
    for name, size in sizes.items():
        plan = runs.plan(size, 1, decay=runs.recipe.decay, **settings)
        plan = replace(plan, steps=steps_within(plan, flops))
        yield name, runs.go(f"{part}-{name}", plan)


def with_trunk(done: Done, trunk: Done) -> Done:
    """Return the run with the trunk's curve before its own."""
    return replace(done, curve=pd.concat([trunk.curve.iloc[:-1], done.curve], ignore_index=True))


def family(runs: SeedRuns, budget: int) -> Arms:
    """Train the arms for the question: does one checkpoint save compute for a family of sizes?"""
    recipe, part = runs.recipe, f"family {budget}"
    steady, trunk = budget - recipe.decay, None
    for number, sizes in enumerate(recipe.family):
        alone = runs.plan(sizes, budget, decay=recipe.decay)
        scratch = runs.go(f"{part}-scratch-{sizes.d_model}", alone)
        yield f"scratch, {sizes.d_model}", scratch
        schedule, began = {}, sizes
        if trunk is not None:
            began = recipe.family[number - 1]
            schedule = {number * steady: between(began, sizes)}
        plan = runs.plan(began, (number + 1) * steady, schedule=schedule)
        before = trunk
        trunk = runs.go(f"{part}-trunk-{sizes.d_model}", plan, before)
        if before is not None:
            last = runs.plan(sizes, plan.steps + recipe.decay, decay=recipe.decay)
            done = runs.go(f"{part}-grown-{sizes.d_model}", last, trunk)
            yield f"grown, {sizes.d_model}", with_trunk(with_trunk(done, trunk), before)
            # Models from scratch also train for the checkpoint's flops, not only for later flops.
            flops = int(done.curve["flops"].iloc[-1])
            yield from for_flops(runs, part, {f"{LONGER}{sizes.d_model}": sizes}, flops)


def depths(runs: SeedRuns) -> Arms:
    """Train the arms for the question: where should new layers go?"""
    recipe = runs.recipe
    small, (few, many) = recipe.family[0], recipe.layers
    more = many - few
    small = replace(small, n_layers=few)
    trunk = runs.go("layers-trunk", runs.plan(small, recipe.before))
    middle, spread = few // 2, tuple(range(1, 2 * more, 2))
    ways: dict[str, Expansion] = {
        "bottom": inserted(tuple(range(more))),
        "middle": inserted(tuple(range(middle, middle + more))),
        "top": inserted(tuple(range(few, many))),
        "spread": inserted(spread),
        "spread, copies": inserted(spread, copy=True),
    }
    flops = 0
    for name, expansion in kept(recipe, ways):
        plan = runs.plan(
            *(small, recipe.before + recipe.after),
            schedule={recipe.before: expansion},
            decay=recipe.decay,
        )
        done = runs.go(f"layers-{name}", plan, trunk)
        flops = int(done.curve["flops"].iloc[-1])
        yield name, with_trunk(done, trunk)
    yield from for_flops(runs, "layers", {"full": replace(small, n_layers=many)}, flops)


def rates(runs: SeedRuns) -> Arms:
    """Train with each learning rate that is tried."""
    recipe = runs.recipe
    ends = {"small": recipe.family[0], "full": recipe.family[-1]}
    for kind, family in recipe.kinds.items() if runs.seed == 0 else ():
        for size, sizes in ends.items():
            for lr in recipe.rates:
                plan = runs.plan(sizes, recipe.tried, lr=lr, decay=recipe.decay, family=family)
                yield f"{kind}, {size}, {lr:g}", runs.go(f"rates-{family}-{size}-{lr:g}", plan)


def parts(recipe: Recipe) -> dict[str, Callable[[SeedRuns], Arms]]:
    """Return the parts of the study by name."""
    return {
        "rates": rates,
        **{kind: lambda runs, kind=kind: starts(runs, kind) for kind in recipe.kinds},
        **{
            f"family {budget}": lambda runs, budget=budget: family(runs, budget)
            for budget in recipe.budgets
        },
        "layers": depths,
    }


def run_all(setting: Setting) -> Tables:
    """Train every arm; return the mean curves over seeds, and how each arm ends."""
    recipe = SMOKE if setting.smoke else Recipe()
    claim(setting.runs / "study.txt", f"{recipe}\n")
    curves, ends = [], []
    with tqdm(unit="step", mininterval=5) as bar:
        for seed in range(setting.n_seeds):
            for part, arms in parts(recipe).items():
                for arm, done in arms(SeedRuns(recipe, seed, setting.runs, setting.device, bar)):
                    label = {"part": part, "arm": arm, "seed": seed}
                    curves.append(done.curve.assign(**label))
                    last = done.curve.iloc[-1][["step", "flops"]].astype(int)
                    loss, *right = figures(done.model, recipe.read[1], recipe.asked).values()
                    right_answers = sum(right) / len(right)
                    ends.append(label | dict(last) | {"loss": loss, "right": right_answers})
    return {"curves": mean_curves(pd.concat(curves)), "ends": pd.DataFrame(ends)}


def mean_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the means over seeds at every step that all seeds of an arm have."""
    by_step = curves[curves["part"] != "rates"].groupby(["part", "arm", "step"], sort=False)
    means, n = by_step[["flops", "loss"]].mean(), by_step["seed"].nunique()
    return means[n == n.groupby(["part", "arm"]).transform("max")].reset_index()


def fresh_steps(steps: int) -> list[float]:
    """Return AdamW's steps for a new entry with a constant gradient, in units of the learning rate.

    Moments of a new entry start at zero. But torch counts steps per tensor, so the tensor's bias
    correction is already 1. (Each step of an old entry with a constant gradient is 1.)
    """
    one, two = 0.9, 0.98  # the betas of all runs
    return [(1 - one**k) / (1 - two**k) ** 0.5 for k in range(1, steps + 1)]


# What the page says


def less(ends: pd.DataFrame, part: str, arm: str, rival: str) -> Floats:
    """Return the differences of the losses of two arms, by seed; nan if an arm was left out."""
    losses = ends[ends["part"] == part].pivot(index="seed", columns="arm", values="loss")
    losses = losses.reindex(columns=list({*losses.columns, arm, rival}))
    return losses[arm] - losses[rival]


def soon(curves: pd.DataFrame, part: str, arm: str) -> list[float]:
    """Return the loss of an arm EARLY steps after growth; nan if it does not grow."""
    rows = curves[(curves["part"] == part) & (curves["arm"] == arm)].set_index("step")["loss"]
    steps = [Recipe.before + step for step in EARLY]
    grew = arm not in ("small", "full")
    return [float(rows.get(step, "nan")) if grew else float("nan") for step in steps]


def compared(tables: Tables, part: str, reference: str) -> pd.DataFrame:
    """Return a row per arm of a part: its losses by seed, compared with the reference."""
    rows = []
    for arm, frame in tables["ends"].query("part == @part").groupby("arm", sort=False):
        early = zip(EARLY, soon(tables["curves"], part, str(arm)), strict=True)
        losses = {f"+{step}": loss for step, loss in early}
        losses |= {f"seed {seed}": x for seed, x in zip(frame["seed"], frame["loss"], strict=True)}
        losses["mean"] = frame["loss"].mean()
        against = said(less(tables["ends"], part, str(arm), reference), "+.3f")
        rows.append(
            {"": arm, "Gflop": f"{frame['flops'].mean() / 1e9:.0f}"}
            | {name: "–" if pd.isna(loss) else f"{loss:.3f}" for name, loss in losses.items()}
            | {f"less that of {reference}": "" if arm == reference else against}
            | {"right": f"{frame['right'].mean():.1%}"}
        )
    return pd.DataFrame(rows)


def families(ends: pd.DataFrame, budgets: list[int], widths: list[int]) -> pd.DataFrame:
    """Return a row per budget and grown size, compared with both models from scratch."""
    means, rows = ends.groupby(["part", "arm"])[["step", "flops", "loss"]].mean(), []
    for budget in budgets:
        for width in widths[1:]:
            part, grown = f"family {budget}", f"grown, {width}"
            arms = {"one checkpoint": grown, "from scratch": f"scratch, {width}"}
            arms["for all flops"] = f"{LONGER}{width}"
            row: dict[str, Any] = {"steps of each": budget, "d_model": width}
            for name, arm in arms.items():
                step, flops, loss = means.loc[(part, arm)]
                row[name] = f"{loss:.3f} ({step:.0f} steps, {flops / 1e9:.0f} Gflop)"
            for name, arm in zip(("first", "second"), list(arms.values())[1:], strict=True):
                row[f"less the {name}"] = said(less(ends, part, grown, arm), "+.3f")
            rows.append(row)
    return pd.DataFrame(rows)


def by_rate(ends: pd.DataFrame) -> pd.DataFrame:
    """Return the loss by kind and size of a model (rows), and by learning rate (columns)."""
    frame = ends[ends["part"] == "rates"].copy()
    frame[["kind", "size", "rate"]] = frame["arm"].str.split(", ", expand=True)
    wide = frame.pivot(index=["kind", "size"], columns="rate", values="loss")
    return wide[sorted(wide, key=float)]


def of_kind(tables: Tables, kind: str) -> dict[str, Any]:
    """Return what was found about initialisations, and whether each prediction held."""
    ends, curves = tables["ends"], tables["curves"]
    means = ends[ends["part"] == kind].groupby("arm", sort=False)["loss"].mean()
    live = [arm for arm in means.index if arm not in ("own", "zeros", "small", "full")]
    apart = {arm: t_interval(less(ends, kind, arm, "own")) for arm in means.index}
    early = {arm: soon(curves, kind, arm)[0] for arm in ("own", "pairs", "GradMax") if arm in means}
    last = means[["own", *live]].idxmax()
    small = (t_interval(less(ends, kind, "small", arm)) for arm in ("own", "full"))
    found = {"ahead": [arm for arm in live if apart[arm][2] < 0], "early": early, "last": last}
    held = {
        "ahead": not found["ahead"],
        "early": all(early[arm] < early["own"] for arm in early if arm != "own"),
        "last": last == "unequal",
        "zeros": "zeros" in apart and apart["zeros"][1] > 0,
        "full": apart["full"][1] > 0 and apart["full"][0] < 0.1,
        "small": all(high < 0 for _, _, high in small),
    }
    return {"title": KINDS[kind], "means": means, "held": held, **found}


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    ends, fresh = tables["ends"], fresh_steps(100)
    named = [part.split() for part in ends["part"].unique()]
    budgets = [int(words[1]) for words in named if words[0] == "family"]
    first = ends[ends["part"] == f"family {budgets[0]}"]["arm"].unique()
    widths = [int(arm.split()[-1]) for arm in first if arm.startswith("scratch, ")]
    widths = sorted(set(widths))
    gains = {
        (budget, width): less(ends, f"family {budget}", f"grown, {width}", f"scratch, {width}")
        for budget in budgets
        for width in widths[1:]
    }
    layers = (
        ends.query("part == 'layers' and arm != 'full'").groupby(["arm", "seed"])["loss"].mean()
    )
    places, seeds = (layers.groupby(level).mean() for level in ("arm", "seed"))
    rates = by_rate(ends)
    mean_flops = ends.groupby(["part", "arm"])["flops"].mean() / 1e9
    return {
        "recipe": Recipe(),
        "early": EARLY,
        "kinds": {kind: of_kind(tables, kind) for kind in KINDS if kind in set(ends["part"])},
        "less": partial(less, ends),
        "compared": partial(compared, tables),
        "budgets": budgets,
        "widths": widths,
        "family_flops": [
            sum(mean_flops[f"family {budget}", f"scratch, {width}"] for width in widths)
            for budget in budgets
        ],
        "gains": gains,
        "gains_held": {key: t_interval(gain)[2] < 0 for key, gain in gains.items()},
        "gains_more": all(
            gains[budgets[0], width].mean() < gains[budgets[-1], width].mean()
            for width in widths[1:]
        ),
        "families": families(ends, budgets, widths),
        "places": places,
        "apart": {"places": places.max() - places.min(), "seeds": seeds.max() - seeds.min()},
        "rates": rates.map("{:.3f}".format).reset_index(),
        "lowest_rate": rates.sum().idxmin(),
        "fresh": {"first": fresh[0], "most": max(fresh), "at": fresh.index(max(fresh)) + 1},
    }


def figure(curves: pd.DataFrame) -> Figure:
    """Draw the mean loss of each arm against flops, one panel per part."""
    parts = list(curves["part"].unique())
    picture = Figure(figsize=(11, 3.7 * -(-len(parts) // 2)), layout="constrained")
    panels = list(picture.subplots(-(-len(parts) // 2), 2, squeeze=False).flat)
    for part, panel in zip(parts, panels, strict=False):
        arms = dict(list(curves[curves["part"] == part].groupby("arm", sort=False)))
        colours = {"small": "0.6", "full": "0.0"}
        for arm, seen in arms.items():
            twin = f"grown, {arm.rpartition(' ')[2]}"
            colours.setdefault(arm, f"C{list(arms).index(twin if twin in arms else arm)}")
            style = ":" if arm.startswith(LONGER) else "--" if arm.startswith("scratch") else "-"
            x, y = seen["flops"] / 1e9, seen["loss"]
            panel.plot(x, y, style, color=colours[arm], lw=1.3, label=arm)
        ends = [seen["loss"].iloc[-1] for seen in arms.values()]
        margin = max(ends) - min(ends) + 0.1
        panel.set_ylim(min(ends) - 0.1 * margin, max(ends) + 1.5 * margin)
        title = f"Family of sizes, {part.split()[-1]} steps each, by d_model"
        title = title if part.startswith("family") else KINDS.get(part, "New layers")
        panel.set_title(title, fontsize="medium")
        panel.locator_params(nbins=4)
        if part != "gated":  # its arms are in the panel on its left
            panel.legend(fontsize="x-small", ncols=2)
    for panel in panels[len(parts) :]:
        panel.set_visible(False)
    picture.supxlabel("Gflop of matrix products", fontsize="medium")
    picture.supylabel("loss, part of the held-out text", fontsize="medium")
    return picture


STUDY = Study(run_all, lambda tables: {"": figure(tables["curves"])}, facts, n_seeds=3)
