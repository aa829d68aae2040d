"""Tests of the locks, which say what tests run with, and of the report that compares with them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from newest import OWN
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # since Python 3.11
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = {"hooked": ("hooked", "dev", "docs", "parquet", "viz")}
EXTRAS["bridge"] = ("bridge", "dev", "parquet", "viz")
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def locked(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.10", "3.13"])
@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_one_version_that_the_ranges_allow(name, python):
    here = {"python_version": python, "python_full_version": f"{python}.1"}
    here |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    pins = [r for r in locked(name) if r.marker is None or r.marker.evaluate(here)]
    assert all(re.fullmatch(r"==[\w.!+]+", str(pin.specifier)) and not pin.url for pin in pins)
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    assert len(versions) == len(pins)
    assert not any(OF_TORCH.fullmatch(pin) for pin in versions)  # TORCH= chooses it
    ours, build = PROJECT["project"], PROJECT["build-system"]["requires"]
    of_extras = [line for extra in EXTRAS[name] for line in ours["optional-dependencies"][extra]]
    for line in [*ours["dependencies"], *build, *of_extras]:
        needed = Requirement(line)
        if canonicalize_name(needed.name) not in ("torch", ours["name"]):
            assert versions[canonicalize_name(needed.name)] in needed.specifier, line


LOUD = (
    "import warnings\ndef warn(): warnings.warn('loud', FutureWarning)\ndef fail(): raise OSError\n"
)
TESTS = """
import warnings, loud
def test_warns(): loud.warn()
def test_fails(): loud.fail()
def test_our_warning(): warnings.warn('ours')
def test_wrong(): assert loud.warn()
"""


def test_the_report_names_the_package(tmp_path):
    for path, text in {
        "site-packages/loud.py": LOUD,
        "tests/test_them.py": TESTS,
        "lock.txt": "pytest==1.0\npackaging>=1\nabsent==2 ; python_version < '3'\n",
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    command = "-m pytest -p newest --lock lock.txt --import-mode=importlib -p no:cacheprovider"
    paths = f"{ROOT / 'tests'}:{tmp_path / 'site-packages'}"
    out = subprocess.run(
        [sys.executable, *command.split(), "tests"],
        cwd=tmp_path,
        env={"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    _, versions, warned, failed = re.split(r"=+ (?:versions|warnings, by|failures, by).*=+\n", out)
    assert re.fullmatch(r"torch +any +\S+\npytest +1\.0 +\S+\n", versions)
    assert re.fullmatch(r"loud +2 × FutureWarning: loud\n", warned)
    rows = [row.split("tests/test_them.py::") for row in failed.splitlines() if "::" in row]
    found = {test: package.strip() for package, test in rows if not package.startswith("FAILED")}
    assert found == {"test_fails": "loud", "test_our_warning": OWN, "test_wrong": OWN}
