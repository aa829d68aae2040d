"""Tests of provenance: where old parts of a grown model are, composition, and files."""

import pytest
import torch
import yaml
from growing import all_steps
from models import build
from sealed_files import rewrite

from attn_only_lens import expansion as ex
from attn_only_lens import grow
from attn_only_lens.errors import CheckpointError, UnknownHeadError
from attn_only_lens.expansion.provenance import IndexMap, TensorMap
from attn_only_lens.expansion.weights import identity_of
from attn_only_lens.growth import read, read_provenance


@pytest.fixture(scope="module")
def grown():
    steps = ex.compose(
        ex.InsertLayer(1), ex.AddNeurons(5), ex.WidenStream(3), ex.AddHeads(2), ex.InsertLayer(0)
    )
    return grow(build("gelu"), steps)


def test_names(grown):
    provenance = grown.provenance
    assert [provenance[f"L{layer}"] for layer in range(3)] == ["L1", "L3", "L4"]
    assert (provenance["L0N17"], provenance["L1H1"]) == ("L1N17", "L3H1")
    assert provenance.old_of("L3H1") == "L1H1"
    assert provenance.old_of("L4") == "L2"
    assert provenance.old_of("L4N36") == "L2N36"
    for new in ("L0", "L2", "L0H0", "L2N3", "L3N37", "L3N41", "L3H2"):
        assert provenance.old_of(new) is None
    assert provenance.new_layers == ("L0", "L2")
    assert len(provenance.new_neurons) == 2 * 42 + 3 * 5
    assert len(provenance.new_heads) == 2 * 4 + 3 * 2
    assert provenance.coordinates == tuple(range(26))
    assert provenance.name("blocks.1.mlp.W_in") == "blocks.3.mlp.W_in"
    assert provenance.old_name("blocks.2.mlp.W_in") is None
    assert provenance.source_of("blocks.2.mlp.W_in") == "blocks.0.mlp.W_in"
    assert provenance.source_of("blocks.3.mlp.W_in") == "blocks.1.mlp.W_in"


@pytest.mark.parametrize("name", ["L3", "L0N37", "L0H2", "L5N0", "N5", "L", "L-1", 7, "L01"])
def test_unknown_names(grown, name):
    with pytest.raises(UnknownHeadError):
        grown.provenance[name]


@pytest.mark.parametrize("name", ["L5", "L0N42", "L0H4", "L5N0", "x"])
def test_unknown_names_of_the_grown_model(grown, name):
    with pytest.raises(UnknownHeadError):
        grown.provenance.old_of(name)


def test_frame(grown):
    frame = grown.provenance.to_frame()
    assert list(frame.columns) == ["name", "kind", "old", "is_new"]
    assert len(frame) == 5 + 5 * 4 + 5 * 42
    assert frame.is_new.sum() == 2 + (2 * 4 + 3 * 2) + (2 * 42 + 3 * 5)
    row = frame.set_index("name").loc["L3N7"]
    assert (row.kind, row.old, row.is_new) == ("neuron", "L1N7", False)
    assert frame.old.isna().equals(frame.is_new)


@pytest.mark.parametrize("family", ["gelu", "grouped", "inverse_layer"])
def test_two_growths_compose(family):
    """Growing twice gives the provenance and weights of both growth steps at once."""
    model = build(family)
    weights = read(model)
    first = all_steps(model)
    second = all_steps(model, ("layer", "stream", "width", "heads", "neurons"))
    once, a = first(weights)
    twice, b = second(once)
    both, c = ex.compose(first, second)(weights)
    assert a.then(b) == c
    assert all(torch.equal(twice.tensors[name], both.tensors[name]) for name in both.tensors)
    assert twice.constants == both.constants
    for name in weights.tensors:
        moved = c.tensor_map(name)
        assert moved.shape == tuple(both.tensors[moved.name].shape)
        part = moved.old_part(both.tensors[moved.name])
        if not c.centred:
            assert torch.allclose(part, weights.tensors[name] * moved.scale, rtol=1e-14)
        assert torch.equal(moved.old_part(moved.put(part, torch.zeros(moved.shape).double())), part)
    for zeros in c.zeros:
        entries = zeros.entries(both.tensors[zeros.name])
        assert entries.numel()
        assert not entries.any()


def test_moved_indices_in_the_middle():
    moved = TensorMap("x", (IndexMap((0, 2), 3), IndexMap((1,), 2)))
    old = torch.tensor([[5.0], [7.0]])
    new = moved.put(old, torch.zeros(3, 2))
    assert new.tolist() == [[0, 5], [0, 0], [0, 7]]
    assert torch.equal(moved.old_part(new), old)
    place = IndexMap((0, 2), 3).then(IndexMap((1, 2, 4), 5))
    assert (place.new_of, place.added, place.old_of) == ((1, 4), (0, 2, 3), {1: 0, 4: 1})


def test_a_bias_of_zeros_that_one_version_adds_is_no_difference():
    tensors = {"unembed.W_U": torch.arange(6.0).reshape(2, 3)}
    identity, longer = identity_of(tensors), identity_of(tensors | {"unembed.b_U": torch.zeros(3)})
    assert identity.differences(longer) == longer.differences(identity) == []
    changed = identity_of(tensors | {"unembed.b_U": torch.ones(3)})
    assert identity.differences(changed) == changed.differences(identity) == ["unembed.b_U"]


@pytest.mark.parametrize("family", ["gelu", "local", "llama"])
def test_files(family, tmp_path):
    model = build(family)
    grown = grow(model, ex.compose(all_steps(model), ex.AddHeads(4 * 3, into_groups=True)))
    folder = grown.save_pretrained(tmp_path / "grown")
    assert read_provenance(folder) == grown.provenance
    card = (folder / "README.md").read_text("utf-8")
    n_parameters = sum(parameter.numel() for parameter in grown.model.parameters())
    assert {"library_name", "tags"} <= yaml.safe_load(card.split("---\n")[1]).keys()
    assert f"| layers | {model.cfg.n_layers} | {grown.model.cfg.n_layers} |" in card
    assert f"{n_parameters:,} parameters" in card
    (folder / "README.md").write_text("An edited card.", encoding="utf-8")
    grown.save_pretrained(folder)
    assert (folder / "README.md").read_text("utf-8") == "An edited card."
    rewrite(folder / "provenance.json", provenance={"layers": {}})
    with pytest.raises(CheckpointError, match=r"cannot be used: .*provenance\.axes is missing"):
        read_provenance(folder)
    with pytest.raises(CheckpointError, match="this model has no provenance"):
        read_provenance(tmp_path)
