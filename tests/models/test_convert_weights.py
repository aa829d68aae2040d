"""Tests of a converted model's weights, and of copying, moving and training it."""

import copy
import io

import pytest
import torch
from common import tokens
from models import build
from torch import nn

from attn_only_lens import convert


def storages(model):
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", ["gelu", "llama", "parallel"])
def test_weights_are_shared_or_copied_and_the_source_is_not_changed(name, copied):
    model = build(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    cfg, state = copy.deepcopy(vars(model.cfg)), torch.get_rng_state()
    expected = model(tokens())
    converted = convert(model, copy_weights=copied)
    assert torch.equal(converted(tokens()), expected)
    if copied:
        owned = {p.untyped_storage().data_ptr() for p in converted.parameters()}
        assert owned.isdisjoint(storages(model))
    else:
        assert storages(converted) == storages(model)
    converted.run_with_cache(tokens())
    converted.to(torch.float32, print_details=False)
    assert converted.cfg.dtype == converted.blocks[1].cfg.dtype == torch.float32
    assert converted(tokens()).dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.cfg) == cfg
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model(tokens()), expected)


def test_training_a_copy_leaves_the_source_whole_and_a_shared_one_trains_both():
    for copied in (True, False):
        model = build("llama")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        converted = convert(model, copy_weights=copied)
        optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = converted(tokens(), return_type="loss")
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert same is copied


def test_copies_and_files():
    converted = convert(build("llama"))
    expected = converted(tokens())
    twin = copy.deepcopy(converted)
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    filled = convert(build("llama", scale=0.1))
    filled.load_state_dict(converted.state_dict())
    for model in (twin, loaded, filled):
        assert torch.equal(model(tokens()), expected)
        assert model.blocks[1].attn.cfg.n_heads == 37
        model.set_use_attn_result(True)  # a block's cfg is a live view of its own model's cfg
        assert model.blocks[1].attn.cfg.use_attn_result
    assert not converted.cfg.use_attn_result
    assert storages(twin).isdisjoint(storages(converted))


def test_parameters_keep_their_ties_flags_and_mode():
    model = build("gelu", d_vocab_out=41)
    model.unembed.W_U = nn.Parameter(model.unembed.W_U.data)
    model.blocks[0].mlp.b_out = model.blocks[1].mlp.b_out
    model.blocks[2].mlp.W_in.requires_grad_(False)
    model.eval()
    converted = convert(model)
    assert converted.blocks[1].attn.b_out is converted.blocks[3].attn.b_out
    assert not converted.blocks[5].attn.W_in.requires_grad
    assert converted.blocks[3].attn.W_in.requires_grad
    assert not any(module.training for module in converted.modules())
    assert converted.n_params_total == model.n_params_total
