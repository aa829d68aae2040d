"""Models that are exposed in tests, of both kinds, and comparisons of their states."""

from functools import partial

import models
import pytest
import torch
from bridges import boot
from common import mlp_hook, needs_hooked_transformer, relative, tokens
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import Bilinear

EXACT = 1e-12


def each(bridges=(), hooked=()):
    """Return parameters: functions that build a bridge, or a HookedTransformer with 3.9."""
    return [
        *(pytest.param(partial(boot, name), id=name) for name in bridges),
        *(
            pytest.param(
                partial(models.build, name), id=f"hooked {name}", marks=needs_hooked_transformer
            )
            for name in hooked
        ),
    ]


def gated(model):
    """Return whether the MLPs of a model without neuron-heads are gated."""
    if isinstance(model, TransformerBridge):
        return hasattr(model.blocks[0].mlp, "gate")
    return model.cfg.gated_mlp


def bilinear(model, heads=4):
    """Return bilinear gates for a model; those of gated MLPs are calibrated."""
    return Bilinear.calibrated(model, tokens(), heads) if gated(model) else Bilinear(heads)


def names_of(model, layer=1):
    """Return the hook points before and after the activation of a layer."""
    if isinstance(model, TransformerBridge):
        pre = "gate.hook_out" if gated(model) else "in.hook_out"
        return f"blocks.{layer}.mlp.{pre}", f"blocks.{layer}.mlp.out.hook_in"
    return mlp_hook("pre", layer), mlp_hook("post", layer)


def drop(index, dim):
    return lambda x, hook: x.index_fill(dim, torch.tensor(index), 0.0)


def fail(x, hook):
    raise RuntimeError("in a hook")


def same(cache, expected, bound=EXACT):
    """Check that every hook that fires on the plain model fires equally on the exposed one."""
    for key, value in expected.items():
        if value is not None and value.is_floating_point():
            finite = value.isfinite()
            assert relative(cache[key][finite], value[finite]) <= bound, key


def state(model):
    """Return the state that `undo` has to restore."""
    modules = {name: (type(m), m.training) for name, m in model.named_modules()}
    points = [
        (name, type(p), p.name, set(vars(p)), list(p._forward_hooks))
        for name, p in model.hook_dict.items()
    ]
    if not isinstance(model, TransformerBridge):
        return type(model), modules, points, list(model.mod_dict), set(vars(model))
    blocks = [block for block in getattr(model, "blocks", ()) if hasattr(block, "mlp")]
    registries = [list(block.mlp._hook_registry) for block in blocks]
    return type(model), modules, points, registries, list(model._hook_registry)


def storages(model):
    """Return where the parameters and buffers of a model are in memory."""
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@torch.no_grad()
def same_models(a, b):
    """Check that two models have bitwise the same tensors, hooks, logits and activations."""
    assert type(a) is type(b)
    tensors, expected = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (a, b))
    assert list(tensors) == list(expected)
    for name in tensors:
        assert tensors[name].dtype == expected[name].dtype, name
        assert torch.equal(tensors[name], expected[name]), name
        assert tensors[name].requires_grad == expected[name].requires_grad, name
    assert set(a.hook_dict) == set(b.hook_dict)
    assert torch.equal(a(tokens()), b(tokens()))
    logits, cache = a.run_with_cache(tokens())
    again, cached = b.run_with_cache(tokens())
    assert torch.equal(logits, again)
    assert list(cache) == list(cached)
    for key, value in cache.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, cached[key]), key
