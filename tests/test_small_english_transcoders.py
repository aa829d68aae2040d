"""Tests of the transcoders of Small English: their files, their accuracy, and their training."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from common import run_script
from safetensors.torch import load_file

from analyses.tools import train_transcoders as training
from attn_only_lens import pretrained

DATA = Path(str(files("attn_only_lens.pretrained") / "data" / "small_english" / "transcoders"))
METRICS = json.loads((DATA / "metrics.json").read_text("utf-8"))
TEXTS = pretrained.small_english_texts()[:100]


@pytest.fixture(scope="module")
def transcoders():
    return pretrained.small_english_transcoders()


@pytest.fixture(scope="module")
def measured(transcoders):
    """Return the metrics on some of the held-out texts."""
    return training.measure(training.read_model("cpu"), transcoders, TEXTS)


def test_there_is_one_for_each_layer(transcoders):
    assert sorted(transcoders) == [0, 1, 2, 3]
    for layer, transcoder in transcoders.items():
        assert transcoder.d_model == 128
        assert 500 < transcoder.d_features <= METRICS["d_features"]
        assert (transcoder.activation, transcoder.reads) == ("jumprelu", "input")
        assert str(layer) in transcoder.name
        assert transcoder.W_enc.dtype == torch.float32
        torch.testing.assert_close(
            transcoder.W_dec.norm(dim=1), torch.ones(transcoder.d_features), rtol=2e-3, atol=0
        )


def test_they_imitate_the_mlps_on_held_out_texts(measured):
    """The bounds of FVU and L0 are the results of the trial in the model card."""
    for name, bounds in (("fvu", (0.066, 0.041, 0.022, 0.018)), ("l0", (46, 15, 21, 58))):
        values = zip(measured[name], METRICS["together"][name], bounds, strict=True)
        for value, reported, bound in values:
            assert value < bound
            assert value == pytest.approx(reported, rel=0.25)
    assert measured["kl"] < 0.1
    assert measured["top_token"] > 0.9
    assert measured["loss_recovered"] > 0.98
    assert max(METRICS["together"]["dead"]) < 0.05


def test_the_replacement_in_the_model_of_the_package_has_the_same_metrics(transcoders):
    """The transcoders read and write at the points where they were trained."""
    texts = TEXTS[:20]
    measured = training.measure(training.read_model("cpu"), transcoders, texts)
    model = pretrained.small_english()
    inputs = {}

    def store(x, hook):
        inputs[hook.name.removesuffix("hook_in")] = x

    def imitate(y, hook):
        name = hook.name.removesuffix("hook_out")
        transcoder = transcoders[int(name.split(".")[1])]
        return transcoder.decode(transcoder.encode(inputs[name]))

    hooks = [(f"blocks.{i}.mlp.hook_in", store) for i in range(4)]
    hooks += [(f"blocks.{i}.mlp.hook_out", imitate) for i in range(4)]
    total, n_tokens = 0.0, 0
    with torch.no_grad():
        for text in texts:
            tokens = model.to_tokens(text)
            original = model(tokens)[0].log_softmax(-1)
            replaced = model.run_with_hooks(tokens, fwd_hooks=hooks)[0].log_softmax(-1)
            total += float(training.kl(original, replaced)) * len(original)
            n_tokens += len(original)
    assert n_tokens == measured["tokens"]
    # Rounding can decide whether a feature is active.
    assert total / n_tokens == pytest.approx(measured["kl"], rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_no_training_text_is_held_out():
    batches = training.batches(training.Recipe(), "cpu")
    rows = [row[row != training.EOS].tolist() for _ in range(20) for row in next(batches)]
    tokenizer = training.language.tokenizer()
    held_out = {tuple(tokenizer(text)["input_ids"]) for text in pretrained.small_english_texts()}
    assert not held_out & set(map(tuple, rows))


def test_no_feature_is_a_copy_of_another():
    for transcoder in pretrained.small_english_transcoders().values():
        encoders, decoders = (
            torch.nn.functional.normalize(x, dim=1) for x in (transcoder.W_enc.T, transcoder.W_dec)
        )
        alike = torch.minimum(encoders @ encoders.T, decoders @ decoders.T)
        assert alike.fill_diagonal_(0).max() < 0.9995


@pytest.mark.filterwarnings("ignore")
def test_smoke(tmp_path):
    run_script(training.main, ["--smoke", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DATA.iterdir()}
    for layer in range(4):
        written = load_file(tmp_path / f"weights/layer_{layer}.transcoder.safetensors")
        assert written.keys() == {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
