"""Tests of gates for gated MLPs, against plain loops and dense grids."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from analyses.tools import certificates
from analyses.tools.certificates import certified_bound
from attn_only_lens.gates import bilinear_gate
from attn_only_lens.gates.bilinear import table

pytestmark = pytest.mark.numeric

EPS32 = 2.0**-23
TABLE = table("gated")
ALPHA = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": lambda g: F.gelu(g, approximate="tanh"),
    "gelu_pytorch_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "gelu_fast": lambda g: 0.5 * g * (1 + torch.tanh(0.7978845608 * g * (1 + 0.044715 * g * g))),
}
every_gate = pytest.mark.parametrize(
    "gate", TABLE, ids=[f"{gate.name}-{gate.limit:g}-{gate.heads}" for gate in TABLE]
)
# All gates share one code, so one gate per number of heads and per activation is enough.
each_code = pytest.mark.parametrize(
    "gate",
    [
        bilinear_gate(name, heads, limit=limit)
        for name, heads, limit in (
            ("silu", 4, 2.0),
            ("gelu", 6, 128.0),
            ("gelu_new", 8, 16.0),
            ("relu", 12, 1.0),
        )
    ],
    ids=lambda gate: f"{gate.name}-{gate.heads}",
)


def off_grid(gate, points=20_011):
    """Return points that lie on no power-of-two grid, and the ends of the range."""
    return torch.linspace(-gate.limit, gate.limit, points, dtype=torch.float64)


def error_at(gate, g):
    return (gate.activation(g) - ALPHA[gate.name](g)).abs()


def test_the_table_holds_each_gate_once():
    ranges = {x: [2.0**k for k in range(1, 8)] for x in ("silu", "gelu", "gelu_new")}
    ranges["relu"] = [1.0]
    keys = sorted((gate.name, gate.limit, gate.heads) for gate in TABLE)
    assert keys == [(x, r, n) for x in sorted(ranges) for r in ranges[x] for n in (4, 6, 8, 12)]


@each_code
def test_heads_are_a_softmax_over_self_and_bias_and_sum_to_the_activation(gate):
    """Compute one head at a time in Python floats, with two keys each."""
    g = torch.linspace(-1.9 * gate.limit, 1.9 * gate.limit, 17, dtype=torch.float64)
    scores, pattern = gate.scores(g), gate.pattern(g)
    assert scores.shape == pattern.shape == (17, gate.heads, 2)
    for i, point in enumerate(g.tolist()):
        total = []
        for j, weight in enumerate(gate.w):
            weight_of_neuron = 1.0
            if j < gate.heads - 1:
                weight_of_neuron = 0.5 + 0.5 * math.tanh(0.5 * (gate.b[j] * point + gate.c[j]))
            # The tolerance is absolute: an argument of size up to 60 loses 60 roundings of 1e-16.
            assert pattern[i, j].tolist() == pytest.approx(
                [weight_of_neuron, 1.0 - weight_of_neuron], abs=1e-14
            )
            assert scores[i, j].softmax(-1).tolist() == pytest.approx(
                [weight_of_neuron, 1.0 - weight_of_neuron], abs=1e-14
            )
            total.append(weight * weight_of_neuron)
        tolerance = 1e-14 * gate.sum_abs_w
        assert gate.activation(g[i]).item() == pytest.approx(math.fsum(total), abs=tolerance)
    assert pattern[:, -1].tolist() == [[1.0, 0.0]] * 17
    assert gate.scores(g.expand(3, 17)).shape == (3, 17, gate.heads, 2)


@every_gate
def test_the_bound_holds_between_grid_points_and_is_certified_and_tight(gate):
    g = off_grid(gate)
    error = error_at(gate, g).max().item()
    # α and the sum have rounding errors relative to their sizes.
    assert error <= gate.bound + 2.0**-48 * (gate.sum_abs_w + gate.limit)
    assert gate.bound <= 1.05 * error
    # The platform's exponential rounds, but the bounds are 1e-7 and larger.
    assert certified_bound(gate) == pytest.approx(gate.bound, rel=1e-6)
    numbers = [*gate.w, *gate.b, *gate.c]
    assert torch.tensor(numbers).tolist() == numbers  # float32 represents them exactly


@each_code
def test_a_changed_coefficient_is_caught(gate):
    """Control: the certificate notices a change of each kind of coefficient."""
    shifted = replace(gate, w=(*gate.w[:-1], gate.w[-1] + 4 * gate.bound))
    assert certified_bound(shifted) > 2.5 * gate.bound
    largest = max(range(len(gate.w) - 1), key=lambda j: abs(gate.w[j]))
    for field in ("w", "b", "c"):
        values = list(getattr(gate, field))
        values[largest] += 0.02 * max(abs(values[largest]), 0.1)
        assert certified_bound(replace(gate, **{field: tuple(values)})) > 1.2 * gate.bound, field


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    gate = bilinear_gate("silu", 8, limit=16.0)
    g = torch.linspace(-16, 16, 331).to(dtype)
    torch.testing.assert_close(gate.activation(g), gate.activation(g.float()).to(dtype))
    # Control: patterns rounded to half precision before the sum have large errors.
    rounded = gate.pattern(g)[..., 0].float() @ torch.tensor(gate.w)
    assert (rounded - gate.activation(g.float())).abs().max() > 10 * gate.bound


def test_outside_the_range_the_error_grows_without_bound():
    gate = bilinear_gate("silu", 8, limit=8.0)
    error = error_at(gate, torch.tensor([8.0, 16.0, 800.0], dtype=torch.float64))
    assert error[0] <= gate.bound < 100 * gate.bound < error[1]
    assert error[2] > 100.0


@pytest.mark.parametrize("activation", ["silu", "gelu_new"])
def test_the_heads_of_a_gated_mlp_are_within_the_bound(activation):
    """Compare with the MLP: d_model 5, d_mlp 7, 11 tokens; each head writes a_j u W_out[i]."""
    random = torch.Generator().manual_seed(0)
    x, w_gate, w_in, w_out = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((11, 5), (5, 7), (5, 7), (7, 5))
    )
    g, u = x @ w_gate, x @ w_in
    expected = (ALPHA[activation](g) * u) @ w_out
    gate = bilinear_gate(activation, 8, limit=g.abs().max().item())

    def sum_of_heads(weights):
        out = torch.zeros_like(expected)
        for i in range(7):
            for j, weight in enumerate(weights):
                pattern = gate.scores(g[:, i]).softmax(-1)[:, j, 0]
                out += (pattern * u[:, i])[:, None] * (weight * w_out[i])
        return out

    allowed = gate.bound * (u.abs() @ w_out.abs())
    assert ((sum_of_heads(gate.w) - expected).abs() <= allowed + 1e-12).all()
    without_constant = sum_of_heads((*gate.w[:-1], 0.0))
    assert ((without_constant - expected).abs() > 10 * allowed).any()


@pytest.mark.parametrize("name", sorted(certificates._GATED_CURVATURE))
def test_the_curvature_of_each_activation_is_bounded(name):
    g = torch.linspace(-40, 40, 40_009, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(ALPHA[name](g).sum(), g, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), g)
    largest, claimed = second.abs().max().item(), certificates._GATED_CURVATURE[name]
    assert 0.1 * claimed <= largest <= claimed


def test_the_smallest_range_that_covers_the_request():
    assert bilinear_gate("silu", 6, limit=1e-3).limit == 2.0
    assert bilinear_gate("silu", 6, limit=8.0).limit == 8.0
    assert bilinear_gate("silu", 6, limit=8.01).limit == 16.0


@pytest.mark.parametrize("limit", [1e-3, 1.0, 3.0, math.nextafter(2.0**40, math.inf)])
def test_relu_has_every_range(limit):
    gate = bilinear_gate("relu", 6, limit=limit)
    assert limit <= gate.limit < 2 * limit
    g = off_grid(gate)
    assert (gate.activation(g) - F.relu(g)).abs().max() <= gate.bound
    assert gate.bound == gate.limit * bilinear_gate("relu", 6, limit=1.0).bound


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_spellings_of_gelu_tanh(name):
    gate = bilinear_gate(name, 12, limit=2.0)
    g = off_grid(gate)
    assert gate.name == name
    assert (gate.activation(g) - ALPHA[name](g)).abs().max() <= gate.bound


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (("tanh", 6, 8.0), "no bilinear gate for 'tanh' in gated MLPs.*gelu_fast.*silu"),
        (("silu", 5, 8.0), r"heads=5; silu has gates with \[4, 6, 8, 12\]"),
        (("silu", 6, 128.1), r"limit=128.1; silu gates cover \|q\| <= 128: use the exact gate"),
        (("silu", 6, 0.0), "limit=0.0; expected a positive number"),
        (("gelu", 6, math.nan), "limit=nan; expected a positive number"),
    ],
)
def test_refusals(request_, words):
    with pytest.raises(ValueError, match=words):
        bilinear_gate(*request_[:2], limit=request_[2])
