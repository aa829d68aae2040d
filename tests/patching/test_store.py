"""Tests of chunks on disk, and of settings that reject another job's results."""

import numpy as np
import pytest
import torch

from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.storage.chunks import ChunkStore

SETTINGS = {"model": "abc", "metric": "kl", "sites": ["L0N1", "L0N2"], "prompts": [[1, 2], [1, 3]]}


def arrays(seed=0):
    numbers = np.random.default_rng(seed)
    return {
        "kept": numbers.normal(size=(3, 5)),
        "exact": numbers.normal(size=7) > 0,
        "block": numbers.integers(9, size=2),
        "empty": np.zeros((0, 2)),
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, strict=True)


def test_resumed(tmp_path):
    folder = tmp_path / "deep" / "sweep"
    store = ChunkStore(folder, SETTINGS)
    assert ChunkStore.settings_of(folder) == SETTINGS
    assert store.get("rows-0-3") is None
    store.put("rows-3-5", arrays(1))
    # The settings may come in another order later.
    again = ChunkStore(folder, dict(reversed(SETTINGS.items())))
    assert_same(again.get("rows-3-5"), arrays(1))
    again.put("rows-3-5", arrays(2))
    again.put("rows-0-3", arrays(3))
    assert_same(store.get("rows-3-5"), arrays(2))
    assert {path.name for path in folder.iterdir()} == {
        "settings.json",
        "rows-0-3.safetensors",
        "rows-3-5.safetensors",
    }


def test_other_settings_are_named(tmp_path):
    ChunkStore(tmp_path, SETTINGS)
    settings = {"model": "abd", "metric": "kl", "sites": ["L0N1"], "part": "z"}
    with pytest.raises(InputError, match="belongs to another job") as caught:
        ChunkStore(tmp_path, settings)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "model",
        "part",
        "prompts",
        "sites",
    ]
    assert 'model: got "abd"; the folder has "abc"' in caught.value.reasons


def test_chunks_of_another_job_and_damaged_ones_are_refused(tmp_path):
    foreign = ChunkStore(tmp_path / "theirs", SETTINGS | {"metric": "loss"})
    store = ChunkStore(tmp_path / "ours", SETTINGS)
    foreign.put("a", arrays())
    store.put("b", arrays())
    whole = store.path("b").read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for content, match in (
        (foreign.path("a").read_bytes(), "other settings"),
        (whole, "other key"),
        (whole[:-7], store.path("a").name),
        (flipped, store.path("a").name),
    ):
        store.path("a").write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            store.get("a")


def test_refused(tmp_path):
    for value in (torch.zeros(1), float("nan")):
        with pytest.raises(CheckpointError, match="cannot be written as JSON"):
            ChunkStore(tmp_path / "other", {"value": value})
    assert not list(tmp_path.glob("other/*"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match=r"holds \['thesis.tex'\]"):
        ChunkStore(tmp_path / "full", SETTINGS)


def test_settings_that_were_changed(tmp_path):
    path = tmp_path / "settings.json"
    ChunkStore(tmp_path, SETTINGS)
    whole = path.read_text()
    for text, reason in {
        whole.replace("L0N2", "L0N3"): "changed after it was written",
        whole.replace('"format_version": 1', '"format_version": 4'): "format version 4",
        whole[:-9]: "is not valid JSON",
    }.items():
        path.write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            ChunkStore(tmp_path, SETTINGS)
