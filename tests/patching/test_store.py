"""Parts on disk, and the fingerprints that keep sweeps of other models and settings out."""

import json

import pandas as pd
import pytest
import torch
from models import build
from random_sweeps import values

from attn_only_lens import Bilinear, CheckpointError, InputError, convert, expose_neuron_heads
from attn_only_lens.engine.fingerprint import _description, fingerprint
from attn_only_lens.patching.resume import PartStore

SETTINGS = {"model": "abc", "metric": "kl", "sites": ["L0N1", "L0N2"], "prompts": [[1, 2], [1, 3]]}


def test_resumed(tmp_path):
    folder = tmp_path / "deep" / "sweep"
    store = PartStore(folder, SETTINGS, 3)
    assert not store.has(0)
    parts = [values(seed) for seed in range(3)]
    for i in (2, 0):
        store.write(i, parts[i])
    # Later, with the settings in another order.
    again = PartStore(folder, dict(reversed(SETTINGS.items())), 3)
    assert [again.has(i) for i in range(3)] == [True, False, True]
    again.write(1, parts[1])
    again.write(0, parts[0])
    expected = pd.concat(parts, ignore_index=True)
    joined = pd.concat(again.read_all(), ignore_index=True)
    pd.testing.assert_frame_equal(joined, expected, check_exact=True)
    assert {each.name for each in folder.iterdir()} == {
        "settings.json",
        *(f"part-00000{i}.parquet" for i in range(3)),
    }


def test_other_settings_are_named(tmp_path):
    PartStore(tmp_path, SETTINGS, 2)
    other = {"model": "abd", "metric": "kl", "sites": ["L0N1"], "part": "z"}
    with pytest.raises(InputError, match="belongs to another sweep") as caught:
        PartStore(tmp_path, other, 2)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "model",
        "part",
        "prompts",
        "sites",
    ]
    assert 'model: got "abd"; the folder has "abc"' in caught.value.reasons


def test_a_part_of_another_sweep_is_refused(tmp_path):
    theirs = PartStore(tmp_path / "theirs", SETTINGS | {"metric": "loss"}, 2)
    ours = PartStore(tmp_path / "ours", SETTINGS, 2)
    theirs.write(0, values())
    ours.write(1, values())
    foreign = tmp_path / "ours" / "part-000000.parquet"
    foreign.write_bytes((tmp_path / "theirs" / "part-000000.parquet").read_bytes())
    with pytest.raises(CheckpointError, match="its settings differ"):
        ours.has(0)
    with pytest.raises(InputError, match="its settings differ"):
        list(ours.read_all())
    (tmp_path / "ours" / "part-000001.parquet").rename(foreign)
    with pytest.raises(CheckpointError, match="its part differ"):
        ours.has(0)
    values().to_parquet(foreign)
    with pytest.raises(CheckpointError, match="something else wrote it"):
        ours.has(0)


def test_damaged_parts_are_told_all_at_once(tmp_path):
    store = PartStore(tmp_path, SETTINGS, 3)
    for i in range(3):
        store.write(i, values(i))
    first, second = (tmp_path / f"part-00000{i}.parquet" for i in range(2))
    first.write_bytes(first.read_bytes()[:-7])
    broken = bytearray(second.read_bytes())
    broken[50] ^= 1
    second.write_bytes(broken)
    with pytest.raises(InputError, match="cannot be joined") as caught:
        list(store.read_all())
    for path, reason in zip((first, second), caught.value.reasons, strict=True):
        assert str(path) in reason
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.has(0)


def test_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no JSON"):
        PartStore(tmp_path / "other", {"model": torch.zeros(1)}, 2)
    with pytest.raises(CheckpointError, match="no JSON"):
        PartStore(tmp_path / "other", {"value": float("nan")}, 2)
    assert not (tmp_path / "other").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match=r"holds \['thesis.tex'\]"):
        PartStore(tmp_path / "full", SETTINGS, 2)


def test_settings_that_were_changed(tmp_path):
    path = tmp_path / "settings.json"
    PartStore(tmp_path, SETTINGS, 2)
    whole = path.read_text()
    for text, reason in {
        whole.replace("L0N2", "L0N3"): "changed after it was written",
        whole.replace("SweepSettings", "PartShop"): "has format 'attn_only_lens.PartShop'",
        whole.replace('"format_version": 1', '"format_version": 4'): "format version 4",
        whole[:-9]: "is no JSON",
        "[]": "has format 'list'",
        json.dumps({"settings": 3, "format": "", "sha256": ""}): "has format ''",
    }.items():
        path.write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            PartStore(tmp_path, SETTINGS, 2)


def test_an_interrupted_write_leaves_no_part(tmp_path, monkeypatch):
    import pyarrow.parquet

    store = PartStore(tmp_path, SETTINGS, 2)

    def interrupted(table, path, **how):
        path.write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pyarrow.parquet, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write(0, values())
    assert not store.has(0)
    assert [each.name for each in tmp_path.iterdir()] == ["settings.json"]


def test_fingerprint_rests_on_nothing_of_this_process():
    """Of a model built again it is the same, and no address of an object is in it."""
    for gate in ("exact", Bilinear()):
        model = build("silu")
        expose_neuron_heads(model, gate=gate)
        again = build("silu")
        expose_neuron_heads(again, gate=gate)
        assert fingerprint(model) == fingerprint(again)
        for each in (model, convert(build("silu"), gate=gate)):
            assert "0x" not in json.dumps(_description(each))


def test_fingerprint_tells_models_apart():
    model = build("gelu", dtype=torch.float32)
    seen = {fingerprint(model)}
    model.set_use_attn_result(True)
    assert fingerprint(model) in seen
    with torch.no_grad():
        model.blocks[2].mlp.W_out[36, 25].nextafter_(torch.tensor(9.0))
    seen.add(fingerprint(model))
    seen.add(fingerprint(model.to(torch.bfloat16)))
    seen.add(fingerprint(build("gelu", dtype=torch.float32, act_fn="relu")))
    seen.add(fingerprint(build("gelu", dtype=torch.float32, output_logits_soft_cap=3.0)))
    seen.add(fingerprint(convert(build("gelu", dtype=torch.float32))))
    for heads in (2, 4):
        approximate = convert(build("gelu"), gate=Bilinear(heads))
        seen.add(fingerprint(approximate))
        model = build("gelu")
        expose_neuron_heads(model, gate=Bilinear(heads))
        seen.add(fingerprint(model))
    assert len(seen) == 10


def test_fingerprint_tells_constants_of_modules_apart():
    """What a norm divides by need not be what the configuration says."""
    model = convert(build("gelu"))
    before = fingerprint(model)
    model.blocks[0].ln1.eps = 0.5
    assert fingerprint(model) != before
    model.blocks[0].ln1.eps = model.cfg.eps
    assert fingerprint(model) == before
    model.blocks[0].attn.attn_scale = 1.0
    assert fingerprint(model) != before


def test_a_sweep_that_is_not_whole_is_refused(tmp_path):
    """As where the folder of another process is not this one."""
    store = PartStore(tmp_path, SETTINGS, 4)
    for i in (0, 2):
        store.write(i, values(i))
    with pytest.raises(InputError, match="lacks 2 parts, such as 1:"):
        list(store.read_all())
    store = PartStore(tmp_path, SETTINGS, 1)
    assert len(next(store.read_all())) == len(values(0))
