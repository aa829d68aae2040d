"""Tests that models with transcoders attached compute the same function, and can be restored."""

import pytest
import torch
from common import needs_hooked_transformer, relative, tokens
from drawn_transcoders import FEATURES, bridge, drawn, hooked, layers_of

from attn_only_lens.heads import has_neuron_heads
from attn_only_lens.transcoders import attach

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]

BRIDGES = ("gpt2", "gemma2", "olmo2", "gptj", "native_gated")
HOOKED = ("norms_before_and_after", "post_norm", "rms_pre")
# What a transcoder may not read in a model.
EXCEPT = {"olmo2": "normalized", "post_norm": "normalized", "gptj": "stream", "rms_pre": "input"}
NORM_AFTER = ("gemma2", "olmo2", "norms_before_and_after", "post_norm")


def cases():
    """Return every kind of transcoder that fits each model."""
    kinds = [(bridge, name) for name in BRIDGES] + [(hooked, name) for name in HOOKED]
    for make, name in kinds:
        marks = [needs_hooked_transformer] * (make is hooked)
        for reads in ("stream", "normalized", "input"):
            if reads != EXCEPT.get(name):
                label = f"{make.__name__} {name} {reads}"
                yield pytest.param(make, name, reads, name in NORM_AFTER, id=label, marks=marks)


def writes(model, prompt):
    """Return the logits and each MLP's output, because some norms round the stream to float32."""
    names = [f"blocks.{layer}.hook_mlp_out" for layer in range(len(model.blocks))]
    logits, cache = model.run_with_cache(prompt, names_filter=lambda name: name in names)
    return [logits, *(cache[name] for name in names)]


def state(model):
    """Return all modules with their classes and attributes, and all hook points, in order."""
    modules = [
        (
            name,
            type(module),
            list(vars(module)),
            getattr(module, "name", None),
            *module._modules.items(),
        )
        for name, module in model.named_modules()
    ]
    registry = list(getattr(model, "_hook_registry", {}).items())
    names = [(name, point.name) for name, point in model.hook_dict.items()]
    hooks = [(name, list(point._forward_hooks)) for name, point in model.hook_dict.items()]
    return modules, list(model.hook_dict.items()), registry, names, hooks


@pytest.mark.parametrize(("make", "name", "reads", "after_norm"), list(cases()))
def test_errors_make_up_for_what_features_miss(make, name, reads, after_norm):
    model, prompt = make(name), tokens()
    before, untouched = writes(model, prompt), state(model)
    transcoders = layers_of(model, reads=reads, after_norm=after_norm, skip=True)
    with attach(model, transcoders) as attached:
        assert attached is model
        assert has_neuron_heads(model)
        for got, expected in zip(writes(model, prompt), before, strict=True):
            assert relative(got, expected) < 1e-12
        error = model.run_with_cache(prompt)[1]["blocks.1.mlp.hook_error"]
        assert error.abs().max() > 0.1  # control: there are errors
    with attach(model, transcoders, error="zero"):
        assert relative(writes(model, prompt)[1], before[1]) > 0.1
    assert not has_neuron_heads(model)
    assert state(model) == untouched
    for got, expected in zip(writes(model, prompt), before, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("activation", ["relu", "topk"])
def test_one_layer_and_every_activation(activation):
    model, prompt = bridge("gpt2"), tokens()
    before = model(prompt)
    attached = attach(model, layers_of(model, (1,), activation=activation))
    assert attached.layers == (1,)
    assert relative(model(prompt), before) < 1e-12
    for layer, n_heads in ((0, 37), (1, FEATURES)):
        shape = model.run_with_cache(prompt)[1][f"blocks.{layer}.mlp.hook_neuron_act"].shape
        assert shape == (2, 11, n_heads, 1)
    attached.undo()
    again = attach(model, layers_of(model, (1,), activation=activation))
    attached.undo()  # nothing happens
    assert has_neuron_heads(model)
    again.undo()
    assert torch.equal(model(prompt), before)


@pytest.mark.parametrize(("dtype", "reads"), [(torch.float32, "input"), (torch.bfloat16, "stream")])
def test_other_dtypes(dtype, reads):
    model, prompt = bridge("gpt2", dtype), tokens()
    before = model(prompt)
    with attach(model, layers_of(model, reads=reads, skip=True, dtype=torch.float32)):
        after = model(prompt)
    assert after.dtype == dtype
    assert relative(after.double(), before.double()) < 16 * torch.finfo(dtype).eps
    assert torch.equal(model(prompt), before)


def test_errors_are_those_of_the_run():
    """An edit before an MLP has the same effect as in the original model."""
    model, prompt = bridge("gpt2"), tokens()

    def edit(value, hook):
        return value * 1.5

    edits = [("blocks.0.attn.hook_z", edit)]
    expected = model.run_with_hooks(prompt, fwd_hooks=edits)
    with attach(model, layers_of(model, skip=True)):
        assert relative(model.run_with_hooks(prompt, fwd_hooks=edits), expected) < 1e-12
        assert relative(model(prompt), expected) > 1e-3


def test_hooks_of_users_stay():
    model, prompt = bridge("gpt2"), tokens()
    plain, fired = model(prompt), []
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: fired.append(1) or 2 * z)
    model.add_hook("blocks.1.mlp.hook_out", lambda out, hook: fired.append(2) or out / 2)
    before, untouched = model(prompt), state(model)
    assert relative(before, plain) > 1e-3
    attached = attach(model, layers_of(model))
    model.add_hook("blocks.1.mlp.hook_neuron_act", lambda z, hook: 0 * z)
    model.add_hook("blocks.1.mlp.hook_error", lambda z, hook: 0 * z)
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 0 * z)
    assert relative(model(prompt), before) > 1e-3
    attached.undo()
    model.blocks[0].attn.hook_z.remove_hooks()
    fired.clear()
    assert torch.equal(model(prompt), before)
    assert fired == [1, 2]
    assert state(model) == untouched


def test_errors_leave_the_model_alone(monkeypatch):
    model, prompt = bridge("gemma2"), tokens()
    before, untouched = model(prompt), state(model)
    transcoders = layers_of(model, reads="stream", after_norm=True)

    def fail(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("attn_only_lens.models.attach.expose_neuron_heads", fail)
        with pytest.raises(KeyboardInterrupt):
            attach(model, transcoders)
    assert state(model) == untouched

    def inside():
        with attach(model, transcoders):
            model.add_hook("blocks.1.mlp.hook_neuron_act", lambda z, hook: 0 * z)
            fail(model)

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert state(model) == untouched
    assert torch.equal(model(prompt), before)


@torch.no_grad()
def test_an_edit_in_place_before_the_gate_leaves_the_error_alone():
    def in_place(q, hook):
        q[..., :23] += 3.0
        return q

    def in_a_copy(q, hook):
        return in_place(q.clone(), hook)

    model, prompt = bridge("gpt2"), tokens()
    with attach(model, {1: drawn(26)}):
        name = "blocks.1.mlp.hook_pre"
        edited = [
            model.run_with_hooks(prompt, fwd_hooks=[(name, hook)]) for hook in (in_place, in_a_copy)
        ]
        assert torch.equal(*edited)
        assert (edited[0] - model(prompt)).abs().max() > 1e-3
