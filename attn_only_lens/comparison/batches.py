"""Prompts as a stream of batches, each prompt with one that it is held against.

What a head does to a metric is told from a second run, whose activations replace its own. Where no
corrupted prompts are given, that run is of the *next prompt of the batch* (of the last, the
first): a resample ablation. Activations then stay such as the model has on real prompts, which
zeros and means are not, and attribution, patching and the search for circuits, whose ablation is
the same, all ask one question: what of the metric is lost when a head knows another prompt?
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import ComparisonError
from attn_only_lens.inputs import checked_tokens
from attn_only_lens.patching.custom_metric import AnyMetric
from attn_only_lens.patching.prompts import PromptPair, Prompts, prompt_pair, unpaired

__all__ = ["Batch", "Source", "batches"]

Some: TypeAlias = Tensor | PromptPair
Source: TypeAlias = Prompts | PromptPair | Iterable[Some | tuple[Some, AnyMetric]]
_PROBLEM = "these prompts cannot be compared on"


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
    if whole and metric is None:
        reasons.append("got no metric; expected one, such as patching.loss()")
    _refuse(reasons)
    stream: Iterable[Any] = tokens if not isinstance(tokens, PromptPair) else [tokens]
    if whole:
        stream = _cut(model, tokens, corrupted, batch_size)
    seen = False
    for each in stream:
        seen = True
        some, own = each if isinstance(each, tuple) and len(each) == 2 else (each, metric)
        if own is None:
            _refuse(["got a batch without a metric, and none for all"])
        else:
            yield Batch(_paired(model, some), own)
    _refuse(["got no prompts; expected at least one batch"] * (not seen))


def _texts(tokens: object) -> bool:
    return isinstance(tokens, list | tuple) and all(isinstance(each, str) for each in tokens)


def _cut(model: Any, tokens: Any, corrupted: Prompts | None, size: int) -> Iterator[Some]:
    """Batches of about one size. Texts that have no pairs go with others of their length."""
    if corrupted is not None:
        pair = prompt_pair(model, tokens, corrupted)
        n = -(-len(pair.clean) // size)
        masks = [None] * n if pair.mask is None else pair.mask.tensor_split(n)
        yield from map(
            PromptPair, pair.clean.tensor_split(n), pair.corrupted.tensor_split(n), masks
        )
        return
    for rows in _by_length(model, tokens):
        yield from rows.tensor_split(-(-len(rows) // size))


def _by_length(model: Any, tokens: Any) -> Sequence[Tokens]:
    if isinstance(tokens, Tensor):
        return [unpaired(model, tokens).clean]
    pair = unpaired(model, tokens)
    lengths = pair.real.sum(dim=1)
    groups = [(pair.clean[lengths == n], pair.real[lengths == n]) for n in lengths.unique()]
    found = [rows[real].view(len(rows), -1) for rows, real in groups]
    _refuse(
        [
            f"1 text alone has {rows.shape[1]} tokens; expected another to hold it against, or "
            "corrupted texts"
            for rows in found
            if len(rows) == 1
        ]
    )
    return found


def _paired(model: Any, some: object) -> PromptPair:
    """A batch with what it is held against."""
    if isinstance(some, PromptPair):
        checked_tokens(model, some.clean)
        checked_tokens(model, some.corrupted)
        return some
    if not isinstance(some, Tensor):
        _refuse([f"got a batch of {type(some).__name__}; expected a tensor or a PromptPair"])
    rows = unpaired(model, some).clean  # type: ignore[arg-type]
    if len(rows) < 2:
        _refuse(
            [
                "got a batch of 1 prompt, which has no next one to be held against; expected 2 or "
                "more, or corrupted prompts"
            ]
        )
    return prompt_pair(model, rows, rows.roll(-1, dims=0))


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)
