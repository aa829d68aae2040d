"""Collect values over chunks of prompts: means with standard errors, or values per prompt.

Let v_b be the metric of prompt b after a patch, u_b the metric before the patch, and w_b the
prompt's weight in the mean (Σ w_b = 1; w_b is 1/n except for a loss). The span (mean clean metric
minus mean corrupted metric) is treated as a constant. Then

    value                  Σ w_b v_b
    value_standard_error   √(n/(n-1) Σ w_b² (v_b - value)²)
    score_standard_error   √(n/(n-1) Σ w_b² (d_b - Σ w_c d_c)²) / |span|,    d_b = v_b - u_b

For n prompts with equal weights, the standard error is s/√n, where s is the sample standard
deviation. For unequal weights, it is the delta-method standard error of a ratio of sums. The
standard error of the score uses paired differences d_b, because the metric usually varies less with
the patch than with the prompt.

For each chunk of prompts and each site, a job stores the mean m of v, Σ w_b² (v_b - m) and Σ w_b²
(v_b - m)², and the same three statistics of d. When two chunks are joined, the sums are recomputed
for their common mean (as Chan, Golub and LeVeque 1979 do for equal weights).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.patching.site_groups import Chunk

SPREAD = ("value_standard_error", "score_standard_error")
"""Columns with the standard errors of means over several prompts."""


@dataclass(eq=False)
class OverPrompts:
    """A table of the metric in the clean run, in the corrupted run and after each patch.

    Attributes:
        name: the name of the metric.
        n_rows: the number of sites.
        n_prompts: the number of prompts.
        weights: the weight of each prompt in the mean; one weight if the metric has one value for
            all prompts.
        direction: the direction of the patches.
        per_prompt: whether each prompt gets its own rows.
    """

    name: str
    n_rows: int
    n_prompts: int
    weights: tuple[float, ...]
    direction: str
    per_prompt: bool
    _table: Float[Tensor, "end_or_row number"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.per_prompt and len(self.weights) != self.n_prompts:
            reason = (
                f"{self.name} has one value for all {self.n_prompts} prompts; expected a metric "
                f"that returns a value for each prompt: a tensor of shape [{self.n_prompts}]"
            )
            raise InputError([reason], "there are no rows for single prompts")
        if self.per_prompt and 0.0 in self.weights:
            zero_step = self.weights.index(0.0)
            reason = f"{self.name} has no value for prompt {zero_step}; leave out this prompt"
            raise InputError([reason], "there are no rows for single prompts")
        width = self.n_prompts if self.per_prompt else 6 if self.n_prompts > 1 else 1
        self._table = torch.zeros(2 + self.n_rows, width, dtype=torch.float64, device="cpu")

    def reduced(
        self,
        clean: Float[Tensor, "prompt"],
        corrupted: Float[Tensor, "prompt"],
        values: Float[Tensor, "row prompt"],
        shares: tuple[float, ...],
    ) -> Float[Tensor, "end_or_row number"]:
        """Return one chunk's statistics for the clean run, the corrupted run and each patch."""
        scores = torch.cat([clean[None], corrupted[None], values.cpu().double()])
        if self.per_prompt:
            return scores
        if self.n_prompts == 1:
            return mean_over(scores, shares)[:, None]
        unpatched = corrupted if self.direction == "denoise" else clean
        return torch.cat([_moments(scores, shares), _moments(scores - unpatched, shares)], dim=1)

    def add(self, chunk: Chunk, by_row: Float[Tensor, "end_or_row number"]) -> None:
        """Add a chunk's statistics, which `reduced` returned. Chunks must be added in order."""
        rows = slice(2 + chunk.rows.start, 2 + chunk.rows.stop)
        for there, new in ((slice(2), by_row[:2]), (rows, by_row[2:])):
            if self.per_prompt:
                self._table[there, chunk.prompts.start : chunk.prompts.stop] = new
            elif there != slice(2) or chunk.rows.start == 0:
                self._table[there] = self._joined(self._table[there], new, chunk.prompts)

    def _joined(self, so_far: Tensor, new: Tensor, prompts: range) -> Tensor:
        if self.n_prompts == 1:
            return new
        weights = torch.tensor(self.weights, dtype=torch.float64, device="cpu")
        before, here = weights[: prompts.start], weights[prompts.start : prompts.stop]
        square = here.sum() ** 2
        new = new.unflatten(1, (2, 3)) * new.new_tensor([1.0, square, square])
        if prompts.start == 0:
            return new.flatten(1)
        old = so_far.unflatten(1, (2, 3))
        total = (before.sum() + here.sum()) or 1.0  # if all weights are 0, all sums are 0
        mean = old[..., 0] + (new[..., 0] - old[..., 0]) * (here.sum() / total)
        first = second = torch.zeros_like(mean)
        for moments, w in ((old, before), (new, here)):
            shift, squares = moments[..., 0] - mean, w.square().sum()
            second = (
                second + moments[..., 2] + 2 * shift * moments[..., 1] + shift.square() * squares
            )
            first = first + moments[..., 1] + shift * squares
        return torch.stack([mean, first, second], dim=-1).flatten(1)

    def weight(self, prompts: range) -> float:
        return sum(self.weights[prompts.start : prompts.stop])

    @property
    def ends(self) -> tuple[float, float]:
        """The metric of the clean run and the metric of the corrupted run."""
        ends = mean_over(self._table[:2], self.weights) if self.per_prompt else self._table[:2, 0]
        return ends[0].item(), ends[1].item()

    @property
    def means(self) -> Float[Tensor, "row"]:
        """The mean metric over prompts after each patch."""
        return mean_over(self._table[2:], self.weights) if self.per_prompt else self._table[2:, 0]

    def columns(self) -> dict[str, np.ndarray]:
        """Return the results as columns, with one entry per site, or per site and prompt."""
        values = self._table[2:]
        if self.per_prompt:
            unpatched = self._table[1 if self.direction == "denoise" else 0]
            return {
                "value": values.flatten().numpy(),
                "prompt": np.tile(np.arange(self.n_prompts), self.n_rows),
                "unpatched": np.tile(unpatched.numpy(), self.n_rows),
            }
        columns = {"value": values[:, 0].numpy()}
        if self.n_prompts > 1:
            clean, corrupted = self.ends
            spreads = self._error(values[:, 2]), self._error(values[:, 5]) / abs(clean - corrupted)
            columns |= dict(zip(SPREAD, map(Tensor.numpy, spreads), strict=True))
        return columns

    def _error(self, squares: Float[Tensor, "row"]) -> Float[Tensor, "row"]:
        """Return the standard error, or NaN if fewer than two prompts have a value."""
        n = len(self.weights) - self.weights.count(0.0)
        if n < 2:
            return torch.full_like(squares, torch.nan)
        return (squares.clamp(min=0) * n / (n - 1)).sqrt() / sum(self.weights)


def mean_over(
    values: Float[Tensor, "row prompt"], shares: tuple[float, ...]
) -> Float[Tensor, "row"]:
    """Return each row's weighted mean over prompts; other rows do not affect its rounding."""
    if len(shares) == 1:
        return values[:, 0]
    # Sum in the order of `BoundMetric.mean`, so that a patch without effect gives the same mean.
    weighted = zip(shares, values.unbind(-1), strict=True)
    return sum((share * weight for share, weight in weighted), torch.zeros_like(values[:, 0]))


def moved_values(
    unpatched: Float[Tensor, "prompt"], moves: Float[Tensor, "row batch"], shares: tuple[float, ...]
) -> Float[Tensor, "row prompt"]:
    """Return each prompt's value after a patch, given its contribution to the mean's change."""
    moves = moves.cpu().double()
    if len(shares) == 1:  # only one prompt, or one value for all prompts
        return unpatched + (moves if moves.shape[1] == 1 else moves.sum(dim=1, keepdim=True))
    return unpatched + moves / moves.new_tensor([share or 1.0 for share in shares])


def _moments(
    values: Float[Tensor, "row prompt"], shares: tuple[float, ...]
) -> Float[Tensor, "row 3"]:
    """Return, for each row, the mean m, Σ w² (v - m) and Σ w² (v - m)²."""
    mean = mean_over(values, shares)
    squares = values.new_tensor(shares).square()
    deviations = values - mean[:, None]
    first = (deviations * squares).sum(-1)
    return torch.stack([mean, first, (deviations.square() * squares).sum(-1)], dim=-1)
