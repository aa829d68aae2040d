"""The study of images: its tokens, its trial run on drawn images, and its page."""

from pathlib import Path

import pandas as pd
import torch
from common import run_script

from analyses.studies import image_circuits as study
from analyses.tools.benching import table

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


def test_tokens_are_patches_row_by_row():
    image = torch.zeros(1, 8, 8)
    image[0, 0, 0] = 16  # the first pixel of the first patch is black
    image[0, 2, 7] = 6  # the second pixel of the last patch in the second row is grey
    image[0, 7, 6] = 4.9  # white
    tokens = study.tokens_of(image)[0].tolist()
    assert tokens == [2, *[0] * 6, 3, *[0] * 8, study.ASK]
    assert study.tokens_of(torch.full((1, 8, 8), 12.0)).max() == study.ASK
    assert study.tokens_of(torch.full((1, 8, 8), 12.0))[0, :-1].tolist() == [80] * 16
    assert list(study.PLACES)[7] == "r1c3"


def test_smoke(tmp_path):
    """On drawn images: neuron-heads change nothing, and a circuit beats random ones."""
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    row = pd.read_csv(tmp_path / "image_circuits.csv").iloc[0]
    assert row["accuracy"] > 0.5
    assert row["exposed"] < 1e-12
    assert abs(row["fitted"] - 0.9) <= 0.2
    assert row["random"] < row["fitted"]
    effects = pd.read_csv(tmp_path / "image_circuits_effects.csv")
    last = effects[effects["layer"] == 1].groupby(effects["place"] == "?")["share"].sum()
    assert last[False] < 1e-12 < last[True]  # the answer is read at "?"
    drawing = (tmp_path / "image_circuits_circuit.svg").read_text("utf-8")
    assert drawing.startswith("<svg")
    assert "r0c" in drawing


def test_the_page_has_its_rows():
    rows = pd.read_csv(RESULTS / "image_circuits.csv")
    effects = pd.read_csv(RESULTS / "image_circuits_effects.csv")
    page = (RESULTS / "image_circuits.md").read_text("utf-8")
    assert study.predictions(rows) in page
    assert table(rows.drop(columns="exposed")) in page
    assert table(study.by_layer(effects)) in page
