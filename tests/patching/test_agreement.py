"""Tests of agreement against scipy in any row order, and refusals of incomparable sweeps."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from random_sweeps import sweep, values

from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

EXACT = 1e-12  # rounding of means over 65 numbers


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_against_scipy(direction):
    exact = sweep(0, direction=direction)
    noisy = values(0).assign(value=(values(0)["value"] + 0.7 * values(1)["value"]).round(1))
    approx = sweep(frame=noisy.sample(frac=1.0, random_state=3), direction=direction)
    (row,) = p.agreement(exact, approx, k=11).to_dict("records")
    first, second = exact.frame["value"], sweep(frame=noisy).frame["value"]
    assert second.duplicated().any()  # ties get their mean rank
    assert row["pearson"] == pytest.approx(scipy.stats.pearsonr(first, second)[0], abs=EXACT)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(first, second)[0], abs=EXACT)
    # The effect is the distance from the value of the patched run, not from 0.
    base = {"denoise": -1.3, "noise": 3.7}[direction]
    tops = [
        set(np.argsort(-np.abs(values - base), kind="stable")[:11]) for values in (first, second)
    ]
    assert row["top_k"] == len(tops[0] & tops[1]) / 11
    assert 0 < row["top_k"] < 1
    assert (row["k"], row["n"]) == (11, 65)
    # Control: rows compared by number instead of by site give another correlation.
    misaligned = np.corrcoef(first, approx.frame["value"])[0, 1]
    assert abs(misaligned - row["pearson"]) > 0.1


BAD = {
    "sites": (lambda: sweep(frame=values().iloc[3:].replace("L1N4", "L1N5000")), "8 of 65 rows"),
    "part": (lambda: sweep(part="q"), "exact has part 'z', but approx has 'q'"),
    "position": (lambda: sweep(frame=values(positions=["all"])), "13 of 13 only in approx"),
    "direction": (
        lambda: sweep(direction="noise"),
        "exact has direction 'denoise', but approx has 'noise'",
    ),
    "other prompts": (lambda: sweep(clean_value=3.5), "clean_value is 3.7 in exact and 3.5"),
    "constant": (lambda: sweep(frame=values().assign(value=1.0)), "all scores of approx"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make_sweep, reason = BAD[case]
    with pytest.raises(InputError, match=reason):
        p.agreement(sweep(), make_sweep())


def test_rows_of_each_prompt_are_held_against_the_same():
    first, second = (
        sweep(
            frame=pd.concat(
                values(seed + prompt).assign(prompt=prompt, unpatched=0.1) for prompt in range(2)
            )
        )
        for seed in (0, 2)
    )
    row = p.agreement(first, second, k=9).iloc[0]
    expected = np.corrcoef(first.frame["value"], second.frame["value"])[0, 1]
    assert (row["n"], row["pearson"]) == (130, pytest.approx(expected, abs=EXACT))
    with pytest.raises(InputError, match="the same `per_prompt`"):
        p.agreement(first, sweep())


def test_refused_with_every_reason():
    flat = sweep(frame=values().assign(value=1.0))
    with pytest.raises(InputError) as caught:
        p.agreement(sweep(direction="noise"), flat, k=66)
    assert len(caught.value.reasons) == 3
