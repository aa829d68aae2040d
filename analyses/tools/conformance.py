"""Run TransformerLens' own tests on our models, and report which tests pass and why others do not.

TransformerLens' source distribution includes its tests. The tests that pass on stock models without
a network, and that make or run a model, are run again with the models exposed (with a hook on every
neuron-head hook point) and with the HookedTransformers converted (`conformance_plugin.py`). A test
that no longer passes is

    refused     the test ends with an error of this package, which says what to do instead
    inherent    the test asserts something that must change; `conformance_reasons.py` says what
    failed      anything else: no page is written, and the exit status is 1

The script downloads from the package registry, and takes half an hour on two cores. With
`--python`, it tests only some versions, and keeps the page's text about the other versions.

    python -m analyses.tools.conformance --out docs/conformance.md
"""

import json
import os
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from analyses.tools.conformance_reasons import INHERENT, Inherent
from attn_only_lens.storage import write_text

ROOT = Path(__file__).parents[2]
FOLDERS = ("unit", "integration", "acceptance", "benchmarks")
Outcome = dict[str, Any]
"""A line from the plugin: how one test ended."""


class Broken(Exception):
    """The tests could not be run, or a test failed for an unknown reason."""


# Outcomes and their meaning


@dataclass(frozen=True)
class Verdict:
    """The result of a test on our models.

    Attributes:
        test: the node id of the test.
        kind: "passed", "refused", "inherent", "failed"; "stock" if no model of it is ours.
        reach: what the test, its fixtures and its module did: names from `REACHES`.
        why: the error message, or the reason; for "stock", the reason why models are not changed.
    """

    test: str
    kind: str
    reach: frozenset[str] = frozenset()
    why: str = ""


REACHES = ("ran", "fired", "fired_in_body", "replaced")
"""One of our models ran; a neuron-head hook fired; a hook fired in the test itself, outside its
fixtures; a method was called that the plugin replaces."""


def judge(outcome: Outcome, layout: str, inherent: Iterable[Inherent] = INHERENT) -> Verdict:
    """Return the verdict for one outcome.

    Args:
        outcome: the outcome of a test that passes on stock models.
        layout: "exposed" or "converted".
        inherent: the known reasons.
    """
    test = outcome["test"]
    reach = frozenset(name for name in REACHES if outcome[name])
    if outcome["outcome"] == "passed":
        if outcome["ours"]:
            return Verdict(test, "passed", reach)
        why = "; ".join(sorted(set(map(plain, outcome["refused"]))))
        return Verdict(
            test, "stock", reach, why or "it makes none by a constructor that is watched"
        )
    if outcome.get("refusal"):
        return Verdict(test, "refused", reach, outcome["message"])
    for reason in inherent:
        if reason.covers(test, layout):
            return Verdict(test, "inherent", reach, reason.why)
    message = f"{outcome.get('error', outcome['outcome'])}: {outcome.get('message', '')}"
    return Verdict(test, "failed", reach, message)


def unneeded(
    verdicts: dict[str, list[Verdict]], inherent: Iterable[Inherent] = INHERENT
) -> list[str]:
    """Return tests that have a reason to fail, but do not fail.

    Args:
        verdicts: the verdicts of all versions, by layout.
        inherent: the known reasons.
    """
    failing = {
        layout: [verdict.test for verdict in verdicts_of if verdict.kind == "inherent"]
        for layout, verdicts_of in verdicts.items()
    }
    return [
        f"{layout}: {test}"
        for reason in inherent
        for layout, failures in failing.items()
        for test in reason.tests.get(layout, ())
        if not any(Inherent.matches(test, failure) for failure in failures)
    ]


# Running the tests


@dataclass(frozen=True)
class Run:
    """The results of all passes for one version of transformer-lens.

    Attributes:
        version: the version of transformer-lens.
        stock: the outcomes on stock models.
        verdicts: the verdicts of all applicable tests, by layout.
        measured: the date.
    """

    version: str
    stock: list[Outcome]
    verdicts: dict[str, list[Verdict]]
    measured: date = field(default_factory=date.today)


def run(python: Path, work: Path, *, reuse: bool) -> Run:
    """Run the tests of the transformer-lens that an interpreter imports.

    Args:
        python: the interpreter.
        work: a folder for the tests and the outcomes.
        reuse: whether to use existing outcomes of complete passes.

    Raises:
        Broken: a pass did not finish.
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
    passing = [
        record["test"] for record in stock if record["outcome"] == "passed" and record["models"]
    ]
    layouts = ["exposed", "converted"] if version.startswith("3.") else ["exposed"]
    verdicts = {
        layout: [judge(outcome, layout) for outcome in outcomes(layout, passing)]
        for layout in layouts
    }
    ended = (work / f"{version}-{layouts[-1]}.jsonl").stat().st_mtime
    return Run(version, stock, verdicts, date.fromtimestamp(ended))


def fetch(python: Path, version: str, folder: Path) -> None:
    """Download a source distribution, and unpack its tests."""
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
    """Run the tests once in one process, at low priority, with an empty model cache."""
    command = [
        "nice",
        "-n",
        "10",
        python,
        "-m",
        "pytest",
        "-p",
        "analyses.tools.conformance_plugin",
    ]
    # TransformerLens' pytest settings need plugins that are not installed here.
    # A conftest.py in a parent folder, such as this repository's, must not be used either.
    command += ["-c", os.devnull, "--rootdir", ".", "--confcutdir", "."]
    command += ["-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-q", "--tb=no", "--continue-on-collection-errors"]
    command += ["--models", models, "--outcomes", outcomes.resolve()]
    paths = [f"tests/{name}" for name in FOLDERS]
    if only is not None:
        test_list = outcomes.with_suffix(".txt")
        test_list.write_text("\n".join(only), "utf-8")
        command += ["--only", test_list.resolve()]
        paths = sorted({test.split("::")[0] for test in only})
    environment = os.environ | {
        "HF_HOME": str(folder.resolve() / "empty"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
    }
    # pytest fails if a test fails, so the outcomes are read from the file.
    done = subprocess.run([*map(str, command), *paths], cwd=folder, env=environment, check=False)
    if finished(outcomes) is None:
        raise Broken(
            f"the tests on {models} models broke off with status {done.returncode}, after the one "
            f"in the last line of {outcomes}"
        )


def finished(path: Path) -> list[Outcome] | None:
    """Return the outcomes of a pass, or None if the pass did not finish."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return lines[:-1] if lines and "finished" in lines[-1] else None


def _run(command: list[Any], **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), check=True, **how)


# The page

_INTRODUCTION = """# TransformerLens' own tests

TransformerLens' source distributions include TransformerLens' own test suite. `make conformance`
selects the tests that pass on stock models without a network and that make or run a model, and runs
these tests again on models from this package:

- **exposed**: each `TransformerBridge` and `HookedTransformer` has its neuron-heads exposed as soon
  as the model is made. Every neuron-head hook point has a hook that changes nothing, so neurons are
  computed as heads whenever an MLP runs.
- **converted**: each `HookedTransformer` is converted as soon as the model is made, with the same
  hooks. A converted model refuses `init_weights`, `load_and_process_state_dict` and
  `process_weights_`. In these runs, the three methods are **replaced** by what their errors advise:
  process the source, and convert it again.

Many tests read names, settings, weights or hooks, but run no model. These tests show that exposing
or converting a model does not break names, settings, weights or hooks, but show nothing about
neurons. So the table also counts the tests that *ran a model* from this package, in the test or in
its fixtures, and the tests that *reached a neuron-head*: a hook on a neuron-head fired. (Some tests
run a part of a model, but no whole model.)

A test that no longer passes is *refused clearly* if it ends with an error from this package that
says what to do instead. A test is *inherent* if it asserts something that has to change, for a
reason that is given below. If a test fails in any other way, `make conformance` fails and does not
write this page. `python -m analyses.tools.conformance` writes this page from the outcomes of the
tests."""
_HEAD = (
    "transformer-lens",
    "models",
    "tests",
    "ran a model",
    "reached a neuron-head",
    "passed",
    "passed and reached one",
    "refused clearly",
    "inherent",
)
_KINDS = {
    "refused": ("Refused clearly", "what the error says"),
    "inherent": ("Inherent", "why"),
}
_SECTION = "## transformer-lens "


def page(runs: list[Run], kept: str = "") -> str:
    """Return the page, which depends only on the outcomes.

    Args:
        runs: the runs of all versions that were tested.
        kept: the old page; its rows and sections about other versions are kept.
    """
    ran = {run.version for run in runs}
    rows, sections = parts_of(kept)
    rows = {version: lines for version, lines in rows.items() if version not in ran}
    sections = {version: text for version, text in sections.items() if version not in ran}
    for run in runs:
        counts = [_counts(verdicts) for verdicts in run.verdicts.values()]
        rows[run.version] = [
            _row([run.version, layout, *(f"{count:,}" for count in numbers)])
            for layout, numbers in zip(run.verdicts, counts, strict=True)
        ]
        sections[run.version] = "\n\n".join(_of_version(run))
    newest_first = sorted(rows, key=lambda version: [*map(int, version.split("."))], reverse=True)
    lines = [line for version in newest_first for line in rows[version]]
    table = "\n".join([_row(_HEAD), _row(["---"] * len(_HEAD)), *lines])
    return "\n\n".join([_INTRODUCTION, table, *map(sections.get, newest_first)]) + "\n"


def parts_of(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the rows of a page's first table, and its sections, by version."""
    first, *others = text.split(f"\n{_SECTION}")
    sections = {section.partition("\n")[0]: f"{_SECTION}{section}".strip() for section in others}
    lines = first.splitlines()
    rows = {
        version: [line for line in lines if line.startswith(f"| {version} |")]
        for version in sections
    }
    return rows, sections


def _counts(verdicts: list[Verdict]) -> list[int]:
    """Return the numbers in a row."""
    applicable = [verdict for verdict in verdicts if verdict.kind != "stock"]
    reached = [verdict for verdict in applicable if "fired" in verdict.reach]
    kinds, reached_kinds = (
        Counter(verdict.kind for verdict in some) for some in (applicable, reached)
    )
    ran = sum("ran" in verdict.reach for verdict in applicable)
    passed = [kinds["passed"], reached_kinds["passed"]]
    return [len(applicable), ran, len(reached), *passed, *(kinds[kind] for kind in _KINDS)]


def _of_version(run: Run) -> Iterable[str]:
    """Yield the parts of the section about one version."""
    passed = [outcome for outcome in run.stock if outcome["outcome"] == "passed"]
    models = sum(bool(outcome["models"]) for outcome in passed)
    yield (
        f"{_SECTION}{run.version}\n\nMeasured on {run.measured}. Of {len(run.stock):,} tests, "
        f"{len(passed):,} pass on stock models without a network (most of the others load a model "
        f"from the hub), and {models:,} of these make or run a model."
    )
    for layout, verdicts in run.verdicts.items():
        yield f"### {layout.capitalize()}, {run.version}"
        yield from _of_layout(verdicts, layout)


def _of_layout(verdicts: list[Verdict], layout: str) -> Iterable[str]:
    """Yield the parts of the section about one layout and version."""
    applicable = [verdict for verdict in verdicts if verdict.kind != "stock"]
    counts = Counter(name for verdict in applicable for name in verdict.reach)
    text = (
        f"A neuron-head hook fired in {counts['fired']:,} of {len(applicable):,} tests: in "
        f"{counts['fired_in_body']:,} tests in the test itself, in the others only in a fixture."
    )
    if layout == "converted":
        replaced = [verdict.kind for verdict in applicable if "replaced" in verdict.reach]
        passed = replaced.count("passed")
        text += (
            f" {len(replaced):,} of the tests called a replaced method, and {passed} of these "
            "passed. Without the replacement, the method's error would have ended these tests."
        )
    yield text
    for kind, (title, head) in _KINDS.items():
        by_reason = _by_reason(verdict for verdict in verdicts if verdict.kind == kind)
        if by_reason:
            yield f"#### {title}"
            rows = [[why, "<br>".join(_grouped(tests))] for why, tests in by_reason.items()]
            yield _table([head, "tests"], rows)
    by_reason = _by_reason(verdict for verdict in verdicts if verdict.kind == "stock")
    if by_reason:
        total = sum(map(len, by_reason.values()))
        yield f"#### Not applicable\n\n{total:,} tests have only models that cannot be {layout}:"
        yield _table(["why", "tests"], [[why, len(tests)] for why, tests in by_reason.items()])


def _by_reason(verdicts: Iterable[Verdict]) -> dict[str, list[str]]:
    """Return tests by reason, starting with the most frequent reason."""
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_reason.setdefault(plain(verdict.why), []).append(verdict.test)
    return dict(sorted(by_reason.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def plain(why: str) -> str:
    """Return a message in one line, without parts that differ between models or runs."""
    text = re.sub(r"\s+", " ", why).strip()
    text = re.sub(r"\blayer \d+", "layer …", text)
    text = re.sub(r"\b\d+\.\d+(e[-+]\d+)?|\b\d+e[-+]\d+|0x[0-9a-f]+", "…", text)
    return text


def _grouped(tests: list[str]) -> list[str]:
    """Return test names without parameters, with the number of cases if there are several."""
    counts = Counter(re.sub(r"\[.*\]$", "", test, flags=re.S) for test in tests)
    return [
        f"`{test.removeprefix('tests/')}`" + (f" ({count} cases)" if count > 1 else "")
        for test, count in sorted(counts.items())
    ]


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    return "\n".join(map(_row, [head, ["---"] * len(head), *rows]))


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main(
    out: Annotated[Path, typer.Option(help="the page")] = Path("docs/conformance.md"),
    work: Annotated[Path, typer.Option(help="where tests and outcomes go")] = Path(
        "out/conformance"
    ),
    python: Annotated[
        list[Path] | None,
        typer.Option(help="interpreters with the versions of transformer-lens to run; all if none"),
    ] = None,
    reuse: Annotated[bool, typer.Option(help="take passes that lie there complete")] = False,
) -> None:
    """Run the tests and write the page; if tests fail, list them and write nothing."""
    pythons = python or [Path(".venv4/bin/python"), Path(".venv/bin/python")]
    runs = [run(python.absolute(), work, reuse=reuse) for python in pythons]
    together: dict[str, list[Verdict]] = {}
    for version_run in runs:
        for layout, verdicts in version_run.verdicts.items():
            together.setdefault(layout, []).extend(verdicts)
    failed = [
        f"{layout}: {verdict.test}: {verdict.why}"
        for layout, verdicts in together.items()
        for verdict in verdicts
        if verdict.kind == "failed"
    ]
    if failed:
        raise Broken("these tests fail, and nobody has said why:\n" + "\n".join(failed))
    kept = out.read_text("utf-8") if python and out.exists() else ""
    if not kept and (passing := unneeded(together)):
        raise Broken("conformance_reasons.py explains what passes:\n" + "\n".join(passing))
    write_text(out, page(runs, kept))


if __name__ == "__main__":
    typer.run(main)
