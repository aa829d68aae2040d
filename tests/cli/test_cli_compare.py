"""Tests of `attn-only-lens compare`: the folder that it writes, printed output, and errors."""

import json
import shutil

import pandas as pd
import pytest
from bridges import hf_folder
from common import needs_hooked_transformer, run_cli, tokens
from models import source_folder
from safetensors.torch import save_file

from attn_only_lens import Contrast, compare, load
from attn_only_lens import patching as p
from attn_only_lens.growth import ComparisonSizes

FEW = ("--patched", 3, "--nodes", 5, "--faithfulness", 0.5)
LOSS = ("--metric", "loss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a source model with a tokenizer and of a model grown from it."""
    return grown_from(hf_folder(tmp_path_factory.mktemp("both") / "source"))


def grown_from(folder):
    grown = folder.parent / "grown"
    result = run_cli("grow", folder, grown, "--d-mlp", 41, "--n-layers", 3)
    assert result.exit_code == 0, result.output
    return folder, grown


def test_texts(folders, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\nw4 w5 w6 w7\n\nw5 w6\nw7 w8\n")  # three lengths
    out = tmp_path / "report"
    result = run_cli(
        "compare", *folders, "--clean", prompts, "--out", out, "--batch-size", 3, *FEW, *LOSS
    )
    assert result.exit_code == 0, result.output
    assert "sites are the same" in result.output
    neurons = pd.read_csv(out / "neurons.csv")
    assert len(neurons) == 2 * 37
    # Growth is exact up to float32 rounding, which is visible in patterns of order 1.
    assert neurons["divergence"].max() < 1e-6
    assert len(pd.read_csv(out / "new.csv")) == 2 * 4 + (2 + 41)
    assert json.loads((out / "comparison.json").read_text())["about"]["n_prompts"] == 4
    comparison = load(out)
    assert comparison.neurons["name"].tolist() == neurons["name"].tolist()
    assert comparison.summary()["components"].sum() == 2 * (2 + 37)
    for page in ("report.html", "circuit.html"):
        assert (out / page).read_text().startswith("<!DOCTYPE html>")


def test_tokens_a_null_a_metric_and_a_provenance_from_elsewhere(folders, tmp_path):
    path, other_path = tmp_path / "prompts.safetensors", tmp_path / "other.txt"
    save_file({"tokens": tokens(batch=3)}, path)
    corrupted = tokens(seed=5, batch=3)
    other_path.write_text("\n".join(",".join(map(str, row)) for row in corrupted.tolist()))
    source, grown = folders
    trained = shutil.copytree(grown, tmp_path / "trained")
    (trained / "provenance.json").unlink()  # as transformers saves it
    out = tmp_path / "report"
    options = ("--corrupted", other_path, "--null", grown, "--provenance", grown)
    options += ("--answer", 7, "--wrong", 11, "--dtype", "float64", "--device", "cpu")
    result = run_cli("compare", source, trained, "--clean", path, "--out", out, *options, *FEW)
    assert result.exit_code == 0, result.output
    models = [load(folder, dtype="float64") for folder in folders]
    expected = compare(
        *models,
        Contrast(tokens(batch=3), corrupted, p.logit_diff(7, 11)),
        provenance=load(folders[1] / "provenance.json"),
        sizes=ComparisonSizes(faithfulness=0.5, n_patched=3, n_nodes=5),
    )
    heads = pd.read_csv(out / "heads.csv")
    assert heads["drop"].tolist() == pytest.approx(expected.heads["drop"].tolist())
    assert heads["drop"].abs().max() > 1e-3
    assert (heads["null_divergence"] == 0).all()


@needs_hooked_transformer
def test_hooked_transformers(tmp_path, monkeypatch):
    """A name is loaded as the kind of model in the grown folder."""
    source, grown = grown_from(source_folder(tmp_path / "source"))
    names = []

    def from_pretrained(name, **options):
        names.append(name)
        return load(source)

    monkeypatch.setattr("attn_only_lens.tl.HookedTransformer.from_pretrained", from_pretrained)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\nw4 w5 w6\n")
    options = ("--clean", prompts, "--out", tmp_path / "report", *FEW, *LOSS)
    result = run_cli("compare", "gpt2", grown, *options)
    assert result.exit_code == 0, result.output
    assert "gpt2: HookedTransformer, 3 layers" in result.stderr
    assert names == ["gpt2"]


def test_what_is_refused(folders, tmp_path):
    out, empty = tmp_path / "report", tmp_path / "empty.txt"
    empty.write_text("\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\nw4 w5\n")
    one = tmp_path / "one.txt"
    one.write_text("w1 w2 w3\n")
    for arguments, message in (
        ((*folders, "--clean", empty, *LOSS), "has no prompts; expected one prompt per line"),
        ((*folders, "--clean", one, *LOSS), "got no other text for prompt 0"),
        ((*folders, "--clean", prompts), "--metric logit_diff takes --answer and --wrong; other"),
        ((folders[0], folders[0], "--clean", prompts, *LOSS), "provenance"),
    ):
        result = run_cli("compare", *arguments, "--out", out)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    assert not out.exists()
    for folder in folders:
        before = sorted(folder.iterdir())
        result = run_cli("compare", *folders, "--clean", prompts, *LOSS, "--out", folder)
        assert result.exit_code == 2
        assert "expected another" in " ".join(result.output.split())
        assert sorted(folder.iterdir()) == before
