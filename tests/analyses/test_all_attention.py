"""Tests of all-attention layers as neurons, and of models with memory tokens in their place."""

import pytest
import torch
from common import relative

from analyses.studies import all_attention as study
from analyses.studies import all_attention_models as constructions
from analyses.studies.attention_only_models import text_model

NORMS = ("LN", "RMS", None)
TEXT = torch.tensor([3, 1, 4, 1, 5, 9])
SPLIT = [(1, 0, 2), (2, 1, 2), (1, 1, 4)]


def close(norm):
    """Return the tolerance: TransformerLens 4 computes its own RMSNorm in float32."""
    return 1e-6 if norm == "RMS" else 1e-13


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
    without = constructions.direct(model, TEXT, deleted=(1, 1, 2))
    assert relative(without.logits, expected) > 1e-6


@torch.no_grad()
def test_the_trained_model_is_the_slow_loop():
    sizes = {"d_vocab": 11, "seed": 3, "n_layers": 2, "d_model": 6, "heads": 2}
    trained = text_model("all-attention", 5, **sizes).double()
    expected = by_loops(constructions.weights_of(trained), TEXT)
    assert relative(trained(TEXT[None]).logits[0], expected) < 1e-13
    moved = TEXT.clone()
    moved[4] += 1  # a token changes no earlier token
    assert torch.equal(trained(moved[None]).logits[0, :4], trained(TEXT[None]).logits[0, :4])


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_memory_tokens_are_persistent_vectors(norm):
    model, c = study.drawn(norm), 7.0
    expected = by_loops(model, TEXT)
    assert relative(logits_of(constructions.loaded(model, c), model), expected) < close(norm)
    static = constructions.loaded(model, c, corrected=False)
    assert relative(logits_of(static, model), expected) > 10 * close(norm)


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
