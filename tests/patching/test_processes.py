"""Processes that share a folder: the very same frame as of one, also if one of them dies."""

import heapq
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import bridges
import pandas as pd
import pytest
import torch
import transformers
from common import tokens

from attn_only_lens import InputError, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.replay import Replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.patching import claims, sweep_parts
from attn_only_lens.patching.claims import Claims
from attn_only_lens.patching.processes import is_first
from attn_only_lens.patching.resume import PartStore

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own
SWEEP = """
import torch
from attn_only_lens import expose_neuron_heads, patching as p, pretrained
from attn_only_lens.patching import sweep_parts

sweep_parts._PARTS, sweep_parts._LEAST = 5, 1
WORDS, WEIGHTS = {"some", "words", "in", "an", "order"}, torch.tensor([7, 8])

def measure(logits):  # identified by each process, with hashes of its own
    right, wrong = logits[0, -1, WEIGHTS]
    return right - wrong if "words" in WORDS else 0.0

def swept(resume=None, **options):
    return p.activation_patch(
        expose_neuron_heads(pretrained.modular_addition()).model, torch.tensor([3, 4, 113]),
        torch.tensor([3, 5, 113]), measure, batch_size=64, resume=resume, **options)
"""
DIES = f"""{SWEEP}
import os, signal, sys
from attn_only_lens.patching.resume import PartStore

def die(self, part, frame):
    if part:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, part, frame)

write, PartStore.write = PartStore.write, die
swept(sys.argv[1])
"""


def test_a_process_that_dies_leaves_its_parts_to_the_others(tmp_path, monkeypatch, capsys):
    for module, name in ((sweep_parts, "_PARTS"), (sweep_parts, "_LEAST")):
        monkeypatch.setattr(module, name, getattr(module, name))  # which the script sets
    script, parts = tmp_path / "script.py", tmp_path / "parts"
    script.write_text(DIES)
    settings = {"PYTHONPATH": str(Path(p.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    settings |= {"WORLD_SIZE": "2", "RANK": "1", "CUDA_VISIBLE_DEVICES": ""}
    errors = (tmp_path / "errors.txt").open("w+")
    with subprocess.Popen(
        [sys.executable, script, parts], env=os.environ | settings, stderr=errors
    ) as other:
        while not (parts / ".part-000001.claim-0").exists():
            assert other.poll() is None, Path(errors.name).read_text()
            time.sleep(0.05)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        here: dict = {}
        exec(SWEEP, here)
        together = here["swept"](parts).frame
        assert other.wait() < 0, Path(errors.name).read_text()
    assert not list(parts.glob(".part*"))
    # A bar of all sites, those of the other among them; of the process that reports.
    assert re.search(r"1548/1548.*site/s", capsys.readouterr().err)
    assert "site" not in Path(errors.name).read_text()
    monkeypatch.delenv("WORLD_SIZE")
    alone = here["swept"](progress=False).frame
    pd.testing.assert_frame_equal(together, alone, check_exact=True)


@pytest.mark.parametrize("positions", ["each", "all"])
def test_eight_processes_end_at_about_the_same_time(positions, tmp_path, monkeypatch):
    """By the flops of what each runs; whoever is free takes the next part."""
    monkeypatch.setattr(sweep_parts, "_LEAST", 1)
    for replay in (BridgeReplay, HookedReplay):
        monkeypatch.setattr(replay, "call_flops_on_cpu", 0)  # most of so small a model's
    values, frames = Replay.values, dict[int, pd.DataFrame]()
    running, costs = [0], []

    def counted(self, *variants):
        for each in variants:
            running[0] += each.stream.shape[:2].numel() * (self.flops_per_token(each.block) + 1)
        return values(self, *variants)

    def written(self, part, frame):
        frames[part] = frame  # in no file: these take longer than the parts
        costs.append(running[0])
        running[0] = 0

    config = transformers.GPT2Config(**bridges.GPT | {"n_layer": 3, "n_inner": 397})
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = expose_neuron_heads(bridges.bridged(source.eval())).model
    monkeypatch.setattr(Replay, "values", counted)
    monkeypatch.setattr(PartStore, "write", written)
    monkeypatch.setattr(
        PartStore, "read_all", lambda self, first: (frames[i] for i in sorted(frames))
    )
    clean, corrupted = tokens(1, batch=1, pos=8), tokens(2, batch=1, pos=8)
    options = {"positions": positions, "resume": tmp_path, "progress": False}
    p.activation_patch(model, clean, corrupted, p.logit_diff(3, 5), **options)
    busy = [0] * 8
    for cost in costs:
        heapq.heapreplace(busy, busy[0] + cost)
    assert sum(costs) / (8 * max(busy)) >= 0.9


def test_every_part_is_done_once_by_who_is_free(tmp_path):
    done, others = Counter(), Counter()
    written = set()
    store = [Claims(tmp_path, written.__contains__) for _ in range(3)]
    each = [one.todo(range(11), lambda part: others.update([part])) for one in store]
    at = [next(one) for one in each]
    assert len(set(at)) == 3
    for turn in (0, 1, 0, 0, 2, 1, 0, 0):  # the last of a process is written when it asks again
        written.add(at[turn])
        done[at[turn]] += 1
        at[turn] = next(each[turn])
    assert len(set(at)) == 3
    for part in at:
        written.add(part)
        done[part] += 1
    assert [next(one, None) for one in each] == [None] * 3
    assert done == Counter(range(11))
    assert others == Counter({part: 2 for part in range(11)})
    assert not list(tmp_path.iterdir())


def test_a_claim_is_dead_with_its_process_or_after_long_silence(tmp_path, monkeypatch):
    clock, later, found = [0.0], [], []
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: later.pop(0)())
    (tmp_path / ".part-000000.claim-0").write_text(f"{platform.node()} {2**22 + 7}")  # never runs
    (tmp_path / ".part-000001.claim-0").write_bytes(b"another machine \xff 7")
    (tmp_path / ".part-000002.claim-0").write_text(f"{platform.node()} {os.getpid()}")

    def touched():
        clock[0] += 50
        for part in (1, 2):
            os.utime(tmp_path / f".part-00000{part}.claim-0", (clock[0], clock[0]))

    def silent():
        clock[0] += 50

    later += [touched, touched, touched, silent, lambda: (silent(), found.append("silent"))]
    for part in Claims(tmp_path, found.__contains__).todo(range(3), lambda part: None):
        found.append(part)
    assert found == [0, "silent", 1, 2]
    assert not list(tmp_path.iterdir())


def test_an_error_gives_the_claim_back(tmp_path):
    def fail():
        with PartStore(tmp_path, {}, 2).todo(range(2), print) as todo:
            next(todo)
            raise ZeroDivisionError(len(list(tmp_path.glob(".part*"))))

    with pytest.raises(ZeroDivisionError, match="1"):
        fail()
    assert not list(tmp_path.glob(".part*"))


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
