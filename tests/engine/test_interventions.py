"""Tests that patches of a neuron-head equal edits of the source's MLP activations."""

import math
from functools import partial

import pytest
import torch
from common import POS, relative, tokens
from models import build
from oracles.definitions import MLP, GeneralizedSiLU, direct_sum
from oracles.theorem_3 import neuron_heads

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


def weights(neuron_weight, bias):
    return lambda x: torch.stack(
        [torch.full_like(x[..., 0], neuron_weight), torch.full_like(x[..., 0], bias)], dim=-1
    )


PATCHES = {
    # hook point: its change, the neuron's resulting activation
    "z": (lambda z: 0 * z, lambda act, q, v, p: 0 * q),
    "result": (lambda r: 0 * r, lambda act, q, v, p: 0 * q),
    "pattern": (weights(0.3, 0.7), lambda act, q, v, p: 0.3 * v),
    "v": (lambda v: v + 0.7, lambda act, q, v, p: p * (v + 0.7)),
    "attn_scores": (weights(0.0, -0.9), lambda act, q, v, p: v / (1 + math.exp(-0.9))),
    # the query changes the pattern but not the value
    "q": (lambda q: q + 0.9, lambda act, q, v, p: act(q + 0.9) / (q + 0.9) * v),
    # a token key of 1 adds q to the self score, so p / (1-p) gains a factor exp(q) for any gate
    "k": (lambda k: k + 1.0, lambda act, q, v, p: p * q.exp() / (p * q.exp() + 1 - p) * v),
}


@pytest.mark.parametrize("point", PATCHES)
@pytest.mark.parametrize("name", ["gelu", "llama", "parallel"])
@torch.no_grad()
def test_patch(name, point):
    model = build(name)
    change, edit = PATCHES[point]
    expected = in_source(model, partial(edit, model.blocks[LAYER].mlp.act_fn))
    converted = convert(model)
    converted.set_use_attn_result(True)
    for in_place in (True, False):

        def hook_fn(x, hook, in_place=in_place):
            x = x if in_place else x.clone()
            head = x[:, NEURON] if point in ("attn_scores", "pattern") else x[:, :, NEURON, ...]
            head.copy_(change(head))
            return None if in_place else x

        hooks = [(f"blocks.{BLOCK}.attn.hook_{point}", hook_fn)]
        got = converted.run_with_hooks(tokens(), fwd_hooks=hooks)
        assert relative(got, expected) <= EXACT
    assert relative(expected, model(tokens())) > 1e-6 or point == "k", "no effect to see"


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


@pytest.mark.parametrize("name", ["gelu", "parallel"])
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


@torch.no_grad()
def test_pattern_is_the_dense_one_of_theorem_3():
    """The pattern is the paper's masked attention over N tokens and a bias token."""
    model = build("silu", normalization_type=None)
    mlp, seen, x = model.blocks[0].mlp, [], torch.randn(POS, 26, dtype=torch.float64)
    mlp.b_in.zero_()
    mlp.b_out.zero_()
    attn = convert(model).blocks[1].attn
    attn.hook_pattern.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    got, stream = attn(x[None])[0], direct_sum(x, 1.0)
    heads = neuron_heads(MLP(mlp.W_in, mlp.W_out, GeneralizedSiLU()), POS)
    for head, compact in zip(heads, seen[0], strict=True):
        pattern = head.pattern(stream)
        torch.testing.assert_close(pattern[:POS, :POS].diagonal(), compact[:, 0])
        torch.testing.assert_close(pattern[:POS, POS], compact[:, 1])
    total = sum(head(stream) for head in heads)
    torch.testing.assert_close(got, total[:POS, :26])
    assert total[POS].abs().max() == 0
