"""Tests that the four ways of the patching benchmark agree, and that its sites can matter."""

import json

import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer, run_script

from analyses.benchmarks import bench_patching as bench
from attn_only_lens import expose_neuron_heads

TASK = bench.Task("scattered", "each", 7, 3)
EVERYWHERE = bench.Task("every neuron", "all", 7, 3)
KINDS = ["bridge", pytest.param("hooked", marks=needs_hooked_transformer)]


def model_of(kind):
    """Return a small float64 model with weights so large that every site has an effect."""
    model = (bench.bridge_of if kind == "bridge" else bench.model_of)("cpu", smoke=True).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.4 * random)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", [TASK, EVERYWHERE], ids=["scattered", "everywhere"])
def test_four_ways_give_the_same_values(kind, task):
    """All ways equal TransformerLens' hooks in float64; its own loop returns values in float32."""
    model = model_of(kind)
    pair = bench.prompts(task, model.cfg.d_vocab, "cpu")
    sites = bench.sites_of(task, model.cfg, 11)
    expected = bench.hooks(model, *pair, sites)
    unpatched = bench.metric_of(model, *pair)(model(pair[1]))
    assert ((expected - unpatched).abs() > 1e-6).all()  # the control: every site has an effect
    with expose_neuron_heads(model):
        values = {"ours": bench.ours(model, *pair, sites)}
    values |= {"skilled": bench.skilled(model, *pair, sites)}
    for way, result in values.items():
        # Logits are below 100: float64 rounds them by 1e-14, some hundred times over.
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12, msg=way)
    looped = bench.loop(model, *pair, sites).double()
    torch.testing.assert_close(looped, expected, rtol=1e-7, atol=0)


def test_the_fit_separates_fixed_from_marginal_cost():
    rows = [
        {"model": "m", "sites": "s", "tokens": 7, "first": 3, "way": "ours", "round": turn, "n": n}
        | {
            "seconds": 2.0 + off + 0.5 * n,
            "bound": 0.25 * n,
            "expose": 1.0,
            "first_call": 10.0 + off + 0.5 * 11,
        }
        | {"effect": 1.0, "difference": 0.0}
        for turn, off in enumerate((0.0, 3.0, 0.125))  # other processes slow down one of the rounds
        for n in (11, 31)
    ]
    [fit] = bench.fit(pd.DataFrame(rows)).itertuples()
    assert (fit.marginal, fit.fixed, fit.bound, fit.tests) == (0.5, 2.125, 0.25, 8.0)


def test_a_way_with_other_values_is_an_error(monkeypatch):
    def wrong_way(model, clean, corrupted, sites):
        return bench.skilled(model, clean, corrupted, sites.assign(neuron=sites["neuron"] - 1))

    monkeypatch.setitem(bench.WAYS, "skilled", wrong_way)
    with pytest.raises(ValueError, match="skilled and ours differ by"):
        bench.measure(bench.bridge_of("cpu", smoke=True), TASK, 1, "cpu", smoke=True)


@pytest.mark.parametrize("kind", KINDS)
def test_smoke(tmp_path, kind):
    args = ["--smoke", "--rounds", "1", "--model", kind, "--out", str(tmp_path)]
    result = run_script(bench.main, args)
    page = (tmp_path / "bench_patching.md").read_text("utf-8")
    assert page.strip() in result.output
    table = pd.read_csv(tmp_path / "bench_patching.csv")
    assert set(table["way"]) == set(bench.WAYS)
    assert (table["difference"] <= bench.TOLERANCE).all()
    assert (table["effect"] > 10 * bench.TOLERANCE).all()
    run = json.loads((tmp_path / "bench_patching.run.json").read_text("utf-8"))
    assert run["settings"]["smoke"]
    assert set(run["sha256"]) == {f"bench_patching.{end}" for end in ("md", "csv", "svg")}
