"""Tests of what `expose_neuron_heads(model, copy=True)` shares with the model or copies."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from bridges import STATES, boot, exposed_copy
from common import mlp_hook, relative, tokens
from exposed_states import EXACT, each
from torch import nn

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers
FAMILIES = {
    "plain": ("gpt2", "phi3", "bert"),
    "names": ("neox",),
    "processed": ("gemma2", "native_gated", "bert"),
}
CASES = [
    pytest.param(*case.values, state, id=f"{case.id} {state}", marks=case.marks)
    for state, families in FAMILIES.items()
    for case in each(families, ["llama"] * (state == "plain"))
]


def settings_of(model):
    modules = {name: (id(m), type(m), len(m._forward_hooks)) for name, m in model.named_modules()}
    return modules, list(model.hook_dict), vars(model.cfg).copy()


def storages(model):
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.both_versions
@pytest.mark.parametrize(("make", "state"), CASES)
@torch.no_grad()
def test_same_function_and_whose_weights(make, state):
    """The model is unchanged; if a weight of it changes, the copy that shares weights follows."""
    model, twin = make(dtype=torch.float32), make(dtype=torch.float32)
    for host in (model, twin):
        STATES[state](host)
    expected, expected_cache = twin.run_with_cache(tokens())
    before, mode = settings_of(model), {n: m.training for n, m in model.named_modules()}
    sharing, copied = exposed_copy(model), exposed_copy(model, copy_weights=True)
    for copy in (sharing, copied):
        assert torch.equal(copy(tokens()), expected)
        logits, cache = copy.run_with_cache(tokens())
        assert relative(logits, expected) <= 2e-5
        assert set(expected_cache) < set(cache)
        assert mlp_hook("pattern") in cache
        assert {n: m.training for n, m in copy.named_modules() if n in mode} == mode
    assert type(model) is type(twin)
    assert torch.equal(model(tokens()), expected)
    assert settings_of(model) == before
    assert storages(sharing) == storages(model)
    assert not storages(copied) & storages(model)
    assert len(storages(copied)) == len(storages(model))
    # Whole weights are changed: in joint attention, q, k and v are views of one weight.
    for parameter in model.parameters():
        parameter.mul_(1.5) if parameter.ndim == 2 else None
    assert torch.equal(sharing(tokens()), model(tokens()))
    assert not torch.equal(model(tokens()), expected)
    assert torch.equal(copied(tokens()), expected)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@torch.no_grad()
def test_the_copy_holds_nothing_of_the_callers_modules(name):
    """The copy drops TransformerBridge's capture hooks, closures that a plain deepcopy keeps."""
    bridge = boot(name)
    expected = bridge(tokens())  # attaches the capture hooks
    converted, plain_copy = exposed_copy(bridge), deepcopy(bridge)
    modules = [weakref.ref(module) for module in bridge.original_model.modules()]
    del bridge
    gc.collect()
    assert any(module() is not None for module in modules), "the control"
    del plain_copy
    gc.collect()
    assert not any(module() is not None for module in modules)
    assert torch.equal(converted(tokens()), expected)


@torch.no_grad()
def test_settings_of_the_copy_are_its_own():
    bridge = boot("gpt2")
    converted = exposed_copy(bridge)
    assert converted.tokenizer is bridge.tokenizer
    converted.set_use_attn_result(True)
    converted.cfg.use_split_qkv_input = True
    assert not bridge.cfg.use_attn_result
    assert not bridge.cfg.use_split_qkv_input
    assert relative(converted(tokens()), bridge(tokens())) <= EXACT


@torch.no_grad()
def test_what_cannot_be_copied_is_refused_with_all_reasons():
    with pytest.raises(UnsupportedModelError, match="pass copy=True, too"):
        expose_neuron_heads(boot("gpt2"), copy_weights=True)
    bridge = boot("llama")
    with pytest.raises(UnsupportedModelError, match=r"expose_neuron_heads\(bridge, copy=True\)"):
        convert(bridge)
    with expose_neuron_heads(bridge), pytest.raises(UnsupportedModelError, match="undo"):
        exposed_copy(bridge)
    bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: None)
    bridge.blocks[1].mlp.original_component.act_fn = nn.Tanh()
    with pytest.raises(UnsupportedModelError, match=r"hooks are attached.*would be lost") as caught:
        exposed_copy(bridge)
    assert len(caught.value.reasons) == 2


@pytest.mark.both_versions
@torch.no_grad()
def test_bert_has_no_module_for_its_mlp():
    """BERT's MLP runs within its layer; transformer-lens 4 hooks the layer's parts to show it."""
    bridge = boot("bert")
    expected = bridge(tokens())
    converted = exposed_copy(bridge)
    double = [("blocks.1.mlp.hook_in", lambda x, hook: x * 2.0)]
    edited = boot("bert").run_with_hooks(tokens(), fwd_hooks=double)
    assert torch.equal(edited, expected) == HAS_HOOKED_TRANSFORMER, "it fires with 4"
    assert relative(converted.run_with_hooks(tokens(), fwd_hooks=double), edited) <= EXACT
    with bridge.hooks(fwd_hooks=double):
        assert torch.equal(converted(tokens()), expected)
    # Removed hooks stay removed in the copy; a permanent user-added hook is refused.
    bridge.add_hook("blocks.0.mlp.in.hook_in", lambda x, hook: None, is_permanent=True)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.mlp\.in\.hook_in"):
        exposed_copy(bridge)
    bridge.reset_hooks(including_permanent=True)
    assert torch.equal(exposed_copy(bridge).run_with_hooks(tokens(), fwd_hooks=double), expected)
