"""Tests of the command line: printed output, written files, and errors."""

import json
import subprocess
import sys

import pytest
import torch
from common import run_cli, tokens
from models import BASE, FAMILIES, build, source_folder
from safetensors.torch import save_file

from attn_only_lens import load
from attn_only_lens.models.checkpoint import read_manifest
from attn_only_lens.models.source_folder import load_source


@pytest.fixture
def folder(tmp_path):
    return source_folder(tmp_path / "source")


@pytest.mark.parametrize(
    "program",
    ["import attn_only_lens", "from attn_only_lens.cli import app; app(['patch', '--help'])"],
)
def test_torch_is_not_imported_before_it_is_used(program):
    heavy = {"torch", "numpy", "pandas", "transformers", "transformer_lens"}
    at_exit = f"print(sorted({heavy} & sys.modules.keys()))"
    check = f"import atexit, sys; atexit.register(lambda: {at_exit})"
    ran = subprocess.run(
        [sys.executable, "-c", f"{check}; {program}"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_convert_and_verify(folder, tmp_path):
    out = tmp_path / "out"
    result = run_cli("convert", folder, out)
    assert result.exit_code == 0, result.output
    assert "3 layers of 2 attention heads and 37 neuron-heads" in result.output
    source, converted = load_source(folder), load(out)
    assert torch.equal(converted(tokens()), source(tokens()))

    result = run_cli("verify", folder, out, "--text", "w3 w5 w7 w11")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("ok: 5 tokens in float32")
    assert "HookedTransformer, 3 layers, float32, cpu, texts begin with <bos>" in result.stderr
    save_file({"tokens": tokens().int()}, tmp_path / "tokens.safetensors")
    result = run_cli("verify", folder, out, "--tokens-file", tmp_path / "tokens.safetensors")
    assert result.exit_code == 0, result.output
    assert "22 tokens" in result.output


def test_a_saved_folder_is_saved_again(folder, tmp_path):
    run_cli("convert", folder, tmp_path / "out", "--dtype", "bfloat16")
    result = run_cli("convert", tmp_path / "out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    first, second = load(tmp_path / "out"), load(tmp_path / "again")
    assert second.cfg.dtype == torch.bfloat16
    assert torch.equal(first(tokens()), second(tokens()))
    assert read_manifest(tmp_path / "again")["source_name"] == str(folder)
    result = run_cli("convert", tmp_path / "out", tmp_path / "new", "--dtype", "float64")
    assert result.exit_code == 2
    assert "convert the original model" in result.output


def test_verify_fails_where_the_models_differ(folder, tmp_path):
    run_cli("convert", folder, tmp_path / "out")
    model = build("gelu", dtype=torch.float32, d_vocab_out=41, scale=0.41)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    result = run_cli("verify", folder, tmp_path / "out", "--text", "w3 w5")
    assert result.exit_code == 1
    assert result.stdout.startswith("DIFFERENT")


def test_errors_are_one_message_and_exit_code_2(folder, tmp_path):
    run_cli("convert", folder, tmp_path / "out")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years of work")
    save_file({"other": tokens()}, tmp_path / "other.safetensors")
    save_file({"tokens": torch.tensor([[0, 41]])}, tmp_path / "big.safetensors")
    out = tmp_path / "out"
    for arguments, message in (
        (("convert", folder, tmp_path / "theirs"), "holds more than a saved model"),
        (("convert", folder, tmp_path / "new", "--device", "abacus"), "got --device abacus"),
        (
            ("verify", folder, out, "--tokens-file", tmp_path / "big.safetensors"),
            "values from 0 to 41",
        ),
        (("verify", folder, out), "either --text or --tokens-file"),
        (
            ("verify", folder, out, "--tokens-file", tmp_path / "other.safetensors"),
            "has the tensors",
        ),
    ):
        result = run_cli(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "new").exists()


def test_bilinear_gates(folder, tmp_path):
    out = tmp_path / "out"
    result = run_cli("convert", folder, out, "--gate", "bilinear", "--heads", 4)
    assert result.exit_code == 0, result.output
    assert f"{4 * 37} neuron-heads" in result.output
    result = run_cli("verify", folder, out, "--text", "w3 w5 w7 w11")
    assert result.exit_code == 0, result.output
    assert "bilinear against exact" in result.output
    assert read_manifest(out)["gate"]["heads"] == 4
    for arguments, message in (
        (("--gate", "bilinear", "--heads", 5), "gelu has gates with [1, 2, 4, 6, 8]"),
        (("--heads", 4), "need --gate bilinear"),
        (("--gate", "bilinear", "--text", "w3 w5"), "cannot be calibrated"),
    ):
        result = run_cli("convert", folder, tmp_path / "new", *arguments)
        assert result.exit_code == 2
        assert message in result.output
    result = run_cli("convert", out, tmp_path / "new", "--gate", "bilinear")
    assert result.exit_code == 2
    assert "is already converted" in result.output
    assert not (tmp_path / "new").exists()


def test_bilinear_gates_of_a_gated_model(tmp_path):
    folder = tmp_path / "gated"
    folder.mkdir()
    model = build("llama", dtype=torch.float32, d_vocab_out=41)
    config = {k: v for k, v in BASE.items() if k not in ("device", "d_vocab_out")}
    (folder / "config.json").write_text(json.dumps(config | FAMILIES["llama"]))
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    options = ("--tokens-file", tmp_path / "tokens.safetensors")
    result = run_cli("convert", folder, tmp_path / "out", "--gate", "bilinear", *options)
    assert result.exit_code == 0, result.output
    result = run_cli("verify", folder, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
