"""Tests of attribution on a saturated model, a bracket classifier."""

import numpy as np
import pytest

from analyses.tools import brackets
from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens
]


def pearsons(exact, estimated):
    """Return the correlation of the exact and estimated effects among heads of each kind."""
    kinds = exact.frame["kind"].to_numpy()
    return {
        kind: np.corrcoef(exact.effect[kinds == kind], estimated.effect[kinds == kind])[0, 1]
        for kind in ("attention", "neuron")
    }


def test_estimates_promise_no_more_than_is_reached_and_the_default_gives_what_patches_give():
    """The expected correlation is not too high for small budgets and poor estimates."""
    model = expose_neuron_heads(brackets.load()).model
    contrast = Contrast(*next(iter(brackets.pairs(model, seed=3))), brackets.BALANCED)
    lowest = 1.0
    for direction in ("denoise", "noise"):
        how = {"model": model, "contrast": contrast, "direction": direction}
        exact, sweep = p.activation_patch(**how), p.attribution(**how)
        assert min(pearsons(exact, sweep).values()) > 0.999
        assert min(sweep.expected_pearson.values()) > 0.98
        for budget in (0, 1, 3):
            few = p.attribution(**how, method=p.Estimate(budget=budget))
            reached = pearsons(exact, few)
            lowest = min(lowest, *reached.values())
            for kind, expected in few.expected_pearson.items():
                assert expected is None or expected - reached[kind] <= 0.02
    assert lowest < 0.9  # control: estimates without repairs correlate far less
