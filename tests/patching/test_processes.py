"""Tests that processes sharing a job return one process's results, even after one has died."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from common import in_threads, tokens

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.replay import Replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.errors import InputError
from attn_only_lens.patching import job, site_groups
from attn_only_lens.patching.job import _share, is_first
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
SWEEP = """
import sys
import torch
from attn_only_lens import expose_neuron_heads, patching as p, pretrained
from attn_only_lens.patching import site_groups

site_groups._CHUNKS, site_groups._LEAST = 5, 1

def swept(resume=None, **options):
    return p.activation_patch(
        expose_neuron_heads(pretrained.modular_addition()).model, torch.tensor([3, 4, 113]),
        torch.tensor([3, 5, 113]), p.logit_diff(7, 8), batch_size=64, resume=resume,
        **options)
"""
RUNS = f"{SWEEP}\nswept(sys.argv[1]).save(sys.argv[2])"
DIES = f"""{SWEEP}
import os, signal
from attn_only_lens.storage.chunks import ChunkStore

def die(self, key, arrays):
    put(self, key, arrays)
    os.kill(os.getpid(), signal.SIGKILL)

put, ChunkStore.put = ChunkStore.put, die
swept(sys.argv[1])
"""
HALF_WRITTEN = f"""{SWEEP}
import os, signal
from attn_only_lens.storage import chunks

def die(path, tensors, *args, **document):
    written.append(path)
    write(path, tensors, *args, **document)
    if len(written) == 3:
        path.write_bytes(path.read_bytes()[:-7])
        os.kill(os.getpid(), signal.SIGKILL)

written, write, chunks.write_tensors = [], chunks.write_tensors, die
swept(sys.argv[1])
"""


def start(script, *args, index=0, n=1):
    path = Path(args[0]).parent / f"script-{index}-{n}.py"
    path.write_text(script)
    settings = {"PYTHONPATH": str(Path(p.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    settings |= {"WORLD_SIZE": str(n), "RANK": str(index), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, path, *args]
    return subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def alone(monkeypatch):
    for name in ("_CHUNKS", "_LEAST"):
        monkeypatch.setattr(site_groups, name, getattr(site_groups, name))  # the script sets it
    here = {}
    exec(SWEEP, here)
    return here["swept"]


def of_one_process(alone, tmp_path):
    """Return the frame of one process whose job has the same chunks, so that its bits are equal."""
    frame = alone(tmp_path / "one process", progress=False).frame
    # Without a folder, products have other sizes, which some processors round differently.
    whole = alone(progress=False).frame
    atol = LOGIT_TOLERANCE[torch.float32] * whole["value"].abs().max()
    pd.testing.assert_frame_equal(frame, whole, rtol=0, atol=atol)
    return frame


def test_two_processes_have_the_frame_of_one(alone, tmp_path):
    chunks, files = tmp_path / "chunks", [tmp_path / f"{i}.parquet" for i in range(2)]
    processes = [start(RUNS, chunks, files[i], index=i, n=2) for i in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(list(chunks.glob("prompts-*"))) == 5
    expected = of_one_process(alone, tmp_path)
    for path in files:
        pd.testing.assert_frame_equal(p.Sweep.load(path).frame, expected, check_exact=True)
    # The reporting process shows a progress bar over all sites.
    assert "1548/1548" in errors[0]
    assert "site" not in errors[1]


def test_the_next_start_takes_over_the_share_of_a_process_that_died(alone, tmp_path):
    chunks = tmp_path / "chunks"
    for index in range(2):
        process = start(DIES, chunks, index=index, n=2)
        errors = process.communicate()[1]
        assert process.returncode < 0, errors
    left = {path: path.stat().st_mtime_ns for path in chunks.glob("prompts-*")}
    assert len(left) == 2
    together = alone(chunks, progress=False).frame
    pd.testing.assert_frame_equal(together, of_one_process(alone, tmp_path), check_exact=True)
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())


def test_a_process_killed_while_it_writes_a_chunk(alone, tmp_path):
    chunks = tmp_path / "chunks"
    process = start(HALF_WRITTEN, chunks)
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors
    (hidden,) = chunks.glob(".*")
    assert (hidden / "new").is_file()
    left = {path: path.stat().st_mtime_ns for path in chunks.glob("prompts-*")}
    assert len(left) == 2
    resumed = alone(chunks, progress=False).frame
    pd.testing.assert_frame_equal(resumed, of_one_process(alone, tmp_path), check_exact=True)
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())
    assert not list(chunks.glob(".*"))


def test_processes_and_threads_that_know_nothing_of_each_other_share_a_folder(alone, tmp_path):
    chunks, files = tmp_path / "chunks", [tmp_path / f"{i}.parquet" for i in range(2)]
    processes = [start(RUNS, chunks, file, index=i) for i, file in enumerate(files)]
    frames = [frame for (frame,) in in_threads(
        lambda folder: alone(folder, progress=False).frame, [chunks, chunks], times=1
    )]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    expected = of_one_process(alone, tmp_path)
    for frame in (*frames, *(p.Sweep.load(path).frame for path in files)):
        pd.testing.assert_frame_equal(frame, expected, check_exact=True)
    assert len(list(chunks.iterdir())) == 6  # the settings and five chunks


@pytest.mark.parametrize("positions", ["each", "all"])
def test_eight_processes_end_at_about_the_same_time(positions, tmp_path, monkeypatch):
    """Each process gets about the same number of flops."""
    monkeypatch.setattr(site_groups, "_LEAST", 1)
    for replay in (BridgeReplay, HookedReplay):
        monkeypatch.setattr(replay, "call_flops_on_cpu", 0)  # too much for so small a model
    values, put = Replay.values, ChunkStore.put
    running, costs = [0], []

    def counted(self, *variants):
        for variant in variants:
            tokens_run = variant.stream.shape[:2].numel()
            running[0] += tokens_run * (self.flops_per_token(variant.block) + 1)
        return values(self, *variants)

    def written(self, key, arrays):
        put(self, key, arrays)
        costs.append(running[0])
        running[0] = 0

    config = transformers.GPT2Config(**bridges.GPT | {"n_layer": 3, "n_inner": 397})
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = expose_neuron_heads(bridges.bridged(source.eval())).model
    monkeypatch.setattr(Replay, "values", counted)
    monkeypatch.setattr(ChunkStore, "put", written)
    clean, corrupted = tokens(1, batch=1, pos=8), tokens(2, batch=1, pos=8)
    options = {"positions": positions, "resume": tmp_path, "progress": False}
    p.activation_patch(model, clean, corrupted, p.logit_diff(3, 5), **options)
    monkeypatch.setenv("WORLD_SIZE", "8")
    shares = []
    for index in range(8):
        monkeypatch.setenv("RANK", str(index))
        shares.append(_share(costs))
    assert sorted(cost for share in shares for cost in share) == sorted(costs)
    assert sum(costs) / (8 * max(map(sum, shares))) >= 0.9


def test_processes_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    with pytest.raises(InputError, match="2 processes were launched"):
        p.activation_patch(model, torch.tensor([3, 4]), torch.tensor([3, 5]), p.logit_diff(1, 2))


def test_the_first_process_reports(monkeypatch):
    assert is_first()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not is_first()


def test_a_chunk_that_nobody_writes_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_PATIENCE", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    chunks = [One("a"), One("b")]
    waiting = job.Job(tmp_path, dict, progress=False).run(chunks, numbers, unit="site")
    assert next(waiting)[0].key == "a"
    with pytest.raises(InputError, match=r"lacks b: .*another process died"):
        next(waiting)
    # A process started alone computes the missing chunks; RANK without WORLD_SIZE is ignored.
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "3")
    again = job.Job(tmp_path, dict, progress=False).run(chunks, numbers, unit="site")
    assert [chunk.key for chunk, _ in again] == ["a", "b"]


class One(NamedTuple):
    key: str
    size: int = 1


def numbers(chunk):
    return {"n": np.array([len(chunk.key)])}
