"""Tests of which features are active, against loops over single numbers."""

import pytest
import torch
from drawn_transcoders import ACTIVATIONS, FEATURES, K, active, drawn

from attn_only_lens.gates.features import active_features, feature_gate


def pre_activations(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 11, FEATURES, generator=generator, dtype=torch.float64).to(dtype)


def test_topk_gives_ties_to_the_features_with_smaller_numbers():
    q = (pre_activations(torch.float16) * 2).round()  # many equal numbers
    expected = active(q, drawn(5, activation="topk"))
    assert torch.equal(active_features(q, k=K), expected)
    assert (expected.sum(-1) == K).all()
    q[0, 0] = -1.0
    q[0, 0, 3] = 0.0
    assert not active_features(q, k=K)[0, 0].any()  # fewer than k are positive
    assert torch.equal(active_features(q, k=FEATURES), q > 0)
    q = torch.tensor([2.0, torch.inf, 1.0, torch.inf, -torch.inf])
    assert active_features(q, k=1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features_are_inactive_at_their_thresholds(activation):
    transcoder = drawn(5, activation=activation)
    gate = feature_gate(transcoder.threshold, transcoder.k)
    theta = torch.zeros(FEATURES) if transcoder.threshold is None else transcoder.threshold
    q = theta.double()[None]
    assert not gate.pattern(q)[..., 0].any()
    above = torch.nextafter(q, torch.tensor(torch.inf, dtype=q.dtype))
    assert gate.pattern(above)[..., 0].sum() == (K if activation == "topk" else FEATURES)
