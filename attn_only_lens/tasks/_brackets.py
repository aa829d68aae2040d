"""Brackets: The book (the old one near the door … ), and not ].

Of a pair, the prompts differ in the mark that opened, and so in the one that is to close:

    simple    The book (the old one near the door                        ), not ]
    nested    The book (the old one [the red one] near the door          ), not ]

Nested, the mark that is wrong has opened and closed in between.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args

from attn_only_lens.arguments import option_reasons
from attn_only_lens.tasks._agreement import _PREPOSITIONS
from attn_only_lens.tasks.paired_prompts import Pair, PairedPrompts, collect, fill
from attn_only_lens.tasks.words import THINGS

Structure = Literal["simple", "nested"]

MARKS = ((" (", ")"), (" [", "]"), (' "', '"'))
_ADJECTIVES = ("old", "new", "small", "big", "red", "blue", "green", "clean", "heavy", "cheap")


def brackets(
    tokenizer: Any, n: int, seed: int = 0, *, structure: Structure = "simple"
) -> PairedPrompts:
    """Return pairs of prompts that end where a bracket or a quotation must be closed.

    Roles: "open", the mark that is to be closed; "end"; and, if nested, "closed", the mark that
    closes the inner remark.

    Args:
        tokenizer: of Hugging Face, such as `model.tokenizer`.
        n: how many pairs; round and square brackets and quotation marks.
        seed: which pairs are drawn.
        structure: "simple"; or "nested", with a second remark inside, whose closing mark is the
            wrong answer.

    Returns:
        The pairs, all different, in random order. The corrupted prompt opens with another mark:
        its right answer is the wrong one of the clean prompt.

    Raises:
        InputError: an unknown option; fewer than n pairs that fit the tokenizer.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.brackets(tokenizer, 10, structure="nested")
        >>> pairs.clean[0]
        'The bridge [the green one "the old one" above the lamp'
        >>> pairs.corrupted[0]
        'The bridge "the green one "the old one" above the lamp'
    """
    reasons = option_reasons("structure", structure, get_args(Structure))
    return collect("brackets", tokenizer, n, seed, _pairs(seed, structure), reasons)


def _pairs(seed: int, structure: str) -> Iterator[Pair]:
    random = Random(int(seed))
    while True:
        noun, second_noun = random.sample(THINGS, 2)
        one, color = random.sample(_ADJECTIVES, 2)
        (here, closes), (there, wrong) = random.sample(MARKS, 2)
        start = f"The {noun}{{open}}the {one} one"
        if structure == "nested":
            start += f"{there}the {color} one{{closed}}"
        template = f"{start} {random.choice(_PREPOSITIONS)} the {second_noun}"
        clean, corrupted = (
            fill(template, {"open": text, "closed": wrong}) for text in (here, there)
        )
        yield Pair(clean, corrupted, (closes,), (wrong,))
