"""Tests of QK and OV circuits and copying scores against dense vocabulary matrices."""

import bridges
import numpy as np
import pytest
import torch
from common import D_MLP, D_VOCAB
from dense_heads import Dense, original

from attn_only_lens import GeneralizedSiLU, circuits
from attn_only_lens.errors import InputError, UnsupportedCallError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
EXACT = 1e-11  # relative to the largest entry: some hundred roundings of float64
SOME = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]


def near(got, expected):
    got, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (got, expected))
    assert (got - expected).abs().max() <= EXACT * expected.abs().max()


def exposed(family, **options):
    return bridges.exposed_copy(bridges.bridged(original(family)), **options)


class Tables:
    """QK and OV matrices over the vocabulary, from the matrices of `Dense`."""

    def __init__(self, family, tokens=slice(None), fold=True):
        self.dense = Dense(family, fold)
        self.E = self.dense.writes["embed"][tokens]
        unembed = self.dense.unembed[:, tokens]
        self.U = unembed - unembed.mean(1, keepdim=True)

    def qk(self, name):
        read = self.E @ self.dense.reads[name]["q"]
        return read if "N" in name else read @ self.E.T

    def ov(self, name):
        return self.E @ self.dense.writes[name] @ self.U


@pytest.mark.parametrize("family", ["grouped", "gemma2"])
def test_circuits_are_those_of_dense_matrices(family):
    model, tables, part = exposed(family), Tables(family), Tables(family, SOME)
    for head in ("L1H1", "L1N5"):
        ov, qk = (
            circuits.token_circuit(model, head, "ov"),
            circuits.token_circuit(model, head, "qk"),
        )
        near(ov.matrix.AB, tables.ov(head))
        near(qk.matrix.AB, tables.qk(head))
        near(circuits.token_circuit(model, head, "ov", tokens=SOME).matrix.AB, part.ov(head))
        values = np.linalg.eigvals(tables.ov(head).numpy())
        values = values[np.argsort(-abs(values))][: ov.matrix.mdim]
        for value in ov.eigenvalues.numpy():
            assert abs(values - value).min() < 1e-8 * abs(values).max()
        frame = circuits.copying_scores(model, [head]).iloc[0]
        assert abs(frame.eigenvalue_sum - values.sum().real) < 1e-9 * abs(values).max()
        assert abs(frame.copying - values.sum().real / abs(values).sum()) < 1e-9
        for M, tokens in ((tables.ov(head), None), (part.ov(head), SOME)):
            scores = circuits.copying_scores(model, [head], tokens=tokens).iloc[0]
            assert abs(scores.cosine - float(M.trace() / M.norm())) < 1e-9
        # Control: without folding, the matrices differ.
        unfolded = circuits.token_circuit(model, head, "ov", fold_norms=False).matrix.AB
        near(unfolded, Tables(family, fold=False).ov(head))
        assert (unfolded - tables.ov(head)).abs().max() > 1e-2
    n_heads = tables.dense.cfg.num_attention_heads
    assert len(circuits.copying_scores(model)) == 2 * (n_heads + D_MLP)


def test_the_strongest_pairs():
    model, tables = exposed("llama"), Tables("llama")
    for head in ("L1H1", "L1N5"):
        every = tables.ov(head)
        for lowest in (False, True):
            top = circuits.token_circuit(model, head, "ov").top(29, lowest=lowest, block=5)
            expected = every.flatten().sort(descending=not lowest).values[:29]
            near(top["score"].to_numpy(), expected)
            near(every[top["read_token"], top["written_token"]], expected)
        assert top["read"].tolist() == [str(token) for token in top["read_token"]]
        part = circuits.token_circuit(model, head, "ov", tokens=SOME)
        assert set(part.top(1000)["read_token"]) == set(SOME)
    gate = circuits.token_circuit(model, "L1N5", "qk").top(3)
    assert gate["key"].tolist() == ["bias token"] * 3
    assert gate["key_token"].tolist() == [-1] * 3
    near(gate["score"].to_numpy(), tables.qk("L1N5")[:, 0].sort(descending=True).values[:3])


def test_generalized_silus_in_the_limit_of_a_large_stream():
    """A plain neuron whose gate is open adds a_1 a_2 times its query to its output."""
    a_1, a_2 = 0.4, -3.1
    made, gate, tables = original("gpt2"), GeneralizedSiLU(a_1, a_2), Tables("gpt2")
    for block in made.base_model.h:
        del block.mlp.act  # a module
        block.mlp.act = gate
    model = bridges.exposed_copy(bridges.bridged(made), gate=gate)
    for key in (f"L1N{neuron}" for neuron in range(0, D_MLP, 9)):
        q = tables.qk(key)[:, 0]
        opens = circuits.token_circuit(model, key, "qk").matrix.AB[:, 0] > 0
        assert torch.equal(opens, a_2 * q > 0)
        row = tables.dense.writes[key][0] / tables.dense.reads[key]["v"][0, 0]
        expected = torch.outer(a_1 * (a_2 * q).clamp(min=0), row @ tables.U)
        near(circuits.token_circuit(model, key, "ov").matrix.AB[opens], expected[opens])


def of_two_vocabularies(d_out):
    """Return a bridge whose output vocabulary is smaller or larger than its input vocabulary."""
    cfg = bridges.TransformerBridgeConfig(**bridges.NATIVE, d_vocab_out=d_out)
    bridge = bridges.TransformerBridge.boot_native(cfg, dtype=torch.float64)
    bridges.randomise(bridge.original_model)
    return bridge


def test_tokens_are_those_of_their_side():
    d_out, chosen, read, written = 31, [3, 37, 29, 40], [3, 37, 29, 40], [3, 29]
    raw = of_two_vocabularies(d_out)
    model = bridges.exposed_copy(raw)
    attn = raw.blocks[1].attn
    E, U = raw.W_E.detach()[read], raw.W_U.detach()[:, written]
    U = U - U.mean(1, keepdim=True)
    W_Q, W_K, W_V, W_O = (getattr(attn, name).detach()[1] for name in ("W_Q", "W_K", "W_V", "W_O"))
    how = {"tokens": chosen, "fold_norms": False}
    ov = circuits.token_circuit(model, "L1H1", "ov", **how)
    near(ov.matrix.AB, E @ W_V @ W_O @ U)
    pairs = ov.top(100)
    assert set(pairs["read_token"]) == set(read)
    assert set(pairs["written_token"]) == set(written)
    qk = circuits.token_circuit(model, "L1H1", "qk", tokens=read, fold_norms=False)
    near(qk.matrix.AB, E @ W_Q @ W_K.T @ E.T)
    both = [token for token in read if token in written]
    M = circuits.token_circuit(model, "L1H1", "ov", tokens=both, fold_norms=False)
    scores = circuits.copying_scores(model, ["L1H1"], tokens=both, fold_norms=False)
    assert abs(scores.eigenvalue_sum[0] - M.matrix.AB.trace()) < EXACT * M.matrix.AB.norm()
    with pytest.raises(InputError, match="got 41 input tokens and 31 output tokens"):
        circuits.copying_scores(model)
    with pytest.raises(InputError, match="none of them in the output vocabulary"):
        circuits.token_circuit(model, "L1H1", "ov", tokens=[40])


def test_refusals():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    for tokens, match in (([3, 3], "expected different tokens"), ([D_VOCAB], "from 0 to 40")):
        with pytest.raises(InputError, match=match):
            circuits.token_circuit(model, "L0H1", "qk", tokens=tokens)
    with pytest.raises(UnsupportedCallError, match="no vocabulary"):
        circuits.copying_scores(bridges.exposed_copy(bridges.boot("vit")))
    untied = bridges.exposed_copy(of_two_vocabularies(31))
    with torch.no_grad():
        untied.unembed.original_component.weight[5, 0] = float("nan")
    circuits.token_circuit(untied, "L0H1", "qk")  # control: it needs no W_U
    with pytest.raises(InputError, match="the unembedding"):
        circuits.token_circuit(untied, "L0H1", "ov")
