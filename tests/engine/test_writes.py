"""Tests that all outputs add up to the stream and that norms change as their modules do."""

import bridges
import pytest
import torch
from common import needs_hooked_transformer, relative, tokens

from attn_only_lens import Contrast, convert, explain, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.engine.writes import decompose
from attn_only_lens.errors import InputError, UnsupportedModelError

pytestmark = pytest.mark.numeric


def heads_and_biases(model, parts):
    """Return the sum of the embedding, every head's output and the biases, added one by one."""
    total = parts.embedding.clone()
    for sites in resolve_sites(model, "all"):
        for write in parts.of(sites.layer, sites.kind).written(sites):
            total += write
    for sublayer in parts.sublayers:
        total += sublayer.bias
    return total


def check_norms(model, parts, tolerance):
    """Compare changes of norms with the norms' own modules."""
    for sublayer in parts.sublayers:
        x = sublayer.reads.stream
        change = torch.randn_like(x) * x.std()
        module = sublayer.reads.norm.module
        expected = change if module is None else module(x + change) - module(x)
        assert relative(sublayer.reads.change(change, "anew"), expected) < tolerance
        held = sublayer.reads.change(change)
        assert relative(sublayer.reads.change(3 * change), 3 * held) < 1e-12
        if module is not None:  # a change along the stream only changes the scale
            moved = sublayer.reads.change(0.25 * x, "anew")
            assert moved.abs().max() < 1e-3 * expected.abs().max()
            assert relative(sublayer.reads.change(0.25 * x), expected) > 1e-3


@needs_hooked_transformer
@pytest.mark.parametrize("family", ["parallel_norms", "no_norm"])
@torch.no_grad()
def test_writes_add_up(family):
    from models import build  # a module-level import would skip the module under 4

    source = build(family, scale=0.25)
    stream = source.run_with_cache(tokens())[1]["blocks.2.hook_resid_post"]
    for model in (convert(source), expose_neuron_heads(source, copy=True).model):
        parts = decompose(model, tokens(), None)
        assert relative(heads_and_biases(model, parts), stream) < 1e-13
        assert relative(parts.final.stream, stream) < 1e-13
    check_norms(model, parts, 1e-10)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite"])
@torch.no_grad()
def test_writes_of_bridges_add_up(name):
    model = bridges.exposed_copy(bridges.boot(name))
    parts = decompose(model, tokens(), None)
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    stream = model.run_with_cache(tokens())[1][last]
    fine = name == "gpt2"  # bridged RMS norms compute in float32
    assert relative(heads_and_biases(model, parts), stream) < (1e-13 if fine else 1e-6)
    check_norms(model, parts, 1e-10 if fine else 1e-5)


def test_the_first_value_that_is_not_finite_is_named():
    model = bridges.exposed_copy(bridges.boot("llama", torch.float16))
    clean = tokens()[:1]
    contrast = Contrast(clean, (clean + 5) % 31, p.logit_diff(3, 7))
    with torch.no_grad():
        model.blocks[1].attn.o.original_component.weight.fill_(6e4)
    place = r"nan or inf in torch\.float16, first at blocks\.1\.attn\.o\.hook_out,"
    for run in (p.activation_patch, p.attribution, explain):
        with pytest.raises(InputError, match=place):
            run(model, contrast)


@pytest.mark.parametrize(
    ("side", "dtype", "window"),
    [("right", torch.float64, None), ("right", torch.float64, 2), ("left", torch.float32, 2)],
)
def test_padding_that_attends_to_no_real_token(side, dtype, window):
    """Transformers computes masks in the model's dtype, but the softmax in float32."""
    config = bridges.FAMILIES["mistral"].config()
    config.sliding_window = window
    make = bridges.transformers.AutoModelForCausalLM.from_config
    source = bridges.randomise(make(config, attn_implementation="eager").to(dtype).eval())
    model = bridges.exposed_copy(bridges.bridged(source))
    mask = torch.ones_like(tokens())
    mask[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    fails = dtype == torch.float64 and (side == "left" or window is not None)
    with torch.no_grad():
        assert bool(model(tokens(), attention_mask=mask)[mask.bool()].isnan().any()) == fails
    if fails:
        with pytest.raises(InputError, match="longer than a sliding window"):
            decompose(model, tokens(), mask)
    else:
        decompose(model, tokens(), mask)


@torch.no_grad()
def test_a_changed_model_is_tested_again():
    model = bridges.exposed_copy(bridges.boot("llama"))
    parts = decompose(model, tokens(), None)
    parts.of(1, "neuron").reads.norm.module.original_component.weight.mul_(-1.5)
    parts = decompose(model, tokens(), None)
    stream = model.run_with_cache(tokens())[1]["blocks.1.hook_resid_post"]
    assert relative(heads_and_biases(model, parts), stream) < 1e-6
    check_norms(model, parts, 1e-5)
    model.blocks[1].hook_resid_pre.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UnsupportedModelError, match="outputs are multiplied"):
        decompose(model, tokens(), None)
