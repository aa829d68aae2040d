"""Prompts as a stream of batches, each prompt with a corrupted one.

The effect of a head on a metric is measured with a second run, whose activation of the head
replaces that of the first run. Without corrupted prompts, the second run is of the *next prompt*
(for the last prompt: the first). This is resample ablation: unlike zeros and means, the activations
are ones that the model has on real prompts. Attribution, patching and the search for circuits use
the same ablation, so all of them ask: how much of the metric is lost if a head sees another prompt?

The next prompt is the next different one of the same length: of all texts or tensors, so that it
does not matter how they are cut; in a stream, of the batch. A prompt that is alone in its batch is
paired with one of its length from an earlier batch. No prompt is paired with itself, which would
count it and measure nothing.
"""

import reprlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.metrics import AnyMetric
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
_AS_TENSOR = "torch.as_tensor(tokens) makes a tensor of an array or of lists"
_PROBLEM = "these prompts cannot be compared on"


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts that run together, and their metric, which is unbound."""

    pair: PromptPair
    metric: AnyMetric
    number: int = 1
    of: int | None = None  # how many batches there are, if the stream knows

    @property
    def label(self) -> str:
        """`batch 2 of 7`."""
        return f"batch {self.number}" + ("" if self.of is None else f" of {self.of}")


def batches(
    model: Any,
    tokens: PromptSource,
    metric: AnyMetric | None,
    corrupted: Prompts | None,
    batch_size: int,
) -> Iterator[Batch]:
    """Yield one batch after another; a stream is read lazily."""
    reasons = []
    tokens = array_as_tensor(tokens)
    is_whole = isinstance(tokens, str | Tensor) or are_prompts(tokens)
    if corrupted is not None and not is_whole:
        reasons.append("got corrupted prompts with a stream; expected pairs of prompt_pair")
    if not (is_whole or isinstance(tokens, PromptPair | Iterable)):
        got = type(tokens).__name__
        reasons.append(f"got {got}; expected texts, tokens [prompt, pos], or batches of them")
    if is_whole and metric is None:
        reasons.append("got no metric; expected one, such as patching.loss()")
    ComparisonError.raise_if(reasons, _PROBLEM)
    stream: Iterable[Any] = [tokens] if isinstance(tokens, PromptPair) else tokens
    if is_whole:
        stream = list(_cut(model, tokens, corrupted, batch_size))
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


def _cut(model: Any, tokens: Any, corrupted: Prompts | None, size: int) -> Iterator[PromptPair]:
    """Cut into batches of about one size; without corrupted prompts, each of one length."""
    if corrupted is not None:
        pairs = [prompt_pair(model, tokens, corrupted)]
    else:
        pairs = [PromptPair(rows, _next_others(rows)) for rows in _by_length(model, tokens)]
    for pair in pairs:
        n = -(-len(pair.clean) // size)
        masks = [None] * n if pair.mask is None else pair.mask.tensor_split(n)
        yield from map(
            PromptPair, pair.clean.tensor_split(n), pair.corrupted.tensor_split(n), masks
        )


def _by_length(model: Any, tokens: Any) -> Sequence[Tokens]:
    pair = single_prompts(model, tokens)
    lengths = pair.real.sum(dim=1)
    groups = [(pair.clean[lengths == n], pair.real[lengths == n]) for n in lengths.unique()]
    texts = [rows[real].view(len(rows), -1) for rows, real in groups]
    reasons = []
    for rows in texts:
        if _other(rows, rows[:1]) is None:
            number = int((lengths == rows.shape[1]).nonzero()[0])
            prompt = tokens if isinstance(tokens, str) else tokens[number]
            text = f", {reprlib.repr(prompt)}" if isinstance(prompt, str) else ""
            reasons.append(
                f"1 prompt alone has {rows.shape[1]} tokens: prompt {number}{text}; expected "
                "another of that length, or corrupted prompts"
            )
    ComparisonError.raise_if(reasons, _PROBLEM)
    return texts


def _other(rows: Tokens, prompt: Tokens) -> Tokens | None:
    """Return the first prompt that differs from this one."""
    others = rows[(rows != prompt).any(dim=1)]
    return others[:1] if len(others) else None


def _next_others(rows: Tokens) -> Tokens:
    """Return for each prompt the next prompt that differs from it, cyclically."""
    shifted = rows.roll(-1, dims=0)
    for shift in range(2, len(rows)):
        same = (shifted == rows).all(dim=1, keepdim=True)
        if not same.any():
            break
        shifted = torch.where(same, rows.roll(-shift, dims=0), shifted)
    return shifted


def _paired(model: Any, stream: Iterable[Any], metric_of_all: AnyMetric | None) -> Iterator[Batch]:
    """Yield batches with corrupted prompts."""
    known: dict[int, Tokens] = {}  # two different prompts of each length
    for item in stream:
        has_metric = isinstance(item, tuple) and len(item) == 2
        tokens, metric = item if has_metric else (item, metric_of_all)
        rows = _checked(model, tokens)
        if metric is None:
            raise ComparisonError(["got a batch without a metric, and none for all"], _PROBLEM)
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
                f"got a batch of 1 prompt, of {length} tokens, and no other prompt of this length "
                "in the batches before; expected batches of 2 or more different prompts, or "
                "corrupted prompts"
            )
            raise ComparisonError([reason], _PROBLEM)


def _checked(model: Any, rows: object) -> _Rows:
    """A batch of a stream that the model can run on."""
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
