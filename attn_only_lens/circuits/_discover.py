"""The smallest circuit that does what a model does, as nearly as is wanted, by one ranking.

Sites are ranked by an estimate of what each does (or by patching each). Of the k first, with all
else ablated, the faithfulness f(k) is measured; k is doubled until |1 - f(k)| ≤ 1 - wanted, and
then the gap to the last k that fell short is halved until it is closed. f need not grow with k, so
what is found is a k that suffices where k - 1 does not: the smallest circuit found, by 2 log₂ n
forward passes, and no proof that there is no smaller one.

A circuit with f > 1 does more than the model, and is not the more faithful for it: what is wanted
bounds |1 - f|, as MIB's CMD does (`faithfulness_curve.py`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from attn_only_lens.circuits._faithfulness import Order, ablated_model, ranked
from attn_only_lens.circuits.ablation import Ablation, Flags
from attn_only_lens.errors import CircuitError
from attn_only_lens.numerics import is_count
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import METHODS, attribution
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.runs.inputs import option_reasons
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.positions import Positions
from attn_only_lens.runs.prompts import Prompts
from attn_only_lens.runs.sites import Sites

__all__ = ["Circuit", "discover"]


@dataclass(frozen=True, eq=False)
class Circuit:
    """Sites that do what the model does, nearly. Made by `discover`.

    Attributes:
        frame: a row for each site, the highest ranked first: `layer`, `kind`, `index`, `name`,
            `position`, and its `effect` by the ranking.
        n_sites: of the model.
        faithfulness: of the circuit.
        completeness: the faithfulness of everything else: near 0 where nothing was missed.
        random: faithfulness of random circuits of the same size.
        wanted: what faithfulness was asked for.
        tried: a row for each size that was measured: `n_sites`, `faithfulness`.
        ablation: what all else was ablated to.
        method: of the ranking.
        metric: its name.
    """

    frame: pd.DataFrame
    n_sites: int
    faithfulness: float
    completeness: float
    random: tuple[float, ...]
    wanted: float
    tried: pd.DataFrame
    ablation: str
    method: str
    metric: str

    def __len__(self) -> int:
        return len(self.frame)


def discover(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float = 0.9,
    method: str = "exact_gate",
    ablation: Ablation = "resample",
    order: Order = "magnitude",
    sites: Sites | None = None,
    positions: Positions = "each",
    n_random: int = 3,
    seed: int = 0,
    mask: Tensor | None = None,
) -> Circuit:
    """The smallest circuit found whose faithfulness is within 1 - `faithfulness` of 1.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts that the circuit is of; see `prompt_pair`.
        corrupted: the prompts that differ from them in what it is about, token for token.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits.
        faithfulness: what is wanted, from 0 to 1.
        method: of the ranking: one of `attribution`'s, or "patching" for `activation_patch`.
        ablation: what everything outside is ablated to: "zero", "mean", "resample".
        order: rank by "magnitude" of effects, or "signed", what helps the clean run first.
        sites: what may be in the circuit; by default all heads. Others are never ablated.
        positions: "each" apart, or "all" together.
        n_random: random circuits of the same size to measure.
        seed: of those.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.

    Returns:
        The circuit, and what was measured on the way.

    Raises:
        CircuitError: settings that make no sense; ablating everything changes nothing.
        PatchingError: with every reason: prompts, metric, sites or positions that do not fit.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> circuit = circuits.discover(
        ...     convert(pretrained.modular_addition()), torch.tensor([3, 4, 113]),
        ...     torch.tensor([3, 5, 113]), p.logit_diff(correct=7, wrong=8))
        >>> abs(1 - circuit.faithfulness) <= 0.1, len(circuit) < circuit.n_sites
        (True, True)
    """
    reasons = option_reasons("method", method, (*METHODS, MEASURED))
    if not 0 < faithfulness <= 1:
        reasons.append(f"got faithfulness={faithfulness!r}; expected more than 0, up to 1")
    if not is_count(n_random):
        reasons.append(f"got n_random={n_random!r}; expected 0 or more")
    if reasons:
        raise CircuitError(reasons, "no circuit can be looked for")
    given: dict[str, Any] = {"sites": sites, "positions": positions, "mask": mask}
    given |= {"direction": "noise", "progress": False}
    if method == MEASURED:
        ranking = activation_patch(model, clean, corrupted, metric, **given)
    else:
        ranking = attribution(model, clean, corrupted, metric, method=method, **given)  # type: ignore[arg-type]
    ablated = ablated_model(model, clean, corrupted, metric, ranking, ablation, mask)
    rows, n = ranked(ranking, order), len(ranking.frame)
    tried: dict[int, float] = {0: 0.0}

    def kept(first: npt.NDArray[np.int64]) -> Flags:
        within = np.zeros(n, dtype=bool)
        within[first] = True
        return within

    def suffices(size: int) -> bool:
        tried[size] = ablated.faithfulness(kept(rows[:size]))
        # All sites are the model itself, to rounding.
        return size == n or abs(1 - tried[size]) <= 1 - faithfulness

    short, enough = 0, 1
    while not suffices(enough):
        short, enough = enough, min(2 * enough, n)
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if suffices(middle) else (middle, enough)
    found = ranking.frame.iloc[rows[:enough]]
    shuffled = np.random.default_rng(seed)
    return Circuit(
        found[["layer", "kind", "index", "name", "position"]]
        .assign(effect=ranking.effect.iloc[rows[:enough]])
        .reset_index(drop=True),
        n_sites=n,
        faithfulness=tried[enough],
        completeness=ablated.faithfulness(~kept(rows[:enough])),
        random=tuple(
            ablated.faithfulness(kept(shuffled.permutation(n)[:enough])) for _ in range(n_random)
        ),
        wanted=faithfulness,
        tried=pd.DataFrame(sorted(tried.items()), columns=["n_sites", "faithfulness"]),
        ablation=ablation,
        method=method,
        metric=ranking.metric,
    )
