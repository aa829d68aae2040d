"""The study of the framework's tools runs, and its page says what its tables do."""

from pathlib import Path

import framework_on_models as study
import pandas as pd
import pytest
from typer.testing import CliRunner

KEPT = Path(__file__).parents[1] / "analyses" / "results"


@pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own
def test_smoke(tmp_path):
    app = study.typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, ["--smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    hops = pd.read_csv(tmp_path / "framework_on_models_hops.csv")
    assert hops.groupby("prompt")["share"].sum().tolist() == pytest.approx([1.0, 1.0], abs=1e-2)
    assert (hops[hops["hops"] == "more"]["explained"] > 0.9999).all()
    tasks = pd.read_csv(tmp_path / "framework_on_models_tasks.csv").groupby("task")
    assert tasks["effect"].sum().tolist() == pytest.approx(tasks["value"].first(), rel=1e-2)


def test_purity_counts_the_most_common_class():
    classes = study.word_classes()
    assert study.purity([" Mary", " Sarah", " key", " Jessica", " the"], classes) == 3 / 5


def test_what_the_page_concludes():
    part = {
        name: pd.read_csv(KEPT / f"framework_on_models_{name}.csv")
        for name in ("hops", "tasks", "words", "heads", "pairs")
    }
    explained = part["hops"].groupby(["model", "hops"])["explained"].mean()
    assert explained[study.SMALL, "2"] < 0.5 < 0.9 < explained[study.SMALL, "4"]
    assert explained[study.LARGE, "2"] < 0.2
    assert explained[study.LARGE, "8"] < -1
    tasks = part["tasks"].set_index(["task", "hops"])
    share = tasks["effect"] / tasks["value"]
    assert share["induction", "2"] > 0.5 > share["agreement", "2"]
    assert (part["pairs"].iloc[0][["copying_first", "copying_second"]] > 0.5).all()
    first = part["words"].iloc[0]
    assert first["reads"] > first["random"] + 0.05
    small = part["heads"].query(f"model == '{study.SMALL}'")
    assert small["induction"].max() < 0.15
