"""Results of sweeps and of path patching, as frames with one row per site or path.

    score = (value - corrupted) / (clean - corrupted)

The score is 0 for the corrupted run and 1 for the clean run. Denoising raises the score from 0, and
noising lowers the score from 1. Values are means over prompts. For a single prompt whose value
before the patch is `unpatched`, the score is baseline + (value - unpatched) / (clean - corrupted).
The mean of these scores over prompts equals the score of the mean value.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.stats import pearsonr, spearmanr

from attn_only_lens.arguments import a_type, as_plain, is_count, is_number
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.metrics import require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import joined, token_texts_of_prompts
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.over_prompts import SPREAD, OverPrompts
from attn_only_lens.patching.site_groups import SiteGroup, roles, site_rows
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import TableFields, read_table, write_table

BASELINE = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0, "bias": 1.0}
"""The score of the target run, for each direction. Ablations patch into the clean run."""
MEASURED = "patching"
"""The method name of a sweep in which every patch was run."""
PARTS = ("by_pattern", "by_value")
"""Columns of a split attribution: parts of the score, through patterns and through values."""

TOP = 20
"""How many rows `top` returns by default; `attribution` checks as many by exact patches."""

_BY_PROMPT = ("prompt", "unpatched")
_SHOWN_ROWS, _SHOWN_TOKENS, _LONGEST_TOKEN = 10, 2, 16
# `top` returns these columns, and the first tuple of `_DETAILS` whose columns all exist.
_ALWAYS_ON_TOP = (
    *("name", "sender", "receiver", "position", "token", "part", "score", "effect", "exact"),
    "before_switch",
)
_DETAILS: tuple[tuple[str, ...], ...] = (
    ("score_standard_error",),
    ("value", "prompt"),
    ("estimate",),
    PARTS,
    ("value",),
)
_SAME_RUN = 0.01  # a tolerance relative to |clean - corrupted|, above rounding errors in any dtype
_PROBLEM = "these are not results of patching"
_METRIC_NAMES = {
    "logit_diff": "Logit difference",
    "probability_diff": "Probability difference",
    "log_probability": "Log probability",
    "kl": "KL divergence",
}
_Column: TypeAlias = "pd.Series[Any]"
_Results = TypeVar("_Results", bound="ScoredFrame")


@dataclass(frozen=True)
class PromptTokens:
    """The token texts of all prompts.

    Attributes:
        clean: for each clean prompt, the token text at each position; None for padding.
        corrupted: token texts of the corrupted prompts; empty without corrupted prompts.
        roles: the position of each role in each prompt.

    Example:
        >>> from attn_only_lens.patching.results import PromptTokens
        >>> tokens = PromptTokens([["The", " keys", " of"]], [["The", " key", " of"]],
        ...                       {"subject": [1]})
        >>> tokens.text(0), tokens.text(-2), tokens.text("subject"), tokens.text("all")
        ("'The'", "' keys' / ' key'", "' keys' / ' key'", '')
    """

    clean: list[list[str | None]]
    corrupted: list[list[str | None]]
    roles: dict[str, list[int]]

    @classmethod
    def of_groups(cls, model: Any, pair: PromptPair, groups: Sequence[SiteGroup]) -> "PromptTokens":
        """Return the token texts of all prompts, and the position of each role in the groups."""
        clean = token_texts_of_prompts(model, pair.clean, pair.real)
        single = pair.corrupted is pair.clean
        corrupted = [] if single else token_texts_of_prompts(model, pair.corrupted, pair.real)
        positions = {
            str(role.label): role.chosen.int().argmax(dim=1).tolist() for role in roles(groups)
        }
        return cls(clean, corrupted, positions)

    def text(
        self,
        position: int | str,
        prompts: Iterable[int] | None = None,
        shown: Callable[[str], str] = repr,
    ) -> str:
        """Return the clean token at a position, and the corrupted token if it differs.

        If the prompts have different tokens at the position, return the two most frequent clean
        tokens, followed by "…" if there are more than two.
        """
        chosen = range(len(self.clean)) if prompts is None else prompts
        pairs = Counter(pair for i in chosen if (pair := self._pair(position, i)) is not None)
        if len(pairs) == 1:
            ((clean, corrupted),) = pairs
            return _cut(shown(clean)) + f" / {_cut(shown(corrupted))}" * (clean != corrupted)
        texts = Counter[str]()
        for (clean, _), count in pairs.items():
            texts[clean] += count
        most = ", ".join(_cut(shown(text)) for text, _ in texts.most_common(_SHOWN_TOKENS))
        return most + ", …" * (len(texts) > _SHOWN_TOKENS)

    def clean_text(self, position: int | str, prompts: Iterable[int]) -> str:
        """Return the clean token at a position, or "" if prompts have different tokens."""
        pairs = [self._pair(position, prompt) for prompt in prompts]
        texts = {pair and pair[0] for pair in pairs}
        return (texts.pop() or "") if len(texts) == 1 else ""

    def _pair(self, position: int | str, prompt: int) -> tuple[str, str] | None:
        """Return a prompt's clean and corrupted token at a position; None if it is padding."""
        row = self.clean[prompt]
        if isinstance(position, str):
            if position not in self.roles:
                return None
            column = self.roles[position][prompt]
        elif position < 0:
            column = max(i for i, token in enumerate(row) if token is not None) + position + 1
        else:
            column = position
        clean = row[column] if 0 <= column < len(row) else None
        if clean is None:
            return None
        return clean, str(self.corrupted[prompt][column]) if self.corrupted else clean


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TOKEN else f"{text[: _LONGEST_TOKEN - 1]}…"


def _floats(column: _Column) -> npt.NDArray[np.float64]:
    try:
        if pd.api.types.is_complex_dtype(column.dtype):
            raise TypeError(f"its dtype is {column.dtype}")
        return column.to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError) as error:
        reason = f"{column.name} cannot be read ({error}); expected numbers"
        raise InputError([reason], _PROBLEM) from error


def _integers(column: _Column) -> npt.NDArray[np.int64]:
    """Return the column as integers, even if pandas has turned them into floats."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        return column.to_numpy(dtype=np.int64, copy=True)
    floats = _floats(column)
    bad = floats[~(np.abs(floats) < 2**53) | (floats != np.round(floats))]
    reasons = [f"got {column.name} {number}; expected whole numbers" for number in bad[:1]]
    InputError.raise_if(reasons, _PROBLEM)
    return floats.astype(np.int64)


def _flags(column: _Column) -> npt.NDArray[np.bool_]:
    """Return the column as booleans, which CSV files store as text."""
    if column.dtype == bool:
        return column.to_numpy(copy=True)
    text = column.astype(str)
    odd = sorted(set(text.unique()) - {"True", "False"})
    reasons = [f"got {column.name}={value}; expected True or False" for value in odd]
    InputError.raise_if(reasons, _PROBLEM)
    return (text == "True").to_numpy()


def _texts(column: _Column) -> pd.Categorical:
    """Return a column of strings as a categorical, with the categories in order of appearance."""
    try:
        codes, distinct = pd.factorize(column)
    except TypeError as error:  # lists are not hashable
        reason = f"{column.name} cannot be read ({error}); expected numbers or texts"
        raise InputError([reason], _PROBLEM) from error
    texts = np.asarray(distinct, dtype=object)
    reasons = [f"{column.name} has rows with missing values (null)"] * (-1 in codes)
    odd = [text for text in texts if not isinstance(text, str)][:1]
    reasons += [f"got {column.name} {text!r}; expected text" for text in odd]
    InputError.raise_if(reasons, _PROBLEM)
    return pd.Categorical.from_codes(codes, categories=pd.Index(texts, dtype=object))


def _positions(column: _Column) -> npt.NDArray[np.int64] | pd.Categorical:
    if pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans:
        return column.to_numpy(dtype=np.int64, copy=True)
    try:
        return _texts(column)
    except InputError as error:
        reason = (
            f"got positions {column.drop_duplicates().head(7).tolist()}; expected only numbers, "
            "or only texts ('all' or roles)"
        )
        raise InputError([reason], _PROBLEM) from error


_MEANS = dict.fromkeys(SPREAD, _floats)
_PROMPTS = {"prompt": _integers, "unpatched": _floats}
_SWEEP_COLUMNS: dict[str, Callable[[_Column], Any]] = {
    **{"layer": _integers, "kind": _texts, "index": _integers, "name": _texts},
    **{"position": _positions, "part": _texts, "value": _floats},
    **{**_PROMPTS, **_MEANS, "exact": _flags, "before_switch": _flags},
    **dict.fromkeys(PARTS, _floats),
}
_PATH_COLUMNS: dict[str, Callable[[_Column], Any]] = {
    **{"sender": _texts, "receiver": _texts, "part": _texts, "position": _positions},
    **{"value": _floats, **_MEANS, **_PROMPTS, "estimate": _floats},
}


@dataclass(frozen=True, eq=False, repr=False)
class ScoredFrame:
    """A frame of results with a column `score`, and the settings that produced them.

    Each subclass lists the columns that its frame may have, and how to read each one. The listed
    columns up to `value`, except `part`, are required.
    """

    _document: ClassVar[Document]
    _columns: ClassVar[Mapping[str, Callable[[_Column], Any]]]

    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    tokens: PromptTokens | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        InputError.raise_if(self._setting_reasons(), _PROBLEM)
        self._require_columns()
        rows = self.frame
        if "part" not in rows:
            rows = rows.assign(part=pd.Categorical([self.part]).repeat(len(rows)))
        frame = pd.DataFrame(
            {name: read(rows[name]) for name, read in self._columns.items() if name in rows}
        )
        InputError.raise_if(self._row_reasons(frame), _PROBLEM)
        frame.insert(list(frame).index("value") + 1, "score", self._scores(frame))
        object.__setattr__(self, "frame", frame)

    def _require_columns(self) -> None:
        if not isinstance(self.frame, pd.DataFrame):
            reason = f"got {a_type(self.frame)}; expected a pandas DataFrame"
            raise InputError([reason], _PROBLEM)
        names, columns = set(self.frame.columns), list(self._columns)
        end = columns.index("value") + 1
        required = [name for name in columns[:end] if name != "part"]
        unknown = names - {*columns, "score"}
        halves = any(len(names & set(pair)) == 1 for pair in (_BY_PROMPT, SPREAD))
        missing = not names.issuperset(required)
        if unknown or halves or missing or not self.frame.columns.is_unique:
            reason = (
                f"got columns {list(self.frame.columns)}; expected {required}, and any of "
                f"{columns[end:]} (both or neither of {_BY_PROMPT}, and of {SPREAD}), each once"
            )
            raise InputError([reason], _PROBLEM)

    def _row_reasons(self, frame: pd.DataFrame) -> list[str]:
        """Return every reason why the rows are invalid."""
        reasons = []
        if not (frame["part"] == self.part).all():
            parts = sorted({str(name) for name in frame["part"]})
            reasons.append(f"got parts {parts}; expected only {self.part!r}")
        finite = np.isfinite(frame[[name for name in ("value", "unpatched") if name in frame]])
        if bad := int((~finite.all(axis=1)).sum()):
            reasons.append(f"{bad} of {len(frame)} values are not finite")
        return reasons

    def _setting_reasons(self) -> list[str]:
        """Return every reason why the settings are invalid."""
        reasons = [
            f"got {name}={getattr(self, name)!r}; expected a text"
            for name in ("part", "metric", "model")
            if not isinstance(getattr(self, name), str)
        ]
        if self.direction not in list(BASELINE):  # a list, because `direction` may be unhashable
            reasons.append(f"got direction={self.direction!r}; expected one of {list(BASELINE)}")
        ends = as_plain(self.clean_value), as_plain(self.corrupted_value)
        if not all(map(is_number, ends)) or ends[0] == ends[1]:
            reasons.append(
                f"the metric is {ends[0]!r} on the clean run and {ends[1]!r} on the corrupted run; "
                "expected two finite numbers that differ"
            )
        if not is_count(self.n_prompts, 1):
            reasons.append(f"got n_prompts={self.n_prompts!r}; expected 1 or more")
        if not isinstance(self.tokens, PromptTokens | None):
            got = type(self.tokens).__name__
            reasons.append(f"got tokens of type {got}; expected PromptTokens, or None")
        elif self.tokens is not None and len(self.tokens.clean) != self.n_prompts:
            got = f"tokens of {len(self.tokens.clean)} prompts"
            reasons.append(f"got {got} and n_prompts={self.n_prompts}; expected the same number")
        return reasons

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the frame."""
        return self.frame.copy()

    @property
    def clean_and_corrupted(self) -> str:
        """The metric in both runs as a string: "Logit difference 7.57 (clean), …"."""
        kind = self.metric.partition("(")[0].partition(" of ")[0]
        name = _METRIC_NAMES.get(kind, kind[:1].upper() + kind[1:])
        return f"{name} {self.clean_value:.3g} (clean), {self.corrupted_value:.3g} (corrupted)"

    @property
    def baseline(self) -> float:
        """The score of the target run, which is also the score of a patch without effect."""
        return BASELINE[self.direction]

    @property
    def effect(self) -> "pd.Series[float]":
        """Each patch's score minus `baseline`, the score without a patch."""
        return pd.Series(self.frame["score"].to_numpy() - self.baseline, name="score")

    def _scores(self, frame: pd.DataFrame) -> Float[np.ndarray, "row"]:
        """Return the score of each row, from its value."""
        value, span = frame["value"].to_numpy(), self.clean_value - self.corrupted_value
        if "unpatched" in frame:
            return self.baseline + (value - frame["unpatched"].to_numpy()) / span
        return (value - self.corrupted_value) / span

    def __len__(self) -> int:
        return len(self.frame)

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k rows with the largest |effect|, largest first; ties keep their order.

        If the score without a patch is 1 (all directions but "denoise"), the column `effect` has
        the score minus 1: a site with a score near 0 matters most.
        In an attribution, column `exact` says which rows are exact patches; the others are
        estimates. With `per_prompt`, a site can appear once for each prompt. The result has only
        columns that fit into 80 characters; `frame` has all columns. The column `token` has the
        clean prompt's token at the position, or an empty text if prompts have different tokens.
        """
        if not is_count(k, 1):
            raise InputError([f"got k={k!r}; expected 1 or more"], "no rows can be picked")
        rows = self.frame.iloc[self.effect.abs().nlargest(k).index]
        if self.baseline:
            rows = rows.assign(effect=rows["score"] - self.baseline)
        if self.tokens is not None:
            token = self.tokens.clean_text
            texts = [token(position, prompts) for position, prompts in self._positions_of(rows)]
            rows = rows.assign(token=texts) if any(texts) else rows
        details = next(group for group in _DETAILS if set(group) <= set(rows))
        return rows[[name for name in (*_ALWAYS_ON_TOP, *details) if name in rows]]

    def _positions_of(self, rows: pd.DataFrame) -> list[tuple[int | str, Iterable[int]]]:
        """Return each row's position, and the prompts over which its value was averaged."""
        every = range(self.n_prompts)
        prompts = [[i] for i in rows["prompt"]] if "prompt" in rows else [every] * len(rows)
        return list(zip(rows["position"], prompts, strict=True))

    def save(self, path: str | Path) -> None:
        """Write a .parquet file, or a .csv file with a .csv.json file next to it."""
        settings = {name: getattr(self, name) for name in self._settings()}
        settings["tokens"] = None if self.tokens is None else vars(self.tokens)
        write_table(path, self.frame, self._document, **settings)

    @classmethod
    def load(cls: "type[_Results]", path: str | Path) -> "_Results":
        """Read a file that `save` wrote."""
        frame, document = read_table(path, cls._document)
        settings = {name: document[name] for name in cls._settings()}
        if settings["tokens"] is not None:
            settings["tokens"] = PromptTokens(**settings["tokens"])
        return cls(frame, **settings)

    @classmethod
    def _settings(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name != "frame"]

    @abstractmethod
    def _kind_and_rows(self) -> tuple[str, str]:
        """Return two strings: what kind of results these are, and how many rows they have."""

    def _headline(self) -> str:
        """Return a one-line description of these results."""
        kind, rows = self._kind_and_rows()
        missing = SPREAD[0] in self.frame and bool(self.frame[SPREAD[0]].isna().any())
        errors = ", without standard errors: the metric has one value for all prompts" * missing
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {rows}, {self.n_prompts} "
            f"prompts{errors}; {self.metric} is {self.clean_value:.4g} clean, "
            f"{self.corrupted_value:.4g} corrupted"
        )

    def _shown(self, as_text: Callable[..., str]) -> str:
        """Return the top rows as text, with the tokens at each row's position."""
        top = self.top(_SHOWN_ROWS)
        if self.tokens is not None:
            texts = [self.tokens.text(*pair) for pair in self._positions_of(top)]
            top = top.drop(columns="token", errors="ignore")
            top.insert(list(top.columns).index("position") + 1, "token", texts)
        return as_text(top, index=False) if len(top) else "no rows"

    def _prompts(self) -> list[str]:
        """Return the text of each prompt that has rows of its own in `_shown`."""
        if self.tokens is None or "prompt" not in self.frame:
            return []
        shown = sorted({*self.top(_SHOWN_ROWS)["prompt"]})
        return [f"prompt {i}: {shortened(joined(self.tokens.clean[i]))}" for i in shown]

    def __repr__(self) -> str:
        return "\n".join([self._headline(), self._shown(pd.DataFrame.to_string), *self._prompts()])

    def _repr_html_(self) -> str:
        prompts = "<br>".join(map(escape, self._prompts()))
        shown = self._shown(pd.DataFrame.to_html)
        return f"<p>{escape(self._headline())}</p>\n{shown}{prompts}"


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
    unknown: dict[HeadKind, str]
    forwards: float


class _PathFields(_Fields):
    scale: str
    n_paths: int


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(ScoredFrame):
    """The results of a sweep, with its settings.

    Attributes:
        frame: one row per site and position. Columns: `layer`, `kind`, `index`, `name`, `position`
            (a number, "all", or a role), `part`, `value` (the metric after the patch), `score`. For
            several prompts, there are also `value_standard_error` and `score_standard_error` (see
            `over_prompts.py`), which are missing if the metric has one value for all prompts. With
            `per_prompt` there is instead one row per site and prompt, with columns `prompt`
            (counted from 0) and `unpatched` (the prompt's metric before the patch). A split
            attribution has `by_pattern` and `by_value`, which add up to the effect on the score. An
            attribution has `exact` (False for estimates) and, if the runs differ by a switch (see
            `attribution`), `before_switch`. A frame passed to the constructor needs no `part` and
            `score`.
        part: the part of each head that was patched: "z", "pattern", "value", "q" or "k".
        direction: "denoise" (clean into corrupted), "noise" (corrupted into clean), or the ablation
            of z in the clean run: "zero", "mean", "resample" or "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of prompt pairs; values are means over them, unless `per_prompt`.
        model: the model's name.
        method: "patching" if every patch was run, or the method of `attribution`.
        expected_pearson: for an attribution with exact patches, the expected correlation with
            patching over attention heads ("attention") and neuron-heads ("neuron"). The expected
            correlation is not a bound. It is None if it is unknown.
        unknown: for each kind of head whose expected correlation is None, the reason.
        forwards: the cost of these exact patches, in forward passes (counted in flops).
        tokens: the texts of the prompts' tokens, which pictures show at positions, or None.

    Raises:
        InputError: columns are missing or unknown, a value is not finite, a site occurs twice,
            positions mix numbers and strings, a name stands for two heads, or the clean value
            equals the corrupted value.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": -1, "value": [2.0, -1.0]})
        >>> sweep = p.Sweep(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
        ...                 clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="adder")
        >>> sweep.to_frame()["score"].tolist(), sweep.top(1)["name"].tolist()
        ([0.75, 0.0], ['L0N5'])
    """

    _document = Document("attn_only_lens.Sweep", 5, _SweepFields)
    _columns = _SWEEP_COLUMNS

    method: str = MEASURED
    expected_pearson: dict[HeadKind, float | None] = field(default_factory=dict)
    unknown: dict[HeadKind, str] = field(default_factory=dict)
    forwards: float = 0.0

    def _row_reasons(self, frame: pd.DataFrame) -> list[str]:
        reasons, names = super()._row_reasons(frame), frame["name"]
        codes = names.cat.codes.to_numpy()
        first_row = np.zeros(len(names.cat.categories), dtype=np.int64)
        first_row[codes[::-1]] = np.arange(len(frame))[::-1]
        for column in ("layer", "kind", "index"):
            values = frame[column]
            numbers = (values.cat.codes if column == "kind" else values).to_numpy()
            differ = numbers != numbers[first_row[codes]]
            if differ.any():
                reasons.append(f"rows for {names[differ.argmax()]} have different {column} values")
        again = _sites(frame).duplicated(keep="last")
        if again.any():
            reasons.append(f"{again.sum()} rows repeat a site, such as {names[again.argmax()]}")
        return reasons

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
        before_switch: Bool[np.ndarray, "row"] | None = None,
        by_pattern: Float[np.ndarray, "row"] | None = None,
        **fields: Any,
    ) -> "Sweep":
        """Return the results of a sweep over all prompts.

        `exact` marks rows with exact values, and `before_switch` sites before a switch (see
        `attribution`). `by_pattern` is how much each patch changes the metric through patterns.
        """
        clean_value, corrupted_value = totals.ends
        require_distinct(clean_value, corrupted_value, next(model.parameters()).dtype)
        columns: dict[str, Any] = totals.columns()
        rows = np.repeat(np.arange(totals.n_rows), len(columns["value"]) // totals.n_rows)
        if exact is not None:
            columns["exact"] = exact[rows]
        if before_switch is not None:
            columns["before_switch"] = before_switch[rows]
        if by_pattern is not None:
            span = clean_value - corrupted_value
            unpatched = corrupted_value if totals.direction == "denoise" else clean_value
            columns["by_pattern"] = by_pattern / span
            columns["by_value"] = (columns["value"] - unpatched - by_pattern) / span
        return cls(
            site_rows(groups).iloc[rows].reset_index(drop=True).assign(**columns),
            method=method,
            **run_settings(model, pair, groups, totals, part),
            **fields,
        )

    @property
    def has_prompts(self) -> bool:
        """Whether the frame has separate rows for several prompts."""
        return "prompt" in self.frame and self.frame["prompt"].nunique() > 1

    def query(self, condition: str) -> "Sweep":
        """Return the rows that satisfy a condition such as `layer == 3 and kind == 'neuron'`.

        As in `DataFrame.query`, `name in @names` uses the caller's variable `names`.

        Raises:
            InputError: `condition` is not a condition on columns of the frame.
        """
        problem = f"no rows can be selected by {condition!r}"
        try:
            mask = self.frame.eval(condition, level=1)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            reason = f"{error}; expected a condition on {list(self.frame.columns)}"
            raise InputError([reason], problem) from error
        if not (isinstance(mask, pd.Series) and mask.dtype == bool):
            got = mask.dtype if isinstance(mask, pd.Series) else type(mask).__name__
            reason = f"the result is {got}; expected True or False for each row"
            raise InputError([reason], problem)
        return replace(self, frame=self.frame[mask])

    def _kind_and_rows(self) -> tuple[str, str]:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        rows = f"{len(self)} rows" + ", one per site and prompt" * ("prompt" in self.frame)
        if self.method == MEASURED or "exact" not in self.frame:
            return kind, rows
        rows += f", {int(self.frame['exact'].sum())} of them exact patches"
        if self.expected_pearson:
            expected = ", ".join(
                f"{kind} unknown ({self.unknown.get(kind)})"
                if value is None
                else f"{kind} {value:.3g}"
                for kind, value in self.expected_pearson.items()
            )
            rows += f" (expected correlation with patching: {expected})"
        top = self.effect.abs().nlargest(TOP)
        n_estimates = int((~self.frame["exact"])[top[top > 0].index].sum())
        rows += f"; {n_estimates} of the top {TOP} rows are estimates" * (n_estimates > 0)
        return kind, rows


def run_settings(
    model: Any, pair: PromptPair, groups: Sequence[SiteGroup], totals: OverPrompts, part: str
) -> dict[str, Any]:
    """Return the settings that `Sweep` and `Paths` share."""
    return {
        "part": part,
        "direction": totals.direction,
        "metric": totals.name,
        "clean_value": totals.ends[0],
        "corrupted_value": totals.ends[1],
        "n_prompts": totals.n_prompts,
        "model": str(getattr(model.cfg, "model_name", "")),
        "tokens": PromptTokens.of_groups(model, pair, groups),
    }


def _sites(frame: pd.DataFrame) -> pd.MultiIndex:
    """Return an index (name, position, prompt) with which rows of two sweeps are matched."""
    columns = [name for name in ("name", "position", "prompt") if name in frame]
    return pd.MultiIndex.from_frame(frame[columns])


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Paths(ScoredFrame):
    """The results of path patching, with its settings.

    Attributes:
        frame: one row per path. Columns: `sender`, `receiver`, `part`, `position` (the sender's
            position: a number, a role, or "all"), `value` (the metric after the patch) and `score`.
            For several prompts, there are also the columns of a `Sweep`: standard errors of means,
            or `prompt` and `unpatched` for single prompts. With `top`, there is also `estimate`,
            the score estimated from gradients (a mean over prompts).
        part: the receiver inputs that were changed: "q", "k", "value", "pattern" or "z".
        scale: whether the norms before receivers are "held" or computed "anew".
        direction: "denoise" or "noise".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of prompt pairs; values are means over them, unless `per_prompt`.
        n_paths: the number of all paths; it exceeds the number of rows if only the top paths were
            patched.
        model: the model's name.
        tokens: the texts of the prompts' tokens, or None.

    Raises:
        InputError: a column is missing, or a value is not a finite number.

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
    _columns = _PATH_COLUMNS

    scale: str
    n_paths: int

    def _kind_and_rows(self) -> tuple[str, str]:
        out_of = "" if self.n_paths == len(self.frame) else f" of {self.n_paths:,}"
        return "Paths", f"{len(self.frame)}{out_of} rows"


def agreement(exact: Sweep, approx: Sweep, k: int = TOP) -> pd.DataFrame:
    """Compare each site's effect (`Sweep.effect`) in two sweeps, whose row orders may differ.

    Args:
        exact: one sweep.
        approx: another sweep with the same sites, positions, part, direction, metric and prompts.
        k: how many rows with the largest |effect| to compare; ties keep the order of `exact`.

    Returns:
        A one-row frame. Columns: `pearson`, `spearman` (ties share their mean rank), `top_k` (the
        share of the k largest effects in one sweep that are among the k largest in the other), `k`,
        `n` (the number of rows).

    Raises:
        InputError: with every reason: sites that only one sweep has; different parts, directions,
            metrics or metric values of the runs; constant scores; k not from 1 to n.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [2, 5, 7],
        ...                        "name": ["L0N2", "L0N5", "L0N7"], "position": -1,
        ...                        "value": [1.0, 2.0, -1.0]})
        >>> run = {"part": "z", "direction": "denoise", "metric": "logit_diff(7, 8)",
        ...        "clean_value": 3.0, "corrupted_value": -1.0, "n_prompts": 1, "model": "adder"}
        >>> exact, approx = p.Sweep(values, **run), p.Sweep(values[::-1], **run)
        >>> p.agreement(exact, approx, k=2).round(6).to_dict("records")
        [{'pearson': 1.0, 'spearman': 1.0, 'top_k': 1.0, 'k': 2, 'n': 3}]
    """
    problem = "these sweeps cannot be compared"
    if ("prompt" in exact.frame) != ("prompt" in approx.frame):
        reason = (
            "one sweep has rows for single prompts and the other means over prompts; expected the "
            "same `per_prompt` for both"
        )
        raise InputError([reason], problem)
    order = _sites(approx.frame).get_indexer(_sites(exact.frame))  # -1 for missing sites
    reasons = _differences(exact, approx) + _site_reasons(exact, approx, order)
    for label, sweep in (("exact", exact), ("approx", approx)):
        if not np.ptp(sweep.effect) > 0:
            reasons.append(f"all scores of {label} are equal; expected scores that differ")
    if not is_count(k, 1, len(exact)):
        reasons.append(f"got k={k!r}; expected 1 to {len(exact)}, the number of rows")
    InputError.raise_if(reasons, problem)
    effects = exact.effect, approx.effect.iloc[order].reset_index(drop=True)
    top = [effect.abs().nlargest(k).index for effect in effects]
    row = {
        "pearson": pearsonr(*effects).statistic,
        "spearman": spearmanr(*effects).statistic,
        "top_k": len(top[0].intersection(top[1])) / k,
        "k": k,
        "n": len(exact),
    }
    return pd.DataFrame([row])


def _differences(exact: Sweep, approx: Sweep) -> list[str]:
    reasons = [
        f"exact has {name} {getattr(exact, name)!r}, but approx has {getattr(approx, name)!r}"
        for name in ("direction", "metric", "part")
        if getattr(exact, name) != getattr(approx, name)
    ]
    span = abs(exact.clean_value - exact.corrupted_value)
    for name in ("clean_value", "corrupted_value"):
        values = getattr(exact, name), getattr(approx, name)
        if not abs(values[0] - values[1]) <= _SAME_RUN * span:
            reasons.append(
                f"{name} is {values[0]:.4g} in exact and {values[1]:.4g} in approx; expected "
                "the same prompts and model"
            )
    return reasons


def _site_reasons(exact: Sweep, approx: Sweep, order: Int[np.ndarray, "row"]) -> list[str]:
    """Return an error message if the sites of the two sweeps differ."""
    only_exact = exact.frame[order < 0]
    only_approx = approx.frame[~approx.frame.index.isin(order)]
    if only_exact.empty and only_approx.empty:
        return []
    row = (only_approx if only_exact.empty else only_exact).iloc[0]
    example = f"{row['name']} at {row['position']}"
    example += f", prompt {row['prompt']}" if "prompt" in row else ""
    return [
        f"{len(only_exact)} of {len(exact)} rows are only in exact, and {len(only_approx)} of "
        f"{len(approx)} only in approx, such as {example}; expected the same names and positions"
    ]
