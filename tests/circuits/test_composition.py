"""Tests of composition scores against dense float64 matrices from the original's raw weights."""

import math

import bridges
import pytest
import torch
from dense_heads import FAMILIES, Dense, original

from attn_only_lens import Bilinear, circuits, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.gates import bilinear_gate

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
EXACT = 1e-12  # scores lie in [0, 1], and each has a few hundred roundings of float64
NAMES = [f"L{layer}{head}" for layer in (0, 1) for head in ("H0", "H1", "N5", "N36")]
COLUMNS = ["writer", "reader", "kind", "score", "ratio_to_baseline", "note"]


def model_of(family, state="plain"):
    bridge = bridges.bridged(original(family))
    bridges.STATES[state](bridge)
    return bridges.exposed_copy(bridge)


@pytest.fixture(scope="module")
def model():
    return model_of("gpt2")


def composed(*args, **options):
    return circuits.composition(*args, **options).frame


def virtual_weights(model, writer, reader, kind):
    return circuits.composition(model, writer, reader, kind).virtual_weights()


def taken(frame):
    return frame.set_index(["writer", "reader"]).score


# TransformerLens folds nothing into the weights that are read here, whatever names hooks have.
CASES = [*((family, "plain", True) for family in FAMILIES), ("gpt2", "names", True)]
CASES += [("gemma2", "plain", False)]


@pytest.mark.parametrize(("family", "state", "fold"), CASES)
def test_every_pair_is_that_of_dense_matrices(family, state, fold):
    dense, model = Dense(family, fold), model_of(family, state)
    tables = {kind: dense.table(["embed", *NAMES], NAMES, kind) for kind in ("q", "k", "v")}
    for kind, expected in tables.items():
        got = composed(model, ["embed", *NAMES], NAMES, kind, fold_norms=fold)
        assert list(got.columns) == COLUMNS
        assert set(taken(got).index) == set(expected.index)
        assert (taken(got) - expected).abs().max() < EXACT
        baseline = math.sqrt(dense.cfg.hidden_size)
        assert (got.ratio_to_baseline - got.score * baseline).abs().max() < 1e-10
        if kind == "k":
            keys = got[got.reader.str.contains("N")]
            assert (keys.score == 0).all()
            assert keys.note.str.contains("zero by construction").all()
            assert (got[got.reader.str.contains("H")].note == "").all()
    # Controls: another kind, or the norms the other way (folded or not), gives other scores.
    assert (tables["v"] - tables["q"]).abs().max() > 1e-2
    control = Dense(family, not fold).table(["embed", *NAMES], NAMES, "v")
    assert (tables["v"] - control).abs().max() > 1e-3


def test_the_largest_of_all():
    model, dense, kind, k = model_of("neox"), Dense("neox"), "v", 53
    everyone = list(dense.reads)
    readers = [name for name in everyone if kind in dense.reads[name]]
    every = dense.table(["embed", *everyone], readers, kind).sort_values(ascending=False)
    for block in (3, 1024):
        largest = circuits.composition(model, kind=kind, top=k, block=block)
        assert largest.n_pairs == len(every)
        got = largest.frame
        assert abs(got.score.to_numpy() - every.to_numpy()[:k]).max() < EXACT
        assert (taken(got) - every.reindex(taken(got).index)).abs().max() < EXACT
        assert taken(got).index.is_unique
        assert got.score.is_monotonic_decreasing
        assert every.iloc[k] < got.score.iloc[-1]  # control


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_virtual_weights_are_the_product(family):
    model, dense = model_of(family), Dense(family)
    heads = [("L0H1", "L1H0", kind) for kind in "qkv"]
    for writer, reader, kind in [*heads, ("L1H0", "L1N5", "q"), ("embed", "L1N5", "v")]:
        got = virtual_weights(model, writer, reader, kind)
        expected = dense.writes[writer] @ dense.reads[reader][kind]
        torch.testing.assert_close(got.AB, expected, rtol=1e-10, atol=1e-12)
        assert got.mdim <= 14
    # A neuron's output is one row: the outer product of `Dense` without the vector that it reads.
    one = virtual_weights(model, "L0N7", "L1N11", "q")
    row = dense.writes["L0N7"] / dense.reads["L0N7"]["v"]
    torch.testing.assert_close(one.AB, row[:1] @ dense.reads["L1N11"]["q"], rtol=1e-9, atol=1e-12)
    assert virtual_weights(model, "L0N7", "L1H1", "v").shape == (1, 26)
    # The row says which pair it is.
    pairs = circuits.composition(model, ["embed", "L0H1"], ["L1H0", "L1N5"], "q")
    for row, pair in enumerate(pairs.frame[["writer", "reader"]].to_numpy()):
        assert torch.equal(pairs.virtual_weights(row).AB, virtual_weights(model, *pair, "q").AB)


def test_neurons_of_bilinear_gates(model):
    """Neuron 4 i + j writes w_j, and its query reads b_j, times neuron i of the original."""
    split = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(4))
    score = composed(model, "L0N5", "L1N7", "q").score.item()
    weight = virtual_weights(model, "L0N5", "L1N7", "q").AB.item()
    gate = bilinear_gate("gelu_new", 4)
    for i, j in ((0, 0), (1, 2), (3, 1)):
        names = f"L0N{20 + i}", f"L1N{28 + j}"
        got = virtual_weights(split, *names, "q").AB.item()
        assert got == pytest.approx(gate.w[i] * gate.b[j] * weight, rel=1e-12)
        assert abs(composed(split, *names, "q").score.item() - score) < EXACT


def test_zero_weights_score_zero_and_broken_ones_are_refused():
    bridge = bridges.boot("gpt2", torch.float32)
    expected = composed(bridges.exposed_copy(bridge), "L0N6", "L1N7").score[0]
    W_out = bridge.original_model.transformer.h[0].mlp.c_proj.weight
    with torch.no_grad():
        W_out[5] = 0.0
        W_out[6] *= 1e-25  # its square underflows in float32
    broken = expose_neuron_heads(bridge).model
    got = composed(broken, ["L0N5", "L0N6"], "L1N7")
    assert got.score[0] == 0.0
    assert got.score[1] == pytest.approx(expected, abs=1e-6) != 0
    with torch.no_grad():
        bridge.original_model.transformer.wte.weight[7, 3] = float("inf")
    with pytest.raises(InputError, match="not finite"):
        composed(broken, "embed", "L1N7", top=3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: composed(m, "L1H0", "L0N5"), "a reader after the writer"),
        (lambda m: virtual_weights(m, "L0H0", "L1N5", "k"), "zero by construction"),
        (lambda m: composed(m, p.Sites("heads", -1)), "got positions=-1; weights have no pos"),
        (lambda m: virtual_weights(model_of("neox"), "L1H0", "L1N5", "q"), "in parallel"),
    ],
)
def test_what_is_refused(model, call, match):
    with pytest.raises(InputError, match=match):
        call(model)


def test_weights_that_are_not_those_of_the_modules_are_refused(monkeypatch):
    exposed = model_of("gpt2")
    kind = type(exposed.blocks[1].attn)
    right = kind.W_Q
    with monkeypatch.context() as patch:
        patch.setattr(kind, "W_Q", property(lambda self: right.fget(self).flip(1)))
        with pytest.raises(InputError, match=r"layer 1: W_Q is not the matrix that its attn\.q"):
            composed(exposed, "L0H0", "L1H0", "q")
    exposed.blocks[1].ln2.register_forward_hook(lambda module, args, output: output + 3.0)
    with pytest.raises(InputError, match="layer 1: its ln2 is neither LayerNorm nor RMSNorm"):
        composed(exposed, "L0H0", "L1H0", "q")
    composed(exposed, "L0H0", "L1H0", "q", fold_norms=False)
