"""What became of a circuit: its sites in groups, and what every group carries in either model.

A group's drop is the fall of the metric when all its sites have their outputs on the corrupted
prompt, and all other sites are as in the clean run. It is exact, and need not be the sum over the
group's sites.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.circuit import are_among
from attn_only_lens.circuits.own_run import members
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.growth.comparison.circuits import ModelCircuit
from attn_only_lens.growth.comparison.results import JOINED, NEW_LAYERS, OLD_JOINED
from attn_only_lens.growth.expansion.provenance import Provenance

_OLD = {
    "kept": "in both circuits",
    "lost": "only in the original's circuit",
    "gained": OLD_JOINED,
}


def compare_parts(
    models: Sequence[Any],
    contrast: Contrast,
    provenance: Provenance,
    found: Sequence[ModelCircuit],
    nodes: pd.DataFrame,
) -> pd.DataFrame:
    """Return one row for each group of sites: its size, and its drops and shares in both models."""
    is_new = nodes["original_name"].isna()
    inserted = nodes["layer"].isin(provenance.layers.added)
    kinds = nodes["kind"].map({"neuron": "new neurons", "attention": "new heads"})
    new = kinds.mask(inserted, NEW_LAYERS)
    part = nodes["status"].map(_OLD).mask(is_new, new)
    names = dict.fromkeys([*_OLD.values(), *JOINED])
    groups = {name: nodes[part == name] for name in names if (part == name).any()}
    frame = pd.DataFrame({"part": [*groups], "n_sites": [len(sites) for sites in groups.values()]})
    columns = "original_name", "name"
    for prefix, model, one, name in zip(
        ("", "grown_"), models[:2], found[:2], columns, strict=True
    ):
        pair = contrast.pair(model)
        sites, _ = members(model, pair, one.circuit, "these circuits cannot be compared")
        ablated = ablated_model(model, pair, contrast.metric, sites, ablation="resample")
        inside = [are_among(sites, x.assign(name=x[name])) for x in groups.values()]
        kept = ablated.faithfulness([np.flatnonzero(~some) for some in inside])
        has_any = np.array([some.any() for some in inside])
        share = np.where(has_any, 1 - kept, np.nan)  # the original lacks new parts
        frame[f"{prefix}drop"] = share * ablated.span
        frame[f"{prefix}share"] = share
    return frame
