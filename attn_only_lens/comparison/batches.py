"""Prompts as a stream of batches, each prompt with one that it is held against.

What a head does to a metric is told from a second run, whose activations replace its own. Where no
corrupted prompts are given, that run is of the *next prompt* (of the last, the first): a resample
ablation. Activations then stay such as the model has on real prompts, which zeros and means are
not, and attribution, patching and the search for circuits, whose ablation is the same, all ask one
question: what of the metric is lost when a head knows another prompt?

The next prompt is the next different one of the same length: of all where texts or a tensor are
given, so that it does not matter how they are cut; of the batch in a stream. One that is alone in
its batch is held against one of an earlier batch of its length, or else of the batch after it. None
is held against itself, which would count it and measure nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import ComparisonError
from attn_only_lens.runs.inputs import checked_tokens
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.prompts import PromptPair, Prompts, prompt_pair, unpaired

__all__ = ["Batch", "Source", "batches"]

Some: TypeAlias = Tensor | PromptPair
Source: TypeAlias = Prompts | PromptPair | Iterable[Some | tuple[Some, AnyMetric]]
_AS_TENSOR = "torch.as_tensor(tokens) makes a tensor of an array or of lists"
_PROBLEM = "these prompts cannot be compared on"
_ALONE = (
    "got a batch of 1 prompt, of {} tokens, and no other of as many in a batch before it, nor in "
    "the one after it, to hold it against; expected batches of 2 or more different prompts, or "
    "corrupted prompts"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts that run together, and what is measured of them.

    Attributes:
        pair: the prompts and what they are held against.
        metric: unbound.
    """

    pair: PromptPair
    metric: AnyMetric


def batches(
    model: Any,
    tokens: Source,
    metric: AnyMetric | None,
    corrupted: Prompts | None,
    batch_size: int,
) -> Iterator[Batch]:
    """One batch after the other; of a stream, none is read before it is asked for.

    Args:
        model: whose tokenizer, vocabulary and context count.
        tokens: texts or a tensor [prompt, pos], which are cut into batches; a `PromptPair`, which
            is one; or any iterable of tensors, pairs, or (either, metric).
        metric: of all batches that bring none of their own.
        corrupted: of texts or a tensor, what each prompt is held against.
        batch_size: the most prompts of a batch that is cut here.

    Raises:
        ComparisonError: with every reason: no metric, prompts of no known kind, a prompt that has
            no other to be held against.
        PatchingError: prompts that the model cannot take or that do not fit each other.
    """
    reasons = []
    whole = isinstance(tokens, Tensor | str) or _texts(tokens)
    if corrupted is not None and not whole:
        reasons.append(
            "got corrupted prompts beside a stream; expected batches made by prompt_pair there"
        )
    if not (whole or isinstance(tokens, PromptPair | Iterable)):
        reasons.append(
            f"got {type(tokens).__name__}; expected texts, tokens [prompt, pos], or batches of them"
        )
    if not whole and _numbers(tokens):
        reasons.append(
            f"got a {type(tokens).__name__} of numbers; expected texts, tokens [prompt, pos], or "
            f"batches of them: {_AS_TENSOR}"
        )
    elif whole and metric is None:
        reasons.append("got no metric; expected one, such as patching.loss()")
    _refuse(reasons)
    stream: Iterable[Any] = tokens if not isinstance(tokens, PromptPair) else [tokens]
    if whole:
        stream = _cut(model, tokens, corrupted, batch_size)
    first = True
    for pair, own in _paired(model, _with_metrics(stream, metric)):
        if first:
            prompt_pair(model, pair.clean, pair.corrupted, pair.mask)  # are any two different?
        first = False
        yield Batch(pair, own)
    _refuse(["got no prompts; expected at least one batch"] * first)


def _texts(tokens: object) -> bool:
    return isinstance(tokens, list | tuple) and all(isinstance(each, str) for each in tokens)


def _numbers(given: object) -> bool:
    """Whether this begins with numbers that are in no tensor."""
    if isinstance(given, list | tuple):
        return any(map(_numbers, given[:1]))
    return isinstance(given, int) or (hasattr(given, "tolist") and not isinstance(given, Tensor))


def _cut(model: Any, tokens: Any, corrupted: Prompts | None, size: int) -> Iterator[PromptPair]:
    """Batches of about one size. Texts that have no pairs go with others of their length."""
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
    pair = unpaired(model, tokens)
    lengths = pair.real.sum(dim=1)
    groups = [(pair.clean[lengths == n], pair.real[lengths == n]) for n in lengths.unique()]
    found = [rows[real].view(len(rows), -1) for rows, real in groups]
    _refuse(
        [
            f"1 prompt alone has {rows.shape[1]} tokens; expected another to hold it against, or "
            "corrupted prompts"
            for rows in found
            if _other(rows, rows[:1]) is None
        ]
    )
    return found


def _other(rows: Tokens, prompt: Tokens) -> Tokens | None:
    """The first of some prompts that is not this one."""
    others = rows[(rows != prompt).any(dim=1)]
    return others[:1] if len(others) else None


def _next_others(rows: Tokens) -> Tokens:
    """After each prompt the next one, around the end, that is another."""
    found = rows.roll(-1, dims=0)
    for shift in range(2, len(rows)):
        same = (found == rows).all(dim=1, keepdim=True)
        if not same.any():
            break
        found = torch.where(same, rows.roll(-shift, dims=0), found)
    return found


def _with_metrics(
    stream: Iterable[Any], metric: AnyMetric | None
) -> Iterator[tuple[Any, AnyMetric]]:
    for each in stream:
        some, own = each if isinstance(each, tuple) and len(each) == 2 else (each, metric)
        if own is None:
            _refuse(["got a batch without a metric, and none for all"])
        else:
            yield some, own


def _paired(
    model: Any, stream: Iterator[tuple[Any, AnyMetric]]
) -> Iterator[tuple[PromptPair, AnyMetric]]:
    """Batches with what they are held against."""
    known: dict[int, Tokens] = {}  # of each length up to two different prompts
    alone: tuple[Tokens, AnyMetric] | None = None  # waits for the batch after it
    for some, metric in stream:
        given = _checked(model, some)
        clean, mask = (given.clean, given.mask) if isinstance(given, PromptPair) else (given, None)
        length = clean.shape[1]
        if alone is not None:
            rows, own = alone
            fits = mask is None and rows.shape[1] == length
            other = _other(clean, rows[:1]) if fits else None
            if other is None:
                _refuse([_ALONE.format(rows.shape[1])])
            else:
                alone = None
                yield PromptPair(rows, other.repeat(len(rows), 1)), own
        if isinstance(given, PromptPair):
            yield given, metric
        elif _other(given, given[:1]) is not None:
            yield PromptPair(given, _next_others(given)), metric
        elif (other := _other(known.get(length, given), given[:1])) is not None:
            yield PromptPair(given, other.repeat(len(given), 1)), metric
        else:
            alone = given, metric
        if mask is None:
            first = known.setdefault(length, clean[:1].clone())
            if len(first) == 1 and (other := _other(clean, first)) is not None:
                known[length] = torch.cat([first, other])
    if alone is not None:
        _refuse([_ALONE.format(alone[0].shape[1])])


def _checked(model: Any, some: object) -> Tokens | PromptPair:
    """A batch of a stream that the model can run on."""
    if isinstance(some, PromptPair):
        checked_tokens(model, some.clean)
        checked_tokens(model, some.corrupted)
        return some
    if not isinstance(some, Tensor):
        got = type(some).__name__
        _refuse([f"got a batch of {got}; expected a tensor or a PromptPair: {_AS_TENSOR}"])
    return unpaired(model, some).clean  # type: ignore[arg-type]


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)
