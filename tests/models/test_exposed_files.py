"""Tests that models with neuron-heads are saved and loaded bit for bit, in any state."""

import json
import shutil

import pytest
import torch
from bridges import FAMILIES, NEURON, STATES, boot, exposed_copy, hf_folder, original
from common import mlp_hook, relative, tokens
from exposed_states import bilinear, drop, each, same_models
from safetensors.torch import load_file, save_file
from sealed_files import digest_again, rewrite
from tiny_tokenizer import tiny_tokenizer
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer

from attn_only_lens import expose_neuron_heads, load, save
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.in_place import exposed_heads

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers


@torch.no_grad()
def same(a, b):
    """Check that two models are the same, also after an edit."""
    same_models(a, b)
    edit = [(mlp_hook("z"), drop(NEURON, 2))]
    edited = a.run_with_hooks(tokens(), fwd_hooks=edit)
    assert torch.equal(edited, b.run_with_hooks(tokens(), fwd_hooks=edit))
    assert relative(edited, a(tokens())) > 1e-7


IN_STATES = {"plain": ["neox", "native_gated", "bert"], "names": ["gpt2"]}
IN_STATES["processed"] = ["llama", "gemma2", "bert"]
ROUND_TRIPS = [
    pytest.param(*case.values, state, id=f"{case.id} {state}", marks=case.marks)
    for state, names in IN_STATES.items()
    for case in each(names, ("llama", "post_norm") if state == "plain" else ())
]


@pytest.mark.parametrize(("make", "state"), ROUND_TRIPS)
def test_round_trip(make, state, tmp_path):
    model = make(dtype=torch.float32).eval()
    STATES[state](model)
    if model.cfg.n_layers == 3:  # a HookedTransformer
        model.blocks[0].mlp.b_out = model.blocks[1].mlp.b_out
        model.blocks[2].mlp.W_in.requires_grad_(False)
    plain = load(save(model, tmp_path / "saved"))
    assert type(plain) is type(model), "without neuron-heads, it comes back without them"
    assert set(plain.hook_dict) == set(model.hook_dict)
    expose_neuron_heads(model)
    random = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), random)
    same(model, loaded)
    mode = {n: m.training for n, m in model.named_modules()}
    assert mode == {n: m.training for n, m in loaded.named_modules()}


@pytest.mark.parametrize("make", each(["llama"], ["gelu"]))
@torch.no_grad()
def test_bilinear_gates(make, tmp_path):
    model = make()
    exact = model(tokens())
    expose_neuron_heads(model, gate=bilinear(model))
    loaded = load(save(model, tmp_path / "saved"))
    same(model, loaded)
    assert not torch.equal(loaded(tokens()), exact)
    assert exposed_heads(loaded)[0].gating == exposed_heads(model)[0].gating


@torch.no_grad()
def test_q_k_and_v_that_were_trained_apart_after_a_cast(tmp_path):
    """A cast separates the views of joint attention, and casts buffers."""
    model = exposed_copy(boot("gpt2", torch.float32), copy_weights=True)
    for same_one in (model, load(save(model, tmp_path / "saved"))):
        attn = same_one.blocks[1].attn
        joint = attn.qkv.weight.untyped_storage().data_ptr()
        assert attn.q.weight.untyped_storage().data_ptr() == joint
    model.to(torch.bfloat16)
    model.blocks[1].attn.q.weight.mul_(3.0)
    folder = save(model, tmp_path / "saved")
    loaded = load(folder)
    same(model, loaded)
    assert loaded.cfg.dtype == torch.bfloat16
    assert next(load(folder, dtype="float32").parameters()).dtype == torch.float32


@torch.no_grad()
def test_settings_frozen_weights_and_tokenizer(tmp_path):
    model = boot("llama")
    expose_neuron_heads(model)
    model.set_use_attn_result(True)
    model.blocks[1].mlp.out.weight[:, NEURON] = 0.0
    model.blocks[0].attn.q.weight.requires_grad_(False)
    model.tokenizer = tiny_tokenizer(41, tmp_path / "tokenizer")
    model.tokenizer.padding_side = "left"
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(loaded.blocks[1].mlp.out.weight, model.blocks[1].mlp.out.weight)
    assert not loaded.blocks[0].attn.q.weight.requires_grad
    assert loaded.blocks[1].attn.q.weight.requires_grad
    assert loaded.cfg.use_attn_result
    assert mlp_hook("result") in loaded.run_with_cache(tokens())[1]
    texts = ["w3 w5", "w7", "w11 w2 w2 w13"]
    assert torch.equal(loaded.to_tokens(texts), model.to_tokens(texts))
    # TransformerBridge gives nan for fully masked rows under left padding; the rest is compared.
    torch.testing.assert_close(loaded(texts), model(texts), rtol=0, atol=0, equal_nan=True)
    assert loaded.tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@torch.no_grad()
def test_other_programs_open_the_folder_of_an_unprocessed_bridge(name, tmp_path):
    """transformers and TransformerLens can open the folder; the logits are the original's."""
    wrapped = original(name, torch.float32)
    model = exposed_copy(load(hf_folder(tmp_path / "source", name)))
    folder = save(model, tmp_path / "saved")
    assert json.loads((folder / MANIFEST).read_text())["weights"] == "transformers"
    opened = FAMILIES[name].auto.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(opened(tokens()).logits, wrapped(tokens()).logits)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    assert type(bridge) is TransformerBridge
    assert torch.equal(bridge(tokens()), model(tokens()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == model.tokenizer.get_vocab()
    # With gate.json, the exposed model is loaded; without it, the plain source.
    same(model, load(folder))
    (folder / MANIFEST).unlink()
    assert type(load(folder)) is TransformerBridge


def another_activation(model):
    for block in model.original_model.transformer.h:
        block.mlp._original_component.act = torch.nn.SiLU()


def code_of_its_own(model):
    class CustomModel(type(model.original_model)):
        pass

    model.original_model.__class__ = CustomModel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_activation, "modules .* would differ|logits that differ"),
        (code_of_its_own, "wraps a CustomModel, which is not a class of transformers"),
        (lambda model: setattr(model, "probe", torch.nn.Linear(2, 3)), r"probe\.bias is not known"),
        (
            lambda model: model.add_perma_hook("blocks.0.hook_resid_pre", lambda x, hook: None),
            "hooks are attached to the model",
        ),
    ],
)
def test_what_could_not_be_built_again_is_not_saved(change, message, tmp_path):
    model = boot("gpt2")
    change(model)
    expose_neuron_heads(model)
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    assert exposed_heads(model), "it still has its neuron-heads"


def edit(**changes):
    return lambda folder: rewrite(folder / MANIFEST, **changes)


def _weights(folder):
    [path] = folder.glob("*.safetensors")
    return path


def _rename(folder):
    tensors, path = load_file(_weights(folder)), _weights(folder)
    name = next(name for name in sorted(tensors) if "mlp" in name)
    tensors[f"{name}s"] = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})
    digest_again(folder / MANIFEST, path.name)


def _config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    digest_again(folder / MANIFEST, "config.json")


OTHER_GATE = {"kind": "bilinear", "heads": 3}
OTHER_GATE |= {"slope": None, "ranges": None, "silu": None}
DAMAGE = {
    "a tensor renamed": (_rename, "is missing|are missing"),
    "other sizes": (lambda f: _config(f, intermediate_size=53), "another shape|expected"),
    "a gate that does not fit": (edit(gate=OTHER_GATE), "cannot be exposed again"),
    "code from a hub": (edit(attention="who/knows"), "attention: got 'who/knows'"),
    "frozen nothing": (edit(frozen=["x"]), "x is not known"),
    "another mode of nothing": (edit(other_mode=["x"]), "a module x does not exist"),
    "a tokenizer gone": (edit(padding_side="left"), "has no tokenizer|tokenizer in .* cannot"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a bridge whose weights transformers can read, and one whose weights are processed."""
    folder = tmp_path_factory.mktemp("saved")
    return {
        state: save(exposed_copy(boot("llama", torch.float32, state)), folder / state)
        for state in ("plain", "processed")
    }


@pytest.mark.parametrize(
    ("state", "case"), [*(("plain", case) for case in DAMAGE), ("processed", "a tensor renamed")]
)
def test_damage_is_refused(case, state, saved, tmp_path):
    folder = shutil.copytree(saved[state], tmp_path / "saved")
    damage, message = DAMAGE[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
