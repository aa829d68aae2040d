"""Compare the effects of sites in two sweeps."""

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy.stats import pearsonr, spearmanr

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.patching.results import TOP, Sweep, site_index

_SAME_RUN = 0.01  # a tolerance relative to |clean - corrupted|, above rounding errors in any dtype


def agreement(exact: Sweep, approx: Sweep, k: int = TOP) -> pd.DataFrame:
    """Compare each site's effect (`Sweep.effect`) in two sweeps, whose row orders may differ.

    Args:
        exact: one sweep.
        approx: another sweep with the same sites, positions, part, direction, metric and prompts.
        k: how many rows with the largest |effect| to compare; ties keep the order of `exact`.

    Returns:
        A one-row frame. Columns: `pearson`, `spearman` (ties share their mean rank), `top_k` (the
        share of the k largest effects in one sweep that are among the k largest in the other), `k`,
        `n` (the number of rows).

    Raises:
        InputError: with every reason: sites that only one sweep has; different parts, directions,
            metrics or metric values of the runs; constant scores; k not from 1 to n.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> from attn_only_lens.patching.results import Sweep
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [2, 5, 7],
        ...                        "name": ["L0N2", "L0N5", "L0N7"], "position": -1,
        ...                        "value": [1.0, 2.0, -1.0]})
        >>> run = {"part": "z", "direction": "denoise", "metric": "logit_diff(7, 8)",
        ...        "clean_value": 3.0, "corrupted_value": -1.0, "n_prompts": 1, "model": "adder"}
        >>> exact, approx = Sweep(values, **run), Sweep(values[::-1], **run)
        >>> p.agreement(exact, approx, k=2).round(6).to_dict("records")
        [{'pearson': 1.0, 'spearman': 1.0, 'top_k': 1.0, 'k': 2, 'n': 3}]
    """
    problem = "these sweeps cannot be compared"
    if ("prompt" in exact.frame) != ("prompt" in approx.frame):
        reason = (
            "one sweep has rows for single prompts and the other means over prompts; expected the "
            "same `per_prompt` for both"
        )
        raise InputError([reason], problem)
    order = site_index(approx.frame).get_indexer(site_index(exact.frame))  # -1 for missing sites
    reasons = _differences(exact, approx) + _site_reasons(exact, approx, order)
    for label, sweep in (("exact", exact), ("approx", approx)):
        if not np.ptp(sweep.effect) > 0:
            reasons.append(f"all scores of {label} are equal; expected scores that differ")
    if not is_count(k, 1, len(exact)):
        reasons.append(f"got k={k!r}; expected 1 to {len(exact)}, the number of rows")
    InputError.raise_if(reasons, problem)
    effects = exact.effect, approx.effect.iloc[order].reset_index(drop=True)
    top = [effect.abs().nlargest(k).index for effect in effects]
    row = {
        "pearson": pearsonr(*effects).statistic,
        "spearman": spearmanr(*effects).statistic,
        "top_k": len(top[0].intersection(top[1])) / k,
        "k": k,
        "n": len(exact),
    }
    return pd.DataFrame([row])


def _differences(exact: Sweep, approx: Sweep) -> list[str]:
    reasons = [
        f"exact has {name} {getattr(exact, name)!r}, but approx has {getattr(approx, name)!r}"
        for name in ("direction", "metric", "part")
        if getattr(exact, name) != getattr(approx, name)
    ]
    span = abs(exact.clean_value - exact.corrupted_value)
    for name in ("clean_value", "corrupted_value"):
        values = getattr(exact, name), getattr(approx, name)
        if not abs(values[0] - values[1]) <= _SAME_RUN * span:
            reasons.append(
                f"{name} is {values[0]:.4g} in exact and {values[1]:.4g} in approx; expected "
                "the same prompts and model"
            )
    return reasons


def _site_reasons(exact: Sweep, approx: Sweep, order: Int[np.ndarray, "row"]) -> list[str]:
    """Return an error message if the sites of the two sweeps differ."""
    only_exact = exact.frame[order < 0]
    only_approx = approx.frame[~approx.frame.index.isin(order)]
    if only_exact.empty and only_approx.empty:
        return []
    row = (only_approx if only_exact.empty else only_exact).iloc[0]
    example = f"{row['name']} at {row['position']}"
    example += f", prompt {row['prompt']}" if "prompt" in row else ""
    return [
        f"{len(only_exact)} of {len(exact)} rows are only in exact, and {len(only_approx)} of "
        f"{len(approx)} only in approx, such as {example}; expected the same names and positions"
    ]
