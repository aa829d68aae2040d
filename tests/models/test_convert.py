"""Tests that conversion is exact, and that a converted model can be copied, moved and trained.

Its logits are bitwise the source's without hooks, and equal up to rounding with all hooks.
"""

import copy
import io

import pytest
import torch
from common import POS, relative, tokens
from exposed_states import storages
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


@pytest.mark.parametrize("name", ["silu_gated", "parallel", "no_norm", "post_norm"])
def test_gradients(name):
    model = build(name)
    converted = convert(model)  # its parameters share the memory of the model's

    def gradients(net, *hooks):
        net.zero_grad()
        net.run_with_hooks(tokens(), fwd_hooks=list(hooks)).square().mean().backward()
        return {parameter.data_ptr(): parameter.grad for parameter in net.parameters()}

    expected = gradients(model)
    largest = max(grad.abs().max() for grad in expected.values() if grad is not None)
    # In parallel models, gradients are summed in another order than in the source.
    silent = 1e-12 if model.cfg.parallel_attn_mlp else 0.0
    every_hook = (lambda name: True, lambda x, hook: None)
    for hooks, tolerance in (((), silent), ((every_hook,), 1e-11)):
        found = gradients(converted, *hooks)
        assert found.keys() == expected.keys()
        for address, reference in expected.items():
            gradient = found[address]
            if reference is None:
                assert gradient is None
                continue
            # A key bias's gradient is only rounding noise: use the other gradients' scale.
            scale = max(reference.abs().max(), 1e-4 * largest)
            assert (gradient - reference).abs().max() <= tolerance * scale


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act_fn", ["gelu", "gelu_new", "relu"])
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
    for point in (attn.hook_pattern, attn.hook_attn_scores, attn.hook_k, attn.hook_z):
        point.register_forward_hook(lambda *_: None)
    got = attn(x)
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


# Weights


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", ["llama", "parallel"])
def test_weights_are_shared_or_copied_and_the_source_is_not_changed(name, copied):
    model = build(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    cfg, state = copy.deepcopy(vars(model.cfg)), torch.get_rng_state()
    expected = model(tokens())
    converted = convert(model, copy_weights=copied)
    assert torch.equal(converted(tokens()), expected)
    if copied:
        owned = {p.untyped_storage().data_ptr() for p in converted.parameters()}
        assert owned.isdisjoint(storages(model))
    else:
        assert storages(converted) == storages(model)
    converted.run_with_cache(tokens())
    converted.to(torch.float32, print_details=False)
    assert converted.cfg.dtype == converted.blocks[1].cfg.dtype == torch.float32
    assert converted(tokens()).dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.cfg) == cfg
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model(tokens()), expected)


@pytest.mark.parametrize("copied", [True, False])
def test_training_a_copy_leaves_the_source_whole_and_a_shared_one_trains_both(copied):
    model = build("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    converted = convert(model, copy_weights=copied)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    converted(tokens(), return_type="loss").backward()
    optimizer.step()
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert same is copied


def test_copies_and_files():
    converted = convert(build("llama"))
    expected = converted(tokens())
    twin = copy.deepcopy(converted)
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    filled = convert(build("llama", scale=0.1))
    filled.load_state_dict(converted.state_dict())
    for model in (twin, loaded, filled):
        assert torch.equal(model(tokens()), expected)
        assert model.blocks[1].attn.cfg.n_heads == 37
        model.set_use_attn_result(True)  # a block's cfg is a live view of its own model's cfg
        assert model.blocks[1].attn.cfg.use_attn_result
    assert not converted.cfg.use_attn_result
    assert storages(twin).isdisjoint(storages(converted))
