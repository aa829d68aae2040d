"""Convert the answers that a metric compares (strings or token IDs) to single tokens.

A list of answers has one item per prompt, or a single item for all prompts. An item is one answer,
or a list of answers if the metric sums over several. In most vocabularies, " are" and "are" are
different tokens. A warning says if adding or removing the space makes an answer far more probable,
or if the model's own answer begins like the correct answer, such as " Rome" instead of " Roma".
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import Logits
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.input_warnings import quoted, warn
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import (
    d_vocab_out,
    instead_of_unknown,
    one_token,
    token_ids,
    token_text,
    token_texts,
    unknown_words,
)
from attn_only_lens.errors import InputError

Answer: TypeAlias = str | int
Answers: TypeAlias = Answer | Sequence[Answer | Sequence[Answer]] | Tensor
AnswerRows: TypeAlias = tuple[tuple[Any, ...], ...]
"""Answers before any check: one row of answers per prompt, or one row for all prompts."""
_Tokens: TypeAlias = list[tuple[int, ...]]

PROBLEM = "this metric does not fit the model or its prompts"
_FAR_MORE_PROBABLE = 10.0
"""Warn if another spelling of an answer is at least this many times as probable.

With SmolLM2-135M and next tokens in English texts, warnings about the space were wrong for 0.2 % of
2,011 tokens, and warnings about words that begin alike were wrong for 3 of 2,000.
"""
_START = 4  # words with the same first characters, including the space, may be one word
SAME, WRONG = "same answer on both prompts", "wrong answer on the clean prompt"
_CHOOSE = {SAME: "prompts with different answers", WRONG: "prompts that it answers correctly"}
_SHOWN = 4  # the maximum number of answers in a metric's name
_SPACES = (" ", "Ġ", "▁")  # leading spaces in word-level, byte-level and SentencePiece vocabularies


def answer_rows(answers: Any) -> AnswerRows:
    """Convert answers to rows: one row of answers per prompt, or a single row for all prompts.

    Example:
        >>> answer_rows("12"), answer_rows([7, " are"]), answer_rows(torch.tensor([[3, 5]]))
        ((('12',),), ((7,), (' are',)), ((3, 5),))
    """

    def as_tuple(answers: Any) -> tuple[Any, ...]:
        plain = as_plain(answers)
        return tuple(plain) if isinstance(plain, list | tuple | range) else (plain,)

    return tuple(map(as_tuple, as_tuple(answers)))


def answers_label(rows: AnswerRows) -> str:
    """Return the answers as a short text for the metric's name.

    Example:
        >>> answers_label(((7,),)), answers_label(((7,), (8,))), answers_label(((1, 2), (3,)))
        ('7', '[7, 8]', '[[1, 2], 3]')
    """

    def listed(labels: list[str]) -> str:
        return f"[{', '.join(labels[:_SHOWN])}{', …' * (len(labels) > _SHOWN)}]"

    labels = [repr(row[0]) if len(row) == 1 else listed(list(map(repr, row))) for row in rows]
    return labels[0] if len(labels) == 1 and len(rows[0]) == 1 else listed(labels)


def answer_tokens(
    model: Any,
    pair: PromptPair,
    answers: Mapping[str, AnswerRows],
    reference: Logits | None,
    *,
    several: bool,
) -> dict[str, _Tokens]:
    """Return the tokens of each prompt's answers, by role: "correct", "wrong" or "answer".

    If answers are invalid, raise an InputError that lists every reason. Warn if another spelling of
    an answer is far more probable on the clean prompts.
    """
    reasons: list[str] = []
    tokens = {
        role: _tokens_of_prompts(model, pair, rows, role, reasons, several)
        for role, rows in answers.items()
    }
    if not reasons:
        prompts = [
            number
            for number, rows in enumerate(zip(*tokens.values(), strict=True))
            if len({*chain(*rows)}) < sum(map(len, rows))
        ]
        reasons += [f"correct and wrong are the same token for prompts {prompts}"] * bool(prompts)
    InputError.raise_if(reasons, PROBLEM)
    if getattr(model, "tokenizer", None) is not None and reference is not None:
        _warn_of_spellings(model, pair, tokens, reference)
    return tokens


def preference(what: str, pairs: str = "") -> str:
    """Say that the model prefers the `SAME` or the `WRONG` answer for some pairs of prompts."""
    return (
        f"{pairs}the model prefers the {what}, so the difference explains little about its answer: "
        f"choose {_CHOOSE[what]}"
    )


def _tokens_of_prompts(
    model: Any, pair: PromptPair, rows: AnswerRows, role: str, reasons: list[str], several: bool
) -> _Tokens:
    """Return each prompt's answer tokens; for each invalid answer, add a message to `reasons`."""
    shared = len(rows) == 1
    if not shared and len(rows) != pair.n_all:
        expected = "1" if pair.n_all == 1 else f"1, or one for each of the {pair.n_all} prompts"
        hint = "; for several answers to every prompt, give a nested list, [[33, 34]]" * several
        reasons.append(f"{role}: got {len(rows)} answers; expected {expected}{hint}")
        return []
    numbers = range(pair.n_all) if pair.among is None else pair.among[0]
    tokens_of_prompts: _Tokens = []
    for number, row in zip(numbers, rows if shared else pair.select(rows), strict=False):
        label = role if shared else f"{role}, prompt {number}"
        results = [_token(model, answer) for answer in row]
        reasons += [f"{label}: {reason}" for reason in results if isinstance(reason, str)]
        tokens = tuple(token for token in results if isinstance(token, int))
        if not row or (len(row) > 1 and not several):
            expected = "1 or more" if several else "1; probability_diff takes several"
            reasons.append(f"{label}: got {len(row)} answers to a prompt; expected {expected}")
        elif len({*tokens}) < len(tokens):
            reasons.append(f"{label}: got {list(row)}; expected each answer once")
        tokens_of_prompts.append(tokens)
    return tokens_of_prompts * len(pair.clean) if shared else tokens_of_prompts


def _token(model: Any, answer: Any) -> int | str:
    """Return the token ID of an answer, or an error message if it is not a single token."""
    size, tokenizer = d_vocab_out(model), getattr(model, "tokenizer", None)
    if isinstance(answer, str):
        if tokenizer is None:
            return f"got {answer!r}, but the model has no tokenizer; give token IDs"
        token = one_token(tokenizer, answer)
        if token is None:
            return _why_not_one(model, answer)
        answer = token
    if is_count(answer, 0, size - 1):
        return int(answer)
    return f"got {answer!r}; expected a text, or a token ID from 0 to {size - 1}"


def _why_not_one(model: Any, text: str) -> str:
    """Return an error message, with a suggestion, for a string that is not a single token."""
    if unknown := unknown_words(model.tokenizer, text):
        reason = (
            f"got {text!r}, and the tokenizer does not know {quoted(unknown)}: "
            f"the metric would read {instead_of_unknown(model.tokenizer)} instead; expected a "
            "text without unknown words"
        )
    else:
        tokens = token_ids(model.tokenizer, text)
        pieces = token_texts(model, tokens)
        reason = f"got {text!r}, which is {len(tokens)} tokens {pieces}; expected one token"
    respelt = text[1:] if text.startswith(" ") else f" {text}"
    if one_token(model.tokenizer, respelt) is not None:
        return f"{reason}: {respelt!r} is one token"
    if text.startswith(" "):
        return f"{reason}: choose a word of one token"
    return (
        f"{reason}: start the text with a space, as most words need, or give a token of the "
        "vocabulary"
    )


# Warnings about an answer's spelling


def _warn_of_spellings(
    model: Any, pair: PromptPair, answers: Mapping[str, _Tokens], logits: Logits
) -> None:
    """Warn if an answer is far more probable in another spelling."""
    rows = torch.arange(len(logits), device=logits.device)
    last = float32_if_half(logits.detach()[rows, pair.last.to(logits.device)])
    tokens = {token for of_prompts in answers.values() for row in of_prompts for token in row}
    cases = dict[Any, str]()
    for role, of_prompts in answers.items():
        for token in dict.fromkeys(chain(*of_prompts)):
            prompts = [prompt for prompt, row in enumerate(of_prompts) if token in row]
            others = [_respelt(model.tokenizer, token, logits.shape[-1])]
            top = int(last[prompts].mean(dim=0).argmax())
            if role != "wrong" and top not in tokens and _begin_alike(model, token, top):
                others.append(top)
            for respelt in dict.fromkeys(x for x in others if x is not None):
                logs = (last[prompts, respelt] - last[prompts, token]).cpu().double()
                times = logs.mean().exp().item()
                if times >= _FAR_MORE_PROBABLE:
                    cases[role, token] = _case(model, role, token, respelt, times)
    warn(cases, "with another spelling, these answers are far more probable on the clean prompts")


def _respelt(tokenizer: Any, token: int, size: int) -> int | None:
    """Return the token for the same word with its leading space added or removed, or None.

    Tokenizing the word would not work, because SentencePiece adds a space before every text.
    """
    piece = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if not piece:
        return None
    others = [piece[1:]] if piece.startswith(_SPACES) else [f"{space}{piece}" for space in _SPACES]
    for respelt in filter(None, others):
        number = tokenizer.convert_tokens_to_ids(respelt)
        # For pieces outside the vocabulary, tokenizers return None or the unknown token.
        if is_count(number, 0, size - 1) and tokenizer.convert_ids_to_tokens(number) == respelt:
            return int(number)
    return None


def _begin_alike(model: Any, token: int, other_token: int) -> bool:
    """Return whether two tokens are words that begin with the same letters."""
    start, other_start = (token_text(model, x).lower()[:_START] for x in (token, other_token))
    return start == other_start and len(start) == _START and start.strip().isalpha()


def _case(model: Any, role: str, token: int, respelt: int, times: float) -> str:
    """Return the warning's line for one answer, with the probability ratio of both spellings."""
    got, expected = token_text(model, token), token_text(model, respelt)
    texts = (expected, expected.strip())
    spelt = [text for text in texts if token_ids(model.tokenizer, text) == [respelt]]
    give = repr(spelt[0]) if spelt else f"token {respelt}"
    amount = f"{times:,.0f}" if times < 1e6 else "more than a million"
    how = "with" if expected.startswith(" ") else "without"
    space = f", {how} a leading space," if expected.strip() == got.strip() else ""
    return (
        f"{role}: {expected!r}{space} is {amount} times as probable as {got!r} "
        f"(token {token}); if you mean {expected!r}, give {give}"
    )
