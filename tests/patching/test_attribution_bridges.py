"""Tests of attribution on TransformerBridges, under TransformerLens 3.9 and 4."""

from functools import partial

import bridges
import patch_oracle as oracle
import pytest
import torch
import transformers
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.pretrained import small_english

estimate = partial(p.attribution, budget=0)  # `test_repairs.py` tests exact repairs

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
POS, D_MLP = 5, 37
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": 41, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
GPT = {"vocab_size": 41, "n_positions": 17, "n_layer": 2, "n_head": 2, "n_inner": D_MLP}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT, n_embd=26),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),
}
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)
# LlamaRMSNorm and Gemma2RMSNorm compute in float32 in any dtype. Rounding then gives a difference
# quotient an error of 1e-7/step, so the step must be large, which adds an error of step² f‴/6.
DIGITS = {"gpt2": 1e-6, "neox": 1e-6, "llama": 5e-3, "gemma2": 5e-3}
STEP = {"gpt2": 1e-4, "neox": 1e-4, "llama": 1e-2, "gemma2": 1e-2}
NAMES = ("L0H1", "L0N3", "L0N29", "L1H0", "L1N36")


@torch.no_grad()
def bridge_of(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    )
    model = model.to(torch.float64).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    expose_neuron_heads(bridge)
    return bridge


def prompts():
    corrupted = torch.tensor([[3, 17, 5, 29, 11]])
    clean = corrupted.clone()
    clean[:, 1] = 23
    return clean, corrupted


def moves(sweep, name, pos):
    row = sweep.frame.query(f"name == {name!r} and position == {pos}")
    return row["value"].item() - sweep.corrupted_value


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_is_the_slope_of_small_patches(name):
    model, (clean, corrupted) = bridge_of(name), prompts()
    for part in ("z", "pattern", "q"):
        result = estimate(model, clean, corrupted, METRIC, part=part, method="gradient")
        expected, got = [], []
        for head in NAMES:
            for pos in (1, POS - 1):
                hook_name, index = oracle.place(model, head, part, pos)
                change = oracle.seen(model, clean, hook_name)[index]
                change = change - oracle.seen(model, corrupted, hook_name)[index]
                expected.append(
                    oracle.slope(model, corrupted, hook_name, index, change, step=STEP[name])
                )
                got.append(moves(result, head, pos))
        expected, got = torch.tensor(expected), torch.tensor(got)
        assert (got - expected).abs().max() < DIGITS[name] * expected.abs().max(), part
        # Control: a wrong sign, or the other run's change, would exceed the tolerance by far.
        assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_methods_find_what_patching_finds(name):
    model, (clean, corrupted) = bridge_of(name), prompts()
    before = {n: (q.requires_grad, q.grad) for n, q in model.named_parameters()}
    exact = p.activation_patch(model, clean, corrupted, METRIC, part="q", progress=False)
    closed = estimate(model, clean, corrupted, METRIC, part="q")
    assert closed.method == "exact_gate"
    assert p.agreement(exact, closed)["pearson"].item() > 0.99
    for method in ("integrated", "secant"):
        estimate(model, clean, corrupted, METRIC, method=method, progress=False)
    assert {n: (q.requires_grad, q.grad) for n, q in model.named_parameters()} == before
    assert not any(m._forward_hooks for m in model.modules())


def native():
    sizes = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": D_MLP}
    cfg = TransformerBridgeConfig(**sizes, d_vocab=41, n_ctx=17, act_fn="gelu_new", seed=0)
    cfg.init_mode = "gpt2"
    model = TransformerBridge.boot_native(cfg, dtype=torch.float64)
    expose_neuron_heads(model)
    return model


def test_hook_points_that_only_look_on_are_refused():
    """Under 3.9, the pattern hook points of a native bridge are read-only."""
    model, (clean, corrupted) = native(), prompts()
    hook_name, index = oracle.place(model, "L1H0", "pattern", POS - 1)
    heard = not torch.equal(oracle.moved(model, clean, hook_name, index, 1.0), model(clean))
    settings = {"part": "pattern", "method": "gradient"}
    if heard:
        estimate(model, clean, corrupted, METRIC, **settings)
    else:
        with pytest.raises(UnsupportedModelError, match=r"attn\.hook_pattern has no gradient"):
            estimate(model, clean, corrupted, METRIC, **settings)
    estimate(model, clean, corrupted, METRIC, method="secant")  # it computes the softmax itself
    estimate(model, clean, corrupted, METRIC, method="gradient")


def test_a_padding_token_with_a_zero_embedding():
    """Transformers sets the embedding of `padding_idx` to zero, so a norm's input can be zero."""
    model = small_english()
    pad = model.tokenizer.pad_token_id
    sides = []
    for texts in (
        ("The dogs", "The keys near the cabinet"),
        ("The dog", "The key near the cabinet"),
    ):
        short, long = (model.to_tokens(text)[0] for text in texts)
        padding = torch.full((len(long) - len(short),), pad)
        sides.append(torch.stack([torch.cat([short, padding]), long]))
    mask = torch.ones_like(sides[0])
    mask[0, len(short) :] = 0
    expose_neuron_heads(model)
    arguments = (model, *sides, p.logit_diff(" are", " is"))
    before = estimate(*arguments, mask=mask, method="secant").to_frame()
    with torch.no_grad():
        model.original_model.get_input_embeddings().weight[pad] = 0
    assert not model.embed(torch.tensor([pad])).any()
    after = estimate(*arguments, mask=mask, method="secant").to_frame()
    assert before["value"].equals(after["value"])  # no token attends to padding


def test_a_factor_on_what_sublayers_add():
    """Bridges of 3.9 let no gradient through Granite's hook_attn_out and hook_mlp_out."""
    model, (clean, corrupted) = bridges.exposed_copy(bridges.boot("granite")), prompts()
    exact = p.activation_patch(model, clean, corrupted, METRIC, progress=False)
    for method in ("exact_gate", "secant"):
        result = p.attribution(model, clean, corrupted, METRIC, method=method, progress=False)
        assert p.agreement(exact, result)["pearson"].min() > 0.99
