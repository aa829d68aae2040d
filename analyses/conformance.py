"""TransformerLens' own tests on models of ours: which pass, and why others do not.

The source distribution of TransformerLens carries its tests. Those that pass on stock models
without a network, and make or run a model, are run again with each such model exposed, every hook
point of its neuron-heads live, and, where it is a HookedTransformer, converted
(`conformance_plugin.py`). What passes no longer is

    refused     the test ends with an error of this package, which says what to do instead
    inherent    it asserts what is bound to change, and `conformance_reasons.py` says what that is
    failed      anything else: nothing is written, and the exit status is 1

It fetches from the package registry, and takes a good part of an hour.

    python analyses/conformance.py --out docs/conformance.md
"""

import json
import os
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from conformance_reasons import INHERENT, Inherent

from attn_only_lens.files import write_text

ROOT = Path(__file__).parents[1]
FOLDERS = ("unit", "integration", "acceptance", "benchmarks")
Outcome = dict[str, Any]
"""A line of the plugin: how one test ended."""


class Broken(Exception):
    """The tests could not be run, or ended in what nobody has explained."""


# What the outcomes mean


@dataclass(frozen=True)
class Verdict:
    """What became of a test on models of ours.

    Attributes:
        test: its node id.
        kind: "passed", "refused", "inherent", "failed"; "stock" where none of its models is ours.
        why: what the error says, or the reason; for stock ones, why the models are.
    """

    test: str
    kind: str
    why: str = ""


def judge(outcome: Outcome, layout: str, inherent: Iterable[Inherent] = INHERENT) -> Verdict:
    """Tell what one outcome comes to.

    Args:
        outcome: of a test that passes on stock models.
        layout: "exposed" or "converted".
        inherent: the reasons that are known.
    """
    test = outcome["test"]
    if outcome["outcome"] == "passed":
        if outcome["ours"]:
            return Verdict(test, "passed")
        return Verdict(test, "stock", " ".join(outcome["refused"]))
    if outcome.get("refusal"):
        return Verdict(test, "refused", outcome["message"])
    for reason in inherent:
        if reason.covers(test, layout):
            return Verdict(test, "inherent", reason.why)
    return Verdict(test, "failed", f"{outcome.get('error')}: {outcome.get('message')}")


def unneeded(
    verdicts: dict[str, list[Verdict]], inherent: Iterable[Inherent] = INHERENT
) -> list[str]:
    """Tests that are said to fail inherently, and do not.

    Args:
        verdicts: by layout, of all versions together.
        inherent: the reasons that are known.
    """
    failing = {
        layout: [each.test for each in found if each.kind == "inherent"]
        for layout, found in verdicts.items()
    }
    return [
        f"{layout}: {test}"
        for reason in inherent
        for layout, found in failing.items()
        for test in reason.tests.get(layout, ())
        if not any(Inherent.matches(test, each) for each in found)
    ]


# Running them


@dataclass(frozen=True)
class Run:
    """What the passes of one version of transformer-lens came to.

    Attributes:
        version: of transformer-lens.
        stock: how the tests ended on stock models.
        verdicts: by layout, of each test that applies.
    """

    version: str
    stock: list[Outcome]
    verdicts: dict[str, list[Verdict]]


def run(python: Path, work: Path, *, reuse: bool) -> Run:
    """Run the tests of the transformer-lens that an interpreter imports.

    Args:
        python: the interpreter.
        work: a folder for the tests and the outcomes.
        reuse: whether outcomes of complete passes that are there already will do.

    Raises:
        Broken: a pass did not come to its end.
    """
    ask = "from importlib.metadata import version; print(version('transformer-lens'))"
    version = _run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    folder = work / version
    if not (folder / "tests").is_dir():
        fetch(python, version, folder)

    def outcomes(models: str, only: list[str] | None = None) -> list[Outcome]:
        path = work / f"{version}-{models}.jsonl"
        if not (reuse and path.exists() and finished(path)):
            one_pass(python, folder, path, models, only)
        return finished(path) or []

    stock = outcomes("stock")
    wanted = [each["test"] for each in stock if each["outcome"] == "passed" and each["models"]]
    layouts = ["exposed", "converted"] if version.startswith("3.") else ["exposed"]
    verdicts = {
        layout: [judge(each, layout) for each in outcomes(layout, wanted)] for layout in layouts
    }
    return Run(version, stock, verdicts)


def fetch(python: Path, version: str, folder: Path) -> None:
    """Download a source distribution, and unpack the tests in it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"transformer-lens=={version}"
    how = ["--no-deps", "--no-binary", "transformer-lens", "--dest", folder]
    _run([python, "-m", "pip", "download", "-q", *how, name])
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name.startswith("tests/"):
                tar.extract(member, folder, filter="data")


def one_pass(
    python: Path, folder: Path, outcomes: Path, models: str, only: list[str] | None
) -> None:
    """Run the tests once, at low priority, as one process, from an empty cache of models."""
    command = ["nice", "-n", "10", python, "-m", "pytest", "-p", "conformance_plugin"]
    # TransformerLens' settings of pytest want plugins that are not needed here.
    command += ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-q", "--tb=no", "--continue-on-collection-errors"]
    command += ["--models", models, "--outcomes", outcomes.resolve()]
    where = [f"tests/{name}" for name in FOLDERS]
    if only is not None:
        wanted = outcomes.with_suffix(".txt")
        wanted.write_text("\n".join(only), "utf-8")
        command += ["--only", wanted.resolve()]
        where = sorted({test.split("::")[0] for test in only})
    environment = os.environ | {
        "HF_HOME": str(folder.resolve() / "empty"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "analyses"))),
    }
    # Tests fail, and so does pytest: what it came to is in the file.
    subprocess.run([*map(str, command), *where], cwd=folder, env=environment, check=False)
    if finished(outcomes) is None:
        raise Broken(f"the tests on {models} models broke off: the last line of {outcomes}")


def finished(path: Path) -> list[Outcome] | None:
    """The outcomes of a pass; None if it was broken off."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return lines[:-1] if lines and "finished" in lines[-1] else None


def _run(command: list[Any], **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), check=True, **how)
