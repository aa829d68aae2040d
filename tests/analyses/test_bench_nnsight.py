"""The benchmark of nnsight, if that is installed: all ways give the same values."""

import pytest
from typer.testing import CliRunner

pytest.importorskip("nnsight")
from analyses.benchmarks import bench_nnsight as bench


def test_smoke(tmp_path):
    app = bench.typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, ["--smoke", "--rounds", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "bench_nnsight.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 5
    assert all(float(row[-1]) > 10 * float(row[-2]) for row in rows)  # effects, and differences
