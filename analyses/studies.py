"""What a study leaves behind: a page, its table, its figure, and how the three were made.

    NAME.md         the page
    NAME.csv        every row that its tables are read off
    NAME.svg        the figure
    NAME.run.json   command, settings, seconds, machine, versions, and the sha256 of the others

A study of several tables or figures has NAME_PART.csv and NAME_PART.svg.
So a page that was edited by hand, or a table of another run, is told from one of this run.
"""

import hashlib
import io
import json
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from benching import machine
from matplotlib import rc_context
from matplotlib.figure import Figure

from attn_only_lens.storage import write_text

PACKAGES = ("attn_only_lens", "transformer-lens", "torch", "numpy", "pandas")


def keep(
    script: str,
    out: Path,
    page: str,
    frame: pd.DataFrame | Mapping[str, pd.DataFrame],
    picture: Figure | Mapping[str, Figure],
    *,
    started: float,
    digits: str = "%.6g",
    **settings: Any,
) -> None:
    """Write the four files of a study, by the name of its script.

    Args:
        script: its `__file__`.
        out: the folder.
        page: Markdown.
        frame: the table; or several, by part (the part "" is NAME.csv).
        picture: the figure; or several, by part.
        started: `time.perf_counter()` at the beginning.
        digits: of the table.
        settings: what the run was asked for.
    """
    name = Path(script).stem
    frames = frame if isinstance(frame, Mapping) else {"": frame}
    pictures = picture if isinstance(picture, Mapping) else {"": picture}
    made = {f"{name}.md": page}
    for part, each in frames.items():
        made[f"{_part(name, part)}.csv"] = each.to_csv(index=False, float_format=digits)
    made |= {f"{_part(name, part)}.svg": svg(each) for part, each in pictures.items()}
    run = {
        "script": f"analyses/{name}.py",
        "settings": settings,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(settings.get("device", "cpu")),
        "python": platform.python_version(),
        "versions": {each: version(each) for each in PACKAGES},
        "sha256": {file: hashlib.sha256(text.encode()).hexdigest() for file, text in made.items()},
    }
    for file, text in made.items():
        write_text(out / file, text)
    write_text(out / f"{name}.run.json", json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _part(name: str, part: str) -> str:
    return f"{name}_{part}" if part else name


def verdict(claim: str, held: bool, found: str) -> str:
    """A line of a page: what was predicted, whether it held, and what was found."""
    return f"- {'Held' if held else 'Failed'}: {claim} Found: {found}."


def svg(picture: Figure) -> str:
    """The same text for the same figure: no date, no random ids; letters as letters."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "study"}):
        picture.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
