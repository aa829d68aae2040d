"""Tests that processes sharing a job return one process's results, even after one has died."""

import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from common import in_threads

from attn_only_lens import Contrast, Work, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.patching import _activation_patch, site_groups
from attn_only_lens.storage import chunks
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens, and of a fork
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
]
METRIC = p.logit_diff(7, 8)


@pytest.fixture(scope="module")
def analysed():
    """Return a function that analyses a model in several chunks, with a folder for them or none."""
    model = expose_neuron_heads(load("modular-addition")).model
    prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
    sites, several = p.Sites(positions=-1), [x.repeat(3, 1) for x in prompts]

    def analyse(folder=None, *, analysis="sweep", metric=METRIC, share=True):
        if analysis == "sweep":
            work = Work(batch_size=64, resume=folder, share=share)
            return p.activation_patch(model, Contrast(*prompts, metric), sites=sites, work=work)
        work = Work(prompts_at_once=1, resume=folder, share=share)
        if analysis == "attribution":
            return p.attribution(model, Contrast(*several, metric), sites=sites, work=work)
        edges = p.Edges(p.Sites("heads"), "neurons", part="z")
        return p.path_patch(model, Contrast(*several, metric), edges, top=5, work=work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_groups, "_CHUNKS", 5)
        patch.setattr(site_groups, "_LEAST", 1)
        yield analyse


@pytest.fixture(scope="module")
def expected(analysed, tmp_path_factory):
    """Return the frame of one process whose job has the same chunks, so that its bits are equal."""
    frame = analysed(tmp_path_factory.mktemp("one process") / "chunks").frame
    # Without a folder, products have other sizes, which some processors round differently.
    whole = analysed().frame
    atol = LOGIT_TOLERANCE[torch.float32] * whole["value"].abs().max()
    pd.testing.assert_frame_equal(frame, whole, rtol=0, atol=atol)
    assert not dist.is_initialized()  # a single process makes no group
    return frame


def forked(run, errors):
    """Run a function in a process of its own; return its id."""
    if process := os.fork():
        return process
    code = 1
    try:
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


def together(tmp_path, *runs, seconds=60):
    """Run functions in one group of processes; return what each exits with and what it prints."""
    store = tmp_path / "store"
    store.unlink(missing_ok=True)

    def run_in_group(rank):
        options = {"timeout": timedelta(seconds=seconds), "init_method": f"file://{store}"}
        dist.init_process_group("gloo", rank=rank, world_size=len(runs), **options)
        runs[rank]()

    errors = [tmp_path / f"errors {rank}.txt" for rank in range(len(runs))]
    processes = [forked(lambda i=i: run_in_group(i), path) for i, path in enumerate(errors)]
    codes = [*map(exit_code, processes)]
    return codes, [path.read_text() for path in errors]


@pytest.mark.parametrize("analysis", ["attribution", "paths"])
def test_processes_need_no_folder(analysed, tmp_path, analysis):
    files = [tmp_path / f"{i}.csv" for i in range(3)]
    runs = [lambda path=path: analysed(analysis=analysis).save(path) for path in files]
    codes, errors = together(tmp_path, *runs)
    assert codes == [0, 0, 0], errors
    alone = analysed(analysis=analysis).frame
    for path in files:
        pd.testing.assert_frame_equal(load(path).frame, alone, check_exact=True)


def test_launched_processes_make_a_group_and_only_the_first_needs_the_folder(
    analysed, expected, tmp_path
):
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]

    def run(rank):
        os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun and `accelerate launch` set it
        compute, computed = _activation_patch.SitePatches.compute, []
        counted = lambda *args: (computed.append(args), compute(*args))[1]  # noqa: E731
        _activation_patch.SitePatches.compute = counted
        analysed(folders[rank]).save(files[rank])
        assert len(computed) == (3, 2)[rank]

    folders = tmp_path / "chunks", tmp_path / "not on this machine"
    files, errors = [[tmp_path / f"{i}.{end}" for i in range(2)] for end in ("csv", "txt")]
    processes = [forked(lambda i=i: run(i), errors[i]) for i in range(2)]
    codes, errors = list(map(exit_code, processes)), [path.read_text() for path in errors]
    assert codes == [0, 0], errors
    assert len(list(folders[0].glob("prompts-*"))) == 5
    assert not folders[1].exists()
    for path in files:
        pd.testing.assert_frame_equal(load(path).frame, expected, check_exact=True)
    # The reporting process shows a progress bar over all sites.
    assert "516/516" in errors[0]
    assert "site" not in errors[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_start_keeps_the_chunks_from_before_a_process_was_killed(
    analysed, expected, tmp_path, rank
):
    """The first process is killed while it writes its third chunk, the other in its second one."""
    folder = tmp_path / "chunks"

    def dies():
        written, computed = [], []
        write, compute = chunks.write_tensors, _activation_patch.SitePatches.compute

        def half(path, tensors, *args, **document):
            written.append(path)
            write(path, tensors, *args, **document)
            if len(written) == 3 and rank == 0:
                path.write_bytes(path.read_bytes()[:-7])
                die()

        def until_the_second(self, chunk):
            computed.append(chunk)
            return die() if len(computed) == 2 and rank == 1 else compute(self, chunk)

        chunks.write_tensors, _activation_patch.SitePatches.compute = half, until_the_second
        analysed(folder)

    runs = [dies if i == rank else lambda: analysed(folder) for i in range(2)]
    codes, errors = together(tmp_path, *runs)
    assert codes[rank] == -signal.SIGKILL, errors
    assert codes[1 - rank] == 1
    assert "InputError: the processes cannot share this work; start it again" in errors[1 - rank]
    assert len(list(folder.glob(".*"))) == (rank == 0)
    left = {path: path.stat().st_mtime_ns for path in folder.glob("prompts-*")}
    assert len(left) == 2
    if rank:
        frame = analysed(folder).frame
    else:
        file = tmp_path / "frame.csv"
        others = [lambda: analysed(tmp_path / "nothing")] * 2
        codes, errors = together(tmp_path, lambda: analysed(folder).save(file), *others)
        assert codes == [0, 0, 0], errors
        frame = load(file).frame
    pd.testing.assert_frame_equal(frame, expected, check_exact=True)
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_process_is_raised_in_all(analysed, tmp_path, rank):
    def fails():
        def compute(self, chunk):
            raise ZeroDivisionError("of this process")

        _activation_patch.SitePatches.compute = compute
        analysed()

    codes, errors = together(tmp_path, *[fails if i == rank else analysed for i in range(2)])
    assert codes == [1, 1]
    assert "ZeroDivisionError: of this process" in errors[rank]
    assert f"  - process {rank}: ZeroDivisionError: of this process" in errors[1 - rank]


def test_a_folder_of_another_job_is_refused_in_all_processes(analysed, tmp_path):
    folder = tmp_path / "chunks"
    chunks.ChunkStore(folder, {"metric": "another"})
    codes, errors = together(tmp_path, *[lambda: analysed(folder)] * 2)
    assert codes == [1, 1]
    assert all("belongs to another job" in text for text in errors)


def test_processes_that_run_other_jobs_are_refused(analysed, tmp_path):
    other = p.logit_diff(7, 9)
    codes, errors = together(tmp_path, analysed, lambda: analysed(metric=other))
    assert codes == [1, 1]
    for text in errors:
        assert "all processes must run the same job" in text
        assert '  - process 1: metric: got "logit_diff(7, 9)"; process 0 has "logit_d' in text


def test_a_process_waits_no_longer_than_the_timeout(analysed, tmp_path):
    def works_on_something_else():
        for _ in range(600):
            if "resume it:" in (tmp_path / "errors 0.txt").read_text():
                return
            time.sleep(0.1)

    codes, errors = together(tmp_path, analysed, works_on_something_else, seconds=3)
    assert codes == [1, 0]
    assert "did not answer within the group's timeout" in errors[0]


def test_processes_and_threads_that_know_nothing_of_each_other_share_a_folder(
    analysed, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "3")  # without WORLD_SIZE, it means nothing
    folder, file, errors = tmp_path / "chunks", tmp_path / "frame.csv", tmp_path / "errors.txt"
    process = forked(lambda: analysed(folder).save(file), errors)
    frames = [
        frame
        for (frame,) in in_threads(lambda folder: analysed(folder).frame, [folder, folder], times=1)
    ]
    assert exit_code(process) == 0, errors.read_text()
    for frame in (*frames, load(file).frame):
        pd.testing.assert_frame_equal(frame, expected, check_exact=True)
    assert len(list(folder.iterdir())) == 6  # the settings and five chunks


def test_processes_are_independent_unless_they_share(analysed, expected, tmp_path, monkeypatch):
    """Without `share`, no process waits for another, whatever started them."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # RANK and an address are missing, and so is torchrun
    pd.testing.assert_frame_equal(analysed(tmp_path / "1").frame, expected, check_exact=True)

    def alone():
        os.environ |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
        analysed(tmp_path / "2", share=False).save(tmp_path / "frame.csv")

    errors = tmp_path / "errors.txt"
    assert exit_code(forked(alone, errors)) == 0, errors.read_text()
    saved = load(tmp_path / "frame.csv").frame
    pd.testing.assert_frame_equal(saved, expected, check_exact=True)
