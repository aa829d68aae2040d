"""Tests that the benchmarks run, and that their counts are right."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch
from common import needs_hooked_transformer, run_script
from typer.testing import CliRunner

from analyses.benchmarks import (
    bench_atlas,
    bench_convert,
    bench_growth,
    bench_paths,
    bench_peak_memory,
    bench_results,
)

pytestmark = needs_hooked_transformer


@pytest.fixture
def in_this_process(monkeypatch):
    """Run a benchmark's subprocesses in this process, because imports take seconds in a new one."""

    start = subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:
            return start(command, **options)
        script = import_module(command[2])
        result = run_script(script.main, command[3:])
        return subprocess.CompletedProcess(command, 0, result.stdout)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_smoke(tmp_path):
    result = run_script(bench_convert.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "bench_convert.md").read_text()
    assert page.strip() in result.output
    for operation in bench_peak_memory.OPERATIONS:
        assert f"| {operation} |" in page
    assert "| convert(model, copy_weights=False) |" in page
    assert "| stock attention |" in page
    assert "| bilinear, 8 |" in page


def test_the_naive_way_computes_the_same_function():
    source = bench_peak_memory.model_of("cpu", smoke=True, act_fn="silu", n_layers=1)
    table = bench_convert.naive(source, 7, 1, "cpu").set_index("neurons of one layer as")
    assert (table["max error / max"] < 2e-6).all()
    # 4-byte floats: d_mlp * pos * 2, and d_mlp * pos * pos (the sink's column is dropped)
    assert table["pattern MiB"]["converted"] * 2**20 == 4 * 37 * 7 * 2
    assert table["pattern MiB"]["stock attention"] * 2**20 == 4 * 37 * 7 * 7


def test_the_bound_counts_the_flops_of_the_model():
    """The formula equals torch's flop counter."""
    from torch.utils.flop_counter import FlopCounterMode

    model = bench_peak_memory.model_of("cpu", smoke=True)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, 13), dtype=torch.long))
    counted = counter.get_total_flops()
    assert bench_convert.forward_flops(model.cfg, 13) == pytest.approx(counted, rel=1e-12)


def test_smoke_of_results(tmp_path):
    run_script(bench_results.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "bench_results.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    # float32 error relative to the largest effect: our values and AtP by plain hooks
    assert float(rows[4][-1]) < 2e-5


def test_smoke_of_an_atlas(tmp_path):
    result = run_script(bench_atlas.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "bench_atlas.md").read_text("utf-8")
    assert page.strip() in result.output
    forward, _, together = (
        [float(cell) for cell in line.split("|")[2:-1]]
        for line in page.splitlines()
        if line.startswith(("| forward", "| gates", "| together"))
    )
    assert together[0] > forward[0] > 0
    assert together[1] > forward[1] > 0


def test_smoke_of_paths(tmp_path):
    run_script(bench_paths.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "bench_paths.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 5
    assert all(float(row[-1]) < 2e-5 for row in rows)  # float32, relative to both metrics' sum


def test_smoke_of_growth(tmp_path, monkeypatch):
    app = bench_growth.typer.Typer()
    app.command()(bench_growth.main)
    # In this process: another one takes seconds to start. It would be called with `--peak`.
    assert float(CliRunner().invoke(app, ["--smoke", "--peak", "grow"]).output) >= 0
    monkeypatch.setattr(bench_growth, "peak_apart", bench_growth.peak)
    result = CliRunner().invoke(app, ["--smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "bench_growth.md").read_text("utf-8")
    assert page.strip() in result.output
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == list(bench_growth.CALLS)
    assert float(rows[-1][-2]) >= 0  # memory that was freed before is used again
    assert float(page.split(" by ")[-1].split()[0]) < 2e-6  # float32, relative to the largest logit


def test_a_device_that_is_not_there_is_refused():
    app = bench_paths.typer.Typer()
    app.command()(bench_paths.main)
    result = CliRunner().invoke(app, ["--smoke", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "torch has no 'cuda:99' here" in " ".join(result.output.split()).replace("│ ", "")
