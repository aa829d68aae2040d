"""Evaluate how much a circuit depends on the prompts that were used to find it.

The prompts are repeatedly split into random halves, and `discover` searches for a circuit on each
half. This is stability selection (Meinshausen and Bühlmann 2010) with complementary pairs (Shah and
Samworth 2013). Each circuit is also evaluated on the other half of the prompts.

    inclusion    the share of these circuits that include a site: an estimate of the probability
                 that the site is in the circuit of a new sample with half as many prompts
    class        "core" if the inclusion is at least 90 %, "noise" if it is at most 10 %, otherwise
                 "contingent"

The interval of a site's inclusion is a Wilson interval for an effective number of independent
circuits. Circuits from the two halves of one split are independent, but circuits from different
splits share prompts. The effective number, 2 + (resamples - 2) / `_DEPENDENCE`, is therefore
smaller than the number of circuits (`analyses/results/stability_of_circuits.md`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool, Float
from scipy.spatial.distance import pdist

from attn_only_lens.arguments import halves_reasons
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.circuits.ablated_points import Rows
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.errors import InputError

_CORE, _NOISE = 0.9, 0.1
INCLUSION = ("inclusion", "inclusion_low", "inclusion_high", "class")
MEASURES = ["faithfulness", "completeness"]
_DEPENDENCE = 8.0
Half: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stability:
    """The circuits found on random halves of the prompts. See `Search`.

    Attributes:
        sites: one row per site that is in any of these circuits, the largest inclusion first.
            Columns: `layer`, `kind`, `index`, `name`, `position`, `effect`, `inclusion`,
            `inclusion_low`, `inclusion_high` (a 90 % interval), and `class`: "core", "contingent"
            or "noise".
        resamples: one row per half. Columns: `n_sites` of the half's circuit; the circuit's
            `faithfulness` and `completeness` on this half; and `held_out_faithfulness` and
            `held_out_completeness` on the other half.
        held_out: faithfulness and completeness on held-out prompts, with standard errors over
            prompts: columns `mean`, `standard_error`.
        core_faithfulness: faithfulness and completeness of the core on all prompts.
        jaccard: the mean Jaccard index over pairs of these circuits.
        by_size: one row per size and way of ranking sites, if the circuit was chosen by its error
            on held-out prompts (`Search.objective`); otherwise None. Columns: the `order` of the
            sites ("search", "magnitude", "tilted", "signed", "worth"); `n_sites`, for "search" a
            mean over halves; on held-out prompts, `faithfulness`, `error` and the error's
            `standard_error` over prompts; and on the half itself, `own_faithfulness` and
            `own_error`.
    """

    sites: pd.DataFrame
    resamples: pd.DataFrame
    held_out: pd.DataFrame
    core_faithfulness: tuple[float, float]
    jaccard: float
    by_size: pd.DataFrame | None = None

    @property
    def n_core(self) -> int:
        """The number of sites in the core: the sites whose inclusion is at least 90 %."""
        return int((self.sites["class"] == "core").sum())

    @property
    def n_union(self) -> int:
        """The number of sites that are in at least one of the circuits."""
        return len(self.sites)

    def __repr__(self) -> str:
        faithful, complete = map(float, self.held_out["mean"])
        error = float(self.held_out["standard_error"].iloc[0])
        return (
            f"{len(self.resamples)} circuits, each for half of the prompts: a core of "
            f"{self.n_core} sites in a union of {self.n_union}, mean Jaccard index "
            f"{self.jaccard:.2f}; on held-out prompts, faithfulness {faithful:.2f} ± {error:.2f}, "
            f"completeness {complete:.2f}"
        )


def require_resamples(n_prompts: int, metric: Metric) -> None:
    """Raise an error with every reason if the prompts cannot be resampled."""
    reasons = halves_reasons(n_prompts)
    if not metric.by_prompt:
        reasons.append(
            f"got {metric.name}, whose values for single prompts are not known, as with every "
            "custom metric; expected logit_diff, loss, or another metric of this package"
        )
    InputError.raise_if(reasons, "these prompts cannot be resampled")


def random_halves(n_prompts: int, n: int, seed: int) -> Iterator[tuple[Half, Half]]:
    """Yield n random halves of the prompt indices, each paired with the other half."""
    generator, size = np.random.default_rng(seed), n_prompts // 2
    for number in range(n):
        if number % 2 == 0:
            order = generator.permutation(n_prompts)
            halves = np.sort(order[:size]), np.sort(order[size : 2 * size])
        yield halves[number % 2], halves[1 - number % 2]


def resampled(
    circuits: Iterable[Rows],
    ablate: Callable[[Half], AblatedModel],
    whole: AblatedModel,
    sites: pd.DataFrame,
    effects: Float[np.ndarray, "site prompt"],
    halves: Sequence[tuple[Half, Half]],
    by_size: pd.DataFrame | None = None,
) -> Stability:
    """Evaluate the circuit of each half of the prompts, on this half and on the other half."""
    included, rows = list[npt.NDArray[np.bool_]](), list[tuple[float, ...]]()
    held_out = list[pd.DataFrame]()
    for circuit, (half, other_half) in zip(circuits, halves, strict=True):
        ablated, others = ablate(half), ablate(other_half)
        flags = np.zeros(len(sites), dtype=bool)
        flags[circuit] = True
        included.append(flags)
        fitted, complete, _ = ablated.curves([circuit])
        values = [*others.by_prompt([circuit, np.flatnonzero(~flags)]), others.whole_by_prompt]
        left, rest, span = (x - others.nothing_by_prompt for x in values)
        columns = {"prompt": other_half, "left": left, "rest": rest, "span": span}
        held_out.append(pd.DataFrame(columns))
        here = others.weights
        ratios = (share_of_sums(part, span, here)[0] for part in (left, rest))
        rows.append((len(circuit), float(fitted[0]), float(complete[0]), *ratios))
    flags_of_all = np.stack(included)
    frame = _inclusion(sites.assign(effect=effects @ whole.weights), flags_of_all)
    core = frame.index[frame["class"] == "core"].to_numpy()
    faithful, complete, _ = whole.curves([core])
    by_prompt = pd.concat(held_out).groupby("prompt").mean()
    weights = whole.weights[by_prompt.index]
    held = [share_of_sums(by_prompt[x], by_prompt["span"], weights) for x in ("left", "rest")]
    return Stability(
        frame.reset_index(drop=True),
        pd.DataFrame(rows, columns=["n_sites", *MEASURES, *(f"held_out_{x}" for x in MEASURES)]),
        pd.DataFrame(held, columns=["mean", "standard_error"], index=MEASURES),
        (float(faithful[0]), float(complete[0])),
        jaccard=float(1 - pdist(flags_of_all, "jaccard").mean()),
        by_size=by_size,
    )


def _inclusion(sites: pd.DataFrame, flags: Bool[np.ndarray, "resample site"]) -> pd.DataFrame:
    """Return the sites that are in at least one circuit, sorted by decreasing inclusion."""
    counts, n = flags.sum(axis=0), len(flags)
    bounds = np.array([inclusion_interval(count, n) for count in range(n + 1)])
    frame = sites.assign(inclusion=counts / n)
    frame[["inclusion_low", "inclusion_high"]] = bounds[counts]
    kinds = np.where(frame["inclusion"] >= _CORE, "core", "contingent")
    frame["class"] = np.where(frame["inclusion"] <= _NOISE, "noise", kinds)
    order = np.lexsort([-frame["effect"].abs(), -frame["inclusion"]])
    return frame.iloc[order[counts[order] > 0]]


def inclusion_interval(count: int, n: int) -> tuple[float, float]:
    """Return the 90 % interval of the inclusion of a site that is in `count` of n circuits."""
    return interval(count / n, 2 + (n - 2) / _DEPENDENCE)


def interval(share: float, n: float) -> tuple[float, float]:
    """Return the 90 % Wilson interval of a share observed in n trials; n may be fractional."""
    z2 = 1.6448536269514722**2  # squared normal quantile for a two-sided 90 % interval
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    # Rounding errors could exclude a share of 0 or 1 from its own interval.
    return min(low, share), max(high, share)


def share_of_sums(
    parts: npt.ArrayLike, wholes: npt.ArrayLike, weights: npt.ArrayLike
) -> tuple[float, float]:
    """Return Σ w·part / Σ w·whole over prompts with weights w, and this ratio's standard error."""
    parts, wholes, weights = (np.asarray(x, dtype=float) for x in (parts, wholes, weights))
    total, n = weights @ wholes, np.count_nonzero(weights)
    share = (weights @ parts) / total
    misses = weights * (parts - share * wholes)
    error = np.sqrt((misses**2).sum() * n / (n - 1)) / abs(total) if n > 1 else np.nan
    return float(share), float(error)
