"""Induction: among random words, "… A B … A" continues with B.

The task is from Olsson et al., "In-context Learning and Induction Heads" (2022). In the corrupted
prompt, another word B' replaces B and is the right answer. The clean and the corrupted prompt
differ only in this token, which alone decides the answer.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from attn_only_lens.arguments import whole
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.tokens import token_ids
from attn_only_lens.errors import InputError
from attn_only_lens.tasks.pairs import (
    PROBLEM,
    Filled,
    Pair,
    collect,
)

_POOL = 4096  # test at most this many vocabulary tokens
_ROLES = {"first": 1, "repeated": 2}


def induction(tokenizer: Any, n: int, seed: int = 0, *, length: int = 20) -> Contrast:
    """Return clean and corrupted prompts of random words, whose last word also occurs earlier.

    The roles (named positions) are "first", the first occurrence of the last word; "repeated", the
    word after it, which is the answer; and "end", the last token.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs.
        seed: decides which pairs are drawn.
        length: the number of tokens in a prompt, without a BOS.

    Returns:
        The pairs, all different. Except for the last word, the words of a prompt are different
        tokens. They have spaces between them if the vocabulary has enough such words.

    Raises:
        InputError: the length is below 3, the tokenizer has too few words, or fewer than n pairs
            fit it.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.induction(tokenizer, 10, length=5)
        >>> pairs.clean[0]
        ' journey Then cabinets Jacob Then'
        >>> pairs.corrupted[0]
        ' journey Then argument Jacob Then'
    """
    pairs, reasons = _pairs(tokenizer, seed, length), whole(3).reasons(length=length)
    return collect("induction", tokenizer, n, seed, pairs, reasons)


def _pairs(tokenizer: Any, seed: int, length: int) -> Iterator[Pair]:
    words, random = _words(tokenizer, Random(int(seed)), length), Random(int(seed))
    if len(words) < length + 1:
        reason = (
            f"{len(words)} words of the tokenizer remain single tokens next to each other; "
            f"expected {length + 1} for {length}-token prompts: use a smaller length"
        )
        raise InputError([reason], PROBLEM)
    while True:
        *others, repeated, replacement = random.sample(words, length + 1)
        first = random.randrange(length - 2)
        others = others[: length - 2]
        rows = [
            [*others[: first + 1], word, *others[first + 1 :], others[first]]
            for word in (repeated, replacement)
        ]
        sides = []
        for row in rows:
            ends = {role: len(_text(tokenizer, row[: first + k])) for role, k in _ROLES.items()}
            sides.append(Filled(_text(tokenizer, row), ends))
        right, wrong = (
            _text(tokenizer, [*rows[0], word]).removeprefix(sides[0].text)
            for word in (repeated, replacement)
        )
        yield Pair(sides[0], sides[1], (right,), (wrong,))


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _words(tokenizer: Any, random: Random, least: int) -> list[int]:
    """Return the word tokens that stay single tokens when a text repeats them.

    If more than `least` words begin with a space, the other words are left out.
    """
    special = set(tokenizer.all_special_ids)
    known = [token for token in sorted(set(tokenizer.get_vocab().values())) if token not in special]
    some = random.sample(known, min(len(known), _POOL))
    some = [token for token in some if _text(tokenizer, [token]).strip().isalnum()]
    if not some:
        return []
    texts = {token: _text(tokenizer, [token] * 3) for token in some}
    back = zip(texts.items(), token_ids(tokenizer, list(texts.values())), strict=True)
    read = {token: text for (token, text), index in back if index == [token] * 3}
    apart = [token for token, text in read.items() if len(text.split()) == 3]
    return apart if len(apart) > least else list(read)
