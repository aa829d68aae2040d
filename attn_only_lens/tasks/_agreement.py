"""Agreement: a verb agrees with its subject in number, or a pronoun with a name in gender.

Number prompts use the structures of Finlayson et al., "Causal Analysis of Syntactic Agreement
Mechanisms in Neural Language Models" (2021). Only the subject's number (singular or plural) differs
between the clean and the corrupted prompt:

    simple          The keys                              are, not is
    prepositional   The keys near the cabinet             are, not is
    relative        The keys that the teacher likes       are, not is

Gender prompts are from Mathwin et al., "Identifying a Preliminary Circuit for Predicting Gendered
Pronouns in GPT-2 Small" (2023): "So Mary is a really great friend, isn't" continues with "she".
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args

from attn_only_lens.arguments import one_of
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.tasks.pairs import Pair, collect, draw, fill
from attn_only_lens.tasks.words import ADJECTIVES, DEGREES, FRIENDS, MEN, PEOPLE, THINGS, WOMEN

Feature = Literal["number", "gender"]
Structure = Literal["simple", "prepositional", "relative"]

_STRUCTURES: dict[str, str] = {
    "simple": "The {subject}",
    "prepositional": "The {subject} {preposition} the {attractor}",
    "relative": "The {subject} that the {attractor} {verb}",
}
_PREPOSITIONS = ("near", "behind", "beside", "above", "below", "next to", "in front of")
_VERBS = (("likes", "like"), ("sees", "see"), ("knows", "know"), ("wants", "want"))
_NUMBER = ((" is", " are"), (" was", " were"), (" has", " have"))
_GENDER = "So {subject} is a {degree} {adjective} {noun}, isn't"


def agreement(
    tokenizer: Any,
    n: int,
    seed: int = 0,
    *,
    feature: Feature = "number",
    structure: Structure | None = None,
) -> Contrast:
    """Return clean and corrupted prompts whose next word agrees with the subject.

    The roles (named positions) are "subject", the noun or name that decides the answer;
    "attractor", the noun after the subject, if there is one; and "end", the last token.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs; on average, half of the clean subjects are plural (or women).
        seed: decides which pairs are drawn.
        feature: "number", for verbs, or "gender", for pronouns.
        structure: for feature="number": "simple", "prepositional" (the default) or "relative".

    Returns:
        Distinct pairs in random order. In the corrupted prompt, the subject has the other number or
        the name has the other gender.

    Raises:
        InputError: an option is unknown, or fewer than n pairs fit the tokenizer.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.agreement(tokenizer, 10, structure="relative")
        >>> pairs.clean[0]
        'The artists that the customer knows'
        >>> pairs.corrupted[0]
        'The artist that the customer knows'
        >>> tasks.agreement(tokenizer, 10, feature="gender").clean[0]
        "So Robert is a really good colleague, isn't"
    """
    reasons = one_of(*get_args(Feature)).reasons(feature=feature)
    if structure is not None:
        reasons += one_of(*get_args(Structure)).reasons(structure=structure)
        reasons += ["got a structure with feature='gender'; leave it out"] * (feature == "gender")
    pairs = _gender(seed) if feature == "gender" else _number(seed, structure or "prepositional")
    return collect("agreement", tokenizer, n, seed, pairs, reasons)


def _number(seed: int, structure: str) -> Iterator[Pair]:
    random = Random(int(seed))
    while True:
        subject, attractor = random.choice(THINGS), random.choice(PEOPLE)
        if random.random() < 0.5:
            subject, attractor = attractor, subject
        if structure == "relative":  # only a person can be the subject of these verbs
            attractor = random.choice([person for person in PEOPLE if person != subject])
        plural, attractor_plural = random.random() < 0.5, random.random() < 0.5
        preposition, verb = random.choice(_PREPOSITIONS), random.choice(_VERBS)[attractor_plural]
        attractor += "s" * attractor_plural
        verbs = random.choice(_NUMBER)
        clean, corrupted = (
            fill(
                _STRUCTURES[structure],
                {"subject": subject + "s" * number, "attractor": attractor},
                preposition=preposition,
                verb=verb,
            )
            for number in (plural, not plural)
        )
        yield Pair(clean, corrupted, (verbs[plural],), (verbs[not plural],))


def _gender(seed: int) -> Iterator[Pair]:
    pronouns = " he", " she"
    people = [(name, woman, False) for name in MEN for woman in WOMEN]
    people += [(person, name, True) for name, person, _ in people]
    for (*names, woman), *chosen in draw(seed, people, DEGREES, ADJECTIVES, FRIENDS):
        words = dict(zip(("degree", "adjective", "noun"), chosen, strict=True))
        clean, corrupted = (fill(_GENDER, {"subject": name}, **words) for name in names)
        yield Pair(clean, corrupted, (pronouns[woman],), (pronouns[not woman],))
