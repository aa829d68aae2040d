r"""Faithfulness by size: how much of a metric the highest ranked sites carry.

With m the metric, M all sites, C those of a circuit, everything else ablated (`ablation.py`):

    faithfulness    f(C) = (m(C) - m(∅)) / (m(M) - m(∅))
    completeness    f(M \ C), the faithfulness of all other sites: near 0 if nothing was missed

(Marks et al., "Sparse Feature Circuits", 2024, who normalize alike.) The curve is over circuits of
the k highest ranked sites, for shares k of all sites, and the two areas are those of Mueller et
al., "MIB: A Mechanistic Interpretability Benchmark", 2025, by the trapezoids of its code:

    CPR = ∫ f(C_k) dk         circuit performance ratio: higher is better
    CMD = ∫ |1 - f(C_k)| dk   circuit-model distance: lower is better, 0 for a circuit that does
                              what the model does, at any size

from the smallest share to the largest, .001 to 1 in MIB. CPR rewards a circuit with f > 1, CMD
does not. MIB ranks by signed scores for CPR, by |scores| for CMD, and counts edges; here each site
counts as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count, is_number
from attn_only_lens.circuits.ablation import ORDERS, AblatedModel, Ablation, Order
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import option_reasons
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.positions import Roles
from attn_only_lens.engine.prompts import Prompts
from attn_only_lens.errors import InputError
from attn_only_lens.patching.results import Sweep

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of all sites that MIB measures."""


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Faithfulness over circuit size.

    Attributes:
        frame: a row for each share of all sites: `share`, `n_sites`, `faithfulness`,
            `completeness`, `random` (mean faithfulness of random circuits of the same size), and
            the `random_min` and `random_max` of those.
        cpr: circuit performance ratio.
        cmd: circuit-model distance.
        random_cpr: mean CPR of random rankings.
        random_cmd: mean CMD of random rankings.
        whole: the metric of the model.
        nothing: the metric with every site ablated.
        ablation: "zero", "mean" or "resample".
        order: of the ranking, "magnitude" or "signed".
        method: of the ranking.
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


@warned_once()
def faithfulness(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    ranking: Sweep,
    *,
    ablation: Ablation = "resample",
    order: Order = "magnitude",
    shares: Sequence[float] = SHARES,
    positions: Roles | None = None,
    n_random: int = 3,
    seed: int = 0,
    mask: Tensor | None = None,
) -> Faithfulness:
    """Measure the faithfulness and completeness of the highest ranked sites, by circuit size.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts whose circuit it is; see `prompt_pair`.
        corrupted: the prompts to resample from, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits.
        ranking: of sites, by `activation_patch` or `attribution`, with positions "each", "all" or
            by role.
        ablation: of everything outside: "zero", "mean", "resample".
        order: rank by "magnitude" of effects, or "signed", with what helps the clean run first.
        shares: of all sites, increasing; MIB's by default.
        positions: for a ranking by role, where each role is in these prompts: `task.roles`.
        n_random: random rankings to compare with; 0 for none.
        seed: of those.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.

    Returns:
        The curve, and its areas.

    Raises:
        InputError: with every reason: invalid shares, settings or sites; ablating everything
            changes nothing.
        InputError: prompts or a metric that do not fit.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
        >>> metric = p.logit_diff(correct=7, wrong=8)
        >>> ranking = p.attribution(model, *prompts, metric, positions="each")
        >>> curve = circuits.faithfulness(model, *prompts, metric, ranking)
        >>> round(float(curve.frame["faithfulness"].iloc[-1]), 4), curve.cmd < curve.random_cmd
        (1.0, True)
    """
    reasons = reasons_against_draws(n_random, seed) + option_reasons("order", order, ORDERS)
    in_range = len(shares) > 1 and all(is_number(as_plain(share), 0, 1) for share in shares)
    if not in_range or list(shares) != sorted(set(shares)):
        reasons.append(f"got shares {list(shares)}; expected two or more, increasing, from 0 to 1")
    if not isinstance(ranking, Sweep):
        reasons.append(
            f"ranking: got a {type(ranking).__name__}; expected what `attribution` or "
            "`activation_patch` returns"
        )
    InputError.raise_if(reasons, "no curve can be drawn")
    ablated = AblatedModel(
        *(model, clean, corrupted, metric, ranking.frame),
        ablation=ablation,
        mask=mask,
        positions=positions,
    )
    highest = ablated.ranked(ranking, order)
    sizes = [int(share * ablated.n_sites) for share in shares]
    circuits = [highest[:size] for size in sizes]
    found, complement, random = ablated.curves(circuits, n_random, seed)
    if not n_random:
        random = np.full((1, len(sizes)), np.nan)
    frame = pd.DataFrame(
        {
            "share": list(shares),
            "n_sites": sizes,
            "faithfulness": found,
            "completeness": complement,
            "random": random.mean(axis=0),
            "random_min": random.min(axis=0),
            "random_max": random.max(axis=0),
        }
    )

    def area(f: npt.NDArray[np.float64]) -> float:
        return float((np.diff(shares) * (f[..., 1:] + f[..., :-1]) / 2).sum(-1).mean())

    return Faithfulness(
        frame,
        cpr=area(found),
        cmd=area(abs(1 - found)),
        random_cpr=area(random),
        random_cmd=area(abs(1 - random)),
        whole=ablated.whole,
        nothing=ablated.nothing,
        ablation=ablation,
        order=order,
        method=ranking.method,
    )


def reasons_against_draws(n_random: object, seed: object) -> list[str]:
    """Return why random circuits cannot be drawn like this."""
    numbers = {"n_random": n_random, "seed": seed}
    return [
        f"got {name}={number!r}; expected a whole number, 0 or more"
        for name, number in numbers.items()
        if not is_count(as_plain(number))
    ]
