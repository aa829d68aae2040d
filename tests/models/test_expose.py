"""Tests of neuron-heads in place: no value of the model changes, and the heads are its neurons.

The references are the unexposed twin of each model, and neurons that formulas in this file compute
from the weights of the transformers model without a bridge.
"""

import math
from functools import partial

import pytest
import torch
from bridges import EVERY, FAMILIES, NEURON, boot, inputs, original
from common import D_MLP, POS, mlp_hook, relative, tokens
from exposed_states import EXACT, bilinear, drop, each, names_of, same, state
from models import FAMILIES as HOOKED
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import (
    Bilinear,
    convert,
    expose_neuron_heads,
    neuron_pattern,
)
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
LAYER = 1
POINTS = ("q", "k", "v", "attn_scores", "pattern", "z")
# TransformerLens' attention for GPT-NeoX and Phi 3 computes rotations in float32, not float64.
THEIR_FLOAT32 = {"neox": 1e-6, "phi3": 1e-6}
# The attention of these models has no hook_result.
NO_ATTENTION_RESULT = {"bert", "native_gated"}
# A HookedTransformer for each activation, with and without gate, and for each structure.
OF_HOOKED = [*list(HOOKED)[:12], "llama", "parallel", "no_norm", "norms_before_and_after"]


def tanh_weight(q):
    return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (q + 0.044715 * q**3))


# The factor p of each activation q · p(q), defined independently of the package.
WEIGHT = {
    "silu": torch.sigmoid,
    "gelu": lambda q: torch.erfc(-q / math.sqrt(2)) / 2,
    "tanh": tanh_weight,
}


def inputs_of(make):
    [name] = make.args
    return inputs(name) if make.func is boot else tokens()


def bias_in(model):
    """Return what a HookedTransformer adds to gated activations, which no head writes."""
    if isinstance(model, TransformerBridge) or not model.cfg.gated_mlp:
        return torch.zeros(D_MLP, dtype=torch.float64)
    return model.blocks[LAYER].mlp.b_in.detach()


COMPATIBLE = ["gpt2", "gemma2"] + ["native_gated"] * (not HAS_HOOKED_TRANSFORMER)
CASES = [
    pytest.param(*case.values, when, id=f"{case.id} {when}", marks=case.marks)
    for when, families, hooked in (
        ("never", EVERY, OF_HOOKED),
        ("before", COMPATIBLE, ()),
        ("after", COMPATIBLE, ()),
    )
    for case in each(families, hooked)
]


@pytest.mark.both_versions
@pytest.mark.parametrize(("make", "compatible"), CASES)
@torch.no_grad()
def test_logits_and_every_hook(make, compatible):
    """Also in compatibility mode, which a bridge may enter before or after it is exposed."""
    model, twin, x = make(), make(), inputs_of(make)
    enter = {"disable_warnings": True}
    if compatible == "before":
        model.enable_compatibility_mode(**enter)
    before = state(model)
    exposed = expose_neuron_heads(model)
    for host in [twin] * (compatible != "never") + [model] * (compatible == "after"):
        host.enable_compatibility_mode(**enter)
    expected, expected_cache = twin(x), twin.run_with_cache(x)[1]
    assert torch.equal(model(x), expected)
    logits, cache = model.run_with_cache(x)
    assert relative(logits, expected) <= EXACT
    n_layers = len(model.blocks)
    new = {mlp_hook(point, layer) for layer in range(n_layers) for point in POINTS}
    assert set(cache) - set(expected_cache) == new
    same(cache, expected_cache)
    post = names_of(twin)[1]
    pos = expected_cache[post].shape[1]
    for point in ("q", "k", "v", "z"):
        assert cache[mlp_hook(point)].shape == (len(x), pos, D_MLP, 1)
    for point in ("attn_scores", "pattern"):
        assert cache[mlp_hook(point)].shape == (len(x), D_MLP, pos, 2)
    z = cache[mlp_hook("z")].squeeze(-1)
    assert relative(z + bias_in(twin), expected_cache[post]) <= EXACT
    pattern = neuron_pattern(cache, "L1N29")
    v = cache[mlp_hook("v")][..., NEURON, 0]
    assert relative(pattern[..., 0] * v, z[..., NEURON]) <= EXACT
    # An edit of z equals the same edit of the activation. The control: it changes the logits.
    by_z = model.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), lambda z, hook: 0.5 * z)])
    shift = bias_in(twin)
    by_post = twin.run_with_hooks(
        x, fwd_hooks=[(post, lambda post, hook: 0.5 * (post - shift) + shift)]
    )
    assert relative(by_z, by_post) <= EXACT
    assert relative(by_z, expected) > 1e3 * EXACT
    exposed.undo()
    assert torch.equal(model(x), expected)
    if compatible != "after":
        assert state(model) == before
    assert list(model.hook_dict) == list(twin.hook_dict)


def project(part, x):
    """Return x · W + b, with the weights of a Linear or a Conv1D."""
    bias = 0.0 if part.bias is None else part.bias
    return x @ (part.weight if type(part).__name__ == "Conv1D" else part.weight.T) + bias


@pytest.mark.parametrize("name", ["gpt2", "neox", "gemma2", "phi3", "bert", "vit"])
@torch.no_grad()
def test_neurons_from_weights(name):
    """The oracle is the transformers model without a bridge."""
    x, bound = inputs(name), THEIR_FLOAT32.get(name, EXACT)
    logits, cache = expose_neuron_heads(boot(name)).model.run_with_cache(x)
    for layer in (0, 1):
        source, seen = original(name), {}
        module = source.get_submodule(FAMILIES[name].layers)[layer]
        *before, out = (module.get_submodule(path) for path in FAMILIES[name].parts)
        before[0].register_forward_pre_hook(lambda m, args, seen=seen: seen.update(x=args[0]))
        out.register_forward_pre_hook(lambda m, args, seen=seen: seen.update(post=args[0]))
        assert relative(logits, source(x).logits) <= bound
        made = [project(part, seen["x"]) for part in before]
        q, *up = made[0].chunk(2, dim=-1) if made[0].shape[-1] == 2 * D_MLP else made
        gate, v = WEIGHT[FAMILIES[name].act](q), q * up[0] if up else q
        for point, value in {"q": q, "v": v, "z": gate * v, "k": torch.zeros_like(v)}.items():
            got = cache[mlp_hook(point, layer)].squeeze(-1)
            assert (got - value).abs().max() <= bound * max(value.abs().max(), 1e-9), point
        pattern = torch.stack([gate, 1 - gate], dim=-1).transpose(1, 2)
        assert (cache[mlp_hook("pattern", layer)] - pattern).abs().max() <= bound
        assert (cache[mlp_hook("attn_scores", layer)].softmax(-1) - pattern).abs().max() <= bound
        # The plain model computes the same activations. The control: another neuron's.
        assert relative(gate * v, seen["post"]) <= EXACT
        assert relative(cache[mlp_hook("z", layer)].squeeze(-1).roll(1, -1), gate * v) > 0.1


@pytest.mark.parametrize("make", each(["gpt2", "phi3"], ["llama"]))
@torch.no_grad()
def test_lower_precision(make):
    """In half precision, exposing adds no error against float64 except for rounding."""
    x, options = tokens(), {} if make.func is boot else {"scale": 0.2}
    dtype = torch.bfloat16
    source, model = make(**options)(x), make(dtype=dtype, **options)
    expected = model(x)
    with expose_neuron_heads(model):
        assert torch.equal(model(x), expected)
        logits, cache = model.run_with_cache(x)
    assert logits.dtype == dtype == cache[mlp_hook("z")].dtype
    eps = torch.finfo(dtype).eps
    assert relative(logits.double(), source) <= 4 * relative(expected.double(), source) + 16 * eps


@pytest.mark.parametrize("make", each(["gemma2", "bert"], ["llama", "norms_before_and_after"]))
def test_gradients(make):
    model, twin, x = make(), make(), inputs_of(make)
    for host in (model, twin):
        host.requires_grad_(True)
    twin(x).square().mean().backward()
    expected = [parameter.grad for parameter in twin.parameters()]
    largest = max(grad.abs().max() for grad in expected if grad is not None)
    expose_neuron_heads(model)
    seen = {}
    keep = [(mlp_hook(p), lambda g, hook: seen.update({hook.name: g})) for p in POINTS]
    for hooks in ([], keep):
        model.zero_grad()
        with model.hooks(bwd_hooks=hooks):
            model(x).square().mean().backward()
        for got, reference in zip(model.parameters(), expected, strict=True):
            assert (got.grad is None) == (reference is None)
            if reference is not None:
                # A key bias's gradient is only rounding noise: use the other gradients' scale.
                # RMS norms of bridges compute in float32, and later layers amplify the rounding.
                scale = max(reference.abs().max(), 1e-4 * largest)
                assert (got.grad - reference).abs().max() <= (1e-6 * scale if hooks else 0.0)
    assert set(seen) == {mlp_hook(p) for p in POINTS}
    assert seen[mlp_hook("z")].abs().max() > 0, "the control"


@pytest.mark.parametrize("make", each(["gpt2", "native_gated"], ["llama"]))
@torch.no_grad()
def test_bilinear(make):
    model = make()
    exact = model(tokens())
    gate = bilinear(model, 8)
    converted = None if make.func is boot else convert(make(), gate=gate)
    with expose_neuron_heads(model, gate=gate):
        silent = model(tokens())
        hooked, cache = model.run_with_cache(tokens())
        assert relative(hooked, silent) <= EXACT
        assert 0 < relative(silent, exact) < 0.1
        assert cache[mlp_hook("pattern")].shape == (2, 8 * D_MLP, POS, 2)
        if converted is not None:  # test_bilinear_models.py holds it against sums of sigmoids
            assert relative(silent, converted(tokens())) <= EXACT
        # An edit after the activation reaches all heads of a neuron, with and without results.
        _, post = names_of(model)
        edit = (post, drop(NEURON, -1))
        alone = model.run_with_hooks(tokens(), fwd_hooks=[edit])
        model.set_use_attn_result(True)
        keep = (mlp_hook("result"), lambda result, hook: None)
        assert relative(model.run_with_hooks(tokens(), fwd_hooks=[edit, keep]), alone) <= EXACT
        assert relative(silent, alone) > 1e-7
        model.set_use_attn_result(False)
    assert torch.equal(model(tokens()), exact)


@pytest.mark.parametrize("make", each(["gpt2", "phi3"], ["llama"]))
@torch.no_grad()
def test_an_edit_reaches_all_that_follow_and_nothing_before(make):
    """Edits before and after the activation have the effect of edits of the plain model."""
    model, twin = make(), make()
    pre, post = names_of(model)
    b_in = bias_in(model)[NEURON]

    def change(to, in_place):
        def edit(x, hook):
            x = x if in_place else x.clone()
            head = x[:, :, NEURON]
            head.copy_(to(head))
            return None if in_place else x

        return edit

    shift = change(lambda q: q + 0.9, True)
    source = [(pre, shift), (post, change(lambda a: 2 * a + 0.3, False))]
    with twin.hooks(source):
        expected, reference = twin.run_with_cache(tokens())
    assert relative(expected, twin(tokens())) > 1e-6
    expose_neuron_heads(model)
    with model.hooks(source):
        logits, cache = model.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    same(cache, reference)
    assert torch.equal(cache[mlp_hook("q")].squeeze(-1), cache[pre])
    z, shown = cache[mlp_hook("z")][..., NEURON, 0], cache[post][..., NEURON]
    torch.testing.assert_close(shown, 2 * (z + b_in) + 0.3, rtol=EXACT, atol=1e-13)
    # An edit of the query changes neither the pre-activation nor the value.
    _, plain = model.run_with_cache(tokens())
    with model.hooks([(mlp_hook("q"), shift)]):
        _, moved = model.run_with_cache(tokens())
    assert torch.equal(moved[pre], plain[pre])
    for point, unchanged in (("v", True), ("q", False), ("pattern", False)):
        assert torch.equal(moved[mlp_hook(point)], plain[mlp_hook(point)]) == unchanged, point


@pytest.mark.parametrize("make", each(["gpt2", "phi3", "native_gated", "bert"], ["llama"]))
@torch.no_grad()
def test_hook_result(make):
    """Results add up to the MLP's output; a hook on them while they are off is refused."""
    [name], model, x = make.args, make(), inputs_of(make)
    expose_neuron_heads(model)
    result = mlp_hook("result")
    calls = [
        lambda: model.run_with_hooks(x, bwd_hooks=[(result, print)]),
        lambda: model.add_hook(result, print),
        lambda: model.hooks([(result, print)]).__enter__(),
        lambda: model.run_with_cache(x, names_filter=[mlp_hook("z"), result]),
    ]
    if make.func is not boot:  # bridges do not look into functions
        calls += [lambda: model.run_with_cache(x, names_filter=result.__eq__)]
    for call in calls:
        with pytest.raises((ValueError, UnsupportedCallError), match="set_use_attn_result"):
            call()
    assert result not in model.run_with_cache(x)[1]
    if make.func is boot and name in NO_ATTENTION_RESULT:
        with pytest.warns(UserWarning, match="affects only mlp.hook_neuron_write"):
            model.set_use_attn_result(True)
    else:
        model.set_use_attn_result(True)
    mlp, out = model.blocks[LAYER].mlp, {}
    with mlp.register_forward_hook(lambda m, i, o: out.update(mlp=o)):
        _, cache = model.run_with_cache(x)
    if make.func is boot:
        bias, out["mlp"] = getattr(mlp.out, "bias", None), cache["blocks.1.mlp.out.hook_out"]
        bias = 0.0 if bias is None else bias
    else:
        bias = mlp.b_out + bias_in(model) @ mlp.W_out
    assert relative(cache[result].sum(2) + bias, out["mlp"]) <= EXACT
    by_result = model.run_with_hooks(x, fwd_hooks=[(result, drop(NEURON, 2))])
    by_z = model.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), drop(NEURON, 2))])
    assert relative(by_result, by_z) <= EXACT
    assert relative(by_z, model(x)) > 1e-7


@torch.no_grad()
def test_another_activation_than_the_configuration_says():
    bridge = boot("gpt2")
    for block in bridge.original_model.transformer.h:
        block.mlp._original_component.act = torch.nn.SiLU()
    expose_neuron_heads(bridge)
    _, cache = bridge.run_with_cache(tokens())
    q = cache[mlp_hook("q")][..., NEURON, 0]
    torch.testing.assert_close(neuron_pattern(cache, "L1N29")[..., 0], torch.sigmoid(q))


# Accessors of caches

READS = (neuron_pattern, partial(neuron_pattern, dense=True))


@pytest.mark.parametrize("make", each(["gpt2"], ["llama"]))
@torch.no_grad()
def test_accessors(make):
    plain_model, model = make(), expose_neuron_heads(make()).model
    _, cache = model.run_with_cache(tokens())
    pattern, dense = (read(cache, "L1N29") for read in READS)
    assert torch.equal(pattern, cache[mlp_hook("pattern")][:, NEURON])
    assert dense.shape == (2, POS, POS + 1)
    assert torch.equal(dense.diagonal(dim1=1, dim2=2), pattern[..., 0])
    assert torch.equal(dense[..., -1], pattern[..., 1])
    assert relative(neuron_pattern(cache, "L1N28"), pattern) > 1e-3
    single = model.run_with_cache(tokens()[:1], remove_batch_dim=True)[1]
    few = model.run_with_cache(tokens(), names_filter=[mlp_hook("pattern")])[1]
    for read in READS:
        whole = read(cache, "L1N29")
        assert relative(read(single, "L1N29"), whole[0]) <= EXACT
        assert relative(read(few, "L1N29"), whole) <= EXACT
        with pytest.raises(UnsupportedCallError, match="names_filter"):
            read(few, "L0N29")
    for name, words in (("L1N37", f"0 to {D_MLP - 1}"), ("L1H0", r"cache\['pattern', 1\]")):
        with pytest.raises(InputError, match=words):
            neuron_pattern(cache, name)
    _, plain = plain_model.run_with_cache(tokens())
    with pytest.raises(UnsupportedCallError, match="converted or exposed"):
        neuron_pattern(plain, "L1N29")


@torch.no_grad()
def test_accessors_refuse_a_cache_from_before_the_model_was_exposed_anew():
    bridge = boot("gpt2")
    with expose_neuron_heads(bridge, gate=Bilinear(4)):
        _, cache = bridge.run_with_cache(tokens())
        assert neuron_pattern(cache, "L1N147").shape == (2, POS, 2)
    with expose_neuron_heads(bridge):
        for read in READS:
            with pytest.raises(UnsupportedCallError, match=r"148 neuron-heads .* now has 37"):
                read(cache, "L1N12")
