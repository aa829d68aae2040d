"""Tests of the paper's definitions against plain loops and torch's layers; section 2's claims."""

import math

import pytest
import torch
import torch.nn.functional as F
from common import relative
from oracles.definitions import (
    MLP,
    GeneralizedSiLU,
    Head,
    LayerNorm,
    Transformer,
    direct_sum,
    msoftmax,
)
from torch import nn

N, D, D_MLP = 7, 5, 11
CAUSAL = torch.ones(N, N, dtype=torch.float64).tril()
# A few float64 roundings of numbers of size one, in sums of about a dozen terms.
TOLERANCE = 1e-13


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def random_mask(rows, columns):
    mask = (torch.rand(rows, columns, dtype=torch.float64) < 0.4).double()
    mask[torch.arange(rows), torch.arange(rows) % columns] = 1.0
    return mask


def test_direct_sum():
    X, Y = rand(3, 2), rand(5, 7)
    got = direct_sum(X, Y)
    assert got.shape == (8, 9)
    for i in range(8):
        for j in range(9):
            if i < 3 and j < 2:
                assert got[i, j] == X[i, j]
            elif i >= 3 and j >= 2:
                assert got[i, j] == Y[i - 3, j - 2]
            else:
                assert got[i, j] == 0


def test_msoftmax_entry_by_entry():
    A, mask = rand(7, 5), random_mask(7, 5)
    got = msoftmax(A, mask)
    for i in range(7):
        total = sum(math.exp(A[i, j]) for j in range(5) if mask[i, j])
        for j in range(5):
            if mask[i, j]:
                assert math.isclose(got[i, j], math.exp(A[i, j]) / total, rel_tol=TOLERANCE)
            else:
                assert got[i, j] == 0
    torch.testing.assert_close(got.sum(1), torch.ones(7, dtype=torch.float64))


def test_msoftmax_acts_like_the_usual_softmax_on_what_it_sees():
    A = rand(7, 5)
    assert relative(msoftmax(A, torch.ones_like(A)), A.softmax(1)) < TOLERANCE
    # Control: a mask that multiplies the scores leaves weight on masked entries.
    mask = random_mask(7, 5)
    assert relative((A * mask).softmax(1), msoftmax(A, mask)) > 0.01


def test_head_against_torch_attention():
    X, (W_Q, W_K, W_V), W_O = rand(N, D), (rand(D, 3) for _ in range(3)), rand(3, D)
    expected = F.scaled_dot_product_attention(X @ W_Q, X @ W_K, X @ W_V, CAUSAL.bool()) @ W_O
    head = Head(W_Q @ W_K.T / math.sqrt(3), W_V @ W_O, CAUSAL)
    assert relative(head(X), expected) < TOLERANCE
    # Controls: a transposed mask, and queries and keys exchanged.
    assert relative(Head(head.W_QK, head.W_OV, CAUSAL.T.contiguous())(X), expected) > 0.01
    assert relative(Head(head.W_QK.T, head.W_OV, CAUSAL)(X), expected) > 0.01


def test_layer_norm():
    X, gain, bias = rand(N, D), rand(D), rand(D)
    expected = F.layer_norm(X, (D,), gain, bias, 1e-3)
    assert relative(LayerNorm(gain, bias, 1e-3)(X), expected) < TOLERANCE
    assert relative(LayerNorm(gain, bias, 1e-5)(X), expected) > 1e-5  # control: another eps


@pytest.mark.parametrize("pre_norm", [False, True])
@torch.no_grad()
def test_transformer_encompasses_the_classical_one(pre_norm):
    """Compare with torch.nn layers without biases; post-norm is the form of Vaswani et al."""
    d, n_heads, d_head = 10, 2, 5
    X, sublayers, norms, layers = rand(N, d), [], [], []
    for _ in range(3):
        layer = nn.TransformerEncoderLayer(
            d, n_heads, D_MLP, dropout=0.0, activation=F.gelu, norm_first=pre_norm, bias=False,
            dtype=torch.float64,
        )  # fmt: skip
        for parameter in layer.parameters():
            parameter.copy_(rand(*parameter.shape))
        layers.append(layer)
        W_Q, W_K, W_V = layer.self_attn.in_proj_weight.T.reshape(d, 3, n_heads, d_head).unbind(1)
        W_O = layer.self_attn.out_proj.weight.T.reshape(n_heads, d_head, d)
        sublayers.append(
            tuple(
                Head(W_Q[:, h] @ W_K[:, h].T / math.sqrt(d_head), W_V[:, h] @ W_O[h], CAUSAL)
                for h in range(n_heads)
            )
        )
        sublayers.append(MLP(layer.linear1.weight.T, layer.linear2.weight.T, F.gelu))
        norms += [LayerNorm(n.weight, torch.zeros_like(n.weight)) for n in layer.children()
                  if isinstance(n, nn.LayerNorm)]  # fmt: skip
    run = Transformer(tuple(sublayers), tuple(norms), pre_norm).run(X)
    expected = X
    for index, layer in enumerate(layers):
        expected = layer(expected, src_mask=(1 - CAUSAL).bool())
        # Six sublayers of random weights of size one amplify the roundings to 1e-12, relatively.
        assert relative(run.stream[2 * index + 2], expected) < 1e-12
    assert torch.equal(run.result, run.stream[-1])
    # Control: the other order of norm and sublayer gives another function.
    control = Transformer(tuple(sublayers), tuple(norms), not pre_norm)
    assert relative(control.run(X).result, expected) > 0.01


def test_gelu_is_near_a_generalized_silu():
    """Section 2: GeLU(x) ≈ SiLU(1.702 x) / 1.702 has an error of at most 0.0203, at x = ±2.27."""
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    error = (F.gelu(x) - GeneralizedSiLU(1 / 1.702, 1.702)(x)).abs()
    assert round(error.max().item(), 4) == 0.0203
    assert round(abs(x[error.argmax()].item()), 2) == 2.27
    torch.testing.assert_close(error, error.flip(0), rtol=0, atol=1e-13)  # the error is symmetric


@pytest.mark.parametrize("k", [1.0, 7.0, 100.0])
def test_relu_is_near_a_generalized_silu(k):
    """Section 2: ReLU(x) ≈ SiLU(k x) / k has an error of at most 0.2785 / k, at x = ±1.278 / k."""
    x = torch.linspace(-20 / k, 20 / k, 400_001, dtype=torch.float64)
    error = (x.relu() - GeneralizedSiLU(1 / k, k)(x)).abs()
    assert round(error.max().item() * k, 4) == 0.2785
    # The grid's step is 1e-4 / k, and the maximum at 1.27846 is flat.
    assert abs(abs(x[error.argmax()].item()) * k - 1.278) < 1e-3
    torch.testing.assert_close(error, error.flip(0), rtol=0, atol=1e-13)
