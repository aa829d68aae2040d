"""Tests of growing TransformerLens' native models behind a bridge, on 3.9 and 4."""

import pytest
import torch
from bridges import NATIVE, boot
from common import D_VOCAB, tokens
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import expansion as ex
from attn_only_lens import expose_neuron_heads, grow
from attn_only_lens.errors import GrowthError
from attn_only_lens.growth import read

pytestmark = pytest.mark.numeric

FAMILIES = {
    "ln": {"act_fn": "gelu_new"},
    "ln_pre": {"normalization_type": "LNPre"},
    "rms": {"normalization_type": "RMS"},
    "rms_pre": {"normalization_type": "RMSPre"},
    "no_norm": {"normalization_type": None},
    "lower_case": {"normalization_type": "ln"},
    "last_norm_only": {"normalization_type": None, "final_rms": True},
    "gated": {"gated_mlp": True, "act_fn": "silu"},
    "rotary": {"positional_embedding_type": "rotary", "d_head": 14},
    "rotary_upper_case": {"positional_embedding_type": "Rotary", "d_head": 14},
    "grouped": {"n_heads": 6, "d_head": 5, "n_key_value_heads": 2},
    "caps": {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "own_scale": {"attn_scale": 3.0},
    "attention_only": {"attn_only": True},
}
# TransformerLens' norms, except torch's LayerNorm, compute in float32 for every dtype.
IN_FLOAT32 = {"rms", "rms_pre", "ln_pre", "last_norm_only"}
SIZES = {"d_mlp": 41, "n_heads": 4, "d_head": 17, "d_model": 37, "n_layers": 3}
EXACT, FLOAT32 = 1e-13, 2e-6


def native(name, **changes):
    """Return a float64 bridge of the family with random parameters."""
    bridge = TransformerBridge.boot_native(NATIVE | FAMILIES[name] | changes, dtype=torch.float64)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in bridge.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.4)
    return bridge


def tie(bridge):
    model = bridge.original_model
    model.head._original_component.weight = model.tok_embed.weight


def sizes_for(name):
    if name == "grouped":
        return SIZES | {"n_heads": 9}
    if name == "attention_only":
        return {key: size for key, size in SIZES.items() if key != "d_mlp"}
    return SIZES


@pytest.mark.parametrize("name", FAMILIES)
def test_all_six_at_once_and_twice_keep_logits_and_old_activations(name):
    bridge, prompts = native(name), tokens()
    before = {key: p.detach().clone() for key, p in bridge.named_parameters()}
    logits, cache = bridge.run_with_cache(prompts)
    once = grow(bridge, **sizes_for(name), seed=1)
    twice = grow(once.model, ex.compose(ex.WidenStream(3), ex.InsertLayer(at=0)), seed=2)
    tolerance = FLOAT32 if name in IN_FLOAT32 else EXACT
    for grown, moved in (
        (once, once.provenance),
        (twice, once.provenance.then(twice.provenance)),
    ):
        got, new = grown.model.run_with_cache(prompts)
        largest = logits.abs().max()
        assert (got - logits).abs().max() < tolerance * largest
        for layer in range(2):
            for part in ("attn.hook_pattern", "attn.hook_z", "mlp.hook_post"):
                old_name = f"blocks.{layer}.{part}"
                if old_name not in cache:
                    continue
                old = cache[old_name]
                here = new[moved.name(old_name)]
                here = here[tuple(slice(size) for size in old.shape)]
                assert (here - old).abs().max() < tolerance * max(1.0, old.abs().max())
    for key, parameter in bridge.named_parameters():
        assert torch.equal(parameter, before[key])
    assert torch.equal(once.shrink()(prompts), logits)
    assert torch.equal(grow(bridge, **sizes_for(name), seed=1).model(prompts), once.model(prompts))


@pytest.mark.parametrize("name", ["blocks.0.mlp.W_out", "blocks.1.attn.W_O", "embed.W_E"])
def test_a_constraint_that_is_broken_changes_the_function(name):
    bridge, prompts = native("ln"), tokens()
    grown = grow(bridge, **SIZES)
    tensor = read(grown.model).tensors[name]  # the model's own tensor, not a copy
    for zeros in grown.provenance.zeros:
        if zeros.name == name:
            index = torch.meshgrid(*map(torch.tensor, zeros.indices), indexing="ij")
            drawn = torch.arange(index[0].numel(), dtype=torch.float64).sin()
            tensor[index] = drawn.reshape(index[0].shape)
    assert (grown.model(prompts) - bridge(prompts)).abs().max() > 1e-3


def test_the_reader_is_right_whatever_the_layout():
    bridge = native("grouped")
    weights, cfg = read(bridge), bridge.cfg
    assert weights.sizes[ex.Axis("kv_head", 0)] == 2
    _, cache = bridge.run_with_cache(tokens())
    x = cache["blocks.0.attn.hook_in"]
    q = torch.einsum("bpm,hme->bphe", x, weights.tensors["blocks.0.attn.W_Q"])
    q = q + weights.tensors["blocks.0.attn.b_Q"]
    got = cache["blocks.0.attn.hook_q"].reshape(*q.shape)
    assert torch.allclose(q, got, atol=1e-12)
    z = cache["blocks.0.attn.hook_z"].reshape(*q.shape[:2], cfg.n_heads, cfg.d_head)
    out = torch.einsum("bphe,hem->bpm", z, weights.tensors["blocks.0.attn.W_O"])
    out = out + weights.tensors["blocks.0.attn.b_O"]
    assert torch.allclose(out, cache["blocks.0.hook_attn_out"], atol=1e-12)


def test_tied_embeddings_stay_tied():
    bridge = native("rms")
    tie(bridge)
    prompts = tokens()
    logits = bridge(prompts)
    grown = grow(bridge, d_model=37, d_mlp=41)
    assert grown.model.original_model.head.weight is grown.model.original_model.tok_embed.weight
    assert (grown.model(prompts) - logits).abs().max() < FLOAT32 * logits.abs().max()
    assert torch.equal(grown.shrink()(prompts), logits)


@pytest.mark.parametrize("name", ["ln", "ln_pre", "rms_pre"])
def test_tied_embeddings_come_untied_where_they_must_differ(name):
    bridge, prompts = native(name), tokens()
    tie(bridge)
    logits = bridge(prompts)
    grown = grow(bridge, d_model=37)
    model = grown.model.original_model
    assert model.head.weight is not model.tok_embed.weight
    assert any(note.startswith("untied: ") for note in grown.notes)
    tolerance = FLOAT32 if name in IN_FLOAT32 else EXACT
    assert (grown.model(prompts) - logits).abs().max() < tolerance * logits.abs().max()
    again = grown.shrink()  # the weights are tied again if neither was trained
    assert again.original_model.head.weight is again.original_model.tok_embed.weight
    assert torch.equal(again(prompts), logits)
    model.head.weight.data[0] += 1.0
    trained = grown.shrink().original_model
    assert trained.head.weight is not trained.tok_embed.weight


def test_rotary_tables_come_along_as_they_are():
    bridge, prompts = native("rotary"), tokens()
    bridge.to(torch.bfloat16).to(torch.float64)  # the tables are rounded to bfloat16
    logits = bridge(prompts)
    grown = grow(bridge, **SIZES)
    assert (grown.model(prompts) - logits).abs().max() < EXACT * logits.abs().max()
    assert torch.equal(grown.shrink()(prompts), logits)
    old, new = (model.original_model.rotary.cos_cached for model in (bridge, grown.model))
    assert old.data_ptr() != new.data_ptr()


def test_modules_that_are_not_what_the_configuration_says_are_refused():
    for path, name, value in (
        ("layers.0.ln1._original_component", "eps", 0.5),
        ("layers.1.attn._original_component", "scale", 2.0),
        ("", "output_logits_soft_cap", 3.0),
    ):
        bridge = native("rms")
        setattr(bridge.original_model.get_submodule(path), name, value)
        with pytest.raises(GrowthError, match=rf"{name} is {value}; the configuration says"):
            grow(bridge, d_mlp=41)
    changed = native("ln")
    changed.original_model.layers[0].mlp._original_component = torch.nn.Identity()
    with pytest.raises(GrowthError, match=r"layers.0.mlp is an Identity; .* says NativeMLP"):
        grow(changed, n_heads=3)


def test_the_optimizer_goes_on():
    bridge = native("ln", seed=1)
    prompts = tokens()

    def step(model, optimizer):
        optimizer.zero_grad()
        model(prompts).log_softmax(-1)[..., D_VOCAB // 2].mean().neg().backward()
        optimizer.step()

    optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-2, eps=1e-2)
    for _ in range(2):
        step(bridge, optimizer)
    grown = grow(bridge, d_mlp=41, n_heads=3, d_head=17)
    new = grown.optimizer(optimizer, bridge)
    step(bridge, optimizer)
    step(grown.model, new)
    old, now = read(bridge).tensors, read(grown.model).tensors
    for name, tensor in old.items():
        moved = grown.provenance.tensor_map(name)
        assert torch.allclose(moved.old_part(now[moved.name]) / moved.scale, tensor, atol=1e-12)


def test_what_cannot_be_grown_is_refused_with_every_reason():
    exposed = expose_neuron_heads(native("ln"))
    with pytest.raises(GrowthError, match="undo"):
        grow(exposed.model, d_mlp=41)
    with pytest.raises(GrowthError, match="got a TransformerBridge of GPTJForCausalLM"):
        grow(boot("gptj"), d_mlp=41)
    processed = native("ln")
    processed.enable_compatibility_mode(no_processing=True)
    with pytest.raises(GrowthError, match="compatibility mode"):
        grow(processed, d_mlp=41)
    with pytest.raises(GrowthError, match="differ in d_mlp"):
        grow(native("ln"), ex.AddNeurons(2, layers=[0]))
    with pytest.raises(GrowthError, match="last norm is RMS"):
        grow(native("ln", final_rms=True), d_model=37)
    with pytest.raises(GrowthError) as caught:
        grow(native("ln"), d_mlp=5, n_heads=1)
    assert len(caught.value.reasons) == 2
