"""Write the page and figure of `grow_on_skill`."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from analyses.studies.circuit_measures import overlap_by_chance
from analyses.studies.pressure_report import predictions, wrapped
from analyses.tools import study_files
from analyses.tools.benching import markdown

__all__ = ["figure", "page_of"]

Frames: TypeAlias = Mapping[str, pd.DataFrame]
GROWN = ("frozen", "free")
RIGHT = 0.9  # of the answers: learned
CHANCE = 0.5  # of the answers, where two are possible
CLOSE = 0.1
N_HEADS = 10
LINES = ("-", "-", ":")  # the last two arms nearly coincide


def said(values: "pd.Series[float]", digits: int = 2) -> str:
    """Return the mean over seeds with Student's interval, or the values of one or two seeds."""
    values = values.dropna()
    if len(values) in (1, 2):
        return " / ".join(f"{value:.{digits}f}" for value in values)
    return study_files.said(values, f".{digits}f")


def final(frames: Frames, arm: str, column: str) -> "pd.Series[float]":
    """Return a figure at the end of training, by seed."""
    curves = frames["curves"]
    rows = curves[(curves["arm"] == arm) & (curves["step"] == curves["step"].max())]
    return rows.set_index("seed")[column]


def at_step(frames: Frames, arm: str, column: str, step: int) -> "pd.Series[float]":
    """Return a figure at a step, by seed."""
    curves = frames["curves"]
    rows = curves[(curves["arm"] == arm) & (curves["step"] == step)]
    return rows.set_index("seed")[column]


def rise(frames: Frames, arm: str, column: str = "text_loss") -> "pd.Series[float]":
    """Return the change of a figure from the start to the end, by seed."""
    return final(frames, arm, column) - at_step(frames, arm, column, 0)


def learned_at(frames: Frames, arm: str) -> pd.DataFrame:
    """Return for each seed the first check with enough right answers, and the rise of the loss."""
    rows = {}
    for seed, curve in frames["curves"].query("arm == @arm").groupby("seed"):
        learned = curve[curve["skill_right"] >= RIGHT]
        if len(learned):
            first = learned.iloc[0]
            rise = first["text_loss"] - curve["text_loss"].iloc[0]
            rows[seed] = {"step": first["step"], "rise": rise}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["step", "rise"], dtype=float)


def of_arm(frames: Frames, arm: str, column: str) -> "pd.Series[float]":
    """Return a measure of circuits, by seed."""
    rows = frames[""][frames[""]["arm"] == arm]
    return rows.set_index("seed")[column]


def kept(frames: Frames, arm: str, kind: str, column: str = "overlap") -> "pd.Series[float]":
    """Return the overlap of old effects relative to the ceiling, by seed."""
    name = f"{column}_{kind}"
    return of_arm(frames, arm, name) / of_arm(frames, "before", f"overlap_{kind}")


def without(frames: Frames, arm: str, what: str, column: str) -> "pd.Series[float]":
    """Return a figure of a grown arm without some neurons, by seed; the mean over draws."""
    removed = frames["removed"]
    rows = removed[(removed["arm"] == arm) & (removed["what"] == what)]
    return rows.groupby("seed")[column].mean()


def head_shares(frames: Frames, arm: str, task: str) -> pd.DataFrame:
    """Return each head's effect over the sum of all heads' |effects|: a column per seed."""
    heads = frames["heads"]
    rows = heads[(heads["arm"] == arm) & (heads["task"] == task)]
    effects = rows.pivot(index="head", columns="seed", values="effect")
    return effects / effects.abs().sum()


def moves(frames: Frames, arm: str, task: str = "agreement") -> pd.DataFrame:
    """Return how much each head's effect on is/are moved: a row per head, a column per seed."""
    return head_shares(frames, arm, task) - head_shares(frames, "before", "agreement")


def most_moved(frames: Frames, arm: str) -> list[str]:
    """Return the heads that moved most, in the mean over seeds."""
    sizes = moves(frames, arm).mean(axis=1).abs()
    return list(sizes.nlargest(N_HEADS).index)


def verdicts(frames: Frames, about: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield each prediction of `grow_on_skill.py`: a claim, whether it held, figures."""
    arms, middle = list(about["study"]["rates"]), about["study"]["steps"] // 2
    right = {arm: final(frames, arm, "skill_right") for arm in arms}
    yield (
        "every arm is right for 90 % or more at the end.",
        min(x.mean() for x in right.values()) >= RIGHT,
        by_arm(right),
    )
    half = {arm: at_step(frames, arm, "skill_loss", middle) for arm in GROWN}
    yield (
        f"frozen learns more slowly: its loss is higher after {middle} steps.",
        half["frozen"].mean() > half["free"].mean(),
        by_arm(half),
    )
    rises = {arm: rise(frames, arm) for arm in arms}
    yield (
        "freezing halves forgetting (the rise of the loss on texts).",
        rises["frozen"].mean() < rises["free"].mean() / 2,
        by_arm(rises, 3),
    )
    ratio = rises["free"].mean() / rises["not grown"].mean()
    yield (
        "free forgets like not grown, within 25 %.",
        abs(ratio - 1) <= 0.25,
        f"a ratio of {ratio:.2f}",
    )
    removed = without(frames, "free", "removed", "skill_right")
    share, parity = (of_arm(frames, "free", f"skill_{x}") for x in ("new_share", "parity"))
    yield (
        "free without its new neurons is right for 90 % or more; their share is below parity.",
        removed.mean() >= RIGHT and share.mean() < parity.mean(),
        f"right {said(removed)}; share {said(share, 3)}, parity {parity.mean():.3f}",
    )
    share, parity, joint, null = (
        of_arm(frames, "frozen", f"skill_{x}")
        for x in ("new_share", "parity", "joint", "directions")
    )
    yield (
        "frozen: the share of new neurons is three times parity; they cost more than directions.",
        share.mean() >= 3 * parity.mean() and joint.mean() > null.mean(),
        f"share {said(share, 3)}, parity {parity.mean():.3f}; cost {said(joint)}, "
        f"directions {said(null)}",
    )
    heads = {arm: kept(frames, arm, "heads") for arm in arms}
    yield (
        "frozen keeps its heads' effects (.9 of the ceiling or more), free keeps less.",
        heads["frozen"].mean() >= 0.9 > heads["free"].mean(),
        by_arm(heads),
    )
    gap = heads["free"] - heads["not grown"]
    yield (
        "free keeps as much as not grown, within .1.",
        abs(gap.mean()) <= CLOSE,
        f"a difference of {said(gap)}",
    )
    common = set(most_moved(frames, "free")) & set(most_moved(frames, "not grown"))
    yield (
        "at least 5 of the 10 heads that moved most are the same in free and not grown.",
        len(common) >= 5,
        f"{len(common)}",
    )
    leaks = {arm: final(frames, arm, "leak") for arm in arms}
    yield (
        'all arms leak: "yes" or "no" has a probability above .5 without the marker.',
        min(x.mean() for x in leaks.values()) > 0.5,
        by_arm(leaks),
    )


def by_arm(values: Mapping[str, "pd.Series[float]"], digits: int = 2) -> str:
    """Return figures by arm, in a sentence."""
    return ", ".join(f"{arm} {said(x, digits)}" for arm, x in values.items())


def learning_table(frames: Frames, arms: list[str]) -> str:
    """Return a row for each arm at the end, and a row for the model before training."""
    columns = {
        "skill, right": "skill_right",
        "skill, loss": "skill_loss",
        "is/are: right of the two": "agreement_two_way",
        "is/are: loss": "agreement_loss",
        "leak": "leak",
        "loss on texts": "text_loss",
    }
    before = [at_step(frames, "not grown", c, 0) for c in columns.values()]
    rows = [["before", *(f"{x.mean():.3g}" for x in before), "", "", ""]]
    for arm in arms:
        ends = [said(final(frames, arm, column), 3) for column in columns.values()]
        first = learned_at(frames, arm)
        when = [said(rise(frames, arm), 3), said(first["step"], 0), said(first["rise"], 3)]
        rows.append([arm, *ends, *when])
    extra = ["rise on texts", "step of 90 % right", "rise on texts then"]
    return markdown(["arm", *columns, *extra], rows)


def curves_table(frames: Frames, arms: list[str]) -> str:
    """Return the skill's right answers, and the rise of the loss on texts, by step."""
    rows = []
    for step in sorted(frames["curves"]["step"].unique()):
        cells = []
        for arm in arms:
            texts = at_step(frames, arm, "text_loss", step) - at_step(frames, arm, "text_loss", 0)
            right = at_step(frames, arm, "skill_right", step)
            cells.append(f"{right.mean():.0%}, {texts.mean():+.3f}")
        rows.append([step, *cells])
    return markdown(["step", *arms], rows)


def shares_table(frames: Frames) -> str:
    """Return where the effects are, for each grown arm and task."""
    columns = {
        "new share": "new_share",
        "parity": "parity",
        "new together": "joint",
        "each alone, summed": "single",
        "random directions": "directions",
        "random neurons": "labels",
        "old together": "joint_old",
    }
    rows = []
    for arm in GROWN:
        for task in ("skill", "agreement"):
            cells = [said(of_arm(frames, arm, f"{task}_{c}"), 3) for c in columns.values()]
            cells[1] = f"{of_arm(frames, arm, f'{task}_parity').mean():.3f}"
            if (of_arm(frames, arm, f"{task}_right") <= CHANCE).all():  # no fall to compare with
                cells[2:] = ["–"] * len(cells[2:])
            rows.append([arm, "is/are" if task == "agreement" else task, *cells])
    return markdown(["arm", "task", *columns], rows)


def removed_table(frames: Frames) -> str:
    """Return what grown arms do without their new neurons, and with only these trained."""
    rows = []
    for arm in GROWN:
        start = at_step(frames, arm, "text_loss", 0)
        columns = ("skill_right", "skill_loss", "leak")
        seeds = without(frames, arm, "removed", "text_loss").index
        whole = [said(final(frames, arm, column)[seeds], 3) for column in columns]
        texts = (final(frames, arm, "text_loss") - start)[seeds]
        rows.append([arm, "whole", *whole, said(texts, 3)])
        for what in ("removed", "random", "only new"):
            cells = [said(without(frames, arm, what, column), 3) for column in columns]
            texts = without(frames, arm, what, "text_loss") - start
            rows.append([arm, what, *cells, said(texts, 3)])
    return markdown(["arm", "", "skill, right", "skill, loss", "leak", "rise on texts"], rows)


def overlaps_table(frames: Frames, arms: list[str]) -> str:
    """Return how much of the old effects on is/are each arm keeps, and what the skill reuses."""
    rows = []
    for kind in ("heads", "neurons"):
        ceiling = of_arm(frames, "before", f"overlap_{kind}")
        for arm in arms:
            cells = [
                said(ceiling),
                said(kept(frames, arm, kind)),
                said(of_arm(frames, arm, f"overlap_{kind}_chance") / ceiling),
                said(kept(frames, arm, kind, "reuse_overlap")),
                said(of_arm(frames, arm, f"reuse_overlap_{kind}_chance") / ceiling),
            ]
            rows.append([kind, arm, *cells])
    header = ["ceiling", "kept", "kept, chance", "skill with old is/are", "this, chance"]
    return markdown(["parts", "arm", *header], rows)


def heads_table(frames: Frames, arms: list[str]) -> str:
    """Return the heads whose effect on is/are moved most, and their effects."""
    columns = {"before": ("before", "agreement"), "before, other prompts": ("before", "other")}
    columns |= {arm: (arm, "agreement") for arm in arms}
    columns |= {f"skill, {arm}": (arm, "skill") for arm in arms}
    shares = {name: head_shares(frames, *column) for name, column in columns.items()}
    moved = pd.concat([moves(frames, arm).mean(axis=1).abs() for arm in arms], axis=1).max(axis=1)
    rows = [
        [head, *(said(share.loc[head]) for share in shares.values())]
        for head in moved.nlargest(N_HEADS).index
    ]
    return markdown(["head", *shares], rows)


def figure(frames: Frames) -> Figure:
    """Draw learning and forgetting by step, and forgetting against learning."""
    picture = Figure(figsize=(10, 3.4), layout="constrained")
    panels = picture.subplots(1, 3)
    for color, (arm, curves) in enumerate(frames["curves"].groupby("arm", sort=False)):
        for seed, curve in curves.groupby("seed"):
            style = {
                "color": f"C{color}",
                "marker": ".",
                "ls": LINES[color],
                "label": arm if seed == 0 else None,
            }
            texts = curve["text_loss"] - curve["text_loss"].iloc[0]
            panels[0].plot(curve["step"], curve["skill_right"], **style)
            panels[1].plot(curve["step"], texts, **style)
            panels[2].plot(curve["skill_loss"], texts, **style)
    panels[0].set(xlabel="step", ylabel="skill: right on unseen nouns")
    panels[1].set(xlabel="step", ylabel="rise of the loss on texts, nats")
    panels[2].set(xlabel="loss of the skill, nats", ylabel="rise of the loss on texts, nats")
    panels[2].set_xscale("log")
    panels[0].legend()
    return picture


def same_heads(frames: Frames, first: str, second: str) -> "pd.Series[float]":
    """Return the overlap of heads' effects on the skill in two arms, by seed."""
    a, b = (head_shares(frames, arm, "skill") for arm in (first, second))
    return a.abs().where(a.abs() < b.abs(), b.abs()).where(a * b > 0, 0.0).sum()


def same_by_chance(frames: Frames, first: str, second: str) -> "pd.Series[float]":
    """Return this overlap if each head is matched with a random one of its layer, by seed."""
    a, b = (head_shares(frames, arm, "skill") for arm in (first, second))
    names = list(a.index)
    found = {seed: overlap_by_chance(names, a[seed].to_numpy(), b[seed].to_numpy()) for seed in a}
    return pd.Series(found, dtype=float)


def in_short(frames: Frames, about: Mapping[str, Any]) -> str:
    """Return question, answer and caution."""
    arms = list(about["study"]["rates"])

    start = at_step(frames, "not grown", "text_loss", 0).mean()
    first = head_shares(frames, "before", "agreement").mean(axis=1)
    strongest = first.abs().idxmax()
    now = {arm: head_shares(frames, arm, "agreement").loc[strongest] for arm in arms}
    of_skill = list(head_shares(frames, "free", "skill").mean(axis=1).abs().nlargest(3).index)
    numbers = {
        "rises": listed({arm: rise(frames, arm) for arm in arms}),
        "rises_then": listed({arm: learned_at(frames, arm)["rise"] for arm in arms}),
        "start": start,
        "rights": listed({arm: 100 * final(frames, arm, "skill_right") for arm in arms}, 0),
        "rate_ratio": about["study"]["rates"]["frozen"] / about["study"]["rates"]["free"],
        "neurons": about["study"]["neurons"],
        "steps": about["study"]["steps"],
        "share_free": said(of_arm(frames, "free", "skill_new_share"), 5),
        "share_frozen": said(of_arm(frames, "frozen", "skill_new_share"), 3),
        "parity": of_arm(frames, "free", "skill_parity").mean(),
        "joint": said(of_arm(frames, "frozen", "skill_joint")),
        "null": said(of_arm(frames, "frozen", "skill_directions")),
        "removed": 100 * without(frames, "free", "removed", "skill_right").mean(),
        "only_new": 100 * without(frames, "free", "only new", "skill_right").mean(),
        "leaks": listed({arm: final(frames, arm, "leak") for arm in arms}, 3),
        "heads": listed({arm: kept(frames, arm, "heads") for arm in arms}),
        "chance": listed(
            {
                arm: of_arm(frames, arm, "overlap_heads_chance")
                / of_arm(frames, "before", "overlap_heads")
                for arm in arms
            }
        ),
        "same": said(same_heads(frames, "frozen", "free")),
        "same_chance": said(same_by_chance(frames, "frozen", "free")),
        "skill_heads": " and ".join([", ".join(of_skill[:-1]), of_skill[-1]]),
        "skill_shares": listed(
            {arm: head_shares(frames, arm, "skill").abs().loc[of_skill].sum() for arm in arms}
        ),
        "strongest": strongest,
        "strongest_before": first[strongest],
        "strongest_now": listed(now),
        "is_are": listed({arm: 100 * final(frames, arm, "agreement_two_way") for arm in arms}, 0),
        "is_are_before": 100 * at_step(frames, "not grown", "agreement_two_way", 0).mean(),
    }
    return wrapped(IN_SHORT.format(**numbers))


def listed(values: Mapping[str, "pd.Series[float]"], digits: int = 2) -> str:
    """Return figures, each followed by its arm."""
    return ", ".join(f"{said(x, digits)} ({arm})" for arm, x in values.items())


def seeds_text(n: int, n_circuits: int) -> str:
    """Return how many seeds there are, and what the figures show."""
    text = (
        f"There are {n} seeds (new entries and order of prompts)" if n > 1 else "There is one seed"
    )
    if n_circuits < n:
        text += f"; circuits and removed neurons were measured for {n_circuits} of them"
    how = "Figures have no intervals" + "; both values are shown" * (n == 2)
    if n > 2:
        how = "Figures are means with Student's 95 % interval over seeds"
    return wrapped(f"{text}. {how}.")


def page_of(frames: Frames, about: Mapping[str, Any], flag: str) -> str:
    """Return the page."""
    arms = list(about["study"]["rates"])
    before = frames[""][frames[""]["arm"] == "before"]
    training = frames["curves"].groupby(["arm", "seed"])["cpu_seconds"].max()
    return PAGE.format(
        **about["study"],
        **{
            key: about[key]
            for key in ("machine", "cpu_seconds", "n_seeds", "circuit_seeds", "texts_sha256")
        },
        in_short=in_short(frames, about),
        seeds=seeds_text(about["n_seeds"], about["circuit_seeds"]),
        difference=before["largest_difference"].max(),
        logit=before["largest_logit"].max(),
        flag=flag,
        n_heads=N_HEADS,
        training=training.sum(),
        step_costs=", ".join(
            f"{seconds / about['study']['steps']:.2f} s ({arm})"
            for arm, seconds in training.groupby("arm", sort=False).mean().items()
        ),
        rate_list=", ".join(f"{x:g} ({arm})" for arm, x in about["study"]["rates"].items()),
        predictions=predictions(verdicts(frames, about)),
        learning=learning_table(frames, arms),
        curves=curves_table(frames, arms),
        shares=shares_table(frames),
        removed=removed_table(frames),
        overlaps=overlaps_table(frames, arms),
        heads=heads_table(frames, arms),
    )


IN_SHORT = """**Question.** SmolLM2 gets {neurons} new neurons in each layer, and learns one narrow
skill. Do new neurons hold the skill? Does it help to freeze the old parts? Which old circuits move?

**Answer.** All arms learn the skill: after {steps} steps, they are right on unseen nouns in
{rights} % of the prompts.

If the old parts are free, new neurons do almost nothing: their output weights start at zero and
move slowly. The model learns and forgets as it does without growth. The model without its new
neurons is still right in {removed:.0f} %; with only new neurons trained, it is right in
{only_new:.0f} %. New neurons have a share of {share_free} of the effects of neurons on the skill;
random labels would give {parity:.3f}.

If the old parts are frozen, the skill depends on new neurons. To patch them together costs {joint}
of the difference of logits that all parts make (random directions: {null}), although their share of
single effects, {share_frozen}, stays below parity.

Freezing does not prevent forgetting at the learning rate of this arm. The loss on held-out texts
(before: {start:.2f} nats) rises by {rises} nats; at the first check with 90 % right answers, it had
risen by {rises_then} nats. In "frozen", the old model comes back exactly if the new neurons are
removed.

All arms also say "yes" or "no" if "Match:" is missing: these words then have a probability of
{leaks}. The old skill, is or are, falls from {is_are_before:.0f} % right of the two words (chance:
50 %) to {is_are} %.

The circuit of the old skill moves in all arms. The overlap of heads' effects before and after,
divided by the ceiling, is {heads}; random matching gives {chance}. The head that mattered most for
is/are, {strongest}, had {strongest_before:.2f} of all heads' effects, and has {strongest_now} after
training. In "frozen", its weights are the same as before; only the new neurons have changed. But
this arm answers is/are at chance, so effects on is/are mean little there.

In "frozen" and "free", the skill partly uses the same old heads: the overlap of heads' effects on
the skill is {same}, and random matching gives {same_chance}. Three heads, {skill_heads}, hold
{skill_shares} of the effects of all heads on the skill. We chose them by their effects in "free".

**Caution.** One model, one skill, few seeds. The rate with old parts frozen is {rate_ratio:.0f}
times the rate with old parts free, since new neurons learned slowly at a lower rate in a pilot. So
we cannot say whether freezing or the rate makes forgetting worse. In "free", new neurons could
hardly take part, because their output weights start at zero and the rate is low. Training shows no
prompts without "Match:"; with such prompts, all arms may keep more."""

PAGE = """# What moves when SmolLM2 grows and learns a skill?

{in_short}

SmolLM2-135M-Instruct gets {neurons} new neurons in each layer, and learns a made-up agreement rule
for {steps} steps of {rows} prompts: after "Match: The keys near the cabinets" comes "yes", since
both nouns have the same number, and after "Match: The key near the cabinets" comes "no". Two thirds
of the nouns are in training, the others in the evaluation. Rates of AdamW:
{rate_list}.
`grow_on_skill.py` says what is compared.
{seeds}

Growth is exact: the largest difference of logits between the model and the grown model, before
training, is {difference:.2g}; the largest logit is {logit:.3g}.

Made by `python -m analyses.studies.grow_on_skill{flag}` on
{machine}. Everything took {cpu_seconds} s of processor time, and training {training:.0f} s of this.
A step took {step_costs}.
The tables are `grow_on_skill.csv` (circuits), `grow_on_skill_curves.csv`,
`grow_on_skill_removed.csv` and `grow_on_skill_heads.csv`.

## Predictions

They were written before the runs, and stand in full in the script. They are about means over seeds,
so a prediction can hold if one seed disagrees.

{predictions}

## Learning and forgetting

At the end, on {asked} prompts with unseen nouns, the same prompts without "Match:" (is/are), and
the first {texts[1]} tokens of each of {texts[0]} paragraphs of Python's documentation
(`pydoc_data.topics`; SHA-256 {texts_sha256:.16}…). "Leak" is the probability of "yes" or "no"
without "Match:". "Right of the two" compares is with are only. Losses are in nats. The last two
columns are about the first check at which 90 % of the answers are right.

{learning}

Right answers of the skill, and the rise of the loss on texts, by step (means over seeds):

{curves}

![Learning and forgetting](grow_on_skill.svg)

## The share of new neurons

`new share` is the part of new neurons in the sum of |effects| of all neurons; parity is their part
of all neurons, in every layer, and so the share that random labels would have. The other columns
are costs of patching from the prompt with the other answer, as a part of the fall of the
metric if all heads and neurons are patched: all new neurons together; each alone, summed; as many
random directions of each layer's neurons; as many random neurons of each layer; all old neurons
together. {prompts} pairs of prompts. Where a model answers at chance, the metric hardly falls, so
costs are left out.

{shares}

## Without the new neurons

"Removed": the output weights of new neurons are zero. "Random": those of as many random old neurons
of each layer, the mean of {draws} draws. "Only new": new neurons as trained, and all old entries
as before training. In "frozen", old entries do not change, so "removed" is the model before
training, and "only new" the whole model.

{removed}

## Which old circuits moved

Effects of old parts on is/are, before training and after. The ceiling is the overlap of the effects
before training on two sets of {prompts} pairs; "kept" is the overlap of before and after, divided
by the ceiling. The last two columns compare the effects on the skill after training with the
effects on is/are before training. Chance matches each part with a random one of its layer.

{overlaps}

The {n_heads} heads whose effect on is/are moved most in any arm (mean over seeds). Figures are the
head's effect, as a part of the sum of |effects| of all heads. In "frozen", is/are is answered at
chance, so the signs of these effects mean little.

{heads}

## What limits this

One model, one skill, one size of growth, {steps} steps. Of three planned seeds, {n_seeds} fitted
the time that we had, and we measured circuits for {circuit_seeds}. New layers were not tried. A
pilot chose the learning rates for speed. They differ between "frozen" and the other arms, so the
size of forgetting depends on them too; lower rates with frozen old parts were not trained to the
end. No arm sees texts, or prompts without "Match:", in training, so nothing tells it to keep what
it knew. The texts are documentation of one kind; SmolLM2 may have been trained on them. Effects are
estimated by attribution, with exact patches of the strongest sites only. The ceiling for overlaps
comes from other sentences with the same nouns. Where a model answers is/are at chance, the effects
on this task are those of a skill that it has lost.
"""
