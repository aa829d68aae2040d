"""Measure whether circuits that are chosen by held-out errors hold on other pairs, in SmolLM2.

The pairs and the rankings are those of `circuits_that_hold.py`. The circuits are found on the same
eight pairs, with `Search(objective="held_out", resamples=4)`.

`--smollm2` is the model's folder.
"""

from functools import partial
from typing import Any

import pandas as pd

from analyses.studies.circuits_that_hold import (
    FAMILIES,
    N_FIND,
    N_JUDGE,
    SIZES,
    WANTED,
    circuits_of,
    curve,
    figure,
    measure,
    pairs,
)
from analyses.study import Setting, Study, Tables
from attn_only_lens import circuits, expose_neuron_heads, load, tasks

SEARCH = circuits.Search(objective="held_out", resamples=4)
LARGE = (*SIZES, 8192, 16384, 32768)


def run(setting: Setting) -> Tables:
    """Find and judge circuits of all families."""
    if setting.smoke:
        model = expose_neuron_heads(load("small-english"), copy=True).model
        contrast = tasks.agreement(model.tokenizer, 3 + N_FIND)
        return {"": pd.DataFrame(measure(model, "number", contrast, (64, 512), SEARCH))}
    if setting.smollm2 is None:
        raise ValueError("the study needs --smollm2 FOLDER")
    model = expose_neuron_heads(load(setting.smollm2).to(setting.device)).model
    rows = list[dict[str, Any]]()
    for family in FAMILIES:
        rows += measure(model, family, pairs(model, family, N_FIND + N_JUDGE), LARGE, SEARCH)
    return {"": pd.DataFrame(rows)}


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame = tables[""]
    held_out = frame[frame["pairs"] == "held out"]
    ours = held_out[held_out["arm"] == "discover"].set_index("family")
    rankings = held_out[held_out["arm"] != "discover"]
    as_large = rankings[rankings["size"] == rankings["family"].map(ours["size"])]
    least = as_large.groupby("family")["error"].min()
    as_good = [family for family in ours.index if least[family] <= ours["error"][family]]
    shares = (ours["size"] / ours["n_sites"])[1:]
    shares = shares if len(shares) else ours["size"] / ours["n_sites"]  # in a trial
    return {
        "circuits_of": partial(circuits_of, frame),
        "curve": curve(frame),
        "kept": ", ".join(
            f"{row.Index} keeps {row.faithfulness:.2f} with {row.size:,} sites"
            for row in ours.itertuples()
        ),
        "shares": f"{shares.min():.0%} to {shares.max():.0%}",
        "n_families": len(ours),
        "n_as_good": len(as_good),
        "n_sites": frame["n_sites"],
        "seconds": ours["seconds"],
        "wanted": WANTED,
    }


STUDY = Study(run, lambda tables: {"": figure(tables[""])}, facts)
