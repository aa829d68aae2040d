"""pytest plugin of `make nightly`: name the package that broke a test, or that gave a warning.

Warnings of other packages are reported; only those from this project's own code are errors. The
report begins with the packages whose versions differ from the lock: `--lock requirements/X.txt`.
"""

import re
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

OWN = "this project"
_failed: list[tuple[str, str]] = []  # (package, test)
_warned: Counter[tuple[str, str]] = Counter()  # by (package, warning)


def pytest_addoption(parser):
    parser.addoption("--lock", type=Path, help="the lock to compare installed versions with")


def pytest_configure(config):
    """Add filters; of two filters that apply, the later one counts."""
    tests = Path(__file__).parent
    ours = "|".join(["attn_only_lens", "analyses", "tests", *(p.stem for p in tests.glob("*.py"))])
    kept = [line for line in config.getini("filterwarnings") if line != "error"]
    for line in ("default", rf"error:::({ours})(\.|$)", *kept):
        config.addinivalue_line("filterwarnings", line)


def package_of(path):
    """Return the package whose folder contains a file."""
    _, installed, inside = str(path).replace("\\", "/").rpartition("site-packages/")
    if installed:
        return inside.partition("/")[0].removesuffix(".py")
    return "Python" if str(path).startswith((sys.base_prefix, "<")) else OWN


def pytest_runtest_logreport(report):
    if report.failed:
        # The last file of the traceback; a failure to collect or a doctest has only a text.
        crash = getattr(report.longrepr, "reprcrash", None)
        files = re.findall(r"^(\S+\.py):\d+: ", str(report.longrepr), re.MULTILINE)
        path = crash.path if crash else (files or [""])[-1]
        _failed.append((package_of(path), report.nodeid))


pytest_collectreport = pytest_runtest_logreport


def pytest_warning_recorded(warning_message):
    text = str(warning_message.message).partition("\n")[0][:120]
    name = f"{warning_message.category.__name__}: {text}"
    _warned[package_of(warning_message.filename), name] += 1


def changed_versions(lock):
    """Yield (package, locked version, installed version) where they differ."""
    for line in ("torch", *lock.read_text("utf-8").splitlines()):
        if line.startswith("#"):
            continue
        locked = Requirement(line)
        if locked.marker is None or locked.marker.evaluate():
            try:
                installed = version(locked.name)
            except PackageNotFoundError:
                installed = "not installed"
            if not locked.specifier or installed not in locked.specifier:
                yield locked.name, str(locked.specifier).lstrip("=") or "any", installed


def pytest_terminal_summary(terminalreporter, config):
    write, section = terminalreporter.write_line, terminalreporter.section
    if lock := config.getoption("--lock"):
        section(f"versions that differ from {lock}")
        for name, locked, installed in changed_versions(lock):
            write(f"{name:<32}{locked:<20}{installed}")
    section("warnings, by the package that they point to")
    for (package, text), n in sorted(_warned.items()):
        write(f"{package:<24}{n:>5} × {text}")
    section("failures, by the package in whose file the error arose")
    for package, test in sorted(_failed):
        write(f"{package:<24}{test}")
