"""Small English: the grammar that writes the texts.

A text is a story of several sentences, a scene for indirect object identification with its
continuation, or a list of random words in which parts are repeated. A model can learn the rules of
the grammar:

    agreement   verbs agree with their subjects in number, across phrases, clauses and brackets;
                question tags agree with the subject, too
    gender      pronouns agree with names, within a sentence and in the next one
    brackets    brackets and quotation marks close what was opened last
    repetition  in a list, the word that followed a word before follows it again
    names       the giver and the receiver are different people

Random numbers come from Python's generator, one by one, so a seed gives the same text anywhere.
"""

import re
from collections.abc import Callable, Container, Sequence
from functools import partial
from random import Random
from typing import Any

from attn_only_lens.tasks import _agreement, _brackets, _ioi, words

TOKEN = r""" ?[A-Za-z]+(?:'[a-z]+)?| ?["(\[]|[^\sA-Za-z]"""
"""A word or a mark. Words and opening marks include the space before them."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = (*words.WOMEN, *words.MEN)
ALIVE = (*words.PEOPLE, *_words("dog cat bird horse cow duck king queen sister girl boy sailor"))
THINGS = (*words.THINGS, *_words("cup plate hat coat shoe stone flower hill field train apple"))
THINGS = (*THINGS, *_words("cake egg coin clock drum flag gate hammer island kettle ladder mirror"))
PREPOSITIONS = _agreement._PREPOSITIONS
LOOKS = _brackets._ADJECTIVES
FEELINGS = _words("happy tired quiet tall young hungry sad proud busy brave")
# third person, plural and infinitive, past
TRANSITIVE = (
    ("likes", "like", "liked"),
    ("sees", "see", "saw"),
    ("knows", "know", "knew"),
    ("wants", "want", "wanted"),
    ("needs", "need", "needed"),
    ("finds", "find", "found"),
    ("helps", "help", "helped"),
    ("meets", "meet", "met"),
    ("draws", "draw", "drew"),
    ("takes", "take", "took"),
    ("loses", "lose", "lost"),
    ("buys", "buy", "bought"),
)
RELATIVE = TRANSITIVE[:4]
INTRANSITIVE = (
    ("sleeps", "sleep", "slept"),
    ("runs", "run", "ran"),
    ("sings", "sing", "sang"),
    ("waits", "wait", "waited"),
    ("laughs", "laugh", "laughed"),
    ("works", "work", "worked"),
    ("jumps", "jump", "jumped"),
    ("swims", "swim", "swam"),
)
STATES = (("looks", "look"), ("seems", "seem"), ("stays", "stay"))
WHEN = ("today", "now", "every day", "in the morning", "at night")
PRONOUNS = (
    ("She", "she", "her", "her", "herself"),
    ("He", "he", "his", "him", "himself"),
    ("They", "they", "their", "them", "themselves"),
)
"""For women, men and groups: sentence start, subject, possessive, object, reflexive."""


class Grammar:
    """A writer of texts.

    Args:
        seed: the seed of the random numbers.
        never: beginnings of sentences that are never written, so that they can be prompts.
        lists: the share of texts that are lists.
    """

    def __init__(self, seed: int, never: Container[str] = (), lists: float = 0.4) -> None:
        self.random = Random(seed)
        self.never = never
        self.lists = lists

    def text(self) -> str:
        """Write a text."""
        if self.maybe(self.lists):
            return self.list_of_words()
        if self.maybe(0.3):
            return " ".join([self.checked(self.scene), *self.story(self.random.randrange(3))])
        return " ".join(self.story(2 + self.random.randrange(4)))

    def checked(self, write: Callable[[], str]) -> str:
        """Write a sentence that begins with none of the excluded beginnings."""
        while True:
            sentence = write()
            parts = [match.end() for match in re.finditer(TOKEN, sentence)]
            if not any(sentence[:end] in self.never for end in parts):
                return sentence

    def one(self, options: Sequence[Any]) -> Any:
        """Choose one of the options."""
        return options[self.random.randrange(len(options))]

    def maybe(self, chance: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < chance

    def story(self, n: int) -> list[str]:
        """Write n sentences, some of them about one person."""
        sentences = list[str]()
        about = None
        for _ in range(n):
            kind = self.random.random()
            if about is not None and kind < 0.4:
                forms = PRONOUNS[about]
                sentences.append(self.checked(partial(self.of_person, forms[0], forms)))
            elif kind < 0.6:
                sentences.append(self.checked(self.of_something))
                about = None
            elif kind < 0.7:
                sentences.append(self.checked(self.question_of_a_friend))
                about = None
            else:
                woman = self.maybe(0.5)
                name, forms = self.one(words.WOMEN if woman else words.MEN), PRONOUNS[not woman]
                sentences.append(
                    self.checked(lambda name=name, forms=forms: self.of_person(name, forms))
                )
                about = int(not woman)
        return sentences

    def noun(self, plural: bool, among: Sequence[str] = (*THINGS, *ALIVE)) -> str:
        """Choose a singular or plural noun."""
        return self.one(among) + "s" * plural

    def new(self, among: Sequence[str]) -> str:
        """Write an adjective and a noun with "a" or "an", for something new."""
        look = self.one(LOOKS)
        return f"a{'n' * (look == 'old')} {look} {self.one(among)}"

    def object(self) -> str:
        """Write the object of a verb."""
        if self.maybe(0.3):
            return self.new((*THINGS, *words.OBJECTS))
        if self.maybe(0.2):
            return self.one(NAMES)
        return f"the {self.noun(self.maybe(0.5))}"

    def phrase(self) -> str:
        """Write a prepositional phrase."""
        return f"{self.one(PREPOSITIONS)} the {self.noun(self.maybe(0.5))}"

    def clause(self, plural: bool) -> str:
        """Write a relative clause about a subject."""
        forms = self.one(RELATIVE)
        if self.maybe(0.2):
            return f"that {forms[plural]} {self.object()}"
        if self.maybe(0.15):
            return f"that {self.one(NAMES)} {forms[0]}"
        others = self.maybe(0.5)
        return f"that the {self.noun(others, words.PEOPLE)} {forms[others]}"

    def brackets(self, plural: bool, depth: int = 0) -> str:
        """Write a remark in brackets or quotation marks."""
        opens, closes = self.one(_brackets.MARKS)
        inside = f"the {self.one(LOOKS)} one{'s' * plural}"
        if depth == 0 and self.maybe(0.35):
            inside += self.brackets(plural, 1)
        if self.maybe(0.6):
            inside += f" {self.phrase()}"
        return f"{opens}{inside}{closes}"

    def subject(self, plural: bool) -> tuple[str, bool]:
        """Write a subject with everything before its verb, and return whether it is alive."""
        noun = self.one((*THINGS, *ALIVE))
        text = noun + "s" * plural
        kind = self.random.random()
        if kind < 0.32:
            text += f" {self.phrase()}"
            if self.maybe(0.1):
                text += f" {self.phrase()}"
        elif kind < 0.57:
            text += f" {self.clause(plural)}"
        elif kind < 0.77:
            text += self.brackets(plural)
        elif kind < 0.85:
            text = f"{self.one(LOOKS)} {text}"
        return f"The {text}", noun in ALIVE

    def of_something(self) -> str:
        """Write a sentence about something, perhaps with a question tag."""
        plural = self.maybe(0.5)
        subject, alive = self.subject(plural)
        return subject + self.predicate(plural, alive, tags=True)

    def predicate(self, plural: bool, alive: bool, tags: bool = False) -> str:
        """Write a verb and the rest of the sentence, with its punctuation."""
        kind = self.random.random()
        quality = self.one((*FEELINGS, *words.ADJECTIVES) if alive else LOOKS)
        if self.maybe(0.3):
            quality = f"{self.one((*words.DEGREES, 'not'))} {quality}"
        if kind < 0.5:
            verb = ("is", "are") if kind < 0.3 else ("was", "were")
            end = self.one((quality, quality, self.phrase(), "here"))
            if tags and self.maybe(0.25):
                tag = f"{verb[plural]}n't {'they' if plural else 'it'}?"
                return f" {verb[plural]} {end}, {tag}"
            return f" {verb[plural]} {end}{self.end()}"
        if kind < 0.7:
            end = self.one((f"been {quality}", self.new(THINGS)))
            return f" {('has', 'have')[plural]} {end}{self.end()}"
        if kind < 0.8:
            verb = self.one(TRANSITIVE if alive else STATES)[1]
            what = self.object() if alive else quality.removeprefix("not ")
            return f" {('does', 'do')[plural]} not {verb} {what}{self.end()}"
        if not alive:
            return f" {self.one(STATES)[plural]} {quality}{self.end()}"
        if kind < 0.9:
            return f" {self.one(INTRANSITIVE)[plural]}{self.end()}"
        return f" {self.one(TRANSITIVE)[plural]} {self.object()}{self.end()}"

    def end(self) -> str:
        """Write the end of a sentence."""
        return f" {self.one(WHEN)}." if self.maybe(0.15) else "."

    def of_person(self, start: str, forms: tuple[str, ...]) -> str:
        """Write a sentence about a person, starting with a name or a pronoun."""
        _, subject, possessive, object_, reflexive = forms
        kind = self.random.random()
        past = self.one(TRANSITIVE)[2]
        if kind < 0.15:
            return start + self.predicate(False, True)
        if kind < 0.3:
            return f"{start} {past} {possessive} {self.noun(self.maybe(0.3), THINGS)}{self.end()}"
        if kind < 0.5:
            return f"{start} said that {subject}{self.predicate(False, True)}"
        if kind < 0.54:
            return f"{start} {past} {self.object()} because {subject}{self.predicate(False, True)}"
        if kind < 0.62:
            return f"{start} {past} {reflexive} {self.phrase()}."
        if kind < 0.7:
            verb = self.one(INTRANSITIVE)[2]
            return f"{start} {verb} {self.phrase()} with {possessive} {self.one(words.FRIENDS)}."
        if kind < 0.78:
            place, thing = self.one(words.PLACES), self.one(words.OBJECTS)
            return f"{start} went to the {place} and got a {thing}{self.end()}"
        if kind < 0.85:
            wants = self.one(TRANSITIVE)[2]
            return f"{start} {wants} the {self.noun(False, words.PEOPLE)} that helped {object_}."
        quoted = self.of_something()
        return f'{start} said "{quoted[:-1]}"{quoted[-1]}'

    def question_of_a_friend(self) -> str:
        """Write a question that ends in a pronoun with a name's gender."""
        woman = self.maybe(0.5)
        text = _agreement._GENDER
        filled = {
            "subject": self.one(words.WOMEN if woman else words.MEN),
            "degree": self.one(words.DEGREES),
            "adjective": self.one(words.ADJECTIVES),
            "noun": self.one(words.FRIENDS),
        }
        return text.format(**filled) + (" she?" if woman else " he?")

    def scene(self) -> str:
        """Write a scene in which one of two people gives something to the other."""
        template = self.one(_ioi._TEMPLATES).replace("{names}", self.one(_ioi._FIRST))
        to, subject = self.one(NAMES), self.one(NAMES)
        while subject == to:
            subject = self.one(NAMES)
        filled = {"IO": to, "S1": subject, "S2": subject}
        filled |= {"place": self.one(words.PLACES), "object": self.one(words.OBJECTS)}
        text = f"{template.format(**filled)} {to}."
        if self.maybe(0.5):
            first, second = (to, subject) if self.maybe(0.5) else (subject, to)
            text += f" {first} {self.one(TRANSITIVE)[2]} {second}{self.end()}"
        return text

    def taken(self, left: list[str], n: int) -> list[str]:
        """Remove n random words from a list, and return them."""
        return [left.pop(self.random.randrange(len(left))) for _ in range(n)]

    def list_of_words(self) -> str:
        """Write a list of random words in which parts are repeated."""
        left, written = list(LISTED if self.maybe(0.6) else NAMES), list[str]()
        new = self.taken(left, 2 + self.random.randrange(self.one((4, 8, 17))))
        written += new
        for _ in range(1 + self.random.randrange(4)):
            start = self.random.randrange(len(new) - 1)
            written += new[start : start + 2 + self.random.randrange(len(new) - 1)]
            written += self.taken(left, 1 + self.random.randrange(2))
        return "".join(f" {word}" for word in written)


def _inner_words() -> set[str]:
    """Return every word that can follow a space."""
    singular = {*THINGS, *ALIVE}
    texts = [*NAMES, *singular, *(f"{noun}s" for noun in singular), *words.PLACES, *words.OBJECTS]
    texts += [*PREPOSITIONS, *LOOKS, *FEELINGS, *WHEN, *words.DEGREES, *words.ADJECTIVES]
    texts += [
        *words.FRIENDS,
        *(form for verb in (*TRANSITIVE, *INTRANSITIVE, *STATES) for form in verb),
    ]
    texts += [form for forms in PRONOUNS for form in forms[1:]]
    texts += _words("is are was were has have does do not been a an the that one ones here said it")
    texts += _words("isn't aren't wasn't weren't because with went to and got helped")
    for template in (*_ioi._TEMPLATES, _agreement._GENDER):
        texts += re.findall(r"(?<= )[A-Za-z']+", re.sub(r"\{\w+\}", "-", template))
    return {word for text in texts for word in text.split()}


def _first_words() -> set[str]:
    """Return every word that can start a text, or follow an opening mark."""
    starts = {template.split()[0].strip(",") for template in _ioi._TEMPLATES}
    return starts | {*NAMES, "So", "The", "the", *(forms[0] for forms in PRONOUNS)}


LISTED = sorted(word for word in _inner_words() if word.isalpha())
"""The words in lists."""


def tokens() -> list[str]:
    """Return every token that texts consist of, in alphabetical order."""
    later = {f" {word}" for word in _inner_words() | _first_words() - {"the"}}
    opening = {mark[0] for mark in _brackets.MARKS}
    closing = {mark[1] for mark in _brackets.MARKS}
    return sorted(later | _first_words() | opening | closing | {".", ",", "?"})
