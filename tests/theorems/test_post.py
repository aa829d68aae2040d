"""Tests of the post's construction in plain numpy, from its text alone, against `analyses.post`.

Here a head is two full matrices, Q and V on the widened stream, and X becomes
X + Σ softmax(X Q Xᵀ) X V. It has no factors, no maximal head width and no batches.

The post says, for N tokens, D dimensions and M = 4D hidden dimensions:

* the stream has N' = N + 1 vectors of D' = D + M + (N + 1) dimensions, the last N + 1 one-hot
  positions; the new vector is the bias vector;
* linear: "by putting such large weights in the self-positional-encoding matrices, a vector attends
  entirely to itself", and V holds W "as a block off the diagonal"; "use the 1s in the position
  encoding dimensions for the bias terms"; the second clears the hidden dimensions;
* SiLU of a dimension x: row i of X Q Xᵀ is -x, but Ω - x in entry i and Ω in the last; "the V
  matrix makes a vector write the negative of its entry and the bias context vector write 0";
* original heads: Q ⊕ P, where the bias vector attends to itself, and no other vector to it.

G is the large number in the matrices, and 2Ω in `analyses.post`. The post does not say how to
mask: here a causal mask is -3/2 G at later positions.
"""

import math

import numpy as np
import pytest
import torch

from analyses.post import (
    PlainLayer,
    PlainTransformer,
    post_transformer,
)

pytestmark = pytest.mark.numeric

SHAPES = {
    "W_Q": "hdk", "W_K": "hdk", "W_V": "hdk", "W_O": "hkd", "b_Q": "hk", "b_K": "hk", "b_V": "hk",
    "b_O": "d", "W_1": "dm", "b_1": "m", "W_2": "md", "b_2": "d",
}  # fmt: skip


def softmax(rows):
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def sublayer(X, heads):
    return X + sum(softmax(X @ Q @ X.T) @ X @ V for Q, V in heads)


class Post:
    """The matrices of the post for one stream size."""

    def __init__(self, N, D, M, G):
        self.N, self.D, self.M, self.G = N, D, M, G
        self.width = D + M + N + 1
        self.first = D + M  # start of the position dimensions

    def widen(self, x):
        X = np.zeros((self.N + 1, self.width))
        X[: self.N, : self.D] = x
        for i in range(self.N + 1):
            X[i, self.first + i] = 1.0
        return X

    def empty(self):
        return np.zeros((self.width, self.width))

    def itself(self):
        Q = self.empty()
        for i in range(self.N + 1):
            Q[self.first + i, self.first + i] = self.G
        return Q

    def linear(self, reads, writes, W, b):
        V = self.empty()
        V[reads : reads + len(W), writes : writes + W.shape[1]] = W
        for i in range(self.N):  # each token has one of these 1s, and the bias vector has none
            V[self.first + i, writes : writes + W.shape[1]] = b
        return V

    def into_hidden(self, w):
        return [(self.itself(), self.linear(0, self.D, w["W_1"], w["b_1"]))]

    def out_of_hidden(self, w):
        V = self.linear(self.D, 0, w["W_2"], w["b_2"])
        for i in range(self.D, self.D + self.M):
            V[i, i] = -1.0
        return [(self.itself(), V)]

    def silu(self):
        for k in range(self.D, self.D + self.M):
            Q, V = self.itself(), self.empty()
            Q[self.first :, -1] = self.G
            Q[k, self.first : self.first + self.N] = -1.0
            V[k, k] = -1.0
            yield Q, V

    def attention(self, w, causal):
        n_heads, _, width = w["W_Q"].shape
        for h in range(n_heads):
            q, k = self.empty()[:, :width], self.empty()[:, :width]
            for into, W, b in ((q, w["W_Q"], w["b_Q"]), (k, w["W_K"], w["b_K"])):
                into[: self.D] = W[h]
                into[self.first : self.first + self.N] = b[h]
            Q = q @ k.T / np.sqrt(width)
            Q[self.first : -1, -1] += -self.G
            Q[-1, -1] += self.G
            for i in range(self.N if causal else 0):
                Q[self.first + i, self.first + i + 1 : self.first + self.N] += -1.5 * self.G
            b = w["b_V"][h] @ w["W_O"][h] + (w["b_O"] if h == 0 else 0.0)
            yield Q, self.linear(0, 0, w["W_V"][h] @ w["W_O"][h], b)

    def run(self, x, layers, causal, slope):
        X, streams = self.widen(x), []
        for w in layers:
            # SiLU(slope x) / slope: W_1 and b_1 are multiplied by the slope, W_2 is divided by it.
            w = w | {"W_1": slope * w["W_1"], "b_1": slope * w["b_1"], "W_2": w["W_2"] / slope}
            kinds = self.attention(w, causal), self.into_hidden(w), self.silu()
            for heads in (*kinds, self.out_of_hidden(w)):
                X = sublayer(X, heads)
                streams.append(X)
        return np.stack(streams)


def case(seed):
    """Return a random transformer, and how to run it."""
    rng = np.random.default_rng(seed)
    spans = (2, 9), (2, 7), (3, 17), (1, 4), (1, 5)
    N, D, M, n_heads, width = (int(rng.integers(*span)) for span in spans)
    sizes = {"h": n_heads, "d": D, "k": width, "m": M}
    layers = [
        {name: rng.normal(size=[sizes[a] for a in axes]) / D**0.5 for name, axes in SHAPES.items()}
        for _ in range(int(rng.integers(1, 4)))
    ]
    omega = [3.0, 7.0, 20.0, 300.0][seed % 4]  # e^{-2Ω} is 2e-3 for the first, 0 for the last
    slope = [1.0, 1.702, 61.0][seed % 3]  # the last one is close to relu
    return rng.normal(size=(N, D)), layers, omega, slope, seed >= 12, width


def plain_transformer(layers, causal):
    tensors = [{name: torch.from_numpy(value) for name, value in w.items()} for w in layers]
    return PlainTransformer(tuple(PlainLayer(**w) for w in tensors), causal)


def run_transformer(x, layers, omega, slope, causal, width, gauge="post"):
    options = {"omega": omega, "slope": slope, "d_head": width, "gauge": gauge}
    post = post_transformer(plain_transformer(layers, causal), len(x), **options)
    run = post.run(torch.from_numpy(x))
    return run.streams.flatten(0, 1).numpy(), run.output.numpy()


def reference(x, layers, omega, slope, causal, change=lambda post: None):
    post = Post(len(x), x.shape[1], layers[0]["W_1"].shape[1], 2 * omega)
    change(post)
    return post.run(x, layers, causal, slope)


def error(got, expected):
    return np.abs(got - expected).max() / (1 + np.abs(expected).max())


@pytest.mark.parametrize("seed", range(6, 18))
def test_every_number_of_every_sublayer(seed):
    x, layers, omega, slope, causal, width = case(seed)
    expected = reference(x, layers, omega, slope, causal)
    for gauge in ("post", "shifted"):
        streams, output = run_transformer(x, layers, omega, slope, causal, width, gauge)
        assert error(streams, expected) < 1e-10
        assert error(output, expected[-1][:-1, : x.shape[1]]) < 1e-10


def direct(x, layers, causal, activation):
    """Compute the original model, vector by vector."""
    for w in layers:
        added = np.zeros_like(x) + w["b_O"]
        for h in range(len(w["W_Q"])):
            q, k, v = (x @ w[f"W_{a}"][h] + w[f"b_{a}"][h] for a in "QKV")
            for i in range(len(x)):
                seen = slice(i + 1) if causal else slice(None)
                scores = q[i] @ k[seen].T / np.sqrt(q.shape[1])
                added[i] += softmax(scores[None])[0] @ v[seen] @ w["W_O"][h]
        x = x + added
        x = x + activation(x @ w["W_1"] + w["b_1"]) @ w["W_2"] + w["b_2"]
    return x


@pytest.mark.parametrize("seed", [3, 11, 23])
def test_both_are_the_original_model(seed):
    x, layers, omega, slope, causal, width = case(seed)
    assert omega == 300.0
    expected = direct(x, layers, causal, lambda h: h / (1 + np.exp(-slope * h)))
    assert error(run_transformer(x, layers, omega, slope, causal, width)[1], expected) < 1e-10
    if slope == 61.0:
        only = layers[0]
        relu = direct(x, [only], causal, lambda h: np.maximum(h, 0.0))
        got = run_transformer(x, [only], omega, slope, causal, width)[1]
        assert np.abs(got - relu).max() <= 0.2785 / slope * np.abs(only["W_2"]).sum(axis=0).max()


WRONG = {
    "another Ω": lambda post: setattr(post, "G", post.G + 0.1),
    "the bias vector is no key of SiLU's heads": lambda post: setattr(post, "silu", lambda: [
        (Q * (np.arange(post.width) < post.width - 1), V) for Q, V in Post.silu(post)
    ]),
    "tokens attend to the bias vector": lambda post: setattr(post, "attention", lambda w, causal: [
        (Q * (1 - np.eye(post.width)[-1]), V) for Q, V in Post.attention(post, w, causal)
    ]),
    "the hidden part is kept": lambda post: setattr(post, "out_of_hidden", lambda w: [
        (Q, np.maximum(V, -0.9)) for Q, V in Post.out_of_hidden(post, w)
    ]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_clause_is_seen(wrong):
    x, layers, omega, slope, causal, width = case(4)
    assert omega == 3.0
    streams, _ = run_transformer(x, layers, omega, slope, causal, width)
    assert error(streams, reference(x, layers, omega, slope, causal)) < 1e-10
    assert error(streams, reference(x, layers, omega, slope, causal, WRONG[wrong])) > 1e-5


# One transformer: the error as a function of Ω, float32, ranks

N, D, M, WIDTH = 7, 5, 11, 2
EXACT = 1000.0  # the author's Ω: e^{-2Ω} is 0 in float64, and 2Ω - h has a spacing of 2e-13


def arrays():
    """Return weights with scores of a few units, and a hidden part of size one."""
    rng, sizes = np.random.default_rng(0), {"h": 3, "d": D, "k": WIDTH, "m": M}
    fan_in = {"W_Q": 4 * D, "W_K": 4 * D, "W_V": D, "W_O": 6, "W_1": D, "W_2": M}
    return [
        {
            name: rng.normal(size=[sizes[a] for a in axes]) / fan_in.get(name, 4) ** 0.5
            for name, axes in SHAPES.items()
        }
        for _ in range(3)
    ]


@pytest.mark.parametrize("gauge", ["post", "shifted"])
def test_the_error_falls_as_exp_of_minus_2_omega(gauge):
    x, layers = np.random.default_rng(1).normal(size=(N, D)), arrays()
    expected = direct(x, layers, False, lambda h: h / (1 + np.exp(-h)))

    def largest_error(omega):
        output = run_transformer(x, layers, omega, 1.0, False, WIDTH, gauge)[1]
        return np.abs(output - expected).max()

    assert largest_error(0.5) > 0.3  # control
    assert largest_error(5.0) < 0.01
    for omega in (5.0, 7.0, 9.0, 11.0):
        # This is first order in e^{-2Ω}; the second order at Ω = 5 is N e^{-10} times a curvature.
        law = largest_error(13.0) * math.exp(2 * (13.0 - omega))
        assert 0.9 * law < largest_error(omega) < 1.1 * law
    assert largest_error(EXACT) < 1e-10  # the tolerance of the author's code
