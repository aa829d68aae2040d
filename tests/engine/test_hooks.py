"""Tests that hooks added by users are refused and hooks added by libraries are not."""

import bridges
import pandas as pd
import pytest
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from bridges import exposed
from common import tokens
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

from attn_only_lens import Contrast, circuits, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.model_checks import find_hooks
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
POS = 7
SAME = {"check_exact": False, "rtol": 0, "atol": 1e-10}
METRIC = p.logit_diff(correct=7, wrong=8)
CLEAN = tokens(1, pos=POS)
PAIR = Contrast(CLEAN, (CLEAN + 5) % bridges.D_VOCAB, METRIC)
SITES = p.Sites(["L0H1", "L1H0", "L0N3", "L1N5"], POS - 1)


def sweep(model):
    return p.activation_patch(model, PAIR, sites=SITES)


def look(*args):
    """Change nothing, as a hook; the package cannot know that."""


HOOKED = {
    "forward": lambda model: model.blocks[1].mlp.register_forward_hook(look),
    "forward pre": lambda model: model.blocks[1].mlp.register_forward_pre_hook(look),
    "backward": lambda model: model.blocks[1].mlp.register_full_backward_hook(look),
    "backward pre": lambda model: model.blocks[1].mlp.register_full_backward_pre_hook(look),
}


def test_hooks_of_torch_modules_are_refused_by_name():
    model = exposed("gpt2")
    for attach in HOOKED.values():
        with attach(model), pytest.raises(InputError, match=r"blocks\.1\.mlp\b.*remove"):
            sweep(model)
    sweep(model)
    with HOOKED["forward"](model):
        for run in (p.attribution, circuits.attribution_graph, circuits.discover):
            with pytest.raises(InputError, match=r"blocks\.1\.mlp\b"):
                run(model, PAIR)


def test_hooks_everywhere_are_refused_unless_they_count():
    model = exposed("gpt2")
    expected = sweep(model).to_frame()
    handle = torch_module.register_module_forward_hook(look)
    try:
        with pytest.raises(InputError, match="register_module_forward_hook"):
            sweep(model)
    finally:
        handle.remove()
    with FlopCounterMode(display=False):
        pd.testing.assert_frame_equal(sweep(model).to_frame(), expected, **SAME)


@pytest.mark.both_versions
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_hooks_of_libraries_are_not_refused(name):
    plain = exposed(name)
    expected = sweep(plain).to_frame()
    recorded = exposed(name)
    recorded.original_model(CLEAN, output_hidden_states=True, output_attentions=True)
    left = [m for m in recorded.original_model.modules() if m._forward_hooks]
    assert len(left) > 3 or name == "bert"
    placed = bridges.original(name)
    for module in placed.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    assert "forward" in vars(placed)
    for model in (recorded, expose_neuron_heads(bridges.bridged(placed)).model):
        assert not find_hooks(model).users
        pd.testing.assert_frame_equal(sweep(model).to_frame(), expected, **SAME)
        assert len(p.attribution(model, PAIR, sites=SITES).frame) == len(expected)
    # Control: a user's hook next to the libraries' hooks is found.
    recorded.original_model.register_forward_hook(look)
    assert find_hooks(recorded).users == ("original_model",)
