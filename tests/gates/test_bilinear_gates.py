"""Tests of bilinear gates of plain and gated MLPs: their heads, their bounds, and their limits.

The oracles are arbitrary precision, dense grids that no fit or certificate uses, and the proofs in
`analyses.tools.certificates`, which have controls of their own here.
"""

import math
import random
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from oracles.activations import logistic, weight
from torch.nn import functional

from analyses.tools import certificates
from analyses.tools.certificates import certified_bound
from attn_only_lens.gates import bilinear_gate
from attn_only_lens.gates.bilinear import BilinearGate, table

pytestmark = pytest.mark.numeric

HEADS = [1, 2, 4, 6, 8]
PINNED = [bilinear_gate(name, m) for name in ("gelu", "gelu_new") for m in HEADS]
GATED = table("gated")
UNMIRRORED = BilinearGate("gelu", (0.25, 0.75), (2.2, 2.1), (1.3, -0.5), math.nan)
# All gates share one code, so one gate per activation and number of heads is enough.
OF_EACH_CODE = [
    *(bilinear_gate("silu"), bilinear_gate("relu"), UNMIRRORED),
    *(gate for gate in PINNED if gate.name == "gelu"),
    *(bilinear_gate("silu", 4, limit=2.0), bilinear_gate("gelu", 6, limit=128.0)),
    *(bilinear_gate("gelu_new", 8, limit=16.0), bilinear_gate("relu", 12, limit=1.0)),
]
# torch's functions, accurate to 1e-14 in float64 for |q| <= 24
ALPHA = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_new": lambda q: functional.gelu(q, approximate="tanh"),
    "gelu_fast": lambda q: 0.5 * q * (1 + torch.tanh(0.7978845608 * (q + 0.044715 * q**3))),
}


def each(gates):
    return pytest.mark.parametrize(
        "gate", gates, ids=lambda gate: f"{gate.name}-{gate.heads}-{gate.limit:g}"
    )


def activation(name, q):
    return mpmath.mpf(q) * weight(name, q)


def mixture(gate, q):
    """Compute what approximates α(q) for one number, in arbitrary precision."""
    q = mpmath.mpf(q)
    terms = zip(gate.w, gate.b, gate.c, strict=True)
    return (1 if gate.gated else q) * mpmath.fsum(w * logistic(b * q + c) for w, b, c in terms)


def error_at(gate, q):
    return (gate.activation(q) - ALPHA[gate.name](q)).abs()


def measured(gate, end=None, points=240_007):
    """Return the largest error on a grid; the grid of a gate for gated MLPs ends at its limit."""
    end = end or min(gate.limit, 24.0)
    return error_at(gate, torch.linspace(-end, end, points, dtype=torch.float64)).max().item()


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(60):
        yield


# heads


@each(OF_EACH_CODE)
def test_each_head_is_a_softmax_of_a_bilinear_score_and_all_are_the_mixture(gate):
    generator = random.Random(0)
    points = [generator.uniform(-15, 15) for _ in range(23)] + [0.0, -1e-3, 40.0, -40.0]
    q = torch.tensor(points, dtype=torch.float64).reshape(3, 9)
    scores, pattern = gate.scores(q), gate.pattern(q)
    assert scores.shape == pattern.shape == (3, 9, gate.heads, 2)
    assert not scores[..., 0].any()
    for j, (b, c) in enumerate(zip(gate.b, gate.c, strict=True)):
        if c == math.inf:  # this head attends only to its own token
            assert (pattern[..., j, :] == torch.tensor([1.0, 0.0])).all()
        else:
            torch.testing.assert_close(scores[..., j, 1], -(b * q + c), rtol=1e-15, atol=1e-15)
    # exp of relu's scores, of size 1e4, loses about 1e4 roundings.
    torch.testing.assert_close(scores.softmax(-1), pattern, rtol=1e-11, atol=1e-300)
    combined = (pattern[..., 0] * torch.tensor(gate.w, dtype=torch.float64)).sum(-1)
    for got in (gate.activation(q), combined if gate.gated else combined * q):
        for x, y in zip(points, got.flatten().tolist(), strict=True):
            assert abs(y - mixture(gate, x)) < 1e-14 * max(1, gate.sum_abs_w) * (1 + abs(x))


@each(PINNED)
def test_weights_of_plain_gates_add_up_to_exactly_one_in_float32_too(gate):
    assert sum(map(Fraction, gate.w)) == 1
    assert all(float(np.float32(w)) == w for w in gate.w)
    for dtype in (torch.float32, torch.float64):
        q = torch.logspace(1.7, 30, 211, dtype=dtype)
        assert torch.equal(gate.activation(q), q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@each([bilinear_gate("relu"), bilinear_gate("gelu", 8), bilinear_gate("relu", 6, limit=8)])
def test_finite_at_every_finite_input(gate, dtype):
    largest = torch.finfo(dtype).max
    q = torch.tensor([-largest, -300.0, -1.0, 0.0, 1.0, 300.0, largest], dtype=dtype)
    for values in (gate.scores(q), gate.scores(q).softmax(-1), gate.pattern(q), gate.activation(q)):
        assert values.dtype == dtype
        assert values.isfinite().all()
    if not gate.gated:  # for large |q|, every activation is relu
        far = [0, 1, -2, -1]
        assert gate.activation(q).double()[far].tolist() == pytest.approx(
            q[far].double().clamp(min=0).tolist(), rel=torch.finfo(dtype).eps, abs=1e-99
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    gate = bilinear_gate("silu", 8, limit=16.0)
    q = torch.linspace(-16, 16, 331).to(dtype)
    torch.testing.assert_close(gate.activation(q), gate.activation(q.float()).to(dtype))
    # Control: patterns rounded to half precision before the sum have large errors.
    rounded = gate.pattern(q)[..., 0].float() @ torch.tensor(gate.w)
    assert (rounded - gate.activation(q.float())).abs().max() > 10 * gate.bound


# bounds


@each([*PINNED, bilinear_gate("gelu_fast", 8)])  # gelu_fast uses the coefficients of gelu_new
def test_the_bound_of_a_plain_gate_is_certified_and_tight(gate):
    assert measured(gate) <= certified_bound(gate) <= gate.bound <= 1.01 * measured(gate)
    # Arbitrary precision, and points up to 1e99, beyond any grid
    generator = random.Random(gate.heads)
    points = [s * 10 ** generator.uniform(-9, 2) for s in (-1, 1) for _ in range(31)]
    points += [s * 10 ** generator.uniform(2, 99) for s in (-1, 1) for _ in range(3)]
    for q in points:
        assert abs(mixture(gate, q) - activation(gate.name, q)) <= gate.bound


@each(GATED)
def test_the_bound_of_a_gated_gate_is_certified_and_tight(gate):
    grid = torch.linspace(-gate.limit, gate.limit, 20_011, dtype=torch.float64)
    error = error_at(gate, grid).max().item()
    # α and the sum have rounding errors relative to their sizes.
    assert error <= gate.bound + 2.0**-48 * (gate.sum_abs_w + gate.limit)
    assert gate.bound <= 1.05 * error
    # The platform's exponential rounds, but the bounds are 1e-7 and larger.
    assert certified_bound(gate) == pytest.approx(gate.bound, rel=1e-6)
    numbers = [*gate.w, *gate.b, *gate.c]
    assert torch.tensor(numbers).tolist() == numbers  # float32 represents them exactly


def test_the_table_holds_each_gate_once():
    ranges = {x: [2.0**k for k in range(1, 8)] for x in ("silu", "gelu", "gelu_new")}
    ranges["relu"] = [1.0]
    keys = sorted((gate.name, gate.limit, gate.heads) for gate in GATED)
    assert keys == [(x, r, n) for x in sorted(ranges) for r in ranges[x] for n in (4, 6, 8, 12)]


@pytest.mark.parametrize("name", ["silu", "quick_gelu"])
def test_one_head_is_exact_where_the_theorem_says_so(name):
    gate = bilinear_gate(name)
    assert gate.bound == 0
    for q in (-37.3, -5.7, -1e-3, 0.0, 1.9, 13.1):
        assert abs(mixture(gate, q) - activation(name, q)) < 1e-15


@pytest.mark.parametrize("choice", [{}, {"tolerance": 1e-12}, {"slope": 0.5}, {"slope": 1e6}])
def test_slope_and_error_of_relu_follow_from_one_another(choice):
    gate = bilinear_gate("relu", **choice)
    largest = mpmath.lambertw(mpmath.exp(-1)).real / mpmath.mpf(gate.b[0])
    assert gate.b == (choice.get("slope", gate.b[0]),)
    assert largest <= gate.bound < largest * mpmath.mpf("1.000001")
    if "slope" not in choice:
        assert gate.bound == choice.get("tolerance", 1e-3)
    worst = (1 + largest * gate.b[0]) / gate.b[0]  # x = 1 + W(1/e)
    for q in (worst, -worst):
        assert abs(mixture(gate, q) - activation("relu", q)) == pytest.approx(largest, rel=1e-12)


def test_the_slope_of_relu_does_not_amplify_float32():
    """A relative error of a pre-activation gives an equal one of the activation for any slope."""
    q = torch.linspace(-7, 7, 100_003)
    for tolerance in (1e-3, 1e-7):
        gate = bilinear_gate("relu", tolerance=tolerance)
        error = gate.activation(q).double() - gate.activation(q.double())
        assert (error.abs() <= 3e-7 * q.abs()).all()


@pytest.mark.parametrize("slope", [1.0, 1.3, 3.2])
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


# The certificate


@each([bilinear_gate("gelu", 4), bilinear_gate("gelu_new", 8), *OF_EACH_CODE[-4:]])
def test_a_changed_coefficient_is_caught(gate):
    """Control: the certificate notices a change of each kind of coefficient."""
    finite = [j for j, c in enumerate(gate.c) if c < math.inf]
    largest = max(finite, key=lambda j: abs(gate.w[j]))
    for field in ("w", "b", "c"):
        values = list(getattr(gate, field))
        values[largest] += 0.02 * max(abs(values[largest]), 0.1)
        bound = certified_bound(replace(gate, **{field: tuple(values)}))
        assert bound > 1.2 * gate.bound, field
        if field == "w" and not gate.gated:  # the mixture no longer tends to 1
            assert bound == math.inf


def test_a_certificate_sees_both_sides_and_the_tail():
    mirror = replace(UNMIRRORED, c=(-1.3, 0.5))  # the errors at q and -q differ
    assert certified_bound(UNMIRRORED) == certified_bound(mirror)
    assert measured(UNMIRRORED) <= certified_bound(UNMIRRORED) <= 1.01 * measured(UNMIRRORED)
    # If a gate opens at q = 30, its largest error lies beyond the nodes.
    late = BilinearGate("gelu", (1.0,), (1.0,), (-30.0,), math.nan)
    assert measured(late, end=20.0) < 0.8 * measured(late, end=60.0) < 0.8 * certified_bound(late)


def test_a_step_between_two_nodes_is_caught():
    """No node shows a narrow bump between two nodes; the second derivative's bound covers it."""
    gate = bilinear_gate("silu", 6, limit=8.0)
    nodes = 16.0 * 2.0**-16
    middle, steep = 1.5 * nodes, 1e9
    bump = replace(
        gate,
        w=(*gate.w, 1.0, -1.0),
        b=(*gate.b, steep, steep),
        c=(*gate.c, -steep * (middle - nodes / 4), -steep * (middle + nodes / 4)),
    )
    seen = error_at(bump, torch.arange(-8, 8, nodes, dtype=torch.float64)).max()
    assert seen < 1.01 * gate.bound
    assert error_at(bump, torch.tensor(middle, dtype=torch.float64)) > 0.9
    assert certified_bound(bump) > 1.0


def test_the_curvatures_of_the_certificate_hold():
    """Check the proof's bounds on |second derivatives|."""
    for name in ("gelu", "gelu_new", "gelu_fast"):
        for t in np.linspace(0, 6, 61):
            assert abs(mpmath.diff(lambda x, name=name: activation(name, x), t, 2)) < 3.1
    for b, c in [(1.0, 0.0), (1.3, 4.4), (1.3, -4.4), (2.2, -1.3), (3.0, 0.7)]:
        head = BilinearGate("gelu", (1.0,), (-b,), (-c,), math.nan)
        for t in np.linspace(0, 8, 61):
            second = mpmath.diff(lambda x, head=head: mixture(head, x), t, 2)
            assert abs(second) < b * (0.87 + abs(c) / 10)
    for name, claimed in certificates._GATED_CURVATURE.items():
        q = torch.linspace(-40, 40, 40_009, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(ALPHA[name](q).sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), q)
        assert 0.1 * claimed <= second.abs().max().item() <= claimed, name


# choice and refusals


def test_the_fewest_heads_within_a_tolerance():
    for m in HEADS:
        bound = bilinear_gate("gelu_fast", m).bound
        assert bilinear_gate("gelu_fast", tolerance=bound) == bilinear_gate("gelu_fast", m)
        if m < 8:
            assert bilinear_gate("gelu_fast", tolerance=bound * 0.999).heads > m
    assert bilinear_gate("gelu").heads == 4  # the default tolerance, 1e-3
    assert bilinear_gate("gelu", 8, tolerance=1e-3).heads == 8


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *(("silu", 8.0), ("silu", 8.01), ("gelu_fast", 2.0)),
        *(("relu", 1e-3), ("relu", 3.0), ("relu", math.nextafter(2.0**40, math.inf))),
    ],
)
def test_the_smallest_range_that_covers_the_request(name, limit):
    gate = bilinear_gate(name, 12, limit=limit)
    assert gate.name == name
    assert limit <= gate.limit < 2 * limit
    assert error_at(gate, torch.linspace(-gate.limit, gate.limit, 20_011).double()).max() <= (
        gate.bound
    )


@pytest.mark.parametrize(
    ("name", "choice", "words"),
    [
        ("solu", {}, "'solu'.*gelu_new.*relu"),
        ("gelu", {"heads": 3}, r"heads=3.*\[1, 2, 4, 6, 8\]"),
        ("gelu", {"tolerance": 1e-9}, r"within 1e-09.*8 heads: 5.863e-08"),
        ("gelu", {"heads": 2, "tolerance": 1e-3}, "within 0.001.*2 heads: 0.004219"),
        ("relu", {"tolerance": 0.0}, "tolerance=0.0.*at least 1e-12"),
        ("silu", {"heads": 5, "limit": 8.0}, r"heads=5; silu has gates with \[4, 6, 8, 12\]"),
        ("silu", {"limit": 128.1}, r"limit=128.1; silu gates cover \|q\| <= 128: use the exact"),
        ("gelu", {"limit": math.nan}, "limit=nan; expected a positive number"),
    ],
)
def test_refusals_say_what_there_is(name, choice, words):
    with pytest.raises(ValueError, match=words):
        bilinear_gate(name, **choice)


# Why not SiLU neurons


def residue(function, pole):
    """Return the residue at a pole of order one: the mean of f(q) (q - pole) on a circle."""
    angles = [mpmath.expjpi(2 * mpmath.mpf(k) / 64) * mpmath.mpf("0.125") for k in range(64)]
    return sum(function(pole + step) * step for step in angles) / 64


@each([bilinear_gate("gelu", 8), bilinear_gate("gelu", 12, limit=3.0)])
def test_heads_with_an_offset_are_no_sum_of_silu_neurons(gate):
    """Residues at conjugate poles are opposite for SiLU, so a sum of SiLU terms has none here.

    The residue of a head w σ(b q + c) u, or of w σ(b q + c) q in a plain MLP, is that of a head
    alone, since no two heads of a gate share a pole.
    """
    terms = [term for term in zip(gate.w, gate.b, gate.c, strict=True) if term[2] < math.inf]
    assert len({(-c / b, abs(b)) for _, b, c in terms}) == len(terms)
    largest = 0.0
    for w, b, c in terms:

        def head(q, w=w, b=b, c=c):
            return w * logistic(b * q + c) * (1 if gate.gated else q)

        def neuron(q, b=b, c=c):
            return (b * q + c) * logistic(b * q + c)

        poles = [mpmath.mpc(-c / b, sign * mpmath.pi / b) for sign in (1, -1)]
        expected = 2 * w / b if gate.gated else -2 * w * c / b**2
        sums = [sum(residue(function, pole) for pole in poles) for function in (head, neuron)]
        assert abs(sums[0] - expected) < 1e-12 * (1 + abs(expected))
        assert abs(sums[1]) < 1e-12  # the control, for the same poles
        assert abs(residue(neuron, poles[0])) > 0.1
        largest = max(largest, abs(expected))
    assert largest > 0.01
