"""Neuron-heads in place on a TransformerBridge, around models built here, not downloaded."""

import pytest
import torch
import transformers
from common import D_MLP, POS, relative, tokens
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import (
    Calibration,
    UnsupportedModelError,
    expose_neuron_heads,
    neuron_gate,
    neuron_pattern,
)
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own
EXACT = 1e-12
NEURON = 29
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": 41, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
GPT = {"vocab_size": 41, "n_positions": 17, "n_layer": 2, "n_head": 2, "n_inner": D_MLP}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT, n_embd=26),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(
        **SIZES | {"hidden_size": 28}, num_key_value_heads=1, pad_token_id=0
    ),
}
NATIVE = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": D_MLP, "d_vocab": 41}
NATIVE |= {"n_ctx": 17, "init_mode": "gpt2", "seed": 0}
NAMES = [*CONFIGS, "native", "native_gated"]


def boot(name, dtype=torch.float64):
    torch.manual_seed(0)
    if name in ("native", "native_gated"):
        gated = {"gated_mlp": True, "act_fn": "silu"} if name == "native_gated" else {}
        cfg = TransformerBridgeConfig(**NATIVE | {"act_fn": "gelu_new"} | gated)
        bridge = TransformerBridge.boot_native(cfg, dtype=dtype)
        randomise(bridge.original_model)
        return bridge
    config = (CONFIGS[name] if name in CONFIGS else REFUSED[name][0])()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(dtype).eval()
    randomise(model)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@torch.no_grad()
def randomise(model):
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)


def hook(point, layer=1):
    return f"blocks.{layer}.mlp.hook_{point}"


def out_in(layer=1):
    return f"blocks.{layer}.mlp.out.hook_in"


def drop(index, dim):
    return lambda x, hook: x.index_fill(dim, torch.tensor(index), 0.0)


@pytest.mark.parametrize("compatible", ["never", "before", "after"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_and_every_hook(name, compatible):
    if name == "native_gated" and compatible != "never" and HAS_HOOKED_TRANSFORMER:
        pytest.skip(
            "3.9's own bridge has float32 biases beside float64 weights here: run with "
            "transformer-lens 4, `make test`"
        )
    bridge, twin = boot(name), boot(name)
    if compatible == "before":
        bridge.enable_compatibility_mode(disable_warnings=True)
    before = type(bridge), list(bridge.hook_dict), type(bridge.blocks[0].mlp)
    exposed = expose_neuron_heads(bridge)
    for each in [twin] * (compatible != "never") + [bridge] * (compatible == "after"):
        each.enable_compatibility_mode(disable_warnings=True)
    expected, theirs = twin.run_with_cache(tokens())
    expected = twin(tokens())
    assert torch.equal(bridge(tokens()), expected)
    logits, cache = bridge.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    for key, value in theirs.items():
        if value is not None and value.is_floating_point():
            finite = value.isfinite()
            assert relative(cache[key][finite], value[finite]) <= EXACT, key
    for point in ("q", "k", "v", "z"):
        assert cache[hook(point)].shape == (2, POS, D_MLP, 1)
    for point in ("attn_scores", "pattern"):
        assert cache[hook(point)].shape == (2, D_MLP, POS, 2)
    z = cache[hook("z")].squeeze(-1)
    torch.testing.assert_close(z, theirs[out_in()], rtol=1e-10, atol=1e-12)
    pattern = neuron_pattern(cache, "L1N29")
    v = cache[hook("v")][..., NEURON, 0]
    torch.testing.assert_close(pattern[..., 0] * v, z[..., NEURON], rtol=1e-10, atol=1e-12)
    assert torch.equal(neuron_gate(cache, "L1N29"), pattern[..., 0])
    # An edit of z is that of the activation; the control: it moves the logits.
    by_z = bridge.run_with_hooks(tokens(), fwd_hooks=[(hook("z"), drop(NEURON, 2))])
    by_post = twin.run_with_hooks(tokens(), fwd_hooks=[(out_in(), drop(NEURON, -1))])
    assert relative(by_z, by_post) <= EXACT
    assert relative(by_z, expected) > 1e-7
    exposed.undo()
    assert torch.equal(bridge(tokens()), expected)
    if compatible != "after":
        assert before == (type(bridge), list(bridge.hook_dict), type(bridge.blocks[0].mlp))
    assert hook("z") not in bridge.hook_dict
    assert set(bridge.hook_dict) == set(twin.hook_dict)


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "gemma2"])
def test_gradients(name):
    bridge, twin = boot(name), boot(name)
    twin(tokens()).square().mean().backward()
    seen = {}
    expose_neuron_heads(bridge)
    keep = [(hook(p), lambda g, hook: seen.update({hook.name: g})) for p in ("q", "pattern", "z")]
    with bridge.hooks(bwd_hooks=keep):
        bridge(tokens()).square().mean().backward()
    assert set(seen) == {hook(p) for p in ("q", "pattern", "z")}
    pairs = zip(bridge.original_model.parameters(), twin.original_model.parameters(), strict=True)
    for got, expected in pairs:
        scale = max(expected.grad.abs().max(), 1e-6) if expected.grad is not None else None
        if scale is not None:
            # Their RMS norms compute in float32, where rounding is amplified.
            assert (got.grad - expected.grad).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "phi3"])
@torch.no_grad()
def test_hook_result(name):
    bridge = boot(name)
    expose_neuron_heads(bridge)
    with pytest.raises(ValueError, match="set_use_attn_result"):
        bridge.run_with_hooks(tokens(), fwd_hooks=[(hook("result"), drop(NEURON, 2))])
    bridge.set_use_attn_result(True)
    _, cache = bridge.run_with_cache(tokens())
    bias = getattr(bridge.blocks[1].mlp.out, "bias", None)
    total = cache[hook("result")].sum(2) + (0.0 if bias is None else bias)
    assert relative(total, cache["blocks.1.mlp.hook_out"]) <= EXACT
    by_result = bridge.run_with_hooks(tokens(), fwd_hooks=[(hook("result"), drop(NEURON, 2))])
    by_z = bridge.run_with_hooks(tokens(), fwd_hooks=[(hook("z"), drop(NEURON, 2))])
    assert relative(by_result, by_z) <= EXACT


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_bilinear(name):
    bridge = boot(name)
    exact = bridge(tokens())
    _, cache = bridge.run_with_cache(tokens())
    how = {"gate": "bilinear", "heads_per_neuron": 8}
    if name == "llama":
        gates = [cache[f"blocks.{layer}.mlp.gate.hook_out"].abs().max() for layer in (0, 1)]
        how["calibration"] = Calibration(tuple(1.25 * g.item() for g in gates), 1.25, 22)
    with expose_neuron_heads(bridge, **how):
        silent = bridge(tokens())
        hooked, cache = bridge.run_with_cache(tokens())
        assert relative(hooked, silent) <= EXACT
        assert 0 < relative(silent, exact) < 0.1
        assert cache[hook("pattern")].shape == (2, 8 * D_MLP, POS, 2)
    assert torch.equal(bridge(tokens()), exact)


@torch.no_grad()
def test_generate_and_twice():
    bridge = boot("gpt2", torch.float32)
    how = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "stop_at_eos": False}
    start = tokens(batch=1, pos=3)
    expected = bridge.generate(start, **how, return_type="tokens")
    seen = []
    with expose_neuron_heads(bridge):
        with expose_neuron_heads(bridge):
            pass
        with bridge.hooks([(hook("z"), lambda z, hook: seen.append(z.shape))]):
            got = bridge.generate(start, **how, return_type="tokens")
    assert torch.equal(got, expected)
    assert len(seen) == 5
    assert type(bridge) is TransformerBridge


REFUSED = {
    "opt": (
        lambda: transformers.OPTConfig(
            vocab_size=41, hidden_size=26, num_hidden_layers=2, num_attention_heads=2, ffn_dim=37
        ),
        "no module of its own",
    ),
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=41, hidden_size=26, n_layer=2, n_head=2),
        "BloomMLPBridge",
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(
            **SIZES | {"hidden_size": 28}, num_key_value_heads=1, num_local_experts=3
        ),
        "MoEBridge",
    ),
    "mpt": (
        lambda: transformers.MptConfig(vocab_size=41, d_model=26, n_heads=2, n_layers=2),
        "does not run alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_of_every_layer(name):
    bridge, reason = boot(name), REFUSED[name][1]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        expose_neuron_heads(bridge)
    assert [text[:7] for text in caught.value.reasons] == ["layer 0", "layer 1"]
    assert type(bridge) is TransformerBridge


def test_what_an_mlp_computes_counts_and_not_its_name():
    bridge = boot("gpt2")
    bridge.original_model.transformer.h[1].mlp._original_component.act = torch.nn.Tanh()
    with pytest.raises(UnsupportedModelError, match="layer 1: what its MLP makes"):
        expose_neuron_heads(bridge)
    other = boot("gpt2")
    for block in other.original_model.transformer.h:
        block.mlp._original_component.act = torch.nn.SiLU()
    assert other.cfg.act_fn == "gelu_new"
    expose_neuron_heads(other)
    with torch.no_grad():
        hooked, cache = other.run_with_cache(tokens())
        assert relative(hooked, other(tokens())) <= EXACT
    q = cache[hook("q")][..., NEURON, 0]
    torch.testing.assert_close(neuron_gate(cache, "L1N29"), torch.sigmoid(q))
