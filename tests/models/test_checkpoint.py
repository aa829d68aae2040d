"""Tests that saved models load bit for bit, and that damaged files raise clear errors."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from common import tokens
from exposed_states import same_models
from models import build, source_folder
from safetensors.torch import load_file, save_file
from sealed_files import digest_again, flips, rewrite
from tiny_tokenizer import tiny_tokenizer
from torch import nn

from attn_only_lens import (
    Bilinear,
    convert,
    grow,
    growth,
    load,
    save,
)
from attn_only_lens.errors import CheckpointError
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.source_folder import load_source


@pytest.fixture
def folder(tmp_path):
    return save(convert(build("gelu")), tmp_path / "model")


def same(a, b):
    same_models(a, b)
    first, second = ({**vars(model.source_cfg), "device": None} for model in (a, b))
    assert first == second


@pytest.mark.parametrize("name", ["local", "alibi", "parallel", "post_norm"])
@torch.no_grad()
def test_round_trip(name, tmp_path):
    """The model is saved as it is now, with ties and frozen weights."""
    source = build(name, seed=5)
    source.blocks[0].mlp.b_out = source.blocks[1].mlp.b_out
    source.blocks[2].mlp.W_in.requires_grad_(False)
    model = convert(source.eval())
    model.set_use_attn_result(True)
    model.blocks[3].attn.W_out.data[29] = 0.0
    random = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), random)
    same(model, loaded)
    assert loaded.blocks[1].attn.b_out is loaded.blocks[3].attn.b_out
    assert not loaded.blocks[5].attn.W_in.requires_grad
    assert loaded.blocks[3].attn.W_in.requires_grad
    assert not loaded.training


@torch.no_grad()
def test_bilinear_gates_in_bfloat16(tmp_path):
    source = build("llama", dtype=torch.bfloat16, scale=0.2)
    gate = Bilinear.calibrated(source, tokens(), heads=4)
    model = convert(source, gate=gate)
    loaded = load(save(model, tmp_path / "saved"))
    same(model, loaded)
    assert loaded.cfg.gating == model.cfg.gating
    wide = load(tmp_path / "saved", dtype="float64")
    assert torch.equal(wide(tokens()), model.to(torch.float64, print_details=False)(tokens()))


@torch.no_grad()
def test_tokenizer_comes_along(tmp_path):
    source = talking()
    loaded = load(save(convert(source), tmp_path / "saved"))
    texts = ["w3 w5", "w7", "w11 w2 w2 w13"]
    assert torch.equal(loaded.to_tokens(texts), source.to_tokens(texts))
    assert torch.equal(loaded(texts), source(texts))
    assert loaded.tokenizer.padding_side == "left"


def test_a_users_files_are_not_deleted(folder):
    """A folder that was saved is saved over, unless it holds something else."""
    save(convert(build("gelu")), folder)
    (folder / "figs").mkdir()
    (folder / "figs" / "one.png").write_text("years of work")
    with pytest.raises(CheckpointError, match="it also holds figs"):
        save(convert(build("gelu")), folder)
    assert (folder / "figs" / "one.png").read_text() == "years of work"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.blocks[1].register_buffer("mean", torch.zeros(3)),
            r"blocks\.1\.mean is not known",
        ),
        (
            lambda model: setattr(model.blocks[3].attn, "W_out", nn.Parameter(torch.zeros(5, 26))),
            r"W_out has shape \(5, 26\); expected \(37, 26\)",
        ),
    ],
)
def test_a_model_that_could_not_be_loaded_is_not_saved(change, message, tmp_path):
    model = convert(build("gelu"))
    change(model)
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def edit(**changes):
    return lambda folder: rewrite(folder / MANIFEST, **changes)


def config(**changes):
    return lambda folder: rewrite(folder / MANIFEST, lambda whole: whole["config"].update(changes))


def tensors_exchanged(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.9.attn.W_in"] = tensors.pop("blocks.1.attn.W_in")
    save_file(tensors, folder / "model.safetensors")
    digest_again(folder / MANIFEST, "model.safetensors")


def tokenizer_extended(folder):
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "added_tokens.json").write_text("{}")


EXACT_OF_FOUR = {"kind": "exact", "heads": 4, "ranges": None, "slope": None, "silu": None}
DAMAGE = {
    "no tokenizer": (edit(padding_side="left"), "tokenizer is missing, but the model was saved"),
    "tokenizer extended": (tokenizer_extended, "tokenizer/added_tokens.json was added"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no folder": (shutil.rmtree, "there is no folder"),
    "not ours": (lambda f: (f / MANIFEST).write_text("{}"), "has format None"),
    "an exact gate of four heads": (edit(gate=EXACT_OF_FOUR), "expected one head, no slope"),
    "newer": (edit(format_version=10), "format version 10, but this attn-only-lens reads"),
    "tied to nothing": (edit(tied={"x": "y"}), "x is not a parameter"),
    "other sizes": (config(d_mlp=53), "d_mlp=37.* expected 3 layers, with LayerSizes.*d_mlp=53"),
    "unknown field": (config(warp_drive=True), "warp_drive"),
    "tensors exchanged": (tensors_exchanged, r"1\.attn\.W_in is missing; .*9\.attn\.W_in is not"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused(case, folder):
    damage, message = DAMAGE[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def talking():
    source = build("gelu", dtype=torch.float32, d_vocab_out=41)
    with tempfile.TemporaryDirectory() as folder:
        source.set_tokenizer(tiny_tokenizer(41, Path(folder)), default_padding_side="left")
    return source


def of_grown(folder):
    model = load_source(folder)
    tensors = {**model.state_dict(), "config": torch.tensor(model.cfg.eps)}
    return tensors, load(folder / "provenance.json"), model.tokenizer.get_vocab()


def test_a_flipped_bit_of_a_grown_model_is_refused_or_changes_nothing(tmp_path):
    """tests/storage flips bits of other folders."""
    expansion = compose(growth.AddNeurons(4), growth.InsertLayer(at=1))
    folder = grow(talking(), expansion).save_pretrained(tmp_path / "folder")
    tensors, *others = of_grown(folder)
    refused = 0
    for change in flips(folder):
        try:
            again, *rest = of_grown(folder)
        except CheckpointError:
            refused += 1
            continue
        assert rest == others, change
        assert all(torch.equal(tensors[name], again[name]) for name in tensors | again), change
    assert refused > 20


def test_a_configuration_is_checked_before_anything_is_built(folder, tmp_path):
    source = source_folder(tmp_path / "source") / "config.json"
    good = json.loads(source.read_text())
    for fields, words in (
        *(({"n_layers": 10**6}, ""), ({"n_ctx": 10**9}, ""), ({"d_mlp": None}, "")),
        *(({"eps": float("inf")}, ""), ({"positional_embedding_type": "none"}, "")),
        ({"act_fn": "nonsense"}, "got 'nonsense'; expected one of gelu, "),
        ({"load_in_4bit": True}, "4-bit"),
    ):
        source.write_text(json.dumps(good | fields))
        before = (folder / MANIFEST).read_text()
        config(**fields)(folder)
        for read, path in ((load, folder), (load_source, source.parent)):
            started = time.process_time()
            with pytest.raises(CheckpointError, match=words or "."):
                read(path)
            assert time.process_time() - started < 5
        (folder / MANIFEST).write_text(before)


def test_a_source_asks_no_hub_and_runs_no_code(tmp_path):
    """Loading a source makes no request and runs no foreign code, whatever its configuration."""
    folder = source_folder(tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    options = {"tokenizer_name": "somebody/else", "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config | options))
    model = load_source(folder)
    assert model.tokenizer.get_vocab()["w3"] == 7
    assert not model.cfg.trust_remote_code
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="outside of that folder"):
        load_source(folder)
