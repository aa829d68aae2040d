"""Tests that HookedTransformers with neuron-heads in place can be saved, loaded and verified."""

import pytest
import torch
from common import POS, mlp_hook, relative, tokens
from models import CORE, build
from sealed_files import rewrite
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

from attn_only_lens import (
    Bilinear,
    calibrate,
    convert,
    dense_pattern,
    expose_neuron_heads,
    load,
    neuron_gate,
    neuron_pattern,
    save,
    verify,
)
from attn_only_lens.cli import app
from attn_only_lens.errors import CheckpointError, UnsupportedModelError
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.tl import HookedTransformer

EXACT = 1e-12


def exposed(name, **how):
    return expose_neuron_heads(build(name), **how).model


@torch.no_grad()
def same(a, b):
    assert type(a) is type(b)
    state, expected = a.state_dict(), b.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert torch.equal(a(tokens()), b(tokens()))
    logits, cache = a.run_with_cache(tokens())
    again, cached = b.run_with_cache(tokens())
    assert torch.equal(logits, again)
    assert list(cache) == list(cached)
    assert all(torch.equal(cache[key], cached[key]) for key in cache.keys())  # noqa: SIM118
    assert exposed_heads(a)[0].gating == exposed_heads(b)[0].gating


@pytest.mark.parametrize("name", [*CORE, "relu", "gelu_new_gated", "grouped_ungrouped", "gemma"])
@torch.no_grad()
def test_round_trip(name, tmp_path):
    model = exposed(name)
    model.set_use_attn_result(True)
    random = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), random)
    same(model, loaded)
    assert mlp_hook("result", 0) in loaded.run_with_cache(tokens())[1]


@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_bilinear_gates_frozen_parameters_ties_and_tokenizer(name, tmp_path):
    source = build(name, d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"), default_padding_side="left")
    source.blocks[0].mlp.b_out = source.blocks[1].mlp.b_out
    source.blocks[2].mlp.W_in.requires_grad_(False)
    how = {"calibration": calibrate(source, tokens())} if source.cfg.gated_mlp else {}
    expose_neuron_heads(source.eval(), gate=Bilinear(4, **how))
    loaded = load(save(source, tmp_path / "saved"))
    same(source, loaded)
    assert loaded.blocks[0].mlp.b_out is loaded.blocks[1].mlp.b_out
    assert not loaded.blocks[2].mlp.W_in.requires_grad
    assert not loaded.training
    assert torch.equal(loaded(["w3 w5", "w7"]), source(["w3 w5", "w7"]))


@torch.no_grad()
def test_a_model_made_in_python_is_converted_and_explained_in_a_shell(tmp_path):
    source = build("gelu", d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"))
    folder, converted = save(source, tmp_path / "saved"), tmp_path / "converted"
    assert not exposed_heads(source)
    loaded = load(folder)
    assert type(loaded) is HookedTransformer
    assert torch.equal(loaded(tokens()), source(tokens()))
    save(source, folder)  # again, into the same folder
    for command in (
        ("convert", folder, converted),
        ("verify", folder, converted, "--text", "w3 w5"),
        *[("explain", folder, "--clean", "w3 w5", "--corrupted", "w4 w5", "--answer", "w7")],
    ):
        more = ("--wrong", "w11", "--out", tmp_path / "why.html") * (command[0] == "explain")
        result = CliRunner().invoke(app, [str(word) for word in (*command, *more)])
        assert result.exit_code == 0, result.output
    assert torch.equal(load(converted)(tokens()), convert(source)(tokens()))


def test_what_could_not_be_built_again_is_refused_before_anything_is_written(tmp_path):
    for spoil, reason in (
        (lambda m: setattr(m.blocks[1].mlp, "act_fn", torch.tanh), "act_fn is not gelu"),
        (lambda m: setattr(m, "probe", torch.nn.Linear(2, 3)), "probe"),
    ):
        model = exposed("gelu")
        spoil(model)
        with pytest.raises(CheckpointError, match=reason):
            save(model, tmp_path / "saved")
        assert not list(tmp_path.iterdir())
        assert exposed_heads(model), "and it has its neuron-heads still"


def test_damage_is_refused(tmp_path):
    folder = save(exposed("gelu"), tmp_path / "saved")
    stored = {
        "kind": "bilinear",
        "heads_per_neuron": 3,
        "slope": None,
        "ranges": None,
        "silu": None,
    }
    for changes, message in (
        ({"gate": stored}, "got heads=3"),
        ({"gate": stored | {"heads_per_neuron": 4, "ranges": [3.0, 3.0]}}, "expected no ranges"),
        ({"layout": "upside down"}, "layout: got 'upside down'"),
        ({"model": "TransformerBridge"}, "architecture is missing; attention is missing"),
        ({"model": None}, "model: got None"),
    ):
        whole = (folder / MANIFEST).read_text()
        rewrite(folder / MANIFEST, **changes)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        (folder / MANIFEST).write_text(whole)
    load(folder)


def test_command_line(tmp_path):
    folder = save(exposed("gelu"), tmp_path / "saved")
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "other")])
    assert result.exit_code == 2
    assert "pass the original model" in result.output


# verify


@pytest.mark.parametrize("name", CORE)
def test_verify_against_a_twin_and_itself(name):
    model, twin = exposed(name), build(name)
    for source in (twin, model):
        report = verify(source, model, tokens())
        assert report.ok, report
        assert report.relative <= EXACT
        assert report.by_layer["relative"].max() <= EXACT
        assert report.n_tokens == 2 * POS
    assert exposed_heads(model)
    layers = verify(twin, convert(twin), tokens()).by_layer["point"]
    assert list(report.by_layer["point"]) == list(layers)


@pytest.mark.parametrize("name", CORE)
def test_verify_bilinear_gates(name):
    """The report equals that of the model with two blocks per layer."""
    twin = build(name)
    calibration = calibrate(twin, tokens()) if twin.cfg.gated_mlp else None
    gate = Bilinear(4, calibration=calibration)
    model = exposed(name, gate=gate)
    expected = verify(twin, convert(twin, gate=gate), tokens())
    for source in (twin, model):
        report = verify(source, model, tokens())
        assert report.ok, report
        assert not report.bitwise
        assert report.relative == pytest.approx(expected.relative, rel=1e-6)
        for column in ("bound", "measured", "largest", "range"):
            got, reference = report.activations[column], expected.activations[column]
            assert got.tolist() == pytest.approx(reference.tolist(), rel=1e-6, abs=1e-15)


@torch.no_grad()
def test_verify_notices():
    model, twin = exposed("gelu"), build("gelu")
    model.blocks[2].mlp.W_out.mul_(1.01)
    report = verify(twin, model, tokens())
    assert not report.ok
    by_point = report.by_layer.set_index("point")["max_abs"]
    assert by_point["2_mid"] < 1e-12 < 1e-3 < by_point["final_post"]
    assert verify(model, model, tokens()).ok, "it is still itself"
    for a, b, message in (
        (model, convert(twin), "source: got ExposedTransformer"),
        (exposed("gelu"), model, "source: got ExposedTransformer"),
        (model, twin, "converted: got HookedTransformer"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            verify(a, b, tokens())


@torch.no_grad()
def test_hooks_on_neuron_heads_are_there_after_verify():
    model, seen = exposed("gelu"), []
    model.add_hook(mlp_hook("z"), lambda z, hook: seen.append(1))
    verify(model, model, tokens())
    seen.clear()
    model(tokens())
    assert seen == [1]


@torch.no_grad()
def test_accessors_of_partial_caches():
    model = exposed("llama")
    _, cache = model.run_with_cache(tokens())
    hook = mlp_hook("pattern")
    _, few = model.run_with_cache(tokens(), names_filter=hook)
    _, single = model.run_with_cache(tokens()[:1], names_filter=[hook], remove_batch_dim=True)
    for read in (neuron_pattern, neuron_gate, dense_pattern):
        whole = read(cache, "L1N29")
        assert relative(read(few, "L1N29"), whole) <= EXACT
        assert read(single, "L1N29").shape == whole.shape[1:]
        assert relative(read(single, "L1N29"), whole[0]) <= EXACT
        assert relative(read(cache, "L1N28"), whole) > 1e-3
    assert isinstance(model, HookedTransformer)
