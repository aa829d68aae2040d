"""How large the batches and circuits of a comparison are, and how prompts are resampled."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from attn_only_lens.arguments import COUNT, POSITIVE, RESAMPLES, SHARE
from attn_only_lens.errors import ComparisonError

_PROBLEM = "models cannot be compared in this way"


@dataclass(frozen=True)
class ComparisonSizes:
    """How large the batches and the circuits of a comparison are.

    Attributes:
        batch_size: the maximum number of prompts in a batch, if a contrast is cut into batches.
            Circuits and exact patches use the first batch only.
        faithfulness: the target for the circuits: each circuit's faithfulness differs from 1 by
            at most 1 - `faithfulness`.
        n_patched: how many components to patch, by the largest |estimated drop|; None: all.
        n_nodes: the number of circuit nodes with the largest effects between which edges are
            computed; 0 for models whose patterns cannot be frozen.
        edge_mass: the share of Σ |weight| that a circuit's edges of each kind must have.

    Raises:
        ComparisonError: a number is out of range; the error lists every reason.

    Example:
        >>> from attn_only_lens.growth import ComparisonSizes
        >>> ComparisonSizes(n_patched=5, n_nodes=20).faithfulness
        0.9
    """

    batch_size: int = 32
    faithfulness: float = 0.9
    n_patched: int | None = 200
    n_nodes: int = 100
    edge_mass: float = 0.9

    def __post_init__(self) -> None:
        reasons = POSITIVE.reasons(batch_size=self.batch_size)
        reasons += COUNT.or_none.reasons(n_patched=self.n_patched)
        reasons += COUNT.reasons(n_nodes=self.n_nodes)
        reasons += SHARE.reasons(faithfulness=self.faithfulness, edge_mass=self.edge_mass)
        ComparisonError.raise_if(reasons, _PROBLEM)


@dataclass(frozen=True)
class Resampling:
    """How the first batch's prompts are resampled, for confidence intervals (the bootstrap).

    Attributes:
        n_resamples: the number of resamples, 2 or more; 0 for no intervals.
        confidence: the level of the confidence intervals.
        seed: the seed for resampling and for random circuits.

    Raises:
        ComparisonError: a number is out of range; the error lists every reason.

    Example:
        >>> from attn_only_lens.growth import Resampling
        >>> Resampling(n_resamples=1000)
        Resampling(n_resamples=1000, confidence=0.95, seed=0)
    """

    n_resamples: int = 200
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        reasons = RESAMPLES.reasons(n_resamples=self.n_resamples) + COUNT.reasons(seed=self.seed)
        reasons += SHARE.reasons(confidence=self.confidence)
        ComparisonError.raise_if(reasons, _PROBLEM)

    def weights(self, n_prompts: int) -> Float[np.ndarray, "resample prompt"]:
        """Return the weight of each prompt in each resample."""
        generator = np.random.default_rng(self.seed)
        uniform = np.full(n_prompts, 1 / n_prompts)
        return generator.multinomial(n_prompts, uniform, size=self.n_resamples) / n_prompts

    def interval(
        self, values: npt.NDArray[np.float64], estimate: float, least: float
    ) -> tuple[float, float]:
        """Return the confidence interval of an estimate, clipped to [least, 1].

        The resamples' values are shifted so that their mean is the estimate; NaN values are left
        out. If the estimate or every value is NaN, so is the interval.
        """
        values = values[~np.isnan(values)]
        if not len(values) or np.isnan(estimate):
            return float("nan"), float("nan")
        tail = (1 - self.confidence) / 2
        shift = estimate - values.mean()
        low, high = (np.quantile(values, [tail, 1 - tail]) + shift).clip(least, 1)
        return float(low), float(high)
