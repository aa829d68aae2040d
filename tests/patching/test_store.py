"""Parts on disk, and the fingerprints that keep sweeps of other models and settings out."""

import json

import pandas as pd
import pytest
import torch
from models import build
from random_sweeps import values

from attn_only_lens import Bilinear, PatchingError, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.runs.identity import _described

SETTINGS = {"model": "abc", "metric": "kl", "sites": ["L0N1", "L0N2"], "prompts": [[1, 2], [1, 3]]}


def test_resumed(tmp_path):
    folder = tmp_path / "deep" / "sweep"
    store = p.PartStore(folder, SETTINGS)
    assert not store.has("0000")
    parts = [values(seed) for seed in range(3)]
    for i in (2, 0):
        store.write(f"{i:04d}", parts[i].assign(name=parts[i]["name"].astype("category")))
    # Later, with the settings in another order.
    again = p.PartStore(folder, dict(reversed(SETTINGS.items())))
    assert [again.has(f"{i:04d}") for i in range(3)] == [True, False, True]
    again.write("0001", parts[1])
    again.write("0000", parts[0])
    expected = pd.concat(parts, ignore_index=True)
    pd.testing.assert_frame_equal(again.read_all(), expected, check_exact=True)
    assert {each.name for each in folder.iterdir()} == {
        "settings.json",
        *(f"part-000{i}.parquet" for i in range(3)),
    }


def test_other_settings_are_named(tmp_path):
    p.PartStore(tmp_path, SETTINGS)
    other = {"model": "abd", "metric": "kl", "sites": ["L0N1"], "part": "z"}
    with pytest.raises(PatchingError, match="holds another sweep") as caught:
        p.PartStore(tmp_path, other)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "model",
        "part",
        "prompts",
        "sites",
    ]
    assert 'model: got "abd"; the folder has "abc"' in caught.value.reasons


def test_a_part_of_another_sweep_is_refused(tmp_path):
    theirs = p.PartStore(tmp_path / "theirs", SETTINGS | {"metric": "loss"})
    ours = p.PartStore(tmp_path / "ours", SETTINGS)
    theirs.write("0000", values())
    ours.write("0001", values())
    foreign = tmp_path / "ours" / "part-0000.parquet"
    foreign.write_bytes((tmp_path / "theirs" / "part-0000.parquet").read_bytes())
    for ask in (lambda: ours.has("0000"), ours.read_all):
        with pytest.raises(PatchingError, match="its settings differ"):
            ask()
    (tmp_path / "ours" / "part-0001.parquet").rename(foreign)
    with pytest.raises(PatchingError, match="its file differ"):
        ours.has("0000")
    values().to_parquet(foreign)
    with pytest.raises(PatchingError, match="something else wrote it"):
        ours.has("0000")


def test_damaged_parts_are_told_all_at_once(tmp_path):
    store = p.PartStore(tmp_path, SETTINGS)
    for i in range(3):
        store.write(str(i), values(i))
    first, second = (tmp_path / f"part-{i}.parquet" for i in range(2))
    first.write_bytes(first.read_bytes()[:-7])
    broken = bytearray(second.read_bytes())
    broken[50] ^= 1
    second.write_bytes(broken)
    with pytest.raises(PatchingError, match="cannot be joined") as caught:
        store.read_all()
    for path, reason in zip((first, second), caught.value.reasons, strict=True):
        assert str(path) in reason
    with pytest.raises(PatchingError, match="cannot be read"):
        store.has("0")


def test_refused(tmp_path):
    store = p.PartStore(tmp_path / "store", SETTINGS)
    with pytest.raises(PatchingError, match="holds no part yet"):
        store.read_all()
    for name in ("", "../up", "a/b", ".hidden", 3, "a b"):
        with pytest.raises(PatchingError, match="letters, digits"):
            store.write(name, values())
    store.write("0", values())
    store.write("1", values().drop(columns="value"))
    with pytest.raises(PatchingError, match=r"part-1\.parquet has columns"):
        store.read_all()
    with pytest.raises(PatchingError, match="no JSON"):
        p.PartStore(tmp_path / "other", {"model": torch.zeros(1)})
    with pytest.raises(PatchingError, match="no JSON"):
        p.PartStore(tmp_path / "other", {"value": float("nan")})
    assert not (tmp_path / "other").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years")
    with pytest.raises(PatchingError, match=r"holds \['thesis.tex'\]"):
        p.PartStore(tmp_path / "full", SETTINGS)


def test_settings_that_were_changed(tmp_path):
    path = tmp_path / "settings.json"
    p.PartStore(tmp_path, SETTINGS)
    whole = path.read_text()
    for text, reason in {
        whole.replace("L0N2", "L0N3"): "changed after it was written",
        whole.replace("PartStore", "PartShop"): "has format 'attn_only_lens.PartShop'",
        whole.replace('"format_version": 3', '"format_version": 4'): "format version 4",
        whole[:-9]: "is no JSON",
        "[]": "has format 'list'",
        json.dumps({"settings": 3, "format": "", "sha256": ""}): "has format ''",
    }.items():
        path.write_text(text)
        with pytest.raises(PatchingError, match=reason):
            p.PartStore(tmp_path, SETTINGS)


def test_an_interrupted_write_leaves_no_part(tmp_path, monkeypatch):
    import pyarrow.parquet

    store = p.PartStore(tmp_path, SETTINGS)

    def interrupted(table, path, **how):
        path.write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pyarrow.parquet, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write("0", values())
    assert not store.has("0")
    assert [each.name for each in tmp_path.iterdir()] == ["settings.json"]


def test_fingerprint_rests_on_nothing_of_this_process():
    """Of a model built again it is the same, and no address of an object is in it."""
    for gate in ("exact", Bilinear()):
        model = build("silu")
        expose_neuron_heads(model, gate=gate)
        again = build("silu")
        expose_neuron_heads(again, gate=gate)
        assert p.fingerprint(model) == p.fingerprint(again)
        for each in (model, convert(build("silu"), gate=gate)):
            assert "0x" not in json.dumps(_described(each))


def test_fingerprint_tells_models_apart():
    model = build("gelu", dtype=torch.float32)
    seen = {p.fingerprint(model)}
    model.set_use_attn_result(True)
    assert p.fingerprint(model) in seen
    with torch.no_grad():
        model.blocks[2].mlp.W_out[36, 25].nextafter_(torch.tensor(9.0))
    seen.add(p.fingerprint(model))
    seen.add(p.fingerprint(model.to(torch.bfloat16)))
    seen.add(p.fingerprint(build("gelu", dtype=torch.float32, act_fn="relu")))
    seen.add(p.fingerprint(build("gelu", dtype=torch.float32, output_logits_soft_cap=3.0)))
    seen.add(p.fingerprint(convert(build("gelu", dtype=torch.float32))))
    for heads in (2, 4):
        approximate = convert(build("gelu"), gate=Bilinear(heads))
        seen.add(p.fingerprint(approximate))
        model = build("gelu")
        expose_neuron_heads(model, gate=Bilinear(heads))
        seen.add(p.fingerprint(model))
    assert len(seen) == 10


def test_fingerprint_tells_constants_of_modules_apart():
    """What a norm divides by need not be what the configuration says."""
    model = convert(build("gelu"))
    before = p.fingerprint(model)
    model.blocks[0].ln1.eps = 0.5
    assert p.fingerprint(model) != before
    model.blocks[0].ln1.eps = model.cfg.eps
    assert p.fingerprint(model) == before
    model.blocks[0].attn.attn_scale = 1.0
    assert p.fingerprint(model) != before


def test_a_sweep_that_is_not_whole_is_refused(tmp_path):
    """As where the folder of another process is not this one."""
    store = p.PartStore(tmp_path, SETTINGS)
    for i in (0, 2):
        store.write(str(i), values(i))
    assert len(store.read_all(["0", "2"])) == len(store.read_all())
    with pytest.raises(PatchingError, match="lacks 2 parts, such as 1:"):
        store.read_all(["0", "1", "2", "3"])
