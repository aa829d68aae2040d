"""Tests of bilinear gates: their heads, their bounds, and why they are no SiLU neurons."""

import dataclasses
import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from analyses.tools.certificates import certified_bound
from attn_only_lens.gates import bilinear_gate
from attn_only_lens.gates.bilinear import BilinearGate

pytestmark = pytest.mark.numeric

GELUS = ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]
HEADS = [1, 2, 4, 6, 8]
PINNED = [(name, m) for name in ("gelu", "gelu_new") for m in HEADS]  # the rows of the table
ERRORS = [*PINNED, ("gelu_fast", 8)]  # gelu_fast uses the coefficients of gelu_new
CODE = [("silu", 1), ("relu", 1), *(("gelu", m) for m in HEADS)]  # all gates share one code
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPE = (3, 5, 7)


def activation(name, q):
    """Compute α(q) for one float in arbitrary precision, without the package or torch."""
    q = mpmath.mpf(q)
    cubic = q + mpmath.mpf("0.044715") * q**3
    root = mpmath.sqrt(2 / mpmath.pi)
    if name == "relu":
        return max(q, mpmath.mpf(0))
    weight = {
        "silu": lambda: 1 / (1 + mpmath.exp(-q)),
        "quick_gelu": lambda: 1 / (1 + mpmath.exp(-mpmath.mpf("1.702") * q)),
        "gelu": lambda: mpmath.ncdf(q),
        "gelu_new": lambda: (1 + mpmath.tanh(root * cubic)) / 2,
        "gelu_pytorch_tanh": lambda: (1 + mpmath.tanh(root * cubic)) / 2,
        "gelu_fast": lambda: (1 + mpmath.tanh(mpmath.mpf("0.7978845608") * cubic)) / 2,
    }
    return q * weight[name]()


def mixture(gate, q):
    """Compute q Σ w σ(b q + c) for one float, in arbitrary precision."""
    q = mpmath.mpf(q)
    heads = zip(gate.w, gate.b, gate.c, strict=True)
    return q * mpmath.fsum(w / (1 + mpmath.exp(-(mpmath.mpf(b) * q + c))) for w, b, c in heads)


def float_activation(name, q):
    """Compute α on an array with torch's functions in float64, accurate to 1e-14 for |q| <= 24."""
    functional = torch.nn.functional
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(q, approximate="tanh")
    if name == "gelu_fast":
        return 0.5 * q * (1 + torch.tanh(0.7978845608 * (q + 0.044715 * q**3)))
    if name == "quick_gelu":
        return q / (1 + torch.exp(-1.702 * q))
    return getattr(functional, name)(q)


def measured(gate, end=24.0, points=240_007):
    """Return the largest error on a grid that no fit or certificate uses."""
    q = torch.linspace(-end, end, points, dtype=torch.float64)
    return float((gate.activation(q) - float_activation(gate.name, q)).abs().max())


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(60):
        yield


# heads


@pytest.mark.parametrize(("name", "m"), CODE)
def test_each_head_is_a_softmax_over_a_score_bilinear_in_the_input(name, m):
    gate = bilinear_gate(name, m)
    q = torch.randn(SHAPE, dtype=torch.float64) * 5
    scores, pattern = gate.scores(q), gate.pattern(q)
    assert scores.shape == pattern.shape == (*SHAPE, m, 2)
    assert (scores[..., 0] == 0).all()
    for j, (b, c) in enumerate(zip(gate.b, gate.c, strict=True)):
        torch.testing.assert_close(scores[..., j, 1], -(b * q + c), rtol=1e-15, atol=1e-15)
    # exp of relu's scores, of size 1e4, loses about 1e4 roundings.
    torch.testing.assert_close(scores.softmax(-1), pattern, rtol=1e-11, atol=1e-300)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(*SHAPE, m).double(), rtol=0, atol=3e-16)


@pytest.mark.parametrize(("name", "m"), CODE)
def test_the_heads_together_are_the_mixture(name, m):
    """Compare with arbitrary precision, for each head and for the sum."""
    gate, generator = bilinear_gate(name, m), random.Random(0)
    points = [generator.uniform(-15, 15) for _ in range(23)] + [0.0, -1e-3, 40.0, -40.0]
    q = torch.tensor(points, dtype=torch.float64)
    combined = (gate.pattern(q)[..., 0] * torch.tensor(gate.w, dtype=torch.float64)).sum(-1)
    for weight in (gate.mixture(q), combined):
        for x, got in zip(points, (weight * q).tolist(), strict=True):
            assert abs(got - mixture(gate, x)) < 1e-14 * (1 + abs(x))
    assert torch.equal(gate.activation(q), gate.mixture(q) * q)


def test_heads_that_are_not_mirrored_keep_their_signs():
    gate = BilinearGate("gelu", (0.25, 0.75), (2.2, 2.1), (1.3, -0.5), math.nan)
    for x in (-1.7, 0.3, 2.9):
        q = torch.tensor(x, dtype=torch.float64)
        assert float(gate.activation(q)) == pytest.approx(float(mixture(gate, x)), rel=1e-14)
        for j in range(2):
            alone = BilinearGate("gelu", (1.0,), (gate.b[j],), (gate.c[j],), math.nan)
            expected = mixture(alone, x) / x
            assert float(gate.pattern(q)[j, 0]) == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize(("name", "m"), PINNED)
def test_weights_add_up_to_exactly_one_in_float32_too(name, m):
    gate = bilinear_gate(name, m)
    assert sum(map(Fraction, gate.w)) == 1
    assert all(float(np.float32(w)) == w for w in gate.w)
    assert gate.sum_abs_w == pytest.approx(sum(map(abs, gate.w)), rel=1e-15)
    assert gate.sum_abs_w < 2
    for dtype in (torch.float32, torch.float64):
        q = torch.logspace(1.7, 30, 211, dtype=dtype)
        assert torch.equal(gate.activation(q), q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "m", "limit"),
    [("silu", 1, None), ("relu", 1, None), ("gelu", 8, None), ("relu", 6, 8)],
)
def test_finite_at_every_finite_input(name, m, limit, dtype):
    gate, largest = bilinear_gate(name, m, limit=limit), torch.finfo(dtype).max
    q = torch.tensor([-largest, -300.0, -1.0, 0.0, 1.0, 300.0, largest], dtype=dtype)
    for values in (gate.scores(q), gate.scores(q).softmax(-1), gate.pattern(q), gate.activation(q)):
        assert values.dtype == dtype
        assert values.isfinite().all()
    if limit is None:  # for large |q|, every activation is relu
        far = q[[0, 1, -2, -1]].double()
        assert gate.activation(q).double()[[0, 1, -2, -1]].tolist() == pytest.approx(
            far.clamp(min=0).tolist(), rel=torch.finfo(dtype).eps, abs=1e-99
        )


# bounds


@pytest.mark.parametrize(("name", "m"), ERRORS)
def test_the_pinned_bound_is_certified_and_tight(name, m):
    gate = bilinear_gate(name, m)
    assert measured(gate) <= certified_bound(gate) <= gate.bound <= 1.01 * measured(gate)


@pytest.mark.parametrize(("name", "m"), ERRORS)
def test_bounds_hold_at_random_points_of_every_size(name, m):
    """Use arbitrary precision and points up to 1e99, beyond any grid."""
    gate, generator = bilinear_gate(name, m), random.Random(m)
    points = [s * 10 ** generator.uniform(-9, 2) for s in (-1, 1) for _ in range(31)]
    points += [s * 10 ** generator.uniform(2, 99) for s in (-1, 1) for _ in range(3)]
    for q in points:
        assert abs(mixture(gate, q) - activation(name, q)) <= gate.bound


@pytest.mark.parametrize("broken", ["w", "b", "c"])
@pytest.mark.parametrize(("name", "m"), [("gelu", 4), ("gelu_new", 8)])
def test_a_perturbed_coefficient_is_caught(name, m, broken):
    gate = bilinear_gate(name, m)
    values = list(getattr(gate, broken))
    values[1] += 1e-3
    bound = certified_bound(dataclasses.replace(gate, **{broken: tuple(values)}))
    assert bound > 1.5 * gate.bound
    if broken == "w":  # the mixture no longer tends to 1
        assert bound == math.inf


def test_a_certificate_sees_both_sides():
    """Use heads without symmetry, whose errors at q and -q differ, and their mirror image."""
    gate = BilinearGate("gelu", (0.25, 0.75), (2.2, 2.1), (1.3, -0.5), math.nan)
    mirror = dataclasses.replace(gate, c=(-1.3, 0.5))
    assert certified_bound(gate) == certified_bound(mirror)
    assert measured(gate) <= certified_bound(gate) <= 1.01 * measured(gate)


def test_a_certificate_sees_the_tail():
    """If a gate opens at q = 30, its largest error lies beyond the nodes."""
    gate = BilinearGate("gelu", (1.0,), (1.0,), (-30.0,), math.nan)
    assert measured(gate, end=20.0) < 0.8 * measured(gate, end=60.0) < 0.8 * certified_bound(gate)


def test_the_curvatures_of_the_certificate_hold():
    """Check the proof's bounds on |second derivatives| in arbitrary precision."""
    for name in ("gelu", "gelu_new", "gelu_fast"):
        for t in np.linspace(0, 6, 61):
            assert abs(mpmath.diff(lambda x, name=name: activation(name, x), t, 2)) < 3.1
    for b, c in [(1.0, 0.0), (1.3, 4.4), (1.3, -4.4), (2.2, -1.3), (3.0, 0.7)]:
        head = BilinearGate("gelu", (1.0,), (-b,), (-c,), math.nan)
        for t in np.linspace(0, 8, 61):
            second = mpmath.diff(lambda x, head=head: mixture(head, x), t, 2)
            assert abs(second) < b * (0.87 + abs(c) / 10)


@pytest.mark.parametrize("name", ["silu", "quick_gelu"])
def test_one_head_is_exact_where_the_theorem_says_so(name):
    gate = bilinear_gate(name)
    assert gate.bound == 0
    for q in (-37.3, -5.7, -1e-3, 0.0, 1.9, 13.1):
        assert abs(mixture(gate, q) - activation(name, q)) < 1e-15


@pytest.mark.parametrize("tolerance", [None, 0.1, 1e-12])
def test_the_slope_of_relu_follows_from_the_tolerance(tolerance):
    gate = bilinear_gate("relu", tolerance=tolerance)
    largest = mpmath.lambertw(mpmath.exp(-1)).real / mpmath.mpf(gate.b[0])
    assert gate.bound == (tolerance or 1e-3)
    assert largest <= gate.bound < largest * mpmath.mpf("1.000001")
    worst = (1 + largest * gate.b[0]) / gate.b[0]  # x = 1 + W(1/e)
    for q in (worst, -worst):
        assert abs(mixture(gate, q) - activation("relu", q)) == pytest.approx(largest, rel=1e-12)


def test_the_error_of_relu_follows_from_the_slope():
    for slope in (0.5, 50, 1e6):
        gate = bilinear_gate("relu", slope=slope)
        largest = mpmath.lambertw(mpmath.exp(-1)).real / mpmath.mpf(slope)
        assert gate.b == (slope,)
        assert largest <= gate.bound < largest * mpmath.mpf("1.000001")


def test_the_slope_of_relu_does_not_amplify_float32():
    """A relative error of a pre-activation gives an equal one of the activation for any slope."""
    q = torch.linspace(-7, 7, 100_003)
    for tolerance in (1e-3, 1e-7):
        gate = bilinear_gate("relu", tolerance=tolerance)
        error = gate.activation(q).double() - gate.activation(q.double())
        assert (error.abs() <= 3e-7 * q.abs()).all()


@pytest.mark.parametrize("slope", [1.0, 1.3, 1.7729338588, 3.2])
@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_the_bound_of_a_slope_is_certified_and_tight(name, slope):
    gate = bilinear_gate(name, slope=slope)
    assert measured(gate) <= gate.bound <= 1.001 * measured(gate)
    assert gate.bound <= certified_bound(gate) * 1.0001


def test_one_head_is_better_than_the_papers_slope():
    paper = bilinear_gate("gelu", slope="paper")
    assert paper.b == (1.702,)
    assert measured(paper) == pytest.approx(0.0203, abs=5e-5)
    assert measured(paper) <= paper.bound == pytest.approx(0.0203, abs=2e-4)
    assert bilinear_gate("gelu", 1).bound < 0.014
    errors = [bilinear_gate("gelu", m).bound for m in HEADS]
    assert errors == sorted(errors, reverse=True)


# choice and refusals


def test_the_fewest_heads_within_a_tolerance():
    for name in GELUS:
        for m in HEADS:
            bound = bilinear_gate(name, m).bound
            assert bilinear_gate(name, tolerance=bound) == bilinear_gate(name, m)
            if m < 8:
                assert bilinear_gate(name, tolerance=bound * 0.999).heads > m
        assert bilinear_gate(name).heads == 4  # the default tolerance, 1e-3
    assert bilinear_gate("gelu", 8, tolerance=1e-3).heads == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("solu",), ["'solu'", "gelu_new", "relu"]),
        (("gelu", 3), ["heads=3", "[1, 2, 4, 6, 8]"]),
        (("relu", 2), ["heads=2", "[1]"]),
        (("gelu", None, 1e-9), ["within 1e-09", "8 heads: 5.863e-08", "GATES['gelu']"]),
        (("gelu", 2, 1e-3), ["within 0.001", "2 heads: 0.004219"]),
        (("relu", None, 0.0), ["tolerance=0.0", "at least 1e-12"]),
        (("gelu", None, math.nan), ["tolerance=nan"]),
    ],
)
def test_refusals_say_what_there_is(arguments, words):
    with pytest.raises(ValueError, match=r"expected|no bilinear gate|has gates with") as caught:
        bilinear_gate(*arguments[:2], tolerance=arguments[2] if arguments[2:] else None)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (bilinear_gate("relu"), "got 'relu'"),
        (BilinearGate("gelu", (1.0,), (0.7,), (0.0,), 0.0), r"got b = \(0.7,\)"),
        (BilinearGate("gelu", (1.0,), (1.7,), (50.0,), 0.0), r"c = \(50.0,\)"),
        (BilinearGate("gelu", (1.0,), (math.nan,), (0.0,), 0.0), "nan"),
    ],
)
def test_a_certificate_refuses_what_its_proof_does_not_cover(gate, words):
    with pytest.raises(ValueError, match=words):
        certified_bound(gate)


# Why not SiLU neurons


def residue(function, pole):
    """Return the residue at a pole of order one: the mean of f(q) (q - pole) on a circle."""
    angles = [mpmath.expjpi(2 * mpmath.mpf(k) / 64) * mpmath.mpf("0.125") for k in range(64)]
    return sum(function(pole + step) * step for step in angles) / 64


def silu(x):
    return x / (1 + mpmath.exp(-x))


@pytest.mark.parametrize(("kind", "heads"), [("plain", 2), ("plain", 8), ("gated", 12)])
def test_heads_with_an_offset_are_no_sum_of_silu_neurons(kind, heads):
    """Residues at conjugate poles are opposite for SiLU, so a sum of SiLU terms has none here.

    The residue of a head w σ(b q + c) u, or of w σ(b q + c) q in a plain MLP, is that of a head
    alone, since no two heads of a gate share a pole.
    """
    limit = None if kind == "plain" else 3.0
    gate = bilinear_gate("gelu", heads, limit=limit)
    terms = [term for term in zip(gate.w, gate.b, gate.c, strict=True) if term[2] < math.inf]
    assert len({(-c / b, abs(b)) for _, b, c in terms}) == len(terms)
    largest = 0.0
    for w, b, c in terms:

        def head(q, w=w, b=b, c=c):
            return w / (1 + mpmath.exp(-(b * q + c))) * (q if kind == "plain" else 1)

        def neuron(q, b=b, c=c):
            return silu(b * q + c)

        poles = [mpmath.mpc(-c / b, sign * mpmath.pi / b) for sign in (1, -1)]
        expected = -2 * w * c / b**2 if kind == "plain" else 2 * w / b
        sums = [sum(residue(function, pole) for pole in poles) for function in (head, neuron)]
        assert abs(sums[0] - expected) < 1e-12 * (1 + abs(expected))
        assert abs(sums[1]) < 1e-12  # the control, for the same poles
        assert abs(residue(neuron, poles[0])) > 0.1
        largest = max(largest, abs(expected))
    assert largest > 0.01
