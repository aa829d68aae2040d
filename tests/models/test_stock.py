"""Tests that `to_stock` gives a plain HookedTransformer that computes the same function."""

import pytest
import torch
from common import N_LAYERS, POS, relative, tokens
from models import build
from tiny_tokenizer import tiny_tokenizer
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from attn_only_lens import Bilinear, convert, to_stock
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.models.to_stock import stock_bytes
from attn_only_lens.tl import Attention, HookedTransformer, HookedTransformerConfig
from attn_only_lens.tolerances import LOGIT_TOLERANCE

PLAIN = {"act_fn": "silu", "gated_mlp": False}
# A family that only differs from "silu" in its activation or gate would repeat "silu".
MODELS = {
    name: (name, {})
    for name in (
        *("silu", "ln_pre", "rms", "no_norm", "norms_before_and_after", "rotary"),
        *("rotary_adjacent", "alibi", "grouped", "sinks", "inverse_layer"),
    )
} | {
    "output_cap": ("silu", {"output_logits_soft_cap": 3.0}),
    "own_window_of_1": ("local", {"window_size": 1}),
    "all_of_a_head_rotated": ("rotary", {"d_head": 6}),
    "more_heads_than_neurons": ("silu", {"d_mlp": 3, "n_heads": 5}),
    "sinks_and_alibi": ("alibi", {"use_attention_sinks": True}),
    "embedding_norm": ("silu", {"post_embedding_ln": True}),
}


def converted(model, **changes):
    family, settings = MODELS.get(model, (model, {}))
    return convert(build(family, **PLAIN | settings | changes))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_float64(name):
    model = converted(name)
    expected, compact = model.run_with_cache(tokens())
    stock = to_stock(model)
    assert type(stock) is HookedTransformer
    assert stock.cfg.attn_only
    assert {type(b.attn) for b in stock.blocks} == {Attention}
    logits, dense = stock.run_with_cache(tokens())
    assert relative(logits, expected) <= 1e-12
    for block in range(2 * N_LAYERS):
        dense_pattern, pattern = dense["pattern", block], compact["pattern", block]
        n_heads = pattern.shape[1]
        if block % 2:
            pattern = torch.diag_embed(pattern[..., 0])
        assert (dense_pattern[:, :n_heads] - pattern).abs().max() <= 1e-12
        assert dense["z", block][:, :, n_heads:].abs().sum() == 0
        for point in ("attn_out", "resid_post"):
            assert relative(dense[point, block], compact[point, block]) <= 1e-12
    assert torch.equal(model(tokens()), converted(name)(tokens()))  # the model is unchanged


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stock: setattr(stock.cfg, "window_size", 2),
        lambda stock: [block.attn.sinks.fill_(-1e4) for block in stock.blocks[1::2]],
        lambda stock: [block.attn.sinks.fill_(0.0) for block in stock.blocks[::2]],
    ],
    ids=["window 2", "no sink for neurons", "a sink for heads"],
)
@torch.no_grad()
def test_controls_fail(spoil):
    model = converted("silu")
    stock = to_stock(model)
    spoil(stock)
    assert relative(stock(tokens()), model(tokens())) > 1e-3


# The stock model with TransformerLens alone


def with_tokenizer(name, folder):
    family, settings = MODELS[name]
    source = build(family, **PLAIN | settings | {"d_vocab_out": 41})
    source.cfg.tokenizer_name = str(folder)
    source.set_tokenizer(tiny_tokenizer(41, folder), default_padding_side="left")
    return convert(source)


@torch.no_grad()
def test_transformer_lens_alone_builds_it_again(tmp_path):
    model = with_tokenizer("alibi", tmp_path / "tokenizer")
    stock = to_stock(model)
    again = HookedTransformer(HookedTransformerConfig.from_dict(stock.cfg.to_dict()))
    again.load_state_dict(stock.state_dict())
    assert torch.equal(again(tokens()), stock(tokens()))
    assert relative(again(tokens()), model(tokens())) <= 1e-12
    greedy = {"max_new_tokens": 5, "do_sample": False, "verbose": False}
    for cached in (True, False):
        text = again.generate("w3 w5", use_past_kv_cache=cached, **greedy)
        assert text == model.generate("w3 w5", **greedy)


@pytest.mark.parametrize("name", ["rotary", "alibi"])
@torch.no_grad()
def test_a_cache_of_keys_and_values_and_padding_on_the_left(name, tmp_path):
    """With a key-value cache, token by token or in pieces, the logits equal those of one pass."""
    model = with_tokenizer(name, tmp_path)
    stock = to_stock(model)
    assert stock.tokenizer is model.tokenizer
    expected = model(tokens())
    for pieces in ([1] * POS, [3, 1, 7]):
        cache = TransformerLensKeyValueCache.init_cache(stock.cfg, "cpu", batch_size=2)
        parts = [
            stock(part, past_kv_cache=cache, attention_mask=torch.ones_like(part))
            for part in tokens().split(pieces, dim=1)
        ]
        assert relative(torch.cat(parts, 1), expected) <= 1e-12
    ids = model.to_tokens(["w3", "w7 w2 w11 w5"], padding_side="left")
    real = ids != model.tokenizer.pad_token_id
    got, expected = stock(ids, padding_side="left"), model(ids, padding_side="left")
    assert not real.all()
    assert relative(got[real], expected[real]) <= 1e-12


# Refusals


def test_refused_with_all_reasons():
    for name, reason in (
        ("post_norm", "normalization of queries and keys"),
        ("shortformer", "shortformer"),
        ("local", "local layers with window 3"),
        ("bidirectional", "applies no mask"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            to_stock(converted(name))
        assert len(caught.value.reasons) == 1
    changes = {
        "act_fn": "gelu",
        "attn_scores_soft_cap": 2.0,
        "clip_qkv": 1.0,
        "use_logn_attn": True,
    }
    with pytest.raises(UnsupportedModelError) as caught:
        to_stock(convert(build("parallel_gated", **changes)), max_bytes=1)
    said = ["gated", "parallel", "clip_qkv", "soft_cap", "Bilinear", "use_logn_attn", "max_bytes"]
    assert len(caught.value.reasons) == len(said)
    assert all(word in str(caught.value) for word in said)
    with pytest.raises(UnsupportedModelError, match=r"attn_only_lens\.convert"):
        to_stock(build("silu"))


def test_size_is_known_before_anything_is_allocated(monkeypatch):
    model = converted("rotary", d_head=6)
    stock = to_stock(model)
    size = sum(tensor.nbytes for tensor in stock.state_dict().values())
    assert stock_bytes(stock.cfg) == size
    assert to_stock(model, max_bytes=size).cfg.d_head == 7
    monkeypatch.setattr("attn_only_lens.models.to_stock._empty", lambda model: pytest.fail("built"))
    with pytest.raises(UnsupportedModelError, match=f"would take {size:,} bytes") as caught:
        to_stock(model, max_bytes=size - 1)
    assert f"max_bytes is {size - 1:,}" in str(caught.value)


@torch.no_grad()
def test_nothing_is_shared_and_weights_are_those_of_now():
    model = converted("rotary", dtype=torch.float32).to(torch.float64, print_details=False)
    model.blocks[3].attn.W_out[29] = 0.0
    random, before = torch.get_rng_state(), model(tokens())
    stock = to_stock(model.eval())
    assert torch.equal(torch.get_rng_state(), random)
    assert not stock.training
    assert relative(stock(tokens()), before) <= 1e-12
    assert stock.blocks[3].attn.W_O[29].abs().max() == 0
    for parameter in stock.parameters():
        parameter.add_(1.0)
    assert torch.equal(model(tokens()), before)


def test_lower_precision_and_what_it_cannot_hold():
    source = build("llama", dtype=torch.bfloat16, scale=0.2)
    model = convert(source, gate=Bilinear.calibrated(source, tokens()))
    with pytest.raises(UnsupportedModelError, match=r"call \.to\(torch\.float32\) first"):
        to_stock(model)
    stock = to_stock(model.to(torch.float32, print_details=False))
    assert relative(stock(tokens()), model(tokens())) <= LOGIT_TOLERANCE[torch.float32]
    far, ids = converted("alibi", n_ctx=1009, dtype=torch.float32, d_mlp=3), tokens(pos=503)
    assert relative(to_stock(far)(ids), far(ids)) <= LOGIT_TOLERANCE[torch.float32]
    with pytest.raises(UnsupportedModelError, match="distinguish nearby positions"):
        to_stock(converted("alibi", dtype=torch.bfloat16))
