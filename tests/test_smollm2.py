"""Tests of SmolLM2-135M-Instruct, a model in real use: bridge, neuron-heads, patches, chat."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from common import relative
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p

FOLDER = Path(__file__).parents[1] / "out" / "smollm2"
CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"
NAMES = ["L23H4", "L29H0", "L13N1033", "L23N325", "L0N7"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folder():
    if not FOLDER.is_dir():
        pytest.skip("needs SmolLM2-135M-Instruct in out/smollm2, which `make smollm2` fetches")
    return FOLDER


@pytest.fixture(scope="module")
def alone(folder):
    """Return the transformers model, without a bridge."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.fixture(scope="module")
def bridge(folder):
    return TransformerBridge.boot_transformers(str(folder), device="cpu")


@torch.no_grad()
def test_bridge_and_neuron_heads_keep_the_logits(alone, bridge):
    tokens = bridge.to_tokens(CLEAN)
    expected = alone(tokens).logits
    booted = bridge(tokens)
    assert relative(booted, expected) < 1e-5
    with expose_neuron_heads(bridge):
        assert torch.equal(bridge(tokens), booted)
        hook = "blocks.11.mlp.hook_neuron_act"
        cut = bridge.run_with_hooks(tokens, fwd_hooks=[(hook, lambda z, hook: z * 0)])
        assert relative(cut, expected) > 1e-2  # the neurons compute something
    assert torch.equal(bridge(tokens), booted)


@torch.no_grad()
def test_patches_are_those_of_hooks_on_the_model_of_transformers(alone, bridge):
    tokens = [bridge.to_tokens(text) for text in (CLEAN, CORRUPTED)]
    paris, rome = (bridge.to_single_token(text) for text in (" Paris", " Rome"))
    assert tokens[0].shape == tokens[1].shape
    with expose_neuron_heads(bridge):
        contrast = Contrast(*tokens, p.logit_diff(correct=paris, wrong=rome))
        sweep = p.activation_patch(bridge, contrast, sites=p.Sites(NAMES, positions=[4, 5]))
    got = sweep.to_frame().set_index(["name", "position"])["value"]

    def difference():
        logits = alone(tokens[1]).logits[0, -1]
        return (logits[paris] - logits[rome]).item()

    unpatched, expected = difference(), {}
    for name in NAMES:
        layer, kind, index = re.fullmatch(r"L(\d+)([HN])(\d+)", name).groups()
        layer, size = alone.model.layers[int(layer)], {"H": 64, "N": 1}[kind]
        reader = {"H": layer.self_attn.o_proj, "N": layer.mlp.down_proj}[kind]
        within, seen = slice(int(index) * size, (int(index) + 1) * size), []
        with reader.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0])):
            alone(tokens[0])
        for pos in (4, 5):

            def patch(_, args, within=within, pos=pos, clean=seen[0]):
                args[0][:, pos, within] = clean[:, pos, within]

            with reader.register_forward_pre_hook(patch):
                expected[name, pos] = difference()
    expected = torch.tensor([expected[key] for key in got.index])
    assert (expected - unpatched).abs().max() > 1  # one neuron alone raises Paris
    assert torch.allclose(torch.tensor(got.to_numpy()), expected.double(), rtol=0, atol=2e-4)


@pytest.mark.filterwarnings(
    r"ignore:[\s\S]*goes on without a cache:attn_only_lens.errors.InputWarning"
)
@torch.no_grad()
def test_chat_template_bos_and_generation(alone, bridge):
    tokenizer = bridge.tokenizer
    assert bridge.to_tokens(CLEAN)[0, 0] == tokenizer.bos_token_id == alone.config.bos_token_id
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    tokens = bridge.to_tokens(text, prepend_bos=False)  # the template has a BOS
    assert tokenizer.decode(tokens[0, :2]) == "<|im_start|>system"
    assert tokenizer.decode(tokens[0, -3:]) == "assistant\n"
    expected = alone.generate(tokens, **GREEDY)
    with expose_neuron_heads(bridge):
        got = bridge.generate(tokens, **GREEDY, verbose=False, return_type="tokens")
    assert torch.equal(got, expected[:, : got.shape[1]])
    assert tokenizer.decode(got[0, tokens.shape[1] :]).startswith("The capital of France is Paris.")
