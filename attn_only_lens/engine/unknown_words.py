"""Words, signs and whitespace that a tokenizer does not know: the model reads <unk>, or nothing.

A byte-level tokenizer knows every text. Most other tokenizers have a token for unknown words; those
without one leave unknown words out. A text that contains the unknown token itself, such as "<unk>",
is not warned about.
"""

import re
from collections.abc import Mapping
from typing import Any
from unicodedata import category

from attn_only_lens.engine.input_warnings import quoted, warn

_WORD = re.compile("w+(?:'w+)*")  # in kinds of characters: "don't" is one


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """Return the pieces of a text that a tokenizer does not know, each once, in their order.

    A piece is a whole word, a sign, or whitespace.

    Example:
        >>> from attn_only_lens import pretrained
        >>> from attn_only_lens.engine.unknown_words import unknown_words
        >>> unknown_words(pretrained.small_english().tokenizer, "The kezs near the  cabinet!")
        ['kezs', ' ', '!']
    """
    token = getattr(tokenizer, "unk_token_id", None)
    if not getattr(tokenizer, "is_fast", False):
        return [] if token is None else _unknown_alone(tokenizer, text, token)
    # Bytes and special tokens have places in the text, too: so a BOS that is also the unknown
    # token, as GPT-2's, is not taken for one.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    lost, known = list[tuple[int, int]](), set[int]()
    for encoded_token, (start, end) in zip(
        encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        if encoded_token == token and text[start:end].strip() != tokenizer.unk_token:
            lost.append((start, end))
        else:
            known.update(range(start, end))
    taken = known.union(*(range(*span) for span in lost))
    lost += [(i, i + 1) for i, letter in enumerate(text) if letter.isalnum() and i not in taken]
    if not lost:
        return []
    words = [match.span() for match in _WORD.finditer("".join(map(_kind, text)))]
    word_at = {i: word for word in words for i in range(*word)}
    pieces = [_piece(text, span, word_at) for span in sorted(lost)]
    return list(dict.fromkeys(filter(None, pieces)))


def _kind(character: str) -> str:
    """Return w for a letter, a mark on one or a digit; ' for an apostrophe; a space for others."""
    return "'" if character in "'’" else "w" if category(character)[0] in "LMN" else " "


def _piece(text: str, span: tuple[int, int], word_at: Mapping[int, tuple[int, int]]) -> str:
    """Return the text at a span without spaces around it, and with all of the words it is in."""
    start, end = span
    piece = text[start:end]
    if not piece.strip():
        return piece
    trimmed = end - len(piece.lstrip()), start + len(piece.rstrip())
    first, last = (word_at.get(i, trimmed) for i in (trimmed[0], trimmed[1] - 1))
    return text[first[0] : last[1]]


def _unknown_alone(tokenizer: Any, text: str, token: int) -> list[str]:
    """Return the unknown words by tokenizing each word, where tokens have no places in the text.

    Unknown whitespace is found only in a text of nothing but whitespace.
    """
    return [
        word
        for word in dict.fromkeys(text.split() or [text])
        if token in tokenizer(word, add_special_tokens=False)["input_ids"]
        and tokenizer.unk_token not in word
    ]


def instead_of_unknown(tokenizer: Any) -> str:
    """Return what a model reads in the place of a word that its tokenizer does not know."""
    return str(getattr(tokenizer, "unk_token", None) or "nothing")


def warn_of_unknown_words(tokenizer: Any, prompts: Mapping[str, str]) -> bool:
    """Warn of pieces that the tokenizer does not know, and return whether there are any."""
    unknown = {text: unknown_words(tokenizer, text) for text in dict.fromkeys(prompts.values())}
    cases = {
        ("unknown words", text): f"{quoted(unknown[text])} in {name}"
        for name, text in prompts.items()
        if unknown[text]
    }
    read = instead_of_unknown(tokenizer)
    warn(
        cases,
        f"the tokenizer does not know these pieces, and the model reads {read}; choose others",
    )
    return bool(cases)
