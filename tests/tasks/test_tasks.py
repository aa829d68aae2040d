"""Tests of task prompts: their texts, the positions of roles, and the pairs that are left out."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import bridges
import numpy as np
import pytest
import torch
from common import D_VOCAB
from patched_runs import cached, logit_diff, mask_at, patched_logits
from task_tokenizer import task_tokenizer
from tiny_tokenizer import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2TokenizerFast

from attn_only_lens import patching as p
from attn_only_lens import tasks
from attn_only_lens.errors import InputError
from attn_only_lens.tasks.words import PEOPLE, THINGS

N = 23
SMOLLM2 = Path(__file__).parents[2] / "out" / "smollm2"


@pytest.fixture(scope="module", params=["words", "gpt2", "smollm2"])
def tokenizer(request):
    if request.param == "words":
        return task_tokenizer()
    if request.param == "smollm2":
        if not SMOLLM2.is_dir():
            pytest.skip("no SmolLM2: make smollm2")
        return AutoTokenizer.from_pretrained(SMOLLM2)
    folder = request.getfixturevalue("shared_models_dir") / "gpt2_tokenizer"
    return GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))


MADE = {
    "ioi": lambda tokenizer, **how: tasks.ioi(tokenizer, N, **how),
    "ioi, swapped": lambda tokenizer, **how: tasks.ioi(tokenizer, N, corruption="swap", **how),
    "greater-than": lambda tokenizer, **how: tasks.greater_than(tokenizer, N, **how),
    "number": lambda tokenizer, **how: tasks.agreement(tokenizer, N, **how),
    "simple": lambda tokenizer, **how: tasks.agreement(tokenizer, N, structure="simple", **how),
    "relative": lambda tokenizer, **how: tasks.agreement(tokenizer, N, structure="relative", **how),
    "gender": lambda tokenizer, **how: tasks.agreement(tokenizer, N, feature="gender", **how),
    "brackets": lambda tokenizer, **how: tasks.brackets(tokenizer, N, **how),
    "nested": lambda tokenizer, **how: tasks.brackets(tokenizer, N, structure="nested", **how),
    "induction": lambda tokenizer, **how: tasks.induction(tokenizer, N, length=11, **how),
}


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
    assert {right, wrong} in [
        {" he", " she"},
        {" is", " are"},
        {" was", " were"},
        {" has", " have"},
    ]


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
CHECKS = {
    "ioi": lambda row: check_ioi(row, swapped=False),
    "ioi, swapped": lambda row: check_ioi(row, swapped=True),
    "greater-than": check_greater,
    "number": lambda row: check_agreement(row, PLURAL),
    "simple": lambda row: check_agreement(row, PLURAL),
    "relative": lambda row: check_agreement(row, PLURAL),
    "gender": lambda row: check_agreement(row, None),
    "brackets": lambda row: check_brackets(row, nested=False),
    "nested": lambda row: check_brackets(row, nested=True),
    "induction": check_induction,
}


@pytest.mark.parametrize("task", MADE)
def test_what_prompts_say_and_where(task, tokenizer):
    if task == "greater-than" and len(tokenizer) == 49152:
        with pytest.raises(InputError, match="no token for 00 at the end of a year"):
            MADE[task](tokenizer)
        return
    state = random.getstate(), torch.get_rng_state().tolist()
    made = MADE[task](tokenizer, seed=5)
    assert (random.getstate(), torch.get_rng_state().tolist()) == state
    assert len(made) == len(set(made.clean)) == N
    assert contents(made) == contents(MADE[task](tokenizer, seed=5))
    assert made.clean != MADE[task](tokenizer, seed=6).clean
    for row in rows(tokenizer, made):
        CHECKS[task](row)
    assert made.metric.name.startswith("probab" if task == "greater-than" else "logit_diff")
    assert f"{N} pairs" in repr(made)


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


def test_roles_that_move_are_dropped():
    words = [
        {"one": "key", "other": "garden door", "answer": " is"},
        {"one": "garden door", "other": "key", "answer": " are"},  # the same total number of tokens
    ]
    with pytest.raises(InputError, match="2 were dropped: a role has different positions"):
        tasks.from_templates(task_tokenizer(), 1, "The {one} near the {other}", words)


REFUSED = {
    "no fields": ("The key", {}, "expected a text with fields"),
    "other fields": (["A {thing}", "A {place}"], {"place": "bag"}, "got template 'A {place}'"),
    "end": ("A {end}", {"end": "bag"}, "got field {end}; expected another name"),
    "no word": ("A {thing} {place}", {}, "expected a dict with a text for place"),
    "each": ("A {all}", {"all": "bag"}, "got field {all}; expected another name"),
    "roles": ("A {roles}", {"roles": "bag"}, "got field {roles}; expected another name"),
    "no name": ("A {} {thing}", {}, "got template 'A {} {thing}'"),
    "half a brace": ("A {thing", {}, "got template 'A {thing'"),
    "a format": ("A {thing:>9}", {}, "got template 'A {thing:>9}'"),
    "no text": ([7], {}, "got template 7"),
    "no list": (None, {}, "got None; expected templates"),
    "none": ([], {}, "got no templates"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_templates_that_make_no_pairs(case):
    templates, more, reason = REFUSED[case]
    words = [{"thing": "key", "answer": " is"} | more, {"thing": "keys", "answer": " are"} | more]
    with pytest.raises(InputError) as caught:
        tasks.from_templates(task_tokenizer(), 2, templates, words)
    assert reason in str(caught.value)


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


def test_texts_of_json_may_hold_separators_of_lines(tmp_path):
    line = json.dumps(row_of("keys", "key") | {"note": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text("\ufeff" + line, encoding="utf-8")
    assert len(tasks.from_jsonl(task_tokenizer(), 1, tmp_path / "pairs.jsonl")) == 1


def test_files_that_make_no_pairs(tmp_path):
    def refused(match, rows=(), **settings):
        path = write_rows(tmp_path / "bad.jsonl", rows)
        with pytest.raises(InputError, match=match):
            tasks.from_jsonl(task_tokenizer(), 1, path, **settings)

    lacking = {key: "The key" for key in tasks._custom.KEYS[:3]}
    refused(r"(?s)line 1: expected a JSON object.*line 2: expected .* patch_answer", [[7], lacking])
    refused("and 2 more lines", [7] * 7)
    refused("got keep='cars'; expected a function", [row_of("keys", "key")], keep="cars")
    refused("has 5 words; expected more words", [row_of("a", "b")], roles={"subject": 5})
    refused(r"(?s)role 'end'.*word number -1 for the role 'end'", roles={"end": -1})
    refused("n=1, but only 0 different", [row_of("garden door", "key")])
    refused("expected four names", [row_of("keys", "key")], keys=("clean_prefix", "answer"))
    refused("expected four names", [row_of("keys", "key")], keys="clean")
    refused("seed=-1", [row_of("keys", "key")], seed=-1)
    (tmp_path / "text.jsonl").write_text("The key", encoding="utf-8")
    for name, match in {"text.jsonl": "not JSON", "none.jsonl": "No such file"}.items():
        with pytest.raises(InputError, match=match):
            tasks.from_jsonl(task_tokenizer(), 1, tmp_path / name)


def test_what_makes_no_prompts():
    known = task_tokenizer()
    ends = task_tokenizer()
    ends.backend_tokenizer.post_processor = TemplateProcessing("$0 <pad>", None, [("<pad>", 1)])
    for call, reasons in {
        lambda: tasks.ioi(None, 0, -1): ["got n=0", "got seed=-1", "got a NoneType"],
        lambda: tasks.ioi(ends, 3): ["special tokens after a text"],
        lambda: tasks.ioi(known, 3, corruption="no"): ["expected one of abc, swap"],
        lambda: tasks.greater_than(ends, 3): ["special tokens after a text"],
        lambda: tasks.agreement(known, 3, feature="gender", structure="simple"): ["leave it out"],
        lambda: tasks.induction(known, 3, length=2): [
            "got length=2; expected a whole number, 3 or more"
        ],
        lambda: tasks.induction(task_tokenizer(), 3, length=4000): ["4001 for 4000-token prompts"],
    }.items():
        with pytest.raises(InputError) as caught:
            call()
        assert all(reason in str(caught.value) for reason in reasons)
    with pytest.raises(InputError, match="got words 'thing'; expected a dict with a text for"):
        tasks.from_templates(known, 2, "A {thing}", {"thing": "key", "answer": " is"})


def test_nouns_take_an_s_and_any_whole_number_is_a_seed():
    for noun in (*THINGS, *PEOPLE):
        assert not re.search("([sxz]|[cs]h|[^aeiou]y)$", noun)
    for make in (tasks.ioi, tasks.induction):
        assert contents(make(task_tokenizer(), 2, np.int64(3))) == contents(
            make(task_tokenizer(), 2, 3)
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("side", "bos"), [("left", True), ("right", False)])
def test_prompts_of_several_lengths_are_patched_by_role(side, bos, tmp_path):
    """With and without BOS, padded on either side, patches equal those of each prompt run alone."""
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    model.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path)
    model.tokenizer.padding_side = side
    model.cfg.tokenizer_prepends_bos, model.cfg.default_prepend_bos = False, bos
    words = [{"thing": f"w{i}", "answer": f" w{i + 9}"} for i in (3, 5, 7)]
    templates = ["w1 {thing} w2", "w4 w1 w2 {thing} w1 w8"]
    task = tasks.from_templates(model.tokenizer, 5, templates, words, seed=1)
    sites = ["L0H1", "L0N29", "L1N3"]
    sweep = p.activation_patch(
        model, task, sites=p.Sites(sites, positions="roles"), per_prompt=True
    )
    assert {len(text.split()) for text in task.clean} == {3, 6}
    for i, (clean, corrupted) in enumerate(zip(task.clean, task.corrupted, strict=True)):
        run, into = model.to_tokens(clean), model.to_tokens(corrupted)
        changed = (run != into)[0].nonzero().flatten().tolist()
        last, seen = run.shape[1] - 1, cached(model, run)
        assert run.shape[1] == len(clean.split()) + bos
        for role, pos in {"thing": changed[0], "end": last}.items():
            for name in sites:
                places = mask_at(1, last + 1, pos)
                logits = patched_logits(model, into, seen, name, "z", places)
                expected = logit_diff(logits, last, task.answers[i][0], task.wrong[i][0])
                frame = sweep.frame[sweep.frame["prompt"] == i]
                row = frame[(frame["name"] == name) & (frame["position"] == role)]
                assert row["value"].item() == pytest.approx(expected, abs=1e-10)
