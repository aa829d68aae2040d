"""Tests that the study of Ω runs, and that its reference values are right."""

import pytest
import torch
import torch.nn.functional as F
from common import run_script

from analyses.studies import omega_models, omega_study


def test_smoke(tmp_path):
    result = run_script(omega_study.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "omega_study.md").read_text()
    assert page.strip() in result.output
    assert "float32, shifted, depth 2" in (tmp_path / "omega_study.svg").read_text("utf-8")


def test_its_figures_are_those_of_the_construction():
    plain = omega_models.random_transformer(2, 16, init="scaled", seed=3)
    frame = omega_study.errors(plain, torch.randn(5, 16), [3.0, 9.0, 1000.0])
    value = frame.set_index(["kind", "omega", "depth"])["value"].to_dict()
    assert 1e-3 < value["float64", 3.0, 2] < 1.0
    assert value["float64", 1000.0, 2] < 1e-12
    assert value["float32", 9.0, 2] < 1e-6 < value["float32", 1000.0, 2] < 1e-4
    assert value["float32, shifted", 1000.0, 2] < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("init", ["scaled", "growing", "unit"])
def test_the_direct_evaluation_against_torchs_attention(init, causal):
    plain = omega_models.random_transformer(2, 8, init=init, seed=0, causal=causal)
    x = start = torch.randn(7, 8, dtype=torch.float64)
    for layer in plain.layers:
        w = layer.to(torch.float64)
        heads = (x @ w.W_Q, x @ w.W_K, x @ w.W_V)
        x = x + (F.scaled_dot_product_attention(*heads, is_causal=causal) @ w.W_O).sum(0)
        x = x + F.linear(F.silu(F.linear(x, w.W_1.T, w.b_1)), w.W_2.T, w.b_2)
    got, _ = omega_models.direct(plain, start)
    # Sums of at most 32 terms, twice; "unit" weights give entries of 1e5, so errors are relative.
    torch.testing.assert_close(got[-1], x, rtol=1e-11, atol=1e-11 * x.abs().max().item())


def test_scaled_weights_keep_the_stream_small_and_others_do_not():
    x = torch.randn(7, 16)

    def last(init):
        return omega_models.direct(omega_models.random_transformer(8, 16, init=init, seed=0), x)

    (scaled, small), (growing, large) = last("scaled"), last("growing")
    assert scaled[-1].abs().max() < 4 * x.abs().max() < growing[-1].abs().max()
    assert max(small) < max(large) / 10
