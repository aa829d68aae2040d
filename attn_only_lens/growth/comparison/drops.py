"""How much the metric falls when a component's output is that of the corrupted prompt.

The drop of a component is the metric of the clean run minus the metric with the component's output
replaced at all positions, for each prompt of the first batch. Drops are estimated by secants, and
the estimates that are likely to be wrong are replaced by exact patches (`patching.attribution`).
Then the components with the largest drops in any of the models are patched in all of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.metrics import as_metric, bind
from attn_only_lens.engine.sites import Sites
from attn_only_lens.growth.comparison.alignment import Alignment
from attn_only_lens.growth.comparison.clean_runs import MODELS
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching.estimate import Estimate
from attn_only_lens.patching.results import Sweep
from attn_only_lens.work import Work


def measure_drops(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
    n_patched: int | None,
    progress: bool,
) -> tuple[pd.DataFrame, list[dict[str, float]]]:
    """Return all drops, and the metric of both runs for every model.

    The frame has one row per component of the grown model, by its name.

    Columns: `drop` (in the original; missing for new components), `grown_drop`, `drop_change`, the
    standard errors over prompts of the last two, `share` (of the grown model's range of the
    metric), `exact` (whether all drops of the row are exact patches); with a null model, also
    `null_drop`, `null_share` and `null_drop_change` (from the grown model to the null model).
    """
    drops = [
        _Drops(model, contrast, None if i else alignment, progress and f"drops in {MODELS[i]}")
        for i, model in enumerate(models)
    ]
    sizes = pd.concat([each.means.abs() for each in drops], axis=1).max(axis=1)
    largest = sizes.sort_values(ascending=False, kind="stable").index[:n_patched]
    for each in drops:
        each.patch(largest)
    original, grown, *null = drops
    frame = pd.DataFrame({"grown_drop": grown.means})
    frame.insert(0, "drop", original.means)
    weights = original.weights  # of the prompts, which are the same in all models
    changes = {"drop_change": grown.by_prompt - original.by_prompt}
    if null:
        changes["null_drop_change"] = null[0].by_prompt - grown.by_prompt
    for name, change in changes.items():
        frame[name] = (change * weights).sum(axis=1, skipna=False)
        frame[f"{name}_se"] = _standard_error(change, weights)
    frame["grown_drop_se"] = _standard_error(grown.by_prompt, weights)
    frame["share"] = grown.means / grown.span
    for other in null:
        frame["null_drop"], frame["null_share"] = other.means, other.means / other.span
    exact = pd.concat([each.exact for each in drops], axis=1).reindex(frame.index)
    frame["exact"] = exact.fillna(True).all(axis=1)  # new components are in no original
    return frame, [each.values for each in drops]


def _standard_error(
    by_prompt: pd.DataFrame, weights: Float[np.ndarray, "prompt"]
) -> "pd.Series[float]":
    """Return the standard error of the weighted mean over prompts; NaN for one prompt."""
    n = len(weights)
    mean = (by_prompt * weights).sum(axis=1, skipna=False)
    squares = (by_prompt.sub(mean, axis=0) * weights) ** 2
    variance = squares.sum(axis=1, skipna=False) * (n / (n - 1) if n > 1 else np.nan)
    return variance.pow(0.5)


class _Drops:
    """One model's drops: a frame [component, prompt] by the names of the grown model.

    A metric with one value for all prompts has one column. `alignment` is given for the original.
    """

    def __init__(
        self,
        model: Any,
        contrast: Contrast,
        alignment: Alignment | None,
        progress: bool | str,
    ) -> None:
        self._prompts = model, contrast
        self._names = {} if alignment is None else alignment.original_names
        grown_names = {} if alignment is None else alignment.names
        metric, pair = as_metric(contrast.metric), contrast.pair(model)
        self._options: dict[str, Any] = {
            "direction": "noise",
            "per_prompt": metric.by_prompt,
            "work": Work(progress=progress),
        }
        sites, method = Sites("all", positions="all"), Estimate("secant")
        sweep = attribution(*self._prompts, sites=sites, method=method, **self._options)
        self.by_prompt = _falls(sweep).rename(index=grown_names)
        exact = sweep.frame.groupby(sweep.frame["name"].astype(str), sort=False)["exact"].all()
        self.exact = exact.rename(index=grown_names).astype(object)
        n = self.by_prompt.shape[1]
        weighted = n > 1 and not metric.needs_reference
        self.weights = np.array(bind(metric, model, pair).shares(n) if weighted else (1 / n,) * n)
        self.values = {"clean": sweep.clean_value, "corrupted": sweep.corrupted_value}
        self.span = sweep.clean_value - sweep.corrupted_value

    @property
    def means(self) -> "pd.Series[float]":
        return (self.by_prompt * self.weights).sum(axis=1, skipna=False)

    def patch(self, names: "pd.Index[str]") -> None:
        """Replace the estimates of these components with exact drops."""
        left = [name for name in names if name in self.exact.index and not self.exact[name]]
        if left:
            here = [self._names.get(name, name) for name in left]
            sites = Sites(here, positions="all")
            sweep = activation_patch(*self._prompts, sites=sites, **self._options)
            # Rows of a sweep are in the order of the model's layers.
            self.by_prompt.loc[left] = _falls(sweep).loc[here].to_numpy()
            self.exact[left] = True


def _falls(sweep: Sweep) -> pd.DataFrame:
    """Return how much the metric falls by each component's patch, on each prompt."""
    frame = sweep.frame
    names = frame["name"].astype(str)
    fall = frame.get("unpatched", sweep.clean_value) - frame["value"]
    falls = pd.DataFrame({"name": names, "prompt": frame.get("prompt", 0), "fall": fall})
    return falls.pivot(index="name", columns="prompt", values="fall").loc[names.unique()]
