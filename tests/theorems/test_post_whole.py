"""Tests of the post's construction as a whole model, which its author did not test; controls."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from post_models import (
    ATTENTION,
    BIAS,
    CAUSAL,
    CLOSE,
    D_HEAD,
    D_MLP,
    EXACT,
    GAUGE,
    INTO_HIDDEN,
    LAYOUT,
    N_LAYERS,
    OUT_OF_HIDDEN,
    SILU,
    D,
    N,
    altered,
    direct,
    error,
    plain,
    tokens,
)

from analyses.post import Heads, PlainTransformer, post_transformer

# ---- the whole model


@CAUSAL
@GAUGE
def test_every_sublayer_of_a_deep_model(causal, gauge):
    transformer, x = plain(causal), tokens(13, 17)
    run = post_transformer(transformer, N, omega=EXACT, gauge=gauge, d_head=4).run(x)
    assert run.streams.shape == (N_LAYERS, 4, 13, 17, N + 1, LAYOUT.width)
    steps = direct(transformer, x)
    for streams, (middle, hidden, activated, after) in zip(run.streams, steps, strict=True):
        # Errors of 2e-13 grow by a factor of about ten over the layers.
        close = {"rtol": 1e-11, "atol": 1e-11}
        tokens_only = streams[..., :N, :]
        for sublayer in (ATTENTION, INTO_HIDDEN, SILU):
            torch.testing.assert_close(tokens_only[sublayer][..., :D], middle, **close)
        torch.testing.assert_close(tokens_only[OUT_OF_HIDDEN][..., :D], after, **close)
        torch.testing.assert_close(tokens_only[INTO_HIDDEN][..., LAYOUT.hidden], hidden, **close)
        torch.testing.assert_close(tokens_only[SILU][..., LAYOUT.hidden], activated, **close)
        for sublayer in (ATTENTION, OUT_OF_HIDDEN):
            assert not streams[sublayer][..., LAYOUT.hidden].any()
    torch.testing.assert_close(run.output, steps[-1][-1], rtol=1e-11, atol=1e-11)
    positions = run.streams[..., LAYOUT.position]
    assert torch.equal(positions, run.start[..., LAYOUT.position].expand_as(positions))
    bias = run.streams[..., BIAS, :]
    assert torch.equal(bias, run.start[..., BIAS, :].expand_as(bias))


@GAUGE
def test_the_error_falls_as_exp_of_minus_2_omega(gauge):
    transformer, x = plain(), tokens(3)

    def measured(omega):
        return error(post_transformer(transformer, N, omega=omega, gauge=gauge), transformer, x)

    assert measured(5.0) < 0.01
    for omega in (5.0, 7.0, 9.0, 11.0):
        # This is first order in e^{-2Ω}; the second order at Ω = 5 is N e^{-10} times a curvature.
        law = measured(13.0) * math.exp(2 * (13.0 - omega))
        assert 0.9 * law < measured(omega) < 1.1 * law


@GAUGE
def test_the_error_falls_at_least_as_fast_with_a_causal_mask(gauge):
    """The mask leaks e^{-3Ω + s - s'}, so the needed Ω depends on the scores, as the post says."""
    transformer, x = plain(causal=True), tokens(3)

    def measured(omega):
        return error(post_transformer(transformer, N, omega=omega, gauge=gauge), transformer, x)

    assert measured(5.0) < 0.1
    for omega in (5.0, 7.0, 9.0, 11.0, 13.0, 15.0):
        # The rounding of the whole model is 1e-11, as above.
        assert measured(omega) < 1.1 * measured(5.0) * math.exp(-2 * (omega - 5.0)) + 1e-11


def test_the_authors_omega_meets_the_authors_tolerance():
    """Use Ω and the tolerance from the author's demonstration code, for a whole model."""
    transformer = plain()
    assert error(post_transformer(transformer, N, omega=1000.0), transformer, tokens()) < 1e-10


def test_slope_makes_relu_as_in_the_footnote():
    transformer, x = plain(n_layers=1), tokens()
    (middle, hidden, _, _), layer = direct(transformer, x)[0], transformer.layers[0]
    run = post_transformer(transformer, N, omega=EXACT, slope=61.0).run(x)
    relu = middle + hidden.relu() @ layer.W_2 + layer.b_2
    assert (run.output - relu).abs().max() <= 0.2785 / 61 * layer.W_2.abs().sum(0).max()
    exact = direct(transformer, x, lambda h: F.silu(61.0 * h) / 61.0)[-1][-1]
    torch.testing.assert_close(run.output, exact, rtol=0.0, atol=1e-11)


def test_dtype_casts_the_weights_before_anything_is_built():
    low, high = plain(dtype=torch.float32), plain(dtype=torch.float64)
    cast = post_transformer(high, N, omega=9.0, dtype=torch.float32).run(tokens().float())
    assert cast.output.dtype == torch.float32
    assert torch.equal(
        cast.output, post_transformer(low, N, omega=9.0).run(tokens().float()).output
    )
    assert error(post_transformer(low, N, omega=EXACT, dtype=torch.float64), high, tokens()) < 1e-5


# ---- float32: a large Ω costs precision


def hidden_run(omega, gauge):
    """Return the output of SiLU's heads in float32, and the hidden part that they read."""
    heads = post_transformer(plain(dtype=torch.float32), N, omega=omega, gauge=gauge).layers[0].silu
    start = LAYOUT.augment(tokens(dtype=torch.float32))
    h = start[:N, LAYOUT.hidden] = torch.randn(N, D_MLP)
    return heads(start)[:N, LAYOUT.hidden], h


def test_float32_has_a_best_omega_in_the_posts_gauge():
    x = tokens()
    low = plain(dtype=torch.float32)
    exact = direct(
        PlainTransformer(tuple(w.to(torch.float64) for w in low.layers)), x.float().double()
    )

    def float32_error(omega, gauge):
        run = post_transformer(low, N, omega=omega, gauge=gauge).run(x.float())
        return (run.output - exact[-1][-1]).abs().max().item()

    small, best, large = (float32_error(omega, "post") for omega in (4.0, 10.0, 1000.0))
    assert small > 100 * best
    assert large > 10 * best
    # In the shifted gauge, a larger Ω costs nothing.
    assert float32_error(1000.0, "shifted") < 2 * best
    assert float32_error(1e9, "shifted") == float32_error(1000.0, "shifted")


def test_an_omega_beyond_the_precision_halves_instead_of_gating():
    """If h is below the spacing of floats at 2Ω, 2Ω − h rounds to 2Ω, and σ(−h) becomes 1/2."""
    got, h = hidden_run(1e9, "post")
    assert torch.equal(got, h - h / 2)
    got, h = hidden_run(1e9, "shifted")
    torch.testing.assert_close(got, F.silu(h), rtol=1e-6, atol=1e-7)


# ---- controls that must fail


def test_control_omega_too_small():
    transformer, x = plain(), tokens()
    assert error(post_transformer(transformer, N, omega=0.5), transformer, x) > 0.3


def test_control_without_clearing_the_hidden_part():
    def keep(heads: Heads):
        W_O = heads.W_O.clone()
        W_O[..., LAYOUT.hidden] = 0.0
        return replace(heads, W_O=W_O)

    transformer, x = plain(), tokens()
    post = altered(post_transformer(transformer, N, omega=EXACT), OUT_OF_HIDDEN, keep)
    streams, steps = post.run(x).streams, direct(transformer, x)
    # The first layer is right; later layers add their hidden part to the previous layer's.
    torch.testing.assert_close(streams[0, -1][:N, :D], steps[0][-1], **CLOSE)
    torch.testing.assert_close(
        streams[1, INTO_HIDDEN][:N, LAYOUT.hidden], steps[0][2] + steps[1][1], **CLOSE
    )
    assert error(post, transformer, x) > 0.3


def test_control_without_the_tweak_of_the_original_heads():
    def untweaked(heads: Heads):
        W_Q = heads.W_Q.clone()
        W_Q[:, LAYOUT.position, D_HEAD:] = 0.0
        return replace(heads, W_Q=W_Q)

    transformer, x = plain(), tokens()
    post = altered(post_transformer(transformer, N, omega=EXACT), ATTENTION, untweaked)
    assert error(post, transformer, x) > 0.1
    bias = post.run(x).streams[0, ATTENTION, BIAS, :D]
    assert bias.abs().max() > 0.1  # it attends to tokens, and is no longer zero


def test_control_the_posts_wording_guards_the_wrong_row():
    """With −2Ω in the bias vector's row, as worded, tokens still attend to the bias vector."""

    def as_worded(heads: Heads):
        W_Q = heads.W_Q.clone()
        W_Q[:, LAYOUT.tokens, -1] = 0.0
        W_Q[:, -1, D_HEAD:-1] = -2 * EXACT
        return replace(heads, W_Q=W_Q)

    transformer, x = plain(), tokens()
    post = altered(post_transformer(transformer, N, omega=EXACT), ATTENTION, as_worded)
    pattern = post.layers[0].attention.pattern(LAYOUT.augment(x))
    assert (pattern[:, BIAS, BIAS] == 1.0).all()  # the bias vector is right
    assert (pattern[:, :N, BIAS] > 0.01).any()  # the tokens are wrong
    assert error(post, transformer, x) > 0.1


def test_control_without_the_causal_block():
    unmasked = PlainTransformer(plain().layers, causal=False)
    post = post_transformer(unmasked, N, omega=EXACT)
    assert error(post, plain(causal=True), tokens()) > 0.1


def test_control_without_skip_connection():
    """After one sublayer, positions and bias vector are lost; the next one attends uniformly."""
    layer = post_transformer(plain(), N, omega=EXACT).layers[0]
    start = LAYOUT.augment(tokens())
    without = layer.attention(start) - start
    assert not without[:, LAYOUT.position].any()
    pattern = layer.into_hidden.pattern(without)
    assert torch.equal(pattern, torch.full_like(pattern, 1 / (N + 1)))
