"""A tiny random transformer of prime sizes, its direct evaluation, and the post's form of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from analyses.post import SUBLAYERS, PlainLayer, PlainTransformer, StreamCoordinates

N, D, D_MLP, N_HEADS, D_HEAD, N_LAYERS = 7, 5, 11, 3, 2, 3
ATTENTION, INTO_HIDDEN, SILU, OUT_OF_HIDDEN = range(4)
LAYOUT = StreamCoordinates(N, D, D_MLP)
BIAS = N  # the bias vector is the last one
# e^{-2Ω} is 0 in float64 from Ω = 373, so linear patterns are exact; 2Ω - h has a spacing of 2e-13.
EXACT = 1000.0
# Sums of a few dozen terms of size ~ 1, with h rounded to 2e-13 inside σ.
CLOSE = {"rtol": 0.0, "atol": 1e-12}
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["unmasked", "causal"])
GAUGE = pytest.mark.parametrize("gauge", ["post", "shifted"])


def plain(causal=False, dtype=torch.float64, n_layers=N_LAYERS, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, fan_in):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) / fan_in**0.5).to(
            dtype
        )

    layers = tuple(
        PlainLayer(
            W_Q=normal(N_HEADS, D, D_HEAD, fan_in=4 * D),  # scores of a few units
            W_K=normal(N_HEADS, D, D_HEAD, fan_in=4 * D),
            W_V=normal(N_HEADS, D, D_HEAD, fan_in=D),
            W_O=normal(N_HEADS, D_HEAD, D, fan_in=N_HEADS * D_HEAD),
            b_Q=normal(N_HEADS, D_HEAD, fan_in=4),
            b_K=normal(N_HEADS, D_HEAD, fan_in=4),
            b_V=normal(N_HEADS, D_HEAD, fan_in=4),
            b_O=normal(D, fan_in=4),
            W_1=normal(D, D_MLP, fan_in=D),
            b_1=normal(D_MLP, fan_in=4),
            W_2=normal(D_MLP, D, fan_in=D_MLP),
            b_2=normal(D, fan_in=4),
        )
        for _ in range(n_layers)
    )
    return PlainTransformer(layers, causal)


def tokens(*batch, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch, N, D, generator=generator, dtype=torch.float64).to(dtype)


def direct(transformer, x, activation=F.silu):
    """Return the states of each layer: after attention, hidden, activated, after the MLP."""
    steps = []
    for w in transformer.layers:
        query = F.linear(x, w.W_Q.mT.flatten(0, 1), w.b_Q.flatten())
        key = F.linear(x, w.W_K.mT.flatten(0, 1), w.b_K.flatten())
        value = F.linear(x, w.W_V.mT.flatten(0, 1), w.b_V.flatten())
        heads = [t.unflatten(-1, (-1, D_HEAD)).transpose(-3, -2) for t in (query, key, value)]
        z = F.scaled_dot_product_attention(*heads, is_causal=transformer.causal)
        middle = x + F.linear(z.transpose(-3, -2).flatten(-2), w.W_O.flatten(0, 1).T, w.b_O)
        hidden = F.linear(middle, w.W_1.T, w.b_1)
        x = middle + F.linear(activation(hidden), w.W_2.T, w.b_2)
        steps.append((middle, hidden, activation(hidden), x))
    return steps


def error(post, transformer, x):
    """Return the largest error of the whole model's output."""
    return (post.run(x).output - direct(transformer, x)[-1][-1]).abs().max().item()


def altered(post, sublayer, change):
    """Return the construction with one sublayer of every layer changed."""
    name = SUBLAYERS[sublayer]
    layers = [replace(layer, **{name: change(getattr(layer, name))}) for layer in post.layers]
    return replace(post, layers=tuple(layers))
