"""Tests that patches of a neuron-head equal edits of the source's MLP activations."""

import pytest
import torch
from common import D_MLP, POS, relative, tokens
from models import build

from attn_only_lens import convert
from attn_only_lens.errors import UnsupportedCallError

LAYER, NEURON = 1, 29
BLOCK = 2 * LAYER + 1
EXACT = 1e-12


def in_source(model, edit):
    """Return the source's logits when NEURON's activation (before b_in if gated) is edited.

    `edit` gets q, the value v and the gate weight p of that neuron, each [batch, pos].
    """
    seen = {}
    prefix = f"blocks.{LAYER}.mlp.hook_"
    gated = model.cfg.gated_mlp

    def keep(x, hook):
        seen[hook.name.removeprefix(prefix)] = x[..., NEURON].clone()

    def replace(post, hook):
        q = seen["pre"]
        v = q * seen["pre_linear"] if gated else q
        p = torch.where(q == 0, 0.5, model.blocks[LAYER].mlp.act_fn(q) / q)
        post = post.clone()
        post[..., NEURON] = edit(q, v, p)
        if gated:
            post[..., NEURON] += model.blocks[LAYER].mlp.b_in[NEURON]
        return post

    reads = [prefix + "pre"] + [prefix + "pre_linear"] * gated
    hooks = [(name, keep) for name in reads] + [(prefix + "post", replace)]
    return model.run_with_hooks(tokens(), fwd_hooks=hooks)


def in_converted(model, point, change, in_place):
    """Return the converted model's logits with `change` applied to NEURON at a hook point."""

    def hook_fn(x, hook):
        x = x if in_place else x.clone()
        head = x[:, NEURON] if point in ("attn_scores", "pattern") else x[:, :, NEURON, ...]
        head.copy_(change(head))
        return None if in_place else x

    converted = convert(model)
    converted.set_use_attn_result(True)
    name = f"blocks.{BLOCK}.attn.hook_{point}"
    return converted.run_with_hooks(tokens(), fwd_hooks=[(name, hook_fn)])


def weights(neuron_weight, bias):
    return lambda x: torch.stack(
        [torch.full_like(x[..., 0], neuron_weight), torch.full_like(x[..., 0], bias)], dim=-1
    )


def act(model, q):
    return model.blocks[LAYER].mlp.act_fn(q)


PATCHES = {
    # name: (hook point, its change, the neuron's resulting activation)
    "z to zero": ("z", lambda z: 0 * z, lambda m: lambda q, v, p: 0 * q),
    "self weight 0.3": ("pattern", weights(0.3, 0.7), lambda m: lambda q, v, p: 0.3 * v),
    "value shifted": ("v", lambda v: v + 0.7, lambda m: lambda q, v, p: p * (v + 0.7)),
    "both masked": (
        "attn_scores",
        weights(-torch.inf, -torch.inf),
        lambda m: lambda q, v, p: 0 * q,
    ),
    "scores set": (
        "attn_scores",
        weights(0.0, -0.9),
        lambda m: lambda q, v, p: torch.sigmoid(torch.tensor(0.9, dtype=q.dtype)) * v,
    ),
    # the query changes the pattern but not the value
    "query shifted": (
        "q",
        lambda q: q + 0.9,
        lambda m: lambda q, v, p: act(m, q + 0.9) / (q + 0.9) * v,
    ),
    # a token key of 1 adds q to the self score, so p / (1-p) gains a factor exp(q) for any gate
    "key set to one": (
        "k",
        lambda k: k + 1.0,
        lambda m: lambda q, v, p: p * q.exp() / (p * q.exp() + 1 - p) * v,
    ),
    "result to zero": ("result", lambda r: 0 * r, lambda m: lambda q, v, p: 0 * q),
}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("name", ["gelu", "llama", "parallel", "post_norm", "relu_gated"])
@torch.no_grad()
def test_patch(name, patch):
    model = build(name)
    point, change, edit = PATCHES[patch]
    expected = in_source(model, edit(model))
    for in_place in (True, False):
        assert relative(in_converted(model, point, change, in_place), expected) <= EXACT
    clean = model(tokens())
    moved = relative(expected, clean)
    assert moved > 1e-6 or patch == "key set to one", "no effect to see"


@torch.no_grad()
def test_parallel_neurons_read_what_enters_the_attention_block():
    """An edit of resid_pre reaches the neurons at block 2l, but not at block 2l + 1."""
    model = build("parallel")
    converted = convert(model)
    shift = lambda x, hook: x + 0.3  # noqa: E731
    expected = model.run_with_hooks(tokens(), fwd_hooks=[("blocks.1.hook_resid_pre", shift)])
    got = converted.run_with_hooks(tokens(), fwd_hooks=[("blocks.2.hook_resid_pre", shift)])
    assert torch.equal(got, expected)
    _, cache = converted.run_with_cache(tokens())
    with converted.hooks([("blocks.3.hook_resid_pre", shift)]):
        _, shifted = converted.run_with_cache(tokens())
    assert torch.equal(cache["z", 3], shifted["z", 3])


@pytest.mark.parametrize("name", ["gelu", "parallel", "post_norm"])
@torch.no_grad()
def test_start_and_stop_at_a_block(name):
    model = build(name)
    converted = convert(model)
    expected, cache = model.run_with_cache(tokens())
    for layer in range(3):
        stream = converted(tokens(), stop_at_layer=2 * layer)
        assert torch.equal(stream, cache["resid_pre", layer])
        assert torch.equal(converted(stream, start_at_layer=2 * layer), expected)
        middle = converted(tokens(), stop_at_layer=2 * layer + 1)
        if name == "parallel":
            with pytest.raises(UnsupportedCallError, match="start_at_layer must be even"):
                converted(middle, start_at_layer=2 * layer + 1)
        else:
            assert torch.equal(middle, cache["resid_mid", layer])
            assert torch.equal(converted(middle, start_at_layer=2 * layer + 1), expected)
    assert torch.equal(converted(tokens()), expected)


def test_pattern_is_the_dense_one_of_theorem_3():
    """The pattern is the paper's masked attention over N tokens and a bias token."""
    model = build("silu", normalization_type=None)
    mlp = model.blocks[0].mlp
    mlp.b_in.data.zero_()
    converted = convert(model)
    x = torch.randn(1, POS, 26, dtype=torch.float64)
    stream = torch.zeros(POS + 1, 27, dtype=torch.float64)
    stream[:POS, :26], stream[POS, 26] = x[0], 1.0
    mask = torch.zeros(POS + 1, POS + 1, dtype=torch.float64)
    mask[:POS, :POS], mask[:, POS] = torch.eye(POS), 1.0
    total = torch.zeros_like(stream)
    seen = {}
    attn = converted.blocks[1].attn
    attn.hook_pattern.register_forward_hook(lambda m, i, out: seen.update(pattern=out))
    got = attn(x)
    for i in range(D_MLP):
        W_QK = torch.zeros(27, 27, dtype=torch.float64)
        W_QK[:26, 26] = -mlp.W_in[:, i]
        W_OV = torch.zeros(27, 27, dtype=torch.float64)
        W_OV[:26, :26] = torch.outer(mlp.W_in[:, i], mlp.W_out[i])
        weight = (stream @ W_QK @ stream.T).exp() * mask
        pattern = weight / weight.sum(-1, keepdim=True)
        total += pattern @ stream @ W_OV
        compact = seen["pattern"][0, i]
        torch.testing.assert_close(pattern[:POS, :POS].diagonal(), compact[:, 0])
        torch.testing.assert_close(pattern[:POS, POS], compact[:, 1])
    torch.testing.assert_close(got[0], total[:POS, :26] + mlp.b_out)
    assert total[POS].abs().max() == 0
