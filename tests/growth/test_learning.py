"""Tests that new entries are seeded, form no equal units, and have a gradient unless documented."""

import pytest
import torch
from common import relative, tokens
from growing import all_steps
from models import build

from analyses.tools.gradmax import grad_max, gradient_products
from attn_only_lens import convert, grow
from attn_only_lens import expansion as ex
from attn_only_lens.errors import GrowthError, UnsupportedCallError
from attn_only_lens.growth import read
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

INITS = {
    "own": ex.init.own(),
    "normal": ex.init.normal(0.1),
    "copies": ex.init.copies(0.1),
}
STEPS = {
    "neurons": ex.AddNeurons(5),
    "heads": ex.AddHeads(2),
    "width": ex.compose(ex.WidenValues(3), ex.WidenQueriesAndKeys(3)),
    "stream": ex.WidenStream(11),
    "layer": ex.InsertLayer(1),
}


def entries(grown):
    """Return one mask of the new entries for every tensor."""
    masks = {name: torch.ones_like(p) for name, p in grown.model.named_parameters()}
    for axis_of in list(masks):
        old = grown.provenance.old_name(axis_of)
        if old is not None:
            moved = grown.provenance.tensor_map(old)
            shape = [len(axis.new_of) for axis in moved.axes]
            masks[axis_of] = moved.put(torch.zeros(shape).double(), masks[axis_of])
    return {name: mask.bool() for name, mask in masks.items()}


def trained(model, n_steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(tokens(), return_type="loss").backward()
        optimizer.step()
    optimizer.zero_grad()
    model(tokens(), return_type="loss").backward()
    return model


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("init", INITS)
def test_new_units_learn(init, step):
    grown = grow(build("gelu"), STEPS[step], init=INITS[init])
    new = entries(grown)
    trained(grown.model)
    for name, parameter in grown.model.named_parameters():
        mask = new[name]
        if not mask.any() or name.endswith("b_K"):  # softmax ignores what b_K adds
            continue
        # Every new entry of a matrix has a gradient, not only some.
        moving = (parameter.grad[mask] != 0).double().mean()
        unread = name.endswith(("W_E", "W_pos"))  # rows of tokens and positions not in the batch
        assert moving > (0.2 if unread else 0.99), (name, moving)


@pytest.mark.parametrize("step", STEPS)
def test_zeros_are_dead(step):
    """The control: with `init.zeros()`, no new entry has a gradient."""
    family = "rms" if step == "stream" else "gelu"  # LayerNorm's mean depends on new coordinates
    grown = grow(build(family), STEPS[step], init=ex.init.zeros())
    new = entries(grown)
    trained(grown.model)
    for name, parameter in grown.model.named_parameters():
        writes_alone = name.endswith(("b_out", "b_O"))  # a new layer's output biases need no unit
        if new[name].any() and not (step == "layer" and writes_alone):
            assert not parameter.grad[new[name]].any(), name


@pytest.mark.parametrize("init", INITS)
def test_seeds_and_equal_units(init):
    model = build("gelu")
    step = ex.compose(ex.AddNeurons(7), ex.AddNeurons(7), ex.AddHeads(2), ex.InsertLayer(1))
    first, same, reseeded = (
        grow(model, step, init=INITS[init], seed=seed).model.state_dict() for seed in (3, 3, 4)
    )
    for name in first:
        assert torch.equal(first[name], same[name])
    read = first["blocks.0.mlp.W_in"]
    assert not torch.equal(read, reseeded["blocks.0.mlp.W_in"])
    distances = torch.cdist(read.T, read.T) + 9 * torch.eye(read.shape[1])
    assert distances.min() > 0.01  # no two new neurons are alike, in either growth step
    assert not torch.equal(first["blocks.0.attn.W_Q"][2], first["blocks.0.attn.W_Q"][3])
    assert not torch.equal(first["blocks.0.mlp.W_in"][:, 37:], first["blocks.2.mlp.W_in"][:, 37:])


@pytest.mark.parametrize("init", ["own", "normal"])
def test_no_layer_repeats_what_another_of_its_name_drew(init):
    first, second = ex.InsertLayer(1), ex.InsertLayer(1)
    grown = grow(build("gelu"), ex.compose(first, second), init=INITS[init]).model
    again = grow(grow(build("gelu"), first, init=INITS[init]).model, second, init=INITS[init]).model
    for model in (grown, again):
        assert not torch.equal(model.blocks[1].attn.W_Q, model.blocks[2].attn.W_Q)
    steps = ex.AddNeurons(3, layers=[0]), ex.InsertLayer(0, like=1), ex.AddNeurons(3, layers=[0])
    grown = grow(convert(build("gelu")), ex.compose(*steps), init=INITS[init])
    tensors = read(grown.model).tensors
    first, second = (tensors[f"blocks.{layer}.mlp.W_in"][:, -3:] for layer in (0, 1))
    assert first.shape == second.shape
    assert (first - second).abs().min() > 0


def test_a_copied_head_is_one_head():
    """With almost no noise, every tensor of a new head is nearest to one old head's tensor."""
    grown = grow(build("gelu", n_heads=13, d_head=2), ex.AddHeads(5), init=ex.init.copies(1e-9))
    nearest = set()
    for of in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
        heads = getattr(grown.model.blocks[0].attn, of).flatten(1)
        nearest.add(tuple(torch.cdist(heads[13:], heads[:13]).argmin(dim=1).tolist()))
    assert len(nearest) == 1


def test_the_dtype_does_not_choose_the_numbers():
    double = grow(build("gelu"), d_mlp=41, seed=1).model.W_in[0, :, 37:]
    single = grow(build("gelu", dtype=torch.float32), d_mlp=41, seed=1).model.W_in[0, :, 37:]
    assert torch.equal(double.float(), single)


@pytest.mark.parametrize(
    "mode", ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"]
)
def test_own_is_transformerlens_own(mode):
    """New entries have the deviation and bounds that TransformerLens gives the larger model."""
    cfg = {"n_layers": 1, "d_model": 64, "n_ctx": 61, "d_head": 32, "n_heads": 2, "d_mlp": 67}
    cfg |= {"d_vocab": 59, "act_fn": "gelu", "init_mode": mode, "seed": 0}
    model = HookedTransformer(HookedTransformerConfig(**cfg))
    grown = grow(model, n_layers=2, d_mlp=256).model
    larger = HookedTransformer(HookedTransformerConfig(**cfg | {"d_mlp": 256}))
    for of in ("attn.W_Q", "attn.W_V", "mlp.W_in"):
        got = grown.get_parameter(f"blocks.1.{of}")
        expected = larger.get_parameter(f"blocks.0.{of}")
        assert got.std().item() == pytest.approx(expected.std().item(), rel=0.05), of
        if mode.endswith("uniform"):
            bounds = (logits_of.abs().max().item() for logits_of in (got, expected))
            assert next(bounds) == pytest.approx(next(bounds), rel=0.01)
    assert (grown.blocks[1].ln1.w == 1).all()


def test_grad_max_has_the_largest_first_gradient():
    model = build("gelu")
    products = gradient_products(model, tokens())
    by_prompt = gradient_products(model, tokens(), batch_size=1)
    assert (
        relative(gradient_products(model, tokens(), loss=twice_the_mean)[1], by_prompt[1]) < 1e-12
    )

    def first_gradient(init):
        grown = grow(model, ex.AddNeurons(3), init=init).model
        grown(tokens(), return_type="loss").backward()
        return grown.blocks[1].mlp.W_out.grad[37:].norm().item()

    std = 1e-4  # gelu is linear at this scale, with slope 1/2
    best = first_gradient(grad_max(products, std=std))
    largest = torch.linalg.svdvals(products[1])[:3].norm().item()
    assert best == pytest.approx(0.5 * std * 26**0.5 * largest, rel=1e-2)
    assert best > 1.5 * max(first_gradient(_Seeded(std, seed)) for seed in range(5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grad_max_twice_makes_no_neuron_twice(dtype):
    model = build("gelu")
    init = grad_max(gradient_products(model, tokens()))
    model = model.to(dtype)
    twice = grow(model, ex.compose(ex.AddNeurons(3), ex.AddNeurons(3)), init=init).model
    new = torch.nn.functional.normalize(twice.W_in[0, :, 37:].double(), dim=0)
    assert (new.T @ new - torch.eye(6)).abs().max() < 0.02  # six orthogonal columns, up to rounding
    with pytest.raises(ValueError, match="expected d_model by d_model, 29"):
        grow(model, ex.compose(ex.WidenStream(3), ex.AddNeurons(3)), init=init)


def twice_the_mean(logits, batch):
    """Return the loss times the number of prompts, so batches of one prompt add up to one batch."""
    scores = logits[:, :-1].log_softmax(-1).gather(-1, batch[:, 1:, None])
    return -scores.mean() * len(batch)


class _Seeded:
    """Random values with a given seed, whose columns have GradMax's norm."""

    def __init__(self, std, seed):
        self.draw, self.std, self.seed = ex.init.normal(std), std, seed

    def __call__(self, new, seed):
        made = self.draw(new, self.seed)
        if new.name.endswith("W_in"):
            return made / made.norm(dim=0) * self.std * made.shape[0] ** 0.5
        return torch.zeros_like(made)


def test_grad_max_leaves_the_rest_to_own():
    model = build("gelu")
    products = gradient_products(model, tokens())
    some = grad_max({0: products[0]})
    first, second = (grow(model, all_steps(model), init=init).model for init in (some, None))
    differing = [
        name
        for name, p in first.named_parameters()
        if not torch.equal(p, second.get_parameter(name))
    ]
    assert differing == ["blocks.0.mlp.W_in"]
    assert all(p.grad is None for p in model.parameters())
    assert not any(block.mlp._forward_hooks for block in model.blocks)
    many = grow(model, ex.AddNeurons(31), init=some).model.W_in[0, :, 37:]
    assert many.norm(dim=0).min() > 0  # columns beyond d_model come from `own`
    with pytest.raises(GrowthError, match="gated MLPs"):
        gradient_products(build("llama"), tokens())
    with pytest.raises(GrowthError, match=r"got a torch\.nn\.modules\.linear\.Linear"):
        gradient_products(torch.nn.Linear(2, 2), tokens())
    for size in (0, -1, 2.5, None):
        with pytest.raises(GrowthError, match=f"got batch_size={size}"):
            gradient_products(model, tokens(), batch_size=size)
    with pytest.raises(UnsupportedCallError, match="got list"):
        gradient_products(model, tokens().tolist())


def test_wishes_that_would_be_dead():
    with pytest.raises(ValueError, match="more than 0"):
        ex.init.normal(0.0)
    with pytest.raises(ValueError, match="a unit and its copy in the same way"):
        ex.init.copies(0.0)
