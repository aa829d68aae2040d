"""Tests that tokens as texts, joined, give the text for any kind of tokenizer."""

from types import SimpleNamespace

import bridges
import pytest
import torch
from common import D_VOCAB
from tiny_tokenizer import SPECIAL
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from attn_only_lens import (
    Contrast,
    chat_tokens,
    expose_neuron_heads,
    load,
)
from attn_only_lens import patching as p
from attn_only_lens.cli import app
from attn_only_lens.engine.tokens import (
    checked_tokens,
    join_tokens,
    token_text,
    token_texts,
    token_texts_of_prompts,
)
from attn_only_lens.errors import InputError

TEXT = "One day, Lily went to a café 🙂\n  too"


def wrapped(core, **special):
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def byte_level():
    """Return a tokenizer like GPT-2's: every byte is a character of its own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=263, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["One day went to to"], trainer)
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    return wrapped(core, bos_token="<|end|>")


def sentence_piece():
    """Return one like LLaMA's: a space before each word, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "▁", *"OnedayLilwtoc,", "▁w", "en", "ent", "▁t", "▁to", "▁O", "▁d"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "w"), ("e", "n"), ("en", "t"), ("▁", "t"), ("▁t", "o"), ("▁", "O"), ("▁", "d")]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens([AddedToken("<s>", special=True)])
    return wrapped(core, bos_token="<s>", unk_token="<unk>")


def word_piece():
    """Return one like BERT's: no spaces, and a mark on tokens that continue a word."""
    pieces = ["[UNK]", "[CLS]", "one", "day", ",", "w", "##ent", "to", "##o"]
    core = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens([AddedToken("[CLS]", special=True)])
    return wrapped(core, cls_token="[CLS]", unk_token="[UNK]")


def words():
    """Return one of whole words without a decoder."""
    core = Tokenizer(models.WordLevel({"w1": 0, "w2": 1, "?": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(core, unk_token="?")


KINDS = {
    "byte level": byte_level,
    "SentencePiece": sentence_piece,
    "WordPiece": word_piece,
    "words": words,
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def end_of_word():
    """Return one like OpenAI GPT's: a mark on tokens that end a word."""
    pieces = ["<unk>", *"thecaw", "</w>", "th", "e</w>", "the</w>", "t</w>", "ca"]
    merges = [("t", "h"), ("e", "</w>"), ("th", "e</w>"), ("t", "</w>"), ("c", "a")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    core.decoder = decoders.BPEDecoder("</w>")
    return wrapped(core, unk_token="<unk>")


def test_a_mark_at_the_end_of_a_word_is_the_space_after_it():
    tokenizer = end_of_word()
    for pieces, expected in (
        (["the</w>", "ca", "t</w>", "the</w>"], ["the ", "ca", "t ", "the"]),
        (["the</w>", "th", "e</w>"], ["the ", "th", "e"]),
    ):
        ids = tokenizer.convert_tokens_to_ids(pieces)
        texts = token_texts(SimpleNamespace(tokenizer=tokenizer), ids)
        assert texts == expected
        assert join_tokens(texts) == tokenizer.decode(ids)


def texts_of(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    return ids, token_texts(SimpleNamespace(tokenizer=tokenizer), torch.tensor(ids))


@pytest.mark.parametrize("text", [TEXT, "w1 w2 w1", "went", "day,went"])
def test_joined_they_are_what_the_tokenizer_decodes(tokenizer, text):
    ids, texts = texts_of(tokenizer, text)
    assert join_tokens(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert all(texts)
    # Some tokenizers lose nothing.
    kinds = str(tokenizer.backend_tokenizer.decoder)
    if "ByteLevel" in kinds or "ByteFallback" in kinds:
        assert join_tokens(texts).removeprefix("<s> ") == text


def test_tokens_of_many_prompts_are_those_of_each(tokenizer):
    model = SimpleNamespace(tokenizer=tokenizer)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXT, "w1 went")]
    real = torch.tensor([[True] * 4, [False, False, True, True]])
    ids = torch.tensor([rows[0][:4], [0, 0, *rows[1][:2]]])
    texts = token_texts_of_prompts(model, ids, real)
    assert texts == [token_texts(model, ids[0]), [None, None, *token_texts(model, ids[1, 2:])]]


def test_each_kind():
    for kind, text, expected in (
        ("byte level", "went é", ["went", " ", "<0xC3>", "<0xA9>"]),
        ("SentencePiece", "went to", ["w", "ent", " to"]),
        ("SentencePiece", "to é\n", ["to", " ", "<0xC3>", "<0xA9>", "\n"]),
        ("WordPiece", "One day, went too", ["one", " day", ",", " w", "ent", " to", "o"]),
        ("words", "w1 w2 no", ["w1", " w2", " ?"]),
    ):
        tokenizer = KINDS[kind]()
        ids, texts = texts_of(tokenizer, text)
        if kind == "byte level":  # tokens depend on the training text
            texts = texts[-4:] if len(texts) == 4 else [join_tokens(texts[:-3]), *texts[-3:]]
        assert texts == expected, kind
        # The control: texts of single tokens lack the spaces.
        alone = [tokenizer.decode([token]) for token in ids]
        assert "".join(alone) != text or kind == "byte level"


def test_special_tokens_and_none():
    pieces = SimpleNamespace(tokenizer=sentence_piece())
    ids = [1, *pieces.tokenizer("went")["input_ids"]]
    assert token_texts(pieces, ids) == ["<s>", " w", "ent"]
    assert token_texts(SimpleNamespace(tokenizer=word_piece()), [1, 2]) == ["[CLS]", " one"]
    size = len(pieces.tokenizer)
    assert token_texts(pieces, [size + 5]) == [f"<{size + 5}>"]  # a padded vocabulary
    assert token_text(pieces, ids[1]) == " w"  # the same text at any position
    assert token_texts(SimpleNamespace(tokenizer=None), torch.tensor([3, 5])) == ["3", "5"]
    assert token_texts(pieces, []) == []


# The first token, and chats

TEMPLATE = (
    "{% if system %}{{ bos_token }} {% endif %}{% for message in messages %}"
    "{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = [*SPECIAL, "user", "assistant", "system", *(f"w{i}" for i in range(D_VOCAB - 7))]
BOS, EOS, W1, W2 = 0, 1, 8, 9
USER, ASSISTANT = 4, 5


def chat_folder(folder, family="llama", bos=True, adds=False, template=TEMPLATE):
    """Save a model with a tokenizer: with or without a BOS, adding it, or a template."""
    bridges.hf_folder(folder, family, tokenizer=False)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if adds:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    made = wrapped(core, **special, **({"bos_token": "<bos>"} if bos else {}))
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("family", "begins"), [("llama", True), ("gpt2", True), ("qwen3", False)])
def test_texts_begin_with_one_bos_or_none(family, begins, adds, tmp_path):
    bridge = load(chat_folder(tmp_path / "model", family, adds=adds))
    expected = [BOS] * begins + [W1, W2]
    for text, ids in (("w1 w2", expected), ("<bos> w1 w2", [BOS, W1, W2])):
        assert checked_tokens(bridge, text).tolist() == [ids]
        assert Contrast(text, f"{text[:-2]}w3", p.loss()).pair(bridge).clean.tolist() == [ids]
    # The control: TransformerLens puts a second BOS before a text's own.
    assert (bridge.to_tokens("<bos> w1")[0, :2].tolist() == [BOS, BOS]) == begins


def test_a_tokenizer_without_bos_gets_none(tmp_path):
    folder = chat_folder(tmp_path / "model", bos=False)
    assert checked_tokens(load(folder), "w1 w2").tolist() == [[W1, W2]]
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    assert bridge.to_tokens("w1 w2").tolist() == [[EOS, W1, W2]]  # the control


@pytest.mark.parametrize("adds", [False, True])
def test_a_chat_is_what_its_template_says(adds, tmp_path):
    with_bos = TEMPLATE.replace("if system", "if true")
    first = chat_folder(tmp_path / "first", adds=adds)
    second = chat_folder(tmp_path / "second", adds=adds, template=with_bos)
    chat = [USER, W1, EOS, ASSISTANT]
    for folder, begins in ((first, []), (second, [BOS])):
        bridge = load(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        [got] = chat_tokens(bridge, "w1")
        assert got.tolist() == begins + chat
        turns = [{"role": "user", "content": "w1"}]
        assert got.tolist() == tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        for prompts in (turns, [turns], ["w1"]):
            assert [row.tolist() for row in chat_tokens(bridge, prompts)] == [begins + chat]
        several = [{"role": "system", "content": "w2"}, *turns]
        rows = chat_tokens(bridge, ["w1", several])
        assert rows[1].tolist() == [*begins, 6, W2, EOS, *chat]
        # Padding is on the tokenizer's side, as for texts.
        pair = Contrast(rows, chat_tokens(bridge, ["w3", several]), p.loss()).pair(bridge)
        assert pair.mask.sum(1).tolist() == [len(row) for row in rows]
        assert pair.clean[0][pair.real[0]].tolist() == rows[0].tolist()


def test_prompts_that_are_no_chat(tmp_path):
    plain = load(chat_folder(tmp_path / "plain", template=None))
    strict = load(
        chat_folder(tmp_path / "strict", template="{{ raise_exception('roles must alternate') }}")
    )
    silent = load(chat_folder(tmp_path / "silent", template="{{ '' }}"))
    for bridge, prompts, message in (
        (plain, "w1", "has no chat template"),
        (silent, "w1", "prompt 0: the template returns no tokens"),
        (strict, ["w1", "w2"], "(?s)prompt 0: .*roles must alternate.*prompt 1: "),
        (strict, [{"role": "user"}], "expected a text, a list of texts, or messages"),
    ):
        with pytest.raises(InputError, match=message):
            chat_tokens(bridge, prompts)


def test_chats_on_the_command_line(tmp_path):
    folder, out = chat_folder(tmp_path / "model"), tmp_path / "sweep.csv"
    pair = ("--clean", "w1 w2", "--corrupted", "w1 w3", "--answer", "w4", "--wrong", "w5")
    patch = ["patch", str(folder), *pair, "--sites", "L0H1", "--out", str(out), "--chat"]
    result = CliRunner().invoke(app, patch)
    assert result.exit_code == 0, result.output
    bridge = expose_neuron_heads(load(folder)).model
    sides = (chat_tokens(bridge, text) for text in ("w1 w2", "w1 w3"))
    contrast = Contrast(*sides, p.logit_diff("w4", "w5"))
    expected = p.activation_patch(bridge, contrast, sites=["L0H1"])
    assert load(out).frame["value"].tolist() == pytest.approx(
        expected.frame["value"].tolist(), abs=1e-5
    )
    assert expected.frame["position"].max() == len(chat_tokens(bridge, "w1 w2")[0]) - 1
    result = CliRunner().invoke(app, ["verify", str(folder), "--text", "w1", "--chat"])
    assert result.exit_code == 0, result.output
    assert "ok: 4 tokens" in result.output
    result = CliRunner().invoke(app, [*patch, "--token-ids"])
    assert result.exit_code == 2


def test_prompts_are_padded_with_a_token_that_the_model_has(tmp_path):
    """Fine-tuners add a padding token without an embedding row; it is masked in any case."""
    bridge = load(chat_folder(tmp_path / "model"))
    bridge.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert bridge.tokenizer.pad_token_id == D_VOCAB
    pair = Contrast(["w1 w2", "w1"], ["w1 w3", "w1"], p.loss()).pair(bridge)
    assert pair.mask.sum(1).tolist() == [3, 2]
    assert pair.clean.max() < D_VOCAB
