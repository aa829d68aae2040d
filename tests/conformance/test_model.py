"""Tests that HookedTransformer's methods on a converted model give what they give on its source."""

import pytest
import torch
from common import in_threads, meeting, relative, tokens
from models import BASE, CORE, build
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import TransformerLensKeyValueCache

from attn_only_lens import convert, neuron_pattern
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

TEXTS = ["w3 w5 w8", "w7", "w11 w2 w2 w13 w1"]


@pytest.fixture(scope="module", params=["right", "left"])
def speaking(request, tmp_path_factory):
    """Return a source with a tokenizer, and its conversion."""
    source = build("llama", d_vocab_out=41)
    tokenizer = tiny_tokenizer(41, tmp_path_factory.mktemp("tokenizer"))
    source.set_tokenizer(tokenizer, default_padding_side=request.param)
    return source, convert(source)


@pytest.mark.parametrize("name", CORE)
@torch.no_grad()
def test_forward(name):
    source = build(name, d_vocab_out=41)
    converted = convert(source)
    for options in (
        {"return_type": "logits"},
        {"return_type": "loss"},
        {"return_type": "loss", "loss_per_token": True},
        {"attention_mask": torch.ones_like(tokens()).index_fill(1, torch.tensor([0, 1]), 0)},
    ):
        assert torch.equal(converted(tokens(), **options), source(tokens(), **options))
    for a, b in zip(
        converted(tokens(), return_type="both"), source(tokens(), return_type="both"), strict=True
    ):
        assert torch.equal(a, b)
    assert converted(tokens(), return_type=None) is None
    assert torch.equal(converted(tokens()[0]), source(tokens()[0]))


@torch.no_grad()
def test_text(speaking):
    source, converted = speaking
    assert converted.tokenizer is source.tokenizer
    for options in ({}, {"prepend_bos": False}, {"padding_side": "left"}):
        for text in (TEXTS, TEXTS[0]):
            assert torch.equal(converted(text, **options), source(text, **options))
            assert torch.equal(
                converted.to_tokens(text, **options), source.to_tokens(text, **options)
            )
    hooked, _ = converted.run_with_cache(TEXTS)
    assert relative(hooked, source(TEXTS)) <= 1e-12
    for method, argument in (
        ("to_str_tokens", TEXTS[0]),
        ("to_string", tokens()[0]),
        ("to_single_token", "w3"),
        ("to_single_str_token", 7),
    ):
        assert getattr(converted, method)(argument) == getattr(source, method)(argument)
    assert converted.get_token_position("w5", TEXTS[0]) == source.get_token_position("w5", TEXTS[0])
    assert torch.equal(
        converted.tokens_to_residual_directions("w3"), source.tokens_to_residual_directions("w3")
    )


@pytest.mark.parametrize("cached", [True, False])
def test_generate(speaking, cached):
    source, converted = speaking
    embeds = source.embed(source.to_tokens(TEXTS[0])).detach()
    options = {"max_new_tokens": 5, "use_past_kv_cache": cached, "verbose": False}
    for prompt, sampling in (
        (TEXTS, {"do_sample": False}),
        (TEXTS, {"temperature": 1.3, "top_k": 17}),
        (embeds, {"do_sample": False}),
    ):
        torch.manual_seed(3)
        expected = source.generate(prompt, **options, **sampling)
        torch.manual_seed(3)
        got = converted.generate(prompt, **options, **sampling)
        assert torch.equal(got, expected) if torch.is_tensor(got) else got == expected


def test_generate_with_hooks_and_streamed(speaking):
    source, converted = speaking
    greedy = {"max_new_tokens": 6, "do_sample": False, "verbose": False}
    expected = source.generate(TEXTS[0], **greedy)
    seen = []
    with converted.hooks([("blocks.3.attn.hook_pattern", lambda p, hook: seen.append(p.shape))]):
        assert converted.generate(TEXTS[0], **greedy) == expected
    assert seen[0][2] == 4
    assert all(shape[2] == 1 for shape in seen[1:])
    streamed, got = (
        [part.tolist() for part in model.generate_stream(TEXTS[0], **greedy)]
        for model in (source, converted)
    )
    assert got == streamed


@torch.no_grad()
def test_key_value_cache(speaking):
    source, converted = speaking
    results = []
    for model in (source, converted):
        past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
        first = model(tokens()[:, :5], past_kv_cache=past)
        past.freeze()
        frozen = model(tokens()[:, 5:8], past_kv_cache=past)
        past.unfreeze()
        results.append((first, frozen, model(tokens()[:, 5:], past_kv_cache=past)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


@torch.no_grad()
def test_run_with_cache_options():
    converted = convert(build("llama"))
    _, everything = converted.run_with_cache(tokens())
    hook = "blocks.3.attn.hook_pattern"
    for hook_filter in (hook, [hook], (hook,), lambda name: name == hook):
        _, cache = converted.run_with_cache(tokens(), names_filter=hook_filter)
        assert list(cache) == [hook]
        # Without other hooks, the pattern is the gate itself; with live scores it is their softmax.
        torch.testing.assert_close(cache[hook], everything[hook], rtol=1e-11, atol=1e-99)
    _, one = converted.run_with_cache(tokens()[:1], remove_batch_dim=True)
    assert one[hook].shape == (37, 11, 2)
    assert neuron_pattern(one, "L1N3").shape == (11, 2)
    _, plain = converted.run_with_cache(tokens(), return_cache_object=False)
    assert type(plain) is dict


@pytest.mark.parametrize("name", CORE)
def test_cached_gradients(name):
    source = build(name, d_vocab_out=41)
    converted = convert(source, copy_weights=True)
    _, expected = source.run_with_cache(tokens(), return_type="loss", incl_bwd=True)
    _, got = converted.run_with_cache(tokens(), return_type="loss", incl_bwd=True)
    for layer in range(3):
        gradient = got[f"blocks.{2 * layer + 1}.attn.hook_z_grad"].squeeze(-1)
        reference = expected[f"blocks.{layer}.mlp.hook_post_grad"]
        assert relative(gradient, reference) <= 1e-11
        gradient = got[f"blocks.{2 * layer + 1}.hook_attn_out_grad"]
        assert relative(gradient, expected[f"blocks.{layer}.hook_mlp_out_grad"]) <= 1e-11
        assert got[f"blocks.{2 * layer + 1}.attn.hook_pattern_grad"].abs().max() > 0


@pytest.mark.parametrize(
    ("hook", "flag"),
    [
        ("blocks.0.attn.hook_result", "use_attn_result"),
        ("blocks.0.hook_q_input", "use_split_qkv_input"),
        ("blocks.1.hook_mlp_in", "use_hook_mlp_in"),
    ],
)
def test_a_hook_that_would_not_fire_is_refused(hook, flag):
    converted = convert(build("gelu"))
    nothing = lambda x, hook: None  # noqa: E731
    for attempt in (
        lambda: converted.run_with_hooks(tokens(), fwd_hooks=[(hook, nothing)]),
        lambda: converted.run_with_hooks(tokens(), bwd_hooks=[(lambda n: n == hook, nothing)]),
        lambda: converted.add_perma_hook(hook, nothing),
        lambda: converted.run_with_cache(tokens(), names_filter=["hook_embed", hook]),
        # The function also matches a hook that fires.
        lambda: converted.add_hook(lambda n: n in (hook, "blocks.0.hook_resid_pre"), nothing),
    ):
        with pytest.raises(UnsupportedCallError, match=f"set_{flag}\\(True\\)"):
            attempt()
    assert not any(point.has_hooks() for point in converted.hook_points())
    getattr(converted, f"set_{flag}")(True)
    assert hook in converted.run_with_cache(tokens(), names_filter=hook)[1]


def test_no_hook_stays_after_an_error():
    converted = convert(build("gelu"))

    def fail(x, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        converted.run_with_hooks(tokens(), fwd_hooks=[("blocks.3.attn.hook_z", fail)])
    with pytest.raises(IndexError):
        converted.run_with_cache(tokens() + 1000)
    assert not any(point.has_hooks() for point in converted.hook_points())


def shift(x, hook):
    x[..., ::2] += 0.4  # not all coordinates: a norm removes a shift of all
    return x


@pytest.mark.parametrize(
    ("flag", "hook", "name", "block"),
    [
        ("use_hook_mlp_in", "hook_mlp_in", "gelu", 3),
        ("use_hook_mlp_in", "hook_mlp_in", "parallel", 3),
        ("use_split_qkv_input", "hook_q_input", "gelu", 2),
        ("use_attn_in", "hook_attn_in", "gelu", 2),
    ],
)
@torch.no_grad()
def test_an_edit_of_an_input_in_place_is_that_of_the_source(flag, hook, name, block):
    source = build(name)
    converted = convert(source)
    for model in (source, converted):
        getattr(model, f"set_{flag}")(True)
    expected = source.run_with_hooks(tokens(), fwd_hooks=[(f"blocks.1.{hook}", shift)])
    got = converted.run_with_hooks(tokens(), fwd_hooks=[(f"blocks.{block}.{hook}", shift)])
    assert relative(got, expected) <= 1e-12
    assert relative(got, converted(tokens())) > 1e-3


@torch.no_grad()
def test_grouped_queries():
    source = build("grouped")
    converted = convert(source)
    with pytest.raises(UnsupportedCallError, match="set_use_split_qkv_input"):
        converted.set_use_attn_in(True)
    converted.set_ungroup_grouped_query_attention(True)
    assert relative(converted(tokens()), source(tokens())) <= 1e-12


@pytest.mark.parametrize("name", CORE)
def test_weights(name):
    source = build(name)
    converted = convert(source)
    for weight in ("W_in", "b_in", "W_out", "b_out", "W_gate", "W_E", "W_U", "b_U"):
        tensor, reference = getattr(converted, weight), getattr(source, weight)
        assert tensor is reference is None or torch.equal(tensor, reference)
    for weight in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
        heads = getattr(converted.attention_heads, weight)
        assert torch.equal(heads, getattr(source, weight))
    if source.cfg.positional_embedding_type == "standard":
        assert torch.equal(converted.W_pos, source.W_pos)
        assert torch.equal(converted.W_E_pos, source.W_E_pos)
    assert torch.equal(converted.b_O[::2], source.b_O)
    assert converted.n_params_total == source.n_params_total
    assert converted.all_head_labels() == source.all_head_labels()
    labels = converted.all_head_labels(neurons=True)
    n_heads = source.cfg.n_heads
    assert len(labels) == len(set(labels)) == 3 * (n_heads + 37)
    assert labels[n_heads - 1 : n_heads + 1] == [f"L0H{n_heads - 1}", "L0N0"]
    assert labels[-1] == "L2N36"


@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_weights_of_neuron_heads(name):
    """The weights give a neuron-head's query, value and result from the normed stream."""
    converted = convert(build(name))
    converted.set_use_attn_result(True)
    _, cache = converted.run_with_cache(tokens())
    x = cache["normalized", 3, "ln1"]
    x = x * converted.blocks[3].ln1.w
    if name == "gelu":
        x = x + converted.blocks[3].ln1.b
    neurons = converted.neuron_heads
    q = torch.einsum("bpd,hde->bphe", x, neurons.W_Q[1]) + neurons.b_Q[1]
    torch.testing.assert_close(q, cache["q", 3])
    if name == "gelu":
        v = torch.einsum("bpd,hde->bphe", x, neurons.W_V[1]) + neurons.b_V[1]
        torch.testing.assert_close(v, cache["v", 3])
        assert neurons.OV.shape == (3, 37, 26, 26)
    else:
        for weight in ("W_V", "b_V", "OV"):
            with pytest.raises(UnsupportedCallError, match="product"):
                getattr(neurons, weight)
    written = torch.einsum("bphe,hed->bphd", cache["z", 3], neurons.W_O[1])
    torch.testing.assert_close(written, cache["result", 3])
    assert (cache["result", 3].sum(2) + converted.b_O[3] - cache["attn_out", 3]).abs().max() < 1e-12
    assert neurons.W_K.abs().max() == neurons.b_K.abs().max() == cache["k", 3].abs().max() == 0
    assert neurons.QK.AB.abs().max() == 0


@pytest.mark.parametrize("name", ["gelu", "parallel"])
def test_accumulated_bias(name):
    source = build(name)
    converted = convert(source)
    for layer in range(4):
        for neurons in (True, False):
            expected = sum(
                (b.attn.b_O + (b.mlp.b_out if neurons else 0) for b in source.blocks[:layer]),
                torch.zeros(26, dtype=torch.float64),
            )
            got = converted.accumulated_bias(2 * layer, include_mlp_biases=neurons)
            torch.testing.assert_close(got, expected)
    with pytest.raises(UnsupportedCallError, match="mlp_input"):
        converted.accumulated_bias(2, mlp_input=True)


STACKED = ("W_Q", "b_V", "QK", "OV")
REFUSED_METHODS = ("process_weights_", "load_and_process_state_dict", "fold_layer_norm")
REFUSED_METHODS += ("center_writing_weights", "all_composition_scores", "init_weights")


def test_refused_before_anything_is_changed():
    converted = convert(build("gelu"))
    before = {key: tensor.clone() for key, tensor in converted.state_dict().items()}
    modules = [(key, type(module)) for key, module in converted.named_modules()]
    for name in STACKED:
        with pytest.raises(UnsupportedCallError, match=rf"neuron_heads\.{name}"):
            getattr(converted, name)
    for name in REFUSED_METHODS:
        with pytest.raises(UnsupportedCallError, match="Use "):
            getattr(converted, name)(converted.state_dict())
    assert modules == [(key, type(module)) for key, module in converted.named_modules()]
    assert all(torch.equal(t, before[key]) for key, t in converted.state_dict().items())


def test_a_converted_configuration_builds_no_other_model():
    converted = convert(build("local"))
    cfg = converted.cfg
    for attempt in (
        lambda: HookedTransformer(cfg),
        lambda: cfg.n_heads,
        lambda: HookedTransformerConfig.from_dict(cfg.to_dict()),
        lambda: type(cfg).from_dict(converted.source_cfg.to_dict()),
        lambda: AttentionOnlyTransformer(cfg),
        lambda: AttentionOnlyTransformer.from_pretrained("gpt2"),
    ):
        with pytest.raises(UnsupportedCallError, match="attn_only_lens"):
            attempt()
    again = HookedTransformer(HookedTransformerConfig.from_dict(converted.source_cfg.to_dict()))
    assert [type(block.mlp).__name__ for block in again.blocks] == ["MLP"] * 3
    assert BASE["n_layers"] == converted.source_cfg.n_layers == 3


# Hook methods of HookedRootModule

PATTERNS = "blocks.1.attn.hook_pattern"


@pytest.fixture
def converted():
    return convert(build("gelu"))


@torch.no_grad()
def test_caching_hooks(converted):
    expected_logits, expected = converted.run_with_cache(tokens())
    cache, forward, backward = converted.get_caching_hooks(lambda name: True)
    assert backward == []
    logits = converted.run_with_hooks(tokens(), fwd_hooks=forward)
    assert torch.equal(logits, expected_logits)
    assert cache.keys() == expected.keys()
    for key, value in cache.items():
        assert torch.equal(value, expected[key]), key
    added = converted.add_caching_hooks(PATTERNS)
    converted(tokens())
    assert list(added) == [PATTERNS]
    torch.testing.assert_close(added[PATTERNS], expected[PATTERNS], rtol=1e-12, atol=1e-14)
    converted.reset_hooks()
    assert not converted.list_hooks()
    for method in (converted.get_caching_hooks, converted.add_caching_hooks):
        for name in ("blocks.1.attn.hook_result", "blocks.1.mlp.hook_post"):
            with pytest.raises(UnsupportedCallError, match=name):
                method([PATTERNS, name])
    with pytest.raises(UnsupportedCallError, match="matches no hook point"):
        converted.run_with_hooks(
            tokens(), fwd_hooks=[(lambda name: "mlp.hook_post" in name, lambda x, hook: x)]
        )
    _, empty = converted.run_with_cache(tokens(), names_filter=lambda name: False)
    assert len(empty) == 0
    assert not converted.list_hooks()


@pytest.mark.parametrize(
    ("block", "edit"),
    [
        (0, lambda x, hook: x.mul_(0.0)),
        (1, lambda x, hook: torch.zeros_like(x)),
        (1, lambda x, hook: x.index_fill_(1, torch.tensor([2]), 3.0)),
    ],
)
@torch.no_grad()
def test_an_edit_where_no_mlp_is_is_refused(converted, block, edit):
    """An edit without an effect is refused; reading is allowed, as attribution patching does."""
    hook = f"blocks.{block}.hook_mlp_out"
    every_head = [(f"blocks.{i}.attn.hook_z", lambda z, hook: None) for i in range(6)]
    with pytest.raises(UnsupportedCallError, match=r"an edit at .*hook_attn_out"):
        converted.run_with_hooks(tokens(), fwd_hooks=[*every_head, (hook, edit)])
    for look in (lambda x, hook: None, lambda x, hook: x):
        converted.run_with_hooks(tokens(), fwd_hooks=[*every_head, (hook, look)])
    assert not converted.list_hooks()


@pytest.mark.parametrize("block", [0, 1])
@torch.no_grad()
def test_the_output_of_no_mlp_is_not_read_as_zeros(converted, block):
    """Hooks on a missing MLP output raise, unless a filter also matches the real output."""
    hook, instead = f"blocks.{block}.hook_mlp_out", f"blocks.{block}.hook_attn_out"
    seen = {}

    def keep(x, hook):
        seen[hook.name] = x

    for attempt in (
        lambda: converted.run_with_hooks(tokens(), fwd_hooks=[(hook, keep)]),
        lambda: converted.run_with_hooks(tokens(), bwd_hooks=[(lambda name: name == hook, keep)]),
        lambda: converted.add_hook(lambda name: name in (hook, "blocks.0.hook_resid_pre"), keep),
        lambda: converted.add_perma_hook(hook, keep),
        lambda: converted.run_with_cache(tokens(), names_filter=["hook_embed", hook]),
        lambda: converted.run_with_cache(tokens(), names_filter=lambda name: name == hook),
        lambda: converted.add_caching_hooks(hook),
        lambda: converted.hook_dict[hook].add_hook(keep),
    ):
        with pytest.raises(UnsupportedCallError, match=r"blocks.\{2l\+1\}.hook_attn_out"):
            attempt()
    assert not converted.list_hooks()
    expected = converted.run_with_hooks(tokens(), fwd_hooks=[(instead, lambda x, hook: 0.5 * x)])
    both = lambda name: name in (hook, instead)  # noqa: E731
    got = converted.run_with_hooks(tokens(), fwd_hooks=[(both, lambda x, hook: 0.5 * x)])
    assert torch.equal(got, expected)
    converted.run_with_hooks(tokens(), fwd_hooks=[(lambda name: True, keep)])
    _, cache = converted.run_with_cache(tokens())
    assert seen.keys() == cache.keys()


@pytest.mark.parametrize("hooks", [[], [("blocks.3.attn.hook_z", lambda z, hook: 0.5 * z)]])
@torch.no_grad()
def test_threads_share_a_model(hooks):
    """Threads share a model although each pauses between the two blocks of a parallel layer."""
    converted, inputs = convert(build("parallel")), [tokens(seed, batch=seed) for seed in (1, 2, 3)]
    with converted.hooks(fwd_hooks=hooks):
        expected = [converted(x) for x in inputs]
        handle = converted.blocks[2].register_forward_hook(meeting(inputs))
        results_of_all = in_threads(torch.no_grad()(converted), inputs)
        handle.remove()
    for results, one in zip(results_of_all, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)
