"""Greater-than: "The war lasted from the year 1732 to the year 17" continues with 33 or later.

The task is from Hanna, Liu and Variengien, "How does GPT-2 compute greater-than?" (2023). The first
year in the clean prompt ends in 02 to 98, and the first year in the corrupted prompt ends in 01.
All later years of the century are right answers, and all other years are wrong answers. The metric
is the total probability of right answers minus that of wrong answers.
"""

from collections.abc import Iterator
from typing import Any

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.tokens import token_ids
from attn_only_lens.errors import InputError
from attn_only_lens.tasks.pairs import (
    PROBLEM,
    Pair,
    collect,
    draw,
    fill,
)
from attn_only_lens.tasks.words import EVENTS

_TEMPLATE = "The {noun} lasted from the year {century}{year} to the year "
_CENTURIES = [str(century) for century in range(11, 18)]
_YEARS = range(2, 99)
_ENDINGS = [f"{year:02}" for year in range(100)]


def greater_than(tokenizer: Any, n: int, seed: int = 0) -> Contrast:
    """Return clean and corrupted prompts that stop halfway through a second, later year.

    The roles (named positions) are "noun", the event; "century" and "year", the two halves of the
    first year; and "end", the century of the second year. The tokenizer must split years into
    century and year.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs.
        seed: decides which pairs are drawn.

    Returns:
        Distinct pairs in random order. The `metric` is the summed probability of all later years
        minus the summed probability of all other years.

    Raises:
        InputError: the tokenizer does not split years in two, or fewer than n pairs fit the
            tokenizer.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.greater_than(tokenizer, 10)
        >>> pairs.clean[0]
        'The riot lasted from the year 1162 to the year 11'
        >>> pairs.corrupted[0]
        'The riot lasted from the year 1101 to the year 11'
        >>> len(pairs.answers[0]), len(pairs.wrong[0])
        (37, 63)
    """
    return collect("greater_than", tokenizer, n, seed, _pairs(tokenizer, seed))


def _tokens_of_years(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens of "00" to "99" when they are the last two digits of a year."""
    year_tokens = dict[str, int]()
    starts = token_ids(tokenizer, [f"year {century}" for century in _ENDINGS[10:]])
    for century, start in zip(_ENDINGS[10:], starts, strict=True):
        # Some tokenizers have single tokens for well-known years, such as 1776. If two digits
        # have no token of their own in one century, they are tried with the next century.
        left = [year for year in _ENDINGS if year not in year_tokens]
        whole = token_ids(tokenizer, [f"year {century}{year}" for year in left]) if left else []
        for year, tokens in zip(left, whole, strict=True):
            if tokens[:-1] == start and tokens[-1] != tokenizer.unk_token_id:
                year_tokens[year] = tokens[-1]
    if lacking := [year for year in _ENDINGS if year not in year_tokens]:
        reason = (
            f"the tokenizer has no token for {lacking[0]} at the end of a year; expected a "
            "tokenizer that splits years into century and year, as GPT-2's does"
        )
        raise InputError([reason], PROBLEM)
    return tuple(year_tokens[year] for year in _ENDINGS)


def _pairs(tokenizer: Any, seed: int) -> Iterator[Pair]:
    tokens = _tokens_of_years(tokenizer)
    for noun, century, year in draw(seed, EVENTS, _CENTURIES, _YEARS):
        words = {"noun": noun, "century": century}
        clean, corrupted = (
            fill(_TEMPLATE + century, words | {"year": ending}) for ending in (_ENDINGS[year], "01")
        )
        yield Pair(clean, corrupted, tokens[year + 1 :], tokens[: year + 1])
