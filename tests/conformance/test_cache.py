"""Tests that every component of a converted model's ActivationCache is right, and its label too."""

import functools
import io

import pytest
import torch
from common import relative, tokens
from einops import rearrange
from models import CORE, build
from transformer_lens import ActivationCache

from attn_only_lens import convert, neuron_pattern
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.models.two_blocks.cache import AttentionOnlyCache

EXACT = 1e-11
N_LAYERS = 3
NORMED = ("post_norm", "norms_before_and_after")  # these norm the output of a block


@functools.cache
def caches(name):
    """Return (name, source cache, converted cache) for the same input; tests share them."""
    model = build(name)
    with torch.no_grad():
        _, source = model.run_with_cache(tokens())
        _, converted = convert(model).run_with_cache(tokens())
    return name, source, converted


@pytest.fixture(params=CORE)
def pair(request):
    return caches(request.param)


@pytest.fixture(params=[name for name in CORE if name not in NORMED])
def plain(request):
    """Return the caches of a model whose heads write to the stream directly, without norms."""
    return caches(request.param)


def agree(actual, reference):
    (a, actual_labels), (b, labels) = actual, reference
    assert actual_labels == labels
    assert len(a) == len(actual_labels)
    torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT * b.abs().max().item())


def test_accumulated_resid(pair):
    name, source, cache = pair
    if name != "parallel":
        actual = cache.accumulated_resid(incl_mid=True, return_labels=True)
        agree(actual, source.accumulated_resid(incl_mid=True, return_labels=True))
    agree(cache.accumulated_resid(return_labels=True), source.accumulated_resid(return_labels=True))
    if name != "no_norm":
        normed = {"apply_ln": True, "return_labels": True, "pos_slice": -1}
        agree(cache.accumulated_resid(**normed), source.accumulated_resid(**normed))
    labels = cache.accumulated_resid(layer=3, return_labels=True)[1]
    assert labels == ["0_pre", "1_pre", "1_mid"]


@pytest.mark.parametrize("mode", ["all", "attn", "mlp"])
def test_decompose_resid(pair, mode):
    _, source, cache = pair
    agree(
        cache.decompose_resid(mode=mode, return_labels=True),
        source.decompose_resid(mode=mode, return_labels=True),
    )
    agree(
        cache.decompose_resid(layer=4, mode=mode, return_labels=True, pos_slice=(1, 5)),
        source.decompose_resid(layer=2, mode=mode, return_labels=True, pos_slice=(1, 5)),
    )


@pytest.mark.parametrize("name", [name for name in CORE if name != "no_norm"])
def test_norm_at_a_middle_block(name):
    _, source, cache = caches(name)
    if name == "post_norm":
        with pytest.raises(UnsupportedCallError, match="normalises the output of a block"):
            cache.decompose_resid(layer=2, apply_ln=True)
        return
    agree(
        cache.decompose_resid(layer=4, apply_ln=True, return_labels=True),
        source.decompose_resid(layer=2, apply_ln=True, return_labels=True),
    )
    if name == "parallel":
        with pytest.raises(UnsupportedCallError, match="parallel"):
            cache.decompose_resid(layer=3, apply_ln=True)
    else:
        agree(
            cache.decompose_resid(layer=3, apply_ln=True, return_labels=True),
            source.decompose_resid(layer=1, mlp_input=True, apply_ln=True, return_labels=True),
        )


def test_stack_head_results(plain):
    _, source, cache = plain
    for options in ({}, {"pos_slice": -1, "incl_remainder": True}, {"pos_slice": (2, 7)}):
        heads = source.stack_head_results(return_labels=True, **options)
        agree(cache.stack_head_results(return_labels=True, **options), heads)
    heads = source.stack_head_results(layer=2, return_labels=True)
    agree(cache.stack_head_results(layer=4, return_labels=True), heads)
    stack, labels = cache.stack_head_results(return_labels=True, neurons=True)
    assert labels == cache.model.all_head_labels(neurons=True)
    assert len(stack) == len(labels)
    for label in ("L0N0", "L1N29", "L2N36"):
        layer, neuron = int(label[1]), int(label[3:])
        mlp = source.model.blocks[layer].mlp
        post = source["post", layer][..., neuron]
        if source.model.cfg.gated_mlp:
            post = post - mlp.b_in[neuron]
        written = post[..., None] * mlp.W_out[neuron]
        torch.testing.assert_close(stack[labels.index(label)], written, rtol=EXACT, atol=EXACT)
        alone = cache.get_neuron_results(2 * layer + 1, neuron_slice=neuron).squeeze(-2)
        torch.testing.assert_close(alone, written, rtol=EXACT, atol=EXACT)
    with_rest, names = cache.stack_head_results(
        layer=3, incl_remainder=True, return_labels=True, pos_slice=4, neurons=True
    )
    assert names[-1] == "remainder"
    assert relative(with_rest.sum(0), cache["resid_post", 2][:, 4]) <= EXACT


@pytest.mark.parametrize("name", ["llama", "post_norm"])
@torch.no_grad()
def test_head_results_are_the_same_from_the_hook(name):
    _, _, cache = caches.__wrapped__(name)  # a new one, because the test changes it
    converted = cache.model
    converted.set_use_attn_result(True)
    _, hooked = converted.run_with_cache(tokens())
    assert "blocks.1.attn.hook_result" in hooked.cache_dict
    expected, got = (stacker.stack_head_results(neurons=True) for stacker in (cache, hooked))
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    cache.compute_head_results()
    torch.testing.assert_close(cache["result", 3], hooked["result", 3], rtol=EXACT, atol=EXACT)


def neurons_of_source(source, **options):
    """Return stacked results of the source without a gated MLP's b_in, which no head writes."""
    source = ActivationCache(dict(source.cache_dict), source.model)
    if source.model.cfg.gated_mlp:
        for layer, block in enumerate(source.model.blocks):
            key = f"blocks.{layer}.mlp.hook_post"
            source.cache_dict[key] = source.cache_dict[key] - block.mlp.b_in
    return source.stack_neuron_results(layer=-1, return_labels=True, **options)


PROJECTION = torch.linspace(-1, 2, 26 * 5, dtype=torch.float64).reshape(26, 5)
OPTIONS = [
    {"incl_remainder": True},
    {"neuron_slice": (5, 12), "pos_slice": 3},
    {"apply_ln": True, "project_output_onto": PROJECTION, "incl_remainder": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_stack_neuron_results(plain, options):
    name, source, cache = plain
    if name == "no_norm" and "apply_ln" in options:
        # TransformerLens reads the scale of a norm that does not exist.
        options = options | {"apply_ln": False}
    actual = cache.stack_neuron_results(layer=-1, return_labels=True, **options)
    agree(actual, neurons_of_source(source, **options))


BY_LAYER = "(layer head) ... -> layer head ..."


@pytest.mark.parametrize("stacked", ["stack_head_results", "stack_neuron_results"])
@torch.no_grad()
def test_a_stack_splits_by_source_layers_alone(stacked):
    """As in ARENA's notebooks: splitting by `layer=cfg.n_layers` would silently mix layers."""
    source = build("gelu", d_mlp=34)
    _, source_cache = source.run_with_cache(tokens())
    _, cache = convert(source).run_with_cache(tokens())
    n_layers, n_blocks = source.cfg.n_layers, cache.model.cfg.n_layers
    expected = rearrange(getattr(source_cache, stacked)(-1, pos_slice=-1), BY_LAYER, layer=n_layers)
    stack = getattr(cache, stacked)(-1, pos_slice=-1)
    torch.testing.assert_close(rearrange(stack, BY_LAYER, layer=n_layers), expected)
    assert len(stack) % n_blocks == 0  # so only HeadRows detects the wrong split

    normed = cache.apply_ln_to_stack(stack, pos_slice=-1)
    projected = normed @ source.W_U
    for rows in (stack, normed, projected, projected.mean(dim=(1, 2)), stack.clone().mul_(2)):
        assert type(rearrange(rows, BY_LAYER, layer=n_layers)) is torch.Tensor
        for split in (
            lambda rows: rearrange(rows, BY_LAYER, layer=n_blocks),
            lambda rows: rows.unflatten(0, (n_blocks, -1)),
            lambda rows: torch.reshape(rows, (n_blocks, -1, *rows.shape[1:])),
        ):
            with pytest.raises(UnsupportedCallError, match=r"layer=model\.cfg\.n_layers // 2"):
                split(rows)
    # Such a stack is saved and split otherwise as any tensor.
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    assert torch.equal(torch.load(file), stack)  # with weights_only, the default
    assert rearrange(stack, "h b (x y) -> h b x y", x=2).shape == (len(stack), 2, 2, 13)


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize(
    "options", [{"pos_slice": 2}, {"apply_ln": True, "project_output_onto": PROJECTION[:, 3]}]
)
def test_get_full_resid_decomposition(plain, expand, options):
    name, source, cache = plain
    if name == "no_norm":
        options = {k: v for k, v in options.items() if k != "apply_ln"}
    got, actual_labels = cache.get_full_resid_decomposition(
        expand_neurons=expand, return_labels=True, **options
    )
    torch.set_default_dtype(torch.float64)  # TransformerLens sums biases in the default dtype
    try:
        reference, labels = source.get_full_resid_decomposition(
            expand_neurons=expand, return_labels=True, **options
        )
    finally:
        torch.set_default_dtype(torch.float32)
    if source.model.cfg.gated_mlp and expand:
        # We count a gated MLP's b_in @ W_out as bias; TransformerLens adds it to the neurons.
        assert actual_labels == labels
        rest = [i for i, label in enumerate(labels) if "N" not in label and label != "bias"]
        agree((got[rest], [labels[i] for i in rest]), (reference[rest], [labels[i] for i in rest]))
        torch.testing.assert_close(got.sum(0), reference.sum(0), rtol=EXACT, atol=1e-9)
    else:
        agree((got, actual_labels), (reference, labels))


@pytest.mark.parametrize("expand", [True, False])
def test_a_decomposition_sums_to_the_stream(pair, expand):
    _, _, cache = pair
    for block in range(2 * N_LAYERS + 1):
        stack = cache.get_full_resid_decomposition(layer=block, expand_neurons=expand)
        end = cache["resid_post", block - 1] if block else cache["resid_pre", 0]
        assert relative(stack.sum(0), end) <= EXACT, block


@pytest.mark.parametrize(("name", "suffix"), [("post_norm", ""), (NORMED[1], "_post")])
@torch.no_grad()
def test_what_is_normed_on_its_way(name, suffix):
    """TransformerLens' tools omit these norms: compute from the source's scales and weights."""
    _, source, cache = caches(name)
    block = source.model.blocks[1]

    def normed(output, name):
        norm = f"{name}{suffix}"
        return output * getattr(block, norm).w / source[f"blocks.1.{norm}.hook_scale"]

    z = source["post", 1][..., 29, None] - block.mlp.b_in[29]
    expected = normed(z * block.mlp.W_out[29], "ln2")
    got = cache.get_neuron_results(3, neuron_slice=29)
    torch.testing.assert_close(got.squeeze(-2), expected, rtol=EXACT, atol=EXACT)
    head = normed(source["z", 1][:, :, 1] @ block.attn.W_O[1], "ln1")
    stack, labels = cache.stack_head_results(return_labels=True, neurons=True)
    torch.testing.assert_close(stack[labels.index("L1H1")], head, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(stack[labels.index("L1N29")], expected, rtol=EXACT, atol=EXACT)

    whole, labels = cache.stack_neuron_results(layer=-1, return_labels=True, apply_ln=True)
    how = {"apply_ln": True, "project_output_onto": PROJECTION, "neuron_slice": (5, 12)}
    projected, some = cache.stack_neuron_results(layer=-1, return_labels=True, **how)
    rows = [labels.index(label) for label in some]
    torch.testing.assert_close(projected, whole[rows] @ PROJECTION, rtol=EXACT, atol=1e-9)


def test_keys_slices_and_copies():
    _, _, cache = caches("llama")
    assert torch.equal(cache["pattern", 3], cache["blocks.3.attn.hook_pattern"])
    assert torch.equal(cache["pattern3"], cache["pattern", -3])
    assert torch.equal(cache["embed"], cache["hook_embed"])
    assert len(cache) == len(list(cache.keys())) == len(list(cache.values())) == len(list(cache))
    stack = cache.stack_activation("attn_out")
    assert len(stack) == 6
    assert torch.equal(stack[4], cache["attn_out", 4])
    one = cache.apply_slice_to_batch_dim(1)
    assert isinstance(one, AttentionOnlyCache)
    assert torch.equal(one["z", 3], cache["z", 3][1])
    pattern = neuron_pattern(one, "L1N5")
    assert torch.equal(pattern, cache["pattern", 3][1, 5])
    assert isinstance(cache.to("cpu"), AttentionOnlyCache)
    assert isinstance(one.remove_batch_dim(), AttentionOnlyCache)


def test_what_is_refused_by_name():
    _, _, cache = caches("llama")
    for gone in (("post", 1, "mlp"), ("mlp_out", 1), ("resid_mid", 0), ("mlp_in", 0), "post3"):
        with pytest.raises(UnsupportedCallError, match="block 2l"):
            cache[gone]
    for gone in ("blocks.1.hook_mlp_out", "blocks.0.mlp.hook_post", "blocks.1.ln2.hook_scale"):
        assert gone not in cache.cache_dict
        with pytest.raises(UnsupportedCallError, match="block 2l"):
            cache[gone]
    with pytest.raises(KeyError):
        cache["no_such_thing", 1]
    with pytest.raises(UnsupportedCallError, match="stack blocks of equal shape"):
        cache.stack_activation("pattern")
    with pytest.raises(UnsupportedCallError, match=r"no .*hook_result; .*set_use_attn_result"):
        cache.stack_activation("result")
    with pytest.raises(UnsupportedCallError, match="expected a neuron block"):
        cache.get_neuron_results(2)
    for method in ("accumulated_resid", "decompose_resid", "get_full_resid_decomposition"):
        with pytest.raises(UnsupportedCallError, match="2 \\* l \\+ 1"):
            getattr(cache, method)(layer=2, mlp_input=True)
    with pytest.raises(UnsupportedCallError, match="expected a block from 0 to 6"):
        cache.decompose_resid(layer=7)
