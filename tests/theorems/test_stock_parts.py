"""Tests of neuron-heads built from others' attention code, against the paper's and convert's.

Common attention layers have no bias token, but some have a sink, which lets a token attend to
nothing: a key with a fixed score of 0 and a value of 0. Take a head of width 1 with queries and
values q = x · w_in + b_in and the constant key a_2, where a token sees itself and the sink. Its
scores are (a_2 q, 0): the paper's (0, -a_2 q) plus a_2 q, which softmax ignores. The pattern is
(σ(a_2 q), σ(-a_2 q)) and the output is q σ(a_2 q), which for a_1 = 1 / a_2 is the activation
a_1 SiLU(a_2 q): silu for a_2 = 1, quick_gelu for a_2 = 1.702. The sink is the paper's bias token.

* **TransformerLens 3.9**: `Attention`, local with window 1, `use_attention_sinks`, sinks 0. Its
  pattern leaves out the sink's column, so rows sum to less than 1.
* **torch**: `MultiheadAttention` with `add_zero_attn` and a diagonal mask. Queries and heads have
  equal numbers of coordinates, so the stream is padded with zeros from d_model to d_mlp. The last
  column of its weights is the sink, at the place of the paper's bias token.

Each layer replaces every MLP of a random model, and the whole model is run.
"""

import pytest
import torch
import torch.nn.functional as F
from common import BATCH, D_MLP, POS, relative, tokens
from models import build
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from attn_only_lens import convert
from attn_only_lens.reference import (
    GeneralizedSiLU,
    append_ones,
    direct_sum,
    mlp_with_biases,
    neuron_heads,
)
from attn_only_lens.tl import Attention, HookedTransformerConfig

# The package's tolerance in float64. Every pattern entry is compared, including small ones.
TOLERANCE = 1e-12

# The sizes, the batch of 2, the 11 tokens per text and the 37 neurons are distinct primes.
SIZES = {"n_heads": 3, "n_layers": 5, "d_head": 7, "d_model": 29}
MODELS = {
    "gpt2": {"normalization_type": "LN"},
    "norms folded": {"normalization_type": "LNPre"},
    "rms": {"normalization_type": "RMS"},
    "parallel": {"normalization_type": "LN", "parallel_attn_mlp": True},
}
ALPHAS = {"silu": GeneralizedSiLU(), "quick_gelu": GeneralizedSiLU(1 / 1.702, 1.702)}


class TransformerLensHeads(Attention):
    """An MLP's neurons as TransformerLens heads, called with x like an MLP."""

    def __init__(self, mlp, key, *, window=1, sink=True):
        d_model, d_mlp = mlp.W_in.shape
        cfg = HookedTransformerConfig(
            n_layers=1,
            d_model=d_model,
            n_heads=d_mlp,
            d_head=1,
            n_ctx=POS,
            d_vocab=1,
            attn_only=True,
            use_local_attn=True,
            attn_types=["local"],
            window_size=window,
            use_attention_sinks=sink,
            dtype=torch.float64,
            device="cpu",
        )
        super().__init__(cfg, "local", 0)
        ones = torch.ones_like(mlp.b_in)[:, None]
        weights = {
            "W_Q": mlp.W_in.T[..., None],
            "b_Q": mlp.b_in[:, None],
            "W_K": torch.zeros(d_mlp, d_model, 1),
            "b_K": key * ones,
            "W_V": mlp.W_in.T[..., None],
            "b_V": mlp.b_in[:, None],
            "W_O": mlp.W_out[:, None],
            "b_O": mlp.b_out,
        }
        if sink:
            weights["sinks"] = torch.zeros(d_mlp)
        left = self.load_state_dict(weights, strict=False)
        assert left.missing_keys == ["mask", "IGNORE"]  # buffers; all parameters are given
        assert not left.unexpected_keys

    def forward(self, x):
        return super().forward(x, x, x)


class TorchHeads(nn.Module):
    """An MLP's neurons as torch heads, called with x like an MLP."""

    def __init__(self, mlp, key, *, window=1, sink=True):
        super().__init__()
        d_model, d_mlp = mlp.W_in.shape
        self.padding = (0, d_mlp - d_model)
        self.heads = nn.MultiheadAttention(
            d_mlp, d_mlp, add_zero_attn=sink, batch_first=True, dtype=torch.float64
        )
        W_in, ones = F.pad(mlp.W_in.T, self.padding), torch.ones_like(mlp.b_in)
        self.heads.load_state_dict(
            {
                "in_proj_weight": torch.cat([W_in, 0 * W_in, W_in]),
                "in_proj_bias": torch.cat([mlp.b_in, key * ones, mlp.b_in]),
                "out_proj.weight": F.pad(mlp.W_out.T, (0, 0, *self.padding)),
                "out_proj.bias": F.pad(mlp.b_out, self.padding),
            }
        )
        seen = torch.ones(POS, POS).tril().triu(1 - window)
        self.hidden = seen == 0
        self.hook_pattern = HookPoint()

    def forward(self, x):
        x = F.pad(x, self.padding)
        out, pattern = self.heads(x, x, x, attn_mask=self.hidden, average_attn_weights=False)
        self.hook_pattern(pattern)
        written, beyond = out.tensor_split([out.shape[-1] - self.padding[1]], dim=-1)
        assert not beyond.any()
        return written


PARTS = {"transformer_lens": TransformerLensHeads, "torch": TorchHeads}
# TransformerLens' sink weight is 1 - (sum of the others), with an absolute error; torch returns it.
SINK_ATOL = {"transformer_lens": TOLERANCE, "torch": 0.0}


def with_sink(pattern):
    """Return the pattern [..., pos, pos + 1]; a missing sink column is 1 - (sum)."""
    if pattern.shape[-1] > POS:
        return pattern
    return torch.cat([pattern, 1 - pattern.sum(-1, keepdim=True)], dim=-1)


def run(model):
    """Return logits and a cache that also has the MLPs' inputs ("in") and outputs ("out")."""
    seen = {}

    def watch(layer):
        def keep(_, inputs, out):
            seen["in", layer], seen["out", layer] = inputs[0], out

        return keep

    for layer, block in enumerate(model.blocks):
        block.mlp.register_forward_hook(watch(layer))
    logits, cache = model.run_with_cache(tokens())
    return logits, cache.cache_dict | seen


def with_parts(model, part, key, **wrong):
    """Replace the model's MLPs by parts; return the model."""
    for block in model.blocks:
        block.mlp = PARTS[part](block.mlp, key, **wrong)
    model.setup()  # TransformerLens collects its hook points again
    return model


@pytest.fixture(scope="module", params=ALPHAS)
def act_fn(request):
    """Yield an activation that a config can name; TransformerLens has no quick_gelu itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUPPORTED_ACTIVATIONS, "quick_gelu", lambda x: x * (1.702 * x).sigmoid())
        yield request.param


@pytest.fixture(scope="module", params=MODELS)
def source(request, act_fn):
    """Return a function that builds the same source model at each call."""
    return lambda: build("silu", **SIZES, **MODELS[request.param] | {"act_fn": act_fn})


@pytest.fixture(scope="module", params=PARTS)
def part(request):
    return request.param


@pytest.fixture(scope="module")
@torch.no_grad()
def stock(source, act_fn, part):
    """Return logits and cache of the model with stock parts as MLPs."""
    return run(with_parts(source(), part, ALPHAS[act_fn].a_2))


def assert_same(got, expected, atol=0.0):
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=atol)


@torch.no_grad()
def test_the_function_is_the_sources(source, stock):
    logits, cache = stock
    expected_logits, expected = run(source())
    for layer in range(SIZES["n_layers"]):
        assert relative(cache["out", layer], expected["out", layer]) <= TOLERANCE
    assert relative(logits, expected_logits) <= TOLERANCE


@torch.no_grad()
def test_the_papers_heads_entry_by_entry(source, stock, act_fn, part):
    model, (_, cache) = source(), stock
    for layer, block in enumerate(model.blocks):
        mlp = block.mlp
        heads = neuron_heads(
            mlp_with_biases(mlp.W_in, mlp.b_in, mlp.W_out, mlp.b_out, ALPHAS[act_fn]), POS
        )
        got = with_sink(cache[f"blocks.{layer}.mlp.hook_pattern"])
        assert got.shape == (BATCH, D_MLP, POS, POS + 1)
        for text in range(BATCH):
            X = direct_sum(append_ones(cache["in", layer][text]), 1.0)
            patterns = torch.stack([head.pattern(X) for head in heads])
            assert patterns.shape == (D_MLP + 1, POS + 1, POS + 1)  # the last head is b_2's neuron
            expected = patterns[:D_MLP, :POS]
            # The tolerance is relative: off-diagonal entries, which are 0 in the paper, must be 0.
            assert_same(got[text, :, :, :POS], expected[:, :, :POS])
            assert_same(got[text, :, :, POS], expected[:, :, POS], SINK_ATOL[part])
            assert_same(expected.diagonal(dim1=1, dim2=2), 1 - expected[:, :, POS], TOLERANCE)
            wrote = sum(head(X) for head in heads)[:POS, : SIZES["d_model"]]
            assert relative(cache["out", layer][text], wrote) <= TOLERANCE
            # Control: heads have different patterns.
            assert (got[text, 1:] - expected[:-1]).abs().max() > 0.1


@torch.no_grad()
def test_converts_heads_entry_by_entry(source, stock, part):
    logits, cache = stock
    expected_logits, converted = convert(source()).run_with_cache(tokens())
    for layer in range(SIZES["n_layers"]):
        got = with_sink(cache[f"blocks.{layer}.mlp.hook_pattern"])
        on_neuron, bias = converted["pattern", 2 * layer + 1].unbind(-1)
        assert_same(got[..., :POS], torch.diag_embed(on_neuron))
        assert_same(got[..., POS], bias, SINK_ATOL[part])
        if part == "transformer_lens":  # torch does not return z
            z = cache[f"blocks.{layer}.mlp.hook_z"]
            assert z.shape == (BATCH, POS, D_MLP, 1)
            assert relative(z, converted["z", 2 * layer + 1]) <= TOLERANCE
        # Control: (bias, self) instead of (self, bias) is far away.
        assert (got[..., POS] - on_neuron).abs().max() > 0.5
    assert relative(logits, expected_logits) <= TOLERANCE


WRONG = {
    "sees two tokens": {"window": 2},
    "sees no sink": {"sink": False},
    "key of the wrong sign": {"key": -1.0},
    "key of another activation": {"key": 1.702},
}


@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_wrong_parts_fail(part, wrong):
    model = build("silu", **SIZES)
    _, right = run(with_parts(build("silu", **SIZES), part, 1.0))
    _, expected = run(model)
    _, cache = run(with_parts(model, part, **{"key": 1.0} | WRONG[wrong]))
    # The first layer's MLP has the same input in all three models, so only its heads differ.
    assert relative(right["out", 0], expected["out", 0]) <= TOLERANCE
    assert relative(cache["out", 0], expected["out", 0]) > 0.05
    good, bad = (with_sink(c["blocks.0.mlp.hook_pattern"]) for c in (right, cache))
    assert (good - bad).abs().max() > 0.1
    square = good[..., :POS]
    if wrong == "sees no sink":
        assert torch.equal(bad[..., :POS], torch.eye(POS, dtype=torch.float64).expand_as(square))
    if wrong == "key of the wrong sign":  # the weights of the sink and of the token are swapped
        swapped = torch.diag_embed(good[..., POS])
        torch.testing.assert_close(bad[..., :POS], swapped, rtol=0, atol=TOLERANCE)
    if wrong == "sees two tokens":
        assert bad[..., 1:, :POS].diagonal(dim1=-2, dim2=-1).amax() > 0.1
