"""Tests of the shipped model's accuracy, architecture and size, and of models made from it."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from common import needs_hooked_transformer, relative
from safetensors.torch import load_file

from analyses.tools import modular_addition as addition
from attn_only_lens import (
    Bilinear,
    convert,
    expose_neuron_heads,
    grow,
    load,
    pretrained,
    save,
    to_stock,
)
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.both_versions

DATA = Path(str(files("attn_only_lens.pretrained") / "data" / "modular_addition"))
METRICS = json.loads((DATA / "metrics.json").read_text())
RECIPE = addition.Recipe(**{key: METRICS[key] for key in addition.Recipe.__dataclass_fields__})


@needs_hooked_transformer
def test_it_is_as_accurate_as_its_metrics_say():
    tokens, answers, trained = addition.pairs(RECIPE)
    with torch.no_grad():
        logits = load("modular-addition")(tokens)[:, -1]
    for name, part in (("train", trained), ("test", ~trained)):
        assert (logits[part].argmax(-1) == answers[part]).all()
        assert METRICS[f"{name}_accuracy"] == 1.0
        loss = addition.loss_of(logits[part], answers[part]).item()
        # float32 logits near 100 give losses near 1e-7 a relative error of a few per mille
        assert loss == pytest.approx(METRICS[f"{name}_loss"], rel=0.02)


def test_models_made_in_inference_mode_can_be_trained(tmp_path):
    tokens = pretrained.modular_addition_tokens()[:3]
    with torch.inference_mode():
        model = load("modular-addition")
        converted = expose_neuron_heads(model, copy=True, copy_weights=True, gate=Bilinear()).model
        made = [model, converted, grow(model, d_mlp=521).model]
        made.append(load(save(converted, tmp_path / "saved")))
        if HAS_HOOKED_TRANSFORMER:
            made.append(to_stock(convert(model, copy_weights=True, gate=Bilinear())))
        logits = [model(tokens) for model in made]
    for model, there in zip(made, logits, strict=True):
        here = model(tokens)
        assert torch.equal(here, there)
        here.square().mean().backward()
        assert next(model.parameters()).grad.abs().max() > 0


def by_hand(state, tokens, act=torch.nn.functional.silu):
    """Return the logits at '=' from the weights alone, without our code or TransformerLens."""
    w = {name.rpartition(".")[2]: tensor.double() for name, tensor in state.items()}
    x = w["W_E"][tokens] + w["W_pos"]  # [batch, pos, d_model]; no norms, and every bias is zero
    q, k, v = (torch.einsum("bpd,hde->bhpe", x, w[name]) for name in ("W_Q", "W_K", "W_V"))
    # '=' comes last, so its query sees every position, and no mask is needed.
    pattern = (q[:, :, -1:] @ k.mT / 32**0.5).softmax(-1)
    end = x[:, -1] + torch.einsum("bhe,hed->bd", (pattern @ v)[:, :, 0], w["W_O"])
    return (end + act(end @ w["W_in"]) @ w["W_out"]) @ w["W_U"]


def test_its_logits_are_those_of_its_weights():
    """The logits match for a HookedTransformer, and under transformer-lens 4 for a bridge."""
    state = load_file(DATA / "model.safetensors")
    tokens = pretrained.modular_addition_tokens()[::7]
    expected = by_hand(state, tokens)
    with torch.no_grad():
        got = load("modular-addition", dtype=torch.float64)(tokens)[:, -1]
    # 128 to 512 terms a sum, in float64
    assert relative(got, expected) <= 1e-13
    heads_swapped = state | {"blocks.0.attn.W_O": state["blocks.0.attn.W_O"].flip(0)}
    assert relative(by_hand(heads_swapped, tokens), expected) > 0.1
    assert relative(by_hand(state, tokens, torch.nn.functional.gelu), expected) > 0.01


def test_tokens():
    tokens = pretrained.modular_addition_tokens()
    assert tokens.shape == (113 * 113, 3)
    assert tokens[113 * 5 + 7].tolist() == [5, 7, 113]


def damaged(tmp_path, name, change):
    for path in DATA.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    return tmp_path


@needs_hooked_transformer
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-100], "is not a readable safetensors file"),
        ("config.json", lambda data: data.replace(b"512", b"509"), r"W_in has shape \(128, 512\)"),
        ("config.json", lambda data: data.replace(b"n_ctx", b"n_cxt"), "n_cxt is not known"),
    ],
)
def test_damaged_files(tmp_path, name, change, message):
    with pytest.raises(CheckpointError, match=message):
        load_source(damaged(tmp_path, name, change))


@needs_hooked_transformer
def test_missing_and_unknown_tensors(tmp_path):
    from safetensors.torch import save_file

    state = load_file(DATA / "model.safetensors")
    state["blocks.0.mlp.W_up"] = state.pop("blocks.0.mlp.W_in")
    (tmp_path / "config.json").write_bytes((DATA / "config.json").read_bytes())
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp\.W_in is missing; .*mlp\.W_up is not known"):
        load_source(tmp_path)
