"""Tests that the studies of attribution run, and that their tables match the text."""

from inspect import signature
from pathlib import Path

import pandas as pd
import pytest
from common import needs_hooked_transformer, run_script

from analyses.studies import attribution_repairs
from analyses.studies import attribution_vs_patching as study

KEPT = Path(__file__).parents[2] / "analyses" / "results"


def test_smoke(tmp_path):
    result = run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "attribution_vs_patching.md").read_text("utf-8")
    assert page.strip() in result.output
    rows = pd.read_csv(tmp_path / "attribution_vs_patching.csv")
    assert set(rows["method"]) == set(study.METHODS)
    of_neurons = rows.query("kind == 'neuron' and method == 'exact_gate'")
    assert len(of_neurons) == 2 * (len(study.PARTS) - 1)  # only attention heads have keys
    # without norms, all after the neurons of a 1-layer model is linear, so estimates are exact
    assert of_neurons["pearson"].tolist() == pytest.approx([1.0] * len(of_neurons), abs=1e-9)
    # control: a linearised gate is not exact
    linear = rows.query("kind == 'neuron' and method == 'gradient' and part == 'q'")
    assert (linear["pearson"] < 0.9).all()
    assert "exact_gate" in (tmp_path / "attribution_vs_patching.svg").read_text("utf-8")


def test_the_default_is_the_method_that_agreed_best():
    rows = pd.read_csv(KEPT / "attribution_vs_patching.csv").fillna(0.0)
    means = rows.groupby(["kind", "method"])["pearson"].mean().unstack("method")
    assert (means.idxmax(axis=1) == "exact_gate").all()
    assert signature(study.p.attribution).parameters["method"].default == "exact_gate"


@needs_hooked_transformer
def test_smoke_of_repairs(tmp_path):
    result = run_script(attribution_repairs.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "attribution_repairs.md").read_text("utf-8")
    assert page.strip() in result.output
    rows = pd.read_csv(tmp_path / "attribution_repairs.csv")
    assert set(rows["budget"]) == {"0", *map(str, attribution_repairs.BUDGETS)}
    default = rows[rows["budget"] == "auto"]
    assert default["pearson"].min() > 0.999
    assert default["expected"].min() > 0.98
    # control: without repairs
    assert (rows.loc[rows["budget"] == "0", "pearson"] < 0.98).all()


def test_what_is_expected_is_reached():
    """On held-out pairs, at most 2 % of expected correlations are too high by more than .02."""
    rows = pd.read_csv(KEPT / "attribution_repairs.csv")
    default = rows[rows["budget"] == "auto"]
    assert len(default) >= 150
    assert default["pearson"].min() > 0.98
    said = rows[rows["expected"].notna()]
    too_high = said["expected"] - said["pearson"] > attribution_repairs.MARGIN
    assert (too_high.groupby(said["budget"]).mean() <= 0.02).all()
    assert (rows.loc[rows["budget"] == "0", "pearson"] < 0.98).any()  # control
