"""Tests that `attn-only-lens grow` writes a folder that every command accepts."""

import shutil
from pathlib import Path

import pytest
import torch
from bridges import exposed_copy, hf_folder
from common import relative, run_cli, tokens

from attn_only_lens import load, save
from attn_only_lens.growth.models._grow import read


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("source"), "llama")


@pytest.mark.both_versions
def test_grow(source, tmp_path):
    out = tmp_path / "out"
    result = run_cli("grow", source, out, "--d-mlp", 41, "--n-layers", 3, "--d-model", 52)
    assert result.exit_code == 0, result.output
    assert "3 layers of 2 attention heads of width 14 and 41 neurons, d_model 52" in result.output
    model, grown = load(source), load(out)
    assert relative(grown(tokens()), model(tokens())) < 2e-5
    assert grown.tokenizer.decode([3]) == model.tokenizer.decode([3])
    assert load(out / "provenance.json")["L0N17"] == "L0N17"
    again = run_cli("grow", out, tmp_path / "more", "--d-mlp", 47)
    assert again.exit_code == 0, again.output
    assert run_cli("grow", source, out, "--d-mlp", 43).exit_code == 0  # replaces an earlier save
    assert load(out).cfg.d_mlp == 43


def test_inserted_layers(source, tmp_path):
    result = run_cli("grow", source, tmp_path / "out", "--insert", "0,3", "--copy")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "out" / "provenance.json").new_layers == ("L0", "L3")
    model, grown = load(source), load(tmp_path / "out")
    assert relative(grown(tokens()), model(tokens())) < 2e-5
    tensors = read(grown).tensors
    assert torch.equal(tensors["blocks.3.mlp.W_in"], tensors["blocks.2.mlp.W_in"])


def test_a_saved_model_grows_without_its_neuron_heads(source, tmp_path):
    model = load(source)
    save(exposed_copy(model), tmp_path / "saved")
    result = run_cli("grow", tmp_path / "saved", tmp_path / "grown", "--d-mlp", "41")
    assert result.exit_code == 0, result.output
    assert relative(load(tmp_path / "grown")(tokens()), model(tokens())) < 2e-5


def test_errors(source, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years of work")
    copied = Path(shutil.copytree(source, tmp_path / "other"))
    for arguments, message in (
        ((source, tmp_path / "new", "--d-mlp", 31), "got --d-mlp 31, but the model has 37"),
        ((source, tmp_path / "new", "--copy"), "--copy needs --insert"),
        ((source, source, "--d-mlp", 41), "for both MODEL and OUT"),
        ((source, tmp_path / "theirs", "--d-mlp", 41), "also holds"),
        ((tmp_path / "theirs", tmp_path / "new", "--d-mlp", 41), "config.json"),
        ((source, copied, "--d-mlp", 41), "also holds"),
    ):
        result = run_cli("grow", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in " ".join(result.output.split()), result.output
        assert "Traceback" not in result.output
    for model in (source, copied):
        assert load(model).cfg.d_mlp == 37
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "theirs" / "thesis.tex").exists()
