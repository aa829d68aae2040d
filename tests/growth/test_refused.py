"""Tests that growth refuses with all reasons in one error and leaves the source unchanged."""

from dataclasses import replace

import pytest
import torch
from common import tokens
from growing import same_bits, state
from models import build

from attn_only_lens import expansion as ex
from attn_only_lens import expose_neuron_heads, grow
from attn_only_lens.errors import GrowthError
from attn_only_lens.growth import read
from attn_only_lens.tl import LayerNormPre


@pytest.mark.parametrize(
    ("request_", "reasons"),
    [
        (
            {"d_mlp": 31, "n_layers": 2},
            ["d_mlp=31, but the model has 37", "n_layers=2, but the model has 3"],
        ),
        ({"d_mlp": 37}, ["which are the current sizes"]),
        ({}, ["give either an expansion or sizes"]),
        ({"expansion": ex.AddNeurons(1), "d_mlp": 41}, ["give either an expansion or sizes"]),
        (
            {"d_mlp": True, "init": "x"},
            ["d_mlp=True; expected 1 or more", "init='x'"],
        ),
        ({"expansion": ex.AddNeurons(0)}, ["got n=0"]),
        ({"expansion": ex.AddNeurons(-3, layers=[5])}, ["got n=-3", "got layers [5]"]),
        ({"expansion": ex.AddNeurons(1.5)}, ["got n=1.5"]),
        ({"expansion": ex.AddNeurons(2, layers=[1.0])}, ["got layers [1.0]"]),
        ({"expansion": ex.AddNeurons(2, layers=[True])}, ["got layers [True]"]),
        ({"expansion": ex.InsertLayer(1.0)}, ["got at=1.0"]),
        ({"expansion": ex.WidenValues(2, heads=[0.0])}, ["got heads [0.0]"]),
        ({"expansion": ex.AddHeads(2, layers=[0, 0])}, ["expected each layer once"]),
        ({"expansion": ex.AddHeads(2, layers=[])}, ["got layers []"]),
        ({"expansion": ex.InsertLayer(4)}, ["got at=4; expected 0 … 3"]),
        ({"expansion": ex.InsertLayer(0, like=3)}, ["got like=3; expected 0 … 2"]),
        ({"expansion": ex.WidenValues(2, heads=[2])}, ["got heads [2]; expected heads 0 … 1"]),
        ({"expansion": ex.WidenValues(2)}, ["one d_head for both", "convert(model) first"]),
        ({"expansion": ex.WidenQueriesAndKeys(2)}, ["one d_head for both"]),
        ({"expansion": ex.AddNeurons(2, layers=[1])}, ["differ in d_mlp", "convert(model) first"]),
        ({"expansion": ex.AddHeads(2, layers=[1])}, ["differ in n_heads"]),
        *(
            ({size: 10**15}, ["the grown model takes", "bytes"])
            for size in ("d_mlp", "n_heads", "d_head", "d_model", "n_layers")
        ),
        ({"expansion": ex.AddNeurons(10**10)}, ["the grown model takes"]),
    ],
)
def test_out_of_range(request_, reasons):
    model = build("gelu")
    before = state(model)
    with pytest.raises(GrowthError) as error:
        grow(model, **request_)
    for reason in reasons:
        assert reason in str(error.value)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_all_reasons_of_all_steps_at_once():
    model = build("clip_qkv", positional_embedding_type="alibi", final_rms=True)
    steps = (ex.AddHeads(2), ex.WidenQueriesAndKeys(2), ex.AddNeurons(1), ex.WidenStream(3))
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value)
    with pytest.raises(GrowthError) as error:
        grow(model, ex.compose(ex.compose(*steps), ex.InsertLayer(9)))
    assert len(error.value.reasons) == 5
    text = str(error.value)
    for reason in ("hooks are attached", "AddHeads: ", "WidenQueriesAndKeys: ", "WidenStream: "):
        assert reason in text
    assert "InsertLayer: got at=9" in text
    with pytest.raises(GrowthError) as error:  # an expansion alone gives the reasons, too
        ex.compose(*steps, ex.InsertLayer(9))(read(build("clip_qkv", final_rms=True)))
    assert len(error.value.reasons) == 3


def test_heads_come_in_whole_groups():
    model = build("llama")  # 6 heads, 2 groups of 3
    with pytest.raises(GrowthError, match="a multiple of 3"):
        grow(model, n_heads=8)
    with pytest.raises(GrowthError, match="2 groups; expected a multiple of 2"):
        grow(model, ex.AddHeads(3, into_groups=True))
    with pytest.raises(GrowthError, match="pass whole groups"):
        grow(model, ex.WidenValues(3, heads=[0, 1]))
    with pytest.raises(GrowthError, match=r"got heads \[\]"):
        grow(model, ex.WidenValues(3, heads=[]))


def test_last_norms_that_see_the_mean():
    with pytest.raises(GrowthError, match="does not remove the mean"):
        grow(build("ln_pre", final_rms=True), ex.WidenStream(3))


@pytest.mark.parametrize(
    ("constants", "reason"),
    [
        ({"norm": "LN", "final_norm": "LN", "norm_place": "both"}, "a nonzero mean"),
        ({"norm": "LN", "final_norm": "LN", "norm_place": "after"}, "a nonzero mean"),
        ({"norm": "RMSPre", "final_norm": "RMSPre", "norm_place": "both"}, "have no gain"),
        ({"norm": "RMS", "final_norm": "RMS", "tied": True}, None),
        ({"norm": "RMS", "final_norm": "RMS", "norm_place": "both"}, None),
    ],
)
def test_what_no_hookedtransformer_is(constants, reason):
    """Native bridges alone may have tied embeddings; TransformerLens builds no LayerNorm after."""
    weights = read(build("rms"))
    weights = replace(weights, constants=replace(weights.constants, **constants))
    reasons = ex.WidenStream(3).reasons_against(weights)
    assert [reason in text for text in reasons] == ([] if reason is None else [True])
    if "tied" in constants and reason is None:
        grown, _ = ex.WidenStream(3)(weights)
        assert (grown.tensors["unembed.W_U"][26:] == 0).all()  # like the columns of the embedding


def test_activations_that_mix_neurons():
    weights = read(build("gelu"))
    mixing = replace(weights, constants=replace(weights.constants, pointwise=False))
    assert "mixes neurons" in ex.AddNeurons(1).reasons_against(mixing)[0]
    with pytest.raises(GrowthError, match="act_fn is 'solu'"):
        grow(build("gelu", act_fn="solu"), d_mlp=41)


def test_a_norm_of_zeros_needs_its_epsilon():
    with pytest.raises(GrowthError, match="divide 0 by 0"):
        grow(build("norms_before_and_after", eps=0.0), ex.InsertLayer(0))


def test_models_that_are_not_plain():
    model = build("gelu")
    with (
        expose_neuron_heads(model),
        pytest.raises(GrowthError, match=r"neuron-heads are exposed; first call"),
    ):
        grow(model, d_mlp=41)
    grow(model, d_mlp=41)
    with pytest.raises(GrowthError, match="expected a HookedTransformer"):
        grow(torch.nn.Linear(2, 3), d_mlp=41)
    model.blocks[1].mlp.W_out = model.blocks[0].mlp.W_out
    with pytest.raises(GrowthError, match="share one parameter"):
        grow(model, d_mlp=41)
    model = build("gelu")
    model.blocks[1].ln1.eps = 1e-3
    model.blocks[2].attn.attn_scale = 1.0
    model.blocks[0].ln2 = LayerNormPre(model.cfg)
    with pytest.raises(GrowthError) as error:
        grow(model, d_mlp=41)
    assert len(error.value.reasons) == 3
    assert "blocks.0.ln2 is a LayerNormPre; the configuration says LN" in str(error.value)


def test_an_error_half_way_leaves_the_source_as_it_was():
    model = build("gelu")
    same = build("gelu")

    def fails(new, seed):
        if "blocks.2" in new.name:
            raise RuntimeError("power cut")
        return torch.ones(new.shape, dtype=torch.float64)

    with pytest.raises(RuntimeError, match="power cut"):
        grow(model, ex.compose(ex.WidenStream(3), ex.AddNeurons(2)), init=fails)
    assert same_bits(model, same)
    with pytest.raises(ValueError, match="returned"):
        grow(model, d_mlp=41, init=lambda new, seed: torch.ones(3))
    assert same_bits(model, same)
    assert model.cfg.to_dict() == same.cfg.to_dict()
    model(tokens())
