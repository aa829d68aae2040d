"""Tests of composition scores against dense float64 matrices from the source's raw weights."""

import copy
import math

import pytest
import torch
from common import D_MLP, N_LAYERS, tokens
from dense_heads import Dense
from models import build

from attn_only_lens import Bilinear, calibrate, circuits, convert
from attn_only_lens import expose_neuron_heads as expose
from attn_only_lens import patching as p
from attn_only_lens.circuits.weights._composition import scores, writer_factors
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.errors import InputError
from attn_only_lens.models.norms import Norm

EXACT = 1e-12  # scores lie in [0, 1], and each has a few hundred roundings of float64
FAMILIES = ["gelu", "rms", "rms_pre", "ln_pre", "no_norm", "llama", "grouped", "silu_gated"]
FAMILIES += [
    "parallel",
    "parallel_gated",
    "norms_before_and_after",
    "post_norm",
    "gemma",
    "qk_norm",
]
D_MODEL = 26


def taken(frame):
    return frame.set_index(["writer", "reader"]).score


def of(source, layout):
    source = copy.deepcopy(source)
    return convert(source) if layout == "convert" else expose(source).model


NAMES = [f"L{layer}{head}" for layer in range(N_LAYERS) for head in ("H0", "H1", "N5", "N36")]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_pair_is_that_of_dense_matrices(name, fold):
    source = build(name)
    dense = Dense(source, fold)
    tables = {kind: dense.table(["embed", *NAMES], NAMES, kind) for kind in ("q", "k", "v")}
    for layout in ("convert", "expose"):
        model = of(source, layout)
        for kind, expected in tables.items():
            got = circuits.composition(model, ["embed", *NAMES], NAMES, kind, fold_norms=fold)
            assert list(got.columns) == [
                "writer", "reader", "kind", "score", "ratio_to_baseline", "note",
            ]  # fmt: skip
            assert set(taken(got).index) == set(expected.index)
            assert (taken(got) - expected).abs().max() < EXACT
            assert (got.ratio_to_baseline - got.score * math.sqrt(D_MODEL)).abs().max() < EXACT
            if kind == "k":
                keys = got[got.reader.str.contains("N")]
                assert (keys.score == 0).all()
                assert keys.note.str.contains("zero by construction").all()
                assert (got[got.reader.str.contains("H")].note == "").all()
    # Controls: another kind, or the norms the other way (folded or not), gives other scores.
    assert (tables["v"] - tables["q"]).abs().max() > 1e-2
    if name not in ("no_norm", "rms_pre"):
        control = Dense(source, not fold).table(["embed", *NAMES], NAMES, "v")
        assert (tables["v"] - control).abs().max() > 1e-2


@pytest.mark.parametrize("centres", [True, False])
def test_a_norm_is_a_matrix_from_either_side(centres):
    """The product of an output and an input matrix is the same with the norm in either one."""
    w, W, o = (torch.randn(shape, dtype=torch.float64) for shape in ((7,), (7, 5), (3, 7)))
    norm = Norm(w, centres)
    centre = torch.eye(7, dtype=torch.float64) - (1 / 7 if centres else 0)
    torch.testing.assert_close(norm.before(W), centre @ torch.diag(w) @ W)
    torch.testing.assert_close(norm.after(o), o @ centre @ torch.diag(w))
    torch.testing.assert_close(norm.after(o) @ W, o @ norm.before(W))


@pytest.mark.parametrize("name", ["gelu", "llama", "no_norm"])
@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_between_attention_heads_it_is_transformer_lens_own(name, kind):
    source = build(name)
    reference = source.all_composition_scores(kind.upper()).detach()
    model = convert(source)
    got = taken(circuits.composition(model, p.heads(), p.heads(), kind, fold_norms=False))
    n = source.cfg.n_heads
    assert len(got) == 3 * n * n
    for (writer, reader), score in got.items():
        (i, h), (j, g) = ([int(x) for x in head[1:].split("H")] for head in (writer, reader))
        assert abs(score - reference[i, h, j, g]) < 1e-10  # TransformerLens uses an SVD
    # TransformerLens has no score of an attention head with the neurons of its own layer; we do.
    assert len(circuits.composition(model, "L1H0", ["L1N5", "L0N5", "L1H1"], "q")) == 1


def test_folding_norms_is_loading_with_them_folded():
    source = build("gelu")
    folded = copy.deepcopy(source)
    how = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    folded.load_and_process_state_dict(source.state_dict(), fold_ln=True, **how)
    got, twin = (
        taken(circuits.composition(convert(m), NAMES, NAMES, "q")) for m in (source, folded)
    )
    reference = folded.all_composition_scores("Q").detach()
    # TransformerLens folds in float32.
    assert abs(got["L0H1", "L2H0"] - reference[0, 1, 2, 0]) < 1e-6
    assert (got - twin).abs().max() < 1e-6
    unfolded = taken(circuits.composition(convert(source), NAMES, NAMES, "q", fold_norms=False))
    assert (unfolded - twin).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "parallel"])
@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_the_largest_of_all(name, kind):
    source = build(name)
    model, dense, k = convert(source), Dense(source, fold=True), 53
    everyone = list(dense.reads)
    readers = [r for r in everyone if kind in dense.reads[r]]
    every = dense.table(["embed", *everyone], readers, kind).sort_values(ascending=False)
    for block in (3, 29, 1024):
        got = circuits.top_compositions(model, k, kind, block=block)
        assert got.attrs["pairs"] == len(every)
        assert abs(got.score.to_numpy() - every.to_numpy()[:k]).max() < EXACT
        assert (taken(got) - every.reindex(taken(got).index)).abs().max() < EXACT
        assert taken(got).index.is_unique
        assert got.score.is_monotonic_decreasing
        # Control: the next score is below the last one listed.
        assert every.iloc[k] < got.score.iloc[-1]


def test_more_than_there_are_is_all_there_are():
    model = convert(build("gelu"))
    got = circuits.top_compositions(model, 10**6, "v", p.heads(0), p.neuron_heads([0, 2]))
    assert len(got) == 2 * 2 * D_MLP
    grid = taken(circuits.composition(model, p.heads(0), p.neuron_heads([0, 2]), "v"))
    assert (taken(got) - grid.reindex(taken(got).index)).abs().max() < EXACT


def test_the_largest_keeps_the_largest_whatever_comes_first():
    scores = torch.rand(31, 17, generator=torch.Generator().manual_seed(0))
    for rows in (scores, scores.flip(0)):
        largest = LargestScores(13)
        for start in range(0, 31, 5):
            largest.add(rows[start : start + 5].clone(), (start, 0))
        assert torch.equal(largest.values, scores.flatten().topk(13).values)
        assert torch.equal(rows[largest.pairs[:, 0], largest.pairs[:, 1]], largest.values)


@pytest.mark.parametrize("name", ["gelu", "llama", "gemma"])
def test_virtual_weights_are_the_product(name):
    source = build(name)
    model, dense = convert(source), Dense(source, fold=True)
    for writer, reader, kind in [
        ("L0H1", "L2H0", "q"), ("L0H1", "L2H0", "k"), ("L0H1", "L2H0", "v"), ("L1H0", "L1N5", "q"),
        ("embed", "L1H1", "q"), ("embed", "L1N5", "v"),
    ]:  # fmt: skip
        got = circuits.virtual_weights(model, writer, reader, kind)
        expected = dense.writes[writer] @ dense.reads[reader][kind]
        torch.testing.assert_close(got.AB, expected, rtol=1e-10, atol=1e-12)
        assert got.mdim <= source.cfg.d_head
    W_out, norm = source.blocks[0].mlp.W_out[7], source.blocks[2].ln2.w
    column = norm * (source.blocks[2].mlp.W_gate if name != "gelu" else source.W_in[2])[..., :, 11]
    if name == "gelu":
        column = column - column.mean()
    if name == "gemma":
        W_out = W_out * source.blocks[0].ln2_post.w
    one = circuits.virtual_weights(model, "L0N7", "L2N11", "q")
    assert one.shape == (1, 1)
    assert abs(one.AB.item() - (W_out @ column).item()) < 1e-10
    assert circuits.virtual_weights(model, "L0N7", "L2H1", "v").shape == (1, D_MODEL)


@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_heads_that_share_a_neuron(name):
    source = build(name)
    how = {"calibration": calibrate(source, tokens())} if name == "llama" else {}
    model = convert(source, gate=Bilinear(4, **how))
    whole = circuits.composition(model, "L0N5", "L1N7", "q").score.item()
    assert abs(whole - Dense(source, True).score("L0N5", "L1N7", "q")) < EXACT
    stack = model.neuron_heads
    norm = source.blocks[1].ln2.w
    for j in range(4):
        one = circuits.virtual_weights(model, f"L0N5.{j}", f"L1N7.{j}", "q").AB.item()
        read = norm * stack.W_Q[1, 7 * 4 + j, :, 0]
        read = read - read.mean() if name == "gelu" else read
        assert abs(one - (stack.W_O[0, 5 * 4 + j, 0] @ read).item()) < 1e-10
        slope = model.blocks[3].attn.gate.b[j]
        score = circuits.composition(model, f"L0N5.{j}", f"L1N7.{j}", "q").score.item()
        assert abs(score - (whole if slope else 0.0)) < EXACT


def test_random_heads_score_as_the_baseline_says():
    """The mean of ratio² over random weights is 1 at any rank; aligned heads exceed 1.5."""
    generator = torch.Generator().manual_seed(0)
    d_model = 101
    for rank in (1, 13):
        n = 200 if rank == 1 else 60
        first, second = (
            writer_factors(_factored(n, d_model, rank, generator), tuple("x" * n)) for _ in "ab"
        )
        ratio = scores(first, second) * math.sqrt(d_model)
        # cos² has variance 2 / d². Over n² pairs of n vectors a side, 5 standard deviations of the
        # mean are 5 √(2 / n²) = 0.04 for vectors, and less for matrices, whose scores vary less.
        assert abs(ratio.square().mean() - 1) < 0.04
        aligned = scores(first, first).diagonal() * math.sqrt(d_model)
        assert aligned.min() > 1.5
    model = convert(build("no_norm"))
    frame = circuits.composition(model, p.neuron_heads(0), p.neuron_heads([1, 2]))
    assert abs(frame.ratio_to_baseline.pow(2).mean() - 1) < 0.15


def _factored(n, d_model, rank, generator):
    from transformer_lens import FactoredMatrix

    A, B = (
        torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        for shape in ((d_model, rank), (rank, d_model))
    )
    return FactoredMatrix(A, B)


def test_zero_weights_score_zero_and_broken_ones_are_refused():
    source = build("gelu", dtype=torch.float32)
    with torch.no_grad():
        source.blocks[0].mlp.W_out[5] = 0.0
        source.blocks[0].mlp.W_out[6] *= 1e-25  # its square underflows in float32
    got = circuits.composition(convert(source), ["L0N5", "L0N6"], "L1N7")
    expected = Dense(source.double(), True).score("L0N6", "L1N7", "v")
    assert got.score[0] == 0.0
    assert abs(got.score[1] - expected) < 1e-6
    model = convert(source)
    with torch.no_grad():  # set after the conversion, because convert refuses such weights
        model.blocks[1].attn.W_out[5, 3] = float("nan")
        model.W_E[7, 3] = float("inf")
    for writers in ("L0N5", "embed"):
        with pytest.raises(InputError, match="not finite"):
            circuits.top_compositions(model, 3, "v", writers, "L1N7")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    source = build("llama", dtype=dtype)
    got = taken(circuits.composition(convert(source), NAMES, NAMES, "q"))
    expected = Dense(source.double(), True).table(NAMES, NAMES, "q")
    assert (got - expected).abs().max() < 1e-6


def test_what_is_refused():
    model = convert(build("gelu"))
    with pytest.raises(InputError, match=r"got kind='o'"):
        circuits.composition(model, "L0H0", "L1H0", "o")
    for writer, reader in [("L1H0", "L0N5"), ("L1N5", "L1H0"), ("L1H0", "L1H1"), ("L1N5", "L1N6")]:
        for call in (circuits.composition, circuits.virtual_weights):
            with pytest.raises(InputError, match="expected a reader after the writer"):
                call(model, writer, reader, "v")
    with pytest.raises(InputError, match="zero by construction"):
        circuits.virtual_weights(model, "L0H0", "L1N5", "k")
    with pytest.raises(InputError, match="zero by construction"):
        circuits.top_compositions(model, 3, "k", p.heads(), p.neuron_heads())
    with pytest.raises(InputError) as caught:
        circuits.top_compositions(model, 0, block=True)
    assert len(caught.value.reasons) == 2
    with pytest.raises(InputError, match="L9H0"):
        circuits.composition(model, ["embed", "L9H0"], "L1H0")
    with pytest.raises(InputError, match="no neuron-heads"):
        circuits.composition(build("gelu"), "L0H0", "L1H0")
    parallel = convert(build("parallel"))
    with pytest.raises(InputError, match="in parallel"):
        circuits.virtual_weights(parallel, "L1H0", "L1N5", "q")


def test_a_grid_that_would_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("attn_only_lens.circuits.weights._composition._MOST_PAIRS", 100)
    with pytest.raises(InputError, match="use top_compositions"):
        circuits.composition(convert(build("gelu")), p.heads(), p.neuron_heads())
