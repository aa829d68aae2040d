"""Tests that models without an exact conversion are refused with all reasons, and unchanged."""

import pytest
import torch
from common import tokens
from models import BASE, build
from torch import nn

from attn_only_lens import convert
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig


def stock(**changes):
    return HookedTransformer(HookedTransformerConfig(**BASE | changes))


def with_foreign_mlp():
    model = stock()
    model.blocks[1].mlp = nn.Identity()
    return model


def with_swapped_activation():
    model = stock()
    model.blocks[2].mlp.act_fn = torch.nn.functional.silu
    return model


def with_hook():
    model = stock()
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: x, is_permanent=True)
    return model


def quantized():
    model = stock()
    model.cfg.load_in_4bit = True
    return model


def truncated():
    model = stock()
    model.blocks = model.blocks[:2]
    return model


def with_replaced_forward():
    model = stock()
    model.blocks[1].mlp.forward = torch.zeros_like
    return model


def inferred():
    with torch.inference_mode():
        return stock()


class Subclass(HookedTransformer):
    pass


REFUSED = {
    "solu": (lambda: stock(act_fn="solu"), "act_fn is 'solu'"),
    "moe": (
        lambda: stock(num_experts=3, experts_per_token=2, gated_mlp=True, act_fn="silu"),
        "mixture of 3 experts",
    ),
    "attention-only": (lambda: stock(attn_only=True), "already attention-only"),
    "converted": (lambda: convert(stock()), "already attention-only"),
    "subclass": (lambda: Subclass(HookedTransformerConfig(**BASE)), "Subclass"),
    "foreign mlp": (with_foreign_mlp, "layer 1: its mlp is an Identity"),
    "swapped activation": (with_swapped_activation, "layer 2: its act_fn is not gelu"),
    "hooks": (with_hook, "blocks.0.hook_resid_pre"),
    "fewer blocks": (truncated, "it has 2 blocks, but cfg.n_layers is 3"),
    "replaced forward": (with_replaced_forward, r"forward was replaced on blocks\.1\.mlp"),
    "inference tensors": (inferred, "inference tensors"),
    "no model": (lambda: nn.Linear(2, 3), "expected a transformer_lens.HookedTransformer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_untouched(case):
    make, reason = REFUSED[case]
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(UnsupportedModelError, match=reason):
        convert(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_all_reasons_in_one_error():
    model = stock(act_fn="solu")
    model.cfg.load_in_4bit = True
    model.cfg.n_devices = 3
    model.add_hook("hook_embed", lambda x, hook: x)
    with pytest.raises(UnsupportedModelError) as caught:
        convert(model)
    assert len(caught.value.reasons) == 4
    for part in ("solu", "quantized", "3 devices", "hook_embed"):
        assert part in str(caught.value)


def test_the_control_is_accepted():
    """The control: the unchanged settings of the cases above can be converted."""
    model = build("gelu")
    assert convert(model)(tokens()).shape == (2, 11, 43)
