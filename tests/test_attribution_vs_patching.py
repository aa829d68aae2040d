"""The study of attribution runs, and its tables say what its rows do."""

from inspect import signature
from pathlib import Path

import attribution_vs_patching as study
import pandas as pd
import pytest
from typer.testing import CliRunner

KEPT = Path(__file__).parents[1] / "analyses" / "results"


def test_smoke(tmp_path):
    app = study.typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, ["--smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "attribution_vs_patching.md").read_text("utf-8")
    assert page.strip() in result.output
    rows = pd.read_csv(tmp_path / "attribution_vs_patching.csv")
    assert set(rows["method"]) == set(study.METHODS)
    assert set(rows["budget"]) == set(map(str, study.BUDGETS))
    methods = rows[(rows["direction"] == "denoise") & (rows["positions"] == "each")]
    methods = methods[methods["budget"].astype(str) == "0"]
    of_neurons = methods.query("kind == 'neuron' and method == 'exact_gate'")
    assert len(of_neurons) == 2 * (len(study.PARTS) - 1)  # keys are of attention heads
    # neurons of a model of one layer without a norm: all after them is linear, and estimates exact
    assert of_neurons["pearson"].tolist() == pytest.approx([1.0] * len(of_neurons), abs=1e-9)
    # control: a linearised gate is not
    linear = methods.query("kind == 'neuron' and method == 'gradient' and part == 'q'")
    assert (linear["pearson"] < 0.9).all()
    assert "auto" in (tmp_path / "attribution_vs_patching.svg").read_text("utf-8")


def test_the_default_is_the_method_that_agreed_best():
    rows = pd.read_csv(KEPT / "attribution_vs_patching.csv").fillna(0.0)
    rows = rows[(rows["direction"] == "denoise") & (rows["positions"] == "each")]
    rows = rows[rows["budget"].astype(str) == "0"]
    means = rows.groupby(["kind", "method"])["pearson"].mean().unstack("method")
    assert (means.idxmax(axis=1) == "exact_gate").all()
    assert signature(study.p.attribution).parameters["method"].default == "exact_gate"
