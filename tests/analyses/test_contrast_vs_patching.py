"""Tests that the study of secants runs, and that its rows match the text in `docs/studies.md`."""

from pathlib import Path

import pandas as pd
from common import run_script

from analyses.studies import contrast_vs_patching as study

ROWS = Path(__file__).parents[2] / "analyses" / "results" / "contrast_vs_patching.csv"


def test_smoke(tmp_path, monkeypatch):
    for name, value in {"N_NODES": 11, "N_EDGES": 20, "N_STEPS": 1}.items():
        monkeypatch.setattr(study, name, value)
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "contrast_vs_patching.csv")
    assert set(rows["what"]) == {"attribution", "ranking", "discover", "edges"}
    attention = rows.query("what == 'attribution' and kind == 'attention' and against == 'mean'")
    pearson = attention.set_index("method")["pearson"]
    assert pearson["secant"] > pearson["exact_gate"]
    assert rows.query("method == 'secant graph'")["spearman"].min() > 0.5


def test_what_the_guide_says_is_in_the_rows():
    rows = pd.read_csv(ROWS)

    def means(query, by):
        return rows.query(query).groupby(["model", "method"])[by].mean().unstack()

    wins = {}
    for kind in ("neuron", "attention"):
        pearson = means(
            f"what == 'attribution' and kind == '{kind}' and against == 'mean'", "pearson"
        )
        wins[kind] = int((pearson["secant"] > pearson["exact_gate"]).sum())
    assert wins == {"neuron": 5, "attention": 4}
    kept = means("what == 'ranking' and kind == 'magnitude' and k == 40", "f")
    assert int((kept["secant"] > kept["exact_gate"]).sum()) == 5
    assert kept.loc["SmolLM2-135M"].round(2)[["secant", "exact_gate"]].tolist() == [0.37, 0.09]
    sizes = means("what == 'discover' and kind == 'budget auto'", "k")
    assert sizes.loc["SmolLM2-135M"].round(0)[["secant", "exact_gate"]].tolist() == [58, 80]
    edges = means("what == 'edges' and against == 'mean'", "spearman")
    assert (edges["secant graph"] > edges["graph of one run"]).all()
    assert (edges["EAP, mean of both ends"] > edges["secant graph"]).all()
