"""Tests that `compare` finds no difference right after growth, and explicit loops' values later."""

import math
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import partial

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import mlp_hook, tokens
from scipy.spatial.distance import jensenshannon

from attn_only_lens import (
    Contrast,
    circuits,
    compare,
    expose_neuron_heads,
    grow,
    growth,
    load,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, ComparisonError, InputError, InputWarning
from attn_only_lens.growth.comparison import results
from attn_only_lens.growth.comparison.circuits import PAIRS
from attn_only_lens.growth.comparison.statistics import pattern_divergence
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Axis
from attn_only_lens.growth.models._grow import identity
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.patching import repairs
from attn_only_lens.storage.tables import write_table

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore::UserWarning:transformer_lens"),
    pytest.mark.filterwarnings("ignore:the grown model no longer does this task"),
]
# Random models have no small circuits: a lower faithfulness saves most of the search.
LOW = 0.5
FAST = {"sizes": growth.ComparisonSizes(faithfulness=LOW, n_patched=7, n_nodes=11)}
QUICK = {"sizes": growth.ComparisonSizes(faithfulness=LOW, n_patched=0, n_nodes=0)}
# These are sums of some hundred terms, each within a few float64 roundings.
SAME = 1e-11


def grown_from(model, seed=0):
    """Grow a model by all six expansions."""
    width = compose(growth.WidenValues(3), growth.WidenQueriesAndKeys(3))
    steps = [
        growth.AddNeurons(5),
        growth.AddHeads(2),
        width,
        growth.InsertLayer(at=1),
        growth.WidenStream(6),
    ]
    return grow(model, [*steps], seed=seed)


def trained(grown, seed=0, steps=3):
    """Train a grown model for a few gradient steps on other prompts."""
    optimizer = torch.optim.SGD(grown.model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        prompts = tokens(seed=100 + 10 * seed + step, batch=5)
        grown.model(prompts, return_type="loss").backward()
        optimizer.step()
    optimizer.zero_grad()
    return grown


def by_loss(prompts):
    return Contrast(prompts, None, p.loss())


def components(comparison):
    return pd.concat([comparison.heads, comparison.neurons], ignore_index=True).set_index("name")


@pytest.mark.parametrize("name", ["native_gated", "neox"])
def test_right_after_growth_nothing_differs(name):
    model = bridges.boot(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    comparison = compare(model, grown_from(model), by_loss(tokens(batch=3)), **FAST)
    every = components(comparison)
    largest = every["drop"].abs().max()
    assert largest > 1e-3
    assert every["divergence"].max() < SAME
    assert (every["cosine"] - 1).abs().max() < SAME
    assert (every["norm_ratio"] - 1).abs().max() < SAME
    assert every["drop_change"].abs().max() < SAME * largest
    assert every["exact"].sum() >= FAST["sizes"].n_patched
    assert (comparison.new["norm"] == 0).all()
    assert comparison.new["drop"].abs().max() < SAME * largest
    assert len(comparison.new) == 2 * (5 + 2) + (2 + 2) + (37 + 5)
    n = len(comparison.nodes)
    assert (comparison.circuits["jaccard"] == 1).all()
    assert comparison.circuits[["jaccard_low", "jaccard_high"]].isna().all(axis=None)
    edges = comparison.edges
    np.testing.assert_allclose(edges["grown_weight"], edges["weight"], rtol=1e-7, atol=SAME)
    assert (comparison.nodes["status"] == "kept").all()
    assert comparison.parts["part"].tolist() == ["in both circuits"]
    assert comparison.title == f"{n} of the circuit's {n} sites are the same"
    assert len(edges) > 5
    # The model is unchanged.
    assert mlp_hook("z", 0) not in model.hook_dict
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stream_that_is_normalized_is_compared_without_its_mean():
    """BERT normalizes the stream itself, so heads read what is written without its mean."""
    model = bridges.boot("bert")
    assert host_of(bridges.exposed_copy(model)).reads_centred()
    assert not host_of(bridges.exposed_copy(bridges.boot("llama"))).reads_centred()
    grown = grow(model, [growth.AddNeurons(5), growth.AddHeads(3)], seed=0)
    metric = p.logit_diff([3, 5, 7], [4, 6, 8])
    contrast = Contrast(tokens(batch=3), None, metric)
    comparison = compare(model, grown, contrast, **QUICK)
    assert (components(comparison)["cosine"] - 1).abs().max() < SAME
    assert comparison.new["share"].abs().max() < SAME
    assert comparison.circuits["jaccard"].min() == 1
    with pytest.raises(InputError, match="n_nodes=0 compares only the nodes"):
        compare(model, grown, contrast, **FAST)


@pytest.fixture(scope="module")
def after_training():
    model = bridges.boot("native")
    grown = trained(grown_from(model))
    prompts = tokens(batch=5)
    null = trained(grown_from(model), seed=1)
    sizes = growth.ComparisonSizes(n_patched=7, n_nodes=11)  # circuits with new parts
    comparison = compare(model, grown, by_loss(prompts), null=null, sizes=sizes)
    return model, grown, null, prompts, comparison


def pattern_and_output(model, cache, head):
    """Return a head's pattern [batch, pos, key] and output; LayerNorm ignores the mean."""
    block = model.blocks[head.layer]
    if head.kind == "attention":
        pattern = cache["pattern", head.layer][:, head.index]
        wrote = cache["z", head.layer][:, :, head.index] @ block.attn.W_O[head.index]
    else:
        x = cache["pre", head.layer][:, :, head.index]
        weight = torch.nn.functional.gelu(x, approximate="tanh") / x
        pattern = torch.stack([weight, 1 - weight], -1)
        wrote = cache["post", head.layer][:, :, head.index, None] * block.mlp.W_out[head.index]
    return pattern, wrote - wrote.mean(-1, keepdim=True)


@torch.no_grad()
def test_patterns_and_outputs_after_training(after_training):
    model, grown, _, prompts, comparison = after_training
    every = components(comparison)
    assert list(grown.provenance.coordinates) == list(range(26))
    (_, old), (_, new) = (m.run_with_cache(prompts) for m in (model, grown.model))
    for name in ("L0H0", "L1H1", "L0N3", "L1N17", "L1N36"):
        head, there, said = HeadName.parse(name), grown.provenance[name], every.loc[name]
        assert HeadName.parse(there).layer == (0, 2)[head.layer]
        first, wrote = pattern_and_output(model, old, head)
        second, grown_wrote = pattern_and_output(grown.model, new, HeadName.parse(there))
        by_prompt = (jensenshannon(first, second, base=2, axis=-1) ** 2).mean(1)
        # It is a difference of entropies of order 1.
        assert said["divergence"] == pytest.approx(by_prompt.mean(), rel=1e-9, abs=1e-14)
        error = by_prompt.std(ddof=1) / math.sqrt(5)
        assert said["divergence_se"] == pytest.approx(error, rel=1e-7, abs=1e-14)
        dot, sizes = (wrote * grown_wrote[..., :26]).sum(), (wrote.norm(), grown_wrote.norm())
        assert said["cosine"] == pytest.approx(float(dot / (sizes[0] * sizes[1])), rel=1e-11)
        assert said["norm_ratio"] == pytest.approx(float(sizes[1] / sizes[0]), rel=1e-11)
    assert every["divergence"].max() > 1e-4
    assert (1 - every["cosine"]).max() > 1e-3


@torch.no_grad()
def test_drops_after_training(after_training):
    """All drops equal whole passes with plain hooks; errors are over prompts."""
    model, grown, _, prompts, comparison = after_training
    every, new = components(comparison), comparison.new.set_index("grown_name")
    assert every["exact"].all() & new["exact"].all()
    gained = new["drop"].abs().sort_values().index[-3:]
    checks = [(model, name, every.loc[name, "drop"]) for name in ("L0H1", "L1N17")]
    checks += [
        (grown.model, grown.provenance[name], every.loc[name, "grown_drop"])
        for name in ("L1H0", "L1N36")
    ]
    checks += [(grown.model, name, new.loc[name, "drop"]) for name in gained]
    for source, name, said in checks:
        assert said == pytest.approx(losses(source, prompts, [name]).mean().item(), rel=1e-9)
    both = [(model, "L0H1"), (grown.model, grown.provenance["L0H1"])]
    before, after = (losses(source, prompts, [name]) for source, name in both)
    row = every.loc["L0H1"]
    assert row["drop_change"] == pytest.approx((after - before).mean().item(), rel=1e-7)
    error = (after - before).std() / math.sqrt(5)
    assert row["drop_change_se"] == pytest.approx(error.item(), rel=1e-7)
    values = comparison.about["values"]["grown"]
    span = values["clean"] - values["corrupted"]
    np.testing.assert_allclose(new["share"], new["drop"] / span, rtol=1e-9)


@torch.no_grad()
def test_drops_that_are_patched_in_both_models_are_of_their_own_components(
    after_training, monkeypatch
):
    """After few repairs, the largest drops of either model are patched in both."""
    model, grown, _, prompts, _ = after_training
    monkeypatch.setattr(repairs, "_AT_LEAST", (0.0, 0.0))
    monkeypatch.setattr(repairs, "_AT_MOST", (1.0, 0.0))
    sizes = growth.ComparisonSizes(faithfulness=LOW, n_patched=41, n_nodes=0)
    comparison = compare(model, grown, by_loss(prompts), sizes=sizes)
    every, new = components(comparison), comparison.new.set_index("grown_name")
    assert 41 <= every["exact"].sum() + new["exact"].sum() < len(every) + len(new)
    for name, row in every[every["exact"]].iterrows():
        for source, own, drop in (
            (model, name, row["drop"]),
            (grown.model, row["grown_name"], row["grown_drop"]),
        ):
            fall = losses(source, prompts, [own]).mean().item()
            assert drop == pytest.approx(fall, rel=1e-7, abs=1e-12)


def losses(model, prompts, sites):
    """Return how much the loss metric of every prompt falls if these sites are corrupted.

    A site is a name, for all positions, or an id such as "L0H1@3".
    """
    _, cache = model.run_with_cache(prompts.roll(-1, 0))

    def put(value, hook, index, position):
        of_head = (slice(None), position, index)
        value = value.clone()
        value[of_head] = cache[hook.name][of_head]
        return value

    hooks = []
    for site in sites:
        name, _, position = site.partition("@")
        head = HeadName.parse(name)
        point = "attn.hook_z" if head.kind == "attention" else "mlp.hook_post"
        at = {"index": head.index, "position": int(position) if position else slice(None)}
        hooks.append((f"blocks.{head.layer}.{point}", partial(put, **at)))

    def by_prompt(logits):
        logs = logits[:, :-1].log_softmax(-1)
        return -logs.gather(-1, prompts[:, 1:, None])[..., 0].mean(1)

    return by_prompt(model(prompts)) - by_prompt(model.run_with_hooks(prompts, fwd_hooks=hooks))


@torch.no_grad()
def test_what_became_of_the_circuit(after_training):
    """Groups of sites are sets of both circuits, and their joint drops those of plain hooks."""
    model, grown, _, prompts, comparison = after_training
    nodes, back = comparison.nodes, {new: old for old, new in names_of(comparison).items()}
    parts = comparison.parts.set_index("part")
    assert parts["n_sites"].sum() == len(nodes)
    kept = nodes["id"][nodes["status"] == "kept"].tolist()
    lost = nodes["id"][nodes["status"] == "lost"].tolist()
    is_new = nodes["original_name"].isna()
    added = nodes["id"][is_new & (nodes["layer"] != 1) & (nodes["kind"] == "attention")].tolist()
    inserted = nodes["id"][nodes["layer"] == 1].tolist()
    checks = {
        "in both circuits": kept,
        "only in the original's circuit": lost,
        "new heads": added,
        "in new layers": inserted,
    }
    checks = {part: ids for part, ids in checks.items() if ids}
    assert {"in both circuits", "only in the original's circuit"} < set(checks) <= set(parts.index)
    for part, ids in checks.items():
        row = parts.loc[part]
        assert row["n_sites"] == len(ids)
        fall = losses(grown.model, prompts, ids).mean().item()
        assert row["grown_drop"] == pytest.approx(fall, rel=1e-7, abs=1e-9)
        olds = [x.partition("@") for x in ids]
        if part in ("new heads", "in new layers"):
            assert np.isnan(row["drop"])
            continue
        old_ids = [f"{back[name]}@{position}" for name, _, position in olds]
        fall = losses(model, prompts, old_ids).mean().item()
        assert row["drop"] == pytest.approx(fall, rel=1e-7, abs=1e-9)
    assert comparison.title.startswith(f"{len(kept)} of the circuit's {len(kept) + len(lost)} site")


def test_a_saved_comparison_is_the_same(after_training, tmp_path):
    comparison = after_training[-1]
    read = load(comparison.save(tmp_path / "folder"))
    for name in ("heads", "neurons", "new", "circuits", "parts", "nodes", "edges"):
        frames = getattr(read, name), getattr(comparison, name)
        pd.testing.assert_frame_equal(*frames, check_dtype=False, check_column_type=False)
    assert read.neurons["exact"].dtype == bool
    assert read.title == comparison.title
    assert viz.circuit_view(read) == viz.circuit_view(comparison)


@pytest.mark.parametrize("after", range(8))
def test_an_interrupted_save_leaves_the_earlier_comparison(
    after_training, tmp_path, monkeypatch, after
):
    comparison, folder = after_training[-1], tmp_path / "folder"
    comparison.save(folder)
    (folder / "report.html").write_text("a page")
    other, written = replace(comparison, tokens=("other",)), list[str]()

    def write(path, *args):
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(path.name)
        return write_table(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(results, "write_table", write)
        with pytest.raises(KeyboardInterrupt):
            other.save(folder)
    assert load(folder).tokens == comparison.tokens
    assert (folder / "report.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert load(other.save(folder)).tokens == ("other",)
    (folder / "notes.txt").write_text("of somebody else")
    with pytest.raises(CheckpointError, match=r"also holds notes\.txt"):
        other.save(folder)


def names_of(comparison):
    every = components(comparison)
    return dict(zip(every.index, every["grown_name"], strict=True))


def test_circuits_after_training(after_training):
    """Circuits are those of `discover`, and edges those of the circuits' own runs."""
    model, grown, null, prompts, comparison = after_training
    renamed, drawn, names = names_of(comparison), [], []
    contrast = Contrast(prompts, prompts.roll(-1, 0), p.loss())
    for source in (model, grown.model, null.model):
        with expose_neuron_heads(source) as exposed:
            circuit = circuits.discover(exposed, contrast)
            graph = circuits.attribution_graph(exposed, contrast, sites=circuit)
        drawn.append(graph.edges.set_index(["source", "target", "kind"])["weight"])
        went = renamed.get if source is model else str
        ids = zip(circuit.frame["name"], circuit.frame["position"], strict=True)
        names.append({f"{went(str(name))}@{position}" for name, position in ids})
    first, second, third = names
    rows = comparison.circuits.set_index(["pair", "what"])
    for label, before, after in zip(PAIRS, (first, second), (second, third), strict=True):
        row = rows.loc[(label, "nodes")]
        assert row[["first", "second"]].tolist() == [len(before), len(after)]
        assert row["kept"] == len(before & after)
        assert row["lost"] == len(before - after)
        assert row["gained"] == len(after - before)
        assert row["jaccard"] == len(before & after) / len(before | after)
    assert rows.loc[(PAIRS[0], "nodes"), "jaccard"] < 1
    status = comparison.nodes.set_index("id")["status"]
    assert set(status.index[status == "kept"]) == first & second
    assert set(status.index[status == "gained"]) == second - first
    back = {new: old for old, new in renamed.items()}

    def original_node(node):
        name, mark, position = node.partition("@")
        return f"{back.get(name, name)}{mark}{position}"

    assert len(comparison.edges) > 20
    n_checked = 0
    for row in comparison.edges.itertuples():
        key = row.source, row.target, row.kind
        has = not np.isnan(row.weight), not np.isnan(row.grown_weight)
        assert row.status == {(True, True): "kept", (True, False): "lost"}.get(has, "gained")
        if not np.isnan(row.grown_weight):
            assert row.grown_weight == pytest.approx(drawn[1][key], rel=1e-9)
        if not np.isnan(row.weight):
            key = original_node(row.source), original_node(row.target), row.kind
            assert row.weight == pytest.approx(drawn[0][key], rel=1e-9)
            n_checked += 1
    assert n_checked


def test_a_null_is_between_the_grown_model_and_it(after_training):
    _, grown, null, prompts, comparison = after_training
    apart = compare(grown.model, null.model, by_loss(prompts), provenance=same(grown), **FAST)
    every, apart_rows = components(comparison), components(apart)
    apart_rows = apart_rows.loc[every["grown_name"]]
    for column in ("divergence", "divergence_se", "cosine", "norm_ratio", "drop_change"):
        np.testing.assert_allclose(
            every[f"null_{column}"], apart_rows[column], rtol=1e-9, atol=1e-13
        )
        assert not np.allclose(every[f"null_{column}"], every[column], atol=1e-6)
    assert comparison.new["null_share"].abs().max() > 1e-5
    by_hand = comparison.neurons.query("layer == 1")["null_divergence"].mean()
    assert comparison.summary()["null_divergence"].iloc[3] == pytest.approx(by_hand)


def test_a_grown_model_that_lost_the_task_is_warned_about():
    model = bridges.boot("native")
    lost = grown_from(model)
    with torch.no_grad():
        lost.model.unembed.original_component.weight.mul_(0.01)
    contrast = Contrast(tokens(), tokens(seed=5), p.logit_diff(7, 11))
    with pytest.warns(InputWarning, match=r"no longer does this task.*\n.*grown model: .*; orig"):
        compare(model, lost, contrast, **FAST)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"(?s).*no longer does this task", InputWarning)
        compare(model, grown_from(model), contrast, **FAST)


def same(grown):
    """Return a grown model's provenance from itself."""
    place = grown.provenance
    axes = {axis: IndexMap.identity(size) for axis, size in place.sizes.items()}
    layers, source = IndexMap.identity(place.layers.size), identity(grown.model)
    return replace(place, layers=layers, axes=axes, like={}, source=source)


def swapped(provenance, axis):
    """Return the provenance with two of its indices along an axis swapped."""
    place = provenance.axes[axis]
    first, second, *rest = place.new_of
    wrong = IndexMap((second, first, *rest), place.size)
    return replace(provenance, axes={**provenance.axes, axis: wrong})


def test_a_misaligned_provenance_shows():
    """The control: a wrong provenance gives differences in the swapped parts only."""
    model = bridges.boot("native")
    grown = grown_from(model)
    wrong = swapped(grown.provenance, Axis("d_mlp", 1))
    comparison = compare(model, grown.model, by_loss(tokens()), provenance=wrong, **FAST)
    every = components(comparison)
    odd = every.index[(every["cosine"] - 1).abs() > 1e-3]
    assert list(odd) == ["L1N0", "L1N1"]
    assert list(every.index[every["divergence"] > 1e-3]) == ["L1N0", "L1N1"]
    assert list(every.index[every["drop_change"].abs() > 1e-6]) == ["L1N0", "L1N1"]
    wrong = swapped(grown.provenance, Axis("d_model"))
    comparison = compare(model, grown.model, by_loss(tokens()), provenance=wrong, **FAST)
    assert components(comparison)["cosine"].median() < 0.99
    assert components(comparison)["divergence"].max() < SAME


def test_intervals_are_of_circuits_of_random_halves():
    model = bridges.boot("native")
    sizes = growth.ComparisonSizes(faithfulness=LOW, n_patched=0, n_nodes=0, resamples=2)
    contrast = by_loss(tokens(batch=5))
    trained_on = compare(model, trained(grown_from(model)), contrast, sizes=sizes)
    row = trained_on.circuits.iloc[0]
    assert 0 < row["jaccard_low"] < row["jaccard_high"] < 1


@pytest.fixture(scope="module")
def grown_and_not():
    model = bridges.boot("native")
    return model, grow(model, [growth.WidenStream(6), growth.AddNeurons(5)], seed=0)


def moved(model, change):
    """Return a copy of a model with a parameter changed in place."""
    copy = deepcopy(model)
    with torch.no_grad():
        change(copy)
    return copy


def test_another_model_of_the_same_shape_is_refused(grown_and_not):
    model, grown = grown_and_not
    model = moved(model, lambda model: model.blocks[1].mlp.W_in[:, :2].mul_(1.001))
    with pytest.raises(ComparisonError, match="is not the model that was grown") as error:
        compare(model, grown, by_loss(tokens()), **QUICK)
    assert "replace(provenance, source=" in str(error.value)
    # The comparison that the error suggests works.
    provenance = replace(grown.provenance, source=grow(model, []).provenance.source)
    comparison = compare(model, grown, by_loss(tokens()), provenance=provenance, **QUICK)
    assert len(comparison.neurons) == 2 * 37


def test_a_provenance_of_no_model_is_refused(grown_and_not):
    model, grown = grown_and_not
    nobody = replace(grown.provenance, source=None)
    with pytest.raises(ComparisonError, match="does not identify a model"):
        compare(model, grown.model, by_loss(tokens()), provenance=nobody, **QUICK)
    negated = moved(model, lambda model: model.W_E.neg_())
    null = grow(negated, [growth.WidenStream(6), growth.AddNeurons(5)], seed=0)
    with pytest.raises(ComparisonError, match="the null model grew from another model"):
        compare(model, grown, by_loss(tokens()), null=null, **QUICK)


def largest_activations(model, prompts, layer):
    """Return each neuron's largest activation, relative to the layer's root mean square."""
    with torch.no_grad():
        z = model.run_with_cache(prompts)[1]["post", layer].double()
    return z.abs().amax((0, 1)) / z.square().mean().sqrt()


def test_silent_neurons_are_counted_and_not_ranked():
    """After growth under LayerNorm, the activations of dead ReLU neurons are only rounding."""
    model, prompts = bridges.boot("neox_sequential", torch.float32), tokens(batch=3)
    sizes = {3: 1e-40, 5: 1e-12, 7: 1e-9, 11: 1e-4, 13: 0.0}  # quiet neurons, and dead ones
    with torch.no_grad():
        for neuron, size in sizes.items():
            model.blocks[1].mlp.W_in[:, neuron] *= size
            model.blocks[1].mlp.b_in[neuron] *= size
    grown = grow(model, d_model=32, seed=0)
    comparison = compare(model, grown, by_loss(prompts), **QUICK)
    expected = []
    for k in (0, 1):  # sixteen float32 units in the last place
        old, new = (largest_activations(side, prompts, k)[:37] for side in (model, grown.model))
        quiet = (old <= 16 * 2**-23) & (new <= 16 * 2**-23)
        expected += [f"L{k}N{i}" for i in quiet.nonzero().flatten().tolist()]
    assert {"L1N3", "L1N5", "L1N7", "L1N13"} <= set(expected)
    assert "L1N11" not in expected
    assert comparison.silent["name"].tolist() == expected
    assert comparison.silent["grown_name"].tolist() == expected
    assert list(comparison.neurons["name"]) == [
        name for k in (0, 1) for i in range(37) if (name := f"L{k}N{i}") not in expected
    ]
    assert comparison.neurons["divergence"].max() < 1e-6
    summary = comparison.summary().set_index(["layer", "kind"])
    n_silent = sum(name.startswith("L1") for name in expected)
    assert summary.loc[(1, "neuron"), "silent"] == n_silent
    assert summary.loc[(1, "neuron"), "components"] == 37 - n_silent
    assert summary.loc[(0, "attention"), "silent"] == 0
    # The control: these neurons' gates alone would have changed most.
    caches = [side.run_with_cache(prompts)[1] for side in (model, grown.model)]
    gates = [cache["pre", 1][..., [3, 5, 7]] > 0 for cache in caches]
    assert (gates[0] != gates[1]).double().mean() > 0.1
    # A neuron that training activates is ranked first.
    with torch.no_grad():
        grown.model.blocks[1].mlp.b_in[13] = 0.5
    awake = compare(model, grown, by_loss(prompts), **QUICK)
    assert "L1N13" not in set(awake.silent["name"])
    assert awake.neurons.set_index("name")["divergence"].idxmax() == "L1N13"
    assert set(awake.silent["name"]) == set(expected) - {"L1N13"}


def test_a_layer_may_be_silent_throughout():
    model = bridges.boot("neox_sequential")
    with torch.no_grad():
        model.blocks[0].mlp.W_in.zero_()
        model.blocks[0].mlp.b_in.fill_(-1.0)
    comparison = compare(model, grow(model, d_mlp=41), by_loss(tokens()), **QUICK)
    assert len(comparison.silent.query("layer == 0")) == 37
    row = comparison.summary().set_index(["layer", "kind"]).loc[(0, "neuron")]
    assert (row["components"], row["silent"]) == (0, 37)
    assert np.isnan(row["divergence"])


def test_a_sink_is_an_outcome():
    """What a row of a pattern lacks to 1 is an outcome; rounding of half precision is none."""
    half = torch.tensor([[0.25, 0.25], [0.5, 0.0]], dtype=torch.float64)
    whole = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    three = np.array([[0.25, 0.25, 0.5], [0.5, 0.0, 0.5]])
    expected = jensenshannon(three, np.array([[0.5, 0.5, 0.0]] * 2), base=2, axis=-1) ** 2
    np.testing.assert_allclose(pattern_divergence(half, whole), expected, atol=1e-14)
    low = torch.tensor([[1 / 3, 2 / 3]]).bfloat16()  # its sum is 1 only up to rounding
    assert pattern_divergence(low, low.clone()).item() == 0
