"""Tests of all-attention layers as neurons, and of models with memory tokens in their place."""

import pytest
import torch
from common import relative
from oracles.definitions import Head
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from analyses.studies import all_attention as study
from analyses.studies import all_attention_models as constructions
from analyses.studies.attention_only_models import AllAttention
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

NORMS = ("LN", "RMS", None)
TEXT = torch.tensor([3, 1, 4, 1, 5, 9])
SPLIT = [(1, 0, 2), (2, 1, 2), (1, 1, 4)]


def close(norm):
    """Return the tolerance: TransformerLens 4 computes its own RMSNorm in float32."""
    return 1e-6 if norm == "RMS" and not HAS_HOOKED_TRANSFORMER else 1e-13


def logits_of(host, model, text=TEXT):
    tokens = constructions.with_memory(text[None], model.n_vectors, len(model.W_E))
    return host(tokens)[0, model.n_vectors :]


@torch.no_grad()
def by_loops(model, text):
    """Return the logits of one text, slowly: every weight of a pattern is a Python float."""
    stream = [model.W_E[token] + model.W_pos[t] for t, token in enumerate(text.tolist())]

    def norm(row, gain, shift):
        if model.norm is None:
            return row
        mean = row.mean() if model.norm == "LN" else row.new_zeros(())
        size = ((row - mean) ** 2).mean() + model.eps
        return (row - mean) / size.sqrt() * gain + shift

    for layer in model.layers:
        reads = [norm(row, layer.gain, layer.shift) for row in stream]
        written = [layer.b_O.clone() for _ in stream]
        for head in range(len(layer.W_Q)):
            q, k, v = (
                [
                    row @ getattr(layer, f"W_{of}")[head] + getattr(layer, f"b_{of}")[head]
                    for row in reads
                ]
                for of in "QKV"
            )
            for t in range(len(stream)):
                keys = [*k[: t + 1], *layer.key[head]]
                values = [*v[: t + 1], *layer.value[head]]
                exponentials = [float((q[t] @ key / len(key) ** 0.5).exp()) for key in keys]
                total = sum(exponentials)
                for weight, value in zip(exponentials, values, strict=True):
                    written[t] += weight / total * (value @ layer.W_O[head])
        stream = [row + more for row, more in zip(stream, written, strict=True)]
    return torch.stack([norm(row, model.gain, model.shift) @ model.W_U for row in stream])


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_direct_computation_is_the_slow_loop(norm):
    model = study.drawn(norm)
    expected = by_loops(model, TEXT)
    assert relative(constructions.direct(model, TEXT).logits, expected) < 1e-13
    moved = constructions.set_entry(1, "weights", (1, 3, 2), 0.0)
    assert relative(constructions.direct(model, TEXT, moved).logits, expected) > 1e-6


@pytest.mark.parametrize("c", [0.3, 7.0, 1e5])
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_memory_tokens_are_persistent_vectors(norm, c):
    model = study.drawn(norm)
    expected = by_loops(model, TEXT)
    assert relative(logits_of(constructions.loaded(model, c), model), expected) < close(norm)
    static = constructions.loaded(model, c, corrected=False)
    assert relative(logits_of(static, model), expected) > 10 * close(norm)


@torch.no_grad()
def test_memory_rows_are_constants_but_not_static():
    model = study.drawn("LN")
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
    model = study.drawn(norm)
    expected = by_loops(model, TEXT)
    host = constructions.loaded(model, split=SPLIT)
    assert relative(logits_of(host, model), expected) < close(norm)
    tokens = constructions.with_memory(TEXT[None], 5, 11)
    _, cache = host.run_with_cache(tokens)
    weights = constructions.direct(model, TEXT).weights
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
        head = Head(torch.outer(reads, keys), torch.outer(reads, writes), mask)
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

    with study.zeroed(made, gone):
        assert relative(made(x)[0], output(kept)) < 1e-13
    with study.deleted(made, gone):
        assert relative(made(x)[0], output(kept / kept.sum(-1, keepdim=True))) < 1e-13
        assert relative(made(x)[0], output(kept)) > 1e-4
    assert torch.equal(made(x)[0], whole)
