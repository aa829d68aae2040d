"""Two processes on one sweep, as `accelerate launch` starts them: the very same frame as one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from attn_only_lens import InputError
from attn_only_lens import patching as p
from attn_only_lens.patching.processes import Processes

SWEEP = """
import torch
from attn_only_lens import expose_neuron_heads, patching as p, pretrained

WORDS, WEIGHTS = {"some", "words", "in", "an", "order"}, torch.tensor([7, 8])

def measure(logits):  # identified by each process, with hashes of its own
    right, wrong = logits[0, -1, WEIGHTS]
    return right - wrong if "words" in WORDS else 0.0

def swept(resume=None):
    return p.activation_patch(
        expose_neuron_heads(pretrained.modular_addition()).model, torch.tensor([3, 4, 113]),
        torch.tensor([3, 5, 113]), measure, batch_size=64, resume=resume)
"""
SCRIPT = f"""{SWEEP}
import sys
from attn_only_lens.patching.processes import is_first

found = swept(sys.argv[1])
if is_first():
    found.save(sys.argv[2])
"""


def run(arguments, folder):
    package = Path(p.__file__).parents[2]
    settings = {
        "PYTHONPATH": str(package),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),  # accelerate looks there for settings of the user's
    }
    found = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found


def launch(*arguments):
    """What a user types. Told so, accelerate starts several processes on CPUs too; `--cpu`, one."""
    command = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    return [*command, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", *arguments]


def test_two_processes_give_the_frame_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parts, saved = tmp_path / "parts", tmp_path / "saved.parquet"
    found = run(launch(script, parts, saved), tmp_path)
    alone: dict = {}
    exec(SWEEP, alone)
    pd.testing.assert_frame_equal(p.Sweep.load(saved).frame, alone["swept"]().frame)
    # One bar, of the share of the process that reports: of 6 groups, every second.
    assert "site/s" in found.stderr
    bars = {
        line.strip().split(":")[0] for line in re.split(r"[\r\n]", found.stderr) if "site/s" in line
    }
    assert bars == {"process 1 of 2"}
    assert "/1548" not in found.stderr


def test_processes_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes were launched"):
        Processes(None)


def test_one_process_does_everything(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Processes(None)
    assert (alone.first, alone.count, alone.share(range(5))) == (True, 1, [0, 1, 2, 3, 4])
    alone.wait()


def test_work_is_dealt_out_once():
    found = []
    for index in range(3):
        one = Processes(None)
        one.index, one.count = index, 3
        found.append(one.share(range(7)))
    assert found == [[0, 3, 6], [1, 4], [2, 5]]
