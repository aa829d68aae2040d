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
from common import in_threads

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import job, site_groups
from attn_only_lens.patching.job import is_first
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
SWEEP = """
import sys
import torch
from attn_only_lens import Contrast, Work, expose_neuron_heads, patching as p, pretrained
from attn_only_lens.patching import site_groups

site_groups._CHUNKS, site_groups._LEAST = 5, 1

def swept(resume=None):
    model = expose_neuron_heads(pretrained.modular_addition()).model
    prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
    contrast = Contrast(*prompts, p.logit_diff(7, 8))
    return p.activation_patch(model, contrast, work=Work(batch_size=64, resume=resume))
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
    if len(written) == 2:
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


@pytest.fixture(scope="module")
def swept():
    """Return the script's function, which runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_CHUNKS", "_LEAST"):
            patch.setattr(site_groups, name, getattr(site_groups, name))  # the script sets it
        here = {}
        exec(SWEEP, here)
        yield here["swept"]


@pytest.fixture(scope="module")
def expected(swept, tmp_path_factory):
    """Return the frame of one process whose job has the same chunks, so that its bits are equal."""
    frame = swept(tmp_path_factory.mktemp("one process") / "chunks").frame
    # Without a folder, products have other sizes, which some processors round differently.
    whole = swept().frame
    atol = LOGIT_TOLERANCE[torch.float32] * whole["value"].abs().max()
    pd.testing.assert_frame_equal(frame, whole, rtol=0, atol=atol)
    return frame


def test_two_processes_have_the_frame_of_one(expected, tmp_path):
    chunks, files = tmp_path / "chunks", [tmp_path / f"{i}.parquet" for i in range(2)]
    processes = [start(RUNS, chunks, files[i], index=i, n=2) for i in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(list(chunks.glob("prompts-*"))) == 5
    for path in files:
        pd.testing.assert_frame_equal(p.Sweep.load(path).frame, expected, check_exact=True)
    # The reporting process shows a progress bar over all sites.
    assert "1548/1548" in errors[0]
    assert "site" not in errors[1]


def test_the_next_start_takes_over_the_shares_of_processes_that_were_killed(
    swept, expected, tmp_path
):
    """One is killed after it has written a chunk, the other one while it writes its second."""
    chunks = tmp_path / "chunks"
    for index, script in enumerate((DIES, HALF_WRITTEN)):
        process = start(script, chunks, index=index, n=2)
        errors = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, errors
    (hidden,) = chunks.glob(".*")
    assert (hidden / "new").is_file()
    left = {path: path.stat().st_mtime_ns for path in chunks.glob("prompts-*")}
    assert len(left) == 2
    together = swept(chunks).frame
    pd.testing.assert_frame_equal(together, expected, check_exact=True)
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())
    assert not list(chunks.glob(".*"))


def test_processes_and_threads_that_know_nothing_of_each_other_share_a_folder(
    swept, expected, tmp_path
):
    chunks, file = tmp_path / "chunks", tmp_path / "frame.parquet"
    process = start(RUNS, chunks, file)
    frames = [frame for (frame,) in in_threads(
        lambda folder: swept(folder).frame, [chunks, chunks], times=1
    )]  # fmt: skip
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    for frame in (*frames, p.Sweep.load(file).frame):
        pd.testing.assert_frame_equal(frame, expected, check_exact=True)
    assert len(list(chunks.iterdir())) == 6  # the settings and five chunks


def test_processes_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    contrast = Contrast(torch.tensor([3, 4]), torch.tensor([3, 5]), p.logit_diff(1, 2))
    with pytest.raises(InputError, match="2 processes were launched"):
        p.activation_patch(model, contrast)


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
