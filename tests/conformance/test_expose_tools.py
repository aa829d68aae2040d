"""Tests that TransformerLens' tools give the same on a HookedTransformer exposed or not."""

import pytest
import torch
from common import mlp_hook, tokens
from models import build
from transformer_lens import patching
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

from attn_only_lens import expose_neuron_heads

CLEAN, CORRUPTED = tokens(1, batch=1), tokens(2, batch=1)
NAMES = ["gelu", "llama", "parallel"]


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


def both(name, measure):
    """Return what `measure` gives for the model, and for the exposed model."""
    model = build(name)
    alone = measure(model)
    with expose_neuron_heads(model):
        return alone, measure(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["mlp_out", "attn_out", "resid_pre", "attn_head_pattern_all_pos"])
@torch.no_grad()
def test_activation_patching(name, part):
    def measure(model):
        _, cache = model.run_with_cache(CLEAN)
        return getattr(patching, f"get_act_patch_{part}")(model, CORRUPTED, cache, metric)

    alone, exposed = both(name, measure)
    torch.testing.assert_close(exposed, alone, rtol=1e-5, atol=1e-6)  # the tools use float32
    assert exposed.std() > 1e-3


@torch.no_grad()
def test_patching_of_neuron_heads():
    """Patching z of one neuron-head equals patching the neuron's activation."""
    model = build("gelu")
    _, cache = model.run_with_cache(CLEAN)
    cells = [(layer, pos, neuron) for layer in (0, 2) for pos in (4, 10) for neuron in (3, 29)]
    expected = []
    for layer, pos, neuron in cells:
        name = f"blocks.{layer}.mlp.hook_post"

        def patch(post, hook, pos=pos, neuron=neuron):
            post[:, pos, neuron] = cache[hook.name][:, pos, neuron]
            return post

        logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, patch)])
        expected.append(metric(logits).item())

    def setter(z, index, clean):
        _, pos, neuron = index
        z[:, pos, neuron] = clean[:, pos, neuron]
        return z

    with expose_neuron_heads(model):
        _, heads = model.run_with_cache(CLEAN)
        got = []
        for cell in cells:
            hook = mlp_hook("z", cell[0])
            edit = lambda z, hook, cell=cell: setter(z, cell, heads[hook.name])  # noqa: E731
            got.append(metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(hook, edit)])).item())
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decompositions_of_the_cache(name):
    def measure(model):
        _, cache = model.run_with_cache(tokens())
        resid, labels = cache.decompose_resid(return_labels=True)
        every, more = cache.get_full_resid_decomposition(expand_neurons=True, return_labels=True)
        neurons, names = cache.stack_neuron_results(layer=-1, return_labels=True)
        return [resid, every, neurons, cache.accumulated_resid()], [labels, more, names]

    (alone, labels), (exposed, more) = both(name, measure)
    assert labels == more
    for got, expected in zip(exposed, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_attribution_patching(name):
    alone, exposed = both(
        name, lambda model: attribution_patch(model, CLEAN, CORRUPTED, metric).node_scores
    )
    assert set(alone) == set(exposed)
    assert max(map(abs, alone.values())) > 1e-3
    for node, score in alone.items():
        assert exposed[node] == pytest.approx(score, rel=1e-9, abs=1e-10)
