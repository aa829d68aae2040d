"""Write the page and figure of `grow_on_skill`."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from analyses.studies.pressure_report import predictions, said
from analyses.tools.benching import markdown
from analyses.tools.circuit_measures import overlap_by_chance
from analyses.tools.study_files import t_interval, wrapped

__all__ = ["figure", "page"]

Frames: TypeAlias = Mapping[str, pd.DataFrame]
Seeds: TypeAlias = "pd.Series[float]"  # a figure of each seed
FIRST = ("frozen", "free", "not grown")  # the arms of predictions 1 to 10
LAST = ("frozen, slower", "free, faster")  # both have one rate
FAILED = {3, 6, 7}  # predictions that failed with two seeds
NOTHING = said(pd.Series(dtype=float))  # said of a figure that was not measured
RIGHT = 0.9  # of the answers: learned
CHANCE = 0.5  # of the answers, where two are possible
CLOSE = 0.1
N_HEADS = 10
DIFFERENCES = (
    ("the rate, old parts frozen", "frozen", "frozen, slower"),
    ("the rate, old parts free", "free, faster", "free"),
    ("freezing, at one rate", "free, faster", "frozen, slower"),
    ("freezing and the rate", "frozen, slower", "free"),
    ("growth", "free", "not grown"),
)
LINES = ("-", "-", ":", "--", "--")  # the second and third arm nearly coincide


def clear(difference: Seeds) -> bool:
    """Return whether the interval of a difference is above zero."""
    return t_interval(difference.dropna())[1] > 0


def circuit_arms(frames: Frames) -> list[str]:
    """Return the trained arms whose circuits were measured."""
    return [arm for arm in frames[""]["arm"].unique() if arm != "before"]


def final(frames: Frames, arm: str, column: str) -> Seeds:
    """Return a figure at the end of training, by seed."""
    return frames["curves"].query("arm == @arm").groupby("seed")[column].last()


def at_step(frames: Frames, arm: str, column: str, step: int) -> Seeds:
    """Return a figure at a step, by seed."""
    curves = frames["curves"]
    rows = curves[(curves["arm"] == arm) & (curves["step"] == step)]
    return rows.set_index("seed")[column]


def rise(frames: Frames, arm: str, column: str = "text_loss") -> Seeds:
    """Return the change of a figure from the start to the end, by seed."""
    return final(frames, arm, column) - at_step(frames, arm, column, 0)


def learned_at(frames: Frames, arm: str) -> pd.DataFrame:
    """Return the curve's row of the first check with enough right answers (or the last), by seed.

    `rise` is the rise of the loss on texts, and `reached` whether there were enough.
    """
    curves = frames["curves"].query("arm == @arm")
    reached = curves["skill_right"] >= RIGHT
    rise = curves["text_loss"] - curves.groupby("seed")["text_loss"].transform("first")
    last = curves["step"] == curves["step"].max()
    return curves.assign(reached=reached, rise=rise)[reached | last].groupby("seed").first()


def forgot_more(frames: Frames, more: str, less: str) -> Seeds:
    """Return the difference of two arms' rises of the loss on texts, when the skill is learned."""
    return learned_at(frames, more)["rise"] - learned_at(frames, less)["rise"]


def of_arm(frames: Frames, arm: str, column: str) -> Seeds:
    """Return a measure of circuits, by seed."""
    rows = frames[""][frames[""]["arm"] == arm]
    return rows.set_index("seed")[column]


def of_new(frames: Frames, arm: str) -> list[Seeds]:
    """Return the share of new neurons on the skill, parity, their cost, and that of directions."""
    columns = ("new_share", "parity", "joint", "directions")
    return [of_arm(frames, arm, f"skill_{column}") for column in columns]


def kept(frames: Frames, arm: str, kind: str, column: str = "overlap") -> Seeds:
    """Return the overlap of old effects relative to the ceiling, by seed."""
    ceiling = of_arm(frames, "before", f"overlap_{kind}").mean()  # the same for every seed
    return of_arm(frames, arm, f"{column}_{kind}") / ceiling


def kept_by_chance(frames: Frames, arm: str, kind: str, column: str = "overlap") -> Seeds:
    """Return the overlap of effects that are matched at random, relative to the ceiling."""
    ceiling = of_arm(frames, "before", f"overlap_{kind}").mean()
    return of_arm(frames, arm, f"{column}_{kind}_chance") / ceiling


def without(frames: Frames, arm: str, what: str, column: str) -> Seeds:
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
    """Yield each tested prediction of `grow_on_skill.py`: a claim, whether it held, figures."""
    first = list(first_checks(frames, about["study"]["arms"]["frozen"]["steps"] // 2))
    failed = {number for number, (held, _) in enumerate(first, 1) if not held}
    which = ", ".join(map(str, sorted(failed))) or "none"
    checks = [*first, (failed == FAILED, f"failed: {which}"), *later_checks(frames)]
    for number, (claim, (held, finding)) in enumerate(zip(CLAIMS, checks, strict=True), 1):
        if NOTHING not in finding:
            yield f"({number}) {claim}.", held, finding


def first_checks(frames: Frames, middle: int) -> Iterator[tuple[bool, str]]:
    """Yield whether each of the first ten claims held, and figures; `middle` is a step."""
    right = {arm: final(frames, arm, "skill_right") for arm in FIRST}
    yield min(x.mean() for x in right.values()) >= RIGHT, by_arm(right)
    half = {arm: at_step(frames, arm, "skill_loss", middle) for arm in ("frozen", "free")}
    yield half["frozen"].mean() > half["free"].mean(), by_arm(half)
    rises = {arm: rise(frames, arm) for arm in FIRST}
    yield rises["frozen"].mean() < rises["free"].mean() / 2, by_arm(rises)
    ratio = rises["free"].mean() / rises["not grown"].mean()
    yield abs(ratio - 1) <= 0.25, f"a ratio of {ratio:.2f}"
    removed = without(frames, "free", "removed", "skill_right")
    share, parity, *_ = of_new(frames, "free")
    finding = f"right {said(removed)}; share {said(share, 5)}, parity {parity.mean():.3f}"
    yield removed.mean() >= RIGHT and share.mean() < parity.mean(), finding
    share, parity, joint, null = of_new(frames, "frozen")
    finding = f"share {said(share, 3)}; cost {said(joint)}, directions {said(null)}"
    yield share.mean() >= 3 * parity.mean() and joint.mean() > null.mean(), finding
    heads = {arm: kept(frames, arm, "heads") for arm in FIRST}
    yield heads["frozen"].mean() >= 0.9 > heads["free"].mean(), by_arm(heads)
    gap = heads["free"] - heads["not grown"]
    yield abs(gap.mean()) <= CLOSE, f"a difference of {said(gap)}"
    common = set(most_moved(frames, "free")) & set(most_moved(frames, "not grown"))
    yield len(common) >= 5, f"{len(common)} of {N_HEADS}"
    leaks = {arm: final(frames, arm, "leak") for arm in FIRST}
    yield min(x.mean() for x in leaks.values()) > 0.5, by_arm(leaks, 3)


def later_checks(frames: Frames) -> Iterator[tuple[bool, str]]:
    """Yield whether each of the last ten claims held, and figures."""
    gap = rise(frames, "frozen") - rise(frames, "free")
    yield clear(gap), f"a difference of {said(gap)} nats"
    _, _, joint, null = of_new(frames, "frozen")
    same = same_heads(frames, "frozen", "free") - same_by_chance(frames, "frozen", "free")
    finding = f"differences of {said(joint - null)} (cost) and {said(same)} (overlap)"
    yield clear(joint - null) and clear(same), finding
    gap = kept(frames, "frozen", "heads") - kept_by_chance(frames, "frozen", "heads")
    yield not clear(gap), f"a difference of {said(gap)}"
    right = final(frames, "frozen, slower", "skill_right")
    yield right.mean() >= RIGHT, said(right)
    then = {arm: learned_at(frames, arm)["rise"] for arm in ("frozen", "free", *LAST)}
    yield then["frozen, slower"].mean() < then["frozen"].mean() / 2, by_arm(then)
    for more, less in (("frozen, slower", "free"), ("free, faster", "frozen, slower")):
        gap = then[more] - then[less]
        yield clear(gap), f"a difference of {said(gap)} nats"
    leak, is_are = (final(frames, "frozen, slower", x) for x in ("leak", "agreement_two_way"))
    finding = f"leak {said(leak, 3)}, is/are {said(is_are)}"
    yield leak.mean() > 0.5 and is_are.mean() < 0.75, finding
    share, parity, joint, null = of_new(frames, "frozen, slower")
    finding = f"cost {said(joint)}, directions {said(null)}; share {said(share, 3)}"
    yield joint.mean() > max(0.5, null.mean()) and share.mean() < parity.mean(), finding
    faster, free = (of_new(frames, arm)[0] for arm in ("free, faster", "free"))
    finding = f"{said(faster, 4)} and {said(free, 5)}"
    yield 10 * free.mean() <= faster.mean() < parity.mean(), finding


def by_arm(values: Mapping[str, Seeds], digits: int = 2) -> str:
    """Return figures by arm, in a sentence."""
    return "; ".join(f"{arm} {said(x, digits)}" for arm, x in values.items())


def learning_table(frames: Frames, about: Mapping[str, Any]) -> str:
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
    rows = [["before", *(f"{x.mean():.3g}" for x in before), ""]]
    for arm in about["study"]["arms"]:
        ends = [said(final(frames, arm, column)) for column in columns.values()]
        rows.append([arm, *ends, said(rise(frames, arm))])
    return markdown(["arm", *columns, "rise on texts"], rows)


def learned_table(frames: Frames, about: Mapping[str, Any]) -> str:
    """Return what each arm has forgotten at the first check with 90 % right answers."""
    columns = {
        "skill, right": "skill_right",
        "is/are: right of the two": "agreement_two_way",
        "leak": "leak",
        "rise on texts": "rise",
    }
    rows = []
    for arm, how in about["study"]["arms"].items():
        first = learned_at(frames, arm)
        reached = f"{first['reached'].sum()} of {len(first)}"
        cells = [said(first["step"], 0), *(said(first[column]) for column in columns.values())]
        rows.append([arm, f"{how['rate']:g}", reached, *cells])
    return markdown(["arm", "rate", "seeds with 90 %", "step", *columns], rows)


def differences_table(frames: Frames) -> str:
    """Return differences of forgetting between arms, by seed."""
    rows = []
    for what, more, less in DIFFERENCES:
        end = rise(frames, more) - rise(frames, less)
        rows.append([what, f"{more} − {less}", said(forgot_more(frames, more, less)), said(end)])
    return markdown(["what differs", "arms", "at 90 % right", "at the end"], rows)


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
    for arm in frames["removed"]["arm"].unique():  # grown
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
    for arm in frames["removed"]["arm"].unique():
        start = at_step(frames, arm, "text_loss", 0)
        columns = ("skill_right", "skill_loss", "leak")
        whole = [said(final(frames, arm, column)) for column in columns]
        rows.append([arm, "whole", *whole, said(rise(frames, arm))])
        for what in ("removed", "random", "only new"):
            cells = [said(without(frames, arm, what, column)) for column in columns]
            texts = without(frames, arm, what, "text_loss") - start
            rows.append([arm, what, *cells, said(texts)])
    return markdown(["arm", "", "skill, right", "skill, loss", "leak", "rise on texts"], rows)


def overlaps_table(frames: Frames, arms: list[str]) -> str:
    """Return how much of the old effects on is/are each arm keeps, and what the skill reuses."""
    rows = []
    for kind in ("heads", "neurons"):
        ceiling = of_arm(frames, "before", f"overlap_{kind}")
        for arm in arms:
            cells = [
                f"{ceiling.mean():.2f}",  # the same for every seed
                said(kept(frames, arm, kind)),
                said(kept_by_chance(frames, arm, kind)),
                said(kept(frames, arm, kind, "reuse_overlap")),
                said(kept_by_chance(frames, arm, kind, "reuse_overlap")),
            ]
            rows.append([kind, arm, *cells])
    header = ["ceiling", "kept", "kept, chance", "skill with old is/are", "this, chance"]
    return markdown(["parts", "arm", *header], rows)


def figure(frames: Frames) -> Figure:
    """Draw learning and forgetting by step, and forgetting when the skill is learned."""
    picture = Figure(figsize=(11, 3.4), layout="constrained")
    panels = picture.subplots(1, 3)
    for number, (arm, curves) in enumerate(frames["curves"].groupby("arm", sort=False)):
        style = {"color": f"C{number}", "ls": LINES[number]}
        rises = curves["text_loss"] - curves.groupby("seed")["text_loss"].transform("first")
        for panel, values in zip(panels, (curves["skill_right"], rises), strict=False):
            for _, of_seed in values.groupby(curves["seed"]):
                panel.plot(curves["step"][of_seed.index], of_seed, **style, lw=0.8, alpha=0.3)
            panel.plot(values.groupby(curves["step"]).mean(), **style, marker=".", label=arm)
        then = learned_at(frames, str(arm))["rise"]
        mean, low, high = t_interval(then)
        panels[2].plot([number] * len(then), then, ".", color=f"C{number}", alpha=0.6)
        panels[2].errorbar(
            number + 0.2, mean, [[mean - low], [high - mean]], fmt="o", color=f"C{number}"
        )
    names = frames["curves"]["arm"].unique()
    panels[2].set_xticks(range(len(names)), names, rotation=25, ha="right")
    panels[0].set(xlabel="step", ylabel="skill: right on unseen nouns")
    panels[1].set(xlabel="step", ylabel="rise of the loss on texts, nats")
    panels[2].set(ylabel="rise at the first check with 90 % right")
    panels[0].legend()
    return picture


def same_heads(frames: Frames, first: str, second: str) -> Seeds:
    """Return the overlap of heads' effects on the skill in two arms, by seed."""
    a, b = (head_shares(frames, arm, "skill") for arm in (first, second))
    return a.abs().where(a.abs() < b.abs(), b.abs()).where(a * b > 0, 0.0).sum()


def same_by_chance(frames: Frames, first: str, second: str) -> Seeds:
    """Return this overlap if each head is matched with a random one of its layer, by seed."""
    a, b = (head_shares(frames, arm, "skill") for arm in (first, second))
    names = list(a.index)
    overlaps = {
        seed: overlap_by_chance(names, a[seed].to_numpy(), b[seed].to_numpy()) for seed in a
    }
    return pd.Series(overlaps, dtype=float)


def in_short(frames: Frames, about: Mapping[str, Any]) -> str:
    """Return question, answer and caution."""
    how, measured = about["study"]["arms"], circuit_arms(frames)
    ends = {
        column: {arm: final(frames, arm, column) for arm in how}
        for column in ("skill_right", "leak", "agreement_two_way")
    }
    before = head_shares(frames, "before", "agreement").mean(axis=1)
    strongest = str(before.abs().idxmax())
    few = min(len(final(frames, arm, "leak")) for arm in LAST)
    numbers = {
        "few": f"{few} seeds"
        + ", but no measures of circuits" * (not set(LAST) & set(frames[""]["arm"])),
        "neurons": about["study"]["neurons"],
        "rights": by_arm(ends["skill_right"]),
        "least_leak": min(x.mean() for x in ends["leak"].values()),
        "is_are": by_arm(ends["agreement_two_way"]),
        "is_are_before": at_step(frames, "not grown", "agreement_two_way", 0).mean(),
        "learned": "; ".join(
            f"{arm} {x['reached'].sum()} of {len(x)}"
            for arm, x in ((arm, learned_at(frames, arm)) for arm in how)
        ),
        "start": at_step(frames, "not grown", "text_loss", 0).mean(),
        "rises": by_arm({arm: learned_at(frames, arm)["rise"] for arm in how}, 1),
        "rate_frozen": said(forgot_more(frames, "frozen", "frozen, slower"), 1),
        "rate_free": said(forgot_more(frames, "free, faster", "free"), 1),
        "freezing": said(forgot_more(frames, "free, faster", "frozen, slower"), 1),
        "slower_than_free": said(forgot_more(frames, "frozen, slower", "free"), 1),
        "removed": 100 * without(frames, "free", "removed", "skill_right").mean(),
        "only_new": 100 * without(frames, "free", "only new", "skill_right").mean(),
        "heads": by_arm({arm: kept(frames, arm, "heads") for arm in measured}),
        "chance": by_arm({arm: kept_by_chance(frames, arm, "heads") for arm in measured}),
        "strongest": strongest,
        "strongest_before": before[strongest],
        "strongest_now": by_arm(
            {arm: head_shares(frames, arm, "agreement").loc[strongest] for arm in measured}
        ),
        "same": said(same_heads(frames, "frozen", "free")),
        "same_chance": said(same_by_chance(frames, "frozen", "free")),
    }
    for arm, digits in (("frozen", 3), ("free", 5)):
        share, parity, joint, null = of_new(frames, arm)
        numbers |= {f"share_{arm}": said(share, digits), "parity": parity.mean()}
        numbers |= {f"joint_{arm}": said(joint), f"null_{arm}": said(null)}
    return wrapped(IN_SHORT.format(**numbers))


def seeds_text(frames: Frames, earlier: Mapping[str, Any]) -> str:
    """Return how many seeds each arm has, with circuits or not, and which are of an earlier run."""
    counts = {
        part: frames[name]
        .groupby("arm", sort=False)["seed"]
        .nunique()
        .drop("before", errors="ignore")
        for part, name in (("Seeds", "curves"), ("Seeds with measures of circuits", ""))
    }
    parts = [
        f"{part}: {', '.join(f'{n} ({arm})' for arm, n in by.items())}."
        for part, by in counts.items()
    ]
    if earlier:
        seeds = (f"{', '.join(map(str, x))} ({arm})" for arm, x in earlier["seeds"].items())
        parts.append(f"These come from an earlier run of the same code: {'; '.join(seeds)}.")
    return wrapped(" ".join(parts))


def page(frames: Frames, about: Mapping[str, Any], flag: str = "") -> str:
    """Return the page."""
    how, measured = about["study"]["arms"], circuit_arms(frames)
    before = frames[""][frames[""]["arm"] == "before"]
    training = frames["curves"].groupby(["arm", "seed"], sort=False)["cpu_seconds"].max()
    steps = {
        arm: seconds / how[arm]["steps"] for arm, seconds in training.groupby("arm").mean().items()
    }
    return PAGE.format(
        **about["study"],
        **{key: about[key] for key in ("machine", "texts_sha256")},
        in_short=in_short(frames, about),
        seeds=seeds_text(frames, about["earlier"]),
        difference=before["largest_difference"].max(),
        logit=before["largest_logit"].max(),
        flag=flag,
        cpu_seconds=about["cpu_seconds"] + about["earlier"].get("cpu_seconds", 0),
        training=training.sum(),
        cheapest=min(steps.values()),
        dearest=max(steps.values()),
        settings=", ".join(
            f"{x['rate']:g} for {x['steps']} steps ({arm})" for arm, x in how.items()
        ),
        predictions=predictions(verdicts(frames, about)),
        learning=learning_table(frames, about),
        learned=learned_table(frames, about),
        differences=differences_table(frames),
        shares=shares_table(frames),
        removed=removed_table(frames),
        overlaps=overlaps_table(frames, measured),
    )


CLAIMS = (
    "every arm is right for 90 % or more at the end",
    "frozen learns more slowly: its loss is higher after half of the steps",
    "freezing halves forgetting (the rise of the loss on texts)",
    "free forgets like not grown, within 25 %",
    "free without its new neurons is right for 90 % or more; their share is below parity",
    "frozen: the share of new neurons is three times parity; they cost more than directions",
    "frozen keeps its heads' effects (.9 of the ceiling or more), free keeps less",
    "free keeps as much as not grown, within .1",
    "at least 5 of the 10 heads that moved most are the same in free and not grown",
    'all arms leak: "yes" or "no" has a probability above .5 without the marker',
    "3, 6 and 7 fail with five seeds, as with two; the other seven of 1 to 10 hold",
    "frozen forgets more than free, clearly",
    "frozen: new neurons cost more than directions, and heads are shared with free; both clearly",
    "frozen: the overlap of heads' effects on is/are is not clearly above chance",
    '"frozen, slower" is right for 90 % or more at the end',
    'at 90 % right, "frozen, slower" has forgotten less than half of what frozen has',
    "it has then forgotten more than free, clearly",
    'and less than "free, faster", clearly',
    '"frozen, slower" leaks (above .5), and is right on is/are in less than 75 %',
    '"frozen, slower": new neurons cost more than .5 and than directions; share below parity',
    '"free, faster": the share of new neurons is ten times that of free, and below parity',
)

IN_SHORT = """**Question.** SmolLM2 gets {neurons} new neurons in each layer, and learns one narrow
skill. Do new neurons hold the skill? Is it freezing the old parts, or the learning rate, that
decides how much the model forgets? Which old circuits move?

**Answer.** At the end, this part of the answers on unseen nouns is right: {rights}. The seeds with
90 % right answers at some check: {learned}.

If the old parts are free, new neurons do almost nothing: their output weights start at zero and
move slowly. The model learns and forgets as it does without growth. The model without its new
neurons is still right in {removed:.0f} %. If old entries are put back to what they were before
training, and new neurons keep what they learned, it is right in {only_new:.0f} %. New neurons have
a share of {share_free} of the effects of neurons on the skill; random labels would give
{parity:.3f}.

If the old parts are frozen, the skill depends on new neurons. To patch them together costs
{joint_frozen} of the difference of logits that all parts make (random directions: {null_frozen}),
although their share of single effects, {share_frozen}, stays below parity.

Is it the rate, or freezing, that makes the model forget? Both matter at the rates that we tried.
The loss on held-out texts (before: {start:.2f} nats) has risen by these amounts at the first check
with 90 % right answers (at the end, if there is none): {rises}. With old parts frozen, a quarter of
the rate saves {rate_frozen} nats. With old parts free, ten times the rate costs {rate_free} nats.
So freezing saves {freezing} nats at the rate that these two arms share. But all weights together
learn the skill at a tenth of this rate, and then forget about as much: "frozen, slower" forgets
{slower_than_free} nats more than "free". So we found no gain from freezing that a low rate does not
give. In frozen arms, the old model comes back exactly if the new neurons are removed.

All arms also say "yes" or "no" if "Match:" is missing: these words then have a probability of at
least {least_leak:.3f}. The old skill, is or are, falls from {is_are_before:.2f} (right of the two
words; chance: .50) to: {is_are}.

The circuit of the old skill moves in the three arms where we measured it. The overlap of heads'
effects before and after, divided by the ceiling, is: {heads}. Random matching gives: {chance}. The
head that mattered most for is/are, {strongest}, had {strongest_before:.2f} of all heads' effects,
and has after training: {strongest_now}. In "frozen", its weights are the same as before; only the
new neurons have changed. But this arm answers is/are at chance, so effects on is/are mean little
there.

In "frozen" and "free", the skill partly uses the same old heads: the overlap of heads' effects on
the skill is {same}, and random matching gives {same_chance}.

**Caution.** One model, one skill, one size of growth; "frozen, slower" and "free, faster" have
{few}. The rate of these two arms is too high for all weights together: training is unstable in
"free, faster", and freezing may save less at a rate between those that we tried. In "free", new
neurons could hardly take part, because their output weights start at zero and the rate is low. No
arm sees texts, or prompts without "Match:", in training; with them, all arms may keep more."""

PAGE = """# What moves when SmolLM2 grows and learns a skill?

{in_short}

SmolLM2-135M-Instruct gets {neurons} new neurons in each layer, and learns a made-up agreement rule
from {rows} prompts a step: after "Match: The keys near the cabinets" comes "yes", since both nouns
have the same number, and after "Match: The key near the cabinets" comes "no". Two thirds of the
nouns are in training, the others in the evaluation. Rates of AdamW:
{settings}.
`grow_on_skill.py` says what is compared. A seed determines new entries and the order of prompts.
Figures are means with Student's 95 % interval over seeds.
{seeds}

Growth is exact: the largest difference of logits between the model and the grown model, before
training, is {difference:.2g}; the largest logit is {logit:.3g}.

Made by `python -m analyses.studies.grow_on_skill{flag}` on
{machine}. Everything took {cpu_seconds} s of processor time, and training {training:.0f} s of this.
A step took {cheapest:.2f} to {dearest:.2f} s.
The tables are `grow_on_skill.csv` (circuits), `grow_on_skill_curves.csv`,
`grow_on_skill_removed.csv` and `grow_on_skill_heads.csv`.

## Predictions

They were written before the runs, and stand in full in the script: the first ten before any run,
the others before seeds 2 to 4 and before the last two arms. They are about means over seeds, except
for "clearly": then Student's 95 % interval of the difference excludes zero. Predictions without an
entry need circuits that were not measured.

{predictions}

## Learning and forgetting

At the end, on {asked} prompts with unseen nouns, the same prompts without "Match:" (is/are), and
the first {texts[1]} tokens of each of {texts[0]} paragraphs of Python's documentation
(`pydoc_data.topics`; SHA-256 {texts_sha256:.16}…). "Leak" is the probability of "yes" or "no"
without "Match:". "Right of the two" compares is with are only. Losses are in nats.

{learning}

![Learning and forgetting](grow_on_skill.svg)

Left and middle: thin lines are seeds, thick lines means. Right: points are seeds, with the mean and
its interval.

## Rate or freezing?

At the first of the checks (every {check_every} steps) at which 90 % of the answers are right; for a
seed without such a check, at the end:

{learned}

Differences of the rise of the loss on texts, between two arms with the same seed, in nats:

{differences}

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
as before training. In frozen arms, old entries do not change, so "removed" is the model before
training, and "only new" the whole model.

{removed}

## Which old circuits moved

Effects of old parts on is/are, before training and after. The ceiling is the overlap of the effects
before training on two sets of {prompts} pairs; "kept" is the overlap of before and after, divided
by the ceiling. The last two columns compare the effects on the skill after training with the
effects on is/are before training. Chance matches each part with a random one of its layer.

{overlaps}

## What limits this

New layers were not tried. Pilots chose the rates. The arms do not separate the rate from the number
of steps. The texts are documentation of one kind; SmolLM2 may have been trained on them. Effects
are estimated by attribution, with exact patches of the strongest sites only. The ceiling for
overlaps comes from other sentences with the same nouns. Where a model answers is/are at chance, the
effects on this task are those of a skill that it has lost.
"""
