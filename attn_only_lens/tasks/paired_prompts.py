"""Pairs of prompts that differ in what decides the answer, with the positions of their parts.

Patches move activations between the two runs of a pair, token by token, and a metric compares the
logits of two answers. So of every pair that is drawn it is checked, with the tokenizer, that

    its two prompts have as many tokens, none of them unknown
    each role (the subject, the end, …) is at the same position in both, and ends with a token
    every answer, put after the clean prompt, is one more token

Pairs that fail are dropped and counted. A role's position is the position of its last token,
counted from the end: -1 is the prompt's last token. So it holds with a BOS before the prompt or
without, as the model has it, and with padding on either side.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from random import Random
from string import Formatter
from typing import Any, TypeAlias

import numpy as np

from attn_only_lens.arguments import is_count, positive_reasons
from attn_only_lens.engine.metrics import Metric, logit_diff, probability_diff
from attn_only_lens.errors import InputError

END = "end"
"""The role of the last token, which every task has."""

PROBLEM = "these prompts cannot be made"
_MOST_DRAWN = 20_000
_NO_PAIRS = "these are no pairs of prompts"
_Checked: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]


@dataclass(frozen=True)
class PairedPrompts:
    """Pairs of prompts of a task, for any model with the tokenizer that they were made with.

    Attributes:
        task: its name.
        clean: a text for each pair.
        corrupted: the other text of each pair, token for token.
        answers: the tokens that are right after each clean prompt.
        wrong: the tokens that are wrong there.
        roles: a position of each prompt by role, from its end: `positions=` of every analysis.
        dropped: how many pairs that were drawn are left out, by reason.

    Raises:
        InputError: no prompts; their number and those of answers and positions differ; answers
            that are not tokens of each prompt.

    Example:
        >>> from attn_only_lens import tasks
        >>> pairs = tasks.PairedPrompts("capitals", ("France:",), ("Italy:",), ((7,),), ((8,),),
        ...                             {"end": (-1,)})
        >>> len(pairs), pairs.metric.name
        (1, 'logit_diff of capitals')
    """

    task: str
    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]
    wrong: tuple[tuple[int, ...], ...]
    roles: Mapping[str, tuple[int, ...]]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in ("clean", "corrupted", "answers", "wrong")}
        columns |= {f"positions of {role}": column for role, column in self.roles.items()}
        if any(isinstance(x, str) or not isinstance(x, Sequence) for x in columns.values()):
            reason = "got what is no list; expected prompts, answers and positions of every pair"
            raise InputError([reason], _NO_PAIRS)
        reasons = [
            f"got {len(column)} {name} of {len(self)} clean prompts; expected as many"
            for name, column in columns.items()
            if len(column) != len(self)
        ]
        reasons += ["got no prompts; expected one pair or more"] * (not self.clean)
        for answer in (*self.answers, *self.wrong):
            if not isinstance(answer, Sequence) or not answer or not all(map(is_count, answer)):
                reasons.append(f"got answers {answer!r}; expected tokens of each prompt, as (7,)")
        InputError.raise_if(reasons, _NO_PAIRS)

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def metric(self) -> Metric:
        """The difference of logits; of prompts with several answers, of summed probabilities."""
        if all(len(tokens) == 1 for tokens in (*self.answers, *self.wrong)):
            right, wrong = ([row for (row,) in some] for some in (self.answers, self.wrong))
            return replace(logit_diff(right, wrong), name=f"logit_diff of {self.task}")
        metric = probability_diff(self.answers, self.wrong)
        return replace(metric, name=f"probability_diff of {self.task}")

    def __repr__(self) -> str:
        dropped = "; ".join(f"{count} dropped: {why}" for why, count in self.dropped.items())
        return (
            f"PairedPrompts({self.task}: {len(self)} pairs; {', '.join(self.roles)}"
            f"{dropped and '; '}{dropped})\n  {self.clean[0]!r}\n  {self.corrupted[0]!r}"
        )


@dataclass(frozen=True)
class Filled:
    """A prompt, and where the words of each role end in it."""

    text: str
    ends: Mapping[str, int]


@dataclass(frozen=True)
class Pair:
    """A pair of prompts that is not checked yet; answers are texts after the prompt, or tokens."""

    clean: Filled
    corrupted: Filled
    answers: tuple[str, ...] | tuple[int, ...]
    wrong: tuple[str, ...] | tuple[int, ...]


def fill(template: str, roles: Mapping[str, str], **words: str) -> Filled:
    """Put the words of roles, and further words, in the fields of a template."""
    text, ends = "", dict[str, int]()
    for literal, role, _, _ in Formatter().parse(template):
        text += literal
        if role is not None:
            text += roles[role] if role in roles else words[role]
            if role in roles:
                ends[role] = len(text)
    return Filled(text, ends)


def draw(seed: int, *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of one choice of each axis in random order, none twice, up to 20,000."""
    sizes = [len(axis) for axis in axes]
    total = prod(sizes)
    for index in Random(int(seed)).sample(range(total), min(total, _MOST_DRAWN)):
        choices = np.unravel_index(index, sizes, order="F")
        yield tuple(axis[int(choice)] for axis, choice in zip(axes, choices, strict=True))


def collect(
    task: str, tokenizer: Any, n: int, seed: int, pairs: Iterable[Pair], reasons: Sequence[str] = ()
) -> PairedPrompts:
    """Return the first n pairs that fit a tokenizer, unless there are reasons against it.

    `pairs` is read only if n, seed and tokenizer are valid.
    """
    reasons = [*reasons, *positive_reasons(n=n), *_tokenizer_reasons(tokenizer)]
    reasons += [f"got seed={seed!r}; expected a whole number from 0"] * (not is_count(seed))
    InputError.raise_if(reasons, PROBLEM)
    pairs_drawn = dict[str, tuple[Pair, _Checked]]()
    dropped, drawn = Counter[str](), 0
    for pair in islice(pairs, _MOST_DRAWN):
        drawn += 1
        if pair.clean.text in pairs_drawn:
            continue
        checked = _checked(tokenizer, pair)
        if isinstance(checked, str):
            dropped[checked] += 1
            continue
        pairs_drawn[pair.clean.text] = pair, checked
        if len(pairs_drawn) == n:
            break
    if len(pairs_drawn) < n:
        raise InputError(
            [
                f"{task}: got n={n}; {len(pairs_drawn)} of {drawn} drawn pairs are different "
                f"and fit the tokenizer; expected n={len(pairs_drawn)} at most",
                *(f"{count} were dropped: {why}" for why, count in dropped.most_common()),
            ],
            PROBLEM,
        )
    kept, checks = zip(*pairs_drawn.values(), strict=True)
    answers, wrong, positions = zip(*checks, strict=True)
    roles = [role for role in positions[0] if all(role in row for row in positions)]
    return PairedPrompts(
        task,
        tuple(pair.clean.text for pair in kept),
        tuple(pair.corrupted.text for pair in kept),
        answers,
        wrong,
        {role: tuple(row[role] for row in positions) for role in roles},
        dict(dropped.most_common()),
    )


def _tokenizer_reasons(tokenizer: Any) -> list[str]:
    """Return why prompts cannot be made with a tokenizer, if they cannot."""
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        return [
            f"got a {type(tokenizer).__name__}; expected a tokenizer of Hugging Face, such as "
            "model.tokenizer"
        ]
    plain, special = token_ids(tokenizer, ["a"])[0], tokenizer("a")["input_ids"]
    if plain and list(special[-len(plain) :]) != plain:
        return [
            "it puts special tokens after a text, so that no answer follows the prompt; expected "
            "the tokenizer of a model that predicts the next token"
        ]
    return []


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts, without special ones."""
    return [list(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _checked(tokenizer: Any, pair: Pair) -> _Checked | str:
    """Return the right answers, the wrong ones and the roles of a pair, or why it does not fit."""
    sides = pair.clean, pair.corrupted
    starts = [side.text[:end] for side in sides for end in side.ends.values()]
    all_answers = (*pair.answers, *pair.wrong)
    continued = [pair.clean.text + answer for answer in all_answers if isinstance(answer, str)]
    numbers = iter(token_ids(tokenizer, [*(side.text for side in sides), *starts, *continued]))
    clean, corrupted = next(numbers), next(numbers)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in (*clean, *corrupted):
        return "the tokenizer does not know a word"
    if len(clean) != len(corrupted):
        return "the two prompts have different numbers of tokens"
    places = []
    for side, whole in zip(sides, (clean, corrupted), strict=True):
        place = {}
        for role in side.ends:
            start = next(numbers)
            if not start or whole[: len(start)] != start:
                return f"no token ends where {role} does"
            place[role] = len(start) - 1 - len(whole)
        places.append(place | {END: -1})
    if places[0] != places[1]:
        return "a role has different positions in the two prompts"
    tokens = list[int]()
    for answer in all_answers:
        text = next(numbers) if isinstance(answer, str) else [*clean, answer]
        if text[:-1] != clean or text[-1] == tokenizer.unk_token_id:
            return "an answer is not one token after the prompt"
        tokens.append(text[-1])
    answers, wrong = tokens[: len(pair.answers)], tokens[len(pair.answers) :]
    if set(answers) & set(wrong):
        return "an answer is right and wrong"
    if clean == corrupted:
        return "the two prompts are the same"
    return tuple(answers), tuple(wrong), places[0]
