"""Models with transcoders come back from files with the same transcoders, bit for bit."""

from dataclasses import replace

import bridges
import pytest
import torch
from common import mlp_hook, needs_hooked_transformer, relative, tokens
from drawn_transcoders import bridge, drawn, hooked, layers_of
from sealed_files import digest_again
from transformers import AutoModelForCausalLM

from attn_only_lens import load, save, transcoders
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.transcoders import attach, detach

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own

FILE = "transcoders/layer_1.transcoder.safetensors"


# label: maker of a model, options of its transcoders, their layers, error
CASES = {
    "replacement": (lambda: bridge("gpt2"), {"activation": "topk", "skip": True}, [1], "zero"),
    "float16": (lambda: bridge("llama", torch.float16), {"activation": "relu"}, None, "node"),
    "norm after": (lambda: bridge("gemma2"), {"reads": "stream", "after_norm": True}, [1], "node"),
    # The gains were folded: the file must say "normalized", because "input" would be refused.
    "folded": (
        *(lambda: bridges.boot("gpt2", torch.float32, "processed"), {"reads": "normalized"}),
        *(None, "node"),
    ),
    "hooked": (
        *(lambda: hooked("norms_before_and_after"), {"reads": "stream", "after_norm": True}),
        *(None, "zero"),
    ),
}


@torch.no_grad()
def seen(model):
    """The logits and all activations, once with hooks on every point and once without."""
    logits, cache = model.run_with_cache(tokens())
    return {name: x for name, x in cache.items() if x is not None} | {
        "logits": logits,
        "plain": model(tokens()),
    }


@torch.no_grad()
def same(model, other_model):
    assert type(model) is type(other_model)
    values, expected = seen(other_model), seen(model)
    assert list(values) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == values[name].dtype
            assert torch.equal(value, values[name]), name


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[needs_hooked_transformer] * (name == "hooked")) for name in CASES],
)
def test_round_trip(case, tmp_path):
    make, options, layers, error = CASES[case]
    model = make()
    attached = attach(model, layers_of(model, layers, **options), error=error)
    model.set_use_attn_result(True)
    before = seen(model)
    folder = save(model, tmp_path / "saved")
    after = seen(model)  # saving leaves the transcoders in place
    assert all(torch.equal(before[name], after[name]) for name in ("logits", "plain"))
    loaded = load(folder)
    same(model, loaded)
    assert mlp_hook("result", 0) in loaded.run_with_cache(tokens())[1]
    detach(loaded)
    attached.undo()
    assert type(loaded) is type(model)
    assert torch.equal(loaded(tokens()), model(tokens()))


@torch.no_grad()
def test_the_current_weights_are_saved(tmp_path):
    model = attach(bridge("gpt2"), {1: replace(drawn(26), name="mine")}).model
    model.blocks[1].mlp.W_out.mul_(2.0)
    loaded = load(save(model, tmp_path / "saved"), dtype="float32")
    assert loaded.blocks[1].mlp.W_out.equal(2 * drawn(26).W_dec.float())
    assert loaded.blocks[1].mlp.W_out.dtype == torch.float32
    assert loaded.blocks[1].mlp.transcoder().name == "mine"


def test_the_folder_holds_the_model_and_its_transcoders(tmp_path):
    """`from_pretrained` opens the model, `transcoders.load` its transcoders."""
    model = bridge("gpt2", torch.float32)
    plain, trained = model(tokens()), layers_of(model, dtype=torch.float32)
    with attach(model, trained):
        folder = save(model, tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert relative(stock(tokens()).logits, plain) < 1e-6
    read = transcoders.load(folder / "transcoders", dtype=None)
    assert list(read) == [0, 1]
    assert read[1].W_enc.equal(trained[1].W_enc)
    # A save without transcoders replaces the whole folder.
    save(model, folder)
    assert not (folder / "transcoders").exists()
    assert torch.equal(load(folder)(tokens()), plain)


def test_damage_is_detected(tmp_path):
    model = bridge("gpt2")
    with attach(model, layers_of(model)):
        folder = save(model, tmp_path / "saved")
        expected, cache = model.run_with_cache(tokens())
    other_folder = transcoders.save(tmp_path / "other", {1: drawn(26, seed=9)})
    kept = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes((other_folder / "layer_1.transcoder.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"layer_1.* was changed after it was saved"):
        load(folder)
    digest_again(folder / MANIFEST, FILE)
    # Control: with another file, the errors keep the logits, but the features are others.
    changed = load(folder)
    assert relative(changed(tokens()), expected) < 1e-12
    act = "blocks.1.mlp.hook_neuron_act"
    assert relative(changed.run_with_cache(tokens())[1][act], cache[act]) > 0.1
    (folder / FILE).write_bytes(kept)
    digest_again(folder / MANIFEST, FILE)
    (folder / "transcoders" / "layer_7.transcoder.safetensors").write_bytes(kept)
    with pytest.raises(CheckpointError, match=r"layer_7.* was added"):
        load(folder)


def test_files_of_another_model_are_refused(tmp_path):
    model = attach(bridge("gpt2"), {1: drawn(26)}).model
    folder = save(model, tmp_path / "saved")
    for layer, width, message in ((5, 26, "got layer 5"), (1, 29, "d_model=29")):
        other_folder = transcoders.save(tmp_path / f"other{layer}", {layer: drawn(width)})
        content = (other_folder / f"layer_{layer}.transcoder.safetensors").read_bytes()
        (folder / FILE).write_bytes(content)
        digest_again(folder / MANIFEST, FILE)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_save_that_fails_leaves_the_transcoders_in_place(tmp_path, monkeypatch):
    model = attach(bridge("gpt2"), {1: drawn(26)}).model
    before = seen(model)

    def fail(*args):
        raise OSError

    with monkeypatch.context() as patched:
        patched.setattr("attn_only_lens.models.checkpoint.save_load.write_transcoders", fail)
        with pytest.raises((OSError, CheckpointError)):
            save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[name]) for name, value in seen(model).items())


@needs_hooked_transformer
def test_hooks_of_hooked_transformers_are_not_saved_and_stay(tmp_path):
    model, fired = hooked("gelu"), []
    attach(model, {1: drawn(model.cfg.d_model)})
    for name in ("hook_neuron_act", "hook_error", "hook_pre"):
        model.add_hook(f"blocks.1.mlp.{name}", lambda z, hook: fired.append(hook.name))
    loaded = load(save(model, tmp_path / "saved"))
    fired.clear()
    assert torch.equal(model(tokens()), loaded(tokens()))
    assert len(fired) == 3
