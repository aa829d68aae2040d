"""Tests of hook methods that a converted model inherits from HookedRootModule."""

import pytest
import torch
from common import in_threads, meeting, tokens
from models import build

from attn_only_lens import convert, dense_pattern, neuron_pattern
from attn_only_lens.errors import UnsupportedCallError

NEURONS = "blocks.1.attn.hook_pattern"


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
    added = converted.add_caching_hooks(NEURONS)
    converted(tokens())
    assert list(added) == [NEURONS]
    torch.testing.assert_close(added[NEURONS], expected[NEURONS], rtol=1e-12, atol=1e-14)
    converted.reset_hooks()
    assert not converted.list_hooks()
    for method in (converted.get_caching_hooks, converted.add_caching_hooks):
        for name in ("blocks.1.attn.hook_result", "blocks.1.mlp.hook_post"):
            with pytest.raises(UnsupportedCallError, match=name):
                method([NEURONS, name])
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
    assert not converted.list_hooks()
    expected = converted.run_with_hooks(tokens(), fwd_hooks=[(instead, lambda x, hook: 0.5 * x)])
    both = lambda name: name in (hook, instead)  # noqa: E731
    got = converted.run_with_hooks(tokens(), fwd_hooks=[(both, lambda x, hook: 0.5 * x)])
    assert torch.equal(got, expected)
    converted.add_hook(both, keep)
    converted.run_with_hooks(tokens(), fwd_hooks=[(lambda name: True, keep)])
    _, cache = converted.run_with_cache(tokens())
    assert seen.keys() == cache.keys()
    assert instead in seen


@torch.no_grad()
def test_threads_share_a_model():
    """Threads share a model although each pauses between the two blocks of a parallel layer."""
    converted, inputs = convert(build("parallel")), [tokens(seed, batch=seed) for seed in (1, 2, 3)]
    with converted.hooks(fwd_hooks=[("blocks.3.attn.hook_z", lambda z, hook: 0.5 * z)]):
        expected = [converted(x) for x in inputs]
        handle = converted.blocks[2].register_forward_hook(meeting(inputs))
        results_of_all = in_threads(torch.no_grad()(converted), inputs)
        handle.remove()
    for results, one in zip(results_of_all, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)


@torch.no_grad()
def test_patterns_of_another_models_cache_are_refused(converted):
    source = build("gelu")
    _, cache = source.run_with_cache(tokens())
    for read in (neuron_pattern, dense_pattern):
        with pytest.raises(UnsupportedCallError, match="expected the cache of"):
            read(cache, "L0N1")
        with pytest.raises(UnsupportedCallError, match="got a dict"):
            read(cache.cache_dict, "L0N1")
