"""Tests that the study of growth runs and resumes, and that its measures are right."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer
from torch import nn
from typer.testing import CliRunner

from analyses.studies import growth_arms as arms
from analyses.studies import growth_measures as measures
from analyses.studies import growth_modular_addition as study
from analyses.tools.train_modular_addition import Recipe, pairs

pytestmark = needs_hooked_transformer

NAME = Path(study.__file__).stem
KEPT = Path(__file__).parents[2] / "analyses" / "results"
TINY = Recipe(modulus=7, d_model=10, n_heads=2, d_mlp=11)
STUDY = replace(arms.SMOKE, n_seeds=1)


def frames(folder):
    names = ("curves", "frequencies", "neurons", "circuits", "joined")
    return {name: pd.read_csv(folder / f"{NAME}_{name}.csv") for name in names}


def test_smoke(tmp_path):
    app = study.typer.Typer()
    app.command()(study.main)
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, ["--smoke", "--n-seeds", "1", *folders])
    assert result.exit_code == 0, result.output
    page = (tmp_path / f"{NAME}.md").read_text("utf-8")
    assert page.strip() in result.output
    assert "late again" in page
    written = frames(tmp_path)
    ends = written["curves"].groupby("arm")[["d_model", "n_heads", "d_mlp", "epoch"]].last()
    sizes = {arm: tuple(row) for arm, row in zip(ends.index, ends.to_numpy(), strict=True)}
    assert sizes.pop("small") == (6, 2, 5, 23)
    assert set(sizes.values()) == {(9, 3, 11, 23)}
    flops = written["curves"].groupby("arm")["flops"].max()
    assert flops["small"] < flops["late"] < flops["early"] < flops["full"]
    check_circuits(written["circuits"])
    assert (written["joined"]["new_neurons"] == 6).all()
    again = CliRunner().invoke(app, ["--smoke", "--n-seeds", "2", *folders])
    assert "choose another --runs" in str(again.exception)


def check_circuits(rows):
    """Check that the circuit is the same right after growth, and that new parts matter later."""
    at_once = rows["when"] == "right after growth"
    assert (rows.loc[at_once, "jaccard"] == 1).all()
    assert (rows.loc[at_once, "share_new_heads"] == 0).all()
    assert (rows.loc[at_once, "new_neurons_in_circuit"] == 0).all()
    later = rows[~at_once & (rows["pair"] == "grown")]
    assert (later["jaccard"] < 1).any()
    assert (later["share_new_heads"] != 0).all()


def test_what_is_stored():
    stored = frames(KEPT)
    check_circuits(stored["circuits"])
    assert stored["curves"].groupby("arm")["seed"].nunique().eq(3).all()
    # before they grow, early and late have the same batches as small
    for arm, until in (("early", 200), ("late", 1000)):
        curves = (
            stored["curves"]
            .query(f"epoch < {until}")
            .set_index(["arm", "seed", "epoch"])
            .sort_index()
        )
        pd.testing.assert_series_equal(
            curves.loc[arm, "test_loss"], curves.loc["small", "test_loss"]
        )


def test_a_run_that_is_broken_off_goes_on(tmp_path):
    def run(folder, tick):
        return arms.run(STUDY, "late", 0, folder, "cpu", tick)

    whole = run(tmp_path / "whole", lambda n: None)

    def breaks(n):
        seen.append(n)
        if len(seen) == stop:
            raise KeyboardInterrupt

    for stop in (8, 7, 0):  # interrupted in epochs 6 and 13, before and after growth
        seen = []
        if stop:
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "parts", breaks)
        else:
            parts = run(tmp_path / "parts", lambda n: None)
    for name, tensor in whole.training.model.state_dict().items():
        assert torch.equal(tensor, parts.training.model.state_dict()[name]), name
    for name, tensor in whole.before.state_dict().items():
        assert torch.equal(tensor, parts.before.state_dict()[name]), name
    columns = ["epoch", "flops", "train_loss", "test_loss", "d_mlp", "n_heads", "d_model"]
    # the losses with all digits, the rest as whole numbers
    pd.testing.assert_frame_equal(whole.curve[columns], parts.curve[columns], check_dtype=False)


def test_flops_of_neurons_are_those_of_their_matrix_products():
    tokens, answers, _ = pairs(TINY)
    small, large = (replace(TINY, d_mlp=n).model() for n in (11, 24))
    more = measures.step_flops(large, tokens, answers) - measures.step_flops(small, tokens, answers)
    # in and out, a multiplication and an addition each; twice that in the backward pass
    assert more == 3 * 2 * 2 * len(tokens) * TINY.d_model * 13


def test_a_wave_is_explained_by_its_frequency():
    index = torch.arange(13, dtype=torch.float64)
    a, b = torch.meshgrid(index, index, indexing="ij")
    turn = 2 * torch.pi / 13
    of_three = (turn * 3 * a).cos() * (turn * 3 * b).sin() + 0.5 * (turn * 3 * (a + b)).cos() + 7
    mixed = (turn * 3 * a).cos() + (turn * 5 * b).cos()
    crossed = (turn * (3 * a + 5 * b)).cos()  # no single frequency
    shares = measures.explained(torch.stack([of_three, mixed, crossed, 0 * a], dim=-1))
    assert shares.shape == (6, 4)
    assert shares[2].tolist() == pytest.approx([1, 0.5, 0, 0], abs=1e-12)
    assert shares[4].tolist() == pytest.approx([0, 0.5, 0, 0], abs=1e-12)


def test_logits_by_offset():
    _, answers, _ = pairs(TINY)
    c = torch.arange(7)
    logits = (2 * torch.pi * 2 * (c - answers[:, None]) / 7).cos()
    shares = measures.frequency_shares(measures.by_offset(logits, answers))
    # float32 logits; control: relative to a wrong answer there is no wave
    assert shares.tolist() == pytest.approx([0, 1, 0], abs=1e-9)
    assert measures.key_frequencies(shares) == [2]
    wrong = measures.by_offset(logits, answers * 3 % 7)
    assert wrong.std() < 1e-6 < measures.by_offset(logits, answers).std()


def test_shares_of_the_margin_are_what_ablation_takes():
    """Neurons write to logits linearly, so their shares add up to an ablation of the MLP."""
    model = TINY.model().double()
    tokens, answers, _ = pairs(TINY)

    def margin(model_then):
        with torch.no_grad():
            profile = measures.by_offset(model_then(tokens)[:, -1], answers)
        return (profile[0] - profile.mean()).item()

    frame = measures.neurons(model, tokens, answers)
    whole, seventh = margin(model), frame["share"][7]
    nn.init.zeros_(model.blocks[0].mlp.W_out[7])
    assert 1 - margin(model) / whole == pytest.approx(seventh, abs=1e-9)
    nn.init.zeros_(model.blocks[0].mlp.W_out)
    assert 1 - margin(model) / whole == pytest.approx(frame["share"].sum(), abs=1e-9)
    assert frame["share"].abs().min() > 1e-6
