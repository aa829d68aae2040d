"""Tests of models with bilinear neuron-heads: the approximation error and every hook."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from common import D_MLP, N_LAYERS, POS, relative, tokens
from models import build

from attn_only_lens import Bilinear, convert, neuron_pattern
from attn_only_lens.errors import (
    InputError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.models.verify import verify
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = 1e-12
HEADS = {"silu": 1, "relu": 1}  # all other activations have 4


def bilinear(source, copy_weights=False, **options):
    """Return the source converted, with 4 heads per neuron where its activation allows it."""
    if source.cfg.gated_mlp:
        gate = Bilinear.calibrated(source, tokens(), heads=4)
    else:
        gate = Bilinear(HEADS.get(source.cfg.act_fn, 4))
    gate = dataclasses.replace(gate, **options)
    return convert(source, gate=gate, copy_weights=copy_weights)


def approximated(source, model):
    """Return a copy of the source whose activations are replaced by explicit sums of sigmoids."""
    source = copy.deepcopy(source)
    for layer, block in enumerate(source.blocks):
        gate = model.blocks[2 * layer + 1].attn.bilinear_gate
        terms = list(zip(gate.w, gate.b, gate.c, strict=True))

        def activation(q, terms=terms, gated=source.cfg.gated_mlp):
            total = torch.zeros_like(q)
            for w, b, c in terms:
                total += w * (1.0 if math.isinf(c) else 1 / (1 + torch.exp(-(b * q + c))))
            return total if gated else total * q

        block.mlp.act_fn = activation
    return source


@pytest.mark.parametrize(
    "name", ["silu", "gelu", "relu", "silu_gated", "relu_gated", "parallel", "post_norm"]
)
@torch.no_grad()
def test_float64(name):
    source = build(name)
    model = bilinear(source)
    expected = approximated(source, model)(tokens())
    assert relative(model(tokens()), expected) <= EXACT
    hooked, cache = model.run_with_cache(tokens())
    assert relative(hooked, expected) <= EXACT
    m = model.cfg.gating.heads
    assert cache["pattern", 1].shape == (2, D_MLP * m, POS, 2)


@torch.no_grad()
def test_the_control_fails():
    """Without its last head, or with its heads permuted, a neuron computes another function."""
    model = bilinear(build("gelu"))
    last = torch.arange(3, 4 * D_MLP, 4)
    for point, edit in (
        ("z", lambda z, hook: z.index_fill(2, last, 0.0)),
        ("pattern", lambda pattern, hook: pattern.roll(1, dims=1)),
    ):
        got = model.run_with_hooks(tokens(), fwd_hooks=[(f"blocks.3.attn.hook_{point}", edit)])
        assert relative(got, model(tokens())) > 1e-3


@pytest.mark.parametrize("point", ["q", "k", "v", "attn_scores", "pattern", "z", "result"])
def test_each_hook_point_alone_and_its_gradient(point):
    model = bilinear(build("llama"))
    model.set_use_attn_result(True)
    hook = f"blocks.3.attn.hook_{point}"
    logits, cache = model.run_with_cache(tokens(), names_filter=hook)
    assert list(cache) == [hook]
    assert relative(logits, model(tokens())) <= EXACT
    _, cache = model.run_with_cache(tokens(), return_type="loss", incl_bwd=True, names_filter=hook)
    assert cache[hook + "_grad"].shape == cache[hook].shape
    loss = model.run_with_hooks(
        tokens(), return_type="loss", fwd_hooks=[(hook, lambda x, hook: x.mul_(0.5))]
    )
    loss.backward()


@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_gradients(name):
    source = build(name)
    model = bilinear(source, copy_weights=True)
    oracle = approximated(source, model)
    for net in (model, oracle):
        net(tokens()).square().mean().backward()
    for block, mlp in zip(model.blocks[1::2], [b.mlp for b in oracle.blocks], strict=True):
        for weight in ("W_in", "b_in", "W_out", "b_out"):
            gradient, expected = getattr(block.attn, weight).grad, getattr(mlp, weight).grad
            assert (gradient - expected).abs().max() <= 1e-11 * expected.abs().max()


@torch.no_grad()
def test_heads_that_cancel_are_allowed_their_rounding():
    """In float32, `verify` allows larger errors where heads cancel; the CPU decides how large."""
    source = build("llama", dtype=torch.float32)
    model = bilinear(source, heads=6)
    report = verify(source, model, tokens())
    assert report.ok, report
    assert 8 < report.tolerance / LOGIT_TOLERANCE[torch.float32] < 17  # Σ|a| / R
    assert report.rounding < report.tolerance / 3
    damaged = bilinear(source, heads=6, copy_weights=True)
    damaged.blocks[3].attn.W_out.mul_(1.003)
    assert not verify(source, damaged, tokens()).ok


@torch.no_grad()
def test_names_and_parts():
    model = bilinear(build("gelu"))
    labels = model.all_head_labels(neurons=True)
    assert labels[2:7] == ["L0N0", "L0N1", "L0N2", "L0N3", "L0N4"]
    assert len(labels) == N_LAYERS * (2 + 4 * D_MLP)
    _, cache = model.run_with_cache(tokens())
    stack = cache.get_full_resid_decomposition(expand_neurons=True)
    assert relative(stack.sum(0), cache["resid_post", 5]) <= 1e-11
    gate = neuron_pattern(cache, "L1N29")[..., 0]
    torch.testing.assert_close(gate * cache["v", 3][:, :, 29, 0], cache["z", 3][:, :, 29, 0])
    pattern = neuron_pattern(cache, "L1N118")
    assert torch.equal(pattern, cache["pattern", 3][:, 29 * 4 + 2])
    with pytest.raises(InputError):
        neuron_pattern(cache, "L1N148")
    # A later change of the gates would misalign every label, so the settings are read-only.
    for name, value in (("gating", convert(build("gelu")).cfg.gating), ("act_fn", "relu")):
        with pytest.raises(UnsupportedCallError, match=f"{name} is read-only after conversion"):
            setattr(model.cfg, name, value)


def test_refused_with_all_reasons():
    gelu, llama = build("gelu"), build("llama")
    calibration = Bilinear.calibrated(llama, tokens()).calibration
    far = dataclasses.replace(calibration, ranges=(1e4, 3.0, 1e5))
    for model, gate, message in (
        (gelu, "bilinear", r"expected 'exact', attn_only_lens\.Bilinear"),
        (gelu, Bilinear(3), r"got heads=3; gelu has gates with \[1, 2, 4, 6, 8\]"),
        (gelu, Bilinear(calibration=calibration), "leave it out"),
        (llama, Bilinear(), "calibrated"),
        (llama, Bilinear(tolerance=1e-3, calibration=calibration), "error depends on the limit"),
        (llama, Bilinear(calibration=far), r"layers \[0\]: .*; layers \[2\]: "),
        (build("llama", n_layers=2), Bilinear(calibration=calibration), "ranges for 3 layers"),
        (build("relu", dtype=torch.float16), Bilinear(tolerance=1e-5), "convert in float32"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            convert(model, gate=gate)
    with pytest.raises(InputError, match="expected") as caught:
        Bilinear(heads=True, tolerance=True, calibration=(3.0, 2.0, 1.0))
    assert str(caught.value).count("expected") == 3
    assert Bilinear(np.int64(4), np.float32(0.5)) == Bilinear(4, 0.5)
