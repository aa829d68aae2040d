"""Tests the nnsight benchmark, if nnsight is installed: all ways give the same values."""

import pytest
from common import run_script

pytest.importorskip("nnsight")
from analyses.benchmarks import bench_nnsight as bench


def test_smoke(tmp_path):
    run_script(bench.main, ["--smoke", "--rounds", "1", "--out", str(tmp_path)])
    page = (tmp_path / "bench_nnsight.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 5
    assert all(float(row[-1]) > 10 * float(row[-2]) for row in rows)  # effects, and differences
