"""Tests that the study of edge scores on trained models runs, and that its text is right."""

from pathlib import Path

import pandas as pd
import pytest
from common import needs_hooked_transformer

from analyses.studies import edges_against_cuts as study
from analyses.studies.edge_attribution_patching import edge_attribution_patching
from analyses.studies.tracr_cuts import logits_without
from analyses.studies.tracr_edges import Edge
from analyses.studies.tracr_models import load_program
from attn_only_lens import convert
from attn_only_lens.circuits import score_edges

KEPT = Path(__file__).parents[2] / "analyses" / "results"


@needs_hooked_transformer
def test_smoke(tmp_path):
    study.main(tmp_path, Path("nowhere"), n_prompts=2, smoke=True)
    rows = pd.read_csv(tmp_path / "edges_against_cuts.csv")
    assert set(rows["model"]) == {"modular_addition"}
    every = rows.query("kind == 'all' and reference == 'zero'").set_index("method")
    assert every["edges"].tolist() == [every["edges"].iloc[0]] * 2
    assert every.loc["two factors", "spearman"] > 0.9 > every.loc["EAP", "spearman"]
    page = (tmp_path / "edges_against_cuts.md").read_text("utf-8")
    assert f"| {every.loc['two factors', 'spearman']:.3f} |" in page


def test_the_guide_says_which_ranks_more_like_cuts_on_how_many_models():
    rows = pd.read_csv(KEPT / "edges_against_cuts.csv").query("kind == 'all'")
    wide = rows.query("reference == 'zero'").pivot(
        index="model", columns="method", values="spearman"
    )
    wins = int((wide["EAP"] > wide["two factors"]).sum())
    assert (wins, len(wide)) == (4, 6)
    assert wide.min().min() == pytest.approx(0.868, abs=5e-3)


@needs_hooked_transformer
def test_exact_cuts_are_those_of_hooks():
    """Against `tracr_cuts.py`, which knows of no neuron-heads: with a reference of zero alone."""
    program = load_program("pair_balance")
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


@needs_hooked_transformer
def test_edge_attribution_patching_into_the_output_is_what_is_written():
    """There the logits are linear: of one logit, the size of what each part puts into it."""
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
