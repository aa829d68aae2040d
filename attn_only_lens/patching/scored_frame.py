"""The base of results of patching: scored rows with the settings and the prompts of their run."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from attn_only_lens.arguments import as_plain, is_count, is_number
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import token_texts_of_prompts
from attn_only_lens.errors import InputError
from attn_only_lens.patching.site_groups import SiteGroup, roles
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import read_table, write_table

BASELINE = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0, "bias": 1.0}
"""The score of the run that is patched into, by direction; an ablation patches the clean run."""

_SHOWN = 10  # rows
_MOST_SHOWN = 2  # tokens
_LONGEST = 16  # characters of a token
_Results = TypeVar("_Results", bound="ScoredFrame")


@dataclass(frozen=True)
class PromptTokens:
    """The texts of the tokens of every prompt.

    Attributes:
        clean: for each clean prompt, the text at each position; None at padding.
        corrupted: the same for the corrupted prompts; empty if there are none.
        roles: the position of each role in each prompt.

    Example:
        >>> from attn_only_lens.patching.scored_frame import PromptTokens
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
        """Return the tokens of prompts, and the positions of the roles of some sites."""
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
        """Return the clean token at a position, and the corrupted one if it differs.

        If prompts differ there, return the two most frequent clean tokens, and "…" for the others.
        """
        chosen = range(len(self.clean)) if prompts is None else prompts
        pairs = Counter(pair for i in chosen if (pair := self._pair(position, i)) is not None)
        if not pairs:
            return ""
        if len(pairs) == 1:
            ((clean, corrupted),) = pairs
            return _cut(shown(clean)) + f" / {_cut(shown(corrupted))}" * (clean != corrupted)
        texts = Counter[str]()
        for (clean, _), count in pairs.items():
            texts[clean] += count
        most = ", ".join(_cut(shown(text)) for text, _ in texts.most_common(_MOST_SHOWN))
        return most + ", …" * (len(texts) > _MOST_SHOWN)

    def _pair(self, position: int | str, prompt: int) -> tuple[str, str] | None:
        """Return the clean and the corrupted token at a position of a prompt, if it has one."""
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
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


class ScoredFrame:
    """A frame with a column `score`, and settings: the fields of a dataclass."""

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
        """The score of the run that is patched into, and of a patch without effect."""
        return BASELINE[self.direction]

    @property
    def effect(self) -> "pd.Series[float]":
        """The change of the score by each patch, from `baseline`."""
        return pd.Series(self.effects, name="score")

    @property
    def effects(self) -> Float[np.ndarray, "row"]:
        """`effect`, without an index."""
        return self.frame["score"].to_numpy() - self.baseline

    def _scores(self, frame: pd.DataFrame) -> Float[np.ndarray, "row"]:
        """Return the score of each row."""
        value, span = frame["value"].to_numpy(), self.clean_value - self.corrupted_value
        if "unpatched" in frame:
            return self.baseline + (value - frame["unpatched"].to_numpy()) / span
        return (value - self.corrupted_value) / span

    def __len__(self) -> int:
        return len(self.frame)

    def top(self, k: int = 20) -> pd.DataFrame:
        """Return the k rows of largest |effect|, the largest first; ties keep their order.

        With `per_prompt`, the row of each prompt is ranked by itself.
        """
        if not is_count(k, 1):
            raise InputError([f"got k={k!r}; expected 1 or more"], "no rows can be picked")
        return self.frame.iloc[largest(np.abs(self.effects), k)]

    def save(self, path: str | Path) -> None:
        """Write to a .parquet file, or to a .csv file with a .csv.json next to it."""
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
        return cls(frame, **settings)  # type: ignore[call-arg]

    @classmethod
    def _settings(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name != "frame"]  # type: ignore[arg-type]

    @abstractmethod
    def _headline(self) -> str:
        """Describe these results in one line."""

    def _shown(self) -> pd.DataFrame:
        """Return the first rows, with the tokens at their positions."""
        top = self.top(_SHOWN)
        if self.tokens is None:
            return top
        prompts = [[prompt] for prompt in top["prompt"]] if "prompt" in top else [None] * len(top)
        texts = [
            self.tokens.text(position, prompt)
            for position, prompt in zip(top["position"], prompts, strict=True)
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
    """Return the rows of the k largest values, the largest first; ties keep their order.

    Example:
        >>> largest(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist()
        [1, 3, 2]
    """
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k] if k else np.inf
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]
