"""Tests of torch's transforms of a model with hooks on its neuron-heads, against plain loops."""

import pytest
import torch
from bridges import boot
from common import mlp_hook, relative, tokens
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


@pytest.fixture(scope="module")
def exposed():
    model = boot("gpt2")
    expose_neuron_heads(model)
    model.set_use_attn_result(True)
    return model


def loss_with_a_hook(model, point):
    """Return the metric as a function of a shift of the stream, with an active hook on a point."""

    def loss(shift):
        hooks = [(START, lambda x, hook: x + shift), (mlp_hook(point, 0), lambda x, hook: 1.1 * x)]
        logits = model.run_with_hooks(tokens(), fwd_hooks=hooks)
        return (logits[:, -1, 7] - logits[:, -1, 11]).sum()

    return loss


SHIFTS = torch.randn((3, 1, 1, 26), generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("point", ["post", "k", "pattern", "z", "result"])
def test_transforms_of_torch_func(exposed, point):
    """Control: `hook_post` is the MLP's own hook point."""
    loss, expected = loss_with_a_hook(exposed, point), []
    for shift in SHIFTS:
        leaf = shift.clone().requires_grad_()
        expected.append(torch.autograd.grad(loss(leaf), leaf)[0])
    assert all(gradient.abs().max() > 1e-6 for gradient in expected)
    same = {"randomness": "same"}  # inactive dropout still draws random numbers
    gradients = torch.func.vmap(torch.func.grad(loss), **same)(SHIFTS)
    assert relative(gradients, torch.stack(expected)) <= EXACT
    assert relative(torch.func.jacrev(loss)(SHIFTS[0]), expected[0]) <= EXACT
    slope = torch.func.jvp(loss, (SHIFTS[0],), (SHIFTS[1],))[1]
    by_gradient = (expected[0] * SHIFTS[1]).sum()
    assert abs(slope - by_gradient) <= EXACT * expected[0].norm() * SHIFTS[1].norm()


class Logits(torch.nn.Module):
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
def test_export_and_changes_of_the_mlp():
    """All hooks are active at once, and the exported program runs on new tokens.

    If the MLP has changed, vmap refuses at once, and an exported program when it runs.
    """
    model = boot("gpt2")
    expose_neuron_heads(model)
    module = Logits(model)
    plain = module(tokens(1))  # a bridge must run once before its export
    for point in ("q", "k", "v", "attn_scores", "pattern", "z"):
        model.add_hook(mlp_hook(point, 0), lambda x, hook: 1.1 * x)
    expected = module(tokens(1))
    assert relative(exported(module)(tokens(1)), expected) <= EXACT
    assert relative(plain, expected) > 1e-3
    model.blocks[0].mlp.original_component.act = torch.nn.Tanh()
    with pytest.raises(RuntimeError, match="no longer computes"):
        exported(module)(tokens(1))
    with pytest.raises(UnsupportedCallError, match="no longer computes"):
        torch.func.vmap(loss_with_a_hook(model, "pattern"), randomness="same")(SHIFTS)
