"""Make many pairs of prompts, which a model solves, from one pair."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.contrast import Contrast, contrast_reasons, solved_pairs
from attn_only_lens.engine.metrics import as_metric, logit_diff
from attn_only_lens.errors import InputError
from attn_only_lens.tasks._custom import RESERVED
from attn_only_lens.tasks.pairs import PROBLEM, Filled, Pair, collect, draw

_Words: TypeAlias = str | tuple[str, ...]


def from_pair(
    model: Any,
    n: int,
    contrast: Contrast,
    words: Mapping[_Words, Sequence[_Words]],
    seed: int = 0,
) -> Contrast:
    """Return pairs of prompts made from one pair by swapping words, which the model solves.

    A word is replaced in both prompts and in the answers. Words that change together, such as a
    noun, its plural and the answers, are a tuple. The pairs have the same tokens' places: a pair is
    dropped if a word has another number of tokens in its two prompts, or if the model does not
    prefer the right answer on both (see `Contrast.solved_by`). `Contrast.dropped` counts them.

    The roles (named positions) are the first word of each tuple, at its last token: where the word
    or the next word of its tuple is first, if it is in both prompts; and "end", the last token.

    Args:
        model: the model that must solve the pairs, with a tokenizer.
        n: the number of pairs.
        contrast: a clean text and a corrupted text, and `logit_diff` with two texts as answers.
        words: for each word, or tuple of words, the words that may take its place. The original
            words are used, too.
        seed: decides which pairs are drawn.

    Returns:
        Distinct pairs of prompts, in random order.

    Raises:
        InputError: the contrast is not one pair of texts with two answers, a word is in none of
            them, words have another form, or fewer than n pairs are left. The error lists every
            reason.

    Example:
        >>> from attn_only_lens import Contrast, load, patching as p, tasks
        >>> model = load("small-english")
        >>> keys = Contrast("The keys near the cabinet", "The key near the cabinet",
        ...                 p.logit_diff(" are", " is"))
        >>> pairs = tasks.from_pair(model, 8, keys, {
        ...     ("keys", "key"): [("letters", "letter"), ("boats", "boat"), ("roads", "road")],
        ...     "cabinet": ["table", "door", "garden"]})
        >>> pairs[0]
        Contrast(pairs: 1 pair; logit_diff of pairs; keys, cabinet, end)
          'The keys near the garden'
          'The key near the garden'
    """
    reasons = contrast_reasons(contrast)
    InputError.raise_if(reasons, PROBLEM)
    metric = as_metric(contrast.metric)
    answers = [answer for rows in metric.answers for row in rows for answer in row]
    parts = [contrast.clean, contrast.corrupted, *answers]
    texts = [part for part in parts if isinstance(part, str)]
    is_difference = metric.make is logit_diff and len(answers) == 2
    if not is_difference or len(texts) != len(parts):
        expected = "two texts, and logit_diff with two texts as answers"
        reasons.append(f"got {contrast!r}; expected one pair: {expected}")
    axes, reasons_of_words = _axes(words, texts)
    InputError.raise_if([*reasons, *reasons_of_words], PROBLEM)

    def pairs() -> Iterator[Pair]:
        for choice in draw(seed, *axes.values()):
            swaps = {
                old: new
                for before, after in zip(axes, choice, strict=True)
                for old, new in zip(before, after, strict=True)
            }
            clean, corrupted = (_swapped(text, swaps, axes) for text in texts[:2])
            right, wrong = (_swapped(answer, swaps, {}).text for answer in texts[2:])
            yield Pair(*_common_roles(clean, corrupted), (right,), (wrong,))

    tokenizer = getattr(model, "tokenizer", None)
    return collect("pairs", tokenizer, n, seed, pairs(), solved=partial(solved_pairs, model))


def _axes(
    words: object, texts: Sequence[str]
) -> tuple[dict[tuple[str, ...], list[tuple[str, ...]]], list[str]]:
    """Return the words to choose from, as tuples, by the words that they replace; and errors."""
    if not isinstance(words, Mapping) or not words:
        return {}, [f"got {a_type(words)} as words; expected a dict from words to lists of words"]
    axes, reasons = dict[tuple[str, ...], list[tuple[str, ...]]](), list[str]()
    for key, options in words.items():
        before = _as_words(key)
        listed = [] if isinstance(options, str) or not isinstance(options, Sequence) else options
        after = [_as_words(option) for option in listed]
        if not before or not after or any(len(some) != len(before) for some in after):
            reasons.append(
                f"got {key!r}: {options!r}; expected a word and a list of words, or a tuple of "
                "words and a list of tuples with as many words"
            )
            continue
        reasons += [
            f"got {word!r}, which is in none of {', '.join(map(repr, texts))}; expected one of "
            "their words"
            for word in before
            if not any(re.search(_whole(word), text) for text in texts)
        ]
        reasons += [
            f"got {word!r} twice; expected every word once"
            for other in axes
            for word in before
            if word in other
        ]
        reasons += [f"got {key!r}; expected every word once"] * (len(set(before)) < len(before))
        if before[0] in RESERVED:
            reasons.append(
                f"got {before[0]!r} first, which cannot be a role; put another word first"
            )
        axes[before] = list(dict.fromkeys([before, *after]))
    return axes, reasons


def _as_words(value: object) -> tuple[str, ...]:
    """Return a word, or a tuple of words, as a tuple; an empty tuple for other values."""
    words = (value,) if isinstance(value, str) else value
    if isinstance(words, tuple) and all(isinstance(word, str) and word.strip() for word in words):
        return words
    return ()


def _whole(word: str) -> str:
    return rf"(?<!\w){re.escape(word)}(?!\w)"


def _swapped(text: str, swaps: Mapping[str, str], roles: Mapping[tuple[str, ...], Any]) -> Filled:
    """Replace whole words, all at once, and record where the first words of the roles end."""
    result, ends, start = "", dict[str, int](), 0
    longest_first = sorted(swaps, key=len, reverse=True)
    for match in re.finditer("|".join(map(_whole, longest_first)), text):
        result += text[start : match.start()] + swaps[match[0]]
        start = match.end()
        for words in roles:
            if match[0] in words[:2]:
                ends.setdefault(words[0], len(result))
    return Filled(result + text[start:], ends)


def _common_roles(clean: Filled, corrupted: Filled) -> tuple[Filled, Filled]:
    """Keep the roles that both prompts have."""
    common = clean.ends.keys() & corrupted.ends.keys()

    def kept(side: Filled) -> Filled:
        return replace(side, ends={role: side.ends[role] for role in side.ends if role in common})

    return kept(clean), kept(corrupted)
