"""Tests of layers that differ in size, against a uniform model whose extra heads write nothing."""

import copy

import pytest
import torch
from common import relative, tokens
from models import FAMILIES, build
from sealed_files import rewrite
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import TransformerLensKeyValueCache
from uneven import GROUPS, NEURONS, UNEVEN, VALUES, has, uneven

from attn_only_lens import Contrast, HeadName, circuits, convert, load, save, to_stock, viz
from attn_only_lens import patching as p
from attn_only_lens.engine.model_state import fingerprint
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import (
    CheckpointError,
    InputError,
    UnknownHeadError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.two_blocks import LayerSizes, rebuild
from attn_only_lens.models.verify import verify

EXACT = 1e-12  # float64: sums of the same numbers and zeros, in another order
METRIC = p.logit_diff(correct=7, wrong=11)
PAIR = Contrast(tokens(1), tokens(2), METRIC)
SOME = ("gelu", "llama", "parallel")


def distance(actual, expected):
    """Return the distance to the leading heads of a larger activation; masked scores are -∞."""
    expected = expected[tuple(slice(size) for size in actual.shape)]
    assert torch.equal(actual.isinf(), expected.isinf())
    actual, expected = actual.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)
    largest = expected.abs().max().item()  # 0 where a hook point shows the keys of neurons
    return (actual - expected).abs().max().item() / (largest or 1.0)


STRUCTURES = [name for name in UNEVEN if name not in list(FAMILIES)[:12] or name == "gelu"]


@pytest.mark.parametrize("name", STRUCTURES)
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


@pytest.mark.parametrize("name", ["gelu", "rotary", "llama", "no_attn_scale", "clip_qkv"])
@torch.no_grad()
def test_heads_of_other_widths(name):
    model, uniform = uneven(name, widths=True)
    assert [block.attn.W_Q.shape[-1] for block in model.blocks[::2]] == [11, 13, 7]
    assert [block.attn.W_V.shape[-1] for block in model.blocks[::2]] == [7, 11, 13]
    assert relative(model(tokens()), uniform(tokens())) <= EXACT
    _, cache = model.run_with_cache(tokens())
    _, reference_cache = uniform.run_with_cache(tokens())
    for key in (key for key in cache if "pattern" in key):
        assert distance(cache[key], reference_cache[key]) <= EXACT


@pytest.mark.parametrize(("name", "heads"), [("silu", 1), ("llama", 8)])
@torch.no_grad()
def test_bilinear_gates(name, heads):
    model, uniform = uneven(name, gate=heads, tokens=tokens(1))
    expected, reference_cache = uniform.run_with_cache(tokens())
    logits, cache = model.run_with_cache(tokens())
    assert relative(logits, expected) <= 1e-11  # single heads are larger than their sum
    for index in range(heads * (NEURONS[2] - 1), heads * NEURONS[2]):
        pattern = model.neuron_pattern(cache, f"L2N{index}")
        reference = uniform.neuron_pattern(reference_cache, f"L2N{index}")
        assert relative(pattern, reference) <= EXACT
    assert model.blocks[1].cfg.n_heads == heads * NEURONS[0]


@torch.no_grad()
def test_names_are_held_against_their_own_layer():
    model, uniform = uneven("gelu", widths=True)
    _, cache = model.run_with_cache(tokens())
    _, reference_cache = uniform.run_with_cache(tokens())
    assert (
        relative(
            model.neuron_pattern(cache, "L1N36"), uniform.neuron_pattern(reference_cache, "L1N36")
        )
        <= EXACT
    )
    for name in ("L0N29", "L2N31"):
        with pytest.raises(UnknownHeadError, match=r"neurons 0 to (28|30)"):
            model.neuron_pattern(cache, name)
        with pytest.raises(InputError, match=r"neurons 0 to (28|30)"):
            resolve_sites(model, [name])
    with pytest.raises(InputError, match="attention heads 0 to 1"):
        resolve_sites(model, ["L0H2"])
    assert [len(group.names) for group in resolve_sites(model, "all")] == [
        2,
        29,
        3,
        37,
        1,
        31,
    ]


def test_stacks_name_the_layers_that_differ():
    model, _ = uneven("gelu", widths=True)
    for stack in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "QK", "OV"):
        with pytest.raises(UnsupportedCallError, match=r"model.blocks\[2 \* l \+ 1\]"):
            getattr(model.neuron_heads, stack)
        with pytest.raises(UnsupportedCallError, match=r"in layer 1 .*model.blocks\[2 \* l\]"):
            getattr(model.attention_heads, stack)
    assert len(model.attention_heads.labels) == sum(GROUPS)


def test_what_has_no_one_answer_refuses():
    model, uniform = uneven("silu_gated")
    for weight in ("W_in", "b_in", "W_out", "W_gate"):
        with pytest.raises(UnsupportedCallError, match=f"stack {weight} across.*layer 0.*layer 2"):
            getattr(model, weight)
    assert torch.equal(model.b_out, uniform.b_out)
    assert model.b_O.shape == uniform.b_O.shape
    with pytest.raises(UnsupportedCallError, match=r"no stock model has these sizes.*layer_sizes"):
        _ = model.source_cfg
    with pytest.raises(UnsupportedCallError, match="29 in layer 0 and 37 in layer 1"):
        _ = model.cfg.d_mlp
    with pytest.raises(UnsupportedCallError, match="2 and 29 in layer 0"):
        _ = model.cfg.n_heads
    with pytest.raises(UnsupportedModelError, match="no stock model has these sizes"):
        verify(build("silu_gated"), model, tokens())
    assert model.cfg.layer_cfg(2).d_mlp == NEURONS[2]
    assert model.cfg.n_params == sum(model.cfg.layer_cfg(layer).n_params // 3 for layer in range(3))
    assert uniform.cfg.n_params == build("silu_gated", n_heads=3).cfg.n_params


@pytest.mark.parametrize("name", ["grouped", "rotary"])
@torch.no_grad()
def test_key_value_cache(name, tmp_path):
    model, uniform = uneven(name, d_vocab_out=41, widths=True)
    for host in (model, uniform):
        host.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"))
    past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    parts = [model(part, past_kv_cache=past) for part in tokens().split([5, 6], dim=1)]
    assert relative(torch.cat(parts, 1), uniform(tokens())) <= EXACT
    options = {"max_new_tokens": 5, "do_sample": False, "verbose": False}
    for cached in (True, False):
        text = model.generate("w3 w5 w8", use_past_kv_cache=cached, **options)
        assert text == uniform.generate("w3 w5 w8", use_past_kv_cache=cached, **options)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_methods_of_the_cache(name):
    model, uniform = uneven(name, widths=True)
    _, cache = model.run_with_cache(tokens())
    _, reference_cache = uniform.run_with_cache(tokens())
    calls = [
        lambda cache: cache.stack_head_results(return_labels=True),
        lambda cache: cache.stack_head_results(
            3, return_labels=True, incl_remainder=True, neurons=True
        ),
        lambda cache: cache.stack_neuron_results(-1, return_labels=True, pos_slice=-1),
        lambda cache: cache.stack_neuron_results(6, return_labels=True, neuron_slice=28),
        lambda cache: cache.stack_neuron_results(6, return_labels=True, neuron_slice=(3, 35)),
        lambda cache: cache.get_full_resid_decomposition(return_labels=True),
        lambda cache: cache.get_full_resid_decomposition(
            5, return_labels=True, expand_neurons=False
        ),
        lambda cache: cache.decompose_resid(return_labels=True),
        lambda cache: cache.accumulated_resid(return_labels=True, incl_mid=True),
    ]
    for call in calls:
        stack, labels = call(cache)
        reference, others = call(reference_cache)
        reference = dict(zip(others, reference, strict=True))
        there = [label for label in others if not label.startswith("L") or has(model, label)]
        assert labels == there
        for label, row in zip(labels, stack, strict=True):
            size = reference[label].abs().max().clamp(1)
            assert (row - reference[label]).abs().max() <= EXACT * size, label
    for beyond in (36, [3, 36]):
        with pytest.raises(IndexError):
            cache.stack_neuron_results(6, neuron_slice=beyond, return_labels=True)
    with pytest.raises(UnsupportedCallError, match="stack blocks of equal shape"):
        cache.stack_activation("z")


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_saved_and_loaded(name, tmp_path):
    model, _ = uneven(name, widths=True)
    loaded = load(save(model, tmp_path / "saved"))
    assert loaded.cfg.layer_sizes == model.cfg.layer_sizes
    assert torch.equal(loaded(tokens()), model(tokens()))
    assert vars(loaded.cfg.layer_cfg(1)) == vars(model.cfg.layer_cfg(1))
    assert fingerprint(loaded) == fingerprint(model)


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    model, _ = uneven("llama")
    folder = save(model, tmp_path / "saved")
    whole = (folder / MANIFEST).read_text()

    def size(layer, name, value):
        return lambda manifest: manifest["layers"][layer].update({name: value})

    for edit, message in (
        (size(1, "d_mlp", 41), r"W_in has shape \(26, 37\); expected \(26, 41\)"),
        (size(1, "n_heads", 5), "multiple of n_key_value_heads"),
        (size(2, "n_heads", 6), r"W_Q has shape \(3, 26, 8\); expected \(6, 26, 8\)"),
        (size(1, "d_head", 0), "whole numbers of at least 1"),
        (size(2, "d_value", 5), r"W_V has shape \(1, 26, 8\); expected \(1, 26, 5\)"),
        (size(1, "d_head", "8"), r"layers\[1\].d_head: got '8'; expected int"),
        (size(1, "attn_scale", None), r"layers\[1\].attn_scale: got None"),
        (size(1, "colour", 3), "colour"),
        (size(0, "d_mlp", 37), "expected 3 layers, with"),
        (lambda manifest: manifest["layers"].pop(), "expected 3 layers"),
        (lambda manifest: manifest.update(layers=[]), "expected 3 layers"),
    ):
        rewrite(folder / MANIFEST, edit)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        (folder / MANIFEST).write_text(whole)
    load(folder)


@pytest.mark.parametrize("name", ["silu", "grouped", "rotary"])
@torch.no_grad()
def test_to_stock(name):
    model, uniform = uneven(name, widths=True, act_fn="silu")
    stock = to_stock(model)
    assert relative(stock(tokens()), uniform(tokens())) <= 1e-11


FEW = ["L0H0", "L0H1", "L1H2"]
PATHS = p.Edges(p.Sites(["L0H1", "L0N3"], -1), ["L1H1", "L1N3", "logits"])


def patched(part, sites="all"):
    return lambda model: p.activation_patch(model, PAIR, sites=sites, part=part).to_frame()


def attributed(method):
    return lambda model: p.attribution(model, PAIR, method=p.Estimate(method, 0)).to_frame()


ANALYSES = {
    "every head": patched("pattern"),
    **{f"{part} of attention": patched(part, FEW) for part in ("q", "k", "value")},
    **{method: attributed(method) for method in ("gradient", "exact_gate", "secant")},
    "paths": lambda model: p.path_patch(model, PAIR, PATHS).to_frame(),
    "sources": lambda model: circuits.score_sources(
        model, tokens(0, 1, 5), "L1H1", query=-1, key=0
    ),
    "composition": lambda model: circuits.composition(model, writers="all", readers="all").frame,
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


def test_steering(both):
    model, uniform = both
    with torch.no_grad(), p.steered(model, {"L0H1": [1.0] * VALUES[0]}):
        logits = model(tokens(1))
    with torch.no_grad(), p.steered(uniform, {"L0H1": [1.0] * max(VALUES)}):
        assert relative(logits, uniform(tokens(1))) <= EXACT
    with pytest.raises(InputError, match="a vector of 7"), p.steered(model, {"L0H1": [1.0] * 11}):
        pass


def test_graphs_and_faithfulness(both):
    alone = Contrast(tokens(0, 1, 5), None, METRIC)
    graphs = [circuits.attribution_graph(host, alone, mass=1) for host in both]
    nodes = [
        graph.nodes.assign(attribution=graph.nodes["attribution"].fillna(0)) for graph in graphs
    ]
    merged = nodes[0].merge(nodes[1], on="id", suffixes=("", " there"))
    assert len(merged) == len(nodes[0])
    assert (merged["attribution"] - merged["attribution there"]).abs().max() <= 1e-10
    assert graphs[0].inflow()["metric"] == pytest.approx(graphs[0].value, abs=1e-9)
    ranking = p.attribution(both[0], PAIR)
    result = circuits.faithfulness(both[0], PAIR, ranking, shares=(0.0, 0.3, 1.0), n_random=1)
    rows = result.frame.set_index("share")
    n_pos = len(ranking.frame["position"].unique())
    assert rows.loc[1.0, "n_sites"] == len(both[0].all_head_labels(neurons=True)) * n_pos
    assert rows.loc[1.0, "faithfulness"] == pytest.approx(1.0, abs=1e-9)
    assert rows.loc[0.0, "faithfulness"] == pytest.approx(0.0, abs=1e-9)


@torch.no_grad()
def test_pictures():
    model, _ = uneven("gelu", widths=True)
    _, cache = model.run_with_cache(tokens())
    texts = [str(token) for token in tokens()[0].tolist()]
    assert "L1N36" in viz.attention_view(cache, ["L0N28", "L1N36"], texts)
    assert "L0H1" in viz.attention_view(cache, p.Sites("heads", layers=0), texts)
    assert "L0H2" not in viz.attention_view(cache, p.Sites("heads", layers=0), texts)
    assert "L1H2" in viz.attention_view(cache, p.Sites("heads", layers=1), texts)


def test_copies_casts_and_gradients():
    model, uniform = uneven("llama", widths=True)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens()), model(tokens()))
    twin.to(torch.bfloat16, print_details=False)
    assert twin(tokens()).dtype == torch.bfloat16
    for host in (model, uniform):
        host.requires_grad_(True)
        host(tokens()).square().mean().backward()
    for block, reference in zip(model.blocks[1::2], uniform.blocks[1::2], strict=True):
        grad = block.attn.W_in.grad
        assert relative(grad, reference.attn.W_in.grad[:, : grad.shape[1]]) <= 1e-11


def test_flags_reach_every_block():
    model, _ = uneven("llama", widths=True)
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    _, cache = model.run_with_cache(tokens())
    assert [cache["result", block].shape[2] for block in range(6)] == [6, 29, 9, 37, 3, 31]
    assert [cache[f"blocks.{block}.hook_q_input"].shape[2] for block in (0, 2, 4)] == [6, 9, 3]
    with pytest.raises(UnsupportedCallError, match="grouped-query"):
        model.set_use_attn_in(True)


def test_rebuilding_touches_nothing_and_refuses_what_does_not_fit():
    model = convert(build("gelu"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes = model.cfg.layer_sizes
    model.note = "kept"
    same = rebuild(model.eval(), tensors, sizes, frozen=["embed.W_E"])
    assert same.note == "kept"
    assert torch.equal(same(tokens()), model(tokens()))
    assert not same.training
    assert not same.embed.W_E.requires_grad
    assert same.unembed.W_U.requires_grad
    with torch.no_grad():
        same.blocks[1].attn.W_out.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    del tensors["blocks.1.attn.W_in"]
    tensors |= {"blocks.9.attn.W_in": tensors["blocks.3.attn.W_in"]}
    larger = [*sizes[:2], LayerSizes(2, None, 13, 13, 41, sizes[2].attn_scale)]
    with pytest.raises(UnsupportedModelError) as refused:
        rebuild(model, tensors, larger)
    assert refused.value.reasons[:2] == (
        "blocks.1.attn.W_in is missing",
        "blocks.9.attn.W_in is not known",
    )
    assert "blocks.5.attn.W_in has shape (26, 37); expected (26, 41)" in refused.value.reasons
    for wrong in (
        {"n_heads": 0},
        {"d_value": 0},
        {"n_heads": 7, "n_key_value_heads": 2},
        {"d_mlp": 2.5},
        {"attn_scale": "√d"},
    ):
        whole = {
            "n_heads": 2,
            "n_key_value_heads": None,
            "d_head": 13,
            "d_value": 13,
            "d_mlp": 37,
            "attn_scale": 1.0,
        }
        with pytest.raises(ValueError, match="expected"):
            LayerSizes(**whole | wrong)
    assert str(HeadName.parse("L2N36")) in model.all_head_labels(neurons=True)
