"""Tests of notebook code that filters hook names for attention, on exposed and on plain models.

The filters are those of TransformerLens' main demo and of ARENA. Each must select bitwise what it
selects on the plain model: a filter for attention hooks that also selected neuron-heads' hooks
would patch, freeze, ablate or mask neurons too, or crash on them.
"""

import re

import pytest
import torch
from bridges import boot
from common import IN_PLACE, mlp_hook, tokens
from exposed_states import each

from attn_only_lens import expose_neuron_heads

ENDINGS = ("z", "q", "k", "v", "pattern", "scores", "attn_scores", "result")
PARTS = ("z", "attn", "pattern", "score", "hook_q", "hook_k", "hook_v", "hook_z", "result")
OFF = ("attn_in", "_input")
FILTERS = {
    **{f"*{x}": lambda name, x=x: name.endswith(x) for x in ENDINGS},
    **{f"*hook_{x}": lambda name, x=x: name.endswith(f"hook_{x}") for x in ENDINGS},
    # Hooks that are off by default are left out: TransformerLens warns about them or raises.
    **{f"*{x}*": lambda name, x=x: x in name and not name.endswith(OFF) for x in PARTS},
}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_word_of_another_hook_selects_a_neuron_head(family):
    """A filter made from any word in a bridge's hook names selects no neuron-head."""
    bridge = boot(family, state="names")
    hook_names = list(bridge.hook_dict)
    new_names = set(expose_neuron_heads(bridge).model.hook_dict) - set(hook_names)
    assert new_names == {mlp_hook(point, layer) for point in IN_PLACE for layer in range(2)}
    words = {word for name in hook_names for word in re.split(r"[._]", name)}
    for word in words - {"blocks", "mlp", "hook"}:
        if word.isdecimal():
            continue
        assert not any(name.endswith(word) for name in new_names), word
        if len(word) > 1 or word == "z":
            assert not any(word in name for name in new_names), word
    assert any("act" in name for name in new_names), "the control"


def selected(model, how, chosen):
    """Return the activations that a filter selects, by name."""
    if how == "run_with_cache":
        return model.run_with_cache(tokens(), names_filter=chosen)[1].cache_dict
    seen = {}

    def look(x, hook):
        seen[hook.name] = x.detach().clone()

    model.run_with_hooks(tokens(), return_type=None, fwd_hooks=[(chosen, look)])
    return seen


@pytest.mark.parametrize("how", ["run_with_cache", "run_with_hooks"])
@pytest.mark.parametrize("make", each(["gpt2"], ["llama"]))
@torch.no_grad()
def test_filters_select_what_they_select_on_the_plain_model(make, how):
    plain, exposed = make(), expose_neuron_heads(make()).model
    for model in (plain, exposed):
        model.set_use_attn_result(True)
    total = 0
    for label, chosen in FILTERS.items():
        expected, got = selected(plain, how, chosen), selected(exposed, how, chosen)
        assert list(got) == list(expected), label
        assert all(torch.equal(got[name], expected[name]) for name in got), label
        total += len(got)
    assert total > 50
    assert mlp_hook("z") in selected(exposed, how, lambda name: "neuron" in name), "the control"
