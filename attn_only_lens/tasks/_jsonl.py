"""Pairs of prompts from a file of JSON lines."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.tasks.paired_prompts import END, Filled, Pair, PairedPrompts, collect

KEYS = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
"""The keys of Marks et al., "Sparse Feature Circuits", 2024."""

_PROBLEM = "this file makes no pairs"
_SHOWN = 5
_TAKEN = {END, "each", "all"}


def from_jsonl(
    tokenizer: Any,
    n: int,
    path: str | PathLike[str],
    seed: int = 0,
    *,
    keys: tuple[str, str, str, str] = KEYS,
    roles: Mapping[str, int] | None = None,
    keep: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> PairedPrompts:
    """Return pairs of prompts from a file with one JSON object in each line.

    Args:
        tokenizer: of Hugging Face, such as `model.tokenizer`.
        n: how many pairs.
        path: a UTF-8 file, such as the agreement sets of the repository of "Sparse Feature
            Circuits".
        seed: which pairs are drawn.
        keys: of the clean prompt, the corrupted prompt, the right answer and the wrong one, all
            texts, with the space before an answer if there is to be one.
        roles: the number of a word by role, from 0; the role is at the last token of this word, as
            {"subject": 1} in "The keys near". Besides these there is "end", the last token.
        keep: which lines to use, for instance those of some nouns.

    Returns:
        The pairs: different ones, in random order.

    Raises:
        InputError: no such file; with every reason: lines that are not objects with these keys; a
            prompt without a role's word; fewer than n pairs that fit the tokenizer, with what was
            dropped and why.

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
    reasons = [f"got role {role!r}; expected another name" for role in roles if role in _TAKEN]
    reasons += [
        f"got word {number!r} for the role {role!r}; expected its number from 0"
        for role, number in roles.items()
        if not is_count(number)
    ]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise InputError([*reasons, f"got {str(path)!r}: {error}"], _PROBLEM) from None
    rows, bad = list[Mapping[str, Any]](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line, keys, roles)
        if isinstance(row, str):
            bad.append(f"line {number}: {row}")
        elif keep(row):
            rows.append(row)
    more = len(bad) - _SHOWN
    reasons += bad[:_SHOWN] + [f"and {more} more lines"] * (more > 0)
    InputError.raise_if(reasons, _PROBLEM)
    Random(seed if is_count(seed) else 0).shuffle(rows)
    return collect(Path(path).stem, tokenizer, n, seed, _pairs(rows, keys, roles))


def _row(line: str, keys: Iterable[str], roles: Mapping[str, int]) -> Mapping[str, Any] | str:
    """Return the object in a line, or why it is none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"it is not JSON ({error})"
    if not isinstance(row, dict):
        return f"got a {type(row).__name__}; expected an object"
    lacking = [key for key in keys if not isinstance(row.get(key), str)]
    if lacking:
        return f"expected a text for {', '.join(lacking)}"
    clean, corrupted, *_ = keys
    fewest = min(len(row[clean].split()), len(row[corrupted].split()))
    if missing := [role for role, number in roles.items() if number >= fewest]:
        return f"a prompt has {fewest} words; expected more, for {', '.join(missing)}"
    return row


def _pairs(
    rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...], roles: Mapping[str, int]
) -> Iterable[Pair]:
    for row in rows:
        clean, corrupted, answer, wrong = (row[key] for key in keys)
        yield Pair(_filled(clean, roles), _filled(corrupted, roles), (answer,), (wrong,))


def _filled(text: str, roles: Mapping[str, int]) -> Filled:
    """Return a text, and where the words of roles end in it."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return Filled(text, {role: ends[number] for role, number in roles.items()})
