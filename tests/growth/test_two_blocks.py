"""Tests that growing a converted model equals converting the grown one, also for single layers."""

import pytest
import torch
from common import relative, tokens
from growing import all_steps, cached, group_size, same_bits, state, steps
from models import CORE, build
from uneven import uneven

from attn_only_lens import Bilinear, HeadName, calibrate, convert, grow, load, patching, save
from attn_only_lens import expansion as ex
from attn_only_lens.errors import GrowthError, UnknownHeadError
from attn_only_lens.growth import read
from attn_only_lens.growth.two_blocks import ConvertedModel
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = LOGIT_TOLERANCE[torch.float64]
SOME = ("gelu", "llama", "parallel", "no_norm", "gemma", "inverse_layer")
PARTS = ("q", "v", "z", "attn_scores", "pattern")  # keys are scaled where widths grow


def growable(model):
    """Return all expansions of the six that this model allows, composed."""
    by_name = steps(group=group_size(model))
    return ex.compose(*(step for step in by_name.values() if not reasons(model, step)))


def reasons(model, step):
    try:
        grow(model, step)
    except GrowthError as error:
        return error.reasons
    return ()


def worst_head(model, grown, old, new):
    """Return the largest relative change of an old head's activations; heads are found by name."""
    m, worst = model.heads_per_neuron, 0.0
    for label in model.all_head_labels(neurons=True):
        here, there = HeadName.parse(label), HeadName.parse(grown.provenance[label])
        for part in PARTS:
            axis = 1 if part in ("attn_scores", "pattern") else 2
            before, now = old[here.hook(part, model)], new[there.hook(part, grown.model)]
            shared = part == "v" and before.shape[2] < model.blocks[here.block(model)].cfg.n_heads
            if shared:  # these values belong to a group of heads
                continue
            before = before.select(axis, here.head_index(m))
            now = now.select(axis, there.head_index(m))[..., : before.shape[-1]]
            if here.kind == "attention":  # normed queries are scaled where the stream grew
                seen = f"blocks.{here.layer}.attn.hook_{part}"
                now = now / grown.provenance.activation_scales.get(seen, 1.0)
            assert torch.equal(before.isinf(), now.isinf())
            worst = max(worst, relative(now.nan_to_num(neginf=0), before.nan_to_num(neginf=0)))
    return worst


def worst_stream(model, grown, old, new):
    """Return the largest change of the stream before old blocks, centred if growth centred it."""
    worst = 0.0
    for block in range(model.cfg.n_layers):
        layer = int(grown.provenance[f"L{block // 2}"][1:])
        stream = old[f"blocks.{block}.hook_resid_pre"]
        now = new[f"blocks.{2 * layer + block % 2}.hook_resid_pre"]
        expected = stream - stream.mean(-1, keepdim=True) if grown.provenance.centred else stream
        worst = max(worst, relative(now[..., list(grown.provenance.coordinates)], expected))
    return worst


@pytest.mark.parametrize(
    "family", [*CORE, "ln_pre", "local", "sinks", "grouped", "parallel_norms", "gemma"]
)
@torch.no_grad()
def test_converting_and_growing_commute(family):
    source = build(family)
    how = growable(source)
    one = convert(grow(source, how, seed=3).model)
    converted = convert(source)
    before = state(converted)
    grown = grow(converted, how, seed=3)
    assert same_bits(grown.model, one)
    assert vars(grown.model.cfg) == vars(one.cfg)
    assert torch.equal(grown.model(tokens()), one(tokens()))
    assert grown.model.all_head_labels(neurons=True) == one.all_head_labels(neurons=True)
    (logits, old), (new_logits, new) = cached(converted), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert worst_head(converted, grown, old, new) < EXACT
    assert worst_stream(converted, grown, old, new) < EXACT
    assert same_bits(grown.shrink(), converted)
    assert all(torch.equal(before[name], now) for name, now in converted.state_dict().items())


@pytest.mark.parametrize("family", ["alibi", "post_norm", "clip_qkv", "final_rms"])
def test_what_the_source_refuses_is_refused(family):
    source = build(family)
    converted = convert(source)
    against = [reasons(source, step) for step in steps(group=group_size(source)).values()]
    assert any(against)
    for step, expected in zip(steps(group=group_size(source)).values(), against, strict=True):
        assert reasons(converted, step) == expected


def partial(group):
    """Return every expansion in one or two layers, and a new layer between."""
    return ex.compose(
        ex.AddNeurons(5, layers=[0, 2]),
        ex.AddHeads(2 * group, layers=[1]),
        ex.InsertLayer(1),
        ex.WidenValues(3, layers=[2]),
        ex.WidenQueriesAndKeys(5, layers=[0]),
        ex.AddNeurons(7, layers=[1]),
        ex.WidenStream(11),
    )


@pytest.mark.parametrize("family", SOME)
@torch.no_grad()
def test_some_layers_only(family, tmp_path):
    converted = convert(build(family))
    group = group_size(build(family))
    grown = grow(converted, partial(group), seed=5)
    sizes = grown.model.cfg.layer_sizes
    heads, width = converted.blocks[0].cfg.n_heads, converted.blocks[0].cfg.d_head
    assert [size.d_mlp for size in sizes] == [42, 49, 37, 42]
    assert [size.n_heads for size in sizes] == [heads, heads, heads + 2 * group, heads]
    assert [size.d_head for size in sizes] == [width + 5, width, width, width]
    assert [size.d_value for size in sizes] == [width, width, width + 3, width]
    assert grown.provenance["L1N36"] == "L2N36"
    assert grown.provenance.new_layers == ("L1",)
    assert grown.provenance.old_of(f"L2H{heads}") is None
    assert len(grown.model.blocks) == 8
    assert len(grown.model.all_head_labels(neurons=True)) == sum(
        size.n_heads + size.d_mlp for size in sizes
    )
    (logits, old), (new_logits, new) = cached(converted), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert worst_head(converted, grown, old, new) < EXACT
    assert worst_stream(converted, grown, old, new) < EXACT
    assert same_bits(grown.shrink(), converted)
    # grow again from unequal layers, after saving and loading
    loaded = load(save(grown.model, tmp_path / "grown"))
    assert same_bits(loaded, grown.model)
    again = grow(loaded, all_steps(build(family)), seed=6)
    assert relative(again.model(tokens()), logits) < EXACT
    assert same_bits(again.shrink(), grown.model)
    # control: a required zero is not zero
    again.model.blocks[1].attn.W_out[-1] += torch.randn_like(again.model.blocks[1].attn.W_out[-1])
    assert relative(again.model(tokens()), logits) > 1e-4
    with pytest.raises(GrowthError, match=r"blocks.0.mlp.W_out: entries that were zero"):
        again.shrink()


@pytest.mark.parametrize("family", ["gelu", "llama", "parallel", "gemma", "qk_norm"])
@torch.no_grad()
def test_values_and_keys_apart(family):
    """Values and keys can grow alone, and both in turn equal both at once, bit for bit."""
    source = build(family)
    converted = convert(source)
    values, keys = ex.WidenValues(3), ex.WidenQueriesAndKeys(3)
    width, (logits, old) = source.cfg.d_head, cached(converted)
    both = grow(source, ex.compose(values, keys), seed=3).model
    for first, then, d_head, d_value in ((values, keys, 0, 3), (keys, values, 3, 0)):
        grown = grow(converted, first, seed=3)
        new_logits, new = cached(grown.model)
        assert relative(new_logits, logits) < EXACT
        assert worst_head(converted, grown, old, new) < EXACT
        assert worst_stream(converted, grown, old, new) < EXACT
        for block in range(0, 6, 2):
            widths = [new[f"blocks.{block}.attn.hook_{part}"].shape[-1] for part in "qkvz"]
            assert widths == [width + d_head] * 2 + [width + d_value] * 2
        assert same_bits(grown.shrink(), converted)
        assert same_bits(grow(grown.model, then, seed=3).model, convert(both))


@torch.no_grad()
def test_layers_that_differ_are_brought_to_one_size():
    model, _ = uneven("llama", widths=True)
    with pytest.raises(GrowthError, match="got n_heads=6, but the model has 9"):
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


@pytest.mark.parametrize(("family", "heads"), [("gelu", 4), ("silu", 1), ("llama", 8)])
@torch.no_grad()
def test_bilinear_gates(family, heads):
    source = build(family)
    calibration = calibrate(source, tokens()) if source.cfg.gated_mlp else None
    gate = Bilinear(heads, calibration=calibration)
    converted = convert(source, gate=gate)
    how = ex.compose(ex.AddNeurons(5, layers=[0]), ex.InsertLayer(1), ex.AddNeurons(3))
    grown = grow(converted, how, seed=2)
    (logits, old), (new_logits, new) = cached(converted), cached(grown.model)
    assert relative(new_logits, logits) < EXACT
    assert worst_head(converted, grown, old, new) < 1e-9  # single heads are larger than their sum
    assert grown.model.blocks[1].cfg.n_heads == 45 * heads
    assert same_bits(grown.shrink(), converted)
    if calibration:  # the new layer has the range of the layer below
        first, *others = converted.cfg.gating.ranges
        assert grown.model.cfg.gating.ranges == (first, first, *others)
        assert grown.shrink().cfg.gating == converted.cfg.gating
    else:
        even = ex.compose(ex.AddNeurons(5), ex.InsertLayer(1))
        one = convert(grow(source, even, seed=2).model, gate=gate)
        two = grow(converted, even, seed=2).model
        assert same_bits(one, two)
        assert torch.equal(one(tokens()), two(tokens()))
        assert one.all_head_labels(neurons=True) == two.all_head_labels(neurons=True)
    provenance = grown.provenance
    assert provenance["L1N17"] == "L2N17"
    if heads > 1:
        assert provenance["L1N17.0"] == "L2N17.0"
        assert provenance.old_of(f"L2N17.{heads - 1}") == f"L1N17.{heads - 1}"
        assert provenance.old_of("L0N42.1") is None
    for ask in (provenance.__getitem__, provenance.old_of):
        with pytest.raises(UnknownHeadError, match="L2N17"):
            ask(f"L2N17.{heads}")
    assert "L0N44" in provenance.new_neurons


def test_another_seed_is_another_model():
    source = build("gelu")
    first, second = (
        grow(source, d_mlp=41, seed=3).model,
        grow(convert(source), d_mlp=41, seed=4).model,
    )
    assert not same_bits(convert(first), second)


@torch.no_grad()
def test_a_layer_is_two_blocks():
    converted = convert(build("local"))
    converted.set_use_attn_result(True)
    converted.blocks[2].eval()
    converted.blocks[3].attn.W_in.requires_grad_(False)
    grown = grow(converted, ex.InsertLayer(at=0, like=1))
    model = grown.model
    assert len(model.blocks) == model.cfg.n_layers == 8
    assert [block.attn.attn_type for block in model.blocks[::2]] == [
        *("local", "global", "local", "global")
    ]
    assert model.cfg.use_attn_result
    assert [block.training for block in model.blocks] == [
        *(False, True),  # copied from the layer that it was made from
        *(True, True, False, True, True, True),
    ]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["blocks.1.attn.W_in", "blocks.5.attn.W_in"]
    assert not any(model.blocks[0].attn.b_O)
    assert not model.blocks[1].attn.W_out.any()
    assert model.blocks[1].attn.W_in.any()
    assert grown.shrink().blocks[2].training is False


def test_new_neurons_learn():
    """New output weights learn first, then the rest of a neuron; with `init.zeros()`, none do."""
    for init, alive in ((ex.init.own(), True), (ex.init.zeros(), False)):
        grown = grow(convert(build("gelu")), ex.AddNeurons(5, layers=[1]), init=init)
        attn = grown.model.requires_grad_(True).blocks[3].attn
        start = attn.W_in[:, 37:].clone()
        optimizer = torch.optim.SGD(grown.model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            grown.model(tokens()).square().mean().backward()
            optimizer.step()
        assert bool(attn.W_out[37:].any()) == alive
        assert torch.equal(attn.W_in[:, 37:], start) != alive


def test_parameters_are_known_by_their_names_in_the_source():
    source = build("llama", n_layers=1, attn_types=None)
    named = {name: p.name for name, p in ConvertedModel(convert(source)).parameters().items()}
    assert named["blocks.0.attn._W_K"] == "blocks.0.attn.W_K"
    assert named["blocks.1.attn.W_gate"] == "blocks.0.mlp.W_gate"
    assert named["blocks.1.ln1.w"] == "blocks.0.ln2.w"
    assert list(read(convert(source)).tensors) == list(named.values())
    tensors = read(source).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in read(convert(source)).tensors.items()
    }


@torch.no_grad()
def test_refused_with_all_reasons():
    converted = convert(build("grouped"))
    with pytest.raises(GrowthError, match="expected a multiple of 3"):
        grow(converted, ex.AddHeads(2, layers=[1]))
    into = grow(converted, ex.AddHeads(2, layers=[1], into_groups=True))
    assert into.provenance["L1H3"] == "L1H4"
    assert relative(into.model(tokens()), converted(tokens())) < EXACT
    into.model.blocks[0].hook_resid_pre.add_hook(lambda x, hook: x)
    with pytest.raises(GrowthError, match="hooks are attached"):
        into.shrink()
    with pytest.raises(GrowthError) as refused:
        grow(into.model, d_mlp=3)
    assert len(refused.value.reasons) == 2
    odd = convert(build("gelu"))
    odd.blocks[0].attn.attn_scale = 5.0
    odd.blocks[3].attn.b_out = odd.blocks[1].attn.b_out
    odd.blocks[5].attn.forward = lambda x: x
    odd.blocks[3].ln1 = torch.nn.Identity()
    with pytest.raises(GrowthError) as refused:
        grow(odd, d_mlp=41)
    text = str(refused.value)
    assert "blocks.0.attn.attn_scale is 5.0" in text
    assert "blocks.3.attn.b_out share one parameter" in text
    assert "forward was replaced on blocks.5.attn" in text
    assert "blocks.3.ln1 is an Identity; the configuration says LN" in text
    with pytest.raises(GrowthError, match=r"convert\(model\) first"):
        grow(build("gelu"), ex.AddNeurons(5, layers=[1]))


@pytest.mark.parametrize("name", ["gelu", "parallel"])
def test_patching_a_model_of_unequal_layers_is_patching_the_original(name):
    model = convert(build(name))
    steps = ex.AddNeurons(2, layers=[0]), ex.AddHeads(1, layers=[2]), ex.InsertLayer(1)
    widths = ex.WidenValues(3, layers=[0]), ex.WidenQueriesAndKeys(2, layers=[3])
    grown = grow(model, ex.compose(*steps, *widths))
    clean = tokens()
    corrupted = clean.roll(-1, dims=0)

    def values(of, sites):
        sweep = patching.activation_patch(
            of, clean, corrupted, patching.loss(), sites=sites, progress=False
        )
        return torch.tensor(sweep.frame["value"].to_numpy())

    names = [f"L{layer}{part}" for layer in range(3) for part in ("H0", "H1", "N5", "N31")]
    now = [grown.provenance[name] for name in names]
    expected = values(model, names)
    assert relative(values(grown.model, now), expected) < 1e-12
    neighbours = [name.replace("N31", "N30") for name in now]  # the control
    assert relative(values(grown.model, neighbours), expected) > 1e-6
