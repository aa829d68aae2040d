"""Agreement of two ways of scoring sites, such as attribution and patching."""

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy.stats import pearsonr, spearmanr

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.scored_frame import largest
from attn_only_lens.patching.sweep_rows import rows_in_order

_SAME_RUN = 0.01  # of the metric's span: more than any dtype's rounding, less than other prompts


def agreement(exact: Sweep, approx: Sweep, k: int = 20) -> pd.DataFrame:
    """Compare the effects of two sweeps, site by site.

    An effect is how far a score is from that of the run patched into (`Sweep.effect`); correlations
    are over all rows, whatever their order.

    Args:
        exact: one sweep.
        approx: another, of the same sites, positions and part, in the same direction, with the
            same metric of the same prompts.
        k: how many rows of largest |effect| to compare; of equals the first of `exact` count.

    Returns:
        One row: `pearson`, `spearman` (ties share their mean rank), `top_k` (share of the k
        largest of one that are among the k largest of the other), `k`, `n` (rows).

    Raises:
        InputError: with every reason: sites that only one has, parts, directions, metrics or their
            values that differ, scores all the same, k not from 1 to n.

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
    reasons = []
    of_prompts = ["prompt" in sweep.rows.numbers for sweep in (exact, approx)]
    if len(set(of_prompts)) > 1:
        reason = "one has rows of each prompt and the other means; expected both with `per_prompt`"
        raise InputError([reason], "these sweeps cannot be compared")
    if exact.direction != approx.direction:
        reasons.append(f"exact is {exact.direction}, approx is {approx.direction}")
    if exact.metric != approx.metric:
        reasons.append(f"exact is of {exact.metric}, approx of {approx.metric}")
    span = abs(exact.clean_value - exact.corrupted_value)
    for which in ("clean_value", "corrupted_value"):
        first_value, second_value = getattr(exact, which), getattr(approx, which)
        if not abs(first_value - second_value) <= _SAME_RUN * span:
            reasons.append(
                f"{which} is {first_value:.4g} in exact and {second_value:.4g} in approx: expected "
                "the same prompts and model"
            )
    if exact.part != approx.part:
        reasons.append(f"exact is of part {exact.part!r}, approx of {approx.part!r}")
    one, second = exact.effects, approx.effects
    order = rows_in_order(exact.rows, approx.rows)
    if order is not None:
        reasons += _reasons_against_sites(exact, approx, order)
    for label, effects in (("exact", one), ("approx", second)):
        if not (effects != effects[:1]).any():
            reasons.append(f"all scores of {label} are the same: nothing correlates with them")
    if not is_count(k, 1, len(one)):
        reasons.append(f"got k={k!r}; expected 1 to the {len(one)} rows")
    InputError.raise_if(reasons, "these sweeps cannot be compared")
    second = second if order is None else second[order]
    both = [set(largest(np.abs(effects), k).tolist()) for effects in (one, second)]
    return pd.DataFrame(
        {
            "pearson": [pearsonr(one, second).statistic],
            "spearman": [spearmanr(one, second).statistic],
            "top_k": [len(both[0] & both[1]) / k],
            "k": [k],
            "n": [len(one)],
        }
    )


def _reasons_against_sites(exact: Sweep, approx: Sweep, order: Int[np.ndarray, "row"]) -> list[str]:
    """Return a reason if a sweep has sites that the other has not, by the rows of each other."""
    alone = np.flatnonzero(order < 0)
    shared = np.zeros(len(approx), dtype=bool)
    shared[order[order >= 0]] = True
    others = np.flatnonzero(~shared)
    if not len(alone) and not len(others):
        return []
    example = exact.rows.site(alone[0]) if len(alone) else approx.rows.site(others[0])
    return [
        f"{len(alone)} of {len(exact)} rows are of exact alone, and {len(others)} of "
        f"{len(approx)} of approx alone, such as {example}; expected the same name and position in "
        "both"
    ]
