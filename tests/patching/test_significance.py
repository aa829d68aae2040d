"""Tests of p-values and false-discovery rates, by numerical integration and by definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

N, SITES = 11, ["L0H1", "L0N29", "L1H0", "L1N3"]
CLEAN = tokens(5, batch=N, pos=5)
CORRUPTED = torch.cat([CLEAN[:, :1], (CLEAN[:, 1:2] + 7) % 41, CLEAN[:, 2:]], dim=1)
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(7, 11))


def tail(t, df, steps=200_000):
    """Return the probability of a larger |t|, by Simpson's rule over Student's density."""
    x = np.linspace(0, abs(t), 2 * steps + 1)
    size = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    y = size * (1 + x**2 / df) ** (-(df + 1) / 2)
    inside = (y[0] + 4 * y[1::2].sum() + 2 * y[2:-1:2].sum() + y[-1]) * (x[1] - x[0]) / 3
    return 1 - 2 * inside


def discovered(p_values, rate):
    """Return which hypotheses Benjamini and Yekutieli (2001, theorem 1.3) reject."""
    m, order = len(p_values), sorted(range(len(p_values)), key=lambda i: p_values[i])
    harmonic = sum(1 / i for i in range(1, m + 1))
    largest = [k for k in range(1, m + 1) if p_values[order[k - 1]] <= k * rate / m / harmonic]
    return set(order[: max(largest, default=0)])


@pytest.mark.parametrize(
    ("run", "direction"), [(p.activation_patch, "noise"), (p.attribution, "denoise")]
)
def test_values_of_single_prompts_have_these_p_values(model, run, direction):
    how = {"sites": p.Sites(SITES, positions=[0, 1, -1]), "direction": direction}
    if run is p.attribution:
        how["method"] = p.Estimate("exact_gate", budget=0)
    sweep, rows = run(model, CONTRAST, **how), run(model, CONTRAST, **how, per_prompt=True)
    span = sweep.clean_value - sweep.corrupted_value
    effects = rows.frame.assign(effect=(rows.frame["value"] - rows.frame["unpatched"]) / span)
    got = sweep.significance()
    assert len(got) == 3 * len(SITES)
    some = 0
    for row in got.itertuples():
        here = effects[(effects["name"] == row.name) & (effects["position"] == row.position)]
        values = here["effect"].tolist()
        assert len(values) == N
        mean = sum(values) / N
        error = math.sqrt(sum((x - mean) ** 2 for x in values) / (N - 1) / N)
        assert (row.effect, row.standard_error) == pytest.approx((mean, error), abs=1e-12)
        if abs(mean) < 1e-5:  # before the change, or without a path to the metric
            assert abs(mean) < 1e-12
            assert (row.p, row.q) == (1, 1)
        else:
            assert row.p == pytest.approx(tail(mean / error, N - 1), abs=1e-9)
            some += row.p < 0.5
    assert 0 < some < len(got)
    values, q = got["p"].tolist(), got["q"].to_numpy()
    for rate in np.unique([0.01, 0.3, *(q[q < 1] + 1e-9), *(q[q < 1] - 1e-9)]):
        assert set(np.flatnonzero(q <= rate)) == discovered(values, rate)


def test_refused(model):
    sites = p.Sites(SITES[:1], positions=-1)

    def patched(contrast, **how):
        return p.activation_patch(model, contrast, sites=sites, **how)

    few = patched(Contrast(CLEAN[:7], CORRUPTED[:7], CONTRAST.metric))
    twice = torch.arange(N) % 9
    whole = p.custom(lambda logits: logits[:, -1, 7].mean())
    for sweep, match in (
        (few, "got 7 prompts; expected 8 or more"),
        (patched(CONTRAST, per_prompt=True), "one row per site and prompt; expected means"),
        (patched(replace(CONTRAST, metric=whole)), "without standard errors"),
        (
            patched(replace(CONTRAST, clean=CLEAN[twice], corrupted=CORRUPTED[twice])),
            r"got prompts \[9, 10\] twice",
        ),
    ):
        with pytest.raises(InputError, match=match) as caught:
            sweep.significance()
        assert len(caught.value.reasons) == 1
    assert patched(CONTRAST).query("layer == 1").significance().empty
    assert len(patched(replace(CONTRAST, corrupted=None), direction="zero").significance()) == 1
