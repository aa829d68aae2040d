"""Tests that conversion is exact: bitwise without hooks, up to rounding with all hooks."""

import pytest
import torch
from common import POS, relative, tokens
from models import FAMILIES, STRUCTURES, build

from attn_only_lens import convert
from attn_only_lens.tolerances import LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_float64(name):
    model = build(name)
    converted = convert(model)
    expected = model(tokens())
    assert torch.equal(converted(tokens()), expected)
    hooked, cache = converted.run_with_cache(tokens())
    assert relative(hooked, expected) <= 1e-12
    assert cache["pattern", 1].shape == (*tokens().shape[:1], 37, POS, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_lower_precision_is_as_near_to_the_truth_as_the_source(dtype):
    """The float64 model is the reference; `test_float64` checks it to 1e-12."""
    ratios = []
    for name in STRUCTURES:
        model = build(name, dtype=dtype, scale=0.2)
        expected = model(tokens())
        converted = convert(model)
        assert torch.equal(converted(tokens()), expected)
        hooked, _ = converted.run_with_cache(tokens())
        assert hooked.dtype == dtype
        bound = LOGIT_TOLERANCE[dtype]
        assert relative(hooked.double(), expected.double()) <= bound
        truth = model.to(torch.float64, print_details=False)(tokens())
        ratios.append(relative(hooked, truth) / relative(expected, truth))
    ratios = torch.tensor(ratios)
    assert 0.8 < ratios.median() < 1.25
    assert ratios.max() < 3


@pytest.mark.parametrize("name", ["gelu", "silu_gated", "parallel", "no_norm", "post_norm"])
def test_gradients(name):
    model = build(name)
    model.requires_grad_(True)
    plain, hooked = convert(model, copy_weights=True), convert(model, copy_weights=True)
    for net in (model, plain, hooked):
        hooks = [(lambda name: True, lambda x, hook: None)] if net is hooked else []
        net.run_with_hooks(tokens(), fwd_hooks=hooks).square().mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    largest = max(grad.abs().max() for grad in expected.values() if grad is not None)
    # In parallel models, gradients are summed in another order than in the source.
    silent = 1e-12 if model.cfg.parallel_attn_mlp else 0.0
    for net, tolerance in ((plain, silent), (hooked, 1e-11)):
        grads = [p.grad for p in net.parameters()]
        assert len(grads) == len(expected)
        for gradient, (key, reference) in _matched(net, expected):
            if reference is None:
                assert gradient is None
                continue
            assert gradient.shape == reference.shape, key
            if tolerance == 0.0:
                assert torch.equal(gradient, reference), key
            else:
                # A key bias's gradient is only rounding noise: use the other gradients' scale.
                scale = max(reference.abs().max(), 1e-4 * largest)
                assert (gradient - reference).abs().max() <= tolerance * scale, key


def _matched(net, expected):
    """Yield the source's name of every parameter of a converted model."""
    for name, parameter in net.named_parameters():
        parts = name.split(".")
        if parts[0] == "blocks":
            block = int(parts[1])
            parts[1] = str(block // 2)
            if block % 2:
                parts[2] = {"attn": "mlp", "ln1": "ln2", "ln1_post": "ln2_post"}[parts[2]]
        key = ".".join(parts)
        yield parameter.grad, (key, expected[key])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act_fn", ["gelu", "gelu_new", "relu", "silu"])
@torch.no_grad()
def test_no_nan_where_the_source_has_none(act_fn, gated):
    """Inputs from tiny to overflowing give no nan in any hook where the source has none."""
    dtype = torch.float16
    model = build("silu_gated" if gated else "silu", dtype=dtype, act_fn=act_fn)
    mlp = model.blocks[1].mlp
    x = torch.zeros(1, 7, 26, dtype=dtype)
    x[0, :, 0] = torch.tensor([0.0, 1.0, -12.0, 100.0, -100.0, 3e4, -3e4], dtype=dtype)
    (mlp.W_gate if gated else mlp.W_in).data[0] = 2.0
    if gated:
        mlp.W_in.data[0] = 1.0
    expected = mlp(x)
    attn = convert(model).blocks[3].attn
    handles = [
        point.register_forward_hook(lambda *_: None)
        for name, point in attn.named_children()
        if name.startswith("hook_")
    ]
    got = attn(x)
    assert handles
    assert not (got.isnan() & ~expected.isnan()).any()
    usual = expected.isfinite() & (expected.abs() < 1e3)
    difference = (got.double() - expected.double())[usual].abs().max()
    scale = expected.double()[usual].abs().max()
    assert difference <= 4 * torch.finfo(dtype).eps * scale


def test_the_control_fails():
    """A gate of another activation exceeds the bounds used above by far."""
    model = build("gelu")
    converted = convert(model)
    vars(converted.cfg)["act_fn"] = "gelu_new"  # bypass the read-only check
    hooked, _ = converted.run_with_cache(tokens())
    assert relative(hooked, model(tokens())) > 1e-6
