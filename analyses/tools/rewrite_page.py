"""Write a study's page again from its stored tables, after the text in its script has changed.

    python -m analyses.tools.rewrite_page contrast_vs_patching

The study has a function `page` that takes the tables by part ("" is NAME.csv) and the settings in
its record. Nothing is measured again, and the record changes only in the digest of the page.
"""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from attn_only_lens.storage import write_text

RESULTS = Path(__file__).parents[1] / "results"


def record_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the record of a study."""
    record: dict[str, Any] = json.loads((folder / f"{name}.run.json").read_text("utf-8"))
    return record


def page_of(name: str, folder: Path = RESULTS) -> str:
    """Return the page that the study's script makes of the stored tables."""
    make = getattr(import_module(f"analyses.studies.{name}"), "page", None)
    if make is None:
        raise typer.BadParameter(f"analyses/studies/{name}.py has no function page: run the study")
    record = record_of(name, folder)
    tables = [file for file in record["sha256"] if file.endswith(".csv")]
    parts = {file: file.removesuffix(".csv").removeprefix(name)[1:] for file in tables}
    frames = {part: pd.read_csv(folder / file) for file, part in parts.items()}
    text: str = make(frames, record["settings"])
    return text


def main(
    name: Annotated[str, typer.Argument(help="the study")],
    folder: Annotated[Path, typer.Option(help="the folder of its files", exists=True)] = RESULTS,
) -> None:
    """Write the page, and its digest into the record."""
    text, record = page_of(name, folder), record_of(name, folder)
    record["sha256"][f"{name}.md"] = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / f"{name}.md", text)
    write_text(folder / f"{name}.run.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
