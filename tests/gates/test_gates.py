"""Tests of exact gates against arbitrary precision and against the activations they represent."""

import mpmath
import pytest
import torch
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from attn_only_lens.gates.exact import GATES

pytestmark = pytest.mark.numeric

mpmath.mp.dps = 1700  # 1 - p is as small as exp(-3700)

POINTS = [-37.0, -11.3, -5.7, -2.3, -1e-3, 0.0, 1e-8, 0.7, 1.9, 5.3, 13.1, 36.7]
NAMES = sorted(GATES)


def exact_weight(name, q):
    """Compute p(q) from each activation's definition, without the package."""
    q = mpmath.mpf(q)
    logistic = lambda x: 1 / (1 + mpmath.exp(-x))  # noqa: E731
    tanh_slope = 2 * mpmath.sqrt(2 / mpmath.pi)
    cubic = q + mpmath.mpf("0.044715") * q**3
    return {
        "silu": lambda: logistic(q),
        "quick_gelu": lambda: logistic(mpmath.mpf("1.702") * q),
        "gelu": lambda: mpmath.ncdf(q),
        "gelu_new": lambda: logistic(tanh_slope * cubic),
        "gelu_pytorch_tanh": lambda: logistic(tanh_slope * cubic),
        "gelu_fast": lambda: logistic(2 * mpmath.mpf("0.7978845608") * cubic),
        "relu": lambda: mpmath.mpf(1 if q > 0 else 0),
    }[name]()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_accurate_in_both_tails(name):
    pattern = GATES[name].pattern(torch.tensor(POINTS, dtype=torch.float64))
    for q, (on_neuron, bias) in zip(POINTS, pattern.tolist(), strict=True):
        p = exact_weight(name, q)
        # exp and erfc of an argument x lose |x| roundings; the largest argument here is about 3600.
        for got, expected in ((on_neuron, p), (bias, 1 - p)):
            if expected > mpmath.mpf("1e-300"):
                assert abs(got - expected) <= 1e-12 * expected, (q, got, expected)
            else:
                assert got <= 1e-299


@pytest.mark.parametrize("name", NAMES)
def test_softmax_of_the_scores_is_the_pattern(name):
    q = torch.linspace(-30, 30, 607, dtype=torch.float64)
    torch.testing.assert_close(
        GATES[name].scores(q).softmax(-1), GATES[name].pattern(q), rtol=1e-11, atol=1e-300
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_at_every_finite_input(name, dtype):
    limit = torch.finfo(dtype).max
    q = torch.tensor([-limit, -300.0, -1.0, 0.0, 1.0, 300.0, limit], dtype=dtype)
    scores, pattern = GATES[name].scores(q), GATES[name].pattern(q)
    assert scores.isfinite().all()
    assert pattern.isfinite().all()
    assert scores.softmax(-1).isfinite().all()
    assert pattern[0].tolist() == [0, 1]
    assert pattern[-1].tolist() == [1, 0]


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


def test_gradients_of_scores_are_finite_far_out():
    for gate in GATES.values():
        for dtype in (torch.float64, torch.float32):
            q = torch.tensor([-1e30, -1e12, -50.0, 0.5, 1e12, 1e30], dtype=dtype)
            q.requires_grad_()
            scores = gate.scores(q)
            assert scores.isfinite().all()
            if scores.requires_grad:
                scores[..., 1].clamp(-1e4, 1e4).sum().backward()
                assert q.grad.isfinite().all(), gate.name
