"""A study: what it measures, and the page that is made from what it stores.

A study NAME has two files in `analyses/studies/`:

    NAME.py      STUDY, a `Study`: code that trains or measures, and draws figures
    NAME.md.j2   the page: text, in which numbers and tables are expressions (Jinja2)

and leaves these in `analyses/results/`:

    NAME.csv, NAME_PART.csv   tidy tables, by part ("" is NAME.csv)
    NAME.svg, NAME_PART.svg   figures
    NAME.md                   the page
    NAME.run.json             the record: settings, versions and digests (`benching.leave`)

Page and figures are made from the stored tables alone, so they can be made again without a run.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from analyses.tools.benching import table
from analyses.tools.study_files import as_csv, as_stored, keep, said, stem, svg, wrapped
from attn_only_lens.storage import write_text

STUDIES, RESULTS = (Path(__file__).parent / name for name in ("studies", "results"))

Tables: TypeAlias = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Setting:
    """How a study is run.

    Attributes:
        runs: the folder of checkpoints; an interrupted run resumes from it.
        models: the folder of trained models, one folder for each.
        smollm2: the folder of SmolLM2-135M.
        data: the folder of texts that some studies need.
        n_seeds: the number of random seeds, for each arm.
        device: the device of models and prompts.
        smoke: whether this is only a trial, with tiny sizes and few steps.
    """

    runs: Path
    models: Path
    smollm2: Path | None = None
    data: Path | None = None
    n_seeds: int = 1
    device: str = "cpu"
    smoke: bool = False


@dataclass(frozen=True)
class Study:
    """What is particular to a study.

    Attributes:
        run: trains or measures, and returns tables by part.
        figures: draws the figures by part, from the stored tables.
        facts: returns the names that the page's expressions use besides the stored tables.
        n_seeds: the number of random seeds, if no other number is asked for.
    """

    run: Callable[[Setting], Tables]
    figures: Callable[[Tables], Mapping[str, Figure]]
    facts: Callable[[Tables], Mapping[str, Any]] = lambda tables: {}
    n_seeds: int = 1


def names() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.name.removesuffix(".md.j2") for path in STUDIES.glob("*.md.j2"))


def study(name: str) -> Study:
    """Return a study."""
    made: Study = import_module(f"analyses.studies.{name}").STUDY
    return made


def run(name: str, setting: Setting, out: Path) -> str:
    """Run a study, write all its files, and return its page."""
    started = time.perf_counter()
    made, script = study(name), str(STUDIES / f"{name}.py")
    tables = made.run(setting)
    stored = as_stored(as_csv(tables))
    settings = {"n_seeds": setting.n_seeds, "device": setting.device, "smoke": setting.smoke}
    text = page(name, stored, settings)
    keep(script, out, text, tables, made.figures(stored), started=started, **settings)
    return text


def render(name: str, folder: Path = RESULTS) -> str:
    """Make a study's page and figures again from its stored tables, and return the page.

    The record changes only in the digests of what is written.
    """
    path = folder / f"{name}.run.json"
    record, stored = json.loads(path.read_text("utf-8")), read(name, folder)
    files = {f"{name}.md": page(name, stored, record["settings"]), **_pictures(name, stored)}
    for file, text in files.items():
        record["sha256"][file] = hashlib.sha256(text.encode()).hexdigest()
        write_text(folder / file, text)
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return files[f"{name}.md"]


def read(name: str, folder: Path = RESULTS) -> dict[str, pd.DataFrame]:
    """Return the stored tables of a study, by part."""
    record = json.loads((folder / f"{name}.run.json").read_text("utf-8"))
    files = [file for file in record["sha256"] if file.endswith(".csv")]
    parts = {file: file.removesuffix(".csv").removeprefix(name)[1:] for file in files}
    return {part: pd.read_csv(folder / file) for file, part in parts.items()}


def page(name: str, tables: Tables, settings: Mapping[str, Any]) -> str:
    """Return the page that a study's template makes of its tables.

    Expressions use the tables by part as `tables`, the record's settings as `settings`, and what
    `Study.facts` returns. Filters: `table` (a frame as a Markdown table), `said` (a mean with its
    interval), `held` (whether a prediction held).
    """
    names = study(name).facts(tables)
    text = (
        _templates()
        .get_template(f"{name}.md.j2")
        .render(tables=tables, settings=settings, name=name, **names)
    )
    return wrapped(text)


def _templates() -> Environment:
    """Return the templates of pages; an unknown name in an expression is an error."""
    made = Environment(
        loader=FileSystemLoader(STUDIES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"table": table, "said": said, "held": lambda x: "held" if x else "failed"}
    return made


def _pictures(name: str, tables: Tables) -> dict[str, str]:
    """Return a study's figures as SVG, by file name."""
    return {f"{stem(name, part)}.svg": svg(x) for part, x in study(name).figures(tables).items()}
