"""Commands on models with transcoders: from a folder that `save` wrote, and by --transcoders."""

import pandas as pd
import pytest
from common import needs_hooked_transformer, run_cli

from attn_only_lens import Contrast, load, save, transcoders
from attn_only_lens import patching as p

PAIR = ["The keys near the cabinet", "The key near the cabinet"]
PROMPTS = ["--clean", PAIR[0], "--corrupted", PAIR[1]]
METRIC = ["--answer", " are", "--wrong", " is"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with transcoders in layers 2 and 3, and the transcoders alone."""
    root, model = tmp_path_factory.mktemp("models"), load("small-english")
    chosen = {layer: x for layer, x in transcoders.load("small-english").items() if layer > 1}
    transcoders.save(root / "features", chosen)
    with transcoders.attach(model, chosen):
        save(model, root / "model")
        sweep = p.activation_patch(
            model,
            Contrast(*PAIR, p.logit_diff(" are", " is")),
            sites=p.Sites("features", positions=[-1]),
        )
    return root, sweep.frame


def test_patch(folders, tmp_path):
    """The same numbers as in Python, from the saved model and from the two parts."""
    root, expected = folders
    out = tmp_path / "sweep.csv"
    for model in ([root / "model"], ["small-english", "--transcoders", root / "features"]):
        options = ["--sites", "features", "--positions=-1", "--out", out]
        result = run_cli("patch", *model, *PROMPTS, *METRIC, *options)
        assert result.exit_code == 0, result.output
        got = pd.read_csv(out)
        assert got["name"].tolist() == expected["name"].tolist()
        assert abs(got["value"] - expected["value"].to_numpy()).max() < 1e-5
        out.unlink()


def test_the_shipped_transcoders(tmp_path):
    page, shipped = tmp_path / "page.html", ["small-english", "--transcoders", "small-english"]
    result = run_cli("pattern", *shipped, "--prompt", PAIR[0], "--names", "L3F7", "--out", page)
    assert result.exit_code == 0, result.output
    assert "L3F7" in page.read_text("utf-8")


def test_errors(folders, tmp_path):
    root, _ = folders
    out = ["--out", tmp_path / "page.html"]
    for words, message in (
        (["explain", root / "model", "--transcoders", root / "features"], "expected no --trans"),
        (["explain", "small-english", "--transcoders", root / "model"], "is a saved model"),
    ):
        result = run_cli(*words, *PROMPTS, *METRIC, *out)
        assert result.exit_code == 2
        assert message in result.output
    result = run_cli("grow", root / "model", tmp_path / "grown", "--d-mlp", 1024)
    assert result.exit_code == 2
    assert "was saved with transcoders, which imitate the MLPs of this model" in result.output
    assert not (tmp_path / "grown").exists()


@needs_hooked_transformer
def test_convert_refuses_transcoders(tmp_path):
    model = load("small-english", hooked=True)
    with transcoders.attach(model, transcoders.load("small-english")):
        save(model, tmp_path / "model")
    result = run_cli("convert", tmp_path / "model", tmp_path / "converted")
    assert result.exit_code == 2
    assert "transcoders replace its MLPs" in result.output
    assert not (tmp_path / "converted").exists()
