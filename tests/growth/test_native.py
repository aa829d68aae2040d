"""Tests of growing TransformerLens' native models behind a bridge, and of `shrink`."""

import pytest
import torch
from common import D_VOCAB, relative, tokens
from growing import (
    NATIVES,
    all_steps,
    cached,
    in_float64,
    loss,
    native,
    same_bits,
    state,
    worst_activation,
)
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import grow, growth
from attn_only_lens.errors import InputError
from attn_only_lens.growth.models._grow import read

pytestmark = pytest.mark.numeric

SIZES = {"d_mlp": 41, "n_heads": 4, "d_head": 18, "d_model": 37, "n_layers": 3}
EXACT = 1e-13


def sizes_for(name):
    if name == "attention_only":
        return {key: size for key, size in SIZES.items() if key != "d_mlp"}
    return SIZES | ({"n_heads": 9} if name == "grouped" else {})


@pytest.mark.parametrize("name", [name for name in NATIVES if name not in ("rms", "caps")])
def test_all_six_at_once_and_twice_keep_logits_and_old_activations(name, monkeypatch):
    with in_float64(monkeypatch):
        bridge = native(name)
        before, (logits, old) = state(bridge), cached(bridge)
        # Free entries are not zero, so required zeros come from the expansion, not from the init.
        once = grow(bridge, **sizes_for(name), init=growth.init.normal(0.3), seed=1)
        twice = grow(once.model, [growth.WidenStream(3), growth.InsertLayer(at=0)], seed=2)
        moved = once.provenance.then(twice.provenance)
        for grown, provenance in ((once, once.provenance), (twice, moved)):
            new_logits, new = cached(grown.model)
            assert relative(new_logits, logits) < EXACT
            worst, _ = worst_activation(provenance, old, new)
            assert max(worst.values()) < EXACT, max(worst, key=worst.get)
            assert sum("hook_pattern" in hook or "hook_z" in hook for hook in worst) == 4
        assert torch.equal(once.shrink()(tokens()), logits)
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())


def test_heads_join_groups():
    bridge = native("grouped")  # 6 heads, 2 groups
    logits, old = cached(bridge)
    grown = grow(bridge, growth.AddHeads(4, into_groups=True))
    assert (grown.model.cfg.n_heads, grown.model.cfg.n_key_value_heads) == (10, 2)
    assert [grown.provenance[f"L1H{head}"] for head in range(6)] == [
        *("L1H0", "L1H1", "L1H2"),
        *("L1H5", "L1H6", "L1H7"),
    ]
    new_logits, new = cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert max(worst_activation(grown.provenance, old, new)[0].values()) < EXACT
    assert same_bits(grown.shrink(), bridge)


def test_what_is_not_function_comes_along(tmp_path):
    bridge = native("rotary")
    bridge.eval()
    bridge.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path)
    list(bridge.parameters())[3].requires_grad_(False)
    grown = grow(bridge, d_mlp=41).model
    assert not any(module.training for module in grown.modules())
    assert grown.tokenizer.get_vocab() == bridge.tokenizer.get_vocab()
    frozen = [[n for n, p in m.named_parameters() if not p.requires_grad] for m in (bridge, grown)]
    assert frozen[0] == frozen[1] != []
    pointers = {tensor.data_ptr() for tensor in bridge.state_dict().values() if tensor.numel()}
    assert not pointers & {tensor.data_ptr() for tensor in grown.state_dict().values()}


# Tied embeddings and tables


@pytest.mark.parametrize("name", ["ln", "rms_pre"])
def test_tied_embeddings_come_untied_where_they_must_differ(name):
    bridge = native(name)
    tied = bridge.original_model
    tied.head._original_component.weight = tied.tok_embed.weight
    grown = grow(bridge, d_model=37)
    model = grown.model.original_model
    assert model.head.weight is not model.tok_embed.weight
    assert any(note.startswith("untied: ") for note in grown.notes)
    assert relative(grown.model(tokens()), bridge(tokens())) < (EXACT if name == "ln" else 2e-6)
    again = grown.shrink()  # the weights are tied again if neither was trained
    assert again.original_model.head.weight is again.original_model.tok_embed.weight
    assert torch.equal(again(tokens()), bridge(tokens()))
    model.head.weight.data[0] += 1.0
    trained = grown.shrink().original_model
    assert trained.head.weight is not trained.tok_embed.weight


def test_rotary_tables_come_along_as_they_are():
    bridge = native("rotary")
    bridge.to(torch.bfloat16).to(torch.float64)  # the tables are rounded to bfloat16
    logits = bridge(tokens())
    grown = grow(bridge, **SIZES)
    assert relative(grown.model(tokens()), logits) < EXACT
    assert torch.equal(grown.shrink()(tokens()), logits)
    old, new = (model.original_model.rotary.cos_cached for model in (bridge, grown.model))
    assert old.data_ptr() != new.data_ptr()


def test_a_list_of_expansions_is_applied_in_its_order():
    first, second = growth.InsertLayer(at=0), growth.InsertLayer(at=2)
    assert grow(native(), [first, second]).provenance.new_layers == ("L0", "L2")
    assert grow(native(), [second, first]).provenance.new_layers == ("L0", "L3")
    assert same_bits(grow(native(), []).model, native())


# Back to the original


def test_the_source_may_change_meanwhile():
    bridge, same = native(), native()
    grown = grow(bridge, [all_steps(bridge), all_steps(bridge)])
    for _ in range(2):
        with torch.no_grad():
            for parameter in bridge.parameters():
                parameter.zero_()
        before, bridge = state(grown.model), grown.shrink()
        assert same_bits(bridge, same)
    assert all(torch.equal(before[name], now) for name, now in grown.model.state_dict().items())


def test_a_trained_model_is_shrunk_only_if_asked():
    bridge = native()
    grown = grow(bridge, all_steps(bridge))
    loss(grown.model).backward()
    torch.optim.SGD(grown.model.parameters(), lr=1e-2).step()
    with pytest.raises(InputError) as error:
        grown.shrink()
    for name in ("blocks.0.mlp.W_out", "blocks.0.attn.W_O", "blocks.1.mlp.b_out", "embed.W_E"):
        assert any(reason.startswith(f"{name}:") for reason in error.value.reasons), name
    assert len(error.value.reasons) == len(set(error.value.reasons))
    dropped = grown.shrink(drop_new=True)
    assert dropped.cfg.d_mlp == 37
    assert relative(dropped(tokens()), grown.model(tokens())) > 1e-6


def test_old_parts_that_were_trained_come_back_in_their_own_scale():
    bridge = native()
    grown = grow(bridge, all_steps(bridge))
    tensors = read(grown.model).tensors
    tensors["blocks.0.attn.W_K"][:2, :26, :13] *= 1.1  # an old part that growth has scaled
    tensors["blocks.2.ln2.w"][:26] += 0.2
    shrunk = grown.shrink()
    assert relative(shrunk(tokens()), grown.model(tokens())) < 1e-12
    assert relative(shrunk(tokens()), bridge(tokens())) > 1e-6
    kept = "blocks.1.attn.W_Q"
    assert torch.equal(read(shrunk).tensors[kept], read(bridge).tensors[kept])


def test_shrinking_another_dtype():
    bridge = native()
    grown = grow(bridge, growth.WidenStream(3))
    grown.model.to(torch.float32)
    assert relative(grown.shrink()(tokens()).double(), bridge(tokens())) < 2e-5
