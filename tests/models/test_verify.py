"""Tests that `verify` reports the right errors and detects wrong models."""

import math

import pytest
import torch
from common import tokens
from models import build

from attn_only_lens import convert, verify
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError


@pytest.fixture
def pair():
    """Return a source, and the conversion of a slightly different model."""
    source = build("gelu")
    changed = convert(source, copy_weights=True)
    changed.blocks[3].attn.W_out.data.mul_(1.1)
    return source, changed


@torch.no_grad()
def test_figures_by_hand(pair):
    source, changed = pair
    report = verify(source, changed, tokens())
    p = source(tokens()).softmax(-1)
    q = changed(tokens()).softmax(-1)
    kl = []
    for row_p, row_q in zip(p.flatten(0, 1).tolist(), q.flatten(0, 1).tolist(), strict=True):
        kl.append(sum(a * math.log(a / b) for a, b in zip(row_p, row_q, strict=True)))
    assert report.max_kl == pytest.approx(max(kl), rel=1e-9)
    assert report.mean_kl == pytest.approx(sum(kl) / len(kl), rel=1e-9)
    same = [a.argmax() == b.argmax() for a, b in zip(p.flatten(0, 1), q.flatten(0, 1), strict=True)]
    assert report.top1_agreement == sum(same) / len(same)
    assert report.top1_agreement < 1
    change = (source(tokens()) - changed(tokens())).abs().max().item()
    assert report.max_abs_logit == pytest.approx(change, rel=1e-9)
    by_point = report.by_layer.set_index("point")["max_abs"]
    assert (by_point[["0_pre", "0_mid", "1_pre", "1_mid"]] < 1e-12).all()
    assert (by_point[["2_pre", "2_mid", "final_post"]] > 1e-3).all()
    assert report.n_tokens == 22
    assert not report.ok
    assert str(report).startswith("DIFFERENT")


@torch.no_grad()
def test_a_last_bit_is_enough_without_hooks():
    """A relative weight change of 1e-15 is within the tolerance but not bitwise equal."""
    source = build("gelu")
    changed = convert(source, copy_weights=True)
    changed.blocks[3].attn.W_out.data.mul_(1 + 1e-15)
    report = verify(source, changed, tokens())
    assert report.relative <= report.tolerance
    assert not report.bitwise
    assert not report.ok


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.tensor([[0, 41]]), "values from 0 to 41"),
        (torch.tensor([[-1, 3]]), "values from -1 to 3"),
        (torch.zeros((1, 18), dtype=torch.long), "got 18 tokens"),
        (torch.zeros((1, 5)), r"float32 \[1, 5\]"),
        (torch.zeros(5, dtype=torch.long), r"int64 \[5\]"),
        (torch.zeros((0, 5), dtype=torch.long), r"int64 \[0, 5\]"),
        ([[1, 2]], "got list"),
    ],
)
def test_input_that_is_refused(inputs, message):
    source = build("gelu")
    with pytest.raises(UnsupportedCallError, match=message):
        verify(source, convert(source), inputs)


def test_models_that_cannot_be_compared():
    source = build("gelu")
    converted = convert(source)
    for a, b, message in (
        (converted, converted, "expected the model before conversion"),
        (source, source, r"expected a model from attn_only_lens\.convert"),
        (build("gelu", d_mlp=53), converted, "d_mlp: got 53 in the source and 37"),
        (build("gelu", dtype=torch.float32), converted, "dtype"),
    ):
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            verify(a, b, tokens())
        assert str(caught.value).startswith("these models cannot be compared")
