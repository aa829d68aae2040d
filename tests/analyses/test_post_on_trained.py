"""Tests of the study of the post's construction on trained models: its references and counts."""

from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from common import needs_hooked_transformer, run_script

from analyses.studies import post_on_trained as study
from analyses.tools import train_modular_addition as training
from attn_only_lens import pretrained

pytestmark = needs_hooked_transformer

KEPT = Path(study.__file__).parents[1] / "results"
TINY = training.Recipe(modulus=7, d_model=10, n_heads=2, d_mlp=11)


def test_smoke(tmp_path):
    result = run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    assert (tmp_path / "post_on_trained.md").read_text("utf-8").strip() in result.output
    frame = pd.read_csv(tmp_path / "post_on_trained.csv")
    errors = frame.set_index(["kind", "omega"])["logits"]
    assert 1e-5 < errors["float64", 4.0] < 1e-2
    assert errors["float64", 1000.0] < 1e-13 < errors["float32", 1000.0] < 1e-4
    assert (frame["accuracy"] == 1).all()
    cost = pd.read_csv(tmp_path / "post_on_trained_cost.csv").set_index("form")
    check_costs(cost)


def check_costs(cost, n=3, d=128, d_mlp=512, n_heads=4, vocabulary=113):
    """Check the counts of the post's construction, factored like its heads, independently."""
    d_head, width = d // n_heads, d + d_mlp + n + 1
    into, out = -(-(d + 1) // d_head), -(-(d_mlp + 1) // d_head)
    assert cost.loc["post", "heads"] == f"{n_heads} + {into} + {d_mlp} + {out}"
    assert (cost.loc["post", "vectors"], cost.loc["post", "width"]) == (n + 1, width)
    flops = 2 * n * d * vocabulary
    for heads, d_qk, d_ov in (
        (n_heads, d_head + n + 1, d_head + 1),
        (into, n + 1, d_head),
        (d_mlp, n + 1, 1),
        (out, n + 1, d_head),
    ):
        flops += 2 * heads * (d_qk + d_ov) * (2 * (n + 1) * width + (n + 1) ** 2)
    assert cost.loc["post", "Mflop a prompt"] == pytest.approx(flops / 1e6, rel=1e-5)
    attention = 2 * n * d * d * 4 + 2 * 2 * n * n * d
    original = attention + 2 * 2 * n * d * d_mlp + 2 * n * d * vocabulary
    assert cost.loc["original", "Mflop a prompt"] == pytest.approx(original / 1e6, rel=1e-5)


def test_it_compares_with_the_model_itself():
    model = pretrained.modular_addition(dtype=torch.float64)
    with study.as_file(study.SHIPPED) as folder, torch.no_grad():
        of = study.case(folder, 5, "cpu")
        torch.testing.assert_close(of.logits, model(of.tokens), rtol=0, atol=1e-11)
        _, cache = model.run_with_cache(of.tokens)
    assert torch.equal(of.answers, of.tokens[:, :2].sum(1) % 113)
    assert of.hidden == pytest.approx(cache["blocks.0.mlp.hook_pre"].abs().max().item())
    off = of.logits.clone()
    off[0, 0, 0] += 2 * of.logits.abs().max()
    assert study.errors(of, off)["logits"] == pytest.approx(2.0)
    assert study.errors(of, of.logits)["logits"] == 0.0


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_relu_is_approached_and_what_does_not_fit_is_refused(tmp_path, act):
    model = TINY.model()
    recipe = type("WithAct", (), {"config": lambda _: TINY.config() | {"act_fn": act}})()
    training.save_file(
        {n: t for n, t in model.state_dict().items() if not n.endswith(("mask", "IGNORE"))},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(training.json.dumps(recipe.config()))
    if act == "gelu":
        with pytest.raises(typer.BadParameter, match="act_fn='gelu'"):
            study.case(tmp_path, 2, "cpu")
        return
    with torch.no_grad():
        frame = study.measured(study.case(tmp_path, 5, "cpu"), [20.0], [1.0, 1e6])
    errors = frame.set_index(["kind", "slope"])["logits"]
    assert errors["float64", 1e6] < 1e-4 * errors["float64", 1.0]


def test_what_is_stored():
    cost = pd.read_csv(KEPT / "post_on_trained_cost.csv")
    assert cost["model"].unique().tolist() == ["modular_addition", "modular_addition_relu_1l"]
    check_costs(cost[cost["model"] == "modular_addition"].set_index("form"))
