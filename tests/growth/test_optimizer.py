"""Tests that the optimizer of a grown model continues from the old optimizer's state."""

import copy
from functools import partial

import pytest
import torch
from common import D_VOCAB, relative
from growing import in_float64, largest_difference, loss, native, training_step

from attn_only_lens import grow, growth
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.initialise import _Splits
from attn_only_lens.growth.models._grow import growable_of

pytestmark = pytest.mark.numeric

TOKENS = torch.arange(5 * 7).reshape(5, 7) * 11 % D_VOCAB
# A step of Adam divides by √v + ε. Some gradients (those of b_K) are zero except for rounding;
# ε is large here, so that their steps are not ratios of rounding errors.
ADAM = {"eps": 1e-2, "weight_decay": 0.3}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-2}),
    "adamw": (torch.optim.AdamW, ADAM),
    "decoupled": (torch.optim.Adam, ADAM | {"decoupled_weight_decay": True}),
}
LARGER = {"d_mlp": 41, "n_heads": 3, "d_head": 17, "d_model": 37, "n_layers": 3}
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    """Compute RMS norms in float64; transformer-lens casts them to float32."""
    with in_float64(monkeypatch):
        yield


step = partial(training_step, prompts=TOKENS)


def trained(name="rms", kind="adamw", n_steps=3):
    """Return a model of the family after some training steps, and its optimizer."""
    model = native(name)
    of, settings = OPTIMIZERS[kind]
    optimizer = of(model.parameters(), lr=1e-2, **settings)
    for _ in range(n_steps):
        step(model, optimizer)
    return model, optimizer


def named(model):
    """Return the parameters by the names of `Weights`."""
    growable = growable_of(model)
    parameters = growable.named_parameters()
    return {layout.name: parameters[name] for name, layout in growable.parameters().items()}


@pytest.mark.parametrize(
    ("name", "kind"), [*(("rms", kind) for kind in OPTIMIZERS), ("rms_pre", "adamw")]
)
def test_the_next_step_of_old_parameters_is_that_of_the_ungrown_model(name, kind):
    model, optimizer = trained(name, kind)
    grown = grow(model, **LARGER)
    assert len(set(grown.provenance.scales.values())) > 1  # scales differ, so an error would show
    new = grown.optimizer(optimizer, model)
    assert largest_difference(model, grown) < TOLERANCE
    losses = step(model, optimizer), step(grown.model, new)
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert largest_difference(model, grown) < TOLERANCE


@pytest.mark.parametrize("lost", ["state", "eps", "weight_decay"])
def test_the_state_and_every_setting_of_scaled_parameters_matter(lost):
    model, optimizer = trained()
    grown = grow(model, **LARGER)
    new = grown.optimizer(optimizer, model)
    if lost == "state":
        new.state.clear()
    else:
        for group in new.param_groups:
            group[lost] = optimizer.param_groups[0][lost]
    step(model, optimizer)
    step(grown.model, new)
    assert largest_difference(model, grown) > 1e-6


def test_new_entries_start_with_moments_of_zero_and_new_layers_with_none():
    model, optimizer = trained()
    grown = grow(model, **LARGER)
    new, parameters = grown.optimizer(optimizer, model), named(grown.model)
    moment = new.state[parameters["blocks.0.mlp.W_in"]]["exp_avg"]  # stored as [neuron, d_model]
    assert moment.shape == (41, 37)
    assert not moment[37:].any()
    assert not moment[:, 26:].any()
    assert moment[:37, :26].all()
    assert parameters["blocks.2.mlp.W_in"] not in new.state
    assert {p for group in new.param_groups for p in group["params"]} == set(parameters.values())


def test_groups_keep_their_settings_frozen_parameters_stay_out_and_the_old_one_is_not_touched():
    model = native("rms")
    parameters = named(model)
    parameters["embed.W_E"].requires_grad_(False)
    biases = [p for name, p in parameters.items() if ".b_" in name]
    others = [p for name, p in parameters.items() if ".b_" not in name and p.requires_grad]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    grown = grow(model, **LARGER)
    new = grown.optimizer(optimizer, model)
    group_of = {id(p): group for group in new.param_groups for p in group["params"]}
    groups = {name: group_of.get(id(p)) for name, p in named(grown.model).items()}
    assert groups["embed.W_E"] is None
    assert groups["blocks.0.mlp.b_in"]["weight_decay"] == 0.0
    assert groups["blocks.2.mlp.b_in"]["weight_decay"] == 0.0  # in the new layer
    assert groups["blocks.2.attn.W_K"]["lr"] == 3e-3  # newly initialised, not scaled
    scale = grown.provenance.scales["blocks.0.attn.W_K"]
    assert groups["blocks.0.attn.W_K"]["lr"] == pytest.approx(3e-3 * scale)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)


def test_other_optimizers_and_other_models_are_refused():
    model, optimizer = trained(n_steps=1)
    grown = grow(model, d_mlp=41)
    with pytest.raises(InputError, match="expected one of torch's SGD, Adam, AdamW"):
        grown.optimizer(torch.optim.Adagrad(model.parameters()), model)
    with pytest.raises(InputError, match="do not belong to the model"):
        grown.optimizer(optimizer, native("rms"))


@pytest.mark.parametrize(("kind", "exact"), [("sgd", True), ("adamw", False)])
def test_a_wider_stream_under_layer_norm_shares_a_mean_with_new_coordinates(kind, exact):
    writers = ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out")
    model, optimizer = trained("ln", kind)
    for name, tensor in growable_of(model).tensors().items():
        if name.endswith(writers):  # so that centring changes nothing
            tensor -= tensor.mean(-1, keepdim=True)
    grown = grow(model, d_model=37)
    new = grown.optimizer(optimizer, model)
    losses = step(model, optimizer), step(grown.model, new)
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert 1e-5 < largest_difference(model, grown) < 1e-2  # lr
    assert (largest_difference(model, grown, centred=writers) < TOLERANCE) == exact


def test_schedulers_go_on_where_they_were():
    model, optimizer = trained()

    def decay(epoch):
        return 1 / (epoch + 1)

    old = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for _ in range(3):
        step(model, optimizer)
        old.step()
    grown = grow(model, **LARGER)
    new = grown.optimizer(optimizer, model)
    again = torch.optim.lr_scheduler.LambdaLR(new, decay, last_epoch=old.last_epoch - 1)
    for _ in range(2):
        step(model, optimizer)
        step(grown.model, new)
        (rate,) = old.get_last_lr()
        rates = {group["lr"] / rate for group in new.param_groups}
        assert sorted(rates) == pytest.approx(sorted({*grown.provenance.scales.values(), 1.0}))
        old.step()
        again.step()


def test_moments_of_split_units_are_those_of_the_grown_models_own_gradients():
    """Without noise, the new moments are determined by the old ones."""
    model = native("rms")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step(model, optimizer)
    more = (
        growth.AddNeurons(40),
        growth.AddHeads(3),
        growth.WidenValues(4),
        growth.WidenQueriesAndKeys(4),
    )
    grown = grow(model, [*more, growth.AddNeurons(3)], init=_Splits(0.3, 0.0))
    new = grown.optimizer(optimizer, model)
    assert relative(grown.model(TOKENS), model(TOKENS)) < TOLERANCE
    loss(grown.model, TOKENS).backward()
    for group in new.param_groups:
        for parameter in group["params"]:
            state, g = new.state[parameter], parameter.grad
            torch.testing.assert_close(state["exp_avg"], 0.1 * g, rtol=1e-9, atol=1e-15)
            torch.testing.assert_close(state["exp_avg_sq"], 1e-3 * g**2, rtol=1e-9, atol=1e-18)
