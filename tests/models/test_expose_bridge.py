"""Tests of neuron-heads in place on a TransformerBridge around models that are built here.

The references are the unexposed twin of each bridge, and the transformers model without a
bridge: its logits, and its neurons computed from its weights with formulas in this file.
"""

import math

import pytest
import torch
from bridges import EVERY, FAMILIES, NEURON, boot, inputs, original
from common import BATCH, D_MLP, mlp_hook, relative, tokens
from exposed_states import EXACT, drop, same, state

from attn_only_lens import Bilinear, expose_neuron_heads, neuron_gate, neuron_pattern
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.models import Calibration
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
# TransformerLens' attention for GPT-NeoX and Phi 3 computes rotations in float32, not float64.
THEIR_FLOAT32 = {"neox": 1e-6, "neox_sequential": 1e-6, "phi3": 1e-6}
NOT_NATIVE = [name for name in EVERY if not name.startswith("native")]
# In compatibility mode, transformer-lens 3.9 makes these models' weights float32, then raises.
THEIR_WEIGHTS_FLOAT32 = {"gpt_neo", "gptj", "qwen2", "native_gated"} & (
    set(FAMILIES) if HAS_HOOKED_TRANSFORMER else set()
)
# TransformerLens does not know ViT's patch embedding and cannot process its weights.
UNPROCESSED = {"vit"}
# The attention of these models has no hook_result.
NO_ATTENTION_RESULT = {"gpt_neo", "gptj", "bert", "vit", "native", "native_gated"}

WEIGHT = {
    "silu": torch.sigmoid,
    "relu": lambda q: (q > 0).to(q),
    "gelu": lambda q: torch.erfc(-q / math.sqrt(2)) / 2,
    "tanh": lambda q: torch.sigmoid(2 * math.sqrt(2 / math.pi) * (q + 0.044715 * q**3)),
}
"""The factor p of each activation q · p(q), defined independently of the package."""


def out_in(layer=1):
    return f"blocks.{layer}.mlp.out.hook_in"


def compatibility_mode(bridge, name):
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=name in UNPROCESSED)


@pytest.mark.parametrize("compatible", ["never", "before", "after"])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_logits_and_every_hook(name, compatible):
    lower = compatible != "never" and name in THEIR_WEIGHTS_FLOAT32
    dtype, bound = (torch.float32, 2e-6) if lower else (torch.float64, EXACT)
    bridge, twin, x = boot(name, dtype), boot(name, dtype), inputs(name)
    if compatible == "before":
        compatibility_mode(bridge, name)
    before = state(bridge)
    exposed = expose_neuron_heads(bridge)
    for host in [twin] * (compatible != "never") + [bridge] * (compatible == "after"):
        compatibility_mode(host, name)
    expected, expected_cache = twin(x), twin.run_with_cache(x)[1]
    assert torch.equal(bridge(x), expected)
    logits, cache = bridge.run_with_cache(x)
    assert relative(logits, expected) <= bound
    assert set(cache) - set(expected_cache) == {
        mlp_hook(point, layer)
        for layer in (0, 1)
        for point in ("q", "k", "v", "attn_scores", "pattern", "z")
    }
    same(cache, expected_cache, bound)
    pos = expected_cache[out_in()].shape[1]
    for point in ("q", "k", "v", "z"):
        assert cache[mlp_hook(point)].shape == (BATCH, pos, D_MLP, 1)
    for point in ("attn_scores", "pattern"):
        assert cache[mlp_hook(point)].shape == (BATCH, D_MLP, pos, 2)
    z = cache[mlp_hook("z")].squeeze(-1)
    assert relative(z, expected_cache[out_in()]) <= bound
    pattern = neuron_pattern(cache, "L1N29")
    v = cache[mlp_hook("v")][..., NEURON, 0]
    assert relative(pattern[..., 0] * v, z[..., NEURON]) <= bound
    assert torch.equal(neuron_gate(cache, "L1N29"), pattern[..., 0])
    # An edit of z equals the same edit of the activation. The control: it changes the logits.
    by_z = bridge.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), drop(NEURON, 2))])
    by_post = twin.run_with_hooks(x, fwd_hooks=[(out_in(), drop(NEURON, -1))])
    assert relative(by_z, by_post) <= bound
    assert relative(by_z, expected) > 1e3 * bound
    exposed.undo()
    assert torch.equal(bridge(x), expected)
    if compatible != "after":
        assert state(bridge) == before
    assert list(bridge.hook_dict) == list(twin.hook_dict)


@pytest.mark.parametrize("name", NOT_NATIVE)
@torch.no_grad()
def test_neurons_from_the_weights_of_the_model_that_was_not_bridged(name):
    source, bridge, x = original(name), boot(name), inputs(name)
    expose_neuron_heads(bridge)
    logits, cache = bridge.run_with_cache(x)
    bound = THEIR_FLOAT32.get(name, EXACT)
    for layer in (0, 1):
        module = source.get_submodule(FAMILIES[name].layers)[layer]
        *before, out = (module.get_submodule(path) for path in FAMILIES[name].parts)
        seen = {}
        handles = [
            before[0].register_forward_pre_hook(lambda m, args, seen=seen: seen.update(x=args[0]))
        ]
        handles.append(
            out.register_forward_pre_hook(lambda m, args, seen=seen: seen.update(post=args[0]))
        )
        assert relative(logits, source(x).logits) <= bound
        for handle in handles:
            handle.remove()
        made = [project(part, seen["x"]) for part in before]
        q, *up = made[0].chunk(2, dim=-1) if made[0].shape[-1] == 2 * D_MLP else made
        gate = WEIGHT[FAMILIES[name].act](q)
        v = q * up[0] if up else q
        expected = {"q": q, "v": v, "z": gate * v, "k": torch.zeros_like(q)}
        for point, value in expected.items():
            got = cache[mlp_hook(point, layer)].squeeze(-1)
            assert (got - value).abs().max() <= bound * max(value.abs().max(), 1e-9), point
        pattern = torch.stack([gate, 1 - gate], dim=-1).transpose(1, 2)
        assert (cache[mlp_hook("pattern", layer)] - pattern).abs().max() <= bound
        assert (cache[mlp_hook("attn_scores", layer)].softmax(-1) - pattern).abs().max() <= bound
        # The transformers model computes the same activations. The control: another neuron's.
        assert relative(gate * v, seen["post"]) <= EXACT
        assert relative(cache[mlp_hook("z", layer)].squeeze(-1).roll(1, -1), gate * v) > 0.1


def project(part, x):
    """Return x · W + b, with the weights of a Linear or a Conv1D."""
    bias = 0.0 if part.bias is None else part.bias
    return x @ (part.weight if type(part).__name__ == "Conv1D" else part.weight.T) + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "bert"])
@torch.no_grad()
def test_lower_precision(name, dtype):
    """In half precision, exposing adds no error against float64 except for rounding."""
    source, x = boot(name)(inputs(name)), inputs(name)
    bridge = boot(name, dtype)
    expected = bridge(x)
    with expose_neuron_heads(bridge):
        assert torch.equal(bridge(x), expected)
        logits, cache = bridge.run_with_cache(x)
    assert logits.dtype == dtype == cache[mlp_hook("z")].dtype
    eps = torch.finfo(dtype).eps
    assert relative(logits.double(), source) <= 4 * relative(expected.double(), source) + 16 * eps


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "gemma2", "bert", "vit"])
def test_gradients(name):
    bridge, twin, x = boot(name), boot(name), inputs(name)
    twin(x).square().mean().backward()
    seen = {}
    expose_neuron_heads(bridge)
    points = ("q", "k", "v", "attn_scores", "pattern", "z")
    keep = [(mlp_hook(p), lambda g, hook: seen.update({hook.name: g})) for p in points]
    with bridge.hooks(bwd_hooks=keep):
        bridge(x).square().mean().backward()
    assert set(seen) == {mlp_hook(p) for p in points}
    pairs = zip(bridge.original_model.parameters(), twin.original_model.parameters(), strict=True)
    compared = 0
    for got, expected in pairs:
        if expected.grad is not None:
            scale = max(expected.grad.abs().max(), 1e-6)
            # These RMS norms compute in float32, and later layers amplify the rounding.
            assert (got.grad - expected.grad).abs().max() <= 1e-6 * scale
            compared += 1
    assert compared > 10
    # The control: the gradient at z is not zero.
    assert seen[mlp_hook("z")].abs().max() > 0


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_hook_result(name):
    bridge, x = boot(name), inputs(name)
    expose_neuron_heads(bridge)
    for call in (
        lambda: bridge.run_with_hooks(x, fwd_hooks=[(mlp_hook("result"), print)]),
        lambda: bridge.run_with_hooks(x, bwd_hooks=[(mlp_hook("result"), print)]),
        lambda: bridge.add_hook(mlp_hook("result"), print),
        lambda: bridge.add_perma_hook(mlp_hook("result"), print),
        lambda: bridge.hooks([(mlp_hook("result"), print)]).__enter__(),
        lambda: bridge.run_with_cache(x, names_filter=mlp_hook("result")),
        lambda: bridge.run_with_cache(x, names_filter=[mlp_hook("z"), mlp_hook("result")]),
    ):
        with pytest.raises((ValueError, UnsupportedCallError), match="set_use_attn_result"):
            call()
    assert mlp_hook("result") not in bridge.run_with_cache(x)[1]
    if name in NO_ATTENTION_RESULT:
        with pytest.warns(UserWarning, match="affects only mlp.hook_neuron_write"):
            bridge.set_use_attn_result(True)
        with pytest.raises(ValueError, match="use_attn_result"):
            bridge.add_hook("blocks.0.attn.hook_result", print)
    else:
        bridge.set_use_attn_result(True)
    _, cache = bridge.run_with_cache(x)
    bias = getattr(bridge.blocks[1].mlp.out, "bias", None)
    total = cache[mlp_hook("result")].sum(2) + (0.0 if bias is None else bias)
    assert relative(total, cache["blocks.1.mlp.out.hook_out"]) <= EXACT
    by_result = bridge.run_with_hooks(x, fwd_hooks=[(mlp_hook("result"), drop(NEURON, 2))])
    by_z = bridge.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), drop(NEURON, 2))])
    assert relative(by_result, by_z) <= EXACT
    assert relative(by_z, bridge(x)) > 1e-7
    bridge.set_use_attn_result(False)
    with pytest.raises(ValueError, match="set_use_attn_result"):
        bridge.add_hook(mlp_hook("result"), print)


@pytest.mark.parametrize("name", ["gpt2", "llama", "native", "native_gated"])
@torch.no_grad()
def test_bilinear(name):
    bridge = boot(name)
    exact = bridge(tokens())
    _, cache = bridge.run_with_cache(tokens())
    calibration = None
    if name in ("llama", "native_gated"):
        gates = [cache[f"blocks.{layer}.mlp.gate.hook_out"].abs().max() for layer in (0, 1)]
        calibration = Calibration(tuple(1.25 * g.item() for g in gates), 1.25, 22)
    with expose_neuron_heads(bridge, gate=Bilinear(8, calibration=calibration)):
        silent = bridge(tokens())
        hooked, cache = bridge.run_with_cache(tokens())
        assert relative(hooked, silent) <= EXACT
        assert 0 < relative(silent, exact) < 0.1
        assert cache[mlp_hook("pattern")].shape == (2, 8 * D_MLP, 11, 2)
    assert torch.equal(bridge(tokens()), exact)


@torch.no_grad()
def test_an_edit_of_activations_is_shared_by_the_heads_of_a_neuron():
    """An edit at hook_post has the same effect whether or not the heads' results are hooked."""
    bridge = boot("gpt2")
    edit, keep = (out_in(), drop(NEURON, -1)), (mlp_hook("result"), lambda result, hook: None)
    with expose_neuron_heads(bridge, gate=Bilinear(4)):
        bridge.set_use_attn_result(True)
        alone = bridge.run_with_hooks(tokens(), fwd_hooks=[edit])
        watched = bridge.run_with_hooks(tokens(), fwd_hooks=[edit, keep])
        assert relative(watched, alone) <= EXACT
        assert relative(bridge(tokens()), alone) > 1e-7


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "native"])
@torch.no_grad()
def test_generate(name):
    bridge = boot(name, torch.float32)
    how = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "stop_at_eos": False}
    start = tokens(batch=1, pos=3)
    expected = bridge.generate(start, **how, return_type="tokens", use_past_kv_cache=False)
    seen = []
    keep = [(mlp_hook("z"), lambda z, hook: seen.append(z.shape))]
    with expose_neuron_heads(bridge), bridge.hooks(keep):
        got = bridge.generate(start, **how, return_type="tokens")
    assert torch.equal(got, expected)
    assert len(seen) == 5


@torch.no_grad()
def test_another_activation_than_the_configuration_says():
    bridge = boot("gpt2")
    for block in bridge.original_model.transformer.h:
        block.mlp._original_component.act = torch.nn.SiLU()
    assert bridge.cfg.act_fn == "gelu_new"
    expose_neuron_heads(bridge)
    hooked, cache = bridge.run_with_cache(tokens())
    assert relative(hooked, bridge(tokens())) <= EXACT
    q = cache[mlp_hook("q")][..., NEURON, 0]
    torch.testing.assert_close(neuron_gate(cache, "L1N29"), torch.sigmoid(q))


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "native_gated"])
@torch.no_grad()
def test_a_hook_may_run_its_own_mlp_alone(name):
    bridge = boot(name)
    x = torch.linspace(-1, 1, 2 * bridge.cfg.d_model, dtype=torch.float64).view(1, 2, -1)
    expected, inner = bridge(tokens()), bridge.blocks[1].mlp(x)
    exposed = expose_neuron_heads(bridge)
    points = [name for name in bridge.hook_dict if name.startswith("blocks.1.mlp.")]
    ran = 0
    for point in points:
        seen = []

        def again(value, hook, seen=seen):
            if not seen:
                seen.append(None)
                seen[0] = bridge.blocks[1].mlp(x)

        if exposed.model._gated_hook_reason(point):
            continue
        hooks = [(point, again), (mlp_hook("z"), lambda z, hook: z)]
        assert relative(bridge.run_with_hooks(tokens(), fwd_hooks=hooks), expected) < EXACT, point
        ran += bool(seen)
        assert not seen or relative(seen[0], inner) < EXACT, point
    assert ran > 6
