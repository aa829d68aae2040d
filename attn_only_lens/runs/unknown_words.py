"""Words that a tokenizer does not know: the model reads <unk> in their place, or nothing.

Tokenizers of bytes know every text. Of the others most have a token for what they do not know;
those without it leave it out. A prompt that names this token itself is meant so.
"""

import re
from collections.abc import Mapping
from string import punctuation
from typing import Any

from attn_only_lens.runs.input_warnings import quoted, warn

_WORD = re.compile(r"\S+")


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """Return the words of a text that a tokenizer does not know, each once, in their order.

    Args:
        tokenizer: of Hugging Face; None knows every word.
        text: any text.

    Example:
        >>> from attn_only_lens import pretrained
        >>> from attn_only_lens.runs.unknown_words import unknown_words
        >>> unknown_words(pretrained.small_english().tokenizer, "The kezs near the cabinet")
        ['kezs']
    """
    token = getattr(tokenizer, "unk_token_id", None)
    if not getattr(tokenizer, "is_fast", False):
        return [] if token is None else _unknown_alone(tokenizer, text, token)
    # Bytes and special tokens have places in the text, too: so a BOS that is also the unknown
    # token, as GPT-2's, is not taken for one.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    unknown, known = set[int](), set[int]()
    for each, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        is_unknown = each == token and text[start:end].strip() != tokenizer.unk_token
        (unknown if is_unknown else known).update(range(start, end))
    left_out = {i for i, character in enumerate(text) if character.isalnum()} - known
    lost = left_out | unknown
    words = [each[0] for each in _WORD.finditer(text) if not lost.isdisjoint(range(*each.span()))]
    return list(dict.fromkeys(word.strip(punctuation) or word for word in words))


def _unknown_alone(tokenizer: Any, text: str, token: int) -> list[str]:
    """Return the unknown words by tokenizing each word, where tokens have no places in the text."""
    return [
        word
        for word in dict.fromkeys(text.split())
        if token in tokenizer(word, add_special_tokens=False)["input_ids"]
        and tokenizer.unk_token not in word
    ]


def instead_of_unknown(tokenizer: Any) -> str:
    """Return what a model reads in the place of a word that its tokenizer does not know."""
    return str(getattr(tokenizer, "unk_token", None) or "nothing")


def warn_of_unknown_words(tokenizer: Any, prompts: Mapping[str, str]) -> bool:
    """Warn of words that the model does not read as they are, and return whether there are any.

    Args:
        tokenizer: the model's, or None.
        prompts: texts, by what to call them.
    """
    found = {text: unknown_words(tokenizer, text) for text in dict.fromkeys(prompts.values())}
    cases = {
        ("unknown words", text): f"{quoted(found[text])} in {name}"
        for name, text in prompts.items()
        if found[text]
    }
    read = instead_of_unknown(tokenizer)
    warn(
        cases, f"the tokenizer does not know these words, and the model reads {read}; choose others"
    )
    return bool(cases)
