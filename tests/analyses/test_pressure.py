"""The studies of capacity pressure: their smoke runs, their measures, and what is stored."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer, needs_transformer_lens_4, run_script

from analyses.studies import pressure_measures as measures
from analyses.studies import pressure_modular_addition as addition
from analyses.studies import pressure_report as report
from analyses.studies.circuit_measures import Look, Part, patched
from analyses.tools.train_small_english import losses_of
from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p

KEPT = Path(__file__).parents[2] / "analyses" / "results"
PAGES = {
    "pressure_small_english": report.english_page,
    "pressure_modular_addition": report.addition_page,
}


def tables(folder, name):
    files = {"": f"{name}.csv", "sizes": f"{name}_sizes.csv"}
    return {part: pd.read_csv(folder / file) for part, file in files.items()}


def check_smoke(study, tmp_path):
    name = Path(study.__file__).stem
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = run_script(study.main, ["--smoke", "--n-seeds", "1", *folders])
    page = (tmp_path / f"{name}.md").read_text("utf-8")
    assert page.strip() in result.output
    frames = tables(tmp_path, name)
    settings = json.loads((tmp_path / f"{name}.run.json").read_text("utf-8"))["settings"]
    assert PAGES[name](frames, settings, " --smoke") == page
    grown = frames[""].query("arm == 'grown'")
    fraction = 1 - grown["small"] / grown["full"]
    assert grown["parity"].to_numpy() == pytest.approx(fraction.to_numpy(), abs=1e-3)
    assert grown["new_share"].between(1e-6, 1).all()
    return frames


@needs_transformer_lens_4
def test_smoke_small_english(tmp_path):
    from analyses.studies import pressure_small_english as english

    frames = check_smoke(english, tmp_path)
    arms = {"grown", "grown, strong decay", "grown, equal loss", "grown, other texts", "full"}
    assert set(frames[""]["arm"]) == arms
    before = frames["sizes"].query("arm == 'ceiling'").set_index(["ladder", "seed", "size"])
    for row in frames[""].itertuples():
        losses = [before.loc[(row.ladder, row.seed, s), "before"] for s in (row.small, row.full)]
        assert row.pressure == pytest.approx(losses[0] - losses[1], abs=2e-3)


@needs_hooked_transformer
def test_smoke_addition(tmp_path):
    frames = check_smoke(addition, tmp_path)
    arms = {"grown", "grown, no decay", "grown, equal loss", "grown, other pairs", "full"}
    assert set(frames[""]["arm"]) == arms


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_shows_its_tables(name):
    settings = json.loads((KEPT / f"{name}.run.json").read_text("utf-8"))["settings"]
    made = PAGES[name](tables(KEPT, name), settings, "")
    assert (KEPT / f"{name}.md").read_text("utf-8") == made


NAMES = ("L0H0", "L0H1", "L0N0", "L0N1", "L0N2", "L1H0", "L1H1", "L1N0", "L1N1", "L1N2")


def a_look():
    generator = np.random.default_rng(3)
    vectors = [generator.normal(size=5) for _ in range(4)]
    part = Part(generator.normal(size=(len(NAMES), 5)), *vectors)
    return Look(NAMES, {"task": part}, {}, {}, {})


def test_shares_by_counting():
    look, new = a_look(), {"L0N1", "L1N0"}
    effects = dict(zip(NAMES, look.parts["task"].effects.mean(1), strict=True))
    got = measures.new_parts(look, "task", new)
    sizes = {name: abs(effect) for name, effect in effects.items() if "N" in name}
    of_new = sum(sizes[name] for name in new)
    assert got["new_share"] == pytest.approx(of_new / sum(sizes.values()))
    assert got["parity"] == pytest.approx(1 / 3)
    of_old = sum(sizes.values()) - of_new
    assert got["new_odds"] == pytest.approx((of_new / 2) / (of_old / 4))


def test_random_labels_are_as_many_in_each_layer_or_in_all_if_layers_are_new():
    drawn = measures.random_labels(NAMES, {"L0N1", "L1N0", "L1N2"}, 0)
    assert [sum(name.startswith(start) for name in drawn) for start in ("L0N", "L1N")] == [1, 2]
    layer = [name for name in NAMES if name.startswith("L1")]
    seen = [measures.random_labels(NAMES, layer, seed) for seed in range(9)]
    assert all(sum("H" in name for name in drawn) == 2 for drawn in seen)
    assert all(len(set(drawn)) == 5 for drawn in seen)
    assert any(set(drawn) != set(layer) for drawn in seen)


@needs_transformer_lens_4
def test_directions_and_text_costs_against_other_code():
    from analyses.studies import pressure_small_english as english

    runs = english.SeedRuns(english.SMOKE, 0, Path(), "cpu")
    plan = english.Plan(english.Sizes(2, 12, 2, 7), 1, seed=5)
    model, asked = plan.model().double(), english.Asked.of(english.SMOKE, "cpu").first["gender"]
    assert runs.seed == 0
    neurons = [f"L1N{i}" for i in range(7)]
    with expose_neuron_heads(model) as exposed:
        # As many directions as neurons span all of them, whatever the basis.
        all_directions = measures.patched_directions(exposed, asked, neurons, 0)
        np.testing.assert_allclose(all_directions, patched(exposed, asked, neurons), atol=1e-10)
        fewer = measures.patched_directions(exposed, asked, neurons[:3], 0)
        assert abs(fewer - all_directions).max() > 1e-6
    # Mean ablation of a whole MLP: its output is its output for the mean of its hidden layer.
    texts = english.texts_once(3)
    names = [f"L{i}N{j}" for i in range(2) for j in range(7)]
    got = measures.text_costs(model, texts, tuple(names), neurons)
    wrapped = model.original_model
    mlp, hidden = wrapped.model.layers[1].mlp, []
    handle = mlp.down_proj.register_forward_pre_hook(lambda _, z: hidden.append(z[0]))
    with torch.no_grad():
        whole = torch.cat([losses_of(wrapped, tokens) for tokens in texts]).mean()
        handle.remove()
        mean = torch.cat([z.flatten(0, 1) for z in hidden]).mean(0)
        out = mlp.down_proj(mean)
        handle = mlp.register_forward_hook(lambda *args: out.expand_as(args[2]))
        ablated = torch.cat([losses_of(wrapped, tokens) for tokens in texts]).mean()
        handle.remove()
    assert got["text_new"] == pytest.approx((ablated - whole).item(), abs=1e-12)
    assert abs(got["text_new"]) > 1e-8


@needs_hooked_transformer
def test_closed_forms_of_addition_are_patches():
    study = addition.SMOKE
    model = study.recipe(7, 3).model().double()
    prompts, others = addition.Prompts.of(study, 0, "cpu")
    sets = [{tuple(row) for row in some.clean.tolist()} for some in (prompts, others)]
    assert not sets[0] & sets[1]
    closed_form = addition.effects_of(model, prompts, {"L0N5", "L0N6"})
    right, wrong = (t[:, :2].sum(1) % study.modulus for t in (prompts.clean, prompts.corrupted))
    asked = (prompts.clean, prompts.corrupted, p.logit_diff(right.tolist(), wrong.tolist()))
    how = {"positions": "all", "direction": "noise", "progress": False}
    with expose_neuron_heads(model) as exposed:
        sites = p.neuron_heads()
        exact = p.activation_patch(exposed, *asked, sites=sites, **how).to_frame()
        secants = p.attribution(
            exposed, *asked, sites=sites, method="secant", budget=0, split=True, **how
        )
    part = closed_form.look.parts[addition.TASK]
    effects = part.clean.mean() - exact["value"].to_numpy()
    # float64 throughout
    np.testing.assert_allclose(part.effects.mean(1), effects, atol=1e-12)
    assert abs(effects).max() > 1e-6
    assert part.without_new.mean() == pytest.approx(part.clean.mean() - effects[5:].sum())
    span = (part.clean - part.nothing).mean()
    shares = -secants.to_frame()["by_pattern"].to_numpy() * span
    np.testing.assert_allclose(closed_form.by_pattern.mean(0).numpy(), shares, atol=1e-12)
