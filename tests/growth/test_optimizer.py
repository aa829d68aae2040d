"""Tests that the optimizer of a grown model continues from the old optimizer's state."""

import copy

import pytest
import torch
from common import D_VOCAB
from models import build

from attn_only_lens import grow
from attn_only_lens.errors import GrowthError

TOKENS = torch.arange(5 * 7).reshape(5, 7) * 11 % D_VOCAB
# A step of Adam divides by √v + ε. Some gradients (those of b_K) are zero except for rounding;
# ε is large here, so that their steps are not ratios of rounding errors.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-2}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-2}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.3, "eps": 1e-2}),
    "decoupled": (
        torch.optim.Adam,
        {"weight_decay": 0.3, "eps": 1e-2, "decoupled_weight_decay": True},
    ),
}
WRITERS = ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out")
TOLERANCE = 1e-12
LARGER = {
    "rms": {"d_mlp": 41, "n_heads": 3, "d_head": 17, "d_model": 37, "n_layers": 4},
    "rms_pre": {"d_mlp": 41, "n_heads": 3, "d_head": 17, "d_model": 37, "n_layers": 4},
    "llama": {"d_mlp": 41, "n_heads": 9, "d_head": 11, "d_model": 37, "n_layers": 4},
}


def step(model, optimizer):
    """Do one training step, and return the loss."""
    optimizer.zero_grad()
    log_probs = model(TOKENS)[:, :-1].log_softmax(-1)
    loss = -log_probs.gather(-1, TOKENS[:, 1:, None] % log_probs.shape[-1]).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(name, kind, n_steps=3):
    """Return a model of the family after some training steps, and its optimizer."""
    model = build(name)
    of, settings = OPTIMIZERS[kind]
    optimizer = of(model.parameters(), lr=1e-2, **settings)
    for _ in range(n_steps):
        step(model, optimizer)
    return model, optimizer


def largest_difference(model, grown):
    """Return the largest difference of old parameters, in the original's units."""
    now = {name.replace("attn._", "attn."): p for name, p in grown.model.named_parameters()}
    worst = 0.0
    for name, parameter in model.named_parameters():
        moved = grown.provenance.tensor_map(name.replace("attn._", "attn."))
        old = moved.old_part(now[moved.name].detach()) / moved.scale
        worst = max(worst, (old - parameter).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", LARGER)
def test_the_next_step_of_old_parameters_is_that_of_the_ungrown_model(name, kind):
    model, optimizer = trained(name, kind)
    grown = grow(model, **LARGER[name])
    assert len(set(grown.provenance.scales.values())) > 1  # scales differ, so an error would show
    new = grown.optimizer(optimizer, model)
    before = largest_difference(model, grown)
    losses = step(model, optimizer), step(grown.model, new)
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert before < TOLERANCE
    assert largest_difference(model, grown) < TOLERANCE


def test_without_the_state_the_next_step_is_another():
    model, optimizer = trained("rms", "adamw")
    grown = grow(model, **LARGER["rms"])
    of, settings = OPTIMIZERS["adamw"]
    fresh = of(grown.model.parameters(), lr=1e-2, **settings)
    step(model, optimizer)
    step(grown.model, fresh)
    assert largest_difference(model, grown) > 1e-3


@pytest.mark.parametrize("setting", ["lr", "eps", "weight_decay"])
def test_every_setting_of_scaled_parameters_matters(setting):
    model, optimizer = trained("rms", "adamw")
    grown = grow(model, **LARGER["rms"])
    new = grown.optimizer(optimizer, model)
    for group in new.param_groups:
        group[setting] = optimizer.param_groups[0][setting]
    step(model, optimizer)
    step(grown.model, new)
    assert largest_difference(model, grown) > 1e-6


def test_new_entries_start_with_moments_of_zero_and_new_layers_with_none():
    model, optimizer = trained("rms", "adamw")
    grown = grow(model, **LARGER["rms"])
    new = grown.optimizer(optimizer, model)
    named = dict(grown.model.named_parameters())
    moment = new.state[named["blocks.0.mlp.W_in"]]["exp_avg"]
    assert moment.shape == named["blocks.0.mlp.W_in"].shape
    assert not moment[:, 37:].any()
    assert not moment[26:].any()
    assert moment[:26, :37].all()
    assert named["blocks.3.mlp.W_in"] not in new.state
    trained_ones = {p for group in new.param_groups for p in group["params"]}
    assert trained_ones == set(named.values())


def test_groups_keep_their_settings_frozen_parameters_stay_out_and_the_old_one_is_not_touched():
    model = build("rms")
    named = dict(model.named_parameters())
    named["embed.W_E"].requires_grad_(False)
    biases = [(name, p) for name, p in named.items() if ".b_" in name]
    others = [(name, p) for name, p in named.items() if ".b_" not in name and p.requires_grad]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    grown = grow(model, **LARGER["rms"])
    new = grown.optimizer(optimizer, model)
    now = dict(grown.model.named_parameters())
    groups = {}
    for group in new.param_groups:
        assert len(group["param_names"]) == len(group["params"])
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert now[name] is parameter
            groups[name] = group
    assert "embed.W_E" not in groups
    assert groups["blocks.0.mlp.b_in"]["weight_decay"] == 0.0
    assert groups["blocks.3.mlp.b_in"]["weight_decay"] == 0.0  # in the new layer
    assert groups["blocks.3.mlp.W_in"]["lr"] == 3e-3
    assert groups["blocks.3.attn.W_K"]["lr"] == 3e-3  # newly initialised, not scaled
    scale = grown.provenance.scales["blocks.0.attn.W_K"]
    assert groups["blocks.0.attn.W_K"]["lr"] == pytest.approx(3e-3 * scale)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)


def test_other_optimizers_and_other_models_are_refused():
    model, optimizer = trained("rms", "adamw")
    grown = grow(model, d_mlp=41)
    adagrad = torch.optim.Adagrad(model.parameters())
    with pytest.raises(GrowthError, match="expected one of torch's SGD, Adam, AdamW"):
        grown.optimizer(adagrad, model)
    with pytest.raises(GrowthError, match="do not belong to the model"):
        grown.optimizer(optimizer, build("rms"))


@pytest.mark.parametrize(("kind", "exact"), [("sgd", True), ("adamw", False)])
def test_a_wider_stream_under_layer_norm_shares_a_mean_with_new_coordinates(kind, exact):
    model, optimizer = trained("gelu", kind)
    with torch.no_grad():  # so that centring changes nothing
        for name, parameter in model.named_parameters():
            if name.endswith(WRITERS):
                parameter.sub_(parameter.mean(-1, keepdim=True))
    grown = grow(model, d_model=37)
    new = grown.optimizer(optimizer, model)
    losses = step(model, optimizer), step(grown.model, new)
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert 1e-5 < largest_difference(model, grown) < 1e-2  # lr
    now = dict(grown.model.named_parameters())
    unseen = 0.0
    for name, parameter in model.named_parameters():
        moved = grown.provenance.tensor_map(name)
        difference = moved.old_part(now[name].detach()) / moved.scale - parameter.detach()
        if name.endswith(WRITERS):
            difference = difference - difference.mean(-1, keepdim=True)
        unseen = max(unseen, difference.abs().max().item())
    assert (unseen < TOLERANCE) == exact


def test_schedulers_go_on_where_they_were():
    model, optimizer = trained("rms", "adamw")
    old = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    for _ in range(3):
        step(model, optimizer)
        old.step()
    grown = grow(model, **LARGER["rms"])
    new = grown.optimizer(optimizer, model)
    again = torch.optim.lr_scheduler.LambdaLR(
        new, lambda epoch: 1 / (epoch + 1), last_epoch=old.last_epoch - 1
    )
    for _ in range(2):
        step(model, optimizer)
        step(grown.model, new)
        (rate,) = old.get_last_lr()
        scales = {*grown.provenance.scales.values(), 1.0}
        rates = {group["lr"] / rate for group in new.param_groups}
        assert sorted(rates) == pytest.approx(sorted(scales))
        old.step()
        again.step()
