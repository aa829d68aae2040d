"""A metric bound to prompts: which logits it reads, and one number of them for every site.

What a metric reads is said apart from what it makes of it, so that a sweep computes those logits
only: for a logit difference, one position of each prompt and two columns of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.axes import Logits
from attn_only_lens.errors import PatchingError
from attn_only_lens.numerics import where_float64_is
from attn_only_lens.patching.prompts import PromptPair

__all__ = ["BoundMetric", "Metric", "require_differentiable", "require_distinct", "require_slope"]

_ROUNDINGS = 8  # of a metric: a difference, a mean and their inputs, each within one
_NO_SLOPE = 64  # roundings of float32 or finer: below, a gradient is what sums left over
_NO_METRIC = "this metric cannot be measured"


@dataclass(frozen=True, eq=False)
class BoundMetric:
    """A metric of given prompts, as a function of the logits.

    Attributes:
        name: what it measures.
        positions: the one position of each prompt that it reads; None where it reads all.
        columns: the entries of the vocabulary that it reads; None where it reads all.
        shape: batch, pos and vocabulary of the logits of a whole run.
        compute: the formula, from logits as `value` takes them.
    """

    name: str
    positions: Int[Tensor, "batch"] | None
    columns: Int[Tensor, "column"] | None
    shape: tuple[int, int, int]
    compute: Callable[[Float[Tensor, "site batch position column"]], Float[Tensor, "site"]] = field(
        repr=False
    )

    def value(self, logits: Float[Tensor, "site batch position column"]) -> Float[Tensor, "site"]:
        """The metric for every site: the mean over the batch. Differentiable.

        Args:
            logits: at `positions` (an axis of size 1) and `columns`, all where those are None.

        Returns:
            One number a site, in the dtype of the logits; float32 where they are shorter.

        Raises:
            PatchingError: logits of another shape; a result that is not one finite number a site.
        """
        batch, pos, d_vocab = self.shape
        expected = (
            batch,
            pos if self.positions is None else 1,
            d_vocab if self.columns is None else len(self.columns),
        )
        if logits.ndim != 4 or not len(logits) or logits.shape[1:] != expected:
            self._refuse(
                f"got logits {list(logits.shape)}; expected [site, batch, position, column] with "
                f"at least one site and then {list(expected)}"
            )
        values = self.compute(logits)
        if values.shape != logits.shape[:1]:
            self._refuse(f"got values {list(values.shape)}; expected one of each site")
        bad = (~values.isfinite()).sum().item()
        if bad:
            self._refuse(f"it is not finite for {bad} of {len(values)} sites")
        return values

    def select(
        self, logits: Float[Tensor, "*site batch pos d_vocab"]
    ) -> Float[Tensor, "*site batch position column"]:
        """What this metric reads of the logits of whole runs."""
        if logits.shape[-3:] != self.shape:
            self._refuse(
                f"got logits {list(logits.shape)}; expected [..., batch, pos, d_vocab] ending in "
                f"{list(self.shape)}"
            )
        if self.positions is not None:
            rows = torch.arange(self.shape[0], device=logits.device)
            logits = logits[..., rows, self.positions.to(logits.device), :].unsqueeze(-2)
        return logits if self.columns is None else logits[..., self.columns.to(logits.device)]

    @torch.no_grad()
    def of(self, logits: Logits) -> float:
        """The metric of one whole run, computed twice.

        Raises:
            PatchingError: as `value` does; or it depends on more than the logits, or changes them.
        """
        read = self.select(logits)[None]
        kept = read.clone()
        once, again = self.value(read).item(), self.value(read).item()
        if not torch.equal(read, kept):
            self._refuse("it changes the logits that it is given; have it work on a copy")
        if once != again:
            self._refuse(
                f"got {once} and then {again} for the same logits; expected a function of the "
                "logits alone, without randomness or a memory"
            )
        return once

    def _refuse(self, reason: str) -> None:
        raise PatchingError([f"{self.name}: {reason}"], _NO_METRIC)


@dataclass(frozen=True)
class Metric:
    """What to measure, of any prompts. Made by `logit_diff` and the like.

    Attributes:
        name: what it measures, and of which answers.
        bound: binds it: called by `bind` with the model, the prompts and the clean run's logits.
        needs_reference: whether it compares with the clean run's logits.
        version: identifies it when a sweep is resumed, in place of its code; None for its code.
    """

    name: str
    bound: Callable[[Any, PromptPair, Logits | None], BoundMetric] = field(repr=False)
    needs_reference: bool = False
    version: str | None = field(default=None, repr=False)


def require_distinct(clean_value: float, corrupted_value: float, dtype: torch.dtype) -> None:
    """Refuse a metric that does not tell the clean run from the corrupted one.

    Scores divide by the difference of the two: where that is rounding, scores are noise.

    Args:
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        dtype: of the logits.

    Raises:
        PatchingError: they are equal, within rounding of the dtype, or not finite.

    Example:
        >>> import torch
        >>> from attn_only_lens import patching as p
        >>> p.require_distinct(3.0, -1.0, torch.float32)
    """
    scale = max(abs(clean_value), abs(corrupted_value))
    within = _ROUNDINGS * torch.finfo(dtype).eps * scale
    if not abs(clean_value - corrupted_value) > within or scale == float("inf"):
        raise PatchingError(
            [
                f"got {clean_value} for the clean run and {corrupted_value} for the corrupted one, "
                f"which {dtype} does not tell apart; expected prompts and a metric that do differ: "
                "scores are shares of that difference"
            ],
            "this metric is constant",
        )


def require_differentiable(metric: BoundMetric, logits: Logits) -> None:
    """Refuse a metric that no gradient passes through.

    Args:
        metric: to be attributed.
        logits: of a whole run.

    Raises:
        PatchingError: its value is detached from the logits, or the gradient is not finite.

    Example:
        >>> import torch
        >>> from attn_only_lens import patching as p, pretrained
        >>> model = pretrained.modular_addition()
        >>> pair = p.prompt_pair(model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]))
        >>> metric = p.bind(p.logit_diff(correct=7, wrong=8), model, pair)
        >>> p.require_differentiable(metric, model(pair.clean))
    """
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        value = metric.value(metric.select(leaf)[None])
        reasons = []
        if not value.requires_grad:
            reasons.append(
                f"{metric.name}: its value is detached from the logits (a python number, argmax, "
                "or torch.no_grad?); expected a tensor made of them by differentiable steps"
            )
        elif not torch.autograd.grad(value.sum(), leaf)[0].isfinite().all():
            reasons.append(f"{metric.name}: its gradient is not finite")
    if reasons:
        raise PatchingError(reasons, "this metric cannot be attributed")


def require_slope(metric: BoundMetric, logits: Logits, other: Logits, span: float) -> None:
    """Refuse a metric that is flat at the run patched into, such as `kl` at its minimum.

    Every estimate by the gradient there would be zero, or rounding. What is held against the
    metric's span is Σ |∂metric/∂logits · (other - logits)|.

    Args:
        metric: that a gradient passes through.
        logits: of the run patched into.
        other: of the other run.
        span: the metric of one less that of the other.

    Raises:
        PatchingError: the metric is flat there.
    """
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        slope = torch.autograd.grad(metric.value(metric.select(leaf)[None]).sum(), leaf)[0]
    moves = float(where_float64_is(slope * (other.detach() - leaf.detach())).double().abs().sum())
    eps = min(torch.finfo(dtype).eps for dtype in (logits.dtype, torch.float32))
    if moves <= _NO_SLOPE * eps * abs(span):
        raise PatchingError(
            [
                f"{metric.name}: its gradient is zero on the run patched into, so every estimate "
                "would be; expected a metric that is not flat there: take the other direction, "
                "another metric, or method='integrated'"
            ],
            "this metric cannot be attributed",
        )
