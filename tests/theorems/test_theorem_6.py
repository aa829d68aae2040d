"""Tests of Theorem 6: torch's encoder layers with biases, converted to heads only."""

import pytest
import torch
import torch.nn.functional as F
from common import relative
from oracles.bias_trick import append_ones, constant_head, head_with_biases, mlp_with_biases
from oracles.definitions import MLP, GeneralizedSiLU, Head, LayerNorm, Transformer, direct_sum, rand
from oracles.theorem_6 import PassingNorm, attention_only
from torch import nn

N, D, D_HEAD, D_MLP, N_LAYERS = 7, 10, 5, 11, 3
N_HEADS = D // D_HEAD
CAUSAL = torch.ones(N, N, dtype=torch.float64).tril()
A_1, A_2 = -2.3, 0.7
# Six sublayers of random weights of size one amplify a sublayer's roundings of about 1e-15.
TOLERANCE = 1e-12


def activation(x):
    return A_1 * F.silu(A_2 * x)


def random_mlp():
    return MLP(rand(D, D_MLP), rand(D_MLP, D), GeneralizedSiLU(A_1, A_2))


def random_heads():
    return tuple(Head(rand(D, D) / D, rand(D, D), CAUSAL) for _ in range(3))


@torch.no_grad()
def torch_layers(pre_norm=False):
    """Return encoder layers in which all parameters are random, including norms and biases."""
    generator = torch.Generator().manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(
            D, N_HEADS, D_MLP, 0.0, activation, norm_first=pre_norm, dtype=torch.float64
        )
        for _ in range(N_LAYERS)
    ]
    for layer in layers:
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    final = nn.LayerNorm(D, dtype=torch.float64)
    final.weight.data, final.bias.data = rand(D), rand(D)
    return layers, final


@torch.no_grad()
def run_torch(layers, X, pre_norm):
    """Return X_0 … X_m, the sublayers' outputs and the heads' patterns, computed by torch.nn."""
    stream, outputs, patterns = [X], [], []
    for layer in layers:
        read = layer.norm1(X) if pre_norm else X
        mask = (1 - CAUSAL).bool()
        wrote, pattern = layer.self_attn(
            read, read, read, attn_mask=mask, average_attn_weights=False
        )
        middle = X + wrote if pre_norm else layer.norm1(X + wrote)
        mlp_read = layer.norm2(middle) if pre_norm else middle
        mlp_wrote = layer.linear2(activation(layer.linear1(mlp_read)))
        X = layer(X, src_mask=mask)
        stream += [middle, X]
        outputs += [wrote, mlp_wrote]
        patterns.append(pattern)
    return stream, outputs, patterns


@torch.no_grad()
def on_constant(layers, final, pre_norm):
    """Return the same model as a transformer without biases on [X | 1]."""
    sublayers, norms = [], []
    for layer in layers:
        attn = layer.self_attn
        W_Q, W_K, W_V = attn.in_proj_weight.T.reshape(D, 3, N_HEADS, D_HEAD).unbind(1)
        b_Q, b_K, b_V = attn.in_proj_bias.reshape(3, N_HEADS, D_HEAD)
        W_O = attn.out_proj.weight.T.reshape(N_HEADS, D_HEAD, D)
        heads = [
            head_with_biases(
                W_Q[:, h], b_Q[h], W_K[:, h], b_K[h], W_V[:, h], b_V[h], W_O[h], CAUSAL
            )
            for h in range(N_HEADS)
        ]
        sublayers.append((*heads, constant_head(attn.out_proj.bias, N)))
        sublayers.append(
            mlp_with_biases(
                layer.linear1.weight.T,
                layer.linear1.bias,
                layer.linear2.weight.T,
                layer.linear2.bias,
                GeneralizedSiLU(A_1, A_2),
            )
        )
        norms += [passing(layer.norm1), passing(layer.norm2)]
    end = passing(final) if pre_norm else None
    return Transformer(tuple(sublayers), tuple(norms), pre_norm, end)


def passing(norm):
    return PassingNorm(LayerNorm(norm.weight.data, norm.bias.data), N, D)


def widened(X, constant=1.0):
    """Return [X | c] ⊕ [1]. A sublayer's output has c = 0."""
    Z = F.pad(X, (0, 2, 0, 1))
    Z[:N, D] = constant
    Z[N, D + 1] = 1.0
    return Z


@pytest.mark.parametrize("pre_norm", [False, True])
def test_every_stream_output_and_pattern(pre_norm):
    layers, final = torch_layers(pre_norm)
    X = rand(N, D)
    stream, outputs, patterns = run_torch(layers, X, pre_norm)
    converted = attention_only(on_constant(layers, final, pre_norm), N, D)
    assert all(isinstance(h, Head) for sublayer in converted.sublayers for h in sublayer)
    # One head per neuron, and another one that writes b_2.
    assert [len(s) for s in converted.sublayers] == [N_HEADS + 1, D_MLP + 1] * N_LAYERS

    run = converted.run(direct_sum(append_ones(X), 1.0))
    for got, expected in zip(run.stream, stream, strict=True):
        assert relative(got, widened(expected)) < TOLERANCE
        # The added coordinates stay exact.
        assert torch.equal(got[:N, D:], torch.tensor([[1.0, 0.0]] * N, dtype=torch.float64))
        assert got[N].tolist() == [0.0] * (D + 1) + [1.0]
    for got, expected in zip(run.outputs, outputs, strict=True):
        assert relative(got[:N, :D], expected) < TOLERANCE
        assert not got[N].any()
        assert not got[:, D:].any()
    for layer, expected in enumerate(patterns):
        got = run.patterns[2 * layer]
        assert relative(got[:N_HEADS, :N, :N], expected) < TOLERANCE
        assert torch.equal(got[:, N], F.one_hot(torch.tensor([N] * (N_HEADS + 1))).double())
        assert not got[:, :N, N].any()
    with torch.no_grad():
        end = final(stream[-1]) if pre_norm else stream[-1]
    assert relative(run.result, widened(end)) < TOLERANCE


def test_the_layer_norm_of_all_coordinates_does_not_pass_the_bias_coordinate():
    """The paper's LayerNorm(Y ⊕ [1]) = LayerNorm(Y) ⊕ [1] is false for a stock LayerNorm."""
    Y, gain, bias = rand(N, D), rand(D), rand(D)
    expected = direct_sum(F.layer_norm(Y, (D,), gain, bias), 1.0)
    assert relative(PassingNorm(LayerNorm(gain, bias), N, D)(direct_sum(Y, 1.0)), expected) < 1e-14
    for last_gain, last_bias in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (-0.7, 1.3)):
        stock = LayerNorm(
            F.pad(gain, (0, 1), value=last_gain), F.pad(bias, (0, 1), value=last_bias)
        )
        got = stock(direct_sum(Y, 1.0))
        # The column of the bias coordinate is never (0, …, 0, 1), which the proof needs.
        if last_gain == 0:
            assert got[:, D].tolist() == [last_bias] * (N + 1)
        else:
            assert got[:N, D].std() > 0.01
        assert relative(got, expected) > 0.1


def test_without_skip_connections_the_second_sublayer_is_linear():
    first, second, norm = random_heads(), random_mlp(), LayerNorm(rand(D), rand(D))
    converted = attention_only(Transformer((first, second), (norm, norm)), N, D)
    X = rand(N, D)
    X_1 = norm(sum(head(X) for head in first))
    Z_1 = converted.norms[0](sum(head(direct_sum(X, 1.0)) for head in converted.sublayers[0]))
    # The input has the bias token, so the first sublayer is right, but X′_1 is X_1 ⊕ [0].
    assert relative(Z_1[:N, :D], X_1) < TOLERANCE
    assert not Z_1[N].any()
    assert not Z_1[:, D].any()
    # Therefore every score of Theorem 3's heads is 0, and every gate is half open.
    for head in converted.sublayers[1]:
        assert not head.scores(Z_1).any()
        assert head.pattern(Z_1)[:N, N].tolist() == [0.5] * N
    linear = 0.5 * A_1 * A_2 * (X_1 @ second.V_1) @ second.V_2
    written = sum(head(Z_1) for head in converted.sublayers[1])
    assert relative(written[:N, :D], linear) < TOLERANCE
    assert relative(linear, second(X_1)) > 0.1
