"""Tests of the study of attribution: its measures, and that its tables match the text."""

from inspect import signature

import pandas as pd
import pytest
import torch

from analyses import study as frame
from analyses.studies import attribution_repairs as study
from analyses.tools.real_models import pairs
from attn_only_lens import expose_neuron_heads, load, pretrained


def test_gates_are_exact_in_a_model_of_one_layer():
    """Without norms, all after the neurons is linear; a linearised gate is not exact."""
    model = expose_neuron_heads(load("modular-addition", dtype=torch.float64)).model
    contrast = next(pairs(model, pretrained.modular_addition_tokens(), 1, 0))
    rows = pd.DataFrame(study.methods(model, contrast))
    assert set(rows["method"]) == set(study.METHODS)
    of_neurons = rows.query("kind == 'neuron' and method == 'exact_gate'")
    assert len(of_neurons) == len(study.PARTS) - 1  # only attention heads have keys
    assert of_neurons["pearson"].tolist() == pytest.approx([1.0] * len(of_neurons), abs=1e-9)
    # The control.
    linear = rows.query("kind == 'neuron' and method == 'gradient' and part == 'q'")
    assert (linear["pearson"] < 0.9).all()


def test_the_default_is_the_method_that_agreed_best():
    means = frame.read("attribution_repairs")["methods"].fillna(0.0)
    by = means.groupby(["kind", "method"])["pearson"].mean().unstack("method")
    assert (by.idxmax(axis=1) == "exact_gate").all()
    assert signature(study.p.attribution).parameters["method"].default == "exact_gate"


def test_what_is_expected_is_reached():
    """On held-out pairs, at most 2 % of expected correlations are too high by more than .02."""
    rows = frame.read("attribution_repairs")[""]
    assert len(rows) >= 150
    assert rows["auto"].min() > 0.98
    for budget in study.WITH_EXPECTED:
        known = rows[rows[f"expected_{budget}"].notna()]
        assert (known[f"expected_{budget}"] - known[str(budget)] > 0.02).mean() <= 0.02
    assert (rows["0"] < 0.98).any()  # the control
