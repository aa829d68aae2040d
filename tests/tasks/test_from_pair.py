"""Tests of pairs that are made from one pair, and of the pairs that a model solves."""

import numpy as np
import pytest
import torch

from attn_only_lens import Contrast, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

KEYS = Contrast(
    "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
)
NOUNS = ("keys", "key"), [("letters", "letter"), ("boats", "boat"), ("key", "keys")]
PLACES = "cabinet", ["table", "door", "keys"]


@pytest.fixture(scope="module")
def model():
    return load("small-english")


def prefers(model, clean, corrupted, right, wrong):
    """Run a pair alone, without the package, and compare the two answers on both prompts."""
    ids = [model.tokenizer(answer)["input_ids"][-1] for answer in (right, wrong)]
    ends = [model(text, return_type="logits")[0, -1] for text in (clean, corrupted)]
    return ends[0][ids[0]] > ends[0][ids[1]] and ends[1][ids[0]] < ends[1][ids[1]]


@torch.no_grad()
def test_words_are_swapped_in_both_prompts_and_the_model_solves_all_pairs(model):
    made = tasks.from_pair(model, 9, KEYS, dict([NOUNS, PLACES]))
    nouns = {"keys": "key", "letters": "letter", "boats": "boat"}
    expected = {  # "key" in place of "keys" is a pair that the model does not solve
        (f"The {plural} near the {place}", f"The {noun} near the {place}")
        for plural, noun in nouns.items()
        for place in ("cabinet", "table", "door", "keys")
        if prefers(
            model, f"The {plural} near the {place}", f"The {noun} near the {place}", " are", " is"
        )
    }
    pairs = set(zip(made.clean, made.corrupted, strict=True))
    assert len(pairs) == 9
    assert pairs <= expected
    assert made.dropped.keys() <= {"the model does not prefer the right answer on both prompts"}
    for i, text in enumerate(made.clean):
        row = model.tokenizer(text)["input_ids"]
        assert model.tokenizer.decode(row[made.roles["keys"][i]]).strip() == text.split()[1]
        assert model.tokenizer.decode(row[made.roles["cabinet"][i]]).strip() == text.split()[-1]
    assert made.clean == tasks.from_pair(model, 9, KEYS, dict([NOUNS, PLACES])).clean
    assert made.clean != tasks.from_pair(model, 9, KEYS, dict([NOUNS, PLACES]), seed=1).clean


def test_answers_are_swapped_with_the_words(model):
    words = {("keys", "key", " are", " is"): [("boats", "boat", " were", " was")]}
    made = tasks.from_pair(model, 2, KEYS, words)
    answers = {
        text.split()[1]: [model.tokenizer.decode(rows[i]) for rows in (made.answers, made.wrong)]
        for i, text in enumerate(made.clean)
    }
    assert answers == {"keys": [" are", " is"], "boats": [" were", " was"]}


def test_a_role_is_at_the_first_place_of_its_first_words(model):
    """Other words of the tuple, and later places of the same word, have no influence."""
    far = Contrast(
        "The artists that the customer knows", "The artist that the customer knows", KEYS.metric
    )
    words = {("artists", "artist", "customer"): [("teachers", "teacher", "driver")]}
    for text, places in (
        (far, {("artists", "artist", "customer"): words.popitem()[1]}),
        (KEYS, {("keys", "key"): [("boats", "boat")], "cabinet": ["boats", "keys"]}),
    ):
        made = tasks.from_pair(model, 2, text, places)
        role = next(iter(made.roles))
        for i, clean in enumerate(made.clean):
            row = model.tokenizer(clean)["input_ids"]
            assert model.tokenizer.decode(row[made.roles[role][i]]).strip() == clean.split()[1]


def test_pairs_that_cannot_be_made(model):
    nouns = dict([NOUNS])
    for n, pair, words, reason in (
        (99, KEYS, nouns, "(?s)got n=99, but only 3 different pairs.*1 were dropped: the"),
        (3, tasks.agreement(model.tokenizer, 3), nouns, "expected one pair"),
        (3, KEYS, {"cat": ["dog"], "near": []}, r"(?s)'cat', which is in none.*got 'near': \[\]"),
        (3, KEYS, {("keys", "key"): ["boats"]}, "a list of tuples with as many words"),
        (3, KEYS, {"key": ["boat"], ("keys", "key"): [("a", "b")]}, "got 'key' twice"),
        (3, KEYS, {("key", "key"): [("a", "b")]}, "expected every word once"),
    ):
        with pytest.raises(InputError, match=reason):
            tasks.from_pair(model, n, pair, words)


@torch.no_grad()
def test_the_pairs_that_a_model_solves(model):
    made = tasks.agreement(model.tokenizer, 23, seed=3)
    swapped = Contrast(  # the model prefers the wrong answer on every third pair
        [made.corrupted[i] if i % 3 == 0 else text for i, text in enumerate(made.clean)],
        [made.clean[i] if i % 3 == 0 else text for i, text in enumerate(made.corrupted)],
        made.metric,
        roles=made.roles,
    )
    left = swapped.solved_by(model)
    texts = [
        (
            clean,
            corrupted,
            *(model.tokenizer.decode(rows[i]) for rows in (made.answers, made.wrong)),
        )
        for i, (clean, corrupted) in enumerate(zip(swapped.clean, swapped.corrupted, strict=True))
    ]
    expected = [pair for pair in texts if prefers(model, *pair)]
    assert 0 < len(expected) < 23
    assert list(zip(left.clean, left.corrupted, strict=True)) == [pair[:2] for pair in expected]
    assert list(left.dropped.values()) == [23 - len(expected)]
    for i, text in enumerate(left.clean):
        assert left.roles["subject"][i] == made.roles["subject"][swapped.clean.index(text)]
    with pytest.raises(InputError, match="got 8 pairs, and the model does not prefer"):
        swapped[::3].solved_by(model)


def test_a_pair_is_solved_only_if_both_answers_are_right(model):
    """After "The keys" and "The boys", the model prefers "are": one answer of the pair is wrong."""
    corrupted, metric = ["The key", "The boys"], p.logit_diff([" are"] * 2, [" is"] * 2)
    assert Contrast(["The keys"] * 2, corrupted, metric).solved_by(model).corrupted == ("The key",)


def test_some_pairs_of_a_contrast(model):
    made = tasks.agreement(model.tokenizer, 7, seed=3)
    for chosen, numbers in ((slice(None, None, -3), [6, 3, 0]), ([5, -6], [5, 1])):
        some = made[chosen]
        assert some.clean == tuple(made.clean[i] for i in numbers)
        assert some.corrupted == tuple(made.corrupted[i] for i in numbers)
        assert some.roles["subject"] == tuple(made.roles["subject"][i] for i in numbers)
        assert some.answers == tuple(made.answers[i] for i in numbers)
        assert some.metric.name == made.metric.name
    rows = torch.arange(15).reshape(5, 3)
    mask = torch.ones(5, 3)
    tokens = Contrast(rows, rows + 1, p.logit_diff(1, 2), mask=mask, roles={"end": -1})[1:3]
    assert torch.equal(tokens.clean, rows[1:3])
    assert torch.equal(tokens.mask, mask[1:3])
    assert tokens.roles == {"end": -1}
    assert tokens.metric.name == "logit_diff(1, 2)"
    with pytest.raises(InputError, match="got 3 answers for 5 pairs; expected 1, or as many"):
        Contrast(rows, rows + 1, p.logit_diff([1, 2, 3], 4))[:2]
    for wrong in (slice(0, 0), [7], np.arange(7) > 3):
        with pytest.raises(InputError, match="this is no contrast"):
            made[wrong]
    with pytest.raises(InputError, match="got <lambda>, your own function; expected logit_diff"):
        Contrast(rows, rows + 1, lambda logits: logits[:, -1, 0])[:2]
