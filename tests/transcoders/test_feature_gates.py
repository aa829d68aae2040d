"""Tests of the gates of features, against loops over single numbers."""

import pytest
import torch
from drawn_transcoders import ACTIVATIONS, FEATURES, K, active, drawn

from attn_only_lens.errors import InputError
from attn_only_lens.gates.features import active_features, feature_gate


def pre_activations(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 11, FEATURES, generator=generator, dtype=torch.float64).to(dtype)


def gate_of(transcoder):
    return feature_gate(transcoder.threshold, transcoder.k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_patterns_are_those_of_a_loop(activation, dtype):
    transcoder = drawn(5, activation=activation, dtype=dtype)
    q = pre_activations(dtype)
    expected = active(q, transcoder)
    assert 0.05 < expected.double().mean() < 0.6
    pattern = gate_of(transcoder).pattern(q)
    assert pattern.dtype == dtype
    assert torch.equal(pattern[..., 0] == 1, expected)
    assert torch.equal(pattern[..., 1] == 1, ~expected)
    assert torch.equal(gate_of(transcoder).activation(q), torch.where(expected, q, 0.0))
    assert torch.equal(torch.softmax(gate_of(transcoder).scores(q), -1), pattern)


def test_topk_gives_ties_to_the_features_with_smaller_numbers():
    q = (pre_activations(torch.float16) * 2).round()  # many equal numbers
    transcoder = drawn(5, activation="topk")
    expected = active(q, transcoder)
    assert torch.equal(active_features(q, k=K), expected)
    assert (expected.sum(-1) == K).all()
    q[0, 0] = 1.0  # all equal
    assert active_features(q, k=K)[0, 0].nonzero()[:, 0].tolist() == list(range(K))
    q[0, 0] = -1.0
    q[0, 0, 3] = 0.0
    assert not active_features(q, k=K)[0, 0].any()  # fewer than k are positive
    assert torch.equal(active_features(q, k=FEATURES), q > 0)


def test_topk_of_numbers_that_are_not_finite():
    q = torch.tensor([[2.0, torch.inf, 1.0, torch.inf, -torch.inf]])
    assert active_features(q, k=1).tolist() == [[False, True, False, False, False]]
    assert active_features(q, k=3).tolist() == [[True, True, False, True, False]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features_are_inactive_at_their_thresholds(activation):
    transcoder = drawn(5, activation=activation)
    theta = torch.zeros(FEATURES) if transcoder.threshold is None else transcoder.threshold
    q = theta.double()[None]
    assert not gate_of(transcoder).pattern(q)[..., 0].any()
    above = torch.nextafter(q, torch.tensor(torch.inf, dtype=q.dtype))
    expected = K if activation == "topk" else FEATURES
    assert gate_of(transcoder).pattern(above)[..., 0].sum() == expected


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_have_gradients_of_zero(activation):
    transcoder = drawn(5, activation=activation)
    q = pre_activations().requires_grad_()
    for function in (gate_of(transcoder).pattern, gate_of(transcoder).scores):
        (gradient,) = torch.autograd.grad(function(q).square().sum(), q)
        assert torch.equal(gradient, torch.zeros_like(q))
    (gradient,) = torch.autograd.grad(gate_of(transcoder).activation(q).sum(), q)
    assert torch.equal(gradient, active(q.detach(), transcoder).to(q))


def test_encode_refuses_another_width():
    with pytest.raises(InputError, match=r"got x of shape \[3, 7\]; expected \[\.\.\., 5\]"):
        drawn(5, activation="relu").encode(torch.zeros(3, 7, dtype=torch.float64))
