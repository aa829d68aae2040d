"""Agreement of two ways of scoring sites, such as attribution and patching."""

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy.stats import pearsonr, spearmanr

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.patching.results import Sweep, site_columns
from attn_only_lens.patching.scored_frame import largest

_PROBLEM = "these sweeps cannot be compared"
_SAME_RUN = 0.01  # of the metric's span: more than rounding in any dtype


def agreement(exact: Sweep, approx: Sweep, k: int = 20) -> pd.DataFrame:
    """Compare the effects of two sweeps, site by site.

    An effect is the difference between a score and the score of the run that is patched into
    (`Sweep.effect`). Correlations are over all rows; their order does not matter.

    Args:
        exact: one sweep.
        approx: another sweep of the same sites, positions, part, direction, metric and prompts.
        k: how many rows of largest |effect| to compare; ties keep the order of `exact`.

    Returns:
        One row: `pearson`, `spearman` (ties share their mean rank), `top_k` (the share
        of the k largest of one that are among the k largest of the other), `k`, `n` (rows).

    Raises:
        InputError: with every reason: sites that only one has, different parts, directions,
            metrics or values of the runs, constant scores, k not from 1 to n.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [2, 5, 7],
        ...                        "name": ["L0N2", "L0N5", "L0N7"], "position": -1,
        ...                        "value": [1.0, 2.0, -1.0]})
        >>> run = {"part": "z", "direction": "denoise", "metric": "logit_diff(7, 8)",
        ...        "clean_value": 3.0, "corrupted_value": -1.0, "n_prompts": 1, "model": "adder"}
        >>> exact, approx = p.Sweep(values, **run), p.Sweep(values[::-1], **run)
        >>> p.agreement(exact, approx, k=2).round(6).to_dict("records")
        [{'pearson': 1.0, 'spearman': 1.0, 'top_k': 1.0, 'k': 2, 'n': 3}]
    """
    if ("prompt" in exact.frame) != ("prompt" in approx.frame):
        reason = "one has rows of each prompt and the other means; expected both with `per_prompt`"
        raise InputError([reason], _PROBLEM)
    order = _rows_in_order(exact.frame, approx.frame)
    reasons = _setting_reasons(exact, approx) + _site_reasons(exact, approx, order)
    for label, sweep in (("exact", exact), ("approx", approx)):
        if not np.ptp(sweep.effects) > 0:
            reasons.append(f"all scores of {label} are the same: a correlation needs a spread")
    if not is_count(k, 1, len(exact)):
        reasons.append(f"got k={k!r}; expected 1 to the {len(exact)} rows")
    InputError.raise_if(reasons, _PROBLEM)
    one, second = exact.effects, approx.effects[order]
    top = [set(largest(np.abs(effects), k).tolist()) for effects in (one, second)]
    return pd.DataFrame(
        {
            "pearson": [pearsonr(one, second).statistic],
            "spearman": [spearmanr(one, second).statistic],
            "top_k": [len(top[0] & top[1]) / k],
            "k": [k],
            "n": [len(one)],
        }
    )


def _setting_reasons(exact: Sweep, approx: Sweep) -> list[str]:
    reasons = [
        f"exact has {name} {getattr(exact, name)!r}, approx has {getattr(approx, name)!r}"
        for name in ("direction", "metric", "part")
        if getattr(exact, name) != getattr(approx, name)
    ]
    span = abs(exact.clean_value - exact.corrupted_value)
    for name in ("clean_value", "corrupted_value"):
        values = getattr(exact, name), getattr(approx, name)
        if not abs(values[0] - values[1]) <= _SAME_RUN * span:
            reasons.append(
                f"{name} is {values[0]:.4g} in exact and {values[1]:.4g} in approx: expected "
                "the same prompts and model"
            )
    return reasons


def _site_reasons(exact: Sweep, approx: Sweep, order: Int[np.ndarray, "row"]) -> list[str]:
    """Return a reason if one of the sweeps has sites that the other has not."""
    only_exact = np.flatnonzero(order < 0)
    seen = np.bincount(order[order >= 0], minlength=len(approx))
    only_approx = np.flatnonzero(seen == 0)
    if not len(only_exact) and not len(only_approx):
        return []
    row = exact.frame.iloc[only_exact[0]] if len(only_exact) else approx.frame.iloc[only_approx[0]]
    example = f"{row['name']} at {row['position']}"
    example += f", prompt {row['prompt']}" if "prompt" in row else ""
    return [
        f"{len(only_exact)} of {len(exact)} rows are only in exact, and {len(only_approx)} of "
        f"{len(approx)} only in approx, such as {example}; expected the same names and positions"
    ]


def _rows_in_order(one: pd.DataFrame, second: pd.DataFrame) -> Int[np.ndarray, "row"]:
    """Return the row of `second` with the site of each row of `one`; -1 if it has none."""
    keys = site_columns(one)
    left, right = one[keys], second[keys].assign(row=np.arange(len(second)))
    for name in keys:
        categorical = [
            isinstance(frame[name].dtype, pd.CategoricalDtype) for frame in (one, second)
        ]
        if categorical[0] != categorical[1]:  # positions that are numbers, and roles
            return np.full(len(one), -1)
        if categorical[0]:  # compare codes of the same categories
            right[name] = right[name].cat.set_categories(left[name].cat.categories)
    return left.merge(right, how="left", on=keys)["row"].fillna(-1).to_numpy(np.int64)
