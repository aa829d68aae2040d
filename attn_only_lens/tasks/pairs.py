"""Clean and corrupted prompts that differ in the words that decide the answer.

Patching moves activations between the two runs, token by token, and a metric compares the logits of
a right and a wrong answer. Every pair is therefore checked with the tokenizer:

    its two prompts have the same number of tokens, and no unknown token
    each role (the subject, the end, …) ends with a token, at the same position in both prompts
    every answer is one more token when it follows the clean prompt

Pairs that fail the check are dropped and counted. A role (such as the subject) has the position of
its last token, counted from the end of the prompt (-1 is the last token). Positions are therefore
the same with and without a BOS token, and for both padding sides.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from random import Random
from string import Formatter
from typing import Any, TypeAlias

import numpy as np

from attn_only_lens.arguments import COUNT, POSITIVE, a_type
from attn_only_lens.engine.contrast import NOT_SOLVED, Contrast
from attn_only_lens.engine.metrics import logit_diff, probability_diff
from attn_only_lens.engine.tokens import token_ids
from attn_only_lens.errors import InputError

END = "end"
"""The role for the last token; every task has it."""

PROBLEM = "these prompts cannot be made"
_MOST_DRAWN = 20_000
_Tokens: TypeAlias = tuple[int, ...]
_Row: TypeAlias = tuple[str, str, _Tokens, _Tokens, dict[str, int]]


@dataclass(frozen=True)
class Filled:
    """A prompt, and the character index at which each role's words end."""

    text: str
    ends: Mapping[str, int]


@dataclass(frozen=True)
class Pair:
    """A pair of prompts before the tokenizer check; answers are tokens or strings."""

    clean: Filled
    corrupted: Filled
    answers: Sequence[str] | _Tokens
    wrong: Sequence[str] | _Tokens


def fill(template: str, roles: Mapping[str, str], **words: str) -> Filled:
    """Fill a template's fields with words, and record at which character each role's words end."""
    text, ends = "", dict[str, int]()
    for literal, role, _, _ in Formatter().parse(template):
        text += literal
        if role is not None:
            text += roles[role] if role in roles else words[role]
            if role in roles:
                ends[role] = len(text)
    return Filled(text, ends)


def draw(seed: int, *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield up to 20,000 different combinations with one item from each axis, in random order."""
    sizes = [len(axis) for axis in axes]
    total = prod(sizes)
    for index in Random(int(seed)).sample(range(total), min(total, _MOST_DRAWN)):
        choices = np.unravel_index(index, sizes, order="F")
        yield tuple(axis[int(choice)] for axis, choice in zip(axes, choices, strict=True))


def collect(
    task: str,
    tokenizer: Any,
    n: int,
    seed: int,
    pairs: Iterable[Pair],
    reasons: Sequence[str] = (),
    solved: Callable[[Contrast], Sequence[int]] | None = None,
) -> Contrast:
    """Return the first n pairs that pass the tokenizer check, or raise InputError.

    The metric is the logit difference or, if prompts have several answers, the probability
    difference. `solved` returns the numbers of the pairs that the model solves; others are dropped.
    """
    reasons = [*reasons, *POSITIVE.reasons(n=n), *_tokenizer_reasons(tokenizer)]
    reasons += COUNT.reasons(seed=seed)
    InputError.raise_if(reasons, PROBLEM)
    dropped, rows = Counter[str](), list[_Row]()
    fitting = _fitting(tokenizer, islice(pairs, _MOST_DRAWN), dropped)
    while len(rows) < n and (new := list(islice(fitting, n if solved else n - len(rows)))):
        left = range(len(new)) if solved is None else solved(_contrast(task, new))
        dropped.update({NOT_SOLVED: len(new) - len(left)} if len(left) < len(new) else {})
        rows += [new[number] for number in left]
    if len(rows) < n:
        raise InputError(
            [
                f"{task}: got n={n}, but only {len(rows)} different pairs can be used; expected at "
                f"most n={len(rows)}",
                *(f"{number} were dropped: {why}" for why, number in dropped.most_common()),
            ],
            PROBLEM,
        )
    return replace(_contrast(task, rows[:n]), dropped=dict(dropped.most_common()))


def _fitting(tokenizer: Any, pairs: Iterable[Pair], dropped: "Counter[str]") -> Iterator[_Row]:
    """Yield the different pairs that pass the tokenizer check; count the others by reason."""
    seen = set[str]()
    for pair in pairs:
        if pair.clean.text in seen:
            continue
        try:
            row = _checked(tokenizer, pair)
        except _Misfit as reason:
            dropped[str(reason)] += 1
            continue
        seen.add(pair.clean.text)
        yield row


def _contrast(task: str, rows: Sequence[_Row]) -> Contrast:
    clean, corrupted, answers, wrong, positions = zip(*rows, strict=True)
    roles = {
        role: tuple(row[role] for row in positions)
        for role in positions[0]
        if all(role in row for row in positions)
    }
    several = any(len(tokens) > 1 for tokens in (*answers, *wrong))
    metric = (probability_diff if several else logit_diff)(answers, wrong)
    kind = metric.name.partition("(")[0]
    named = replace(metric, name=f"{kind} of {task}")
    return Contrast(clean, corrupted, named, roles=roles, name=task)


def _tokenizer_reasons(tokenizer: Any) -> list[str]:
    """Return error messages if prompts cannot be made with a tokenizer."""
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        return [
            f"got {a_type(tokenizer)}; expected a Hugging Face tokenizer, such as model.tokenizer"
        ]
    plain, with_special = token_ids(tokenizer, "a"), tokenizer("a")["input_ids"]
    if not plain or list(with_special[-len(plain) :]) == plain:
        return []
    return [
        "the tokenizer puts special tokens after a text, where the answer should follow; expected "
        "the tokenizer of a model that predicts the next token"
    ]


class _Misfit(Exception):
    """Raised if a pair fails the tokenizer check."""


def _require(fits: bool, reason: str) -> None:
    if not fits:
        raise _Misfit(reason)


def _checked(tokenizer: Any, pair: Pair) -> _Row:
    """Return the prompts, answers and roles of a pair; raise `_Misfit` if the pair does not fit."""
    clean, corrupted = token_ids(tokenizer, [pair.clean.text, pair.corrupted.text])
    unknown = tokenizer.unk_token_id
    has_unknown = unknown is not None and unknown in (*clean, *corrupted)
    _require(not has_unknown, "the tokenizer does not know a word")
    _require(len(clean) == len(corrupted), "the two prompts have different numbers of tokens")
    _require(clean != corrupted, "the two prompts are the same")
    roles = _roles(tokenizer, pair.clean, clean)
    same_roles = roles == _roles(tokenizer, pair.corrupted, corrupted)
    _require(same_roles, "a role has different positions in the two prompts")
    answers, wrong = (
        _answer_tokens(tokenizer, pair.clean.text, clean, texts)
        for texts in (pair.answers, pair.wrong)
    )
    _require(not set(answers) & set(wrong), "an answer is both right and wrong")
    return pair.clean.text, pair.corrupted.text, answers, wrong, roles


def _roles(tokenizer: Any, prompt: Filled, tokens: list[int]) -> dict[str, int]:
    """Return the position of each role's last token, counted from the end of the prompt."""
    roles = dict[str, int]()
    for role, end in prompt.ends.items():
        start = token_ids(tokenizer, prompt.text[:end])
        _require(bool(start) and tokens[: len(start)] == start, f"no token ends where {role} does")
        roles[role] = len(start) - 1 - len(tokens)
    return roles | {END: -1}


def _answer_tokens(
    tokenizer: Any, prompt: str, tokens: list[int], answers: Sequence[str] | _Tokens
) -> _Tokens:
    """Return the token that each answer has when it follows the prompt."""
    rows = [
        token_ids(tokenizer, prompt + answer) if isinstance(answer, str) else [*tokens, answer]
        for answer in answers
    ]
    fits = all(row[:-1] == tokens and row[-1] != tokenizer.unk_token_id for row in rows)
    _require(fits, "an answer is not one token after the prompt")
    return tuple(row[-1] for row in rows)
