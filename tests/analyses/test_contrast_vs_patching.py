"""Tests of the study of secants: its measures, and that its tables match the guide."""

import numpy as np
import pandas as pd
import pytest

from analyses.studies import contrast_vs_patching as study
from attn_only_lens import Contrast, expose_neuron_heads, pretrained
from attn_only_lens import patching as p


def test_edges_by_secants_agree_with_path_patches():
    model = expose_neuron_heads(pretrained.small_english(), copy=True).model
    clean, corrupted, right, wrong = study.ENGLISH[0]
    contrast = Contrast(clean, corrupted, p.logit_diff(right, wrong))
    sizes = study.Sizes(nodes=11, edges=20, steps=1)
    edges = pd.DataFrame(study.edges(model, contrast, sizes)).set_index("method")
    assert edges.loc["secant graph", ["denoise", "noise", "mean"]].min() > 0.5
    # The control: rank correlations are lower without the corrupted run.
    assert edges.loc["graph of one run", "mean"] < edges.loc["secant graph", "mean"]


def test_r2_is_of_held_out_names():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(41, 2))
    y = 3 + x @ [2.0, -1.0]
    assert study.r2(x, y) == pytest.approx(1)
    assert study.r2(x[:, :1], y) < 0.95  # without one of two parts
    guesses = np.empty(41)
    for i in range(5):
        left = [n for n in range(41) if n % 5 != i]
        slope, start = np.polyfit(x[left, 0], y[left], 1)
        guesses[i::5] = start + slope * x[i::5, 0]
    expected = 1 - ((y - guesses) ** 2).mean() / y.var()
    assert study.r2(x[:, :1], y) == pytest.approx(expected)
