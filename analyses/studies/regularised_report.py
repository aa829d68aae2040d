"""Write the page and figures of `regularised.py`, which compare predictions with measurements."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from analyses.tools.benching import markdown, table
from analyses.tools.study_files import verdict

__all__ = ["drift_figure", "page", "shrink_figure"]

N_OTHERS = 3  # the other vectors for a query: two tokens and the bias vector
LOST = 0.1  # a KL in nats
LEAKS = 0.01
COLOURS = {"MLP": "black", "heads": "C0", "post Ω=9": "C1", "post Ω=1000": "C3"}


@dataclass(frozen=True)
class Settings:
    """The settings of a run that the page mentions."""

    study: Mapping[str, object]
    rate: float
    regularizers: Sequence[str]
    decays: Mapping[str, float]
    flag: str


def leak(omega: float, s: float, *, factored: bool) -> float:
    """Return a linear head's weight on other vectors after decay alone, in closed form."""
    others = N_OTHERS * math.exp(-2 * omega * math.exp(-s * (2 if factored else 1)))
    return others / (1 + others)


def when(omega: float, share: float, *, factored: bool) -> float:
    """Return the s at which a linear head gives this share of its weight to other vectors."""
    s = math.log(2 * omega / math.log(N_OTHERS * (1 - share) / share))
    return s / 2 if factored else s


def omega_of(form: str) -> float:
    """Return the Ω in the name of a form."""
    return float(form.partition("=")[2].partition(",")[0])


def passes(losses: pd.Series, bound: float) -> float:
    """Return the index at which a series first exceeds a bound, interpolated linearly; or NaN."""
    above = losses[losses > bound]
    if not len(above):
        return math.nan
    right = above.index[0]
    before = losses[losses.index < right]
    if not len(before):
        return float(right)
    left = before.index[-1]
    return float(left + (right - left) * (bound - losses[left]) / (losses[right] - losses[left]))


def by_seed(frame: pd.DataFrame, column: str, bound: float, index: str) -> list[float]:
    """Return `passes` for each seed."""
    return [passes(rows.set_index(index)[column], bound) for _, rows in frame.groupby("seed")]


def numbers(values: Iterable[float], never: str = "–") -> str:
    """Return all values with two digits, as text."""
    return ", ".join(never if math.isnan(x) else f"{x:.2g}" for x in values)


def steps(values: Iterable[float]) -> str:
    """Return all values as whole steps, as text."""
    return ", ".join("never" if math.isnan(x) else f"{x:.0f}" for x in values)


def ends(curves: pd.DataFrame, column: str, regularizers: Sequence[str]) -> str:
    """Return a table with a row per regularizer and a column per form, with all seeds."""
    last = curves[
        curves["step"] == curves.groupby(["form", "regularizer"])["step"].transform("max")
    ]
    forms = [form for form in curves["form"].unique() if "every" not in form]
    rows = []
    for name in regularizers:
        cells = [
            numbers(last[(last["form"] == f) & (last["regularizer"] == name)][column])
            for f in forms
        ]
        if any(cells):
            rows.append([name, *cells])
    return markdown(["regularizer", *forms], rows)


def structure(curves: pd.DataFrame) -> str:
    """Return a table of the post's forms at the end of their runs: medians over seeds."""
    rows = []
    for (form, name), part in curves[curves["form"].str.startswith("post")].groupby(
        ["form", "regularizer"], sort=False
    ):
        last = part[part["step"] == part["step"].max()].median(numeric_only=True)
        leaks = {k.removeprefix("leak_"): v for k, v in last.items() if k.startswith("leak_")}
        row = {"form": form, "regularizer": name, "steps": int(last["step"]), "KL": last["kl"]}
        row |= {"KL, masks back": last["kl_masked"], "Ω left": last["omega"]}
        rows.append(row | {f"leak: {k}": v for k, v in leaks.items()})
    return table(pd.DataFrame(rows))


def decays(shrinking: pd.DataFrame) -> str:
    """Return a table of the s at which each form and part is lost, with the predictions."""
    rows = []
    for (form, part), some in shrinking.groupby(["form", "part"], sort=False):
        span = "–"
        if part == "omega":
            factored = "factored" in form
            ends_of = [when(omega_of(form), x, factored=factored) for x in (LEAKS, 0.5)]
            span = f"{ends_of[0]:.2f} to {ends_of[1]:.2f}"
        figures = [numbers(by_seed(some, kl, LOST, "s")) for kl in ("kl", "kl_masked")]
        rows.append([form, part, *figures, span])
    header = ["form", "part", f"s where KL passes {LOST}, all seeds", "masks back", "predicted"]
    return markdown(header, rows)


def on_schedule(curves: pd.DataFrame, settings: Settings) -> str:
    """Return a table of the step at which a linear sublayer leaks 1 %, with the closed form."""
    rows = []
    plain = curves[curves["form"].str.startswith("post") & ~curves["form"].str.contains("every")]
    for (form, name), some in plain.groupby(["form", "regularizer"], sort=False):
        if name not in settings.decays:
            continue
        due = when(omega_of(form), LEAKS, factored=False) / settings.rate / settings.decays[name]
        mlp = curves[(curves["form"] == "MLP") & (curves["regularizer"] == name)]
        times = (
            by_seed(some, "leak_out_of_hidden", LEAKS, "step"),
            by_seed(some, "kl", LOST, "step"),
            by_seed(mlp, "kl", LOST, "step"),
        )
        rows.append([form, name, f"{due:.0f}", *map(steps, times)])
    header = ["form", "regularizer", "step predicted for a leak of 1 %", "measured"]
    return markdown([*header, f"its KL passes {LOST}", "the MLP's does"], rows)


def last_of(curves: pd.DataFrame, form: str, name: str, column: str = "kl") -> pd.Series:
    """Return the last values by seed."""
    rows = curves[(curves["form"] == form) & (curves["regularizer"] == name)]
    return rows.sort_values("step").groupby("seed")[column].last()


def predictions(frames: Mapping[str, pd.DataFrame], settings: Settings) -> str:
    """Return each prediction, whether it held, and the numbers."""
    curves, shrinking = frames["curves"], frames["shrinking"]
    posts = [f for f in COLOURS if f in set(curves["form"]) and f.startswith("post")]
    plain = [n for n in settings.regularizers if "dropout" not in n and "η" not in n]
    dropped = [n for n in settings.regularizers if "dropout" in n]

    def ratio(form: str, name: str, to: str = "MLP") -> pd.Series:
        return last_of(curves, form, name) / last_of(curves, to, name)

    def span(values: Iterable[float]) -> str:
        numbers_of = list(values)
        return f"{min(numbers_of):.2g} to {max(numbers_of):.2g}"

    wide = curves[curves["regularizer"].isin(plain)].pivot_table(
        index=["regularizer", "seed", "step"], columns="form", values="kl"
    )
    apart = ((wide["heads"] - wide["MLP"]).abs() / (wide["MLP"] + 1e-6)).max()
    lines = [
        verdict(
            "without dropout heads are the MLP.",
            apart < 0.05,
            f"KL of the two at all checkpoints differs by {apart:.2g} of itself at most",
        )
    ]
    omegas = shrinking[shrinking["part"] == "omega"]
    off = max(
        abs(row["leak_out_of_hidden"] - leak(omega_of(form), row["s"], factored="factored" in form))
        for form, rows in omegas.groupby("form")
        for _, row in rows.iterrows()
    )
    lost = {
        form: by_seed(rows, "kl", LOST, "s") for form, rows in omegas.groupby("form", sort=False)
    }
    inside = all(
        when(omega_of(f), LEAKS, factored="factored" in f)
        <= s
        <= when(omega_of(f), 0.5, factored="factored" in f)
        for f, values in lost.items()
        for s in values
    )
    lines.append(
        verdict(
            "where only Ω shrinks, the leak is the closed form's, and the function is lost "
            f"(KL {LOST}) between a leak of 1 % and of 1/2.",
            off < 1e-3 and inside,
            f"the leak is off by {off:.2g} at most; lost at s = "
            + "; ".join(f"{numbers(values)} ({form})" for form, values in lost.items()),
        )
    )
    parts = {
        part: by_seed(
            shrinking[(shrinking["form"] == posts[-1]) & (shrinking["part"] == part)],
            "kl",
            LOST,
            "s",
        )
        for part in ("ones", "own", "omega")
    }
    lines.append(
        verdict(
            "of decay alone, the ones break first, Ω last.",
            all(a < b < c for a, b, c in zip(*parts.values(), strict=True)),
            f"{posts[-1]}: lost at s = "
            + ", ".join(f"{numbers(values)} ({part})" for part, values in parts.items()),
        )
    )
    weak = min(settings.decays, key=lambda n: settings.decays[n])
    strong = max(settings.decays, key=lambda n: settings.decays[n])
    due, got = [], []
    for form in posts:
        for name, decay in settings.decays.items():
            step = when(omega_of(form), LEAKS, factored=False) / settings.rate / decay
            rows = curves[(curves["form"] == form) & (curves["regularizer"] == name)]
            for reached in by_seed(rows, "leak_out_of_hidden", LEAKS, "step"):
                due.append(step if step <= rows["step"].max() else math.nan)
                got.append(reached)
    timely = all(
        math.isnan(a) == math.isnan(b) and not abs(a - b) > 0.2 * a
        for a, b in zip(due, got, strict=True)
    )
    lines.append(
        verdict(
            "trained with decay, the leak comes when the closed form says (within a fifth).",
            timely,
            "the table below has every seed",
        )
    )
    weakly = [x for form in posts for x in ratio(form, weak)]
    lines.append(
        verdict(
            f"with {weak} the MLP stays (KL below {LOST}), and the post's KL is at most 10 times "
            "its.",
            max(weakly) <= 10 and last_of(curves, "MLP", weak).max() < LOST,
            f"the MLP's KL is {numbers(last_of(curves, 'MLP', weak))}, the post's {span(weakly)} "
            "times that",
        )
    )
    before = [
        curves[(curves["form"] == f) & (curves["regularizer"] == strong)] for f in ("MLP", *posts)
    ]
    mlp_lost = by_seed(before[0], "kl", LOST, "step")
    masks = [by_seed(rows, "leak_out_of_hidden", LEAKS, "step") for rows in before[1:]]
    lines.append(
        verdict(
            f"with {strong} the MLP is lost before the masks are.",
            all(a < b or math.isnan(b) for m in masks for a, b in zip(mlp_lost, m, strict=True)),
            f"the MLP's KL passes {LOST} at steps {steps(mlp_lost)}, the leak 1 % at "
            + "; ".join(f"{steps(m)} ({form})" for form, m in zip(posts, masks, strict=True)),
        )
    )
    for name in plain:
        if name.startswith("L2"):
            leaks = [last_of(curves, f, name, "leak_out_of_hidden").max() for f in posts]
            ratios = [x for form in posts for x in ratio(form, name)]
            lines.append(
                verdict(
                    f"with {name} in the loss nothing leaks (below 1e-6), and the post is at most "
                    "10 times as far off as the MLP.",
                    max(leaks) < 1e-6 and max(ratios) <= 10,
                    f"leak {max(leaks):.2g} at most, {span(ratios)} times the MLP's KL",
                )
            )
    for name in dropped:
        site = name.partition(", ")[2]
        if site == "patterns":
            ours = list(ratio("heads", name))
            same = max(ours) < 3 and min(ours) > 1 / 3
            claim = "dropout, patterns: heads are as far off as the MLP (within 3)."
            lines.append(verdict(claim, same, f"{span(ours)} times the MLP's KL"))
            ratios = [x for form in posts for x in ratio(form, name, "heads")]
            claim, held = "at least ten times as far off as heads.", min(ratios) >= 10
            against = "heads'"
        else:
            ratios = [x for form in posts for x in ratio(form, name)]
            held = min(ratios) > 1 if site == "stream" else max(ratios) < 3 and min(ratios) > 1 / 3
            claim = "further off than the MLP." if site == "stream" else "as the MLP (within 3)."
            against = "the MLP's"
        lines.append(
            verdict(
                f"dropout, {site}: the post is {claim}",
                held,
                f"{span(ratios)} times {against} KL",
            )
        )
    none = [x for form in ("MLP", "heads", *posts) for x in last_of(curves, form, "none")]
    lines.append(
        verdict(
            f"without a regularizer all stay (KL below {LOST}) where only nonzero entries are "
            "trained.",
            max(none) < LOST,
            f"{span(none)}",
        )
    )
    every = curves[curves["form"].str.contains("every")]
    second = every[every["step"] == sorted(every["step"].unique())[1]]
    slow = second["regularizer"] != "none"
    lost_by_then = second[~slow | (second["form"] == f"{posts[-1]}, every entry")]
    lines.append(
        verdict(
            f"with every entry trained the post is lost (KL above {LOST}) by step "
            f"{second['step'].max()}, at a lower rate too for the largest Ω.",
            bool((lost_by_then["kl"] > LOST).all()),
            "KL "
            + "; ".join(
                f"{numbers(rows['kl'])} ({form}, {name})"
                for (form, name), rows in second.groupby(["form", "regularizer"], sort=False)
            ),
        )
    )
    return "\n".join(lines)


def answer(curves: pd.DataFrame, settings: Settings) -> str:
    """Return the first lines of the page."""
    posts = [f for f in COLOURS if f in set(curves["form"]) and f.startswith("post")]
    names = [n for n in settings.regularizers if "η" not in n and n != "none"]
    ratios = [
        x
        for form in posts
        for name in names
        for x in last_of(curves, form, name) / last_of(curves, "MLP", name)
    ]
    every = curves[curves["form"].str.contains("every")]
    final = every[every["step"] == every["step"].max()]
    full = final["regularizer"] == "none"
    lost, slow = final[full]["kl"], final[~full]["kl"]
    none = [x for form in posts for x in last_of(curves, form, "none")]
    due = [
        f"{when(omega_of(form), LEAKS, factored=False):.2g} for Ω = {omega_of(form):g}"
        for form in posts
    ]
    return ANSWER.format(
        low=min(ratios),
        high=max(ratios),
        due=" and ".join(due),
        none=max(none),
        lost=min(lost),
        most=max(lost),
        slow_lost=min(slow),
        slow_most=max(slow),
        steps=int(every["step"].max()),
    )


ANSWER = """\
**Answer.** In part, the post's expectation is right. Weight decay shrinks Ω on a schedule, because
no gradient opposes it: masks leak 1 % at s = ηλt = {due}, and s = 3 does not need a long training.
But in these runs, the model's function had changed before the masks broke. If only the nonzero
entries of the post's form are trained, it ends about as far from the original function as the MLP:
with every regularizer (also dropout), its KL from the original function at the end is {low:.2g} to
{high:.2g} times the MLP's, and {none:.2g} at most without a regularizer. During training, it may be
further away. Training itself breaks the post's form if its zeros are trained, too: without any
regularizer, the KL is {lost:.2g} to {most:.2g} nats after {steps} steps of Adam at this rate, and
{slow_lost:.2g} to {slow_most:.2g} at the lower rate. Our form has the parameters of the MLP, and
trains like the MLP, except under dropout of patterns."""


def drift_figure(curves: pd.DataFrame) -> Figure:
    """Draw KL by step: one panel per regularizer, one colour per form, one line per seed."""
    shown = curves[curves["form"].isin(COLOURS) & (curves["step"] > 0)]
    names = list(dict.fromkeys(shown["regularizer"]))
    picture = Figure(figsize=(13, 6), layout="constrained")
    panels = picture.subplots(2, -(-len(names) // 2), sharex=True, sharey=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        for form, rows in shown[shown["regularizer"] == name].groupby("form", sort=False):
            style = {"color": COLOURS[form], "ls": "--" if form == "heads" else "-", "lw": 1.2}
            for seed, curve in rows.groupby("seed"):
                label = form if seed == 0 else None
                panel.plot(curve["step"], curve["kl"], label=label, **style)
        panel.set_title(name, fontsize="medium")
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("steps after conversion")
    for row in panels:
        row[0].set_ylabel("KL from what it was, nats")
    handles, labels = panels[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return picture


def shrink_figure(shrinking: pd.DataFrame) -> Figure:
    """Draw decay without gradients: KL by s for each part, and the leak with its closed form."""
    picture = Figure(figsize=(12, 4.4), layout="constrained")
    left, right = picture.subplots(1, 2)
    mean = (
        shrinking.groupby(["form", "part", "s"], sort=False).mean(numeric_only=True).reset_index()
    )
    largest = max((f for f in set(mean["form"]) if f.startswith("post")), key=omega_of)
    largest = largest.partition(",")[0]
    ones = mean[(mean["form"] == largest) & mean["part"].isin(["ones", "own"])]
    kinds = [(f"{part} part of the post", rows) for part, rows in ones.groupby("part", sort=False)]
    kinds.append(("MLP, all", mean[mean["form"] == "MLP"]))
    kinds += [
        (f"{form}: Ω", rows)
        for form, rows in mean[mean["part"] == "omega"].groupby("form", sort=False)
    ]
    for number, (label, rows) in enumerate(kinds):
        rows = rows[rows["s"] > 0]
        left.plot(
            rows["s"], rows["kl"].clip(lower=1e-9), "o-", ms=3, color=f"C{number}", label=label
        )
    left.axhline(LOST, color="grey", lw=1, ls=":")
    left.set(yscale="log", xlabel="s = ηλt", ylabel="KL from what it was, nats")
    left.legend(fontsize="small", loc="lower right")
    for number, (form, rows) in enumerate(
        mean[mean["part"] == "omega"].groupby("form", sort=False), start=3
    ):
        right.plot(rows["s"], rows["leak_out_of_hidden"], "o", ms=4, color=f"C{number}", label=form)
        fine = [rows["s"].max() * k / 200 for k in range(201)]
        exact = [leak(omega_of(form), s, factored="factored" in form) for s in fine]
        right.plot(fine, exact, color=f"C{number}", lw=1)
    right.set(xlabel="s = ηλt", ylabel="weight of a linear head on other vectors")
    right.set_ylim(-0.03, 1.1)  # space for the legend
    right.legend(fontsize="small", title="lines: closed form", loc="upper left", ncols=2)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    return picture


def page(frames: Mapping[str, pd.DataFrame], settings: Settings) -> str:
    """Return the whole page in Markdown."""
    curves = frames["curves"]
    every = curves[curves["form"].str.contains("every")]
    first = curves[(curves["step"] == 0) & (curves["form"] == "MLP")].drop_duplicates("seed")
    spent = curves.groupby(["form", "regularizer", "seed"])["seconds"].max().sum()
    return PAGE.format(
        **settings.study,
        flag=settings.flag,
        answer=answer(curves, settings),
        predictions=predictions(frames, settings),
        start=numbers(first["accuracy"]),
        kl=ends(curves, "kl", settings.regularizers),
        accuracy=ends(curves, "accuracy", settings.regularizers),
        logits=ends(curves, "logits", settings.regularizers),
        structure=structure(curves),
        schedule=on_schedule(curves, settings),
        alone=decays(frames["shrinking"]),
        lost_steps=int(every["step"].max()),
        minutes=spent / 60,
    )


PAGE = """# Does the post's form survive training with a regularizer?

**Question.** The blog post says: "The structures used for attention-only transformers are probably
not stable under training with any form of regularization." Is this so?

We train a one-layer model without norm (SiLU, addition modulo {modulus}, d_model {d_model}, d_mlp
{d_mlp}, {n_heads} heads; its accuracy on all pairs is {start} for the three seeds). Then training
continues for {steps} steps of AdamW (η = {lr}, batches of {batch}) in several forms: with its MLP,
with a head for each neuron ("heads", by `convert`), and in the post's form with two values of Ω.
`regularised.py` and `regularised_forms.py` describe what is trained, measured and predicted.

{answer}

Made by `python -m analyses.studies.regularised{flag}`; {minutes:.0f} minutes of processor time in
training.

![KL from the function it was, by step](regularised.svg)

## The predictions

{predictions}

## How far from what it was: KL at the end, nats, all seeds

{kl}

Its logits' distance from what they were, over their norm:

{logits}

Accuracy on all pairs:

{accuracy}

## What happened to the structure

Medians over seeds. "Masks back" has the same weights, but exact masks: attention is 0 wherever the
construction wants 0. The KL that is left is drift of the function; the rest of the KL comes from
broken masks. A leak is the largest weight that any query gives to a masked token. Runs that train
every entry end at step {lost_steps}.

{structure}

## When Ω no longer masks

{schedule}

## Decay alone

We multiply all weights, or one part of them, by e^-s. The table has the s at which the KL exceeds
the bound. "MLP" multiplies the weights of the original model. "ones" are the entries -1 of the SiLU
heads and of the head that clears the hidden part. After t steps with rate η and decay λ, s = ηλt:
for example, s = 3 after 100,000 steps at 3e-4 and 0.1. "Masks back" is the s at which the same
weights exceed the bound with exact masks. In the factored form, the rows with Ω also contain the
score -h of the SiLU heads, so gates become flat when Ω shrinks, and exact masks do not help.

![Decay alone](regularised_shrinking.svg)

{alone}

## What limits this

**Caution.** There is one layer, one task with {modulus} numbers, three seeds of one size, and one
optimizer. The biases, the one-hot positions and the bias vector are not trained. We did not try a
language model without norm. Decay is stronger than usual, so that {steps} steps have the effect of
many thousands; the MLP drifts at each strength. We did not measure separately whether gradients
repair the ones.
"""
