"""Tests of `attn-only-lens atlas`: one page or several, and resuming."""

import pytest
import torch
from bridges import original
from common import D_VOCAB, run_cli
from tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    original("llama", torch.float32).save_pretrained(made)
    tiny_tokenizer(D_VOCAB, made)
    return made


def test_an_atlas(folder, tmp_path, monkeypatch):
    texts, out = tmp_path / "texts.txt", tmp_path / "atlas"
    texts.write_text("w3 w5 w7\nw11 w2\n")
    command = ("atlas", folder, "--texts", texts, "--k", 3, "--out", out)
    result = run_cli(*command)
    assert result.exit_code == 0, result.output
    assert "index.html" in result.output
    whole = (out / "index.html").read_text("utf-8")
    assert "4 heads and 74 neurons" in whole
    assert {path.name for path in out.iterdir()} == {"index.html", "statistics"}
    monkeypatch.setattr("attn_only_lens.viz.neurons.MOST_NEURONS", 73)  # the second call resumes
    assert run_cli(*command).exit_code == 0
    assert "layer-01.html" in (out / "index.html").read_text("utf-8")
    assert "2 heads and 37 neurons" in (out / "layer-01.html").read_text("utf-8")
    narrow = run_cli(*command[:-1], tmp_path / "narrow", "--layers", 1)
    assert narrow.exit_code == 0, narrow.output
    assert "37 neurons" in (tmp_path / "narrow" / "index.html").read_text("utf-8")
    for more, reason in (
        (("--layers", "1", "--names", "L1N3"), "got --layers and --names"),
        (("--names", "L1H9"), "got 'L1H9'"),
        (("--k", 5), "belongs to another job"),
        (("--texts", tmp_path / "no.txt"), "no.txt is missing"),
    ):
        words = list(command)
        for name in more[::2]:  # an option may not be repeated
            if name in words:
                del words[words.index(name) : words.index(name) + 2]
        result = run_cli(*words, *more)
        assert result.exit_code == 2
        assert reason in " ".join(result.output.split())
