"""The benchmark of composition runs, and counts what it says it counts."""

import bench_composition
import pytest
from bench_peak_memory import model_of
from common import needs_hooked_transformer
from typer.testing import CliRunner

from attn_only_lens import circuits, expose_neuron_heads

pytestmark = needs_hooked_transformer


def test_smoke(tmp_path):
    app = bench_composition.typer.Typer()
    app.command()(bench_composition.main)
    result = CliRunner().invoke(app, ["--smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "bench_composition.md").read_text()
    assert page.strip() in result.output
    assert "| v | 7 |" in page


@pytest.mark.parametrize("kind", ["v", "k"])
def test_the_bound_counts_the_products_of_pairs_in_order(kind):
    model = expose_neuron_heads(model_of("cpu", smoke=True)).model
    # Neurons read and write with rank 1, heads with d_head = 13, the embedding writes with d_model.
    rank = {"H": 13, "N": 1, "e": 26}
    frame = circuits.top_compositions(model, 10**6, kind)
    pairs = zip(frame.writer, frame.reader, strict=True)
    total = sum(rank[w[2] if w != "embed" else "e"] * rank[r[2]] for w, r in pairs)
    assert bench_composition.flops(model.cfg, kind) == 2 * 26 * total
