"""A corpus, and how it is read: text by text, each split into rows of tokens."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import KW_ONLY, dataclass, field
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.arguments import COUNT, a_type, one_of, whole
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.passed_tests import ignores_padding
from attn_only_lens.engine.tokens import (
    checked_tokens,
    length_dependent_ropes,
    tokens_of_text,
    warn_of_unknown_words,
)
from attn_only_lens.errors import InputError, UnsupportedCallError

Texts: TypeAlias = str | Path | Tensor | Iterable[Any]
"""A file, or texts: strings, dictionaries with a text, or rows of tokens."""
Ends = Literal["both", "largest", "smallest"]
_PROBLEM = "this corpus cannot be read"
_EXPECTED = "expected a text, a dictionary with 'text', or tokens of one text [pos]"
_CONTEXT = 128


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts in which neurons and heads are looked up, and which part of a text is an example.

    Attributes:
        texts: a list or any iterable (also of `datasets`) of texts, of dictionaries with a "text",
            or of the tokens of one text [pos]; or the path of a UTF-8 file with one text per
            line or, if its name ends in .jsonl, one dictionary per line.
        context: maximum number of tokens per piece; longer texts are split into pieces, which begin
            with BOS if texts do. None means 128, or the model's context length if it is shorter.
        ends: the examples to keep: "largest", "smallest", or "both"; in a gated MLP, z can have
            either sign.
        before: number of tokens in a window before the example's token. For attention heads, 4
            times this number, because keys can be distant.
        after: number of tokens in a window after the example's token.

    Raises:
        InputError: the texts have another type, or an option is out of range; the error lists every
            reason.

    Example:
        >>> from attn_only_lens import neurons
        >>> neurons.Corpus(["One text.", "Another text."], ends="largest", before=4)
        Corpus(context=None, ends='largest', before=4, after=6)
    """

    texts: Texts = field(repr=False)
    _: KW_ONLY
    context: int | None = None
    ends: Ends = "both"
    before: int = 12
    after: int = 6

    def __post_init__(self) -> None:
        reasons = _texts_reasons(self.texts) + whole(2).or_none.reasons(context=self.context)
        reasons += one_of(*get_args(Ends)).reasons(ends=self.ends)
        reasons += COUNT.reasons(before=self.before, after=self.after)
        InputError.raise_if(reasons, _PROBLEM)

    def context_of(self, model: Any) -> int:
        """Return the maximum number of tokens per piece; raise InputError if it is too large."""
        most = model.cfg.n_ctx
        if self.context is None:
            return min(_CONTEXT, most)
        if self.context > most and "dynamic" not in length_dependent_ropes(model):
            expected = f"expected 2 to {most}, the model's context length"
            raise InputError([f"got context={self.context}; {expected}"], _PROBLEM)
        return self.context


def context_of(model: Any, corpus: object) -> int:
    """Return `corpus.context_of(model)`; raise InputError also if this is no corpus."""
    if isinstance(corpus, Corpus):
        return corpus.context_of(model)
    raise InputError([f"got {a_type(corpus)}; expected a corpus: neurons.Corpus(texts)"], _PROBLEM)


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a text that is short enough for one forward pass.

    Attributes:
        text: the index of the text in the corpus.
        first: the position in the text of the row's first token after BOS.
        tokens: the tokens, on the CPU.
        has_bos: whether the row begins with BOS, which is not an example.
    """

    text: int
    first: int
    tokens: Int[Tensor, "pos"]
    has_bos: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens, padded on the right.

    Attributes:
        tokens: the tokens, on the model's device.
        mask: 1 for tokens, 0 for padding; None if there is no padding.
        text: the index of each row's text.
        first: the position of each row's first token in its text.
        lengths: the number of tokens in each row.
        counted: indices in `tokens.flatten()` of all tokens except padding and BOS.
    """

    tokens: Tokens
    mask: Int[Tensor, "batch pos"] | None
    text: Int[Tensor, "batch"]
    first: Int[Tensor, "batch"]
    lengths: Int[Tensor, "batch"]
    counted: Int[Tensor, "token"]


def n_texts(texts: Texts) -> int | None:
    """Return the number of texts, or None if `texts` has no length."""
    try:
        return len(texts) if isinstance(texts, Sized) and not isinstance(texts, str) else None
    except TypeError:  # a scalar tensor or a dataset stream has no length
        return None


def corpus_rows(model: Any, texts: Texts, context: int) -> Iterator[Row]:
    """Split each text of a corpus into rows of at most `context` tokens.

    If a text begins with BOS, so does each of its rows. Empty texts have no rows. A warning
    names the first text that contains a word unknown to the tokenizer.
    """
    all_known = True
    for number, entry in enumerate(_entries(texts)):
        if isinstance(entry, Mapping):
            entry = entry.get("text")
        tokens = _tokens(model, entry, number)
        bos = getattr(model.tokenizer, "bos_token_id", None)
        has_bos = len(tokens) > 0 and bos is not None and int(tokens[0]) == bos
        if all_known and isinstance(entry, str):
            name = f"text {number} of the corpus {shortened(entry)}, and perhaps in others"
            all_known = not warn_of_unknown_words(model.tokenizer, {name: entry})
        n_bos = int(has_bos)
        body, step = tokens[n_bos:], context - n_bos
        for start in range(0, len(body), step):
            piece = body[start : start + step]
            yield Row(number, start, torch.cat([tokens[:n_bos], piece]), has_bos)


def batches(model: Any, rows: Iterator[Row], size: int) -> Iterator[tuple[Batch, list[Row]]]:
    """Group rows into batches of up to `size` rows; yield each batch, and its rows."""
    device = next(model.parameters()).device
    # Some bidirectional models attend to padding, so run each row alone, without padding.
    size = size if size > 1 and ignores_padding(model) else 1
    # In longer rows, rotary positions depend on the longest row of the batch.
    longest = min(length_dependent_ropes(model).values(), default=math.inf)
    for _, alike in groupby(rows, lambda row: len(row.tokens) * (len(row.tokens) > longest)):
        while some := list(islice(alike, size)):
            yield _batch(some, device), some


def _batch(rows: list[Row], device: torch.device) -> Batch:
    lengths, text, first = (
        torch.tensor(numbers, device="cpu")
        for numbers in zip(*((len(row.tokens), row.text, row.first) for row in rows), strict=True)
    )
    n_pos = int(lengths.max())
    tokens = torch.zeros(len(rows), n_pos, dtype=torch.long, device="cpu")
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
    real = torch.arange(n_pos, device="cpu") < lengths[:, None]
    counts = real.clone()
    counts[:, 0] &= ~torch.tensor([row.has_bos for row in rows], device="cpu")
    counted = counts.flatten().nonzero()[:, 0]
    mask = None if bool(real.all()) else real.long().to(device)
    return Batch(tokens.to(device), mask, *(x.to(device) for x in (text, first, lengths, counted)))


def chained_digest(before: str, row: Row) -> str:
    """Return the digest of all rows up to `row`, from the digest `before` of the earlier rows."""
    return hashlib.sha256(f"{before} {row.text} {row.tokens.tolist()}".encode()).hexdigest()


def _texts_reasons(texts: object) -> list[str]:
    """Return a reason if these are neither a file nor texts that can be read one by one."""
    is_list = isinstance(texts, str | Path | Iterable) and getattr(texts, "ndim", 1) > 0
    if is_list and not isinstance(texts, Mapping | pd.DataFrame):
        return []
    expected = "expected a file or a list of texts, such as one column of a table"
    return [f"got {a_type(texts)}; {expected}"]


def _entries(texts: Texts) -> Iterator[Any]:
    if not isinstance(texts, str | Path):
        yield from texts
        return
    path, numbers = Path(texts), count()
    try:
        with path.open(encoding="utf-8-sig") as file:
            objects = path.suffix.lower() == ".jsonl"
            for line in file:
                next(numbers)
                text = line.rstrip("\r\n")
                yield (json.loads(text) if text.strip() else []) if objects else text
    except (OSError, ValueError) as error:
        advice = "; put a single text into a list" if isinstance(texts, str) else ""
        said = (
            f"line {next(numbers)}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        reason = f"{str(texts)[:100]!r} is not a file of texts: {said}{advice}"
        raise InputError([reason], _PROBLEM) from error


def _tokens(model: Any, entry: Any, number: int) -> Int[Tensor, "pos"]:
    """Return the tokens of a corpus entry, which is either a text or a list of tokens."""
    try:
        if isinstance(entry, str):
            return tokens_of_text(model, entry)[0].cpu()
        if isinstance(entry, np.ndarray):
            entry = entry.tolist()
        if isinstance(entry, list | tuple):
            entry = torch.tensor(entry, device="cpu", dtype=None if entry else torch.long)
        if not isinstance(entry, Tensor):
            raise UnsupportedCallError(f"got {a_type(entry)}; {_EXPECTED}")
        if entry.ndim != 1:
            raise UnsupportedCallError(f"got tokens {list(entry.shape)}; {_EXPECTED}")
        for piece in entry.split(model.cfg.n_ctx) if len(entry) else ():
            checked_tokens(model, piece[None])
        return entry.cpu().long()
    except (UnsupportedCallError, RuntimeError, TypeError, ValueError) as error:
        raise InputError([f"text {number}: {error}"], _PROBLEM) from error
