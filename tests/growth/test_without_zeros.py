"""Tests of new units without zeros: the same function, gradients at the first step, `shrink`."""

import pytest
import torch
from common import relative, tokens
from growing import group_size, same_bits, steps
from models import build

from attn_only_lens import convert, grow
from attn_only_lens import expansion as ex
from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion.initialise import _Splits
from attn_only_lens.growth import read, read_provenance
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = LOGIT_TOLERANCE[torch.float64]
# The random values are large, so terms must cancel in pairs; small values would hide errors.
INITS = {"cancelling": ex.init.cancelling(0.5), "splits": ex.init.splits(0.3, 0.7)}
EVEN = {
    "neurons": lambda group: ex.AddNeurons(4),
    "heads": lambda group: ex.AddHeads(2 * group),
    "width": lambda group: ex.compose(ex.WidenValues(4), ex.WidenQueriesAndKeys(4)),
    "stream": lambda group: ex.WidenStream(4),
    "layer": lambda group: ex.InsertLayer(1),
}
# Where zeros stay, by family: in parts that norms, rotary positions and slopes depend on.
STAY = {
    "gelu": {"splits": {"stream", "layer"}, "cancelling": {"stream"}},
    "llama": {"splits": {"W_K", "stream", "layer"}, "cancelling": {"stream"}},
    "no_norm": {"splits": {"layer"}, "cancelling": set()},
    "qk_norm": {"splits": {"W_K", "stream", "layer"}, "cancelling": {"W_K", "stream"}},
    "norms_before_and_after": {
        "splits": {"stream", "layer"},
        "cancelling": {"stream", "layer"},
    },
}
WRITTEN = {"neurons": "W_out", "heads": "W_O", "width": "W_O", "stream": "W_out", "layer": "W_out"}


def possible(model):
    """Return all expansions by odd numbers that this model allows, composed."""
    steps_so_far = []
    for step in steps(group=3 * group_size(model)).values():
        try:
            grow(model, step)
            steps_so_far.append(step)
        except GrowthError:
            pass
    return ex.compose(*steps_so_far)


def is_new(grown, name):
    """Return a mask of the new entries in a parameter of the second layer or of a new one."""
    parameter = grown.model.get_parameter(name)
    mask, old = torch.ones_like(parameter), grown.provenance.old_name(name.replace("._", "."))
    if old is not None:
        moved = grown.provenance.tensor_map(old)
        mask = moved.put(torch.zeros([len(axis.new_of) for axis in moved.axes]).double(), mask)
    return mask.bool()


@pytest.mark.parametrize(
    "family", ["gelu", "llama", "no_norm", "qk_norm", "post_norm", "alibi", "clip_qkv", "sinks"]
)
@pytest.mark.parametrize("init", INITS)
def test_the_same_function_and_back_to_the_bit(family, init):
    model = build(family)
    grown = grow(model, possible(model), init=INITS[init], seed=3)
    assert relative(grown.model(tokens()), model(tokens())) < EXACT
    assert grown.provenance.ties
    assert same_bits(grown.shrink(), model)


@pytest.mark.parametrize("family", STAY)
@pytest.mark.parametrize("init", INITS)
def test_zeros_stay_where_nothing_else_would_do(family, init):
    model = build(family)
    for step, make in EVEN.items():
        grown = grow(model, make(group_size(model)), init=INITS[init])
        layer = f"blocks.1.{'mlp' if 'out' in WRITTEN[step] else 'attn'}.{WRITTEN[step]}"
        written = grown.model.get_parameter(layer)[is_new(grown, layer)]
        if step == "layer":  # the last of 37 neurons has no partner
            written = grown.model.get_parameter(layer)[:36]
        assert (written == 0).all() if step in STAY[family][init] else (written != 0).all(), step
        if step == "width":
            keys = read(grown.model).tensors["blocks.1.attn.W_K"][..., -4:]
            assert (keys == 0).all() if "W_K" in STAY[family][init] else (keys != 0).all()


@pytest.mark.parametrize("family", ["gelu", "llama"])
@pytest.mark.parametrize("init", [*INITS, "zeros in outputs"])
def test_all_of_a_new_unit_sees_a_gradient_at_the_first_step(family, init):
    model = build(family)
    for step in ("neurons", "heads", "width", "layer"):
        if step in STAY[family].get(init, ()) or (family, step) == ("llama", "width"):
            continue
        grown = grow(model, EVEN[step](group_size(model)), init=INITS.get(init))
        grown.model(tokens(), return_type="loss").backward()
        for name, parameter in grown.model.named_parameters():
            reads = any(f".{of}" in name.replace("._", ".") for of in ("W_in", "W_gate", "W_V"))
            new = is_new(grown, name) if reads else torch.zeros_like(parameter).bool()
            if step == "layer":
                new[..., 36 if new.shape[-1] == 37 else 99 :] = False  # the odd neuron
            if new.any():
                share = (parameter.grad[new] != 0).double().mean()
                assert (share == 0) if init == "zeros in outputs" else (share > 0.99), (step, name)


def test_the_last_of_an_odd_number_writes_zeros():
    grown = grow(build("gelu"), ex.AddNeurons(5), init=INITS["cancelling"]).model
    new = grown.W_out[1, 37:]
    assert torch.equal(new[0], -new[1])
    assert torch.equal(new[2], -new[3])
    assert not new[4].any()
    assert torch.equal(grown.W_in[1, :, 37], grown.W_in[1, :, 38])
    assert grown.W_in[1, :, 41].any()


@pytest.mark.parametrize("init", INITS)
def test_groups_of_heads_go_together_or_pair_within(init):
    model = build("grouped")  # 6 heads in 2 groups
    for step in (
        ex.AddHeads(6),
        ex.AddHeads(4, into_groups=True),
        ex.AddHeads(2, into_groups=True),
    ):
        grown = grow(model, step, init=INITS[init])
        assert relative(grown.model(tokens()), model(tokens())) < EXACT
        assert same_bits(grown.shrink(), model)
    keys = grow(model, ex.AddHeads(6), init=INITS["splits"]).model.blocks[0].attn._W_K
    assert {
        int(torch.cdist(keys[i].flatten()[None], keys[:2].flatten(1)).argmin()) for i in (2, 3)
    } == {0, 1}


@pytest.mark.parametrize("init", INITS)
def test_some_heads_only(init):
    model = build("gelu")
    some = {"layers": [1], "heads": [0]}
    step = ex.compose(
        *(ex.WidenValues(4, **some), ex.WidenQueriesAndKeys(4, **some)),
        *(ex.WidenValues(4, [0, 2]), ex.WidenQueriesAndKeys(4, [0, 2])),
    )
    grown = grow(model, step, init=INITS[init])
    assert relative(grown.model(tokens()), model(tokens())) < EXACT
    attention = grown.model.blocks[1].attn
    shared_out = init == "splits"  # if only some heads of a group are new in width, zeros stay
    for of in (attention.W_Q, attention.W_K, attention.W_V, attention.W_O.mT):
        may_stay = shared_out and of is not attention.W_Q and of is not attention.W_V
        assert not of[0, :, 13:].any() if may_stay else of[0, :, 13:].all()
        assert not of[1, :, 13:].any()
    assert torch.equal(attention.W_O[1, :13], model.blocks[1].attn.W_O[1])
    assert same_bits(grown.shrink(), model)


@pytest.mark.parametrize("init", INITS)
def test_a_converted_model_grows_the_same(init):
    model = build("silu_gated", act_fn="gelu")
    step = ex.compose(ex.AddNeurons(5), ex.AddHeads(2))
    grown = grow(convert(model), step, init=INITS[init], seed=3)
    assert same_bits(grown.model, convert(grow(model, step, init=INITS[init], seed=3).model))
    assert same_bits(grown.shrink(), convert(model))


@pytest.mark.parametrize("init", INITS)
def test_broken_pairs_change_the_function_and_are_refused(init):
    model = build("gelu")
    grown = grow(model, ex.AddNeurons(4), init=INITS[init])
    with torch.no_grad():
        grown.model.blocks[1].mlp.W_in[3, 39] += 1e-3
    assert relative(grown.model(tokens()), model(tokens())) > 1e-6
    with pytest.raises(GrowthError, match="were equal or opposite") as error:
        grown.shrink()
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["blocks.1.mlp.W_in"]
    assert same_bits(grown.shrink(drop_new=True), model)  # nothing else was changed


def test_what_copies_write_goes_back_to_the_old_unit_after_training():
    model = build("gelu")
    grown = grow(model, ex.compose(ex.AddNeurons(40), ex.AddHeads(1)), init=INITS["splits"])
    with torch.no_grad():
        for block in grown.model.blocks:
            block.mlp.W_out.add_(torch.randn_like(block.mlp.W_out))
            block.attn.W_O.mul_(1.3)
    shrunk = grown.shrink()
    assert relative(shrunk(tokens()), grown.model(tokens())) < EXACT
    assert relative(shrunk(tokens()), model(tokens())) > 0.1


def test_a_written_part_that_was_shared_out_is_no_old_activation():
    grown = grow(build("gelu"), ex.AddHeads(1), init=INITS["splits"])
    with pytest.raises(KeyError, match="copies share the outputs of old units"):
        ex.activation_map(grown.provenance, "blocks.1.attn.hook_result")
    assert ex.activation_map(grown.provenance, "blocks.1.attn.hook_z").scale == 1.0


@pytest.mark.parametrize(("noise", "apart"), [(0.0, False), (0.7, True)])
def test_noise_parts_copies_at_the_first_step_of_adam(noise, apart):
    grown = grow(build("gelu"), ex.AddNeurons(4), init=_Splits(0.3, noise))
    optimizer = torch.optim.Adam(grown.model.parameters(), lr=1e-2, eps=1e-12)
    (shares, *_) = grown.provenance.shares
    grown.model(tokens(), return_type="loss").backward()
    optimizer.step()
    reads = grown.model.W_in[0]
    distance = (reads[:, list(shares.new)] - reads[:, list(shares.of)]).abs().max()
    assert (distance > 1e-3) == apart
    assert apart or distance < 1e-6


def test_moments_are_those_of_the_grown_models_own_gradients():
    """Without noise, the new moments are determined by the old ones."""
    model = build("rms")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(tokens(), return_type="loss").backward()
    optimizer.step()  # the learning rate is 0
    step = ex.compose(ex.AddNeurons(40), ex.AddHeads(3), ex.WidenValues(4), ex.AddNeurons(3))
    step = ex.compose(step, ex.WidenQueriesAndKeys(4))
    grown = grow(model, step, init=_Splits(0.3, 0.0))
    new = grown.optimizer(optimizer, model)
    grown.model(tokens(), return_type="loss").backward()
    for group in new.param_groups:
        for parameter in group["params"]:
            state, g = new.state[parameter], parameter.grad
            torch.testing.assert_close(state["exp_avg"], 0.1 * g, rtol=1e-9, atol=1e-15)
            torch.testing.assert_close(state["exp_avg_sq"], 1e-3 * g**2, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("init", INITS)
def test_the_folder_keeps_what_must_hold(init, tmp_path):
    model = build("gelu")
    grown = grow(model, possible(model), init=INITS[init])
    assert grown.provenance.shares or init == "cancelling"
    assert read_provenance(grown.save_pretrained(tmp_path / "grown")) == grown.provenance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("init", INITS)
def test_other_dtypes(init, dtype):
    model = build("gelu", dtype=dtype)
    grown = grow(model, ex.compose(ex.AddNeurons(4), ex.AddHeads(2)), init=INITS[init])
    assert relative(grown.model(tokens()), model(tokens())) < LOGIT_TOLERANCE[dtype]
    assert same_bits(grown.shrink(), model)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ex.init.cancelling(0.0), "got std=0.0"),
        (lambda: ex.init.cancelling(float("nan")), "got std=nan"),
        (lambda: ex.init.splits(1.0), "got share=1.0"),
        (lambda: ex.init.splits(noise=0.0), "a unit and its copy in the same way"),
    ],
)
def test_what_would_be_dead_or_equal_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
