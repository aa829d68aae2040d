"""Tests of an exposed model that is trained, copied, cast, hooked, shared or left by an error."""

import gc
import weakref
from copy import deepcopy
from functools import partial

import pytest
import torch
from bridges import NEURON, STATES, boot, exposed_copy
from common import in_threads, meeting, mlp_hook, relative, tokens
from exposed_states import (
    EXACT,
    bilinear,
    drop,
    each,
    fail,
    names_of,
    state,
    storages,
)
from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from libraries
KEEP = [(mlp_hook("q"), lambda q, hook: None), (mlp_hook("z"), lambda z, hook: None)]
HALVE = (mlp_hook("result"), lambda result, hook: 0.5 * result)
SIMPLE = pytest.mark.parametrize("make", each(["gpt2"], ["gelu"]))


def test_training_mode_with_dropout_behind_w_out():
    """With GPT-2's dropout, one seed gives the same values, and head outputs are not dropped."""
    bridge, twin = boot("gpt2"), boot("gpt2")
    for host in (bridge, twin):
        for module in host.original_model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
    exposed = expose_neuron_heads(bridge)
    bridge.train()
    twin.train()
    assert all(point.training for name, point in bridge.hook_dict.items() if ".mlp." in name)
    torch.manual_seed(5)
    expected = twin(tokens())
    assert relative(twin(tokens()), expected) > 0.01, "dropout is on"
    torch.manual_seed(5)
    assert relative(bridge.run_with_hooks(tokens(), fwd_hooks=KEEP), expected) <= EXACT
    bridge.eval()
    assert not any(point.training for point in bridge.hook_dict.values())
    exposed.undo()
    assert torch.equal(bridge(tokens()), twin.eval()(tokens()))


@pytest.mark.parametrize("make", each(["gpt2", "phi3"], ["llama"]))
@torch.no_grad()
def test_copies_weights_and_casts(make):
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(tokens())
    exposed = expose_neuron_heads(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    # A copy is exposed, has its own heads and weights, and is not undone with the original.
    copied = deepcopy(model)
    assert torch.equal(copied(tokens()), expected)
    edit = [(mlp_hook("z"), drop(NEURON, 2))]
    by_z = model.run_with_hooks(tokens(), fwd_hooks=edit)
    assert torch.equal(copied.run_with_hooks(tokens(), fwd_hooks=edit), by_z)
    assert not torch.equal(by_z, expected)
    weights, others = (getattr(host, "original_model", host) for host in (model, copied))
    for parameter in others.parameters():
        parameter.zero_()
    assert torch.equal(model(tokens()), expected)
    # The heads use new weights at once.
    others.load_state_dict(weights.state_dict())
    logits, _ = copied.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    copied.to(torch.float32)
    logits, cache = copied.run_with_cache(tokens())
    assert logits.dtype == cache[mlp_hook("z")].dtype == torch.float32
    assert relative(logits, expected) <= 2e-5
    exposed.undo()
    assert type(model) is type(make())
    assert mlp_hook("z") in copied.hook_dict, "the copy is exposed still"


@SIMPLE
@torch.no_grad()
def test_hooks_of_others_stay(make):
    """Permanent and temporary hooks stay, also on the MLP; none fires during the inspection."""
    model, calls = make(), []
    post = names_of(model)[1]
    first = "blocks.0.hook_resid_pre" if post == mlp_hook("post") else "blocks.0.hook_in"
    model.add_perma_hook(first, lambda x, hook: calls.append("block"))
    model.add_hook(post, lambda x, hook: calls.append("post"))
    model.add_hook(post, drop(NEURON, -1))
    expected = model(tokens())
    assert calls == ["block", "post"]
    exposed = expose_neuron_heads(model)
    assert len(calls) == 2
    model.add_perma_hook(mlp_hook("z"), lambda z, hook: calls.append("z"))
    assert relative(model(tokens()), expected) <= EXACT
    assert calls[2:] == ["block", "z", "post"]
    exposed.undo()
    assert torch.equal(model(tokens()), expected)
    assert calls[5:] == ["block", "post"]
    model.reset_hooks()
    assert not torch.equal(model(tokens()), expected), "the edit was there"
    assert calls[7:] == ["block"]


@SIMPLE
@torch.no_grad()
def test_twice_and_after_an_error(make):
    model = make()
    model(tokens())
    before, expected = state(model), model(tokens())
    with expose_neuron_heads(model) as same_one:
        assert same_one is model
        shown = state(model)
        with expose_neuron_heads(model):
            assert state(model) == shown
        assert state(model) == shown, "what the outer call has done stays"
        with pytest.raises(UnsupportedModelError, match="already exposed"):
            expose_neuron_heads(model, gate=Bilinear(2))
        assert state(model) == shown
    assert state(model) == before
    pre, _ = names_of(model)
    for name in (mlp_hook("z"), pre):
        with pytest.raises(RuntimeError, match="in a hook"), expose_neuron_heads(model):
            model.run_with_hooks(tokens(), fwd_hooks=[(name, fail)])
        assert state(model) == before
    exposed = expose_neuron_heads(model)
    exposed.undo()
    exposed.undo()
    assert state(model) == before
    assert torch.equal(model(tokens()), expected)


@pytest.mark.parametrize("make", each(["gpt2", "bert"], ["gelu"]))
@torch.no_grad()
def test_a_pass_that_broke_off_leaves_the_next_one_alone(make):
    """After a failure in or behind an MLP, the next pass is bitwise as before."""
    model, x = make(), tokens(1, batch=3)
    plain, keep = model(x), (mlp_hook("result"), lambda result, hook: None)
    expose_neuron_heads(model)
    model.set_use_attn_result(True)
    expected = model(x)
    for point in (*names_of(model), mlp_hook("z"), mlp_hook("result")):
        with pytest.raises(RuntimeError, match="in a hook"):
            model.run_with_hooks(tokens(), fwd_hooks=[keep, (point, fail)])
        assert torch.equal(model(x), expected), point
    assert relative(model.run_with_hooks(x, fwd_hooks=KEEP), plain) <= EXACT


# The activation modules, which run between the two halves of an MLP.
ACT = {
    "LlamaForCausalLM": "model.layers.1.mlp.act_fn",
    "BertForMaskedLM": "bert.encoder.layer.1.intermediate.intermediate_act_fn",
}


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("make", each(["bert", "llama"], ["gelu"]))
@torch.no_grad()
def test_threads_share_a_model(make, gate):
    """Each thread stops in the middle of an MLP, until all have reached it."""
    # All inputs have one batch size, which a bridge keeps for its position embedding.
    inputs, model = [tokens(seed) for seed in (1, 2, 3)], make()
    pause, is_bridge = [lambda: None], isinstance(model, TransformerBridge)
    if not is_bridge:
        mlp = model.blocks[1].mlp
        mlp.act_fn = partial(lambda act, q: (pause[0](), act(q))[1], mlp.act_fn)
    expose_neuron_heads(model, gate=bilinear(model) if gate == "bilinear" else gate)
    if is_bridge:
        act = model.original_model.get_submodule(ACT[type(model.original_model).__name__])
        act.register_forward_hook(lambda *_: pause[0]())
    # With exact heads and no hook, the MLP's own activations are used.
    live = [(mlp_hook("z"), lambda z, hook: 0.5 * z)] if gate == "exact" else []
    with model.hooks(fwd_hooks=live):
        expected = [model(x) for x in inputs]
        pause[0] = meeting(inputs)
        results_of_all = in_threads(torch.no_grad()(model), inputs, times=5)
    for results, one in zip(results_of_all, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("make", each(["llama"], ["llama"]))
@torch.no_grad()
def test_a_hook_may_run_the_model_again(make, gate):
    """A hook within an MLP may run the model, or its first layers; the outer pass is as before."""
    model = make()
    expose_neuron_heads(model, gate=bilinear(model) if gate == "bilinear" else gate)
    model.set_use_attn_result(True)
    stops = (None,) if isinstance(model, TransformerBridge) else (None, 2)
    with model.hooks(fwd_hooks=[HALVE]):
        expected, inner = model(tokens()), model(tokens(seed=3))
    for point in (*names_of(model), mlp_hook("z")):
        for stop in stops:
            seen, how = [], {} if stop is None else {"stop_at_layer": stop}

            def again(x, hook, seen=seen, how=how):
                if not seen:
                    seen.append(None)
                    seen[0] = model(tokens(seed=3), **how)

            got = model.run_with_hooks(tokens(), fwd_hooks=[(point, again), HALVE])
            assert relative(got, expected) <= EXACT
            assert stop or relative(seen[0], inner) <= EXACT


def test_inference_mode():
    """A bridge exposed and run in inference mode gives equal values; a copy can train."""
    bridge, twin = boot("llama"), boot("llama")
    drop_one, gate = [(mlp_hook("z"), drop(NEURON, 2))], bilinear(twin)
    expose_neuron_heads(twin, gate=gate)
    with torch.no_grad():
        expected, expected_cache = twin.run_with_cache(tokens())
        edited = twin.run_with_hooks(tokens(), fwd_hooks=drop_one)
    with torch.inference_mode():
        copied = expose_neuron_heads(bridge, gate=gate, copy=True, copy_weights=True).model
        expose_neuron_heads(bridge, gate=gate)
        logits, cache = bridge.run_with_cache(tokens())
        assert torch.equal(logits, expected)
        assert all(torch.equal(cache[key], expected_cache[key]) for key in expected_cache)
        assert torch.equal(bridge.run_with_hooks(tokens(), fwd_hooks=drop_one), edited)
    for model in (bridge, copied):
        model(tokens()).square().mean().backward()
        assert all(not parameter.is_inference() for parameter in model.parameters())


# What `expose_neuron_heads(model, copy=True)` shares with the model, or copies

COPIED = {
    "plain": ("gpt2", "phi3", "bert"),
    "names": ("neox",),
    "processed": ("gemma2", "native_gated", "bert"),
}
CASES = [
    pytest.param(*case.values, way, id=f"{case.id} {way}", marks=case.marks)
    for way, families in COPIED.items()
    for case in each(families, ["llama"] * (way == "plain"))
]


def settings_of(model):
    modules = {name: (id(m), type(m), len(m._forward_hooks)) for name, m in model.named_modules()}
    return modules, list(model.hook_dict), vars(model.cfg).copy()


@pytest.mark.both_versions
@pytest.mark.parametrize(("make", "way"), CASES)
@torch.no_grad()
def test_same_function_and_whose_weights(make, way):
    """The model is unchanged; if a weight of it changes, the copy that shares weights follows."""
    model, twin = make(dtype=torch.float32), make(dtype=torch.float32)
    for host in (model, twin):
        STATES[way](host)
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
