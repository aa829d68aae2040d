"""Tests of all-attention layers as neurons, and of models with memory tokens in their place."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import relative, run_script
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from analyses.studies import all_attention as study
from analyses.studies import all_attention_identities as identities
from analyses.studies import all_attention_measures as measures
from analyses.studies import all_attention_models as constructions
from analyses.studies import all_attention_report as report
from analyses.studies import all_attention_tools as tools
from analyses.studies.attention_only_models import AllAttention, sublayers_of
from attn_only_lens import reference
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

NAME = Path(study.__file__).stem
KEPT = Path(__file__).parents[2] / "analyses" / "results"
NORMS = ("LN", "RMS", None)
TEXT = torch.tensor([3, 1, 4, 1, 5, 9])
SPLIT = [(1, 0, 2), (2, 1, 2), (1, 1, 4)]


def close(norm):
    """Return the tolerance: TransformerLens 4 computes its own RMSNorm in float32."""
    return 1e-6 if norm == "RMS" and not HAS_HOOKED_TRANSFORMER else 1e-13


def logits_of(host, model, text=TEXT):
    tokens = constructions.with_memory(text[None], model.n_vectors, len(model.W_E))
    return host(tokens)[0, model.n_vectors :]


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_direct_computation_is_the_slow_loop(norm):
    model = identities.drawn(norm)
    expected = constructions.by_loops(model, TEXT)
    assert relative(tools.direct(model, TEXT).logits, expected) < 1e-13
    moved = tools.set_entry(1, "weights", (1, 3, 2), 0.0)
    assert relative(tools.direct(model, TEXT, moved).logits, expected) > 1e-6


@pytest.mark.parametrize("c", [0.3, 7.0, 1e5])
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_memory_tokens_are_persistent_vectors(norm, c):
    model = identities.drawn(norm)
    expected = constructions.by_loops(model, TEXT)
    assert relative(logits_of(constructions.loaded(model, c), model), expected) < close(norm)
    static = constructions.loaded(model, c, corrected=False)
    assert relative(logits_of(static, model), expected) > 10 * close(norm)


@torch.no_grad()
def test_memory_rows_are_constants_but_not_static():
    model = identities.drawn("LN")
    host, rows = constructions.loaded(model, 3.0), []
    for text in (TEXT, TEXT.flip(0)):
        tokens = constructions.with_memory(text[None], 5, 11)
        _, cache = host.run_with_cache(tokens)
        rows.append([cache[f"blocks.{layer}.hook_resid_pre"][0, :5] for layer in range(3)])
    for first, second in zip(*rows, strict=True):
        assert torch.equal(first, second)
    assert relative(rows[0][1], rows[0][0]) > 0.1
    wide = rows[0][2]
    assert torch.equal(wide[:, 7:], rows[0][0][:, 7:])  # nothing writes to the new coordinates
    assert wide.mean(dim=1).abs().max() < 1e-12  # so LayerNorm acts as RMSNorm


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_a_persistent_vector_becomes_a_head(norm):
    model = identities.drawn(norm)
    expected = constructions.by_loops(model, TEXT)
    host = constructions.loaded(model, split=SPLIT)
    assert relative(logits_of(host, model), expected) < close(norm)
    tokens = constructions.with_memory(TEXT[None], 5, 11)
    _, cache = host.run_with_cache(tokens)
    weights = tools.direct(model, TEXT).weights
    for (layer, head, vector), new in zip(SPLIT, (2, 2, 3), strict=True):
        z = cache[f"blocks.{layer}.attn.hook_z"][0, 5:, new]
        p = weights[layer][head, :, vector, None]
        assert relative(z, p * model.layers[layer].value[head, vector]) < 10 * close(norm)
    assert cache["blocks.2.attn.hook_z"][0, :, 3].abs().max() == 0  # a head of zeros


@torch.no_grad()
def test_a_neuron_is_a_masked_head_with_the_shared_persistent_vector():
    """Compare with Definition 1's heads on the stream with the bias token, one after another."""
    torch.manual_seed(2)
    d, pos, n = 5, 7, 3
    x, W_in = torch.randn(pos, d).double(), torch.randn(d, n).double()
    b_in, W_out, b_out = (
        torch.randn(n).double(),
        torch.randn(n, d).double(),
        torch.randn(d).double(),
    )
    stream = torch.zeros(pos + 1, d + 2, dtype=torch.double)  # x, 1 for text, 1 for the vector
    stream[:pos, :d], stream[:pos, d], stream[pos, d + 1] = x, 1, 1
    mask = torch.eye(pos + 1, dtype=torch.double)
    mask[:, -1] = 1
    expected = b_out.expand(pos, d).clone()
    for i in range(n):
        reads = torch.cat([W_in[:, i], b_in[i, None], torch.zeros(1).double()])
        keys = torch.zeros(d + 2, dtype=torch.double)
        keys[-1] = -1
        writes = torch.cat([W_out[i], torch.zeros(2).double()])
        head = reference.Head(torch.outer(reads, keys), torch.outer(reads, writes), mask)
        expected += head(stream)[:pos, :d]
    out, pattern = constructions.neuron_layer(x, W_in, b_in, W_out, b_out)
    assert relative(out, expected) < 1e-13
    assert relative(out, torch.nn.functional.silu(x @ W_in + b_in) @ W_out + b_out) < 1e-13
    assert pattern.shape == (n, pos, pos + 1)
    causal, _ = constructions.neuron_layer(x, W_in, b_in, W_out, b_out, diagonal=False)
    assert relative(causal, expected) > 1e-2


@torch.no_grad()
def test_leaving_out_vectors():
    torch.manual_seed(13)
    config = GPT2Config(n_embd=6, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0)
    made, x = AllAttention(GPT2Attention(config), 5).double(), torch.randn(2, 7, 6).double()
    whole, pattern, (_, _, values) = made(x)[0], made.pattern(x), made.rows(x)
    gone = torch.zeros(2, 5, dtype=torch.bool)
    gone[1, 3] = True
    kept = pattern.clone()
    kept[:, 1, :, 3] = 0

    def output(weights):
        return made.c_proj((weights @ values).transpose(1, 2).flatten(2))

    with measures.zeroed(made, gone):
        assert relative(made(x)[0], output(kept)) < 1e-13
    with measures.deleted(made, gone):
        assert relative(made(x)[0], output(kept / kept.sum(-1, keepdim=True))) < 1e-13
        assert relative(made(x)[0], output(kept)) > 1e-4
    assert torch.equal(made(x)[0], whole)


@torch.no_grad()
def test_usage_of_vectors():
    """Compare with direct computation on the text of one batch."""
    task = study.SMOKE.text
    model = task.model("all-attention", 5, 0).double()
    batch = task.batch(0, 0)[:1]
    real = int((batch[0, :-1] != study.english.vocabulary()["</s>"]).sum())
    run = tools.direct(constructions.weights_of(model), batch[0, :real])
    usage = measures.usage(model, [batch])
    for row in usage.itertuples():
        p, a = (x[row.layer][row.head, :, :5] for x in (run.weights, run.scores))
        share = p / p.sum(1, keepdim=True)
        assert row.weight == pytest.approx(p.sum(1).mean().item())
        effective = (-(share * share.log()).sum(1)).exp().mean().item()
        assert row.effective == pytest.approx(effective)
        explained = [
            torch.corrcoef(torch.stack([a[:, n], p[:, n].log()]))[0, 1] ** 2 for n in range(5)
        ]
        assert row.explained == pytest.approx(torch.stack(explained).median().item())


@torch.no_grad()
def test_costs_of_single_vectors_and_of_layers():
    task = study.SMOKE.text
    model, batches = task.model("all-attention", 5, 0), [task.batch(i, 0) for i in range(2)]
    costs = measures.single_costs(model, batches, every=4, few=2)
    assert set(zip(costs["layer"], costs["head"], costs["vector"], strict=True)) == {
        (layer, *of) for layer in (0, 1) for of in ((0, 0), (0, 4), (1, 1))
    }
    whole = measures.losses(model, batches)
    sublayers_of(model)[1].scaled_value[1, 1] = 0
    changed = measures.losses(model, batches) - whole
    row = costs.query("layer == 1 and head == 1").iloc[0]
    assert row["zeroed_b"] == pytest.approx(changed[1].item(), abs=1e-7)
    for sublayer in sublayers_of(model):
        sublayer.scaled_value.zero_()
    expected = measures.losses(model, batches).mean().item()
    costs = measures.layer_costs(model, batches).set_index("layer")
    assert costs.loc["all", "whole"] + costs.loc["all", "zeroed"] == pytest.approx(expected)


def test_the_strongest_tenth():
    made = pd.DataFrame(
        {
            "zeroed_a": [5.0, *[0.0] * 9],
            "zeroed_b": [3.0, 1.0, -7.0, *[0.0] * 7],
            "deleted_a": [9.0, 1.0, *[0.0] * 8],
            "deleted_b": [9.0, 1.0, *[0.0] * 8],
        }
    )
    summary = measures.summary_of(made)
    assert (summary["tenth"], summary["median"]) == (3 / 4, 0)


def test_every_tool_reads_persistent_vectors():
    model = identities.drawn("LN")
    corrupted = TEXT.clone()
    corrupted[5] = 6
    split = tools.strongest(model, TEXT, (3, 5), per_layer=2)
    reading = tools.Reading(model, split, TEXT, corrupted, (3, 5))
    rows = pd.DataFrame(check.row() for check in tools.checks(reading)).set_index("tool")
    assert len(rows) > 20
    assert (rows["difference"] < 1e-9).all(), rows["difference"]
    assert (rows["control"] > 1e3 * rows["difference"]).all(), rows
    every = tools.every_vector(reading).iloc[0]
    assert every["heads a layer"] == 2 + 2 * 5
    assert max(every["logits"], every["effects"]) < 1e-4
    refused = tools.refusals(reading).set_index("tool")["says"]
    assert "expected neuron-heads" in refused["`gate_and_value`"]


def test_smoke(tmp_path):
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs"), "--n-seeds", "2"]
    result = run_script(study.main, ["--smoke", *folders])
    page = (tmp_path / f"{NAME}.md").read_text("utf-8")
    assert page.strip() in result.output
    last = pd.read_csv(tmp_path / f"{NAME}.csv").groupby("arm")[["step", "flops"]].last()
    assert set(last.index) == set(study.ARMS)
    assert set(last["step"]) == {4}
    flops = last["flops"]
    assert flops["neither"] < flops["all-attention"] == flops["mlp"]
    for part in ("remark", "vectors"):
        frame = pd.read_csv(tmp_path / f"{NAME}_{part}.csv")
        assert frame["difference"].max() < 1e-12 < 1e-4 < frame["of control"].min()


def test_what_is_stored():
    """The page's sentences match its tables."""
    parts = ("", "single", "usage", "layers", "search", "promoted", "remark", "gates", "vectors")
    parts += ("ranks", "memory", "tools", "every", "refusals")
    frames = {part: pd.read_csv(KEPT / f"{NAME}{'_' * bool(part)}{part}.csv") for part in parts}
    page = (KEPT / f"{NAME}.md").read_text("utf-8")
    for line in report.verdicts(frames):
        assert line in page
    for table in (report.losses_table, report.usage_table, report.singles_table):
        assert table(frames) in page
    assert frames[""].groupby("arm")["seed"].nunique().eq(5).all()
    assert frames["tools"]["difference"].max() < 1e-9
    exact = pd.concat([frames["remark"], frames["vectors"]])
    assert exact["difference"].max() < 1e-12
    trained = frames["memory"].query("model == 'trained, LayerNorm'")
    assert trained["corrected"].max() < 1e-12
    ratio = trained["uncorrected"] * trained["c"]  # O(1/c)
    assert ratio.iloc[-1] == pytest.approx(ratio.iloc[-3], rel=0.05)
