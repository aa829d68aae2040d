"""The study of rank by layer: its distances, its forms without skips, and its page."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import relative, run_script

from analyses.studies import rank_by_layer as study
from analyses.studies import train_attention_only as training
from attn_only_lens import expose_neuron_heads, pretrained

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


def test_distances_of_matrices_that_are_known():
    rows = torch.arange(1, 4, dtype=torch.float64)[:, None] * torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    of_rank_1 = study.distances(rows)
    assert of_rank_1["rank 1"] < 1e-14
    assert of_rank_1["equal rows"] == pytest.approx((2 / 14) ** 0.5)  # (1, 0, 1) against (1, 2, 3)
    # the sums of columns are 2 · 2 and 6 · 2, the sums of rows 4.5 and 3 · 4.5
    assert of_rank_1["Dong"] == pytest.approx((4 * 4.5 / (12 * 13.5)) ** 0.5)
    assert max(study.distances(torch.ones(3, 4)).values()) < 1e-7
    square = study.distances(torch.eye(2))
    assert square["rank 1"] == pytest.approx(0.5**0.5)


@torch.no_grad()
def test_without_skips_each_sublayer_reads_only_the_one_before():
    source = pretrained.small_english(dtype=torch.float64)
    model = expose_neuron_heads(source).model
    tokens = model.to_tokens("The keys near the cabinet")
    plain = study.lens_streams(model, tokens, *study.FORMS["skips, MLPs"])
    cache = model.run_with_cache(tokens)[1]
    assert len(plain) == 9
    assert relative(plain[4], cache["blocks.2.hook_resid_pre"]) < 1e-12
    assert relative(plain[8], cache["blocks.3.hook_resid_post"]) < 1e-12

    written = study.lens_streams(model, tokens, *study.FORMS["no skips, MLPs"])
    cut = study.lens_streams(model, tokens, *study.FORMS["no skips, no MLPs"])
    half = study.lens_streams(model, tokens, *study.FORMS["no skips, gates 1/2"])
    first = cache["blocks.0.hook_attn_out"]
    for streams in (written, cut, half):
        assert relative(streams[1], first) < 1e-12
    assert relative(cut[2], first) < 1e-12
    block = source.blocks[0]
    read = block.ln2(first)
    assert relative(written[2], block.mlp(read)) < 1e-12
    gate, up = (getattr(block.mlp, name)(read) for name in ("gate", "in"))
    assert relative(half[2], block.mlp.out(0.5 * gate * up)) < 1e-12
    assert relative(half[2], written[2]) > 0.1


@torch.no_grad()
def test_a_gpt2_without_skips():
    task = training.SMOKE.text
    model, tokens = task.model("bias token", 6, 0).eval(), task.batch(0, 0)[:1, :5]
    plain = study.gpt2_streams(model, tokens, *study.FORMS["skips, MLPs"])
    hidden = model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(plain[0], hidden[0])
    streams = study.gpt2_streams(model, tokens, *study.FORMS["no skips, MLPs"])
    block = model.transformer.h[0]
    attention = block.attn(block.ln_1(hidden[0]))[0]
    assert relative(streams[1], attention) < 1e-5
    assert relative(streams[2], block.mlp(block.ln_2(attention))) < 1e-5
    assert relative(plain[2], plain[1] + block.mlp(block.ln_2(plain[1]))) < 1e-5


def test_random_weights_have_the_scale_of_the_trained():
    model = training.SMOKE.text.model("bias token", 6, 0)
    before = {name: weights.clone() for name, weights in model.named_parameters()}
    study.redraw(model, 0)
    for name, weights in model.named_parameters():
        if ".h." in name and weights.ndim > 1:
            assert not torch.allclose(weights, before[name])
            assert weights.detach().std() == pytest.approx(before[name].std().item(), rel=0.5)
        else:
            assert torch.equal(weights, before[name])


def test_smoke(tmp_path):
    run_script(study.main, ["--smoke", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")])
    rows = pd.read_csv(tmp_path / "rank_by_layer.csv")
    assert set(rows["form"]) == set(study.FORMS)
    assert set(rows["model"]) == {
        "Small English",
        *(f"trained as {arm}" for arm in study.TRAINED_FORMS),
    }
    start = rows.query("model == 'Small English' and sublayer == 0")["rank 1"]
    assert start.nunique() == 1  # all forms read the same embedding


def test_the_page_has_its_rows():
    rows = pd.read_csv(RESULTS / "rank_by_layer.csv")
    page = (RESULTS / "rank_by_layer.md").read_text("utf-8")
    for measure in study.MEASURES:
        assert study._markdown(study.at_end(rows, measure)) in page
    assert study.predictions(rows) in page
