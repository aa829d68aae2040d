"""Tests of the study of growing graphs: counts by hand, conversion, and a complete stored table."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer

from analyses.studies import tracr_growth
from analyses.studies.tracr_edges import Edge
from analyses.studies.tracr_models import PROGRAMS, load_program
from attn_only_lens import convert

pytestmark = needs_hooked_transformer
STORED = Path(tracr_growth.__file__).parents[1] / "results" / "tracr_growth.csv"


def test_neurons_of_a_layer_become_one_node():
    edges = {
        Edge("embed", "L0N3", "in"), Edge("embed", "L0N5", "in"), Edge("L0N3", "L1H0", "q"),
        Edge("L0N5", "L1H0", "k"), Edge("L0H0", "L0N5", "in"), Edge("L0N3", "L1N3", "in"),
    }  # fmt: skip
    assert tracr_growth.with_whole_mlps(edges) == {
        Edge("embed", "L0MLP", "in"), Edge("L0MLP", "L1H0", "q"), Edge("L0MLP", "L1H0", "k"),
        Edge("L0H0", "L0MLP", "in"), Edge("L0MLP", "L1MLP", "in"),
    }  # fmt: skip
    assert tracr_growth.nodes_of(edges) == 6


def test_edges_into_the_output_are_what_parts_write_to_the_metric():
    """Written anew: what each part puts into the stream, through the unembedding."""
    program = load_program("pair_balance")
    tokens, expected, _ = next(program.batches())
    metric, model = tracr_growth.metric_of(program, expected[3]), program.model
    converted = convert(model, copy_weights=True)
    scores = tracr_growth.graph_scores(converted, tokens[3], metric)
    _, cache = model.run_with_cache(tokens[3][None])
    weights = torch.zeros(tokens.shape[1], dtype=torch.float64)
    weights[[i + 1 for i, value in enumerate(expected[3]) if value is not None]] = 1
    W_U = model.unembed.W_U[:, 0]
    z = cache["z", 1][0, :, 1] @ model.blocks[1].attn.W_O[1]
    edge = Edge("L1H1", "output", "in")
    assert scores.get(edge, 0.0) == pytest.approx(
        ((z @ W_U) * weights).abs().sum().item(), abs=1e-9
    )
    post = cache["post", 1][0]
    of_neurons = (post * (model.blocks[1].mlp.W_out @ W_U) * weights[:, None]).abs().sum(0)
    for neuron, size in enumerate(of_neurons.tolist()):
        got = scores.get(Edge(f"L1N{neuron}", "output", "in"), 0.0)
        assert got == pytest.approx(size, abs=1e-9)
    assert of_neurons.max() > 0.1


def test_the_script_counts_what_the_architecture_has(tmp_path):
    tracr_growth.main(out=tmp_path, n_inputs=2, smoke=True)
    frame = pd.read_csv(tmp_path / "tracr_growth.csv").set_index("program")
    for name, row in frame.iterrows():
        cfg = load_program(name).model.cfg
        parts = 2 + cfg.n_layers * cfg.n_heads
        assert row["nodes, neurons"] == parts + cfg.n_layers * cfg.d_mlp
        assert row["nodes, MLPs"] == parts + cfg.n_layers
        heads = [1 + layer * (cfg.n_heads + 1) for layer in range(cfg.n_layers)]
        before = [1 + layer * (cfg.n_heads + 1) + cfg.n_heads for layer in range(cfg.n_layers)]
        assert row["edges, MLPs"] == 3 * cfg.n_heads * sum(heads) + sum(before) + parts - 1 + (
            cfg.n_layers
        )
        assert row["error"] < 1e-12
        assert 0 < row["found and true"] <= row["found"] <= row["true, neurons"]
    assert "| pair_balance |" in (tmp_path / "tracr_growth.md").read_text("utf-8")


def test_a_wrong_conversion_is_seen(monkeypatch):
    """The control: an output weight changed by a thousandth is detected."""
    program, exact = load_program("frac_prevs"), tracr_growth.convert

    def off(model, copy_weights):
        converted = exact(model, copy_weights=copy_weights)
        with torch.no_grad():
            converted.unembed.W_U.mul_(1.001)
        return converted

    monkeypatch.setattr(tracr_growth, "convert", off)
    assert tracr_growth.error_of(program) > 1e-4


def test_the_stored_table_has_every_program():
    frame = pd.read_csv(STORED)
    assert frame["program"].tolist() == list(PROGRAMS)
    assert (frame["error"] < 1e-12).all()
    assert (frame["edges, neurons"] >= frame["edges, MLPs"]).all()
    assert (frame["found and true"] == frame["found"]).all()
