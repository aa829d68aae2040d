"""Tests of notebook code that filters hook names for attention, on exposed and on plain models.

The functions are rewritten from the descriptions in TransformerLens' main demo and in ARENA.
Each must give bitwise the plain model's result: a filter for attention hooks that also selected
neuron-heads' hooks would patch, freeze, ablate or mask neurons too, or crash on them.
"""

import re
from functools import partial

import models
import pytest
import torch
from bridges import boot
from common import IN_PLACE, mlp_hook, needs_hooked_transformer, tokens

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
MODELS = {
    "gated hooked": lambda: models.build("llama"),
    "bridge": lambda: boot("gpt2"),
    "gated bridge": lambda: boot("llama", state="names"),
}
EACH = [
    pytest.param(make, id=name, marks=[needs_hooked_transformer] * name.endswith("hooked"))
    for name, make in MODELS.items()
]
CLEAN, CORRUPTED = tokens(0), tokens(1)


def words(names):
    return {word for name in names for word in re.split(r"[._]", name) if not word.isdecimal()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_word_of_another_hook_selects_a_neuron_head(family):
    """A filter made from any word in a bridge's hook names selects no neuron-head."""
    bridge = boot(family, state="names")
    hook_names = list(bridge.hook_dict)
    new_names = set(expose_neuron_heads(bridge).model.hook_dict) - set(hook_names)
    assert new_names == {mlp_hook(point, layer) for point in IN_PLACE for layer in range(2)}
    for word in words(hook_names) - {"blocks", "mlp", "hook"}:
        assert not any(name.endswith(word) for name in new_names), word
        if len(word) > 1 or word == "z":
            assert not any(word in name for name in new_names), word
    assert any("act" in name for name in new_names), "the control"


def selected(model, how, chosen):
    """Return the activations that a filter selects, by name."""
    seen = {}

    def look(x, hook):
        seen[hook.name] = x.detach().clone()

    if how == "run_with_cache":
        return model.run_with_cache(CLEAN, names_filter=chosen)[1].cache_dict
    if how == "run_with_hooks":
        model.run_with_hooks(CLEAN, return_type=None, fwd_hooks=[(chosen, look)])
    else:
        for name, point in model.hook_dict.items():
            if chosen(name):
                point.add_hook(look)
        model(CLEAN)
        model.reset_hooks()
    return seen


@pytest.mark.parametrize("how", ["run_with_cache", "run_with_hooks", "hook_dict"])
@pytest.mark.parametrize("make", EACH)
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


def path_patching(model):
    """Return each head's effect on the logits over all paths except through other heads."""
    is_z = lambda name: name.endswith("z")  # noqa: E731
    _, new = model.run_with_cache(CORRUPTED, names_filter=is_z)
    _, old = model.run_with_cache(CLEAN, names_filter=is_z)
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"

    def patch_or_freeze(z, hook, layer, head):
        z[...] = old[hook.name][...]
        if hook.layer() == layer:
            z[:, :, head] = new[hook.name][:, :, head]
        return z

    effects = []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            model.reset_hooks()
            model.add_hook(is_z, partial(patch_or_freeze, layer=layer, head=head))
            _, patched = model.run_with_cache(CLEAN, names_filter=lambda name: name == last)
            model.reset_hooks()
            put = (last, lambda x, hook, patched=patched: patched[last])
            effects.append(model.run_with_hooks(CLEAN, fwd_hooks=[put]))
    return torch.stack(effects) - model(CLEAN)


def induction_scores(model):
    """Return how much each head attends to the token after the previous occurrence of the token."""
    half = tokens(2, pos=5)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.float64)

    def look(pattern, hook):
        stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - half.shape[1])
        scores[hook.layer(), :] = stripe.mean((0, -1))

    hooks = [(lambda name: name.endswith("pattern"), look)]
    model.run_with_hooks(torch.cat([half, half], 1), return_type=None, fwd_hooks=hooks)
    return scores


FUNCTIONS = {
    "path patching": path_patching,
    "induction scores": induction_scores,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
# A bridge without compatibility mode caches under another name than its hooks have.
@pytest.mark.parametrize("make", [case for case in EACH if case.id != "bridge"])
@torch.no_grad()
def test_functions_of_notebooks_do_what_they_do_on_the_plain_model(make, function):
    plain, exposed = make(), expose_neuron_heads(make()).model
    expected = function(plain)
    assert torch.equal(function(exposed), expected)
    assert expected.std() > 1e-6
