"""Make pairs of clean and corrupted prompts from templates and words, or from a JSON Lines file."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from random import Random
from string import Formatter
from typing import Any

from attn_only_lens.arguments import is_count
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.positions import WORDS
from attn_only_lens.errors import InputError
from attn_only_lens.tasks.pairs import (
    END,
    PROBLEM,
    Filled,
    Pair,
    collect,
    draw,
    fill,
)

ANSWER = "answer"
KEYS = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
"""The keys in the files of Marks et al., "Sparse Feature Circuits" (2024)."""
RESERVED = {END, *WORDS}  # role names with another meaning in `Sites(positions=…)`
_SHOWN = 5  # the maximum number of invalid lines in an error


def from_templates(
    tokenizer: Any,
    n: int,
    templates: str | Sequence[str],
    words: Sequence[Mapping[str, str]],
    seed: int = 0,
) -> Contrast:
    """Return pairs of prompts. Each pair is a template filled with two rows of words.

    The row that fills the clean prompt has the right answer, and the other row has the wrong
    answer. The roles (named positions) are the template's fields, and "end", the last token.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs.
        templates: strings with a field for each role; all templates have the same fields.
        words: rows with a string for each field, and an "answer", which begins with a space if the
            model should predict a space.
        seed: decides which pairs are drawn.

    Returns:
        Distinct pairs of prompts, in random order.

    Raises:
        InputError: templates have no fields or different fields, rows lack a word, or fewer than n
            pairs fit the tokenizer. The error lists every reason.

    Example:
        >>> from attn_only_lens import tasks
        >>> words = [{"thing": "key", "answer": " is"}, {"thing": "keys", "answer": " are"}]
        >>> pairs = tasks.from_templates(tokenizer, 2, "The {thing} in the bag", words)
        >>> pairs.clean[0], pairs.corrupted[0]
        ('The keys in the bag', 'The key in the bag')
        >>> dict(pairs.roles)
        {'thing': (-4, -4), 'end': (-1, -1)}
    """
    for argument in (templates, words):
        if not isinstance(argument, Iterable):
            raise InputError([f"got {argument!r}; expected templates and rows of words"], PROBLEM)
    texts = [templates] if isinstance(templates, str) else list(templates)
    rows, fields = list(words), list(map(_fields, texts))
    expected = set(fields[0]) if fields else set()
    reasons = [
        f"got template {template!r}; expected a text with fields, each used once, such as "
        "{subject}; all templates must have the same fields"
        for template, roles in zip(texts, fields, strict=True)
        if not roles or sorted(roles) != sorted(expected)
    ]
    reasons += [f"got field {{{role}}}; expected another name" for role in expected & RESERVED]
    keys = [*sorted(expected), ANSWER]
    reasons += [
        f"got words {row!r}; expected a dict with a text for {', '.join(keys)}"
        for row in rows
        if not _has_texts(row, keys)
    ]
    reasons += ["got no templates; expected one or more"] * (not texts)
    reasons += [f"got {len(rows)} rows of words; expected two or more"] * (len(rows) < 2)
    pairs = (
        Pair(fill(template, row), fill(template, changed), (row[ANSWER],), (changed[ANSWER],))
        for template, row, changed in draw(seed, texts, rows, rows)
        if row is not changed and row[ANSWER] != changed[ANSWER]
    )
    return collect("templates", tokenizer, n, seed, pairs, reasons)


def _fields(template: object) -> list[str]:
    """Return a template's fields, or an empty list if it is not a string with plain fields."""
    try:
        parts = list(Formatter().parse(template)) if isinstance(template, str) else []
    except ValueError:  # an unmatched brace
        return []
    fields = [part[1:] for part in parts if part[1] is not None]
    is_plain = all(role and not spec and not conversion for role, spec, conversion in fields)
    return [role for role, *_ in fields if role] if is_plain else []


def _has_texts(row: object, keys: Iterable[str]) -> bool:
    return isinstance(row, Mapping) and all(isinstance(row.get(key), str) for key in keys)


def from_jsonl(
    tokenizer: Any,
    n: int,
    path: str | PathLike[str],
    seed: int = 0,
    *,
    keys: tuple[str, str, str, str] = KEYS,
    roles: Mapping[str, int] | None = None,
    keep: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> Contrast:
    """Return pairs of clean and corrupted prompts from a file with one JSON object per line.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs.
        path: a UTF-8 file, such as the agreement data sets from "Sparse Feature Circuits".
        seed: decides which pairs are drawn.
        keys: the keys of the clean prompt, the corrupted prompt, the right answer and the wrong
            answer. All are strings; an answer includes the space before it.
        roles: the word number for each role, counted from 0, such as {"subject": 1} for "The keys
            near". The role's position is the last token of this word. "end", the last token of
            the prompt, is always a role.
        keep: a function that gets a line as a dictionary and returns whether to use it.

    Returns:
        Distinct pairs of prompts, in random order.

    Raises:
        InputError: the file does not exist, lines are not objects with these keys, prompts lack the
            word of a role, or fewer than n pairs fit the tokenizer. The error lists every reason.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from attn_only_lens import tasks
        >>> row = {"clean_prefix": "The keys", "patch_prefix": "The key",
        ...        "clean_answer": " are", "patch_answer": " is"}
        >>> _ = Path("pairs.jsonl").write_text(json.dumps(row))
        >>> pairs = tasks.from_jsonl(tokenizer, 1, "pairs.jsonl", roles={"subject": 1})
        >>> pairs.clean, dict(pairs.roles)
        (('The keys',), {'subject': (-1,), 'end': (-1,)})
    """
    roles = dict(roles or {})
    reasons = [f"got role {role!r}; expected another name" for role in roles if role in RESERVED]
    reasons += [
        f"got word number {number!r} for the role {role!r}; expected a whole number, 0 or more"
        for role, number in roles.items()
        if not is_count(number)
    ]
    if isinstance(keys, str) or len(keys) != len(KEYS):
        reasons.append(f"got keys={keys!r}; expected four names, such as {KEYS}")
        keys = KEYS
    if not callable(keep):
        reasons.append(f"got keep={keep!r}; expected a function that takes a dictionary")
        keep = bool
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError, TypeError) as error:
        raise InputError([*reasons, f"got {str(path)!r}: {error}"], PROBLEM) from None
    rows, bad = list[Mapping[str, Any]](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line, keys, roles)
        if isinstance(row, str):
            bad.append(f"line {number}: {row}")
        elif keep(row):
            rows.append(row)
    reasons += [*bad[:_SHOWN], *[f"and {len(bad) - _SHOWN} more lines"] * (len(bad) > _SHOWN)]
    return collect(Path(path).stem, tokenizer, n, seed, _pairs(rows, keys, roles, seed), reasons)


def _row(line: str, keys: Iterable[str], roles: Mapping[str, int]) -> Mapping[str, Any] | str:
    """Return the JSON object in a line, or a message that says why the line is invalid."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"it is not JSON ({error})"
    if not _has_texts(row, keys):
        return f"expected a JSON object with a text for {', '.join(keys)}"
    clean, corrupted, *_ = keys
    fewest = min(len(row[clean].split()), len(row[corrupted].split()))
    if missing := [role for role, number in roles.items() if number >= fewest]:
        return f"a prompt has {fewest} words; expected more words for {', '.join(missing)}"
    return row


def _pairs(
    rows: list[Mapping[str, Any]], keys: Iterable[str], roles: Mapping[str, int], seed: int
) -> Iterator[Pair]:
    Random(int(seed)).shuffle(rows)
    for row in rows:
        clean, corrupted, answer, wrong = (row[key] for key in keys)
        yield Pair(_filled(clean, roles), _filled(corrupted, roles), (answer,), (wrong,))


def _filled(text: str, roles: Mapping[str, int]) -> Filled:
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return Filled(text, {role: ends[number] for role, number in roles.items()})
