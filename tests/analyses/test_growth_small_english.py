"""Tests of the study of growth on Small English: smoke run, arithmetic, stored tables."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from common import needs_transformer_lens_4, run_script

from analyses.studies import growth_small_english as study
from analyses.studies import growth_small_english_report as report
from analyses.tools.english_runs import growth

pytestmark = needs_transformer_lens_4

NAME = Path(study.__file__).stem
FAMILIES = ("grown", "scratch")
KEPT = Path(__file__).parents[2] / "analyses" / "results"


def stored():
    return {part: pd.read_csv(KEPT / f"{NAME}_{part}.csv") for part in ("curves", "ends")}


def check(ends, smallest):
    """Check that compared arms have equal flops, and that families match their twins."""
    for part, frame in ends.groupby("part"):
        if part == "rates":
            continue
        flops = frame.groupby("arm")["flops"].mean()
        if part.startswith("family"):
            for arm in [arm for arm in flops.index if arm.startswith("grown")]:
                assert arm.replace("grown", "scratch") in flops
                for_all = flops[arm.replace("grown, ", report.LONGER)]
                assert 1 <= for_all / flops[arm] <= smallest
        else:
            grown = flops.drop(["full", *({"small"} & set(flops.index))])
            assert grown.nunique() == 1
            assert (flops / grown.iloc[0]).between(1, smallest).all()


def test_smoke(tmp_path):
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = run_script(study.main, ["--smoke", "--n-seeds", "1", *folders])
    page = (tmp_path / f"{NAME}.md").read_text("utf-8")
    assert page.strip() in result.output
    ends = pd.read_csv(tmp_path / f"{NAME}_ends.csv")
    assert ends["loss"].between(5, 7).all()
    check(ends, smallest=1.3)
    curves = pd.read_csv(tmp_path / f"{NAME}_curves.csv").query("part == 'plain'")
    by_step = curves.pivot(index="step", columns="arm", values="loss")
    arms = ["own", "pairs", "GradMax"]
    # right after growth the function is the same for all arms, later it differs
    assert by_step.loc[4, arms].to_numpy() == pytest.approx(by_step.loc[4, "own"], rel=1e-5)
    assert by_step.loc[8, arms].nunique() == 3


def test_what_is_stored():
    curves, ends = stored().values()
    assert ends.query("part != 'rates'").groupby(["part", "arm"])["seed"].nunique().eq(3).all()
    check(ends, smallest=1.02)
    rates = ends.query("part == 'rates'").set_index("arm")["loss"]
    for kind in ("plain", "gated"):
        full = {float(arm.split()[-1]): x for arm, x in rates.items() if f"{kind}, full" in arm}
        assert min(full, key=full.get) == study.Study().lr
    for budget in study.Study().budgets:  # a size has the same flops, grown or from scratch
        part = f"family {budget}"
        for number, sizes in enumerate(study.Study().family[1:], start=1):
            both = [f"part == '{part}' and arm == '{how}, {sizes.d_model}'" for how in FAMILIES]
            grown, scratch = (curves.query(query).groupby("seed") for query in both)
            began = number * (budget - study.Study().decay)
            before = curves.query(f"{both[0]} and step == {began}").set_index("seed")["flops"]
            spent = grown["flops"].last() - before
            assert spent.to_numpy() == pytest.approx(scratch["flops"].last(), rel=0.05)


def test_the_guide_says_what_is_stored():
    ends = stored()["ends"]
    guide = (KEPT.parents[1] / "docs" / "growth.md").read_text("utf-8")
    said = guide[guide.index("A [second study]") :].split("\n\n")[0]

    def less(part, arm, other_arm="own"):
        return abs(report.difference(ends, part, arm, other_arm)[0])

    alike = [
        *(less("plain", arm) for arm in ("pairs", "splits", "unequal", "GradMax")),
        *(less("gated", arm) for arm in ("pairs", "splits", "unequal")),
    ]
    figures = [less("gated", "small"), less("plain", "small"), max(alike)]
    figures += [less("gated", "copies"), less("plain", "copies")]
    figures += [less("family 400", "grown, 64", "scratch, 64")]
    for budget in (400, 200):
        arms = "grown, 64", f"{report.LONGER}64"
        mean, low, high = report.difference(ends, f"family {budget}", *arms)
        figures += [-mean, -high, -low]
    places = ends.query("part == 'layers' and arm != 'full'").groupby("arm")["loss"].mean()
    figures += [places.max() - places.min()]
    assert re.findall(r"\d\.\d{3}", said) == [f"{figure:.3f}" for figure in figures]
    # pairs whose difference is not significant, at equal flops
    apart = [("plain", "full", "own"), ("gated", "full", "own")]
    apart += [(f"family {n}", "grown, 32", f"{report.LONGER}32") for n in (200, 400)]
    for part, *arms in apart:
        _, low, high = report.difference(ends, part, *arms)
        assert low < 0 < high
    spent = ends.query("part == 'family 400'").groupby("arm")[["step", "flops"]].mean()
    spent["flops"] = (spent["flops"] / 1e9).round()
    assert spent.loc["grown, 64"].tolist() == [1000, 368]
    assert spent.loc["scratch, 64"].tolist() == [400, 275]
    verdicts = dict(report.verdicts(stored(), study.Study()))
    assert (sum(verdicts.values()), len(verdicts)) == (11, 19)


def test_intervals_are_students():
    rows = [
        {"part": "x", "arm": arm, "seed": seed, "loss": loss}
        for arm, losses in {"a": (1.0, 2.0, 4.0), "b": (0.5, 1.0, 2.5)}.items()
        for seed, loss in enumerate(losses)
    ]
    mean, low, high = report.difference(pd.DataFrame(rows), "x", "a", "b")
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
