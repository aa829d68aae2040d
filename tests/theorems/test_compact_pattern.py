"""Tests that a converted model's (self, bias) patterns equal the oracles' dense patterns.

The reference is built from the weights of a random HookedTransformer with GPT-2's pre-norm form,
biases everywhere and two layers. It shares no code with the package: both sides have only the model
and Theorem 6 in common.
"""

import pytest
import torch
from common import BATCH, D_MLP, POS, relative, tokens
from models import build
from oracles.bias_trick import append_ones, constant_head, head_with_biases, mlp_with_biases
from oracles.definitions import GeneralizedSiLU, LayerNorm, Transformer, direct_sum
from oracles.theorem_6 import PassingNorm, attention_only

from attn_only_lens import convert

# The package's tolerance in float64. Every pattern entry is compared, including small ones.
TOLERANCE = 1e-12


def reference_of(model, n_tokens):
    """Return Theorem 6's heads for the weights of a HookedTransformer with LayerNorm."""
    cfg, causal = model.cfg, torch.ones(n_tokens, n_tokens, dtype=torch.float64).tril()

    def norm(ln):
        return PassingNorm(LayerNorm(ln.w, ln.b, cfg.eps), n_tokens, cfg.d_model)

    sublayers, norms = [], []
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        heads = [
            head_with_biases(
                attn.W_Q[h], attn.b_Q[h], attn.W_K[h], attn.b_K[h], attn.W_V[h], attn.b_V[h],
                attn.W_O[h], causal,
            )
            for h in range(cfg.n_heads)
        ]  # fmt: skip
        sublayers.append((*heads, constant_head(attn.b_O, n_tokens)))
        sublayers.append(
            mlp_with_biases(mlp.W_in, mlp.b_in, mlp.W_out, mlp.b_out, GeneralizedSiLU())
        )
        norms += [norm(block.ln1), norm(block.ln2)]
    original = Transformer(tuple(sublayers), tuple(norms), pre_norm=True,
                           final_norm=norm(model.ln_final))  # fmt: skip
    return attention_only(original, n_tokens, cfg.d_model)


@torch.no_grad()
def run_reference(model):
    """Return the reference's run of each prompt, and its logits."""
    reference, runs = reference_of(model, POS), []
    for X in model.embed(tokens()) + model.pos_embed(tokens()):
        runs.append(reference.run(direct_sum(append_ones(X), 1.0)))
    normed = torch.stack([run.result[:POS, : model.cfg.d_model] for run in runs])
    return runs, normed @ model.W_U + model.b_U


@pytest.fixture(scope="module")
def both():
    """Return the converted model's cache and logits, and the reference's runs and logits."""
    model = build("silu", n_layers=2, n_heads=3, d_head=7)
    with torch.no_grad():
        logits, cache = convert(model).run_with_cache(tokens())
    return cache, logits, *run_reference(model)


def test_neuron_heads_entry_by_entry(both):
    cache, _, runs, _ = both
    for block in range(1, len(runs[0].patterns), 2):
        compact = cache["pattern", block]
        assert compact.shape == (BATCH, D_MLP, POS, 2)
        for text, run in enumerate(runs):
            dense = run.patterns[block]
            assert dense.shape == (D_MLP + 1, POS + 1, POS + 1)  # the last head is b_2's neuron
            for neuron in range(D_MLP):
                on_neuron, bias = compact[text, neuron].unbind(-1)
                expected = torch.zeros(POS + 1, POS + 1, dtype=torch.float64)
                expected[range(POS), range(POS)] = on_neuron
                expected[:POS, POS] = bias
                expected[POS, POS] = 1.0
                torch.testing.assert_close(dense[neuron], expected, rtol=TOLERANCE, atol=0)
            # Control: (bias, self) instead of (self, bias) is far away.
            difference = dense[:D_MLP].diagonal(dim1=1, dim2=2)[:, :POS] - compact[text, ..., 1]
            assert difference.abs().max() > 0.5


def test_the_stream_the_outputs_and_the_logits(both):
    cache, logits, runs, expected_logits = both
    d_model = cache["resid_pre", 0].shape[-1]
    for text, run in enumerate(runs):
        for block in range(len(run.outputs)):
            stream = run.stream[block][:POS, :d_model]
            assert relative(cache["resid_pre", block][text], stream) <= TOLERANCE
            wrote = run.outputs[block][:POS, :d_model]
            assert relative(cache["attn_out", block][text], wrote) <= TOLERANCE
        last = cache["resid_post", len(run.outputs) - 1][text]
        assert relative(last, run.stream[-1][:POS, :d_model]) <= TOLERANCE
        for point in run.stream:
            assert torch.equal(point[:POS, d_model], torch.ones(POS, dtype=torch.float64))
            assert point[POS].tolist() == [0.0] * (d_model + 1) + [1.0]
    assert relative(logits, expected_logits) <= TOLERANCE


@torch.no_grad()
def test_another_models_reference_is_noticed():
    """Control: a change of 1e-6 in one input bias of a middle neuron is found."""
    model = build("silu", n_layers=2)
    logits, cache = convert(model, copy_weights=True).run_with_cache(tokens())
    model.blocks[1].mlp.b_in[5] += 1e-6
    runs, expected_logits = run_reference(model)
    on_neuron = cache["pattern", 3][0, :, :, 0]
    dense = runs[0].patterns[3][:D_MLP].diagonal(dim1=1, dim2=2)[:, :POS]
    differs = (dense - on_neuron).abs().amax(1) > 1e-9
    assert differs.nonzero().flatten().tolist() == [5]
    assert relative(logits, expected_logits) > 1e-9
