"""Tests of the study of growth on Small English: arithmetic, and what is stored."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from common import needs_transformer_lens_4

from analyses import study as frame
from analyses.studies import growth_small_english as study
from analyses.tools.study_files import t_interval
from attn_only_lens import growth

pytestmark = needs_transformer_lens_4

FAMILIES = ("grown", "scratch")


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


def test_arms_that_grow_differ_only_after_growth(tmp_path):
    tables = study.STUDY.run(frame.Setting(tmp_path, tmp_path, smoke=True))
    assert tables["ends"]["loss"].between(5, 7).all()
    check(tables["ends"], smallest=1.3)
    curves = tables["curves"].query("part == 'plain'")
    by_step = curves.pivot(index="step", columns="arm", values="loss")
    arms = ["own", "pairs", "GradMax"]
    # right after growth the function is the same for all arms, later it differs
    assert by_step.loc[4, arms].to_numpy() == pytest.approx(by_step.loc[4, "own"], rel=1e-5)
    assert by_step.loc[8, arms].nunique() == 3


def test_what_is_stored():
    tables = frame.read("growth_small_english")
    curves, ends = tables["curves"], tables["ends"]
    assert ends.query("part != 'rates'").groupby(["part", "arm"])["seed"].nunique().eq(3).all()
    check(ends, smallest=1.02)
    recipe, rates = study.Recipe(), study.by_rate(ends)
    for kind in ("plain", "gated"):
        assert float(rates.loc[kind, "full"].idxmin()) == recipe.lr
    for budget in recipe.budgets:  # a size has the same flops, grown or from scratch
        for number, sizes in enumerate(recipe.family[1:], start=1):
            part = curves[curves["part"] == f"family {budget}"].set_index("step")
            grown, scratch = (
                part.loc[part["arm"] == f"{how}, {sizes.d_model}", "flops"] for how in FAMILIES
            )
            spent = grown.iloc[-1] - grown[number * (budget - recipe.decay)]
            assert spent == pytest.approx(scratch.iloc[-1], rel=0.05)


def test_the_guide_says_what_is_stored():
    tables = frame.read("growth_small_english")
    ends = tables["ends"]
    guide = (frame.RESULTS.parents[1] / "docs" / "growth.md").read_text("utf-8")
    said = guide[guide.index("A [second study]") :].split("\n\n")[0]

    def less(part, arm, other_arm="own"):
        return abs(study.less(ends, part, arm, other_arm).mean())

    alike = [
        *(less("plain", arm) for arm in ("pairs", "splits", "unequal", "GradMax")),
        *(less("gated", arm) for arm in ("pairs", "splits", "unequal")),
    ]
    figures = [less("gated", "small"), less("plain", "small"), max(alike)]
    figures += [less("gated", "copies"), less("plain", "copies")]
    figures += [less("family 400", "grown, 64", "scratch, 64")]
    for budget in (400, 200):
        arms = "grown, 64", f"{study.LONGER}64"
        mean, low, high = t_interval(study.less(ends, f"family {budget}", *arms))
        figures += [-mean, -high, -low]
    places = ends.query("part == 'layers' and arm != 'full'").groupby("arm")["loss"].mean()
    figures += [places.max() - places.min()]
    assert re.findall(r"\d\.\d{3}", said) == [f"{figure:.3f}" for figure in figures]
    # pairs whose difference is not significant, at equal flops
    apart = [("plain", "full", "own"), ("gated", "full", "own")]
    apart += [(f"family {n}", "grown, 32", f"{study.LONGER}32") for n in (200, 400)]
    for part, *arms in apart:
        _, low, high = t_interval(study.less(ends, part, *arms))
        assert low < 0 < high
    spent = ends.query("part == 'family 400'").groupby("arm")[["step", "flops"]].mean()
    spent["flops"] = (spent["flops"] / 1e9).round()
    assert spent.loc["grown, 64"].tolist() == [1000, 368]
    assert spent.loc["scratch, 64"].tolist() == [400, 275]
    facts = study.facts(tables)
    verdicts = [held for kind in facts["kinds"].values() for held in kind["held"].values()]
    verdicts += [*facts["gains_held"].values(), facts["gains_more"]]
    assert (sum(verdicts), len(verdicts)) == (9, 17)


def test_intervals_are_students():
    rows = [
        {"part": "x", "arm": arm, "seed": seed, "loss": loss}
        for arm, losses in {"a": (1.0, 2.0, 4.0), "b": (0.5, 1.0, 2.5)}.items()
        for seed, loss in enumerate(losses)
    ]
    mean, low, high = t_interval(study.less(pd.DataFrame(rows), "x", "a", "b"))
    # differences 0.5, 1, 1.5: deviation 0.5, and 4.302653 is Student's for two degrees of freedom
    assert (mean, high - mean, mean - low) == pytest.approx((1, *[4.302653 * 0.5 / 3**0.5] * 2))


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


def test_new_layers_are_where_they_are_said_to_be():
    small = (
        study.SeedRuns(study.SMOKE, 0, Path(), "cpu", None).plan(study.SMOKE.family[0], 1).model()
    )
    two = growth.grow(small, study.inserted((1,)))
    assert two.provenance.new_layers == ("L1",)
    four = growth.grow(two.model, study.inserted((1, 3))).provenance
    assert (four["L0"], four["L1"], four.new_layers) == ("L0", "L2", ("L1", "L3"))
