"""Tests of task prompts: their texts, the positions of roles, and the pairs that are left out."""

import json
import random
from collections import Counter
from functools import partial

import pytest
import torch
from task_tokenizer import task_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import GPT2TokenizerFast

from attn_only_lens import tasks
from attn_only_lens.errors import InputError

N = 23


@pytest.fixture(scope="module", params=["words", "gpt2"])
def tokenizer(request):
    if request.param == "words":
        return task_tokenizer()
    folder = request.getfixturevalue("shared_models_dir") / "gpt2_tokenizer"
    return GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))


def contents(made):
    sides = made.clean, made.corrupted, made.answers, made.wrong
    return *sides, made.roles, made.metric.name, made.name, made.dropped


def rows(tokenizer, made):
    """Yield each pair's tokens, the texts of its roles on both sides, and those of its answers."""
    for i, (clean, corrupted) in enumerate(zip(made.clean, made.corrupted, strict=True)):
        ids = [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (clean, corrupted)
        ]
        assert len(ids[0]) == len(ids[1])
        roles = [
            {role: tokenizer.decode(side[places[i]]) for role, places in made.roles.items()}
            for side in ids
        ]
        answers = [
            [tokenizer.decode(token) for token in side[i]] for side in (made.answers, made.wrong)
        ]
        yield ids, roles, answers


def check_ioi(row, swapped):
    (clean, corrupted), (here, there), ((right,), (wrong,)) = row
    counts = Counter(clean)
    assert here["S1"] == here["S2"] == wrong != right == here["IO"]
    if swapped:
        assert (there["IO"], there["S1"], there["S2"]) == (right, wrong, right)
    else:
        assert len({right, wrong, there["IO"], there["S1"], there["S2"]}) == 5
    changed = sum(first != second for first, second in zip(clean, corrupted, strict=True))
    assert changed == (1 if swapped else 3)
    assert counts.most_common()[0][1] >= 2


def check_greater(row):
    _, (here, there), (right, wrong) = row
    year = int(here["year"])
    assert [int(year_token) for year_token in right] == list(range(year + 1, 100))
    assert [int(year_token) for year_token in wrong] == list(range(year + 1))
    assert int(there["year"]) == 1
    assert here["century"] == there["century"] == here["end"]


def check_agreement(row, forms):
    (clean, corrupted), (here, there), ((right,), (wrong,)) = row
    assert sum(first != second for first, second in zip(clean, corrupted, strict=True)) == 1
    which = [words_of["subject"] != words_of["subject"].rstrip("s") for words_of in (here, there)]
    if forms is not None:
        assert which[0] != which[1]
        assert (right in forms, wrong in forms) == tuple(which)
    pairs = ((" he", " she"), (" is", " are"), (" was", " were"), (" has", " have"))
    assert {right, wrong} in map(set, pairs)


def check_induction(row):
    (clean, corrupted), (here, there), ((right,), (wrong,)) = row
    assert len(clean) == 11
    assert here["first"] == here["end"] == there["end"]
    assert (here["repeated"], there["repeated"]) == (right, wrong)
    assert sum(first != second for first, second in zip(clean, corrupted, strict=True)) == 1
    assert len(set(clean)) == 10


def check_brackets(row, nested):
    (clean, corrupted), (here, there), ((right,), (wrong,)) = row
    closing = {" (": ")", " [": "]", ' "': '"'}
    assert (closing[here["open"]], closing[there["open"]]) == (right, wrong)
    assert sum(first != second for first, second in zip(clean, corrupted, strict=True)) == 1
    assert ("closed" in here) == nested
    assert not nested or here["closed"] == there["closed"] == wrong


PLURAL = {" are", " were", " have"}


@pytest.mark.parametrize(
    ("make", "options", "check"),
    [
        (tasks.ioi, {}, partial(check_ioi, swapped=False)),
        (tasks.ioi, {"corruption": "swap"}, partial(check_ioi, swapped=True)),
        (tasks.greater_than, {}, check_greater),
        (tasks.agreement, {}, partial(check_agreement, forms=PLURAL)),
        (tasks.agreement, {"structure": "simple"}, partial(check_agreement, forms=PLURAL)),
        (tasks.agreement, {"structure": "relative"}, partial(check_agreement, forms=PLURAL)),
        (tasks.agreement, {"feature": "gender"}, partial(check_agreement, forms=None)),
        (tasks.brackets, {}, partial(check_brackets, nested=False)),
        (tasks.brackets, {"structure": "nested"}, partial(check_brackets, nested=True)),
        (tasks.induction, {"length": 11}, check_induction),
    ],
)
def test_what_prompts_say_and_where(make, options, check, tokenizer):
    state = random.getstate(), torch.get_rng_state().tolist()
    made = make(tokenizer, N, seed=5, **options)
    assert (random.getstate(), torch.get_rng_state().tolist()) == state
    assert len(made) == len(set(made.clean)) == N
    assert contents(made) == contents(make(tokenizer, N, seed=5, **options))
    assert made.clean != make(tokenizer, N, seed=6, **options).clean
    for row in rows(tokenizer, made):
        check(row)
    assert made.metric.name.startswith("probab" if check is check_greater else "logit_diff")


def test_pairs_that_do_not_fit_are_dropped_and_counted():
    without = {" Mary", "Mary", " store", " decided"}
    made = tasks.ioi(task_tokenizer(without), 211)
    assert not any(word.strip() in text.split() for text in made.clean for word in without)
    assert made.dropped.keys() == {"the tokenizer does not know a word"}
    assert 20 < sum(made.dropped.values()) < 400
    assert not tasks.ioi(task_tokenizer(), 211).dropped
    with pytest.raises(InputError) as caught:
        tasks.agreement(task_tokenizer({" are"}), 91, structure="simple")
    assert "got n=91, but only 90 different pairs can be used" in str(caught.value)
    assert "were dropped: an answer is not one token after the prompt" in str(caught.value)


def test_templates_of_ones_own():
    words = [
        {"thing": "keys", "answer": " are"},
        {"thing": "cars", "answer": " are"},
        {"thing": "key", "answer": " is"},
        {"thing": "garden door", "answer": " is"},  # two tokens
        {"thing": "door", "answer": " is good"},
    ]
    templates = ["The {thing} in the bag", "The bag near the {thing}"]
    made = tasks.from_templates(task_tokenizer(), 6, templates, words)
    expected = {
        (template.format(thing=first), template.format(thing=second))
        for template in templates
        for first, second in [("key", "keys"), ("key", "cars"), ("keys", "key"), ("cars", "key")]
    }
    assert set(zip(made.clean, made.corrupted, strict=True)) <= expected
    assert set(made.roles["thing"]) == {-4, -1}
    assert set(made.dropped) == {
        "the two prompts have different numbers of tokens",
        "an answer is not one token after the prompt",
    }


@pytest.mark.parametrize(
    ("templates", "reason"),
    [
        ("The key", "expected a text with fields"),
        (["A {thing}", "A {answer}"], "got template 'A {answer}'"),
        ("A {thing} {place}", "expected a dict with a text for place"),
        ("A {} {thing}", "got template 'A {} {thing}'"),
        ([], "got no templates"),
    ],
)
def test_templates_that_make_no_pairs(templates, reason):
    words = [{"thing": "key", "answer": " is"}, {"thing": "keys", "answer": " are"}]
    with pytest.raises(InputError, match=reason):
        tasks.from_templates(task_tokenizer(), 2, templates, words)


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def row_of(first, second, answer=" are", wrong=" is"):
    prompts = f"The {first} near the car", f"The {second} near the car"
    return dict(zip(tasks._custom.KEYS, (*prompts, answer, wrong), strict=True))


def test_pairs_of_a_file(tmp_path):
    """Every fitting line gives one pair, in an order set by the seed, with roles by word index."""
    fitting = [row_of("keys", "key"), row_of("key", "keys", " is", " are"), row_of("cars", "door")]
    longer = row_of("garden door", "key", " is", " are")
    path = write_rows(tmp_path / "agreement.jsonl", [*fitting, longer, fitting[0]])
    made = [
        tasks.from_jsonl(task_tokenizer(), 3, path, seed, roles={"subject": 1}) for seed in range(9)
    ]
    for pairs in made:
        assert set(pairs.clean) == {row["clean_prefix"] for row in fitting}
        assert pairs.roles["subject"] == (-4,) * 3
        assert pairs.roles["end"] == (-1,) * 3
        for clean, corrupted in zip(pairs.clean, pairs.corrupted, strict=True):
            (row,) = [row for row in fitting if row["clean_prefix"] == clean]
            assert row["patch_prefix"] == corrupted
    assert len({pairs.clean for pairs in made}) > 1
    assert made[0].name == "agreement"
    some = tasks.from_jsonl(
        task_tokenizer(), 1, path, keep=lambda row: "cars" in row["clean_prefix"]
    )
    assert some.clean == ("The cars near the car",)


def test_an_answer_that_is_also_wrong_is_dropped(tmp_path):
    """Such a pair would count nothing in the metric, and still be a prompt of the mean."""
    rows = [row_of("keys", "key"), row_of("key", "car", " is", " is")]
    made = tasks.from_jsonl(task_tokenizer(), 1, write_rows(tmp_path / "rows.jsonl", rows))
    assert made.clean == ("The keys near the car",)
    with pytest.raises(InputError, match="an answer is both right and wrong"):
        tasks.from_jsonl(task_tokenizer(), 2, tmp_path / "rows.jsonl")


def test_files_that_make_no_pairs(tmp_path):
    def refused(match, rows=(), **settings):
        path = write_rows(tmp_path / "bad.jsonl", rows)
        with pytest.raises(InputError, match=match):
            tasks.from_jsonl(task_tokenizer(), 1, path, **settings)

    lacking = {key: "The key" for key in tasks._custom.KEYS[:3]}
    refused(r"(?s)line 1: expected a JSON object.*line 2: expected .* patch_answer", [[7], lacking])
    refused("has 5 words; expected more words", [row_of("a", "b")], roles={"subject": 5})
    refused("n=1, but only 0 different", [row_of("garden door", "key")])
    (tmp_path / "text.jsonl").write_text("The key", encoding="utf-8")
    for name, match in {"text.jsonl": "not JSON", "none.jsonl": "No such file"}.items():
        with pytest.raises(InputError, match=match):
            tasks.from_jsonl(task_tokenizer(), 1, tmp_path / name)


def test_what_makes_no_prompts():
    known, ends = task_tokenizer(), task_tokenizer()
    ends.backend_tokenizer.post_processor = TemplateProcessing("$0 <pad>", None, [("<pad>", 1)])
    for call, reason in {
        lambda: tasks.ioi(ends, 3): "special tokens after a text",
        lambda: tasks.greater_than(ends, 3): "special tokens after a text",
        lambda: tasks.agreement(known, 3, feature="gender", structure="simple"): "leave it out",
        lambda: tasks.induction(known, 3, length=4000): "4001 for 4000-token prompts",
    }.items():
        with pytest.raises(InputError, match=reason):
            call()
