"""Tests of neuron enrichment, and of attention heads that behave like neurons, against loops."""

import pytest
import torch
from common import D_MLP, N_LAYERS, POS, tokens
from models import build

from analyses.studies.enrichment import enrichment
from analyses.studies.neuron_like_heads import neuron_like_heads
from attn_only_lens import convert
from attn_only_lens import expose_neuron_heads as expose
from attn_only_lens.errors import InputError, UnsupportedCallError


@pytest.mark.parametrize("name", ["gelu", "llama", "gemma"])
@pytest.mark.parametrize("layout", [convert, lambda model: expose(model).model])
def test_enrichment(name, layout):
    source = build(name)
    blocks, cfg = source.blocks, source.cfg
    frame = enrichment(layout(source)).set_index("name")
    assert len(frame) == N_LAYERS * D_MLP
    for layer, neuron in [(0, 5), (2, 36)]:
        mlp, w = blocks[layer].mlp, blocks[layer].ln2.w
        value = w * mlp.W_in[:, neuron]
        value = value - value.mean() if cfg.normalization_type == "LN" else value
        gate = w * mlp.W_gate[:, neuron] if cfg.gated_mlp else value
        out = mlp.W_out[neuron] * (blocks[layer].ln2_post.w if name == "gemma" else 1)
        cos = torch.cosine_similarity
        row = frame.loc[f"L{layer}N{neuron}"]
        assert abs(row.cos - cos(value, out, dim=0).item()) < 1e-12
        assert abs(row.gate_cos - cos(gate, out, dim=0).item()) < 1e-12
        assert abs(row.gate_value_cos - cos(gate, value, dim=0).item()) < 1e-12
        assert abs(row.ratio_to_baseline - abs(row.cos) * 26**0.5) < 1e-12
    model = convert(build(name))
    as_they_stand = enrichment(model, fold_norms=False)
    assert abs(as_they_stand.cos.to_numpy() - frame.cos.to_numpy()).max() > 1e-2
    assert set(enrichment(model, [1]).layer) == {1}


def test_a_neuron_that_writes_what_it_reads_and_one_that_takes_it_away():
    source = build("no_norm")
    mlp = source.blocks[1].mlp
    with torch.no_grad():
        mlp.W_out[3], mlp.W_out[4] = 2 * mlp.W_in[:, 3], -mlp.W_in[:, 4]
        mlp.W_out[5] = 0.0
    frame = enrichment(convert(source)).set_index("name")
    assert abs(frame.cos["L1N3"] - 1) < 1e-12
    assert abs(frame.cos["L1N4"] + 1) < 1e-12
    assert frame.cos.isna().sum() == 1
    assert abs(frame.cos["L1N6"]) < 0.9


@pytest.mark.parametrize("name", ["gelu", "sinks", "parallel", "bidirectional"])
@pytest.mark.parametrize("layout", [convert, lambda model: expose(model).model])
@torch.no_grad()
def test_attention_is_counted_token_by_token(name, layout):
    source = build(name)
    _, cache = source.run_with_cache(tokens())
    frame = neuron_like_heads(layout(source), tokens()).set_index("name")
    assert frame.to_others.is_monotonic_increasing
    for layer in range(N_LAYERS):
        pattern = cache["pattern", layer]
        for head in range(2):
            itself, first, others, sink = [], [], [], []
            for row in pattern[:, head]:
                for t in range(1, POS):
                    itself.append(row[t, t].item())
                    first.append(row[t, 0].item())
                    others.append(sum(row[t, s].item() for s in range(1, POS) if s != t))
                    sink.append(1 - row[t].sum().item())
            got = frame.loc[f"L{layer}H{head}"]
            for column, numbers in [
                ("to_self", itself), ("to_first", first), ("to_others", others), ("to_sink", sink),
            ]:  # fmt: skip
                assert abs(got[column] - sum(numbers) / len(numbers)) < 1e-12
            spread = torch.tensor(itself, dtype=torch.float64).std(correction=0).item()
            assert abs(got.self_spread - spread) < 1e-12
    assert (frame.to_sink.max() > 1e-3) == (name == "sinks")


@torch.no_grad()
def test_a_head_that_sees_itself_alone_comes_first():
    source = build("no_norm")
    attn = source.blocks[1].attn
    source.W_E[:, 0], source.W_pos[:, 0] = 0.0, 0.0
    for one in (attn.W_Q, attn.W_K, attn.b_Q, attn.b_K):
        one[0] = 0.0
    source.W_pos[:, 1:12] = 40 * torch.eye(17, 11, dtype=torch.float64)
    for layer in range(1):
        for part in (source.blocks[layer].attn, source.blocks[layer].mlp):
            for parameter in part.parameters():
                parameter.mul_(1e-6)
    attn.W_Q[0, 1:12, :11] = attn.W_K[0, 1:12, :11] = torch.eye(11, dtype=torch.float64)
    frame = neuron_like_heads(convert(source), tokens())
    assert frame.name[0] == "L1H0"
    assert frame.to_self[0] > 0.999
    # The control: heads with uniform attention are not like neurons.
    for block in source.blocks:
        for one in (block.attn.W_Q, block.attn.b_Q):
            one.zero_()
    frame = neuron_like_heads(convert(source), tokens())
    uniform = sum(1 / (t + 1) for t in range(1, POS)) / (POS - 1)
    assert (frame.to_self - uniform).abs().max() < 1e-12
    assert frame.self_spread.min() > 0


def test_no_hook_stays_and_what_is_refused():
    model = convert(build("gelu"))
    neuron_like_heads(model, tokens())
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(ValueError, match="one token"):
        neuron_like_heads(model, tokens(pos=1))
    with pytest.raises(UnsupportedCallError, match="tokens"):
        neuron_like_heads(model, torch.zeros(2, 3))
    with pytest.raises(InputError, match="no neuron-heads"):
        neuron_like_heads(build("gelu"), tokens())
