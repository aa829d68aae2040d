"""Find the sites that may have a strong effect of their own, which `explain` patches one by one.

No single estimate sees them all. A gradient in one run misses sites whose gates or patterns are
saturated in this run; secants between the runs are small if another site carries the same effect.
We take the largest of three estimates: the gradients in both runs and the secants. With each
gradient, `attribution` also patches the sites whose estimates are likely to be wrong (see
`repairs.py`), and takes their exact effects instead.
"""

from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.sites import Sites
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.results import Sweep
from attn_only_lens.work import Work

_DIRECTIONS = ("denoise", "noise")


def may_be_strong(
    model: Any, contrast: Contrast, sites: Sites, secants: Sweep, strong: float, work: Work
) -> tuple[list[str], float]:
    """Return the sites that may have an effect of `strong` or more, and the largest other estimate.

    Effects are shares of the difference, in either direction.

    Args:
        model: the model.
        contrast: the two runs and the metric.
        sites: the sites.
        secants: the secant attribution of all sites.
        strong: the smallest strong effect.
        work: how the estimates are run.
    """
    sweeps = [
        attribution(
            *(model, contrast), sites=sites, direction=direction, method="gradient", work=work
        )
        for direction in _DIRECTIONS
    ]
    estimates = np.maximum(*(sweep.effect.abs().to_numpy() for sweep in sweeps))
    exact = np.logical_and(*(sweep.frame["exact"].to_numpy() for sweep in sweeps))
    estimates = np.where(exact, estimates, np.maximum(estimates, secants.effect.abs().to_numpy()))
    chosen = estimates >= strong
    return site_ids(secants.frame)[chosen].tolist(), float(
        estimates[~chosen & ~exact].max(initial=0.0)
    )


def single_effects(patches: dict[str, Sweep]) -> pd.DataFrame:
    """Return the share of the difference that each patched site restores ("denoise") or removes."""
    columns = [
        (sweep.effect if way == "denoise" else -sweep.effect)
        .set_axis(site_ids(sweep.frame))
        .rename(way)
        for way, sweep in patches.items()
    ]
    return pd.concat(columns, axis=1)
