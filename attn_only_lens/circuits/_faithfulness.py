"""Compute faithfulness as a function of circuit size.

`faithfulness` evaluates circuits C_k, which contain the highest-ranked fraction k of all sites.
MIB, the Mechanistic Interpretability Benchmark (Mueller et al., 2025), measures circuit size in
edges instead of sites, and ranks edges by |score| only for CMD. Two scores from MIB are areas under
curves, computed by the trapezoidal rule:

    CPR = ∫ f(C_k) dk         circuit performance ratio: higher is better
    CMD = ∫ |1 - f(C_k)| dk   circuit-model distance: lower is better
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.integrate import trapezoid

from attn_only_lens.arguments import COUNT, a_type, as_plain, is_number, one_of
from attn_only_lens.circuits.ablated_model import (
    ABLATIONS,
    ORDERS,
    AblatedModel,
    Ablation,
    Order,
)
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.errors import InputError
from attn_only_lens.patching.results import Sweep

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of all sites at which MIB evaluates circuits."""


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Faithfulness over circuit size.

    Attributes:
        frame: one row per share of all sites. Columns: `share`, `n_sites`, `faithfulness`,
            `completeness`; and `random`, `random_min` and `random_max`, the mean, smallest and
            largest faithfulness of random circuits of the same size.
        cpr: the circuit performance ratio.
        cmd: the circuit-model distance.
        random_cpr: the mean CPR of random rankings.
        random_cmd: the mean CMD of random rankings.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
        ablation: how sites outside a circuit are ablated.
        order: the order of the ranking, "magnitude" or "signed".
        method: the method of the ranking.
    """

    frame: pd.DataFrame
    cpr: float
    cmd: float
    random_cpr: float
    random_cmd: float
    whole: float
    nothing: float
    ablation: str
    order: str
    method: str


@one_thread_per_model
@warned_once()
def faithfulness(
    model: Any,
    contrast: Contrast,
    ranking: Sweep,
    *,
    ablation: Ablation = "resample",
    order: Order = "magnitude",
    shares: Sequence[float] = SHARES,
    n_random: int = 3,
    seed: int = 0,
) -> Faithfulness:
    """Compute faithfulness and completeness of the highest-ranked sites, for several circuit sizes.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: the two runs and the metric; see `Contrast`.
        ranking: the result of `activation_patch` or `attribution`, with positions "each", "all" or
            by role.
        ablation: how sites outside a circuit are ablated: "zero", "mean", "positional_mean" or
            "resample".
        order: "magnitude" ranks sites by |effect|; "signed" puts sites that help the clean run
            first.
        shares: increasing shares of all sites; by default MIB's shares.
        n_random: how many random rankings to compare with; 0 for none.
        seed: the seed of random rankings.

    Raises:
        InputError: with every reason: invalid shares, settings, sites or contrast; ablating
            every site changes nothing.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> curve = circuits.faithfulness(model, sums, p.attribution(model, sums))
        >>> round(float(curve.frame["faithfulness"].iloc[-1]), 4), curve.cmd < curve.random_cmd
        (1.0, True)
    """
    reasons = contrast_reasons(contrast) + COUNT.reasons(n_random=n_random, seed=seed)
    reasons += one_of(*ABLATIONS).reasons(ablation=ablation) + one_of(*ORDERS).reasons(order=order)
    in_range = len(shares) > 1 and all(is_number(as_plain(share), 0, 1) for share in shares)
    if not in_range or list(shares) != sorted(set(shares)):
        reasons.append(f"got shares {list(shares)}; expected 2 or more increasing values in [0, 1]")
    if not isinstance(ranking, Sweep):
        expected = "expected the result of `attribution` or `activation_patch`"
        reasons.append(f"ranking: got {a_type(ranking)}; {expected}")
    InputError.raise_if(reasons, "no curve can be drawn")
    pair = contrast.pair(model)
    ablated = AblatedModel(model, pair, contrast.metric, ranking.frame, ablation=ablation)
    highest = ablated.ranked(ranking, order)
    sizes = [int(share * ablated.n_sites) for share in shares]
    kept, others, random = ablated.curves([highest[:size] for size in sizes], n_random, seed)
    frame = pd.DataFrame({"share": list(shares), "n_sites": sizes, "faithfulness": kept})
    random = random if n_random else np.full((1, len(sizes)), np.nan)
    ends = {"random_min": random.min(axis=0), "random_max": random.max(axis=0)}
    return Faithfulness(
        frame.assign(completeness=others, random=random.mean(axis=0), **ends),
        cpr=float(trapezoid(kept, shares)),
        cmd=float(trapezoid(abs(1 - kept), shares)),
        random_cpr=float(trapezoid(random, shares).mean()),
        random_cmd=float(trapezoid(abs(1 - random), shares).mean()),
        whole=ablated.whole,
        nothing=ablated.nothing,
        ablation=ablation,
        order=order,
        method=ranking.method,
    )
