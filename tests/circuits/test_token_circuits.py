"""Tests of QK and OV circuits, copying scores and token paths against dense vocabulary matrices."""

import copy

import bridges
import numpy as np
import pytest
import torch
from allocations import Allocated
from common import D_MLP, D_VOCAB, needs_hooked_transformer
from dense_heads import Dense

from attn_only_lens import Bilinear, circuits, convert, expose_neuron_heads, pretrained
from attn_only_lens import patching as p
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.growth import read

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
EXACT = 1e-11  # relative to the largest entry: some hundred roundings of float64
SOME = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]


def source(name):
    from models import build  # a module-level import would skip the module under 4

    return build(name, d_vocab_out=D_VOCAB)


def near(got, expected):
    got, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (got, expected))
    assert (got - expected).abs().max() <= EXACT * expected.abs().max()


class Tables:
    """QK and OV matrices over the vocabulary, from the matrices of `Dense`."""

    def __init__(self, model, tokens=slice(None), fold=True):
        self.dense = Dense(model, fold)
        self.E = self.dense.writes["embed"][tokens]
        unembed = self.dense.unembed[:, tokens]
        self.U = unembed - unembed.mean(1, keepdim=True)

    def qk(self, name):
        read = self.E @ self.dense.reads[name]["q"]
        return read if "N" in name else read @ self.E.T

    def ov(self, name):
        return self.E @ self.dense.writes[name] @ self.U


def test_what_centring_the_unembedding_does_to_small_english():
    """Check the figures in docs/circuits.md, from plain weights, with W_U centred and as it is."""
    model = pretrained.small_english()
    heads = circuits.copying_scores(expose_neuron_heads(model, copy=True).model, p.heads())
    tensors = {key: x.double() for key, x in read(model).tensors.items()}
    W_E, W_U = tensors["embed.W_E"], tensors["ln_final.w"][:, None] * tensors["unembed.W_U"]
    changes, moved = [], []
    for name, copying in zip(heads["name"], heads["copying"], strict=True):
        layer, head = map(int, name[1:].split("H"))
        W_V, W_O = (tensors[f"blocks.{layer}.attn.W_{x}"][head] for x in "VO")
        gain = tensors[f"blocks.{layer}.ln1.w"][:, None]
        plain = W_E @ (gain * W_V) @ W_O @ W_U
        centred = plain - plain.mean(1, keepdim=True)
        changes.append(((plain - centred).norm() / plain.norm()).item())
        scores = []
        for OV in (plain, centred):
            values = torch.linalg.eigvals(OV)
            scores.append((values.sum().real / values.abs().sum()).item())
        assert copying == pytest.approx(scores[1], abs=1e-3)
        moved.append(abs(scores[0] - scores[1]))
    assert (max(changes), np.median(changes)) == pytest.approx((0.628, 0.378), abs=2e-3)
    assert max(moved) == pytest.approx(0.153, abs=2e-3)


@needs_hooked_transformer
@pytest.mark.parametrize("name", ["gelu", "llama", "gemma", "post_norm", "no_norm"])
def test_circuits_are_those_of_dense_matrices(name):
    raw = source(name)
    tables, part = Tables(raw), Tables(raw, SOME)
    source_model = copy.deepcopy(raw)
    in_place = name in ("gelu", "gemma")
    model = expose_neuron_heads(source_model).model if in_place else convert(source_model)
    for head in ("L1H1", "L2N5"):
        ov, qk = circuits.ov_circuit(model, head), circuits.qk_circuit(model, head)
        near(ov.matrix.AB, tables.ov(head))
        near(qk.matrix.AB, tables.qk(head))
        near(circuits.ov_circuit(model, head, tokens=SOME).matrix.AB, part.ov(head))
        values = np.linalg.eigvals(tables.ov(head).numpy())
        values = values[np.argsort(-abs(values))][: ov.matrix.mdim]
        got = ov.eigenvalues.numpy()
        for value in got:
            assert abs(values - value).min() < 1e-8 * abs(values).max()
        frame = circuits.copying_scores(model, [head]).iloc[0]
        assert abs(frame.eigenvalue_sum - values.sum().real) < 1e-9 * abs(values).max()
        assert abs(frame.copying - values.sum().real / abs(values).sum()) < 1e-9
        M = tables.ov(head)
        assert abs(frame.cosine - float(M.trace() / M.norm())) < 1e-9
        scores = circuits.copying_scores(model, [head], tokens=SOME).iloc[0]
        M = part.ov(head)
        assert abs(scores.cosine - float(M.trace() / M.norm())) < 1e-9
        # Control: without folding, the matrices differ if the model has norms.
        unfolded = circuits.ov_circuit(model, head, fold_norms=False).matrix.AB
        near(unfolded, Tables(raw, fold=False).ov(head))
        assert name == "no_norm" or (unfolded - tables.ov(head)).abs().max() > 1e-2
    assert list(circuits.copying_scores(model, p.heads(1))["name"]) == [
        f"L1H{i}" for i in range(raw.cfg.n_heads)
    ]
    assert len(circuits.copying_scores(model)) == 3 * (raw.cfg.n_heads + D_MLP)


@needs_hooked_transformer
@pytest.mark.parametrize("block", [5, 1024])
def test_the_strongest_pairs(block):
    raw = source("llama")
    model, tables = convert(raw), Tables(raw)
    for head in ("L1H4", "L2N5"):
        ov, every = circuits.ov_circuit(model, head), tables.ov(head)
        for lowest in (False, True):
            top = ov.top(29, lowest=lowest, block=block)
            expected = every.flatten().sort(descending=not lowest).values
            near(top["score"].to_numpy(), expected[:29])
            near(every[top["read_token"], top["written_token"]], expected[:29])
        assert top["read"].tolist() == [str(token) for token in top["read_token"]]
        near(ov.matrix.AB, every)
        part = circuits.ov_circuit(model, head, tokens=SOME)
        assert set(part.top(1000)["read_token"]) == set(SOME)
        near(part.matrix.AB, Tables(raw, SOME).ov(head))
    gate = circuits.qk_circuit(model, "L2N5").top(3)
    assert gate["key"].tolist() == ["bias token"] * 3
    assert gate["key_token"].tolist() == [-1] * 3
    near(gate["score"].to_numpy(), tables.qk("L2N5")[:, 0].sort(descending=True).values[:3])


@needs_hooked_transformer
@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_token_paths_by_hand(name):
    raw = source(name)
    tables, model = Tables(raw), convert(raw)
    rows = {}
    for neuron in range(D_MLP):
        key = f"L1N{neuron}"
        gate = tables.qk(key)[:, 0].clamp(min=0)
        value = (tables.E @ tables.dense.reads[key]["v"])[:, 0]
        drive = gate * value if name == "llama" else gate
        W_out = raw.blocks[1].mlp.W_out.detach()[neuron]
        for sign in (1, -1)[: 1 + (name == "llama")]:
            reads = (sign * drive).argsort(descending=True)[:3]
            write = sign * (W_out @ tables.U)
            writes = write.argsort(descending=True)[:3]
            score = float(sign * drive[reads[0]] * write[writes[0]])
            rows[key, "+" if sign > 0 else "-"] = (score, reads.tolist(), writes.tolist())
    for block in (5, 1024):
        got = circuits.token_paths(
            model, p.neuron_heads(1), 11, n_tokens=3, block=block, progress=False
        )
        largest = sorted((score for score, *_ in rows.values()), reverse=True)[:11]
        near(got["score"].to_numpy(), largest)
        for row in got.itertuples():
            score, reads, writes = rows[row.name, row.value]
            near(row.score, score)
            assert list(row.reads)[: row.drive > 0] == list(map(str, reads))[: row.drive > 0]
            assert list(row.writes) == list(map(str, writes))
    few = circuits.token_paths(model, ["L1N5"], tokens=SOME, n_tokens=2, progress=False)
    assert {int(text) for row in few["reads"] for text in row} <= set(SOME)


@needs_hooked_transformer
@pytest.mark.parametrize(("a_1", "a_2"), [(0.4, -3.1), (-2.3, 0.7)])
@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_generalized_silus_in_the_limit_of_a_large_stream(name, a_1, a_2):
    raw, gate = source(name), GeneralizedSiLU(a_1, a_2)
    tables = Tables(raw)
    for block in raw.blocks:
        block.mlp.act_fn = gate
    model = convert(raw, gate=gate)
    paths = circuits.token_paths(model, p.neuron_heads(1), 100, progress=False)
    best = paths.groupby("name")["score"].max()
    for key in (f"L1N{neuron}" for neuron in range(0, D_MLP, 9)):
        q = tables.qk(key)[:, 0]
        assert torch.equal(circuits.qk_circuit(model, key).matrix.AB[:, 0] > 0, a_2 * q > 0)
        drive = a_1 * (a_2 * q).clamp(min=0)
        value = (tables.E @ tables.dense.reads[key]["v"])[:, 0]
        drive = drive * value if name == "llama" else drive
        row = tables.dense.writes[key][0] / tables.dense.reads[key]["v"][0, 0]
        paths = torch.outer(drive, row @ tables.U)
        near(best[key], paths.max())
        if name == "gelu":  # a gated neuron's OV follows its up-projection, whatever its gate
            ov, opens = circuits.ov_circuit(model, key).matrix.AB, a_2 * q > 0
            near(ov[opens], paths[opens])


@needs_hooked_transformer
def test_heads_that_share_a_neuron_share_its_circuit():
    raw = source("gelu")
    model = convert(raw, gate=Bilinear(4))
    whole = circuits.ov_circuit(model, "L1N5").matrix.AB
    parts = [circuits.ov_circuit(model, f"L1N5.{j}").matrix.AB for j in range(4)]
    for part, w in zip(parts, model.blocks[3].attn.gate.w, strict=True):
        near(part, w * whole)
    with pytest.raises(InputError, match="expected whole neurons"):
        circuits.token_paths(model, ["L1N5.2"])


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_bridges(name):
    """Compare with the model's own embedding, modules and unembedding."""
    bridge = bridges.boot(name)
    model, block = bridges.exposed_copy(bridge), bridge.blocks[1]
    circuit = circuits.ov_circuit(model, "L1N29")
    W_U = bridge.unembed.W_U.detach()
    last = bridge.ln_final.original_component.weight.detach() + (name == "gemma2")
    norm = block.ln2_post if hasattr(block, "ln2_post") and name == "gemma2" else None
    row = block.mlp.W_out.detach()[29]
    if norm is not None:
        row = row * (norm.original_component.weight.detach() + 1)
    row = (row - row.mean() if name == "gpt2" else row) * last @ W_U
    first = block.ln2.original_component.weight.detach() + (name == "gemma2")
    column = first * block.mlp.W_in.detach()[:, 29]
    column = column - column.mean() if name == "gpt2" else column
    near(circuit.matrix.AB, torch.outer(bridge.W_E.detach() @ column, row - row.mean()))
    frame = circuits.copying_scores(model)
    assert abs(frame.set_index("name").eigenvalue_sum["L1N29"] - circuit.matrix.AB.trace()) < 1e-9
    heads = frame[frame["kind"] == "attention"]
    for row in heads.itertuples():
        M = circuits.ov_circuit(model, row.name).matrix.AB
        assert abs(row.eigenvalue_sum - float(M.trace())) < 1e-9 * float(M.norm())


def test_no_matrix_of_the_vocabulary_is_held():
    d_vocab, b, k = 2003, 128, 50
    config = bridges.transformers.GPT2Config(**bridges.GPT | {"vocab_size": d_vocab})
    bridge = bridges.bridged(bridges.transformers.GPT2LMHeadModel(config).eval())
    model, d_head, d_model = expose_neuron_heads(bridge).model, 13, 26
    ov = circuits.ov_circuit(model, "L0H1")
    factors = 4 * (2 * d_vocab * d_head + 2 * d_model * d_head)
    for make in (circuits.ov_circuit, circuits.qk_circuit):
        with Allocated() as allocated:
            make(model, "L0H1")
        assert factors / 4 < allocated.most < 1.5 * factors + 20 * 4 * d_vocab
    with Allocated() as allocated:
        top = ov.top(k, block=b)
    bound = 4 * (2 * b * d_head + 2 * b * b + 16 * b * k + 8 * d_vocab)
    assert allocated.most < bound < 4 * d_vocab**2 / 10
    expected = ov.matrix.AB.flatten().topk(k).values.double()
    assert abs(top["score"].to_numpy() - expected.numpy()).max() < 1e-5 * expected[0]
    with Allocated() as allocated:
        circuits.copying_scores(model)
    assert allocated.most < 64 * d_model**2 + 32 * 1024 * d_model + 32 * d_model * D_MLP + 2**18
    with Allocated() as allocated:
        circuits.token_paths(model, k=5, n_tokens=3, block=b, progress=False)
    tables = 2 * d_model * D_MLP + b * (4 * D_MLP + d_model) + 12 * D_MLP * (b + 3)
    assert allocated.most < 4 * tables + 4 * 64 * 4 * d_vocab


def test_the_largest_products_are_found_whatever_is_skipped():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 5, generator=generator).double() for n in (61, 43))
    left *= torch.rand(61, 1, generator=generator) ** 9
    for by_size in (False, True):
        largest = LargestScores(17, by_size=by_size)
        largest.add_products(left, right, (100, 0), block=7)
        every = left @ right.T
        sizes = every.abs() if by_size else every
        expected = every.flatten()[sizes.flatten().topk(17).indices]
        near(largest.values, expected)
        near(every[largest.pairs[:, 0] - 100, largest.pairs[:, 1]], expected)
        assert largest.seen == 61 * 43


def test_refusals():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    ov = circuits.ov_circuit(model, "L0H1", tokens=SOME)
    for match, call in (
        ("got k=0", lambda: ov.top(0)),
        ("got block=0.5", lambda: ov.top(block=0.5)),
        ("expected different tokens", lambda: circuits.qk_circuit(model, "L0H1", tokens=[3, 3])),
        ("got tokens=", lambda: circuits.copying_scores(model, tokens=[D_VOCAB])),
        ("got tokens=", lambda: circuits.token_paths(model, tokens=[])),
        ("expected one name", lambda: circuits.ov_circuit(model, ["L0H1"])),
        ("expected whole neurons", lambda: circuits.token_paths(model, p.heads())),
        ("has no neuron-heads", lambda: circuits.copying_scores(bridges.boot("gpt2"))),
    ):
        with pytest.raises(InputError, match=match):
            call()
    with torch.no_grad():
        model.embed.original_component.weight[5, 0] = float("nan")
    for tool in (circuits.copying_scores, circuits.token_paths):
        with pytest.raises(InputError, match="the embedding has weights that are not finite"):
            tool(model)
    with pytest.raises(UnsupportedCallError, match="no vocabulary"):
        circuits.copying_scores(bridges.exposed_copy(bridges.boot("vit")))


def of_two_vocabularies(kind, d_out):
    """Return a model whose output vocabulary is smaller or larger than its input vocabulary."""
    if kind == "native":
        cfg = bridges.TransformerBridgeConfig(**bridges.NATIVE, d_vocab_out=d_out)
        bridge = bridges.TransformerBridge.boot_native(cfg, dtype=torch.float64)
        bridges.randomise(bridge.original_model)
        return bridge
    from models import build

    return build("gelu", d_vocab_out=d_out)


@pytest.mark.parametrize("kind", ["native", pytest.param("hooked", marks=needs_hooked_transformer)])
@pytest.mark.parametrize(
    ("d_out", "chosen", "read", "written"),
    [
        (31, [3, 37, 29, 40], [3, 37, 29, 40], [3, 29]),
        (53, [51, 3, 29, 47], [3, 29], [51, 3, 29, 47]),
    ],
)
def test_tokens_are_those_of_their_side(kind, d_out, chosen, read, written):
    raw = of_two_vocabularies(kind, d_out)
    model = expose_neuron_heads(raw, copy=True).model
    attn, mlp = raw.blocks[1].attn, raw.blocks[1].mlp
    E, U = raw.W_E.detach()[read], raw.W_U.detach()[:, written]
    U = U - U.mean(1, keepdim=True)
    W_Q, W_K, W_V, W_O = (getattr(attn, name).detach()[1] for name in ("W_Q", "W_K", "W_V", "W_O"))
    W_in, W_out = mlp.W_in.detach(), mlp.W_out.detach()
    how = {"tokens": chosen, "fold_norms": False}
    ov = circuits.ov_circuit(model, "L1H1", **how)
    near(ov.matrix.AB, E @ W_V @ W_O @ U)
    pairs = ov.top(100)
    assert set(pairs["read_token"]) == set(read)
    assert set(pairs["written_token"]) == set(written)
    qk = circuits.qk_circuit(model, "L1H1", tokens=read, fold_norms=False)
    near(qk.matrix.AB, E @ W_Q @ W_K.T @ E.T)
    gate = circuits.qk_circuit(model, "L1N5", tokens=read, fold_norms=False)
    near(gate.matrix.AB[:, 0], E @ W_in[:, 5])
    assert gate.top(9)["query_token"].tolist() == [
        read[i] for i in (E @ W_in[:, 5]).argsort(descending=True)
    ]
    paths = circuits.token_paths(model, ["L1N5"], n_tokens=9, progress=False, **how)
    drive, write = (E @ W_in[:, 5]).clamp(min=0), W_out[5] @ U
    near(paths["score"], [drive.max() * write.max()])
    assert int(paths["reads"][0][0]) == read[int(drive.argmax())]
    assert [int(write) for write in paths["writes"][0]] == [
        written[i] for i in write.argsort(descending=True)
    ]
    both = [neuron for neuron in read if neuron in written]
    M = circuits.ov_circuit(model, "L1H1", tokens=both, fold_norms=False)
    scores = circuits.copying_scores(model, ["L1H1"], tokens=both, fold_norms=False)
    assert abs(scores.eigenvalue_sum[0] - M.matrix.AB.trace()) < EXACT * M.matrix.AB.norm()
    assert len(M.eigenvalues) == 13
    for match, call in (
        (f"got {len(read)} input tokens and {len(written)} output", circuits.copying_scores),
        (
            "different tokens from 0 to 40",
            lambda m, tokens: circuits.qk_circuit(m, "L1H1", tokens=[*tokens, 41]),
        ),
        (
            f"from 0 to {max(41, d_out) - 1}",
            lambda m, tokens: circuits.ov_circuit(m, "L1H1", tokens=[53]),
        ),
        (
            f"none of them in the {'output' if d_out < 41 else 'input'} vocabulary",
            lambda m, tokens: circuits.ov_circuit(m, "L1H1", tokens=[40 if d_out < 41 else 41]),
        ),
    ):
        with pytest.raises(InputError, match=match):
            call(model, tokens=chosen)
    with pytest.raises(InputError, match=f"got 41 input tokens and {d_out} output tokens"):
        circuits.copying_scores(model)
    with pytest.raises(InputError, match="expected a square matrix"):
        _ = circuits.ov_circuit(model, "L0H1").eigenvalues


def test_a_qk_circuit_needs_no_unembedding():
    raw = of_two_vocabularies("native", 31)
    model = expose_neuron_heads(raw, copy=True).model
    expected = circuits.qk_circuit(model, "L0H1").matrix.AB
    with torch.no_grad():
        model.unembed.original_component.weight[5, 0] = float("nan")
    assert torch.equal(circuits.qk_circuit(model, "L0H1").matrix.AB, expected)
    with pytest.raises(InputError, match="the unembedding"):
        circuits.ov_circuit(model, "L0H1")
