"""How a circuit changes with the prompts that it was found on.

The prompts are split into random halves, and each half is searched as all prompts were (stability
selection: Meinshausen and Bühlmann 2010; in pairs of halves, Shah and Samworth 2013). Each circuit
is also measured on the half that it was not fitted to.

    inclusion    the share of these circuits that include a site: it estimates how probable the
                 site is in the circuit of a new sample of half as many prompts
    class        "core" from an inclusion of 90 % on, "noise" up to 10 %, else "contingent"

Intervals of inclusion are Wilson's for n_eff independent circuits. The two halves of one split are
independent, but circuits of different splits share prompts, so n_eff is smaller than the number of
circuits: 2 + (resamples - 2) / `_DEPENDENCE` (`analyses/results/stability_of_circuits.md`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool, Float
from scipy.spatial.distance import pdist

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.circuits.ablation import AblatedModel, Rows
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.errors import InputError

_CORE, _NOISE = 0.9, 0.1
INCLUSION = ("inclusion", "inclusion_low", "inclusion_high", "class")
_DEPENDENCE = 8.0
_Half: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stability:
    """Circuits of random halves of the prompts. Made by `discover(…, resamples=20)`.

    Attributes:
        sites: a row for each site that any of these circuits includes: `layer`, `kind`, `index`,
            `name`, `position`, `effect`; `inclusion`, `inclusion_low`, `inclusion_high` (90 %), and
            `class`: "core", "contingent" or "noise". The most included first.
        resamples: a row for each half: `n_sites` of its circuit; `faithfulness` and `completeness`
            on this half; `held_out_faithfulness` and `held_out_completeness` on the other one.
        held_out: faithfulness and completeness on held-out prompts, with their standard errors
            over prompts: columns `mean`, `standard_error`.
        core_faithfulness: faithfulness and completeness of the core on all prompts.
        jaccard: the mean Jaccard index of two of these circuits.
    """

    sites: pd.DataFrame
    resamples: pd.DataFrame
    held_out: pd.DataFrame
    core_faithfulness: tuple[float, float]
    jaccard: float

    @property
    def n_core(self) -> int:
        """How many sites the core has."""
        return int((self.sites["class"] == "core").sum())

    @property
    def n_union(self) -> int:
        """How many sites are in any of the circuits."""
        return len(self.sites)

    def __repr__(self) -> str:
        faithful, complete = map(float, self.held_out["mean"])
        error = float(self.held_out["standard_error"].iloc[0])
        return (
            f"{len(self.resamples)} circuits of half of the prompts: a core of {self.n_core} sites "
            f"in a union of {self.n_union}, mean Jaccard index {self.jaccard:.2f}; on held-out "
            f"prompts faithfulness {faithful:.2f} ± {error:.2f}, completeness {complete:.2f}"
        )


def resamples_reasons(resamples: object) -> list[str]:
    """Return why this is no number of resamples."""
    if is_count(resamples) and as_plain(resamples) != 1:
        return []
    return [f"got resamples={resamples!r}; expected 2 or more, or 0 for none"]


def require_resamples(n_prompts: int, metric: Metric) -> None:
    """Refuse prompts that cannot be resampled, with every reason."""
    reasons = []
    if n_prompts < 4:
        reasons.append(f"got {n_prompts} pairs of prompts; expected 4 or more, to split in halves")
    if not metric.by_prompt:
        reasons.append(f"got {metric.name}, one number of all prompts; expected one for each")
    InputError.raise_if(reasons, "these prompts cannot be resampled")


def random_halves(n_prompts: int, n: int, seed: int) -> Iterator[tuple[_Half, _Half]]:
    """Yield random halves of the prompts, each with the other half."""
    generator, size = np.random.default_rng(seed), n_prompts // 2
    for number in range(n):
        if number % 2 == 0:
            order = generator.permutation(n_prompts)
            halves = np.sort(order[:size]), np.sort(order[size : 2 * size])
        yield halves[number % 2], halves[1 - number % 2]


def resampled(
    search: Callable[[AblatedModel, Float[np.ndarray, "site"]], tuple[Rows, Any]],
    ablate: Callable[..., AblatedModel],
    whole: AblatedModel,
    sites: pd.DataFrame,
    effects: Float[np.ndarray, "site prompt"],
    halves: Iterator[tuple[_Half, _Half]],
) -> Stability:
    """Search halves of the prompts, and measure what is found on the other halves."""
    included, rows = list[npt.NDArray[np.bool_]](), list[tuple[float, ...]]()
    held_out = list[pd.DataFrame]()
    models: dict[tuple[int, ...], AblatedModel] = {}
    for half, other_half in halves:
        keys = [tuple(some.tolist()) for some in (half, other_half)]
        # The two halves of a split follow each other.
        models = {key: models.get(key) or ablate(some=list(key)) for key in keys}
        ablated, others = (models[key] for key in keys)
        circuit, _ = search(ablated, effects[:, half].mean(axis=1))
        flags = np.zeros(len(sites), dtype=bool)
        flags[circuit] = True
        included.append(flags)
        fitted, complete, _ = ablated.curves([circuit])
        values = [*others.by_prompt([circuit, np.flatnonzero(~flags)]), others.whole_by_prompt]
        left, rest, span = (x - others.nothing_by_prompt for x in values)
        columns = {"prompt": other_half, "left": left, "rest": rest, "span": span}
        held_out.append(pd.DataFrame(columns))
        shares = float(left.mean() / span.mean()), float(rest.mean() / span.mean())
        rows.append((len(circuit), float(fitted[0]), float(complete[0]), *shares))
    flags_of_all = np.stack(included)
    frame = _inclusion(sites.assign(effect=effects.mean(axis=1)), flags_of_all)
    core = frame.index[frame["class"] == "core"].to_numpy()
    faithful, complete, _ = whole.curves([core])
    measures = ["faithfulness", "completeness"]
    by_prompt = pd.concat(held_out).groupby("prompt").mean()
    ratios = [share_of_sums(*by_prompt[[part, "span"]].to_numpy().T) for part in ("left", "rest")]
    return Stability(
        frame.reset_index(drop=True),
        pd.DataFrame(rows, columns=["n_sites", *measures, *(f"held_out_{x}" for x in measures)]),
        pd.DataFrame(ratios, columns=["mean", "standard_error"], index=measures),
        (float(faithful[0]), float(complete[0])),
        jaccard=float(1 - pdist(flags_of_all, "jaccard").mean()),
    )


def _inclusion(sites: pd.DataFrame, flags: Bool[np.ndarray, "resample site"]) -> pd.DataFrame:
    """Return the sites of any circuit with their inclusion, the most included first."""
    counts, n = flags.sum(axis=0), len(flags)
    bounds = np.array([inclusion_interval(count, n) for count in range(n + 1)])
    frame = sites.assign(inclusion=counts / n)
    frame[["inclusion_low", "inclusion_high"]] = bounds[counts]
    kinds = np.where(frame["inclusion"] >= _CORE, "core", "contingent")
    frame["class"] = np.where(frame["inclusion"] <= _NOISE, "noise", kinds)
    order = np.lexsort([-frame["effect"].abs(), -frame["inclusion"]])
    return frame.iloc[order[counts[order] > 0]]


def inclusion_interval(count: int, n: int) -> tuple[float, float]:
    """Return the interval of a site that `count` of n circuits include."""
    return interval(count / n, 2 + (n - 2) / _DEPENDENCE)


def interval(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's 90 % interval of a share of n trials; n need not be a whole number."""
    z2 = 1.6448536269514722**2  # the quantile of a two-sided 90 % interval
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return min(low, share), max(high, share)  # rounding may exclude shares of 0 and 1


def share_of_sums(
    parts: Float[np.ndarray, "prompt"], wholes: Float[np.ndarray, "prompt"]
) -> tuple[float, float]:
    """Return Σ parts / Σ wholes over prompts, and the standard error of this ratio."""
    n, share = len(parts), parts.sum() / wholes.sum()
    if n < 2:
        return float(share), np.nan
    misses = parts - share * wholes
    return float(share), float(np.sqrt((misses**2).sum() / (n * (n - 1))) / abs(wholes.mean()))
