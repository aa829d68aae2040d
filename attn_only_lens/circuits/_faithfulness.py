r"""How much of a metric circuits carry, by their size, and how random ones of the same size do.

With m the metric, M all sites, C those of a circuit, everything else ablated (`ablation.py`):

    faithfulness    f(C) = (m(C) - m(∅)) / (m(M) - m(∅))
    completeness    f(M \ C), the faithfulness of what is left: near 0 where nothing was missed

(Marks et al., "Sparse Feature Circuits", 2024, who divide alike.) The curve is over circuits of the
k highest ranked sites, for shares k of all sites, and the two areas are those of Mueller et al.,
"MIB: A Mechanistic Interpretability Benchmark", 2025, by the trapezoids of its code:

    CPR = ∫ f(C_k) dk         circuit performance ratio: higher is better
    CMD = ∫ |1 - f(C_k)| dk   circuit-model distance: lower is better, 0 is a circuit that does what
                              the model does, whatever its size

from the smallest share to the largest, .001 to 1 in MIB. Of circuits that f > 1 belongs to, CPR
thinks well and CMD does not. MIB ranks by signed scores for CPR, by |scores| for CMD, and counts
edges; here sites count, each as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.circuits.ablation import Ablated, Ablation, Flags
from attn_only_lens.errors import CircuitError
from attn_only_lens.numerics import is_count
from attn_only_lens.patching.results import Sweep
from attn_only_lens.runs.inputs import reasons_not_to_run
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.prompts import Prompts, prompt_pair
from attn_only_lens.runs.recording import record_pair
from attn_only_lens.runs.sites import resolve_sites

__all__ = ["SHARES", "Faithfulness", "Order", "ablated_model", "faithfulness", "ranked"]

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""MIB's."""

Order = Literal["magnitude", "signed"]


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
        order: what sites are ranked by, "magnitude" or "signed".
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
    n_random: int = 3,
    seed: int = 0,
    mask: Tensor | None = None,
) -> Faithfulness:
    """Faithfulness and completeness of the highest ranked sites, for a range of sizes.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts that the circuit is of; see `prompt_pair`.
        corrupted: the prompts to resample from, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits.
        ranking: of sites, by `activation_patch` or `attribution`, with positions "each" or "all".
        ablation: what everything outside is ablated to: "zero", "mean", "resample".
        order: rank by "magnitude" of effects, or "signed", what helps the clean run first.
        shares: of all sites, increasing; MIB's by default.
        n_random: random rankings to compare with; 0 for none.
        seed: of those.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.

    Returns:
        The curve, and its areas.

    Raises:
        CircuitError: with every reason: shares, settings or sites that make no sense; ablating
            everything changes nothing.
        PatchingError: prompts or a metric that do not fit.

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
    _check(shares, n_random)
    sites = ablated_model(model, clean, corrupted, metric, ranking, ablation, mask)
    n = len(ranking.frame)
    sizes = [int(share * n) for share in shares]
    order_of = ranked(ranking, order)
    generator = np.random.default_rng(seed)
    found = np.array([sites.faithfulness(_first(order_of, size)) for size in sizes])
    complement = np.array([sites.faithfulness(~_first(order_of, size)) for size in sizes])
    random = np.full((max(n_random, 1), len(sizes)), np.nan)
    for i in range(n_random):
        shuffled = generator.permutation(n)
        random[i] = [sites.faithfulness(_first(shuffled, size)) for size in sizes]
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
        points = torch.tensor(list(shares), dtype=torch.float64, device="cpu")
        return float(torch.trapezoid(torch.from_numpy(f), points, dim=-1).mean())

    return Faithfulness(
        frame,
        cpr=area(found),
        cmd=area(abs(1 - found)),
        random_cpr=area(random),
        random_cmd=area(abs(1 - random)),
        whole=sites.whole,
        nothing=sites.nothing,
        ablation=ablation,
        order=order,
        method=ranking.method,
    )


def ablated_model(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    ranking: Sweep,
    ablation: Ablation,
    mask: Tensor | None,
) -> Ablated:
    """The model with the sites of a ranking to be ablated.

    Raises:
        CircuitError: as `faithfulness` does.
        PatchingError: prompts or a metric that do not fit.
    """
    reasons = reasons_not_to_run(model)
    if reasons:
        raise CircuitError(reasons, "this model cannot be ablated")
    chosen = resolve_sites(model, list(ranking.frame["name"].unique()))
    pair = prompt_pair(model, clean, corrupted, mask)
    runs = record_pair(model, pair, metric, chosen, "z")
    return Ablated(model, runs, ranking.frame, ablation)


def ranked(ranking: Sweep, order: Order) -> npt.NDArray[np.int64]:
    """Rows of a ranking, the first to be kept first; of equals as they come.

    Raises:
        CircuitError: another order.
    """
    if order not in ("magnitude", "signed"):
        raise CircuitError(
            [f"got order={order!r}; expected 'magnitude' or 'signed'"], "no sites can be ranked"
        )
    # What helps the clean run raises the score when put in, and lowers it when taken out.
    effect = ranking.effect.to_numpy() * (1 if ranking.baseline == 0 else -1)
    return np.argsort(-(abs(effect) if order == "magnitude" else effect), kind="stable")


def _first(order: npt.NDArray[np.int64], size: int) -> Flags:
    kept = np.zeros(len(order), dtype=bool)
    kept[order[:size]] = True
    return kept


def _check(shares: Sequence[float], n_random: object) -> None:
    reasons = []
    within = len(shares) > 1 and all(0 <= share <= 1 for share in shares)
    if not within or list(shares) != sorted(set(shares)):
        reasons.append(f"got shares {list(shares)}; expected two or more, increasing, from 0 to 1")
    if not is_count(n_random):
        reasons.append(f"got n_random={n_random!r}; expected 0 or more")
    if reasons:
        raise CircuitError(reasons, "no curve can be drawn")
