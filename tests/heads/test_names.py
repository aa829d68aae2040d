"""Tests of names of heads and of their hook points in any kind of model."""

import models
import pytest
import torch
from bridges import boot, exposed
from common import D_MLP, IN_PLACE, mlp_hook, needs_hooked_transformer, relative, tokens

from attn_only_lens import (
    Bilinear,
    HeadName,
    convert,
    expose_neuron_heads,
)
from attn_only_lens.errors import InputError, UnsupportedCallError

SOURCES = {
    "bridge": lambda: boot("gpt2"),
    "hooked": lambda: models.build("gelu"),
}
EACH = pytest.mark.parametrize(
    "source",
    [pytest.param(n, marks=[needs_hooked_transformer] * (n == "hooked")) for n in SOURCES],
)
ATTENTION = {point: f"blocks.1.attn.hook_{point}" for point in IN_PLACE}
HEAD, NEURON = HeadName.parse("L1H1"), HeadName.parse("L1N5")


def points(name, model):
    return {point: name.hook(point, model) for point in IN_PLACE}


def ablated(model, hook_name, index):
    """Return the logits with one head's output set to zero; check that it was not zero before."""
    seen = []

    def silence(x, hook):
        seen.append(x[:, :, index].abs().max())
        return x.index_fill(2, torch.tensor(index), 0.0)

    logits = model.run_with_hooks(tokens(), fwd_hooks=[(hook_name, silence)])
    (largest,) = seen
    assert largest > 0
    return logits


@EACH
@torch.no_grad()
def test_hook_points_are_those_of_the_model_that_is_asked(source):
    """Names tell heads and neurons of equal layer and index apart, in both layouts."""
    plain = SOURCES[source]()
    assert points(HEAD, plain) == ATTENTION
    expected = ablated(plain, "blocks.1.mlp.hook_post", 5), ablated(plain, ATTENTION["z"], 1)
    layouts = {"in place": expose_neuron_heads(SOURCES[source]()).model}
    if source == "hooked":
        layouts["two blocks a layer"] = convert(plain)
    for layout, model in layouts.items():
        names = points(NEURON, model), points(HEAD, model)
        if layout == "in place":
            assert names == ({point: mlp_hook(point) for point in IN_PLACE}, ATTENTION)
            blocks = 1, 1
        else:
            neurons = {point: f"blocks.3.attn.hook_{point}" for point in IN_PLACE}
            assert names == (neurons, {p: f"blocks.2.attn.hook_{p}" for p in IN_PLACE})
            blocks = 3, 2
        assert (NEURON.block(model), HEAD.block(model)) == blocks
        got = ablated(model, names[0]["z"], 5), ablated(model, names[1]["z"], 1)
        assert relative(got[0], expected[0]) < 1e-12
        assert relative(got[1], expected[1]) < 1e-12
        assert relative(got[0], expected[1]) > 1e-3


@pytest.mark.parametrize(
    ("name", "point", "message"),
    [
        ("L1N5", "hook_z", "got point='hook_z'; expected .* attn_scores"),
        ("L2N5", "z", "'L2N5'; the model has layers 0 to 1"),
        ("L1N5.0", "z", r"got 'L1N5\.0'; expected 'L5H3'"),
    ],
)
def test_heads_and_points_that_are_not_there_are_refused(name, point, message):
    with pytest.raises(InputError, match=message):
        HeadName.parse(name).hook(point, exposed("gpt2"))


@pytest.mark.parametrize("m", [1, 4])
def test_the_original_neuron_of_each_neuron(m):
    """Every number of the original occurs m times, in order; control: the model has no other."""
    gate = "exact" if m == 1 else Bilinear(m)
    model = expose_neuron_heads(boot("gpt2"), gate=gate).model
    expected = [f"L1N{i}" for i in range(D_MLP) for _ in range(m)]
    names = [HeadName(1, "neuron", k) for k in range(m * D_MLP)]
    assert [str(name.original_neuron(model)) for name in names] == expected
    assert str(HeadName.parse("L1H1").original_neuron(model)) == "L1H1"
    with pytest.raises(InputError):
        HeadName.parse(f"L1N{m * D_MLP}").original_neuron(model)


def test_a_model_without_neuron_heads_is_refused():
    with pytest.raises(UnsupportedCallError, match=r"without neuron-heads.*convert.*expose"):
        HeadName.parse("L1N5").hook("z", boot("gpt2"))
