"""Tests of answers and prompts as texts: forms, unknown words, and the space before an answer."""

import math
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from task_tokenizer import task_tokenizer
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attn_only_lens import (
    Contrast,
    Work,
    expose_neuron_heads,
    load,
    neurons,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import unknown_words
from attn_only_lens.errors import InputError, InputWarning

POS, VOCAB = 5, 31


def fast(core, words, decoder=None, **special):
    core.pre_tokenizer = words
    if decoder is not None:
        core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def byte_level():
    """Build a tokenizer like GPT-2's: it knows all bytes; its unknown token is also BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "r"), ("ar", "e"), ("Ġ", "are"), ("i", "s"), ("Ġ", "is")]
    entries = ["<|endoftext|>", *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    same = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast(core, words, decoders.ByteLevel(), **same)


def sentencepiece():
    """Build a tokenizer that adds a space before every text, so no text gives the token "are"."""
    pieces = ["<unk>", "▁are", "are", "▁is", "is", "▁", "a", "r", "e", "i", "s"]
    core = Tokenizer(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], 0))
    return fast(core, pre_tokenizers.Metaspace(), decoders.Metaspace(), unk_token="<unk>")


class Slow:
    """A tokenizer in Python, which does not return the positions of its tokens in the text."""

    unk_token, unk_token_id, is_fast = "<unk>", 0, False
    known = ("<unk>", "are", "is", "the")

    def __call__(self, text, **options):
        ids = [self.known.index(w) if w in self.known else 0 for w in text.split()]
        return {"input_ids": ids}

    def __len__(self):
        return len(self.known)

    def convert_ids_to_tokens(self, token):
        return self.known[token]

    def convert_tokens_to_ids(self, piece):
        return self.known.index(piece) if piece in self.known else 0


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "english": load("small-english").tokenizer,
        "words": task_tokenizer(),
        "bytes": byte_level(),
        "sentencepiece": sentencepiece(),
        "slow": Slow(),
    }


def stub(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(d_vocab=len(tokenizer)))


def pair_of(batch):
    clean = torch.arange(batch * POS).view(batch, POS) % 7
    return PromptPair(clean, clean + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stub(tiny_tokenizer(VOCAB, tmp_path_factory.mktemp("tiny")))


def test_what_is_ambiguous_is_refused(model):
    pair = pair_of(3)
    match = re.escape("expected 1, or one for each of the 3 prompts;")
    with pytest.raises(InputError, match=match) as caught:
        bind(p.probability_diff([5, 6], ["w3", "w4"]), model, pair)
    assert len(caught.value.reasons) == 2
    assert caught.match(re.escape("[[33, 34]]"))
    for bad in ({5}, None, 5.0, True, [[[5]]], torch.tensor([5.0])):
        with pytest.raises(InputError, match="expected a text, or a token ID from 0 to 30"):
            bind(p.probability_diff(bad, 7), model, pair)


def test_answers_of_some_prompts_are_those_prompts(model):
    """Prompt chunks use their part of the answers, and later changes of the list have no effect."""
    answers = [[5, 6], [7], [8, 9, 10]]
    metric = p.probability_diff(answers, 11)
    answers[1] = [12]
    logits = torch.zeros(2, POS, VOCAB)
    logits[0, -1, 7], logits[1, -1, 9] = 50.0, 50.0
    whole = pair_of(3)
    some = PromptPair(whole.clean[1:], whole.corrupted[1:], None, (range(1, 3), 3))
    assert bind(metric, model, some).of_run(logits).tolist() == pytest.approx([1.0, 1.0])


# Unknown words


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("words", "The keys kezs near, xyz", ["kezs", "xyz"]),
        ("bytes", "the kezs <|endoftext|> né☃", []),
        ("sentencepiece", "are  ! ake\u0301s is", ["!", "ake\u0301s"]),
        ("slow", "the kers are <unk> kers", ["kers"]),
        ("english", "The keys   near", ["  "]),  # the third space is a part of " near"
        ("english", "The keys\nnear", ["\n", "near"]),  # "near" needs a space before it
    ],
)
def test_unknown_words(name, text, expected, tokenizers):
    assert unknown_words(tokenizers[name], text) == expected
    assert unknown_words(tokenizers[name], "") == []
    for word in expected[:1]:
        with pytest.raises(InputError, match=re.escape(repr(word))) as caught:
            bind(p.probability(word), stub(tokenizers[name]), pair_of(1))
        assert caught.match("the metric would read")
    bind(p.probability("<unk>"), stub(tokenizers["words"]), pair_of(1))  # it may be the answer


# The space before an answer


@pytest.mark.parametrize(
    ("name", "right", "give"),
    [
        ("bytes", "Ġare", "give ' are'"),
        ("bytes", "are", "give 'are'"),
        ("sentencepiece", "are", "give token 2"),  # no text gives this token
    ],
)
def test_a_space_more_or_less(name, right, give, tokenizers):
    tokenizer, pair = tokenizers[name], pair_of(3)
    model = stub(tokenizer)
    pieces = {"bytes": ["Ġare", "are"], "sentencepiece": ["▁are", "are"]}[name]
    right, *_ = tokenizer.convert_tokens_to_ids([right])
    [wrong] = {*tokenizer.convert_tokens_to_ids(pieces)} - {right}
    untwinned = tokenizer.convert_tokens_to_ids("i")  # it has no version with a space
    metrics = {
        "correct": lambda a: p.logit_diff(a, untwinned),
        "wrong": lambda a: p.logit_diff(untwinned, a),
        "answer": p.log_probability,
    }
    for times, is_far in ((9.9, False), (10.1, True)):
        logits = torch.zeros(3, POS, len(tokenizer), dtype=torch.float64)
        # The geometric mean over three prompts exceeds the others by this factor.
        logits[0, -1, right] = math.log(times) * 3
        for answers, is_right in ((right, True), (wrong, False)):
            for role, metric in metrics.items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    bind(metric(answers), model, pair, logits)
                    bind(metric(answers), model, pair)  # without a clean run
                assert len(caught) == (is_far and not is_right), (role, times)
                if caught:
                    assert give in str(caught[0].message)
                    assert f"{role}: " in str(caught[0].message)
                    assert caught[0].filename == __file__


def test_an_answer_that_begins_like_the_models_answer(tokenizers):
    """Warn about " Mark" if the model answers " Mary", unless the metric has both answers."""
    tokenizer = tokenizers["words"]
    logits = torch.zeros(1, POS, len(tokenizer))
    logits[..., tokenizer.convert_tokens_to_ids(" Mary")] = math.log(13)
    message = "' Mary' is 13 times as probable as ' Mark'.*if you mean ' Mary', give ' Mary'"
    with pytest.warns(InputWarning, match=message):
        bind(p.logit_diff(" Mark", " John"), stub(tokenizer), pair_of(1), logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(p.logit_diff(" Mark", " Mary"), stub(tokenizer), pair_of(1), logits)
        logits[..., tokenizer.convert_tokens_to_ids(" Mark")] = math.log(2)  # 13 / 2 < 10
        bind(p.probability(" Mark"), stub(tokenizer), pair_of(1), logits)


# Analyses warn once

CLEAN = "When Mary and John went to the store, John gave a {} to"
CORRUPTED = "When Mary and John went to the store, Mary gave a {} to"
KNOWN, ODD = (
    [template.format(word) for template in (CLEAN, CORRUPTED)] for word in ("drink", "kezs")
)


def patched_in_chunks(model, contrast):
    three = Contrast([contrast.clean] * 3, [contrast.corrupted] * 3, contrast.metric)
    p.activation_patch(
        model, three, sites=p.Sites(["L0H1", "L1N7"], -1), work=Work(prompts_at_once=1)
    )


def looked_up(model, contrast):
    corpus = neurons.Corpus([contrast.clean, contrast.corrupted] * 2)
    neurons.top_examples(model, ["L0N5"], corpus)


@pytest.mark.parametrize("call", [patched_in_chunks, looked_up])
def test_an_analysis_warns_once(call):
    english = expose_neuron_heads(load("small-english")).model
    right, odd = p.logit_diff(" Mary", " John"), p.logit_diff("Mary", "John")

    def caught(prompts, metric):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(english, Contrast(*prompts, metric))
        ours = [warning for warning in caught if warning.category is InputWarning]
        assert {warning.filename for warning in ours} <= {__file__}
        return [str(warning.message) for warning in ours]

    assert caught(KNOWN, right) == []
    messages = caught(ODD, odd)
    assert len(messages) == 1 + (call is not looked_up)
    assert "'kezs' in " in messages[0]
    assert "reads <unk>" in messages[0]
    if call is not looked_up:
        assert "correct: ' Mary', with a leading space" in messages[1]
        assert "wrong: ' John'" in messages[1]
