"""Answers of metrics: texts of one token, or tokens; one for all prompts or one per prompt.

All metrics take the same forms. A list has one item per prompt, or a single item for all prompts.
An item is one answer or, for a metric that sums over several answers, a list of answers.

A space before a word is part of its token in most vocabularies: " are" and "are" are two tokens.
The logits of the clean run show which of the two the model expects after a prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import Logits
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.input_warnings import quoted, warn
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import (
    d_vocab_out,
    instead_of_unknown,
    token_text,
    token_texts,
    unknown_words,
)

Answer: TypeAlias = str | int
Answers: TypeAlias = Answer | Sequence[Answer | Sequence[Answer]] | Tensor
AnswerRows: TypeAlias = tuple[tuple[Any, ...], ...]
"""A row of answers for each prompt, or one for all; not checked yet."""

FAR_MORE_PROBABLE = 10.0
"""A warning is raised if another spelling of an answer is this many times as probable.

Checked on SmolLM2-135M with 2,011 next tokens of English texts. 98 % of them are at least ten times
as probable as the same word with one space more or less. For .2 % the other spelling is ten times
as probable, which would be a wrong warning; for random words in their place, spelt rightly, .9 %.
"""
_SHOWN = 4  # answers in a name
_SPACES = (" ", "Ġ", "▁")  # of words, byte-level and SentencePiece vocabularies


def answer_rows(answers: Any) -> AnswerRows:
    """Return answers of any form as rows.

    Example:
        >>> import torch
        >>> answer_rows("12"), answer_rows([7, " are"]), answer_rows(torch.tensor([[3, 5]]))
        ((('12',),), ((7,), (' are',)), ((3, 5),))
    """
    return tuple(map(_as_tuple, _as_tuple(answers)))


def _as_tuple(answers: Any) -> tuple[Any, ...]:
    plain = as_plain(answers)
    return tuple(plain) if isinstance(plain, list | tuple | range) else (plain,)


def answers_label(rows: AnswerRows) -> str:
    """Return a short text of answers, for the name of a metric.

    Example:
        >>> answers_label(((7,),)), answers_label(((7,), (8,))), answers_label(((1, 2), (3,)))
        ('7', '[7, 8]', '[[1, 2], 3]')
    """
    labels = [repr(row[0]) if len(row) == 1 else _listed(list(map(repr, row))) for row in rows]
    return labels[0] if len(labels) == 1 and len(rows[0]) == 1 else _listed(labels)


def _listed(labels: list[str]) -> str:
    return f"[{', '.join(labels[:_SHOWN])}{', …' * (len(labels) > _SHOWN)}]"


def answer_tokens(
    model: Any,
    pair: PromptPair,
    rows: AnswerRows,
    role: str,
    reasons: list[str],
    *,
    several: bool = False,
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt's answers; add a reason for each invalid answer."""
    shared = len(rows) == 1
    if not shared and len(rows) != pair.n_all:
        expected = "1" if pair.n_all == 1 else f"1, or {pair.n_all}, one for each prompt"
        hint = "; several answers to every prompt are a list in a list, [[33, 34]]" * several
        reasons.append(f"{role}: got {len(rows)} answers; expected {expected}{hint}")
        return [()] * len(pair.clean)
    first = 0 if pair.among is None else pair.among[0].start
    by_prompt = list[tuple[int, ...]]()
    for number, row in enumerate(rows if shared else pair.own(rows), start=first):
        of_prompt = role if shared else f"{role}, prompt {number}"
        tokens = tuple(_token(model, answer, of_prompt, reasons) for answer in row)
        if not row or (len(row) > 1 and not several):
            expected = "1 or more" if several else "1; probability_diff takes several"
            reasons.append(f"{of_prompt}: got {len(row)} answers to a prompt; expected {expected}")
        elif len({*tokens} - {_NO_TOKEN}) + tokens.count(_NO_TOKEN) < len(tokens):
            reasons.append(f"{of_prompt}: got {list(row)}; expected each answer once")
        by_prompt.append(tokens)
    return by_prompt * len(pair.clean) if shared else by_prompt


_NO_TOKEN = -1


def _token(model: Any, answer: Any, role: str, reasons: list[str]) -> int:
    """Return the token of an answer; -1, and a reason, if it is not one."""
    size = d_vocab_out(model)
    if isinstance(answer, str):
        answer = _token_of_text(model, answer, role, reasons)
        if answer is None:
            return _NO_TOKEN
    if not is_count(answer, 0, size - 1):
        reasons.append(f"{role}: got {answer!r}; expected a text, or a token from 0 to {size - 1}")
        return _NO_TOKEN
    return int(answer)


def _token_of_text(model: Any, text: str, role: str, reasons: list[str]) -> int | None:
    """Return the one token of a text; None, and a reason, if it is not one."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        reasons.append(f"{role}: got {text!r}, and the model has no tokenizer; give its token")
        return None
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = unknown_words(tokenizer, text)
    if len(tokens) == 1 and not unknown:
        return int(tokens[0])
    if unknown:
        reason = (
            f"got {text!r}, and the tokenizer does not know {quoted(unknown)}: "
            f"{instead_of_unknown(tokenizer)} would be measured instead; expected a text that it "
            "knows"
        )
    else:
        reason = (
            f"got {text!r}, which is {len(tokens)} tokens {token_texts(model, tokens)}; expected "
            "one"
        )
    respelt = text[1:] if text.startswith(" ") else f" {text}"
    is_one = len(tokenizer(respelt, add_special_tokens=False)["input_ids"]) == 1
    if respelt and is_one and not unknown_words(tokenizer, respelt):
        advice = f": {respelt!r} is one token"
    else:
        advice = ": put a space before it, as most words need, or give a token of the vocabulary"
    reasons.append(f"{role}: {reason}{advice}")
    return None


def one_each(rows: Sequence[tuple[int, ...]], device: torch.device) -> Int[Tensor, "batch"]:
    """Return the tokens of prompts that have one answer each."""
    return torch.tensor([token for (token,) in rows], device=device)


def overlap_reasons(
    correct: Sequence[tuple[int, ...]], wrong: Sequence[tuple[int, ...]]
) -> list[str]:
    """Return the reason if some answers are both correct and wrong; empty if none are."""
    prompts = [
        number
        for number, (right, left) in enumerate(zip(correct, wrong, strict=True))
        if not {*right}.isdisjoint(left)
    ]
    return [f"correct and wrong are the same token for prompts {prompts}"] * bool(prompts)


# The space before an answer


def warn_of_spaces(
    model: Any,
    pair: PromptPair,
    answers: Mapping[str, Sequence[tuple[int, ...]]],
    logits: Logits | None,
) -> None:
    """Warn if an answer is far more probable with its leading space added or removed.

    "Far" means a factor of `FAR_MORE_PROBABLE`, in the geometric mean over the answer's prompts.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or logits is None:
        return
    size = logits.shape[-1]
    every = {token for rows in answers.values() for row in rows for token in row}
    twins = {token: _twin(tokenizer, token, size) for token in every}
    rows = torch.arange(len(logits), device=logits.device)
    last = float32_if_half(logits.detach()[rows, pair.last.to(logits.device)])
    cases = dict[Any, str]()
    for role, of_prompts in answers.items():
        for token, prompts in _prompts_of(of_prompts).items():
            twin = twins[token]
            if twin is None:
                continue
            times = (last[prompts, twin] - last[prompts, token]).cpu().double().mean().exp().item()
            if times >= FAR_MORE_PROBABLE:
                cases[role, token] = _case(model, role, token, twin, times)
    warn(cases, "with another spelling, these answers are far more probable on the clean prompts")


def _prompts_of(rows: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
    """Return the prompts of each answer."""
    prompts: dict[int, list[int]] = {}
    for prompt, row in enumerate(rows):
        for token in row:
            prompts.setdefault(token, []).append(prompt)
    return prompts


def _twin(tokenizer: Any, token: int, size: int) -> int | None:
    """Return the same word's token with the leading space added or removed; None if there is none.

    It is looked up in the vocabulary: SentencePiece adds a space to every text, so tokenizing
    a text never gives the token without a space.
    """
    piece = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if not piece:
        return None
    twins = [piece[1:]] if piece.startswith(_SPACES) else [f"{space}{piece}" for space in _SPACES]
    for twin in filter(None, twins):
        number = tokenizer.convert_tokens_to_ids(twin)
        # For a piece that is not in the vocabulary this is None, or the unknown token.
        if is_count(number, 0, size - 1) and tokenizer.convert_ids_to_tokens(number) == twin:
            return int(number)
    return None


def _case(model: Any, role: str, token: int, twin: int, times: float) -> str:
    """Return the line of a warning about an answer that is far more probable as its twin."""
    got, expected = token_text(model, token), token_text(model, twin)
    spelt = [
        text
        for text in (expected, expected.strip())
        if model.tokenizer(text, add_special_tokens=False)["input_ids"] == [twin]
    ]
    give = repr(spelt[0]) if spelt else f"its number, {twin}"
    amount = f"{times:,.0f}" if times < 1e6 else "more than a million"
    how = "with" if expected.startswith(" ") else "without"
    return (
        f"{role}: {expected!r}, {how} a space before it, is {amount} times as probable as {got!r} "
        f"(token {token}); if you mean it, give {give}"
    )
