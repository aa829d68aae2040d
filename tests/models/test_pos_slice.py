"""Tests that caches with `pos_slice` hold the same positions of every activation."""

import pytest
import torch
from bridges import boot
from common import POS, needs_hooked_transformer, tokens
from drawn_transcoders import layers_of

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers
FIRST, END = 3, 5


def hooked():
    from models import build

    return build("llama", d_vocab_out=41)


def with_transcoders(model):
    return attach(model, layers_of(model, skip=True)).model


MODELS = {
    "bridge": lambda: expose_neuron_heads(boot("gpt2")).model,
    "bilinear bridge": lambda: expose_neuron_heads(boot("gpt2"), gate=Bilinear(4)).model,
    "bridge with transcoders": lambda: with_transcoders(boot("llama")),
    "hooked": lambda: expose_neuron_heads(hooked()).model,
    "hooked with transcoders": lambda: with_transcoders(hooked()),
    "converted": lambda: convert(hooked()),
}
KINDS = [
    pytest.param(kind, marks=[] if "bridge" in kind else needs_hooked_transformer)
    for kind in MODELS
]


def cached(model, method, **options):
    """Return all activations and gradients of activations in one run."""
    if method == "run_with_cache":
        options |= {"incl_bwd": True, "return_type": "loss"}
        return model.run_with_cache(tokens(), return_cache_object=False, **options)[1]
    cache, forward, backward = model.get_caching_hooks(incl_bwd=True, **options)
    with model.hooks(forward, backward):
        model(tokens(), return_type="loss").backward()
    return cache


@pytest.mark.parametrize("method", ["run_with_cache", "get_caching_hooks"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_has_the_chosen_positions(kind, method):
    model = MODELS[kind]()
    if not hasattr(model, method):
        pytest.skip("bridges of transformer-lens 3.9 have no get_caching_hooks")
    model.set_use_attn_result(True)
    everything = cached(model, method)
    got = cached(model, method, pos_slice=(FIRST, END))
    assert set(got) == set(everything)
    assert any("hook_neuron" in name or "blocks.1.attn.hook_z" in name for name in got)
    for name, value in everything.items():
        # TransformerLens 3.9 slices rotated queries and keys on their head_index axis, as
        # docs/layouts.md says.
        if POS in value.shape and not (HAS_HOOKED_TRANSFORMER and "hook_rot" in name):
            # In a pattern, the first of two axes of this length holds queries.
            expected = value.narrow(value.shape.index(POS), FIRST, END - FIRST)
            same = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": name}
            torch.testing.assert_close(got[name], expected, **same)
