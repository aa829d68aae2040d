"""Tests of contrasts: what is checked when one is made, and the tokens of its runs in a model."""

import copy
import gc
import re
import warnings
import weakref
from dataclasses import replace

import bridges
import numpy as np
import pytest
import torch
from common import D_VOCAB, changed, tokens
from sealed_files import rewrite
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import Contrast, load
from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, InputError, InputWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # raised by TransformerLens
METRIC = p.logit_diff(5, 7)
CLEAN, CORRUPTED = ("w1 w2 w3", "w8 w9"), ("w1 w5 w3", "w7 w9")
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles={"subject": [2, 1], "end": -1})


@pytest.fixture
def model(tmp_path):
    model = bridges.boot("gpt2")
    model.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path)
    model.cfg.tokenizer_prepends_bos = False
    return model


# Construction


def test_refused_with_every_reason():
    with pytest.raises(InputError) as caught:
        Contrast(7, {"w1"}, 3, roles=["end"])
    assert len(caught.value.reasons) == 4
    for reason in (
        "clean: got an int; expected a text, a list of texts, or tokens",
        "corrupted: got a set; expected a text",
        "got an int as metric; expected a metric such as logit_diff",
        "roles: got a list; expected a dict from names to positions",
    ):
        assert caught.match(reason)
    with pytest.raises(InputError, match="got 3 clean and 1 corrupted prompts; expected the same"):
        Contrast(["w1"] * 3, ["w2"], METRIC)


def test_prompts_of_every_form():
    for prompts, n in (("w1 w2", 1), (["w1 w2"] * 3, 3), (ROWS, 3), (ROWS[0], 1), ([*ROWS], 3)):
        assert len(Contrast(prompts, None, METRIC)) == len(Contrast(prompts, prompts, METRIC)) == n
    assert len(repr(Contrast("w1 " * 10**4, None, METRIC))) < 500
    assert (PAIR.answers, PAIR.wrong) == (((5,),), ((7,),))


# The tokens in a model


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_padded_on_the_tokenizers_side(model, side):
    model.tokenizer.padding_side = side
    texts = ["w1 w2 w3 w5", "w8 w9"]
    pair = Contrast(texts, ["w1 w2 w4 w5", "w7 w9"], METRIC).pair(model)
    bos, pad = model.tokenizer.bos_token_id, model.tokenizer.pad_token_id
    short = [bos, 12, 13, pad, pad] if side == "right" else [pad, pad, bos, 12, 13]
    assert pair.clean.tolist() == [[bos, 5, 6, 7, 9], short]
    assert pair.corrupted[0].tolist() == [bos, 5, 6, 8, 9]
    assert pair.mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0] if side == "right" else [0, 0, 1, 1, 1]]
    assert pair.last.tolist() == ([4, 2] if side == "right" else [4, 4])
    alone = Contrast(texts, None, METRIC).pair(model)
    assert torch.equal(alone.clean, pair.clean)
    assert alone.corrupted is alone.clean
    # The padding is that of the model's own tokenization.
    assert torch.equal(pair.clean, model.to_tokens(texts))
    # With the mask, a padded prompt has the logits of the prompt alone. Control: not without it.
    masked = model(pair.clean, attention_mask=pair.mask)
    alone = model(model.to_tokens("w8 w9"))[0, -1]
    torch.testing.assert_close(masked[1, pair.last[1]], alone, rtol=1e-10, atol=1e-12)
    blind = model(pair.clean, attention_mask=torch.ones_like(pair.mask))[1, 4]
    assert (blind - alone).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_for_tokens(side):
    mask = torch.zeros(3, 7, dtype=torch.bool)
    for row, length in zip(mask, (7, 2, 5), strict=True):
        row[slice(length) if side == "right" else slice(7 - length, None)] = True
    pair = Contrast(ROWS.int(), changed(ROWS, 3), METRIC, mask=mask).pair(PLAIN)
    assert torch.equal(pair.clean, ROWS)
    assert pair.last.tolist() == ([6, 1, 4] if side == "right" else [6, 6, 6])
    assert torch.equal(pair.real, mask)
    assert pair.clean.dtype == pair.mask.dtype == torch.int64


PLAIN = bridges.boot("gpt2")
"""A model without a tokenizer."""
ROWS = tokens(batch=3, pos=7)
OTHER = changed(ROWS, 6)
HOLES = torch.tensor([[1, 1, 0, 1, 0, 0, 0]] + [[1] * 7] * 2)
LAST_IS_PADDING = torch.tensor([[1] * 6 + [0]] * 3)
REFUSED = {
    "identical": (ROWS, ROWS, None, ["identical prompts"]),
    "identical but for padding": (ROWS, OTHER, LAST_IS_PADDING, ["identical prompts"]),
    "vocabulary": (ROWS + 41, OTHER - 41, None, ["clean: tokens: got v", "corrupted: tokens"]),
    "too long": (
        *(tokens(pos=19), tokens(1, pos=19), None),
        ["clean: .* 19 tokens; the model has 17", "corrupted:"],
    ),
    "no tokenizer": ("w1", "w2", None, ["clean: .*no tokenizer", "corrupted: .*no tokenizer"]),
    "mask shape": (ROWS, OTHER, torch.ones(7, 3), [r"mask: got \[7, 3\]; .*\[3, 7\]"]),
    "mask values": (ROWS, OTHER, ROWS, ["mask: got values from"]),
    "mask nothing": (ROWS, OTHER, torch.zeros(3, 7), [r"\[0, 1, 2\] have no real token"]),
    "mask holes": (ROWS, OTHER, HOLES, [r"prompts \[0\] have padding between"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_model_with_every_reason(case):
    clean, corrupted, mask, reasons = REFUSED[case]
    with pytest.raises(InputError) as caught:
        Contrast(clean, corrupted, METRIC, mask=mask).pair(PLAIN)
    assert len(caught.value.reasons) == len(reasons)
    for got, pattern in zip(caught.value.reasons, reasons, strict=True):
        assert re.search(pattern, got)


def test_a_pair_is_made_once_for_each_model(model):
    other = bridges.boot("gpt2")
    other.tokenizer, other.cfg.tokenizer_prepends_bos = model.tokenizer, True
    pair, of_other = PAIR.pair(model), PAIR.pair(other)
    assert PAIR.pair(model) is pair
    assert PAIR.pair(other) is of_other is not pair
    assert replace(PAIR).pair(model) is not pair
    # A model is not kept by the contrasts that it has read.
    reference = weakref.ref(other)
    del other, of_other
    gc.collect()
    assert reference() is None
    assert torch.equal(copy.deepcopy(PAIR).pair(model).clean, pair.clean)
    part = pair.of_prompts([1])
    assert part.select(part.roles["subject"]) == [1]
    assert (part.n_all, part.clean.tolist()) == (2, [[0, 12, 13]])  # without padding


@pytest.mark.parametrize(
    "change",
    [
        lambda model, words: setattr(model.tokenizer, "padding_side", "left"),
        lambda model, words: setattr(model.tokenizer, "pad_token", "<eos>"),
        lambda model, words: setattr(model.cfg, "default_prepend_bos", False),
        lambda model, words: setattr(model, "tokenizer", words),
    ],
)
def test_a_pair_is_made_again_if_texts_are_read_otherwise(change, model, tmp_path):
    contrast = replace(PAIR)
    pair = contrast.pair(model)
    change(model, tiny_tokenizer(D_VOCAB - 2, tmp_path / "another"))
    again = contrast.pair(model)
    assert torch.equal(again.clean, replace(PAIR).pair(model).clean)
    assert again is not pair
    assert contrast.pair(model) is again


def test_refusals_and_warnings_are_those_of_prompts(model, monkeypatch):
    with pytest.raises(InputError, match=r"prompt 0 has 4 clean tokens.*' w1', ' w2', "):
        replace(PAIR, corrupted=("w1", "w2")).pair(model)
    odd = replace(PAIR, clean=("w1 odd w3", "w8 w9"))
    with pytest.warns(InputWarning, match="'odd' in clean prompt 0 'w1 odd w3'"):
        odd.pair(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odd.pair(model)  # a contrast warns once for each model
    # Padding is tested with each call: the model may have changed after its first analysis.
    PAIR.pair(model)
    name = "attn_only_lens.engine.prompts.ignores_padding"
    monkeypatch.setattr(name, lambda model, side: False)
    with pytest.raises(InputError, match="padding on the right changes this model's logits"):
        PAIR.pair(model)
    replace(PAIR, clean=CLEAN[:1], corrupted=CORRUPTED[:1], roles={}).pair(model)  # no padding


@pytest.mark.parametrize("of", [torch.Tensor.clone, lambda x: [*x]])
def test_tokens_that_are_later_changed_in_place_stay_as_they_were(of, model):
    given, mask = of(tokens(1)), torch.ones(tokens(1).shape)
    some = Contrast(given, tokens(2), METRIC, mask=mask)
    for row in given:
        row[:] = 0
    mask[:, -1] = 0
    pair = some.pair(model)
    assert torch.equal(pair.clean, tokens(1))
    assert pair.real.all()
    for prompts in (some.clean, some.corrupted):  # the contrast's own tokens
        prompts[0][2] = 3
        both = torch.stack([*some.clean, *some.corrupted])
        assert torch.equal(some.pair(model).together[0], both)


def test_tokens_of_inference_mode_are_read(model):
    with torch.inference_mode():
        some = Contrast(tokens(1).clone(), tokens(2).clone(), METRIC)
    for changed_token in (3, 5):
        with torch.inference_mode():
            some.clean[0, 2] = changed_token
        assert torch.equal(some.pair(model).clean, some.clean)


# Files


METRICS = [
    p.logit_diff(" are", [7, "x"]),
    p.probability_diff([[33, 31], [13]], [["a", 29], [5]]),
    p.probability("é"),
    p.log_probability(torch.tensor([5, 7, 11])),
    p.kl(),
    p.loss(),
]


@pytest.mark.parametrize(
    "more",
    [
        {"clean": ["a \n\t日", "b", "c"], "corrupted": ("d", "e", "f"), "roles": {"x": [2, -1, 0]}},
        {"clean": ROWS, "corrupted": ROWS + 1, "mask": ROWS > 3, "dropped": {"too long": 3}},
        {"clean": ROWS[0], "corrupted": ROWS[0].numpy(), "roles": {"x": np.int64(2)}},
        {"clean": [ROWS[0], ROWS[1, :2], ROWS[2, :2]], "corrupted": None, "name": "é"},
    ],
)
def test_a_contrast_is_read_back(more, tmp_path):
    def plain(value):
        if isinstance(value, torch.Tensor | np.ndarray):
            return value.tolist()
        if isinstance(value, list | tuple):
            return list(map(plain, value))
        return {key: plain(item) for key, item in value.items()} if type(value) is dict else value

    for metric in METRICS:
        contrast = Contrast(metric=metric, **more)
        contrast.save(tmp_path / "contrast.json")
        again = load(tmp_path / "contrast.json")
        for name in ("clean", "corrupted", "roles", "mask", "name", "dropped"):
            assert plain(getattr(again, name)) == plain(getattr(contrast, name))
        assert again.metric.identity() == metric.identity()
        assert (again.answers, again.wrong) == (contrast.answers, contrast.wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["contrast.json"]


def test_a_function_is_stored_by_its_name(tmp_path):
    def largest(logits):
        return logits[:, -1].max()

    path = tmp_path / "contrast.json"
    # A function with the name of one of the package's metrics is still a function.
    for metric in (largest, p.custom(largest, name="loss", version="1")):
        replace(PAIR, metric=metric).save(path)
        with pytest.raises(InputError, match=r"only the name of its metric, .*, a function; "):
            load(path)
    replace(PAIR, metric=largest).save(path)
    assert load(path, metric=largest).metric is largest
    PAIR.save(path)
    assert load(path, metric=METRIC).metric is METRIC
    with pytest.raises(InputError, match="got the metric largest; expected logit_diff"):
        load(path, metric=largest)


@pytest.mark.parametrize(
    ("path_to", "value", "match"),
    [
        (("name",), 7, r"contrast\.name: got 7; expected str"),
        (("metric", "version"), "7", "logit_diff.*, version 7, .*: use the release that wrote"),
        (("metric", "kind"), "entropy", r"has the metric logit_diff\(5, 7\)"),
        (("clean",), ["w1"], "(?s)holds no contrast: .*got 1 clean and 2 corrupted prompts"),
        (("roles", "subject"), [1, 2, 3], "(?s)holds no contrast: .*subject: got 3 positions"),
    ],
)
def test_files_that_another_program_wrote_are_refused(path_to, value, match, tmp_path):
    def change(whole):
        *outer, last = ("contrast", *path_to)
        for key in outer:
            whole = whole[key]
        whole[last] = value

    PAIR.save(tmp_path / "contrast.json")
    rewrite(tmp_path / "contrast.json", change)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "contrast.json")
