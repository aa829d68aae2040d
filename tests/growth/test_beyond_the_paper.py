"""Tests of what the growth paper omits: ε, LayerNorm, folded gains, scales by layer."""

import math

import pytest
import torch
from common import relative, tokens
from models import build

from attn_only_lens import expansion as ex
from attn_only_lens import grow

EXACT = 1e-13  # rounding; the issue requires 1e-10
CLEARLY = 1e-3  # the least effect of a violated constraint, relative to the largest logit


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 1.0])
def test_the_papers_rule_leaves_epsilon_out(eps):
    """Control: Definition 3.5 with ε unchanged is off by about ε / mean square of the stream."""
    model = build("rms", eps=eps)
    expected = model(tokens())
    grown = grow(model, ex.WidenStream(11)).model
    assert grown.cfg.eps == pytest.approx(eps * 26 / 37, rel=1e-15)
    assert relative(grown(tokens()), expected) < EXACT
    for module in grown.modules():
        if hasattr(module, "eps"):
            module.eps = eps
    error = relative(grown(tokens()), expected)
    # The errors are 1.5e-5, 1.4e-2 and 0.33 of the largest logit.
    assert 0.1 * eps < error < 2 * eps


def test_layer_norm_needs_a_stream_of_mean_zero():
    """Control: growing d_model under LayerNorm fails if a single mean is added back."""
    model = build("gelu")
    expected = model(tokens())
    grown = grow(model, ex.WidenStream(11))
    assert any("centred" in note for note in grown.notes)
    assert relative(grown.model(tokens()), expected) < EXACT
    for name in ("embed.W_E", "blocks.1.attn.W_O", "blocks.1.mlp.b_out"):
        fresh = grow(model, ex.WidenStream(11)).model
        with torch.no_grad():
            mean = model.get_parameter(name).mean(-1, keepdim=True)
            fresh.get_parameter(name)[..., :26] += mean
        assert relative(fresh(tokens()), expected) > CLEARLY, name
    assert not grow(build("rms"), ex.WidenStream(11)).notes


def test_a_layer_norm_bias_of_a_new_coordinate_must_be_zero():
    grown = grow(build("gelu"), ex.WidenStream(11)).model
    expected = grown(tokens())
    with torch.no_grad():
        grown.blocks[1].ln2.b[26:] = 0.3
    assert relative(grown(tokens()), expected) > CLEARLY


def test_folded_gains_go_to_the_readers():
    model = build("rms_pre")
    grown = grow(model, ex.WidenStream(11)).model
    for name in ("blocks.1.attn.W_V", "blocks.1.mlp.W_in", "unembed.W_U"):
        dim = 1 if "attn" in name else 0
        got = grown.get_parameter(name).narrow(dim, 0, 26)
        assert torch.equal(got, model.get_parameter(name) * math.sqrt(26 / 37))


def test_scores_divided_by_layer_need_larger_keys():
    model = build("inverse_layer")
    grown = grow(model, ex.InsertLayer(0)).model
    assert relative(grown(tokens()), model(tokens())) < EXACT
    for of in ("W_K", "b_K"):
        keys = getattr(model.blocks[1].attn, of)
        assert torch.equal(getattr(grown.blocks[2].attn, of), keys * (3 / 2))
    with torch.no_grad():
        grown.blocks[2].attn.W_K.copy_(model.blocks[1].attn.W_K)
    assert relative(grown(tokens()), model(tokens())) > CLEARLY
    normed = build("inverse_layer", use_qk_norm=True, normalization_type="RMS")
    grown = grow(normed, ex.InsertLayer(0)).model
    assert relative(grown(tokens()), normed(tokens())) < EXACT
    assert torch.equal(grown.blocks[2].attn.W_K, normed.blocks[1].attn.W_K)


@pytest.mark.parametrize("norm", ["RMS", "RMSPre", "LNPre"])
def test_positions_beside_the_stream(norm):
    model = build("shortformer", normalization_type=norm)
    grown = grow(model, ex.WidenStream(11)).model
    assert relative(grown(tokens()), model(tokens())) < EXACT
    moves = grown.pos_embed.W_pos[:, :26] / model.pos_embed.W_pos
    assert torch.allclose(moves, moves.new_tensor(1 if norm == "RMS" else math.sqrt(37 / 26)))


def test_a_scale_of_its_own_stays():
    model = build("clip_qkv", attn_scale=2.3)
    grown = grow(model, d_head=17)
    assert grown.model.cfg.attn_scale == 2.3
    assert not grown.provenance.scales
    assert relative(grown.model(tokens()), model(tokens())) < EXACT
