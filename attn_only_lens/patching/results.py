"""The results of a sweep: a row for each site and position, on a scale from 0 to 1.

    score = (value - corrupted) / (clean - corrupted)

is 0 on the corrupted run and 1 on the clean one, in either direction: denoising (clean activations
into the corrupted run) raises it from 0, noising lowers it from 1. Values are means over prompts.
In rows of each prompt, with `unpatched` the prompt's own value in the run that is patched into,

    score = baseline + (value - unpatched) / (clean - corrupted)

so that a patch without effect leaves the baseline, and the mean over prompts is the score above.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attn_only_lens.errors import InputError
from attn_only_lens.patching.over_prompts import SPREAD, OverPrompts
from attn_only_lens.patching.scored_frame import BASELINE, ScoredFrame
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import TableFields

MEASURED = "patching"
"""The method of a sweep that ran every patch."""

_GIVEN = ["layer", "kind", "index", "name", "position", "value"]
_BY_PROMPT = ("prompt", "unpatched")
_ADDED = ("part", "score")
_PROBLEM = "these are not the results of a sweep"


class _Fields(TableFields):
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str
    expected_pearson: float | None
    forwards: float


_DOCUMENT = Document("attn_only_lens.Sweep", 2, _Fields)


def _flags(column: "pd.Series[Any]") -> "npt.NDArray[np.bool_]":
    """True and False, also as a CSV file has them."""
    text = column.astype(str)
    others = sorted(set(text) - {"True", "False"})
    InputError.raise_if([f"got exact={each}; expected True or False" for each in others], _PROBLEM)
    return (text == "True").to_numpy()


_OPTIONAL: dict[str, Callable[["pd.Series[Any]"], Any]] = {
    "prompt": lambda column: column.to_numpy(dtype=np.int64),
    "unpatched": lambda column: column.to_numpy(dtype=np.float64),
    **dict.fromkeys(SPREAD, lambda column: column.to_numpy(dtype=np.float64)),
    "exact": _flags,
}
"""Columns that some sweeps have, and how each is read."""


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(ScoredFrame):
    """The results of a sweep, with its settings.

    Attributes:
        frame: a row for each site and position, with columns `layer`, `kind`, `index`, `name`,
            `position` (a number, "all", or a role), `part`, `value` (the metric after the patch),
            `score`; given without the columns `part` and `score`, it gets them. Of several prompts
            `value_standard_error` and `score_standard_error` (see `over_prompts.py`), missing where
            the metric is one number of all prompts; or, with `per_prompt`, a row for each prompt,
            with `prompt`, counted from 0, and `unpatched`, its metric before the patch.
        part: the part of each head that was patched: "z", "pattern", "value", "q", "k".
        direction: "denoise", clean into corrupted; "noise", corrupted into clean; or the
            ablation of z in the clean run, "zero", "mean", "resample", "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: pairs of prompts, over which values are means unless rows are of each.
        model: the model's name.
        method: "patching" where values are measured, or how `attribution` estimated them.
        expected_pearson: of an attribution with exact repairs, the correlation of its scores with
            those of patching that their fitted error makes one expect, with a margin; an estimate,
            of all rows together. None where nothing was patched that tells.
        forwards: of such an attribution, what its patches cost, in flops of forward passes.

    Raises:
        InputError: columns are missing or unknown, a value is not finite, a site is there
            twice, positions are of two kinds, or the clean value is the corrupted one.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": -1, "value": [2.0, -1.0]})
        >>> sweep = p.Sweep(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
        ...                 clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="adder")
        >>> sweep.to_frame()["score"].tolist()
        [0.75, 0.0]
        >>> sweep.top(1)["name"].tolist()
        ['L0N5']
    """

    _document = _DOCUMENT

    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str = MEASURED
    expected_pearson: float | None = None
    forwards: float = 0.0

    def __post_init__(self) -> None:
        given, part = self.frame, self.part
        others = set(given.columns) - {*_GIVEN, *_ADDED, *_OPTIONAL}
        halves = [tuple(c in given for c in pair) for pair in (_BY_PROMPT, SPREAD)]
        if others or set(_GIVEN) - set(given.columns) or any(len(set(half)) > 1 for half in halves):
            raise InputError(
                [
                    f"got columns {list(given.columns)}; expected {_GIVEN}, and any of "
                    f"{list(_OPTIONAL)}, of which {_BY_PROMPT} and {SPREAD} come together"
                ],
                _PROBLEM,
            )
        frame = pd.DataFrame(
            {
                "layer": given["layer"].to_numpy(),
                "kind": _categories(given["kind"]),
                "index": given["index"].to_numpy(),
                "name": _categories(given["name"]),
                "position": _positions(given["position"]),
                "part": pd.Categorical([part] * len(given), categories=[part]),
                "value": given["value"].to_numpy(dtype=np.float64),
                **{name: read(given[name]) for name, read in _OPTIONAL.items() if name in given},
            }
        )
        reasons = []
        if "part" in given and not (given["part"] == part).all():
            reasons.append(f"got parts {sorted(set(given['part']))}; expected {part!r} alone")
        if self.direction not in BASELINE:
            reasons.append(f"got direction={self.direction!r}; expected one of {list(BASELINE)}")
        span = self.clean_value - self.corrupted_value
        if not np.isfinite(span) or span == 0:
            reasons.append(
                f"the metric is {self.clean_value} on the clean run and {self.corrupted_value} on "
                "the corrupted one; expected two finite numbers that differ"
            )
        finite = np.isfinite(frame[[c for c in ("value", "unpatched") if c in frame]]).all(axis=1)
        bad = int((~finite).sum())
        reasons += [f"{bad} of {len(frame)} values are not finite"] * (bad > 0)
        twice = frame.loc[frame.duplicated(site_columns(frame)), "name"]
        if len(twice):
            reasons.append(f"{len(twice)} rows repeat a site, such as {twice.iloc[0]}")
        InputError.raise_if(reasons, _PROBLEM)
        if "unpatched" in frame:
            score = self.baseline + (frame["value"] - frame["unpatched"]) / span
        else:
            score = (frame["value"] - self.corrupted_value) / span
        frame.insert(list(frame).index("value") + 1, "score", score)
        object.__setattr__(self, "frame", frame)

    @classmethod
    def of_prompts(
        cls,
        model: Any,
        groups: Sequence[SiteGroup],
        over: OverPrompts,
        part: str,
        method: str = MEASURED,
        **others: Any,
    ) -> "Sweep":
        """Return the sweep of the values of all prompts, with the settings of its runs.

        Args:
            model: that was patched.
            groups: the sites.
            over: their values.
            part: of each head.
            method: how they were found.
            others: `exact`, which rows are patches where others are estimates; and fields of an
                attribution.
        """
        frame = pd.concat([group.rows for group in groups], ignore_index=True)
        if "exact" in others:
            frame = frame.assign(exact=others.pop("exact"))
        if over.per_prompt:
            frame = frame.loc[frame.index.repeat(over.n_prompts)].reset_index(drop=True)
        clean_value, corrupted_value = over.ends
        return cls(
            frame.assign(**over.columns()),
            part=part,
            direction=over.direction,
            metric=over.name,
            clean_value=clean_value,
            corrupted_value=corrupted_value,
            n_prompts=over.n_prompts,
            model=str(getattr(model.cfg, "model_name", "")),
            method=method,
            **others,
        )

    @property
    def has_prompts(self) -> bool:
        """Whether rows are of single prompts, more than one of them."""
        return "prompt" in self.frame and self.frame["prompt"].nunique() > 1

    def query(self, condition: str) -> "Sweep":
        """Return the rows that meet a condition, such as `layer == 3 and kind == 'neuron'`."""
        return replace(self, frame=self.frame.query(condition))

    def _headline(self) -> str:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        rows = "rows of each prompt" if "prompt" in self.frame else "rows"
        errors = ", without standard errors: its metric is one number of all prompts"
        repaired = ""
        if "exact" in self.frame and self.frame["exact"].any():
            repaired = f", {self.frame['exact'].sum()} of them exact patches"
            if self.expected_pearson is not None:
                repaired += f" (expected correlation with patching: {self.expected_pearson:.3g})"
        missing = SPREAD[0] in self.frame and bool(self.frame[SPREAD[0]].isna().any())
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {len(self.frame)} {rows}"
            f"{repaired}, "
            f"{self.n_prompts} prompts{errors * missing}; {self.metric} is {self.clean_value:.4g} "
            f"clean, {self.corrupted_value:.4g} corrupted"
        )


def site_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns that tell rows of a sweep apart."""
    return ["name", "position", "part", *(["prompt"] if "prompt" in frame else [])]


def _categories(column: "pd.Series[Any]") -> pd.Categorical:
    """Text as categories, in order of appearance."""
    codes, found = pd.factorize(column, use_na_sentinel=False)  # nameless rows are an error
    text = found.astype(str) if isinstance(found, pd.CategoricalIndex) else found
    return pd.Categorical.from_codes(codes, categories=text)


def _positions(column: "pd.Series[Any]") -> Any:
    """Numbers as integers, and labels as categories."""
    if pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(dtype=np.int64)
    labels = pd.unique(column)
    if not all(isinstance(each, str) for each in labels):
        got = list(labels)[:7]
        raise InputError(
            [f"got positions {got}; expected numbers alone, or texts: 'all', or roles"], _PROBLEM
        )
    return _categories(column)
