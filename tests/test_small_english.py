"""Tests of the shipped language model: its logits, tokenizer, card, and analyses of it."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from common import needs_hooked_transformer, needs_transformer_lens_4, relative

from analyses.tools import small_english as english
from analyses.tools import small_english_grammar
from attn_only_lens import load, pretrained
from attn_only_lens.errors import UnsupportedCallError

pytestmark = pytest.mark.numeric

DATA = Path(str(files("attn_only_lens.pretrained") / "data" / "small_english"))
METRICS = json.loads((DATA / "metrics.json").read_text("utf-8"))
RECIPE = english.Recipe(**{key: METRICS[key] for key in english.Recipe.__dataclass_fields__})


@pytest.fixture(scope="module")
def llama():
    """Return the same folder's model, loaded by transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(DATA, attn_implementation="eager")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DATA)


CLASSES = [False, pytest.param(True, marks=needs_hooked_transformer)]


@pytest.mark.both_versions
@pytest.mark.parametrize("hooked", CLASSES)
@torch.no_grad()
def test_its_logits_are_those_of_transformers(hooked, llama):
    model = load("small-english", dtype="float64", hooked=hooked)
    tokens = model.to_tokens(pretrained.small_english_texts()[:7], padding_side="right")
    alone = transformers.AutoModelForCausalLM.from_pretrained(
        DATA, attn_implementation="eager", dtype=torch.float64
    )
    expected = alone(tokens).logits
    # Rotation tables are float32, with angles up to 50, so their rounding is 50 * 2**-24 = 3e-6.
    assert relative(model(tokens), expected) < 1e-5
    assert relative(llama(tokens).logits.double(), expected) < 1e-4
    changed = tokens.clone()
    changed[:, 3] = tokens[:, 3].roll(1)
    assert relative(model(changed), expected) > 1e-2


@needs_transformer_lens_4
def test_there_is_no_hooked_transformer_under_4():
    with pytest.raises(UnsupportedCallError, match="small-english as a HookedTransformer needs"):
        load("small-english", hooked=True)


def test_decoding_gives_texts_back(tokenizer):
    texts = pretrained.small_english_texts()
    for text, tokens in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens[1:]) == text
    assert tokenizer("The keys sneeze")["input_ids"][-1] == tokenizer.unk_token_id


def test_texts_are_those_of_the_grammar():
    texts = pretrained.small_english_texts()
    grammar = small_english_grammar.Grammar(english.SEED_OF_HELD_OUT - 1)
    assert [grammar.text() for _ in texts] == list(texts)
    assert sum(len(text) + 1 for text in texts) >= RECIPE.held_out


def test_it_is_as_right_as_its_card_says(llama):
    card = (DATA / "README.md").read_text("utf-8")
    for task, pairs in english.questions(RECIPE.prompts).items():
        differences = english.differences(llama, pairs)
        right, total = METRICS["right"][task]
        near = int((differences.abs() < 1e-3).sum())  # rounding may decide
        assert (len(differences), near < 3) == (total, True)
        assert abs(int((differences > 0).sum()) - right) <= near
        assert right >= 0.95 * total
        assert re.search(rf"\| {task} .*\| {right} of {total} \|", card), task
