"""Tests that `verify` reports the right errors and detects wrong models, and of `calibrated`."""

import math

import pandas as pd
import pytest
import torch
from bridges import boot, exposed_copy
from common import POS, mlp_hook, tokens
from exposed_states import EXACT, bilinear, each
from torch import nn

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.models import Calibration
from attn_only_lens.models.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers


@pytest.mark.both_versions
@pytest.mark.parametrize("make", each(["gpt2", "native_gated"], ["llama", "parallel"]))
def test_a_copy_a_twin_and_itself(make):
    model, twin = make(), make()
    reports = [verify(model, exposed_copy(model), tokens())]
    checked = expose_neuron_heads(model, check=tokens())
    before = list(model.hook_dict)
    reports += [verify(twin, model, tokens()), verify(model, model, tokens()), checked.verification]
    assert sorted(before) == sorted(model.hook_dict)
    for report in reports:
        assert report.ok, report
        assert report.bitwise
        assert report.relative <= EXACT
        assert report.by_layer["relative"].max() <= EXACT
        assert report.n_tokens == 2 * POS
        assert report.activations.empty
    points = list(report.by_layer["point"])
    assert (points[0], points[-1]) == ("0_pre", "final_post")
    if make.func is not boot:
        converted = convert(twin, check=tokens())
        assert points == list(verify(twin, converted, tokens()).by_layer["point"])


def test_the_option_check(monkeypatch):
    model = boot("gpt2")
    logits, hooks = model(tokens()), sorted(model.hook_dict)
    with pytest.raises(UnsupportedCallError, match=r"int64 \[5\]"):
        expose_neuron_heads(model, check=torch.zeros(5, dtype=torch.long))
    monkeypatch.setattr("attn_only_lens.models.verify.torch.equal", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match=r"(?s)not those of the model.*NOT bitwise"):
        expose_neuron_heads(model, check=tokens())
    monkeypatch.undo()
    # After a check that fails, nothing is exposed.
    assert sorted(model.hook_dict) == hooks
    assert torch.equal(model(tokens()), logits)
    assert expose_neuron_heads(model).verification is None
    assert expose_neuron_heads(model, check=True).verification.n_tokens == model.cfg.n_ctx


@torch.no_grad()
def test_figures_by_hand():
    """A changed weight is noticed, where it first has an effect."""
    source = boot("llama")
    changed = exposed_copy(source, copy_weights=True)
    changed.blocks[1].mlp.out.weight.mul_(1.5)
    report = verify(source, changed, tokens())
    p = source(tokens()).softmax(-1)
    q = changed(tokens()).softmax(-1)
    kl = []
    for row_p, row_q in zip(p.flatten(0, 1).tolist(), q.flatten(0, 1).tolist(), strict=True):
        kl.append(sum(a * math.log(a / b) for a, b in zip(row_p, row_q, strict=True)))
    assert report.max_kl == pytest.approx(max(kl), rel=1e-9)
    assert report.mean_kl == pytest.approx(sum(kl) / len(kl), rel=1e-9)
    same = p.argmax(-1) == q.argmax(-1)
    assert report.top1_agreement == same.double().mean().item() < 1
    change = (source(tokens()) - changed(tokens())).abs().max().item()
    assert report.max_abs_logit == pytest.approx(change, rel=1e-9)
    by_point = report.by_layer.set_index("point")["max_abs"]
    assert (by_point[["0_pre", "0_mid", "1_pre", "1_mid"]] < 1e-12).all()
    assert by_point["final_post"] > 1e-3
    assert not report.ok
    assert str(report).startswith("DIFFERENT")
    # A last bit is enough: it is within the tolerance, but not bitwise equal.
    source = boot("gpt2")
    changed = exposed_copy(source, copy_weights=True)
    changed.blocks[1].mlp.out.weight.mul_(1 + 1e-15)
    report = verify(source, changed, tokens())
    assert report.relative <= report.tolerance
    assert not report.bitwise
    assert not report.ok


@torch.no_grad()
def test_neuron_heads_that_are_wrong():
    """The check runs with live hooks: logits without hooks do not depend on the heads."""
    bridge, seen = boot("gpt2"), []
    with expose_neuron_heads(bridge):
        bridge.add_hook(mlp_hook("z"), lambda z, hook: seen.append(1))
        heads = bridge.blocks[1].mlp._neuron_heads
        attend = heads._attend
        heads._attend = lambda q, up: attend(q, up) * 1.01
        report = verify(bridge, bridge, tokens())
        seen.clear()
        bridge(tokens())
    assert report.bitwise
    assert report.relative > 1e-6
    assert not report.ok
    assert seen == [1], "the user's hooks are still there"


@pytest.mark.parametrize("make", each(["gpt2", "gemma2"], ["llama"]))
@torch.no_grad()
def test_bilinear_gates(make):
    model = make()
    gate = bilinear(model)
    copy = exposed_copy(model, gate=gate)
    for source in (model, copy):
        report = verify(source, copy, tokens())
        assert report.ok, report
        assert not report.bitwise
        assert 1e-12 < report.relative < 1
        assert report.rounding <= EXACT
        assert list(report.activations["layer"]) == list(range(len(model.blocks)))
        measured, bound = report.activations["measured"], report.activations["bound"]
        assert (measured <= bound + 1e-14).all()
        assert (measured > bound / 300).all(), "errors were found"
        assert (report.activations["largest"] <= report.activations["range"]).all()
    if make.func is not boot:  # as with two blocks per layer
        expected = verify(model, convert(model, gate=gate), tokens())
        assert report.relative == pytest.approx(expected.relative, rel=1e-6)
        columns = ["bound", "measured", "largest", "range"]
        got, reference = report.activations[columns], expected.activations[columns]
        pd.testing.assert_frame_equal(got, reference, rtol=1e-6, atol=1e-15)
    elif make.args == ("gemma2",):
        # The control: outside the calibrated range, the bound does not hold.
        narrow = Calibration(tuple(r / 9 for r in gate.calibration.ranges), 1.25, 22)
        copy = exposed_copy(model, gate=Bilinear(4, calibration=narrow))
        report = verify(model, copy, tokens())
        assert not report.ok
        assert (report.activations["largest"] > report.activations["range"]).all()


@torch.no_grad()
def test_nan_with_hooks_alone(monkeypatch):
    """The nan is in the second of two outputs, where Python's `max` would return the first."""
    bridge = boot("llama")
    copy = exposed_copy(bridge, gate=bilinear(bridge))
    assert verify(bridge, copy, tokens()).ok
    attend = BilinearHeads._attend
    monkeypatch.setattr(
        BilinearHeads,
        "_attend",
        lambda heads, q, v: attend(heads, q, v) * (torch.nan if heads.layer == 1 else 1.0),
    )
    report = verify(bridge, copy, tokens())
    assert math.isnan(report.rounding)
    assert not report.ok


def test_refused():
    bridge = boot("llama")
    copy = exposed_copy(bridge)
    for bad, message in (
        (torch.tensor([[-1, 3]]), "values from -1 to 3"),
        (torch.zeros((1, 18), dtype=torch.long), "got 18 tokens"),
        (torch.zeros((1, 5)), r"float32 \[1, 5\]"),
    ):
        with pytest.raises(UnsupportedCallError, match=message):
            verify(bridge, copy, bad)
    for a, b, message in (
        (bridge, bridge, r"expected a model from attn_only_lens\.convert"),
        (nn.Linear(2, 3), copy, "expected the model before conversion, a TransformerBridge"),
        (boot("phi3"), copy, "d_model: got 28"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            verify(a, b, tokens())


@pytest.mark.parametrize("make", each(["phi3", "native_gated"], ["llama"]))
@torch.no_grad()
def test_calibrated(make):
    """The ranges are computed from the pre-activations in TransformerLens' own cache."""
    model = make()
    _, cache = model.run_with_cache(tokens())
    calibration = Bilinear.calibrated(model, tokens(), margin=1.5).calibration
    for layer, limit in enumerate(calibration.ranges):
        largest = cache[f"blocks.{layer}.mlp.hook_pre"].abs().max().item()
        assert limit == pytest.approx(1.5 * largest, rel=1e-12)
    assert calibration.n_tokens == 2 * POS
    again = Bilinear.calibrated(exposed_copy(model), tokens(), margin=1.5)
    assert calibration == again.calibration


def test_calibrated_refuses():
    bridge = boot("llama")
    bridge.blocks[1].mlp.gate.weight.data[3] = float("nan")
    for model, inputs, message in (
        (boot("gpt2"), tokens(), "not gated"),
        (bridge, "a text", "no tokenizer"),
        (bridge, tokens(), r"not finite in layers \[1\]|layer 1"),
    ):
        with pytest.raises((UnsupportedModelError, UnsupportedCallError), match=message):
            Bilinear.calibrated(model, inputs)
    with pytest.raises(ValueError, match=r"got margin=0\.5"):
        Bilinear.calibrated(bridge, tokens(), margin=0.5)
