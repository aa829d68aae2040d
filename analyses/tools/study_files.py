"""Write a study's files: a page, its table, its figure, and a record of how they were made.

    NAME.md         the page
    NAME.csv        the rows that its tables are made from
    NAME.svg        the figure
    NAME.run.json   command, settings, versions and digests: `benching.leave`

A study with several tables or figures has NAME_PART.csv and NAME_PART.svg. A benchmark leaves
only a page and its record.
"""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.stats import t as student

from analyses.tools.benching import leave

_DECIMALS = re.compile(r"(\d\.\d\d)\d+")  # two decimals of a point are enough to draw
_REPEATED = {
    r"<!--.*?-->\n|<!DOCTYPE.*?>\n|<metadata>.*?</metadata>\n|<g[^>]*/>\n": "",
    r"'DejaVu Sans'(, ('[\w ]+'|sans-serif))+": "'DejaVu Sans', sans-serif",
    r' transform="rotate\(-0 [^"]*"': "",
}
NOT_PROSE = re.compile(r"[|#!]|- |\d+\. |    ")


def keep(
    script: str,
    out: Path,
    page: str,
    frames: Mapping[str, pd.DataFrame],
    pictures: Mapping[str, Figure],
    *,
    started: float,
    **settings: Any,
) -> None:
    """Write the page, tables, figures and record of a study, named after its script.

    Args:
        script: the script's `__file__`.
        out: the folder.
        page: the page in Markdown.
        frames: tables by part; the part "" is NAME.csv.
        pictures: figures by part.
        started: `time.perf_counter()` at the beginning.
        settings: the settings of the run.
    """
    name = Path(script).stem
    made = {f"{name}.md": page}
    for part, text in as_csv(frames).items():
        made[f"{stem(name, part)}.csv"] = text
    for part, figure in pictures.items():
        made[f"{stem(name, part)}.svg"] = svg(figure)
    leave(script, out, made, started=started, **settings)


def as_csv(frames: Mapping[str, pd.DataFrame], digits: str = "%.6g") -> dict[str, str]:
    """Return tables as text, with numbers in this format."""
    return {part: x.to_csv(index=False, float_format=digits) for part, x in frames.items()}


def as_stored(texts: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """Return tables as their text stores them, so that a page is computed from what they show."""
    return {part: pd.read_csv(io.StringIO(text)) for part, text in texts.items()}


def t_interval(values: "pd.Series[float]") -> tuple[float, float, float]:
    """Return the mean, and its 95 % interval (Student's t); nan if there is only one value."""
    mean, n = float(values.mean()), len(values)
    half = float(student.ppf(0.975, n - 1) * values.sem()) if n > 1 else float("nan")
    return mean, mean - half, mean + half


def said(values: "pd.Series[float]", form: str = ".3f") -> str:
    """Return the mean over seeds with Student's interval of 95 %, in words."""
    values = values.dropna()
    if values.empty:
        return "–"
    mean, low, high = (format(number, form) for number in t_interval(values))
    return f"{mean} [{low}, {high}]"


def stem(name: str, part: str) -> str:
    """Return the name of the file for a part of a study, without its ending."""
    return f"{name}_{part}" if part else name


def wrapped(text: str) -> str:
    """Return Markdown with paragraphs in lines of at most 100 characters.

    Headings, lists, tables, figures and code stay as they are.
    """
    options: dict[str, Any] = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
    parts = text.rstrip("\n").split("\n\n")
    filled = [part if NOT_PROSE.match(part) else fill(part, **options) for part in parts]
    return "\n\n".join(filled) + text[len(text.rstrip("\n")) :]


def svg(picture: Figure) -> str:
    """Return a figure as SVG, the same for equal figures: no date, no random ids, text as text."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "study"}):
        picture.savefig(text, format="svg", metadata={"Date": None})
    lines = (line.strip() for line in text.getvalue().splitlines())
    # Only in attributes: numbers in the texts of a figure are not places.
    tags = re.sub("<[^>]*>", lambda tag: _DECIMALS.sub(r"\1", tag[0]), "\n".join(lines))
    return _shortened(tags) + "\n"


def _shortened(text: str) -> str:
    """Return a figure without what matplotlib repeats; it looks the same.

    These are comments, metadata, alternatives to the font, turns by nothing, ids that nothing
    refers to, groups without attributes, and styles of marks that repeat their definition's.
    """
    for repeated, short in _REPEATED.items():
        text = re.sub(repeated, short, text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w.]+)", text))
    text = re.sub(r' id="([\w.]+)"', lambda name: name[0] if name[1] in used else "", text)
    styles = dict(re.findall(r'<path id="(\w+)" d="[^"]*" style="([^"]*)"', text))
    marks = re.compile(r'(<use xlink:href="#(\w+)"[^>]*?) style="([^"]*)"')
    text = marks.sub(lambda mark: mark[1 if styles.get(mark[2]) == mark[3] else 0], text)
    text = re.sub('style="[^"]*"', lambda x: x[0].replace(": ", ":").replace("; ", ";"), text)
    kept, has_attributes = [], list[bool]()
    for line in text.splitlines():
        if line.startswith("<g"):
            has_attributes.append(line != "<g>")
        if has_attributes.pop() if line == "</g>" else line != "<g>":
            kept.append(line)
    return "\n".join(kept)
