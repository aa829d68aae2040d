"""A stream of batches, in which each prompt has a corrupted prompt.

To compute the effect of a head on a metric, the head's activation in a first run is replaced by its
activation in a second run. Without corrupted prompts, the second run is on the *next prompt* (the
first prompt follows the last). This is resample ablation. Unlike zeros and means, these activations
come from a run on a real prompt. Attribution, patching and circuit search all use this ablation.

The next prompt is the next one that differs and has the same length. If a contrast is cut into
batches, the next prompt can be in any batch, so that batch boundaries do not matter. In a stream of
contrasts, the next prompt is in the same contrast. A prompt that is alone in its contrast is paired
with a prompt of the same length from an earlier one. No prompt is paired with itself, because zero
effects would bias the mean.
"""

import reprlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import Logits, Tokens
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, as_metric
from attn_only_lens.engine.prompts import PromptPair, prompt_pair, single_prompts
from attn_only_lens.errors import ComparisonError

_PROBLEM = "models cannot be compared on these prompts"
_EXPECTED = "expected Contrast(clean, corrupted, metric)"


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompt pairs that are run together, and a metric that is not yet bound to them."""

    pair: PromptPair
    metric: AnyMetric
    number: int = 1
    of: int | None = None  # the number of batches, if it is known

    @property
    def label(self) -> str:
        """The label of the batch, for example `batch 2 of 7`."""
        return f"batch {self.number}" + ("" if self.of is None else f" of {self.of}")


def batches(
    model: Any, contrast: Contrast | Iterable[Contrast], batch_size: int
) -> Iterator[Batch]:
    """Yield batches with corrupted prompts; a stream of contrasts is read lazily."""
    n = len(contrast) if isinstance(contrast, Sized) else None
    if isinstance(contrast, Contrast):
        cut = list(_cut(model, contrast, batch_size))
        n, pairs = len(cut), iter(cut)
    elif isinstance(contrast, Iterable):
        pairs = _paired(model, contrast)
    else:
        got = f"got {a_type(contrast)}; {_EXPECTED}, or an iterable of contrasts"
        raise ComparisonError([got], _PROBLEM)
    first = next(pairs, None)
    if first is None:
        raise ComparisonError(["got no contrasts; expected at least one"], _PROBLEM)
    pair, _ = first
    prompt_pair(model, pair.clean, pair.corrupted, pair.mask)  # refuses identical prompts
    for number, (pair, metric) in enumerate(chain([first], pairs), start=1):
        yield Batch(pair, metric, number, n)


def _cut(model: Any, contrast: Contrast, size: int) -> Iterator[tuple[PromptPair, AnyMetric]]:
    """Split prompts, and the metric's answers to them, into batches.

    Without corrupted prompts, a batch's prompts have the same length.
    """
    if contrast.corrupted is not None:
        pair = contrast.pair(model)
        groups = [(pair, torch.arange(len(pair.clean), device="cpu"))]
    else:
        groups = [
            (PromptPair(rows, _next_others(rows)), numbers)
            for rows, numbers in _by_length(model, contrast)
        ]
    n_all = sum(len(numbers) for _, numbers in groups)
    for pair, numbers in groups:
        n = -(-len(numbers) // size)
        masks = [None] * n if pair.mask is None else pair.mask.tensor_split(n)
        sides = pair.clean.tensor_split(n), pair.corrupted.tensor_split(n), masks
        metrics = [
            _metric_of(contrast.metric, rows.tolist(), n_all) for rows in numbers.tensor_split(n)
        ]
        yield from zip(map(PromptPair, *sides), metrics, strict=True)


def _metric_of(metric: AnyMetric, prompts: Sequence[int], n_all: int) -> AnyMetric:
    """Restrict a metric that has answers for `n_all` prompts to the prompts with these indices."""
    metric = as_metric(metric)
    bind = metric.bound

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        rows = range(len(pair.clean)) if pair.among is None else pair.among[0]
        return bind(model, replace(pair, among=([prompts[row] for row in rows], n_all)), reference)

    return replace(metric, bound=bound) if metric.answers else metric


def _by_length(model: Any, contrast: Contrast) -> list[tuple[Tokens, Tensor]]:
    """Group prompts by length; return each group's tokens and its prompts' indices."""
    prompts = contrast.clean
    pair = single_prompts(model, prompts, contrast.mask, padded=False)
    lengths = pair.real.sum(dim=1)
    groups = [(pair.clean[lengths == n], pair.real[lengths == n]) for n in lengths.unique()]
    numbers = [(lengths == n).nonzero()[:, 0].cpu() for n in lengths.unique()]
    texts = [rows[real].view(len(rows), -1) for rows, real in groups]
    reasons = []
    for rows, numbers_of_rows in zip(texts, numbers, strict=True):
        if _other(rows, rows[:1]) is None:
            number = int(numbers_of_rows[0])
            prompt = prompts if isinstance(prompts, str) else prompts[number]
            text = f", {reprlib.repr(prompt)}" if isinstance(prompt, str) else ""
            reasons.append(
                f"only prompt {number} has {rows.shape[1]} tokens{text}; expected another prompt "
                "with this length, or corrupted prompts"
            )
    ComparisonError.raise_if(reasons, _PROBLEM)
    return list(zip(texts, numbers, strict=True))


def _other(rows: Tokens, prompt: Tokens) -> Tokens | None:
    """Return the first row that differs from `prompt`, or None."""
    others = rows[(rows != prompt).any(dim=1)]
    return others[:1] if len(others) else None


def _next_others(rows: Tokens) -> Tokens:
    """Return, for each prompt, the next different prompt in cyclic order."""
    shifted = rows.roll(-1, dims=0)
    for shift in range(2, len(rows)):
        same = (shifted == rows).all(dim=1, keepdim=True)
        if not same.any():
            break
        shifted = torch.where(same, rows.roll(-shift, dims=0), shifted)
    return shifted


def _paired(model: Any, contrasts: Iterable[Contrast]) -> Iterator[tuple[PromptPair, AnyMetric]]:
    """Yield each contrast's prompts, with corrupted prompts, and its metric."""
    known: dict[int, Tokens] = {}  # for each length, two different earlier prompts
    for contrast in contrasts:
        if not isinstance(contrast, Contrast):
            raise ComparisonError([f"got {a_type(contrast)} as a batch; {_EXPECTED}"], _PROBLEM)
        pair = contrast.pair(model)
        if contrast.corrupted is not None:
            yield pair, contrast.metric
            continue
        rows = _of_one_length(pair)
        length = rows.shape[1]
        if (different := _other(rows, rows[:1])) is not None:
            known.setdefault(length, torch.cat([rows[:1], different]))
            yield PromptPair(rows, _next_others(rows)), contrast.metric
        elif (different := _other(known.get(length, rows), rows[:1])) is not None:
            yield PromptPair(rows, different.repeat(len(rows), 1)), contrast.metric
        else:
            reason = (
                f"got a batch with 1 prompt of {length} tokens, and no other prompt of this length "
                "in earlier batches; expected batches of 2 or more different prompts, or "
                "corrupted prompts"
            )
            raise ComparisonError([reason], _PROBLEM)


def _of_one_length(pair: PromptPair) -> Tokens:
    """Return prompts without padding; raise an error if their lengths differ."""
    lengths = pair.real.sum(dim=1)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < longest:
        reason = (
            f"got a batch of prompts of {shortest} to {longest} tokens without corrupted prompts; "
            "expected batches of prompts of one length, or one contrast with all prompts"
        )
        raise ComparisonError([reason], _PROBLEM)
    return pair.clean[pair.real].view(len(lengths), -1)
