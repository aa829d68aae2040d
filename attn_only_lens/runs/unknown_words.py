"""Words that a tokenizer does not know: the model reads <unk> in their place, or nothing.

A byte-level tokenizer knows every text. Most other tokenizers have a token for unknown words; those
without one leave unknown words out. A text that contains the unknown token itself, such as "<unk>",
is not warned about.
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
        tokenizer: a tokenizer of Hugging Face; None knows every word.
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
    # The offsets show the text of each token. So a special token in the text that is also the
    # unknown token, as in GPT-2, does not count as an unknown word.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    unknown, known = set[int](), set[int]()
    for number, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        is_unknown = number == token and text[start:end].strip() != tokenizer.unk_token
        (unknown if is_unknown else known).update(range(start, end))
    left_out = {i for i, character in enumerate(text) if character.isalnum()} - known
    lost = left_out | unknown
    words = [word[0] for word in _WORD.finditer(text) if not lost.isdisjoint(range(*word.span()))]
    return list(dict.fromkeys(word.strip(punctuation) or word for word in words))


def _unknown_alone(tokenizer: Any, text: str, token: int) -> list[str]:
    """Return the unknown words by a tokenizer without offsets: each word is tokenized alone."""
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
    """Warn of words that the tokenizer does not know, and return whether there are any.

    Args:
        tokenizer: the model's, or None.
        prompts: texts, by their names in the warning.
    """
    unknown = {text: unknown_words(tokenizer, text) for text in dict.fromkeys(prompts.values())}
    cases = {
        ("unknown words", text): f"{quoted(unknown[text])} in {name}"
        for name, text in prompts.items()
        if unknown[text]
    }
    read = instead_of_unknown(tokenizer)
    warn(
        cases,
        f"the tokenizer does not know these words, and the model reads {read} in their place; "
        "use other words",
    )
    return bool(cases)
