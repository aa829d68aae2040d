"""A stream of batches, in which each prompt has a corrupted prompt.

To compute the effect of a head on a metric, the head's activation in a first run is replaced by its
activation in a second run. Without corrupted prompts, the second run is on the *next prompt* (the
first prompt follows the last). This is resample ablation. Unlike zeros and means, these activations
come from a run on a real prompt. Attribution, patching and circuit search all use this ablation.

The next prompt is the next one that differs and has the same length. In texts and tensors, the next
prompt can be in any batch, so that batch boundaries do not matter. In a stream, the next prompt is
in the same batch. A prompt that is alone in its batch is paired with a prompt of the same length
from an earlier batch. No prompt is paired with itself, because zero effects would bias the mean.
"""

import reprlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attn_only_lens.axes import Logits, Tokens
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, as_metric
from attn_only_lens.engine.prompts import (
    PromptPair,
    Prompts,
    are_prompts,
    prompt_pair,
    single_prompts,
)
from attn_only_lens.engine.tokens import array_as_tensor, checked_tokens
from attn_only_lens.errors import ComparisonError

_Rows: TypeAlias = Tensor | PromptPair
PromptSource: TypeAlias = Prompts | PromptPair | Iterable[_Rows | tuple[_Rows, AnyMetric]]
_AS_TENSOR = "torch.as_tensor(tokens) makes a tensor from an array or from lists"
_PROBLEM = "models cannot be compared on these prompts"


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
    model: Any,
    tokens: PromptSource,
    metric: AnyMetric | None,
    corrupted: Prompts | None,
    batch_size: int,
) -> Iterator[Batch]:
    """Yield batches with corrupted prompts; a stream of batches is read lazily."""
    reasons = []
    tokens = array_as_tensor(tokens)
    is_whole = isinstance(tokens, str | Tensor) or are_prompts(tokens)
    if corrupted is not None and not is_whole:
        reasons.append("got corrupted prompts with a stream; expected a stream of PromptPairs")
    if not (is_whole or isinstance(tokens, PromptPair | Iterable)):
        got = type(tokens).__name__
        reasons.append(f"got {got}; expected texts, tokens [prompt, pos], or batches of them")
    if is_whole and metric is None:
        reasons.append("got no metric; expected a metric such as patching.loss()")
    ComparisonError.raise_if(reasons, _PROBLEM)
    stream: Iterable[Any] = [tokens] if isinstance(tokens, PromptPair) else tokens
    if is_whole:
        assert metric is not None
        stream = list(_cut(model, tokens, metric, corrupted, batch_size))
    n = len(stream) if isinstance(stream, Sized) else None
    pairs = _paired(model, stream, metric)
    first = next(pairs, None)
    if first is None:
        raise ComparisonError(["got no prompts; expected at least one batch"], _PROBLEM)
    pair = first.pair
    prompt_pair(model, pair.clean, pair.corrupted, pair.mask)  # refuses identical prompts
    yield replace(first, of=n)
    for number, batch in enumerate(pairs, start=2):
        yield replace(batch, number=number, of=n)


def _cut(
    model: Any, tokens: Any, metric: AnyMetric, corrupted: Prompts | None, size: int
) -> Iterator[tuple[PromptPair, AnyMetric]]:
    """Split prompts, and the metric's answers to them, into batches.

    Without `corrupted`, a batch's prompts have the same length.
    """
    if corrupted is not None:
        pair = prompt_pair(model, tokens, corrupted)
        groups = [(pair, torch.arange(len(pair.clean), device="cpu"))]
    else:
        groups = [
            (PromptPair(rows, _next_others(rows)), numbers)
            for rows, numbers in _by_length(model, tokens)
        ]
    n_all = sum(len(numbers) for _, numbers in groups)
    for pair, numbers in groups:
        n = -(-len(numbers) // size)
        masks = [None] * n if pair.mask is None else pair.mask.tensor_split(n)
        sides = pair.clean.tensor_split(n), pair.corrupted.tensor_split(n), masks
        metrics = [_metric_of(metric, rows.tolist(), n_all) for rows in numbers.tensor_split(n)]
        yield from zip(map(PromptPair, *sides), metrics, strict=True)


def _metric_of(metric: AnyMetric, prompts: Sequence[int], n_all: int) -> AnyMetric:
    """Restrict a metric that has answers for `n_all` prompts to the prompts with these indices."""
    metric = as_metric(metric)
    bind = metric.bound

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        rows = range(len(pair.clean)) if pair.among is None else pair.among[0]
        return bind(model, replace(pair, among=([prompts[row] for row in rows], n_all)), reference)

    return replace(metric, bound=bound) if metric.answers else metric


def _by_length(model: Any, tokens: Any) -> list[tuple[Tokens, Tensor]]:
    """Group prompts by length; return each group's tokens and its prompts' indices."""
    pair = single_prompts(model, tokens, padded=False)
    lengths = pair.real.sum(dim=1)
    groups = [(pair.clean[lengths == n], pair.real[lengths == n]) for n in lengths.unique()]
    numbers = [(lengths == n).nonzero()[:, 0].cpu() for n in lengths.unique()]
    texts = [rows[real].view(len(rows), -1) for rows, real in groups]
    reasons = []
    for rows, numbers_of_rows in zip(texts, numbers, strict=True):
        if _other(rows, rows[:1]) is None:
            number = int(numbers_of_rows[0])
            prompt = tokens if isinstance(tokens, str) else tokens[number]
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


def _paired(model: Any, stream: Iterable[Any], metric_of_all: AnyMetric | None) -> Iterator[Batch]:
    """Yield batches with corrupted prompts."""
    known: dict[int, Tokens] = {}  # for each length, two different earlier prompts
    for item in stream:
        has_metric = isinstance(item, tuple) and len(item) == 2
        tokens, metric = item if has_metric else (item, metric_of_all)
        rows = _checked(model, tokens)
        if metric is None:
            raise ComparisonError(["got a batch without a metric, and no metric for all"], _PROBLEM)
        if isinstance(rows, PromptPair):
            yield Batch(rows, metric)
            continue
        length = rows.shape[1]
        if (different := _other(rows, rows[:1])) is not None:
            known.setdefault(length, torch.cat([rows[:1], different]))
            yield Batch(PromptPair(rows, _next_others(rows)), metric)
        elif (different := _other(known.get(length, rows), rows[:1])) is not None:
            yield Batch(PromptPair(rows, different.repeat(len(rows), 1)), metric)
        else:
            reason = (
                f"got a batch with 1 prompt of {length} tokens, and no other prompt of this length "
                "in earlier batches; expected batches of 2 or more different prompts, or "
                "corrupted prompts"
            )
            raise ComparisonError([reason], _PROBLEM)


def _checked(model: Any, rows: object) -> _Rows:
    """Return a batch from a stream, after checking that the model can run on it."""
    rows = array_as_tensor(rows)
    if isinstance(rows, PromptPair):
        checked_tokens(model, rows.clean)
        checked_tokens(model, rows.corrupted)
        return rows
    if not isinstance(rows, Tensor):
        got = type(rows).__name__
        raise ComparisonError(
            [f"got a batch of {got}; expected a tensor or a PromptPair: {_AS_TENSOR}"], _PROBLEM
        )
    return single_prompts(model, rows).clean
