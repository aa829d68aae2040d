"""Tests of `load`: which model a name or a folder gives, and which clear errors it raises."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from bridges import boot, bridged, hf_folder, original
from common import D_VOCAB, needs_hooked_transformer, relative, run_cli, tokens
from drawn_transcoders import drawn
from models import source_folder
from safetensors.torch import load_file, save_file
from test_pretrained import DATA
from tiny_tokenizer import tiny_tokenizer
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import (
    Contrast,
    convert,
    expose_neuron_heads,
    load,
    pretrained,
    save,
    tl,
    transcoders,
)
from attn_only_lens import patching as p
from attn_only_lens._load_model import is_hooked
from attn_only_lens.errors import CheckpointError, InputError, UnsupportedModelError
from attn_only_lens.pretrained.small_english import small_english
from attn_only_lens.storage import Document
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write a LLaMA as a transformers folder."""
    return hf_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# Which models are loaded


@pytest.mark.both_versions
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("llama", torch.float32)])
def test_a_folder_is_what_boot_transformers_makes_of_it(name, dtype, tmp_path):
    folder = hf_folder(tmp_path / "model", name)
    got = load(folder, dtype=dtype)
    expected = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=dtype)
    for bridge in (got, expected):
        assert type(bridge) is TransformerBridge
        assert not bridge.training
    here, there = (model.run_with_cache("w3 w5 w7")[1] for model in (got, expected))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[hook], there[hook]) for hook in here)
    settings = [{k: str(v) for k, v in vars(model.cfg).items()} for model in (got, expected)]
    assert settings[0] == settings[1]
    if dtype == torch.float32:  # the transformers model itself, which shares no code with either
        assert relative(got(tokens()), original(name, dtype)(tokens()).logits) < 1e-5


def test_shards_and_dtypes(tmp_path):
    original("llama").save_pretrained(tmp_path / "model", max_shard_size="5KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    got = load(str(tmp_path / "model"), dtype="float64")
    # transformers loads rotary tables in float32.
    assert relative(got(tokens()), boot("llama")(tokens())) < 1e-6
    assert got(tokens()).dtype == torch.float64
    assert load(tmp_path / "model")(tokens()).dtype == torch.float32
    [shard, *_] = (tmp_path / "model").glob("model-*.safetensors")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load(tmp_path / "model")


def test_a_name_is_looked_up_in_the_cache_and_a_folder_comes_first(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    for name in ("tiny/llama", "EleutherAI/pythia-70m"):
        there = cache / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, there / "snapshots" / "abc")
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    expected = load(folder)(tokens())
    for name, official in (("tiny/llama", "tiny/llama"), ("pythia-70m", "EleutherAI/pythia-70m")):
        got = load(name)
        assert got.cfg.model_name == official
        assert torch.equal(got(tokens()), expected)
    shutil.copytree(folder, tmp_path / "tiny" / "llama")
    change_weights(tmp_path / "tiny" / "llama", lambda x: x["lm_head.weight"].mul_(3))
    assert torch.allclose(load("tiny/llama")(tokens()), 3 * expected, atol=1e-5)
    with pytest.raises(
        CheckpointError, match=r"there is no folder 'tiny/other', .*a Hugging Face name"
    ):
        load("tiny/other")


@pytest.mark.both_versions
def test_the_shipped_model_has_a_name_and_the_hub_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr("attn_only_lens._load_model.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    expected = small_english(dtype="float64").state_dict()
    for name in ("small-english", "small_english"):
        loaded = load(name, dtype="float64")
        assert all(torch.equal(x, expected[key]) for key, x in loaded.state_dict().items())
        assert loaded.cfg.model_name == "small-english-4l"
    (tmp_path / "small-english").mkdir()
    with pytest.raises(CheckpointError, match=r"this folder hides the model 'small-english'"):
        load("small-english")  # a local folder takes precedence


@needs_hooked_transformer
def test_names_of_hooked_transformers_are_asked_for(monkeypatch):
    calls = []

    def from_pretrained(name, **options):
        calls.append((name, options["dtype"], options["trust_remote_code"]))
        return load("modular-addition")

    monkeypatch.setattr(tl.HookedTransformer, "from_pretrained", from_pretrained)
    assert load("gpt2", hooked=True, dtype="bfloat16").cfg.d_mlp == 512
    assert calls == [("gpt2", "bfloat16", False)]


@needs_hooked_transformer
def test_folders_of_hooked_transformers():
    got = load(DATA, dtype="float64")
    inputs = pretrained.modular_addition_tokens()[:11]
    assert torch.equal(got(inputs), load("modular-addition", dtype=torch.float64)(inputs))
    assert is_hooked(DATA)


@pytest.mark.both_versions
def test_what_save_wrote_keeps_its_dtype_and_its_first_token(folder, tmp_path):
    saved = save(expose_neuron_heads(load(folder, dtype="bfloat16")).model, tmp_path / "saved")
    got = load(saved)
    assert next(got.parameters()).dtype == torch.bfloat16
    assert not is_hooked(saved)
    assert (
        got.to_tokens("w3 w5").tolist() == load(folder).to_tokens("w3 w5").tolist() == [[0, 7, 9]]
    )


# The command line

PROMPTS = ("--clean", "w3 w5", "--corrupted", "w3 w6", "--answer", "w7", "--wrong", "w9")
COMMANDS = {
    "patch": (*PROMPTS, "--sites", "L0N3", "--out", "sweep.csv"),
    "verify": ("--text", "w3 w5"),
}


@pytest.mark.both_versions
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_every_model_and_say_what_it_is(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(expose_neuron_heads(load(folder, dtype="float64")).model, "saved")
    for model, more, dtype in (
        (folder, ("--dtype", "float64", "--device", "cpu"), "float64"),
        ("saved", (), "float64"),
    ):
        result = run_cli(command, model, *COMMANDS[command], *more)
        assert result.exit_code == 0, result.output
        said = f"{model}: TransformerBridge (LlamaForCausalLM), 2 layers, {dtype}, cpu, "
        assert f"{said}texts begin with <bos>" in result.stderr
        assert "TransformerBridge" not in result.stdout
    if HAS_HOOKED_TRANSFORMER:
        source = source_folder(tmp_path)
        for model in (source, save(convert(load(source)), "converted")):
            result = run_cli(command, model, *COMMANDS[command])
            if (command, model) == ("verify", Path("converted").resolve()):
                assert "pass the original model" in result.output
                continue
            assert result.exit_code == 0, result.output
            kind = "HookedTransformer" if model == source else "attention-only HookedTransformer"
            assert f"{model}: {kind}, 3 layers, float32, cpu, texts begin" in result.stderr
    for more, words in ((("--dtype", "int8"), "--dtype int8"), (("--device", "abacus"), "abacus")):
        result = run_cli(command, folder, *COMMANDS[command], *more)
        assert result.exit_code == 2
        assert words in result.output


def test_verify_compares_a_saved_bridge_with_its_source(folder, tmp_path):
    bridge = load(folder)
    bridge.enable_compatibility_mode(True)
    saved = save(expose_neuron_heads(bridge).model, tmp_path / "saved")
    result = run_cli("verify", folder, saved, "--text", "w3 w5 w7")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("ok: 4 tokens in float32\nno hooks:   logits bitwise equal")
    change_weights(folder, lambda x: x[UP].mul_(1.001))
    result = run_cli("verify", folder, saved, "--text", "w3 w5 w7")
    assert result.exit_code == 1
    assert result.stdout.startswith("DIFFERENT")
    result = run_cli("verify", folder, folder, "--text", "w3")
    assert result.exit_code == 2
    assert "was written neither by" in result.output


# Errors


def without(tensors, part):
    [name] = [name_of for name_of in tensors if part in name_of]
    del tensors[name]


def move_weights(folder, path):
    """Move the weights out of the folder, and leave an index that names the file."""
    (folder / "model.safetensors").rename(path)
    index = {"weight_map": {UP: f"../{path.name}"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


UP = "model.layers.0.mlp.up_proj.weight"
QUANTISED = {"quant_method": "gptq", "bits": 4}
DAMAGED = {
    "no config": (lambda f: (f / "config.json").unlink(), "neither config.json nor"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "unserved": (
        lambda f: change_config(f, model_type="clvp", architectures=["ClvpModel"]),
        "supported architecture",
    ),
    "a text for a size": (lambda f: change_config(f, hidden_size="big"), "hidden_size"),
    "endless": (lambda f: change_config(f, num_hidden_layers=10**9), "is 1000000000"),
    "another size": (lambda f: change_config(f, intermediate_size=41), r"up_proj.* another shape"),
    "code": (
        lambda f: change_config(
            f, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.M"}
        ),
        "its own code, which is never run",
    ),
    "cut": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]
        ),
        "is not a readable safetensors file",
    ),
    "missing": (
        lambda f: change_weights(f, lambda x: without(x, "layers.0.mlp.up_proj")),
        f"{re.escape(UP)} is missing",
    ),
    "a classifier": (
        lambda f: change_config(f, architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification, whose output head is not for language modelling",
    ),
    "weights elsewhere": (
        lambda f: move_weights(f, f.parent / "stolen.safetensors"),
        r"names a file '\.\./stolen\.safetensors', which is outside the folder",
    ),
    "quantised": (
        lambda f: change_config(f, quantization_config=QUANTISED),
        r"quantization_config \(gptq\).*dequantize",
    ),
    "a tokenizer of another model": (
        lambda f: tiny_tokenizer(D_VOCAB + 2, f),
        f"tokenizer has {D_VOCAB + 2} tokens, but the model embeds {D_VOCAB}",
    ),
    "half a tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer in .* cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_one_clear_error(name, folder):
    change, message = DAMAGED[name]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_must_be_converted_first_says_how(missing, folder):
    (folder / missing).unlink()
    (folder / "small.gguf").touch()
    for path in (folder, folder / "small.gguf"):
        with pytest.raises(CheckpointError, match=r"gguf_file='small\.gguf'\).*save_pretrained"):
            load(path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter without its base.*merge_and_unload\(\)"):
        load(folder)
    for given in (original("llama"), None, ["gpt2"]):
        with pytest.raises(CheckpointError, match="expected a path or a name"):
            load(given)


def test_pickles_are_never_read(folder, tmp_path):
    class Poison:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    torch.save({"lm_head.weight": Poison()}, folder / "pytorch_model.bin")
    load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read: expected safeten"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_parts_of_another_task_are_left_out(tmp_path):
    """BERT checkpoints also hold a pooler and a next-sentence head, which MaskedLM lacks."""
    folder = hf_folder(tmp_path / "bert", "bert", tokenizer=False)
    expected = load(folder)(tokens())
    others = {
        "bert.pooler.dense.weight": torch.ones(2, 2),
        "cls.seq_relationship.bias": torch.ones(2),
    }
    change_weights(folder, lambda x: x.update(others))
    assert torch.equal(load(folder)(tokens()), expected)


def test_a_folder_without_a_tokenizer_takes_tokens(tmp_path):
    folder = hf_folder(tmp_path / "model", "gpt2", tokenizer=False)
    assert load(folder).tokenizer is None
    result = run_cli("verify", folder, "--text", "w3")
    assert result.exit_code == 2
    assert "no tokenizer: use --tokens-file" in result.output
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    options = ("--tokens-file", tmp_path / "tokens.safetensors")
    assert run_cli("verify", folder, *options).exit_code == 0


class QuantisedLinear(torch.nn.Linear):
    __module__ = "torch.ao.nn.quantized.dynamic.modules.linear"


QuantisedLinear.__name__ = "Linear"


def test_quantised_weights_are_refused_on_a_bridge_too():
    class Params4bit(torch.nn.Parameter):
        """A stand-in for bitsandbytes' class of this name."""

        __module__ = "bitsandbytes.nn.modules"

    def with_head(make):
        model = original("llama", torch.float32)
        model.lm_head = make(model.lm_head)
        return bridged(model)

    def with_weight(kind, dtype):
        bridge = boot("llama", torch.float32)
        head = bridge.original_model.lm_head
        head.weight = kind(head.weight.detach().to(dtype), False)
        return bridge

    configured = boot("llama")
    configured.original_model.config.quantization_config = QUANTISED
    for bridge, words in (
        (with_weight(torch.nn.Parameter, torch.int8), "lm_head.weight is a Parameter of int8"),
        (with_weight(Params4bit, torch.float32), "is a Params4bit of float32"),
        (with_head(lambda head: QuantisedLinear(26, D_VOCAB)), "lm_head is a .*Linear"),
        (configured, r"quantization_config \(gptq\)"),
    ):
        for copy in (False, True):
            with pytest.raises(UnsupportedModelError, match=words) as caught:
                expose_neuron_heads(bridge, copy=copy)
            assert "dequantize" in str(caught.value)
    expose_neuron_heads(with_head(lambda head: head))  # the control


# What errors tell users to install


# Results


def not_results(folder):
    """Write files and folders that are no results, and yield them with what the error says."""
    transcoders.save(folder / "features", {5: drawn(7)})
    feature = folder / "features" / "layer_5.transcoder.safetensors"
    yield feature, r"format 'attn_only_lens\.Transcoder', which transcoders\.load reads; expected a"
    save_file({"x": torch.ones(3)}, folder / "weights.safetensors")
    yield folder / "weights.safetensors", "format None; expected a contrast"
    (folder / "config.json").write_text('{"n_layers": 3}')
    for name in ("config.json", "weights.safetensors"):
        yield folder / name, rf"format None; expected a contrast.* a part of {folder}: load that f"
    (folder / "circuit.txt").write_text("{}")
    yield folder / "circuit.txt", r"circuit\.txt is a file; expected a name that ends in \.json, "
    (folder / "list.json").write_text("[3, 5]")
    yield folder / "list.json", "format 'list'; expected a contrast"
    (folder / "table.csv").write_text("name,value\nL0N3,7\n")
    yield folder / "table.csv", r"table\.csv\.json is missing: `save` writes it with a table"
    for name in ("gone.json", "gone.csv", "gone.parquet", "gone.safetensors"):
        yield folder / name, rf"{name} is missing; expected the file of a contrast"
    (folder / "why").mkdir()
    (folder / "why" / "explanation.csv").write_text("id\nL0N3@5\n")
    yield folder / "why", r"an explanation; load one of its files: .*graph\.json"
    (folder / "cut").mkdir()
    (folder / "cut" / "comparison.json").write_text("{")
    yield folder / "cut", r"comparison\.json is not valid JSON"


@pytest.mark.both_versions
def test_what_is_no_result_is_an_error(tmp_path):
    for path, match in not_results(tmp_path):
        with pytest.raises(CheckpointError, match=match):
            load(path)


@pytest.mark.both_versions
def test_options_that_do_not_fit_are_refused(folder, tmp_path):
    path = tmp_path / "contrast.json"
    Contrast("w3", "w5", p.logit_diff(7, 11)).save(path)
    with pytest.raises(InputError, match=r"(?s)device='cpu'.*\n.*dtype='float32'.*\n.*hooked=True"):
        load(path, device="cpu", dtype="float32", hooked=True)
    for source in (folder, tmp_path / "sweep.json"):
        Document("attn_only_lens.Circuit", 1, dict).write(tmp_path / "sweep.json")
        with pytest.raises(InputError, match="got metric="):
            load(source, metric=p.kl())
    assert load(path, metric=p.logit_diff(7, 11)).metric.name == "logit_diff(7, 11)"
