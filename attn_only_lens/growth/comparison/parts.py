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
from attn_only_lens.circuits.own_run import members
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.growth.comparison.alignment import Alignment
from attn_only_lens.growth.comparison.circuits import ModelCircuit, renamed
from attn_only_lens.growth.comparison.results import JOINED, NEW_LAYERS, OLD_JOINED
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.patching.columns import site_ids

_OLD = {
    "kept": "in both circuits",
    "lost": "only in the original's circuit",
    "gained": OLD_JOINED,
}


def compare_parts(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
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
    groups = {name: nodes["id"][part == name] for name in names if (part == name).any()}
    frame = pd.DataFrame({"part": [*groups], "n_sites": [len(ids) for ids in groups.values()]})
    names_of_models: tuple[dict[str, str], ...] = (alignment.names, {})
    for prefix, model, one, of_model in zip(
        ("", "grown_"), models[:2], found[:2], names_of_models, strict=True
    ):
        pair = contrast.pair(model)
        sites, _ = members(model, pair, one.circuit, "these circuits cannot be compared")
        ids = pd.Series(renamed(site_ids(sites), of_model))
        ablated = ablated_model(model, pair, contrast.metric, sites, ablation="resample")
        others = [np.flatnonzero(~ids.isin(group)) for group in groups.values()]
        kept = ablated.faithfulness(others)
        has_any = np.array([len(rows) < len(ids) for rows in others])
        share = np.where(has_any, 1 - kept, np.nan)  # the original lacks new parts
        frame[f"{prefix}drop"] = share * ablated.span
        frame[f"{prefix}share"] = share
    return frame
