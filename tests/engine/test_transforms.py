"""Tests of torch's transforms of a model with hooks on its neuron-heads, against plain loops."""

import pytest
import torch
from bridges import boot
from common import IN_PLACE, mlp_hook, relative, tokens
from torch.export.graph_signature import InputKind

from attn_only_lens import expose_neuron_heads
from attn_only_lens.errors import UnsupportedCallError

# These warnings come from torch: from vmap, and from modules that jvp and export import.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:The tensor attribute"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
EXACT = 1e-12  # rounding in float64 over two layers
START = "blocks.0.hook_resid_pre"


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def exposed(request):
    model = boot(request.param)
    expose_neuron_heads(model)
    model.set_use_attn_result(True)
    return model


def metric(output):
    logits = getattr(output, "logits", output)
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


def loss_with_a_hook(model, point):
    """Return the metric as a function of a shift of the stream, with an active hook on a point."""

    def loss(shift):
        hooks = [(START, lambda x, hook: x + shift), (mlp_hook(point, 0), lambda x, hook: 1.1 * x)]
        return metric(model.run_with_hooks(tokens(), fwd_hooks=hooks))

    return loss


def shifts(model):
    generator = torch.Generator().manual_seed(0)
    return torch.randn((3, 1, 1, model.cfg.d_model), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("point", ["post", *IN_PLACE])
def test_transforms_of_torch_func(exposed, point):
    """Control: `hook_post` is the MLP's own hook point."""
    loss, stack = loss_with_a_hook(exposed, point), shifts(exposed)
    expected = []
    for shift in stack:
        leaf = shift.clone().requires_grad_()
        expected.append(torch.autograd.grad(loss(leaf), leaf)[0])
    assert all(gradient.abs().max() > 1e-6 for gradient in expected)
    same = {"randomness": "same"}  # inactive dropout still draws random numbers
    assert relative(torch.func.grad(loss)(stack[0]), expected[0]) <= EXACT
    gradients = torch.func.vmap(torch.func.grad(loss), **same)(stack)
    assert relative(gradients, torch.stack(expected)) <= EXACT
    with torch.no_grad():
        values = torch.stack([loss(shift) for shift in stack])
        assert relative(torch.func.vmap(loss, **same)(stack), values) <= EXACT
    if point in ("post", "k", "pattern"):
        assert relative(torch.func.jacrev(loss)(stack[0]), expected[0]) <= EXACT
        slope = torch.func.jvp(loss, (stack[0],), (stack[1],))[1]
        by_gradient = (expected[0] * stack[1]).sum()
        # Some families compute in float32 in places, where jvp and the gradient round differently.
        assert abs(slope - by_gradient) <= 1e-5 * expected[0].norm() * stack[1].norm()


class _Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        output = self.model(x)
        return getattr(output, "logits", output)


def exported(module):
    """Export a module as a function; a bridge has a module named `in`, so no Python code works."""
    program = torch.export.export(module, (tokens(),), strict=False)
    held = {**program.state_dict, **program.constants}

    def run(x):
        inputs = [
            x if spec.kind is InputKind.USER_INPUT else held[spec.target]
            for spec in program.graph_signature.input_specs
        ]
        return torch.fx.Interpreter(program.graph_module).run(*inputs)[0]

    return run


@torch.no_grad()
def test_export(exposed):
    """All hooks are active at once, and the exported program runs on new tokens."""
    module = _Logits(exposed)
    plain = module(tokens(1))  # a bridge must run once before its export
    for point in IN_PLACE:
        exposed.add_hook(mlp_hook(point, 0), lambda x, hook: 1.1 * x)
    expected = module(tokens(1))
    try:
        got = exported(module)(tokens(1))
    finally:
        exposed.reset_hooks()
    assert relative(got, expected) <= EXACT
    assert relative(plain, expected) > 1e-3


@torch.no_grad()
def test_an_mlp_that_changed_is_seen_under_transforms():
    """vmap refuses at once, and an exported program when it runs."""
    model = boot("gpt2")
    expose_neuron_heads(model)
    loss, stack = loss_with_a_hook(model, "pattern"), shifts(model)
    module = _Logits(model)
    module(tokens())
    model.blocks[0].mlp.original_component.act = torch.nn.Tanh()
    with pytest.raises(UnsupportedCallError, match="no longer computes"):
        torch.func.vmap(loss, randomness="same")(stack)
    model.add_hook(mlp_hook("pattern", 0), lambda x, hook: x)
    with pytest.raises(RuntimeError, match="no longer computes"):
        exported(module)(tokens(1))
