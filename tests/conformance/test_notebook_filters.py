"""Tests of notebook code that filters hook names for attention, on models with neuron-heads.

TransformerLens' main demo and ARENA's notebooks choose hooks by a word in their names. A filter for
attention hooks that also chose neuron-heads' hooks would patch, freeze, ablate or mask neurons too,
or crash on them.
"""

import re

import pytest
import torch
from common import IN_PLACE, mlp_hook, tokens
from exposed_states import each

from attn_only_lens import expose_neuron_heads


@pytest.mark.parametrize("make", each(["gpt2", "llama"], ["llama"]))
@torch.no_grad()
def test_no_word_of_another_hook_selects_a_neuron_head(make):
    """A filter made from any word in a model's hook names selects what it selects without heads."""
    model = make()
    hook_names, plain_cache = list(model.hook_dict), model.run_with_cache(tokens())[1]
    expose_neuron_heads(model)
    new_names = set(model.hook_dict) - set(hook_names)
    n_layers = len(model.blocks)
    assert new_names == {mlp_hook(point, layer) for point in IN_PLACE for layer in range(n_layers)}
    words = {word for name in hook_names for word in re.split(r"[._]", name)}
    for word in words - {"blocks", "mlp", "hook"}:
        if word.isdecimal():
            continue
        assert not any(name.endswith(word) for name in new_names), word
        if len(word) > 1 or word == "z":
            assert not any(word in name for name in new_names), word
    assert any("act" in name for name in new_names), "the control"
    _, cache = model.run_with_cache(tokens(), names_filter=lambda name: "attn" in name)
    assert set(cache) == {name for name in plain_cache if "attn" in name}
