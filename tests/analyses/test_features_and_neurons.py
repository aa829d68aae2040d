"""Tests that the study of features and neurons runs, and that its page has its rows' means."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import needs_transformer_lens_4, run_script

from analyses.studies import features_and_neurons as study

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


@needs_transformer_lens_4  # takes a minute, and reads nothing that differs between versions
@pytest.mark.filterwarnings("ignore")
def test_smoke(tmp_path):
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "features_and_neurons.csv")
    assert list(rows["arm"].unique()) == list(study.ARMS)
    assert (rows["sites"] == rows["heads"] + rows["mlp sites"]).all()
    of_neurons = rows["arm"] == "neurons"
    assert (rows["error share"] == 0).equals(of_neurons)
    assert (rows["fitted"] - 0.9).abs().max() <= 0.2


def test_a_label_counts_the_tokens_that_cover_an_activation():
    class Model:
        """A model with one neuron: z is 7 at token 2, 2 at token 3, 1 at token 5."""

        class cfg:
            d_vocab, n_ctx = 7, 11

        blocks = (None,)

        @staticmethod
        def to_tokens(text):
            return torch.tensor([[0, 2, 3, 5]])

        @staticmethod
        def run_with_cache(tokens, names_filter):
            z = torch.tensor([100.0, 7.0, -2.0, 1.0])  # the first token is BOS
            return None, {names_filter[0]: z[None, :, None, None]}

    assert study.label_lengths(Model, ["any"]) == {(0, 0): 2}


def test_the_page_has_the_means_of_its_rows():
    rows = pd.read_csv(RESULTS / "features_and_neurons.csv")
    text = (RESULTS / "features_and_neurons.md").read_text("utf-8")
    wide = study.means(rows)
    for (task, measure), row in wide.iterrows():
        cells = " | ".join(f"{x:.3g}" for x in row)
        assert f"| {task} | {measure} | {cells} |" in text
