"""Tests that the guide's recipe for many contrasts gives one process's results, and loses none."""

import importlib
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import dask
import distributed
import pandas as pd
import pytest
from examples import EXAMPLE
from test_pickles import require_equal

from attn_only_lens import Contrast
from attn_only_lens import patching as p

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787 is already in use")

SCALE = Path(__file__).parents[1] / "docs" / "scale.md"
FILE, MAP, MERGE = EXAMPLE.findall(SCALE.read_text("utf-8"))
# This follows the recipe's file: a worker is killed when it has analysed the deadly contrast.
DEADLY = """

import os, signal
from pathlib import Path

_analyse, _died = analyse, Path(__file__).with_suffix(".died")


def analyse(contrast):
    results = _analyse(contrast)
    if contrast.name == "deadly" and not _died.exists():
        _died.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return results
"""


@pytest.fixture
def _imported_workers(monkeypatch):
    """Let dask fork workers from a process that has imported the package, which takes seconds."""
    monkeypatch.setattr(distributed.utils, "_forkserver_preload_set", True, raising=False)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["distributed", "attn_only_lens.explanation"])
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield


@pytest.mark.usefixtures("_imported_workers")
def test_the_recipe_loses_nothing_if_a_worker_is_killed(tmp_path, monkeypatch, capsys):
    nouns, contrasts = ("key", "door", "book"), []
    metrics = p.logit_diff(" are", " is"), p.probability_diff([[" are", " were"]], [[" is"]])
    for i, (metric, start) in enumerate(zip(metrics, ("The", "Then the"), strict=True)):
        for noun in nouns:
            pair = f"{start} {noun}s", f"{start} {noun}"
            name = "deadly" if i == 1 and noun == "key" else ""  # the fourth: a worker's second
            contrasts.append(Contrast(*pair, metric, name=name))
    (tmp_path / "one_contrast.py").write_text(FILE + DEADLY)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"contrasts": contrasts}
    for number, block in enumerate((MAP, MERGE)):
        exec(compile(block, f"scale.md, example {number + 1}", "exec"), namespace)

    assert int((tmp_path / "one_contrast.died").read_text()) != os.getpid()
    alone = importlib.import_module("one_contrast").analyse
    monkeypatch.delitem(sys.modules, "one_contrast")
    expected = [alone(contrast) for contrast in contrasts]
    for (why, sweep), (expected_why, expected_sweep) in zip(
        namespace["results"], expected, strict=True
    ):
        require_equal(sweep, expected_sweep)
        require_equal(why, pickle.loads(pickle.dumps(expected_why)))
    effects = namespace["effects"]
    for i, (_, sweep) in enumerate(expected):
        rows = effects[effects["contrast"] == i].drop(columns="contrast").reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, sweep.frame, check_exact=True)
    assert capsys.readouterr().out.startswith("id\n")
