"""Tests of exact gates against arbitrary precision and against the activations they represent."""

import mpmath
import pytest
import torch
from oracles.activations import logistic, weight
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from attn_only_lens import GeneralizedSiLU
from attn_only_lens.gates.exact import GATES

pytestmark = pytest.mark.numeric

mpmath.mp.dps = 1700  # 1 - p is as small as exp(-3700)

POINTS = [-37.0, -11.3, -5.7, -2.3, -1e-3, 0.0, 1e-8, 0.7, 1.9, 5.3, 13.1, 36.7]
NAMES = sorted(GATES)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_accurate_in_both_tails(name):
    q = torch.tensor(POINTS, dtype=torch.float64)
    pattern = GATES[name].pattern(q)
    for x, (on_neuron, bias) in zip(POINTS, pattern.tolist(), strict=True):
        p = weight(name, x)
        # exp and erfc of an argument x lose |x| roundings; the largest argument here is about 3600.
        for got, expected in ((on_neuron, p), (bias, 1 - p)):
            if expected > mpmath.mpf("1e-300"):
                assert abs(got - expected) <= 1e-12 * expected, (x, got, expected)
            else:
                assert got <= 1e-299
    torch.testing.assert_close(GATES[name].scores(q).softmax(-1), pattern, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize(("a_1", "a_2"), [(0.4, -3.1), (-2.3, 0.7)])
def test_generalized_silu_is_accurate_in_both_tails(a_1, a_2):
    gate, q = GeneralizedSiLU(a_1, a_2).gate, torch.tensor(POINTS, dtype=torch.float64)
    pattern = gate.pattern(q)
    rows = zip(POINTS, pattern.tolist(), gate.activation(q).tolist(), strict=True)
    for x, (on_neuron, bias), activation in rows:
        p, on_bias = (logistic(sign * mpmath.mpf(a_2) * x) for sign in (1, -1))
        # exp of an argument of up to 115 loses about 115 roundings.
        assert abs(on_neuron - p) <= 1e-13 * p
        assert abs(bias - on_bias) <= 1e-13 * on_bias
        expected = mpmath.mpf(a_1) * mpmath.mpf(a_2) * x * p
        assert abs(activation - expected) <= 1e-13 * abs(expected)
    torch.testing.assert_close(gate.scores(q).softmax(-1), pattern, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_finite_at_every_finite_input(name, dtype):
    limit = torch.finfo(dtype).max
    q = torch.tensor([-limit, -300.0, -1.0, 0.0, 1.0, 300.0, limit], dtype=dtype)
    q.requires_grad_()
    scores, pattern = GATES[name].scores(q), GATES[name].pattern(q)
    assert scores.isfinite().all()
    assert scores.softmax(-1).isfinite().all()
    assert pattern.isfinite().all()
    assert pattern[0].tolist() == [0, 1]
    assert pattern[-1].tolist() == [1, 0]
    if scores.requires_grad:
        scores[..., 1].clamp(-1e4, 1e4).sum().backward()
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "quick_gelu"])
def test_activation_and_its_gradient_are_those_of_transformer_lens(name):
    q = torch.linspace(-9, 9, 211, dtype=torch.float64)
    got, expected = q.clone().requires_grad_(), q.clone().requires_grad_()
    a, b = GATES[name].activation(got), SUPPORTED_ACTIVATIONS[name](expected)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(got.grad, expected.grad, rtol=1e-11, atol=1e-13)


def test_the_control_fails():
    """Control: another activation's gate fails the comparison above."""
    q = torch.linspace(-9, 9, 211, dtype=torch.float64)
    difference = GATES["gelu"].activation(q) - SUPPORTED_ACTIVATIONS["gelu_new"](q)
    assert difference.abs().max() > 1e-4
