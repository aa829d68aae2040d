"""Tests of `attn-only-lens circuit`, `picture` and `pattern`: written files, output, errors."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest
import typer
from common import run_cli
from page_of_circuit import read_back

from attn_only_lens import (
    Contrast,
    circuits,
    explain,
    expose_neuron_heads,
    load,
    neuron_pattern,
    tasks,
)
from attn_only_lens import patching as p
from attn_only_lens.cli import app
from attn_only_lens.cli.options import load_model

CLEAN, CORRUPTED = "w3 w5 w7 w11", "w3 w6 w7 w11"
ANSWERS = ("--answer", "w13", "--wrong", "w17")
TEXTS = ("--clean", CLEAN, *ANSWERS)


def test_each_command_is_in_a_group_with_examples_that_can_be_copied(monkeypatch):
    """The examples fit a terminal with 80 columns, so they can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    command = typer.main.get_command(app)
    assert "attn-only-lens explain" in run_cli().output  # without a command, what to do first
    listed = run_cli("--help").output
    for name, subcommand in command.commands.items():
        assert subcommand.rich_help_panel in listed
        shown = run_cli(name, "--help").output.split("Examples:")[1].split("╭")[0].splitlines()
        examples = "\n".join(map(str.strip, shown)).replace("\\\n", " ").strip().split("\n\n")
        assert len(examples) == 3
        for example in examples:
            program, verb, *arguments = shlex.split(example)
            assert (program, verb) == ("attn-only-lens", name)
            subcommand.make_context(name, arguments)  # raises if an option does not exist


def test_an_explanation_and_its_page_with_examples(folder, expected, tmp_path):
    texts, page = tmp_path / "texts.txt", tmp_path / "why.html"
    texts.write_text("w3 w5 w7 w11\nw13 w17 w19\n", "utf-8")
    model, metric, _ = expected
    why = explain(model, Contrast(CLEAN, CORRUPTED, metric))
    pair = (*TEXTS, "--corrupted", CORRUPTED)
    result = run_cli("explain", folder, *pair, "--out", page, "--top", 5, "--texts", texts)
    assert result.exit_code == 0, result.output
    assert why.text(5) in result.output
    assert " at \\u201c" in page.read_text("utf-8")
    in_json = (*pair, "--out", tmp_path / "why.json")
    assert run_cli("explain", folder, *in_json).exit_code == 0
    read = load(tmp_path / "why.json")
    assert read.heads["id"].tolist() == why.graph.heads["id"].tolist()
    assert "only a page" in run_cli("explain", folder, *in_json, "--texts", texts).output


@pytest.fixture(scope="module")
def expected(folder):
    """Return the model, the metric, and the graph that the command should find."""
    model = expose_neuron_heads(load(folder)).model
    metric = p.logit_diff("w13", "w17")
    return model, metric, circuits.attribution_graph(model, Contrast(CLEAN, None, metric), top=19)


def test_a_graph_and_a_page_of_it(folder, expected, tmp_path):
    _, _, graph = expected
    for name in ("circuit.json", "circuit.html"):
        result = run_cli("circuit", folder, *TEXTS, "--nodes", 19, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        strongest = graph.nodes[graph.nodes["kind"].isin(["attention", "neuron"])]
        strongest = strongest.loc[strongest["attribution"].abs().nlargest(20).index]
        assert all(name in result.output for name in strongest["name"])
    read = load(tmp_path / "circuit.json")
    assert read.nodes["id"].tolist() == graph.nodes["id"].tolist()
    np.testing.assert_allclose(read.nodes["attribution"], graph.nodes["attribution"], atol=1e-4)
    data = read_back((tmp_path / "circuit.html").read_text("utf-8"))
    assert data["nodes"]["id"] == graph.nodes["id"].tolist()
    # A page written from the file shows the same graph.
    result = run_cli("picture", tmp_path / "circuit.json", "--out", tmp_path / "again.html")
    assert result.exit_code == 0, result.output
    again = read_back((tmp_path / "again.html").read_text("utf-8"))
    assert again["nodes"]["id"] == data["nodes"]["id"]


def test_a_pair_finds_a_minimal_circuit(folder, expected, tmp_path):
    model, metric, _ = expected
    out = tmp_path / "circuit.json"
    result = run_cli("circuit", folder, *TEXTS, "--corrupted", CORRUPTED, "--out", out,
                 "--faithfulness", 0.7, "--top", 3)  # fmt: skip
    assert result.exit_code == 0, result.output
    circuit = circuits.discover(model, Contrast(CLEAN, CORRUPTED, metric), faithfulness=0.7)
    kept = f"{len(circuit)} of {circuit.n_sites} sites keep {circuit.faithfulness:.0%}"
    assert f"{kept} of the effect, all others {circuit.completeness:.0%}" in result.output
    pattern = r"^ *(L\d[HN]\d+) +(\d) +\S+ +(-?[\d.]+)$"
    shown = [(f"{name}@{x}", float(y)) for name, x, y in re.findall(pattern, result.output, re.M)]
    table = explain(model, Contrast(CLEAN, CORRUPTED, metric), faithfulness=0.7).table()
    table = table.query("group == 'circuit'").sort_values("share", key=abs, ascending=False).head(3)
    assert [site for site, _ in shown] == table["id"].tolist()
    assert [share for _, share in shown] == pytest.approx(table["share"].tolist(), abs=0.006)


def test_pages_of_circuit_and_explain_have_the_same_labels(folder, tmp_path):
    pages = {}
    for command in ("circuit", "explain"):
        pages[command] = tmp_path / f"{command}.html"
        pair = (*TEXTS, "--corrupted", CORRUPTED, "--faithfulness", 0.7)
        assert run_cli(command, folder, *pair, "--out", pages[command]).exit_code == 0
    states = (read_back(page.read_text("utf-8"))["state"]["names"] for page in pages.values())
    names, explained = states
    assert any("←" in name for name in names.values())
    for node, name in names.items():
        assert explained[node].removesuffix(", sign disputed") == name


def test_sweeps_as_pictures(folder, tmp_path):
    sweep, out = tmp_path / "sweep.csv", tmp_path / "sweep.html"
    pair = ("--corrupted", CORRUPTED, "--sites", "L0H1,L1N5")
    assert run_cli("patch", folder, *TEXTS, *pair, "--out", sweep).exit_code == 0
    for more, drawn in (
        ((), r'"y":\["L0 heads"'),
        (("--rows", "name"), r'"y":\["L[01][HN]\d"'),
        (("--bars", 2), '"type":"bar"'),
    ):
        result = run_cli("picture", sweep, "--out", out, *more)
        assert result.exit_code == 0, result.output
        assert re.search(drawn, out.read_text("utf-8"))


def test_patterns(folder, expected, tmp_path):
    model, out = expected[0], tmp_path / "pattern.html"
    result = run_cli("pattern", folder, "--prompt", CLEAN, "--names", "L0N7, L1H1", "--out", out)
    assert result.exit_code == 0, result.output
    text = out.read_text("utf-8")
    _, cache = model.run_with_cache(CLEAN)
    gates = neuron_pattern(cache, "L0N7")[0, :, 0].tolist()
    assert str([float(f"{gate:.4g}") for gate in gates]).replace(" ", "") in text
    assert '"L1H1"' in text
    assert run_cli("pattern", folder, "--prompt", "0,7,9", "--token-ids", "--layer", 1, "--out", out
               ).exit_code == 0  # fmt: skip
    assert "L1H0" in out.read_text("utf-8")


def test_a_saved_circuit_is_evaluated_on_other_prompts(folder, expected, tmp_path):
    model, metric, _ = expected
    pair, page = (*TEXTS, "--corrupted", CORRUPTED), tmp_path / "page.html"
    pairs = ["w3 w7 w7 w11", "w4 w5 w9 w11"], ["w3 w8 w7 w11", "w4 w6 w9 w11"]
    texts = [word for x in pairs[0] for word in ("--clean", x)]
    texts += [word for x in pairs[1] for word in ("--corrupted", x)]
    saved = tmp_path / "saved.json"
    options = ("--faithfulness", 0.5, "--out", page, "--save-circuit", saved)
    assert run_cli("circuit", folder, *pair, *options).exit_code == 0
    circuit, parts = load(saved), tmp_path / "parts"
    stored = []
    for command in ("circuit", "explain"):  # the second has the same search
        assert run_cli(command, folder, *pair, *options, "--resume", parts).exit_code == 0
        assert load(saved).sites == circuit.sites
        stored.append({path.name for path in parts.glob("*.safetensors")})
    assert stored[0] == stored[1] != set()
    result = run_cli("evaluate", folder, saved, *texts, *ANSWERS)
    assert result.exit_code == 0, result.output
    kept = circuits.evaluate(model, circuit, Contrast(*pairs, metric))
    assert f"{len(circuit)} of {circuit.n_sites} sites" in result.output
    assert repr(kept) in result.output
    best = result.output.splitlines()[-len(circuit) :][0].split()[0]
    alone = p.activation_patch(model, Contrast(*pairs, metric), sites=circuit.sites)
    assert best == alone.top(1)["name"].item()
    frame = pd.DataFrame(dict(zip(("clean", "corrupted"), pairs, strict=True)))
    frame = frame.assign(answer=ANSWERS[1], wrong=ANSWERS[3], note=7)
    frame.to_csv(tmp_path / "pairs.csv", index=False)
    frame.to_json(tmp_path / "pairs.jsonl", orient="records", lines=True)
    Contrast(*(list(side) for side in pairs), metric).save(tmp_path / "pairs.json")
    for file in (tmp_path / f"pairs.{ending}" for ending in ("csv", "jsonl", "json")):
        again = run_cli("evaluate", folder, saved, "--pairs", file)
        assert again.stdout == result.stdout, (again.output, again.exception)


def test_pairs_are_made_for_a_task_and_read_by_other_commands(tmp_path):
    """The file has the pairs that the model solves, with their roles and their metric."""
    file = tmp_path / "pairs.json"
    result = run_cli("pairs", "small-english", "number", "--n", 4, "--seed", 3, "--out", file)
    assert result.exit_code == 0, result.output
    model = load_model("small-english", None, "cpu")
    expected = tasks.agreement(model.tokenizer, 4, 3).solved_by(model)
    made = load(file)
    for name in ("clean", "corrupted", "name", "dropped", "answers", "wrong"):
        assert getattr(made, name) == getattr(expected, name)
    assert {role: tuple(places) for role, places in made.roles.items()} == expected.roles
    page, saved = tmp_path / "page.html", tmp_path / "circuit.json"
    options = ("--held-out", 2, "--faithfulness", 0.3, "--strong", 1, "--save-circuit", saved)
    result = run_cli("explain", "small-english", "--pairs", file, *options, "--out", page)
    assert result.exit_code == 0, result.output
    exposed = expose_neuron_heads(model, copy=True).model
    kept = circuits.evaluate(exposed, load(saved), made[-2:])
    assert f"; {kept.faithfulness:.0%} ± " in result.output
    refused = run_cli("explain", "small-english", "--pairs", file, "--held-out", 4, "--out", page)
    assert "got --held-out 4 for 4 pairs; expected at most 3" in " ".join(refused.output.split())
    sweep = tmp_path / "sweep.parquet"
    result = run_cli("patch", "small-english", "--pairs", file, "--sites", "L3H3", "--out", sweep)
    assert result.exit_code == 0, result.output
    expose_neuron_heads(model)
    expected = p.activation_patch(model, expected, sites="L3H3").frame["score"]
    assert pd.read_parquet(sweep)["score"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_saved_contrast_that_a_command_cannot_use(tmp_path):
    alone, own = tmp_path / "alone.json", tmp_path / "own.json"
    Contrast("w3 w5", None, p.logit_diff("w13", "w17")).save(alone)
    Contrast("w3 w5", "w3 w7", p.custom(lambda logits: logits.sum(), "total")).save(own)
    out = ("--out", tmp_path / "x.html")
    for arguments, reason in {
        ("--pairs", alone): "has no corrupted prompts; expected pairs",
        ("--pairs", own): "stores only the name of its metric, total",
        ("--pairs", alone, *ANSWERS): "and --answer; expected only one",
    }.items():
        result = run_cli("explain", "small-english", *arguments, *out)
        assert result.exit_code == 2
        assert reason in " ".join(result.output.split()), result.output
