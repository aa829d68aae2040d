"""Tests of the study of a mixture of experts: shares by hand, words, and what is stored."""

import numpy as np
import pandas as pd
import pytest

from analyses import study as frame
from analyses.studies import mixture_of_experts as study
from analyses.tools import small_english_grammar as grammar


def test_shares_by_hand():
    """Four tokens and two experts, which two and one of them visit."""
    visits = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=bool)
    halves = pd.Series(["a", "a", "b", "b"])
    # expert 0: all of 1/4; expert 1: the means 1/2 and 0 have the variance 1/16, of 3/16.
    expected = (1 / 4 + 1 / 16) / (1 / 4 + 3 / 16)
    assert study.explained(visits, halves) == pytest.approx(expected)
    assert study.explained(visits, pd.Series(range(4))) == pytest.approx(1.0)
    assert study.explained(visits, pd.Series(["a"] * 4)) == pytest.approx(0.0)


def test_every_word_has_a_part_of_speech():
    parts = study.parts_of_speech()
    assert set(parts) == set(grammar.tokens())
    words = {"keys": "plural noun", "key": "noun", "are": "auxiliary", "Mary": "name"}
    words |= {"likes": "verb", "near": "preposition", "old": "adjective"}
    assert {word: parts[f" {word}"] for word in words} == words
    assert parts["."] == parts[" ("] == "mark"
    assert parts["The"] == parts[" the"] == "determiner"
    others = sorted(token for token, part in parts.items() if part == "other")
    assert len(others) < 0.15 * len(parts), others


def test_prompts_have_five_words():
    pairs = study.agreement(16)
    assert len(pairs) == 16
    assert {len(text.split()) for text in (*pairs.clean, *pairs.corrupted)} == {5}


def test_stored_shares_and_visits_add_up():
    """Each token visits two experts, and a finer variable explains no less."""
    tables = frame.read("mixture_of_experts")
    visits = tables["visits"].groupby(["model", "seed", "layer"])["visits"].sum()
    assert visits.to_numpy() == pytest.approx(2.0, abs=1e-4)
    shares = tables["specialisation"].set_index(["model", "seed", "layer", "variable"])["share"]
    assert shares.between(0, 1).all()
    by = shares.unstack("variable")
    assert (by["token"] >= by["part of speech"]).all()
    assert (by["token"] >= by["part of speech, shuffled among words"]).all()
    measures = tables["agreement"].query("arm == 'mixture'")
    ways = measures[measures["measure"].str.contains("effects")]
    assert ways.groupby("seed")["value"].sum().to_numpy() == pytest.approx(1.0, abs=1e-4)
