"""The columns that results have: how each is read, which are required, and which go together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import InputError
from attn_only_lens.patching.over_prompts import SPREAD

PROBLEM = "these are not results of patching"
PARTS = ("by_pattern", "by_value")
"""Columns of a split attribution: parts of the score, through patterns and through values."""
_BY_PROMPT = ("prompt", "unpatched")
_TOGETHER = (_BY_PROMPT, SPREAD, PARTS)
"""Columns that a frame has together, or not at all."""
_Values: TypeAlias = "pd.Series[Any]"


def site_ids(frame: pd.DataFrame) -> "pd.Series[str]":
    """Return each row's site, such as "L3H3@5"."""
    return frame["name"].astype(str) + "@" + frame["position"].astype(str)


@dataclass(frozen=True)
class Column:
    """A column that a frame of results has, or may have.

    Attributes:
        name: the column's name.
        read: a function that returns the column's values in the type in which results store them,
            or raises InputError.
        required: whether every frame has the column.
        finite: whether missing and infinite numbers are refused.
    """

    name: str
    read: Callable[[_Values], Any]
    required: bool = False
    finite: bool = False


def read_columns(frame: Any, columns: Sequence[Column]) -> pd.DataFrame:
    """Return a frame with the given columns, each in its type and in the order of `columns`.

    A column `score` is left out, because it follows from the other columns.

    Raises:
        InputError: with every reason: columns are missing or unknown, or values cannot be read.
    """
    if not isinstance(frame, pd.DataFrame):
        raise InputError([f"got {a_type(frame)}; expected a pandas DataFrame"], PROBLEM)
    names, known = set(frame.columns), {column.name for column in columns}
    required = [column.name for column in columns if column.required]
    pairs = [pair for pair in _TOGETHER if known.issuperset(pair)]
    halves = any(len(names & set(pair)) == 1 for pair in pairs)
    complete = names.issuperset(required) and names <= {*known, "score"}
    if halves or not complete or not frame.columns.is_unique:
        optional = [column.name for column in columns if not column.required]
        reason = (
            f"got columns {list(frame.columns)}; expected {required}, and any of {optional} (both "
            f"or neither of {', and of '.join(map(str, pairs))}), each once"
        )
        raise InputError([reason], PROBLEM)
    values, reasons = dict[str, Any](), list[str]()
    for column in columns:
        if column.name in names:
            with InputError.collected(reasons):
                values[column.name] = column.read(frame[column.name])
    InputError.raise_if(reasons, PROBLEM)
    return pd.DataFrame(values)


def finite_reasons(frame: pd.DataFrame, columns: Sequence[Column]) -> list[str]:
    """Return a list with an error message if rows have missing or infinite numbers."""
    names = [column.name for column in columns if column.finite and column.name in frame]
    bad = int((~np.isfinite(frame[names]).all(axis=1)).sum())
    return [f"{bad} of {len(frame)} values are not finite"] * bool(bad)


def _numbers(column: _Values) -> npt.NDArray[np.float64]:
    try:
        if pd.api.types.is_complex_dtype(column.dtype):
            raise TypeError(f"its dtype is {column.dtype}")
        return column.to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError) as error:
        reason = f"{column.name} cannot be read ({error}); expected numbers"
        raise InputError([reason], PROBLEM) from error


def _integers(column: _Values) -> npt.NDArray[np.int64]:
    """Return the column as integers, even if pandas has turned them into floats."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        return column.to_numpy(dtype=np.int64, copy=True)
    numbers = _numbers(column)
    bad = numbers[~(np.abs(numbers) < 2**53) | (numbers != np.round(numbers))]
    reasons = [f"got {column.name} {number}; expected whole numbers" for number in bad[:1]]
    InputError.raise_if(reasons, PROBLEM)
    return numbers.astype(np.int64)


def _flags(column: _Values) -> npt.NDArray[np.bool_]:
    """Return the column as booleans, which CSV files store as text."""
    if column.dtype == bool:
        return column.to_numpy(copy=True)
    text = column.astype(str)
    odd = sorted(set(text.unique()) - {"True", "False"})
    reasons = [f"got {column.name}={value}; expected True or False" for value in odd]
    InputError.raise_if(reasons, PROBLEM)
    return (text == "True").to_numpy()


def texts(column: _Values) -> pd.Categorical:
    """Return a column of strings as a categorical, with the categories in order of appearance."""
    try:
        codes, distinct = pd.factorize(column)
    except TypeError as error:  # lists are not hashable
        reason = f"{column.name} cannot be read ({error}); expected numbers or texts"
        raise InputError([reason], PROBLEM) from error
    strings = np.asarray(distinct, dtype=object)
    reasons = [f"{column.name} has rows with missing values (null)"] * (-1 in codes)
    odd = [text for text in strings if not isinstance(text, str)][:1]
    reasons += [f"got {column.name} {text!r}; expected text" for text in odd]
    InputError.raise_if(reasons, PROBLEM)
    return pd.Categorical.from_codes(codes, categories=pd.Index(strings, dtype=object))


def _positions(column: _Values) -> npt.NDArray[np.int64] | pd.Categorical:
    if pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans:
        return column.to_numpy(dtype=np.int64, copy=True)
    try:
        return texts(column)
    except InputError as error:
        reason = (
            f"got positions {column.drop_duplicates().head(7).tolist()}; expected only numbers, "
            "or only texts ('all' or roles)"
        )
        raise InputError([reason], PROBLEM) from error


_POSITION = Column("position", _positions, required=True)
_PART = Column("part", texts)
_VALUE = Column("value", _numbers, required=True, finite=True)
_PROMPTS = (Column("prompt", _integers), Column("unpatched", _numbers, finite=True))
_ERRORS = tuple(Column(name, _numbers) for name in SPREAD)
SWEEP_COLUMNS = (
    Column("layer", _integers, required=True),
    Column("kind", texts, required=True),
    Column("index", _integers, required=True),
    Column("name", texts, required=True),
    *(_POSITION, _PART, _VALUE, *_PROMPTS, *_ERRORS),
    Column("exact", _flags),
    Column("before_switch", _flags),
    *(Column(name, _numbers) for name in PARTS),
)
"""The columns of a `Sweep`, in the order of its frame."""
PATH_COLUMNS = (
    Column("sender", texts, required=True),
    Column("receiver", texts, required=True),
    *(_PART, _POSITION, _VALUE, *_ERRORS, *_PROMPTS),
    Column("estimate", _numbers),
)
"""The columns of `Paths`, in the order of its frame."""
