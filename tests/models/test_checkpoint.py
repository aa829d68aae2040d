"""Tests that saved models load bit for bit, and that damaged files raise clear errors."""

import json
import shutil
import time

import pytest
import torch
from common import tokens
from models import build, source_folder
from safetensors.torch import load_file, save_file
from sealed_files import digest_again, flips, mutated, rewrite
from tiny_tokenizer import tiny_tokenizer
from torch import nn
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from attn_only_lens import (
    Bilinear,
    calibrate,
    convert,
    expose_neuron_heads,
    grow,
    growth,
    load,
    save,
)
from attn_only_lens.errors import CheckpointError
from attn_only_lens.growth import read_provenance
from attn_only_lens.models.checkpoint import MANIFEST, hooked, save_load
from attn_only_lens.models.source_folder import load_source


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(convert(build("gelu")), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def same(a, b):
    state, expected = a.state_dict(), b.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state)
    logits, cache = a.run_with_cache(tokens())
    again, cached = b.run_with_cache(tokens())
    assert torch.equal(logits, again)
    assert list(cache) == list(cached)
    assert all(torch.equal(cache[key], cached[key]) for key in cache.keys())  # noqa: SIM118
    cfg, expected = (vars(model.source_cfg) for model in (a, b))
    assert {k: v for k, v in cfg.items() if k != "device"} == {
        k: v for k, v in expected.items() if k != "device"
    }


@pytest.mark.parametrize("name", ["gelu", "local", "alibi", "parallel", "gemma", "post_norm"])
@torch.no_grad()
def test_round_trip(name, tmp_path):
    """The model is saved as it is now."""
    model = convert(build(name, seed=5))
    model.set_use_attn_result(True)
    model.blocks[3].attn.W_out.data[29] = 0.0
    random = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), random)
    same(model, loaded)


@torch.no_grad()
def test_bilinear_gates_in_bfloat16(tmp_path):
    source = build("llama", dtype=torch.bfloat16, scale=0.2)
    gate = Bilinear(4, calibration=calibrate(source, tokens()))
    model = convert(source, gate=gate)
    loaded = load(save(model, tmp_path / "saved"))
    same(model, loaded)
    assert loaded.cfg.gating == model.cfg.gating
    wide = load(tmp_path / "saved", dtype="float64")
    assert torch.equal(wide(tokens()), model.to(torch.float64, print_details=False)(tokens()))


@torch.no_grad()
def test_ties_frozen_parameters_and_mode(tmp_path):
    model = build("gelu")
    model.blocks[0].mlp.b_out = model.blocks[1].mlp.b_out
    model.blocks[2].mlp.W_in.requires_grad_(False)
    model.eval()
    converted = convert(model)
    loaded = load(save(converted, tmp_path / "saved"))
    same(converted, loaded)
    assert loaded.blocks[1].attn.b_out is loaded.blocks[3].attn.b_out
    assert not loaded.blocks[5].attn.W_in.requires_grad
    assert loaded.blocks[3].attn.W_in.requires_grad
    assert not loaded.training


@torch.no_grad()
def test_tokenizer_comes_along(tmp_path):
    source = build("gelu", d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"), default_padding_side="left")
    model = convert(source)
    loaded = load(save(model, tmp_path / "saved"))
    texts = ["w3 w5", "w7", "w11 w2 w2 w13"]
    assert torch.equal(loaded.to_tokens(texts), source.to_tokens(texts))
    assert torch.equal(loaded(texts), source(texts))
    assert loaded.tokenizer.padding_side == "left"


def test_nothing_is_unpickled(saved, monkeypatch):
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *args, **kwargs: pytest.fail("a pickle was read"))
    load(saved)


@pytest.mark.parametrize("failing", [(hooked, "write_tensors"), (save_load, "write_manifest")])
def test_interrupted_save_leaves_the_old_one(failing, tmp_path, monkeypatch):
    old = convert(build("gelu"))
    save(old, tmp_path / "saved")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(*failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(convert(build("llama")), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    same(old, load(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nothing", "model.safetensors"),
        ("two blocks", "figs/one.png"),
        ("grown", "tokenizer/added/merges.txt"),
    ],
)
def test_a_users_files_are_not_deleted(kind, name, tmp_path):
    """A folder that was saved is saved over, unless it holds something else."""
    folder = tmp_path / "saved"
    make = FOLDERS["two blocks" if kind == "nothing" else kind][0]
    if kind != "nothing":
        make(folder)
        make(folder)
    added = folder / name
    added.parent.mkdir(exist_ok=True, parents=True)
    added.write_text("years of work")
    with pytest.raises(CheckpointError, match=f"it also holds {name.split('/')[0]}"):
        make(folder)
    assert added.read_text() == "years of work"


def test_odd_destinations(tmp_path, monkeypatch):
    model = convert(build("gelu"))
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    monkeypatch.chdir(tmp_path)
    for folder, message in (
        (".", "got the current folder"),
        ("file", "is a file"),
        ("file/in/it", "cannot be written"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save(model, folder)
    for link, target in (("link", "empty"), ("dangling", "later")):
        save(model, link)
        assert (tmp_path / link).is_symlink()
        same(model, load(tmp_path / target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.blocks[1].register_buffer("mean", torch.zeros(3)),
            r"blocks\.1\.mean is not known",
        ),
        (
            lambda model: vars(model.cfg).update(act_fn="quick_gelu"),  # the attribute is read-only
            "its act_fn is not quick_gelu",
        ),
        (
            lambda model: setattr(model.blocks[3].attn, "W_out", nn.Parameter(torch.zeros(5, 26))),
            r"W_out has shape \(5, 26\); expected \(37, 26\)",
        ),
    ],
)
def test_a_model_that_could_not_be_loaded_is_not_saved(change, message, tmp_path, monkeypatch):
    monkeypatch.setitem(SUPPORTED_ACTIVATIONS, "quick_gelu", SUPPORTED_ACTIVATIONS["gelu"])
    model = convert(build("gelu"))
    change(model)
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def edit(**changes):
    return lambda folder: rewrite(folder / MANIFEST, **changes)


def config(**changes):
    return lambda folder: rewrite(folder / MANIFEST, lambda whole: whole["config"].update(changes))


def flip_a_byte(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-7] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-5])


def tensors_exchanged(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.9.attn.W_in"] = tensors.pop("blocks.1.attn.W_in")
    save_file(tensors, folder / "model.safetensors")
    digest_again(folder / MANIFEST, "model.safetensors")


def tokenizer_extended(folder):
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "added_tokens.json").write_text("{}")


def without_weights_listed(folder):
    rewrite(folder / MANIFEST, lambda whole: whole["files"].pop("model.safetensors"))


EXACT_OF_FOUR = {"kind": "exact", "heads": 4, "ranges": None, "slope": None, "silu": None}
DAMAGE = {
    "no tokenizer": (edit(padding_side="left"), "tokenizer is missing, but the model was saved"),
    "no weights listed": (without_weights_listed, "safetensors is missing"),
    "tokenizer extended": (tokenizer_extended, "tokenizer/added_tokens.json was added"),
    "one bit": (flip_a_byte, "model.safetensors was changed after it was saved"),
    "truncated": (truncate, r"model.safetensors has \d+ bytes; expected \d+"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"nor {MANIFEST}"),
    "no folder": (shutil.rmtree, "there is no folder"),
    "not ours": (lambda f: (f / MANIFEST).write_text("{}"), "has format None"),
    "an exact gate of four heads": (edit(gate=EXACT_OF_FOUR), "expected one head, no slope"),
    "a gate without ranges": (edit(gate={"kind": "bilinear", "heads": 4}), "cannot be built"),
    "newer": (edit(format_version=10), "format version 10, but this attn-only-lens reads"),
    "a layer of no size": (edit(layers=[{}] * 3), "n_heads is missing"),
    "tied to nothing": (edit(tied={"x": "y"}), "x is not a parameter"),
    "frozen nothing": (edit(frozen=["x"]), "x is not a parameter"),
    "other sizes": (config(d_mlp=53), "d_mlp=37.* expected 3 layers, with LayerSizes.*d_mlp=53"),
    "unknown field": (config(warp_drive=True), "warp_drive"),
    "unknown activation": (config(act_fn="solu"), "solu"),
    "tensors exchanged": (
        tensors_exchanged,
        r"blocks\.1\.attn\.W_in is missing; blocks\.9\.attn\.W_in is not known",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused(case, folder):
    damage, message = DAMAGE[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "expected one of float64"),
        ({"device": "abacus"}, "got device='abacus'"),
        ({"device": "meta"}, "got device='meta'"),
    ],
)
def test_unknown_device_or_dtype(arguments, message, saved):
    with pytest.raises(CheckpointError, match=message):
        load(saved, **arguments)


def saved_two_blocks(folder):
    source = build("gelu", dtype=torch.float32, d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, folder.parent / "tokenizer"))
    save(convert(source), folder)


def saved_in_place(folder):
    save(expose_neuron_heads(build("llama")).model, folder)


def saved_grown(folder):
    source = build("gelu", dtype=torch.float32, d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, folder.parent / "tokenizer"))
    grow(source, growth.compose(growth.AddNeurons(4), growth.InsertLayer(at=1))).save_pretrained(
        folder
    )


def of_grown(folder):
    model = load_source(folder)
    tensors = {**model.state_dict(), "config": torch.tensor(model.cfg.eps)}
    return tensors, read_provenance(folder), model.tokenizer.get_vocab()


def of_saved(folder):
    model = load(folder)
    return model.state_dict(), vars(model.cfg), model.tokenizer and model.tokenizer.get_vocab()


FOLDERS = {
    "two blocks": (saved_two_blocks, of_saved),
    "in place": (saved_in_place, of_saved),
    "grown": (saved_grown, of_grown),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_flipped_bit_is_refused_or_changes_nothing(kind, tmp_path):
    make, read = FOLDERS[kind]
    make(tmp_path / "folder")
    tensors, *others = read(tmp_path / "folder")
    refused = 0
    for change in flips(tmp_path / "folder"):
        try:
            again, *rest = read(tmp_path / "folder")
        except CheckpointError:
            refused += 1
            continue
        assert rest == others, change
        assert all(torch.equal(tensors[name], again[name]) for name in tensors | again), change
    assert refused > 20


@pytest.mark.parametrize("kind", ["two blocks", "in place"])
def test_any_manifest_leads_to_an_error_or_to_the_same_tensors(kind, tmp_path):
    make, read = FOLDERS[kind]
    make(tmp_path / "folder")
    path = tmp_path / "folder" / MANIFEST
    whole, (tensors, *_) = json.loads(path.read_text()), read(tmp_path / "folder")
    loaded = 0
    for seed in range(40):
        changed, what = mutated(whole, seed)
        path.write_text(json.dumps(changed))
        rewrite(path)
        started = time.process_time()
        try:
            again = load(tmp_path / "folder").state_dict()
            assert all(torch.equal(tensors[name], again[name]) for name in tensors | again), what
            loaded += 1
        except CheckpointError:
            pass
        assert time.process_time() - started < 5, what  # typically a fraction of a second
    assert 0 < loaded < 40


BAD_SIZES = (
    *({"n_layers": 10**6}, {"d_vocab": 10**12}, {"n_ctx": 10**9}, {"num_experts": 10**6}),
    *({"d_mlp": None}, {"n_heads": "2"}, {"eps": float("inf")}, {"rotary_base": 0}),
    {"positional_embedding_type": "none"},
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *((fields, "") for fields in BAD_SIZES),
        ({"act_fn": "nonsense"}, "got 'nonsense'; expected one of gelu, "),
        ({"load_in_4bit": True}, "4-bit"),
    ],
)
def test_a_configuration_is_checked_before_anything_is_built(fields, words, folder, tmp_path):
    (tmp_path / "source").mkdir()
    source = source_folder(tmp_path / "source") / "config.json"
    source.write_text(json.dumps(json.loads(source.read_text()) | fields))
    config(**fields)(folder)
    for read, path in ((load, folder), (load_source, source.parent)):
        started = time.process_time()
        with pytest.raises(CheckpointError) as error:
            read(path)
        assert time.process_time() - started < 5
        assert words in str(error.value)
        assert " at 0x" not in str(error.value)


def test_a_source_asks_no_hub_and_runs_no_code(tmp_path):
    """Loading a source makes no request and runs no foreign code, whatever its configuration."""
    folder = tmp_path / "source"
    folder.mkdir()
    source_folder(folder)
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


def test_files_can_be_shared(folder, tmp_path):
    """The umask decides who can read the files, although safetensors allows only the owner."""
    save(load(folder), folder)
    plain = tmp_path / "plain"
    plain.write_text("")
    for path in (folder / "model.safetensors", folder / MANIFEST):
        assert path.stat().st_mode & 0o777 == plain.stat().st_mode & 0o777
