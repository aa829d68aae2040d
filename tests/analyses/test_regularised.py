"""Tests of the study of regularised training: its forms, its measures, and how it resumes."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from common import needs_hooked_transformer
from typer.testing import CliRunner

from analyses.studies import regularised as study
from analyses.studies import regularised_forms as forms
from analyses.studies import regularised_report as report
from analyses.tools.train_modular_addition import Recipe, pairs

pytestmark = needs_hooked_transformer

TINY = Recipe(modulus=7, d_model=10, n_heads=2, d_mlp=11)
TOKENS, ANSWERS, _ = pairs(TINY)
KINDS = ["MLP", "heads", "post Ω=1000", "post Ω=1000, every entry", "post Ω=1000, factored"]
KEPT = Path(study.__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def model():
    made = TINY.model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)  # so that neurons are not linear
    return made


def test_smoke_and_on_from_where_it_stopped(tmp_path):
    app = typer.Typer()
    app.command()(study.main)
    runs = tmp_path / "runs"
    arguments = ["--smoke", "--out", str(tmp_path), "--runs", str(runs)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "regularised.md").read_text("utf-8")
    assert page.strip() in result.output
    kept = runs / "post Ω=9-decay 1-0.csv"
    before = pd.read_csv(kept).drop(columns="seconds")
    kept.unlink()
    again = study.measured(study.SMOKE, runs, "cpu")
    pd.testing.assert_frame_equal(pd.read_csv(kept).drop(columns="seconds"), before)
    assert len(again["curves"]) == len(pd.read_csv(tmp_path / "regularised_curves.csv"))
    with pytest.raises(ValueError, match="choose another --runs"):
        study.measured(replace(study.SMOKE, lr=1.0), runs, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_begins_as_the_model(model, kind):
    with torch.no_grad():
        expected = model(TOKENS)[:, -1]
        form = forms.form_of(model, kind)
        got = form.logits(TOKENS)
        # float32; 2Ω - h is rounded to 1e-4 at Ω = 1000
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3 * expected.abs().max().item())
        if isinstance(form, forms.Post):
            assert form.omega_left() == pytest.approx(1000.0)
            assert max(form.seen(TOKENS, masked=False).leaks.values()) == 0.0
            wrong = form.shrunk(0.9, ("ones",)).logits(TOKENS)
            assert not torch.allclose(wrong, expected, atol=1e-2 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["post Ω=3", "post Ω=3, factored"])
def test_what_leaks_and_what_masks_take_away(model, kind):
    with torch.no_grad():
        exact = model(TOKENS)[:, -1]
        weak = forms.form_of(model, kind).shrunk(math.exp(-0.25), ("omega",))
        leaking, masked = (weak.seen(TOKENS, masked=is_masked) for is_masked in (False, True))
    expected = report.leak(3.0, 0.25, factored="factored" in kind)
    assert leaking.leaks["into_hidden"] == pytest.approx(expected, rel=1e-4)
    assert leaking.leaks["out_of_hidden"] == pytest.approx(expected, rel=1e-4)
    assert report.when(3.0, expected, factored="factored" in kind) == pytest.approx(0.25)
    assert max(masked.leaks.values()) == 0.0
    size = exact.abs().max().item()
    # In the factored form, entries with Ω also hold the SiLU heads' score; no mask restores it.
    assert ((masked.logits - exact).abs().max() < 1e-5 * size) == ("factored" not in kind)
    assert (leaking.logits - exact).abs().max() > 1e-3 * size


@pytest.mark.parametrize("kind", ["post Ω=9", "post Ω=9, factored"])
def test_parts_are_all_of_the_weights_and_their_own(model, kind):
    form = forms.form_of(model, kind)
    shrunk = {part: form.shrunk(0.5, (part,)) for part in (*forms.PARTS, "all")[:3]}
    every = form.shrunk(0.5, forms.PARTS)
    for name, weights in form.named_parameters():
        assert torch.equal(every.get_parameter(name), weights / 2)
        changed = [model.get_parameter(name) != weights for model in shrunk.values()]
        assert torch.equal(torch.stack(changed).sum(0).bool(), weights != 0)
        assert torch.stack(changed).sum(0).max() <= 1


def test_zeros_stay_unless_every_entry_is_trained(model):
    data = study.Data(
        TOKENS, ANSWERS, torch.ones(49, dtype=torch.bool), model(TOKENS)[:, -1].detach()
    )
    for kind, same in (("post Ω=9", True), ("post Ω=9, every entry", False)):
        form = forms.form_of(model, kind)
        zeros = {name: parameter.detach() == 0 for name, parameter in form.named_parameters()}
        frame = study.run(study.SMOKE, form, study.Regularizer(decay=1.0), data, 0)
        kept = all(
            (parameter[zeros[name]] == 0).all() for name, parameter in form.named_parameters()
        )
        assert kept == same
        assert frame["kl"].iloc[0] < 1e-6 < frame["kl"].iloc[-1]


def test_dropped_patterns_of_our_heads_drop_neurons(model):
    form = forms.form_of(model, "heads")
    drop = [("blocks.1.attn.hook_pattern", lambda x, hook: torch.nn.functional.dropout(x, 0.5))]
    seen = []
    keep = [("blocks.1.attn.hook_z", lambda z, hook: seen.append(z.detach()))]
    with torch.no_grad():
        form.model.run_with_hooks(TOKENS, fwd_hooks=keep)
        form.model.run_with_hooks(TOKENS, fwd_hooks=drop + keep)
    whole, dropped = seen
    kept = dropped != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])


def test_measures():
    logits, before = torch.randn(2, 49, 7, generator=torch.Generator().manual_seed(0))
    data = study.Data(TOKENS, ANSWERS, torch.ones(49, dtype=torch.bool), before)
    distances = study.distances(logits, data)
    p, q = (torch.distributions.Categorical(logits=x.double()) for x in (before, logits))
    assert distances["kl"] == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item())
    assert study.distances(before + 5.0, data)["logits"] < 1e-6
    assert study.distances(2 * before, data)["logits"] == pytest.approx(1.0)
    assert report.passes(pd.Series({0: 0.0, 10: 0.05, 20: 0.15}), 0.1) == pytest.approx(15.0)
    assert math.isnan(report.passes(pd.Series({0: 0.0, 10: 0.05}), 0.1))


def test_what_is_stored():
    curves = pd.read_csv(KEPT / "regularised_curves.csv")
    assert curves.groupby(["form", "regularizer"])["seed"].nunique().eq(3).all()
    start = curves[curves["step"] == 0]
    assert (start["kl"] < 1e-6).all()
    # The statements in the page's first lines and docs/theory.md.
    whole = curves[(curves["step"] == 500) & (curves["regularizer"] != "none")]
    kl = whole.set_index(["form", "regularizer", "seed"])["kl"].sort_index()
    for form in ("post Ω=9", "post Ω=1000"):
        assert (kl[form] / kl["MLP"]).between(0.5, 2.0).all()
    same = kl["heads"] == kl["MLP"]
    assert same[same.index.get_level_values("regularizer") != "dropout, patterns"].all()
    every = curves[curves["form"].str.endswith("every entry") & (curves["regularizer"] == "none")]
    assert (every[every["step"] == 100]["kl"] > 5).all()
    decayed = curves[(curves["form"] == "post Ω=9") & (curves["regularizer"] == "decay 3")]
    leaks = decayed.groupby("step")["leak_out_of_hidden"].agg(["min", "max"])
    assert leaks.loc[375, "max"] < 0.01 < leaks.loc[425, "min"]
