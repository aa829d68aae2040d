"""Tests of layers that differ in size, against a uniform model whose extra heads write nothing."""

import copy

import pytest
import torch
from common import relative, tokens
from models import build
from sealed_files import rewrite
from transformer_lens import TransformerLensKeyValueCache
from uneven import NEURONS, has, uneven

from attn_only_lens import Contrast, circuits, load, neuron_pattern, save
from attn_only_lens import patching as p
from attn_only_lens.engine.model_state import fingerprint
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import (
    CheckpointError,
    InputError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.verify import verify

EXACT = 1e-12  # float64: sums of the same numbers and zeros, in another order
METRIC = p.logit_diff(correct=7, wrong=11)
PAIR = Contrast(tokens(1), tokens(2), METRIC)


def distance(actual, expected):
    """Return the distance to the leading heads of a larger activation; masked scores are -∞."""
    expected = expected[tuple(slice(size) for size in actual.shape)]
    assert torch.equal(actual.isinf(), expected.isinf())
    actual, expected = actual.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)
    largest = expected.abs().max().item()  # 0 where a hook point shows the keys of neurons
    return (actual - expected).abs().max().item() / (largest or 1.0)


@pytest.mark.parametrize(
    "name", ["rotary", "grouped", "qk_norm", "sinks", "inverse_layer", "parallel", "gemma"]
)
@torch.no_grad()
def test_logits_and_every_activation(name):
    model, uniform = uneven(name)
    assert [block.cfg.n_heads for block in model.blocks[1::2]] == list(NEURONS)
    expected, reference_cache = uniform.run_with_cache(tokens())
    assert relative(model(tokens()), expected) <= EXACT
    logits, cache = model.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    assert set(cache) == set(reference_cache)
    folded = ("q_norm", "k_norm")  # each row is a token and head: no axis to slice
    for key in (key for key in cache if not any(norm in key for norm in folded)):
        assert distance(cache[key], reference_cache[key]) <= EXACT, key
    assert model.all_head_labels(neurons=True) == [
        label for label in uniform.all_head_labels(neurons=True) if has(model, label)
    ]
    # control: the neurons that the smaller layers lack have an effect
    for block in uniform.blocks[1::2]:
        block.attn.W_out[NEURONS[0] :] += torch.randn(26, dtype=torch.float64)
    assert relative(uniform(tokens()), expected) > 1e-3


@pytest.mark.parametrize("name", ["llama", "no_attn_scale"])
@torch.no_grad()
def test_heads_of_other_widths(name):
    model, uniform = uneven(name, widths=True)
    assert [block.attn.W_Q.shape[-1] for block in model.blocks[::2]] == [11, 13, 7]
    assert [block.attn.W_V.shape[-1] for block in model.blocks[::2]] == [7, 11, 13]
    assert relative(model(tokens()), uniform(tokens())) <= EXACT
    past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    parts = [
        model(part, past_kv_cache=past, attention_mask=torch.ones_like(part))
        for part in tokens().split([5, 6], dim=1)
    ]
    assert relative(torch.cat(parts, 1), uniform(tokens())) <= EXACT
    _, cache = model.run_with_cache(tokens())
    _, reference_cache = uniform.run_with_cache(tokens())
    for key in (key for key in cache if "pattern" in key):
        assert distance(cache[key], reference_cache[key]) <= EXACT


@torch.no_grad()
def test_names_and_sizes_are_those_of_their_own_layer():
    model, uniform = uneven("gelu", widths=True)
    _, cache = model.run_with_cache(tokens())
    _, reference_cache = uniform.run_with_cache(tokens())
    pattern, expected = (neuron_pattern(one, "L1N36") for one in (cache, reference_cache))
    assert relative(pattern, expected) <= EXACT
    with pytest.raises(InputError, match=r"neurons 0 to 30"):
        neuron_pattern(cache, "L2N31")
    with pytest.raises(InputError, match=r"(?s)neurons 0 to 28.*attention heads 0 to 1"):
        resolve_sites(model, ["L0N29", "L0H2"])
    sizes = [len(group.names) for group in resolve_sites(model, "all")]
    assert sizes == [2, 29, 3, 37, 1, 31]
    # Nothing that stacks layers, or has one number for all, is answered.
    with pytest.raises(UnsupportedCallError, match=r"model.blocks\[2 \* l \+ 1\]"):
        _ = model.neuron_heads.QK
    with pytest.raises(UnsupportedCallError, match=r"in layer 1 .*model.blocks\[2 \* l\]"):
        _ = model.attention_heads.b_V
    with pytest.raises(UnsupportedCallError, match=r"stack W_in across.*layer 0.*layer 2"):
        _ = model.W_in
    assert torch.equal(model.b_out, uniform.b_out)
    with pytest.raises(UnsupportedCallError, match=r"no stock model has these sizes.*layer_sizes"):
        _ = model.source_cfg
    with pytest.raises(UnsupportedCallError, match="29 in layer 0 and 37 in layer 1"):
        _ = model.cfg.d_mlp
    with pytest.raises(UnsupportedModelError, match="no stock model has these sizes"):
        verify(build("gelu"), model, tokens())
    assert model.cfg.layer_cfg(2).d_mlp == NEURONS[2]


@torch.no_grad()
def test_saved_and_loaded_or_refused(tmp_path):
    model, _ = uneven("llama", widths=True)
    folder = save(model, tmp_path / "saved")
    loaded = load(folder)
    assert loaded.cfg.layer_sizes == model.cfg.layer_sizes
    assert torch.equal(loaded(tokens()), model(tokens()))
    assert vars(loaded.cfg.layer_cfg(1)) == vars(model.cfg.layer_cfg(1))
    assert fingerprint(loaded) == fingerprint(model)
    whole = (folder / MANIFEST).read_text()

    def size(layer, name, value):
        return lambda manifest: manifest["layers"][layer].update({name: value})

    for edit, message in (
        (size(1, "d_mlp", 41), r"W_in has shape \(26, 37\); expected \(26, 41\)"),
        (size(1, "n_heads", 5), "multiple of n_key_value_heads"),
        (size(2, "d_value", 5), r"W_V has shape \(1, 26, 13\); expected \(1, 26, 5\)"),
        (size(1, "d_head", "8"), r"layers\[1\].d_head: got '8'; expected int"),
        (lambda manifest: manifest["layers"].pop(), "expected 3 layers"),
    ):
        rewrite(folder / MANIFEST, edit)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        (folder / MANIFEST).write_text(whole)


COLUMNS = ["id", "attribution"]
ALONE = Contrast(tokens(0, 1, 5), None, METRIC)
FEW = ["L0H0", "L0H1", "L1H2"]
PATHS = p.Edges(p.Sites(["L0H1", "L0N3"], -1), ["L1H1", "L1N3", "logits"])


ANALYSES = {
    "neurons and heads": lambda model: p.activation_patch(model, PAIR, part="pattern").to_frame(),
    "values": lambda model: p.activation_patch(model, PAIR, sites=FEW, part="value").to_frame(),
    "paths": lambda model: p.path_patch(model, PAIR, PATHS).to_frame(),
    "sources": lambda model: circuits.score_sources(
        model, tokens(0, 1, 5), "L1H1", query=-1, key=0
    ),
    "composition": lambda model: circuits.composition(model, writers="all", readers="all").frame,
    "graph": lambda model: (
        circuits.attribution_graph(model, ALONE, mass=1).nodes[COLUMNS].fillna(0)
    ),
}


@pytest.fixture(scope="module")
def both():
    return uneven("llama", widths=True)


@pytest.mark.parametrize("name", ANALYSES)
def test_analyses(both, name):
    """Every row is that of the uniform model, whose other heads change nothing."""
    frame, reference = (ANALYSES[name](host) for host in both)
    by = [column for column in frame if frame[column].dtype.kind != "f"]
    merged = frame.merge(reference, on=by, suffixes=("", " there"), validate="one_to_one")
    assert len(merged) == len(frame) <= len(reference)
    numbers = [column for column in frame.select_dtypes("float") if f"{column} there" in merged]
    assert numbers
    for column in numbers:
        size = merged[column].abs().max()
        assert (merged[column] - merged[f"{column} there"]).abs().max() <= 1e-11 * max(size, 1)
    assert merged[numbers].abs().max().max() > 1e-9, "the control"


@torch.no_grad()
def test_copies_casts_and_stacks():
    model, _ = uneven("llama", widths=True)
    model.set_use_attn_result(True)
    twin = copy.deepcopy(model)
    _, cache = twin.run_with_cache(tokens())
    assert [cache["result", block].shape[2] for block in range(6)] == [6, 29, 9, 37, 3, 31]
    stack, labels = cache.get_full_resid_decomposition(return_labels=True)
    assert {label for label in labels if label.startswith("L")} == {*model.all_head_labels(True)}
    assert relative(stack.sum(0), cache["resid_post", 5]) <= 1e-11
    with pytest.raises(UnsupportedCallError, match="stack blocks of equal shape"):
        cache.stack_activation("z")
    assert torch.equal(twin(tokens()), model(tokens()))
