"""Tests of the study of edge scores: AUROC by hand, scores against a cut, and a small full run."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from analyses.studies.edge_attribution_patching import edge_attribution_patching
from analyses.studies.tracr_cuts import logits_without
from analyses.studies.tracr_edges import Edge
from analyses.studies.tracr_edges_auroc import METHODS, auroc, graph_scores, main, metric_of, scores
from analyses.studies.tracr_models import load_program
from attn_only_lens import convert
from attn_only_lens.circuits import score_edges
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

RESULTS = Path(__file__).parents[2] / "analyses" / "results"

pytestmark = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="needs HookedTransformer: run with transformer-lens 3.9"
)


def test_auroc_is_the_share_of_pairs_in_order():
    assert auroc([3, 2, 1], [True, False, False]) == 1
    assert auroc([1, 2, 3], [True, False, False]) == 0
    assert auroc([5, 5, 5, 5], [True, False, True, False]) == 0.5
    # (4, 3), (4, 2), (2, 3), (2, 2): right, right, wrong, a tie
    assert auroc([4, 3, 2, 2], [True, False, True, False]) == pytest.approx(2.5 / 4)
    assert math.isnan(auroc([1, 2], [True, True]))


def test_edges_into_the_output_are_what_parts_write_to_the_metric():
    """The edges into the output equal each part's output times the unembedding."""
    program = load_program("pair_balance")
    tokens, expected, _ = next(program.batches())
    metric, model = metric_of(program, expected[3]), program.model
    scores = graph_scores(convert(model, copy_weights=True), tokens[3], metric, patterns=True)
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


@pytest.fixture(scope="module")
def scored():
    """Return all edges of a program with two layers, with one input of each length."""
    program = load_program("pair_balance")
    return program, scores(program, per_length=1)


def test_scores_name_candidates_alone_and_false_edges_have_none(scored):
    program, scores = scored
    candidates, true = set(program.candidates()), program.true_edges()
    assert set(scores["two factors"]) == set(scores["exact cut"]) == candidates
    for method in METHODS:
        scored = {edge for edge, score in scores[method].items() if score > 1e-6}
        assert scored
        assert scored <= candidates
        assert scored <= true  # parts without a true edge write exact zeros in these programs
        assert method == "secants" or "k" in {edge.side for edge in scored}


def test_exact_cuts_are_those_of_hooks(scored):
    """Exact cuts equal those of `tracr_cuts.py`, which uses no neuron-heads, at reference zero."""
    program, _ = scored
    rows = [tokens[0] for tokens, _, _ in program.batches()][1::2]
    model = convert(program.model, copy_weights=True)
    how = {"to": ["zero"], "exact": 1000, "progress": False}
    edges = score_edges(model, rows, **how)
    assert len(edges) == len(program.candidates())
    expected, n_tokens = {}, sum(map(len, rows))
    for edge in program.candidates():
        moved = 0.0
        for row in rows:
            whole, cut = program.model(row[None]), logits_without(program.model, row[None], [edge])
            moved += float((cut - whole).detach().abs().amax(-1).sum())
        expected[edge] = moved / n_tokens
    for row in edges.itertuples():
        edge = Edge(row.writer, row.reader, "v" if row.kind == "value" else row.kind)
        assert row.exact == pytest.approx(expected[edge], abs=1e-12)
        if row.reader == "output":
            assert row.score == row.local == row.exact
    assert (edges["exact"] > 0.01).sum() > 5


def test_edge_attribution_patching_into_the_output_is_what_is_written():
    """Logits are linear in the stream: scores are the size of each part's output in a logit."""
    program = load_program("pair_balance")
    tokens, _, _ = next(program.batches())
    model = convert(program.model, copy_weights=True)
    nodes = [f"L1N{neuron}" for neuron in range(4)]
    scores = edge_attribution_patching(program.model, model, [tokens[:3]], nodes)
    _, cache = program.model.run_with_cache(tokens[:3])
    products = cache["post", 1] * (program.model.blocks[1].mlp.W_out @ program.model.W_U[:, 0])
    for neuron, size in enumerate(products.abs().sum((0, 1)).tolist()):
        assert scores[f"L1N{neuron}", "output", "in"] == pytest.approx(size, abs=1e-9)
    assert max(scores.values()) > 0.1


def test_the_script_writes_a_table_in_which_edges_are_found(tmp_path):
    main(out=tmp_path, per_length=1, seed=0, smoke=True)
    frame = pd.read_csv(tmp_path / "tracr_edges_auroc.csv")
    assert set(frame["program"]) == {"hist", "pair_balance"}
    assert set(frame["edges"]) == {"all", "changing"}
    means = frame.groupby("method")["auroc"].mean()
    assert means["two factors"] > 0.85
    assert abs(means["random"] - 0.5) < 0.05
    assert "| pair_balance |" in (tmp_path / "tracr_edges_auroc.md").read_text("utf-8")


def test_what_is_stored_finds_the_edges_of_every_program():
    frame = pd.read_csv(RESULTS / "tracr_edges_auroc.csv").query("edges == 'all'")
    wide = frame.pivot(index="program", columns="method", values="auroc")
    assert len(wide) == 7
    assert wide["two factors"].mean() >= 0.97
    # The maximum: four of its edges have no effect.
    assert wide["two factors"].drop("pair_balance").min() >= 0.97
