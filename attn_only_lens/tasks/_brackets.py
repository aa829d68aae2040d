"""Brackets: "The book (the old one near the door" continues with ")", not with "]".

The clean and the corrupted prompt differ in the opening mark, and so in the right closing mark:

    simple    The book (the old one near the door                        ), not ]
    nested    The book (the old one [the red one] near the door          ), not ]

In nested prompts, the wrong answer is the mark that closes the inner remark.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args

from attn_only_lens.arguments import one_of
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.tasks._agreement import _PREPOSITIONS
from attn_only_lens.tasks.pairs import Pair, collect, fill
from attn_only_lens.tasks.words import THINGS

Structure = Literal["simple", "nested"]

MARKS = ((" (", ")"), (" [", "]"), (' "', '"'))
_ADJECTIVES = ("old", "new", "small", "big", "red", "blue", "green", "clean", "heavy", "cheap")


def brackets(tokenizer: Any, n: int, seed: int = 0, *, structure: Structure = "simple") -> Contrast:
    """Return clean and corrupted prompts with a bracket or quotation that is open at the end.

    The roles (named positions) are "open", the mark that opens the bracket or quotation; "end", the
    last token; and, in nested prompts, "closed", the mark that closes the inner remark.

    Args:
        tokenizer: a Hugging Face tokenizer, such as `model.tokenizer`.
        n: the number of pairs; they have round brackets, square brackets or quotation marks.
        seed: decides which pairs are drawn.
        structure: "simple"; or "nested", which adds an inner remark whose closing mark is the wrong
            answer.

    Returns:
        Distinct pairs in random order. The corrupted prompt has another opening mark, and its right
        answer is the wrong answer of the clean prompt.

    Raises:
        InputError: an option is unknown, or fewer than n pairs fit the tokenizer.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.brackets(tokenizer, 10, structure="nested")
        >>> pairs.clean[0]
        'The bridge [the green one "the old one" above the lamp'
        >>> pairs.corrupted[0]
        'The bridge "the green one "the old one" above the lamp'
    """
    reasons = one_of(*get_args(Structure)).reasons(structure=structure)
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
