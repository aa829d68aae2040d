"""Tests of `attn-only-lens patch`: the sweep that it writes, printed output, and errors."""

import re
from functools import partial

import numpy as np
import pandas as pd
import torch
from common import run_cli

from attn_only_lens import Contrast, expose_neuron_heads, load, save, viz
from attn_only_lens import patching as p

CLEAN, CORRUPTED = "w3 w5 w7 w11", "w3 w6 w7 w11"
TEXTS = ("--clean", CLEAN, "--corrupted", CORRUPTED, "--answer", "w13", "--wrong", "w17")
TOKENS = ("--token-ids", "--clean", "0,7,9,11", "--corrupted", "0,8,9,11")
NUMBERS = (*TOKENS, "--answer", 17, "--wrong", 21)


run = partial(run_cli, "patch")


def expected(folder, *prompts, **how):
    model = expose_neuron_heads(load(folder)).model
    metric = how.pop("metric", p.logit_diff("w13", "w17"))
    return p.activation_patch(model, Contrast(*prompts, metric), **how).frame


def same(frame, reference, atol=1e-4):
    """Check that a sweep has the sites and the values of a call of `activation_patch`."""
    for column in ("name", "position"):
        assert frame[column].tolist() == reference[column].tolist()
    np.testing.assert_allclose(frame["value"], reference["value"], rtol=0, atol=atol)


def test_a_sweep_of_texts(folder, tmp_path):
    out = tmp_path / "sweep.parquet"
    result = run(folder, *TEXTS, "--out", out, "--top", 3)
    assert result.exit_code == 0, result.output
    frame = load(out).frame
    assert len(frame) == 2 * (2 + 37) * 5
    same(frame, expected(folder, CLEAN, CORRUPTED))
    for name, token in load(out).top(3)[["name", "token"]].to_numpy():
        assert re.search(rf"{name} .* {token} ", result.output)
    assert "estimate" not in result.stderr


def test_prompts_of_different_lengths(folder, tmp_path, monkeypatch):
    """Without roles, they have one row for each token from the end; with roles, for each role.

    Many patches begin with an estimate of the time.
    """
    texts = (*TEXTS, "--clean", "w3 w5 w7", "--corrupted", "w3 w6 w7")
    saved, out = tmp_path / "pairs.json", tmp_path / "sweep.csv"
    result = run(folder, *texts, "--out", out, "--positions", "2,-1")
    assert result.exit_code != 0
    assert "prompt 0 has 5 tokens, and prompt 1 has 4" in " ".join(result.output.split())
    assert not out.exists()
    result = run(folder, *texts, "--out", out, "--positions=-1", "--sites", "heads")
    assert result.exit_code == 0, result.output
    prompts, roles = ([CLEAN, "w3 w5 w7"], [CORRUPTED, "w3 w6 w7"]), {"changed": 2, "end": -1}
    contrast = Contrast(*prompts, p.logit_diff("w13", "w17"), roles=roles)
    contrast.save(saved)
    monkeypatch.setattr("attn_only_lens.cli.patch._MANY", 100)
    monkeypatch.setattr("attn_only_lens.patching._plan._SAMPLES", (2, 2, 7))
    result = run(folder, "--pairs", saved, "--out", out)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "156 patches of 78 heads and neurons take about" in said
    assert "an estimate from 14 of them" in said
    assert "Cheaper: `explain`" in said
    sweep = load(out)
    model = expose_neuron_heads(load(folder)).model
    reference = p.activation_patch(model, contrast, sites=p.Sites(positions="roles")).frame
    same(sweep.frame, reference)
    assert viz.heatmap(sweep).data[0].x[0].startswith("changed: ")


def test_an_ablation_needs_no_corrupted_prompt(folder, tmp_path):
    out, sites = tmp_path / "sweep.csv", ["L0N5@1", "L1H1@-1"]
    options = ("--metric", "loss", "--direction", "zero", "--sites", ",".join(sites))
    result = run(folder, "--token-ids", "--clean", "0,7,9,11", "--out", out, *options)
    assert result.exit_code == 0, result.output
    how = {"metric": p.loss(), "direction": "zero", "sites": sites}
    reference = expected(folder, torch.tensor([0, 7, 9, 11]), None, **how)
    same(load(out).frame, reference)


def test_a_saved_model_tokens_and_every_option(folder, tmp_path):
    saved = save(expose_neuron_heads(load(folder)).model, tmp_path / "saved")
    out, parts = tmp_path / "sweep.csv", tmp_path / "parts"
    options = ("--sites", "neurons", "--layers", "0", "--part", "pattern", "--positions", "1,-1")
    more = ("--direction", "noise", "--resume", parts, "--batch-size", 5, "--metric", "logit_diff")
    for _ in range(2):  # the second time from the folder
        result = run(saved, *NUMBERS, "--out", out, *options, *more)
        assert result.exit_code == 0, result.output
    sweep = load(out)
    assert (sweep.part, sweep.direction) == ("pattern", "noise")
    assert len(list(parts.glob("*.safetensors"))) == 1
    reference = expected(
        folder,
        torch.tensor([0, 7, 9, 11]),
        torch.tensor([0, 8, 9, 11]),
        metric=p.logit_diff(17, 21),
        sites=p.Sites("neurons", positions=[1, -1], layers=[0]),
        part="pattern",
        direction="noise",
    )
    same(sweep.frame, reference, atol=1e-5)
    assert reference["value"].std() > 2e-4


def test_every_prompt_may_have_its_own_answers(folder, tmp_path):
    """Repeating an option is refused, because typer would keep only its last value."""
    pairs = {"--clean": ["w1 w3 w5", "w2 w3 w7"], "--corrupted": ["w2 w3 w5", "w4 w3 w7"]}
    pairs |= {"--answer": ["w13", "w11"], "--wrong": ["w17", "w19"]}
    arguments = [word for name, texts in pairs.items() for text in texts for word in (name, text)]
    out = tmp_path / "sweep.csv"
    result = run(folder, *arguments, "--sites", "L0N3,L0H1", "--out", out)
    assert result.exit_code == 0, result.output
    metric = p.logit_diff(pairs["--answer"], pairs["--wrong"])
    prompts = pairs["--clean"], pairs["--corrupted"]
    reference = expected(folder, *prompts, metric=metric, sites=["L0N3", "L0H1"])
    same(pd.read_csv(out), reference, atol=1e-5)
    arguments += ["--sites", "L0N3", "--sites", "L0H1", "--out", out]
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert "got --sites 2 times; expected it once" in " ".join(result.stderr.split())
