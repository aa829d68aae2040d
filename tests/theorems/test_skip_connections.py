"""Tests that without skip connections the bias token loses its 1, and the next MLP its gates."""

import pytest
import torch
import torch.nn.functional as F
from common import relative

from attn_only_lens.reference import (
    MLP,
    GeneralizedSiLU,
    Head,
    LayerNorm,
    Transformer,
    attention_only,
    direct_sum,
)

N, D, D_MLP = 7, 5, 11
A_1, A_2 = -2.3, 0.7


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mlp():
    return MLP(rand(D, D_MLP), rand(D_MLP, D), GeneralizedSiLU(A_1, A_2))


def heads():
    causal = torch.ones(N, N, dtype=torch.float64).tril()
    return tuple(Head(rand(D, D), rand(D, D), causal) for _ in range(3))


def without_skip(transformer, X):
    """Run X_{j+1} = norm(sublayer(X_j)), without skip connections."""
    stream = [X]
    for sublayer, norm in zip(transformer.sublayers, transformer.norms, strict=True):
        parts = sublayer if isinstance(sublayer, tuple) else (sublayer,)
        stream.append(norm(sum(part(stream[-1]) for part in parts)))
    return stream


@pytest.mark.parametrize("first", [mlp, heads])
def test_without_skip_connections_the_second_sublayer_fails(first):
    norms = tuple(LayerNorm(rand(D), rand(D)) for _ in range(2))
    original = Transformer((first(), second := mlp()), norms)
    converted = attention_only(original, N)
    X = rand(N, D)
    X_1, X_2 = without_skip(original, X)[1:]
    Z_1, Z_2 = without_skip(converted, direct_sum(X, 1.0))[1:]

    # X′_1 is X_1 ⊕ [0] instead of X_1 ⊕ [1].
    assert relative(Z_1[:N, :D], X_1) < 1e-12
    assert not Z_1[N].any()
    assert not Z_1[:, D].any()
    # Therefore every score of Theorem 3's heads is 0, and every gate is half open.
    for head in converted.sublayers[1]:
        assert not head.scores(Z_1).any()
        pattern = head.pattern(Z_1)
        assert pattern.diagonal().tolist() == [0.5] * N + [1.0]
        assert pattern[:N, N].tolist() == [0.5] * N
    # The MLP is therefore linear: half of its value with all gates open.
    linear = 0.5 * A_1 * A_2 * (X_1 @ second.V_1) @ second.V_2
    written = sum(head(Z_1) for head in converted.sublayers[1])
    assert relative(written[:N, :D], linear) < 1e-12
    assert relative(linear, A_1 * F.silu(A_2 * X_1 @ second.V_1) @ second.V_2) > 0.1
    assert relative(Z_2[:N, :D], X_2) > 0.1


def test_the_first_sublayer_needs_no_skip_connection():
    """X′_0 = X_0 ⊕ [1] is the input, so one sublayer alone is right on the first D columns."""
    original = Transformer((mlp(),), (LayerNorm(rand(D), rand(D)),))
    X = rand(N, D)
    got = without_skip(attention_only(original, N), direct_sum(X, 1.0))[1]
    assert relative(got[:N, :D], without_skip(original, X)[1]) < 1e-12
