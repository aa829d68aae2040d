"""Tests of initial values: new entries are seeded, form no equal units, and have a gradient."""

import pytest
import torch
from common import relative, tokens
from growing import (
    evaluate,
    gradients,
    is_new,
    loss,
    native,
    random_weights,
    same_bits,
    training_step,
)
from transformer_lens.model_bridge import TransformerBridge

from analyses.tools.gradmax import GradMax, gradient_products
from attn_only_lens import grow, growth
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.activations import activation_map
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.initialise import _Splits
from attn_only_lens.growth.models._grow import read
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

INITS = {
    "own": growth.init.own(),
    "normal": growth.init.normal(0.1),
    "copies": growth.init.copies(0.1),
}
STEPS = {
    "neurons": growth.AddNeurons(5),
    "heads": growth.AddHeads(2),
    "width": compose(growth.WidenValues(3), growth.WidenQueriesAndKeys(3)),
    "stream": growth.WidenStream(11),
    "layer": growth.InsertLayer(1),
}


def trained(model, n_steps=3):
    """Train, and leave the gradients of the next step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(n_steps):
        training_step(model, optimizer)
    optimizer.zero_grad()
    loss(model).backward()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("init", INITS)
def test_new_units_learn(init, step):
    grown = grow(native(), STEPS[step], init=INITS[init])
    trained(grown.model)
    for name, gradient in gradients(grown.model).items():
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
    for name, gradient in gradients(grown.model).items():
        writes_alone = name.endswith(("b_out", "b_O"))  # a new layer's output biases need no unit
        if not (step == "layer" and writes_alone):
            assert not gradient[is_new(grown.provenance, name, gradient)].any(), name


@pytest.mark.parametrize("init", INITS)
def test_seeds_and_equal_units(init):
    step = compose(
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
    grad_max = GradMax(products)

    def small(new, seed):
        made = grad_max(new, seed)  # gelu is linear at this scale, with slope 1/2
        return 1e-3 * made if new.name.endswith("W_in") else made

    grown = grow(model, growth.AddNeurons(3), init=small).model
    assert relative(grown(tokens()), model(tokens())) < 1e-12
    loss(grown).backward()
    first = gradients(grown)["blocks.1.mlp.W_out"][37:].norm().item()
    length = read(grown).tensors["blocks.1.mlp.W_in"][:, 37:].norm(dim=0).mean().item()
    largest = torch.linalg.svdvals(expected)[:3].norm().item()
    assert first == pytest.approx(0.5 * length * largest, rel=1e-2)


# New units without zeros: the same function, gradients at the first step, and `shrink`

EXACT = LOGIT_TOLERANCE[torch.float64]
# The random values are large, so terms must cancel in pairs; small values would hide errors.
PAIRED = {"cancelling": growth.init.cancelling(0.5), "splits": growth.init.splits(0.3, 0.7)}
WITHOUT_ZEROS = pytest.mark.parametrize("init", PAIRED)
NEURONS = growth.AddNeurons(4)
WIDTH = compose(growth.WidenValues(4), growth.WidenQueriesAndKeys(4))
# Of an odd number of new units, one has no other to form a pair with.
ODD = (
    growth.AddNeurons(5),
    growth.AddHeads(3),
    growth.WidenValues(3),
    growth.WidenQueriesAndKeys(3),
    growth.WidenStream(11),
    growth.InsertLayer(1),
)
# Constants of the weights
CASES = {
    "layer norm": {"norm": "LN", "final_norm": "LN"},
    "no norm": {"norm": None, "final_norm": None},
    "query norm": {"qk_norm": "by head"},
    "norms before and after": {"norm_place": "both"},
    "grouped": {"kv_head": 1, "grouped": True, "gated": True},
    "clipped": {"clip_qkv": 0.3},
}


@WITHOUT_ZEROS
@pytest.mark.parametrize("case", CASES)
def test_the_same_function(case, init):
    weights = random_weights(**CASES[case])
    steps = [step for step in ODD if not step.reasons_against(weights)]
    grown, provenance = compose(*steps)(weights, PAIRED[init], seed=3)
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    assert provenance.ties
    assert not provenance.broken(grown.tensors)


@pytest.mark.parametrize("family", ["ln", "gated"])
@WITHOUT_ZEROS
def test_all_of_a_new_unit_sees_a_gradient_at_the_first_step(family, init):
    steps = {"neurons": NEURONS, "heads": growth.AddHeads(6), "width": WIDTH}
    if init != "splits":  # zeros stay there
        steps["layer"] = growth.InsertLayer(1)
    for step, expansion in steps.items():
        grown = grow(native(family), expansion, init=PAIRED[init])
        loss(grown.model).backward()
        for name, gradient in gradients(grown.model).items():
            if not name.endswith(("W_in", "W_gate", "W_V")):
                continue
            new = is_new(grown.provenance, name, gradient)
            if step == "layer" and not name.endswith("W_V"):
                new[..., 36:] = False  # the odd neuron
            if new.any():
                assert (gradient[new] != 0).double().mean() > 0.99, (step, name)


@WITHOUT_ZEROS
def test_some_heads_only(init):
    weights, some = random_weights(), {"layers": [1], "heads": [0]}
    step = compose(growth.WidenValues(4, **some), growth.WidenQueriesAndKeys(4, **some))
    grown, _ = step(weights, PAIRED[init])
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    old, new = (x.tensors["blocks.1.attn.W_O"] for x in (weights, grown))
    assert torch.equal(new[1, :7], old[1])  # the other heads
    assert not new[1, 7:].any()


@WITHOUT_ZEROS
def test_broken_pairs_change_the_function_and_are_refused(init):
    model = native()
    grown = grow(model, NEURONS, init=PAIRED[init])
    read(grown.model).tensors["blocks.1.mlp.W_in"][3, 39] += 1e-3
    assert relative(grown.model(tokens()), model(tokens())) > 1e-6
    with pytest.raises(InputError, match="were equal or opposite") as error:
        grown.shrink()
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["blocks.1.mlp.W_in"]
    assert same_bits(grown.shrink(drop_new=True), model)  # nothing else was changed


def test_what_copies_write_goes_back_to_the_old_unit_after_training():
    model = native()
    grown = grow(model, [growth.AddNeurons(40), growth.AddHeads(1)], init=PAIRED["splits"])
    for name, tensor in read(grown.model).tensors.items():
        if name.endswith(("W_out", "W_O")):
            tensor += torch.randn_like(tensor)
    shrunk = grown.shrink()
    assert relative(shrunk(tokens()), grown.model(tokens())) < EXACT
    assert relative(shrunk(tokens()), model(tokens())) > 0.1


def test_a_written_part_that_was_shared_out_is_no_old_activation():
    _, provenance = growth.AddHeads(3)(random_weights(), PAIRED["splits"])
    with pytest.raises(KeyError, match="copies share the outputs of old units"):
        activation_map(provenance, "blocks.1.attn.hook_result")
    assert activation_map(provenance, "blocks.1.attn.hook_z").scale == 1.0


@pytest.mark.parametrize(("noise", "apart"), [(0.0, False), (0.7, True)])
def test_noise_parts_copies_at_the_first_step_of_adam(noise, apart):
    grown = grow(native(), NEURONS, init=_Splits(0.3, noise))
    optimizer = torch.optim.Adam(grown.model.parameters(), lr=1e-2, eps=1e-12)
    (shares, *_) = grown.provenance.shares
    loss(grown.model).backward()
    optimizer.step()
    reads = read(grown.model).tensors["blocks.0.mlp.W_in"]
    distance = (reads[:, list(shares.new)] - reads[:, list(shares.of)]).abs().max()
    assert (distance > 1e-3) == apart
    assert apart or distance < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@WITHOUT_ZEROS
def test_models_and_the_way_back_to_the_bit(init, dtype):
    model = native("gated", dtype)
    steps = (growth.AddNeurons(5), growth.AddHeads(2), WIDTH, growth.InsertLayer(1))
    grown = grow(model, [*steps], init=PAIRED[init])
    assert relative(grown.model(tokens()), model(tokens())) < LOGIT_TOLERANCE[dtype]
    assert same_bits(grown.shrink(), model)
