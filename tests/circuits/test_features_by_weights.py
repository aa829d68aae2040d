"""Tests of features in weight analyses and explanations; skip and error nodes are left out."""

import pytest
import torch
from feature_model import PAIR, with_features
from patched_runs import node_outputs, others_held

from attn_only_lens import Contrast, circuits, explain
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

CONTRAST = Contrast(*PAIR, p.logit_diff(" are", " is"))
WIDE = "one of the (error|skip) nodes"


@pytest.fixture(scope="module")
def model():
    return with_features()


def gain(norm):
    """Return the gain of a norm, under TransformerLens 3.9 or 4."""
    return (norm.weight if hasattr(norm, "weight") else norm.w).detach()


@torch.no_grad()
def test_composition_is_the_cosine_of_decoder_and_encoder(model):
    early, late = model.blocks[1].mlp, model.blocks[3].mlp
    written, read = early.W_out[58], gain(model.blocks[3].ln2) * late.W_in[:, 11]
    cosine = torch.nn.functional.cosine_similarity(written, read, dim=0)
    frame = circuits.composition(model, ["L1F58"], ["L3F11"], "q").frame
    assert frame["score"].item() == pytest.approx(abs(float(cosine)), rel=1e-4)
    matrix = circuits.composition(model, "L1F58", "L3F11", "v").virtual_weights().AB
    assert matrix.item() == pytest.approx(float(written @ read), rel=1e-4)
    best = circuits.composition(
        model, p.Sites("features", layers=1), p.Sites("features", layers=3), top=5
    ).frame
    assert set(best["writer"].str[:3]) == {"L1F"}
    assert set(best["reader"].str[:3]) == {"L3F"}
    products = early.W_out / early.W_out.norm(dim=1, keepdim=True)
    reads = gain(model.blocks[3].ln2)[:, None] * late.W_in
    scores = (products @ (reads / reads.norm(dim=0))).abs()
    assert best["score"][0] == pytest.approx(float(scores.max()), rel=1e-4)


@torch.no_grad()
def test_tokens_of_features(model):
    mlp, W_E = model.blocks[1].mlp, model.W_E
    reads = W_E @ (gain(model.blocks[1].ln2) * mlp.W_in[:, 58])
    best = circuits.token_circuit(model, "L1F58", "qk").top(1)
    assert best["query_token"].item() == int(reads.argmax())
    ov = circuits.token_circuit(model, "L1F58", "ov").matrix
    logits = (mlp.W_out[58] * gain(model.ln_final)) @ model.W_U
    expected = torch.outer(reads, logits - logits.mean())
    assert torch.allclose(ov.AB, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    copying = circuits.copying_scores(model, ["L1F58"])
    assert copying["kind"].item() == "feature"
    assert copying["eigenvalue_sum"].item() == pytest.approx(float(ov.AB.trace()), rel=1e-3)


def test_selections_leave_out_what_has_no_weights(model):
    pairs = circuits.composition(model, p.Sites(layers=3), p.Sites(layers=3), top=3)
    assert pairs.n_pairs == 4 * 344 + 4 * 0  # the heads of layer 3 write to its features
    for call in (
        lambda: circuits.composition(model, ["L1F58"], ["L3E"]),
        lambda: circuits.token_circuit(model, "L1S", "ov"),
        lambda: circuits.copying_scores(model, ["L3E"]),
    ):
        with pytest.raises(InputError, match=WIDE):
            call()


@torch.no_grad()
def test_sources_of_a_feature_include_errors(model):
    """An error node's share is its output times the encoder column, divided by the norm's scale."""
    frame = circuits.score_sources(model, PAIR[0], "L3F11")
    _, cache = model.run_with_cache(PAIR[0])
    q = cache["blocks.3.mlp.hook_pre"][0, -1, 11]
    assert frame.attrs["score"] == pytest.approx(float(q), rel=1e-4)
    assert frame["share"].sum() == pytest.approx(float(q), abs=1e-4)
    shares = frame.set_index("name")["share"]
    stream = cache["blocks.3.hook_resid_mid"][0, -1]
    scale = (stream.square().mean() + model.cfg.eps).sqrt()
    read = gain(model.blocks[3].ln2) * model.blocks[3].mlp.W_in[:, 11] / scale
    skip = cache["blocks.1.mlp.hook_skip"][0, -1, 0] @ model.blocks[1].mlp.W_skip
    for name, written in (("L1E", cache["blocks.1.mlp.hook_error"][0, -1, 0]), ("L1S", skip)):
        assert shares[name] == pytest.approx(float(written @ read), rel=1e-3, abs=1e-5)
    for name in ("L3E", "L1S"):
        with pytest.raises(InputError, match=WIDE):
            circuits.score_sources(model, PAIR[0], name)


def test_explanation_and_groups(model):
    why = explain(model, CONTRAST, faithfulness=0.99)
    kinds = why.graph.heads.set_index("id")["kind"]
    assert {"feature", "error", "attention"} <= set(kinds)
    assert any("F" in name for name in why.neurons)
    corrupted = model.run_with_cache(PAIR[1])[1]
    with model.hooks(fwd_hooks=others_held(why.circuit.sites, node_outputs(corrupted, 4))):
        cache = model.run_with_cache(PAIR[0])[1]
    for node, kind in kinds.items():
        name, _, position = node.partition("@")
        does = why.does[node]
        if kind == "error":
            size = cache[f"blocks.{name[1]}.mlp.hook_error"][0, int(position), 0].norm()
            expected = f"what the transcoder misses of the MLP's output, length {size:.2f}"
            assert does.startswith(expected)
        if kind == "feature":
            place = f"blocks.{name[1]}.mlp.hook_post", int(position), int(name[3:])
            z, corrupted_z = (run[place[0]][0, place[1], place[2]] for run in (cache, corrupted))
            assert does.startswith(f"z {z:.2f}" if z or corrupted_z else "inactive")
        assert ("gate" in does) == (kind == "neuron")
    groups = circuits.group_nodes(why.graph, model, CONTRAST, similarity=0.3)
    words = {"N": "neurons", "F": "features", "H": "heads", "E": "error nodes", "S": "skip nodes"}
    assert len(groups)
    for name, members in groups.frame[["name", "members"]].to_numpy():
        (letter,) = {member.lstrip("L0123456789")[0] for member in members}
        assert name.startswith(f"{len(members)} {words[letter]}"), name
