"""Tests that generation with a cache is correct, even if TransformerLens ignores the cache.

The reference is a loop over full forward passes. TransformerLens 3.9 and 4.3 ignore the cache that
transformers 5.24 passes to some models; here, they are also made to ignore every cache.
"""

import warnings

import pytest
import torch
from bridges import boot, hf_folder
from common import tokens
from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge
from transformers.cache_utils import DynamicCache

from attn_only_lens import expose_neuron_heads, grow, load, save
from attn_only_lens.engine import cached_generation
from attn_only_lens.errors import InputWarning, UnsupportedCallError

NEW = 5
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "verbose": False, "stop_at_eos": False}
pytestmark = [
    pytest.mark.both_versions,  # both pass caches by names of their own
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]


def saved(name, folder):
    with expose_neuron_heads(boot(name, torch.float32)) as model:
        return load(save(model, folder / "saved"))


KINDS = {
    "loaded": lambda name, folder: load(hf_folder(folder, name, tokenizer=False)),
    "saved": saved,
    "grown": lambda name, _: grow(boot(name), d_mlp=61).model,
}


def by_full_passes(model, prompt):
    with torch.no_grad():
        for _ in range(NEW):
            prompt = torch.cat([prompt, model(prompt)[:, -1].argmax(-1, keepdim=True)], 1)
    return prompt


def generated(model, prompt, method="generate"):
    """Return the generated tokens, how many warnings there were, and the length of each pass."""
    lengths = []
    handle = model.blocks[0].register_forward_hook(
        lambda module, args, output: lengths.append(output_of(output).shape[1])
    )
    with handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = getattr(model, method)(prompt, **OPTIONS)
        made = made if method == "generate" else torch.cat(list(made), 1)
    return made, [w for w in caught if issubclass(w.category, InputWarning)], lengths


def output_of(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture
def ignored(monkeypatch):
    """Make TransformerLens' attention ignore the cache, as it does with transformers 5.24."""
    monkeypatch.setattr(AttentionBridge, "_update_kv_cache", lambda self, k, v, **how: (k, v))


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("llama", "saved", "generate"),
        ("llama", "grown", "generate"),
        ("gpt2", "loaded", "generate_stream"),
    ],
)
def test_generation_is_correct_if_caches_are_ignored(name, kind, method, tmp_path, ignored):
    model, prompt = KINDS[kind](name, tmp_path), tokens()
    expected = by_full_passes(model, prompt)
    made, caught, lengths = generated(model, prompt, method)
    assert made.tolist() == expected.tolist()
    assert caught[0].filename == __file__  # it shows the line that calls the model
    assert lengths == [prompt.shape[1] + i for i in range(NEW)]
    direct = model.original_model.generate  # which hf_generate calls
    with pytest.raises(UnsupportedCallError, match="passes a cache"):
        direct(prompt, max_new_tokens=2)
    with pytest.raises(UnsupportedCallError, match="passes a cache"):
        model(prompt, past_key_values=DynamicCache())
    made = direct(prompt, max_new_tokens=NEW, do_sample=False, use_cache=False, eos_token_id=-1)
    assert made.tolist() == expected.tolist()


@pytest.mark.parametrize(("name", "kind"), [("neox", "loaded"), ("llama", "saved")])
@torch.no_grad()
def test_caches_that_work_are_used(name, kind, tmp_path, monkeypatch):
    """For the installed versions, whatever they are: a cache is used without a warning, or not."""
    model, prompt, seen = KINDS[kind](name, tmp_path), tokens(), []
    expected = by_full_passes(model, prompt)
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: seen.append(x.shape[1]))
    made, caught, lengths = generated(model, prompt)
    assert made.tolist() == expected.tolist()
    unwatched = boot(name, torch.float32)
    _, cache = unwatched(prompt[:, :-1], return_type="logits_and_cache", use_cache=True)
    last, _ = unwatched(prompt[:, -1:], return_type="logits_and_cache", past_key_values=cache)
    works = torch.allclose(last[:, -1], unwatched(prompt)[:, -1], rtol=1e-3, atol=1e-3)
    assert (bool(caught), lengths[-1] == 1) == (not works, works)
    assert seen == lengths  # no hook of the user sees the passes of the test
    assert len(seen) == NEW
    monkeypatch.delattr(cached_generation, "_same_logits")  # the model is tested once
    again, _, _ = generated(model, prompt)
    assert again.tolist() == made.tolist()


def test_torch_hooks_of_the_user_do_not_change_the_result(ignored):
    model, prompt, calls = expose_neuron_heads(boot("llama")).model, tokens(), []

    def zero(module, args, output):
        calls.append(None)
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    handles = [block.attn.register_forward_hook(zero) for block in model.blocks]
    generated(model, prompt)
    assert len(calls) == len(model.blocks) * NEW  # none of the passes of the test
    for handle in handles:
        handle.remove()
    made, caught, _ = generated(model, prompt)
    assert caught
    assert made.tolist() == by_full_passes(model, prompt).tolist()


def test_a_wrong_position_is_noticed(monkeypatch):
    with expose_neuron_heads(boot("gpt2")) as model:
        monkeypatch.setattr(DynamicCache, "get_seq_length", lambda *_, **how: 0)
        with pytest.warns(InputWarning, match="goes on without a cache"):
            model.generate(tokens(), **OPTIONS)


def test_only_models_of_this_package_are_changed(ignored):
    model = boot("llama")
    with expose_neuron_heads(model), expose_neuron_heads(model):
        pass
    made = model.generate(tokens(), **OPTIONS)
    assert made.tolist() != by_full_passes(model, tokens()).tolist()  # the control
