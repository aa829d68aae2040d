"""Tests that the benchmarks run, that the compared methods agree, and that counts are right."""

import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer, run_script
from torch.utils.flop_counter import FlopCounterMode

from analyses.benchmarks import (
    bench_atlas,
    bench_convert,
    bench_growth,
    bench_patching,
    growth_of_cost,
    models,
)
from attn_only_lens import expose_neuron_heads

TASK = bench_patching.Task("scattered", "each", 7, 3)
EVERYWHERE = bench_patching.Task("every neuron", "all", 7, 3)


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Return a function that runs a benchmark's trial and returns its page; no process starts."""

    def run(benchmark):
        if hasattr(benchmark, "in_new_process"):
            monkeypatch.setattr(
                benchmark, "in_new_process", lambda call, *arguments, **_: call(*arguments)
            )
        result = run_script(benchmark.main, ["--smoke", "--out", str(tmp_path)])
        name = benchmark.__name__.rpartition(".")[2]
        page = (tmp_path / f"{name}.md").read_text("utf-8")
        assert page.strip() in result.output
        assert (tmp_path / f"{name}.run.json").exists()
        return page

    return run


def rows_of(page):
    """Return the cells of all rows of a page's tables, without headers."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    headers = {i - 1 for i, row in enumerate(rows) if row[0].strip() == "---"}
    return [
        [cell.strip() for cell in row] for i, row in enumerate(rows) if not {i, i - 1} & headers
    ]


@needs_hooked_transformer
def test_smoke_of_conversion(page_of):
    page = page_of(bench_convert)
    for row in (*bench_convert.OPERATIONS, "stock attention", "bilinear, 8"):
        assert f"| {row} |" in page


@needs_hooked_transformer
def test_smoke_of_growth(page_of):
    page = page_of(bench_growth)
    assert [row[0] for row in rows_of(page)] == list(bench_growth.CALLS)
    assert float(page.split(" by ")[-1].split()[0]) < 2e-6  # float32, relative to the largest logit


def test_smoke_of_an_atlas(page_of):
    forward, _, together = ([float(x) for x in row[1:]] for row in rows_of(page_of(bench_atlas)))
    assert together[0] > forward[0] > 0
    assert together[1] > forward[1] > 0


def test_smoke_of_patching(page_of, tmp_path):
    page_of(bench_patching)
    table = pd.read_csv(tmp_path / "bench_patching.csv")
    assert set(table["way"]) == set(bench_patching.WAYS)
    assert (table["difference"] <= bench_patching.TOLERANCE).all()
    assert (table["effect"] > 10 * bench_patching.TOLERANCE).all()


def test_smoke_of_growing_costs(page_of, tmp_path):
    page_of(growth_of_cost)
    rows = pd.read_csv(tmp_path / "growth_of_cost.csv")
    assert set(rows["call"]) == set(growth_of_cost.CALLS)
    sites = rows[rows["axis"] == "sites"].set_index("call")
    for call in ("activation_patch", "attribution", "discover", "corpus_statistics"):
        assert sites.loc[call, "counted sites"] == sites.loc[call, "size"]


@needs_hooked_transformer
def test_the_naive_way_computes_the_same_function():
    source = models.model_of("cpu", smoke=True, act_fn="silu", n_layers=1)
    table = bench_convert.naive(source, 7, 1, "cpu").set_index("neurons of one layer as")
    assert (table["max error / max"] < 2e-6).all()
    # 4-byte floats: d_mlp * pos * 2, and d_mlp * pos * pos (the sink's column is dropped)
    assert table["pattern MiB"]["converted"] * 2**20 == 4 * 37 * 7 * 2
    assert table["pattern MiB"]["stock attention"] * 2**20 == 4 * 37 * 7 * 7


@needs_hooked_transformer
def test_the_bound_counts_the_flops_of_the_model():
    model = models.model_of("cpu", smoke=True)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, 13), dtype=torch.long))
    counted = counter.get_total_flops()
    assert bench_convert.forward_flops(model.cfg, 13) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("task", [TASK, EVERYWHERE], ids=["scattered", "everywhere"])
def test_four_ways_to_patch_give_the_same_values(task):
    """All ways equal TransformerLens' hooks in float64; its own loop returns values in float32."""
    model = models.bridge_of("cpu", smoke=True).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # weights so large that every site has an effect
        random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(0.4 * random)
    pair = bench_patching.prompts(task, model.cfg.d_vocab, "cpu")
    sites = bench_patching.sites_of(task, model.cfg, 11)
    expected = bench_patching.hooks(model, *pair, sites)
    unpatched = bench_patching.metric_of(model, *pair)(model(pair[1]))
    assert ((expected - unpatched).abs() > 1e-6).all()  # the control: every site has an effect
    with expose_neuron_heads(model):
        ours = bench_patching.ours(model, *pair, sites)
    for result in (ours, bench_patching.skilled(model, *pair, sites)):
        # Logits are below 100: float64 rounds them by 1e-14, some hundred times over.
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    looped = bench_patching.loop(model, *pair, sites).double()
    torch.testing.assert_close(looped, expected, rtol=1e-7, atol=0)


def test_the_fit_separates_fixed_from_marginal_cost():
    rows = [
        {"sites": "s", "tokens": 7, "first": 3, "way": "ours", "round": turn, "n": n}
        | {"seconds": 2.0 + off + 0.5 * n, "bound": 0.25 * n, "expose": 1.0}
        | {"first_call": 10.0 + off + 0.5 * 11, "effect": 1.0, "difference": 0.0}
        for turn, off in enumerate((0.0, 3.0, 0.125))  # other processes slow down one of the rounds
        for n in (11, 31)
    ]
    [fit] = bench_patching.fit(pd.DataFrame(rows)).itertuples()
    assert (fit.marginal, fit.fixed, fit.bound, fit.tests) == (0.5, 2.125, 0.25, 8.0)


def test_costs_far_away_continue_the_line_or_the_power_law():
    sizes, far = pd.Series([10, 1000, 10_000]), float(growth_of_cost.FAR)
    assert growth_of_cost.at_far(sizes, 7.0 + 2.0 * sizes) == pytest.approx(7.0 + 2.0 * far)
    assert growth_of_cost.at_far(sizes, 0.5 * sizes**2.0) == pytest.approx(0.5 * far**2)
    assert growth_of_cost.at_far(sizes, pd.Series([5.0, 5.0, 4.0])) == 4.0
