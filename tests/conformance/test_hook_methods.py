"""Tests of hook methods that a converted model inherits from HookedRootModule."""

import pytest
import torch
from common import in_threads, meeting, relative, tokens
from models import build

from attn_only_lens import convert, dense_pattern, neuron_pattern
from attn_only_lens.errors import UnsupportedCallError

NEURONS = "blocks.1.attn.hook_pattern"


@pytest.fixture
def converted():
    return convert(build("gelu"))


def is_live_anywhere(model):
    return bool(model.list_hooks())


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
    added = converted.add_caching_hooks(NEURONS)
    converted(tokens())
    assert list(added) == [NEURONS]
    torch.testing.assert_close(added[NEURONS], expected[NEURONS], rtol=1e-12, atol=1e-14)
    converted.reset_hooks()
    assert not is_live_anywhere(converted)


def test_a_name_that_would_not_be_cached_is_refused(converted):
    for method in (converted.get_caching_hooks, converted.add_caching_hooks):
        for name in ("blocks.1.attn.hook_result", "blocks.1.mlp.hook_post"):
            with pytest.raises(UnsupportedCallError, match=name):
                method([NEURONS, name])
    assert not is_live_anywhere(converted)


@torch.no_grad()
def test_names_by_function_are_checked_as_strings_are(converted):
    with pytest.raises(UnsupportedCallError, match="matches no hook point"):
        converted.run_with_hooks(
            tokens(), fwd_hooks=[(lambda name: "mlp.hook_post" in name, lambda x, hook: x)]
        )
    off = "blocks.1.attn.hook_result"
    with pytest.raises(UnsupportedCallError, match="set_use_attn_result"):
        converted.run_with_cache(tokens(), names_filter=lambda name: name == off)
    _, empty = converted.run_with_cache(tokens(), names_filter=lambda name: False)
    assert len(empty) == 0


EDITS = {
    "in place": lambda x, hook: x.mul_(0.0),
    "another tensor": lambda x, hook: torch.zeros_like(x),
    "one entry": lambda x, hook: x.index_fill_(1, torch.tensor([2]), 3.0),
}


EVERY_HEAD = [(f"blocks.{block}.attn.hook_z", lambda z, hook: None) for block in range(6)]


@pytest.mark.parametrize(
    ("edit", "block", "mode"),
    [
        ("in place", 0, torch.no_grad),
        ("another tensor", 1, torch.enable_grad),
        ("one entry", 1, torch.inference_mode),
    ],
)
def test_an_edit_where_no_mlp_is_is_refused(converted, edit, block, mode):
    """An edit without an effect is refused; reading is allowed, as attribution patching does."""
    hook = f"blocks.{block}.hook_mlp_out"
    with mode():
        with pytest.raises(UnsupportedCallError, match=r"an edit at .*hook_attn_out"):
            converted.run_with_hooks(tokens(), fwd_hooks=[*EVERY_HEAD, (hook, EDITS[edit])])
        for look in (lambda x, hook: None, lambda x, hook: x):
            converted.run_with_hooks(tokens(), fwd_hooks=[*EVERY_HEAD, (hook, look)])
    assert not is_live_anywhere(converted)


@pytest.mark.parametrize("block", [0, 1])
@torch.no_grad()
def test_the_output_of_no_mlp_is_not_read_as_zeros(converted, block):
    """Hooks on a missing MLP output raise, unless a filter also matches the real output."""
    hook, instead = f"blocks.{block}.hook_mlp_out", f"blocks.{block}.hook_attn_out"
    seen = {}

    def keep(x, hook):
        seen[hook.name] = x

    for choice in (hook, lambda name: name in (hook, "blocks.0.hook_resid_pre")):
        for attempt in (
            lambda choice=choice: converted.run_with_hooks(tokens(), fwd_hooks=[(choice, keep)]),
            lambda choice=choice: converted.run_with_hooks(tokens(), bwd_hooks=[(choice, keep)]),
            lambda choice=choice: converted.add_hook(choice, keep),
            lambda choice=choice: converted.add_perma_hook(choice, keep),
            lambda: converted.run_with_cache(tokens(), names_filter=["hook_embed", hook]),
            lambda: converted.run_with_cache(tokens(), names_filter=lambda name: name == hook),
            lambda: converted.add_caching_hooks(hook),
            lambda: converted.hook_dict[hook].add_hook(keep),
            lambda: converted.hook_dict[hook].add_perma_hook(keep),
        ):
            with pytest.raises(UnsupportedCallError, match=r"blocks.\{2l\+1\}.hook_attn_out"):
                attempt()
    assert not is_live_anywhere(converted)
    expected = converted.run_with_hooks(tokens(), fwd_hooks=[(instead, lambda x, hook: 0.5 * x)])
    both = lambda name: name in (hook, instead)  # noqa: E731
    got = converted.run_with_hooks(tokens(), fwd_hooks=[(both, lambda x, hook: 0.5 * x)])
    assert torch.equal(got, expected)
    converted.add_hook(both, keep)
    converted.run_with_hooks(tokens(), fwd_hooks=[(lambda name: True, keep)])
    _, cache = converted.run_with_cache(tokens())
    assert seen.keys() == cache.keys()
    assert instead in seen


@pytest.mark.parametrize("name", ["relu", "llama"])
@pytest.mark.parametrize("point", ["q", "v", "pattern"])
def test_every_hook_point_has_a_gradient_and_can_be_edited(name, point):
    converted = convert(build(name))
    hook = f"blocks.3.attn.hook_{point}"
    _, cache = converted.run_with_cache(
        tokens(), return_type="loss", incl_bwd=True, names_filter=hook
    )
    assert cache[hook + "_grad"].shape == cache[hook].shape
    if point == "pattern":
        _, full = converted.run_with_cache(tokens(), return_type="loss", incl_bwd=True)
        expected = (full["v", 3] * full.cache_dict["blocks.3.attn.hook_z_grad"]).squeeze(-1)
        got = cache[hook + "_grad"][..., 0].transpose(1, 2)
        assert relative(got, expected) < 1e-12
    loss = converted.run_with_hooks(
        tokens(), return_type="loss", fwd_hooks=[(hook, lambda x, hook: x.mul_(0.5))]
    )
    loss.backward()


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


def test_blocks_out_of_range(converted):
    for block in (-1, 6, 99):
        with pytest.raises(UnsupportedCallError, match=f"got block={block}"):
            converted.head_labels(block)
    for layer in (-1, 7):
        with pytest.raises(UnsupportedCallError, match=f"got layer={layer}"):
            converted.accumulated_bias(layer)


@torch.no_grad()
def test_patterns_of_another_models_cache_are_refused(converted):
    source = build("gelu")
    _, cache = source.run_with_cache(tokens())
    for read in (neuron_pattern, dense_pattern):
        with pytest.raises(UnsupportedCallError, match="expected the cache of"):
            read(cache, "L0N1")
        with pytest.raises(UnsupportedCallError, match="got a dict"):
            read(cache.cache_dict, "L0N1")
