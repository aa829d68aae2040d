"""Tests of the locks, which say what tests run with, and of the report that compares with them."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # since Python 3.11
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = {"hooked": ("hooked", "dev", "docs", "dask", "parquet", "viz")}
EXTRAS["bridge"] = ("bridge", "dev", "dask", "parquet", "viz")
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
