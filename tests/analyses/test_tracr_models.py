"""Tests that compiled programs compute RASP's outputs in every form, and have the right edges.

Three oracles share no code with the tested code: the RASP interpreter's outputs and Tracr's own
logits, both stored with the programs, and edges derived by hand.
"""

import pytest
import torch
from common import needs_hooked_transformer

from analyses.benchmark import tracr_edges
from analyses.benchmark.tracr_cuts import logits_without
from analyses.benchmark.tracr_edges import Edge
from analyses.benchmark.tracr_models import PROGRAMS, load_program
from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = needs_hooked_transformer

ROUNDING = LOGIT_TOLERANCE[torch.float64]
# The number of true edges, and of those whose cut changes a logit.
COUNTS = {
    "detect_abc": (46, 46),
    "frac_prevs": (5, 5),
    "hist": (37, 31),
    "hist_so_far": (37, 31),
    "pair_balance": (16, 12),
    "reverse": (118, 87),
    "sort_unique": (39, 31),
}
# tokens == "x" is a neuron; the head attends to all earlier positions and averages that neuron.
BY_HAND = {
    ("embed", "L0N0", "in"),
    ("embed", "L1H0", "q"),
    ("embed", "L1H0", "k"),
    ("L0N0", "L1H0", "v"),
    ("L1H0", "output", "in"),
}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return load_program(request.param)


def error(program, actual, expected):
    """Return the error relative to the program's largest logit; on some inputs all logits are 0."""
    scale = max(x.abs().max() for x in program.tracr_logits)
    return ((actual - expected).abs().max() / scale).item()


def forms(program):
    """Yield the model and the package's versions of it, without hooks and with every hook live."""
    model = program.model
    attn_only = convert(model)
    yield "source", model
    yield "two blocks", attn_only
    yield "two blocks, hooks live", lambda tokens: attn_only.run_with_cache(tokens)[0]
    with expose_neuron_heads(model):
        yield "in place", model
        yield "in place, hooks live", lambda tokens: model.run_with_cache(tokens)[0]


@torch.no_grad()
def test_every_form_gives_what_the_interpreter_and_tracr_give(program):
    for form, run in forms(program):
        for tokens, expected, tracr_logits in program.batches():
            logits = run(tokens)
            assert program.agrees(logits, expected), form
            assert error(program, logits, tracr_logits) <= ROUNDING, form


def test_the_edges_of_a_program_worked_out_by_hand():
    assert load_program("frac_prevs").true_edges() == BY_HAND


def test_the_edges_are_those_of_the_weights(program):
    weights = {name: x.detach().numpy() for name, x in program.model.named_parameters()}
    edges = tracr_edges.true_edges(weights)
    labels = program.residual_labels
    axes = [[labels[axis] for axis in shared] for shared in edges.values()]
    assert program.edges[[*Edge._fields]].to_numpy().tolist() == [list(edge) for edge in edges]
    assert program.edges["axes"].tolist() == axes
    assert (len(edges), program.edges.changes_logits.sum()) == COUNTS[program.name]
    assert set(edges) < set(program.candidates())


@torch.no_grad()
def prepared(program):
    """Yield for each batch: tokens, expected outputs, where they are defined, and all logits."""
    for tokens, expected, _ in program.batches():
        defined = torch.tensor([[False, *(y is not None for y in ys)] for ys in expected])
        if defined.any():
            yield tokens, expected, defined, program.model(tokens)


def moves(program, cut, batches=None):
    """Yield for each batch: the largest |Δ logit| at defined outputs, and if outputs are right."""
    for tokens, expected, defined, whole in batches or prepared(program):
        logits = logits_without(program.model, tokens, cut)
        moved = (logits - whole)[defined].abs().max().item()
        yield moved, program.agrees(logits, expected)


def test_what_is_not_an_edge_carries_nothing(program):
    rest = set(program.candidates()) - program.true_edges()
    assert rest
    for moved, right in moves(program, rest):
        assert moved <= ROUNDING
        assert right


def test_every_edge_matters_or_is_marked_redundant(program):
    # A compiled head leaks about 1e-7; the smallest value in a program is about 1e-1.
    batches = list(prepared(program))
    for row in program.edges.itertuples():
        edge = Edge(row.writer, row.reader, row.side)
        effects = moves(program, {edge}, batches)
        if row.changes_output:
            assert any(not right for _, right in effects), edge
        elif row.changes_logits:
            seen = list(effects)
            assert max(moved for moved, _ in seen) > 1e-2, edge
            assert all(right for _, right in seen), edge
        else:
            assert all(moved < 1e-5 and right for moved, right in effects), edge


def test_a_list_with_a_wrong_edge_fails(program):
    used = program.edges[program.edges.changes_output & (program.edges.side != "in")]
    edge = Edge(*used[[*Edge._fields]].iloc[-1])
    candidates = set(program.candidates())
    wrong = Edge(edge.writer, edge.reader, {"q": "v", "k": "v", "v": "q"}[edge.side])
    listed = program.true_edges() - {edge} | {wrong}
    assert not all(right for _, right in moves(program, candidates - listed))
