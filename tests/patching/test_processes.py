"""Tests that processes sharing a job return one process's results, even after one has died."""

import os
import signal
import sys
import traceback

import pandas as pd
import pytest
import torch
from common import in_threads

from attn_only_lens import Contrast, Work, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import job, site_groups
from attn_only_lens.storage import chunks
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens, and of a fork
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
]


@pytest.fixture(scope="module")
def swept():
    """Return a function that sweeps a model in five chunks, with a folder for them or none."""
    model = expose_neuron_heads(load("modular-addition")).model
    prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
    contrast, sites = Contrast(*prompts, p.logit_diff(7, 8)), p.Sites(positions=-1)

    def sweep(folder=None):
        work = Work(batch_size=64, resume=folder)
        return p.activation_patch(model, contrast, sites=sites, work=work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_groups, "_CHUNKS", 5)
        patch.setattr(site_groups, "_LEAST", 1)
        yield sweep


@pytest.fixture(scope="module")
def expected(swept, tmp_path_factory):
    """Return the frame of one process whose job has the same chunks, so that its bits are equal."""
    frame = swept(tmp_path_factory.mktemp("one process") / "chunks").frame
    # Without a folder, products have other sizes, which some processors round differently.
    whole = swept().frame
    atol = LOGIT_TOLERANCE[torch.float32] * whole["value"].abs().max()
    pd.testing.assert_frame_equal(frame, whole, rtol=0, atol=atol)
    return frame


def forked(run, errors, index=0, n=1):
    """Run a function in a process of its own, the one with this index of n; return its id."""
    if process := os.fork():
        return process
    code = 1
    try:
        os.environ |= {"WORLD_SIZE": str(n), "RANK": str(index)}
        sys.stderr = errors.open("w", buffering=1)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_processes_have_the_frame_of_one(swept, expected, tmp_path):
    folder, files = tmp_path / "chunks", [tmp_path / f"{i}.csv" for i in range(2)]
    errors = [tmp_path / f"{i}.txt" for i in range(2)]
    processes = [
        forked(lambda i=i: swept(folder).save(files[i]), errors[i], index=i, n=2) for i in range(2)
    ]
    codes, errors = list(map(exit_code, processes)), [path.read_text() for path in errors]
    assert codes == [0, 0], errors
    assert len(list(folder.glob("prompts-*"))) == 5
    for path in files:
        pd.testing.assert_frame_equal(load(path).frame, expected, check_exact=True)
    # The reporting process shows a progress bar over all sites.
    assert "516/516" in errors[0]
    assert "site" not in errors[1]


def test_the_next_start_takes_over_the_shares_of_processes_that_were_killed(
    swept, expected, tmp_path
):
    """One is killed after it has written a chunk, the other one while it writes its second."""
    folder, written = tmp_path / "chunks", []
    put, write = chunks.ChunkStore.put, chunks.write_tensors

    def die_after_a_chunk():
        chunks.ChunkStore.put = lambda self, *chunk: (put(self, *chunk), die())
        swept(folder)

    def die_within_the_second():
        def half(path, tensors, *args, **document):
            written.append(path)
            write(path, tensors, *args, **document)
            if len(written) == 2:
                path.write_bytes(path.read_bytes()[:-7])
                die()

        chunks.write_tensors = half
        swept(folder)

    for index, run in enumerate((die_after_a_chunk, die_within_the_second)):
        errors = tmp_path / f"{index}.txt"
        assert exit_code(forked(run, errors, index, n=2)) == -signal.SIGKILL, errors.read_text()
    (hidden,) = folder.glob(".*")
    assert (hidden / "new").is_file()
    left = {path: path.stat().st_mtime_ns for path in folder.glob("prompts-*")}
    assert len(left) == 2
    together = swept(folder).frame
    pd.testing.assert_frame_equal(together, expected, check_exact=True)
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())
    assert not list(folder.glob(".*"))


def test_processes_and_threads_that_know_nothing_of_each_other_share_a_folder(
    swept, expected, tmp_path
):
    folder, file, errors = tmp_path / "chunks", tmp_path / "frame.csv", tmp_path / "errors.txt"
    process = forked(lambda: swept(folder).save(file), errors)
    frames = [
        frame
        for (frame,) in in_threads(lambda folder: swept(folder).frame, [folder, folder], times=1)
    ]
    assert exit_code(process) == 0, errors.read_text()
    for frame in (*frames, load(file).frame):
        pd.testing.assert_frame_equal(frame, expected, check_exact=True)
    assert len(list(folder.iterdir())) == 6  # the settings and five chunks


def test_a_chunk_that_nobody_writes_ends_the_wait(swept, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_PATIENCE", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="2 processes were launched"):
        swept()  # without a folder
    with pytest.raises(InputError, match="another process died"):
        swept(tmp_path / "chunks")
    # A process started alone computes the missing chunks; RANK without WORLD_SIZE is ignored.
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "3")
    pd.testing.assert_frame_equal(swept(tmp_path / "chunks").frame, expected, check_exact=True)
