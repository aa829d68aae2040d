"""Tests of everything public on a device that is not the CPU (`on_a_device.py`).

A device made in Python stays in its process, so each part of that file runs in its own process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.both_versions

HERE = Path(__file__).parent
MODELS = "models_made or hooked_transformers_made or saved or training or shipped"


@pytest.mark.parametrize("part", [MODELS, f"not ({MODELS})"], ids=["models made", "the rest"])
def test_on_a_simulated_device(part):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-k", part]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(HERE / "on_a_device.py")],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
