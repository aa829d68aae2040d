"""Tests that `attn-only-lens grow` writes a folder that every command accepts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from common import relative, tokens
from models import BASE, build
from safetensors.torch import save_file
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

from attn_only_lens.cli import app
from attn_only_lens.growth import read_provenance
from attn_only_lens.models.source_folder import load_source


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    config = {k: v for k, v in BASE.items() if k not in ("device", "d_vocab_out")}
    (folder / "config.json").write_text(json.dumps(config))
    model = build("gelu", dtype=torch.float32, d_vocab_out=41)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    tiny_tokenizer(41, folder / "tokenizer")
    return folder


def test_grow(folder, tmp_path):
    out = tmp_path / "out"
    result = run("grow", folder, out, "--d-mlp", 41, "--n-layers", 4, "--d-model", 29)
    assert result.exit_code == 0, result.output
    assert "4 layers of 2 attention heads of width 13 and 41 neurons, d_model 29" in result.output
    assert "centred: " in result.output
    source, grown = load_source(folder), load_source(out)
    assert relative(grown(tokens()), source(tokens())) < 2e-5
    assert grown.tokenizer.decode([3]) == source.tokenizer.decode([3])
    assert read_provenance(out)["L0N17"] == "L0N17"
    again = run("grow", out, tmp_path / "more", "--n-heads", 3)
    assert again.exit_code == 0, again.output
    assert run("convert", tmp_path / "more", tmp_path / "converted").exit_code == 0
    assert run("grow", folder, out, "--d-mlp", 43).exit_code == 0  # replaces an earlier save
    assert load_source(out).cfg.d_mlp == 43


def test_inserted_layers(folder, tmp_path):
    result = run("grow", folder, tmp_path / "out", "--insert", "0,3", "--copy")
    assert result.exit_code == 0, result.output
    provenance = read_provenance(tmp_path / "out")
    assert provenance.new_layers == ("L0", "L3")
    source, grown = load_source(folder), load_source(tmp_path / "out")
    assert relative(grown(tokens()), source(tokens())) < 2e-5
    assert torch.equal(grown.blocks[3].mlp.W_in, grown.blocks[2].mlp.W_in)
    assert run("grow", folder, tmp_path / "new", "--copy").exit_code == 2
    assert run("grow", folder, tmp_path / "new", "--insert", "1", "--d-mlp", 41).exit_code == 2


def test_errors(folder, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years of work")
    copied = Path(shutil.copytree(folder, tmp_path / "other"))
    for arguments, message in (
        ((folder, tmp_path / "new", "--d-mlp", 31), "got --d-mlp 31, but the model has 37"),
        ((folder, tmp_path / "new"), "give either sizes"),
        ((folder, tmp_path / "theirs", "--d-mlp", 41), "holds more than a saved model"),
        ((tmp_path / "theirs", tmp_path / "new", "--d-mlp", 41), "config.json"),
        ((folder, folder, "--d-mlp", 41), "for both MODEL and OUT"),
        ((folder, copied, "--d-mlp", 41), "holds more than a saved model"),
    ):
        result = run("grow", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in " ".join(result.output.split())
        assert "Traceback" not in result.output
    for model in (folder, copied):
        assert load_source(model).cfg.d_mlp == 37
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "theirs" / "thesis.tex").exists()
