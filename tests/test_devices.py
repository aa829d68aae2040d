"""Tests of everything public on a device that is not the CPU (`on_a_device.py`).

A device made in Python stays in its process, so that file runs in its own process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.both_versions

HERE = Path(__file__).parent


def test_on_a_simulated_device():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short"]
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
