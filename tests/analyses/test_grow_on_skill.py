"""The study of SmolLM2 grown and trained on a skill: its prompts, its training and its measures."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from analyses.studies import grow_on_skill as study
from analyses.tools import circuit_measures as measures


@pytest.fixture(scope="module")
def seed_runs(tmp_path_factory):
    """The runs of one seed; the model is tiny and random."""
    folder = tmp_path_factory.mktemp("runs")
    base = study.tiny(folder / "tiny")
    prompts = study.Prompts(study.SMOKE, transformers.AutoTokenizer.from_pretrained(base))
    return study.SeedRuns(study.SMOKE, 0, base, folder, prompts)


def test_only_new_entries_get_gradients(seed_runs):
    model = study.transformer(seed_runs.base)
    study.freeze_old(model, 29)
    model(torch.arange(7)[None]).logits[:, -1].logsumexp(-1).sum().backward()
    mlp = model.model.layers[1].mlp
    for name, old, new in (
        ("gate_proj", slice(29), slice(29, None)),
        ("down_proj", (slice(None), slice(29)), (slice(None), slice(29, None))),
    ):
        gradient = getattr(mlp, name).weight.grad
        assert not gradient[old].any()
        assert gradient[new].all()
    assert model.lm_head.weight.grad is None


def test_a_frozen_model_without_its_new_neurons_is_the_model_before(seed_runs):
    arms = ("frozen", "free")
    path, _ = (seed_runs.trained(arm) / "curve.csv" for arm in arms)
    frozen, free = (
        pd.DataFrame(study.without_neurons(seed_runs, arm)).set_index("what") for arm in arms
    )
    curve = pd.read_csv(path).set_index("step")["skill_loss"]
    losses = frozen["skill_loss"]
    assert losses["removed"] == curve[0] != curve[4] == losses["only new"]
    # The control: old weights of "free" were trained.
    assert free.loc["removed", "skill_loss"] != curve[0]
    written = path.stat().st_mtime_ns
    seed_runs.trained("frozen")
    assert path.stat().st_mtime_ns == written  # a second run trains nothing


def test_figures_of_new_neurons_by_hand():
    effects = np.array([[9.0, 9.0], [2.0, 4.0], [-1.0, -1.0]])  # by component and prompt
    part = measures.Part(effects, *map(np.array, ([5.0, 7.0], [1.0, 1.0], [4.0, 6.0], [2.0, 3.0])))
    look = study.Look(("L0H0", "L0N0", "L0N1"), {"skill": part}, {}, {}, {})
    expected = {"right": 1, "new_share": 1 / 4, "parity": 1 / 2, "single": -1 / 5}
    expected |= {"joint": 1 / 5, "joint_old": 3.5 / 5}
    assert study.of_new(look, "skill", ["L0N1"]) == pytest.approx(expected)
