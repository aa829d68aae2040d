"""Progress bars for the stages of a comparison."""

from typing import Any

from tqdm.auto import tqdm

MODELS = ("the original", "the grown model", "the null")
"""The names of the models of a comparison, in order."""


def stage_bar(text: str, total: int | None, unit: str, shown: bool) -> "tqdm[Any]":
    """Return a bar that is visible from the start, as its first step may take minutes."""
    return tqdm(desc=text, total=total, unit=unit, disable=not shown)
