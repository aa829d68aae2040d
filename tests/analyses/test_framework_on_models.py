"""Tests that the study of the framework's tools runs, and that its page matches its tables."""

from pathlib import Path

import pandas as pd
import pytest
from common import run_script

from analyses.studies import framework_on_models as study

KEPT = Path(__file__).parents[2] / "analyses" / "results"


@pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers
def test_smoke(tmp_path):
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    hops = pd.read_csv(tmp_path / "framework_on_models_hops.csv")
    assert hops.groupby("prompt")["share"].sum().tolist() == pytest.approx([1.0, 1.0], abs=1e-2)
    assert (hops[hops["hops"] == "more"]["explained"] > 0.9999).all()
    tasks = pd.read_csv(tmp_path / "framework_on_models_tasks.csv").groupby("task")
    assert tasks["effect"].sum().tolist() == pytest.approx(tasks["value"].first(), rel=1e-2)


def test_purity_counts_the_most_common_class():
    classes = study.word_classes()
    assert study.purity([" Mary", " Sarah", " key", " Jessica", " the"], classes) == 3 / 5


def test_neurons_of_random_directions_by_hand():
    """The tokens that drive a neuron, and those it raises, follow from products of weights."""
    plain = study.with_random_directions(study.pretrained.small_english(), 3)
    wrapped, neuron = plain.original_model, 5
    layer = wrapped.model.layers[1]
    read = wrapped.model.embed_tokens.weight * layer.post_attention_layernorm.weight
    drive = (read @ layer.mlp.gate_proj.weight[neuron]).clamp(min=0)
    drive = drive * (read @ layer.mlp.up_proj.weight[neuron])
    raised = (wrapped.lm_head.weight * wrapped.model.norm.weight) @ layer.mlp.down_proj.weight
    want = [
        [study.token_texts(plain, [int(token)])[0] for token in of.topk(study.N_TOKENS).indices]
        for of in (drive, raised[:, neuron])
    ]
    again = study.with_random_directions(study.pretrained.small_english(), 4)

    def paths(model):
        exposed = study.expose_neuron_heads(model).model
        paths = study.circuits.token_paths(exposed, study.p.neuron_heads(1), 10**6, progress=False)
        row = paths.query(f"name == 'L1N{neuron}' and value == '+'").iloc[0]
        return [list(row[end]) for end in study.ENDS]

    assert paths(plain) == want
    assert paths(again) != want  # control: another draw


def test_what_stands_out_is_above_every_draw(monkeypatch):
    monkeypatch.setattr(study, "word_classes", lambda: {"a": "x", "b": "x", "c": "y"})

    def rows(*reads):
        writes = [("a", "b", "a", "b", "a")] * len(reads)
        return pd.DataFrame({"layer": range(len(reads)), "reads": reads, "writes": writes})

    one, two, five = ("a", "c", "", "", ""), ("a", "b", "c", "", ""), ("a",) * 5
    nulls = [rows(one, two), rows(two, two)]
    words = study.readability(rows(five, two), ["a", "c", "d", "e", "f"], nulls, 3)
    assert words["reads"].tolist() == pytest.approx([1, 0.4])
    assert words["reads, random directions"].tolist() == pytest.approx([0.3, 0.4])
    assert words["reads, largest"].tolist() == pytest.approx([0.4, 0.4])
    assert words["random tokens"].tolist() == pytest.approx([0.2, 0.2])
    assert study.standing_out(words, "reads") == "layer 0"
    assert study.standing_out(words, "writes") == "no layer"


def test_what_the_page_concludes():
    part = {
        name: pd.read_csv(KEPT / f"framework_on_models_{name}.csv")
        for name in ("hops", "tasks", "words", "heads", "pairs")
    }
    explained = part["hops"].groupby(["model", "hops"])["explained"].mean()
    assert explained[study.SMALL, "2"] < 0.5 < 0.9 < explained[study.SMALL, "4"]
    assert explained[study.LARGE, "2"] < 0.2
    assert explained[study.LARGE, "8"] < -1
    tasks = part["tasks"].set_index(["task", "hops"])
    share = tasks["effect"] / tasks["value"]
    assert share["induction", "2"] > 0.5 > share["agreement", "2"]
    assert (part["pairs"].iloc[0][["copying_first", "copying_second"]] > 0.5).all()
    words = part["words"].set_index("layer")
    above = words["reads"] > words["reads, largest"]
    assert above.tolist() == [True, False, False, False]
    # The first run's null was too easy: any direction prefers words of one class.
    assert (words["reads, random directions"] > words["random tokens"] + 0.03).all()
    small = part["heads"].query(f"model == '{study.SMALL}'")
    assert small["induction"].max() < 0.15
