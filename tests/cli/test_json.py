"""Tests of --json: one object on standard output, with the values of the Python functions."""

import json
import math
from pathlib import Path

import pytest
from common import run_cli

from attn_only_lens import Contrast, circuits, explain, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.circuits.circuit import read_circuit
from attn_only_lens.cli.json_output import EvaluateOutput, ExplainOutput, PatchOutput, schema

SCHEMA = Path(__file__).parents[2] / "docs" / "json.schema.json"
CLEAN, CORRUPTED = "w3 w5 w7 w11", "w3 w6 w7 w11"
PAIR = ("--clean", CLEAN, "--corrupted", CORRUPTED, "--answer", "w13", "--wrong", "w17", "--json")


@pytest.fixture(scope="module")
def contrast():
    return Contrast(CLEAN, CORRUPTED, p.logit_diff("w13", "w17"))


@pytest.fixture(scope="module")
def model(folder):
    return expose_neuron_heads(load(folder)).model


@pytest.fixture(scope="module")
def printed(folder, tmp_path_factory):
    """Return what the three commands print to standard output, parsed, and their folder."""
    out = tmp_path_factory.mktemp("json")
    runs = {
        "explain": ("--out", out / "why.html", "--save-circuit", out / "circuit.json"),
        "patch": ("--sites", "heads", "--direction", "noise", "--top", 3, "--out", out / "s.csv"),
        "evaluate": ("--top", 2),
    }
    parsed = {}
    for command, options in runs.items():
        arguments = (out / "circuit.json",) if command == "evaluate" else ()
        result = run_cli(command, folder, *arguments, *PAIR, *options)
        assert result.exit_code == 0, result.output
        parsed[command] = json.loads(result.stdout)  # one object, and nothing else
    return parsed, out


def test_explain_prints_its_table(printed, model, contrast):
    parsed, out = printed
    why, got = explain(model, contrast), parsed["explain"]
    assert ExplainOutput.model_validate(got).version == 1
    assert (got["title"], got["warnings"]) == (why.title, why.warnings)
    table = why.table()
    assert [row["id"] for row in got["sites"]] == table["id"].tolist()
    for row, wanted in zip(got["sites"], table.to_dict("records"), strict=True):
        for name, value in wanted.items():
            if isinstance(value, float):
                missing = math.isnan(value)
                assert row[name] == (None if missing else pytest.approx(value, abs=1e-5))
            else:
                assert row[name] == value
    assert got["circuit"]["n_sites"] == len(why.circuit)
    assert got["files"] == [str(out / "why.html"), str(out / "circuit.json")]
    assert all(map(Path.exists, map(Path, got["files"])))


def test_patch_and_evaluate_print_their_numbers(printed, model, contrast):
    parsed, out = printed
    sweep = p.activation_patch(model, contrast, sites="heads", direction="noise")
    got = PatchOutput.model_validate(parsed["patch"])
    top = sweep.top(3)
    assert [site.id for site in got.sites] == [f"{x.name}@{x.position}" for x in top.itertuples()]
    assert [site.effect for site in got.sites] == pytest.approx(top["effect"].tolist(), abs=1e-5)
    assert [site.score for site in got.sites] == pytest.approx(
        [effect + 1 for effect in top["effect"]], abs=1e-5
    )
    assert got.n_sites == len(sweep)
    circuit = read_circuit(out / "circuit.json")
    kept = circuits.evaluate(model, circuit, contrast)
    printed_kept = EvaluateOutput.model_validate(parsed["evaluate"]).kept
    assert printed_kept.faithfulness == pytest.approx(kept.faithfulness, abs=1e-5)
    assert printed_kept.standard_error is None  # one prompt
    assert len(parsed["evaluate"]["sites"]) == 2


def test_the_guide_has_the_schema():
    """After a change of the objects: `make support` writes it again."""
    assert json.loads(SCHEMA.read_text("utf-8")) == schema()
