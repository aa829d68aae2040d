"""What results of patching have in common: scored rows, kept with the settings of their run."""

from abc import abstractmethod
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from attn_only_lens.arguments import as_plain, is_count, is_number
from attn_only_lens.errors import InputError
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import read_table, write_table

BASELINE = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0, "bias": 1.0}
"""The score of the run that is patched into, by direction; ablations are of the clean run."""

_SHOWN = 10


_Results = TypeVar("_Results", bound="ScoredFrame")


class ScoredFrame:
    """Scored rows, as a frame with a column `score`, and settings: the fields of a dataclass."""

    _document: ClassVar[Document]
    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    tokens: PromptTokens | None

    def _setting_reasons(self) -> list[str]:
        """Return the reasons why settings are invalid; empty if they are valid."""
        reasons = [
            f"got {name}={getattr(self, name)!r}; expected a text"
            for name in ("part", "metric", "model")
            if not isinstance(getattr(self, name), str)
        ]
        if self.direction not in list(BASELINE):  # a list: it may not be hashable
            reasons.append(f"got direction={self.direction!r}; expected one of {list(BASELINE)}")
        ends = as_plain(self.clean_value), as_plain(self.corrupted_value)
        if not all(map(is_number, ends)) or ends[0] == ends[1]:
            reasons.append(
                f"the metric is {ends[0]!r} on the clean run and {ends[1]!r} on the corrupted one; "
                "expected two finite numbers that differ"
            )
        if not is_count(self.n_prompts, 1):
            reasons.append(f"got n_prompts={self.n_prompts!r}; expected 1 or more")
        if not isinstance(self.tokens, PromptTokens | None):
            got = type(self.tokens).__name__
            reasons.append(f"got tokens of type {got}; expected PromptTokens, or None")
        return reasons

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the frame."""
        return self.frame.copy()

    @property
    def baseline(self) -> float:
        """The score of the run that is patched into, which a patch without effect leaves."""
        return BASELINE[self.direction]

    @property
    def effect(self) -> "pd.Series[float]":
        """The change of the score by each patch, from `baseline`."""
        return pd.Series(self.effects, name="score")

    @property
    def effects(self) -> Float[np.ndarray, "row"]:
        """`effect`, without an index."""
        return self.frame["score"].to_numpy() - self.baseline

    def __len__(self) -> int:
        return len(self.frame)

    def top(self, k: int = 20) -> pd.DataFrame:
        """Return the k rows of largest |effect|, the largest first; of equals the first.

        Where rows are of single prompts, each is ranked by itself.
        """
        if not is_count(k, 1):
            raise InputError([f"got k={k!r}; expected 1 or more"], "no rows can be picked")
        return self._chosen(largest(np.abs(self.effects), k))

    def _chosen(self, rows: Int[np.ndarray, "some"]) -> pd.DataFrame:
        """Return some rows of the frame."""
        return self.frame.iloc[rows]

    def save(self, path: str | Path) -> None:
        """Write to a .parquet file, or to a .csv file with a .csv.json beside it."""
        run = {name: getattr(self, name) for name in self._settings()}
        run["tokens"] = None if self.tokens is None else vars(self.tokens)
        write_table(path, self.frame, self._document, **run)

    @classmethod
    def load(cls: "type[_Results]", path: str | Path) -> "_Results":
        """Read a file that `save` wrote."""
        frame, said = read_table(path, cls._document)
        run = {name: said[name] for name in cls._settings()}
        if run["tokens"] is not None:
            run["tokens"] = PromptTokens(**run["tokens"])
        return cls(frame, **run)  # type: ignore[call-arg]

    @classmethod
    def _settings(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name not in ("frame", "rows")]  # type: ignore[arg-type]

    @abstractmethod
    def _headline(self) -> str:
        """Return what these results are, in a line."""

    def _shown(self) -> pd.DataFrame:
        """Return the first rows, with the tokens at their positions."""
        top = self.top(_SHOWN)
        if self.tokens is None:
            return top
        prompts = [[prompt] for prompt in top["prompt"]] if "prompt" in top else [None] * len(top)
        texts = [
            self.tokens.text(position, of)
            for position, of in zip(top["position"], prompts, strict=True)
        ]
        top.insert(list(top.columns).index("position") + 1, "token", texts)
        return top

    def __repr__(self) -> str:
        shown = self._shown().to_string(index=False) if len(self) else "no rows"
        return f"{self._headline()}\n{shown}"

    def _repr_html_(self) -> str:
        shown = self._shown().to_html(index=False) if len(self) else "no rows"
        return f"<p>{escape(self._headline())}</p>\n{shown}"


def largest(values: Float[np.ndarray, "row"], k: int) -> Int[np.ndarray, "some"]:
    """Return the rows of the k largest values, the largest first; of equals the first.

    Example:
        >>> largest(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist()
        [1, 3, 2]
    """
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k] if k else np.inf
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]
