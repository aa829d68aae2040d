"""The rows of a sweep as arrays: codes of heads and positions, and numbers; and frames of them.

A row is of a head in a table, at a set of positions in a list, and of a prompt if rows are of each.
Of ten million rows there are as many codes of four bytes, and as many numbers; but only the names
of some hundred thousand heads, and no text of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from attn_only_lens.errors import InputError
from attn_only_lens.patching.over_prompts import SPREAD
from attn_only_lens.patching.site_groups import SiteGroup

PROBLEM = "these are not the results of a sweep"
_GIVEN = ["layer", "kind", "index", "name", "position", "value"]
_BY_PROMPT = ("prompt", "unpatched")
_ADDED = ("part", "score")

_Codes: TypeAlias = npt.NDArray[np.int32]
_Column: TypeAlias = "pd.Series[Any]"


def _flags(column: _Column) -> npt.NDArray[np.bool_]:
    """True and False, also as a CSV file has them."""
    if column.dtype == bool:
        return column.to_numpy()
    text = column.astype(str)
    others = sorted(set(text) - {"True", "False"})
    InputError.raise_if(
        [f"got exact={row_set}; expected True or False" for row_set in others], PROBLEM
    )
    return (text == "True").to_numpy()


def _floats(column: _Column) -> npt.NDArray[np.float64]:
    """A copy, which no change of the frame reaches."""
    try:
        if pd.api.types.is_complex_dtype(column.dtype):
            raise TypeError(f"they are {column.dtype}")
        return column.to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError) as error:
        reason = f"{column.name} cannot be read ({error}); expected numbers"
        raise InputError([reason], PROBLEM) from error


def _integers(column: _Column) -> npt.NDArray[np.int64]:
    """A copy; floats that are whole will do, as pandas makes them when it joins frames."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        return column.to_numpy(dtype=np.int64, copy=True)
    floats = _floats(column)
    bad = floats[~(np.abs(floats) < 2**53) | (floats != np.round(floats))]
    reasons = [f"got {column.name} {bad[0]}; expected whole numbers"] if len(bad) else []
    InputError.raise_if(reasons, PROBLEM)
    return floats.astype(np.int64)


_OPTIONAL: dict[str, Callable[[_Column], Any]] = {
    "prompt": _integers,
    "unpatched": _floats,
    **dict.fromkeys(SPREAD, _floats),
    "exact": _flags,
}
"""Columns that some sweeps have, and how each is read."""


@dataclass(frozen=True, eq=False)
class SweepRows:
    """Rows of a sweep.

    Attributes:
        layer: of each head.
        kind: of each head.
        index: of each head.
        names: of each head, each once.
        labels: of sets of positions: numbers, or texts.
        blocks: of rows, one after another: the first head, the heads counted from it, and the sets
            of positions; all rows of a block in order.
        repeats: rows that follow each other for each of these, one for each prompt.
        numbers: a number for each row: `value`, and some of the optional columns.
    """

    layer: npt.NDArray[np.int64]
    kind: tuple[str, ...]
    index: npt.NDArray[np.int64]
    names: tuple[str, ...]
    labels: tuple[int | str, ...]
    blocks: tuple[tuple[int, npt.NDArray[Any], npt.NDArray[Any]], ...]
    repeats: int
    numbers: dict[str, npt.NDArray[Any]]

    @classmethod
    def of_groups(
        cls, groups: Sequence[SiteGroup], numbers: Sequence[dict[str, npt.NDArray[Any]]]
    ) -> "SweepRows":
        """Return the rows of groups of sites, with the numbers of each."""
        sites = list(dict.fromkeys(group.sites for group in groups))
        ends = np.cumsum([0, *(len(site.names) for site in sites)]).tolist()
        first = dict(zip(sites, ends, strict=False))
        labels = list(
            dict.fromkeys(position.label for group in groups for position in group.positions)
        )
        place = {label: i for i, label in enumerate(labels)}
        blocks = []
        for group in groups:
            places = [place[position.label] for position in group.positions]
            position = group.where.numpy()
            if places != list(range(len(places))):
                position = np.array(places, dtype=np.int32)[position]
            blocks.append((first[group.sites], group.head.numpy(), position))
        columns = {
            name: np.concatenate([number[name] for number in numbers]) for name in numbers[0]
        }
        n_rows = sum(len(group) for group in groups)
        rows = cls(
            layer=np.repeat([site.layer for site in sites], np.diff(ends)),
            kind=tuple(chain.from_iterable([site.kind] * len(site.names) for site in sites)),
            index=np.concatenate([site.index.cpu().numpy() for site in sites]),
            names=tuple(chain.from_iterable(site.names for site in sites)),
            labels=tuple(labels),
            blocks=tuple(blocks),
            repeats=len(columns["value"]) // n_rows,
            numbers=columns,
        )
        # Tables are in order of appearance, as those of a file are when it is read.
        every = all(
            len(group_) == len(group_.sites.names) * len(group_.positions) for group_ in groups
        )
        return rows if every else rows[np.arange(len(rows))]

    @classmethod
    def of_frame(cls, frame: pd.DataFrame, part: str) -> "SweepRows":
        """Return the rows of a frame, which may have the columns that are added."""
        if not isinstance(frame, pd.DataFrame):
            reason = f"got a {type(frame).__name__}; expected a pandas DataFrame"
            raise InputError([reason], PROBLEM)
        others = set(frame.columns) - {*_GIVEN, *_ADDED, *_OPTIONAL}
        halves = [tuple(c in frame for c in pair) for pair in (_BY_PROMPT, SPREAD)]
        odd = [others, set(_GIVEN) - set(frame.columns), not frame.columns.is_unique]
        if any(odd) or any(len(set(half)) > 1 for half in halves):
            reason = (
                f"got columns {list(frame.columns)}; expected {_GIVEN}, and any of "
                f"{list(_OPTIONAL)}, of which {_BY_PROMPT} and {SPREAD} come together, each once"
            )
            raise InputError([reason], PROBLEM)
        head, names = _coded(frame["name"])
        codes, labels = _coded_positions(frame["position"])
        example = np.full(len(names), -1)  # a row of each head
        example[head] = np.arange(len(frame), dtype=np.int32)
        kind, kinds = _coded(frame["kind"])
        layer, index = (_integers(frame[name]) for name in ("layer", "index"))
        numbers = {name: read(frame[name]) for name, read in _OPTIONAL.items() if name in frame}
        rows = cls(
            layer=layer[example],
            kind=tuple(kinds[code] for code in kind[example].tolist()),
            index=index[example],
            names=names,
            labels=labels,
            blocks=((0, head, codes),),
            repeats=1,
            numbers={"value": _floats(frame["value"]), **numbers},
        )
        reasons = []
        if "part" in frame and not (frame["part"] == part).all():
            parts = sorted({str(name) for name in frame["part"]})
            reasons.append(f"got parts {parts}; expected {part!r} alone")
        unlike = [column != column[example][head] for column in (layer, kind, index)]
        reasons += [
            f"rows of {names[head[differing.argmax()]]} differ in their {column}"
            for column, differing in zip(("layer", "kind", "index"), unlike, strict=True)
            if differing.any()
        ]
        InputError.raise_if(reasons + rows._reasons_against_repeats(), PROBLEM)
        return rows if (example >= 0).all() else rows[np.arange(len(rows))]

    def __len__(self) -> int:
        return len(self.numbers["value"])

    @cached_property
    def head(self) -> _Codes:
        """The place of each row's head in the table."""
        return self._joined([head + np.int32(first) for first, head, _ in self.blocks])

    @cached_property
    def where(self) -> _Codes:
        """The place of each row's set of positions in the list."""
        return self._joined([block for _, _, block in self.blocks])

    def _joined(self, codes: list[npt.NDArray[Any]]) -> _Codes:
        joined = np.concatenate([code.astype(np.int32, copy=False) for code in codes])
        return np.repeat(joined, self.repeats) if self.repeats > 1 else joined

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> "SweepRows":
        """Return some of the rows, with the heads and positions that they have."""
        head, heads = pd.factorize(self.head[rows])
        positions, places = pd.factorize(self.where[rows])
        return SweepRows(
            layer=self.layer[heads],
            kind=tuple(self.kind[i] for i in heads.tolist()),
            index=self.index[heads],
            names=tuple(self.names[i] for i in heads.tolist()),
            labels=tuple(self.labels[i] for i in places.tolist()),
            blocks=((0, head, positions),),
            repeats=1,
            numbers={name: item[rows] for name, item in self.numbers.items()},
        )

    def frame(self, part: str, score: npt.NDArray[np.float64]) -> pd.DataFrame:
        """Return the frame of the rows, with their part and score."""
        kind, kinds = pd.factorize(np.array(self.kind, dtype=object))
        labels: Any = np.array(self.labels, dtype=np.int64 if self.numbered else object)
        positions = labels[self.where] if self.numbered else _categories(self.where, labels)
        numbers = dict(self.numbers)
        return pd.DataFrame(
            {
                "layer": self.layer[self.head],
                "kind": _categories(kind.astype(np.int8)[self.head], kinds),
                "index": self.index[self.head],
                "name": _categories(self.head, list(self.names)),
                "position": positions,
                "part": _categories(np.zeros(len(self), dtype=np.int8), [part]),
                "value": numbers.pop("value"),
                "score": score,
                **{name: numbers[name] for name in _OPTIONAL if name in numbers},
            }
        )

    @property
    def numbered(self) -> bool:
        """Whether positions are numbers."""
        return not any(isinstance(label, str) for label in self.labels)

    @property
    def has_prompts(self) -> bool:
        """Whether rows are of single prompts, more than one of them."""
        prompt = self.numbers.get("prompt")
        return prompt is not None and bool((prompt != prompt[:1]).any())

    def reasons_against_values(self) -> list[str]:
        """Return a reason if values are not finite."""
        finite = np.isfinite(self.numbers["value"])
        if "unpatched" in self.numbers:
            finite &= np.isfinite(self.numbers["unpatched"])
        bad = int((~finite).sum())
        return [f"{bad} of {len(self)} values are not finite"] * (bad > 0)

    def _reasons_against_repeats(self) -> list[str]:
        (key,), n = site_keys(self)
        seen = np.zeros(n, dtype=bool)
        seen[key] = True
        if int(seen.sum()) == len(self):
            return []
        again = _last_rows(key, n)[key] != np.arange(len(self))
        name = self.names[self.head[again.argmax()]]
        return [f"{again.sum()} rows repeat a site, such as {name}"]

    def site(self, row: int) -> str:
        """Return the name of a row's head, its positions, and its prompt if it is of one."""
        prompt = f", prompt {self.numbers['prompt'][row]}" if "prompt" in self.numbers else ""
        return f"{self.names[self.head[row]]} at {self.labels[self.where[row]]}{prompt}"


def rows_in_order(one: SweepRows, second: SweepRows) -> npt.NDArray[np.int64] | None:
    """Return the row of `other` with each row's site of `one`, -1 where it has none.

    None if the rows are of the same sites in order.
    """
    if (one.names, one.labels) == (second.names, second.labels):
        columns = (
            [rows_.head, rows_.where, rows_.numbers.get("prompt")] for rows_ in (one, second)
        )
        if all(np.array_equal(*pair) for pair in zip(*columns, strict=True)):
            return None
    (first_keys, second_keys), n = site_keys(one, second)
    return _last_rows(second_keys, n)[first_keys]


def site_keys(*rows: SweepRows) -> tuple[list[npt.NDArray[Any]], int]:
    """Return a number for each row's site and prompt, from 0, and how many numbers there are."""
    names, n_heads = _common_codes([row.names for row in rows])
    labels, n_places = _common_codes([row.labels for row in rows])
    n = n_heads * n_places
    keys: list[npt.NDArray[Any]] = []
    for row_set, name, label in zip(rows, names, labels, strict=True):
        head = row_set.head if name is None else name[row_set.head]
        positions = row_set.where if label is None else label[row_set.where]
        keys.append(positions.astype(np.int32 if n < 2**31 else np.int64))
        keys[-1] *= n_heads
        keys[-1] += head
    ends = np.cumsum([len(row) for row in rows])
    if "prompt" in rows[0].numbers:
        prompt, prompts = pd.factorize(np.concatenate([row.numbers["prompt"] for row in rows]))
        keys = [k + n * of for k, of in zip(keys, np.split(prompt, ends[:-1]), strict=True)]
        n *= len(prompts)
    if n > 8 * ends[-1] + 1024:  # a table of all would be far longer than the rows
        key, categories = pd.factorize(np.concatenate(keys))
        keys, n = np.split(key, ends[:-1]), len(categories)
    return keys, n


def _common_codes(
    tables: Sequence[Sequence[Any]],
) -> tuple[list[npt.NDArray[np.int64] | None], int]:
    """Return a code for each entry of tables, the same for the same entry, and how many.

    None for the places of entries themselves, where tables are the same.
    """
    if all(of == tables[0] for of in tables):
        return [None] * len(tables), len(tables[0])
    entries = dict.fromkeys(entry for of in tables for entry in of)
    place = {entry: i for i, entry in enumerate(entries)}
    return [np.array([place[entry] for entry in of], dtype=np.int64) for of in tables], len(place)


def _last_rows(key: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """Return the last row with each key; -1 where there is none."""
    last = np.full(n, -1)
    last[key] = np.arange(len(key))
    return last


def _categories(codes: npt.NDArray[Any], categories: Any) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, categories=categories)


def _coded(column: _Column) -> tuple[_Codes, tuple[str, ...]]:
    """Return a copy of the codes of texts, and the texts: categories, or in order of appearance."""
    codes: Any
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, categories = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, categories = _factors(column, use_na_sentinel=True)
    if len(codes) and codes.min() < 0:
        reason = f"{int((codes < 0).sum())} rows have no {column.name} (null)"
        raise InputError([reason], PROBLEM)
    odd = next((category for category in categories if not isinstance(category, str)), None)
    if odd is not None:
        raise InputError([f"got {column.name} {odd!r}; expected text"], PROBLEM)
    return codes.astype(np.int32), tuple(map(str, categories))


def _coded_positions(column: _Column) -> tuple[_Codes, tuple[int | str, ...]]:
    """Return the codes of positions in order of appearance, and the positions."""
    codes, categories = _factors(column, use_na_sentinel=False)
    labels = list(categories)
    numbers = pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans
    if not numbers and not all(isinstance(label, str) for label in labels):
        reason = f"got positions {labels[:7]}; expected numbers alone, or texts: 'all', or roles"
        raise InputError([reason], PROBLEM)
    return codes.astype(np.int32), tuple(map(int, labels) if numbers else labels)


def _factors(column: _Column, use_na_sentinel: bool) -> tuple[npt.NDArray[np.int64], Any]:
    try:
        return pd.factorize(column, use_na_sentinel=use_na_sentinel)
    except TypeError as error:  # of lists
        reason = f"{column.name} cannot be read ({error}); expected numbers or texts"
        raise InputError([reason], PROBLEM) from error
