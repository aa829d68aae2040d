"""Tests of the study of secants: its regression is that of held-out names."""

import numpy as np
import pytest

from analyses.studies import contrast_vs_patching as study


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
