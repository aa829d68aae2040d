r"""Circuits by ranking: how much of a metric the highest ranked sites carry, and how few suffice.

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

The search doubles k until |1 - f(k)| ≤ 1 - wanted, then halves the gap to the last k that fell
short until it is closed. f need not grow with k, so the result is a k that suffices while k - 1
does not: the smallest circuit found, by 2 log₂ n forward passes, and no proof that there is no
smaller one. A circuit with f > 1 does more than the model and is not more faithful, so that
|1 - f| is bounded, as in CMD.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.circuits.ablation import AblatedModel, Ablation, Order
from attn_only_lens.errors import InputError
from attn_only_lens.numerics import as_plain, is_count, is_number
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import METHODS, attribution
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.runs.inputs import option_reasons
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.positions import Positions
from attn_only_lens.runs.prompts import Prompts
from attn_only_lens.runs.sites import Sites

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
    """Measure the faithfulness and completeness of the highest ranked sites, by circuit size.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts whose circuit it is; see `prompt_pair`.
        corrupted: the prompts to resample from, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits.
        ranking: of sites, by `activation_patch` or `attribution`, with positions "each" or "all".
        ablation: of everything outside: "zero", "mean", "resample".
        order: rank by "magnitude" of effects, or "signed", with what helps the clean run first.
        shares: of all sites, increasing; MIB's by default.
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
    reasons = _reasons_against_draws(n_random, seed)
    in_range = len(shares) > 1 and all(is_number(as_plain(share), 0, 1) for share in shares)
    if not in_range or list(shares) != sorted(set(shares)):
        reasons.append(f"got shares {list(shares)}; expected two or more, increasing, from 0 to 1")
    InputError.raise_if(reasons, "no curve can be drawn")
    ablated = AblatedModel(
        *(model, clean, corrupted, metric, ranking), ablation=ablation, order=order, mask=mask
    )
    sizes = [int(share * len(ranking.frame)) for share in shares]
    found = np.array([ablated.faithfulness(ablated.ranked[:size]) for size in sizes])
    complement = [ablated.completeness(ablated.ranked[:size]) for size in sizes]
    random = ablated.random_faithfulness(sizes, n_random, seed)
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


@dataclass(frozen=True, eq=False)
class Circuit:
    """Sites that nearly do what the model does. Made by `discover`.

    Attributes:
        frame: a row for each site, the highest ranked first: `layer`, `kind`, `index`, `name`,
            `position`, and its `effect` by the ranking.
        n_sites: how many were ranked.
        faithfulness: of the circuit.
        completeness: the faithfulness of all other sites: near 0 if nothing was missed.
        random: faithfulness of random circuits of the same size.
        wanted: the faithfulness that was asked for.
        tried: a row for each size that was measured: `n_sites`, `faithfulness`.
        ablation: of all other sites.
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
    progress: bool | str = False,
) -> Circuit:
    """Find a small circuit whose faithfulness is within 1 - `faithfulness` of 1.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts whose circuit it is; see `prompt_pair`.
        corrupted: prompts that differ from them in what the circuit is about, token for token.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits.
        faithfulness: the faithfulness wanted, more than 0, up to 1.
        method: of the ranking: one of `attribution`'s, or "patching" for `activation_patch`.
        ablation: of everything outside: "zero", "mean", "resample".
        order: rank by "magnitude" of effects, or "signed", with what helps the clean run first.
        sites: candidates, all heads by default. Others are never ablated.
        positions: "each" separately, or "all" together.
        n_random: random circuits of the same size to measure.
        seed: of those.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.
        progress: whether to show a bar over the circuits that are run; a text is its label.

    Returns:
        The circuit, with the sizes tried.

    Raises:
        InputError: invalid settings; ablating everything changes nothing.
        InputError: with every reason: prompts, metric, sites or positions that do not fit.

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
    if not (is_number(as_plain(faithfulness), 0, 1) and faithfulness > 0):
        reasons.append(f"got faithfulness={faithfulness!r}; expected more than 0, up to 1")
    reasons += _reasons_against_draws(n_random, seed)
    InputError.raise_if(reasons, "no circuit can be looked for")
    settings: dict[str, Any] = {"sites": sites, "positions": positions, "mask": mask}
    settings |= {"direction": "noise", "progress": False}
    label = f"{progress}: " if isinstance(progress, str) else ""
    with tqdm(unit="run", desc=f"{label}ranking", disable=not progress) as bar:
        if method == MEASURED:
            ranking = activation_patch(model, clean, corrupted, metric, **settings)
        else:
            settings["method"] = method
            ranking = attribution(model, clean, corrupted, metric, **settings)
        bar.set_description(f"{label}tests of ablations")
        ablated = AblatedModel(
            *(model, clean, corrupted, metric, ranking), ablation=ablation, order=order, mask=mask
        )
        bar.set_description(f"{label}search")
        n_sites = len(ranking.frame)
        bar.total = 2 * n_sites.bit_length() + 1 + n_random  # at most
        tried: dict[int, float] = {0: 0.0}

        def suffices(size: int) -> bool:
            tried[size] = ablated.faithfulness(ablated.ranked[:size])
            bar.update()
            # All sites are the model itself, to rounding.
            return size == n_sites or abs(1 - tried[size]) <= 1 - faithfulness

        short, enough = 0, 1
        while not suffices(enough):
            short, enough = enough, min(2 * enough, n_sites)
        while enough - short > 1:
            middle = (short + enough) // 2
            short, enough = (short, middle) if suffices(middle) else (middle, enough)
        circuit = ablated.ranked[:enough]
        completeness = ablated.completeness(circuit)
        random = ablated.random_faithfulness([enough], n_random, seed)[:, 0].tolist()
        bar.total = bar.n = bar.n + 1 + n_random
    frame = ranking.frame[["layer", "kind", "index", "name", "position"]]
    return Circuit(
        frame.assign(effect=ranking.effect).iloc[circuit].reset_index(drop=True),
        n_sites=n_sites,
        faithfulness=tried[enough],
        completeness=completeness,
        random=tuple(random),
        wanted=faithfulness,
        tried=pd.DataFrame(sorted(tried.items()), columns=["n_sites", "faithfulness"]),
        ablation=ablation,
        method=method,
        metric=ranking.metric,
    )


def _reasons_against_draws(n_random: object, seed: object) -> list[str]:
    numbers = {"n_random": n_random, "seed": seed}
    return [
        f"got {name}={number!r}; expected a whole number, 0 or more"
        for name, number in numbers.items()
        if not is_count(as_plain(number))
    ]
