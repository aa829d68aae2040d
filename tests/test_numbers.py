"""Tests that the numbers in the README, the guide and the paper are those of stored results.

Sentences about examples are compared with `docs/pictures/measured.json`. Every number in a
paragraph that names a page of results, in a link or in text, must stand in this page or in its
tables, perhaps with more digits or as a share in place of a percentage.
"""

import json
import re
from pathlib import Path

import measured
import pytest

pytestmark = pytest.mark.numeric

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "analyses" / "results"
GENERATED = {"support.md", "growth_families.md", "conformance.md", "studies.md"}  # by other scripts
PAGES = [
    ROOT / "README.md",
    ROOT / "paper" / "paper.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
]
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?:e[+-]?\d+)?(?![\w])")
CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
# Code, targets of links, names with digits, and years of papers are not results.
NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|\b20\d\d\b|\bversion \d[\d.]*|nnsight [\d.]+")


def stored():
    return json.loads(measured.STORED.read_text("utf-8"))


@pytest.mark.parametrize(("page", "sentence"), list(measured.sentences(stored())))
def test_sentences_about_examples_have_the_measured_numbers(page, sentence):
    text = (ROOT / page).read_text("utf-8")
    assert measured.update(text, sentence) == text, f"run `make pictures`, for {sentence!r}"


def test_a_stale_number_is_found_and_replaced():
    text = "Here, 29 sites keep\n94 % of it; L0N870 and SmolLM2-135M keep −.5."
    sentence = "44 sites keep 96 % of it; L0N870 and SmolLM2-135M keep −.17"
    new = "Here, 44 sites keep\n96 % of it; L0N870 and SmolLM2-135M keep −.17."
    assert measured.update(text, sentence) == new
    assert measured.update(new, sentence) == new
    for other in (text + text, "29 sites keep nothing"):
        with pytest.raises(ValueError, match="places in the page"):
            measured.update(other, sentence)


@pytest.mark.usefixtures("working_cache")  # without it, the budget pays for other patches
def test_the_small_model_still_gives_the_stored_numbers():
    """The README shows shares with two digits; sizes may differ by a site on another machine."""
    for name, now in measured.of_small_english().items():
        old = stored()[name]
        assert now["n_sites"] == old["n_sites"]
        assert abs(now["n"] - old["n"]) <= 1
        shares = ([x["kept"], x["others"], *x["elsewhere"]] for x in (now, old))
        assert list(next(shares)) == pytest.approx(next(shares), abs=0.01)


def linked(text):
    """Yield the results pages and the text of each paragraph that names one, with its table."""
    paragraphs = re.split(r"\n\s*\n", CODE.sub("", text))
    for i, paragraph in enumerate(paragraphs):
        if names := set(re.findall(r"analyses/results/(\w+)\.md", paragraph)):
            table = next((t for t in paragraphs[i + 1 : i + 2] if t.startswith("|")), "")
            yield names, paragraph + "\n" + table


def digits_and_value(number):
    digits = len(number.partition(".")[2]) if "e" not in number else 0
    return digits, float(number.replace(",", ""))


def values_in_results(names):
    for name in names:
        for path in (RESULTS / f"{name}.md", *RESULTS.glob(f"{name}*.csv")):
            text = re.sub(r"(?<=\d)[,\s](?=\d{3}\b)", "", path.read_text("utf-8"))
            yield from (float(number) for number in re.findall(r"\d*\.?\d+(?:e[+-]?\d+)?", text))


def missing_numbers(text):
    """Return the numbers of linked paragraphs that their pages of results do not contain."""
    missing = []
    for names, paragraph in linked(text):
        values = list(values_in_results(names))
        for number in NUMBER.findall(NAMES.sub(" ", paragraph)):
            digits, wanted = digits_and_value(number)
            half = 0.5 * 10**-digits * (1 + 1e-9)
            if not any(abs(x - wanted) <= half or abs(100 * x - wanted) <= half for x in values):
                missing.append((number, names))
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_numbers_of_studies_stand_in_their_pages_of_results(page):
    assert missing_numbers(page.read_text("utf-8")) == []


def test_a_number_that_no_study_has_is_found():
    text = "We [measured](analyses/results/bench_atlas.md) 98765.4 of them (2023)."
    assert missing_numbers(text) == [("98765.4", {"bench_atlas"})]
