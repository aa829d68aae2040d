"""Pairs of prompts by templates of one's own."""

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from attn_only_lens.errors import InputError
from attn_only_lens.tasks.paired_prompts import END, Pair, PairedPrompts, collect, draw, fill

ANSWER = "answer"
_PROBLEM = "these templates make no pairs"
_TAKEN = {END, "each", "all"}  # what roles cannot be called: analyses know these positions


def from_templates(
    tokenizer: Any,
    n: int,
    templates: str | Sequence[str],
    words: Sequence[Mapping[str, str]],
    seed: int = 0,
) -> PairedPrompts:
    """Return pairs of prompts that say the same of different things.

    A pair is a template with two rows of words: one in the clean prompt, whose answer is right, the
    other in the corrupted prompt, whose answer is wrong. The fields of a template are the roles;
    besides these there is "end", the last token.

    Args:
        tokenizer: of Hugging Face, such as `model.tokenizer`.
        n: how many pairs.
        templates: texts with a field for each role, and the same fields in all.
        words: rows of a text for each field, and the "answer", with the space before it if there
            is to be one.
        seed: which pairs are drawn.

    Returns:
        The pairs: different ones, in random order.

    Raises:
        InputError: with every reason: templates without fields, or with different ones; rows that
            lack a word; fewer than n pairs that fit the tokenizer, with what was dropped and why.

    Example:
        >>> from attn_only_lens import tasks
        >>> words = [{"thing": "key", "answer": " is"}, {"thing": "keys", "answer": " are"}]
        >>> pairs = tasks.from_templates(tokenizer, 2, "The {thing} in the bag", words)
        >>> pairs.clean[0], pairs.corrupted[0]
        ('The keys in the bag', 'The key in the bag')
        >>> dict(pairs.roles)
        {'thing': (-4, -4), 'end': (-1, -1)}
    """
    if not isinstance(templates, Iterable) or not isinstance(words, Iterable):
        texts = templates if isinstance(words, Iterable) else words
        raise InputError([f"got {texts!r}; expected texts, and rows of words"], _PROBLEM)
    texts = [templates] if isinstance(templates, str) else list(templates)
    rows, reasons = list(words), list[str]()
    fields = list(map(_fields, texts))
    expected = set(fields[0] or ()) if fields else set()
    for template, roles in zip(texts, fields, strict=True):
        if not roles or set(roles) != expected or len(set(roles)) != len(roles):
            reasons.append(
                f"got template {template!r}; expected a text with fields such as {{subject}}, the "
                "same in all, each once, one or more"
            )
    reasons += [f"got field {{{role}}}; expected another name" for role in expected & _TAKEN]
    for row in rows:
        if not isinstance(row, Mapping):
            reasons.append(f"got words {row!r}; expected a text by field, and the {ANSWER!r}")
            continue
        lacking = [key for key in (*sorted(expected), ANSWER) if not isinstance(row.get(key), str)]
        reasons += [f"got words {dict(row)}; expected a text for {', '.join(lacking)}"] * bool(
            lacking
        )
    reasons += ["got no templates; expected one or more"] * (not texts)
    reasons += [f"got {len(rows)} rows of words; expected two or more"] * (len(rows) < 2)
    InputError.raise_if(reasons, _PROBLEM)
    pairs = (
        Pair(fill(template, one), fill(template, second), (one[ANSWER],), (second[ANSWER],))
        for template, one, second in draw(seed, texts, rows, rows)
        if one is not second and one[ANSWER] != second[ANSWER]
    )
    return collect("templates", tokenizer, n, seed, pairs)


def _fields(template: object) -> list[str] | None:
    """Return the fields of a template; None if the text is not a template with plain fields."""
    if not isinstance(template, str):
        return None
    fields = list[str]()
    try:
        for _, role, spec, how in Formatter().parse(template):
            if role is not None:
                if not role or spec or how:
                    return None
                fields.append(role)
    except ValueError:  # a brace without its other
        return None
    return fields
