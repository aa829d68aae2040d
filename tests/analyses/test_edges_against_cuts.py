"""Tests that the study of edge scores on trained models runs, and that its text is right."""

from pathlib import Path

import pandas as pd
import pytest
from common import needs_hooked_transformer

from analyses.studies import edges_against_cuts as study

KEPT = Path(__file__).parents[2] / "analyses" / "results"


@needs_hooked_transformer
def test_smoke(tmp_path):
    study.main(tmp_path, Path("nowhere"), n_prompts=2, smoke=True)
    rows = pd.read_csv(tmp_path / "edges_against_cuts.csv")
    assert set(rows["model"]) == {"modular_addition"}
    every = rows.query("kind == 'all' and reference == 'zero'").set_index("method")
    assert every["edges"].tolist() == [every["edges"].iloc[0]] * 2
    assert every.loc["two factors", "spearman"] > 0.9 > every.loc["EAP", "spearman"]
    page = (tmp_path / "edges_against_cuts.md").read_text("utf-8")
    assert f"| {every.loc['two factors', 'spearman']:.3f} |" in page


def test_the_guide_says_which_ranks_more_like_cuts_on_how_many_models():
    rows = pd.read_csv(KEPT / "edges_against_cuts.csv").query("kind == 'all'")
    wide = rows.query("reference == 'zero'").pivot(
        index="model", columns="method", values="spearman"
    )
    wins = int((wide["EAP"] > wide["two factors"]).sum())
    assert (wins, len(wide)) == (4, 6)
    assert wide.min().min() == pytest.approx(0.868, abs=5e-3)
