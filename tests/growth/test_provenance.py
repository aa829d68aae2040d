"""Tests of provenance: where old parts of a grown model are, and its files."""

import pytest
import torch
import yaml
from bridges import boot, exposed_copy
from growing import native
from sealed_files import rewrite

from attn_only_lens import grow, growth, load
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.weights import identity_of
from attn_only_lens.growth.models._grow import identity
from attn_only_lens.growth.models.grown_folder import read_provenance


def test_names():
    steps = compose(
        growth.InsertLayer(1),
        growth.AddNeurons(5),
        growth.WidenStream(3),
        growth.AddHeads(2),
        growth.InsertLayer(0),
    )
    provenance = grow(native(n_layers=3), steps).provenance
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
    for unknown in ("L3", "L0N37", "L0H2", "N5", 7):
        with pytest.raises(InputError):
            provenance[unknown]
    with pytest.raises(InputError):
        provenance.old_of("L0N42")
    frame = provenance.to_frame()
    assert list(frame.columns) == ["name", "kind", "old", "is_new"]
    assert len(frame) == 5 + 5 * 4 + 5 * 42
    assert frame.is_new.sum() == 2 + (2 * 4 + 3 * 2) + (2 * 42 + 3 * 5)
    row = frame.set_index("name").loc["L3N7"]
    assert (row.kind, row.old, row.is_new) == ("neuron", "L1N7", False)
    assert frame.old.isna().equals(frame.is_new)


def test_a_bias_of_zeros_that_one_version_adds_is_no_difference():
    tensors = {"unembed.W_U": torch.arange(6.0).reshape(2, 3)}
    identity, longer = identity_of(tensors), identity_of(tensors | {"unembed.b_U": torch.zeros(3)})
    assert identity.differences(longer) == longer.differences(identity) == []
    changed = identity_of(tensors | {"unembed.b_U": torch.ones(3)})
    assert identity.differences(changed) == changed.differences(identity) == ["unembed.b_U"]


def test_identity_is_that_of_the_weights_in_any_form():
    model = native()
    source = grow(model, d_mlp=41).provenance.source
    for same in (model, native(dtype=torch.float32), exposed_copy(native())):
        assert source.differences(identity(same)) == []
    model.original_model.tok_embed.weight.data[0] += 0.01
    assert source.differences(identity(model)) == ["embed.W_E"]
    assert identity(torch.nn.Linear(2, 3)).marks.keys() == {"weight", "bias"}  # cannot be grown
    with pytest.raises(InputError, match="expected a model"):
        identity("gpt2")


@pytest.mark.parametrize("init", [growth.init.cancelling(0.5), growth.init.splits(0.3, 0.7)])
def test_files(init, tmp_path):
    steps = (
        growth.AddNeurons(5),
        growth.AddHeads(2),
        growth.InsertLayer(1),
        growth.AddHeads(4, into_groups=True),
    )
    model = boot("granite", torch.float32)
    grown = grow(model, [*steps], init=init)
    folder = grown.save_pretrained(tmp_path / "grown")
    assert load(folder / "provenance.json") == grown.provenance
    card = (folder / "README.md").read_text("utf-8")
    assert {"library_name", "tags"} <= yaml.safe_load(card.split("---\n")[1]).keys()
    assert "| layers | 2 | 3 |" in card
    (folder / "README.md").write_text("An edited card.", encoding="utf-8")
    grown.save_pretrained(folder)
    assert (folder / "README.md").read_text("utf-8") == "An edited card."
    rewrite(folder / "provenance.json", provenance={"layers": {}})
    with pytest.raises(CheckpointError, match=r"cannot be used: .*provenance\.axes is missing"):
        load(folder / "provenance.json")
    rewrite(folder / "provenance.json", provenance={"layers": [[0, 10**12]]})
    with pytest.raises(CheckpointError, match="lists more than"):
        load(folder / "provenance.json")
    with pytest.raises(CheckpointError, match="this model has no provenance"):
        read_provenance(tmp_path / "provenance.json")
