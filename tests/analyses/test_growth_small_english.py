"""Tests of the study of growth on Small English: arithmetic, and what is stored."""

import pytest
import torch

from analyses import study as frame
from analyses.studies import growth_small_english as study


def check(ends, smallest):
    """Check that compared arms have equal flops, and that families match their twins."""
    for part, rows in ends.groupby("part"):
        if part == "rates":
            continue
        flops = rows.groupby("arm")["flops"].mean()
        if part.startswith("family"):
            for arm in [arm for arm in flops.index if arm.startswith("grown")]:
                assert arm.replace("grown", "scratch") in flops
                for_all = flops[arm.replace("grown, ", study.LONGER)]
                assert 1 <= for_all / flops[arm] <= smallest
        else:
            grown = flops.drop(["full", *({"small"} & set(flops.index))])
            assert grown.nunique() == 1
            assert (flops / grown.iloc[0]).between(1, smallest).all()


def test_arms_that_grow_differ_only_after_growth():
    tables = frame.read("growth_small_english")
    check(tables["ends"], smallest=1.03)
    curves = tables["curves"].query("part == 'plain'")
    by_step = curves.pivot(index="step", columns="arm", values="loss")
    arms, growth_step = ["own", "pairs", "GradMax"], study.Recipe().before
    # right after growth the function is the same for all arms, later it differs
    after = by_step.loc[growth_step, arms]
    assert after.to_numpy() == pytest.approx(after["own"], rel=1e-5)
    assert by_step.loc[growth_step + 20, arms].nunique() == 3


def test_steps_of_fresh_entries_are_those_of_adamw():
    weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, eps=0.0)
    weight.grad, moved = torch.ones(2, dtype=torch.float64), []
    for step in range(1010):
        if step == 1000:  # the second entry is new: its moments start at zero, not the count
            state = optimizer.state[weight]
            state["exp_avg"][1] = state["exp_avg_sq"][1] = 0.0
        before = weight.detach().clone()
        optimizer.step()
        moved.append((before - weight.detach()).tolist())
    assert [new for _, new in moved[1000:]] == pytest.approx(study.fresh_steps(10), rel=1e-6)
    assert [old for old, _ in moved[1000:]] == pytest.approx([1] * 10, rel=1e-6)
