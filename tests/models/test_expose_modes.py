"""Tests of an exposed bridge that is trained, copied, cast, hooked or processed meanwhile."""

import copy

import pytest
import torch
from bridges import NEURON, boot
from common import in_threads, meeting, mlp_hook, relative, tokens
from exposed_states import EXACT, drop, same, state
from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import Bilinear, calibrate, expose_neuron_heads
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.models.in_place import exposed_heads

pytestmark = pytest.mark.filterwarnings("ignore")
KEEP = [(mlp_hook("q"), lambda q, hook: None), (mlp_hook("z"), lambda z, hook: None)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_training_mode_with_dropout_behind_w_out(when):
    """With GPT-2's dropout, one seed gives the same values, and head outputs are not dropped."""
    bridge, twin = boot("gpt2"), boot("gpt2")
    for host in (bridge, twin):
        for module in host.original_model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
    if when == "before":
        bridge.train()
    exposed = expose_neuron_heads(bridge)
    if when == "after":
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "bert"])
@torch.no_grad()
def test_copies_weights_and_casts(name):
    bridge = boot(name)
    before = {key: value.clone() for key, value in bridge.state_dict().items()}
    expected = bridge(tokens())
    exposed = expose_neuron_heads(bridge)
    after = bridge.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    copied = copy.deepcopy(bridge)
    assert torch.equal(copied(tokens()), expected)
    by_z = bridge.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("z"), drop(NEURON, 2))])
    # A copy is exposed, has its own heads, and can be undone alone.
    assert copied.blocks[1].mlp._neuron_heads.mlp is copied.blocks[1].mlp
    edited = copied.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("z"), drop(NEURON, 2))])
    assert torch.equal(edited, by_z)
    assert not torch.equal(by_z, expected)
    for parameter in copied.original_model.parameters():
        parameter.zero_()
    assert torch.equal(bridge(tokens()), expected)
    # The heads use new weights at once.
    copied.original_model.load_state_dict(bridge.original_model.state_dict())
    logits, cache = copied.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    copied.to(torch.float32)
    logits, cache = copied.run_with_cache(tokens())
    assert logits.dtype == cache[mlp_hook("z")].dtype == torch.float32
    assert relative(logits, expected) <= 2e-5
    exposed.undo()
    assert type(bridge) is TransformerBridge
    assert mlp_hook("z") in copied.hook_dict, "the copy is exposed still"


@torch.no_grad()
def test_hooks_of_others_stay():
    """Permanent and temporary hooks stay, also on the MLP; none fires during the inspection."""
    bridge, calls = boot("gpt2"), []
    point = "blocks.1.mlp.out.hook_in"
    bridge.add_perma_hook("blocks.0.hook_in", lambda x, hook: calls.append("block"))
    bridge.add_hook(point, lambda x, hook: calls.append("post"))
    bridge.add_hook(point, drop(NEURON, -1))
    expected = bridge(tokens())
    assert calls == ["block", "post"]
    exposed = expose_neuron_heads(bridge)
    assert len(calls) == 2
    bridge.add_perma_hook(mlp_hook("z"), lambda z, hook: calls.append("z"))
    assert relative(bridge(tokens()), expected) <= EXACT
    assert calls[2:] == ["block", "z", "post"]
    exposed.undo()
    assert torch.equal(bridge(tokens()), expected)
    assert calls[5:] == ["block", "post"]


@torch.no_grad()
def test_twice_again_and_after_an_error():
    bridge = boot("gpt2")
    bridge(tokens())
    before, expected = state(bridge), bridge(tokens())
    with expose_neuron_heads(bridge) as same_one:
        assert same_one is bridge
        shown = state(bridge)
        with expose_neuron_heads(bridge):
            assert state(bridge) == shown
        assert state(bridge) == shown, "what the outer call has done stays"
        with pytest.raises(UnsupportedModelError, match="already exposed"):
            expose_neuron_heads(bridge, gate=Bilinear(2))
        assert state(bridge) == shown
    assert state(bridge) == before

    def fail(x, hook):
        raise RuntimeError("in a hook")

    for name in (mlp_hook("z"), "blocks.1.mlp.in.hook_out"):
        with pytest.raises(RuntimeError, match="in a hook"), expose_neuron_heads(bridge):
            bridge.run_with_hooks(tokens(), fwd_hooks=[(name, fail)])
        assert state(bridge) == before
    exposed = expose_neuron_heads(bridge)
    with pytest.raises(RuntimeError, match="in a hook"):
        bridge.run_with_hooks(tokens(), fwd_hooks=[("blocks.1.mlp.in.hook_out", fail)])
    # The state of the failed pass does not affect the next one.
    assert relative(bridge.run_with_hooks(tokens(1), fwd_hooks=KEEP), boot("gpt2")(tokens(1))) == (
        pytest.approx(0, abs=EXACT)
    )
    exposed.undo()
    exposed.undo()
    assert state(bridge) == before
    assert torch.equal(bridge(tokens()), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@torch.no_grad()
def test_a_pass_that_broke_off_after_the_heads_leaves_the_next_one_alone(name):
    """After a failure at hook_z or hook_result, the next pass is bitwise the plain model's."""
    bridge, x = boot(name), tokens(1, batch=3)
    expected = bridge(x)

    def fail(x, hook):
        raise RuntimeError("in a hook")

    keep = (mlp_hook("result"), lambda result, hook: None)
    for point in ("blocks.1.mlp.out.hook_in", mlp_hook("result")):
        with expose_neuron_heads(bridge):
            for heads in exposed_heads(bridge):
                heads.results = True
            with pytest.raises(RuntimeError, match="in a hook"):
                bridge.run_with_hooks(tokens(), fwd_hooks=[keep, (point, fail)])
            assert torch.equal(bridge(x), expected)


@torch.no_grad()
def test_a_copy_has_nothing_of_a_pass_that_broke_off():
    """A copy holds no activations of a failed pass; those with gradients could not be copied."""
    bridge = boot("gpt2")
    expected = bridge(tokens())

    def fail(x, hook):
        raise RuntimeError("in a hook")

    with expose_neuron_heads(bridge):
        left = bridge.blocks[1].mlp._neuron_heads.passing.values
        with pytest.raises(RuntimeError, match="in a hook"):
            bridge.run_with_hooks(tokens(), fwd_hooks=[("blocks.1.hook_out", fail)])
        assert not left
        bridge.blocks[1].mlp.get_submodule("in")(torch.ones(2, 11, 26, dtype=torch.float64))
        assert left, "half an MLP, run by hand"
        copied = copy.deepcopy(bridge)
        assert not copied.blocks[1].mlp._neuron_heads.passing.values
        assert torch.equal(copied(tokens()), expected)
        assert torch.equal(bridge(tokens()), expected)


# The activation modules, which run between the two halves of an MLP.
ACT = {"gpt2": "transformer.h.1.mlp.act", "llama": "model.layers.1.mlp.act_fn"}
ACT |= {"bert": "bert.encoder.layer.1.intermediate.intermediate_act_fn"}
ACT |= {"phi3": "model.layers.1.mlp.activation_fn"}


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("name", ACT)
@torch.no_grad()
def test_threads_share_a_bridge(name, gate):
    """Threads share a bridge although each pauses in the middle of an MLP."""
    # All inputs have one batch size, which a bridge keeps for its position embedding.
    inputs, bridge = [tokens(seed) for seed in (1, 2, 3)], boot(name)
    ranged = gate == "bilinear" and name in ("llama", "phi3")
    calibration = calibrate(bridge, tokens()) if ranged else None
    gates = Bilinear(calibration=calibration) if gate == "bilinear" else gate
    expose_neuron_heads(bridge, gate=gates)
    # With exact heads and no hook, the MLP's own activations are used.
    live = [(mlp_hook("z"), lambda z, hook: 0.5 * z)] if gate == "exact" else []
    with bridge.hooks(fwd_hooks=live):
        expected = [bridge(x) for x in inputs]
        act = bridge.original_model.get_submodule(ACT[name])
        handle = act.register_forward_hook(meeting(inputs))
        results_of_all = in_threads(torch.no_grad()(bridge), inputs)
        handle.remove()
    for results, one in zip(results_of_all, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_a_hook_may_run_the_bridge_again(name):
    """A hook in the middle of an MLP may run the bridge; the outer pass keeps its results."""
    bridge = boot(name)
    expose_neuron_heads(bridge)
    for heads in exposed_heads(bridge):
        heads.results = True
    halve = (mlp_hook("result"), lambda result, hook: 0.5 * result)
    with bridge.hooks(fwd_hooks=[halve]):
        expected, inner = bridge(tokens()), bridge(tokens(seed=3))
    for point in ("blocks.1.mlp.in.hook_out", mlp_hook("z"), "blocks.1.mlp.out.hook_in"):
        seen = []

        def again(x, hook, seen=seen):
            if not seen:
                seen.append(None)
                seen[0] = bridge(tokens(seed=3))

        got = bridge.run_with_hooks(tokens(), fwd_hooks=[(point, again), halve])
        assert relative(got, expected) <= EXACT
        assert relative(seen[0], inner) <= EXACT


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "native"])
def test_inference_mode(name, gate):
    """A bridge exposed and run in inference mode gives equal values; converted, it can train."""
    bridge, twin = boot(name), boot(name)
    generate = {"max_new_tokens": 3, "verbose": False, "stop_at_eos": False, "do_sample": False}
    drop_one = [(mlp_hook("z"), drop(NEURON, 2))]
    ranged = (name, gate) == ("llama", "bilinear")
    if gate == "bilinear":
        gate = Bilinear(calibration=calibrate(twin, tokens()) if ranged else None)
    expose_neuron_heads(twin, gate=gate)
    with torch.no_grad():
        expected, expected_cache = twin.run_with_cache(tokens())
        edited = twin.run_with_hooks(tokens(), fwd_hooks=drop_one)
        text = twin.generate(tokens()[:1, :5], **generate)
    with torch.inference_mode():
        converted = expose_neuron_heads(bridge, gate=gate, copy=True, copy_weights=True).model
        expose_neuron_heads(bridge, gate=gate)
        logits, cache = bridge.run_with_cache(tokens())
        assert torch.equal(logits, expected)
        assert all(torch.equal(cache[key], expected_cache[key]) for key in expected_cache)
        assert torch.equal(bridge.run_with_hooks(tokens(), fwd_hooks=drop_one), edited)
        assert torch.equal(bridge.generate(tokens()[:1, :5], **generate), text)
    for model in (bridge, converted):
        model(tokens()).square().mean().backward()
        assert all(not parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2"])
@torch.no_grad()
def test_processed_while_exposed(name):
    """Weights processed while exposed, after `undo`, are as if processed without exposing."""
    bridge, twin = boot(name), boot(name)
    exposed = expose_neuron_heads(bridge)
    for host in (bridge, twin):
        host.enable_compatibility_mode(disable_warnings=True)
    logits, cache = bridge.run_with_cache(tokens())
    expected, expected_cache = twin.run_with_cache(tokens())
    same(cache, expected_cache)
    assert relative(logits, expected) <= EXACT
    assert cache[mlp_hook("z")].squeeze(-1).equal(cache["blocks.1.mlp.hook_post"])
    exposed.undo()
    assert list(bridge.hook_dict) == list(twin.hook_dict)
    _, cache = bridge.run_with_cache(tokens())
    assert set(cache) == set(expected_cache)
    assert torch.equal(bridge(tokens()), twin(tokens()))
