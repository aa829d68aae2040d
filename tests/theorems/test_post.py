"""Tests of each clause of the post's construction: stream, sublayers, leaks and rank."""

import math

import pytest
import torch
import torch.nn.functional as F
from post_models import (
    BIAS,
    CAUSAL,
    CLOSE,
    D_HEAD,
    D_MLP,
    EXACT,
    GAUGE,
    LAYOUT,
    N_HEADS,
    D,
    N,
    direct,
    plain,
    tokens,
)

from analyses.post import StreamCoordinates, post_transformer, split

# ---- stream


def test_the_stream_has_the_posts_widths():
    layout = StreamCoordinates(n_tokens=13, d_model=7, d_mlp=4 * 7)
    assert layout.n_vectors == 13 + 1
    assert layout.width == 7 + 4 * 7 + (13 + 1)
    x = torch.randn(3, 13, 7)
    stream = layout.augment(x)
    assert torch.equal(stream[:, :13, :7], x)
    assert not stream[:, :, 7:35].any()
    assert torch.equal(stream[:, :, 35:], torch.eye(14).expand(3, 14, 14))
    assert not stream[:, 13, :-1].any()
    assert torch.equal(layout.read(stream), x)


# ---- each sublayer, given the exact stream before it


@CAUSAL
def test_original_heads_behave_as_before(causal):
    transformer, x = plain(causal), tokens()
    heads = post_transformer(transformer, N, omega=EXACT).layers[0].attention
    start = LAYOUT.augment(x)
    after = heads(start)
    torch.testing.assert_close(LAYOUT.read(after), direct(transformer, x)[0][0], **CLOSE)
    assert torch.equal(after[BIAS], start[BIAS])
    assert torch.equal(after[:, D:], start[:, D:])

    pattern = heads.pattern(start)
    assert not pattern[:, :N, BIAS].any()  # no token attends to the bias vector
    assert not pattern[:, BIAS, :N].any()  # the bias vector attends to no token
    assert (pattern[:, BIAS, BIAS] == 1.0).all()
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    assert bool(pattern[:, :N, :N][:, future].any()) is not causal


@GAUGE
def test_linear_into_hidden(gauge):
    transformer = plain()
    heads = post_transformer(transformer, N, omega=EXACT, gauge=gauge).layers[0].into_hidden
    start = LAYOUT.augment(tokens())
    after = heads(start)
    expected = tokens() @ transformer.layers[0].W_1 + transformer.layers[0].b_1
    torch.testing.assert_close(after[:N, LAYOUT.hidden], expected, **CLOSE)
    assert torch.equal(after[:, LAYOUT.model], start[:, LAYOUT.model])
    assert torch.equal(after[:, LAYOUT.position], start[:, LAYOUT.position])
    assert torch.equal(after[BIAS], start[BIAS])


@GAUGE
def test_silu_on_the_hidden_part(gauge):
    heads = post_transformer(plain(), N, omega=EXACT, gauge=gauge).layers[0].silu
    assert len(heads.W_Q) == D_MLP  # one head per neuron
    start = LAYOUT.augment(tokens())
    h = 3.0 * torch.randn(N, D_MLP, dtype=torch.float64)
    start[:N, LAYOUT.hidden] = h
    after = heads(start)
    torch.testing.assert_close(after[:N, LAYOUT.hidden], F.silu(h), **CLOSE)
    assert torch.equal(after[:, LAYOUT.model], start[:, LAYOUT.model])
    assert torch.equal(after[:, LAYOUT.position], start[:, LAYOUT.position])
    assert torch.equal(after[BIAS], start[BIAS])

    # Each token attends only to itself, with σ(-h), and to the bias vector, with σ(h).
    expected = torch.zeros(D_MLP, N + 1, N + 1, dtype=torch.float64)
    expected[:, range(N), range(N)] = torch.sigmoid(-h).T
    expected[:, :N, BIAS] = torch.sigmoid(h).T
    expected[:, BIAS, BIAS] = 1.0
    torch.testing.assert_close(heads.pattern(start), expected, **CLOSE)


@GAUGE
def test_linear_out_of_hidden_clears_it(gauge):
    layer = plain().layers[0]
    heads = post_transformer(plain(), N, omega=EXACT, gauge=gauge).layers[0].out_of_hidden
    start = LAYOUT.augment(tokens())
    h = torch.randn(N, D_MLP, dtype=torch.float64)
    start[:N, LAYOUT.hidden] = h
    after = heads(start)
    torch.testing.assert_close(LAYOUT.read(after), tokens() + h @ layer.W_2 + layer.b_2, **CLOSE)
    assert not after[:, LAYOUT.hidden].any()
    assert torch.equal(after[:, LAYOUT.position], start[:, LAYOUT.position])
    assert torch.equal(after[BIAS], start[BIAS])


# ---- leaks at a finite Ω


@GAUGE
@pytest.mark.parametrize("omega", [0.5, 2.0, 5.0])
def test_leaks_are_those_of_the_derivation(omega, gauge):
    """Weights on other vectors equal the closed forms in `analyses/post.py`."""
    layer = post_transformer(plain(causal=True), N, omega=omega, gauge=gauge).layers[0]
    start = LAYOUT.augment(tokens())
    h = torch.randn(N, D_MLP, dtype=torch.float64)
    start[:N, LAYOUT.hidden] = h
    leak, others = math.exp(-2 * omega), ~torch.eye(N, dtype=torch.bool)

    for heads in (layer.into_hidden, layer.out_of_hidden):
        expected = torch.full((N + 1, N + 1), leak / (1 + N * leak), dtype=torch.float64)
        expected.fill_diagonal_(1 / (1 + N * leak))
        torch.testing.assert_close(
            heads.pattern(start), expected.expand(len(heads.W_Q), -1, -1), rtol=1e-13, atol=0.0
        )

    total = 1 + torch.exp(-h) * (1 + (N - 1) * leak)  # divided by e^{2Ω}; [token, neuron]
    pattern = layer.silu.pattern(start)[:, :N]
    expected = (leak * torch.exp(-h) / total).T[..., None].expand(-1, -1, N)
    torch.testing.assert_close(
        pattern[:, :, :N][:, others], expected[:, others], rtol=1e-13, atol=0.0
    )
    bound = leak * torch.sigmoid(-h).T[..., None]
    assert (pattern[:, :, :N][:, others] <= bound.expand(-1, -1, N)[:, others] * (1 + 1e-13)).all()

    # Original heads: e^s for the past, e^{s - 3Ω} for the future, e^{-2Ω} for the bias vector.
    weights = plain().layers[0]
    query, key = (
        tokens() @ w + b[:, None]
        for w, b in zip((weights.W_Q, weights.W_K), (weights.b_Q, weights.b_K), strict=True)
    )
    s = query @ key.mT / D_HEAD**0.5
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    s[:, future] -= 3 * omega
    exact = torch.cat([s.exp(), torch.full((N_HEADS, N, 1), leak, dtype=s.dtype)], -1)
    exact /= exact.sum(-1, keepdim=True)
    torch.testing.assert_close(layer.attention.pattern(start)[:, :N], exact, rtol=1e-12, atol=0.0)


# ---- rank


@pytest.mark.parametrize("d_head", [1, 2, 5, 13])
def test_value_matrices_are_split_exactly_over_heads_with_equal_patterns(d_head):
    whole = post_transformer(plain(), N, omega=EXACT, d_head=1000).layers[0]
    parts = post_transformer(plain(), N, omega=EXACT, d_head=d_head).layers[0]
    for one, many in (
        (whole.into_hidden, parts.into_hidden),
        (whole.out_of_hidden, parts.out_of_hidden),
    ):
        assert len(one.W_V) == 1
        matrix = one.W_V[0] @ one.W_O[0]
        rank = int(torch.linalg.matrix_rank(matrix))
        # The number of heads is as small as the rank and d_head allow.
        assert len(many.W_V) == math.ceil(rank / d_head)
        assert many.W_V.shape[2] == many.W_O.shape[1] == d_head
        # Each sum has only one nonzero term, so it is exact.
        assert torch.equal((many.W_V @ many.W_O).sum(0), matrix)
        assert torch.equal(many.W_Q, one.W_Q.expand_as(many.W_Q))
        assert torch.equal(many.W_K, one.W_K.expand_as(many.W_K))


def test_clearing_the_hidden_part_costs_rank_d_mlp():
    """W_2 alone has rank d_model. The −1 on the hidden part makes it d_mlp, and b_2 adds one."""
    heads = post_transformer(plain(), N, omega=EXACT, d_head=1000).layers[0].out_of_hidden
    matrix = heads.W_V[0] @ heads.W_O[0]
    assert torch.linalg.matrix_rank(matrix) == D_MLP + 1
    assert torch.linalg.matrix_rank(matrix[:, LAYOUT.model]) == D


def test_added_patterns_need_rank_n_plus_1():
    """As the post says, these patterns need wider queries and keys than usual heads have."""
    layer = post_transformer(plain(), N, omega=3.0).layers[0]
    for heads in (layer.into_hidden, layer.silu, layer.out_of_hidden):
        scores = heads.W_Q[0] @ heads.W_K[0].T
        assert torch.linalg.matrix_rank(scores) == N + 1


def test_an_odd_split_is_padded_with_zeros():
    reads, writes = torch.randn(7, 5), torch.randn(5, 7)
    W_V, W_O = split(reads, writes, 3)
    assert W_V.shape == (2, 7, 3)
    assert not W_V[1, :, 2].any()
    assert not W_O[1, 2].any()


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"omega": 0.0}, r"omega: got 0\.0; expected a positive"),
        ({"omega": math.inf}, "omega: got inf"),
        ({"omega": math.nan}, "omega: got nan"),
        ({"omega": 1.0, "slope": -1.0}, r"slope: got -1\.0"),
        ({"omega": 1.0, "gauge": "paper"}, "gauge: got 'paper'; expected one of"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        post_transformer(plain(), N, **arguments)


def test_bad_streams_are_refused():
    post = post_transformer(plain(), N, omega=EXACT)
    with pytest.raises(ValueError, match=r"\(n_tokens, d_model\) = \(7, 5\)"):
        post.run(tokens()[:3])
