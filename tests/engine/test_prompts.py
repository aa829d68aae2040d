"""Tests of prompt pairs made from texts and tokens, and of refusals."""

import re

import bridges
import pytest
import torch
from common import tokens
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens.engine.prompts import prompt_pair
from attn_only_lens.errors import InputError

BATCH, POS = 3, 7


PLAIN = bridges.boot("gpt2")
"""A model without a tokenizer."""


@pytest.fixture(scope="module", params=["right", "left"])
def model(request, tmp_path_factory):
    model = bridges.boot("gpt2")
    model.tokenizer = tiny_tokenizer(model.cfg.d_vocab, tmp_path_factory.mktemp("tokenizer"))
    model.tokenizer.padding_side = request.param
    model.cfg.tokenizer_prepends_bos = False
    return model


def changed(clean, positions):
    corrupted = clean.clone()
    corrupted[:, positions] = (corrupted[:, positions] + 1) % 41
    return corrupted


def test_tokens_without_a_tokenizer():
    clean = tokens(batch=BATCH, pos=POS)
    pair = prompt_pair(PLAIN, clean.int(), changed(clean, 5))
    assert torch.equal(pair.clean, clean)
    assert pair.clean.dtype == torch.int64
    assert (pair.mask, pair.last.tolist()) == (None, [6, 6, 6])
    assert pair.real.all()
    row = prompt_pair(PLAIN, clean[0], changed(clean, 2)[0])
    assert row.clean.shape == (1, POS)


def test_texts_are_padded_on_the_tokenizers_side(model):
    pair = prompt_pair(model, ["w1 w2 w3 w5", "w8 w9"], ["w1 w2 w4 w5", "w7 w9"])
    bos, pad = model.tokenizer.bos_token_id, model.tokenizer.pad_token_id
    right = model.tokenizer.padding_side == "right"
    short = [bos, 12, 13, pad, pad] if right else [pad, pad, bos, 12, 13]
    assert pair.clean.tolist() == [[bos, 5, 6, 7, 9], short]
    assert pair.mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0] if right else [0, 0, 1, 1, 1]]
    assert pair.last.tolist() == [4, 2] if right else [4, 4]
    # The padding is that of the model's own tokenization.
    assert torch.equal(pair.clean, model.to_tokens(["w1 w2 w3 w5", "w8 w9"]))
    # With the mask, a padded prompt has the logits of the prompt alone. Control: not without it.
    masked = model(pair.clean, attention_mask=pair.mask)
    alone = model(model.to_tokens("w8 w9"))[0, -1]
    last = masked[1, pair.last[1]]
    torch.testing.assert_close(last, alone, rtol=1e-10, atol=1e-12)
    blind = model(pair.clean, attention_mask=torch.ones_like(pair.mask))[1, 4]
    assert (blind - alone).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_for_tokens(side):
    clean = tokens(batch=BATCH, pos=POS)
    lengths = [7, 2, 5]
    mask = torch.zeros(BATCH, POS, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(length) if side == "right" else slice(POS - length, None)] = True
    pair = prompt_pair(PLAIN, clean, changed(clean, 3), mask)
    assert pair.last.tolist() == ([6, 1, 4] if side == "right" else [6, 6, 6])
    assert torch.equal(pair.real, mask)
    assert pair.mask.dtype == torch.int64


def test_a_difference_under_padding_is_none():
    clean = tokens(batch=BATCH, pos=POS)
    mask = torch.ones(BATCH, POS)
    mask[:, 5:] = 0
    prompt_pair(PLAIN, clean, changed(clean, 4), mask)
    with pytest.raises(InputError, match="identical prompts"):
        prompt_pair(PLAIN, clean, changed(clean, 5), mask)


def test_words_that_split_differently_are_shown(model):
    with pytest.raises(InputError, match="leave it out"):
        prompt_pair(model, "w1 w2", "w1 w3", torch.ones(1, 3))
    with pytest.raises(InputError) as caught:
        prompt_pair(model, ["w1 w2", "w3", "w4 w5"], ["w1", "w7", "w5 w5 w6"])
    assert len(caught.value.reasons) == 2
    first, second = caught.value.reasons
    assert "prompt 0 has 3 clean tokens ['<bos>', ' w1', ' w2']" in first
    assert "2 corrupted tokens ['<bos>', ' w1']" in first
    assert "prompt 2" in second


OK = tokens(batch=BATCH, pos=POS)
OTHER = changed(OK, 1)
HOLES = torch.tensor([[1, 1, 0, 1, 0, 0, 0]] + [[1] * POS] * 2)
REFUSED = {
    "identical": ((OK, OK), ["identical prompts"]),
    "batch": ((OK, OTHER[:2]), ["3 clean and 2 corrupted"]),
    "length": ((OK, OTHER[:, :5]), ["prompt 0 has 7", "prompt 1 has 7", "prompt 2 has 7"]),
    "vocabulary": ((OK + 41, OTHER - 41), ["clean: tokens: got values", "corrupted: tokens"]),
    "too long": (
        (tokens(pos=19), tokens(1, pos=19)),
        ["clean: .* 19 tokens; the model has 17", "corrupted:"],
    ),
    "floats": ((OK.double(), OTHER), ["clean: tokens: got float64"]),
    "empty": ((OK[:0], []), ["clean: tokens: got int64", "corrupted: got no prompts"]),
    "no tokenizer": (("w1", "w2"), ["clean: .*no tokenizer", "corrupted: .*no tokenizer"]),
    "mask shape": ((OK, OTHER, torch.ones(POS, BATCH)), [r"mask: got \[7, 3\]; .*\[3, 7\]"]),
    "mask type": ((OK, OTHER, [1, 1]), ["mask: got list"]),
    "mask values": ((OK, OTHER, OK), ["mask: got values from"]),
    "mask nothing": (
        (OK, OTHER, torch.zeros(BATCH, POS)),
        [r"prompts \[0, 1, 2\] have no real token"],
    ),
    "mask holes": ((OK, OTHER, HOLES), [r"prompts \[0\] have padding between"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_every_reason(case):
    arguments, reasons = REFUSED[case]
    with pytest.raises(InputError) as caught:
        prompt_pair(PLAIN, *arguments)
    assert len(caught.value.reasons) == len(reasons)
    for got, pattern in zip(caught.value.reasons, reasons, strict=True):
        assert re.search(pattern, got)
