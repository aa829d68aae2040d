"""Tests that new entries are seeded, form no equal units, and have a gradient unless documented."""

import pytest
import torch
from common import relative, tokens
from growing import is_new, loss, native, weights_and_gradients
from transformer_lens.model_bridge import TransformerBridge

from analyses.tools.gradmax import grad_max, gradient_products
from attn_only_lens import grow, growth
from attn_only_lens.growth import read

pytestmark = pytest.mark.numeric

INITS = {
    "own": growth.init.own(),
    "normal": growth.init.normal(0.1),
    "copies": growth.init.copies(0.1),
}
STEPS = {
    "neurons": growth.AddNeurons(5),
    "heads": growth.AddHeads(2),
    "width": growth.compose(growth.WidenValues(3), growth.WidenQueriesAndKeys(3)),
    "stream": growth.WidenStream(11),
    "layer": growth.InsertLayer(1),
}


def trained(model, n_steps=3):
    """Train, and leave the gradients of the next step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(n_steps + 1):
        optimizer.zero_grad()
        loss(model).backward()
        if step < n_steps:
            optimizer.step()
    return model


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("init", INITS)
def test_new_units_learn(init, step):
    grown = grow(native(), STEPS[step], init=INITS[init])
    trained(grown.model)
    for name, (_, gradient) in weights_and_gradients(grown.model).items():
        new = is_new(grown.provenance, name, gradient)
        if new.any() and not name.endswith("b_K"):  # softmax ignores what b_K adds
            # Every new entry of a matrix has a gradient, not only some.
            moving = (gradient[new] != 0).double().mean()
            unread = name.endswith(("W_E", "W_pos"))  # tokens and positions not in the batch
            assert moving > (0.2 if unread else 0.99), (name, moving)


@pytest.mark.parametrize("step", STEPS)
def test_zeros_are_dead(step):
    """The control: with `init.zeros()`, no new entry has a gradient."""
    family = "rms" if step == "stream" else "ln"  # LayerNorm's mean depends on new coordinates
    grown = grow(native(family), STEPS[step], init=growth.init.zeros())
    trained(grown.model)
    for name, (_, gradient) in weights_and_gradients(grown.model).items():
        writes_alone = name.endswith(("b_out", "b_O"))  # a new layer's output biases need no unit
        if not (step == "layer" and writes_alone):
            assert not gradient[is_new(grown.provenance, name, gradient)].any(), name


@pytest.mark.parametrize("init", INITS)
def test_seeds_and_equal_units(init):
    step = growth.compose(
        growth.AddNeurons(7), growth.AddNeurons(7), growth.AddHeads(2), growth.InsertLayer(1)
    )
    first, same, reseeded = (
        read(grow(native(), step, init=INITS[init], seed=seed).model).tensors for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    reads = first["blocks.0.mlp.W_in"]
    assert not torch.equal(reads, reseeded["blocks.0.mlp.W_in"])
    distances = torch.cdist(reads.T, reads.T) + 9 * torch.eye(reads.shape[1])
    assert distances.min() > 0.01  # no two new neurons are alike, in either growth step
    assert not torch.equal(first["blocks.0.attn.W_Q"][2], first["blocks.0.attn.W_Q"][3])
    assert not torch.equal(first["blocks.0.mlp.W_in"][:, 37:], first["blocks.2.mlp.W_in"][:, 37:])


@pytest.mark.parametrize("mode", ["gpt2", "xavier_uniform", "kaiming_normal"])
def test_own_is_transformerlens_own(mode):
    """New entries have the deviation and bounds that TransformerLens gives the larger model."""
    cfg = {"n_layers": 1, "d_model": 64, "n_ctx": 61, "d_head": 32, "n_heads": 2, "d_mlp": 67}
    cfg |= {"d_vocab": 59, "act_fn": "gelu_new", "init_mode": mode, "seed": 0}
    grown = read(grow(TransformerBridge.boot_native(cfg), n_layers=2, d_mlp=256).model).tensors
    larger = read(TransformerBridge.boot_native(cfg | {"d_mlp": 256})).tensors
    for of in ("attn.W_Q", "attn.W_V", "mlp.W_in"):
        got, expected = grown[f"blocks.1.{of}"], larger[f"blocks.0.{of}"]
        assert got.std().item() == pytest.approx(expected.std().item(), rel=0.05), of
        if mode.endswith("uniform"):
            largest = expected.abs().max().item()
            assert got.abs().max().item() == pytest.approx(largest, rel=0.01)
    assert (grown["blocks.1.ln1.w"] == 1).all()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: growth.init.normal(0.0), "more than 0"),
        (lambda: growth.init.copies(0.0), "a unit and its copy in the same way"),
        (lambda: growth.init.splits(1.0), "got share=1.0"),
        (lambda: growth.init.splits(noise=0.0), "a unit and its copy in the same way"),
    ],
)
def test_units_that_would_be_dead_or_equal_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_grad_max_has_the_largest_first_gradient():
    model, seen = native(), {}
    products = gradient_products(model, tokens())

    def keep(value, hook):
        seen[hook.name.split("_")[-1]] = value
        value.retain_grad()

    with model.hooks([(f"blocks.1.mlp.hook_{end}", keep) for end in ("in", "out")]):
        loss(model).backward()
    expected = torch.einsum("bpm,bpn->mn", seen["in"], seen["out"].grad)
    assert relative(products[1], expected) < 1e-12
    std = 1e-4  # gelu is linear at this scale, with slope 1/2
    grown = grow(model, growth.AddNeurons(3), init=grad_max(products, std=std)).model
    assert relative(grown(tokens()), model(tokens())) < 1e-12
    loss(grown).backward()
    first = weights_and_gradients(grown)["blocks.1.mlp.W_out"][1][37:].norm().item()
    largest = torch.linalg.svdvals(expected)[:3].norm().item()
    assert first == pytest.approx(0.5 * std * 26**0.5 * largest, rel=1e-2)
