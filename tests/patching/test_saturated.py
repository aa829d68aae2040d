"""Tests of attribution on a saturated model, a bracket classifier."""

from functools import cache
from itertools import islice

import numpy as np
import pytest
from common import needs_hooked_transformer

from analyses.tools import train_brackets as brackets
from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens
]
KINDS = ("attention", "neuron")


@cache
def exact_sweeps():
    """Return the runs to patch and the sweeps of every site, for a pair in both directions."""
    model = expose_neuron_heads(brackets.load_bridge()).model
    sweeps = []
    for clean, corrupted in islice(brackets.pairs(model, seed=3), 1):
        contrast = Contrast(clean, corrupted, brackets.BALANCED)
        for direction in ("denoise", "noise"):
            how = {"model": model, "contrast": contrast, "direction": direction}
            sweeps.append((how, p.activation_patch(**how)))
    return sweeps


def pearson(exact, estimated, kind):
    """Return the correlation of the exact and estimated effects among heads of one kind."""
    here = (exact.frame["kind"] == kind).to_numpy()
    return np.corrcoef(exact.effect[here], estimated.effect[here])[0, 1]


def test_the_default_gives_what_patches_give():
    alone = []
    for how, exact in exact_sweeps():
        sweep = p.attribution(**how)
        assert min(pearson(exact, sweep, kind) for kind in KINDS) > 0.999
        assert min(sweep.expected_pearson.values()) > 0.98
        # Control: estimates without repairs correlate far less.
        plain = p.attribution(**how, method=p.Estimate(budget=0))
        alone += [pearson(exact, plain, kind) for kind in KINDS]
    assert min(alone) < 0.5
    assert sum(value < 0.98 for value in alone) > len(alone) / 2


def test_no_more_is_expected_than_is_reached():
    """The expected correlation is not too high for small budgets and poor estimates."""
    n_low = 0
    for how, exact in exact_sweeps():
        for budget in (1, 3):
            sweep = p.attribution(**how, method=p.Estimate(budget=budget))
            for kind, expected in sweep.expected_pearson.items():
                reached = pearson(exact, sweep, kind)
                n_low += reached < 0.98
                assert expected is None or expected - reached <= 0.02
    assert n_low >= 5


@needs_hooked_transformer
def test_training(tmp_path):
    brackets.main(out=tmp_path, smoke=True)
    assert brackets.load(tmp_path).cfg.n_layers == 1
