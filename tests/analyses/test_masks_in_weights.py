"""The study of Theorem 9 measures the head of `reference`, and its page has the stored rows."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import relative, run_script

from analyses.studies import masks_in_weights as study
from analyses.tools.benching import table
from attn_only_lens.reference import Head, unmasked_head, with_positions

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


def test_smoke(tmp_path):
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "masks_in_weights.csv")
    assert set(rows["mask"]) == {"causal", "neuron", "random"}
    exact = rows.query("dtype == 'float64' and form == 'masked down'")
    assert (exact["error"] <= exact["bound"] * (1 + 1e-9) + 1e-14).all()
    assert exact.query("omega == 1")["error"].min() > 1e-2
    assert exact.query("omega == 1e6")["error"].max() < 1e-14


@pytest.mark.parametrize("shift", [0.0, 9.0])
def test_a_shift_of_all_scores_changes_nothing_but_rounding(shift):
    generator = torch.Generator().manual_seed(3)
    X, W_QK, W_OV = (torch.randn(n, study.D, generator=generator).double() for n in (5, 16, 16))
    head = unmasked_head(Head(W_QK, W_OV, study.masks(5, generator)["random"]), 7.0)
    Z = with_positions(X)
    assert relative(study.output(head, Z, torch.float64, shift), head(Z)) < 1e-13
    assert relative(study.output(head, Z, torch.float32, shift), head(Z)) > 1e-10


def test_the_page_has_its_rows():
    rows = pd.read_csv(RESULTS / "masks_in_weights.csv", keep_default_na=False)
    rows["bound"] = pd.to_numeric(rows["bound"])
    page = (RESULTS / "masks_in_weights.md").read_text("utf-8")
    assert table(study.by_omega(rows)) in page
    assert table(study.needed(rows)) in page
    assert study.predictions(rows) in page
