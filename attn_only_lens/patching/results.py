"""The results of sweeps and of path patching: a row for each site or path, with its score.

    score = (value - corrupted) / (clean - corrupted)

is 0 on the corrupted run and 1 on the clean one, in either direction: denoising (clean activations
into the corrupted run) raises it from 0, noising lowers it from 1. Values are means over prompts.
In rows of each prompt, with `unpatched` the prompt's own value in the run that is patched into,

    score = baseline + (value - unpatched) / (clean - corrupted)

so that a patch without effect has the baseline, and the mean over prompts is the score above.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool, Float

from attn_only_lens.engine.metrics import require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.over_prompts import SPREAD, OverPrompts
from attn_only_lens.patching.scored_frame import PromptTokens, ScoredFrame
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import TableFields

MEASURED = "patching"
"""The method of a sweep that ran every patch."""
_PROBLEM = "these are not the results of a sweep"
_NOT_PATHS = "these are not the results of path patching"
_REQUIRED = ["layer", "kind", "index", "name", "position", "value"]
_BY_PROMPT = ("prompt", "unpatched")
PARTS = ("by_pattern", "by_value")
"""Columns of an attribution that is split: shares of `score`, through patterns and values."""
_PATH_COLUMNS = ["sender", "receiver", "position", "value"]
_Column: TypeAlias = "pd.Series[Any]"


class _Fields(TableFields):
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    tokens: PromptTokens | None


class _SweepFields(_Fields):
    method: str
    expected_pearson: dict[HeadKind, float | None]
    forwards: float


class _PathFields(_Fields):
    scale: str
    n_paths: int


def _checked_frame(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Return a copy of a sweep's frame without scores, with texts as categoricals; or refuse it."""
    _require_columns(frame)
    columns: dict[str, Any] = {
        "layer": _integers(frame["layer"]),
        "kind": _texts(frame["kind"]),
        "index": _integers(frame["index"]),
        "name": _texts(frame["name"]),
        "position": _positions(frame["position"]),
        "part": pd.Categorical([part]).repeat(len(frame)),
        **{name: read(frame[name]) for name, read in _COLUMNS.items() if name in frame},
    }
    checked, names = pd.DataFrame(columns), columns["name"]
    reasons = []
    if "part" in frame and not (frame["part"] == part).all():
        parts = sorted({str(name) for name in frame["part"]})
        reasons.append(f"got parts {parts}; expected {part!r} alone")
    first_rows = np.unique(names.codes, return_index=True)[1]
    for column in ("layer", "kind", "index"):
        values = columns["kind"].codes if column == "kind" else columns[column]
        differ = values != values[first_rows][names.codes]
        if differ.any():
            reasons.append(f"rows of {names[differ.argmax()]} differ in their {column}")
    again = checked.duplicated(site_columns(checked), keep="last")
    if again.any():
        reasons.append(f"{again.sum()} rows repeat a site, such as {names[again.argmax()]}")
    finite = np.isfinite(checked[[name for name in ("value", "unpatched") if name in checked]])
    if bad := int((~finite.all(axis=1)).sum()):
        reasons.append(f"{bad} of {len(checked)} values are not finite")
    InputError.raise_if(reasons, _PROBLEM)
    return checked


def site_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns that identify a row of a sweep."""
    return [name for name in ("name", "position", "prompt") if name in frame]


def _require_columns(frame: pd.DataFrame) -> None:
    if not isinstance(frame, pd.DataFrame):
        reason = f"got a {type(frame).__name__}; expected a pandas DataFrame"
        raise InputError([reason], _PROBLEM)
    names = set(frame.columns)
    unknown = names - {*_REQUIRED, "part", "score", *_COLUMNS}
    halves = any(len(names & set(pair)) == 1 for pair in (_BY_PROMPT, SPREAD))
    if unknown or halves or not names.issuperset(_REQUIRED) or not frame.columns.is_unique:
        optional = [name for name in _COLUMNS if name != "value"]
        reason = (
            f"got columns {list(frame.columns)}; expected {_REQUIRED}, and any of {optional}, with "
            f"{_BY_PROMPT} and {SPREAD} together, each once"
        )
        raise InputError([reason], _PROBLEM)


def _texts(column: _Column) -> pd.Categorical:
    """Return texts as a categorical, with categories in the order of appearance."""
    try:
        codes, texts = pd.factorize(column)
    except TypeError as error:  # of lists
        reason = f"{column.name} cannot be read ({error}); expected numbers or texts"
        raise InputError([reason], _PROBLEM) from error
    InputError.raise_if(
        [f"{column.name} has rows without a value (null)"] * (-1 in codes), _PROBLEM
    )
    odd = [text for text in texts if not isinstance(text, str)][:1]
    InputError.raise_if([f"got {column.name} {text!r}; expected text" for text in odd], _PROBLEM)
    return pd.Categorical.from_codes(codes, categories=pd.Index(np.asarray(texts, dtype=object)))


def _positions(column: _Column) -> npt.NDArray[np.int64] | pd.Categorical:
    if pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans:
        return column.to_numpy(dtype=np.int64, copy=True)
    try:
        return _texts(column)
    except InputError as error:
        reason = (
            f"got positions {column.drop_duplicates().head(7).tolist()}; expected numbers alone, "
            "or texts: 'all', or roles"
        )
        raise InputError([reason], _PROBLEM) from error


def _flags(column: _Column) -> npt.NDArray[np.bool_]:
    """Return True and False, which a CSV file has as text."""
    text = column.astype(str)
    odd = sorted(set(text.unique()) - {"True", "False"})
    InputError.raise_if([f"got exact={value}; expected True or False" for value in odd], _PROBLEM)
    return (text == "True").to_numpy()


def _floats(column: _Column) -> npt.NDArray[np.float64]:
    try:
        if pd.api.types.is_complex_dtype(column.dtype):
            raise TypeError(f"they are {column.dtype}")
        return column.to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError) as error:
        reason = f"{column.name} cannot be read ({error}); expected numbers"
        raise InputError([reason], _PROBLEM) from error


def _integers(column: _Column) -> npt.NDArray[np.int64]:
    """Return integers; pandas makes them floats when it joins frames."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        return column.to_numpy(dtype=np.int64, copy=True)
    floats = _floats(column)
    bad = floats[~(np.abs(floats) < 2**53) | (floats != np.round(floats))]
    reasons = [f"got {column.name} {number}; expected whole numbers" for number in bad[:1]]
    InputError.raise_if(reasons, _PROBLEM)
    return floats.astype(np.int64)


_COLUMNS: dict[str, Callable[[_Column], Any]] = {
    "value": _floats,
    "prompt": _integers,
    "unpatched": _floats,
    **dict.fromkeys(SPREAD, _floats),
    "exact": _flags,
    **dict.fromkeys(PARTS, _floats),
}
"""Columns of values, most of them optional, and how each is read."""


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(ScoredFrame):
    """The results of a sweep, with its settings.

    Attributes:
        frame: a row for each site and position, with columns `layer`, `kind`, `index`, `name`,
            `position` (a number, "all", or a role), `part`, `value` (the metric after the patch),
            `score`. For several prompts also `value_standard_error` and `score_standard_error`
            (see `over_prompts.py`), missing if the metric is one number of all prompts; or, with
            `per_prompt`, a row for each prompt, with `prompt`, counted from 0, and `unpatched`, its
            metric before the patch. A split attribution has `by_pattern` and `by_value`, which add
            up to the effect on the score. A frame that is passed needs no `part` and `score`.
        part: the part of each head that was patched: "z", "pattern", "value", "q", "k".
        direction: "denoise", clean into corrupted; "noise", corrupted into clean; or the
            ablation of z in the clean run, "zero", "mean", "resample", "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of pairs of prompts; values are means over them, unless `per_prompt`.
        model: the model's name.
        method: "patching" if values are measured, or the method of `attribution`.
        expected_pearson: for an attribution with exact repairs, the expected correlation with
            patching over all rows of attention heads ("attention") and of neuron-heads ("neuron").
            It has a margin, but is not a bound. None if too few sites were patched to tell.
        forwards: for such an attribution, the cost of its patches, in flops of forward passes.
        tokens: the texts of the prompts' tokens, which pictures show at positions, or None.

    Raises:
        InputError: columns are missing or unknown, a value is not finite, a site occurs twice,
            positions are numbers and texts, a name stands for two heads, or the clean value equals
            the corrupted one.

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

    _document = Document("attn_only_lens.Sweep", 4, _SweepFields)

    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str = MEASURED
    expected_pearson: dict[HeadKind, float | None] = field(default_factory=dict)
    forwards: float = 0.0
    tokens: PromptTokens | None = None

    def __post_init__(self) -> None:
        reasons = self._setting_reasons()
        if isinstance(self.tokens, PromptTokens) and len(self.tokens.clean) != self.n_prompts:
            got = f"tokens of {len(self.tokens.clean)} prompts"
            reasons.append(f"got {got} and n_prompts={self.n_prompts}; expected the same number")
        InputError.raise_if(reasons, _PROBLEM)
        frame = _checked_frame(self.frame, self.part)
        frame.insert(list(frame).index("value") + 1, "score", self._scores(frame))
        object.__setattr__(self, "frame", frame)

    @classmethod
    def of_prompts(
        cls,
        model: Any,
        pair: PromptPair,
        groups: Sequence[SiteGroup],
        totals: OverPrompts,
        part: str,
        method: str = MEASURED,
        *,
        exact: Bool[np.ndarray, "row"] | None = None,
        by_pattern: Float[np.ndarray, "row"] | None = None,
        **fields: Any,
    ) -> "Sweep":
        """Return the sweep of all prompts.

        `exact` marks patches among estimates; `by_pattern` is what goes through patterns, in units
        of the metric.
        """
        columns: dict[str, Any] = totals.columns()
        sites = pd.concat([group.rows for group in groups], ignore_index=True)
        rows = np.repeat(np.arange(totals.n_rows), len(columns["value"]) // totals.n_rows)
        if exact is not None:
            columns["exact"] = exact[rows]
        clean_value, corrupted_value = totals.ends
        require_distinct(clean_value, corrupted_value, next(model.parameters()).dtype)
        if by_pattern is not None:
            span = clean_value - corrupted_value
            unpatched = corrupted_value if totals.direction == "denoise" else clean_value
            columns["by_pattern"] = by_pattern / span
            columns["by_value"] = (columns["value"] - unpatched - by_pattern) / span
        return cls(
            sites.iloc[rows].reset_index(drop=True).assign(**columns),
            part=part,
            direction=totals.direction,
            metric=totals.name,
            clean_value=clean_value,
            corrupted_value=corrupted_value,
            n_prompts=totals.n_prompts,
            model=str(getattr(model.cfg, "model_name", "")),
            method=method,
            tokens=PromptTokens.of_groups(model, pair, groups),
            **fields,
        )

    @property
    def has_prompts(self) -> bool:
        """Whether rows are for single prompts, and there are several prompts."""
        return "prompt" in self.frame and self.frame["prompt"].nunique() > 1

    def query(self, condition: str) -> "Sweep":
        """Return the rows that meet a condition, such as `layer == 3 and kind == 'neuron'`.

        Names after an @ are variables of the caller: `name in @names`.

        Raises:
            InputError: it is not a condition on columns of the frame.
        """
        problem = f"no rows can be picked by {condition!r}"
        try:
            mask = self.frame.eval(condition, level=1)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            reason = f"{error}; expected a condition on {list(self.frame.columns)}"
            raise InputError([reason], problem) from error
        if not (isinstance(mask, pd.Series) and mask.dtype == bool):
            got = mask.dtype if isinstance(mask, pd.Series) else type(mask).__name__
            raise InputError([f"it gives {got}; expected True or False for each row"], problem)
        return replace(self, frame=self.frame[mask])

    def _headline(self) -> str:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        table = self.frame
        rows = "rows of each prompt" if "prompt" in table else "rows"
        n_exact = int(table["exact"].sum()) if "exact" in table else 0
        repaired = f", {n_exact} of them exact patches" * (n_exact > 0)
        if n_exact and self.expected_pearson:
            expected = ", ".join(
                f"{kind} {'unknown' if value is None else format(value, '.3g')}"
                for kind, value in self.expected_pearson.items()
            )
            repaired += f" (expected correlation with patching: {expected})"
        missing = SPREAD[0] in table and bool(table[SPREAD[0]].isna().any())
        errors = ", without standard errors: its metric is one number of all prompts" * missing
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {len(self)} {rows}{repaired}, "
            f"{self.n_prompts} prompts{errors}; {self.metric} is {self.clean_value:.4g} "
            f"clean, {self.corrupted_value:.4g} corrupted"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Paths(ScoredFrame):
    """The results of path patching, with its settings.

    Attributes:
        frame: a row for each path, with columns `sender`, `receiver`, `part`, `position` (the
            sender's: a number, a role, or "all"), `value` (the metric after the patch) and
            `score`. For several prompts also the columns of a `Sweep`: standard errors of means,
            or `prompt` and `unpatched` of single prompts. With `top` also `estimate`, the score
            estimated by gradients, a mean over prompts.
        part: the inputs of the receivers: "q", "k", "value", "pattern", "z".
        scale: whether the norms that receivers read through are "held" or computed "anew".
        direction: "denoise" or "noise".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of pairs of prompts; values are means over them, unless `per_prompt`.
        n_paths: the number of paths; more than rows if only the top ones were patched.
        model: the model's name.
        tokens: the texts of the prompts' tokens, or None.

    Raises:
        InputError: columns are missing, or a value is not finite.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"sender": "L0H1", "receiver": ["L0N5", "logits"],
        ...                        "position": 2, "value": [2.0, -1.0]})
        >>> paths = p.Paths(values, part="z", scale="held", direction="denoise",
        ...                 metric="logit_diff(7, 8)", clean_value=3.0, corrupted_value=-1.0,
        ...                 n_prompts=1, n_paths=2, model="adder")
        >>> paths.to_frame()["score"].tolist(), paths.top(1)["receiver"].tolist()
        ([0.75, 0.0], ['L0N5'])
    """

    _document = Document("attn_only_lens.Paths", 2, _PathFields)

    frame: pd.DataFrame
    part: str
    scale: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    n_paths: int
    model: str
    tokens: PromptTokens | None = None

    def __post_init__(self) -> None:
        reasons = self._setting_reasons()
        if not set(_PATH_COLUMNS) <= set(self.frame):
            reasons.append(f"got columns {list(self.frame.columns)}; expected {_PATH_COLUMNS}")
        elif bad := int((~np.isfinite(self.frame["value"])).sum()):
            reasons.append(f"{bad} values are not finite")
        InputError.raise_if(reasons, _NOT_PATHS)
        frame = pd.DataFrame(
            {
                "sender": pd.Categorical(self.frame["sender"]),
                "receiver": pd.Categorical(self.frame["receiver"]),
                "part": self.part,
                "position": self.frame["position"].to_numpy(),
                "value": self.frame["value"].to_numpy(dtype=np.float64),
                "score": self._scores(self.frame),
            }
        )
        for name in (*SPREAD, "prompt", "unpatched", "estimate"):
            if name in self.frame:
                dtype = np.int64 if name == "prompt" else np.float64
                frame[name] = self.frame[name].to_numpy(dtype=dtype)
        object.__setattr__(self, "frame", frame)

    def _headline(self) -> str:
        out_of = "" if self.n_paths == len(self.frame) else f" of {self.n_paths:,}"
        return (
            f"Paths of {self.model}: {self.part}, {self.direction}, {len(self.frame)}{out_of} rows,"
            f" {self.n_prompts} prompts; {self.metric} is {self.clean_value:.4g} clean, "
            f"{self.corrupted_value:.4g} corrupted"
        )
