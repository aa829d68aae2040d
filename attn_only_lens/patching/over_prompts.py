"""Values of each prompt as rows of a sweep: means with standard errors, or every prompt's own.

With v_b the metric of prompt b after a patch and u_b before it, w_b its weight in the mean (1/n,
but for a loss; Σ w_b = 1), and span = clean - corrupted of the means, taken as given,

    value                  Σ w_b v_b
    value_standard_error   √(n/(n-1) Σ w_b² (v_b - value)²)
    score_standard_error   √(n/(n-1) Σ w_b² (d_b - Σ w_c d_c)²) / |span|,    d_b = v_b - u_b

which is s/√n of n prompts of equal weight, and the linearised one of a ratio of sums otherwise. The
score's is of paired differences: prompts differ more from each other than a patch moves them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.runs.recording import RunPair

SPREAD = ("value_standard_error", "score_standard_error")
"""Columns of means over several prompts."""


@dataclass(frozen=True, eq=False)
class OverPrompts:
    """How the values of each prompt become rows.

    Attributes:
        unpatched: the metric of each prompt in the run patched into.
        weights: of each prompt in the mean.
        n_prompts: how many prompts there are; more than there are values, if prompts have none of
            their own.
        span: the mean of the clean run less that of the corrupted one.
        per_prompt: whether each prompt gets rows of its own.
    """

    unpatched: Float[Tensor, "prompt"]
    weights: tuple[float, ...]
    n_prompts: int
    span: float
    per_prompt: bool

    @classmethod
    def of_runs(cls, runs: RunPair, direction: str, per_prompt: bool) -> "OverPrompts":
        """Return it for the two runs of a sweep.

        Raises:
            InputError: prompts have no rows of their own.
        """
        unpatched = runs.target(direction)[2]
        weights, n_prompts = runs.metric.shares(len(unpatched)), len(runs.pair.clean)
        if per_prompt and len(weights) != n_prompts:
            reason = (
                f"{runs.metric.name} is one number of all {n_prompts} prompts; expected a metric "
                f"that gives each its own: have the function return a tensor [{n_prompts}]"
            )
            raise InputError([reason], "there are no rows of each prompt")
        if per_prompt and 0.0 in weights:
            reason = (
                f"{runs.metric.name} has no value for prompt {weights.index(0.0)}; leave it out"
            )
            raise InputError([reason], "there are no rows of each prompt")
        span = runs.clean_value - runs.corrupted_value
        return cls(unpatched, weights, n_prompts, span, per_prompt)

    def columns(self, values: Float[Tensor, "site prompt"]) -> dict[str, np.ndarray]:
        """Return the columns that values make: a row for each site, or each site and prompt."""
        values = values.cpu().double()
        if self.per_prompt:
            n_sites, n_prompts = values.shape
            return {
                "value": values.flatten().numpy(),
                "prompt": np.tile(np.arange(n_prompts), n_sites),
                "unpatched": np.tile(self.unpatched.numpy(), n_sites),
            }
        columns = {"value": self.mean(values).numpy()}
        if self.n_prompts > 1:
            changes = values - self.unpatched
            spreads = self._error_of_mean(values), self._error_of_mean(changes) / abs(self.span)
            columns |= dict(zip(SPREAD, map(Tensor.numpy, spreads), strict=True))
        return columns

    def flags(self, flags: Bool[Tensor, "site"]) -> Bool[np.ndarray, "row"]:
        """Return the flag of each row."""
        return np.repeat(flags.numpy(), len(self.weights) if self.per_prompt else 1)

    def moved(self, moves: Float[Tensor, "site batch"]) -> Float[Tensor, "site prompt"]:
        """Return the values of prompts of which each moves the mean by so much."""
        moves = moves.cpu().double()
        if len(self.weights) == 1:  # of all prompts, or of the only one
            return (
                moves if moves.shape[1] == 1 else moves.sum(dim=1, keepdim=True)
            ) + self.unpatched
        return self.unpatched + moves / moves.new_tensor([share or 1.0 for share in self.weights])

    def mean(self, values: Float[Tensor, "site prompt"]) -> Float[Tensor, "site"]:
        """Return the mean over prompts."""
        if len(self.weights) == 1:
            return values[:, 0]
        # As `BoundMetric.mean` sums: a patch without effect has the unpatched value, bit for bit.
        weighted = zip(self.weights, values.unbind(-1), strict=True)
        return sum((share * each for share, each in weighted), torch.zeros_like(values[:, 0]))

    def _error_of_mean(self, values: Float[Tensor, "site prompt"]) -> Float[Tensor, "site"]:
        """Return the standard error; nan where fewer than two prompts have values of their own."""
        n = len(self.weights) - self.weights.count(0.0)
        if n < 2:
            return torch.full_like(values[:, 0], torch.nan)
        deviations = values.new_tensor(self.weights) * (values - self.mean(values).unsqueeze(-1))
        return (deviations.square().sum(-1) * n / (n - 1)).sqrt()
