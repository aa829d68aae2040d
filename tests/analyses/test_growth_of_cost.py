"""Tests of the benchmark of growing costs: the sizes of its calls, and its exponents."""

import pandas as pd
import pytest
import torch
from common import run_script

from analyses.benchmarks import growth_of_cost as bench
from attn_only_lens import expose_neuron_heads


class Here:
    """A pool that runs in this process; another process takes seconds to start."""

    def __init__(self, *sizes, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    Pool = __init__

    def apply(self, function, args):
        return function(*args)


@pytest.fixture
def in_this_process(monkeypatch):
    context = Here()
    context.Pool = Here
    context.set_forkserver_preload = list
    monkeypatch.setattr(bench, "get_context", lambda method: context)


@pytest.mark.usefixtures("in_this_process")
def test_smoke(tmp_path):
    run_script(bench.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "growth_of_cost.md").read_text("utf-8")
    rows = pd.read_csv(tmp_path / "growth_of_cost.csv")
    assert set(rows["call"]) == set(bench.CALLS)
    assert (rows["seconds"] > 0).all()
    sites = rows[rows["axis"] == "sites"].set_index("call")
    for call in ("activation_patch", "attribution", "discover", "neuron_statistics"):
        assert sites.loc[call, "counted sites"] == sites.loc[call, "size"]
        assert f"| {call} | sites |" in page
    assert (tmp_path / "growth_of_cost.svg").exists()
    assert (tmp_path / "growth_of_cost.run.json").exists()


def test_sites_of_a_sweep_are_those_that_a_patch_can_change():
    point = bench.Point("activation_patch", tokens=16, sites=40)
    # In float32, the effect of a patch may be rounded to zero.
    with expose_neuron_heads(bench.bridge_of("cpu", smoke=True).to(torch.float64)) as model:
        sites = bench.some_sites(point, model.cfg)
        assert len(sites.heads) * len(sites.positions) == 40
        assert min(sites.positions) == point.first
        contrast = bench.contrast_of(point, model.cfg.d_vocab, "cpu")
        scores = bench.activation_patch(model, contrast, sites=sites, work=bench.QUIET)
    frame = scores.to_frame()
    first_layer = frame["name"].str.startswith("L0N")
    assert first_layer.sum() == 20
    assert (frame.loc[first_layer, "value"] != scores.corrupted_value).all()


def test_costs_far_away_continue_the_line_or_the_power_law():
    sizes = pd.Series([10, 1000, 10_000])
    assert bench.at_far(sizes, 7.0 + 2.0 * sizes) == pytest.approx(7.0 + 2.0 * bench.FAR)
    assert bench.at_far(sizes, 0.5 * sizes**2.0) == pytest.approx(0.5 * float(bench.FAR) ** 2)
    assert bench.at_far(sizes, pd.Series([5.0, 5.0, 4.0])) == 4.0
