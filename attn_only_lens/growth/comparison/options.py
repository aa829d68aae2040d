"""How large the batches and circuits of a comparison are, and how much is measured exactly."""

from dataclasses import dataclass

from attn_only_lens.arguments import COUNT, POSITIVE, RESAMPLES, SHARE
from attn_only_lens.errors import ComparisonError


@dataclass(frozen=True)
class ComparisonSizes:
    """How large the batches and the circuits of a comparison are, and how much is patched.

    Attributes:
        batch_size: the maximum number of prompts in a batch, if a contrast is cut into batches.
            Circuits and drops use the first batch only.
        faithfulness: the target for the circuits: each circuit's faithfulness differs from 1 by
            at most 1 - `faithfulness`.
        n_patched: how many components to patch exactly, by the largest |drop|; None: all.
        n_nodes: the largest number of sites of each circuit between which edges are computed; 0
            for models that have no attribution graph, such as BERT.
        edge_mass: the share of Σ |weight| that a circuit's edges of each kind must have.
        resamples: how many times to search for circuits again on a random half of the first batch,
            for the intervals of their overlap: 0, or 2 or more. Each costs one more search in every
            model.
        seed: the seed of random circuits and halves.

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
    n_nodes: int = 60
    edge_mass: float = 0.9
    resamples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        reasons = POSITIVE.reasons(batch_size=self.batch_size)
        reasons += COUNT.or_none.reasons(n_patched=self.n_patched)
        reasons += COUNT.reasons(n_nodes=self.n_nodes, seed=self.seed)
        reasons += SHARE.reasons(faithfulness=self.faithfulness, edge_mass=self.edge_mass)
        reasons += RESAMPLES.reasons(resamples=self.resamples)
        ComparisonError.raise_if(reasons, "models cannot be compared in this way")
