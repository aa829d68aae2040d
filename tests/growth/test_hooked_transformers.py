"""Tests of growing HookedTransformers, and the models that `convert` made of them.

Growing and converting commute, and converted models also grow in single layers. How the expansions
work is tested without a model in test_theorems.py, and with bridges in the other files.
"""

from functools import lru_cache

import pytest
import torch
import transformers
from bridges import bridged
from common import D_VOCAB, relative, run_cli, tokens
from growing import (
    all_steps,
    cached,
    group_size,
    largest_difference,
    same_bits,
    state,
    steps,
    training_step,
    worst_activation,
)
from models import build, source_folder
from uneven import uneven

from attn_only_lens import (
    Bilinear,
    HeadName,
    convert,
    grow,
    growth,
    load,
    save,
)
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.models._grow import read
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, LayerNormPre
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = LOGIT_TOLERANCE[torch.float64]
REFUSED = {
    "alibi": {"heads": "slopes depend on the number of heads"},
    "post_norm": dict.fromkeys(("heads", "width", "stream"), "the queries would have width"),
    "clip_qkv": {"width": "bounds keys"},
    "final_rms": {"stream": "does not remove the mean of the stream"},
}
# Fewer keys than queries, under a norm over all heads, has two widths.
REFUSED["post_norm_grouped"] = REFUSED["post_norm"]
# Other families differ from one of these only in what growth does not read.
FAMILIES = ("gelu", "ln_pre", "no_norm", "final_rms", "post_norm", "post_norm_grouped")
FAMILIES += ("norms_before_and_after", "alibi", "shortformer_pre", "grouped_ungrouped", "qk_norm")
FAMILIES += ("clip_qkv", "inverse_layer", "parallel", "llama")
CHANGED = {
    "post_norm_grouped": ("post_norm", {"n_key_value_heads": 1}),
    "shortformer_pre": ("shortformer", {"normalization_type": "LNPre"}),
}
SEEN_BY_NO_AXES = ("q_norm.", "k_norm.")  # heads and batch are one axis there


@lru_cache(maxsize=2)
def source(family):
    name, changes = CHANGED.get(family, (family, {}))
    model = build(name, n_layers=2, **changes)
    model.set_use_attn_result(True)
    return model


def worst_head(model, grown, old, new):
    """Return the largest relative change of an old head's activations; heads are found by name."""
    worst = 0.0
    for label in model.all_head_labels(neurons=True):
        here, there = HeadName.parse(label), HeadName.parse(grown.provenance[label])
        for part, axis in (("pattern", 1), ("z", 2)):
            before = old[here.hook(part, model)].select(axis, here.index)
            now = new[there.hook(part, grown.model)].select(axis, there.index)
            worst = max(worst, relative(now[..., : before.shape[-1]], before))
    return worst


@torch.no_grad()
def check_converted(converted, grown):
    """Check logits, the heads, the stream before old blocks, and the way back."""
    (logits, old), (new_logits, new) = cached(converted), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert worst_head(converted, grown, old, new) < EXACT
    for block in range(converted.cfg.n_layers):
        layer = int(grown.provenance[f"L{block // 2}"][1:])
        stream = old[f"blocks.{block}.hook_resid_pre"]
        now = new[f"blocks.{2 * layer + block % 2}.hook_resid_pre"]
        expected = stream - stream.mean(-1, keepdim=True) if grown.provenance.centred else stream
        assert relative(now[..., list(grown.provenance.coordinates)], expected) < EXACT
    assert same_bits(grown.shrink(), converted)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_exact_or_refused_and_the_same_after_conversion(family):
    model, refused = source(family), REFUSED.get(family, {})
    by_name, converted = steps(group=group_size(model)), convert(model)
    before = state(model), state(converted)
    if refused:
        for kind in (model, converted):
            with pytest.raises(InputError) as error:
                grow(kind, [*by_name.values()])
            for text in refused.values():  # all reasons in one error
                assert text in str(error.value)
    # Free entries are not zero, so required zeros come from the expansion, not from the init.
    how = compose(*(step for name, step in by_name.items() if name not in refused))
    grown = grow(model, how, init=growth.init.normal(0.3), seed=3)
    (logits, old), (new_logits, new) = cached(model), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    worst, unknown = worst_activation(grown.provenance, old, new)
    assert max(worst.values()) < EXACT, max(worst, key=worst.get)
    assert all(any(part in hook for part in SEEN_BY_NO_AXES) for hook in unknown)
    assert sum("hook_pattern" in hook for hook in worst) == model.cfg.n_layers
    assert same_bits(grown.shrink(), model)
    assert set(grown.model.hook_dict) > set(model.hook_dict)
    # The converted model
    one = convert(grown.model)
    after = grow(converted, how, init=growth.init.normal(0.3), seed=3)
    assert same_bits(after.model, one)
    assert vars(after.model.cfg) == vars(one.cfg)
    assert torch.equal(after.model(tokens()), one(tokens()))
    assert after.model.all_head_labels(neurons=True) == one.all_head_labels(neurons=True)
    check_converted(converted, after)
    for kind, was in zip((model, converted), before, strict=True):
        assert all(torch.equal(was[name], now) for name, now in kind.state_dict().items())


def test_one_norm_over_all_heads_grows_where_all_its_sizes_fit():
    model = build("post_norm")  # 2 heads of width 13, d_model 26
    grown = grow(model, n_heads=3, d_head=17, d_model=51, init=growth.init.normal(0.3))
    (logits, old), (new_logits, new) = cached(model), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert max(worst_activation(grown.provenance, old, new)[0].values()) < EXACT


def test_inputs_by_head():
    model = build("grouped")
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    logits, old = cached(model)
    grown = grow(model, all_steps(model))
    new_logits, new = cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    # The norm before attention runs once per head input, but the cache holds only one of the runs.
    old = {hook: seen for hook, seen in old.items() if ".ln1." not in hook}
    worst, unknown = worst_activation(grown.provenance, old, new)
    assert max(worst.values()) < EXACT
    assert not unknown


def test_own_is_transformerlens_own():
    """`boot_native` does not have this mode; test_initial_values.py tests the others."""
    cfg = {"n_layers": 1, "d_model": 64, "n_ctx": 61, "d_head": 32, "n_heads": 2, "d_mlp": 67}
    cfg |= {"d_vocab": 59, "act_fn": "gelu", "init_mode": "muP", "seed": 0}
    grown = grow(HookedTransformer(HookedTransformerConfig(**cfg)), n_layers=2, d_mlp=256).model
    larger = HookedTransformer(HookedTransformerConfig(**cfg | {"d_mlp": 256}))
    got, expected = read(grown).tensors, read(larger).tensors
    for of in ("attn.W_Q", "attn.W_V", "mlp.W_in"):
        std = expected[f"blocks.0.{of}"].std().item()
        assert got[f"blocks.1.{of}"].std().item() == pytest.approx(std, rel=0.05), of


def test_the_optimizer_goes_on():
    """Grouped heads' parameters have other names."""
    model = build("llama", d_vocab_out=D_VOCAB)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    training_step(model, optimizer)
    grown = grow(model, d_mlp=41, n_heads=9, d_head=11, d_model=37, n_layers=4)
    new = grown.optimizer(optimizer, model)
    training_step(model, optimizer)
    training_step(grown.model, new)
    assert largest_difference(model, grown) < 1e-12


def test_folders(tmp_path):
    folder = source_folder(tmp_path / "source")
    for arguments in (
        ("grow", folder, tmp_path / "out", "--d-mlp", 41, "--n-layers", 4, "--d-model", 29),
        ("grow", tmp_path / "out", tmp_path / "more", "--n-heads", 3),
        ("convert", tmp_path / "more", tmp_path / "converted"),
    ):
        result = run_cli(*arguments)
        assert result.exit_code == 0, result.output
    model, grown = load_source(folder), load_source(tmp_path / "out")
    assert relative(grown(tokens()), model(tokens())) < 2e-5
    assert grown.tokenizer.decode([3]) == model.tokenizer.decode([3])
    assert load(tmp_path / "out" / "provenance.json")["L0N17"] == "L0N17"


# Converted models whose layers differ


@torch.no_grad()
def test_some_layers_only(tmp_path):
    model = build("llama")  # 6 heads of width 8 in groups of 3
    converted = convert(model)
    partial = compose(
        growth.AddNeurons(5, layers=[0, 2]),
        growth.AddHeads(6, layers=[1]),
        growth.InsertLayer(1),
        growth.WidenValues(3, layers=[2]),
        growth.WidenQueriesAndKeys(5, layers=[0]),
        growth.AddNeurons(7, layers=[1]),
        growth.WidenStream(11),
    )
    grown = grow(converted, partial, seed=5)
    sizes = grown.model.cfg.layer_sizes
    assert [size.d_mlp for size in sizes] == [42, 49, 37, 42]
    assert [size.n_heads for size in sizes] == [6, 6, 12, 6]
    assert [size.d_head for size in sizes] == [13, 8, 8, 8]
    assert [size.d_value for size in sizes] == [8, 8, 11, 8]
    assert grown.provenance["L1N36"] == "L2N36"
    check_converted(converted, grown)
    # Grow again from unequal layers, after saving and loading.
    loaded = load(save(grown.model, tmp_path / "grown"))
    assert same_bits(loaded, grown.model)
    again = grow(loaded, all_steps(model), seed=6)
    assert relative(again.model(tokens()), converted(tokens())) < EXACT
    assert same_bits(again.shrink(), grown.model)
    # Control: a required zero is not zero.
    again.model.blocks[1].attn.W_out[-1] += torch.randn_like(again.model.blocks[1].attn.W_out[-1])
    assert relative(again.model(tokens()), converted(tokens())) > 1e-4
    with pytest.raises(InputError, match=r"blocks.0.mlp.W_out: entries that were zero"):
        again.shrink()


@torch.no_grad()
def test_values_and_keys_apart():
    """Values and keys can grow alone, and both in turn equal both at once, bit for bit."""
    model = build("qk_norm")
    converted, width = convert(model), model.cfg.d_head
    values, keys = growth.WidenValues(3), growth.WidenQueriesAndKeys(3)
    both = grow(model, [values, keys], seed=3).model
    for first, then, d_head, d_value in ((values, keys, 0, 3), (keys, values, 3, 0)):
        grown = grow(converted, first, seed=3)
        check_converted(converted, grown)
        _, new = cached(grown.model)
        for block in range(0, 6, 2):
            widths = [new[f"blocks.{block}.attn.hook_{part}"].shape[-1] for part in "qkvz"]
            assert widths == [width + d_head] * 2 + [width + d_value] * 2
        assert same_bits(grow(grown.model, then, seed=3).model, convert(both))


@torch.no_grad()
def test_layers_that_differ_are_brought_to_one_size():
    model, _ = uneven("llama", widths=True)
    with pytest.raises(InputError, match="got n_heads=6, but the model has 9"):
        grow(model, n_heads=6)
    before = model(tokens())
    grown = grow(model, d_mlp=41, n_heads=12, d_head=16, n_layers=4, seed=1)
    assert len(set(grown.model.cfg.layer_sizes)) == 1
    # Its layers divided scores by one number that is not √d_head, which growth keeps.
    assert {sizes.attn_scale for sizes in grown.model.cfg.layer_sizes} == {13**0.5}
    assert relative(grown.model(tokens()), before) < EXACT
    assert grown.model.source_cfg.d_mlp == 41
    assert grown.provenance.new_heads[:3] == ("L0H6", "L0H7", "L0H8")
    assert same_bits(grown.shrink(), model)


@torch.no_grad()
def test_bilinear_gates():
    converted = convert(build("silu"), gate=Bilinear(1))
    how = compose(growth.AddNeurons(5, layers=[0]), growth.InsertLayer(1), growth.AddNeurons(3))
    grown = grow(converted, how, seed=2)
    (logits, old), (new_logits, new) = cached(converted), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert worst_head(converted, grown, old, new) < 1e-9
    assert grown.model.blocks[1].cfg.n_heads == 45
    assert same_bits(grown.shrink(), converted)
    assert grown.provenance["L1N17"] == "L2N17"
    assert "L0N44" in grown.provenance.new_neurons


@torch.no_grad()
def test_refused_with_all_reasons():
    converted = convert(build("grouped"))
    with pytest.raises(InputError, match="expected a multiple of 3"):
        grow(converted, growth.AddHeads(2, layers=[1]))
    odd = convert(build("gelu"))
    odd.blocks[0].attn.attn_scale = 5.0
    odd.blocks[3].attn.b_out = odd.blocks[1].attn.b_out
    odd.blocks[5].attn.forward = lambda x: x
    odd.blocks[3].ln1 = torch.nn.Identity()
    with pytest.raises(InputError) as refused:
        grow(odd, d_mlp=41)
    text = str(refused.value)
    assert "blocks.0.attn.attn_scale is 5.0" in text
    assert "blocks.3.attn.b_out share one parameter" in text
    assert "forward was replaced on blocks.5.attn" in text
    assert "blocks.3.ln1 is an Identity; the configuration says LN" in text
    model = build("gelu")
    with pytest.raises(InputError, match=r"differ in d_mlp.*convert\(model\) first"):
        grow(model, growth.AddNeurons(5, layers=[1]))
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value)
    model.blocks[1].mlp.W_out = model.blocks[0].mlp.W_out
    model.blocks[0].ln2 = LayerNormPre(model.cfg)
    with pytest.raises(InputError, match="ln2 is a LayerNormPre; the configuration") as refused:
        grow(model, d_mlp=41)
    assert len(refused.value.reasons) == 3


def test_attention_only_models():
    model = build("gelu", attn_only=True, d_mlp=None, act_fn=None)
    more = compose(growth.AddHeads(3), growth.WidenStream(5), growth.InsertLayer(2))
    grown = grow(model, more)
    assert relative(grown.model(tokens()), model(tokens())) < EXACT
    assert same_bits(grown.shrink(), model)


def test_t5_needs_version_4():
    config = transformers.T5Config(vocab_size=D_VOCAB, d_model=23, num_layers=1, num_heads=3)
    bridge = bridged(transformers.T5ForConditionalGeneration(config))
    with pytest.raises(InputError, match="cannot run T5"):
        grow(bridge, d_mlp=41)
