"""Tests of new units without zeros: the same function, gradients at the first step, `shrink`."""

import pytest
import torch
from common import relative, tokens
from growing import (
    evaluate,
    is_new,
    loss,
    native,
    random_weights,
    same_bits,
    weights_and_gradients,
)

from attn_only_lens import grow, growth
from attn_only_lens.errors import GrowthError
from attn_only_lens.growth import read
from attn_only_lens.growth.expansion.initialise import _Splits
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

EXACT = LOGIT_TOLERANCE[torch.float64]
# The random values are large, so terms must cancel in pairs; small values would hide errors.
INITS = {"cancelling": growth.init.cancelling(0.5), "splits": growth.init.splits(0.3, 0.7)}
EVERY_INIT = pytest.mark.parametrize("init", INITS)
NEURONS = growth.AddNeurons(4)
WIDTH = growth.compose(growth.WidenValues(4), growth.WidenQueriesAndKeys(4))
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


@EVERY_INIT
@pytest.mark.parametrize("case", CASES)
def test_the_same_function(case, init):
    weights = random_weights(**CASES[case])
    steps = [step for step in ODD if not step.reasons_against(weights)]
    grown, provenance = growth.compose(*steps)(weights, INITS[init], seed=3)
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    assert provenance.ties
    assert not provenance.broken(grown.tensors)


@pytest.mark.parametrize("family", ["ln", "gated"])
@pytest.mark.parametrize("init", [*INITS, "zeros in outputs"])
def test_all_of_a_new_unit_sees_a_gradient_at_the_first_step(family, init):
    steps = {"neurons": NEURONS, "heads": growth.AddHeads(6), "width": WIDTH}
    if init != "splits":  # zeros stay there
        steps["layer"] = growth.InsertLayer(1)
    for step, expansion in steps.items():
        grown = grow(native(family), expansion, init=INITS.get(init))
        loss(grown.model).backward()
        for name, (_, gradient) in weights_and_gradients(grown.model).items():
            if not name.endswith(("W_in", "W_gate", "W_V")):
                continue
            new = is_new(grown.provenance, name, gradient)
            if step == "layer" and not name.endswith("W_V"):
                new[..., 36:] = False  # the odd neuron
            if new.any():
                share = (gradient[new] != 0).double().mean()
                assert (share == 0) if init == "zeros in outputs" else (share > 0.99), (step, name)


@EVERY_INIT
def test_some_heads_only(init):
    weights, some = random_weights(), {"layers": [1], "heads": [0]}
    step = growth.compose(growth.WidenValues(4, **some), growth.WidenQueriesAndKeys(4, **some))
    grown, _ = step(weights, INITS[init])
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    old, new = (x.tensors["blocks.1.attn.W_O"] for x in (weights, grown))
    assert torch.equal(new[1, :7], old[1])  # the other heads
    assert not new[1, 7:].any()


@EVERY_INIT
def test_broken_pairs_change_the_function_and_are_refused(init):
    model = native()
    grown = grow(model, NEURONS, init=INITS[init])
    read(grown.model).tensors["blocks.1.mlp.W_in"][3, 39] += 1e-3
    assert relative(grown.model(tokens()), model(tokens())) > 1e-6
    with pytest.raises(GrowthError, match="were equal or opposite") as error:
        grown.shrink()
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["blocks.1.mlp.W_in"]
    assert same_bits(grown.shrink(drop_new=True), model)  # nothing else was changed


def test_what_copies_write_goes_back_to_the_old_unit_after_training():
    model = native()
    grown = grow(
        model, growth.compose(growth.AddNeurons(40), growth.AddHeads(1)), init=INITS["splits"]
    )
    for name, tensor in read(grown.model).tensors.items():
        if name.endswith(("W_out", "W_O")):
            tensor += torch.randn_like(tensor)
    shrunk = grown.shrink()
    assert relative(shrunk(tokens()), grown.model(tokens())) < EXACT
    assert relative(shrunk(tokens()), model(tokens())) > 0.1


def test_a_written_part_that_was_shared_out_is_no_old_activation():
    _, provenance = growth.AddHeads(3)(random_weights(), INITS["splits"])
    with pytest.raises(KeyError, match="copies share the outputs of old units"):
        growth.activation_map(provenance, "blocks.1.attn.hook_result")
    assert growth.activation_map(provenance, "blocks.1.attn.hook_z").scale == 1.0


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
@EVERY_INIT
def test_models_and_the_way_back_to_the_bit(init, dtype):
    model = native("gated", dtype)
    steps = (growth.AddNeurons(5), growth.AddHeads(2), WIDTH, growth.InsertLayer(1))
    grown = grow(model, growth.compose(*steps), init=INITS[init])
    assert relative(grown.model(tokens()), model(tokens())) < LOGIT_TOLERANCE[dtype]
    assert same_bits(grown.shrink(), model)
