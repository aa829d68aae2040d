"""Measure whether circuits that are found on eight pairs hold on other pairs, in SmolLM2.

The pairs of a family are templates filled with words, and SmolLM2 prefers the right answer on both
prompts. A circuit is found on eight of them by role, and evaluated on the others. Rankings of all
sites, made on the same eight pairs, are evaluated at several sizes and at the circuit's size.

In families of one word, such as a capital, other pairs have other words or other templates. To find
out which of them a circuit fails on, circuits are also found on half of the words in two templates,
and evaluated on the same words in a third template, and on the other words.

`--smollm2` is the model's folder.
"""

import re
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analyses.study import Setting, Study, Tables
from attn_only_lens import Contrast, Work, circuits, expose_neuron_heads, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.stability import share_of_sums

QUIET = Work(progress=False)
BY_ROLE = p.Sites(positions="roles")
SMALLEST = circuits.Search()
WANTED = 0.8
N_FIND, N_JUDGE = 8, 24
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
METHODS = ("gradient", "integrated", "secant")
_N_DRAWN = 42  # pairs from templates, before those that the model does not solve are dropped
# Pairs that are drawn by template and word, in two templates to find, or to judge, and in a third.
_N_BY_WORD = {"find": 12, "same templates": 12, "another template": 7}
FAMILIES = ("number", "pronoun", "capital", "opposite", "indirect object")

_NOUNS = "dog boat letter road farmer teacher book cat car tree friend lawyer doctor horse"
_PLACES = "table garden door school river house window"
_SMALL = "key boat car hat tree letter horse lamp"  # Small English knows these
_HE = "John David Peter Paul Mark Tom James Robert Michael George Henry Frank"
_SHE = "Mary Anna Sarah Jane Emma Alice Helen Laura Susan Kate Rachel Julia"
_CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Russia": "Moscow",
    "Japan": "Tokyo",
    "China": "Beijing",
    "England": "London",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Turkey": "Ankara",
    "Peru": "Lima",
    "Iran": "Tehran",
}
_OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "old": "young",
    "good": "bad",
    "high": "low",
    "black": "white",
    "left": "right",
    "light": "dark",
    "hard": "soft",
    "fast": "slow",
    "strong": "weak",
    "rich": "poor",
    "long": "short",
    "true": "false",
    "happy": "sad",
    "open": "closed",
    "north": "south",
}

_ANSWERS = {
    "number": dict.fromkeys(_NOUNS.split(), "is") | {f"{x}s": "are" for x in _NOUNS.split()},
    "pronoun": dict.fromkeys(_HE.split(), "him") | dict.fromkeys(_SHE.split(), "her"),
    "capital": _CAPITALS,
    "opposite": _OPPOSITES,
}
_TEMPLATES = {
    "number": (
        "The {word} near the door",
        "The {word} at the school",
        "The {word} near the river",
    ),
    "pronoun": ("I met {word} and asked", "I met {word} and talked to", "I saw {word} and called"),
    "capital": (
        "The capital of {word} is the city of",
        "{word} is a country, and its capital is",
        "Q: What is the capital of {word}? A:",
    ),
    "opposite": (
        "The opposite of {word} is",
        "Something that is not {word} is",
        "Q: What is the opposite of {word}? A:",
    ),
}


def pairs(model: Any, family: str, n: int) -> Contrast:
    """Return up to n pairs of a family that the model solves on both prompts."""
    if family == "indirect object":
        return tasks.ioi(model.tokenizer, 3 * n, corruption="swap").solved_by(model)[:n]
    if family == "number":
        keys = Contrast(
            "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
        )
        nouns = [(f"{noun}s", noun) for noun in _NOUNS.split()]
        swaps: Any = {("keys", "key"): nouns, "cabinet": _PLACES.split()}
        return tasks.from_pair(model, n, keys, swaps)
    return filled(model, _TEMPLATES[family], _ANSWERS[family], _N_DRAWN)[:n]


def filled(
    model: Any, templates: Sequence[str], answers: Mapping[str, str], n_drawn: int
) -> Contrast:
    """Return the pairs that the model solves, of `n_drawn` from templates and words."""
    words = [{"word": word, "answer": f" {answer}"} for word, answer in answers.items()]
    made = tasks.from_templates(model.tokenizer, n_drawn, templates, words)
    return made.solved_by(model)


def measure(
    model: Any,
    family: str,
    contrast: Contrast,
    sizes: Sequence[int] = SIZES,
    search: circuits.Search = SMALLEST,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each circuit: its arm and size, and what it keeps on which pairs."""
    find, judge = contrast[:N_FIND], contrast[N_FIND:]
    started = time.process_time()
    circuit = circuits.discover(
        *(model, find), sites=BY_ROLE, faithfulness=WANTED, search=search, work=QUIET
    )
    seconds = time.process_time() - started
    how: dict[str, Any] = {"sites": BY_ROLE, "direction": "noise", "work": QUIET}
    rankings = {
        method: p.attribution(model, find, method=p.Estimate(method, budget=0), **how)
        for method in METHODS
    }
    frame = rankings["secant"].frame
    here, there = (
        ablated_model(
            *(model, some.pair(model), some.metric, frame), ablation="resample", work=QUIET
        )
        for some in (find, judge)
    )
    chosen: dict[tuple[str, int], np.ndarray] = {
        ("discover", len(circuit)): np.flatnonzero(circuit.contains(frame))
    }
    for method, ranking in rankings.items():
        for order in ("magnitude", "signed"):
            rows = here.ranked(ranking, order)
            for size in sorted({*sizes, len(circuit)}):
                chosen[f"{method}, {order}", size] = rows[:size]
    for pairs_of, ablated in (("found on", here), ("held out", there)):
        left = ablated.by_prompt(list(chosen.values()))
        whole, nothing = ablated.whole_by_prompt, ablated.nothing_by_prompt
        shares = (share_of_sums(x - nothing, whole - nothing, ablated.weights) for x in left)
        measures = zip(chosen, shares, ablated.errors(left), strict=True)
        for (arm, size), (faithful, standard_error), error in measures:
            row = {"faithfulness": faithful, "standard error": standard_error, "error": error}
            names = {"family": family, "arm": arm, "size": size, "pairs": pairs_of}
            cost = {"seconds": seconds} if arm == "discover" else {}
            yield names | {"n_pairs": len(whole), "n_sites": len(frame)} | row | cost


def by_word(
    model: Any, family: str, templates: Sequence[str], answers: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield what a circuit keeps on its own pairs, on the same words, and on other words.

    The circuit is found on every second word, in all templates but the last.
    """
    halves = [dict(list(answers.items())[start::2]) for start in (0, 1)]
    find = filled(model, templates[:-1], halves[0], _N_BY_WORD["find"])[:N_FIND]
    used = {*re.findall(r"\w+", " ".join(map(str, (*find.clean, *find.corrupted))))}
    same = {word: answer for word, answer in halves[0].items() if word in used}
    n_same, n_another = _N_BY_WORD["same templates"], _N_BY_WORD["another template"]
    judges = {
        "these pairs": find,
        "the same words in another template": filled(model, templates[-1:], same, n_another),
        "other words in the same templates": filled(model, templates[:-1], halves[1], n_same),
        "other words in another template": filled(model, templates[-1:], halves[1], n_another),
    }
    circuit = circuits.discover(model, find, sites=BY_ROLE, faithfulness=WANTED, work=QUIET)
    for kind, some in judges.items():
        kept = circuits.evaluate(model, circuit, some, work=QUIET)
        names = {"family": family, "size": len(circuit), "pairs": kind, "n_pairs": len(some)}
        measured = ("faithfulness", "standard_error", "error")
        yield names | {name.replace("_", " "): getattr(kept, name) for name in measured}


def run(setting: Setting) -> Tables:
    """Find and judge circuits of all families."""
    if setting.smoke:
        model = expose_neuron_heads(load("small-english"), copy=True).model
        contrast = tasks.agreement(model.tokenizer, 3 + N_FIND)
        words = dict.fromkeys(_SMALL.split(), "is") | {f"{x}s": "are" for x in _SMALL.split()}
        by_place = [f"The {{word}} near the {place}" for place in ("cabinet", "door", "book")]
        return {
            "": pd.DataFrame(measure(model, "number", contrast)),
            "words": pd.DataFrame(by_word(model, "number in Small English", by_place, words)),
        }
    if setting.smollm2 is None:
        raise ValueError("the study needs --smollm2 FOLDER")
    model = expose_neuron_heads(load(setting.smollm2).to(setting.device)).model
    rows, words = list[dict[str, Any]](), list[dict[str, Any]]()
    for family in FAMILIES:
        rows += measure(model, family, pairs(model, family, N_FIND + N_JUDGE))
    for family, templates in _TEMPLATES.items():
        words += by_word(model, family, templates, _ANSWERS[family])
    return {"": pd.DataFrame(rows), "words": pd.DataFrame(words)}


# ---- the page


def circuits_of(frame: pd.DataFrame, measured: str) -> pd.DataFrame:
    """Return a row for each family: what `discover`'s circuit and the best rankings have.

    Args:
        frame: all rows.
        measured: "held out" or "found on".
    """
    rows = list[list[str]]()
    for family, some in frame[frame["pairs"] == measured].groupby("family", sort=False):
        (ours,) = some[some["arm"] == "discover"].to_dict("records")
        rankings = some[some["arm"] != "discover"]
        of_this_size = rankings[rankings["size"] == ours["size"]]
        as_good = rankings[rankings["error"] <= ours["error"]]
        best = of_this_size.loc[of_this_size["error"].idxmin()]
        smallest = as_good.loc[as_good["size"].idxmin()] if len(as_good) else None
        cells = [_said(ours), f"{_said(best)}, {best['arm']}"]
        cells.append("–" if smallest is None else f"{_said(smallest)}, {smallest['arm']}")
        rows.append([str(family), f"{ours['n_pairs']}", *cells])
    of_rankings = ["best ranking of this size", "smallest ranking with this error or less"]
    return pd.DataFrame(rows, columns=["family", "pairs", "discover", *of_rankings])


def _said(row: "Mapping[Hashable, Any] | pd.Series[Any]") -> str:
    measured = f"{row['faithfulness']:.2f} ± {row['standard error']:.2f} ({row['error']:.2f})"
    return f"{row['size']:,} sites {measured}"


def curve(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the least error on held-out pairs at each size over all rankings, by family."""
    rows = frame[(frame["pairs"] == "held out") & (np.log2(frame["size"]) % 1 == 0)]
    least = rows[rows["arm"] != "discover"].groupby(["family", "size"], sort=False)["error"].min()
    return least.unstack().map("{:.2f}".format, na_action="ignore").fillna("").reset_index()


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the error on held-out pairs by circuit size, a panel for each family."""
    families: Sequence[str] = frame["family"].unique()
    picture = Figure(figsize=(2.6 * max(2, len(families)), 3.4), layout="constrained")
    panels = np.atleast_1d(picture.subplots(1, len(families), sharey=True))
    for panel, family in zip(panels, families, strict=True):
        rows = frame[(frame["family"] == family) & (frame["pairs"] == "held out")]
        for number, (arm, some) in enumerate(rows.groupby("arm", sort=False)):
            some = some.sort_values("size")
            style = f"C{(number - 1) // 2}{('--', '-')[number % 2]}"  # the first is discover's
            style = "ko" if arm == "discover" else style
            panel.plot(some["size"], some["error"].clip(0, 1.5), style, label=arm, markersize=5)
        panel.axhline(1 - WANTED, color="grey", linewidth=0.5)
        panel.set(title=family, xscale="log", xlabel="sites")
    panels[0].set_ylabel("error on held-out pairs\n(1.5 and more at the top)")
    picture.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize="small",
    )
    return picture


def by_words(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each family: what its circuit keeps on which pairs."""
    said = [
        f"{row['faithfulness']:.2f} ± {row['standard error']:.2f} ({row['error']:.2f})"
        for row in frame.to_dict("records")
    ]
    cells = frame.assign(said=said).pivot(index=["family", "size"], columns="pairs", values="said")
    order, families = frame["pairs"].unique(), frame["family"].unique()
    return cells[order].loc[families].reset_index().rename(columns={"size": "sites"})


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame = tables[""]
    ours = frame[frame["arm"] == "discover"]
    held_out = frame[frame["pairs"] == "held out"]
    held = held_out[held_out["arm"] == "discover"].set_index("family")
    rankings = held_out[held_out["arm"] != "discover"].assign(
        ours=lambda rows: rows["family"].map(held["error"]),
        as_large=lambda rows: rows["size"] == rows["family"].map(held["size"]),
    )
    as_good = rankings[rankings["error"] <= rankings["ours"]]
    better = set(as_good.loc[as_good["as_large"], "family"]) - {"number"}
    others = held["faithfulness"].drop("number")
    words = tables["words"].query("family != 'number'").groupby("pairs")["faithfulness"]
    same, other = (
        words.get_group(pairs)
        for pairs in ("the same words in another template", "other words in the same templates")
    )
    at_512 = rankings[rankings["size"] == 512].groupby("family")["error"].min().drop("number")
    return {
        "circuits_of": partial(circuits_of, frame),
        "curve": curve(frame),
        "held": held.to_dict("index"),
        "n_number": as_good.query("family == 'number'")["size"].min(),
        "n_better": len(better),
        "others": f"{others.min():.2f} to {others.max():.2f}",
        "at_512": f"{at_512.min():.2f} to {at_512.max():.2f}",
        "by_words": by_words(tables["words"]),
        "same_words": f"{same.min():.2f} to {same.max():.2f}",
        "other_words": f"{other.min():.2f} to {other.max():.2f}",
        "seconds": ours["seconds"],
        "n_sites": frame["n_sites"],
        "wanted": WANTED,
    }


STUDY = Study(run, lambda tables: {"": figure(tables[""])}, facts)
