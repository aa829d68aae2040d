"""The study of edge scores: AUROC by hand, scores against a cut, and the whole script, small."""

import math

import pandas as pd
import pytest
import torch
from tracr_edges import Edge
from tracr_edges_auroc import auroc, gradient_scores, graph_scores, main, metric_of, scores
from tracr_models import load_program

from attn_only_lens import convert
from attn_only_lens import patching as p
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="needs HookedTransformer: run with transformer-lens 3.9"
)


def test_auroc_is_the_share_of_pairs_in_order():
    assert auroc([3, 2, 1], [True, False, False]) == 1
    assert auroc([1, 2, 3], [True, False, False]) == 0
    assert auroc([5, 5, 5, 5], [True, False, True, False]) == 0.5
    # of (4, 3), (4, 2), (2, 3), (2, 2): right, right, wrong, a tie
    assert auroc([4, 3, 2, 2], [True, False, True, False]) == pytest.approx(2.5 / 4)
    assert math.isnan(auroc([1, 2], [True, True]))


def test_edges_into_the_output_are_what_parts_write_to_the_metric():
    """Written anew: what each part puts into the stream, through the unembedding."""
    program = load_program("pair_balance")
    tokens, expected, _ = next(program.batches())
    metric, model = metric_of(program, expected[3]), program.model
    found = graph_scores(convert(model, copy_weights=True), tokens[3], metric, patterns=True)
    _, cache = model.run_with_cache(tokens[3][None])
    weights = torch.zeros(tokens.shape[1], dtype=torch.float64)
    weights[[i + 1 for i, value in enumerate(expected[3]) if value is not None]] = 1
    W_U = model.unembed.W_U[:, 0]
    z = cache["z", 1][0, :, 1] @ model.blocks[1].attn.W_O[1]
    at = Edge("L1H1", "output", "in")
    assert found.get(at, 0.0) == pytest.approx(((z @ W_U) * weights).abs().sum().item(), abs=1e-9)
    post = cache["post", 1][0]
    of_neurons = (post * (model.blocks[1].mlp.W_out @ W_U) * weights[:, None]).abs().sum(0)
    for neuron, each in enumerate(of_neurons.tolist()):
        got = found.get(Edge(f"L1N{neuron}", "output", "in"), 0.0)
        assert got == pytest.approx(each, abs=1e-9)
    assert of_neurons.max() > 0.1


def test_scores_name_candidates_alone_and_false_edges_have_none():
    program = load_program("pair_balance")
    found = scores(program, n_inputs=2)
    candidates, true = set(program.candidates()), program.true_edges()
    for method in ("graph", "gradient edges", "value edges"):
        scored = {edge for edge, score in found[method].items() if score > 1e-6}
        assert scored
        assert scored <= candidates
        assert scored <= true  # in these programs what is no edge writes exact zeros
    assert {edge.side for edge in found["value edges"]} <= {"v", "in"}
    assert "k" in {edge.side for edge, score in found["graph"].items() if score > 1e-6}


def test_gradient_edges_are_first_order_patches():
    """Into the output, which is linear: the change of the metric by what the writer writes."""
    program = load_program("pair_balance")
    tokens, _, _ = next(program.batches())
    metric = p.custom(lambda logits: logits[0, -1, 0], name="last")
    found = gradient_scores(program.model, tokens[3], tokens[5], metric)
    _, one = program.model.run_with_cache(tokens[3][None])
    _, other = program.model.run_with_cache(tokens[5][None])
    moved = (other["post", 1] - one["post", 1])[0, -1]
    each = moved * (program.model.blocks[1].mlp.W_out @ program.model.unembed.W_U[:, 0])
    for neuron, change in enumerate(each.abs().tolist()):
        assert found[Edge(f"L1N{neuron}", "output", "in")] == pytest.approx(change, abs=1e-9)


def test_the_script_writes_a_table_in_which_edges_are_found(tmp_path):
    main(out=tmp_path, n_inputs=2, seed=0, smoke=True)
    frame = pd.read_csv(tmp_path / "tracr_edges_auroc.csv")
    assert set(frame["program"]) == {"hist", "pair_balance"}
    assert set(frame["edges"]) == {"all", "changing"}
    means = frame.groupby("method")["auroc"].mean()
    assert means["graph"] > 0.8
    assert abs(means["random"] - 0.5) < 0.05
    assert "| pair_balance |" in (tmp_path / "tracr_edges_auroc.md").read_text("utf-8")
