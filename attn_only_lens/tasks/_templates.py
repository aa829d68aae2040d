"""Pairs of prompts by templates of one's own."""

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from attn_only_lens.errors import InputError
from attn_only_lens.tasks.paired_prompts import END, Pair, PairedPrompts, collect, draw, fill

ANSWER = "answer"


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
        >>> pairs = tasks.from_templates(tokenizer, 2, "The {thing} in the box", words)
        >>> pairs.clean[0], pairs.corrupted[0]
        ('The keys in the box', 'The key in the box')
        >>> dict(pairs.roles)
        {'thing': (-4, -4), 'end': (-1, -1)}
    """
    given = [templates] if isinstance(templates, str) else list(templates)
    rows, reasons = list(words), list[str]()
    fields = [[role for _, role, _, _ in Formatter().parse(each) if role] for each in given]
    expected = set(fields[0]) if fields else set()
    for template, roles in zip(given, fields, strict=True):
        if not roles or set(roles) != expected or len(set(roles)) != len(roles) or END in roles:
            reasons.append(
                f"got template {template!r}; expected the same fields in all, each once, one or "
                f"more, and none of them {{{END}}}"
            )
    for row in rows:
        lacking = [key for key in (*sorted(expected), ANSWER) if not isinstance(row.get(key), str)]
        reasons += [f"got words {dict(row)}; expected a text for {', '.join(lacking)}"] * bool(
            lacking
        )
    reasons += ["got no templates; expected one or more"] * (not given)
    reasons += [f"got {len(rows)} rows of words; expected two or more"] * (len(rows) < 2)
    InputError.raise_if(reasons, "these templates make no pairs")
    pairs = (
        Pair(fill(template, one), fill(template, other), (one[ANSWER],), (other[ANSWER],))
        for template, one, other in draw(seed, given, rows, rows)
        if one is not other and one[ANSWER] != other[ANSWER]
    )
    return collect("templates", tokenizer, n, seed, pairs)
