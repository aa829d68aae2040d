"""What a sweep found: a row for each site, position and part, on a scale from 0 to 1.

    score = (value - corrupted) / (clean - corrupted)

is 0 on the corrupted run and 1 on the clean one, in either direction: denoising (clean activations
into the corrupted run) raises it from 0, noising lowers it from 1.
"""

from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pandas as pd

from attn_only_lens.errors import PatchingError
from attn_only_lens.numerics import is_count
from attn_only_lens.storage import misfits
from attn_only_lens.storage.tables import read_table, write_table

__all__ = ["BASELINE", "MEASURED", "Sweep"]

BASELINE = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0, "bias": 1.0}
"""The score of the run that is patched into, by direction; ablations are of the clean run."""

MEASURED = "patching"
"""The method of a sweep that ran every patch."""

_COLUMNS = ["layer", "kind", "index", "name", "position", "part", "value", "score"]
_GIVEN = ["layer", "kind", "index", "name", "position", "value"]
_SITE = ["name", "position", "part"]
_FORMAT = {"format": "attn_only_lens.Sweep", "format_version": 1}
_SHOWN = 10
_PROBLEM = "these are not the results of a sweep"


class _Saved(TypedDict):
    format: Literal["attn_only_lens.Sweep"]
    format_version: Literal[1]
    n_rows: int
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """The results of a sweep, and what was run. Made by `Sweep.of`.

    Attributes:
        frame: a row for each site and position, with columns `layer`, `kind`, `index`, `name`,
            `position` (a number, or "all"), `part`, `value` (the metric after the patch), `score`.
        part: what of each head was patched: "z", "pattern", "value", "q".
        direction: "denoise", clean into corrupted; "noise", corrupted into clean; or what z of the
            clean run was ablated to, "zero", "mean", "resample", "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: pairs of prompts, over which values are means.
        model: the model's name.
        method: "patching" where values are measured, or how `attribution` estimated them.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": -1, "value": [2.0, -1.0]})
        >>> sweep = p.Sweep.of(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
        ...                    clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="adder")
        >>> sweep.to_frame()["score"].tolist()
        [0.75, 0.0]
        >>> sweep.top(1)["name"].tolist()
        ['L0N5']
    """

    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str = MEASURED

    @classmethod
    def of(
        cls,
        values: pd.DataFrame,
        *,
        part: str,
        direction: str,
        metric: str,
        clean_value: float,
        corrupted_value: float,
        n_prompts: int,
        model: str,
        method: str = MEASURED,
    ) -> "Sweep":
        """Results from values: part and score are added, names become categories.

        Args:
            values: a row for each site and position, with the columns of `frame` but those two.
            part: see the class, as for the others.
            direction: "denoise" or "noise".
            metric: the metric's name.
            clean_value: the metric of the clean run.
            corrupted_value: the metric of the corrupted run.
            n_prompts: pairs of prompts.
            model: the model's name.
            method: "patching" where values are measured, or how they were estimated.

        Returns:
            The sweep, its rows in the order given.

        Raises:
            PatchingError: columns are missing or unknown, a value is not finite, a site is there
                twice, positions are of two kinds, or the clean value is the corrupted one.
        """
        given = [*_GIVEN, "part"] if "part" in values else _GIVEN
        if set(values.columns) != set(given):
            _refuse([f"got columns {list(values.columns)}; expected {_GIVEN}"])
        frame = pd.DataFrame(
            {
                "layer": values["layer"].to_numpy(),
                "kind": _categories(values["kind"]),
                "index": values["index"].to_numpy(),
                "name": _categories(values["name"]),
                "position": _position(values["position"]),
                "part": pd.Categorical([part] * len(values), categories=[part]),
                "value": values["value"].to_numpy(dtype=np.float64),
            }
        )
        reasons = []
        if "part" in values and not (values["part"] == part).all():
            reasons.append(f"got parts {sorted(set(values['part']))}; expected {part!r} alone")
        if direction not in BASELINE:
            reasons.append(f"got direction={direction!r}; expected one of {list(BASELINE)}")
        span = clean_value - corrupted_value
        if not np.isfinite(span) or span == 0:
            reasons.append(
                f"the metric is {clean_value} on the clean run and {corrupted_value} on the "
                "corrupted one; expected two finite numbers that differ"
            )
        bad = int((~np.isfinite(frame["value"])).sum())
        reasons += [f"{bad} of {len(frame)} values are not finite"] * (bad > 0)
        twice = frame.loc[frame.duplicated(_SITE), "name"]
        if len(twice):
            reasons.append(f"{len(twice)} rows repeat a site, such as {twice.iloc[0]}")
        _refuse(reasons)
        frame["score"] = (frame["value"] - corrupted_value) / span
        run = part, direction, metric, clean_value, corrupted_value, n_prompts, model, method
        return cls(frame, *run)

    def to_frame(self) -> pd.DataFrame:
        """A copy of the frame."""
        return self.frame.copy()

    @property
    def baseline(self) -> float:
        """The score of the run that is patched into, which a patch without effect leaves."""
        return BASELINE[self.direction]

    @property
    def effect(self) -> "pd.Series[float]":
        """How far each patch moves the score from `baseline`."""
        return self.frame["score"] - self.baseline

    def top(self, k: int = 20) -> pd.DataFrame:
        """The k rows of largest |effect|, the largest first; of equals the first.

        Raises:
            PatchingError: k is not a positive number.
        """
        if not is_count(k, 1):
            raise PatchingError([f"got k={k!r}; expected 1 or more"], "no rows can be picked")
        return self.frame.loc[self.effect.abs().nlargest(k, keep="first").index]

    def query(self, condition: str) -> "Sweep":
        """The rows that meet a condition, such as `layer == 3 and kind == 'neuron'`."""
        rows = self.frame.query(condition).reset_index(drop=True)
        rows["name"] = rows["name"].cat.remove_unused_categories()
        return replace(self, frame=rows)

    def save(self, path: str | Path) -> None:
        """Write to a .parquet file, or to a .csv file with a .csv.json beside it.

        Raises:
            PatchingError: another ending, or parquet without pyarrow.
        """
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "frame"}
        write_table(Path(path), self.frame, {**_FORMAT, **said, "n_rows": len(self.frame)})

    @classmethod
    def load(cls, path: str | Path) -> "Sweep":
        """Read what `save` wrote.

        Raises:
            PatchingError: it is missing, damaged, newer than this package, or no sweep.
        """
        frame, said = read_table(Path(path))
        _refuse([f"{path}: {reason.removeprefix('.')}" for reason in misfits(said, _Saved, "")])
        if len(frame) != said["n_rows"] or list(frame.columns) != _COLUMNS:
            _refuse([f"{path}: got {len(frame)} rows of {list(frame.columns)}; it is damaged"])
        what = {f.name: said[f.name] for f in fields(cls) if f.name != "frame"}
        return cls.of(frame.drop(columns="score"), **what)

    def __repr__(self) -> str:
        shown = self.top(_SHOWN).to_string(index=False) if len(self.frame) else "no rows"
        return f"{self._headline()}\n{shown}"

    def _repr_html_(self) -> str:
        shown = self.top(_SHOWN).to_html(index=False) if len(self.frame) else "no rows"
        return f"<p>{escape(self._headline())}</p>\n{shown}"

    def _headline(self) -> str:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {len(self.frame)} rows, "
            f"{self.n_prompts} prompts; {self.metric} is {self.clean_value:.4g} clean, "
            f"{self.corrupted_value:.4g} corrupted"
        )


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise PatchingError(reasons, _PROBLEM)


def _categories(column: "pd.Series[Any]") -> pd.Categorical:
    """Text as categories, in order of appearance."""
    codes, found = pd.factorize(column, use_na_sentinel=False)  # nameless rows are an error
    text = found.astype(str) if isinstance(found, pd.CategoricalIndex) else found
    return pd.Categorical.from_codes(codes, categories=text)


def _position(column: "pd.Series[Any]") -> Any:
    """Numbers as integers, and labels as categories."""
    if pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(dtype=np.int64)
    if not (column == "all").all():
        _refuse([f"got positions {list(pd.unique(column))[:7]}; expected numbers alone, or 'all'"])
    return _categories(column)
