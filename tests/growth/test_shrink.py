"""Tests that `shrink` restores the model bit for bit, or refuses if a required zero is not zero."""

import pytest
import torch
from common import relative, tokens
from growing import all_steps, same_bits, state
from models import build

from attn_only_lens import expansion as ex
from attn_only_lens import grow
from attn_only_lens.errors import GrowthError


@pytest.fixture
def model():
    return build("gelu")


def step(model, only=None):
    optimizer = torch.optim.SGD(
        [p for name, p in model.named_parameters() if only is None or name in only], lr=1e-2
    )
    model(tokens(), return_type="loss").backward()
    optimizer.step()


def test_the_source_may_change_meanwhile(model):
    same = build("gelu")
    grown = grow(model, ex.compose(all_steps(model), all_steps(model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shrunk = grown.shrink()
    assert same_bits(shrunk, same)
    assert shrunk.cfg.to_dict() == same.cfg.to_dict()
    before = state(grown.model)
    with torch.no_grad():
        for parameter in shrunk.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], now) for name, now in grown.model.state_dict().items())
    assert same_bits(grown.shrink(), same)  # a second time


def test_refused_after_training(model):
    grown = grow(model, all_steps(model))
    step(grown.model)
    with pytest.raises(GrowthError) as error:
        grown.shrink()
    for name in ("blocks.0.mlp.W_out", "blocks.0.attn.W_O", "blocks.1.mlp.b_out", "embed.W_E"):
        assert any(reason.startswith(f"{name}:") for reason in error.value.reasons), name
    assert len(error.value.reasons) == len(set(error.value.reasons))
    dropped = grown.shrink(drop_new=True)
    assert dropped.cfg.d_mlp == 37
    assert relative(dropped(tokens()), grown.model(tokens())) > 1e-6


def test_old_parts_that_were_trained_come_back_in_their_own_scale(model):
    grown = grow(model, all_steps(model))
    old_only = {"blocks.0.attn.W_K", "blocks.3.ln2.w"}
    step(grown.model, old_only)
    with torch.no_grad():  # keep the required zeros
        for zeros in grown.provenance.zeros:
            if zeros.name == "blocks.0.attn.W_K":
                grown.model.blocks[0].attn.W_K[..., 13:] = 0.0
    shrunk = grown.shrink()
    assert relative(shrunk(tokens()), grown.model(tokens())) < 1e-12
    assert relative(shrunk(tokens()), model(tokens())) > 1e-6
    assert torch.equal(shrunk.blocks[1].attn.W_K, model.blocks[1].attn.W_K)  # bitwise unchanged


def test_one_zero_that_woke_is_named(model):
    grown = grow(model, d_mlp=41)
    with torch.no_grad():
        grown.model.blocks[2].mlp.W_out[40, 3] = 1e-30
    with pytest.raises(GrowthError, match="cannot be shrunk") as error:
        grown.shrink()
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["blocks.2.mlp.W_out"]
    assert same_bits(grown.shrink(drop_new=True), model)


def test_hooks_and_dtypes(model):
    grown = grow(model, ex.WidenStream(3))
    grown.model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value)
    with pytest.raises(GrowthError, match="hooks are attached"):
        grown.shrink()
    grown.model.reset_hooks()
    grown.model.to(torch.float32)
    shrunk = grown.shrink()
    assert shrunk.W_E.dtype == torch.float32
    assert relative(shrunk(tokens()).double(), model(tokens())) < 2e-5
