"""Tests that the rules for a difference of two runs are exact identities for any change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, log_softmax, softmax

from attn_only_lens.engine import secants

pytestmark = pytest.mark.numeric

# Each rule has about ten operations, so a relative error of 100 float64 roundings is allowed.
ROUNDING = 100 * np.finfo(np.float64).eps
SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([1e-9, 1e-5, 1e-3, 1.0, 30.0])


def two_runs(seed, size, shape=(3, 5, 7)):
    generator = np.random.default_rng(seed)
    x_0 = generator.normal(size=shape)
    return x_0 + size * generator.normal(size=shape), x_0


def both(*arrays):
    return (torch.from_numpy(np.asarray(array)) for array in arrays)


@settings(deadline=None, max_examples=25)
@given(SEEDS, SIZES)
def test_an_elementwise_function_changes_by_its_slope(seed, size):
    x_1, x_0 = two_runs(seed, size)
    y_1, y_0 = (0.5 * x * (1 + erf(x / 2**0.5)) for x in (x_1, x_0))

    def derivative(x):
        normal = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
        return 0.5 * (1 + torch.erf(x / 2**0.5)) + x * normal

    slope = secants.slope(*both(y_1, y_0, x_1, x_0), derivative).numpy()
    assert abs(slope * (x_1 - x_0) - (y_1 - y_0)).max() <= ROUNDING * (1 + abs(y_1).max())


@pytest.mark.parametrize("distance", [1e-6, 1e-5, 1e-3])
def test_nearly_equal_inputs_in_float32_have_the_slope_between_them(distance):
    """In float32, the quotient of tanh loses digits. The oracle is the derivative, in float64."""
    middle = torch.linspace(-2.0, 2.0, 101)
    x_1, x_0 = middle + distance / 2, middle - distance / 2
    expected = 1 - torch.tanh(middle.double()) ** 2

    def error(slope):
        return (slope.double() - expected).abs().max().item()

    runs = x_1.tanh(), x_0.tanh(), x_1, x_0
    assert error(secants.slope(*runs, lambda x: 1 - x.tanh() ** 2)) < 1e-6 + distance**2
    quotient = (runs[0] - runs[1]) / (x_1 - x_0)  # the control
    assert distance > 1e-5 or error(quotient) > 1e-3


@settings(deadline=None, max_examples=25)
@given(SEEDS, SIZES)
def test_a_jump_keeps_its_quotient_however_near(seed, size):
    x_1, x_0 = two_runs(seed, size)
    y_1, y_0 = ((x > 0).astype(float) for x in (x_1, x_0))
    slope = secants.slope(*both(y_1, y_0, x_1, x_0), torch.zeros_like).numpy()
    assert abs(slope * (x_1 - x_0) - (y_1 - y_0)).max() <= ROUNDING


@settings(deadline=None, max_examples=25)
@given(SEEDS, SIZES, st.booleans())
def test_softmax_changes_by_its_rule(seed, size, masked):
    s_1, s_0 = two_runs(seed, size)
    if masked:
        s_1[..., 3:], s_0[..., 3:] = -np.inf, -np.inf
    L, w = secants.softmax_slopes(*both(*(log_softmax(s, axis=-1) for s in (s_1, s_0))))
    with np.errstate(invalid="ignore"):
        change = torch.from_numpy(np.nan_to_num(s_1 - s_0))
    got = secants.softmax_change(L, w, change).numpy()
    expected = softmax(s_1, axis=-1) - softmax(s_0, axis=-1)
    assert abs(got - expected).max() <= ROUNDING * (1 + abs(s_1[np.isfinite(s_1)]).max())
    assert np.allclose(w.sum(-1), 1)


@settings(deadline=None, max_examples=25)
@given(SEEDS, SIZES, st.booleans())
def test_a_norm_changes_by_its_rule(seed, size, centres):
    x_1, x_0 = two_runs(seed, size)
    if centres:
        x_1, x_0 = (x - x.mean(-1, keepdims=True) for x in (x_1, x_0))
    r_1, r_0 = (1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) for x in (x_1, x_0))
    arrays = both((x_1 + x_0) / 2, r_1, r_0, x_1 - x_0)
    got = secants.norm_change(*arrays).numpy()
    # Rounding is relative to the rule's terms, which may exceed their difference. No entry of the
    # second term is larger than the norm of the first, r̄ |Δx|: in both runs |x| ≤ √7 / r, so
    # |x̄| ≤ √7 r̄ / (r_1 r_0).
    first = np.linalg.norm((r_1 + r_0) / 2 * (x_1 - x_0), axis=-1, keepdims=True)
    assert (abs(got - (x_1 * r_1 - x_0 * r_0)) <= ROUNDING * (1 + first)).all()


def test_functions_without_a_rule_are_left_alone_and_hooks_of_torch_end():
    x = torch.randn(2, 5, dtype=torch.float64)
    with secants.FunctionRules() as functions:
        assert torch.equal(x.sinh(), torch.sinh(x))
        assert x.float().dtype == torch.float64  # float32 would lose digits
        x.softmax(-1)
    assert len(functions.seen) == 1
    assert x.float().dtype == torch.float32
    with secants.FunctionRules(functions.seen):
        x[:1].softmax(-1)
        with pytest.raises(IndexError):  # a second pass with other calls
            x[:1].softmax(-1)
