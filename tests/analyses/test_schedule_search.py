"""The search for growth schedules: flops, exact growth, halving, and what is stored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer, run_script
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from analyses.studies import schedule_report as report
from analyses.studies import schedule_search as search
from analyses.tools.study_files import t_interval
from analyses.tools.train_modular_addition import fast_logits, pairs, step
from attn_only_lens import grow

NAME = Path(search.__file__).stem
KEPT = Path(__file__).parents[2] / "analyses" / "results"
STUDY = search.SMOKE


def page_of(folder, flag=""):
    runs = pd.read_csv(folder / f"{NAME}.csv")
    settings = json.loads((folder / f"{NAME}.run.json").read_text("utf-8"))["settings"]
    return runs, report.page(runs, settings, flag)


@needs_hooked_transformer
def test_smoke(tmp_path):
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = run_script(search.main, ["--smoke", "--n-seeds", "2", *folders])
    runs, page = page_of(tmp_path, " --smoke")
    assert (tmp_path / f"{NAME}.md").read_text("utf-8") == page
    assert page.strip() in result.output
    check_searches(runs, STUDY)


def check_searches(runs, study):
    """Check which runs there are, and which of them halving kept."""
    halving = runs[runs["search"] == "halving"]
    counts = [len(halving[f"score_{rung}"].dropna()) for rung in range(3)]
    assert counts == [study.n_halving, study.n_halving // 3, study.n_halving // 9]
    for rung in (0, 1):
        left = halving[f"score_{rung + 1}"].notna()
        at_rung = halving[halving[f"score_{rung}"].notna()]
        assert halving.loc[left, f"score_{rung}"].max() < at_rung.loc[~left, f"score_{rung}"].min()
    searches = ("random", "halving", "re-draws")
    seeds = runs.loc[runs["search"].isin(searches), "seed"]
    assert seeds.is_unique
    assert not set(seeds) & set(runs.loc[runs["search"] == "evaluation", "seed"])
    ends = {tuple((search.schedule_of(row).stages)[-1]) for _, row in runs.iterrows()}
    assert ends == {study.space.full}


def test_both_searches_have_the_same_flops():
    study = search.Study()
    rungs = [study.n_halving / 3**rung for rung in range(3)]
    parts = np.diff([0, *search.RUNGS])
    assert sum(n * part for n, part in zip(rungs, parts, strict=True)) == pytest.approx(
        study.n_random
    )


@needs_hooked_transformer
def test_planned_flops_are_those_that_torch_counts():
    full = STUDY.steps * search.cost_of_step(STUDY.recipe(STUDY.space.full, 0))
    small = STUDY.steps * search.cost_of_step(STUDY.recipe(STUDY.small, 0))
    assert small < full / 2
    schedules = [*search.drawn(STUDY, 3, 3), STUDY.handmade()["early"]]
    for seed, schedule in enumerate(schedules):
        plan = search.Plan.of(STUDY, schedule)
        training = search.Trainer(STUDY, Path()).training(schedule, plan, seed)
        tokens, answers, trained = pairs(STUDY.recipe(schedule.start, seed))
        with FlopCounterMode(display=False) as counter:
            for _ in training.steps(plan.until(plan.flops)):
                step(training.model, training.optimizer, tokens[trained], answers[trained])
        assert counter.get_total_flops() == plan.flops
        assert len(training.history) == len(schedule.events)
        # All runs have the same budget, up to half a step.
        assert abs(plan.flops - full) <= max(plan.costs) / 2
        planned = sum(plan.cost_at(number) for number in range(sum(plan.steps)))
        assert planned == plan.flops


def sizes_of(model):
    return tuple(getattr(model.cfg, name) for name in search.SIZES)


@needs_hooked_transformer
@pytest.mark.parametrize("study", [STUDY, replace(search.Study(), modulus=7)])
def test_every_growth_of_every_schedule_is_exact(study):
    schedules = [*search.drawn(study, 20, 4), *study.handmade().values()]
    assert {schedule.init for schedule in schedules} == set(search.INITS)
    for seed, schedule in enumerate(schedules):
        recipe = study.recipe(schedule.start, seed)
        model, (tokens, *_) = recipe.model().double(), pairs(recipe)
        for before, after in zip(schedule.stages, schedule.stages[1:], strict=False):
            init, expansion = search.INITS[schedule.init], search.expansion(before, after)
            grown = grow(model, expansion, init=init, seed=seed).model
            assert sizes_of(grown) == after
            with torch.no_grad():
                logits, expected = fast_logits(grown, tokens), fast_logits(model, tokens)
            # float64, sums of at most 128 terms below 1
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-13)
            model = grown
        assert sizes_of(model) == study.space.full
        assert times(schedule) == sorted(times(schedule))


def times(schedule):
    return [when for when, _ in schedule.events]


@needs_hooked_transformer
def test_control_new_neurons_with_random_output_weights_change_the_function():
    recipe = STUDY.recipe(STUDY.small, 0)
    model, (tokens, *_) = recipe.model().double(), pairs(recipe)
    after = (STUDY.space.full[0], *STUDY.small[1:])
    grown = grow(model, search.expansion(STUDY.small, after), seed=0).model
    with torch.no_grad():
        torch.nn.init.normal_(grown.blocks[0].mlp.W_out[STUDY.small[0] :])
        assert (fast_logits(grown, tokens) - fast_logits(model, tokens)).abs().max() > 1e-3


@needs_hooked_transformer
def test_a_run_that_stops_at_a_rung_is_the_beginning_of_a_longer_run(tmp_path):
    schedule = next(s for s in search.drawn(STUDY, 9, 6) if len(s.events) == 2)
    parts, whole = (search.Trainer(STUDY, tmp_path / name) for name in ("parts", "whole"))
    scores = [parts.run("a", schedule, 5, rung) for rung in range(3)]
    at_once = whole.run("a", schedule, 5)
    assert [parts.run("a", schedule, 5, rung)["score_0"] for rung in range(3)] == [
        at_once["score_0"]
    ] * 3  # what has been done is read, and not done again
    for rung, row in enumerate(scores):
        for earlier in range(rung + 1):
            assert row[f"score_{earlier}"] == at_once[f"score_{earlier}"]
    assert scores[-1]["loss"] == at_once["loss"]
    assert scores[-1]["flops"] == at_once["flops"] > 2 * scores[1]["flops"]


class Known:
    """A trainer whose scores are known."""

    def __init__(self, table):
        self.table, self.spent = table, 0

    def run(self, name, schedule, seed, rung=2):
        known = {f"score_{i}": self.table[schedule][i] if i <= rung else np.nan for i in range(3)}
        return {"name": name, "seed": seed, "rung": rung, **known}


def test_halving_keeps_the_best_if_small_budgets_predict_and_the_worst_if_they_mislead():
    quality = np.random.default_rng(0).permutation(27)
    honest = Known({i: [q, q, q] for i, q in enumerate(quality)})
    misled = Known({i: [-q, -q, q] for i, q in enumerate(quality)})
    best, worst = (
        search.best(search.halved(known, range(27), 0), 2)[0] for known in (honest, misled)
    )
    assert best == f"halving-{quality.argmin()}"
    assert quality[int(worst.split("-")[1])] > 20


def test_a_score_is_the_mean_over_the_last_fifth():
    steps = np.arange(101)
    curve = pd.DataFrame({"step": steps, "flops": 3 * steps, "test_loss": 10.0 ** (-steps / 10)})
    # Checks of the whole budget: steps 85, 90, 95, 100; of a third: 30, but not 33.
    assert search.score(curve, 300, 5) == pytest.approx(-9.25)
    assert search.score(curve, 99, 5) == pytest.approx(-3.0)


def test_rank_correlation_and_its_interval():
    random = np.random.default_rng(2)
    pairs = random.normal(size=(40, 2)).cumsum(1)
    correlation, low, high = report.ranked(pairs)
    assert correlation == pytest.approx(spearmanr(*pairs.T).statistic)
    assert low < correlation < high
    # Fisher's interval is close to the bootstrap's.
    middle, half = np.arctanh(correlation), 1.96 / np.sqrt(37)
    assert np.arctanh([low, high]) == pytest.approx([middle - half, middle + half], abs=0.2)


def test_drawn_schedules_stay_in_the_space():
    space = search.Space()
    random = np.random.default_rng(1)
    schedules = [space.draw(random) for _ in range(300)]
    for schedule in schedules:
        assert schedule.stages[-1] == space.full
        for values, *column in zip(space.sizes, *schedule.stages, strict=True):
            assert set(column) <= set(values)
            assert sorted(column) == column
        assert all(a != b for a, b in zip(schedule.stages, schedule.stages[1:], strict=False))
        assert all(0.02 <= when <= 0.5 for when in times(schedule))
        stored = pd.Series({"schedule": json.dumps(search.asdict(schedule))})
        assert search.schedule_of(stored) == schedule
    assert {len(schedule.events) for schedule in schedules} >= {1, 2, 3}
    middle = [s for s in schedules if len({sizes[0] for sizes in s.stages}) == 3]
    assert middle  # some take an intermediate number of neurons


@pytest.mark.skipif(not (KEPT / f"{NAME}.csv").exists(), reason="the study has not been run")
def test_the_page_shows_its_tables():
    runs, page = page_of(KEPT)
    assert (KEPT / f"{NAME}.md").read_text("utf-8") == page
    study = search.Study()
    check_searches(runs, study)
    flops = runs[runs["search"] != "evaluation"].groupby("search")["flops"].sum()
    assert flops.max() / flops.min() < 1.01
    # The first row of the table of new seeds, by hand.
    evaluation = runs[runs["search"] == "evaluation"].set_index(["name", "seed"])["score_2"]
    mean, low, high = t_interval(evaluation["random search"] - evaluation["full"])
    assert f"{mean:.2f} [{low:.2f}, {high:.2f}]" in page
    assert len(evaluation["full"]) == study.n_seeds >= 10
