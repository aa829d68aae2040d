"""Indirect object identification: "Mary and John went to the store, John gave a drink to" Mary.

The templates, names, places and objects are from Wang, Variengien, Conmy, Shlegeris and Steinhardt,
"Interpretability in the Wild: a Circuit for Indirect Object Identification in GPT-2 small" (2022).
Some prompts name the indirect object (IO) first, and others name the subject (S) first.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args

from attn_only_lens.arguments import one_of
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.tokens import token_ids
from attn_only_lens.tasks.pairs import Pair, collect, fill
from attn_only_lens.tasks.words import NAMES, OBJECTS, PLACES

Corruption = Literal["abc", "swap"]
_FIRST = ("{S1} and {IO}", "{IO} and {S1}")
_TEMPLATES = (
    "Then, {names} went to the {place}. {S2} gave a {object} to",
    "Then, {names} had a lot of fun at the {place}. {S2} gave a {object} to",
    "Then, {names} were working at the {place}. {S2} decided to give a {object} to",
    "Then, {names} were thinking about going to the {place}. {S2} wanted to give a {object} to",
    "Then, {names} had a long argument, and afterwards {S2} said to",
    "After {names} went to the {place}, {S2} gave a {object} to",
    "When {names} got a {object} at the {place}, {S2} decided to give it to",
    "When {names} got a {object} at the {place}, {S2} decided to give the {object} to",
    "While {names} were working at the {place}, {S2} gave a {object} to",
    "While {names} were commuting to the {place}, {S2} gave a {object} to",
    "After the lunch, {names} went to the {place}. {S2} gave a {object} to",
    "Afterwards, {names} went to the {place}. {S2} gave a {object} to",
    "Then, {names} had a long argument. Afterwards {S2} said to",
    "The {place} {names} went to had a {object}. {S2} gave it to",
    "Friends {names} found a {object} at the {place}. {S2} gave it to",
)


def ioi(tokenizer: Any, n: int, seed: int = 0, *, corruption: Corruption = "abc") -> Contrast:
    """Return clean and corrupted prompts whose next word is the name that occurs only once.

    The roles (named positions) are "IO", the indirect object and answer; "S1" and "S2", the first
    and second mention of the subject, which is the wrong answer; and "end", the last token.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs; on average, half of the pairs name the subject first.
        seed: decides which pairs are drawn.
        corruption: "abc" replaces the three names with three other names; "swap" replaces S2 with
            the indirect object, so that the subject becomes the right answer.

    Returns:
        Distinct pairs of prompts, in random order.

    Raises:
        InputError: an option is unknown, or fewer than n pairs fit the tokenizer.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.ioi(tokenizer, 100, corruption="swap")
        >>> pairs.clean[0]
        'The house Kevin and Sara went to had a ring. Sara gave it to'
        >>> pairs.corrupted[0]
        'The house Kevin and Sara went to had a ring. Kevin gave it to'
        >>> {role: at[0] for role, at in pairs.roles.items()}
        {'IO': -13, 'S1': -11, 'S2': -4, 'end': -1}
    """
    reasons = one_of(*get_args(Corruption)).reasons(corruption=corruption)
    return collect("ioi", tokenizer, n, seed, _pairs(tokenizer, seed, corruption), reasons)


def _pairs(tokenizer: Any, seed: int, corruption: str) -> Iterator[Pair]:
    random, names = Random(int(seed)), _known(tokenizer)
    while True:
        template = random.choice(_TEMPLATES).replace("{names}", random.choice(_FIRST))
        words = {"place": random.choice(PLACES), "object": random.choice(OBJECTS)}
        io, subject, *others = random.sample(names, 5)
        changed = (io, subject, io) if corruption == "swap" else others
        clean, corrupted = (
            fill(template, dict(zip(("IO", "S1", "S2"), three, strict=True)), **words)
            for three in ((io, subject, subject), changed)
        )
        yield Pair(clean, corrupted, (f" {io}",), (f" {subject}",))


def _known(tokenizer: Any) -> tuple[str, ...]:
    """Return the names that a tokenizer knows; pairs with other names would be dropped."""
    ids = token_ids(tokenizer, [f"{name} {name}" for name in NAMES])
    known = tuple(
        name
        for name, tokens in zip(NAMES, ids, strict=True)
        if tokenizer.unk_token_id not in tokens
    )
    return known if len(known) >= 5 else NAMES
